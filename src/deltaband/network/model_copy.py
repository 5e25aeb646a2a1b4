"""A private, eval-mode twin of the user's module.

It shares the storage of the module's parameters but none of its state, so nothing that happens to it can be seen on the
user's side, and every caller (every thread) can have its own.
"""

from __future__ import annotations

import copy
import hashlib
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import UninitializedParameter

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def unwrapped(model: nn.Module) -> nn.Module:
    """What torch.compile and DataParallel were given."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("a TorchScript module cannot be differentiated row by row: pass the original nn.Module")
    while isinstance(model, WRAPPERS) or hasattr(model, "_orig_mod"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module  # type: ignore[assignment]
    return model


def twin(model: nn.Module, chosen: Callable[[str], bool] = lambda name: True, own_weights: bool = False) -> nn.Module:
    """A copy of the module tree, in eval mode, around the same numbers, or around copies of them.

    Only trainable parameters of a `chosen` name are trainable in the twin. Buffers are copied in any case: a forward
    pass may write to them.
    """
    shared: dict[int, object] = {}
    for name, w in model.named_parameters():
        if isinstance(w, UninitializedParameter):
            raise ValueError(
                f"parameter {name!r} is not initialised yet: call the lazy module once, or load its weights"
            )
        own = _outside_inference(w.detach())
        shared[id(w)] = nn.Parameter(own.clone() if own_weights else own, w.requires_grad and chosen(name))
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
                setattr(module, name, unwrapped(child))
    for module in copied.modules():  # torch.func has no use for them, and stumbles
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _plain(module, copied)
    return copied


def _outside_inference(tensor: Tensor) -> Tensor:
    """A copy of what was made in inference mode, which no graph takes; others as they are."""
    with torch.inference_mode(False):
        return tensor.clone() if tensor.is_inference() else tensor


def _plain(table: nn.Embedding | nn.EmbeddingBag, model: nn.Module) -> None:
    """Gradients that are those of the output: dense, and not scaled by how often an index occurs.

    `max_norm` shortens what is looked up, in place: here all of the table is, in memory of its own.
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
    """Arithmetic as written, whatever context the caller is in (inference mode, no_grad, autocast)."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if torch.amp.is_autocast_available(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


@contextmanager
def no_inner_loops() -> Iterator[None]:
    """An error where torch.func would fall back to a loop of its own, of which it only warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop because we have not yet implemented")
        yield


class _MathAttention:
    """torch's switch is one for the whole process: whoever comes first turns it, whoever leaves last turns it back."""

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


def fingerprint(twin: nn.Module) -> dict[str, str]:
    """A digest of each parameter and buffer, what is trainable, and the types of the modules.

    Buffers that a state_dict leaves out are caches, which a call of the model may fill.
    """
    cached = {f"{name}.{key}".lstrip(".") for name, m in twin.named_modules() for key in m._non_persistent_buffers_set}
    state = {name: w for name, w in (*twin.named_parameters(), *twin.named_buffers()) if name not in cached}
    kinds = {f"module {name!r}": type(module).__qualname__ for name, module in twin.named_modules()}
    return {name: _digest(tensor) for name, tensor in state.items()} | kinds


def _digest(tensor: Tensor) -> str:
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}".encode(), digest_size=16)
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
