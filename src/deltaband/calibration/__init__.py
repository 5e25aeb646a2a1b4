"""From a fit and held-out rows to conformal intervals."""

from .calibrate import EXCESS_SEEN_SHARE as EXCESS_SEEN_SHARE
from .calibrate import Calibration as Calibration
from .calibrate import calibrate as calibrate
from .conformal import AllOutputs as AllOutputs
from .conformal import ConformalScale as ConformalScale
from .conformal import EachOutput as EachOutput
from .labels import LabelCalibration as LabelCalibration
from .pooled import Joint as Joint
from .pooled import PooledOutputs as PooledOutputs
from .pooled import check_mode as check_mode
from .quality import drift_p_value as drift_p_value
from .quantiles import AllRows as AllRows
from .quantiles import Given as Given
from .quantiles import conformal_quantiles as conformal_quantiles
from .quantiles import conformal_rank as conformal_rank
from .quantiles import rows_needed as rows_needed
from .rules import rule_for as rule_for
from .scales import Scales as Scales
