"""The gradients of a layer's parameters from its input and the gradient of its output, for known types of layers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .factors import DenseRows, EmbeddingRows, OuterProducts, Part


def _linear(layer: nn.Linear, x: Tensor, delta: Tensor, b: int) -> Part:
    return _outer(x.reshape(b, -1, layer.in_features), delta.reshape(b, -1, layer.out_features), layer)


def _convolution(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor, delta: Tensor, b: int) -> Part:
    dimensions = len(layer.kernel_size)
    if layer.padding_mode == "zeros":
        x = F.pad(x, layer._reversed_padding_repeated_twice)
    else:
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
    for i, (size, stride, dilation) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)):
        x = x.unfold(2 + i, dilation * (size - 1) + 1, stride)[..., ::dilation]
    # (n, channels, places…, kernel…) -> (n, places…, channels, kernel…)
    x = x.movedim(1, 1 + dimensions)
    groups = layer.groups
    x = x.reshape(b, -1, groups, layer.in_channels // groups * int(np.prod(layer.kernel_size)))
    delta = delta.movedim(1, -1).reshape(b, -1, groups, layer.out_channels // groups)
    if groups == 1:
        return _outer(x[:, :, 0], delta[:, :, 0], layer)
    rows = []
    if layer.weight.requires_grad:
        rows.append(torch.einsum("btgo,btga->bgoa", delta, x).flatten(1))
    if layer.bias is not None and layer.bias.requires_grad:
        rows.append(delta.sum(dim=1).flatten(1))
    return DenseRows(torch.cat(rows, dim=1))


def _outer(x: Tensor, delta: Tensor, layer: nn.Module) -> Part:
    has_bias = isinstance(layer.bias, Tensor) and layer.bias.requires_grad
    if not layer.weight.requires_grad:
        return DenseRows(delta.sum(dim=1))
    return OuterProducts(x, delta, has_bias)


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


def _layer_norm(layer: nn.LayerNorm, x: Tensor, delta: Tensor, b: int) -> Part:
    size = int(np.prod(layer.normalized_shape))
    normal = F.layer_norm(x, layer.normalized_shape, None, None, layer.eps)
    return _scale(normal.reshape(b, -1, size), delta.reshape(b, -1, size), layer)


def _group_norm(layer: nn.GroupNorm, x: Tensor, delta: Tensor, b: int) -> Part:
    return _channels(F.group_norm(x, layer.num_groups, None, None, layer.eps), delta, b, layer)


def _batch_norm(layer: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d, x: Tensor, delta: Tensor, b: int) -> Part:
    normal = F.batch_norm(x, layer.running_mean, layer.running_var, None, None, False, 0.0, layer.eps)
    return _channels(normal, delta, b, layer)


def _channels(normal: Tensor, delta: Tensor, b: int, layer: nn.Module) -> Part:
    normal, delta = (values.movedim(1, -1) for values in (normal, delta))
    size = normal.shape[-1]
    return _scale(normal.reshape(b, -1, size), delta.reshape(b, -1, size), layer)


def _scale(normal: Tensor, delta: Tensor, layer: nn.Module) -> Part:  # (b, t, size) twice
    rows = [(normal * delta).sum(dim=1)] if layer.weight.requires_grad else []
    if layer.bias is not None and layer.bias.requires_grad:
        rows.append(delta.sum(dim=1))
    return DenseRows(torch.cat(rows, dim=1))


LAYER_RULES: dict[type[nn.Module], Callable[..., Part]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.Embedding: _embedding,
    nn.EmbeddingBag: _bag,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.BatchNorm3d: _batch_norm,
}
