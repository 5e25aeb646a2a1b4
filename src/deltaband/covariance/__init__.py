"""The engines: a stream of gradients in, a `Covariance` value out."""

from .choose import choose_engine
from .directions import FrequentDirections, ImportantDirections, RobustFrequentDirections, importance, magnitude
from .engine import Covariance, Engine
from .exact import Exact
from .spectral import SpectralCovariance, Spectrum

__all__ = [
    "Covariance",
    "Engine",
    "Exact",
    "FrequentDirections",
    "ImportantDirections",
    "RobustFrequentDirections",
    "SpectralCovariance",
    "Spectrum",
    "choose_engine",
    "importance",
    "magnitude",
]
