"""A network with the gradients of its outputs as one graph of tensor operations, for any number of rows.

What `network/layers/hooks.py` does row by batch is traced once with a symbolic number of rows: the forward pass, the
backward pass to what each layer returned, and the layer rules. Recurrent layers are unrolled, as their fused kernels
fix the number of rows.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import PackedSequence

from ..data.inputs import Inputs
from ..errors import ExportError
from ..network.layers import hooks
from ..network.layers.factors import DenseRows, OuterProducts, Part, stacked
from ..network.layers.hooks import Layers, called_with
from ..network.layers.recurrent import unrolled
from ..network.network import Head, Network, reduced
from ..network.returned import Pick

TRACED_ROWS = (13, 17, 19, 23)  # numbers of rows to trace with: one that is no size of the inputs
CAN_TRACE = (
    "linear and convolutional layers, normalisation, embeddings, attention, recurrent layers of a fixed number of "
    "steps, and modules of any of these; control flow must not depend on the values of inputs"
)


@dataclass(frozen=True)
class Shape:
    """What a part of the gradients is besides its tensors."""

    kind: type[Part]
    tensors: tuple[str, ...]
    others: dict[str, Any]
    names: tuple[str, ...]  # of its parameters
    positions: int  # of outer products; 0 of others
    dtype: torch.dtype  # of its first tensor

    @property
    def is_outer_product(self) -> bool:
        """Whether a row is a single outer product, which need not be formed."""
        return self.kind is OuterProducts and self.positions == 1


class TracedNetwork(nn.Module):
    """Rows of inputs in; outputs (b, m), what came with them, features of the rows, and gradients out."""

    def __init__(self, graph: nn.Module, state: Sequence[Tensor], shapes: Sequence[Shape]) -> None:
        super().__init__()
        self.graph, self.shapes = graph, shapes
        for i, tensor in enumerate(state):
            self.register_buffer(f"state_{i}", tensor)
        self.n_state = len(state)

    def forward(self, x: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, list[Part]]:
        flat = list(self.graph([getattr(self, f"state_{i}") for i in range(self.n_state)], list(x)))
        outputs, companion, features, *rest = flat
        tensors, parts = iter(rest), []
        for shape in self.shapes:
            parts.append(shape.kind(**shape.others, **{name: next(tensors) for name in shape.tensors}))
        return outputs, companion, features, parts  # the gradients of the first output for all rows, then the second…


def trace(
    network: Network, layers: Layers, head: Head, x: Inputs, companion: Pick | None, features: bool
) -> TracedNetwork:
    """Return the network as a graph.

    Args:
        network: The network, without head.
        layers: How its gradients come by.
        head: Of the outputs (b, M) those (b, m) that have gradients.
        x: Some rows of its inputs, of whose format all will be.
        companion: What else to pick from what the model returns.
        features: Whether the features of rows are wanted.

    Raises:
        ExportError: If the network cannot be traced.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    if layers.rest and not layers.vmap:
        name = layers.rest[0]
        raise ExportError(
            f"the gradients of {name!r} come by a plain loop over the rows, which no program has: torch.func cannot "
            f"compute them. Leave the parameter out (parameters=), or use {CAN_TRACE}"
        )
    copied = network.copy().model_copy
    whole = _Whole(copied.module, copied.output, companion, layers, head, features, x)
    named = {**dict(copied.module.named_parameters()), **dict(copied.module.named_buffers())}
    state = [tensor.detach().cpu() for tensor in named.values()]
    trainable = set(copied.parameters)

    def flat(state: list[Tensor], x: list[Tensor]) -> list[Tensor]:
        given = {
            f"module.{name}": tensor.detach().requires_grad_() if name in trainable else tensor
            for name, tensor in zip(named, state, strict=True)
        }
        with torch.enable_grad():
            found = called_with(whole, given, (x,))
        return [tensor.detach() for tensor in found]

    sizes = {size for tensor in x.tensors for size in tensor.shape[1:]}
    n = next(each for each in TRACED_ROWS if each not in sizes)
    rows = copied.prepare(x[torch.arange(n) % len(x)]).map(Tensor.cpu)
    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def symbolic(tensor: Tensor) -> Any:
        dynamic = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (tensor.ndim - 1)]
        return fake.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))

    try:
        # without Python's dispatcher some operations would take the number of rows for a constant
        with fake, enable_python_dispatcher(), hooks.math_attention():
            given = [fake.from_tensor(t, static_shapes=True) for t in state], [symbolic(t) for t in rows.tensors]
            graph = make_fx(flat, _allow_non_fake_inputs=True)(*given)
    except Exception as error:
        raise ExportError(
            f"the network could not be written as a graph of tensors: {first_line(error)}. What can be: {CAN_TRACE}"
        ) from error
    size = given[1][0].shape[0]
    if isinstance(size, int) or size.node.maybe_as_int() is not None:
        rest = "parameters= can leave out those that no layer has" if layers.rest else "such as len(x), for x.shape[0]"
        raise ExportError(
            "the network, or its gradients, can only be written for one number of rows: some operation reads that as a "
            f"constant ({rest}). What can be: {CAN_TRACE}"
        )
    return TracedNetwork(graph, state, whole.shapes)


