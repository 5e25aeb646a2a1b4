"""Which layers of a network can be had as outer products, and the parts of a batch's gradients.

Hooks on one forward pass see each layer's input, one backward pass gives the gradient of each layer's output. Whether
that tells all about a parameter is not assumed but tried: on some rows the parts must equal plain gradients. Parameters
that fail, or belong to no known layer, get rows of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .layers import KINDS, Part, Rows, cheapest, compact, joined, multiplications

COMPARED = 2**20  # columns at a time
DEPENDS_ON_NOTHING = "the network's output does not depend on any trainable parameter: all gradients are zero"


@dataclass(frozen=True)
class Layers:
    """The layers of a network by name, and what is left over."""

    batch_dims: dict[str, int]  # of each layer that is had by its inputs: where the rows are in them
    parameters: tuple[tuple[str, ...], ...]  # the names of the parameters of each of them, in the same order
    rest: tuple[str, ...]  # parameters that need rows of their own
    factor_bytes: int  # what the parts of one row take, those of the rest included
    inner_flops: int  # of an inner product of two rows
    working_bytes: int  # what has to be there besides while they are made
    vmap: bool = True  # whether torch.func gives those rows; a plain loop does where it cannot


@dataclass(frozen=True)
class Call:
    """A layer at work."""

    x: Tensor
    output: GradientEdge
    shape: torch.Size


Evaluate = Callable[[], Tensor]  # (b, m)


def examine(twin: nn.Module, evaluate: Evaluate, b: int) -> Layers:
    """Try every layer of a known kind on b rows. Of several outputs a mixture is looked at: all is linear in it.

    Rows whose gradients are zero or equal tell nothing, so at least two others are asked for; what cannot be told that
    way gets rows of its own, and so does a layer that is not called: its weights may be used all the same.
    """
    trainable = {name: w for name, w in twin.named_parameters() if w.requires_grad}
    candidates = _candidates(twin)
    outputs, calls = _forward(evaluate, candidates)
    if not outputs.requires_grad:
        raise ValueError(DEPENDS_ON_NOTHING)
    y = outputs @ torch.linspace(1.0, 2.0, outputs.shape[1]).to(outputs)
    deltas = _deltas(y, calls, retain_graph=True)
    guesses: dict[str, dict[int, Part]] = {}
    for name, layer in candidates.items():
        for dim in (0, 1) if calls[name] else ():
            try:
                guesses.setdefault(name, {})[dim] = _part(layer, calls[name], deltas[name], b, dim)
            except (RuntimeError, IndexError, ValueError):  # the rows are not there
                continue
    told: dict[str, list[float]] = {name: [] for name in guesses}
    for i in range(b):  # a row at a time: whole gradients of a large network are not small
        gradients = torch.autograd.grad(y[i], list(trainable.values()), retain_graph=True, allow_unused=True)
        by_name = dict(zip(trainable, gradients, strict=True))
        for name, by_dim in guesses.items():
            expected = [dense(by_name[each], trainable[each]) for each in _names(name, candidates[name])]
            scale = max(float(values.abs().max()) for values in expected)
            for dim in list(by_dim):
                if not _equal(by_dim[dim].take(slice(i, i + 1)), expected, scale):
                    del by_dim[dim]
            if scale > 0:
                told[name].append(_signature(expected))
    found = {name: min(by_dim) for name, by_dim in guesses.items() if by_dim and _differ(told[name])}
    kept = [guesses[name][dim].take(slice(0, 1)) for name, dim in found.items()]
    parameters = tuple(_names(name, candidates[name]) for name in found)
    covered = {name for names in parameters for name in names}
    rest = {name: w for name, w in trainable.items() if name not in covered}
    return Layers(
        found,
        parameters,
        tuple(rest),
        factor_bytes=sum(_kept_bytes(part) for part in kept) + sum(w.nbytes for w in rest.values()),
        inner_flops=2 * (sum(map(_least, kept)) + sum(w.numel() for w in rest.values())),
        working_bytes=2 * max((part.nbytes for part in kept), default=0),
    )


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


def parts(twin: nn.Module, layers: Layers, evaluate: Evaluate, b: int) -> tuple[Tensor, list[list[Part]]]:
    """Outputs (b, m) and, for each output, the part of each layer."""
    modules = {name: twin.get_submodule(name) for name in layers.batch_dims}
    y, calls = _forward(evaluate, modules)
    blocks = []
    for i, column in enumerate(y.unbind(dim=1)):
        deltas = _deltas(column, calls, retain_graph=i < y.shape[1] - 1)
        blocks.append(
            [
                compact(cheapest(_part(layer, calls[name], deltas[name], b, layers.batch_dims[name])))
                for name, layer in modules.items()
            ]
        )
    return y.detach(), blocks


def _candidates(twin: nn.Module) -> dict[str, nn.Module]:
    """Layers of a known kind that have their parameters to themselves."""
    owners: dict[int, int] = {}
    for module in twin.modules():
        for w in module._parameters.values():
            if w is not None:
                owners[id(w)] = owners.get(id(w), 0) + 1
    return {
        name: module
        for name, module in twin.named_modules()
        if type(module) in KINDS
        and any(w is not None and w.requires_grad for w in module._parameters.values())
        and set(module._parameters) <= {"weight", "bias"}
        and module._parameters.get("weight") is not None
        and all(owners[id(w)] == 1 for w in module._parameters.values() if w is not None)
    }


def _names(name: str, layer: nn.Module) -> tuple[str, ...]:
    prefix = f"{name}." if name else ""
    return tuple(f"{prefix}{key}" for key, w in layer._parameters.items() if w is not None and w.requires_grad)


def _forward(evaluate: Evaluate, layers: dict[str, nn.Module]) -> tuple[Tensor, dict[str, list[Call]]]:
    calls: dict[str, list[Call]] = {name: [] for name in layers}

    def watch(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if not (isinstance(output, Tensor) and output.requires_grad):  # called without gradients
                return
            given = args[0] if args else kwargs["input"]
            # the edge, not the tensor: what follows may work in place
            calls[name].append(Call(given.detach(), get_gradient_edge(output), output.shape))

        return hook

    handles = [
        layer.register_forward_hook(watch(name), prepend=True, with_kwargs=True) for name, layer in layers.items()
    ]
    try:
        y = evaluate()
    finally:
        for handle in handles:
            handle.remove()
    return y, calls


def _deltas(y: Tensor, calls: dict[str, list[Call]], retain_graph: bool = False) -> dict[str, list[Tensor]]:
    """The gradient of each row's output with respect to the output of each layer, call by call."""
    edges = [call.output for made in calls.values() for call in made]
    if not edges:
        return {name: [] for name in calls}
    # rows do not depend on each other, so the sum's gradient is that of each
    gradients = iter(torch.autograd.grad(y.sum(), edges, allow_unused=True, retain_graph=retain_graph))
    return {
        name: [y.new_zeros(call.shape) if (g := next(gradients)) is None else g for call in made]
        for name, made in calls.items()
    }


def _part(layer: nn.Module, calls: list[Call], deltas: list[Tensor], b: int, dim: int) -> Part:
    made = [
        KINDS[type(layer)](layer, call.x.movedim(dim, 0), delta.movedim(dim, 0), b)
        for call, delta in zip(calls, deltas, strict=True)
    ]
    if not made:  # never used
        size = sum(w.numel() for w in layer._parameters.values() if w is not None and w.requires_grad)
        return Rows(next(layer.parameters()).detach().new_zeros(b, size))
    return joined(made)


def dense(gradient: Tensor | None, w: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros_like(w).flatten()
    return (gradient.to_dense() if gradient.is_sparse else gradient).flatten()
