"""Networks that are cheap to ask for: one eval copy per thread, copied anew only when the user's model has changed.

A change is noticed at the next call by the identity, storage and version of every tensor, by the values of all other
attributes of the modules, and by some elements of every tensor. Only a write through `tensor.data` that misses these
elements leaves no such trace: it is found by a hash of all weights, from time to time.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .layers.hooks import Layers
from .model_copy import ModelCopy, unwrap
from .network import Head, Network
from .parameter_selection import ParameterChoice

HASH_SECONDS = 5.0  # between two hashes of all weights, at least
HASH_SHARE = 0.01  # of the time, at most, that hashes may take
SAMPLED_ELEMENTS = 16  # about, of each tensor, compared in every call
SEARCHED_ITEMS = 1000  # of a container in an attribute; a longer one is known by its identity and length
SEARCHED_DEPTH = 4
# Of no importance to a copy in eval mode without backward hooks; a Lightning module knows its trainer and all the data.
IGNORED = frozenset(
    ("training", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook", "_trainer", "_fabric")
)
ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))
CONTAINERS = (dict, OrderedDict, list, tuple, set, frozenset)
STATELESS = (type, FunctionType, BuiltinFunctionType, MethodType, np.ndarray)  # or shared with the copy, as arrays are
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class NetworkCache:
    """Networks around one eval copy of a model per thread. A copy or a pickle of a cache is an empty one."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def network(
        self,
        model: nn.Module,
        layers: Layers | None = None,
        *,
        parameters: ParameterChoice = "all",
        output: Callable[[Any], Tensor] | None = None,
        head: Head | None = None,
    ) -> Network:
        """Return what `Network` with the same arguments does; for use in this thread, and until the next call."""
        return Network(self._copy(model, parameters, output), layers, head=head)

    def _copy(self, model: nn.Module, parameters: ParameterChoice, output: Any) -> ModelCopy:
        entry: _Entry | None = getattr(self._thread, "entry", None)
        try:
            described = _Description(unwrap(model), parameters, output)
        except (RuntimeError, NotImplementedError):  # no versions in inference mode, no storage of sparse tensors
            return ModelCopy(model, parameters, output)
        if entry is None or not entry.is_valid(described):
            entry = _Entry(described, model, parameters, output)
        elif time.monotonic() > entry.expires:
            fresh = _Entry(described, model, parameters, output)
            if fresh.fingerprint == entry.fingerprint:  # what is known about inputs stays
                entry.expires = fresh.expires
            else:
                entry = fresh
        self._thread.entry = entry
        return entry.copy

    def __deepcopy__(self, memo: dict[int, Any]) -> NetworkCache:
        return NetworkCache()

    def __reduce__(self) -> tuple[type[NetworkCache], tuple[()]]:
        return NetworkCache, ()


class _Entry:
    """An eval copy, and all that has to stay as it is for the copy to be valid."""

    def __init__(self, described: _Description, model: nn.Module, parameters: ParameterChoice, output: Any) -> None:
        start = time.monotonic()
        self._described = described
        self._samples = [_sample(tensor) for tensor in described.tensors]
        self._values = [sample() for sample in self._samples]  # first: a change while copying is found next time
        self.copy = ModelCopy(model, parameters, output)
        self.fingerprint = self.copy.fingerprint
        self._buffers = [(buffer, buffer._version) for buffer in self.copy.module.buffers()]  # a pass may write to them
        end = time.monotonic()
        self.expires = end + max(HASH_SECONDS, (end - start) / HASH_SHARE)

    def is_valid(self, described: _Description) -> bool:
        return (
            described.state == self._described.state
            and all(buffer._version == version for buffer, version in self._buffers)
            and [sample() for sample in self._samples] == self._values
        )


class _Description:
    """What a copy of a model depends on, as values that can be compared."""

    def __init__(self, *given: Any) -> None:
        self.tensors: list[Tensor] = []
        self._visited: dict[int, Any] = {}  # identities are unique as long as the objects exist
        self.state = tuple(self._describe(value, SEARCHED_DEPTH) for value in given)

    def _describe(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in ATOMS or (kind in CONTAINERS and not value):
            return value if kind in ATOMS else id(value)
        if id(value) in self._visited:
            return id(value)
        self._visited[id(value)] = value
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return id(value), value.data_ptr(), value._version, value.shape, value.dtype, value.requires_grad
        if isinstance(value, nn.Module):
            attributes = [(key, each) for key, each in list(vars(value).items()) if key not in IGNORED]
            return id(value), kind, *[(key, self._describe(each, SEARCHED_DEPTH)) for key, each in attributes]
        if depth == 0 or isinstance(value, STATELESS):
            return id(value)
        if isinstance(value, CONTAINERS):
            if len(value) > SEARCHED_ITEMS:
                return id(value), len(value)
            keys, items = (list(value), list(value.values())) if isinstance(value, dict) else ([], list(value))
            return id(value), *keys, *[self._describe(each, depth - 1) for each in items]
        return id(value), self._describe(getattr(value, "__dict__", None), depth - 1)


def _sample(tensor: Tensor) -> Callable[[], bytes]:
    """Return a function that reads some elements of a tensor as they are then."""
    view = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    if view.is_contiguous():
        view = view.view(-1)[:: max(1, view.numel() // SAMPLED_ELEMENTS)]
    else:  # three places in each dimension
        view = view[tuple(slice(None, None, max(1, (size + 1) // 3)) for size in view.shape)]
    view = view.view(INTEGERS[view.itemsize])
    if view.device.type == "cpu":
        array: np.ndarray = view.numpy()
        return array.tobytes
    return lambda: bytes(view.cpu().numpy().tobytes())
