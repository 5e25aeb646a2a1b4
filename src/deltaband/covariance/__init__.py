"""The engines: a stream of gradients in, a `Covariance` value out."""

from .choose import choose_engine
from .directions import FrequentDirections, ImportantDirections, RobustFrequentDirections, importance, magnitude
from .engine import Covariance, Engine
from .exact import Exact
from .nystrom import Nystrom
from .projection import RandomProjection
from .spectral import SpectralCovariance, Spectrum

__all__ = [
    "Covariance",
    "Engine",
    "Exact",
    "FrequentDirections",
    "ImportantDirections",
    "Nystrom",
    "RandomProjection",
    "RobustFrequentDirections",
    "SpectralCovariance",
    "Spectrum",
    "choose_engine",
    "importance",
    "magnitude",
]
