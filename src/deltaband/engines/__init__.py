"""The engines: a stream of gradients in, a `Covariance` value out."""

from .base import Accumulator, Cost, Engine, Known, register
from .covariance import Covariance
from .directions import FrequentDirections, ImportantDirections, RobustFrequentDirections, importance, magnitude
from .exact import Exact, ExactCovariance, Problem
from .fields import concatenated, private, reduced, shared
from .nystrom import Nystrom
from .plan import Option, Plan, largest, parse_engine, plan_fit, registered_engines
from .projection import RandomProjection
from .spectral import EigenbasisCovariance, SpectralCovariance, Spectrum

__all__ = ["Exact", "FrequentDirections", "ImportantDirections", "Nystrom", "RandomProjection"]
__all__ += ["RobustFrequentDirections", "importance", "magnitude"]
__all__ += ["Option", "Plan", "Problem", "SpectralCovariance", "Spectrum", "largest", "plan_fit"]
__all__ += ["EigenbasisCovariance", "ExactCovariance", "parse_engine"]
__all__ += ["Accumulator", "Cost", "Covariance", "Engine", "Known", "registered_engines"]  # for engines of others
__all__ += ["concatenated", "private", "reduced", "register", "shared"]
