"""Values as plain data: a tree that JSON can hold, and the tensors that it speaks of.

No pickle: a class is written by its name and its fields, and only the classes listed here come back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import engines as covariance
from ..calibration import conformal as calibration
from ..data.inputs import Inputs
from ..data.row_record import Sample, SeenRows
from ..engines import directions, exact, nystrom, projection, sketched
from ..engines import power_law_tail as unheld
from ..engines import residual_spectrum as tail
from ..fitting.accuracy import ErrorReport
from ..fitting.fit import Fit
from ..network.gradient_batch import GradientBatch, StoredBlock
from ..network.layers.factors import DenseRows, EmbeddingRows, OuterProducts
from ..network.layers.hooks import Layers
from ..network.network import Network
from ..network.recomputed import Recomputed

ENGINES = {
    name: getattr(covariance, name)
    for name in (
        "Exact",
        "FrequentDirections",
        "ImportantDirections",
        "Nystrom",
        "RandomProjection",
        "RobustFrequentDirections",
    )
}
SCORES = {score.__name__: score for score in (directions.importance, directions.magnitude)}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64)}

_SPECTRAL = ("eigenvalues", "damping", "_name", "_floor")
_SKETCHED = ("_spread", "_tail", "directions", "squared", "totals", "_unheld", "error_bound")
_CONFORMAL = ("scales", "n_rows", "_unit", "_signed", "_absolute", "_sum_squares", "_log_weight", "chosen")


@cache
def classes() -> dict[str, tuple[type, tuple[str, ...]]]:
    """Name, class and fields of what is written field by field. Who changes a field changes the format's version."""
    from ..engines.gram import DampedGram  # which loads SciPy

    plain: dict[type, tuple[str, ...]] = {
        DampedGram: ("damping", "size", "_matrix", "_diagonal", "effective_size", "rounding"),
        exact.PrimalCovariance: ("_A", "damping", "effective_parameters"),
        exact.DualCovariance: ("_A", "J", "damping", "effective_parameters"),
        exact.DiagonalPrimal: (*_SPECTRAL, "_V"),
        exact.DiagonalDual: (*_SPECTRAL, "_U", "J"),
        sketched.SketchedCovariance: (*_SPECTRAL, *_SKETCHED),
        nystrom.NystromCovariance: (*_SPECTRAL, "basis", "totals", "_tail", "_corrected", "error_bound"),
        projection.ProjectedCovariance: (*_SPECTRAL, "_S", "_exact", "_full_rank"),
        calibration.ConformalScale: _CONFORMAL,
        calibration.EachOutput: ("outputs", "n_rows"),
        calibration.AllOutputs: ("outputs", "n_rows", "_units", "_scores"),
        SeenRows: SeenRows._fields,
    }
    for cls in (
        *(Fit, Layers, ErrorReport, Sample, Inputs, GradientBatch, StoredBlock, Recomputed),
        *(DenseRows, OuterProducts, EmbeddingRows),
        *(nystrom.Basis, nystrom.RowSums, sketched.Totals, tail.Tail, unheld.Unheld, projection.Projection),
        *(calibration.Calibration, calibration.Scales, covariance.Option, covariance.Problem),
    ):
        plain[cls] = tuple(field.name for field in fields(cls))
    return {cls.__name__: (cls, names) for cls, names in plain.items()}


