"""Prediction intervals for neural networks that are already trained."""

__version__ = "0.1.0.dev0"

from .artefact import ArtefactError
from .band import NotFittedError
from .classification import ClassificationIntervals
from .covariance import (
    Exact,
    FrequentDirections,
    ImportantDirections,
    Nystrom,
    RandomProjection,
    RobustFrequentDirections,
)
from .intervals import PredictionIntervals
from .result import ClassIntervals, Intervals
from .team import TeamError
from .warning import DeltabandWarning

__all__ = [
    "ArtefactError",
    "ClassIntervals",
    "ClassificationIntervals",
    "DeltabandWarning",
    "Exact",
    "FrequentDirections",
    "ImportantDirections",
    "Intervals",
    "NotFittedError",
    "Nystrom",
    "PredictionIntervals",
    "RandomProjection",
    "RobustFrequentDirections",
    "TeamError",
]
