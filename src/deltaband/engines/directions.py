"""Streaming low-rank sketches of J: Important Directions and its relatives.

Algorithms 1–3 of Fishkov & Panov. A buffer B of 2k rows takes the rows of J one after the other. When it is full it
is rotated onto its singular directions, k of them are kept, and each kept d² is lowered by δ², the smallest of them:

    JᵀJ ≈ BᵀB + λ'I,    λ' = Σ δ²/2 over all shrinks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, Self

import numpy as np
import torch

from ..errors import warn
from ..network.gradient_batch import CHUNK_BYTES, GradientBatch
from .base import Total
from .power_law_tail import Unheld, power_law
from .problem import Problem
from .sketched import SketchedCovariance, Totals

Score = Callable[[np.ndarray, float], np.ndarray]

# Singular values are read off the Gram matrix BBᵀ in float64: d² is known to about 1e-13 of the largest, so a d below
# 1e-6 of the largest cannot be told from zero.
ZERO = 1e-6
HARMLESS = 0.1  # of λ: rounding that matters
# rank="auto": "the smallest and largest singular values of the approximation differ by several orders" (the paper).
SEVERAL_ORDERS = 1e-3
SMALLEST_AUTO_RANK = 32
SQUARES = 4 * 4 * 8  # bytes of four (2k)² matrices, over k²


STATE = (
    *("_damping", "_expected_rows", "_k", "_filled", "_n_rows", "_energy"),
    *("_shift", "_lost", "_delta2", "_above", "_n_above"),
)


def importance(d: np.ndarray, damping: float) -> np.ndarray:
    """d²/(d²+λ)²: the eigenvalue of Σ⁻¹ that a singular value d of J stands for."""
    return d**2 / (d**2 + damping) ** 2


def magnitude(d: np.ndarray, damping: float) -> np.ndarray:
    """d itself."""
    return d


class _Directions:
    """One sketch for all three: they differ in the score that chooses what is kept, and in λ'."""

    needs_damping = False
    sample_size = 0
    seed = 0
    _robust = True
    _usual_tail = "none"

    def __init__(self, rank: int | Literal["auto"], score: Score, tail: str, compress: bool, memory: float) -> None:
        if not (isinstance(rank, str) and rank == "auto") and (
            isinstance(rank, bool) or not isinstance(rank, int | np.integer) or rank < 1
        ):
            raise ValueError(f"rank must be a positive whole number or 'auto', got {rank!r}")
        if not callable(score):
            raise TypeError(f"score must be a function of (singular values, damping), got {score!r}")
        if not isinstance(tail, str) or tail not in ("none", "estimate"):
            raise ValueError(f"tail must be 'none' or 'estimate', got {tail!r}")
        if not (isinstance(memory, int | float) and 0 < memory < np.inf):
            raise ValueError(f"memory must be a positive number of bytes, got {memory!r}")
        self.rank = rank
        self.score = score
        self.tail = tail
        self.compress = compress
        self.memory = memory
        self._reset(None, None)

    def start(
        self, *, n_rows: int | None = None, damping: float | None = None, sample: GradientBatch | None = None
    ) -> Self:
        fresh = copy.copy(self)
        fresh._reset(n_rows, damping)
        return fresh

    def _reset(self, n_rows: int | None, damping: float | None) -> None:
        self._damping = damping
        self._expected_rows = n_rows
        self._k = 0
        self._buffer: np.ndarray | None = None  # (2k, p), the first `_filled` rows in use
        self._filled = 0
        self._n_rows = 0
        self._energy = 0.0  # ‖J‖²_F
        self._shift = 0.0  # λ'
        self._lost = 0.0  # 0 ≤ JᵀJ − BᵀB ≤ _lost · I
        self._delta2 = 0.0  # the largest δ²
        self._above = 0.0  # energy let go along directions of d > δ, which the score did not choose
        self._n_above = 0  # how many such there were, in the shrink with most

    def wants_rows(self, problem: Problem) -> bool:
        return True

    def nbytes(self, problem: Problem) -> float:
        """The buffer of 2k rows and as much while it is rotated, and four (2k)² in float64."""
        k = self._planned_rank(problem.n_rows, problem.n_parameters, problem.itemsize)
        return 4.0 * k * problem.n_parameters * problem.itemsize + SQUARES * k**2

    def flops(self, problem: Problem) -> float:
        k = self._planned_rank(problem.n_rows, problem.n_parameters, problem.itemsize)
        return (problem.n_rows or problem.n_parameters) * (8.0 * k * problem.n_parameters + 80.0 * k**2)

    def limited(self, size: int, share: float = 1.0) -> Self:
        fewer = copy.copy(self)
        rank = (self._k or size) if self.rank == "auto" else int(self.rank)
        fewer.rank = max(1, min(math.ceil(share * rank), size // 2))
        fewer._reset(None, None)
        return fewer

    def update(self, gradients: GradientBatch) -> None:
        if self.needs_damping and self._damping is None:
            raise ValueError(f"{type(self).__name__} needs λ before the first row: call start(damping=...)")
        self._energy += float(gradients.squared_norms.sum())
        self._n_rows += len(gradients)
        for block in gradients.row_blocks():
            self._insert(block.cpu().numpy())

    def beside(self) -> Self:
        return self.start(n_rows=self._expected_rows, damping=self._damping)

    def resumed(self, covariance: SketchedCovariance, n_rows: int, n_parameters: int) -> Self:
        totals, directions = covariance.totals, covariance.directions.cpu().numpy()
        resumed = self.start(damping=covariance.damping)
        resumed._k, resumed._n_rows, resumed._filled = totals.rank, n_rows, len(directions)
        resumed._buffer = np.zeros((2 * totals.rank, n_parameters), dtype=directions.dtype)
        resumed._buffer[: len(directions)] = np.sqrt(covariance.squared)[:, None] * directions
        resumed._energy, resumed._shift, resumed._lost = totals.energy, totals.shift, totals.lost
        resumed._delta2, resumed._above, resumed._n_above = totals.delta2, totals.above, totals.n_above
        return resumed

    def merge(self, other: Self) -> None:
        if self.needs_damping and self._damping != other._damping:
            raise ValueError(f"sketches made with different λ cannot be merged: {self._damping} and {other._damping}")
        if self.tail != other.tail:
            raise ValueError(f"sketches of different tail cannot be merged: {self.tail!r} and {other.tail!r}")
        self._energy += other._energy
        self._n_rows += other._n_rows
        self._shift += other._shift
        self._lost += other._lost
        self._delta2 = max(self._delta2, other._delta2)
        self._above += other._above
        self._n_above = max(self._n_above, other._n_above)
        if other._buffer is not None:
            self._insert(other._buffer[: other._filled])

    def add_up(self, total: Total, n_rows: int, n_parameters: int) -> bool:
        return False

    def state(self) -> dict[str, Any]:
        buffer = None if self._buffer is None else self._buffer[: self._filled]
        return {name: getattr(self, name) for name in STATE} | {"_buffer": buffer}

    def from_state(self, state: dict[str, Any]) -> Self:
        made = self.start()
        vars(made).update(state)
        if (filled := made._buffer) is not None:
            made._buffer = np.zeros((2 * made._k, filled.shape[1]), dtype=filled.dtype)
            made._buffer[: made._filled] = filled
        return made

    def finalise(self, damping: float | None) -> SketchedCovariance:
        if self.needs_damping and damping != self._damping:
            raise ValueError(f"the sketch was made with λ = {self._damping}, not with {damping}")
        if self._buffer is None:
            raise ValueError("no rows were given")
        p = self._buffer.shape[1]
        full = min(self._n_rows, p)
        if self.rank != "auto" and self.rank > full:
            warn(f"rank={self.rank} is larger than min(n, p) = {full}: it leaves nothing out, and Exact() is cheaper")
        if self.compress:
            self._shrink(may_grow=False)
        U, d = _left_singular(self._buffer[: self._filled])
        rounding = ZERO**2 * float(d[0]) ** 2 if 0 < len(d) < full else 0.0
        if damping is not None and rounding > HARMLESS * damping:  # directions that may be there and cannot be seen
            self._lost += rounding
        shift = self._shift if self._robust else 0.0
        spread = self.tail == "estimate" and self._shift > 0
        if damping == 0.0 and len(d) < p and (shift == 0.0 or (spread and self._n_rows <= p)):
            raise ValueError(
                f"damping 0 needs a regular JᵀJ, but the sketch holds {len(d)} of {p} directions: "
                "give a positive damping or weight_decay"
            )
        covariance = SketchedCovariance(
            directions=torch.from_numpy(_rotate_in_float64((U / d).T, self._buffer[: self._filled])),
            squared=d**2,
            shift=shift,
            damping=damping,
            name=f"{type(self).__name__}, rank {min(self._k, full):,} ({len(d):,} directions held){self._named_tail}",
            totals=Totals(
                self._k, self._energy, self._shift, self._lost, self._delta2, float(self._above), self._n_above
            ),
            full_rank=full,
            spread=self._spread(d**2, full) if spread else None,
        )
        self._reset(self._expected_rows, self._damping)
        return covariance

    def __repr__(self) -> str:
        compress = ", compress=True" if self.compress else ""
        return f"{type(self).__name__}(rank={self.rank!r}{compress}{self._named_tail})"

    @property
    def _named_tail(self) -> str:
        return "" if self.tail == self._usual_tail else f", tail={self.tail!r}"

    def _spread(self, squared: np.ndarray, full: int) -> tuple[np.ndarray, Unheld | None]:  # (r,)
        """What each held direction gets back, and the eigenvalues along all others: ‖J‖²_F − Σd² in all.

        A shrink takes δ² from each of k directions, so the k largest get Σδ² back. After them JᵀJ goes on as a power
        law: its k-th eigenvalue is at least the largest δ² (Weyl) and about Σδ² at most, so take the middle. Directions
        of d > δ that were let go come back equally large, as unheld ones; as the largest held ones where all are held.
        """
        r, k = len(squared), min(self._k, len(squared))
        missed = max(self._energy - float(squared.sum()), 0.0)
        above = min(self._above, missed)
        n_above, unheld_above = self._n_above, min(self._n_above, full - r)
        back = min(2 * self._shift, (missed - above) / max(k, 1))
        middle = (self._delta2 + 2 * self._shift) / 2
        rest = power_law(missed - above - k * back, full - k - unheld_above, middle, after=max(k, 1))
        added = np.concatenate([np.full(k, back), rest[: r - k]])
        added[: n_above - unheld_above] += above / max(n_above, 1)
        e = np.concatenate([np.full(unheld_above, above / max(n_above, 1)), rest[r - k :]])
        e = e[e > 0]
        return added, Unheld(e, self._n_rows - r) if len(e) else None

    def _insert(self, block: np.ndarray) -> None:  # (b, p)
        if self._buffer is None:
            self._k = self._starting_rank(block)
            self._buffer = np.zeros((2 * self._k, block.shape[1]), dtype=block.dtype)
        taken = 0
        while taken < len(block):
            fits = min(len(self._buffer) - self._filled, len(block) - taken)
            self._buffer[self._filled : self._filled + fits] = block[taken : taken + fits]
            self._filled += fits
            taken += fits
            if self._filled == len(self._buffer):
                self._shrink()

    def _shrink(self, may_grow: bool = True) -> None:
        """Lines 4–9 of Algorithm 1, or a larger buffer where the rank is automatic and the spectrum has not decayed."""
        assert self._buffer is not None
        B = self._buffer[: self._filled]
        U, d = _left_singular(B)
        if len(d) < self._k:
            kept, scale = np.arange(len(d)), np.ones(len(d))
        elif may_grow and self._grow(d):
            return
        else:
            scores = np.asarray(self.score(d.copy(), 0.0 if self._damping is None else self._damping))
            if scores.shape != d.shape or scores.dtype.kind not in "fiub" or not np.isfinite(scores).all():
                raise ValueError("score must return one finite number for each singular value")
            scores = scores.astype(np.float64)
            order = np.argsort(-scores, kind="stable")
            kept, dropped = order[: self._k], order[self._k :]
            delta = d[kept].min()
            scale = np.sqrt(np.maximum(d[kept] ** 2 - delta**2, 0.0)) / d[kept]
            self._shift += delta**2 / 2
            self._lost += max(delta, d[dropped].max(initial=0.0)) ** 2
            above = d[dropped][d[dropped] > delta]
            self._delta2 = max(self._delta2, delta**2)
            self._above += (above**2).sum()
            self._n_above = max(self._n_above, len(above))
        kept, scale = kept[scale > 0], scale[scale > 0]
        self._buffer[: len(kept)] = _rotate((U[:, kept] * scale).T, B)
        self._filled = len(kept)

    def _planned_rank(self, n: int | None, p: int, itemsize: int) -> int:
        """The rank, or the largest that `memory` allows where it is automatic.

        Beyond min(n, p) it would only waste memory: one more than that never shrinks, and so is exact.
        """
        rank = self.rank
        if rank == "auto":
            linear = 4 * p * itemsize
            rank = max(1, int((np.sqrt(linear**2 + 4 * SQUARES * self.memory) - linear) / (2 * SQUARES)))
        return min(int(rank), min(n or p, p) + 1)

    def _starting_rank(self, block: np.ndarray) -> int:
        k = self._planned_rank(self._expected_rows, block.shape[1], block.itemsize)
        return min(SMALLEST_AUTO_RANK, k) if self.rank == "auto" else k

    def _grow(self, d: np.ndarray) -> bool:
        assert self._buffer is not None
        if self.rank != "auto" or d[self._k - 1] <= SEVERAL_ORDERS * d[0]:
            return False
        most = self._planned_rank(self._expected_rows, self._buffer.shape[1], self._buffer.itemsize)
        k = min(2 * self._k, most)
        if k == self._k:
            return False
        more = np.zeros((2 * (k - self._k), self._buffer.shape[1]), dtype=self._buffer.dtype)
        self._buffer = np.concatenate([self._buffer, more])
        self._k = k
        return True


class ImportantDirections(_Directions):
    """Robust Important Directions: keeps the directions of highest `score(d, λ)`, by default d²/(d²+λ)².

    `score` takes the singular values (r,) and λ and returns a number for each; the highest are kept.
    `compress=True` shrinks once more at the end, to at most `rank` directions, as the authors' code does; the
    algorithms as printed keep up to 2·rank − 1. `rank="auto"` doubles the rank while the kept singular values span
    less than three orders of magnitude and the sketch stays within `memory` bytes.

    `tail="estimate"` puts an estimate from the energy of J that the sketch misses in place of λ'. It mends p*; q only
    where the rank is large enough: where the score lets the largest directions go, the sketch meets them again with too
    small a d, and q stays too large.
    """

    needs_damping = True

    def __init__(
        self,
        rank: int | Literal["auto"] = "auto",
        *,
        score: Score = importance,
        tail: Literal["none", "estimate"] = "none",
        compress: bool = False,
        memory: float = 2**30,
    ) -> None:
        super().__init__(rank, score, tail, compress, memory)


class RobustFrequentDirections(_Directions):
    """Robust Frequent Directions: keeps the largest singular values. `rank`, `compress`: as `ImportantDirections`.

    `tail="estimate"` puts an estimate from the energy of J that the sketch misses in the place of λ': on networks the
    error of the widths was a half to a sixth. Rows far outside the data get too large a q rather than too small a one,
    and where p* comes near n widths explode with any error of it: calibrate there.
    `tail="none"` is the algorithm as published, to the letter.
    """

    _usual_tail = "estimate"

    def __init__(
        self,
        rank: int | Literal["auto"] = "auto",
        *,
        tail: Literal["none", "estimate"] = "estimate",
        compress: bool = False,
        memory: float = 2**30,
    ) -> None:
        super().__init__(rank, magnitude, tail, compress, memory)


class FrequentDirections(_Directions):
    """Frequent Directions: as `RobustFrequentDirections`, without λ'. Then 0 ≤ JᵀJ − BᵀB ≤ `error_bound`·I."""

    _robust = False

    def __init__(self, rank: int | Literal["auto"] = "auto", *, compress: bool = False, memory: float = 2**30) -> None:
        super().__init__(rank, magnitude, "none", compress, memory)


# All of a shrink is done by SciPy's BLAS: where two libraries take turns, their threads wait for each other.


def _left_singular(B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """U (m, r) and the r non-zero singular values of B (m, p), largest first, through BBᵀ in float64."""
    from . import gram as cholesky

    if len(B) == 0:
        return np.zeros((0, 0)), np.zeros(0)
    C = cholesky.empty(len(B))
    for _, columns in _in_float64(B):
        cholesky.add_outer_gram(C, columns)
    squared, U = cholesky.eigh(C)
    r = int((squared > ZERO**2 * squared[0]).sum())
    return U[:, :r], np.sqrt(squared[:r])


def _rotate(R: np.ndarray, B: np.ndarray) -> np.ndarray:  # (r, m), (m, p) -> (r, p)
    from scipy.linalg.blas import dgemm, sgemm

    gemm = dgemm if B.dtype == np.float64 else sgemm
    return gemm(1.0, B.T, np.asarray(R.T, dtype=B.dtype, order="F")).T


def _rotate_in_float64(R: np.ndarray, B: np.ndarray) -> np.ndarray:
    """As `_rotate`, rounded only at the end, so that directions of small singular values stay orthogonal."""
    result = np.empty((len(R), B.shape[1]), dtype=B.dtype)
    for where, columns in _in_float64(B):
        result[:, where] = R @ columns
    return result


def _in_float64(B: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """B in float64, some columns at a time."""
    width = max(1, CHUNK_BYTES // (8 * max(len(B), 1)))
    for start in range(0, B.shape[1], width):
        yield slice(start, start + width), B[:, start : start + width].astype(np.float64, order="C")
