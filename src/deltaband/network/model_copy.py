"""A private, eval-mode copy of the user's module: which of its parameters vary, its fingerprint, and when it is stale.

It shares the storage of the parameters but no state: the user sees nothing of it, and every thread can have its own.
"""

from __future__ import annotations

import copy
import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property, partial, reduce
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..data.inputs import Inputs
from .choice import matching
from .layers.hooks import called_with
from .layers.tables import make_plain
from .precision import Precision, make_precise, without_autocast

if TYPE_CHECKING:
    from .checks import AcceptedInputs

ParameterChoice = Literal["all", "last"] | Sequence[str] | Callable[[str, nn.Parameter], bool]
Pick = Callable[[Any], Tensor] | None  # a tensor from whatever the model returns
OUTSIDE = ("_trainer", "_fabric")  # of a Lightning module: they know all the data
HASH_SECONDS, HASH_SHARE = 5.0, 0.01  # between two hashes of all weights at least; of the time that they take at most
SAMPLED_ELEMENTS, LOOSE_ELEMENTS = 16, 2**16  # compared in every call; of a tensor that is no parameter and no buffer
SEARCHED_ITEMS, SEARCHED_DEPTH = 1000, 8  # of containers in attributes
IMMUTABLE_TYPE = 1 << 8  # a flag of classes that are not written in Python
IGNORED = frozenset(("training", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook", *OUTSIDE))
ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, range, torch.dtype, torch.device, torch.Size))
CONTAINERS, CODE = (dict, list, tuple, set, frozenset, partial), (type, FunctionType, BuiltinFunctionType)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module that torch.compile and DataParallel were given."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    while isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module  # type: ignore[assignment]
    return model


def select_parameters(model: nn.Module, choice: ParameterChoice) -> frozenset[str]:
    """Return the names of the trainable parameters that are chosen: all, the last layer's, or some by name."""
    first = {id(w): name for name, w in model.named_parameters()}  # a tied one may be chosen by any of its names
    everything = {_plain(name): w for name, w in model.named_parameters(remove_duplicate=False)}
    if isinstance(choice, str) and choice in ("all", "last"):
        layers = _layers(model)
        trainable = (name for name, w in everything.items() if w.requires_grad)
        found = {name for name in trainable if choice == "all" or layer_of(name) == layers[-1]}
    else:
        found = matching(everything, choice, _plain)
    return frozenset(first[id(everything[name])] for name in found)


def _layers(model: nn.Module) -> list[str]:
    """Return the names of the modules that have trainable parameters, in the order of registration."""
    parameters = model.named_parameters(remove_duplicate=False)
    return list(dict.fromkeys(layer_of(name) for name, w in parameters if w.requires_grad))


def layer_of(name: str) -> str:
    """Return the name of the module that a parameter belongs to; for a parametrised weight that is the layer."""
    layer, parametrised, _ = f".{_plain(name)}".partition(".parametrizations.")
    return (layer if parametrised else layer.rpartition(".")[0]).removeprefix(".")


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")  # which torch.compile adds


