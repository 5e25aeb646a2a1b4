"""Rows of J for any network: by torch.func, all at once, or by plain autograd, one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import grad_and_value, vjp, vmap

from ..data.inputs import Inputs
from .model_copy import math_attention

Parameters = dict[str, Tensor]
PAST_THE_TREE = (
    "some weights are reached past the module tree (a lambda or a list that holds a layer or a parameter), so their "
    "gradients would be missing: register them as submodules or parameters"
)


def rows_by_vmap(
    evaluate: Callable[[Inputs, Parameters], Tensor],  # (b, m)
    varied: Parameters,  # with respect to which
    x: Inputs,
    m: int,
) -> tuple[Tensor, Tensor]:
    """Compute outputs (b, m) and rows (m, b, p)."""

    def outputs(varied: Parameters, *row: Tensor) -> Tensor:  # (m,)
        return evaluate(replace(x, tensors=tuple(part.unsqueeze(0) for part in row)), varied)[0]

    def single(varied: Parameters, *row: Tensor) -> Tensor:
        return outputs(varied, *row)[0]

    def several(varied: Parameters, *row: Tensor) -> tuple[Parameters, Tensor]:
        y, pull = vjp(lambda varied: outputs(varied, *row), varied)  # type: ignore[misc]
        return vmap(pull)(torch.eye(m, dtype=y.dtype, device=y.device))[0], y

    each: Callable[..., tuple[Parameters, Tensor]] = grad_and_value(single) if m == 1 else several
    with math_attention():
        try:
            by_name, y = vmap(each, in_dims=(None, *[0] * len(x.tensors)))(varied, *x.tensors)
        except Exception as error:
            raise TypeError(f"torch.func could not compute per-row gradients of this network: {error}") from error
    b = len(x)
    rows = torch.cat([g.reshape(b, m, -1) for g in by_name.values()], dim=2).movedim(1, 0)
    if y.requires_grad or rows.requires_grad:
        raise TypeError(PAST_THE_TREE)
    return y.reshape(b, m), rows


def rows_by_loop(
    evaluate: Callable[[Inputs], Tensor],  # (b, m)
    varied: Sequence[Tensor],
    x: Inputs,
) -> tuple[Tensor, Tensor]:
    """Compute the same row by row and output by output."""
    outputs, rows = [], []
    for one in x.split(1):
        y = evaluate(one)[0]
        rows.append(torch.stack([plain_gradient(value, varied) for value in y]))
        outputs.append(y.detach())
    return torch.stack(outputs), torch.stack(rows, dim=1)


def plain_gradient(y: Tensor, varied: Sequence[Tensor]) -> Tensor:  # (p,)
    """Compute the gradient of one number; the graph is kept."""
    gradients: Sequence[Tensor | None] = [None] * len(varied)
    if y.requires_grad:  # a row may go past all of them
        gradients = torch.autograd.grad(y, varied, retain_graph=True, allow_unused=True)
    pairs = zip(gradients, varied, strict=True)
    return torch.cat([(torch.zeros_like(w) if g is None else g).flatten() for g, w in pairs])


def leaves(y: Tensor) -> set[Tensor]:
    """Return the tensors that y has gradients with respect to."""
    waiting, seen, found = [y.grad_fn], set(), {y} if y.is_leaf else set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found
