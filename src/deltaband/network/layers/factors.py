"""Gradients layer by layer: for most layers a row of J is a sum of outer products that need never be formed.

For y = Wx + b the gradient of one row's output is δ ⊗ [x, 1] with δ the gradient of the layer's output, and the inner
product of two such rows is (δ·δ')(x·x' + 1). With several positions t in a row (sequences, convolutions, a layer used
more than once) it is Σₜ δₜ ⊗ [xₜ, 1], and the inner product a double sum over positions. One forward and one backward
pass give x and δ of every layer and every row of a batch; `LAYER_RULES` has the formula for each known type of layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

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

    @property
    def float64_bytes(self) -> int:
        return 8 * sum(tensor.numel() for tensor in self._tensors.values())

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
    shapes: tuple[tuple[int, int], ...] = ()  # of the weights as matrices, where they are known

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

    def total(self, factors: Tensor, directions: Tensor) -> Tensor:  # (b,), (k, ·)
        """Return the sum of the rows, each times its factor; of outer products only its image in some directions."""
        return factors.to(self.values) @ self.values

    def image(self, gradients: Sequence[Tensor], directions: Tensor) -> Tensor:
        """Return what `total` is if the sum is given as a gradient for each parameter."""
        return torch.cat([g.to_dense().flatten() for g in gradients])

    def columns(self, start: int, stop: int) -> Tensor:  # (b, stop − start)
        return self.values[:, start:stop]

    def squared_norms(self) -> Tensor:  # (b,) float64
        return torch.linalg.vector_norm(self.values, dim=1, dtype=torch.float64).square()


class _Positions(_Factors):
    """A sum over positions t."""

    delta: Tensor  # (b, t, o)

    def _products(self, theirs: Any) -> Tensor:  # (…, t, t') in float64, of each position with each other
        raise NotImplementedError

    def scaled(self, factors: Tensor) -> Self:  # (b,)
        return replace(self, **{"delta": self.delta * factors.to(self.delta)[:, None, None]})

    def _images(self, factors: Tensor, directions: Tensor) -> Tensor:  # (k, b·t)
        """Return δ of all positions in some directions, times the factors of their rows."""
        b, t, o = self.delta.shape
        delta = self.delta.reshape(b * t, o)
        factors = factors.to(delta) if t == 1 else factors.to(delta).repeat_interleave(t)
        return (directions[:, :o].to(delta) @ delta.T).mul_(factors)

    def squared_norms(self) -> Tensor:
        return self._products(self).sum(dim=(1, 2))

    def inner(self, other: _Positions) -> Tensor:  # (b, b')
        """Sum products over the positions t and t' of two rows, some rows at a time."""
        (b, t, _), (b_, t_, _) = self.delta.shape, other.delta.shape
        step = max(1, PRODUCT_NUMBERS // max(1, t * b_ * t_))
        mine = [self] if b <= step else [self.take(slice(start, start + step)) for start in range(0, b, step)]
        theirs, sums = (other if len(mine) == 1 else other.map(exact))._flat(), []
        for rows in mine:
            products = rows._flat()._products(theirs)
            sums.append(products.reshape(-1, t, b_, t_).sum(dim=(1, 3)) if t * t_ > 1 else products)
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def _flat(self) -> Self:
        """Return the positions of all rows in one dimension."""
        return self.map(lambda values: values.flatten(0, 1))


def exact(values: Tensor) -> Tensor:
    """Return numbers in float64, and indices as they are."""
    return values.double() if values.is_floating_point() else values


def _product(mine: Tensor, theirs: Tensor) -> Tensor:  # (…, t, k), (…, t', k) -> (…, t, t')
    """Return inner products in float64; other numbers are converted for this product alone, within the cache."""
    return exact(mine) @ exact(theirs).mT


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

    def total(self, factors: Tensor, directions: Tensor) -> Tensor:
        images = self._images(factors, directions)
        weight = images @ self.x.flatten(0, 1)
        return torch.cat([weight, images.sum(dim=1, keepdim=True)], dim=1) if self.bias else weight

    def image(self, gradients: Sequence[Tensor], directions: Tensor) -> Tensor:
        directions = directions[:, : len(gradients[0])].to(gradients[0])
        return torch.cat([directions @ g.reshape(len(g), -1) for g in gradients], dim=1)

    def _products(self, theirs: OuterProducts) -> Tensor:
        return _product(self.x, theirs.x).add_(float(self.bias)).mul_(_product(self.delta, theirs.delta))


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

    def total(self, factors: Tensor, directions: Tensor) -> Tensor:
        return self._looked_up(self.index.flatten(), self._images(factors, directions))

    def image(self, gradients: Sequence[Tensor], directions: Tensor) -> Tensor:
        (table,) = gradients
        directions = directions[:, : table.shape[1]].to(table.dtype)
        if table.is_sparse:
            return self._looked_up(table._indices()[0], directions @ table._values().T)
        return directions @ table.T

    def _looked_up(self, index: Tensor, images: Tensor) -> Tensor:  # (k, size)
        return images.new_zeros(len(images), self.size).index_add_(1, index, images)

    def _products(self, theirs: EmbeddingRows) -> Tensor:
        same = exact(self.index)[..., :, None] == exact(theirs.index)[..., None, :]
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


def cheapest(part: Part) -> Part:
    """Return full rows where factors take more multiplications for an inner product than they save memory."""
    numbers, p = part.float64_bytes / (8 * max(len(part), 1)), part.n_parameters
    return DenseRows(part.rows()) if part.n_products >= p * max(1.0, p / max(numbers, 1.0)) else part


def compact(part: Part) -> Part:
    """Return a copy of what would keep a larger tensor alive, such as all steps of a sequence."""
    return part.map(lambda values: values.clone() if values.untyped_storage().nbytes() > 2 * values.nbytes else values)


def inner(mine: Part, theirs: Part) -> Tensor:  # (b, b')
    """Return the inner products of two parts for the same parameters, in float64, where they are."""
    if isinstance(mine, _Positions) and isinstance(theirs, type(mine)):
        return mine.inner(theirs)
    a, b = mine.rows(), theirs.rows()
    products = a.new_zeros(len(a), len(b), dtype=torch.float64)
    width = max(1, PRODUCT_NUMBERS // 4 // max(len(a), len(b), 1))
    for start in range(0, a.shape[1], width):
        columns = slice(start, start + width)
        products += a[:, columns].double() @ b[:, columns].double().T
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
