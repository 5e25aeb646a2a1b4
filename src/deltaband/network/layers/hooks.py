"""The parts of a batch's gradients: hooks record the input of each layer, a backward pass gives those of its output."""

import inspect
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ...storage.encoding import storable
from .factors import LAYER_RULES, DenseRows, Part, cheapest, compact, joined
from .recurrent import recurrent
from .segments import SEGMENTS, owners, padded

SHARED = -1  # instead of a dimension: the layer's input has no rows, as for the positions of a sequence
DEPENDS_ON_NOTHING = (
    "the network's output does not depend on any trainable parameter, of those chosen: all gradients are zero"
)

Evaluate = Callable[[], Tensor]  # (b, m)
Deltas = list[Tensor | None]  # of one call
Places = frozenset[int | str]  # of arguments


@storable
@dataclass(frozen=True)
class Layers:
    """The layers whose gradients hooks can compute, by name, and the parameters that are left over."""

    batch_dims: dict[str, int]  # of each such layer: the dimension of its inputs that holds the rows
    parameters: tuple[tuple[str, ...], ...]  # the names of the parameters of each of them, in the same order
    rest: tuple[str, ...]  # parameters that need rows of their own
    factor_bytes: int  # size of the parts of one row, those of the rest included
    inner_flops: int  # multiplications of an inner product of two rows
    positions: int  # of those parts that are outer products
    working_bytes: int  # memory needed besides while they are computed
    vmap: bool = True  # whether torch.func computes the rows of the rest; otherwise a plain loop does
    given: dict[str, frozenset[Places]] = field(default_factory=dict)  # tensor arguments of layers without a rule

    @property
    def owners(self) -> tuple[tuple[str, ...], ...]:
        """The names of the parameters of each part of J, in the order of its columns."""
        return (*self.parameters, self.rest) if self.rest else self.parameters

    @property
    def order(self) -> tuple[str, ...]:
        """The names of all parameters in the order of the columns of J."""
        return tuple(name for names in self.owners for name in names)

    def only(self, owners: Container[int]) -> "Layers":
        """Return some of the layers, by their numbers among the owners: gradients with respect to their parameters."""
        kept = [i for i in range(len(self.parameters)) if i in owners]
        dims = list(self.batch_dims.items())
        rest = self.rest if len(self.parameters) in owners else ()
        return replace(
            self,
            batch_dims=dict(dims[i] for i in kept),
            parameters=tuple(self.parameters[i] for i in kept),
            rest=rest,
        )


class Call(NamedTuple):
    """One call of a layer: its arguments, and where the gradients of the real tensors that it returned arrive."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[GradientEdge | None, ...]

    @property
    def given(self) -> Places:
        places: list[tuple[int | str, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        return frozenset(i for i, value in places if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)))


def parts(
    model: nn.Module,
    layers: Layers,
    evaluate: Evaluate,
    b: int,
    left_out: Container[str] = (),
    keep_graph: bool = False,
) -> tuple[Tensor, list[list[Part] | None]]:
    """Compute outputs (b, m) and, for each layer, its part for each output; none where these rows use it as the first
    ones did not, or where its parameters are to be left out."""
    modules = {name: model.get_submodule(name) for name in layers.batch_dims}
    shared = {name for name, dim in layers.batch_dims.items() if dim == SHARED}
    y, calls = forward(evaluate, modules, b, shared, sparse=keep_graph)
    paddings = by_item(y, {name: calls[name] for name, dim in layers.batch_dims.items() if dim == SEGMENTS})
    wanted = [
        not any(call.given not in layers.given.get(name, (call.given,)) for call in calls[name])
        and not any(each in left_out for each in names)
        for name, names in zip(modules, layers.parameters, strict=True)
    ]
    found: list[list[Part] | None] = [[] if each else None for each in wanted]
    for i, column in enumerate(y.unbind(dim=1)):
        deltas = deltas_of(column, calls, retain_graph=i < y.shape[1] - 1 or keep_graph)
        for layer, (name, dim) in enumerate(layers.batch_dims.items()):
            if (made := found[layer]) is None:
                continue
            try:
                made.append(
                    compact(cheapest(part_of(modules[name], calls[name], deltas[name], b, dim, paddings.get(name))))
                )
            except Exception:
                found[layer] = None
    return y, found


def owned(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters that a call of the layer uses, by their names in it."""
    inner = {id(w) for module in _inner(layer) for w in module.parameters()}
    return {name: w for name, w in layer.named_parameters() if w.requires_grad and ("." not in name or id(w) in inner)}


