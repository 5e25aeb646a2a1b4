"""A private, eval-mode copy of the user's module, its fingerprint, and the contexts it is evaluated in.

The copy shares the storage of the module's parameters but none of its state: nothing that happens to it can be seen on
the user's side, and every thread can have its own.
"""

from __future__ import annotations

import copy
import hashlib
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import UninitializedParameter

from ..data.inputs import Inputs
from .parameter_selection import ParameterChoice, last_layer, layers_of, select_parameters

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module that torch.compile and DataParallel were given."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("a TorchScript module cannot be differentiated row by row: pass the original nn.Module")
    while isinstance(model, WRAPPERS) or hasattr(model, "_orig_mod"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module  # type: ignore[assignment]
    return model


def eval_copy(
    model: nn.Module, selected: Callable[[str], bool] = lambda name: True, own_weights: bool = False
) -> nn.Module:
    """Copy the module tree, in eval mode, around the same parameter storage or, with `own_weights`, around a copy.

    Only trainable parameters whose name is `selected` are trainable in the copy. Buffers are copied in any case: a
    forward pass may write to them.
    """
    shared: dict[int, object] = {}
    for name, w in model.named_parameters():
        if isinstance(w, UninitializedParameter):
            raise ValueError(
                f"parameter {name!r} is not initialised yet: call the lazy module once, or load its weights"
            )
        own = _outside_inference(w.detach())
        shared[id(w)] = nn.Parameter(own.clone() if own_weights else own, w.requires_grad and selected(name))
    for buffer in model.buffers():
        if buffer.is_inference():
            shared[id(buffer)] = _outside_inference(buffer)
    for module in model.modules():
        for key, value in vars(module).items():
            # old-style weight_norm keeps a computed weight, which cannot be copied; arrays are data, not state; a
            # Lightning module knows its trainer, and with it all the data
            data = isinstance(value, np.ndarray) and not own_weights
            if data or key in ("_trainer", "_fabric") or (isinstance(value, Tensor) and not value.is_leaf):
                shared[id(value)] = value
    try:
        copied = copy.deepcopy(model, shared)
    except Exception as error:
        raise TypeError(f"the model could not be copied with copy.deepcopy, which deltaband needs: {error}") from error
    if {id(module) for module in model.modules()} & {id(module) for module in copied.modules()}:
        raise TypeError("copy.deepcopy of the model returns parts of the model itself: deltaband would change them")
    copied.eval()
    for module in list(copied.modules()):
        for name, child in module.named_children():  # a compiled part shows no hook what it does
            if hasattr(child, "_orig_mod"):
                setattr(module, name, unwrap(child))
    for module in copied.modules():  # torch.func cannot handle backward hooks
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _make_plain(module, copied)
    return copied


def _outside_inference(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor created in inference mode, which autograd refuses; others unchanged."""
    with torch.inference_mode(False):
        return tensor.clone() if tensor.is_inference() else tensor


def _make_plain(table: nn.Embedding | nn.EmbeddingBag, model: nn.Module) -> None:
    """Make the gradients those of the output: dense, and not scaled by how often an index occurs.

    `max_norm` shortens the rows that are looked up, in place: here all rows are shortened, in memory of their own.
    """
    table.sparse = table.scale_grad_by_freq = False
    if table.max_norm is None:
        return
    w = table.weight
    if sum(each is w for module in model.modules() for each in module._parameters.values()) != 1:
        raise TypeError(
            "an Embedding with max_norm changes its weight whenever it is called, and this one is used elsewhere too: "
            "shorten the weight once, and set max_norm=None"
        )
    shortened = w.detach().clone()
    torch.embedding_renorm_(shortened, torch.arange(len(w), device=w.device), table.max_norm, table.norm_type)
    table.weight, table.max_norm = nn.Parameter(shortened, w.requires_grad), None


@contextmanager
def plain_autograd(device: torch.device) -> Iterator[None]:
    """Evaluate as in a plain context, whatever the caller's is (inference mode, no_grad, autocast)."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if torch.amp.is_autocast_available(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


@contextmanager
def no_inner_loops() -> Iterator[None]:
    """Raise an error where torch.func would fall back to a slow loop, of which it only warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop because we have not yet implemented")
        yield


class _MathAttention:
    """Math attention for a while: torch has one switch, which the first user sets and the last one restores."""

    def __init__(self) -> None:
        self._lock, self._users, self._stack = threading.Lock(), 0, ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                self._stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._stack.close()


math_attention = _MathAttention()  # its other kernels have no rule for vmap


def fingerprint(model: nn.Module) -> dict[str, str]:
    """Return a digest of each parameter and buffer, including what is trainable, and the types of the modules.

    Buffers that a state_dict leaves out are caches, which a call of the model may fill.
    """
    cached = {f"{name}.{key}".lstrip(".") for name, m in model.named_modules() for key in m._non_persistent_buffers_set}
    state = {name: w for name, w in (*model.named_parameters(), *model.named_buffers()) if name not in cached}
    types = {f"module {name!r}": type(module).__qualname__ for name, module in model.named_modules()}
    return {name: _digest(tensor) for name, tensor in state.items()} | types


def _digest(tensor: Tensor) -> str:
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}".encode(), digest_size=16)
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class ModelCopy:
    """An eval copy of a model, which of its parameters vary, and what is known about the inputs that it accepts.

    `output` picks a tensor from whatever the model returns.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: ParameterChoice = "all",
        output: Callable[[Any], Tensor] | None = None,
        own_weights: bool = False,
    ) -> None:
        model = unwrap(model)
        self.output = output
        names = select_parameters(model, parameters)
        self.module = eval_copy(model, names.__contains__, own_weights)
        self.trainable = {name: w for name, w in self.module.named_parameters() if w.requires_grad}
        self.parameters = {name: w.detach() for name, w in self.trainable.items()}
        self.layer_names = frozenset(layers_of(model))
        self.last_layer = last_layer(model) if parameters == "last" and self.trainable else None
        self.accepted: dict[tuple[Any, ...], AcceptedInputs] = {}  # by the kind of inputs
        self.rng = np.random.default_rng(0)  # which rows are verified
        tensors = list(self.parameters.values())
        _check_parameters(self.parameters)
        self.n_parameters = sum(w.numel() for w in tensors)
        self.device = tensors[0].device
        self.dtype = tensors[0].dtype
        for w in tensors:
            self.dtype = torch.promote_types(self.dtype, w.dtype)
        dtypes = {w.dtype for w in self.module.parameters() if w.is_floating_point()}
        self.input_dtype = self.dtype if len(dtypes) == 1 else None  # a frozen half may have another

    def __call__(self, x: Inputs, parameters: dict[str, Tensor] | None = None) -> Any:
        """Return the output for some rows, with the module's own parameters or others."""
        args, kwargs = x.arguments(self.module.forward)
        if parameters is None:
            y = self.module(*args, **kwargs)
        else:
            y = functional_call(self.module, parameters, args, kwargs)
        return y if self.output is None else self.output(y)

    def prepare(self, x: Any) -> Inputs:
        """Copy `x` to the module's device, and to its dtype where it is not integer."""

        def prepared(x: Tensor) -> Tensor:
            x = x.detach().to(self.device, self.input_dtype if x.is_floating_point() else None, copy=True)
            return x.clone() if x.is_inference() else x

        return Inputs.of(x).map(prepared)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """The fingerprint of the weights when it was first asked for."""
        return fingerprint(self.module)


@dataclass(frozen=True)
class AcceptedInputs:
    """What the validation of one kind of inputs found."""

    n_returned: int  # numbers per row
    pass_bytes: int  # of a row: what a forward pass keeps for the backward pass
    alone_and_together: bool  # whether a row was seen to give the same alone as among others


def _check_parameters(parameters: dict[str, Tensor]) -> None:
    if not parameters:
        raise ValueError(
            "the model has no trainable parameters: the delta method needs gradients with respect to at least "
            "one; set requires_grad=True on the parameters that were trained"
        )
    for name, w in parameters.items():
        if w.dtype not in (torch.float32, torch.float64):
            hint = "convert a copy of the model first, for instance with copy.deepcopy(model).float()"
            if w.is_complex():
                hint = "write it as its real and imaginary parts, or leave it out with parameters="
            raise TypeError(f"parameter {name!r} is {w.dtype}, expected float32 or float64: {hint}")
    if not any(w.numel() for w in parameters.values()):
        raise ValueError("the model's trainable parameters have no elements")
    if any(w.device.type == "meta" for w in parameters.values()):
        raise TypeError("the model is on the meta device and has no weights: load them first")
