"""Rows of J where no layers give them: by torch.func, or by plain autograd for one row and output after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from ..data.inputs import Inputs
from .layers.hooks import gradient, math_attention
from .probes import COMBINATION

if TYPE_CHECKING:
    from .network import Network

PAST_THE_TREE = (
    "some weights are reached past the module tree (by a lambda or a list), so their gradients would be missing: "
    "register them as submodules or parameters"
)


def vmapped(network: Network, names: tuple[str, ...], x: Inputs, group: slice) -> tuple[Tensor, Tensor]:
    """Compute outputs (b, m) and rows of J (m, b, p) for some of the parameters, by torch.func."""
    b, m, c = len(x), len(range(network.gradients_per_row(x))[group]), x.extras.get(COMBINATION)
    rows_of = x.tensors if c is None else (*x.tensors, c)

    def outputs(varied: dict[str, Tensor], *row: Tensor) -> tuple[Tensor, Tensor]:  # (m,) or one number, twice
        tensors = tuple(part.unsqueeze(0) for part in row)
        extras = {} if c is None else {COMBINATION: tensors[-1]}
        one = replace(x, tensors=tensors[: len(x.tensors)], extras=extras)
        y = network.evaluate(one, network.parameters | varied)[0, group]
        return (y[0] if m == 1 else y), y

    each = (grad if m == 1 else jacrev)(outputs, has_aux=True)  # the first is faster
    varied = {name: network.parameters[name] for name in names}
    with math_attention():
        try:
            by_name, y = vmap(each, in_dims=(None, *[0] * len(rows_of)))(varied, *rows_of)
        except Exception as error:
            raise TypeError(f"torch.func could not compute per-row gradients of this network: {error}") from error
    rows = torch.cat([g.reshape(b, m, -1) for g in by_name.values()], dim=2).movedim(1, 0)
    if y.requires_grad or rows.requires_grad:
        raise TypeError(PAST_THE_TREE)
    return y.reshape(b, m), rows


def looped(network: Network, names: tuple[str, ...], x: Inputs, group: slice) -> tuple[Tensor, Tensor]:
    """Compute outputs (b, m) and rows of J (m, b, p) by plain autograd, row by row and output by output."""
    varied, outputs, rows = [network.model_copy.trainable[name] for name in names], [], []
    for row in x.split(1):
        y = network.evaluate(row.map(torch.clone))[0, group]  # a network may work on its input in place
        rows.append(torch.stack([gradient(value, varied) for value in y]))
        outputs.append(y.detach())
    return torch.stack(outputs), torch.stack(rows, dim=1)
