"""What an engine ends in: the parameter covariance of the delta method, as a value that answers about gradients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..network.gradient_batch import GradientBatch
from ..storage import encoding

if TYPE_CHECKING:
    from .spectral import SpectralCovariance, Spectrum

By = Literal["variance", "leverage"]  # of a covariance between rows: whether its diagonal is q or h
Products = Callable[[GradientBatch], np.ndarray]  # of b rows with b' others that it knows, (b, b')


@dataclass(frozen=True, eq=False)
class Covariance(ABC):
    """The parameter covariance of the delta method, Σ⁻¹ = A⁻¹JᵀJA⁻¹ with A = JᵀJ + λI: a value, nothing changes it.

    `SpectralCovariance` needs one method of an author; otherwise write the abstract ones here. They are given the
    gradients `g` of b rows, and return float64.
    """

    damping: float | None  #: λ; None where it is not chosen yet.
    accumulated: dict[str, Any] | None = field(default=None, kw_only=True, repr=False)  # see Engine.resume

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        encoding.storable(cls)

    @abstractmethod
    def variance(self, g: GradientBatch) -> np.ndarray:  # (b,)
        """Return q = gᵀ Σ⁻¹ g of each row.

        Args:
            g: The gradients of b rows.

        Returns:
            q, (b,).
        """

    @abstractmethod
    def leverage(self, g: GradientBatch) -> np.ndarray:  # (b,)
        """Return h = gᵀ A⁻¹ g of each row.

        Args:
            g: The gradients of b rows.

        Returns:
            h, (b,).
        """

    @property
    @abstractmethod
    def effective_parameters(self) -> float:
        """p* = tr(2H − H²), H = J A⁻¹ Jᵀ."""

    @abstractmethod
    def eigendecomposed(self) -> SpectralCovariance:
        """Return the same J as a covariance that answers for every λ."""

    def variances(self, g: GradientBatch, dampings: np.ndarray) -> np.ndarray:  # (b, len(dampings))
        """Return q for several λ.

        Args:
            g: The gradients of b rows.
            dampings: The values of λ; one column each.

        Returns:
            A column of q per λ: (b, len(dampings)).
        """
        if (dampings == self.damping).all():
            return np.repeat(self.variance(g)[:, None], len(dampings), axis=1)
        return self.eigendecomposed().variances(g, dampings)

    def leverage_and_variances(self, g: GradientBatch, dampings: np.ndarray) -> np.ndarray:  # (b, 1 + len(dampings))
        """Return h, and behind it q for several λ.

        Args:
            g, dampings: As in `variances`.

        Returns:
            h in the first column, and a column of q per λ: (b, 1 + len(dampings)).
        """
        return np.column_stack([self.leverage(g), self.variances(g, dampings)])

    def across(self, other: GradientBatch, by: By = "variance") -> Products:
        """Return the function of rows g that returns gᵀ Σ⁻¹ g' for each row g' of another batch.

        Args:
            other: The rows g'.
            by: "variance" for Σ⁻¹, with q where both rows are the same, or "leverage" for A⁻¹ in its place, with h.

        Returns:
            A function of b rows that returns (b, b').
        """
        spectral = self.eigendecomposed()
        return (spectral if self.damping is None else spectral.at(self.damping)).across(other, by)

    def spectrum(self) -> Spectrum:
        """Return the singular values of J and the matching eigenvalues of Σ⁻¹."""
        return self.eigendecomposed().spectrum()

    @property
    def error_bound(self) -> float:
        """‖JᵀJ − its approximation‖₂ is at most this, rounding aside; 0 where it is exact, NaN if not certified."""
        return math.nan

    @property
    def is_exact(self) -> bool:
        """Whether nothing stands in for JᵀJ."""
        return self.error_bound == 0.0

    @property
    def missed_parameters(self) -> float:
        """An upper bound of the part of p* that an approximation has left out; NaN where none is known."""
        return 0.0 if self.is_exact else math.nan

    @property
    def own_leverages(self) -> np.ndarray | None:
        """h of each row of J, smallest first, where it is known without the gradients; None where it is not."""
        return None

    @property
    def resolves_damping(self) -> bool:
        """Whether an approximation of this size can answer for this λ at all."""
        return True

    def describe(self) -> str:
        """Return one line for `summary()`."""
        return type(self).__name__
