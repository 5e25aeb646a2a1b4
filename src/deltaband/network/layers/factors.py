"""Gradients layer by layer: for most layers a row of J is a sum of outer products that need never be formed.

For y = Wx + b the gradient of one row's output is δ ⊗ [x, 1] with δ the gradient of the layer's output, and the inner
product of two such rows is (δ·δ')(x·x' + 1). With several positions t in a row (sequences, convolutions, a layer used
more than once) it is Σₜ δₜ ⊗ [xₜ, 1], and the inner product a double sum over positions. One forward and one backward
pass give x and δ of every layer and every row of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...storage.encoding import storable

PRODUCT_NUMBERS = 2**22  # of all positions of some rows times all positions of others, at once


@storable
@dataclass(frozen=True)
class Rows:
    """Rows as they are."""

    values: Tensor  # (b, p)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def n_parameters(self) -> int:
        return self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def rows(self) -> Tensor:
        return self.values

    def columns(self, start: int, stop: int) -> Tensor:  # (b, stop − start)
        return self.values[:, start:stop]

    def take(self, index: Tensor | slice) -> Rows:
        return Rows(self.values[index])

    def squared_norms(self) -> np.ndarray:  # (b,)
        return np.square(torch.linalg.vector_norm(self.values.cpu(), dim=1, dtype=torch.float64).numpy())


@storable
@dataclass(frozen=True)
class Outer:
    """Σₜ δₜ ⊗ xₜ, and Σₜ δₜ behind it if there is a bias."""

    x: Tensor  # (b, t, a)
    delta: Tensor  # (b, t, o)
    bias: bool

    def __len__(self) -> int:
        return len(self.x)

    @property
    def n_parameters(self) -> int:
        return self.delta.shape[2] * (self.x.shape[2] + self.bias)

    @property
    def nbytes(self) -> int:
        return self.x.nbytes + self.delta.nbytes

    def rows(self) -> Tensor:
        weight = torch.bmm(self.delta.mT, self.x).flatten(1)
        return torch.cat([weight, self.delta.sum(dim=1)], dim=1) if self.bias else weight

    def columns(self, start: int, stop: int) -> Tensor:
        """The same columns of `rows()`; no more are formed than those of the outputs that they belong to."""
        a, n_weights = self.x.shape[2], self.x.shape[2] * self.delta.shape[2]
        pieces = []
        if start < n_weights:
            end = min(stop, n_weights)
            first, last = start // a, (end - 1) // a
            x = self.x if first < last else self.x[:, :, start - first * a : end - first * a]
            weight = torch.bmm(self.delta[:, :, first : last + 1].mT, x).flatten(1)
            pieces.append(weight if first == last else weight[:, start - first * a : end - first * a])
        if stop > n_weights:
            pieces.append(self.delta[:, :, max(start - n_weights, 0) : stop - n_weights].sum(dim=1))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def take(self, index: Tensor | slice) -> Outer:
        return Outer(self.x[index], self.delta[index], self.bias)

    def squared_norms(self) -> np.ndarray:
        x, delta = self.x.cpu().double(), self.delta.cpu().double()
        return ((x @ x.mT + float(self.bias)) * (delta @ delta.mT)).sum(dim=(1, 2)).numpy()

    def inner(self, other: Outer) -> np.ndarray:  # (b, b')
        return _sum_over_positions(
            self, other, lambda x, x_, d, d_: (x @ x_.T + float(self.bias)) * (d @ d_.T), (self.x, other.x)
        )


@storable
@dataclass(frozen=True)
class Lookup:
    """Σₜ δₜ in the row of the table that was looked up at t: an embedding."""

    index: Tensor  # (b, t)
    delta: Tensor  # (b, t, o)
    size: int  # rows of the table

    def __len__(self) -> int:
        return len(self.index)

    @property
    def n_parameters(self) -> int:
        return self.size * self.delta.shape[2]

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + self.delta.nbytes

    def rows(self) -> Tensor:
        b, _, o = self.delta.shape
        table = self.delta.new_zeros(b, self.size, o)
        return table.scatter_add_(1, self.index[:, :, None].expand_as(self.delta), self.delta).flatten(1)

    def columns(self, start: int, stop: int) -> Tensor:
        """The same columns of `rows()`, from that piece of the table alone."""
        o = self.delta.shape[2]
        first, last = start // o, (stop - 1) // o
        within = (self.index >= first) & (self.index <= last)
        piece = Lookup((self.index - first) * within, self.delta * within[:, :, None], last + 1 - first)
        return piece.rows()[:, start - first * o : stop - first * o]

    def take(self, index: Tensor | slice) -> Lookup:
        return Lookup(self.index[index], self.delta[index], self.size)

    def squared_norms(self) -> np.ndarray:
        index, delta = self.index.cpu(), self.delta.cpu().double()
        same = index[:, :, None] == index[:, None, :]
        return (same * (delta @ delta.mT)).sum(dim=(1, 2)).numpy()

    def inner(self, other: Lookup) -> np.ndarray:
        index, index_ = self.index[:, :, None], other.index[:, :, None]
        return _sum_over_positions(self, other, lambda i, i_, d, d_: (i == i_.T) * (d @ d_.T), (index, index_))


Part = Rows | Outer | Lookup


def joined(parts: list[Part]) -> Part:
    """The gradient of a layer that was used several times: all its positions together."""
    if len(parts) == 1:
        return parts[0]
    outer = [part for part in parts if isinstance(part, Outer)]
    if len(outer) == len(parts):
        x, delta = torch.cat([part.x for part in outer], dim=1), torch.cat([part.delta for part in outer], dim=1)
        return Outer(x, delta, outer[0].bias)
    lookups = [part for part in parts if isinstance(part, Lookup)]
    if len(lookups) == len(parts):
        index = torch.cat([part.index for part in lookups], dim=1)
        return Lookup(index, torch.cat([part.delta for part in lookups], dim=1), lookups[0].size)
    return Rows(torch.stack([part.rows() for part in parts]).sum(dim=0))


def alike(mine: Part, theirs: Part) -> bool:
    """Whether rows of the same layer are of one kind and shape."""
    if isinstance(mine, Rows) and isinstance(theirs, Rows):
        return True
    if isinstance(mine, Outer) and isinstance(theirs, Outer):
        return mine.x.shape[1] == theirs.x.shape[1]
    return isinstance(mine, Lookup) and isinstance(theirs, Lookup) and mine.index.shape[1] == theirs.index.shape[1]


def stacked(parts: Sequence[Part]) -> Part:
    """The rows of all of them, which are alike, as one part."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Rows):
        return Rows(torch.cat([part.values for part in parts if isinstance(part, Rows)]))
    delta = torch.cat([part.delta for part in parts if not isinstance(part, Rows)])
    if isinstance(first, Outer):
        return Outer(torch.cat([part.x for part in parts if isinstance(part, Outer)]), delta, first.bias)
    return Lookup(torch.cat([part.index for part in parts if isinstance(part, Lookup)]), delta, first.size)


