"""The exact delta method: one Cholesky factor, of p × p or of n × n numbers, whichever is smaller."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..gradients import CHUNK_BYTES, GradientBatch
from .engine import Spectrum

if TYPE_CHECKING:  # SciPy is loaded when there is work for it, not by `import deltaband`
    from .cholesky import DampedGram


class Exact:
    """The exact covariance, in float64 whatever the precision of the gradients.

    Primal form, n ≥ p: JᵀJ is summed up in one p × p matrix, 8p² bytes however many rows there are.
    Dual form, n < p: the rows are kept, and K = JJᵀ is factorised, 8n² bytes.

    Where n is not known beforehand, rows are kept until there are p of them.
    """

    needs_damping = False

    def __init__(self) -> None:
        self._kept: list[GradientBatch] = []
        self._gram: np.ndarray | None = None  # JᵀJ, in the upper triangle
        self._n_rows = 0
        self._expected_rows = 0

    def start(self, *, n_rows: int | None = None, damping: float | None = None) -> Exact:
        fresh = Exact()
        fresh._expected_rows = n_rows or 0
        return fresh

    def update(self, gradients: GradientBatch) -> None:
        self._n_rows += len(gradients)
        self._kept.append(gradients)
        if max(self._n_rows, self._expected_rows) >= gradients.n_parameters:
            self._fold()

    def merge(self, other: Exact) -> None:
        self._n_rows += other._n_rows
        self._kept += other._kept
        if other._gram is not None:
            if self._gram is None:
                self._gram = other._gram.copy(order="F")
            else:
                self._gram += other._gram
        if self._kept and (self._gram is not None or self._n_rows >= self._kept[0].n_parameters):
            self._fold()

    def finalise(self, damping: float) -> PrimalCovariance | DualCovariance:
        n_rows, gram = self._n_rows, self._gram
        if n_rows == 0:
            raise ValueError("no rows were given")
        J = GradientBatch.concatenate(self._kept)
        self._n_rows, self._gram, self._kept = 0, None, []
        if gram is not None:
            return PrimalCovariance(_factorise(gram, damping), n_rows)
        if damping == 0.0:
            raise ValueError(
                f"damping 0 needs a regular JᵀJ, but {n_rows} rows cannot determine {J.n_parameters} parameters: "
                "give a positive damping or weight_decay"
            )
        return DualCovariance(_factorise(_kernel(J), damping), J)

    def __repr__(self) -> str:
        return "Exact()"

    def _fold(self) -> None:
        from . import cholesky

        for batch in self._kept:
            if self._gram is None:
                self._gram = cholesky.empty(batch.n_parameters)
            for block in batch.blocks:
                cholesky.add_gram(self._gram, block.double().cpu().numpy())
        self._kept = []


class PrimalCovariance:
    """With u = A⁻¹g: q = g·u − λ u·u, h = g·u, p* = p − λ²‖A⁻¹‖²_F."""

    missed_parameters = 0.0

    def __init__(self, A: DampedGram, n_rows: int) -> None:
        self._A = A
        self._n_rows = n_rows
        self.damping = A.damping
        self.effective_parameters = A.size - A.damping**2 * A.inverse_norm_squared

    def variance(self, g: GradientBatch) -> np.ndarray:
        z = self._A.half_solve(_columns(g))  # g·u = z·z
        u = self._A.solve_half_solved(z)
        return np.maximum(_squared_norms(z) - self.damping * _squared_norms(u), 0.0)

    def leverage(self, g: GradientBatch) -> np.ndarray:
        return _squared_norms(self._A.half_solve(_columns(g)))

    def spectrum(self) -> Spectrum:
        return _spectrum(self._A.eigenvalues()[: self._n_rows], self.damping)

    def describe(self) -> str:
        return f"exact, primal form ({self._A.size:,} × {self._A.size:,})"


class DualCovariance:
    """With k = Jg and c = (K + λI)⁻¹k: q = c·c, h = (g·g − k·c)/λ, p* = n − λ²‖(K + λI)⁻¹‖²_F."""

    missed_parameters = 0.0

    def __init__(self, A: DampedGram, J: GradientBatch) -> None:
        self._A = A
        self._J = J
        self.damping = A.damping
        self.effective_parameters = A.size - A.damping**2 * A.inverse_norm_squared

    def variance(self, g: GradientBatch) -> np.ndarray:
        return _squared_norms(self._A.solve_half_solved(self._half_solved(g)))

    def leverage(self, g: GradientBatch) -> np.ndarray:
        explained = _squared_norms(self._half_solved(g))  # k·c
        return np.maximum(g.squared_norms().cpu().numpy() - explained, 0.0) / self.damping

    def spectrum(self) -> Spectrum:
        return _spectrum(self._A.eigenvalues(), self.damping)

    def describe(self) -> str:
        return f"exact, dual form ({self._A.size:,} × {self._A.size:,})"

    def _half_solved(self, g: GradientBatch) -> np.ndarray:
        return self._A.half_solve(g.inner(self._J).T)


def _kernel(J: GradientBatch) -> np.ndarray:
    """K = JJᵀ, in the upper triangle."""
    from . import cholesky

    K = cholesky.empty(len(J))
    for columns in J.columns(width=max(1, CHUNK_BYTES // (8 * len(J)))):
        cholesky.add_outer_gram(K, columns)
    return K


def _factorise(M: np.ndarray, damping: float) -> DampedGram:
    from .cholesky import DampedGram, SingularMatrixError

    try:
        return DampedGram(M, damping)
    except SingularMatrixError as error:
        raise ValueError(
            f"JᵀJ + λI is singular to working precision with damping λ = {damping:.3g} ({error}): "
            "give a larger damping or weight_decay"
        ) from error


def _columns(g: GradientBatch) -> np.ndarray:  # (p, b), column by column in memory
    return g.rows().double().cpu().numpy().T


def _squared_norms(columns: np.ndarray) -> np.ndarray:  # (m, b) -> (b,)
    return np.einsum("ij,ij->j", columns, columns)


def _spectrum(squared: np.ndarray, damping: float) -> Spectrum:
    with np.errstate(divide="ignore", invalid="ignore"):
        eigenvalues = np.where(squared > 0, squared / (squared + damping) ** 2, 0.0)
    return Spectrum(np.sqrt(squared), eigenvalues)
