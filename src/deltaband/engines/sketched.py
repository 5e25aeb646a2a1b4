"""What a sketch of directions ends in: the directions it holds, and what it knows of the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..network.gradient_batch import GradientBatch
from .power_law_tail import PowerLawTail
from .spectral import SpectralCovariance, effective


@dataclass(frozen=True, eq=False)
class SketchedCovariance(SpectralCovariance):
    """Algorithm 3: eⱼ = d²ⱼ + λ' over the held directions, and λ' for all others; with what the sketch has lost.

    Where there are `added`, each held direction gets that instead of λ', and `tail` has eigenvalues along the others.
    """

    directions: Tensor  # (r, p), orthonormal
    squared: np.ndarray  # (r,) d²
    shift: float  # λ'
    name: str
    energy: float  # ‖J‖²_F
    lost: float  # 0 ≤ JᵀJ − BᵀB ≤ lost · I
    full_rank: int  # min(n, p)
    added: np.ndarray | None = None  # (r,)
    tail: PowerLawTail | None = None

    @property
    def floor(self) -> float:
        return self.shift if self.added is None else 0.0

    @property
    def error_bound(self) -> float:
        if self.added is None:
            return max(self.shift, self.lost - self.shift)
        largest = 0.0 if self.tail is None else float(self.tail.eigenvalues.max())
        return max(self.lost, float(self.added.max(initial=0.0)), largest)  # what stands in for JᵀJ − BᵀB is ≥ 0 too

    @property
    def added_tail(self) -> PowerLawTail | None:
        return self.tail

    @property
    def missed_parameters(self) -> float:
        """The j-th eigenvalue of JᵀJ lies between d²ⱼ and d²ⱼ + lost, and they sum up to the energy ‖J‖²_F.

        p* sums f(eigenvalue) with f(e) = 2h − h², which is concave with slope at most 2/λ: two upper bounds. With an
        estimated tail p* may also be too large, so there this bounds its error on either side.
        """
        damping, lost = self.chosen_damping, self.lost
        n_unheld = self.full_rank - len(self.squared)
        at_least = float(effective(self.squared, damping).sum())
        at_most = effective(self.squared + lost, damping).sum() + n_unheld * effective(lost, damping)
        if damping > 0:
            tail = max(self.energy - self.squared.sum(), 0.0)
            at_most = min(at_most, at_least + 2 * tail / damping)
        found = self.effective_parameters
        return max(float(at_most) - found, 0.0 if self.added is None else found - at_least, 0.0)

    def squared_projections(self, g: GradientBatch) -> np.ndarray:
        return self._projections(g).cpu().double().numpy() ** 2

    def split(self, g: GradientBatch) -> tuple[np.ndarray, np.ndarray]:
        z = self._projections(g)
        # As a norm, not as the difference of two: in float32 that would lose all that a small λ shows.
        remainder = g.rows().to(self.directions) - z @ self.directions
        return z.cpu().double().numpy() ** 2, GradientBatch.of(remainder).squared_norms

    def describe(self) -> str:
        return self.name

    def _projections(self, g: GradientBatch) -> Tensor:  # (b, r)
        return g.rows().to(self.directions) @ self.directions.T