@torch.inference_mode(False)  # autograd refuses tensors that are created in it
def eval_copy(model: nn.Module, selected: Container[str] | None = None, own_weights: bool = False) -> nn.Module:
    """Copy the module tree, in eval mode, around the same parameter storage or, with `own_weights`, around a copy.

    Only `selected` parameters are trainable in the copy. Buffers are copied in any case: a pass may write to them.
    """
    shared: dict[int, object] = {}
    for name, w in model.named_parameters():
        if isinstance(w, nn.UninitializedParameter):
            raise ValueError(f"parameter {name!r} is not initialised: call the lazy module once, or load its weights")
        own = w.detach().clone() if own_weights or w.is_inference() else w.detach()
        shared[id(w)] = nn.Parameter(own, w.requires_grad and (selected is None or name in selected))
    shared |= {id(buffer): buffer.clone() for buffer in model.buffers() if buffer.is_inference()}
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError("a TorchScript module cannot be differentiated row by row: pass the original nn.Module")
        for key, value in vars(module).items():
            data = isinstance(value, np.ndarray) and not own_weights  # not state
            for each in value if isinstance(value, list) else [value]:  # what norms of weights compute has no copy
                if data or key in OUTSIDE or (isinstance(each, Tensor) and not each.is_leaf):
                    shared[id(each)] = each
    try:
        copied = copy.deepcopy(model, shared)
    except Exception as error:
        raise TypeError(f"the model could not be copied with copy.deepcopy, which deltaband needs: {error}") from error
    if {id(module) for module in model.modules()} & {id(module) for module in copied.modules()}:
        raise TypeError("copy.deepcopy of the model returns parts of the model itself: deltaband would change them")
    for module in list(copied.eval().modules()):
        for name, child in module.named_children():  # a compiled part shows no hook what it does
            if hasattr(child, "_orig_mod"):
                setattr(module, name, unwrap(child))
        module._backward_hooks.clear()  # torch.func cannot handle them
        module._backward_pre_hooks.clear()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            make_plain(module, copied)
    return copied


class ModelCopy:
    """An eval copy of a model, which of its parameters vary, and what is known about the inputs that it accepts."""

    def __init__(
        self, model: nn.Module, parameters: ParameterChoice = "all", output: Pick = None, precision: Precision = None
    ) -> None:
        model, self.output, self.precision = unwrap(model), output, precision
        self.module = eval_copy(model, select_parameters(model, parameters))
        self.own_bytes = 0 if precision is None else make_precise(self.module)
        self.trainable = {name: w for name, w in self.module.named_parameters() if w.requires_grad}
        self.parameters = {name: w.detach() for name, w in self.trainable.items()}
        for name, w in self.parameters.items():
            if w.dtype not in (torch.float32, torch.float64):
                parts = "write it as its real and imaginary parts, or leave it out with parameters="
                hint = parts if w.is_complex() else "give precision='float32', for a float32 copy of the whole model"
                raise TypeError(f"parameter {name!r} is {w.dtype}, expected float32 or float64: {hint}")
        tensors = list(self.parameters.values())
        if not sum(w.numel() for w in tensors):
            raise ValueError("the model has no trainable parameters, or with no elements: set requires_grad=True")
        if any(w.device.type == "meta" for w in tensors):
            raise TypeError("the model is on the meta device and has no weights: load them first")
        self.layer_names = frozenset(_layers(model))
        self.accepted: dict[Any, AcceptedInputs] = {}  # by the kind of inputs
        self.by_forward: dict[Any, bool] = {}
        self.rng = np.random.default_rng(0)  # of the factors by which batches are certified
        self.uncertified: set[str] = set()  # parameters of which some batch has needed rows of plain autograd
        dtypes, self.device = [w.dtype for w in self.trainable.values()], next(iter(self.trainable.values())).device
        self.n_parameters, self.dtype = sum(w.numel() for w in tensors), reduce(torch.promote_types, dtypes)
        kinds = {w.dtype for w in self.module.parameters() if w.is_floating_point()}
        self.input_dtype = self.dtype if len(kinds) == 1 else None  # a frozen half may have another

    def __call__(self, x: Inputs, parameters: dict[str, Tensor] | None = None) -> Any:
        """Return the output for some rows, with the module's own parameters or others."""

        def call(*args: Any, **kwargs: Any) -> Any:
            y = called_with(self.module, parameters, args, kwargs) if parameters else self.module(*args, **kwargs)
            return y if self.output is None else self.output(y)

        with nullcontext() if self.precision is None else without_autocast():
            return x.evaluated(call, self.module.forward)

    def prepare(self, x: Any) -> Inputs:
        """Copy `x`, which a pass may write to, to the module's device, and to its dtype where it is not integer."""
        device, dtype = self.device, self.input_dtype
        return Inputs.of(x).map(lambda x: x.detach().to(device, dtype if x.is_floating_point() else None, copy=True))

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


