"""The delta method on randomly projected gradients, sparse Johnson–Lindenstrauss, less the bias that this brings.

Every gradient is replaced by Sg, r numbers in place of p. Each column of S (r × p) has four entries ±1/2, one in each
quarter of the rows, at places and with signs that depend on the seed and on the column's number alone. Then

    E (Sg)·(Sg') = g·g',    Var (Sg)·(Sg') ≤ (‖g‖²‖g'‖² + (g·g')²)/r    where 4 divides r,

but Sᵀ(SJᵀJSᵀ + μI)⁻¹S is near (JᵀJ + λI)⁻¹ for a λ larger than μ (LeJeune et al. 2022, "Asymptotics of the sketched
pseudoinverse"): the harmonic mean of all r eigenvalues of SJᵀJSᵀ + μI. `Equivalent` solves that for μ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..network.gradient_batch import CHUNK_BYTES, CHUNK_ROWS_AT_LEAST, GradientBatch
from .base import Covariance, Total
from .exact import Exact
from .problem import Problem
from .spectral import SpectralCovariance

# With one entry, columns of large gradients that fall together stay together (measured: six times the error of q).
# Two are nearly as good as four; eight or sixteen gain nothing.
ENTRIES = 4
WIDTH = 10_000  # columns at a time
# What it takes to form a number of a gradient and to project it is the way to memory and back, 5 to 8 ns: in that time
# a matrix product does so many multiplications.
FORMING_FLOPS = 250.0


class RandomProjection:
    """h = (Sg)ᵀ(SJᵀJSᵀ + μI)⁻¹Sg, the μ < λ making up for what `dim` dimensions cannot keep apart; q = h + λ ∂h/∂λ and
    p* follow.

    It holds 8·dim² bytes, up to twice that where n is below dim or not known beforehand, and three times at the end,
    for any number of parameters: neither S nor the rows of J are ever there as a whole. Equals `Exact()` where dim ≥ p.

    While tr H < dim there is next to no error on average over seeds, so dim should be above p*. With one seed h and q
    of a row unlike the training rows are off by about √(2/(dim − tr H²))·h, of others by less. Where λ is so small that
    tr H would exceed dim, the answers are those for the λ with tr H = dim, and `fit` warns.
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
        return self.dim >= problem.n_parameters and Exact().wants_rows(problem)

    def nbytes(self, problem: Problem) -> float:
        return Exact().nbytes(self._projected(problem))

    def flops(self, problem: Problem) -> float:
        forming = FORMING_FLOPS * problem.n_parameters if self.dim < problem.n_parameters else 0.0
        return (problem.n_rows or self.dim) * forming + Exact().flops(self._projected(problem))

    def limited(self, size: int, share: float = 1.0) -> RandomProjection:
        return RandomProjection(max(1, math.ceil(share * self.dim)), seed=self.seed)

    def _projected(self, problem: Problem) -> Problem:
        """What is left for `Exact`; it is diagonalised."""
        if self.dim >= problem.n_parameters:
            return problem
        row = 8 * self.dim
        return replace(
            problem,
            n_parameters=self.dim,
            itemsize=8,
            factor_bytes=row,
            inner_flops=0.0,
            damped=False,
            recomputed=False,
        )

    def update(self, gradients: GradientBatch) -> None:
        self._n_rows += len(gradients)
        self._n_parameters = gradients.n_parameters
        S = self._projection()
        if S is None:
            self._exact.update(gradients)
            return
        for batch in S.batches(gradients):
            self._exact.update(batch)

    def beside(self) -> RandomProjection:
        beside = RandomProjection(self.dim, seed=self.seed)
        beside._exact = self._exact.beside()
        return beside

    def resumed(self, covariance: Covariance, n_rows: int, n_parameters: int) -> RandomProjection:
        resumed = RandomProjection(self.dim, seed=self.seed)
        inner = covariance._exact if isinstance(covariance, ProjectedCovariance) else covariance
        resumed._exact = Exact().resumed(inner, n_rows, min(self.dim, n_parameters))
        resumed._n_rows, resumed._n_parameters = n_rows, n_parameters
        return resumed

    def merge(self, other: RandomProjection) -> None:
        if (self.dim, self.seed) != (other.dim, other.seed):
            raise ValueError(f"different projections cannot be merged: {self!r} and {other!r}")
        p = {self._n_parameters, other._n_parameters} - {0}
        if len(p) > 1:
            raise ValueError(f"projections of different numbers of parameters cannot be merged: {min(p)} and {max(p)}")
        self._n_rows += other._n_rows
        self._n_parameters = max(self._n_parameters, other._n_parameters)
        self._exact.merge(other._exact)

    def add_up(self, total: Total, n_rows: int, n_parameters: int) -> bool:
        added = self._exact.add_up(total, n_rows, min(self.dim, n_parameters))
        if added:
            self._n_rows, self._n_parameters = n_rows, n_parameters
        return added

    def state(self) -> dict[str, Any]:
        return {"_n_rows": self._n_rows, "_n_parameters": self._n_parameters, "_exact": self._exact.state()}

    def from_state(self, state: dict[str, Any]) -> RandomProjection:
        made = RandomProjection(self.dim, seed=self.seed)
        vars(made).update(state | {"_exact": self._exact.from_state(state["_exact"])})
        return made

    def finalise(self, damping: float | None) -> Covariance:
        S, n_rows, p = self._projection(), self._n_rows, self._n_parameters
        if S is not None and damping == 0.0:  # what S leaves out cannot be told from what J does not determine
            raise ValueError(
                f"damping 0 needs a regular JᵀJ, but the projection holds {self.dim} of {p} directions: "
                "give a positive damping or weight_decay"
            )
        exact = self._exact.finalise(damping if S is None else None)
        self._n_rows, self._n_parameters = 0, 0
        return exact if S is None else ProjectedCovariance(S, exact.diagonalised(), min(n_rows, p), damping)

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

    def batches(self, g: GradientBatch) -> Iterator[GradientBatch]:
        """gSᵀ, no more rows at a time than should be there at once."""
        for batch in g.split(max(CHUNK_ROWS_AT_LEAST, CHUNK_BYTES // (8 * self.dim))):
            yield self(batch)

    def __call__(self, g: GradientBatch) -> GradientBatch:
        """gSᵀ, row by row."""  # (b, p) -> (b, r)
        projected = np.empty((len(g), self.dim))
        width = min(WIDTH, self.n_parameters)
        end = 0
        for batch in g.split(max(1, CHUNK_BYTES // (8 * max(width, self.dim)))):
            start, end = end, end + len(batch)
            projected[start:end] = self._project(batch, width).T
        return GradientBatch.of(torch.from_numpy(projected))

    def _project(self, g: GradientBatch, width: int) -> np.ndarray:  # (r, b)
        from scipy.sparse import csc_array

        projected = np.zeros((self.dim, len(g)))
        start = 0
        for columns in g.columns(width):
            at, values = self.entries(start, columns.shape[1])
            ends = at.shape[1] * np.arange(len(at) + 1, dtype=np.int32)
            projected += csc_array((values.ravel(), at.ravel(), ends), shape=(self.dim, len(at))) @ columns.T
            start += len(at)
        return projected

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


class ProjectedCovariance(SpectralCovariance):
    """In the eigenbasis of SJᵀJSᵀ, asked with Sg; each λ has its own μ. The error is not certified."""

    error_bound = math.nan

    def __init__(self, S: Projection, exact: SpectralCovariance, full_rank: int, damping: float | None) -> None:
        name = f"random projection of {S.n_parameters:,} to {S.dim:,} dimensions"
        super().__init__(exact.eigenvalues, damping, name)
        self._S = S
        self._exact = exact
        self._full_rank = full_rank  # min(n, p)

    @property
    def effective_parameters(self) -> float:
        return float(min(self._equivalent(self._chosen).effective_parameters, self._full_rank))

    @property
    def in_reach(self) -> bool:  # type: ignore[override]
        return self._equivalent(self._chosen).reached

    @property
    def missed_parameters(self) -> float:  # type: ignore[override]
        """About the standard error of p* over seeds; all that there could be where λ is out of reach."""
        room = self._full_rank - self.effective_parameters
        equivalent = self._equivalent(self._chosen)
        return min(equivalent.standard_error, room) if equivalent.reached else room

    def variances(self, g: GradientBatch, dampings: np.ndarray) -> np.ndarray:
        weights = [self._equivalent(damping).variance_weights for damping in dampings]
        return np.maximum(self._weighed(g, np.stack(weights, axis=1)), 0.0)  # a difference, noise where q is nothing

    def leverage(self, g: GradientBatch) -> np.ndarray:
        return self._weighed(g, self._equivalent(self._chosen).y)

    def _equivalent(self, damping: float) -> Equivalent:
        return Equivalent.of(self.eigenvalues, self._S.dim, damping)

    def _weighed(self, g: GradientBatch, weights: np.ndarray) -> np.ndarray:  # (b,) or (b, ·)
        return np.concatenate([self._squared_projections(batch) @ weights for batch in self._S.batches(g)])

    def _squared_projections(self, g: GradientBatch) -> np.ndarray:  # (b, m), (b, m + 1) where m < r
        """z² of projected rows on the directions with ẽ > 0, and what is left on the others together."""
        z2 = self._exact._squared_projections(g)
        if z2.shape[1] == self._S.dim:
            return z2
        return np.column_stack([z2, np.maximum(g.squared_norms - z2.sum(axis=1), 0.0)])


@dataclass(frozen=True)
class Equivalent:
    """How the eigenvalues ẽ of SJᵀJSᵀ, r with those that are zero, answer for a λ of JᵀJ. With y = 1/(ẽ + μ):

    λ = r/Σy,    tr H = r(1 − μ/λ),    h = Σ z²y,    z the coordinates of Sg.

    For q = h + λ ∂h/∂λ and tr H² = tr H + λ ∂(tr H)/∂λ one differentiates by μ, ∂λ/∂μ = r/f with f = (Σy)²/Σy²:

    q = Σ z²(ẽ − ē)y²,    ē = Σ ẽy²/Σy²,    tr H² = r − f,    p* = 2 tr H − tr H².
    """

    y: np.ndarray  # (m,), (m + 1,) where m < r
    variance_weights: np.ndarray  # of z² in q, the same
    effective_parameters: float
    standard_error: float  # of them
    reached: bool  # whether there is a μ ≥ 0 for this λ; otherwise all is said for the smallest λ that has one

    @staticmethod
    def of(eigenvalues: np.ndarray, r: int, damping: float) -> Equivalent:  # the m that are not zero
        m = len(eigenvalues)
        e, count = (eigenvalues, np.ones(m)) if m == r else (np.append(eigenvalues, 0.0), np.append(np.ones(m), r - m))
        # A harmonic mean is concave in μ: Newton's method stays below λ, where it starts.
        mu = damping * (r - m) / r
        for _ in range(100):
            least = e[-1] + mu
            x = least / (e + mu)  # y, but without overflow
            total, squares = float(count @ x), float(count @ x**2)
            f = total**2 / squares
            short = damping - r * least / total
            if short <= 1e-12 * damping:
                break
            mu += short * f / r
        y = x / least
        p_star = max(2 * (r - mu * total / least) - (r - f), 0.0)
        return Equivalent(
            y=y,
            variance_weights=(e - float(count @ (e * x**2)) / squares) * y * y,
            effective_parameters=p_star,
            # Cov(log det) for two λ is −2 log(1 − tr(HH')/r); differentiated by both it is that of tr H, at most
            # 2(t/f + t²/f²) = 2rt/f² with t = tr H² ≤ p*. Measured: a quarter of it, as H²(1 − H)² is below H².
            standard_error=math.sqrt(2 * r * p_star) / f,
            reached=short > -1e-9 * damping,
        )
