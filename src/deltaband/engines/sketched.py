"""What a sketch of directions ends in: the directions it holds, and what it knows of the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..network.gradient_batch import GradientBatch
from .power_law_tail import Unheld
from .spectral import SpectralCovariance, effective, sigma


@dataclass(frozen=True)
class Totals:
    """What a sketch knows beside the directions that it holds."""

    rank: int  # k
    energy: float  # ‖J‖²_F
    shift: float  # λ' of the algorithm, whether it is made use of or not
    lost: float  # 0 ≤ JᵀJ − BᵀB ≤ lost · I
    delta2: float  # the largest δ²
    above: float  # energy let go along directions of d > δ, which the score did not choose
    n_above: int  # how many such there were, in the shrink with most


class SketchedCovariance(SpectralCovariance):
    """Algorithm 3: eⱼ = d²ⱼ + λ' over the held directions, and λ' for all others; with what the sketch has lost.

    `spread` puts in the place of λ' what each held direction gets back, and eigenvalues along the others.
    """

    def __init__(
        self,
        directions: Tensor,  # (r, p), orthonormal
        squared: np.ndarray,  # (r,) d²
        shift: float,  # λ'
        damping: float | None,
        name: str,
        totals: Totals,
        full_rank: int,  # min(n, p)
        spread: tuple[np.ndarray, Unheld | None] | None = None,
    ) -> None:
        if spread is None:
            super().__init__(squared + shift, damping, name, floor=shift)
        else:
            super().__init__(squared + spread[0], damping, name)
        self._spread = spread is not None
        self._tail = None if spread is None else spread[1]
        self.directions = directions
        self.squared = squared
        self.totals = totals
        self._unheld = full_rank - len(squared)
        self.error_bound = max(shift, totals.lost - shift)
        if spread is not None:  # what stands in for JᵀJ − BᵀB is not below 0 either
            largest = 0.0 if self._tail is None else float(self._tail.eigenvalues.max())
            self.error_bound = max(totals.lost, float(spread[0].max(initial=0.0)), largest)

    @property
    def effective_parameters(self) -> float:
        found = super().effective_parameters
        return found if self._tail is None else found + self._tail.parameters(self._chosen)

    @property
    def missed_parameters(self) -> float:  # type: ignore[override]
        """The j-th eigenvalue of JᵀJ lies between d²ⱼ and d²ⱼ + lost, and they sum up to the energy ‖J‖²_F.

        p* sums f(eigenvalue) with f(e) = 2h − h², which is concave with slope at most 2/λ: two upper bounds. With an
        estimated tail p* may also be too large, so there this bounds its error on either side.
        """
        damping = self._chosen
        at_most = effective(self.squared + self.totals.lost, damping).sum() + self._unheld * effective(
            self.totals.lost, damping
        )
        if damping > 0:
            tail = max(self.totals.energy - self.squared.sum(), 0.0)
            at_most = min(at_most, effective(self.squared, damping).sum() + 2 * tail / damping)
        above = float(at_most) - self.effective_parameters
        below = 0.0
        if self._spread:
            below = self.effective_parameters - float(effective(self.squared, damping).sum())
        return max(above, below, 0.0)

    def variances(self, g: GradientBatch, dampings: np.ndarray) -> np.ndarray:  # (b, len(dampings))
        if self._tail is None:
            return super().variances(g, dampings)
        z2, rho = self._split(g)
        tail = [self._tail.variance(damping) for damping in dampings]
        return z2 @ sigma(self.eigenvalues[:, None], dampings) + np.outer(rho, tail)

    def leverage(self, g: GradientBatch) -> np.ndarray:
        if self._tail is None:
            return super().leverage(g)
        z2, rho = self._split(g)
        return z2 @ (1 / (self.eigenvalues + self._chosen)) + rho * self._tail.leverage(self._chosen)

    def _squared_projections(self, g: GradientBatch) -> np.ndarray:  # (b, r)
        return self._projections(g).cpu().double().numpy() ** 2

    def _squared_remainder(self, g: GradientBatch) -> np.ndarray:  # (b,)
        return self._split(g)[1]

    def _split(self, g: GradientBatch) -> tuple[np.ndarray, np.ndarray]:  # (b, r), (b,)
        """(vⱼ·g)² and g·g − Σ (vⱼ·g)²."""
        z = self._projections(g)
        # As a norm, not as the difference of two: that would lose in float32 all that a small λ brings to light.
        remainder = g.rows().to(self.directions) - z @ self.directions
        return z.cpu().double().numpy() ** 2, GradientBatch.of(remainder).squared_norms

    def _projections(self, g: GradientBatch) -> Tensor:  # (b, r)
        return g.rows().to(self.directions) @ self.directions.T
