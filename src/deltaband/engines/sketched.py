"""What a sketch of directions ends in: the directions it holds, and what it knows of the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..network.gradient_batch import GradientBatch
from ..storage.encoding import storable
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

        p* sums f(e) = 2h − h², concave with slope at most 2/λ: two upper bounds. With an estimated tail p* may also be
        too large, so there this bounds its error on either side.
        """
        damping, lost = self.chosen_damping, self.lost
        n_unheld = self.full_rank - len(self.squared)
        at_least = float(effective(self.squared, damping).sum())
        at_most = effective(self.squared + lost, damping).sum() + n_unheld * effective(lost, damping)
        if damping > 0:
            at_most = min(at_most, at_least + 2 * max(self.energy - self.squared.sum(), 0.0) / damping)
        found = self.effective_parameters
        return max(float(at_most) - found, 0.0 if self.added is None else found - at_least, 0.0)

    def squared_projections(self, g: GradientBatch) -> np.ndarray:
        return (g.rows().to(self.directions) @ self.directions.T).cpu().double().numpy() ** 2

    def split(self, g: GradientBatch) -> tuple[np.ndarray, np.ndarray]:
        rows = g.rows().to(self.directions)
        z = rows @ self.directions.T
        # As a norm, not as the difference of two: in float32 that would lose all that a small λ shows.
        return z.cpu().double().numpy() ** 2, GradientBatch.of(rows - z @ self.directions).squared_norms

    def describe(self) -> str:
        return self.name


@storable
@dataclass(frozen=True)
class PowerLawTail:
    """Of n rows and r held directions, N = n − r; hᵢ = eᵢ/(eᵢ+λ), and 0 until there are N; ρ = g·g − Σ (vⱼ·g)²:

    h = ρ·N/Σe · h̄/(1 − h̄),    q = ρ·N/Σe · Var h/(1 − h̄)²,    p* = Σ 2h − h².

    That is a row left out of N rows with these eigenvalues, on average: with C = (K+λI)⁻¹ it has h = 1/(λCᵢᵢ) − 1 and
    q = (C²)ᵢᵢ/C²ᵢᵢ − 1; the mean of λCᵢᵢ is 1 − h̄, and that of λ²(C²)ᵢᵢ the mean of (1 − h)². So a direction that one
    training row has to itself adds nothing to q: no new row has a part in it.
    """

    eigenvalues: np.ndarray  # all above 0
    n_rows: int  # N, at least as many

    def variance(self, e: np.ndarray, damping: float) -> float:
        h, mean, free = self._leverages(damping)
        spread = float(np.square(h - mean).sum()) + (self.n_rows - len(h)) * mean**2  # N·Var h
        return spread / (float(self.eigenvalues.sum()) * free**2) if free > 0 else 0.0

    def leverage(self, e: np.ndarray, damping: float) -> float:
        _, mean, free = self._leverages(damping)
        return self.n_rows * mean / (float(self.eigenvalues.sum()) * free) if free > 0 else 0.0

    def parameters(self, e: np.ndarray, damping: float) -> float:
        return float(effective(self.eigenvalues, damping).sum())

    def _leverages(self, damping: float) -> tuple[np.ndarray, float, float]:
        """Return h without its zeros, h̄, and 1 − h̄, without a difference of nearly equal numbers."""
        N, e = self.n_rows, self.eigenvalues
        h = e / (e + damping)
        return h, float(h.sum()) / N, (float((damping / (e + damping)).sum()) + N - len(e)) / N


def power_law(energy: float, count: int, largest: float, after: int) -> np.ndarray:  # (count,)
    """Continue a spectrum after its `after`-th eigenvalue, which is `largest`:

    eᵢ = largest·(1 + i/after)^(−a),  i = 1, …, count,  with the a ≥ 0 that makes their sum the `energy`;

    all of them equal where the energy exceeds count·largest.
    """
    if count <= 0 or energy <= 0 or largest <= 0:
        return np.zeros(max(count, 0))
    log = np.log1p(np.arange(1, count + 1) / after)

    def decayed(a: float) -> np.ndarray:
        return largest * np.exp(-a * log)

    low, high = 0.0, 0.0 if energy >= count * largest else 1.0
    while high > 0 and decayed(high).sum() > energy:
        low, high = high, 2 * high
    for _ in range(50 if high else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if decayed(middle).sum() > energy else (low, middle)
    e = decayed(low)
    return e * (energy / e.sum())
