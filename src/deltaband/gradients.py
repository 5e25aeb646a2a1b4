"""Per-row gradients of a network: the rows of J."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import capture
from .batch import CHUNK_BYTES, CHUNK_ROWS_AT_LEAST, GradientBatch, Held
from .capture import Layers
from .choice import Choice, chosen, owner
from .inputs import Inputs
from .layers import Part, Rows
from .twin import plain_autograd, twin, unwrapped

CHUNK_BYTES_AT_MOST = 256 * 2**20
CHUNK_ROWS_AT_MOST = 4096
EXAMINED = 8  # rows that tell which layers do without rows
PAST_THE_TREE = (
    "some weights are reached past the module tree (a lambda or a list that holds a layer or a parameter), so their "
    "gradients would be missing: register them as submodules or parameters"
)

Head = Callable[[Tensor], Tensor]  # (b, M) -> (b, m): of a network's outputs what is asked about


class Network:
    """A trained network as a differentiable function of its parameters: m numbers for each row of its inputs.

    `output` picks a tensor from whatever the model returns, `head` makes of it, as (b, M), the (b, m) numbers whose
    gradients are asked for. Frozen parameters, and those not chosen, are constants. A parameter used in several places
    counts once. With `layers` gradients come layer by layer, without rows where that is possible.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Layers | None = None,
        *,
        parameters: Choice = "all",
        output: Callable[[Any], Tensor] | None = None,
        head: Head | None = None,
        own_weights: bool = False,
    ) -> None:
        self.layers = layers
        self.head = head
        self._output = output
        model = unwrapped(model)
        names = chosen(model, parameters)
        self.twin = twin(model, names.__contains__, own_weights)
        self._trainable = {name: w for name, w in self.twin.named_parameters() if w.requires_grad}
        self._last = owner(next(reversed(self._trainable))) if parameters == "last" and self._trainable else None
        self.parameters = {name: w.detach() for name, w in self._trainable.items()}
        if not self.parameters:
            raise ValueError(
                "the model has no trainable parameters: the delta method needs gradients with respect to at least "
                "one; set requires_grad=True on the parameters that were trained"
            )
        for name, w in self.parameters.items():
            if w.dtype not in (torch.float32, torch.float64):
                raise TypeError(
                    f"parameter {name!r} is {w.dtype}, expected float32 or float64: "
                    "convert a copy of the model first, for instance with copy.deepcopy(model).float()"
                )
        tensors = list(self.parameters.values())
        self.n_parameters = sum(w.numel() for w in tensors)
        if self.n_parameters == 0:
            raise ValueError("the model's trainable parameters have no elements")
        if any(w.device.type == "meta" for w in tensors):
            raise TypeError("the model is on the meta device and has no weights: load them first")
        self.device = tensors[0].device
        self.dtype = tensors[0].dtype
        for w in tensors:
            self.dtype = torch.promote_types(self.dtype, w.dtype)
        self.n_outputs = 0  # not known before `check`
        self.n_returned = 0  # before the head
        self._outputs_at_once = 1

    def again(self, layers: Layers | None = None, head: Head | None = None, own_weights: bool = False) -> Network:
        """A network of the same parameters with a twin of its own: for another thread, or another head."""
        made = Network(self.twin, layers, output=self._output, head=head or self.head, own_weights=own_weights)
        made.n_outputs = self.n_outputs if head is None else 0
        return made

    def prepare(self, x: Any) -> Inputs:
        """A copy of `x` (a network may work on its input in place), in the network's dtype where it is not integer."""

        def prepared(x: Tensor) -> Tensor:
            x = x.detach().to(self.device, self.dtype if x.is_floating_point() else None, copy=True)
            return x.clone() if x.is_inference() else x

        return Inputs.of(x).map(prepared)

    def evaluate(self, x: Inputs, parameters: dict[str, Tensor] | None = None) -> Tensor:  # (b, m)
        """What the head makes of the outputs, with the network's own parameters or others."""
        y = self._call(x, parameters).reshape(len(x), -1)
        return y if self.head is None else self.head(y)

    def _call(self, x: Inputs, parameters: dict[str, Tensor] | None = None) -> Any:
        args, kwargs = self._arguments(x)
        y = self.twin(*args, **kwargs) if parameters is None else functional_call(self.twin, parameters, args, kwargs)
        return y if self._output is None else self._output(y)

    def _arguments(self, x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Several tensors are several arguments, tensors by name are named ones, unless `forward` takes them as one."""
        if x.single:
            return x.tensors, {}
        if x.names is None:
            return ((x.tensors,) if _places(self.twin) == 1 and len(x.tensors) > 1 else x.tensors), {}
        by_name = dict(zip(x.names, x.tensors, strict=True))
        return ((), by_name) if _takes(self.twin, x.names) else ((by_name,), {})

    def check(self, x: Any) -> int:
        """How many rows of `x` go into one chunk. Raises unless the network gives real numbers for each row of `x`.

        Two rows are enough to tell, and to measure what a pass will have in memory of each: what backward remembers, or
        what the layers give, where it remembers nothing because they are frozen.
        """
        x = self.prepare(Inputs.of(x)[:2])
        b = len(x)
        weights = {w.data_ptr() for w in self.twin.parameters()}
        remembered = given = 0
        last: str | None = None

        def pack(tensor: Tensor) -> Tensor:
            nonlocal remembered
            remembered += 0 if tensor.data_ptr() in weights else tensor.nbytes
            return tensor

        def weigh(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                nonlocal given, last
                given += output.nbytes if isinstance(output, Tensor) else 0
                last = name if any(True for _ in module.parameters()) else last

            return hook

        with ExitStack() as stack:
            stack.enter_context(plain_autograd(self.device))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
            for name, module in self.twin.named_modules():
                if next(module.children(), None) is None or name == self._last:
                    stack.callback(module.register_forward_hook(weigh(name)).remove)
            try:
                y = self._call(x.map(torch.clone))
            except Exception as error:
                integer = any(not tensor.is_floating_point() for tensor in x.tensors)
                hint = "; if these are not indices of an Embedding, pass x.float()" if integer else ""
                raise ValueError(f"the network could not be evaluated on a batch of {x}: {error}{hint}") from error
            self._check_output(y, b)
            y = self._headed(y, b)
        if b > 1:
            self._check_alone(x[:1], y[0].detach())
        if self._last is not None and last not in (None, self._last):
            raise ValueError(
                f"parameters='last' takes the layer that was registered last, {self._last!r}, but {last!r} runs last: "
                f"name it, parameters=['{last}.*']"
            )
        own = self.n_parameters * self.dtype.itemsize
        if self.layers is not None:
            own = self.layers.factor_bytes + self.layers.working_bytes
        pass_bytes = (x.nbytes + 2 * max(remembered, given)) // b
        self._outputs_at_once = max(1, min(self.n_outputs, CHUNK_BYTES_AT_MOST // max(own, 1)))
        row_bytes = own * self._outputs_at_once + pass_bytes
        fewest = max(1, min(CHUNK_ROWS_AT_LEAST // self.n_outputs, CHUNK_BYTES_AT_MOST // row_bytes))
        return min(max(CHUNK_BYTES // row_bytes, fewest), CHUNK_ROWS_AT_MOST)

    def _headed(self, y: Tensor, b: int) -> Tensor:
        y = y.reshape(b, -1)
        self.n_returned = y.shape[1]
        y = y if self.head is None else self.head(y)
        self.n_outputs = y.shape[1]
        return y

    def _check_alone(self, x: Inputs, in_batch: Tensor) -> None:
        """Whether a row's outputs are its own."""
        with plain_autograd(self.device), torch.no_grad():
            try:
                alone = self.evaluate(x.map(torch.clone))[0]
            except Exception as error:
                raise ValueError(f"the network could not be evaluated on a single row: {error}") from error
        scale = 1e-5 * (1 + float(alone.abs().max().nan_to_num(0.0, 0.0, 0.0)))
        if not torch.allclose(in_batch, alone, rtol=1e-3, atol=scale, equal_nan=True):
            i = int((in_batch - alone).abs().nan_to_num(torch.inf).argmax())
            raise ValueError(
                "the network's output for a row depends on the other rows of the batch, or changes from call to "
                f"call ({alone[i].item():.4g} alone, {in_batch[i].item():.4g} in a batch): not supported"
            )

    def _check_output(self, y: Any, b: int) -> None:
        if not isinstance(y, Tensor):
            raise TypeError(
                f"the network must return one tensor, got {type(y).__name__}; pick the prediction with "
                "output=, for instance output=lambda out: out[0] or output=lambda out: out.logits"
            )
        if not y.is_floating_point():
            raise TypeError(f"the network must return real numbers, got {y.dtype}")
        rows = y.ndim in (1, 2) and len(y) == b and y.numel() > 0
        if not rows and not (b == 1 and y.ndim == 0):
            raise ValueError(
                f"the network returns shape {tuple(y.shape)} for a batch of {b} rows, expected ({b},), or ({b}, m) for "
                "m outputs; pick some of it with output=, for instance output=lambda y: y[:, -1]"
            )

    def examine(self, x: Any) -> Layers:
        """Find out which layers do without rows, by some of the rows of `x`; gradients come layer by layer from now."""
        x = self.prepare(_distinct(Inputs.of(x)))
        with plain_autograd(self.device):
            try:
                past_the_tree = self.evaluate(x.map(torch.clone), self.parameters).requires_grad
                self.layers = capture.examine(self.twin, lambda: self.evaluate(x.map(torch.clone)), len(x))
            except RuntimeError as error:
                raise TypeError(f"the network could not be differentiated: {error}") from error
        if past_the_tree:
            raise TypeError(PAST_THE_TREE)
        if self.layers.rest and not self._vmap_works(self.layers.rest, x):
            self.layers = replace(self.layers, vmap=False)
        return self.layers

    def take_rows(self, x: Any) -> None:
        """Whole rows in one piece from now on, if that works on the rows of `x`."""
        if self._vmap_works(tuple(self.parameters), self.prepare(Inputs.of(x))):
            self.layers = None

    def _vmap_works(self, names: tuple[str, ...], x: Inputs) -> bool:
        """Whether torch.func gives the gradients that plain autograd does, on two rows, and without falling back to a
        loop of its own, of which it warns."""
        x = x[:2]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                _, fast = self._vmapped(names, x, slice(None))
            except Exception:
                return False
        _, plain = self._looped(names, x, slice(None))
        return bool(torch.allclose(fast, plain, rtol=1e-3, atol=1e-4 * float(plain.abs().max())))

    def groups(self) -> Iterator[slice]:
        """The outputs, so many at a time that the gradients of one row fit into memory."""
        for start in range(0, self.n_outputs, self._outputs_at_once):
            yield slice(start, min(start + self._outputs_at_once, self.n_outputs))

    def gradients(self, x: Any, group: slice = slice(None)) -> tuple[Tensor, GradientBatch]:
        """Outputs (b, m) and their gradients, from one forward pass: those of the first output of all rows, those of
        the second, and so on."""
        x = self.prepare(x)
        if not self.n_outputs:
            self.check(x)
        if self.layers is None:
            outputs, rows = self._vmapped(tuple(self.parameters), x, group)
            return outputs, GradientBatch.of(*rows)
        with plain_autograd(self.device):
            outputs, parts = capture.parts(
                self.twin, self.layers, lambda: self.evaluate(x.map(torch.clone))[:, group], len(x)
            )
        blocks: list[list[Part]] = parts
        if self.layers.rest:
            compute = self._vmapped if self.layers.vmap else self._looped
            _, rows = compute(self.layers.rest, x, group)
            blocks = [[*block, Rows(of_output)] for block, of_output in zip(parts, rows, strict=True)]
        return outputs, GradientBatch(tuple(map(Held, blocks)))

    def _vmapped(self, names: tuple[str, ...], x: Inputs, group: slice) -> tuple[Tensor, Tensor]:
        """Outputs (b, m) and rows of J (m, b, p) for some of the parameters."""
        varied = {name: self.parameters[name] for name in names}
        others = {name: w for name, w in self.parameters.items() if name not in varied}

        def outputs(varied: dict[str, Tensor], *row: Tensor) -> Tensor:  # (m,)
            one = replace(x, tensors=tuple(part.unsqueeze(0) for part in row))
            return self.evaluate(one, {**others, **varied})[0, group]

        def single(varied: dict[str, Tensor], *row: Tensor) -> Tensor:
            return outputs(varied, *row)[0]

        def several(varied: dict[str, Tensor], *row: Tensor) -> tuple[dict[str, Tensor], Tensor]:
            y, pull = vjp(lambda varied: outputs(varied, *row), varied)  # type: ignore[misc]
            return vmap(pull)(torch.eye(len(y), dtype=y.dtype, device=y.device))[0], y

        is_single = self.n_outputs == 1
        each: Callable[..., tuple[dict[str, Tensor], Tensor]] = grad_and_value(single) if is_single else several
        # the other kernels of attention have no batching rule
        with plain_autograd(self.device), sdpa_kernel(SDPBackend.MATH):
            try:
                by_name, y = vmap(each, in_dims=(None, *[0] * len(x.tensors)))(varied, *x.tensors)
            except Exception as error:
                raise TypeError(f"torch.func could not compute per-row gradients of this network: {error}") from error
        if is_single:
            y, by_name = y[:, None], {name: g[:, None] for name, g in by_name.items()}
        b, m = y.shape
        rows = torch.cat([g.reshape(b, m, -1).to(self.dtype) for g in by_name.values()], dim=2).movedim(1, 0)
        if y.requires_grad or rows.requires_grad:
            raise TypeError(PAST_THE_TREE)
        return y, rows

    def _looped(self, names: tuple[str, ...], x: Inputs, group: slice) -> tuple[Tensor, Tensor]:
        """The same by plain autograd, row by row and output by output."""
        varied = [self._trainable[name] for name in names]
        outputs, rows = [], []
        with plain_autograd(self.device):
            for one in x.split(1):
                y = self.evaluate(one.map(torch.clone))[0, group]
                of_row = [torch.autograd.grad(value, varied, retain_graph=True, allow_unused=True) for value in y]
                rows.append(torch.stack([_flat(gradients, varied, self.dtype) for gradients in of_row]))
                outputs.append(y.detach())
        return torch.stack(outputs), torch.stack(rows, dim=1)

    def outputs(self, x: Any) -> Tensor:
        """Outputs (b, m) alone, without gradients."""
        x = Inputs.of(x)
        with plain_autograd(self.device), torch.no_grad():
            return torch.cat([self.evaluate(self.prepare(part)) for part in x.split(self.check(x))])


def _flat(gradients: tuple[Tensor | None, ...], parameters: list[nn.Parameter], dtype: torch.dtype) -> Tensor:
    pairs = zip(gradients, parameters, strict=True)
    return torch.cat([capture.dense(gradient, w).to(dtype) for gradient, w in pairs])


def _distinct(x: Inputs) -> Inputs:
    """Up to EXAMINED rows that differ; a single row beside itself with some noise, where that is possible."""
    rows = x[np.unique(np.linspace(0, len(x) - 1, EXAMINED).round().astype(int))]
    if len(rows) > 1 and not all(bool((tensor == tensor[:1]).all()) for tensor in rows.tensors):
        return rows
    rows = rows[:1]
    if not any(tensor.is_floating_point() for tensor in rows.tensors):
        return rows
    generator = torch.Generator().manual_seed(0)

    def noisy(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor + 0.1 * torch.randn(tensor.shape, generator=generator).to(tensor) * (1 + tensor.abs())

    return Inputs.cat([rows, rows.map(noisy)])


def _signature(module: nn.Module) -> list[inspect.Parameter]:
    return list(inspect.signature(module.forward).parameters.values())


def _places(module: nn.Module) -> float:
    """How many arguments `forward` takes by position."""
    kinds = [parameter.kind for parameter in _signature(module)]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return float("inf")
    return sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)


def _takes(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether `forward` takes arguments of these names."""
    parameters = _signature(module)
    by_name = {p.name for p in parameters if p.kind is not inspect.Parameter.POSITIONAL_ONLY}
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters) or set(names) <= by_name
