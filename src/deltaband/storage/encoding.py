"""Values as plain data: a tree that JSON can hold, and the tensors that it refers to.

No pickle: a class is written by its name and its fields, and only classes registered with `storable` are restored.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from numbers import Real
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T", bound=Callable[..., Any])

DTYPES = {"float32": torch.float32, "float64": torch.float64}
# by the name of a kind: its type, what is written of a value, and how that is turned into the value again
VALUE_KINDS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "float": (float | np.floating, lambda number: str(float(number)), float),  # NaN and ±∞, which JSON has not
    "dtype": (torch.dtype, lambda dtype: str(dtype).removeprefix("torch."), DTYPES.__getitem__),
    "slice": (slice, lambda ends: [ends.start, ends.stop], lambda ends: slice(*ends)),
    "tuple": (tuple, list, tuple),
    "set": (frozenset, lambda values: sorted(values, key=repr), frozenset),
    "dict": (Mapping, lambda mapping: list(map(list, mapping.items())), dict),
}
OWN = __name__.partition(".")[0]  # the package whose names nobody else can take
_REGISTERED: dict[str, Any] = {}


def storable(cls: T) -> T:
    """Register a dataclass, a NamedTuple or a function by its name, so that files can hold it.

    A class of the same name that is defined again, as in a notebook, replaces the one before.
    """
    known = _REGISTERED.get(cls.__name__)
    if known is not None and _is_own(known) and known.__module__ != cls.__module__:
        raise ValueError(f"{cls.__name__} is the name of something that deltaband itself stores: choose another name")
    _REGISTERED[cls.__name__] = cls
    return cls


def registered(name: str, module: str | None = None) -> Any:
    """Return what is registered under a name; `module` says in the error message where it was defined."""
    if name not in _REGISTERED:
        where = "" if module is None else f" of the module {module!r}"
        raise ValueError(f"there is no registered class {name!r}{where}: import the module that defines it, and retry")
    return _REGISTERED[name]


def field_names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls)) if is_dataclass(cls) else tuple(cls._fields)


class Encoder:
    """Turns values into trees and collects their tensors; a tensor that occurs twice is kept once.

    `hooks` maps classes that no file holds to functions that return what is written instead of an instance.
    """

    def __init__(self, hooks: Mapping[type, Callable[[Any], Any]] | None = None) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.hooks = hooks or {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._memory: set[int] = set()
        self._hooked: dict[int, Any] = {}
        self._alive: list[Any] = []  # an address identifies an object only as long as the object exists

    def __call__(self, value: Any) -> Any:
        cls = type(value)
        match value:
            case None | bool() | str():
                return value
            case int() | np.integer():
                return int(value)
            case float() | np.floating() if math.isfinite(value):
                return float(value)
            case np.ndarray():  # torch supports neither negative strides nor read-only memory
                plain = value.flags.writeable and all(stride >= 0 for stride in value.strides)
                return {"array": self._array(torch.from_numpy(value if plain else value.copy()))}
            case Tensor():
                return {"tensor": self._array(value.detach().cpu())}
            case _ if cls in self.hooks:
                if id(value) not in self._hooked:
                    index, about = len(self._hooked), self(self.hooks[cls](value))
                    self._hooked[id(value)] = {"hook": cls.__name__, "index": index, "about": about}
                    self._alive.append(value)
                return self._hooked[id(value)]
            case _ if _REGISTERED.get(cls.__name__) is cls:
                tree = {"class": cls.__name__, "fields": {n: self._field(getattr(value, n)) for n in field_names(cls)}}
                return tree if _is_own(cls) else {**tree, "module": cls.__module__}
            case list():
                return [self(each) for each in value]
        for kind, (of_kind, write, _) in VALUE_KINDS.items():
            if isinstance(value, of_kind):
                return {kind: self(write(value))}
        advice = "decorate an engine with @register, another dataclass with @storable"
        own = f"{cls.__name__} is not registered and cannot be saved: {advice}"
        raise TypeError(getattr(cls, "unstorable", own))

    def _field(self, value: Any) -> Any:
        """Encode a field; of a function only the name is kept."""
        if not callable(value) or type(value).__name__ in _REGISTERED or type(value) in self.hooks:
            return self(value)
        name = getattr(value, "__name__", repr(value))
        return {"function": name, "known": _REGISTERED.get(name) is value}

    def _array(self, tensor: Tensor) -> Any:
        """Return a name and the order of the dimensions in memory, on which the last digits of products depend."""
        strides = tensor.stride()
        order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, strides)
        if key not in self._names:
            self._names[key] = name = str(len(self.tensors))
            dense = tensor.permute(order).contiguous()
            memory = dense.untyped_storage().data_ptr()
            # safetensors refuses tensors that share memory
            self.tensors[name] = dense.clone() if memory in self._memory else dense
            self._memory.add(memory)
            self._alive.append(tensor)
        return [self._names[key], order]


class Decoder:
    """Restores values from their trees. `hooks` maps class names to functions of what the encoder's hooks returned."""

    def __init__(self, tensors: Mapping[str, Tensor], hooks: Mapping[str, Callable[[Any], Any]] | None = None) -> None:
        self._tensors = tensors
        self._hooks = hooks or {}
        self._made: dict[Any, Any] = {}  # what occurs twice in the file is one object

    def __call__(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self(each) for each in tree]
        if not isinstance(tree, dict):
            return tree
        kind, value = next(iter(tree.items()))
        match kind:
            case "array" | "tensor":
                name, order = value
                if (kind, name) not in self._made:
                    # a copy, as the file may be mapped into memory
                    tensor = self._tensors[name].clone().permute([order.index(dim) for dim in range(len(order))])
                    self._made[kind, name] = tensor if kind == "tensor" else tensor.numpy()
                return self._made[kind, name]
            case _ if kind in VALUE_KINDS:
                return VALUE_KINDS[kind][2](self(value))
            case "function":
                return _REGISTERED[value] if tree["known"] else partial(_missing_function, value)
            case "hook":
                if (value, tree["index"]) not in self._made:
                    self._made[value, tree["index"]] = self._hooks[value](self(tree["about"]))
                return self._made[value, tree["index"]]
            case "class":
                cls, values = registered(value, tree.get("module")), tree["fields"]
                if not isinstance(cls, type) or tuple(values) != field_names(cls):
                    raise ValueError(f"{cls.__name__} has other fields than the file: {', '.join(values)}")
                return cls(**{name: self(each) for name, each in values.items()})
        raise ValueError(f"unknown kind of value {kind!r}")


def describe_setting(value: Any) -> str:
    """Return what was given as text that is the same in every process."""
    if is_dataclass(value) and not isinstance(value, type):
        settings = (f"{name}={describe_setting(getattr(value, name))}" for name in field_names(value))
        return f"{type(value).__name__}({', '.join(settings)})"
    if isinstance(value, partial):
        return describe_setting(value.func)
    if isinstance(value, np.ndarray):  # all digits, which its repr has not
        return str(value.tolist())
    if isinstance(value, Real) and not isinstance(value, bool):  # 1, 1.0 and np.float64(1) are one setting
        return repr(float(value)).removesuffix(".0")
    return str(getattr(value, "__name__", type(value).__name__)) if callable(value) else repr(value)


def _missing_function(name: str, *args: Any) -> Any:
    raise ValueError(f"{name!r} is your own function, which no file holds: construct the engine again with it")


def _is_own(cls: Any) -> bool:
    return str(cls.__module__).partition(".")[0] == OWN
