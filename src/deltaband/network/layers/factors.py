"""Gradients layer by layer: for most layers a row of J is a sum of outer products that need never be formed.

For y = Wx + b the gradient of one row's output is δ ⊗ [x, 1] with δ the gradient of the layer's output, and the inner
product of two such rows is (δ·δ')(x·x' + 1). With several positions t in a row (sequences, convolutions, a layer used
more than once) it is Σₜ δₜ ⊗ [xₜ, 1], and the inner product a double sum over positions. One forward and one backward
pass give x and δ of every layer and every row of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from ...storage.encoding import storable

PRODUCT_NUMBERS = 2**22  # formed at once: all positions of some rows times all positions of others


@dataclass(frozen=True)
class _Factors:
    """Tensors that hold the rows of a batch in their first dimension, from which gradients can be formed."""

    @property
    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def __len__(self) -> int:
        return len(next(iter(self._tensors.values())))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def map(self, change: Callable[..., Tensor], *others: Self) -> Self:
        """Return the same factors with each tensor changed, given the corresponding tensors of `others` as well."""
        rest = [other._tensors for other in others]
        changed = {name: change(mine, *(each[name] for each in rest)) for name, mine in self._tensors.items()}
        return replace(self, **changed)

    def take(self, index: Tensor | slice) -> Self:
        return self.map(lambda tensor: tensor[index])


@storable
@dataclass(frozen=True)
class DenseRows(_Factors):
    """Rows in full."""

    values: Tensor  # (b, p)

    @property
    def n_parameters(self) -> int:
        return self.values.shape[1]

    @property
    def n_products(self) -> int:
        """Multiplications of an inner product of two such rows."""
        return self.n_parameters

    def rows(self) -> Tensor:
        return self.values

    def columns(self, start: int, stop: int) -> Tensor:  # (b, stop − start)
        return self.values[:, start:stop]

    def squared_norms(self) -> np.ndarray:  # (b,)
        return np.square(torch.linalg.vector_norm(self.values.cpu(), dim=1, dtype=torch.float64).numpy())


@storable
@dataclass(frozen=True)
class OuterProducts(_Factors):
    """Σₜ δₜ ⊗ xₜ, and Σₜ δₜ behind it if there is a bias."""

    x: Tensor  # (b, t, a)
    delta: Tensor  # (b, t, o)
    bias: bool

    @property
    def n_parameters(self) -> int:
        return self.delta.shape[2] * (self.x.shape[2] + self.bias)

    @property
    def n_products(self) -> int:
        (_, t, a), o = self.x.shape, self.delta.shape[2]
        return t * t * (a + o + (t > 1))

    def rows(self) -> Tensor:
        weight = torch.bmm(self.delta.mT, self.x).flatten(1)
        return torch.cat([weight, self.delta.sum(dim=1)], dim=1) if self.bias else weight

    def columns(self, start: int, stop: int) -> Tensor:
        """Return the same columns of `rows()`; only those of the layer's outputs that they belong to are formed."""
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

    def squared_norms(self) -> np.ndarray:
        x, delta = self.x.cpu().double(), self.delta.cpu().double()
        return ((x @ x.mT + float(self.bias)) * (delta @ delta.mT)).sum(dim=(1, 2)).numpy()

    def inner(self, other: OuterProducts) -> np.ndarray:  # (b, b')
        return _sum_over_positions(
            self, other, lambda x, x_, d, d_: (x @ x_.T + float(self.bias)) * (d @ d_.T), (self.x, other.x)
        )


