"""Eval copies of a model that are kept between calls, and all that tells when one is stale."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .model_copy import OUTSIDE, ModelCopy, ParameterChoice, unwrap

HASH_SECONDS = 5.0  # between two hashes of all weights, at least
HASH_SHARE = 0.01  # of the time, at most, that hashes may take
SAMPLED_ELEMENTS = 16  # about, of each tensor, compared in every call
SEARCHED_ITEMS, SEARCHED_DEPTH = 1000, 8  # of containers in attributes
LOOSE_ELEMENTS = 2**16  # of a tensor that is neither a parameter nor a buffer
IMMUTABLE_TYPE = 1 << 8  # a flag of classes that are not written in Python
IGNORED = frozenset(("training", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook", *OUTSIDE))
ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, range, torch.dtype, torch.device, torch.Size))
CONTAINERS = (dict, OrderedDict, list, tuple, set, frozenset)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ModelCopyCache:
    """One eval copy of a model per thread, made anew only when the model has changed. A copy of a cache is empty.

    The copy shares the parameters and gets the buffers anew for every call. All else that it depends on is compared in
    every call, of the parameters identity, storage, version and some elements; a model with state that cannot be
    followed, such as a `deque`, is copied for every call. Only the fingerprint can be late: a write through
    `tensor.data` that misses the compared elements is found by a hash of all weights, from time to time.
    """

    def __init__(self) -> None:
        self._thread = threading.local()
        self._generation = 0

    def forget(self) -> None:
        """Hash all weights at the next call, in every thread."""
        self._generation += 1

    def get(self, model: nn.Module, parameters: ParameterChoice = "all", output: Any = None) -> ModelCopy:
        """Return what `ModelCopy` with the same arguments does; for use in this thread, and until the next call."""
        entry: _Entry | None = getattr(self._thread, "entry", None)
        try:
            described = _Description(unwrap(model), parameters, output)
            if entry is None or entry.generation != self._generation or not entry.is_valid(described):
                entry = _Entry(self._generation, described, model, parameters, output)
            elif time.monotonic() > entry.expires:
                known, entry = entry, _Entry(self._generation, described, model, parameters, output)
                entry.copy.accepted.update(known.copy.accepted)
        except Exception:  # not to be followed; or not to be copied, which says so itself
            self._thread.entry = None
            return ModelCopy(model, parameters, output)
        self._thread.entry = entry
        return entry.copy

    def __reduce__(self) -> tuple[type[ModelCopyCache], tuple[()]]:
        return ModelCopyCache, ()


class _Entry:
    """An eval copy, and all that has to stay as it is for the copy to be valid."""

    def __init__(self, generation: int, described: _Description, model: nn.Module, *given: Any) -> None:
        start = time.monotonic()
        self.generation, self._state = generation, described.state
        self._samples = described.samples()
        self._values = [sample() for sample in self._samples]  # first: a change while copying is found next time
        self.copy = ModelCopy(model, *given)
        self.copy.fingerprint  # noqa: B018 - hashed before a pass writes to the buffers
        mine = dict(self.copy.module.named_buffers())
        self._buffers = [(mine[name], theirs) for name, theirs in unwrap(model).named_buffers()]
        self._own = _Description(self.copy.module, versions=False).state
        end = time.monotonic()
        self.expires = end + max(HASH_SECONDS, (end - start) / HASH_SHARE)

    def is_valid(self, described: _Description) -> bool:
        if described.state != self._state or [sample() for sample in self._samples] != self._values:
            return False
        if self._own != _Description(self.copy.module, versions=False).state:  # the network records something
            return False
        with torch.inference_mode(False), torch.no_grad():
            for mine, theirs in self._buffers:
                mine.copy_(theirs)
        return True


class _Description:
    """What a copy of a model depends on, as values that can be compared; raises where that cannot be known."""

    def __init__(self, *given: Any, versions: bool = True) -> None:
        self._versions = versions
        self._tensors: list[Tensor] = []
        self._loose: list[Tensor] = []  # neither parameters nor buffers: the copy has its own
        self._visited: dict[int, Any] = {}  # identities are unique as long as the objects exist
        self.state = tuple(self._describe(value, SEARCHED_DEPTH) for value in given)

    def samples(self) -> list[Callable[[], bytes]]:
        """Return functions that read some elements of every tensor, and all of those that the copy has for itself."""
        return [_sample(w, SAMPLED_ELEMENTS) for w in self._tensors] + [_sample(w, w.numel()) for w in self._loose]

    def _describe(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in ATOMS:
            return kind, value
        if id(value) in self._visited:
            return id(value)
        self._visited[id(value)] = value
        if isinstance(value, Tensor):
            return self._tensor(value, self._loose)
        if isinstance(value, nn.Module):
            return id(value), kind, *self._module(value)
        if isinstance(value, type | FunctionType | BuiltinFunctionType):
            return id(value)
        if isinstance(value, MethodType):
            return value.__func__, self._describe(value.__self__, depth)
        own = getattr(value, "__dict__", {})
        if depth == 0 or not (isinstance(value, CONTAINERS) or _is_plain(kind)):
            raise TypeError(f"the state of {kind.__name__} cannot be followed")
        items = list(chain(own, own.values()))
        if isinstance(value, CONTAINERS):
            items += chain(value, value.values()) if isinstance(value, dict) else value
        if len(items) > SEARCHED_ITEMS:
            raise TypeError(f"a {kind.__name__} of {len(items)} items is too long to be followed")
        return id(value), kind, *[self._describe(each, depth - 1) for each in items]

    def _module(self, module: nn.Module) -> Iterator[Any]:
        if getattr(module, "max_norm", None) is not None:
            raise TypeError("the copy of a table that is shortened has a weight of its own")
        for key, value in list(vars(module).items()):
            if key in ("_parameters", "_buffers"):
                registered = [(name, w) for name, w in value.items() if w is not None]
                yield key, *[(name, self._tensor(w, self._tensors)) for name, w in registered]
            elif isinstance(value, np.ndarray):  # shared with the copy
                yield key, id(value)
            elif key not in IGNORED:
                yield key, self._describe(value, SEARCHED_DEPTH)

    def _tensor(self, w: Tensor, among: list[Tensor]) -> Any:
        if not self._versions:
            return id(w)
        if among is self._loose and w.numel() > LOOSE_ELEMENTS:
            raise TypeError("a large tensor that is neither a parameter nor a buffer is copied for every call")
        among.append(w)
        return id(w), w.data_ptr(), w._version, w.shape, w.dtype, w.requires_grad


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
