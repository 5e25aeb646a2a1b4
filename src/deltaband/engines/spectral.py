"""JᵀJ in its eigenbasis: one projection of g answers q and h for every λ."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from ..network.gradient_batch import GradientBatch
from .base import Covariance


class Spectrum(NamedTuple):
    """Singular values of J, largest first, and the eigenvalue of Σ⁻¹ that belongs to each."""

    singular_values: np.ndarray  # (r,)
    covariance_eigenvalues: np.ndarray  # (r,) d²/(d²+λ)²


class Tail(Protocol):
    """What directions that are not held add: q and h of a new row over its ρ = g·g − Σ (vⱼ·g)², and to p*.

    It is estimated beside the eigenvalues e of those that are held.
    """

    def variance(self, e: np.ndarray, damping: Any) -> Any: ...
    def leverage(self, e: np.ndarray, damping: Any) -> Any: ...
    def parameters(self, e: np.ndarray, damping: float) -> float: ...


@dataclass(frozen=True, eq=False)
class SpectralCovariance(Covariance):
    """With orthonormal directions vⱼ and eigenvalues eⱼ of JᵀJ, and one eigenvalue `floor` for all other directions:

    q = Σ (vⱼ·g)² eⱼ/(eⱼ+λ)²,  p* = Σ 2hⱼ − h²ⱼ with hⱼ = eⱼ/(eⱼ+λ),
    h = Σ (vⱼ·g)²/(eⱼ+λ) + (g·g − Σ (vⱼ·g)²)/(floor+λ).

    Where there is an `added_tail` for the other directions, its part is added instead of the floor's.
    """

    eigenvalues: np.ndarray  # (r,) largest first

    @abstractmethod
    def squared_projections(self, g: GradientBatch) -> np.ndarray:  # (b, r)
        """Return (vⱼ·g)²."""

    def split(self, g: GradientBatch) -> tuple[np.ndarray, np.ndarray]:  # (b, r), (b,)
        """Return (vⱼ·g)² and g·g − Σ (vⱼ·g)²."""
        z2 = self.squared_projections(g)
        return z2, np.maximum(g.squared_norms - z2.sum(axis=1), 0.0)

    @property
    def floor(self) -> float:
        """The eigenvalue along all other directions."""
        return 0.0

    @property
    def added_tail(self) -> Tail | None:
        """The estimate for the other directions."""
        return None

    def at(self, damping: float) -> Self:
        """Return the same J with another λ."""
        return replace(self, damping=damping)

    @property
    def chosen_damping(self) -> float:
        """λ, or an error where it is not chosen yet."""
        if self.damping is None:
            raise ValueError("λ is not chosen yet")
        return self.damping

    @property
    def effective_parameters(self) -> float:
        held, tail = float(effective(self.eigenvalues, self.chosen_damping).sum()), self.added_tail
        return held if tail is None else held + tail.parameters(self.eigenvalues, self.chosen_damping)

    def variance(self, g: GradientBatch) -> np.ndarray:
        return self.variances(g, np.array([self.chosen_damping]))[:, 0]

    def variances(self, g: GradientBatch, dampings: np.ndarray) -> np.ndarray:
        weights, tail = sigma(self.eigenvalues[:, None], dampings), self.added_tail
        if tail is None:
            return self.squared_projections(g) @ weights
        z2, rho = self.split(g)
        return z2 @ weights + np.outer(rho, [tail.variance(self.eigenvalues, damping) for damping in dampings])

    def leverage(self, g: GradientBatch) -> np.ndarray:
        (z2, rho), damping = self.split(g), self.chosen_damping
        h = z2 @ (1 / (self.eigenvalues + damping))
        if self.added_tail is not None:
            return h + rho * self.added_tail.leverage(self.eigenvalues, damping)
        return h + rho / (self.floor + damping) if self.floor + damping else h

    def spectrum(self) -> Spectrum:
        return Spectrum(np.sqrt(self.eigenvalues), sigma(self.eigenvalues, self.chosen_damping))

    def eigendecomposed(self) -> SpectralCovariance:
        return self


def effective(e: Any, damping: float) -> Any:
    """Return 2h − h² with h = e/(e+λ): what an eigenvalue e of JᵀJ adds to p*."""
    h = e / (e + damping) if damping > 0 else np.sign(e)
    return 2 * h - h**2


def sigma(e: np.ndarray, damping: Any) -> np.ndarray:
    """Return e/(e+λ)², the eigenvalue of Σ⁻¹; 0 where e is."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(e > 0, e / (e + damping) / (e + damping), 0.0)
