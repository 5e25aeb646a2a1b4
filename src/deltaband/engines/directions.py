"""Streaming low-rank sketches of J: Important Directions and its relatives.

Algorithms 1–3 of Fishkov & Panov. A buffer B of 2k rows takes the rows of J one after the other. When it is full it
is rotated onto its singular directions, k of them are kept, and each kept d² is lowered by δ², the smallest of them:

    JᵀJ ≈ BᵀB + λ'I,    λ' = Σ δ²/2 over all shrinks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch

from ..errors import not_regular, warn
from ..network.gradient_batch import CHUNK_BYTES, GradientBatch
from ..storage.encoding import storable
from ..validation import check_choice, check_int, check_memory
from .base import Accumulator, Cost, Engine, Known, register
from .exact import Exact, Problem
from .fields import concatenated, private, reduced, shared
from .spectral import EigenbasisCovariance, PowerLawTail, SketchedCovariance, eigh, power_law

Score = Callable[[np.ndarray, float], np.ndarray]

# Singular values are read off BBᵀ in float64: d² is known to about 1e-13 of the largest, so a d below this is zero.
RELATIVE_ZERO = 1e-6
RELEVANT_ROUNDING = 0.1  # of λ
# rank="auto": "the smallest and largest singular values of the approximation differ by several orders" (the paper).
SEVERAL_ORDERS = 1e-3
SMALLEST_AUTO_RANK = 32
SQUARES_BYTES = 4 * 4 * 8  # of four (2k)² matrices, over k²


@storable
def importance(d: np.ndarray, damping: float) -> np.ndarray:
    """Return d²/(d²+λ)²: the eigenvalue of Σ⁻¹ that a singular value d of J stands for."""
    return d**2 / (d**2 + damping) ** 2


@storable
def magnitude(d: np.ndarray, damping: float) -> np.ndarray:
    """Return d itself."""
    return d


@dataclass(frozen=True)
class Directions(Engine):
    """One sketch for all three: they differ in the score that chooses what is kept, and in λ'."""

    size_setting: ClassVar[str | None] = "rank"
    adds_shift: ClassVar[bool] = True  # whether λ' is part of the answer
    tail = "none"  # a setting of some, as is the score

    rank: int | Literal["auto"] = "auto"
    _: KW_ONLY
    compress: bool = False
    memory: float = field(default=2**30, repr=False)

    def __post_init__(self) -> None:
        if not (isinstance(self.rank, str) and self.rank == "auto"):
            check_int(self.rank, "rank must be 'auto', or it")
        if not callable(self.score):
            raise TypeError(f"score must be a function of (singular values, damping), got {self.score!r}")
        check_choice(self.tail, "tail", ("none", "estimate"))
        check_memory(self.memory)

    @property
    def score(self) -> Score:
        return magnitude

    def cost(self, problem: Problem) -> Cost:
        """The buffer of 2k rows and as much while it is rotated, and four (2k)² in float64."""
        n, p = problem.n_rows, problem.n_parameters
        k = self.planned_rank(n, p, problem.itemsize)
        if n is not None and n < min(2 * k, p) and self.rank != "auto" and not self.compress:  # nothing is shrunk
            return Exact().cost(replace(problem, damped=False))
        flops_of_a_row = (8.0 * k + 150.0) * p + 80.0 * k**2  # 150: memory, which takes longer where k is small
        return Cost(4.0 * k * p * problem.itemsize + SQUARES_BYTES * k**2, (n or p) * flops_of_a_row)

    def start(self, known: Known = Known()) -> DirectionsSketch:
        return DirectionsSketch(self, damping=known.damping, expected_rows=known.n_rows)

    def resized(self, size: int, share: float = 1.0) -> Directions:
        rank = size if self.rank == "auto" else int(self.rank)
        return replace(self, rank=max(1, min(math.ceil(share * rank), size // 2)))

    def resume(self, covariance: Any, n_rows: int, n_parameters: int) -> DirectionsSketch:
        sums = {**(covariance.accumulated or {}), "damping": covariance.damping, "expected_rows": None}
        if isinstance(covariance, EigenbasisCovariance):
            return DirectionsSketch(self, kept=[] if covariance.J is None else [covariance.J], **sums)
        directions = covariance.directions.cpu().numpy()
        rows = np.asarray(np.sqrt(covariance.squared)[:, None] * directions, dtype=directions.dtype)
        return DirectionsSketch(self, buffer=rows, **sums)

    def planned_rank(self, n: int | None, p: int, itemsize: int) -> int:
        """Return the rank, or the largest that `memory` allows; one more than min(n, p) never shrinks and is exact."""
        rank = self.rank
        if rank == "auto":
            linear = 4 * p * itemsize
            root = np.sqrt(linear**2 + 4 * SQUARES_BYTES * self.memory)
            rank = max(1, int((root - linear) / (2 * SQUARES_BYTES)))
        return min(int(rank), min(n or p, p) + 1)


@register
@dataclass(frozen=True)
class RobustFrequentDirections(Directions):
    """Robust Frequent Directions: keeps the largest singular values.

    Args:
        rank, compress, memory: As in `ImportantDirections`.
        tail: "estimate" replaces λ' by an estimate from the energy of J that the sketch misses: on networks the error
            of the widths was a half to a sixth. Rows far outside the data get too large a q rather than too small a
            one; where p* comes near n, calibrate. "none" is the algorithm as published, to the letter.
    """

    tail: Literal["none", "estimate"] = field(default="estimate", kw_only=True)


@register
@dataclass(frozen=True)
class ImportantDirections(Directions):
    """Robust Important Directions: keeps those of the highest score, by default d²/(d²+λ)².

    Args:
        rank: How many; "auto" doubles the rank while the kept singular values span less than three orders of magnitude
            and the sketch stays within `memory` bytes.
        compress: Whether to shrink once more at the end, to at most `rank` directions, as the authors' code does; the
            algorithms as printed keep up to 2·rank − 1.
        memory: Bytes for `rank="auto"`.
        score: A function of the singular values d and of λ that returns a number for each d.
        tail: "estimate" replaces λ' by an estimate from the energy of J that the sketch misses. It corrects p*; q only
            at a large enough rank: where the score drops the largest directions, the sketch meets them again with too
            small a d.
    """

    needs_damping: ClassVar[bool] = True

    score: Score = field(default=importance, kw_only=True, repr=False)
    tail: Literal["none", "estimate"] = field(default="none", kw_only=True)


@register
@dataclass(frozen=True)
class FrequentDirections(Directions):
    """Frequent Directions: as `RobustFrequentDirections`, without λ'. Then 0 ≤ JᵀJ − BᵀB ≤ `error_bound`·I.

    Args:
        rank, compress, memory: As in `ImportantDirections`.
    """

    is_planned: ClassVar[bool] = False
    adds_shift: ClassVar[bool] = False


@dataclass
class DirectionsSketch(Accumulator):
    """The buffer B, and what the shrinks have lost; fewer than 2k rows are kept as they come, and end exact."""

    engine: Directions
    damping: float | None = shared(check=False)
    expected_rows: int | None = shared(check=False)
    kept: list[GradientBatch] = concatenated()
    k: int = private(0)  # the rank, once there is a row
    buffer: np.ndarray | None = private()  # (2k, p), the first `filled` rows in use
    filled: int = field(default=0, init=False)
    n_rows: int = reduced("sum", 0)
    energy: float = reduced("sum", 0.0)  # ‖J‖²_F
    shift: float = reduced("sum", 0.0)  # λ'
    lost: float = reduced("sum", 0.0)  # 0 ≤ JᵀJ − BᵀB ≤ lost · I
    delta2: float = reduced("max", 0.0)  # the largest δ²
    above: float = reduced("sum", 0.0)  # energy dropped along directions of d > δ, which the score did not choose
    n_above: int = reduced("max", 0)  # how many such there were, in the shrink with most

    def __post_init__(self) -> None:
        if (rows := self.buffer) is not None:  # of a state, the rows in use
            self.buffer = np.zeros((2 * self.k, rows.shape[1]), dtype=rows.dtype)
            self.buffer[: len(rows)] = rows
            self.filled = len(rows)

    def update(self, g: GradientBatch) -> None:
        if self.engine.needs_damping and self.damping is None:
            raise ValueError(f"{self.engine!r} needs λ before the first row: call start(Known(damping=...))")
        self.energy += float(g.squared_norms.sum())
        self.n_rows += len(g)
        self.kept.append(g)
        self._insert_kept(if_many=True)

    def check_mergeable(self, other: Self) -> None:
        if self.engine.needs_damping and self.damping != other.damping:
            raise ValueError(f"sketches made with different λ cannot be merged: {self.damping} and {other.damping}")
        if (mine := self.engine.tail) != (theirs := other.engine.tail):
            raise ValueError(f"sketches of different tail cannot be merged: {mine!r} and {theirs!r}")

    def merge(self, other: Self) -> None:
        super().merge(other)
        self._insert_kept(if_many=other.buffer is None)
        if other.buffer is not None:
            self._insert(other.buffer[: other.filled])

    def state(self) -> dict[str, Any]:
        return super().state() | {"buffer": None if self.buffer is None else self.buffer[: self.filled]}

    def sized_engine(self, size: int) -> Engine:
        automatic = self.engine.rank == "auto" and self.k
        return (replace(self.engine, rank=self.k) if automatic else self.engine).resized(size)

    def finalise(self, damping: float | None) -> SketchedCovariance | EigenbasisCovariance:
        if self.engine.needs_damping and damping != self.damping:
            raise ValueError(f"the sketch was made with λ = {self.damping}, not with {damping}")
        if self.buffer is None and not self.kept:
            raise ValueError("no rows were given")
        engine, p = self.engine, self.kept[0].n_parameters if self.buffer is None else self.buffer.shape[1]
        full = min(self.n_rows, p)
        if engine.rank != "auto" and engine.rank > full:
            warn(f"rank={engine.rank} is larger than min(n, p) = {full}: it leaves nothing out, and Exact() is cheaper")
        if self.buffer is None and not (engine.compress and self.n_rows >= self.k):
            return self._unshrunk(damping, p)
        self._insert_kept()
        if engine.compress:
            self._shrink(may_grow=False)
        assert self.buffer is not None
        B = GradientBatch.of(torch.from_numpy(self.buffer[: self.filled]))
        U, d = _left_singular(B)
        rounding = RELATIVE_ZERO**2 * float(d[0]) ** 2 if 0 < len(d) < full else 0.0
        if damping is not None and rounding > RELEVANT_ROUNDING * damping:  # directions that may exist, below rounding
            self.lost += rounding
        shift = self.shift if engine.adds_shift else 0.0
        estimated = engine.tail == "estimate" and self.shift > 0
        if damping == 0.0 and len(d) < p and (shift == 0.0 or (estimated and self.n_rows <= p)):
            raise not_regular(f"the sketch holds {len(d)} of {p} directions")
        added, tail = self._estimated_tail(d**2, full) if estimated else (None, None)
        directions, stop = np.empty((len(d), p), dtype=self.buffer.dtype), 0
        for columns in B.columns(width=max(1, CHUNK_BYTES // (8 * max(len(B), 1)))):
            start, stop = stop, stop + columns.shape[1]
            directions[:, start:stop] = (U / d).T @ columns  # rounded here: directions of small d stay orthogonal
        named_tail = f", tail={engine.tail!r}" if "tail=" in repr(engine) else ""
        name = f"{type(engine).__name__}, rank {min(self.k, full):,} ({len(d):,} directions held){named_tail}"
        e, floor = (d**2 + shift, shift) if added is None else (d**2 + added, 0.0)
        sketch = (torch.from_numpy(directions), d**2, name, self.energy, self.lost, full, added)
        numbers = self.numbers()
        self.clear()
        return SketchedCovariance(damping, e, *sketch, floor=floor, added_tail=tail, accumulated=numbers)

    def _unshrunk(self, damping: float | None, p: int) -> EigenbasisCovariance:
        J, numbers = GradientBatch.concatenate(self.kept), self.numbers()
        covariance = replace(EigenbasisCovariance.of(J.kernel(), damping, J), accumulated=numbers)
        if damping == 0.0 and (held := len(covariance.eigenvalues)) < p:
            raise not_regular(f"the sketch holds {held} of {p} directions")
        self.clear()
        return covariance

    def _estimated_tail(self, squared: np.ndarray, full: int) -> tuple[np.ndarray, PowerLawTail | None]:  # (r,)
        """Return what each held direction gets back, and the eigenvalues along all others: ‖J‖²_F − Σd² in all.

        A shrink takes δ² from each of k directions, so the k largest get Σδ² back. After them JᵀJ goes on as a power
        law: its k-th eigenvalue is at least the largest δ² (Weyl) and about Σδ² at most, so take the middle. Directions
        of d > δ that were dropped come back equally large, as unheld ones; as the largest held ones where all are held.
        """
        r, k = len(squared), min(self.k, len(squared))
        missed = max(self.energy - float(squared.sum()), 0.0)
        above, n_above, unheld_above = min(self.above, missed), self.n_above, min(self.n_above, full - r)
        each_above = above / max(n_above, 1)
        back = min(2 * self.shift, (missed - above) / max(k, 1))
        middle = (self.delta2 + 2 * self.shift) / 2
        rest = power_law(missed - above - k * back, full - k - unheld_above, middle, after=max(k, 1))
        added = np.concatenate([np.full(k, back), rest[: r - k]])
        added[: n_above - unheld_above] += each_above
        e = np.concatenate([np.full(unheld_above, each_above), rest[r - k :]])
        e = e[e > 0]
        return added, PowerLawTail(e, self.n_rows - r) if len(e) else None

    def _rank(self, p: int, itemsize: int = 8) -> int:
        if self.buffer is None:
            k = self.engine.planned_rank(self.expected_rows, p, itemsize)
            self.k = min(SMALLEST_AUTO_RANK, k) if self.engine.rank == "auto" else k
        return self.k

    def _insert_kept(self, if_many: bool = False) -> None:
        """Put the rows that are kept into the buffer; `if_many`, only if there is one or they fill it."""
        n = sum(map(len, self.kept))
        if n and if_many and self.buffer is None and n < 2 * self._rank(self.kept[0].n_parameters):
            return
        for block in (block for g in self.kept for block in g.row_blocks()):
            self._insert(block.cpu().numpy())
        self.kept = []

    def _insert(self, block: np.ndarray) -> None:  # (b, p)
        if self.buffer is None:
            self.buffer = np.zeros((2 * self._rank(block.shape[1], block.itemsize), block.shape[1]), dtype=block.dtype)
        while len(block):
            fitting = block[: len(self.buffer) - self.filled]
            self.buffer[self.filled : self.filled + len(fitting)] = fitting
            self.filled += len(fitting)
            block = block[len(fitting) :]
            if self.filled == len(self.buffer):
                self._shrink()

    def _shrink(self, may_grow: bool = True) -> None:
        """Lines 4–9 of Algorithm 1, or a larger buffer where the rank is automatic and the spectrum has not decayed."""
        from scipy.linalg.blas import dgemm, sgemm

        assert self.buffer is not None
        B = self.buffer[: self.filled]
        U, d = _left_singular(GradientBatch.of(torch.from_numpy(B)))
        if len(d) < self.k:
            kept, scale = np.arange(len(d)), np.ones(len(d))
        elif may_grow and self._grow(d):
            return
        else:
            scores = np.asarray(self.engine.score(d.copy(), 0.0 if self.damping is None else self.damping))
            if scores.shape != d.shape or scores.dtype.kind not in "fiub" or not np.isfinite(scores).all():
                raise ValueError("score must return one finite number for each singular value")
            order = np.argsort(-scores.astype(np.float64), kind="stable")
            kept, dropped = order[: self.k], d[order[self.k :]]
            squared, delta = np.square(d[kept]), float(d[kept].min())
            delta2 = float(squared.min())  # of the same squares: the row that gives δ becomes exactly zero
            scale = np.sqrt(squared - delta2) / d[kept]
            self.shift += delta2 / 2
            self.lost += max(delta2, float(dropped.max(initial=0.0)) ** 2)
            self.delta2 = max(self.delta2, delta2)
            self.above += float((dropped[dropped > delta] ** 2).sum())
            self.n_above = max(self.n_above, int((dropped > delta).sum()))
        kept, scale = kept[scale > 0], scale[scale > 0]
        # All of a shrink is done by SciPy's BLAS: where two libraries take turns, their threads wait for each other.
        gemm = dgemm if B.dtype == np.float64 else sgemm
        self.buffer[: len(kept)] = gemm(1.0, B.T, np.asarray(U[:, kept] * scale, dtype=B.dtype, order="F")).T
        self.filled = len(kept)

    def _grow(self, d: np.ndarray) -> bool:
        assert self.buffer is not None
        if self.engine.rank != "auto" or d[self.k - 1] <= SEVERAL_ORDERS * d[0]:
            return False
        p, before = self.buffer.shape[1], self.k
        self.k = min(2 * before, self.engine.planned_rank(self.expected_rows, p, self.buffer.itemsize))
        if self.k > before:
            self.buffer = np.concatenate([self.buffer, np.zeros((2 * (self.k - before), p), dtype=self.buffer.dtype)])
        return self.k > before


def _left_singular(B: GradientBatch) -> tuple[np.ndarray, np.ndarray]:
    """Return U (m, r) and the r non-zero singular values of B (m, p), largest first, through BBᵀ in float64."""
    squared, U = eigh(B.kernel()) if len(B) else (np.zeros(0), np.zeros((0, 0)))
    r = int((squared > RELATIVE_ZERO**2 * squared.max(initial=0.0)).sum())
    return U[:, :r], np.sqrt(squared[:r])
