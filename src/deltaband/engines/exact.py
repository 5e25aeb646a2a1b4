"""The exact delta method: one Cholesky factor, of p × p or of n × n numbers, whichever is smaller."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import warn
from ..network.gradient_batch import CHUNK_BYTES, GradientBatch
from .base import Covariance, Total
from .memory import free_memory, square_bytes
from .problem import Problem
from .spectral import SpectralCovariance, Spectrum

if TYPE_CHECKING:  # SciPy is loaded when there is work for it, not by `import deltaband`
    from .gram import DampedGram

ROUNDING = 1e-2  # what of 1 + q, the squared width of an interval, may be rounding


class Exact:
    """The exact covariance, in float64 whatever the precision of the gradients.

    Primal form, n ≥ p: JᵀJ is summed up in one p × p matrix, 8p² bytes however many rows there are.
    Dual form, n < p: K = JJᵀ is factorised, 8n² bytes; of J is kept what its inner products need, layer by layer.

    Where n is not known beforehand, J is kept until there are p rows.
    """

    needs_damping = False
    sample_size = 0
    seed = 0

    def __init__(self) -> None:
        self._kept: list[GradientBatch] = []
        self._gram: np.ndarray | None = None  # JᵀJ, in the upper triangle
        self._n_rows = 0
        self._expected_rows = 0
        self._scratch: Tensor | None = None

    def start(
        self, *, n_rows: int | None = None, damping: float | None = None, sample: GradientBatch | None = None
    ) -> Exact:
        fresh = Exact()
        fresh._expected_rows = n_rows or 0
        return fresh

    def wants_rows(self, problem: Problem) -> bool:
        return problem.n_rows is not None and problem.n_rows >= problem.n_parameters

    def nbytes(self, problem: Problem) -> float:
        n, p = problem.n_rows, problem.n_parameters
        if n is None:  # up to p rows, and then the matrix
            return square_bytes(p, problem.damped) + p * problem.kept_bytes
        return square_bytes(min(n, p), problem.damped) + (n * problem.kept_bytes if n < p else 0)

    def flops(self, problem: Problem) -> float:
        p = problem.n_parameters
        n = p if problem.n_rows is None else problem.n_rows
        products = n * p**2 if n >= p else n**2 * problem.product_flops / 2
        return products + (2.0 if problem.damped else 10.0) * min(n, p) ** 3

    def limited(self, size: int, share: float = 1.0) -> Exact:
        return Exact()

    def update(self, gradients: GradientBatch) -> None:
        self._n_rows += len(gradients)
        self._kept.append(gradients)
        if max(self._n_rows, self._expected_rows) >= gradients.n_parameters:
            self._fold()

    def beside(self) -> Exact:
        return self.start(n_rows=self._expected_rows)

    def resumed(self, covariance: Covariance, n_rows: int, n_parameters: int) -> Exact:
        resumed = Exact()
        resumed._n_rows = n_rows
        if isinstance(covariance, DualCovariance | DiagonalDual):
            resumed._kept = [covariance.J]
        else:
            assert isinstance(covariance, PrimalCovariance | DiagonalPrimal)
            resumed._gram = covariance.gram()
        return resumed

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

    def add_up(self, total: Total, n_rows: int, n_parameters: int) -> bool:
        from . import gram as cholesky

        if n_rows < n_parameters:
            return False
        self._fold()
        self._gram = cholesky.empty(n_parameters) if self._gram is None else self._gram
        cholesky.add_up(self._gram, total)
        self._n_rows = n_rows
        return True

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("_kept", "_gram", "_n_rows", "_expected_rows")}

    def from_state(self, state: dict[str, Any]) -> Exact:
        made = Exact()
        vars(made).update(state)
        return made

    def finalise(self, damping: float | None) -> Covariance:
        n_rows, gram = self._n_rows, self._gram
        if n_rows == 0:
            raise ValueError("no rows were given")
        J = GradientBatch.concatenate(self._kept)
        self._n_rows, self._gram, self._kept, self._scratch = 0, None, [], None
        if gram is not None:
            return DiagonalPrimal(gram) if damping is None else PrimalCovariance(_factorise(gram, damping))
        if damping == 0.0:
            raise ValueError(
                f"damping 0 needs a regular JᵀJ, but {n_rows} rows cannot determine {J.n_parameters} parameters: "
                "give a positive damping or weight_decay"
            )
        kernel = _kernel(J)
        return DiagonalDual(kernel, J) if damping is None else DualCovariance(_factorise(kernel, damping), J)

    def __repr__(self) -> str:
        return "Exact()"

    def _fold(self) -> None:
        from . import gram as cholesky

        for batch in self._kept:
            if self._gram is None:
                self._gram = cholesky.empty(batch.n_parameters)
            for block in batch.row_blocks():
                cholesky.add_gram(self._gram, self._in_float64(block))
        self._kept = []

    def _in_float64(self, block: Tensor) -> np.ndarray:
        """The block in one piece of memory that is used again and again: what is asked for anew each time adds up."""
        if self._scratch is None or self._scratch.shape[0] < len(block):
            self._scratch = torch.empty(block.shape, dtype=torch.float64, device="cpu")
        return self._scratch[: len(block)].copy_(block).numpy()


class PrimalCovariance:
    """With u = A⁻¹g: q = g·u − λ u·u, h = g·u, p* = p − ‖λA⁻¹‖²_F."""

    missed_parameters = 0.0
    error_bound = 0.0
    in_reach = True

    def __init__(self, A: DampedGram) -> None:
        self._A = A
        self.damping = A.damping
        self.effective_parameters = A.effective_size

    def variance(self, g: GradientBatch) -> np.ndarray:
        z = self._A.half_solve(_columns(g))
        h = _squared_norms(z)
        q = np.maximum(h - self.damping * _squared_norms(self._A.solve_half_solved(z)), 0.0)
        if self.damping > 0 and (self._A.rounding * h > ROUNDING * (1 + q)).any():
            warn(
                f"damping λ = {self.damping:.3g} is so small against JᵀJ that rounding shows in the variance of some "
                "rows: give a larger damping or weight_decay"
            )
        return q

    def leverage(self, g: GradientBatch) -> np.ndarray:
        return _squared_norms(self._A.half_solve(_columns(g)))

    def spectrum(self) -> Spectrum:
        return self.diagonalised().spectrum()

    def diagonalised(self) -> SpectralCovariance:
        _check_room(self._A.size)
        return DiagonalPrimal(self._A.gram(), self.damping)

    def gram(self) -> np.ndarray:
        """JᵀJ, in the upper triangle."""
        return self._A.gram()

    def describe(self) -> str:
        return f"exact, primal form ({self._A.size:,} × {self._A.size:,})"


class DualCovariance:
    """With k = Jg and c = (K + λI)⁻¹k: q = c·c, h = (g·g − k·c)/λ, p* = n − ‖λ(K + λI)⁻¹‖²_F."""

    missed_parameters = 0.0
    error_bound = 0.0
    in_reach = True

    def __init__(self, A: DampedGram, J: GradientBatch) -> None:
        self._A = A
        self.J = J
        self.damping = A.damping
        self.effective_parameters = A.effective_size

    def variance(self, g: GradientBatch) -> np.ndarray:
        return _squared_norms(self._A.solve_half_solved(self._half_solved(g)))

    def leverage(self, g: GradientBatch) -> np.ndarray:
        explained = _squared_norms(self._half_solved(g))  # k·c
        return np.maximum(g.squared_norms - explained, 0.0) / self.damping

    def spectrum(self) -> Spectrum:
        return self.diagonalised().spectrum()

    def diagonalised(self) -> SpectralCovariance:
        _check_room(self._A.size)
        return DiagonalDual(self._A.gram(), self.J, self.damping)

    def describe(self) -> str:
        return f"exact, dual form ({self._A.size:,} × {self._A.size:,})"

    def _half_solved(self, g: GradientBatch) -> np.ndarray:
        return self._A.half_solve(g.inner(self.J).T)


class DiagonalPrimal(SpectralCovariance):
    """JᵀJ = V diag(e) Vᵀ, from an upper triangle and over it."""

    def __init__(self, gram: np.ndarray, damping: float | None = None) -> None:
        from . import gram as cholesky

        e, V = cholesky.eigh(gram)
        r = _rank(e)
        super().__init__(e[:r], damping, f"exact, in the eigenbasis of JᵀJ ({len(e):,} × {len(e):,})")
        self._V = V[:, :r]

    def gram(self) -> np.ndarray:
        """JᵀJ, in the upper triangle, to the last digits."""
        from . import gram as cholesky

        M = cholesky.empty(len(self._V))
        cholesky.add_outer_gram(M, np.ascontiguousarray(self._V * np.sqrt(self.eigenvalues)))
        return M

    def _squared_projections(self, g: GradientBatch) -> np.ndarray:
        return (_columns(g).T @ self._V) ** 2


class DiagonalDual(SpectralCovariance):
    """K = JJᵀ = U diag(e) Uᵀ, from an upper triangle and over it; vⱼ·g = uⱼ·(Jg)/√eⱼ."""

    def __init__(self, kernel: np.ndarray, J: GradientBatch, damping: float | None = None) -> None:
        from . import gram as cholesky

        e, U = cholesky.eigh(kernel)
        r = _rank(e)
        super().__init__(e[:r], damping, f"exact, in the eigenbasis of JJᵀ ({len(e):,} × {len(e):,})")
        self._U = U[:, :r] / np.sqrt(e[:r])
        self.J = J

    def _squared_projections(self, g: GradientBatch) -> np.ndarray:
        return (g.inner(self.J) @ self._U) ** 2


def _check_room(m: int) -> None:
    """A factor and its matrix share their memory; eigenvectors need memory of their own."""
    needed, free = square_bytes(m, damped=False), free_memory()
    if needed > free:
        raise MemoryError(
            f"eigenvectors of a {m:,} × {m:,} matrix take {needed / 1e9:.3g} GB and {free / 1e9:.3g} GB are free: "
            "calibrate with tune=False, which needs none, or fit with a smaller engine"
        )


def _rank(e: np.ndarray) -> int:
    """How many eigenvalues, largest first, are more than rounding."""
    return int((e > len(e) * np.finfo(np.float64).eps * e[0]).sum())


def _kernel(J: GradientBatch) -> np.ndarray:
    """K = JJᵀ, in the upper triangle."""
    from . import gram as cholesky

    K = cholesky.empty(len(J))
    if J.has_rows:
        for columns in J.columns(width=max(1, CHUNK_BYTES // (8 * len(J)))):
            cholesky.add_outer_gram(K, columns)
        return K
    ends = np.cumsum([0, *map(len, J.blocks)])
    for first, last in _groups(J):
        mine = GradientBatch(J.blocks[first:last]).merged()
        for i in range(last):
            K[ends[i] : ends[i + 1], ends[first] : ends[last]] = GradientBatch((J.blocks[i],)).inner(mine)
    return K


def _groups(J: GradientBatch) -> Iterator[tuple[int, int]]:
    """First and last (not included) of the blocks that are held in memory at once."""
    first = rows = 0
    for i, block in enumerate(J.blocks):
        if i > first and rows + len(block) > block.rows_in_memory:
            yield first, i
            first, rows = i, 0
        rows += len(block)
    yield first, len(J.blocks)


def _factorise(M: np.ndarray, damping: float) -> DampedGram:
    from ..errors import SingularMatrixError
    from .gram import DampedGram

    try:
        return DampedGram(M, damping)
    except SingularMatrixError as error:
        raise ValueError(
            f"JᵀJ + λI is singular to working precision with damping λ = {damping:.3g} ({error}): "
            "give a larger damping or weight_decay"
        ) from error


def _columns(g: GradientBatch) -> np.ndarray:  # (p, b), column by column in memory
    return g.rows().cpu().double().numpy().T


def _squared_norms(columns: np.ndarray) -> np.ndarray:  # (m, b) -> (b,)
    return np.einsum("ij,ij->j", columns, columns)
