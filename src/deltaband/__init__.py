"""Prediction intervals for neural networks that are already trained."""

from .classification import ClassificationIntervals
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
from .errors import ArtefactError, DeltabandWarning, DistributedFitError, NotFittedError
from .intervals import PredictionIntervals
from .results import ClassIntervals, ErrorReport, Intervals
from .version import __version__ as __version__

__all__ = [
    "ArtefactError",
    "ClassIntervals",
    "ClassificationIntervals",
    "DeltabandWarning",
    "DistributedFitError",
    "ErrorReport",
    "Exact",
    "FrequentDirections",
    "ImportantDirections",
    "Intervals",
    "NotFittedError",
    "Nystrom",
    "Plan",
    "PredictionIntervals",
    "RandomProjection",
    "RobustFrequentDirections",
    "Spectrum",
]
