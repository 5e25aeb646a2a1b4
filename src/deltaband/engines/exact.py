"""The exact delta method: one Cholesky factor, of p × p or of n × n numbers, whichever is smaller."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import SingularMatrixError, warn
from ..network.gradient_batch import CHUNK_BYTES, GradientBatch
from . import gram as grams
from .base import Accumulator, Covariance, Engine, Total, concatenated, not_regular, reduced, register, shared
from .cost import Cost, Known, Problem, free_memory, square_bytes
from .spectral import SpectralCovariance

LARGEST_ROUNDING = 1e-2  # the part of 1 + q, the squared width of an interval, that may be rounding


@register
@dataclass(frozen=True)
class Exact(Engine):
    """The exact covariance, in float64 whatever the precision of the gradients.

    Primal form, n ≥ p: JᵀJ is summed up in one p × p matrix, 8p² bytes however many rows there are.
    Dual form, n < p: K = JJᵀ is factorised, 8n² bytes; of J is kept what its inner products need, layer by layer.

    Where n is not known beforehand, J is kept until there are p rows.
    """

    is_exact: ClassVar[bool] = True

    def cost(self, problem: Problem) -> Cost:
        n, p = problem.n_rows, problem.n_parameters
        size, dual = p if n is None else min(n, p), n is not None and n < p
        n_kept = size if dual or n is None else 0  # of an unknown number up to p rows, and then the matrix
        kept = n_kept * (problem.input_bytes if problem.recomputed else problem.factor_bytes)
        products = size**2 * problem.product_flops / 2 if dual else (n or p) * p**2
        flops = products + (2.0 if problem.damped else 10.0) * size**3
        return Cost(square_bytes(size, problem.damped) + kept, flops, wants_rows=n is not None and n >= p)

    def start(self, known: Known = Known()) -> ExactRows:
        return ExactRows(self, expected_rows=known.n_rows or 0)

    def resume(self, covariance: Covariance, n_rows: int, n_parameters: int) -> ExactRows:
        return ExactRows(self, n_rows=n_rows, **accumulated_fields(covariance))


@dataclass
class ExactRows(Accumulator):
    """JᵀJ once there are p rows, or are known to come; J until then."""

    kept: list[GradientBatch] = concatenated()
    gram: np.ndarray | None = reduced("sum", upper_triangle=True)  # JᵀJ
    n_rows: int = reduced("sum", 0)
    expected_rows: int = shared(0, check=False)
    scratch: Tensor | None = field(default=None, repr=False)

    def update(self, g: GradientBatch) -> None:
        self.n_rows += len(g)
        self.kept.append(g)
        if max(self.n_rows, self.expected_rows) >= g.n_parameters:
            self._fold()

    def merge(self, other: ExactRows) -> None:
        super().merge(other)
        if self.kept and (self.gram is not None or self.n_rows >= self.kept[0].n_parameters):
            self._fold()

    def all_reduce(self, total: Total, n_rows: int, n_parameters: int) -> bool:
        if n_rows < n_parameters:
            return False
        self._fold()
        self.reduce_sums(total)
        return True

    def finalise(self, damping: float | None) -> Covariance:
        n_rows, matrix, kept, J = self.n_rows, self.gram, self.kept, None
        if n_rows == 0:
            raise ValueError("no rows were given")
        self.clear()
        if matrix is None:
            J = GradientBatch.concatenate(kept)
            if damping == 0.0:
                raise not_regular(f"{n_rows} rows cannot determine {J.n_parameters} parameters")
            matrix = _kernel(J)
        if damping is None:
            return EigenbasisCovariance.of(matrix, None, J)
        try:
            return ExactCovariance(damping, matrix, *grams.factorise(matrix, damping), J)
        except SingularMatrixError as error:
            what = f"JᵀJ + λI is singular to working precision with damping λ = {damping:.3g} ({error})"
            raise ValueError(f"{what}: give a larger damping or weight_decay") from error

    def _fold(self) -> None:
        for batch in self.kept:
            if self.gram is None:
                self.gram = grams.empty(batch.n_parameters)
            for block in batch.row_blocks():
                # in memory that is used again and again: allocating it anew each time adds up
                if self.scratch is None or self.scratch.shape[0] < len(block):
                    self.scratch = torch.empty(block.shape, dtype=torch.float64, device="cpu")
                grams.add_gram(self.gram, self.scratch[: len(block)].copy_(block).numpy())
        self.kept = []


@dataclass(frozen=True, eq=False)
class ExactCovariance(Covariance):
    """A Cholesky factor for one λ, of A = JᵀJ + λI, where u = A⁻¹g, or with J of A = K + λI, where k = Jg and c = A⁻¹k:

    q = g·u − λ u·u,  h = g·u,  p* = p − ‖λA⁻¹‖²_F,    or    q = c·c,  h = (g·g − k·c)/λ,  p* = n − ‖λA⁻¹‖²_F.
    """

    damping: float
    matrix: np.ndarray  # (m, m), the factor, and above it JᵀJ or K
    diagonal: np.ndarray  # (m,) of these
    effective_size: float
    rounding: float  # relative, of bᵀA⁻¹b
    J: GradientBatch | None = None
    error_bound = 0.0

    @property
    def effective_parameters(self) -> float:
        return self.effective_size

    def variance(self, g: GradientBatch) -> np.ndarray:
        z = grams.half_solve(self.matrix, _coordinates(g, self.J))
        solved = _squared_norms(grams.half_solve(self.matrix, z, transposed=True))
        if self.J is not None:
            return solved
        h = _squared_norms(z)
        q = np.maximum(h - self.damping * solved, 0.0)
        if self.damping > 0 and (self.rounding * h > LARGEST_ROUNDING * (1 + q)).any():
            what = f"damping λ = {self.damping:.3g} is so small against JᵀJ that rounding shows in the variance of some"
            warn(f"{what} rows: give a larger damping or weight_decay")
        return q

    def leverage(self, g: GradientBatch) -> np.ndarray:
        h = _squared_norms(grams.half_solve(self.matrix, _coordinates(g, self.J)))
        return h if self.J is None else np.maximum(g.squared_norms - h, 0.0) / self.damping

    def gram(self) -> np.ndarray:
        M = self.matrix.copy(order="F")
        np.fill_diagonal(M, self.diagonal)
        return M

    def eigendecomposed(self) -> SpectralCovariance:
        m, free = len(self.matrix), free_memory()
        needed = square_bytes(m, damped=False)
        if needed > free:  # a factor shares the memory of its matrix, eigenvectors do not
            what = f"eigenvectors of a {m:,} × {m:,} matrix take {needed / 1e9:.3g} GB and {free / 1e9:.3g} GB are free"
            raise MemoryError(f"{what}: calibrate with tune=False, which needs none, or fit with a smaller engine")
        return EigenbasisCovariance.of(self.gram(), self.damping, self.J)

    def describe(self) -> str:
        return f"exact, {'primal' if self.J is None else 'dual'} form ({len(self.matrix):,} × {len(self.matrix):,})"


@dataclass(frozen=True, eq=False)
class EigenbasisCovariance(SpectralCovariance):
    """JᵀJ = W diag(e) Wᵀ, vⱼ·g = wⱼ·g; or, with J, K = JJᵀ = U diag(e) Uᵀ, vⱼ·g = wⱼ·(Jg) with wⱼ = uⱼ/√eⱼ."""

    W: np.ndarray  # (p, r), with J (n, r)
    J: GradientBatch | None = None
    error_bound = 0.0

    @classmethod
    def of(cls, M: np.ndarray, damping: float | None, J: GradientBatch | None = None) -> EigenbasisCovariance:
        """Decompose JᵀJ, or K where there is J, given in an upper triangle, in place."""
        e, V = grams.eigh(M)
        r = int((e > len(e) * np.finfo(np.float64).eps * e[0]).sum())  # the rest is rounding
        return cls(damping, e[:r], V[:, :r] if J is None else V[:, :r] / np.sqrt(e[:r]), J)

    def gram(self) -> np.ndarray:
        """Return JᵀJ to the last digits, in the upper triangle."""
        M = grams.empty(len(self.W))
        grams.add_gram(M, np.ascontiguousarray(self.W * np.sqrt(self.eigenvalues)), outer=True)
        return M

    def squared_projections(self, g: GradientBatch) -> np.ndarray:
        return (_coordinates(g, self.J).T @ self.W) ** 2

    def describe(self) -> str:
        return f"exact, in the eigenbasis of {'JᵀJ' if self.J is None else 'JJᵀ'} ({len(self.W):,} × {len(self.W):,})"


def accumulated_fields(covariance: Covariance) -> dict[str, Any]:
    """Return the fields of `ExactRows` that ended in this covariance."""
    assert isinstance(covariance, ExactCovariance | EigenbasisCovariance)
    return {"gram": covariance.gram()} if covariance.J is None else {"kept": [covariance.J]}


def _kernel(J: GradientBatch) -> np.ndarray:
    """Return K = JJᵀ, in the upper triangle."""
    K = grams.empty(len(J))
    if J.has_rows:
        for columns in J.columns(width=max(1, CHUNK_BYTES // (8 * len(J)))):
            grams.add_gram(K, columns, outer=True)
        return K
    starts, rows = [0], 0  # the first of the blocks that are in memory at once
    for i, block in enumerate(J.blocks):
        if i > starts[-1] and rows + len(block) > block.rows_in_memory:
            starts.append(i)
            rows = 0
        rows += len(block)
    ends = np.cumsum([0, *map(len, J.blocks)])
    for first, last in itertools.pairwise([*starts, len(J.blocks)]):
        mine = GradientBatch(J.blocks[first:last]).merged()
        for i in range(last):
            K[ends[i] : ends[i + 1], ends[first] : ends[last]] = GradientBatch((J.blocks[i],)).inner(mine)
    return K


def _coordinates(g: GradientBatch, J: GradientBatch | None) -> np.ndarray:  # (p, b) or (n, b)
    return (g.rows().cpu().double().numpy() if J is None else g.inner(J)).T


def _squared_norms(columns: np.ndarray) -> np.ndarray:  # (m, b) -> (b,)
    return np.einsum("ij,ij->j", columns, columns)
