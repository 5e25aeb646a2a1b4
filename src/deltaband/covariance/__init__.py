"""The engines: a stream of gradients in, a `Covariance` value out."""

from .choose import Option, Plan, plan
from .directions import FrequentDirections, ImportantDirections, RobustFrequentDirections, importance, magnitude
from .engine import Covariance, Engine
from .exact import Exact
from .nystrom import Nystrom
from .problem import Problem
from .projection import RandomProjection
from .spectral import SpectralCovariance, Spectrum

__all__ = [
    "Covariance",
    "Engine",
    "Exact",
    "FrequentDirections",
    "ImportantDirections",
    "Nystrom",
    "Option",
    "Plan",
    "Problem",
    "RandomProjection",
    "RobustFrequentDirections",
    "SpectralCovariance",
    "Spectrum",
    "importance",
    "magnitude",
    "plan",
]
