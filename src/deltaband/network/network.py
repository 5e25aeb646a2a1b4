"""Per-row gradients of a network: the rows of J."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..data.inputs import Inputs
from ..errors import LayerMismatchError
from .gradient_batch import CHUNK_BYTES, CHUNK_ROWS_AT_LEAST, GradientBatch, Held
from .layers import hooks as capture
from .layers.factors import Part, Rows
from .layers.generic import real_tensors
from .layers.hooks import Layers
from .layers.probe import examine
from .model_copy import no_inner_loops, plain_autograd, twin, unwrapped
from .parameter_selection import Choice, chosen, last_layer, layers_of
from .per_row import PAST_THE_TREE, leaves, looped, plain, vmapped
from .preconditions import check_output, check_own, check_same, distinct, first_difference

CHUNK_BYTES_AT_MOST = 256 * 2**20
CHUNK_ROWS_AT_MOST = 4096
EXAMINED = 8  # rows that tell which layers do without rows
VERIFIED = 4  # rows that are compared with plain autograd later on

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
        self._last = last_layer(model) if parameters == "last" and self._trainable else None
        self._layers = set(layers_of(model))
        self.parameters = {name: w.detach() for name, w in self._trainable.items()}
        if not self.parameters:
            raise ValueError(
                "the model has no trainable parameters: the delta method needs gradients with respect to at least "
                "one; set requires_grad=True on the parameters that were trained"
            )
        for name, w in self.parameters.items():
            if w.dtype not in (torch.float32, torch.float64):
                hint = "convert a copy of the model first, for instance with copy.deepcopy(model).float()"
                if w.is_complex():
                    hint = "write it as its real and imaginary parts, or leave it out with parameters="
                raise TypeError(f"parameter {name!r} is {w.dtype}, expected float32 or float64: {hint}")
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
        kinds = {w.dtype for w in self.twin.parameters() if w.is_floating_point()}
        self._input_dtype = self.dtype if len(kinds) == 1 else None  # a frozen half of it may be of another
        self._rng = np.random.default_rng(0)
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
            x = x.detach().to(self.device, self._input_dtype if x.is_floating_point() else None, copy=True)
            return x.clone() if x.is_inference() else x

        return Inputs.of(x).map(prepared)

    def evaluate(self, x: Inputs, parameters: dict[str, Tensor] | None = None) -> Tensor:  # (b, m)
        """What the head makes of the outputs, with the network's own parameters or others."""
        y = self._call(x, parameters).reshape(len(x), -1)
        return y if self.head is None else self.head(y)

    def _fresh(self, x: Inputs) -> Tensor:
        """The same of a copy: a network may work on its input in place."""
        return self.evaluate(x.map(torch.clone))

    def _call(self, x: Inputs, parameters: dict[str, Tensor] | None = None) -> Any:
        args, kwargs = x.arguments(self.twin.forward)
        y = self.twin(*args, **kwargs) if parameters is None else functional_call(self.twin, parameters, args, kwargs)
        return y if self._output is None else self._output(y)

    def check(self, x: Any) -> int:
        """How many rows of `x` go into one chunk. Raises unless the network gives real numbers for each row of `x`.

        Two rows are enough to tell, and to measure what a pass will have in memory of each: what backward remembers, or
        what the layers give, where it remembers nothing because they are frozen.
        """
        x = self.prepare(Inputs.of(x)[:2])
        b = len(x)
        weights = {w.data_ptr() for w in self.twin.parameters()}
        versions = [w._version for w in self.twin.parameters()]
        remembered = given = 0
        last: str | None = None
        coarse: list[str] = []

        def pack(tensor: Tensor) -> Tensor:
            nonlocal remembered
            remembered += 0 if tensor.data_ptr() in weights else tensor.nbytes
            return tensor.detach()  # an output would hold the graph that holds it, for ever

        def weigh(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                nonlocal given, last
                given += output.nbytes if isinstance(output, Tensor) else 0
                last = name if name in self._layers else last
                if capture.is_known(module) and capture.owned(module):
                    coarse.extend(f"{name!r} in {each.dtype}" for each in real_tensors(output) if each.itemsize < 4)

            return hook

        def called() -> Any:
            try:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    return self._call(x.map(torch.clone))
            except Exception:  # a network that uses torch.func takes no such hooks; any other fails once more
                return self._call(x.map(torch.clone))

        with ExitStack() as stack:
            stack.enter_context(plain_autograd(self.device))
            for name, module in self.twin.named_modules():
                if next(module.children(), None) is None or name in self._layers:
                    stack.callback(module.register_forward_hook(weigh(name)).remove)
            try:
                y = called()
            except Exception as error:
                integer = any(not tensor.is_floating_point() for tensor in x.tensors)
                hint = "; if these are not indices of an Embedding, pass x.float()" if integer and x.single else ""
                hint += "" if x.single else f"; its forward takes {inspect.signature(self.twin.forward)}"
                raise ValueError(f"the network could not be evaluated on a batch of {x}: {error}{hint}") from error
            if coarse:
                raise TypeError(
                    f"the network computes {coarse[0]}, of weights in {self.dtype} (torch.autocast in its forward?): "
                    "such gradients are too coarse for JᵀJ; take the autocast off, or say enabled=self.training"
                )
            check_output(y, b)
            y = self._headed(y, b)
        if versions != [w._version for w in self.twin.parameters()]:
            raise ValueError(
                "the network's weights change while it is called: it writes to them (such as F.embedding with "
                "max_norm), or another thread trains it; neither is supported"
            )
        if b > 1:
            with plain_autograd(self.device):
                check_own(self._fresh, x, y.detach(), b - 1)
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

    def examine(self, x: Any) -> Layers:
        """Find out which layers do without rows, by some of the rows of `x`; gradients come layer by layer from now."""
        x = self.prepare(distinct(Inputs.of(x), EXAMINED))
        with plain_autograd(self.device):
            try:
                y = self.evaluate(x.map(torch.clone), self.parameters)
                check_same(y.detach(), self._fresh(x).detach())
                check_own(self._fresh, x, y.detach(), 0, len(x) - 1)
                self.layers = examine(self.twin, lambda: self._fresh(x), len(x))
            except RuntimeError as error:
                raise TypeError(f"the network could not be differentiated: {error}") from error
        if y.requires_grad and self._reached_past(x, y):
            raise TypeError(PAST_THE_TREE)
        if self.layers.rest and not self._vmap_works(self.layers.rest, x):
            self.layers = replace(self.layers, vmap=False)
        return self.layers

    def _reached_past(self, x: Inputs, y: Tensor) -> bool:
        """Whether y, which was computed with constant parameters, has gradients with respect to others.

        A network that differentiates its own outputs makes leaves of its inputs, but new ones in each call.
        """
        with plain_autograd(self.device):
            again = self.evaluate(x.map(torch.clone), self.parameters)
        return not leaves(y).isdisjoint(leaves(again))

    def verify(self, x: Any) -> None:
        """Raise unless the last row of `x` and some others, drawn at random, have the gradients of plain autograd.

        Which layers tell their gradients is found out on the first rows; a weight that only later rows use past its
        layer would be missed.
        """
        x = self.prepare(x)
        x = x[np.append(self._rng.permutation(len(x) - 1)[: VERIFIED - 1], len(x) - 1)]
        o = int(self._rng.integers(self.n_outputs))
        _, gradients = self.gradients(x, slice(o, o + 1))
        varied = {name: self._trainable[name] for name in (self.layers.order if self.layers else self.parameters)}
        with plain_autograd(self.device):
            y = self._fresh(x)
            check_own(self._fresh, x, y.detach(), 0, len(x) - 1)
            for i, value in enumerate(y[:, o]):
                expected, got = plain(value, list(varied.values())), gradients.take(np.array([i])).rows()[0]
                name = first_difference(got, expected, {name: w.numel() for name, w in varied.items()})
                if name is not None:
                    raise ValueError(
                        f"the gradient with respect to {name!r} is not had as it was on the first rows: for some rows "
                        "the network uses this weight in another way than by calling its layer. Put such a row among "
                        f"the first {EXAMINED}, or leave the weight out with parameters="
                    )

    def take_rows(self, x: Any) -> None:
        """Whole rows in one piece from now on, if that works on the rows of `x`."""
        if self._vmap_works(tuple(self.parameters), self.prepare(Inputs.of(x))):
            self.layers = None

    def _vmap_works(self, names: tuple[str, ...], x: Inputs) -> bool:
        """Whether torch.func gives the gradients that plain autograd does, on two rows."""
        x = x[:2]
        try:
            with no_inner_loops():
                _, fast = self._vmapped(names, x, slice(None))
        except Exception:
            return False
        _, plain = self._looped(names, x, slice(None))
        if not bool(torch.isfinite(plain).all()):
            return False
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
        outputs, blocks = self._parts(self.layers, x, group)
        if self.layers.rest:
            compute = self._vmapped if self.layers.vmap else self._looped
            _, rows = compute(self.layers.rest, x, group)
            blocks = [[*block, Rows(of_output)] for block, of_output in zip(blocks, rows, strict=True)]
        return outputs, GradientBatch(tuple(map(Held, blocks)))

    def _parts(self, layers: Layers, x: Inputs, group: slice) -> tuple[Tensor, list[list[Part]]]:
        """Outputs (b, m) and for each of them the parts of its layers; by a plain loop, if these rows use a layer as
        the first ones did not."""
        with plain_autograd(self.device):
            try:
                return capture.parts(self.twin, layers, lambda: self._fresh(x)[:, group], len(x))
            except LayerMismatchError:
                names = tuple(name for names in layers.parameters for name in names)
        outputs, rows = self._looped(names, x, group)
        sizes = [sum(self.parameters[name].numel() for name in names) for names in layers.parameters]
        return outputs, [[Rows(part) for part in of_output.split(sizes, dim=1)] for of_output in rows]

    def _vmapped(self, names: tuple[str, ...], x: Inputs, group: slice) -> tuple[Tensor, Tensor]:
        """Outputs (b, m) and rows of J (m, b, p) for some of the parameters."""
        others = {name: w for name, w in self.parameters.items() if name not in names}
        with plain_autograd(self.device):
            return vmapped(
                lambda x, varied: self.evaluate(x, {**others, **varied})[:, group],
                {name: self.parameters[name] for name in names},
                x,
                len(range(*group.indices(self.n_outputs))),
            )

    def _looped(self, names: tuple[str, ...], x: Inputs, group: slice) -> tuple[Tensor, Tensor]:
        """The same by plain autograd."""
        with plain_autograd(self.device):
            return looped(lambda x: self._fresh(x)[:, group], [self._trainable[name] for name in names], x)

    def outputs(self, x: Any) -> Tensor:
        """Outputs (b, m) alone, without gradients."""
        x = Inputs.of(x)
        rows = self.check(x)
        with plain_autograd(self.device):
            try:
                return torch.cat([self._answer(part) for part in x.split(rows)])
            except Exception as error:
                raise ValueError(f"the network could not be evaluated on a batch of {x}: {error}") from error

    def _answer(self, x: Inputs) -> Tensor:
        try:
            with torch.no_grad():
                return self.evaluate(self.prepare(x)).detach()
        except RuntimeError:  # a network that differentiates its own outputs cannot do without a graph
            return self.evaluate(self.prepare(x)).detach()
