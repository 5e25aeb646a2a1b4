"""A private, eval-mode copy of the user's module: which of its parameters vary, and its fingerprint.

The copy shares the storage of the module's parameters but none of its state: nothing that happens to it can be seen on
the user's side, and every thread can have its own.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import cached_property, reduce
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import UninitializedParameter

from ..data.inputs import Inputs

ParameterChoice = Literal["all", "last"] | Sequence[str] | Callable[[str, nn.Parameter], bool]
NAMES_IN_ERROR = 20
OUTSIDE = ("_trainer", "_fabric")  # of a Lightning module: they know all the data


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module that torch.compile and DataParallel were given."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("a TorchScript module cannot be differentiated row by row: pass the original nn.Module")
    while isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module  # type: ignore[assignment]
    return model


def select_parameters(model: nn.Module, choice: ParameterChoice) -> frozenset[str]:
    """Return the names of the trainable parameters that are chosen: all, the last layer's, or some by name."""
    first = {id(w): name for name, w in model.named_parameters()}  # a tied one may be chosen by any of its names
    everything = {_plain(name): w for name, w in model.named_parameters(remove_duplicate=False)}
    trainable = {name: w for name, w in everything.items() if w.requires_grad}
    listed = ", ".join(list(trainable)[:NAMES_IN_ERROR])
    if len(trainable) > NAMES_IN_ERROR:
        listed += f" and {len(trainable) - NAMES_IN_ERROR} more"
    is_word = isinstance(choice, str)
    if is_word and choice in ("all", "last"):
        layers = _layers(model)
        found = {name for name in trainable if choice == "all" or _layer(name) == layers[-1]}
    elif callable(choice):
        found = {name for name, w in trainable.items() if choice(name, w)}
        if not found:
            raise ValueError(f"the function given as parameters chooses none of the trainable ones: {listed}")
    elif isinstance(choice, Sequence) and not is_word and choice and all(isinstance(name, str) for name in choice):
        found = set()
        for pattern in choice:
            matching = {name for name in everything if fnmatchcase(name, _plain(pattern))}
            if not matching & set(trainable):
                reason = f"only frozen parameters ({min(matching)})" if matching else "no parameter"
                raise ValueError(f"{pattern!r} matches {reason}; trainable are: {listed}")
            found |= matching & set(trainable)
    else:
        expected = "'all', 'last', a list of names such as ['head.*'], or a function of name and parameter"
        raise (ValueError if is_word else TypeError)(f"parameters must be {expected}, got {choice!r}")
    return frozenset(first[id(trainable[name])] for name in found)


def _layers(model: nn.Module) -> list[str]:
    """Return the names of the modules that have trainable parameters, in the order of registration."""
    parameters = model.named_parameters(remove_duplicate=False)
    return list(dict.fromkeys(_layer(name) for name, w in parameters if w.requires_grad))


def _layer(name: str) -> str:
    """Return the name of the module that a parameter belongs to; for a parametrised weight that is the layer."""
    layer, parametrised, _ = f".{_plain(name)}".partition(".parametrizations.")
    return (layer if parametrised else layer.rpartition(".")[0]).removeprefix(".")


def _plain(name: str) -> str:
    """Remove what torch.compile adds to a name."""
    return name.replace("_orig_mod.", "")


def eval_copy(model: nn.Module, selected: Container[str] | None = None, own_weights: bool = False) -> nn.Module:
    """Copy the module tree, in eval mode, around the same parameter storage or, with `own_weights`, around a copy.

    Only `selected` parameters are trainable in the copy. Buffers are copied in any case: a pass may write to them.
    """
    shared: dict[int, object] = {}
    for name, w in model.named_parameters():
        if isinstance(w, UninitializedParameter):
            raise ValueError(f"parameter {name!r} is not initialised: call the lazy module once, or load its weights")
        own, chosen = _outside_inference(w.detach()), selected is None or name in selected
        shared[id(w)] = nn.Parameter(own.clone() if own_weights else own, w.requires_grad and chosen)
    shared |= {id(buffer): _outside_inference(buffer) for buffer in model.buffers() if buffer.is_inference()}
    for module in model.modules():
        for key, value in vars(module).items():
            # old-style weight_norm keeps a computed weight, which cannot be copied; arrays are data, not state
            data = isinstance(value, np.ndarray) and not own_weights
            if data or key in OUTSIDE or (isinstance(value, Tensor) and not value.is_leaf):
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
    """Make the gradients dense and not scaled by frequency; shorten all rows, of a copy, instead of those looked up."""
    table.sparse = table.scale_grad_by_freq = False
    if table.max_norm is None:
        return
    w = table.weight
    if sum(each is w for module in model.modules() for each in module._parameters.values()) != 1:
        raise TypeError(
            "an Embedding with max_norm changes its weight whenever it is called, and others use it: shorten it once"
        )
    shortened = w.detach().clone()
    torch.embedding_renorm_(shortened, torch.arange(len(w), device=w.device), table.max_norm, table.norm_type)
    table.weight, table.max_norm = nn.Parameter(shortened, w.requires_grad), None


