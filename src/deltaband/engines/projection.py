"""The delta method on randomly projected gradients, sparse Johnson–Lindenstrauss, less the bias that this brings.

Every gradient is replaced by Sg, r numbers instead of p, computed from layer factors where that is faster. Each column
of S (r × p) has four entries ±1/2, at places and with signs that depend on the seed, on the column's number and on the
shapes of the weights (`network/layers/projection.py`). Then

    E (Sg)·(Sg') = g·g',    Var (Sg)·(Sg') ≈ (‖g‖²‖g'‖² + (g·g')²)/r

for the gradients of vectors; for g = δ ⊗ x there is also (‖δ‖²‖δ'‖²(x·x')² + (δ·δ')²‖x‖²‖x'‖² + 2(g·g')²)/r.
But Sᵀ(SJᵀJSᵀ + μI)⁻¹S is near (JᵀJ + λI)⁻¹ for a λ larger than μ (LeJeune et al. 2022, "Asymptotics of the sketched
pseudoinverse"): the harmonic mean of all r eigenvalues of SJᵀJSᵀ + μI. `Equivalent` solves that for μ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import not_regular
from ..network.gradient_batch import CHUNK_BYTES, CHUNK_ROWS_AT_LEAST, GradientBatch
from ..network.layers.projection import Projection
from ..validation import check_int
from .base import Cost, Engine, Known, register
from .covariance import By, Covariance, Products
from .exact import Exact, ExactRows, Problem, accumulated_fields
from .fields import reduced
from .spectral import EigenbasisCovariance, SpectralCovariance, products

ROUNDED_TO = 5e-3  # of q and h, at most, what float32 may have rounded: twice as much as of a width
DOUBLED_NUMBERS = 2**20  # products of so few numbers are in float64 straight away
FORMING_FLOPS = 250.0  # of a matrix product, while a number of a gradient is formed and projected: 5 to 8 ns


@register
@dataclass(frozen=True)
class RandomProjection(Engine):
    """h = (Sg)ᵀ(SJᵀJSᵀ + μI)⁻¹Sg, the μ < λ making up for what `dim` dimensions cannot keep apart; q = h + λ ∂h/∂λ.

    It holds 8·dim² bytes, up to twice that where n is below dim or not known beforehand, and three times at the end:
    neither S nor the rows of J ever exist as a whole, and for most layers their factors do. Equals `Exact()` where
    dim ≥ p.

    While tr H < dim there is little error on average over seeds, about 1 % of h, so dim should be above p*. With one
    seed h and q of a row unlike the training rows are off by about √(2/(dim − tr H²))·h, of others by less. Where λ is
    so small that tr H would exceed dim, the answers are those for the λ with tr H = dim, and `fit` warns.

    Args:
        dim: How many dimensions; from p on there is nothing to project.
        seed: Seed for S.
    """

    size_setting: ClassVar[str | None] = "dim"

    dim: int = 4000
    _: KW_ONLY
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", check_int(self.dim, "dim", 1, 2**31))
        object.__setattr__(self, "seed", check_int(self.seed, "seed", 0))

    def cost(self, problem: Problem) -> Cost:
        if self.dim >= problem.n_parameters:
            return Exact().cost(problem)
        dim = self.dim  # damped=False: the eigenvectors are needed in any case
        projected = replace(problem, n_parameters=dim, itemsize=8, factor_bytes=8 * dim, inner_flops=0.0, damped=False)
        inside = Exact().cost(replace(projected, recomputed=False))
        S = Projection(dim, problem.n_parameters, self.seed)
        numbers = (problem.n_rows or dim) * S.numbers(problem.factor_bytes / problem.itemsize, problem.positions)
        return Cost(inside.nbytes, FORMING_FLOPS * numbers + inside.flops, wants_rows=False)

    def start(self, known: Known = Known()) -> ProjectedRows:
        return ProjectedRows(self, expected_rows=known.n_rows or 0)

    def resized(self, size: int, share: float = 1.0) -> RandomProjection:
        return replace(self, dim=max(1, math.ceil(share * self.dim)))

    def resume(self, covariance: Covariance, n_rows: int, n_parameters: int) -> ProjectedRows:
        exact = covariance.exact if isinstance(covariance, ProjectedCovariance) else covariance
        return ProjectedRows(self, n_rows=n_rows, n_parameters=n_parameters, **accumulated_fields(exact))


@dataclass
class ProjectedRows(ExactRows):
    """The exact method on projected rows; on the rows themselves where there are no more parameters than dimensions."""

    engine: RandomProjection
    n_parameters: int = reduced("max", 0)  # not known before the first row

    def update(self, g: GradientBatch) -> None:
        self.n_parameters = g.n_parameters
        S = self._projection()
        for batch in [g] if S is None else _projected(g, S):
            super().update(batch)

    def check_mergeable(self, other: ProjectedRows) -> None:
        super().check_mergeable(other)
        p = {self.n_parameters, other.n_parameters} - {0}
        if len(p) > 1:
            raise ValueError(f"projections of different numbers of parameters cannot be merged: {min(p)} and {max(p)}")

    def is_sum(self, n_rows: int, n_parameters: int) -> bool:
        self.n_parameters = n_parameters
        return super().is_sum(n_rows, min(self.engine.dim, n_parameters))

    def finalise(self, damping: float | None) -> Covariance:
        S, full_rank = self._projection(), min(self.n_rows, self.n_parameters)
        if S is None:
            return super().finalise(damping)
        if damping == 0.0:  # what S leaves out cannot be distinguished from what J does not determine
            raise not_regular(f"the projection holds {S.dim} of {S.n_parameters} directions")
        exact = super().finalise(None).eigendecomposed()
        assert isinstance(exact, EigenbasisCovariance)
        return ProjectedCovariance(damping, exact.eigenvalues, S, exact, full_rank)

    def _projection(self) -> Projection | None:
        S = Projection(self.engine.dim, self.n_parameters, self.engine.seed)
        return S if S.dim < S.n_parameters else None


def _projected(g: GradientBatch, S: Projection) -> Iterator[GradientBatch]:
    """Yield gSᵀ, no more rows at a time than should be in memory at once; a `ForwardNetwork` has projected already."""
    done = g.n_parameters == S.dim
    return (batch if done else batch.projected(S) for batch in g.split(_rows_at_once(S)))


def _rows_at_once(S: Projection) -> int:
    return max(CHUNK_ROWS_AT_LEAST, CHUNK_BYTES // (8 * S.dim))


@dataclass(frozen=True, eq=False)
class ProjectedCovariance(SpectralCovariance):
    """In the eigenbasis of SJᵀJSᵀ, evaluated at Sg; each λ has its own μ. The error is not certified."""

    S: Projection
    exact: EigenbasisCovariance  # of the projected rows
    full_rank: int  # min(n, p)

    @property
    def effective_parameters(self) -> float:
        return float(min(self._equivalent().effective_parameters, self.full_rank))

    @property
    def resolves_damping(self) -> bool:
        return self._equivalent().reached

    @property
    def missed_parameters(self) -> float:
        """About the standard error of p* over seeds; all that there could be where λ is not resolved."""
        room, equivalent = self.full_rank - self.effective_parameters, self._equivalent()
        return min(equivalent.standard_error, room) if equivalent.reached else room

    def variances(self, g: GradientBatch, dampings: np.ndarray) -> np.ndarray:
        weights = [self._equivalent(damping).variance_weights for damping in dampings]
        return np.maximum(self._weighed(g, np.stack(weights, axis=1)), 0.0)  # a difference, noise where q is nothing

    def leverage(self, g: GradientBatch) -> np.ndarray:
        return self._weighed(g, self._equivalent().y)

    def leverage_and_variances(self, g: GradientBatch, dampings: np.ndarray) -> np.ndarray:
        weights = [self._equivalent().y, *(self._equivalent(damping).variance_weights for damping in dampings)]
        return np.maximum(self._weighed(g, np.stack(weights, axis=1)), 0.0)

    def across(self, other: GradientBatch, by: By = "variance") -> Products:
        """The same on projected rows; by "variance" a difference, as q is, so that far from all rows it is noise."""
        equivalent, m = self._equivalent(), len(self.eigenvalues)
        weights = equivalent.variance_weights if by == "variance" else equivalent.y
        projected = GradientBatch.concatenate(_projected(other, self.S))
        of = products(self.exact.projections, weights[:m], weights[m] if m < self.S.dim else None, projected)
        return lambda g: np.concatenate([of(batch) for batch in _projected(g, self.S)])

    def describe(self) -> str:
        return f"random projection of {self.S.n_parameters:,} to {self.S.dim:,} dimensions"

    @cached_property
    def _equivalents(self) -> dict[float, Equivalent]:  # by λ
        return {}

    def _equivalent(self, damping: float | None = None) -> Equivalent:
        at = float(self.chosen_damping if damping is None else damping)
        if at not in self._equivalents:
            self._equivalents[at] = Equivalent.of(self.eigenvalues, self.S.dim, at)
        return self._equivalents[at]

    def _weighed(self, g: GradientBatch, weights: np.ndarray) -> np.ndarray:  # (b,) or (b, ·)
        w, found, waiting = torch.from_numpy(weights.reshape(len(weights), -1)), [], []
        for batch in _projected(g, self.S):
            waiting.append(batch.rows())
            if sum(map(len, waiting)) >= _rows_at_once(self.S):  # not block by block: large products are faster
                found.append(self._weighed_rows(torch.cat(waiting), w))
                waiting = []
        found += [self._weighed_rows(torch.cat(waiting), w)] if waiting else []
        return torch.cat(found).cpu().numpy().reshape(-1, *weights.shape[1:])

    def _weighed_rows(self, rows: Tensor, weights: Tensor) -> Tensor:  # (b, r), (m, ·) -> (b, ·)
        """Return Σ z²w of projected rows s = Sg: where they are in float32 in that, but for rows where it could show.

        With s and w divided by ‖s‖ and max |w|, rounding moves z = v·s by at most η = √r·2⁻²⁴ (Higham & Mary 2019: but
        for a probability that is next to nothing), and the sum by at most η(3 Σ|z||w| + η Σ|w|).
        """
        weights = weights.to(rows.device)
        few = len(rows) * self.S.dim**2 <= DOUBLED_NUMBERS
        if few or rows.dtype != torch.float32 or len(self.eigenvalues) < self.S.dim:  # a rest is a small difference
            return self._squares(rows.double()) @ weights
        norms, largest = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)[:, None], weights.abs().amax(dim=0)
        eta = math.sqrt(self.S.dim) * 2**-24
        w = (weights / largest).float()
        z = (rows / norms.clamp(min=torch.finfo(torch.float64).tiny).float()) @ self.exact.basis(rows)
        found, sizes = z.square() @ w, w.abs()
        rounded = eta * (3 * (z.abs_() @ sizes) + eta * sizes.sum(dim=0))
        shows = ~(rounded <= ROUNDED_TO * found).all(dim=1)
        found = found.double() * norms.square() * largest
        if bool(shows.any()):
            found[shows] = self._squares(rows[shows].double()) @ weights
        return found

    def projections(self, g: GradientBatch) -> np.ndarray:  # (b, m), on the directions with ẽ > 0
        return np.concatenate([self.exact.projections(batch) for batch in _projected(g, self.S)])

    @property
    def inverses(self) -> np.ndarray:
        return self._equivalent().y[: len(self.eigenvalues)]

    def _squares(self, rows: Tensor) -> Tensor:  # (b, m), (b, m + 1) where m < r
        """Return z² of projected rows on the directions with ẽ > 0, and what is left on the others together."""
        z2 = (rows @ self.exact.basis(rows)).square_()
        if z2.shape[1] == self.S.dim:
            return z2
        rest = (rows.square().sum(dim=1) - z2.sum(dim=1)).clamp_(min=0)
        return torch.cat([z2, rest[:, None]], dim=1)


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
    reached: bool  # whether there is a μ ≥ 0 for this λ; otherwise all is for the smallest λ that has one

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
        # Cov(log det) for two λ is −2 log(1 − tr(HH')/r); differentiated by both it is that of tr H, at most
        # 2(t/f + t²/f²) = 2rt/f² with t = tr H² ≤ p*. Measured: a quarter of it, as H²(1 − H)² is below H².
        # Where gradients are outer products some bias is left, up to 1 % of p* where r is not much larger.
        standard_error = math.sqrt(2 * r * p_star) / f + 0.02 * p_star**2 / r
        variance_weights = (e - float(count @ (e * x**2)) / squares) * y * y
        return Equivalent(y, variance_weights, p_star, standard_error, reached=short > -1e-9 * damping)
