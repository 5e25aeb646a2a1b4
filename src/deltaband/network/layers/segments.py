"""Which item each row of a layer belongs to, where these are not the rows of the batch: nodes and edges of graphs.

Outputs do not depend on other items, so the gradient of Σ 2^kᵢ yᵢ with respect to what a layer returned is, in each of
its rows, 2^kᵢ times that of Σ yᵢ, exactly: a power of two changes no digit. The ratio names the item i. Where it is no
power of two, rows of several items have been mixed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

SEGMENTS = -2  # instead of a dimension: the layer's rows belong to items, as is found out for each batch

LARGEST_EXPONENT = 40  # far from the smallest and the largest number of float32
MIXED = 1e-3  # relative: a ratio that is farther from a power of two is none

Gradients = Sequence[Sequence[Tensor | None]]  # by call, by output
Backward = Callable[[Tensor], Mapping[str, Gradients]]  # numbers of the items (b,) -> gradients of their sum by layer


def owners(outputs: Tensor, backward: Backward) -> dict[str, list[Tensor | None]]:  # (b, m)
    """Return the item of each row (R,) of each call of each layer, −1 where the gradient is zero, or None."""
    b, m = outputs.shape
    y = outputs @ torch.linspace(1.0, 2.0, m, dtype=outputs.dtype, device=outputs.device)  # of several a mixture
    plain = backward(y)
    base, power = 2 * LARGEST_EXPONENT + 1, 1
    found = {name: [_nobody(call) for call in calls] for name, calls in plain.items()}
    while power < b:
        digits = torch.arange(b, device=y.device) // power % base
        scaled = backward(y * torch.exp2((digits - LARGEST_EXPONENT).to(y.dtype)))
        for name, calls in plain.items():
            for i, (call, of_call) in enumerate(zip(calls, scaled[name], strict=True)):
                found[name][i] = _with_digit(found[name][i], call, of_call, power)
        power *= base
    return {
        name: [None if each is None else _checked(each, b) for each in of_calls] for name, of_calls in found.items()
    }


def _nobody(call: Sequence[Tensor | None]) -> Tensor | None:
    """Return 0 for rows with a gradient, −1 for others."""
    delta = call[0] if len(call) == 1 else None
    if delta is None or delta.ndim == 0 or not bool(torch.isfinite(delta).all()):
        return None
    return (_flat(delta) != 0).any(dim=1).long() - 1


def _flat(delta: Tensor) -> Tensor:  # (R, k), also of no rows
    return delta.reshape(len(delta), math.prod(delta.shape[1:]))


def _with_digit(
    owner: Tensor | None, call: Sequence[Tensor | None], scaled: Sequence[Tensor | None], power: int
) -> Tensor | None:
    delta, of_factors = call[0], scaled[0]
    if owner is None or delta is None or of_factors is None:
        return None
    one, other = map(_flat, (delta, of_factors))
    largest = one.abs().argmax(dim=1, keepdim=True)
    alive = owner >= 0
    ratio = torch.where(alive[:, None], other.gather(1, largest) / one.gather(1, largest), 1.0)
    exponent = ratio.abs().log2().round()
    off = torch.linalg.vector_norm(other - one * exponent.exp2(), dim=1)
    if not bool((off <= MIXED * torch.linalg.vector_norm(other, dim=1)).all()):
        return None
    return torch.where(alive, owner + power * (exponent[:, 0].long() + LARGEST_EXPONENT), owner)


def _checked(owner: Tensor, b: int) -> Tensor | None:
    return owner if bool((owner < b).all()) else None


def padded(calls: Sequence[Any], deltas: Gradients, b: int, rows: Sequence[Tensor | None]) -> tuple[Any, Any]:
    """Return calls of a layer, and gradients, with equally many rows for each item, which are next to each other."""
    made, arrived = [], []
    for call, delta, owner in zip(calls, deltas, rows, strict=True):
        if any(each is not None for each in delta):
            padding = _Padding(owner, b)
            args, kwargs = tree_map_only(Tensor, padding, (call.args, call.kwargs))
            made.append(call._replace(args=args, kwargs=kwargs))
            arrived.append([None if each is None else padding(each) for each in delta])
    return made, arrived


class _Padding:
    """The rows of a layer sorted by item, with as many for each as the largest has; the others are zero."""

    def __init__(self, owner: Tensor | None, b: int) -> None:
        if owner is None:
            raise ValueError("the rows of this layer belong to no single item")
        alive = torch.nonzero(owner >= 0)[:, 0]
        self._rows = alive[torch.argsort(owner[alive], stable=True)]
        items = owner[self._rows]
        counts = torch.bincount(items, minlength=b)
        most = max(int(counts.max()), 1)
        within = torch.arange(len(items), device=items.device) - (counts.cumsum(0) - counts)[items]
        self._places, self._size, self._n_given = items * most + within, b * most, len(owner)

    def __call__(self, value: Tensor) -> Tensor:  # (R, …) -> (b·most, …)
        if value.ndim == 0 or len(value) != self._n_given:
            raise ValueError("an argument of this layer has other rows than what it returns")
        return value.new_zeros(self._size, *value.shape[1:]).index_copy_(0, self._places, value[self._rows])
