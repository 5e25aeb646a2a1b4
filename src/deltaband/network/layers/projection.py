"""A random projection of gradients that takes each weight for a matrix, so that the factors of its gradient will do.

The column of the weight W[i, j] in S (r × p) has four entries ±1/2, at

    (aₖ(i) + cₗ(j)) mod r,    k, l = 1, 2,

with places a of the rows of W, places c of its columns, and a sign for each. So S of δ ⊗ x is the circular convolution
of a projection of δ with one of x (TensorSketch: Pham & Pagh 2013, "Fast and scalable polynomial kernels via explicit
feature maps"): in the frequency domain a product, which is summed over positions and layers and transformed back once.
Where there are many positions, the gradient is formed instead, some columns at a time, and S applied to that: the same
up to rounding. The column of an entry of a vector has four entries as well, one in each quarter of the rows of S.

All of it is computed where the gradients are, and in their precision: what that rounds off Sg is as small against ‖g‖
as what it has rounded off g. Long sums are in float64.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...storage.encoding import storable
from .factors import DenseRows, EmbeddingRows, OuterProducts, Part

ENTRIES = 4  # of a column: one has six times the error of q and a bias, eight or sixteen gain nothing
COLUMNS_AT_ONCE = 10_000  # of gradients that are formed
NUMBERS_AT_ONCE = 2**20  # of gradients that are formed, or looked up
TRANSFORMED_AT_ONCE = 2**18  # numbers: within the cache, faster
REMEMBERED_PLACES = 2**14  # of an axis, at most
ROWS_SIDE_BY_SIDE = 32  # from so many on they are added up a column at a time
# of r·log₂ r, the time of two transforms and their product over that of one number which is formed and projected
TRANSFORM = 0.15

Entries = tuple[Tensor, Tensor]  # of some columns of S: where they are and what they are, (count, ·) twice


@storable
@dataclass(frozen=True)
class Projection:
    """S (r × p), of which there are only the places and signs of the rows and columns of each weight."""

    dim: int  # r
    n_parameters: int  # p
    seed: int

    def __call__(self, parts: Sequence[Part]) -> Tensor:  # (b, r)
        """Return gSᵀ, row by row, for gradients given part by part, where they are and in their precision."""
        b, r, first = len(parts[0]), self.dim, 0
        factored: list[tuple[Weight, OuterProducts]] = []
        formed, sums = FormedColumns(r, b), []
        for part in parts:
            column = first
            for rows, columns in weight_shapes(part):
                weight = Weight(self, column, rows, columns)
                if isinstance(part, EmbeddingRows):
                    sums.append(weight.looked_up(part))
                elif isinstance(part, OuterProducts) and column == first and weight.prefers_factors(part):
                    factored.append((weight, part))
                else:
                    weight.add_formed(part, column - first, formed)
                column += rows * columns
            first = column
        sums += [self._convolved(factored)] if factored else []
        return functools.reduce(torch.add, sums + formed.projected())

    def row_blocks(self, weights: Sequence[Tensor], size: int, like: Tensor) -> Iterator[Tensor]:  # each (≤ size, p)
        """Yield the rows of S, so many at a time, for parameters that are these weights, in this order."""
        first, found = 0, []
        for w in weights:
            rows, columns = (len(w), w[0].numel()) if w.ndim > 1 else (w.numel(), 1)
            at, values = Weight(self, first, rows, columns).entries(0, rows * columns, like)
            column = torch.arange(first, first + rows * columns, device=at.device).repeat(len(at))
            found.append((at.reshape(-1), column, values.reshape(-1)))
            first += rows * columns
        at, column, values = (torch.cat(each) for each in zip(*found, strict=True))
        for start in range(0, self.dim, size):
            here = (at >= start) & (at < start + size)
            block = like.new_zeros(min(size, self.dim - start), self.n_parameters)
            yield block.index_put_((at[here] - start, column[here]), values[here], accumulate=True)

    def _convolved(self, factored: Sequence[tuple[Weight, OuterProducts]]) -> Tensor:  # (b, r)
        """Return the sum over weights of S(Σₜ δₜ ⊗ xₜ), some rows at a time: they stay in the cache."""
        b, positions = len(factored[0][1]), max(part.delta.shape[1] for _, part in factored)
        at_once = max(1, TRANSFORMED_AT_ONCE // self.dim)
        n_pieces = max(1, -(-b * positions // at_once))
        found = []
        for rows in np.array_split(np.arange(b), min(n_pieces, max(b, 1))):
            some = slice(int(rows[0]), int(rows[-1]) + 1) if len(rows) else slice(0)
            pieces = ((weight, part if n_pieces == 1 else part.take(some)) for weight, part in factored)
            transforms = (weight.transformed(part, at_once) for weight, part in pieces)
            found.append(torch.fft.irfft(functools.reduce(Tensor.add_, transforms), n=self.dim))
        return found[0] if len(found) == 1 else torch.cat(found)

    def numbers(self, factors: float, positions: float) -> float:
        """Return how many numbers can be formed and projected in the time of a row: one of so many numbers in all its
        parts, of which those that are outer products have so many positions."""
        return min(factors + positions * TRANSFORM * self.dim * math.log2(self.dim + 1), self.n_parameters)


def weight_shapes(part: Part) -> tuple[tuple[int, int], ...]:
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

    def places(self, axis: int, start: int, stop: int, like: Tensor) -> Entries:  # (count, stop − start) twice
        """Return the places and signs of some rows, or for axis 1 columns, of the weight; those of rows are scaled."""
        size, count = (self.rows, self.columns)[axis], self.counts[axis]
        if self.only_axis not in (None, axis):
            return like.new_zeros(1, 1, dtype=torch.int64), like.new_ones(1, 1)
        scale = 1.0 if axis == 1 and self.only_axis is None else 1 / math.sqrt(math.prod(self.counts))
        source = self.S.dim, self.S.seed, self.first, axis, count, like.device, like.dtype, scale
        if size > REMEMBERED_PLACES:
            return _drawn(*source, start, stop)
        at, signs = _remembered(*source, 0, size)
        return at[:, start:stop], signs[:, start:stop]

    def entries(self, start: int, stop: int, like: Tensor) -> Entries:  # (·, stop − start) twice
        """Return where the entries of some columns of S are, counted from the weight's first, and what they are."""
        if self.only_axis is not None:
            return self.places(self.only_axis, start, stop, like)
        top, bottom = start // self.columns, (stop - 1) // self.columns
        left, right = (start % self.columns, (stop - 1) % self.columns + 1) if top == bottom else (0, self.columns)
        (at, signs), (at_, signs_) = self.places(0, top, bottom + 1, like), self.places(1, left, right, like)
        skipped = start - top * self.columns - left
        some = slice(skipped, skipped + stop - start)
        sums = (at[:, None, :, None] + at_[None, :, None, :]).reshape(len(at) * len(at_), -1)[:, some]
        products = (signs[:, None, :, None] * signs_[None, :, None, :]).reshape(len(at) * len(at_), -1)[:, some]
        return torch.where(sums < self.S.dim, sums, sums - self.S.dim), products

    def add_formed(self, part: Part, offset: int, formed: FormedColumns) -> None:
        """Form the gradient, some columns at a time; `offset` is the weight's first column in its part."""
        for start in range(0, self.rows * self.columns, formed.at_once):
            stop = min(start + formed.at_once, self.rows * self.columns)
            columns = part.columns(offset + start, offset + stop)
            formed.add(columns, *self.entries(start, stop, columns))

    def prefers_factors(self, part: OuterProducts) -> bool:
        """Return whether to transform every position takes less time than to form the gradient."""
        t, r, numbers = part.delta.shape[1], self.S.dim, self.rows * self.columns
        return t * (TRANSFORM * r * math.log2(r + 1) + self.rows + self.columns) < numbers * (1 + 0.01 * t)

    def transformed(self, part: OuterProducts, at_once: int) -> Tensor:  # (b, r // 2 + 1)
        """Return the transform of S(Σₜ δₜ ⊗ xₜ), so many positions at a time."""
        products = []
        for start in range(0, part.delta.shape[1], at_once):
            here = slice(None), slice(start, start + at_once)
            product = self._transformed(0, part.delta[here]).mul_(self._transformed(1, part.x[here]))
            products.append(product[:, 0] if product.shape[1] == 1 else product.sum(dim=1))
        return functools.reduce(Tensor.add_, products)

    def _transformed(self, axis: int, values: Tensor) -> Tensor:  # (b, t, ·) -> (b, t, r // 2 + 1)
        at, signs = self.places(axis, 0, values.shape[2], values)
        flat = values.flatten(0, 1)
        signed = (flat[:, None] * signs).flatten(1)
        hashed = signed.new_zeros(len(flat), self.S.dim).scatter_add_(1, at.reshape(1, -1).expand_as(signed), signed)
        return torch.fft.rfft(hashed).unflatten(0, values.shape[:2])

    def looked_up(self, part: EmbeddingRows) -> Tensor:  # (b, r)
        """Return S of Σₜ δₜ in the row of the table that was looked up at t: of these rows alone."""
        b, t, o = part.delta.shape
        places = [zip(*self.places(axis, 0, n, part.delta), strict=True) for axis, n in enumerate((self.rows, o))]
        projected, pairs = part.delta.new_zeros(b, self.S.dim), list(itertools.product(*places))
        for start in range(0, b, step := max(1, NUMBERS_AT_ONCE // max(t * o, 1))):
            some = part.take(slice(start, start + step))
            for (at, signs), (at_, signs_) in pairs:
                where = (at[some.index][:, :, None] + at_) % self.S.dim  # (·, t, o)
                values = some.delta * signs[some.index][:, :, None] * signs_
                projected[start : start + step].scatter_add_(1, where.flatten(1), values.flatten(1))
        return projected


class FormedColumns:
    """Columns of gradients and the matching ones of S, which are put together until there are enough to multiply."""

    def __init__(self, dim: int, b: int) -> None:
        self.at_once = max(1, min(COLUMNS_AT_ONCE, NUMBERS_AT_ONCE // max(b, 1)))
        self._dim, self._width = dim, 0
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        self._sums: list[Tensor] = []  # one, in float64 from the second on

    def add(self, columns: Tensor, at: Tensor, values: Tensor) -> None:  # (b, w), (entries, w) twice
        if self._waiting and (self._width + columns.shape[1] > self.at_once or len(at) != len(self._waiting[0][1])):
            self._multiply()
        self._waiting.append((columns, at, values))
        self._width += columns.shape[1]

    def projected(self) -> list[Tensor]:  # (b, r)
        """Return the sum over all columns; nothing where there are none."""
        dtypes = [columns.dtype for columns, _, _ in self._waiting]
        if self._waiting:
            self._multiply()
        return [sums.to(dtypes[0]) for sums in self._sums]

    def _multiply(self) -> None:
        columns, places, values = (torch.cat(each, dim=1) for each in zip(*self._waiting, strict=True))
        if len(columns) < ROWS_SIDE_BY_SIDE:
            sums = columns.new_zeros(len(columns), self._dim)
            for at, signs in zip(places, values, strict=True):
                sums.index_add_(1, at, columns * signs)
        else:
            columns, by_place = columns.T.contiguous(), columns.new_zeros(self._dim, len(columns))
            for at, signs in zip(places, values, strict=True):
                by_place.index_add_(0, at, columns * signs[:, None])
            sums = by_place.T
        self._sums = [self._sums[0].double().add_(sums)] if self._sums else [sums]
        self._waiting, self._width = [], 0


def _drawn(
    dim: int,
    seed: int,
    first: int,
    axis: int,
    count: int,
    device: torch.device,
    dtype: torch.dtype,
    scale: float,
    start: int,
    stop: int,
) -> Entries:
    """Draw places, one in each of `count` parts of the rows of S, and signs: the same whichever others are asked for.

    Each comes from a raw 64-bit word of a stream that NumPy never changes, the place from its lowest 31 bits.
    """
    stream = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(first, axis))).advance(start * count)
    words = stream.random_raw((stop - start, count)).view(np.int64).T
    edges = dim * np.arange(count + 1, dtype=np.int64)[:, None] // count
    at = edges[:-1] + ((words & 0x7FFFFFFF) * np.diff(edges, axis=0) >> 31)
    signs = np.where(words < 0, -scale, scale)
    places = torch.from_numpy(np.ascontiguousarray(at)), torch.from_numpy(np.ascontiguousarray(signs)).to(dtype)
    return places[0].to(device), places[1].to(device)


_remembered = functools.lru_cache(maxsize=1024)(_drawn)
