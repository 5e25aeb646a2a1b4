"""Per-row gradients of a network: the rows of J.

`Network` is a private, eval-mode twin of the user's module. It shares the module's tensors but none of its state, so
nothing that happens here can be seen on the user's side, and every caller (every thread) can have its own.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import capture
from .batch import CHUNK_BYTES, CHUNK_ROWS_AT_LEAST, GradientBatch, Held
from .capture import Layers
from .layers import Rows

CHUNK_BYTES_AT_MOST = 256 * 2**20
CHUNK_ROWS_AT_MOST = 4096
EXAMINED = 8  # rows that tell which layers do without rows
PAST_THE_TREE = (
    "some weights are reached past the module tree (a lambda or a list that holds a layer or a parameter), so their "
    "gradients would be missing: register them as submodules or parameters"
)


class Network:
    """A trained network as a differentiable function of its trainable parameters, one number for each input row.

    Frozen parameters are constants. A parameter used in several places counts once. With `layers` gradients come layer
    by layer, without rows where that is possible.
    """

    def __init__(self, model: nn.Module, layers: Layers | None = None) -> None:
        self.layers = layers
        self.twin = twin(model)
        self.parameters = {name: w.detach() for name, w in self.twin.named_parameters() if w.requires_grad}
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

    def prepare(self, x: Tensor) -> Tensor:
        """A copy of `x` (a network may work on its input in place), in the network's dtype where it is not integer."""
        x = x.detach().to(self.device, self.dtype if x.is_floating_point() else None, copy=True)
        return x.clone() if x.is_inference() else x

    def check(self, x: Tensor) -> int:
        """How many rows of J fit into one chunk. Raises unless the network gives one real number for each row of `x`.

        Two rows are enough to tell, and to measure what a pass will have in memory of each: what backward remembers, or
        what the layers give, where it remembers nothing because they are frozen.
        """
        x = self.prepare(x[:2])
        b = len(x)
        weights = {w.data_ptr() for w in self.twin.parameters()}
        remembered = given = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal remembered
            remembered += 0 if tensor.data_ptr() in weights else tensor.nbytes
            return tensor

        def weigh(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal given
            given += output.nbytes if isinstance(output, Tensor) else 0

        with ExitStack() as stack:
            stack.enter_context(plain_autograd(self.device))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
            for module in self.twin.modules():
                if next(module.children(), None) is None:
                    stack.callback(module.register_forward_hook(weigh).remove)
            try:
                y = self.twin(x.clone())
            except Exception as error:
                hint = "" if x.is_floating_point() else "; if these are not indices of an Embedding, pass x.float()"
                raise ValueError(
                    f"the network could not be evaluated on a batch of shape {tuple(x.shape)} and {x.dtype}: "
                    f"{error}{hint}"
                ) from error
        self._check_output(y, b)
        if b > 1:
            with plain_autograd(self.device), torch.no_grad():
                try:
                    alone = self.twin(x[:1].clone()).reshape(-1)[0]
                except Exception as error:
                    raise ValueError(f"the network could not be evaluated on a single row: {error}") from error
            if not torch.isclose(y.detach().reshape(-1)[0], alone, rtol=1e-3, atol=1e-5, equal_nan=True):
                raise ValueError(
                    "the network's output for a row depends on the other rows of the batch, or changes from call to "
                    f"call ({alone.item():.4g} alone, {y.reshape(-1)[0].item():.4g} in a batch): not supported"
                )
        own = self.n_parameters * self.dtype.itemsize
        if self.layers is not None:
            own = self.layers.factor_bytes + self.layers.working_bytes
        row_bytes = own + (x.nbytes + 2 * max(remembered, given)) // b
        fewest = max(1, min(CHUNK_ROWS_AT_LEAST, CHUNK_BYTES_AT_MOST // row_bytes))
        return min(max(CHUNK_BYTES // row_bytes, fewest), CHUNK_ROWS_AT_MOST)

    def _check_output(self, y: Any, b: int) -> None:
        if not isinstance(y, Tensor):
            raise TypeError(
                f"the network must return one tensor, got {type(y).__name__}; a network that returns its own variance "
                "or several values is not covered: wrap it in a module that returns the prediction alone"
            )
        if not y.is_floating_point():
            raise TypeError(f"the network must return real numbers, got {y.dtype}")
        if y.ndim == 2 and len(y) == b and y.shape[1] > 1:
            raise ValueError(
                f"the network returns {y.shape[1]} outputs a row: several outputs, or an output with its own variance, "
                "are not supported yet; expected (b,) or (b, 1). Wrap the network in a module that returns one output"
            )
        if tuple(y.shape) not in {(b,), (b, 1)} and not (b == 1 and y.ndim == 0):
            raise ValueError(
                f"the network returns shape {tuple(y.shape)} for a batch of {b} rows, expected ({b},) or ({b}, 1)"
            )

    def examine(self, x: Tensor) -> Layers:
        """Find out which layers do without rows, by some of the rows of `x`; gradients come layer by layer from now."""
        x = self.prepare(_distinct(x))
        with plain_autograd(self.device):
            try:
                past_the_tree = functional_call(self.twin, self.parameters, (x.clone(),)).requires_grad
                self.layers = capture.examine(self.twin, x)
            except RuntimeError as error:
                raise TypeError(f"the network could not be differentiated: {error}") from error
        if past_the_tree:
            raise TypeError(PAST_THE_TREE)
        return self.layers

    def gradients(self, x: Tensor) -> tuple[Tensor, GradientBatch]:
        """Outputs (b,) and gradients of the rows of `x`, from one forward and one backward pass."""
        x = self.prepare(x)
        if self.layers is None:
            outputs, rows = self._rows(self.parameters, x)
            return outputs, GradientBatch.of(rows)
        with plain_autograd(self.device):
            outputs, parts = capture.parts(self.twin, self.layers, x.clone())
        if self.layers.rest:
            _, rows = self._rows({name: self.parameters[name] for name in self.layers.rest}, x)
            parts.append(Rows(rows))
        return outputs, GradientBatch((Held(parts),))

    def _rows(self, parameters: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:  # (b,), (b, p)
        """Outputs and rows of J for some of the parameters."""
        others = {name: w for name, w in self.parameters.items() if name not in parameters}

        def output(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
            return functional_call(self.twin, {**others, **parameters}, (row.unsqueeze(0),)).reshape(())

        # the other kernels of attention have no batching rule
        with plain_autograd(self.device), sdpa_kernel(SDPBackend.MATH):
            try:
                by_name, outputs = vmap(grad_and_value(output), in_dims=(None, 0))(parameters, x)
            except Exception as error:
                raise TypeError(
                    "torch.func could not compute per-row gradients of this network (layers such as nn.GRU, "
                    "branches that depend on the data, random numbers or state written in forward are not supported "
                    f"yet): {error}"
                ) from error
            rows = torch.cat([g.reshape(len(x), -1).to(self.dtype) for g in by_name.values()], dim=1)
        if outputs.requires_grad or rows.requires_grad:
            raise TypeError(PAST_THE_TREE)
        return outputs, rows

    def outputs(self, x: Tensor) -> Tensor:
        """Outputs (b,) alone, without gradients."""
        with plain_autograd(self.device), torch.no_grad():
            parts = torch.split(x, self.check(x))
            return torch.cat([self.twin(self.prepare(part)).reshape(len(part)) for part in parts])

    def fingerprint(self) -> dict[str, str]:
        """A digest of each parameter and buffer, what is trainable, and the types of the modules."""
        state = {**dict(self.twin.named_parameters()), **dict(self.twin.named_buffers())}
        kinds = {f"module {name!r}": type(module).__qualname__ for name, module in self.twin.named_modules()}
        return {name: _digest(tensor) for name, tensor in state.items()} | kinds


def _distinct(x: Tensor) -> Tensor:
    """Up to EXAMINED rows that differ; a single row beside itself with some noise, where that is possible."""
    rows = x[np.unique(np.linspace(0, len(x) - 1, EXAMINED).round().astype(int))]
    if len(rows) == 1 or bool((rows == rows[:1]).all()):
        rows = rows[:1]
        if x.is_floating_point():
            noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0)).to(rows)
            rows = torch.cat([rows, rows + 0.1 * noise * (1 + rows.abs())])
    return rows


def twin(model: nn.Module, own_weights: bool = False) -> nn.Module:
    """A copy of the module tree, in eval mode, around the very same parameters, or around copies of them.

    Buffers are copied in any case: a forward pass may write to them.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("a TorchScript module cannot be differentiated row by row: pass the original nn.Module")
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps the module it was given
    model = model.module if isinstance(model, nn.DataParallel) else model
    shared: dict[int, object] = {
        id(w): nn.Parameter(w.detach().clone(), w.requires_grad) if own_weights else w for w in model.parameters()
    }
    for module in model.modules():
        for value in vars(module).values():
            # old-style weight_norm keeps a computed weight, which cannot be copied; arrays are data, not state
            data = isinstance(value, np.ndarray) and not own_weights
            if data or (isinstance(value, Tensor) and not value.is_leaf):
                shared[id(value)] = value
    try:
        copied = copy.deepcopy(model, shared)
    except Exception as error:
        raise TypeError(f"the model could not be copied with copy.deepcopy, which deltaband needs: {error}") from error
    if {id(module) for module in model.modules()} & {id(module) for module in copied.modules()}:
        raise TypeError("copy.deepcopy of the model returns parts of the model itself: deltaband would change them")
    copied.eval()
    for module in copied.modules():  # torch.func has no use for them, and stumbles
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
    return copied


@contextmanager
def plain_autograd(device: torch.device) -> Iterator[None]:
    """Arithmetic as written, whatever context the caller is in (inference mode, no_grad, autocast)."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if torch.amp.is_autocast_available(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


def _digest(tensor: Tensor) -> str:
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}".encode(), digest_size=16)
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
