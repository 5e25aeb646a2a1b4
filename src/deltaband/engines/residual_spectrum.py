"""What lies outside the directions that an approximation of JᵀJ holds: an estimate of its part in q, h and p*.

With orthonormal directions V, B = VᵀJᵀJV, J⊥ = J(I − VVᵀ), N = I − JV(B+λ)⁻¹VᵀJᵀ and Y = N^½J⊥, block inversion gives

    I − H = N^½(I − W)N^½,  W = Y(YᵀY+λ)⁻¹Yᵀ,    p* = (n − tr N²) + 2 tr N²W − tr NWNW

exactly. The estimate takes N for its mean ν = tr N/n where it meets the tail (of the rows' freedom the directions use
some, the tail gets the rest), and the energy of J⊥ as spread evenly over eigenvalues between 0 and twice their mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..storage.encoding import storable
from .spectral import effective


def spread(x: Any) -> tuple[Any, Any]:
    """Return the means of 1/(1+t) and of t/(1+t)² over t from 0 to x.

    A tail of energy R, spread evenly over eigenvalues from 0 to xλ, has Σ h = R/λ times the first and Σ h² = R/λ times
    the second; a row with the energy ρ in it gets h = ρ/λ times the first and q = ρ/λ times the second. Eigenvalues of
    such a tail decay exponentially.
    """
    x = np.maximum(x, 1e-12)  # as good as 0
    first = np.log1p(x) / x
    return first, first - 1 / (1 + x)


@storable
@dataclass(frozen=True)
class ResidualSpectrum:
    """What is known of E = J⊥J⊥ᵀ."""

    energy: float = 0.0  # R = tr E
    squares: float = 0.0  # Σ E²ᵢᵢ
    pairs: float = 0.0  # Σ E²ᵢⱼ over i ≠ j, estimated
    n_rows: int = 1
    rank: int = 0  # at most

    def variance(self, e: np.ndarray, damping: Any) -> Any:
        """Return q of a new row over its ρ; e are the eigenvalues of B."""
        nu = self._freedom(e, damping)
        return nu / damping * spread(2 * nu * self._mean(self.pairs) / damping)[1]

    def leverage(self, e: np.ndarray, damping: Any) -> Any:
        """Return h of a new row over its ρ."""
        return spread(2 * self._freedom(e, damping) * self._mean(self.pairs) / damping)[0] / damping

    def parameters(self, e: np.ndarray, damping: float) -> float:
        """Return what is to be added to the p* of B."""
        nu = self._freedom(e, damping)
        nu2 = 1 - effective(e, damping).sum() / self.n_rows  # tr N²/n
        first, second = spread(2 * nu * self._mean(self.squares + self.pairs) / damping)
        return min(
            float(nu * self.energy / damping * (2 * nu2 * first - nu**2 * second)), self.parameters_at_most(damping)
        )

    def parameters_at_most(self, damping: float) -> float:
        """Return by how much p* can exceed that of B, whatever the tail; it is not smaller.

        JVVᵀJᵀ has the eigenvalues of B, JJᵀ = JVVᵀJᵀ + E, and f(e) = 2h − h² is increasing and concave with f(0) = 0:
        tr f(JVVᵀJᵀ) ≤ p* (Weyl) ≤ tr f(JVVᵀJᵀ) + tr f(E) (Rotfel'd), and tr f(E) ≤ rank·f(R/rank) (Jensen).
        """
        return self.rank * float(effective(self.energy / max(self.rank, 1), damping))

    def _mean(self, squares: float) -> float:
        """Return tr E²/tr E, the mean eigenvalue over the energy; at most tr E, whatever the estimate says.

        A new row forms a pair with every row and is not one of them: for it the pairs alone count.
        """
        return min(squares / self.energy, self.energy) if self.energy else 0.0

    def _freedom(self, e: np.ndarray, damping: Any) -> Any:
        """Return ν."""
        return 1 - (e / (e + np.expand_dims(damping, -1))).sum(axis=-1) / self.n_rows