@contextmanager
def plain_autograd(device: torch.device) -> Iterator[None]:
    """Evaluate as in a plain context, whatever the caller's is (inference mode, no_grad, autocast)."""
    castable = torch.amp.is_autocast_available(device.type)
    autocast = torch.autocast(device.type, enabled=False) if castable else nullcontext()
    with torch.inference_mode(False), torch.enable_grad(), autocast:
        yield


class AcceptedInputs(NamedTuple):
    """What the validation of one kind of inputs found."""

    n_returned: int  # numbers per row
    pass_bytes: int  # of a row: what a forward pass keeps for the backward pass
    alone_and_together: bool  # whether a row was seen to give the same alone as among others


class ModelCopy:
    """An eval copy of a model, which of its parameters vary, and what is known about the inputs that it accepts."""

    def __init__(
        self,
        model: nn.Module,
        parameters: ParameterChoice = "all",
        output: Callable[[Any], Tensor] | None = None,  # picks a tensor from whatever the model returns
        own_weights: bool = False,
    ) -> None:
        model = unwrap(model)
        self.output = output
        self.module = eval_copy(model, select_parameters(model, parameters), own_weights)
        self.trainable = {name: w for name, w in self.module.named_parameters() if w.requires_grad}
        self.parameters = {name: w.detach() for name, w in self.trainable.items()}
        tensors, layers = self.parameters.values(), _layers(model)
        for name, w in self.parameters.items():
            if w.dtype not in (torch.float32, torch.float64):
                real = "convert a copy of the model first, for instance with copy.deepcopy(model).float()"
                parts = "write it as its real and imaginary parts, or leave it out with parameters="
                hint = parts if w.is_complex() else real
                raise TypeError(f"parameter {name!r} is {w.dtype}, expected float32 or float64: {hint}")
        if not tensors:
            raise ValueError("the model has no trainable parameters: set requires_grad=True on those that were trained")
        if not any(w.numel() for w in tensors):
            raise ValueError("the model's trainable parameters have no elements")
        if any(w.device.type == "meta" for w in tensors):
            raise TypeError("the model is on the meta device and has no weights: load them first")
        self.layer_names = frozenset(layers)
        self.last_layer = layers[-1] if parameters == "last" else None
        self.accepted: dict[tuple[Any, ...], AcceptedInputs] = {}  # by the kind of inputs
        self.rng = np.random.default_rng(0)  # which rows are verified
        self.n_parameters = sum(w.numel() for w in tensors)
        self.device = next(iter(tensors)).device
        self.dtype = reduce(torch.promote_types, (w.dtype for w in tensors))
        dtypes = {w.dtype for w in self.module.parameters() if w.is_floating_point()}
        self.input_dtype = self.dtype if len(dtypes) == 1 else None  # a frozen half may have another

    def __call__(self, x: Inputs, parameters: dict[str, Tensor] | None = None) -> Any:
        """Return the output for some rows, with the module's own parameters or others."""
        args, kwargs = x.arguments(self.module.forward)
        y = functional_call(self.module, parameters, args, kwargs) if parameters else self.module(*args, **kwargs)
        return y if self.output is None else self.output(y)

    def prepare(self, x: Any) -> Inputs:
        """Copy `x`, which a pass may write to, to the module's device, and to its dtype where it is not integer."""

        def prepared(x: Tensor) -> Tensor:
            x = x.detach().to(self.device, self.input_dtype if x.is_floating_point() else None, copy=True)
            return x.clone() if x.is_inference() else x

        return Inputs.of(x).map(prepared)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Digests of the parameters and buffers when first asked for, with what is trainable, and types of modules."""
        modules = list(self.module.named_modules())
        # buffers that a state_dict leaves out may be filled by a call of the model
        cached = {f"{name}.{key}".lstrip(".") for name, m in modules for key in m._non_persistent_buffers_set}
        state = (*self.module.named_parameters(), *self.module.named_buffers())
        digests = {name: _digest(tensor) for name, tensor in state if name not in cached}
        return digests | {f"module {name!r}": type(module).__qualname__ for name, module in modules}


def _digest(tensor: Tensor) -> str:
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}".encode(), digest_size=16)
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
