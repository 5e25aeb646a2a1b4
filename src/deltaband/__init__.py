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
from .errors import DeltabandWarning
from .fitting.band import NotFittedError
from .fitting.process_group import DistributedFitError
from .intervals import PredictionIntervals
from .results import ClassIntervals, Intervals
from .storage.container import ArtefactError

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
