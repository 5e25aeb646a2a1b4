"""The exact delta method: one Cholesky factor, of p × p or of n × n numbers, whichever is smaller."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import SingularMatrixError, warn
from ..network.gradient_batch import CHUNK_BYTES, GradientBatch
from . import gram as grams
from .base import Accumulator, Covariance, Engine, Known, Total, concatenated, reduced, register, shared
from .cost import Cost, Problem, free_memory, square_bytes
from .gram import DampedGram
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
        size = p if n is None else min(n, p)
        n_kept = p if n is None else n if n < p else 0  # of an unknown number up to p rows, and then the matrix
        products = n**2 * problem.product_flops / 2 if n is not None and n < p else (p if n is None else n) * p**2
        return Cost(
            nbytes=square_bytes(size, problem.damped) + n_kept * problem.kept_bytes,
            flops=products + (2.0 if problem.damped else 10.0) * size**3,
            wants_rows=n is not None and n >= p,
        )

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
        n_rows, gram, kept = self.n_rows, self.gram, self.kept
        if n_rows == 0:
            raise ValueError("no rows were given")
        self.clear()
        if gram is not None:
            if damping is None:
                return EigenbasisCovariance.of(gram, None)
            return PrimalCovariance(damping, _factorised(gram, damping))
        J = GradientBatch.concatenate(kept)
        if damping == 0.0:
            raise ValueError(
                f"damping 0 needs a regular JᵀJ, but {n_rows} rows cannot determine {J.n_parameters} parameters: "
                "give a positive damping or weight_decay"
            )
        kernel = _kernel(J)
        if damping is None:
            return EigenbasisCovariance.of(kernel, None, J)
        return DualCovariance(damping, _factorised(kernel, damping), J)

    def _fold(self) -> None:
        for batch in self.kept:
            if self.gram is None:
                self.gram = grams.empty(batch.n_parameters)
            for block in batch.row_blocks():
                grams.add_gram(self.gram, self._in_float64(block))
        self.kept = []

    def _in_float64(self, block: Tensor) -> np.ndarray:
        """Return the block in memory that is used again and again: allocating it anew each time adds up."""
        if self.scratch is None or self.scratch.shape[0] < len(block):
            self.scratch = torch.empty(block.shape, dtype=torch.float64, device="cpu")
        return self.scratch[: len(block)].copy_(block).numpy()


@dataclass(frozen=True, eq=False)
class FactorisedCovariance(Covariance):
    """A Cholesky factor of JᵀJ + λI or, with J, of K + λI, for one λ."""

    damping: float
    A: DampedGram
    J: GradientBatch | None = None

    @property
    def error_bound(self) -> float:
        return 0.0

    @property
    def effective_parameters(self) -> float:
        return self.A.effective_size

    def eigendecomposed(self) -> SpectralCovariance:
        m, free = len(self.A.matrix), free_memory()
        needed = square_bytes(m, damped=False)
        if needed > free:  # a factor shares the memory of its matrix, eigenvectors do not
            raise MemoryError(
                f"eigenvectors of a {m:,} × {m:,} matrix take {needed / 1e9:.3g} GB and {free / 1e9:.3g} GB are free: "
                "calibrate with tune=False, which needs none, or fit with a smaller engine"
            )
        return EigenbasisCovariance.of(self.A.gram(), self.damping, self.J)


@dataclass(frozen=True, eq=False)
class PrimalCovariance(FactorisedCovariance):
    """With u = A⁻¹g: q = g·u − λ u·u, h = g·u, p* = p − ‖λA⁻¹‖²_F."""

    def variance(self, g: GradientBatch) -> np.ndarray:
        z = self.A.half_solve(_columns(g))
        h = _squared_norms(z)
        q = np.maximum(h - self.damping * _squared_norms(self.A.solve_half_solved(z)), 0.0)
        if self.damping > 0 and (self.A.rounding * h > LARGEST_ROUNDING * (1 + q)).any():
            warn(
                f"damping λ = {self.damping:.3g} is so small against JᵀJ that rounding shows in the variance of some "
                "rows: give a larger damping or weight_decay"
            )
        return q

    def leverage(self, g: GradientBatch) -> np.ndarray:
        return _squared_norms(self.A.half_solve(_columns(g)))

    def describe(self) -> str:
        return f"exact, primal form {_shape(self.A.matrix)}"


@dataclass(frozen=True, eq=False)
class DualCovariance(FactorisedCovariance):
    """With k = Jg and c = (K + λI)⁻¹k: q = c·c, h = (g·g − k·c)/λ, p* = n − ‖λ(K + λI)⁻¹‖²_F."""

    def variance(self, g: GradientBatch) -> np.ndarray:
        return _squared_norms(self.A.solve_half_solved(self._half_solved(g)))

    def leverage(self, g: GradientBatch) -> np.ndarray:
        explained = _squared_norms(self._half_solved(g))  # k·c
        return np.maximum(g.squared_norms - explained, 0.0) / self.damping

    def describe(self) -> str:
        return f"exact, dual form {_shape(self.A.matrix)}"

    def _half_solved(self, g: GradientBatch) -> np.ndarray:
        assert self.J is not None
        return self.A.half_solve(g.inner(self.J).T)


@dataclass(frozen=True, eq=False)
class EigenbasisCovariance(SpectralCovariance):
    """JᵀJ = W diag(e) Wᵀ, vⱼ·g = wⱼ·g; or, with J, K = JJᵀ = U diag(e) Uᵀ, vⱼ·g = wⱼ·(Jg) with wⱼ = uⱼ/√eⱼ."""

    W: np.ndarray  # (p, r), with J (n, r)
    J: GradientBatch | None = None

    @classmethod
    def of(cls, M: np.ndarray, damping: float | None, J: GradientBatch | None = None) -> EigenbasisCovariance:
        """Decompose JᵀJ, or K where there is J, given in an upper triangle, in place."""
        e, V = grams.eigh(M)
        r = int((e > len(e) * np.finfo(np.float64).eps * e[0]).sum())  # the rest is rounding
        return cls(damping, e[:r], V[:, :r] if J is None else V[:, :r] / np.sqrt(e[:r]), J)

    @property
    def error_bound(self) -> float:
        return 0.0

    def gram(self) -> np.ndarray:
        """Return JᵀJ to the last digits, in the upper triangle."""
        M = grams.empty(len(self.W))
        grams.add_outer_gram(M, np.ascontiguousarray(self.W * np.sqrt(self.eigenvalues)))
        return M

    def squared_projections(self, g: GradientBatch) -> np.ndarray:
        return ((_columns(g).T if self.J is None else g.inner(self.J)) @ self.W) ** 2

    def describe(self) -> str:
        return f"exact, in the eigenbasis of {'JᵀJ' if self.J is None else 'JJᵀ'} {_shape(self.W)}"


def accumulated_fields(covariance: Covariance) -> dict[str, Any]:
    """Return the fields of `ExactRows` that ended in this covariance."""
    assert isinstance(covariance, FactorisedCovariance | EigenbasisCovariance)
    if covariance.J is not None:
        return {"kept": [covariance.J]}
    return {"gram": covariance.gram() if isinstance(covariance, EigenbasisCovariance) else covariance.A.gram()}


def _shape(matrix: np.ndarray) -> str:
    return f"({len(matrix):,} × {len(matrix):,})"


def _kernel(J: GradientBatch) -> np.ndarray:
    """Return K = JJᵀ, in the upper triangle."""
    K = grams.empty(len(J))
    if J.has_rows:
        for columns in J.columns(width=max(1, CHUNK_BYTES // (8 * len(J)))):
            grams.add_outer_gram(K, columns)
        return K
    ends = np.cumsum([0, *map(len, J.blocks)])
    for first, last in _groups(J):
        mine = GradientBatch(J.blocks[first:last]).merged()
        for i in range(last):
            K[ends[i] : ends[i + 1], ends[first] : ends[last]] = GradientBatch((J.blocks[i],)).inner(mine)
    return K


def _groups(J: GradientBatch) -> Iterator[tuple[int, int]]:
    """Yield first and last (not included) of the blocks that are in memory at once."""
    first = rows = 0
    for i, block in enumerate(J.blocks):
        if i > first and rows + len(block) > block.rows_in_memory:
            yield first, i
            first, rows = i, 0
        rows += len(block)
    yield first, len(J.blocks)


def _factorised(M: np.ndarray, damping: float) -> DampedGram:
    try:
        return DampedGram.factorised(M, damping)
    except SingularMatrixError as error:
        raise ValueError(
            f"JᵀJ + λI is singular to working precision with damping λ = {damping:.3g} ({error}): "
            "give a larger damping or weight_decay"
        ) from error


def _columns(g: GradientBatch) -> np.ndarray:  # (p, b), column by column in memory
    return g.rows().cpu().double().numpy().T


def _squared_norms(columns: np.ndarray) -> np.ndarray:  # (m, b) -> (b,)
    return np.einsum("ij,ij->j", columns, columns)