def _inner(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield modules that are not called, or not with rows, but whose parameters the layer uses."""
    if isinstance(layer, nn.MultiheadAttention):
        yield layer.out_proj
    if is_parametrized(layer):
        yield layer.parametrizations  # type: ignore[misc]


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that share no parameters with others; not the model itself, unless it is a known layer."""
    uses = Counter(id(w) for module in model.modules() for w in module._parameters.values())
    inner = {id(module) for layer in model.modules() for each in _inner(layer) for module in each.modules()}
    return {
        name: layer
        for name, layer in model.named_modules()
        if id(layer) not in inner
        and (name or is_known(layer))
        and (own := owned(layer))
        and all(uses[id(w)] == 1 for w in own.values())
    }


def _rule(layer: nn.Module) -> Callable[..., Part] | None:
    """Return the closed form of the layer's gradient, if it has one; a parametrised layer has none."""
    known = next((base for base in type(layer).__mro__ if base in LAYER_RULES), None)
    if known is None or type(layer).forward is not known.forward:
        return None
    plain = set(layer._parameters) <= {"weight", "bias"} and layer._parameters.get("weight") is not None
    return LAYER_RULES[known] if plain else None


def is_known(layer: nn.Module) -> bool:
    """Return whether the meaning of each of its arguments is known."""
    return _rule(layer) is not None or isinstance(layer, nn.RNNBase | nn.MultiheadAttention)


def names_of(name: str, layer: nn.Module) -> tuple[str, ...]:
    return tuple(f"{name}.{key}" if name else key for key in owned(layer))


def forward(
    evaluate: Evaluate, layers: Mapping[str, nn.Module], b: int, shared: set[str], sparse: bool = False
) -> tuple[Tensor, dict[str, list[Call]]]:
    """Evaluate the network and record every call of these layers; gradients of tables can be sparse."""
    calls: dict[str, list[Call]] = {name: [] for name in layers}
    recording = True  # a hook that an interrupt leaves behind does nothing

    def record(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not recording or not any(y.requires_grad for y in real_tensors(output)):  # called without gradients
            return None
        if name in shared and ((output.ndim == 3 and len(output) == 1) or output.ndim == 2):
            output = output.expand(b, *output.shape[-2:])  # so that each row has a gradient of its own there
        # the edge, not the tensor: what follows may work in place
        edges = [get_gradient_edge(y) if y.requires_grad else None for y in real_tensors(output)]
        given = {key: _detached(value) for key, value in kwargs.items()}
        calls[name].append(Call(tuple(map(_detached, args)), given, tuple(edges)))
        return output if name in shared else None

    try:
        with ExitStack() as stack:
            for name, layer in layers.items():
                handle = layer.register_forward_hook(partial(record, name), prepend=True, with_kwargs=True)
                stack.callback(handle.remove)
                if sparse and isinstance(layer, nn.Embedding | nn.EmbeddingBag):
                    layer.sparse = True
                    stack.callback(setattr, layer, "sparse", False)
            return evaluate(), calls
    finally:
        recording = False


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else tree_map_only(Tensor, Tensor.detach, value)


def deltas_of(y: Tensor, calls: dict[str, list[Call]], retain_graph: bool = False) -> dict[str, list[Deltas]]:
    """Compute the gradient of each row's output with respect to what each layer returned, call by call."""
    edges = [edge for made in calls.values() for call in made for edge in call.outputs if edge is not None]
    live = edges and y.requires_grad  # rows do not depend on each other, so the sum's gradient is that of each
    found = torch.autograd.grad(y.sum(), edges, allow_unused=True, retain_graph=retain_graph) if live else ()
    gradients = chain(found, repeat(None))
    return {
        name: [[None if edge is None else next(gradients) for edge in call.outputs] for call in made]
        for name, made in calls.items()
    }


def by_item(y: Tensor, calls: dict[str, list[Call]]) -> dict[str, list[Tensor | None]]:
    """Return which item each row of these layers belongs to, for each of their calls."""
    found = partial(deltas_of, calls=calls, retain_graph=True)
    return owners(y, found) if calls and y.requires_grad else {}


def part_of(
    layer: nn.Module,
    calls: list[Call],
    deltas: list[Deltas],
    b: int,
    dim: int,
    rows: Sequence[Tensor | None] | None = None,  # the items of the rows of each call, for SEGMENTS
) -> Part:
    """Compute the gradient of a layer, over all its calls."""
    if dim == SEGMENTS:
        calls, deltas, dim = *padded(calls, deltas, b, rows or ()), 0
    made: list[Part] = []
    for call, arrived in zip(calls, deltas, strict=True):
        if all(delta is None for delta in arrived):
            continue
        if rule := _rule(layer):
            x, (delta,) = call.args[0] if call.args else call.kwargs["input"], arrived
            assert delta is not None
            if dim != SHARED:
                x, delta = x.movedim(dim, 0), delta.movedim(dim, 0)
            made.append(rule(layer, x.expand(b, delta.shape[1]) if dim == SHARED else x, delta, b))
        elif isinstance(layer, nn.RNNBase) and not is_parametrized(layer):
            made.append(recurrent(layer, (*call.args, *call.kwargs.values()), arrived, b))
        else:
            made.append(_per_row_vjp(layer, call, arrived, b, dim))
    if not made:  # never used
        return DenseRows(torch.cat([w.detach().new_zeros(b, w.numel()) for w in owned(layer).values()], dim=1))
    return joined(made)


def _per_row_vjp(layer: nn.Module, call: Call, deltas: Deltas, b: int, dim: int) -> DenseRows:
    """Compute each row's vector–Jacobian product by torch.func, for a layer whose tensor arguments all hold the rows,
    each in one piece or in several consecutive ones; for attention it is known which does not."""
    parameters = {name: w.detach() for name, w in owned(layer).items()}
    bound = inspect.signature(layer.forward).bind(*call.args, **call.kwargs)
    dims = {name: tree_map(partial(_dim, layer, name, dim), value) for name, value in bound.arguments.items()}
    arrived = {i: torch.unflatten(delta, dim, (b, -1)) for i, delta in enumerate(deltas) if delta is not None}
    given = tree_map(lambda leaf, dim: leaf if dim is None else leaf.unflatten(dim, (b, -1)), bound.arguments, dims)

    def pulled(given: dict[str, Any], arrived: dict[int, Tensor]) -> dict[str, Tensor]:
        of_row = inspect.BoundArguments(bound.signature, given)

        def product(parameters: dict[str, Tensor]) -> Tensor:
            outputs = real_tensors(called_with(layer, parameters, of_row.args, of_row.kwargs))
            return torch.stack([(outputs[i] * delta).sum() for i, delta in arrived.items()]).sum()

        return grad(product)(parameters)  # `vjp` has to loop over the rows where a weight is parametrised

    with torch.no_grad(), math_attention():  # whatever else the layer holds needs no graph
        rows = vmap(pulled, in_dims=(dims, dim))(given, arrived)
    return DenseRows(torch.cat([rows[name].reshape(b, -1) for name in parameters], dim=1))


class _MathAttention:
    """Math attention for a while: torch has one switch, which the first user sets and the last one restores."""

    def __init__(self) -> None:
        self._lock, self._users, self._stack = threading.Lock(), 0, ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        entered = False
        try:
            with self._lock:
                if self._users == 0:
                    self._stack.enter_context(sdpa_kernel(SDPBackend.MATH))
                self._users, entered = self._users + 1, True
            yield
        finally:
            with self._lock:
                self._users -= entered
                if self._users == 0:
                    self._stack.close()


math_attention = _MathAttention()  # its other kernels have no rule for vmap


@contextmanager
def no_inner_loops() -> Iterator[None]:
    """Raise an error where torch.func would fall back to a slow loop, of which it only warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop because we have not yet implemented")
        yield


def _dim(layer: nn.Module, name: str, dim: int, value: Any) -> int | None:
    """Return which dimension of an argument holds the rows; None if none does."""
    if not isinstance(value, Tensor):
        return None
    if isinstance(layer, nn.MultiheadAttention) and name in ("attn_mask", "key_padding_mask"):
        return None if name == "attn_mask" and value.ndim == 2 else 0
    return dim


def called_with(module: nn.Module, tensors: Mapping[str, Tensor], args: Any, kwargs: Any = None) -> Any:
    """Call a module with some parameters and buffers, each wherever the module has that of this name.

    What torch would do about tied weights leaves a module that is registered under two names with those of the call.
    """
    places: dict[str, Tensor] = {}
    own = {id(w): tensors[name] for name, w in (*module.named_buffers(), *module.named_parameters()) if name in tensors}
    for path, part in module.named_modules():  # each once
        named = (*part._parameters.items(), *part._buffers.items())
        places |= {f"{path}.{key}".lstrip("."): own[id(w)] for key, w in named if id(w) in own}
    return functional_call(module, places, args, kwargs, tie_weights=False)


def real_tensors(output: Any) -> list[Tensor]:
    leaves = [output] if isinstance(output, Tensor) else tree_leaves(output)  # the first for speed
    return [y for y in leaves if isinstance(y, Tensor) and y.is_floating_point() and not y.is_nested]


def gradient(y: Tensor, varied: Sequence[Tensor]) -> Tensor:  # (p,)
    """Compute the gradient of one number; the graph is kept."""
    if not y.requires_grad:  # a row may go past all of them
        return torch.cat([torch.zeros_like(w).flatten() for w in varied])
    return torch.cat([g.flatten() for g in torch.autograd.grad(y, varied, retain_graph=True, materialize_grads=True)])
