"""The engines: a stream of gradients in, a `Covariance` value out."""

from .choose import choose_engine
from .directions import FrequentDirections, ImportantDirections, RobustFrequentDirections, importance, magnitude
from .engine import Covariance, Engine, Spectrum
from .exact import Exact

__all__ = [
    "Covariance",
    "Engine",
    "Exact",
    "FrequentDirections",
    "ImportantDirections",
    "RobustFrequentDirections",
    "Spectrum",
    "choose_engine",
    "importance",
    "magnitude",
]