@storable
@dataclass(frozen=True)
class EmbeddingRows(_Factors):
    """Σₜ δₜ in the row of the table that was looked up at t."""

    index: Tensor  # (b, t)
    delta: Tensor  # (b, t, o)
    size: int  # rows of the table

    @property
    def n_parameters(self) -> int:
        return self.size * self.delta.shape[2]

    @property
    def n_products(self) -> int:
        (_, t, o) = self.delta.shape
        return t * t * o

    def rows(self) -> Tensor:
        b, _, o = self.delta.shape
        table = self.delta.new_zeros(b, self.size, o)
        return table.scatter_add_(1, self.index[:, :, None].expand_as(self.delta), self.delta).flatten(1)

    def columns(self, start: int, stop: int) -> Tensor:
        """Return the same columns of `rows()`, from that piece of the table alone."""
        o = self.delta.shape[2]
        first, last = start // o, (stop - 1) // o
        within = (self.index >= first) & (self.index <= last)
        piece = EmbeddingRows((self.index - first) * within, self.delta * within[:, :, None], last + 1 - first)
        return piece.rows()[:, start - first * o : stop - first * o]

    def squared_norms(self) -> np.ndarray:
        index, delta = self.index.cpu(), self.delta.cpu().double()
        same = index[:, :, None] == index[:, None, :]
        return (same * (delta @ delta.mT)).sum(dim=(1, 2)).numpy()

    def inner(self, other: EmbeddingRows) -> np.ndarray:
        index, index_ = self.index[:, :, None], other.index[:, :, None]
        return _sum_over_positions(self, other, lambda i, i_, d, d_: (i == i_.T) * (d @ d_.T), (index, index_))


Part = DenseRows | OuterProducts | EmbeddingRows


def joined(parts: list[Part]) -> Part:
    """Return the gradient of a layer that was used several times: all its positions together."""
    first, *others = parts
    if not others:
        return first
    if isinstance(first, DenseRows) or any(type(part) is not type(first) for part in others):
        return DenseRows(torch.stack([part.rows() for part in parts]).sum(dim=0))
    return first.map(lambda *tensors: torch.cat(tensors, dim=1), *others)  # type: ignore[arg-type]


def alike(mine: Part, theirs: Part) -> bool:
    """Return whether rows of the same layer have the same type and number of positions, and can be stacked."""
    if isinstance(mine, DenseRows) or isinstance(theirs, DenseRows):
        return type(mine) is type(theirs)
    return type(mine) is type(theirs) and mine.delta.shape[1] == theirs.delta.shape[1]


def stacked(parts: Sequence[Part]) -> Part:
    """Return the rows of all parts, which are alike, as one part."""
    first, *others = parts
    return first.map(lambda *tensors: torch.cat(tensors), *others) if others else first  # type: ignore[arg-type]


def cheapest(part: Part) -> Part:
    """Return full rows where an inner product of the factors would take more multiplications."""
    return DenseRows(part.rows()) if part.n_products >= part.n_parameters else part


def compact(part: Part) -> Part:
    """Return the same in memory of its own where it would keep a larger tensor alive, such as all steps of a
    sequence."""
    return part.map(lambda values: values.clone() if values.untyped_storage().nbytes() > 2 * values.nbytes else values)


def inner(mine: Part, theirs: Part) -> np.ndarray:  # (b, b')
    """Return the inner products of two parts for the same parameters, in float64."""
    if isinstance(mine, OuterProducts) and isinstance(theirs, OuterProducts):
        return mine.inner(theirs)
    if isinstance(mine, EmbeddingRows) and isinstance(theirs, EmbeddingRows):
        return mine.inner(theirs)
    a, b = mine.rows().cpu(), theirs.rows().cpu()
    products = np.zeros((len(a), len(b)))
    width = max(1, PRODUCT_NUMBERS // 4 // max(len(a), len(b), 1))
    for start in range(0, a.shape[1], width):
        columns = slice(start, start + width)
        products += a[:, columns].double().numpy() @ b[:, columns].double().numpy().T
    return products


def _sum_over_positions(
    mine: OuterProducts | EmbeddingRows,
    theirs: OuterProducts | EmbeddingRows,
    product: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    what: tuple[Tensor, Tensor],  # (b, t, ·), (b', t', ·)
) -> np.ndarray:
    """Sum products over the positions t and t' of two rows, some rows at a time."""

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
