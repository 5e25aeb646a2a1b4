"""The engines: a stream of gradients in, a `Covariance` value out."""

from .base import Accumulator, Covariance, Engine, concatenated, private, reduced, register, registered_engines, shared
from .cost import Cost, Known, Problem
from .directions import FrequentDirections, ImportantDirections, RobustFrequentDirections, importance, magnitude
from .exact import Exact
from .nystrom import Nystrom
from .plan import Option, Plan, plan_fit
from .projection import RandomProjection
from .spectral import SpectralCovariance, Spectrum

__all__ = ["Exact", "FrequentDirections", "ImportantDirections", "Nystrom", "RandomProjection"]
__all__ += ["RobustFrequentDirections", "importance", "magnitude"]
__all__ += ["Option", "Plan", "Problem", "SpectralCovariance", "Spectrum", "plan_fit"]
__all__ += ["Accumulator", "Cost", "Covariance", "Engine", "Known", "registered_engines"]  # for engines of others
__all__ += ["concatenated", "private", "reduced", "register", "shared"]
