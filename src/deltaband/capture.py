"""Which layers of a network tell their gradients, and the parts of a batch's gradients.

Hooks on one forward pass see what each layer is given, one backward pass gives the gradients of what it returns.
Whether that tells all about a parameter is not assumed but tried: on some rows the parts must equal plain gradients.
Parameters that fail, or belong to no layer, get rows of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_map_only

from .alone import alone, real_tensors
from .layers import KINDS, Part, Rows, cheapest, compact, joined, multiplications
from .recurrent import recurrent
from .twin import no_inner_loops

COMPARED = 2**20  # columns at a time
SHARED = -1  # in the place of a dimension: no rows in what the layer is given, as for the places of a sequence
DEPENDS_ON_NOTHING = (
    "the network's output does not depend on any trainable parameter, of those chosen: all gradients are zero"
)


class UnlikeError(Exception):
    """A layer was called in another way than on the rows that were tried."""


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

    @property
    def order(self) -> tuple[str, ...]:
        """The names of all parameters, as the columns of J follow each other."""
        return tuple(name for names in self.parameters for name in names) + self.rest


@dataclass(frozen=True)
class Call:
    """A layer at work: what it was given, and where the gradients of the real tensors that it returned arrive."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[GradientEdge | None, ...]


Evaluate = Callable[[], Tensor]  # (b, m)
Deltas = list[Tensor | None]  # of one call


def examine(twin: nn.Module, evaluate: Evaluate, b: int) -> Layers:
    """Try every layer on b rows. Of several outputs a mixture is looked at: all is linear in it.

    Rows whose gradients are zero or equal tell nothing, so at least two others are asked for; what cannot be told that
    way gets rows of its own, and so does a layer that is not called: its weights may be used all the same.
    """
    candidates = _candidates(twin)
    found = _tried(twin, evaluate, b, candidates, lambda layer: (0,) if isinstance(layer, nn.RNNBase) else (0, 1))
    tables = {n: each for n, each in candidates.items() if n not in found and isinstance(each, nn.Embedding)}
    if tables:
        with suppress(RuntimeError):  # the network will not have as many rows there
            found |= _tried(twin, evaluate, b, tables, lambda layer: (SHARED,))
    found = {name: found[name] for name in candidates if name in found}
    parameters = tuple(_names(name, candidates[name]) for name in found)
    covered = {name for names in parameters for name in names}
    rest = {name: w for name, w in twin.named_parameters() if w.requires_grad and name not in covered}
    kept = [part for _, part in found.values()]
    return Layers(
        {name: dim for name, (dim, _) in found.items()},
        parameters,
        tuple(rest),
        factor_bytes=sum(_kept_bytes(part) for part in kept) + sum(w.nbytes for w in rest.values()),
        inner_flops=2 * (sum(map(_least, kept)) + sum(w.numel() for w in rest.values())),
        working_bytes=2 * max((part.nbytes for part in kept), default=0),
    )


def _tried(
    twin: nn.Module,
    evaluate: Evaluate,
    b: int,
    candidates: Mapping[str, nn.Module],
    dims: Callable[[nn.Module], Sequence[int]],
) -> dict[str, tuple[int, Part]]:
    """Of the layers that tell their gradients: where the rows are in what they are given, and the part of one row."""
    shared = {name for name, layer in candidates.items() if SHARED in dims(layer)}
    outputs, calls = _forward(evaluate, candidates, b, shared)
    if not outputs.requires_grad:
        raise ValueError(DEPENDS_ON_NOTHING)
    y = outputs @ torch.linspace(1.0, 2.0, outputs.shape[1]).to(outputs)
    deltas = _deltas(y, calls, retain_graph=True)
    guesses: dict[str, dict[int, Part]] = {}
    for name, layer in candidates.items():
        for dim in dims(layer) if calls[name] else ():
            # where the rows are not there, or torch.func cannot do with it, it is no such layer
            with suppress(Exception), no_inner_loops():
                guesses.setdefault(name, {})[dim] = _part(layer, calls[name], deltas[name], b, dim)
    told: dict[str, list[float]] = {name: [] for name in guesses}
    names = {name: _names(name, candidates[name]) for name in guesses}
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
        name: (dim := min(by_dim), by_dim[dim].take(slice(0, 1)))
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


def parts(twin: nn.Module, layers: Layers, evaluate: Evaluate, b: int) -> tuple[Tensor, list[list[Part]]]:
    """Outputs (b, m) and, for each output, the part of each layer."""
    modules = {name: twin.get_submodule(name) for name in layers.batch_dims}
    y, calls = _forward(evaluate, modules, b, {name for name, dim in layers.batch_dims.items() if dim == SHARED})
    blocks = []
    for i, column in enumerate(y.unbind(dim=1)):
        deltas = _deltas(column, calls, retain_graph=i < y.shape[1] - 1)
        try:
            made = [_part(modules[n], calls[n], deltas[n], b, dim) for n, dim in layers.batch_dims.items()]
        except Exception as error:
            raise UnlikeError from error
        blocks.append([compact(cheapest(part)) for part in made])
    return y.detach(), blocks