def multiplications(part: Part) -> int:
    """What an inner product of two such rows takes."""
    if isinstance(part, Outer):
        (_, t, a), o = part.x.shape, part.delta.shape[2]
        return t * t * (a + o + (t > 1))
    if isinstance(part, Lookup):
        (_, t, o) = part.delta.shape
        return t * t * o
    return part.n_parameters


def cheapest(part: Part) -> Part:
    """Rows, where an inner product of outer products would take more multiplications."""
    return Rows(part.rows()) if multiplications(part) >= part.n_parameters else part


def compact(part: Part) -> Part:
    """The same in memory of its own, where it would keep a larger tensor alive, such as all steps of a sequence."""
    if isinstance(part, Outer):
        return Outer(_own(part.x), _own(part.delta), part.bias)
    if isinstance(part, Lookup):
        return Lookup(_own(part.index), _own(part.delta), part.size)
    return Rows(_own(part.values))


def _own(values: Tensor) -> Tensor:
    return values.clone() if values.untyped_storage().nbytes() > 2 * values.nbytes else values


def inner(mine: Part, theirs: Part) -> np.ndarray:  # (b, b')
    """The inner products of two parts for the same parameters, in float64."""
    if isinstance(mine, Outer) and isinstance(theirs, Outer):
        return mine.inner(theirs)
    if isinstance(mine, Lookup) and isinstance(theirs, Lookup):
        return mine.inner(theirs)
    a, b = mine.rows().cpu(), theirs.rows().cpu()
    products = np.zeros((len(a), len(b)))
    width = max(1, PRODUCT_NUMBERS // 4 // max(len(a), len(b), 1))
    for start in range(0, a.shape[1], width):
        columns = slice(start, start + width)
        products += a[:, columns].double().numpy() @ b[:, columns].double().numpy().T
    return products


def _sum_over_positions(
    mine: Outer | Lookup,
    theirs: Outer | Lookup,
    product: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    what: tuple[Tensor, Tensor],  # (b, t, ·), (b', t', ·)
) -> np.ndarray:
    """Σₜ Σₜ' of products that belong to two positions, some rows at a time."""

    def flat(values: Tensor) -> Tensor:  # (b, t, c) -> (b·t, c)
        values = values.cpu().reshape(-1, values.shape[2])
        return values.double() if values.is_floating_point() else values

    (b, t, _), (b_, t_, _) = mine.delta.shape, theirs.delta.shape
    x_, delta_ = flat(what[1]), flat(theirs.delta)
    sums = np.empty((b, b_))
    step = max(1, PRODUCT_NUMBERS // max(1, t * b_ * t_))
    for start in range(0, b, step):
        rows = slice(start, start + step)
        products = product(flat(what[0][rows]), x_, flat(mine.delta[rows]), delta_)
        sums[rows] = products.reshape(-1, t, b_, t_).sum(dim=(1, 3)).numpy() if t * t_ > 1 else products.numpy()
    return sums
