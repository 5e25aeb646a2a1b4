"""Gradients of any layer, differentiated on its own: torch.func sees the layer, not the whole network."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_leaves, tree_map

from ..model_copy import math_attention
from .factors import DenseRows


def per_row_vjp(
    layer: nn.Module,
    parameters: dict[str, Tensor],  # its own, by their names in it
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    deltas: Sequence[Tensor | None],  # of the real tensors in its output; None where nothing arrives
    b: int,
    dim: int,  # where the rows are in each tensor
) -> DenseRows:
    """Compute each row's vector–Jacobian product. Every tensor that the layer is given must hold the rows, each of them
    in one piece or in several consecutive ones; for attention it is known which tensor does not."""
    bound = inspect.signature(layer.forward).bind(*args, **kwargs)
    arguments = dict(bound.arguments)
    dims = {name: tree_map(lambda leaf, name=name: _dim(layer, name, leaf, dim), arguments[name]) for name in arguments}
    arrived = [i for i, delta in enumerate(deltas) if delta is not None]

    def by_row(tensor: Any, dim: int | None) -> Any:  # (b, pieces, …)
        return tensor if dim is None else tensor.movedim(dim, 0).unflatten(0, (b, -1))

    def pulled(given: Any, delta: list[Tensor]) -> dict[str, Tensor]:
        one = tree_map(lambda leaf, dim: leaf if dim is None else leaf.movedim(0, dim), given, dims)
        call = inspect.BoundArguments(bound.signature, one)

        def product(parameters: dict[str, Tensor]) -> Tensor:
            outputs = real_tensors(functional_call(layer, parameters, call.args, call.kwargs))
            pairs = zip(arrived, delta, strict=True)
            return torch.stack([(outputs[i].movedim(dim, 0) * d).sum() for i, d in pairs]).sum()

        return grad(product)(parameters)  # `vjp` has to loop over the rows where a weight is parametrised

    given, in_dims = tree_map(by_row, arguments, dims), tree_map(lambda dim: None if dim is None else 0, dims)
    with torch.no_grad(), math_attention():  # whatever else the layer holds needs no graph
        rows = vmap(pulled, in_dims=(in_dims, 0))(given, [by_row(deltas[i], dim) for i in arrived])
    return DenseRows(torch.cat([rows[name].reshape(b, -1) for name in parameters], dim=1))


def leaves(value: Any) -> list[Any]:
    """Return what is in tuples, lists and dictionaries, however deep."""
    return [value] if isinstance(value, Tensor) else tree_leaves(value)  # the first for speed


def real_tensors(output: Any) -> list[Tensor]:
    return [y for y in leaves(output) if isinstance(y, Tensor) and y.is_floating_point()]


def _dim(layer: nn.Module, name: str, value: Any, dim: int) -> int | None:
    """Return which dimension of an argument holds the rows; None if none does."""
    if not isinstance(value, Tensor):
        return None
    if isinstance(layer, nn.MultiheadAttention) and name in ("attn_mask", "key_padding_mask"):
        return None if name == "attn_mask" and value.ndim == 2 else 0
    return dim
