"""Which layers of a network tell their gradients.

That what a layer is given and the gradients of what it returns tell all about its parameters is not assumed but tried:
on some rows its part must equal plain gradients. Parameters that fail, or belong to no layer, get rows of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from ...errors import NoGradientError
from ..model_copy import no_inner_loops
from .factors import Part, Rows, multiplications
from .hooks import (
    DEPENDS_ON_NOTHING,
    SHARED,
    Evaluate,
    Layers,
    Places,
    candidates,
    deltas_of,
    forward,
    is_known,
    names_of,
    part_of,
)

COMPARED = 2**20  # columns at a time


def examine(twin: nn.Module, evaluate: Evaluate, b: int) -> Layers:
    """Try every layer on b rows. Of several outputs a mixture is looked at: all is linear in it.

    Rows whose gradients are zero or equal tell nothing, so at least two others are asked for; what cannot be told that
    way gets rows of its own, and so does a layer that is not called: its weights may be used all the same.
    """
    layers = candidates(twin)
    found = _tried(twin, evaluate, b, layers, lambda layer: (0,) if isinstance(layer, nn.RNNBase) else (0, 1))
    tables = {n: each for n, each in layers.items() if n not in found and isinstance(each, nn.Embedding)}
    if tables:
        with suppress(RuntimeError):  # the network will not have as many rows there
            found |= _tried(twin, evaluate, b, tables, lambda layer: (SHARED,))
    found = {name: found[name] for name in layers if name in found}  # as they were registered
    parameters = tuple(names_of(name, layers[name]) for name in found)
    covered = {name for names in parameters for name in names}
    rest = {name: w for name, w in twin.named_parameters() if w.requires_grad and name not in covered}
    kept = [part for _, part, _ in found.values()]
    return Layers(
        {name: dim for name, (dim, _, _) in found.items()},
        parameters,
        tuple(rest),
        factor_bytes=sum(_kept_bytes(part) for part in kept) + sum(w.nbytes for w in rest.values()),
        inner_flops=2 * (sum(map(_least, kept)) + sum(w.numel() for w in rest.values())),
        working_bytes=2 * max((part.nbytes for part in kept), default=0),
        given={name: given for name, (_, _, given) in found.items() if not is_known(layers[name])},
    )


def _tried(
    twin: nn.Module,
    evaluate: Evaluate,
    b: int,
    layers: Mapping[str, nn.Module],
    dims: Callable[[nn.Module], Sequence[int]],
) -> dict[str, tuple[int, Part, frozenset[Places]]]:
    """Of the layers that tell their gradients: where the rows are in what they are given, the part of one row, and
    which of their arguments are tensors."""
    shared = {name for name, layer in layers.items() if SHARED in dims(layer)}
    outputs, calls = forward(evaluate, layers, b, shared)
    if not outputs.requires_grad:
        raise NoGradientError(DEPENDS_ON_NOTHING)
    y = outputs @ torch.linspace(1.0, 2.0, outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
    deltas = deltas_of(y, calls, retain_graph=True)
    guesses: dict[str, dict[int, Part]] = {}
    for name, layer in layers.items():
        for dim in dims(layer) if calls[name] else ():
            # where the rows are not there, or torch.func cannot do with it, it is no such layer
            with suppress(Exception), no_inner_loops():
                guesses.setdefault(name, {})[dim] = part_of(layer, calls[name], deltas[name], b, dim)
    told: dict[str, list[float]] = {name: [] for name in guesses}
    names = {name: names_of(name, layers[name]) for name in guesses}
    trainable = {name: w for name, w in twin.named_parameters() if any(name in each for each in names.values())}
    for i in range(b) if trainable else ():  # a row at a time: whole gradients of a large network are not small
        gradients = torch.autograd.grad(y[i], list(trainable.values()), retain_graph=True, allow_unused=True)
        by_name = dict(zip(trainable, gradients, strict=True))
        for name, by_dim in guesses.items():
            expected = [_flat(by_name[each], trainable[each]) for each in names[name]]
            scale = max(float(values.abs().max()) for values in expected)
            for dim in list(by_dim):
                if not _equal(by_dim[dim].take(slice(i, i + 1)), expected, scale):
                    del by_dim[dim]
            if scale > 0:
                told[name].append(_signature(expected))
    return {
        name: (dim := min(by_dim), by_dim[dim].take(slice(0, 1)), frozenset(call.given for call in calls[name]))
        for name, by_dim in guesses.items()
        if by_dim and _differ(told[name])
    }


def _signature(gradient: list[Tensor]) -> float:
    """A number that unequal gradients hardly share."""
    pieces = [piece for values in gradient for piece in torch.split(values, COMPARED)]
    weights = [torch.arange(1, len(piece) + 1, device=piece.device).remainder(97) for piece in pieces]
    return sum(float((piece.abs() * weight).sum()) for piece, weight in zip(pieces, weights, strict=True))


def _differ(values: list[float]) -> bool:
    return len(values) > 1 and max(values) - min(values) > 1e-4 * max(values)


def _equal(part: Part, expected: list[Tensor], scale: float) -> bool:
    """Whether a part of one row is this gradient, some columns at a time."""
    if part.n_parameters != sum(values.numel() for values in expected) or not scale < float("inf"):
        return False
    start = 0
    for values in expected:
        for piece in torch.split(values, COMPARED):
            got = part.columns(start, start + len(piece))[0]
            if not torch.allclose(got, piece, rtol=1e-3, atol=1e-4 * scale):
                return False
            start += len(piece)
    return True


def _least(part: Part) -> int:
    return min(multiplications(part), part.n_parameters)


def _kept_bytes(part: Part) -> int:
    """Of what `cheapest` makes of it."""
    return part.nbytes if multiplications(part) < part.n_parameters else part.n_parameters * _itemsize(part)


def _itemsize(part: Part) -> int:
    return (part.values if isinstance(part, Rows) else part.delta).itemsize


def _flat(gradient: Tensor | None, w: Tensor) -> Tensor:
    return torch.zeros_like(w).flatten() if gradient is None else gradient.flatten()