class ModelCopyCache:
    """One eval copy of a model per thread, made anew only when the model has changed. A copy of a cache is empty.

    The copy shares the parameters and gets the buffers anew for every call. All else that it depends on is compared in
    every call, of the parameters identity, storage, version and some elements; a model with state that cannot be
    followed, such as a `deque`, is copied for every call. Only the fingerprint can be late: a write through
    `tensor.data` that misses the compared elements is found by a hash of all weights, from time to time.
    """

    def __init__(self) -> None:
        self._thread = threading.local()

    def forget(self) -> None:
        """Hash all weights at the next call, in every thread."""
        self._thread = threading.local()

    def get(self, model: nn.Module, *given: Any) -> ModelCopy:
        """Return what `ModelCopy` with the same arguments does; for use in this thread, and until the next call."""
        thread = self._thread  # what is found out while another thread calls `forget` is forgotten, too
        kept: _KeptCopy | None = getattr(thread, "entry", None)
        try:
            known = kept.accepted if kept is not None and kept.is_valid(unwrap(model), *given) else None
            if kept is None or known is None or time.monotonic() > kept.expires:
                kept = thread.entry = _KeptCopy(model, *given)
                kept.accepted.update(known or {})
            return kept
        except Exception:  # not to be followed; or not to be copied, which says so itself
            thread.entry = None
            return ModelCopy(model, *given)

    def __reduce__(self) -> tuple[type[ModelCopyCache], tuple[()]]:
        return ModelCopyCache, ()


class _KeptCopy(ModelCopy):
    """An eval copy that knows all that has to stay as it is for it to be valid."""

    def __init__(self, model: nn.Module, *given: Any) -> None:
        start = time.monotonic()
        self._model = _Description(unwrap(model), *given)
        self._samples = self._model.samples()
        self._values = [sample() for sample in self._samples]  # first: a change while copying is found next time
        super().__init__(model, *given)
        self.fingerprint  # noqa: B018 - hashed before a pass writes to the buffers
        mine = dict(self.module.named_buffers())
        self._buffers = [(mine[name], theirs) for name, theirs in unwrap(model).named_buffers()]
        self._own = _Description(self.module, versions=False)  # a network may record something
        self.expires = time.monotonic() + max(HASH_SECONDS, (time.monotonic() - start) / HASH_SHARE)

    def is_valid(self, *given: Any) -> bool:
        same = self._model.holds_for(*given) and [sample() for sample in self._samples] == self._values
        if not (same and self._own.holds_for(self.module)):
            return False
        with torch.inference_mode(False), torch.no_grad():
            for mine, theirs in self._buffers:
                mine.copy_(theirs)
        return True


