"""The parts of a batch's gradients, layer by layer: hooks on one forward pass see what each layer is given, and one
backward pass gives the gradients of what it returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_map_only

from ...errors import LayerMismatchError
from ...storage.encoding import storable
from .factors import Part, Rows, cheapest, compact, joined
from .generic import alone, leaves, real_tensors
from .recurrent import recurrent
from .rules import KINDS

SHARED = -1  # in the place of a dimension: no rows in what the layer is given, as for the places of a sequence
DEPENDS_ON_NOTHING = (
    "the network's output does not depend on any trainable parameter, of those chosen: all gradients are zero"
)

Places = frozenset[int | str]  # of arguments


@storable
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
    given: dict[str, frozenset[Places]] = field(default_factory=dict)  # where layers of no known kind had tensors

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

    @property
    def given(self) -> Places:
        places: list[tuple[int | str, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        return frozenset(i for i, value in places if any(isinstance(leaf, Tensor) for leaf in leaves(value)))


Evaluate = Callable[[], Tensor]  # (b, m)
Deltas = list[Tensor | None]  # of one call


def parts(twin: nn.Module, layers: Layers, evaluate: Evaluate, b: int) -> tuple[Tensor, list[list[Part]]]:
    """Outputs (b, m) and, for each output, the part of each layer."""
    modules = {name: twin.get_submodule(name) for name in layers.batch_dims}
    y, calls = forward(evaluate, modules, b, {name for name, dim in layers.batch_dims.items() if dim == SHARED})
    if any(call.given not in given for name, given in layers.given.items() for call in calls[name]):
        raise LayerMismatchError
    blocks = []
    for i, column in enumerate(y.unbind(dim=1)):
        deltas, made = deltas_of(column, calls, retain_graph=i < y.shape[1] - 1), []
        for name, dim in layers.batch_dims.items():
            try:
                part = part_of(modules[name], calls[name], deltas[name], b, dim)
            except Exception as error:
                raise LayerMismatchError from error
            made.append(compact(cheapest(part)))
        blocks.append(made)
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


def candidates(twin: nn.Module) -> dict[str, nn.Module]:
    """Layers that have their parameters to themselves. The network itself, if it is no layer, is none."""
    uses = Counter(id(w) for module in twin.modules() for w in module._parameters.values())
    inner = {id(module) for layer in twin.modules() for each in _inner(layer) for module in each.modules()}
    return {
        name: layer
        for name, layer in twin.named_modules()
        if id(layer) not in inner
        and (name or is_known(layer))
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


def is_known(layer: nn.Module) -> bool:
    """Whether it is clear what each of its arguments is."""
    return _kind(layer) is not None or isinstance(layer, nn.RNNBase | nn.MultiheadAttention)


def names_of(name: str, layer: nn.Module) -> tuple[str, ...]:
    return tuple(f"{name}.{key}" if name else key for key in owned(layer))


def forward(
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
            given = {key: _detached(value) for key, value in kwargs.items()}
            calls[name].append(Call(tuple(map(_detached, args)), given, tuple(edges)))
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


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else tree_map_only(Tensor, Tensor.detach, value)


def _for_each_row(output: Tensor, b: int) -> Tensor:
    """(t, o) or (1, t, o) as (b, t, o), so that each row has a gradient of its own there."""
    if (output.ndim == 3 and len(output) == 1) or output.ndim == 2:
        return output.expand(b, *output.shape[-2:])
    return output


def deltas_of(y: Tensor, calls: dict[str, list[Call]], retain_graph: bool = False) -> dict[str, list[Deltas]]:
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


def part_of(layer: nn.Module, calls: list[Call], deltas: list[Deltas], b: int, dim: int) -> Part:
    """The gradient of a layer, of all its calls together."""
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
            own = {name: w.detach() for name, w in owned(layer).items()}
            made.append(alone(layer, own, call.args, call.kwargs, arrived, b, dim))
    if not made:  # never used
        return Rows(torch.cat([w.detach().new_zeros(b, w.numel()) for w in owned(layer).values()], dim=1))
    return joined(made)
