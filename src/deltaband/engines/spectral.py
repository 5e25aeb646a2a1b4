"""JᵀJ in its eigenbasis: one projection of g answers q and h for every λ."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Self

import numpy as np

from ..network.gradient_batch import GradientBatch


class Spectrum(NamedTuple):
    """Singular values of J, largest first, and the eigenvalue of Σ⁻¹ that belongs to each."""

    singular_values: np.ndarray  # (r,)
    covariance_eigenvalues: np.ndarray  # (r,) d²/(d²+λ)²


class SpectralCovariance(ABC):
    """With orthonormal directions vⱼ and eigenvalues eⱼ of JᵀJ, and one eigenvalue `floor` for all other directions:

    q = Σ (vⱼ·g)² eⱼ/(eⱼ+λ)²,  p* = Σ 2hⱼ − h²ⱼ with hⱼ = eⱼ/(eⱼ+λ),
    h = Σ (vⱼ·g)²/(eⱼ+λ) + (g·g − Σ (vⱼ·g)²)/(floor+λ).
    """

    missed_parameters = 0.0
    error_bound = 0.0
    in_reach = True

    def __init__(
        self,
        eigenvalues: np.ndarray,  # (r,) largest first
        damping: float | None,
        name: str,
        floor: float = 0.0,
    ) -> None:
        self.eigenvalues = eigenvalues
        self.damping = damping
        self._name = name
        self._floor = floor

    @abstractmethod
    def _squared_projections(self, g: GradientBatch) -> np.ndarray:  # (b, r)
        """(vⱼ·g)²."""

    def _squared_remainder(self, g: GradientBatch) -> np.ndarray:  # (b,)
        """g·g − Σ (vⱼ·g)²."""
        return np.maximum(g.squared_norms - self._squared_projections(g).sum(axis=1), 0.0)

    def at(self, damping: float) -> Self:
        """The same J with another λ."""
        other = copy.copy(self)
        other.damping = damping
        return other

    @property
    def effective_parameters(self) -> float:
        return float(effective(self.eigenvalues, self._chosen).sum())

    def variance(self, g: GradientBatch) -> np.ndarray:
        return self.variances(g, np.array([self._chosen]))[:, 0]

    def variances(self, g: GradientBatch, dampings: np.ndarray) -> np.ndarray:
        """q for several λ at once."""  # (b, len(dampings))
        return self._squared_projections(g) @ sigma(self.eigenvalues[:, None], dampings)

    def leverage(self, g: GradientBatch) -> np.ndarray:
        inside = self._squared_projections(g) @ (1 / (self.eigenvalues + self._chosen))
        floor = self._floor + self._chosen
        return inside + self._squared_remainder(g) / floor if floor else inside

    def spectrum(self) -> Spectrum:
        return Spectrum(np.sqrt(self.eigenvalues), sigma(self.eigenvalues, self._chosen))

    def diagonalised(self) -> SpectralCovariance:
        return self

    def describe(self) -> str:
        return self._name

    @property
    def _chosen(self) -> float:
        if self.damping is None:
            raise ValueError("λ is not chosen yet")
        return self.damping


def effective(e: Any, damping: float) -> Any:
    """2h − h² with h = e/(e+λ): what an eigenvalue e of JᵀJ adds to p*."""
    h = e / (e + damping) if damping > 0 else np.sign(e)
    return 2 * h - h**2


def sigma(e: np.ndarray, damping: Any) -> np.ndarray:
    """e/(e+λ)², the eigenvalue of Σ⁻¹; 0 where e is."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(e > 0, e / (e + damping) / (e + damping), 0.0)
