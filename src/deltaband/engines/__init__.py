"""The engines: a stream of gradients in, a `Covariance` value out."""

from .base import Covariance, Engine
from .directions import FrequentDirections, ImportantDirections, RobustFrequentDirections, importance, magnitude
from .exact import Exact
from .nystrom import Nystrom
from .plan import Option, Plan, plan_fit
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
    "plan_fit",
]