class _Description:
    """What a copy of a model depends on, as values that can be compared; raises where that cannot be known."""

    def __init__(self, *given: Any, versions: bool = True) -> None:
        self._given, self._versions = given, versions
        self._owners: list[tuple[Any, type, dict[str, Any]]] = []  # objects with their class and attributes
        self._collections: list[Collection[Any]] = []
        self._content: list[Any] = []  # of all of these, one after another
        self._empty: list[Any] = []  # dictionaries, most of them of hooks that nobody has
        self._tensors: list[tuple[Tensor, tuple[Any, ...], int]] = []  # with how many elements are compared
        self._visited: dict[int, Any] = {}  # identities are unique as long as the objects exist
        self.state = tuple(self._describe(value, SEARCHED_DEPTH) for value in given)

    def holds_for(self, *given: Any) -> bool:
        """Return whether these would be described alike: at once where everything is the same object still."""
        return (
            list(map(id, given)) == list(map(id, self._given))
            and all(type(value) is kind and value.__dict__ is own for value, kind, own in self._owners)
            and sum(map(len, self._collections)) == len(self._content)
            and all(map(is_, chain.from_iterable(self._collections), self._content))
            and not any(self._empty)
            and all(_about(w) == before for w, before, _ in self._tensors)
        ) or _Description(*given, versions=self._versions).state == self.state

    def samples(self) -> list[Callable[[], bytes]]:
        """Return functions that read some elements of every tensor, and all of those that the copy has for itself."""
        return [_sample(w, count) for w, _, count in self._tensors]

    def _describe(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in ATOMS:
            return kind, value
        if id(value) in self._visited or isinstance(value, CODE):
            return id(value)
        self._visited[id(value)] = value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return id(value), kind, *self._module(value)
        if isinstance(value, MethodType):
            return value.__func__, self._describe(value.__self__, depth)
        if depth == 0 or not (isinstance(value, CONTAINERS) or _is_plain(kind)):
            raise TypeError(f"the state of {kind.__name__} cannot be followed")
        items = self._attributes(value) if hasattr(value, "__dict__") else []
        if isinstance(value, CONTAINERS):
            held = (value.func, value.args, value.keywords) if isinstance(value, partial) else value
            items += self._items(held, held.values()) if isinstance(held, dict) else self._items(held)
        if len(items) > SEARCHED_ITEMS:
            raise TypeError(f"a {kind.__name__} of {len(items)} items is too long to be followed")
        return id(value), kind, *[self._describe(each, depth - 1) for each in items]

    def _module(self, module: nn.Module) -> Iterator[Any]:
        if getattr(module, "max_norm", None) is not None:
            raise TypeError("the copy of a table that is shortened has a weight of its own")
        self._attributes(module)
        for key, value in list(vars(module).items()):
            if key in ("_parameters", "_buffers"):
                self._items(value, value.values())
                yield key, *[(name, self._tensor(w, SAMPLED_ELEMENTS)) for name, w in value.items() if w is not None]
            elif isinstance(value, np.ndarray):  # which is shared with the copy
                yield key, id(value)
            elif type(value) in (dict, OrderedDict) and not value:
                self._empty.append(value)
                yield key, id(value)
            elif key not in IGNORED:
                yield key, self._describe(value, SEARCHED_DEPTH)

    def _tensor(self, w: Tensor, count: int | None = None) -> Any:
        """Describe a tensor; one that is neither a parameter nor a buffer has no `count`: the copy has its own."""
        if not self._versions:
            return id(w)
        if count is None and w.numel() > LOOSE_ELEMENTS:
            raise TypeError("a large tensor that is neither a parameter nor a buffer is copied for every call")
        self._tensors.append((w, _about(w), w.numel() if count is None else count))
        return id(w), *self._tensors[-1][1]

    def _attributes(self, value: Any) -> list[Any]:
        self._owners.append((value, type(value), vars(value)))
        return self._items(vars(value), vars(value).values())

    def _items(self, *collections: Collection[Any]) -> list[Any]:
        self._collections += collections
        self._content += (items := list(chain(*collections)))
        return items


def _about(w: Tensor) -> tuple[Any, ...]:
    return w.data_ptr(), w._version, w.shape, w.dtype, w.requires_grad


def _is_plain(kind: type) -> bool:
    """Return whether all state of the instances of a class is in their `__dict__`."""
    classes = kind.__mro__[:-1]
    return bool(classes) and not any(c.__flags__ & IMMUTABLE_TYPE or vars(c).get("__slots__") for c in classes)


def _sample(tensor: Tensor, count: int) -> Callable[[], bytes]:
    """Return a function that reads about so many elements of a tensor as they are then."""
    view = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    if view.is_contiguous():
        view = view.view(-1)[:: max(1, view.numel() // max(count, 1))]
    elif count < view.numel():  # three places in each dimension
        view = view[tuple(slice(None, None, max(1, (size + 1) // 3)) for size in view.shape)]
    if view.device.type == "cpu" and not view.is_neg():
        return view.view(INTEGERS[view.itemsize]).numpy().tobytes
    return lambda: view.cpu().resolve_neg().contiguous().view(torch.uint8).numpy().tobytes()
