"""Which layers of a network can be had as outer products, and the parts of a batch's gradients.

Hooks on one forward pass see each layer's input, one backward pass gives the gradient of each layer's output. Whether
that tells all about a parameter is not assumed but tried: on two rows the parts must equal plain gradients. Parameters
that fail, or belong to no known layer, get rows of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .layers import KINDS, Part, Rows, cheapest, joined

DEPENDS_ON_NOTHING = "the network's output does not depend on any trainable parameter: all gradients are zero"


@dataclass(frozen=True)
class Layers:
    """The layers of a network by name, and what is left over."""

    batch_dims: dict[str, int]  # of each layer that is had by its inputs: where the rows are in them
    parameters: tuple[tuple[str, ...], ...]  # the names of the parameters of each of them, in the same order
    rest: tuple[str, ...]  # parameters that need rows of their own
    factor_bytes: int  # what the parts of one row take, those of the rest included
    working_bytes: int  # what has to be there besides while they are made


@dataclass(frozen=True)
class Call:
    """A layer at work."""

    x: Tensor
    output: GradientEdge
    shape: torch.Size


def examine(twin: nn.Module, x: Tensor) -> Layers:
    """Try every layer of a known kind on the rows of `x`; two are enough."""
    b = len(x)
    trainable = {name: w for name, w in twin.named_parameters() if w.requires_grad}
    candidates = _candidates(twin)
    y, calls = _forward(twin, x, candidates)
    if not y.requires_grad:
        raise ValueError(DEPENDS_ON_NOTHING)
    rows = [torch.autograd.grad(y[i], list(trainable.values()), retain_graph=True, allow_unused=True) for i in range(b)]
    truth = {name: torch.stack([_dense(row[k], w) for row in rows]) for k, (name, w) in enumerate(trainable.items())}
    deltas = _deltas(y, calls)
    found: dict[str, int] = {}
    kept = largest = 0
    for name, layer in candidates.items():
        expected = torch.cat([truth[parameter] for parameter in _names(name, layer)], dim=1)
        if not torch.isfinite(expected).all():
            continue  # whoever asks for these rows is told
        for dim in (0, 1):
            try:
                whole = _part(layer, calls[name], deltas[name], b, dim)
                got = whole.rows()
            except (RuntimeError, IndexError, ValueError):  # the rows are not there
                continue
            tolerance = 1e-4 * float(expected.abs().max())
            if got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-3, atol=tolerance):
                found[name] = dim
                kept += cheapest(whole).nbytes // b
                largest = max(largest, whole.nbytes // b)
                break
    parameters = tuple(_names(name, candidates[name]) for name in found)
    covered = {name for names in parameters for name in names}
    rest = tuple(name for name in trainable if name not in covered)
    return Layers(found, parameters, rest, kept + sum(trainable[name].nbytes for name in rest), 2 * largest)


def parts(twin: nn.Module, layers: Layers, x: Tensor) -> tuple[Tensor, list[Part]]:
    """Outputs (b,) and the part of each layer."""
    modules = {name: twin.get_submodule(name) for name in layers.batch_dims}
    y, calls = _forward(twin, x, modules)
    deltas = _deltas(y, calls)
    return y.detach(), [
        cheapest(_part(layer, calls[name], deltas[name], len(x), layers.batch_dims[name]))
        for name, layer in modules.items()
    ]


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


def _forward(twin: nn.Module, x: Tensor, layers: dict[str, nn.Module]) -> tuple[Tensor, dict[str, list[Call]]]:
    calls: dict[str, list[Call]] = {name: [] for name in layers}

    def watch(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            given = args[0] if args else kwargs["input"]
            # the edge, not the tensor: what follows may work in place
            calls[name].append(Call(given.detach(), get_gradient_edge(output), output.shape))

        return hook

    handles = [
        layer.register_forward_hook(watch(name), prepend=True, with_kwargs=True) for name, layer in layers.items()
    ]
    try:
        y = twin(x).reshape(len(x))
    finally:
        for handle in handles:
            handle.remove()
    return y, calls


def _deltas(y: Tensor, calls: dict[str, list[Call]]) -> dict[str, list[Tensor]]:
    """The gradient of each row's output with respect to the output of each layer, call by call."""
    edges = [call.output for made in calls.values() for call in made]
    if not edges:
        return {name: [] for name in calls}
    # rows do not depend on each other, so the sum's gradient is that of each
    gradients = iter(torch.autograd.grad(y.sum(), edges, allow_unused=True))
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


def _dense(gradient: Tensor | None, w: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros_like(w).flatten()
    return (gradient.to_dense() if gradient.is_sparse else gradient).flatten()
