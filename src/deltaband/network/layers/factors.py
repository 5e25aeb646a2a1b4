"""Gradients layer by layer: for most layers a row of J is a sum of outer products that need never be formed.

For y = Wx + b the gradient of one row's output is δ ⊗ [x, 1] with δ the gradient of the layer's output, and the inner
product of two such rows is (δ·δ')(x·x' + 1). With several positions t in a row (sequences, convolutions, a layer used
more than once) it is Σₜ δₜ ⊗ [xₜ, 1], and the inner product a double sum over positions. One forward and one backward
pass give x and δ of every layer and every row of a batch; `LAYER_RULES` has the formula for each known type of layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ...storage.encoding import storable

CERTIFIED_TO = {torch.float32: 1e-4, torch.float64: 1e-9}  # relative; more is not rounding
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
        changed = {name: change(mine, *(vars(each)[name] for each in others)) for name, mine in self._tensors.items()}
        return type(self)(**{**vars(self), **changed})  # faster than `replace`

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
    def n_products(self) -> int:  # multiplications of an inner product of two such rows
        return self.n_parameters

    def rows(self) -> Tensor:
        return self.values

    def scaled(self, factors: Tensor) -> Self:  # (b,)
        return replace(self, values=self.values * factors.to(self.values)[:, None])

    def total(self, factors: Tensor) -> Tensor:  # (b,) -> (p,)
        """Return the sum of the rows, each times its factor."""
        return factors.to(self.values) @ self.values

    def columns(self, start: int, stop: int) -> Tensor:  # (b, stop − start)
        return self.values[:, start:stop]

    def squared_norms(self) -> np.ndarray:  # (b,)
        return np.square(torch.linalg.vector_norm(self.values.cpu(), dim=1, dtype=torch.float64).numpy())


class _Positions(_Factors):
    """A sum over positions t."""

    delta: Tensor  # (b, t, o)

    def _products(self, theirs: Any) -> Tensor:  # (…, t, t') in float64, of each position with each other
        raise NotImplementedError

    def scaled(self, factors: Tensor) -> Self:  # (b,)
        return replace(self, **{"delta": self.delta * factors.to(self.delta)[:, None, None]})

    def squared_norms(self) -> np.ndarray:
        return self._products(self).sum(dim=(1, 2)).numpy()

    def inner(self, other: _Positions) -> np.ndarray:  # (b, b')
        """Sum products over the positions t and t' of two rows, some rows at a time."""
        (b, t, _), (b_, t_, _) = self.delta.shape, other.delta.shape
        step = max(1, PRODUCT_NUMBERS // max(1, t * b_ * t_))
        mine = [self] if b <= step else [self.take(slice(start, start + step)) for start in range(0, b, step)]
        theirs, sums = (other if len(mine) == 1 else other.map(_exact))._flat(), []
        for rows in mine:
            products = rows._flat()._products(theirs)
            sums.append(products.reshape(-1, t, b_, t_).sum(dim=(1, 3)) if t * t_ > 1 else products)
        return (sums[0] if len(sums) == 1 else torch.cat(sums)).numpy()

    def _flat(self) -> Self:
        """Return the positions of all rows in one dimension."""
        return self.map(lambda values: values.flatten(0, 1))


def _exact(values: Tensor) -> Tensor:
    """Return numbers in float64, and indices as they are, in main memory."""
    return values.cpu().double() if values.is_floating_point() else values.cpu()


def _product(mine: Tensor, theirs: Tensor) -> Tensor:  # (…, t, k), (…, t', k) -> (…, t, t')
    """Return inner products in float64; numbers that are not are converted for this one alone, within the cache."""
    return _exact(mine) @ _exact(theirs).mT


@storable
@dataclass(frozen=True)
class OuterProducts(_Positions):
    """Σₜ δₜ ⊗ xₜ, and Σₜ δₜ behind it if there is a bias."""

    x: Tensor  # (b, t, a)
    delta: Tensor
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

    def total(self, factors: Tensor) -> Tensor:  # (b,) -> (p,)
        delta = self.scaled(factors).delta.flatten(0, 1)
        (o, a), total = (delta.shape[1], self.x.shape[2]), delta.new_empty(self.n_parameters)
        torch.mm(delta.T, self.x.flatten(0, 1), out=total[: o * a].view(o, a))
        if self.bias:
            total[o * a :] = delta.sum(dim=0)
        return total

    def _products(self, theirs: OuterProducts) -> Tensor:
        return (_product(self.x, theirs.x) + float(self.bias)) * _product(self.delta, theirs.delta)


@storable
@dataclass(frozen=True)
class EmbeddingRows(_Positions):
    """Σₜ δₜ in the row of the table that was looked up at t."""

    index: Tensor  # (b, t)
    delta: Tensor
    size: int  # rows of the table

    @property
    def n_parameters(self) -> int:
        return self.size * self.delta.shape[2]

    @property
    def n_products(self) -> int:
        return self.delta.shape[1] ** 2 * self.delta.shape[2]

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

    def total(self, factors: Tensor) -> Tensor:  # (b,) -> (p,)
        delta = self.scaled(factors).delta.flatten(0, 1)
        return delta.new_zeros(self.size, delta.shape[1]).index_add_(0, self.index.flatten(), delta).flatten()

    def _products(self, theirs: EmbeddingRows) -> Tensor:
        same = _exact(self.index)[..., :, None] == _exact(theirs.index)[..., None, :]
        return same * _product(self.delta, theirs.delta)


Part = DenseRows | OuterProducts | EmbeddingRows


def joined(parts: list[Part]) -> Part:
    """Return the gradient of a layer that was used several times: all its positions together."""
    kinds = {type(part) for part in parts}
    if len(parts) == 1 or (len(kinds) == 1 and DenseRows not in kinds):
        return stacked(parts, dim=1)
    return DenseRows(torch.stack([part.rows() for part in parts]).sum(dim=0))


def alike(mine: Part, theirs: Part) -> bool:
    """Return whether rows of the same layer have the same type and number of positions, and can be stacked."""
    positions = [part.delta.shape[1] if isinstance(part, _Positions) else None for part in (mine, theirs)]
    return type(mine) is type(theirs) and positions[0] == positions[1]


def stacked(parts: Sequence[Part], dim: int = 0) -> Part:
    """Return the rows of all parts, which are alike, as one part."""
    first, *others = parts
    return first.map(lambda *tensors: torch.cat(tensors, dim), *others) if others else first  # type: ignore[arg-type]


def certified(parts: Sequence[Part], factors: Tensor, expected: Sequence[Tensor]) -> bool:  # one per output, (b, m)
    """Return whether the sum of the gradients of a batch, each times its factor, is the expected one up to rounding.

    The expected one is the gradient of the sum of the outputs, each times its factor, with respect to each weight: rows
    that were permuted, merged or dropped on their way to the parts would make another sum.
    """
    total, *others = (part.total(column) for part, column in zip(parts, factors.T, strict=True))
    for other in others:
        total += other
    pieces = torch.split(total, [g.numel() for g in expected])
    largest = max(math.hypot(*(float(g.norm()) for g in each)) for each in (pieces, expected))
    for piece, g in zip(pieces, expected, strict=True):
        piece -= g.flatten()  # memory is what this takes most of
    difference = math.hypot(*(float(piece.norm()) for piece in pieces))
    return difference <= CERTIFIED_TO[total.dtype] * largest or not math.isfinite(largest)  # then a row will be named


def cheapest(part: Part) -> Part:
    """Return full rows where an inner product of the factors would take more multiplications."""
    return DenseRows(part.rows()) if part.n_products >= part.n_parameters else part


def compact(part: Part) -> Part:
    """Return a copy of what would keep a larger tensor alive, such as all steps of a sequence."""
    return part.map(lambda values: values.clone() if values.untyped_storage().nbytes() > 2 * values.nbytes else values)


def inner(mine: Part, theirs: Part) -> np.ndarray:  # (b, b')
    """Return the inner products of two parts for the same parameters, in float64."""
    if isinstance(mine, _Positions) and isinstance(theirs, type(mine)):
        return mine.inner(theirs)
    a, b = mine.rows().cpu(), theirs.rows().cpu()
    products = np.zeros((len(a), len(b)))
    width = max(1, PRODUCT_NUMBERS // 4 // max(len(a), len(b), 1))
    for start in range(0, a.shape[1], width):
        columns = slice(start, start + width)
        products += a[:, columns].double().numpy() @ b[:, columns].double().numpy().T
    return products


def _linear(layer: nn.Linear, x: Tensor, delta: Tensor, b: int) -> Part:
    return _outer(layer, x.reshape(b, -1, layer.in_features), delta.reshape(b, -1, layer.out_features))


def _convolution(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor, delta: Tensor, b: int) -> Part:
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    for i, (size, stride, dilation) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)):
        x = x.unfold(2 + i, dilation * (size - 1) + 1, stride)[..., ::dilation]
    x = x.movedim(1, 1 + len(layer.kernel_size))  # (n, channels, places…, kernel…) -> (n, places…, channels, kernel…)
    groups = layer.groups
    x = x.reshape(b, -1, groups, layer.in_channels // groups * int(np.prod(layer.kernel_size)))
    delta = delta.movedim(1, -1).reshape(b, -1, groups, layer.out_channels // groups)
    if groups == 1:
        return _outer(layer, x[:, :, 0], delta[:, :, 0])
    return _trainable(layer, lambda: torch.einsum("btgo,btga->bgoa", delta, x).flatten(1), delta.flatten(2))


def _outer(layer: nn.Module, x: Tensor, delta: Tensor) -> Part:
    if not layer.weight.requires_grad:
        return DenseRows(delta.sum(dim=1))
    return OuterProducts(x, delta, isinstance(layer.bias, Tensor) and layer.bias.requires_grad)


def _trainable(layer: Any, weight: Callable[[], Tensor], delta: Tensor) -> Part:
    """Return the rows of a weight and a bias, of those that are trainable."""
    rows = [weight()] if layer.weight.requires_grad else []
    if layer.bias is not None and layer.bias.requires_grad:
        rows.append(delta.sum(dim=1))
    return DenseRows(torch.cat(rows, dim=1))


def _embedding(layer: nn.Embedding, x: Tensor, delta: Tensor, b: int) -> Part:
    index, delta = x.reshape(b, -1), delta.reshape(b, -1, layer.embedding_dim)
    if layer.padding_idx is not None:
        delta = delta * (index != layer.padding_idx)[:, :, None]
    return EmbeddingRows(index, delta, layer.num_embeddings)


def _bag(layer: nn.EmbeddingBag, x: Tensor, delta: Tensor, b: int) -> Part:
    if layer.mode == "max" or x.ndim != 2:
        raise ValueError("a bag of maxima, or one given by offsets into one long list, has no factors")
    counted = torch.ones_like(x, dtype=delta.dtype)
    if layer.padding_idx is not None:
        counted *= x != layer.padding_idx
    if layer.mode == "mean":
        counted /= counted.sum(dim=1, keepdim=True).clamp(min=1)
    return EmbeddingRows(x, counted[:, :, None] * delta[:, None, :], layer.num_embeddings)


def _normalisation(layer: Any, x: Tensor, delta: Tensor, b: int) -> Part:
    if isinstance(layer, nn.LayerNorm):
        normal = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    else:
        if isinstance(layer, nn.GroupNorm):
            normal = F.group_norm(x, layer.num_groups, eps=layer.eps)
        else:
            normal = F.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps)
        normal, delta = normal.movedim(1, -1), delta.movedim(1, -1)
    normal, delta = (values.reshape(b, -1, layer.weight.numel()) for values in (normal, delta))
    return _trainable(layer, lambda: (normal * delta).sum(dim=1), delta)


LAYER_RULES: dict[type[nn.Module], Callable[..., Part]] = {
    nn.Linear: _linear,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    nn.Embedding: _embedding,
    nn.EmbeddingBag: _bag,
    **dict.fromkeys((nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _normalisation),
}