def first_line(error: Exception) -> str:
    """Return what an error says, without torch's advice to its own developers."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class _Whole(nn.Module):
    """Forward and backward pass of a module, and the layers' rules."""

    def __init__(
        self,
        module: nn.Module,
        output: Pick | None,
        companion: Pick | None,
        layers: Layers,
        head: Head,
        features: bool,
        x: Inputs,
    ) -> None:
        super().__init__()
        self.module, self.output, self.companion, self.layers = module, output, companion, layers
        self.head, self.features, self.x = head, features, x
        self.shapes: list[Shape] = []
        for layer in module.modules():
            if isinstance(layer, nn.RNNBase):
                layer.forward = partial(_recurrent_forward, layer)

    def forward(self, x: list[Tensor]) -> list[Tensor]:
        b = x[0].shape[0]
        returned: list[Any] = []
        layers, module = self.layers, self.module
        modules = {name: module.get_submodule(name) for name in layers.batch_dims}
        shared = {name for name, dim in layers.batch_dims.items() if dim == hooks.SHARED}
        given: list[Tensor] = []
        records = [
            layer.register_forward_pre_hook(lambda _, args: given.append(args[0]))
            for layer in module.modules()
            if isinstance(layer, nn.Linear)
        ]
        try:
            y, calls = hooks.forward(lambda: self._evaluate(x, returned), modules, b, shared)
        finally:
            for record in records:
                record.remove()
        of_layers: list[list[Part]] = [[] for _ in layers.batch_dims]
        for column in y.unbind(dim=1):
            deltas = hooks.deltas_of(column, calls, retain_graph=True)
            for parts, (name, dim) in zip(of_layers, layers.batch_dims.items(), strict=True):
                layer, made = modules[name], calls[name]
                if isinstance(layer, nn.MultiheadAttention) and len(made) == 1 and _is_plain(layer):
                    parts.append(_attention(layer, made[0], deltas[name][0][0], b))
                else:
                    parts.append(hooks.part_of(layer, made, deltas[name], b, dim))
        parts = list(map(stacked, of_layers))
        if layers.rest:
            parts.append(self._rest(x, y.shape[1]))
        self.shapes = [_shape(part, names) for part, names in zip(parts, layers.owners, strict=True)]
        nothing = y.new_zeros(b, 0)
        companion = nothing if self.companion is None else self.companion(returned[0]).reshape(b, -1)
        tensors = [getattr(part, name) for part, s in zip(parts, self.shapes, strict=True) for name in s.tensors]
        return [y, companion, self._features(x, given, nothing), *tensors]

    def _evaluate(self, x: list[Tensor], returned: list[Any] | None = None) -> Tensor:
        rows = Inputs(tuple(map(torch.clone, x)), self.x.names, self.x.single)
        args, kwargs = rows.arguments(self.module.forward)
        found = self.module(*args, **kwargs)
        if returned is not None:
            returned.append(found)
        y = found if self.output is None else self.output(found)
        return self.head(y.reshape(x[0].shape[0], -1))

    def _rest(self, x: list[Tensor], m: int) -> Part:
        """Compute the gradients of parameters that no layer's rule covers, row by row."""
        own = dict(self.module.named_parameters())
        varied = {name: own[name].detach() for name in self.layers.rest}

        def of_row(varied: dict[str, Tensor], *row: Tensor, o: int) -> Tensor:
            call = _Call(self, [part.unsqueeze(0) for part in row])
            return called_with(call, {f"whole.module.{name}": w for name, w in varied.items()}, ())[0, o]

        found = []
        for o in range(m):
            by_name = vmap(grad(partial(of_row, o=o)), in_dims=(None, *[0] * len(x)))(varied, *x)
            found.append(torch.cat([by_name[name].flatten(1) for name in self.layers.rest], dim=1))
        return DenseRows(torch.cat(found))

    def _features(self, x: list[Tensor], given: list[Tensor], nothing: Tensor) -> Tensor:
        """Compute what `Network.features` does."""
        if not self.features:
            return nothing
        if len(x) == 1 and x[0].ndim == 2 and x[0].is_floating_point():
            return reduced(x[0])
        last = given[-1].detach()
        return reduced(last.reshape(last.shape[0], -1, last.shape[-1]).mean(dim=1))


