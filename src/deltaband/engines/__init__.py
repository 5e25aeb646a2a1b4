"""The engines: a stream of gradients in, a `Covariance` value out."""

from .base import (
    Accumulator,
    Covariance,
    Engine,
    Known,
    concatenated,
    private,
    reduced,
    register,
    registered_engines,
    shared,
)
from .cost import Cost, Problem
from .directions import FrequentDirections, ImportantDirections, RobustFrequentDirections, importance, magnitude
from .exact import Exact
from .nystrom import Nystrom
from .plan import Option, Plan, plan_fit
from .projection import RandomProjection
from .spectral import SpectralCovariance, Spectrum

__all__ = [
    "Accumulator",
    "Cost",
    "Covariance",
    "Engine",
    "Exact",
    "FrequentDirections",
    "ImportantDirections",
    "Known",
    "Nystrom",
    "Option",
    "Plan",
    "Problem",
    "RandomProjection",
    "RobustFrequentDirections",
    "SpectralCovariance",
    "Spectrum",
    "concatenated",
    "importance",
    "magnitude",
    "plan_fit",
    "private",
    "reduced",
    "register",
    "registered_engines",
    "shared",
]
