"""The exact delta method: one Cholesky factor, of p × p or of n × n numbers, whichever is smaller.

Below it are the sizes that the cost of all engines depends on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import SingularMatrixError, not_regular, warn
from ..machine import free_memory
from ..network.gradient_batch import GradientBatch, add_gram, check_in_place, coordinates
from ..network.kernel import kernel_by_layers
from ..storage.encoding import storable
from .base import Accumulator, Cost, Engine, Known, register
from .covariance import By, Covariance, Products
from .fields import concatenated, reduced, shared
from .spectral import EigenbasisCovariance, SpectralCovariance

BLOCK_COLUMNS = 256  # of a matrix that is copied piece by piece
FACTOR_BYTES, EIGENVECTOR_BYTES = 8.0, 24.0  # of an entry: LAPACK factorises in place, its eigenvectors take three
COPIED_BYTES = 2**25  # of a factor that is copied rather than computed again
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
        pairs = size**2 / 2 if dual else 0.0
        products = pairs * problem.product_flops if dual else (n or p) * p**2
        flops = products + (2.0 if problem.damped else 10.0) * size**3
        matrix = (FACTOR_BYTES if problem.damped else EIGENVECTOR_BYTES) * size**2
        wants_rows = n is not None and n >= p
        return Cost(matrix + kept, flops, wants_rows, pairs, knows_leverages=dual and problem.single)

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
    inner: np.ndarray | None = field(default=None, repr=False)  # JJᵀ, once it is prepared

    def update(self, g: GradientBatch) -> None:
        self.n_rows, self.inner = self.n_rows + len(g), None
        self.kept.append(g)
        if max(self.n_rows, self.expected_rows) >= g.n_parameters:
            self._fold()

    def merge(self, other: ExactRows) -> None:
        super().merge(other)
        self.inner = None
        if self.kept and (self.gram is not None or self.n_rows >= self.kept[0].n_parameters):
            self._fold()

    def is_sum(self, n_rows: int, n_parameters: int) -> bool:
        if n_rows >= n_parameters:
            self._fold()
        return n_rows >= n_parameters

    def prepare(self) -> None:
        if self.gram is None and self.kept and self.inner is None:
            J = GradientBatch.concatenate(self.kept)
            self.inner = J.kernel() if J.is_in_memory else kernel_by_layers(J)

    def finalise(self, damping: float | None) -> Covariance:
        J = None if self.gram is not None else GradientBatch.concatenate(self.kept)
        if self.n_rows == 0:
            raise ValueError("no rows were given")
        if damping == 0.0 and J is not None:
            raise not_regular(f"{self.n_rows} rows cannot determine {J.n_parameters} parameters")
        self.prepare()
        matrix = self.gram if self.inner is None else self.inner
        assert matrix is not None
        self.clear()
        if damping is None:
            return EigenbasisCovariance.of(matrix, None, J)
        try:
            return ExactCovariance(damping, matrix, *factorise(matrix, damping), J)
        except SingularMatrixError as error:
            what = f"JᵀJ + λI is singular to working precision with damping λ = {damping:.3g} ({error})"
            raise ValueError(f"{what}: give a larger damping or weight_decay") from error

    def _fold(self) -> None:
        for batch in self.kept:
            for block in batch.row_blocks():
                # in memory that is used again and again: allocating it anew each time adds up
                if self.scratch is None or self.scratch.shape[0] < len(block):
                    self.scratch = torch.empty(block.shape, dtype=torch.float64, device="cpu")
                self.gram = add_gram(self.gram, self.scratch[: len(block)].copy_(block).numpy())
        self.kept = []


@dataclass(frozen=True, eq=False)
class ExactCovariance(Covariance):
    """A Cholesky factor for one λ, of A = JᵀJ + λI, where u = A⁻¹g, or with J of A = K + λI, where k = Jg and c = A⁻¹k:

    q = g·u − λ u·u,  h = g·u,  p* = p − ‖λA⁻¹‖²_F,    or    q = c·c,  h = (g·g − k·c)/λ,  p* = n − ‖λA⁻¹‖²_F,

    and with J the i-th training row has h = 1 − λ(A⁻¹)ᵢᵢ.
    """

    damping: float
    matrix: np.ndarray  # (m, m), the factor, and above it JᵀJ or K
    diagonal: np.ndarray  # (m,) of these
    effective_size: float
    rounding: float  # relative, of bᵀA⁻¹b
    remainders: np.ndarray  # (m,) λ(A⁻¹)ᵢᵢ
    J: GradientBatch | None = None
    is_exact, error_bound, missed_parameters = True, 0.0, 0.0

    @property
    def effective_parameters(self) -> float:
        return self.effective_size

    @property
    def own_leverages(self) -> np.ndarray | None:
        return None if self.J is None else np.sort(1 - self.remainders)

    def variance(self, g: GradientBatch) -> np.ndarray:
        z = half_solve(self.matrix, coordinates(g, self.J))
        solved = _squared_norms(half_solve(self.matrix, z, transposed=True))
        if self.J is not None:
            return solved
        h = _squared_norms(z)
        q = np.maximum(h - self.damping * solved, 0.0)
        if self.damping > 0 and (self.rounding * h > LARGEST_ROUNDING * (1 + q)).any():
            what = f"damping λ = {self.damping:.3g} is so small against JᵀJ that rounding shows in the variance of some"
            warn(f"{what} rows: give a larger damping or weight_decay")
        return q

    def leverage(self, g: GradientBatch) -> np.ndarray:
        h = _squared_norms(half_solve(self.matrix, coordinates(g, self.J)))
        return h if self.J is None else np.maximum(g.squared_norms - h, 0.0) / self.damping

    def across(self, other: GradientBatch, by: By = "variance") -> Products:
        solved, J = self._solve(k := coordinates(other, self.J)), self.J
        if by == "variance":  # without the difference of nearly equal numbers that q is in the primal form
            right = self._solve(self._times(solved) if J is None else solved)
            return lambda g: coordinates(g, J).T @ right
        if J is None:
            return lambda g: coordinates(g, None).T @ solved
        half = half_solve(self.matrix, k)
        return lambda g: (g.inner(other) - half_solve(self.matrix, coordinates(g, J)).T @ half) / self.damping

    def _solve(self, B: np.ndarray) -> np.ndarray:
        """Return A⁻¹B."""
        return half_solve(self.matrix, half_solve(self.matrix, B), transposed=True)

    def _times(self, B: np.ndarray) -> np.ndarray:
        """Return JᵀJ·B or K·B, of the upper triangle above the factor."""
        from scipy.linalg import blas

        return blas.dsymm(1.0, self.matrix, B, lower=0) + (self.diagonal - self.matrix.diagonal())[:, None] * B

    def gram(self) -> np.ndarray:
        M = self.matrix.copy(order="F")
        np.fill_diagonal(M, self.diagonal)
        return M

    def eigendecomposed(self) -> SpectralCovariance:
        m, free = len(self.matrix), free_memory()
        needed = EIGENVECTOR_BYTES * m**2
        if needed > free:  # a factor shares the memory of its matrix, eigenvectors do not
            what = f"eigenvectors of a {m:,} × {m:,} matrix take {needed / 1e9:.3g} GB and {free / 1e9:.3g} GB are free"
            raise MemoryError(f"{what}: calibrate with tune=False, which needs none, or fit with a smaller engine")
        return EigenbasisCovariance.of(self.gram(), self.damping, self.J)

    def describe(self) -> str:
        return f"exact, {'primal' if self.J is None else 'dual'} form ({len(self.matrix):,} × {len(self.matrix):,})"


def accumulated_fields(covariance: Covariance) -> dict[str, Any]:
    """Return the fields of `ExactRows` that ended in this covariance."""
    assert isinstance(covariance, ExactCovariance | EigenbasisCovariance)
    return {"gram": covariance.gram()} if covariance.J is None else {"kept": [covariance.J]}


def _squared_norms(columns: np.ndarray) -> np.ndarray:  # (m, b) -> (b,)
    return np.einsum("ij,ij->j", columns, columns)


def factorise(M: np.ndarray, damping: float) -> tuple[np.ndarray, float, float, np.ndarray]:
    """Put the Cholesky factor L of A = M + λI = LLᵀ below the diagonal and on it; M stays above it.

    Return the diagonal of M, m − ‖λA⁻¹‖²_F, the relative rounding error of bᵀA⁻¹b, and λ(A⁻¹)ᵢᵢ.
    """
    from scipy.linalg import lapack

    diagonal, in_place = M.diagonal().copy(), M.nbytes > COPIED_BYTES
    rounding = _factorise(M, diagonal + damping)
    X, _ = lapack.dpotri(M, lower=1, overwrite_c=in_place)  # A⁻¹ over the factor, which has no zero on its diagonal
    # times λ before it is squared: A⁻¹ may be too large for that, and λ² too small
    below = sum(float((column := damping * X[j + 1 :, j]) @ column) for j in range(len(X)))
    remainders = damping * X.diagonal()
    norm_squared = float(np.square(remainders).sum()) + 2 * below
    if in_place:
        check_in_place(X, M)
        _factorise(M, diagonal + damping)
    return diagonal, len(M) - norm_squared, rounding, remainders


def half_solve(L: np.ndarray, B: np.ndarray, transposed: bool = False) -> np.ndarray:
    """Return Z = L⁻¹B, whose squared column norms are bᵀA⁻¹b, or L⁻ᵀB, which makes A⁻¹B of Z."""
    from scipy.linalg import blas

    return blas.dtrsm(1.0, L, B, lower=1, trans_a=int(transposed))


def _factorise(A: np.ndarray, damped_diagonal: np.ndarray) -> float:
    """Put the factor into the lower triangle; return the relative rounding error of bᵀA⁻¹b."""
    from scipy.linalg import lapack

    m = len(A)
    for i in range(0, m, BLOCK_COLUMNS):
        j = i + BLOCK_COLUMNS
        A[j:, i:j] = A[i:j, j:].T
        A[i:j, i:j] = np.triu(A[i:j, i:j]) + np.triu(A[i:j, i:j], 1).T
    np.fill_diagonal(A, damped_diagonal)
    norm = max(float(np.abs(A[:, j : j + BLOCK_COLUMNS]).sum(axis=0).max()) for j in range(0, m, BLOCK_COLUMNS))
    L, info = lapack.dpotrf(A, lower=1, clean=0, overwrite_a=1)
    if info:
        raise SingularMatrixError(f"the leading minor of order {info} is not positive definite")
    check_in_place(L, A)
    reciprocal_condition, _ = lapack.dpocon(L, norm, uplo="L")
    if reciprocal_condition < m * np.finfo(np.float64).eps:
        raise SingularMatrixError(f"its reciprocal condition number is {reciprocal_condition:.1e}")
    return float(np.finfo(np.float64).eps / reciprocal_condition)


@storable
@dataclass(frozen=True)
class Problem:
    """The sizes that the memory and time of an engine depend on, known before the first row."""

    n_rows: int | None  #: Rows of J: training rows times outputs that are fitted together; None where unknown.
    n_parameters: int  #: Columns of J.
    itemsize: int  #: Bytes of a number in a gradient.
    factor_bytes: int  #: Bytes of one row's gradient, layer by layer.
    input_bytes: int  #: Bytes of one row's input.
    inner_flops: float = 0.0  #: Of an inner product of two rows' gradients; 0: as many as there are factors.
    row_seconds: float = 0.0  #: Time to compute one row's gradient, as measured on the first rows.
    pair_seconds: float = 0.0  #: Time of an inner product of two rows' gradients, likewise; 0: as many operations take.
    setup_seconds: float = 0.0  #: Time to look at the first rows and to plan: what a fit takes before them.
    asked_rows: int = 0  #: Training rows whose own leverages a fit ends with.
    single: bool = False  #: Whether a training row has one output, and one row of J.
    damped: bool = True  #: Whether λ is known.
    reiterable: bool = True  #: Whether the data can be read twice.
    recomputed: bool = False  #: Whether only the inputs of rows are kept, and their gradients computed again.
    room: float = 0.0  #: Bytes for the factors of all rows, as many layers at a time as fit, where they are.
    positions: int = 0  #: Of the outer products that one row's gradient consists of.

    @property
    def product_flops(self) -> float:
        """The cost of an inner product of two rows."""
        return self.inner_flops or 2.0 * self.factor_bytes / self.itemsize

    @property
    def certificate_bytes(self) -> int:
        """What certifying a batch takes: a gradient of all weights, and the sum that is compared with it."""
        return 2 * self.n_parameters * self.itemsize

    @property
    def passes(self) -> int:
        """How often the gradients of all rows are computed."""
        if not self.recomputed:
            return 1
        return 1 + math.ceil((self.n_rows or 0) * self.factor_bytes / max(self.room, self.factor_bytes))

    @property
    def recomputed_bytes(self) -> int:
        """What recomputing rows takes: a copy of the weights, and the factors of some rows that meet some others."""
        weights = self.n_parameters * self.itemsize
        return weights + max(min(256 * 2**20, 128 * self.factor_bytes), 4 * self.factor_bytes)
