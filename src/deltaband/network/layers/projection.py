"""A random projection of gradients that takes each weight for a matrix, so that the factors of its gradient will do.

The column of the weight W[i, j] in S (r × p) has four entries ±1/2, at

    (aₖ(i) + cₗ(j)) mod r,    k, l = 1, 2,

with places a of the rows of W, places c of its columns, and a sign for each. So S of δ ⊗ x is the circular convolution
of a projection of δ with one of x (TensorSketch: Pham & Pagh 2013, "Fast and scalable polynomial kernels via explicit
feature maps"): in the frequency domain a product, which is summed over positions and layers and transformed back once.
Where there are many positions, the gradient is formed instead, some columns at a time, and S applied to that: the same
up to rounding. The column of an entry of a vector has four entries as well, one in each quarter of the rows of S.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...storage.encoding import storable
from .factors import DenseRows, EmbeddingRows, OuterProducts, Part

ENTRIES = 4  # of a column: one has six times the error of q and a bias, eight or sixteen gain nothing
COLUMNS_AT_ONCE = 10_000  # of gradients that are formed
NUMBERS_AT_ONCE = 2**19  # of gradients that are formed, or looked up
TRANSFORMED_AT_ONCE = 2**16  # numbers: within the cache, several times faster
REMEMBERED_PLACES = 2**14  # of an axis, at most
# of r·log₂ r, the time of two transforms and their product over that of one number which is formed and projected
TRANSFORM = 0.15


@storable
@dataclass(frozen=True)
class Projection:
    """S (r × p), of which there are only the places and signs of the rows and columns of each weight."""

    dim: int  # r
    n_parameters: int  # p
    seed: int

    def __call__(self, parts: Sequence[Part]) -> Tensor:  # (b, r) float64
        """Return gSᵀ, row by row, for gradients given part by part."""
        b, r, first = len(parts[0]), self.dim, 0
        formed, looked_up, frequencies = FormedColumns(r, b), None, None
        for part in parts:
            column = first
            for rows, columns in _shapes(part):
                weight = Weight(self, column, rows, columns)
                if isinstance(part, EmbeddingRows):
                    looked_up = torch.zeros(b, r, dtype=torch.float64, device="cpu") if looked_up is None else looked_up
                    weight.add_looked_up(part, looked_up)
                elif isinstance(part, OuterProducts) and column == first and weight.prefers_factors(part):
                    if frequencies is None:
                        frequencies = torch.zeros(b, r // 2 + 1, dtype=torch.complex128, device=part.delta.device)
                    weight.add_factors(part, frequencies)
                else:
                    weight.add_formed(part, column - first, formed)
                column += rows * columns
            first = column
        sums = [formed.projected(), looked_up, None if frequencies is None else torch.fft.irfft(frequencies, n=r).cpu()]
        return functools.reduce(torch.add, (each for each in sums if each is not None))

    def numbers(self, factors: float, positions: float) -> float:
        """Return how many numbers can be formed and projected in the time of a row: one of so many numbers in all its
        parts, of which those that are outer products have so many positions."""
        return min(factors + positions * TRANSFORM * self.dim * math.log2(self.dim + 1), self.n_parameters)


def _shapes(part: Part) -> tuple[tuple[int, int], ...]:
    """Return the shapes of the weights that a part belongs to, each as a matrix; a vector is a column."""
    if isinstance(part, DenseRows):
        return part.shapes or ((part.n_parameters, 1),)
    o = part.delta.shape[2]
    return ((part.size, o),) if isinstance(part, EmbeddingRows) else ((o, part.x.shape[2]), (o, 1))[: 1 + part.bias]


@dataclass(frozen=True)
class Weight:
    """The columns of S that belong to one weight, (rows, columns) as a matrix, the first of them with this number."""

    S: Projection
    first: int
    rows: int
    columns: int

    @property
    def only_axis(self) -> int | None:
        """The axis of a vector; None of a matrix."""
        return 0 if self.columns == 1 else 1 if self.rows == 1 else None

    @property
    def counts(self) -> tuple[int, int]:
        """How many places each row has, and each column."""
        of_axes = {None: (math.isqrt(ENTRIES), math.isqrt(ENTRIES)), 0: (ENTRIES, 1), 1: (1, ENTRIES)}[self.only_axis]
        return min(of_axes[0], self.S.dim), min(of_axes[1], self.S.dim)

    def places(self, axis: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:  # (stop − start, count) twice
        """Return the places and signs of some rows, or for axis 1 columns, of the weight."""
        size, count = (self.rows, self.columns)[axis], self.counts[axis]
        if self.only_axis not in (None, axis):
            return np.zeros((1, 1), dtype=np.int64), np.ones((1, 1))
        source = self.S.dim, self.S.seed, self.first, axis, count
        if size > REMEMBERED_PLACES:
            return _drawn(*source, start, stop)
        at, signs = _remembered(*source, size)
        return at[start:stop], signs[start:stop]

    def entries(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:  # (stop − start, ·) twice
        """Return where the entries of some columns of S are, counted from the weight's first, and what they are."""
        top, bottom = start // self.columns, (stop - 1) // self.columns
        left, right = (start % self.columns, (stop - 1) % self.columns + 1) if top == bottom else (0, self.columns)
        (at, signs), (at_, signs_) = self.places(0, top, bottom + 1), self.places(1, left, right)
        n_entries, skipped = at.shape[1] * at_.shape[1], start - top * self.columns - left
        at, at_ = at.astype(np.int32), at_.astype(np.int32)
        sums = (at[:, None, :, None] + at_[None, :, None, :]).reshape(-1, n_entries)[skipped:][: stop - start]
        products = (signs[:, None, :, None] * signs_[None, :, None, :]).reshape(-1, n_entries)[skipped:][: stop - start]
        return np.where(sums < self.S.dim, sums, sums - self.S.dim), products / math.sqrt(n_entries)

    def add_formed(self, part: Part, offset: int, formed: FormedColumns) -> None:
        """Form the gradient, some columns at a time; `offset` is the weight's first column in its part."""
        for start in range(0, self.rows * self.columns, formed.at_once):
            stop = min(start + formed.at_once, self.rows * self.columns)
            formed.add(part.columns(offset + start, offset + stop), *self.entries(start, stop))

    def prefers_factors(self, part: OuterProducts) -> bool:
        """Return whether to transform every position takes less time than to form the gradient."""
        t, r, numbers = part.delta.shape[1], self.S.dim, self.rows * self.columns
        return t * (TRANSFORM * r * math.log2(r + 1) + self.rows + self.columns) < numbers * (1 + 0.01 * t)

    def add_factors(self, part: OuterProducts, frequencies: Tensor) -> None:  # (b, r // 2 + 1)
        """Add the transform of S(Σₜ δₜ ⊗ xₜ)."""
        b, t, _ = part.delta.shape
        scale = math.sqrt(math.prod(self.counts))
        at_once = max(1, TRANSFORMED_AT_ONCE // self.S.dim)  # positions
        for start in range(0, b, step := max(1, at_once // max(t, 1))):
            some = part.take(slice(start, start + step))
            for position in range(0, t, at_once):
                here = slice(position, position + at_once)
                product = self._transformed(0, some.delta[:, here]) * self._transformed(1, some.x[:, here])
                frequencies[start : start + step] += product.sum(dim=1) / scale

    def _transformed(self, axis: int, values: Tensor) -> Tensor:  # (b, t, ·) -> (b, t, r // 2 + 1)
        at, signs = (torch.from_numpy(each).to(values.device) for each in self.places(axis, 0, values.shape[2]))
        flat = values.flatten(0, 1).double()
        hashed = flat.new_zeros(len(flat), self.S.dim)
        for k in range(at.shape[1]):
            hashed.index_add_(1, at[:, k], flat * signs[:, k])
        return torch.fft.rfft(hashed).unflatten(0, values.shape[:2])

    def add_looked_up(self, part: EmbeddingRows, projected: Tensor) -> None:
        """Add S of Σₜ δₜ in the row of the table that was looked up at t: of these rows alone."""
        (b, t, o), scale = part.delta.shape, math.sqrt(math.prod(self.counts))
        of_rows, of_columns = (map(torch.from_numpy, self.places(axis, 0, n)) for axis, n in enumerate((self.rows, o)))
        (at, signs), (at_, signs_) = of_rows, of_columns
        for start in range(0, b, step := max(1, NUMBERS_AT_ONCE // max(t * o, 1))):
            some = part.take(slice(start, start + step))
            index, delta = some.index.cpu(), some.delta.cpu().double() / scale
            for k, m in itertools.product(range(at.shape[1]), range(at_.shape[1])):
                where = (at[index, k][:, :, None] + at_[:, m]) % self.S.dim  # (·, t, o)
                values = delta * signs[index, k][:, :, None] * signs_[:, m]
                projected[start : start + step].scatter_add_(1, where.flatten(1), values.flatten(1))


class FormedColumns:
    """Columns of gradients and the matching ones of S, which are put together until there are enough to multiply."""

    def __init__(self, dim: int, b: int) -> None:
        self.at_once = max(1, min(COLUMNS_AT_ONCE, NUMBERS_AT_ONCE // max(b, 1)))
        self._waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._width, self._total = 0, np.zeros((dim, b))

    def add(self, columns: Tensor, at: np.ndarray, values: np.ndarray) -> None:  # (b, w), (w, entries) twice
        if self._width + len(at) > self.at_once:
            self._multiply()
        self._waiting.append((columns.cpu().numpy(), at, values))
        self._width += len(at)

    def projected(self) -> Tensor:  # (b, r)
        self._multiply()
        return torch.from_numpy(self._total.T)

    def _multiply(self) -> None:
        from scipy.sparse import csc_array

        if not self._waiting:
            return
        columns, at, values = zip(*self._waiting, strict=True)
        ends = np.cumsum(np.concatenate([[0], *(np.full(len(each), each.shape[1]) for each in at)]), dtype=np.int32)
        entries = (np.concatenate([each.ravel() for each in pieces]) for pieces in (values, at))
        S = csc_array((*entries, ends), shape=(len(self._total), self._width))
        self._total += S @ np.concatenate(columns, axis=1, dtype=np.float64).T
        self._waiting, self._width = [], 0


@functools.lru_cache(maxsize=1024)
def _remembered(dim: int, seed: int, first: int, axis: int, count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    return _drawn(dim, seed, first, axis, count, 0, size)


def _drawn(
    dim: int, seed: int, first: int, axis: int, count: int, start: int, stop: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draw places, one in each of `count` parts of the rows of S, and signs: the same whichever others are asked for.

    Each comes from a raw 64-bit word of a stream that NumPy never changes, the place from its lowest 31 bits.
    """
    stream = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(first, axis))).advance(start * count)
    words = stream.random_raw((stop - start, count)).view(np.int64)
    edges = dim * np.arange(count + 1, dtype=np.int64) // count
    at = edges[:-1] + ((words & 0x7FFFFFFF) * np.diff(edges) >> 31)
    return at, np.where(words < 0, -1.0, 1.0)