def owned(layer: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters that are used where the layer is called, by their names in it."""
    inner = {id(w) for module in _inner(layer) for w in module.parameters()}
    return {name: w for name, w in layer.named_parameters() if w.requires_grad and ("." not in name or id(w) in inner)}


def _inner(layer: nn.Module) -> Iterator[nn.Module]:
    """Modules that are not called, or not with rows, but lend their parameters to the layer."""
    if isinstance(layer, nn.MultiheadAttention):
        yield layer.out_proj
    if is_parametrized(layer):
        yield layer.parametrizations  # type: ignore[misc]


def _candidates(twin: nn.Module) -> dict[str, nn.Module]:
    """Layers that have their parameters to themselves. The network itself, if it is no layer, is none."""
    uses = Counter(id(w) for module in twin.modules() for w in module._parameters.values())
    inner = {id(module) for layer in twin.modules() for each in _inner(layer) for module in each.modules()}
    return {
        name: layer
        for name, layer in twin.named_modules()
        if id(layer) not in inner
        and (name or _kind(layer) or isinstance(layer, nn.RNNBase))
        and (own := owned(layer))
        and all(uses[id(w)] == 1 for w in own.values())
    }


def _kind(layer: nn.Module) -> Callable[..., Part] | None:
    """Of a layer whose gradient is known in closed form; a parametrised one is not such a layer any more."""
    known = next((base for base in type(layer).__mro__ if base in KINDS), None)
    if known is None or type(layer).forward is not known.forward:
        return None
    plain = set(layer._parameters) <= {"weight", "bias"} and layer._parameters.get("weight") is not None
    return KINDS[known] if plain else None


def _names(name: str, layer: nn.Module) -> tuple[str, ...]:
    return tuple(f"{name}.{key}" if name else key for key in owned(layer))


def _forward(
    evaluate: Evaluate, layers: Mapping[str, nn.Module], b: int, shared: set[str]
) -> tuple[Tensor, dict[str, list[Call]]]:
    calls: dict[str, list[Call]] = {name: [] for name in layers}

    def watch(name: str) -> Callable[..., Any]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if not any(y.requires_grad for y in real_tensors(output)):  # called without gradients
                return None
            if name in shared:
                output = _for_each_row(output, b)
            # the edge, not the tensor: what follows may work in place
            edges = [get_gradient_edge(y) if y.requires_grad else None for y in real_tensors(output)]
            args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
            calls[name].append(Call(args, kwargs, tuple(edges)))
            return output if name in shared else None

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


def _for_each_row(output: Tensor, b: int) -> Tensor:
    """(t, o) or (1, t, o) as (b, t, o), so that each row has a gradient of its own there."""
    if (output.ndim == 3 and len(output) == 1) or output.ndim == 2:
        return output.expand(b, *output.shape[-2:])
    return output


def _deltas(y: Tensor, calls: dict[str, list[Call]], retain_graph: bool = False) -> dict[str, list[Deltas]]:
    """The gradient of each row's output with respect to what each layer returned, call by call."""
    edges = [edge for made in calls.values() for call in made for edge in call.outputs if edge is not None]
    if not edges or not y.requires_grad:
        return {name: [[None] * len(call.outputs) for call in made] for name, made in calls.items()}
    # rows do not depend on each other, so the sum's gradient is that of each
    gradients = iter(torch.autograd.grad(y.sum(), edges, allow_unused=True, retain_graph=retain_graph))
    return {
        name: [[None if edge is None else next(gradients) for edge in call.outputs] for call in made]
        for name, made in calls.items()
    }


def _part(layer: nn.Module, calls: list[Call], deltas: list[Deltas], b: int, dim: int) -> Part:
    own = {name: w.detach() for name, w in owned(layer).items()}
    made: list[Part] = []
    for call, arrived in zip(calls, deltas, strict=True):
        if all(delta is None for delta in arrived):
            continue
        if kind := _kind(layer):
            x, (delta,) = call.args[0] if call.args else call.kwargs["input"], arrived
            assert delta is not None
            if dim == SHARED:
                made.append(kind(layer, x.expand(b, delta.shape[1]), delta, b))
            else:
                made.append(kind(layer, x.movedim(dim, 0), delta.movedim(dim, 0), b))
        elif isinstance(layer, nn.RNNBase) and not is_parametrized(layer):
            made.append(recurrent(layer, (*call.args, *call.kwargs.values()), arrived, b))
        else:
            made.append(alone(layer, own, call.args, call.kwargs, arrived, b, dim))
    if not made:  # never used
        return Rows(torch.cat([w.new_zeros(b, w.numel()) for w in own.values()], dim=1))
    return joined(made)


def _flat(gradient: Tensor | None, w: Tensor) -> Tensor:
    return torch.zeros_like(w).flatten() if gradient is None else gradient.flatten()
