"""Prediction intervals for neural networks that are already trained."""

__version__ = "0.1.0.dev0"

from .classification import ClassificationIntervals
from .engines import (
    Exact,
    FrequentDirections,
    ImportantDirections,
    Nystrom,
    RandomProjection,
    RobustFrequentDirections,
)
from .errors import ArtefactError, DeltabandWarning, DistributedFitError, NotFittedError
from .intervals import PredictionIntervals
from .results import ClassIntervals, Intervals

__all__ = [
    "ArtefactError",
    "ClassIntervals",
    "ClassificationIntervals",
    "DeltabandWarning",
    "DistributedFitError",
    "Exact",
    "FrequentDirections",
    "ImportantDirections",
    "Intervals",
    "NotFittedError",
    "Nystrom",
    "PredictionIntervals",
    "RandomProjection",
    "RobustFrequentDirections",
]
