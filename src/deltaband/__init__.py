"""Prediction intervals for neural networks that are already trained."""

from .classification import ClassificationIntervals
from .data.items import OpaqueBatch
from .engines import (
    Exact,
    FrequentDirections,
    ImportantDirections,
    Nystrom,
    Plan,
    RandomProjection,
    RobustFrequentDirections,
    Spectrum,
)
from .error_report import ErrorReport
from .errors import ArtefactError, DeltabandWarning, DistributedFitError, ExportError, NotFittedError
from .intervals import PredictionIntervals
from .online import Alarm, Monitor, Online
from .results import ClassIntervals, Intervals
from .version import __version__ as __version__

__all__ = [
    "Alarm",
    "ArtefactError",
    "ClassIntervals",
    "ClassificationIntervals",
    "DeltabandWarning",
    "DistributedFitError",
    "ErrorReport",
    "Exact",
    "ExportError",
    "FrequentDirections",
    "ImportantDirections",
    "Intervals",
    "Monitor",
    "NotFittedError",
    "Nystrom",
    "Online",
    "OpaqueBatch",
    "Plan",
    "PredictionIntervals",
    "RandomProjection",
    "RobustFrequentDirections",
    "Spectrum",
]
