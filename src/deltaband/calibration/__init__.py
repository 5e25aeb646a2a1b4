"""From a fit and held-out rows to conformal intervals."""

from .calibrate import EXCESS_SEEN_SHARE as EXCESS_SEEN_SHARE
from .calibrate import Calibration as Calibration
from .calibrate import calibrate as calibrate
from .calibrate import drift_p_value as drift_p_value
from .conformal import AllOutputs as AllOutputs
from .conformal import ConformalScale as ConformalScale
from .conformal import Scales as Scales
from .conformal import conformal_quantiles as conformal_quantiles
from .conformal import rows_needed as rows_needed