class Encoder:
    """Collects the tensors of all that it encodes; one that occurs twice is kept once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.outputs: tuple[int, ...] = ()  # of the fit that is encoded, which its network answers for
        self._names: dict[tuple[Any, ...], str] = {}
        self._memory: set[int] = set()
        self._networks: dict[int, Any] = {}
        self._alive: list[Any] = []  # addresses are names as long as what is there stays there

    def __call__(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int | np.integer):
            return int(value)
        if isinstance(value, float | np.floating):
            return float(value) if math.isfinite(value) else {"float": str(float(value))}
        if isinstance(value, np.ndarray):
            return {"array": self._array(_shared(value))}
        if isinstance(value, Tensor):
            return {"tensor": self._array(value.detach().cpu())}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, slice):
            return {"slice": [value.start, value.stop]}
        if isinstance(value, Network):
            return self._network(value)
        name = type(value).__name__
        if ENGINES.get(name) is type(value):
            return {"engine": name, "settings": {k: self._setting(v) for k, v in settings(value).items()}}
        cls, names = classes().get(name, (None, ()))
        if cls is type(value):
            return {"class": name, "fields": {key: self(getattr(value, key)) for key in names}}
        if isinstance(value, list):
            return [self(each) for each in value]
        if isinstance(value, tuple | frozenset):
            kind = "tuple" if isinstance(value, tuple) else "set"
            return {kind: [self(each) for each in (value if kind == "tuple" else sorted(value, key=repr))]}
        if isinstance(value, Mapping):
            return {"dict": [[self(key), self(each)] for key, each in value.items()]}
        raise TypeError(f"{name} is not one of deltaband's own and cannot be saved")

    def _array(self, tensor: Tensor) -> Any:
        """A name, and the order of the dimensions in memory: products of matrices depend on it in their last digit."""
        strides = tensor.stride()
        order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, strides)
        if key not in self._names:
            self._names[key] = name = str(len(self.tensors))
            dense = tensor.permute(order).contiguous()
            memory = dense.untyped_storage().data_ptr()
            self.tensors[name] = dense.clone() if memory in self._memory else dense  # no two pieces of one
            self._memory.add(memory)
            self._alive.append(tensor)
        return [self._names[key], order]

    def _network(self, network: Network) -> Any:
        if id(network) not in self._networks:
            index = len(self._networks)
            self._networks[id(network)] = {
                "network": index,
                "outputs": list(self.outputs),
                "layers": self(network.layers),
            }
            self._alive.append(network)
        return self._networks[id(network)]

    def _setting(self, value: Any) -> Any:
        if not callable(value):
            return self(value)
        name = getattr(value, "__name__", repr(value))
        return {"score": name, "known": SCORES.get(name) is value}


class Decoder:
    """The way back. `network(outputs, layers)` makes the network that rows are computed with again."""

    def __init__(self, tensors: Mapping[str, Tensor], network: Callable[[tuple[int, ...], Layers], Network]) -> None:
        self._tensors = tensors
        self._network = network
        self._made: dict[Any, Any] = {}  # what occurs twice in the file is one thing

    def __call__(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self(each) for each in tree]
        if not isinstance(tree, dict):
            return tree
        kind = next(iter(tree))
        value = tree[kind]
        match kind:
            case "float":
                return float(value)
            case "array" | "tensor":
                return self._array(kind, *value)
            case "dtype":
                return DTYPES[value]
            case "slice":
                return slice(*value)
            case "tuple":
                return tuple(self(each) for each in value)
            case "set":
                return frozenset(self(each) for each in value)
            case "dict":
                return {self(key): self(each) for key, each in value}
            case "engine":
                return ENGINES[value](**{name: self._setting(each) for name, each in tree["settings"].items()})
            case "network":
                if ("network", value) not in self._made:
                    self._made["network", value] = self._network(tuple(tree["outputs"]), self(tree["layers"]))
                return self._made["network", value]
            case "class":
                return self._instance(value, {name: self(each) for name, each in tree["fields"].items()})
        raise ValueError(f"unknown kind of value {kind!r}")

    def _array(self, kind: str, name: str, order: list[int]) -> Any:
        if (kind, name) not in self._made:
            # in memory of its own, wherever the file is mapped to
            tensor = self._tensors[name].clone().permute([order.index(dim) for dim in range(len(order))])
            self._made[kind, name] = tensor if kind == "tensor" else tensor.numpy()
        return self._made[kind, name]

    @staticmethod
    def _instance(name: str, values: dict[str, Any]) -> Any:
        cls, names = classes()[name]
        if tuple(values) != names:
            raise ValueError(f"{name} has the fields {', '.join(values)}, expected {', '.join(names)}")
        if is_dataclass(cls) or issubclass(cls, tuple):
            return cls(**values)
        made = object.__new__(cls)
        vars(made).update(values)
        return made

    def _setting(self, tree: Any) -> Any:
        if not (isinstance(tree, dict) and "score" in tree):
            return self(tree)
        if tree["known"]:
            return SCORES[tree["score"]]

        def score(d: np.ndarray, damping: float) -> np.ndarray:
            raise ValueError(
                f"the score {tree['score']!r} is a function of yours, which no file holds: make the engine anew"
            )

        return score


def settings(engine: Any) -> dict[str, Any]:
    """What an engine was constructed with."""
    return {name: getattr(engine, name) for name in signature(type(engine)).parameters}


def text(value: Any) -> str:
    """What was given, in words that are the same in every process."""
    if hasattr(value, "finalise"):
        return f"{type(value).__name__}({', '.join(f'{name}={text(each)}' for name, each in settings(value).items())})"
    if isinstance(value, partial):
        return text(value.func)
    if callable(value):
        return str(getattr(value, "__name__", type(value).__name__))
    return repr(value)


def _shared(array: np.ndarray) -> Tensor:
    """torch knows neither negative strides nor memory that must not be written to."""
    plain = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if plain else array.copy())