class _Call(nn.Module):
    """The outputs for some rows, as a module whose parameters can be others."""

    def __init__(self, whole: _Whole, rows: list[Tensor]) -> None:
        super().__init__()
        self.whole, self.rows = whole, rows

    def forward(self) -> Tensor:
        return self.whole._evaluate(self.rows)


def _shape(part: Part, names: tuple[str, ...]) -> Shape:
    values = {each.name: getattr(part, each.name) for each in fields(part)}
    tensors = tuple(name for name, value in values.items() if isinstance(value, Tensor))
    positions = int(part.delta.shape[1]) if isinstance(part, OuterProducts) else 0
    others = {name: value for name, value in values.items() if name not in tensors}
    return Shape(type(part), tensors, others, names, positions, values[tensors[0]].dtype)


class _Products:
    """The products of a recurrent layer's weights, of which no record is kept."""

    def __init__(self, layer: nn.RNNBase) -> None:
        self.layer = layer

    def linear(self, which: str, x: Tensor) -> Tensor:
        return F.linear(x, getattr(self.layer, f"weight_{which}"), getattr(self.layer, f"bias_{which}", None))


def _recurrent_forward(layer: nn.RNNBase, given: Any, state: Any = None) -> Any:
    """Do what the layer does, step by step."""
    if isinstance(given, PackedSequence):
        raise TypeError("packed sequences have no fixed number of steps: give the recurrent layer padded ones")
    x = given if layer.batch_first else given.transpose(0, 1)
    y, *states = unrolled(layer, _Products(layer), x, state, None)
    y = y if layer.batch_first else y.transpose(0, 1)
    return y, tuple(states) if isinstance(layer, nn.LSTM) else states[0]


def _is_plain(layer: nn.MultiheadAttention) -> bool:
    """Return whether attention has one weight for queries, keys and values, and all of its parameters are trainable."""
    plain = layer.in_proj_weight is not None and layer.bias_k is None and not layer.add_zero_attn
    return plain and all(w.requires_grad for w in layer.parameters())


def _attention(layer: nn.MultiheadAttention, call: hooks.Call, delta: Tensor | None, b: int) -> DenseRows:
    """Compute each row's gradient from that of the output: torch.func would fix the number of rows here."""
    bound = inspect.signature(layer.forward).bind(*call.args, **call.kwargs).arguments
    given = [bound[name] if layer.batch_first else bound[name].transpose(0, 1) for name in ("query", "key", "value")]
    assert delta is not None
    delta = delta if layer.batch_first else delta.transpose(0, 1)
    bias = layer.in_proj_bias
    weights = layer.in_proj_weight.detach().chunk(3)
    biases = [None] * 3 if bias is None else list(bias.detach().chunk(3))
    with torch.enable_grad():
        projected = [F.linear(x, w, c).requires_grad_() for x, w, c in zip(given, weights, biases, strict=True)]
        q, k, v = (y.reshape(b, y.shape[1], layer.num_heads, layer.head_dim).transpose(1, 2) for y in projected)
        scores = q @ k.transpose(2, 3) / math.sqrt(layer.head_dim)
        if (mask := bound.get("attn_mask")) is not None:
            mask = mask if mask.ndim == 2 else mask.reshape(b, layer.num_heads, *mask.shape[1:])
            scores = scores.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        if (padding := bound.get("key_padding_mask")) is not None:
            padding = padding[:, None, None, :]
            scores = scores.masked_fill(padding, -torch.inf) if padding.dtype == torch.bool else scores + padding
        mixed = (scores.softmax(dim=3) @ v).transpose(1, 2).flatten(2)
        of_mixed = delta @ layer.out_proj.weight.detach()
        deltas = torch.autograd.grad((mixed * of_mixed).sum(), projected)
    rows = [torch.cat([d.mT @ x for d, x in zip(deltas, given, strict=True)], dim=1).flatten(1)]
    rows += [] if bias is None else [torch.cat([d.sum(dim=1) for d in deltas], dim=1)]
    rows.append((delta.mT @ mixed.detach()).flatten(1))
    rows += [] if layer.out_proj.bias is None else [delta.sum(dim=1)]
    return DenseRows(torch.cat(rows, dim=1))
