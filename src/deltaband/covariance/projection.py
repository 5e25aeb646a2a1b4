"""The exact delta method on randomly projected gradients: sparse Johnson–Lindenstrauss.

Every gradient is replaced by Sg, r numbers in place of p. Each column of S (r × p) has four entries ±1/2, one in each
quarter of the rows, at places and with signs that depend on the seed and on the column's number alone. Then

    E (Sg)·(Sg') = g·g',    Var (Sg)·(Sg') ≤ (‖g‖²‖g'‖² + (g·g')²)/r    where 4 divides r.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..batch import CHUNK_BYTES, GradientBatch
from .engine import Covariance
from .exact import Exact
from .problem import Problem
from .spectral import SpectralCovariance, Spectrum

# With one entry, columns of large gradients that fall together stay together (measured: six times the error of q).
# Two are nearly as good as four; eight or sixteen gain nothing.
ENTRIES = 4
WIDTH = 10_000  # columns at a time


class RandomProjection:
    """q = (Sg)ᵀ A⁻¹ SJᵀJSᵀ A⁻¹ Sg, h = (Sg)ᵀ A⁻¹ Sg with A = SJᵀJSᵀ + λI: `Exact` on Sg, for all gradients g.

    It holds 8·dim² bytes, up to twice that where n is below dim or not known beforehand, for any number of parameters:
    S is drawn anew for each batch, some columns at a time. Equals `Exact()` where dim ≥ p.

    Single inner products keep a relative error of about √(2/dim), but not all directions are kept at once: the error
    of q is up to about (p*/dim)·h, and p* comes out too small on average. So dim should be many times p*.
    """

    needs_damping = False
    sample_size = 0

    def __init__(self, dim: int = 4000, *, seed: int = 0) -> None:
        if isinstance(dim, bool) or not isinstance(dim, int | np.integer) or not 1 <= dim < 2**31:
            raise ValueError(f"dim must be a positive whole number below 2³¹, got {dim!r}")
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
            raise ValueError(f"seed must be a whole number ≥ 0, got {seed!r}")
        self.dim = int(dim)
        self.seed = int(seed)
        self._exact = Exact()
        self._n_rows = 0
        self._n_parameters = 0  # not known before the first row

    def start(
        self, *, n_rows: int | None = None, damping: float | None = None, sample: GradientBatch | None = None
    ) -> RandomProjection:
        fresh = RandomProjection(self.dim, seed=self.seed)
        fresh._exact = Exact().start(n_rows=n_rows)
        return fresh

    def wants_rows(self, problem: Problem) -> bool:
        return self.dim < problem.n_parameters or Exact().wants_rows(problem)

    def nbytes(self, problem: Problem) -> float:
        return Exact().nbytes(self._projected(problem))

    def flops(self, problem: Problem) -> float:
        entries = 2.0 * ENTRIES * problem.n_parameters if self.dim < problem.n_parameters else 0.0
        return (problem.n_rows or self.dim) * entries + Exact().flops(self._projected(problem))

    def limited(self, size: int) -> RandomProjection:
        return RandomProjection(self.dim, seed=self.seed)

    def _projected(self, problem: Problem) -> Problem:
        if self.dim >= problem.n_parameters:
            return problem
        return replace(problem, n_parameters=self.dim, itemsize=8, factor_bytes=8 * self.dim, recomputed=False)

    def update(self, gradients: GradientBatch) -> None:
        self._n_rows += len(gradients)
        self._n_parameters = gradients.n_parameters
        S = self._projection()
        self._exact.update(gradients if S is None else S(gradients))

    def merge(self, other: RandomProjection) -> None:
        if (self.dim, self.seed) != (other.dim, other.seed):
            raise ValueError(f"different projections cannot be merged: {self!r} and {other!r}")
        p = {self._n_parameters, other._n_parameters} - {0}
        if len(p) > 1:
            raise ValueError(f"projections of different numbers of parameters cannot be merged: {min(p)} and {max(p)}")
        self._n_rows += other._n_rows
        self._n_parameters = max(self._n_parameters, other._n_parameters)
        self._exact.merge(other._exact)

    def finalise(self, damping: float | None) -> Covariance:
        S, n_rows, p = self._projection(), self._n_rows, self._n_parameters
        if S is not None and damping == 0.0:  # what S leaves out cannot be told from what J does not determine
            raise ValueError(
                f"damping 0 needs a regular JᵀJ, but the projection holds {self.dim} of {p} directions: "
                "give a positive damping or weight_decay"
            )
        exact = self._exact.finalise(damping)
        self._n_rows, self._n_parameters = 0, 0
        if S is None:
            return exact
        if isinstance(exact, SpectralCovariance):
            return ProjectedSpectral(S, exact, min(n_rows, p))
        return ProjectedCovariance(S, exact, min(n_rows, p))

    def __repr__(self) -> str:
        return f"RandomProjection(dim={self.dim}{f', seed={self.seed}' if self.seed else ''})"

    def _projection(self) -> Projection | None:
        return Projection(self.dim, self._n_parameters, self.seed) if self.dim < self._n_parameters else None


@dataclass(frozen=True)
class Projection:
    """S (r × p), of which no more than some columns exist at a time."""

    dim: int  # r
    n_parameters: int  # p
    seed: int

    def __call__(self, g: GradientBatch) -> GradientBatch:
        """gSᵀ, row by row."""  # (b, p) -> (b, r)
        from scipy.sparse import csc_array

        projected = np.zeros((self.dim, len(g)))
        start = 0
        # + 1: the columns are transposed, which takes longer where there is a power of two of them
        for columns in g.columns(width=max(1, min(WIDTH, CHUNK_BYTES // (8 * (len(g) + 1))))):
            width = columns.shape[1]
            at, values = self.entries(start, width)
            ends = at.shape[1] * np.arange(width + 1, dtype=np.int32)
            projected += csc_array((values.ravel(), at.ravel(), ends), shape=(self.dim, width)) @ columns.T
            start += width
        return GradientBatch.of(torch.from_numpy(np.ascontiguousarray(projected.T)))

    def entries(self, start: int, width: int) -> tuple[np.ndarray, np.ndarray]:  # (width, 4) twice
        """Where the entries of some columns are, and what they are.

        Each from a raw 64-bit word of a stream that NumPy never changes, the place from its lowest 31 bits taken as a
        fraction. The stream can be entered anywhere, so a column is the same whichever others are asked for.
        """
        count = min(ENTRIES, self.dim)
        words = np.random.PCG64(self.seed).advance(start * count).random_raw((width, count)).view(np.int64)
        edges = self.dim * np.arange(count + 1, dtype=np.int64) // count
        at = edges[:-1] + ((words & 0x7FFFFFFF) * np.diff(edges) >> 31)
        return at.astype(np.int32), np.copysign(1 / math.sqrt(count), words)


class ProjectedCovariance:
    """The exact covariance of projected gradients, asked with projected gradients. Its error is not certified."""

    error_bound = math.nan

    def __init__(self, S: Projection, exact: Covariance, full_rank: int) -> None:
        self._S = S
        self._exact = exact
        self._full_rank = full_rank  # min(n, p)
        self.damping = exact.damping
        self.effective_parameters = exact.effective_parameters

    @property
    def missed_parameters(self) -> float:
        return _missed(self.effective_parameters, self._S.dim, self._full_rank)

    def variance(self, g: GradientBatch) -> np.ndarray:
        return self._exact.variance(self._S(g))

    def leverage(self, g: GradientBatch) -> np.ndarray:
        return self._exact.leverage(self._S(g))

    def spectrum(self) -> Spectrum:
        return self._exact.spectrum()

    def diagonalised(self) -> SpectralCovariance:
        return ProjectedSpectral(self._S, self._exact.diagonalised(), self._full_rank)

    def describe(self) -> str:
        return _describe(self._S, self._exact)


class ProjectedSpectral(SpectralCovariance):
    """The same in the eigenbasis of SJᵀJSᵀ: gradients are projected on their way in, once."""

    error_bound = math.nan

    def __init__(self, S: Projection, exact: SpectralCovariance, full_rank: int) -> None:
        super().__init__(exact.eigenvalues, exact.damping, _describe(S, exact))
        self._S = S
        self._exact = exact
        self._full_rank = full_rank

    @property
    def missed_parameters(self) -> float:  # type: ignore[override]
        return _missed(self.effective_parameters, self._S.dim, self._full_rank)

    def variances(self, g: GradientBatch, dampings: np.ndarray) -> np.ndarray:
        return super().variances(self._S(g), dampings)

    def leverage(self, g: GradientBatch) -> np.ndarray:
        return super().leverage(self._S(g))

    def _squared_projections(self, g: GradientBatch) -> np.ndarray:  # of projected rows
        return self._exact._squared_projections(g)


def _missed(p_star: float, dim: int, full_rank: int) -> float:
    """What p* may lack, on average over seeds and for large dim.

    There a projection acts like the larger damping κ = λ/(1 − tr(H)/dim), and p*(λ) ≤ p*(κ)·κ/λ with tr H ≤ p*. It is
    no bound for each seed, but where it is larger than min(n, p) − p*, that is one.
    """
    likely = p_star**2 / (dim - p_star) if p_star < dim else math.inf
    return max(min(likely, full_rank - p_star), 0.0)


def _describe(S: Projection, exact: Covariance) -> str:
    return f"random projection of {S.n_parameters:,} to {S.dim:,} dimensions, then {exact.describe()}"
