"""Eigenvalues of JᵀJ along directions that a sketch does not hold: an estimate from their number and their sum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..storage.encoding import storable
from .spectral import effective


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
        """Return q of a new row over its ρ."""
        h, mean, free = self._leverages(damping)
        spread = float(np.square(h - mean).sum()) + (self.n_rows - len(h)) * mean**2  # N·Var h
        return spread / (float(self.eigenvalues.sum()) * free**2) if free > 0 else 0.0

    def leverage(self, e: np.ndarray, damping: float) -> float:
        """Return h of a new row over its ρ."""
        _, mean, free = self._leverages(damping)
        return self.n_rows * mean / (float(self.eigenvalues.sum()) * free) if free > 0 else 0.0

    def parameters(self, e: np.ndarray, damping: float) -> float:
        """Return their part of p*."""
        return float(effective(self.eigenvalues, damping).sum())

    def _leverages(self, damping: float) -> tuple[np.ndarray, float, float]:
        """Return h without its zeros, h̄, and 1 − h̄, without a difference of nearly equal numbers."""
        N, e = self.n_rows, self.eigenvalues
        return (
            e / (e + damping),
            float((e / (e + damping)).sum()) / N,
            (float((damping / (e + damping)).sum()) + N - len(e)) / N,
        )
