"""The inputs of a network: one tensor, several, or tensors by name, each with one row per example."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import Dataset

from ..storage.encoding import storable
from ..validation import describe

MAX_RANGES = 10_000  # features of a table that have a range each
MANY_ROWS = 20  # from which on they are many
WELL_FILLED = 0.2  # of a range, by rows like the training rows
FAR_OF_MANY, FAR_OF_FEW = 0.5, 5.0  # widths of a range that most rows are beyond it
NUMBERS_CHECKED_AT_ONCE = 2**20  # the mask of a check takes memory too


@storable
@dataclass(frozen=True)
class Inputs:
    """Rows of one tensor, of several (`names` is None), or of tensors by name.

    `extras` are numbers of each row that the network does not see and that stay with the row: its "weight" in the fit,
    (n, 1) or (n, m), that which was "given" if it is another, and its "cluster", (n, 1).
    """

    tensors: tuple[Tensor, ...]
    names: tuple[str, ...] | None = None
    single: bool = True
    extras: dict[str, Tensor] = field(default_factory=dict)
    mixed_by: ClassVar[str] = "a recurrent layer without batch_first=True"  # what else may make rows depend on others

    @classmethod
    def of(cls, x: Any) -> Self:
        """Return the inputs in a tensor or array, in a tuple or list of them, or in a mapping; memory may be shared."""
        if isinstance(x, cls):
            return x
        if isinstance(x, PackedSequence):
            raise TypeError("a packed sequence has no rows: give the padded tensor and lengths, and pack in forward")
        if isinstance(x, Mapping):
            if not all(isinstance(name, str) for name in x):
                raise TypeError(f"inputs by name need names that are strings, got {list(x)}")
            made = cls(tuple(as_tensor(x[name], f"input {name!r}") for name in x), tuple(x), single=False)
        elif isinstance(x, tuple | list):
            if not all(hasattr(part, "__array__") for part in x):
                raise TypeError(f"inputs must be a tensor or a NumPy array, or several (np.asarray), got {describe(x)}")
            made = cls(tuple(as_tensor(part, f"input {i}") for i, part in enumerate(x)), single=False)
        else:
            made = cls((as_tensor(x, "inputs"),))
        if not made.tensors:
            raise ValueError(f"inputs are an empty {type(x).__name__}: give at least one tensor")
        if len({len(tensor) for tensor in made.tensors}) > 1:
            sizes = {label: len(tensor) for label, tensor in made._by_label().items()}
            raise ValueError(f"all inputs must have the same number of rows, got {sizes}")
        return made

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: Any) -> Self:
        chosen = self.map(lambda tensor: tensor[index])
        extras = {name: extra[index] for name, extra in self.extras.items()}
        return chosen.with_extras(**extras) if extras else chosen

    def with_extras(self, **extras: Tensor) -> Self:
        """Return the same rows with these extras, besides or instead of those they have."""
        return replace(self, extras={**self.extras, **extras})

    def without(self, name: str) -> Self:
        """Return the same rows without one of their extras."""
        return replace(self, extras={each: extra for each, extra in self.extras.items() if each != name})

    def without_extras(self) -> Self:
        """Return the same rows without extras."""
        return replace(self, extras={})

    @property
    def weight(self) -> Tensor | None:
        return self.extras.get("weight")

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return replace(self, tensors=tuple(map(change, self.tensors)))

    def split(self, size: int) -> Iterator[Self]:
        """Yield the rows in parts of `size`; no rows are one empty part."""
        for start in range(0, max(len(self), 1), size):
            yield self[start : start + size]

    def arguments(self, forward: Callable[..., Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for `forward`: one per tensor, by name where named, or a single one if it takes that."""
        return bound(self.as_given(), forward)

    def evaluated(self, call: Callable[..., Any], forward: Callable[..., Any]) -> Any:
        """Return what `call` gives for the arguments that `forward` takes."""
        args, kwargs = self.arguments(forward)
        return call(*args, **kwargs)

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        if len(parts) == 1:
            return parts[0]
        if type(parts[0]) is not cls:  # items have no tensors
            return parts[0].cat(parts)
        extras = {name: torch.cat([part.extras[name] for part in parts]) for name in parts[0].extras}
        tensors = tuple(map(torch.cat, zip(*(part.tensors for part in parts), strict=True)))
        return replace(parts[0], tensors=tensors, extras=extras)

    def as_given(self) -> Any:
        """Return the inputs as users give them: a tensor, a tuple of tensors, or a dictionary."""
        if self.single:
            return self.tensors[0]
        return self.tensors if self.names is None else self._by_label()

    def copied(self) -> Self:
        """Return the same rows in memory of their own."""
        return self.map(torch.clone).with_extras(**{name: extra.clone() for name, extra in self.extras.items()})

    def check_storable(self) -> None:
        """Raise if no file or process can be given these rows."""

    def without_rows(self) -> "Inputs | None":
        """Return what is left of the inputs without their rows: names, shapes and types; None where there are none."""
        return self.without_extras().map(lambda tensor: tensor[:0].cpu().clone())

    def made_up(self, n: int) -> Self:
        """Return n rows of the same format, always the same: normal random numbers, or zeros for whole numbers."""
        rng = np.random.default_rng(0)

        def rows(tensor: Tensor) -> Tensor:
            shape = (n, *tensor.shape[1:])
            numbers = rng.standard_normal(shape) if tensor.is_floating_point() else np.zeros(shape)
            return torch.from_numpy(numbers).to(tensor.dtype)

        return self.without_extras().map(rows)

    def looks_like_a_row_of(self, format: Self) -> bool:
        """Return whether every tensor lacks one dimension of those in this format."""
        if len(self.tensors) != len(format.tensors):
            return False
        return all(mine.ndim + 1 == theirs.ndim for mine, theirs in zip(self.tensors, format.tensors, strict=True))

    @property
    def row_format(self) -> tuple[Any, ...]:
        """Names, shapes and types of a row: inputs with equal ones can be concatenated."""
        extras = tuple((name, extra.shape[1:]) for name, extra in sorted(self.extras.items()))
        return (self.names, self.single, extras, *((tensor.shape[1:], tensor.dtype) for tensor in self.tensors))

    @property
    def hashed(self) -> tuple[Tensor, ...]:
        """The tensors that rows are compared by."""
        return self.tensors

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def __str__(self) -> str:
        labels = [""] if self.single else [f"{label}: " for label in self._by_label()]
        labelled = zip(labels, self.tensors, strict=True)
        return ", ".join(f"{label}shape {_shape(tensor)} and {tensor.dtype}" for label, tensor in labelled)

    def _by_label(self) -> dict[Any, Tensor]:
        return dict(zip(self.names or range(len(self.tensors)), self.tensors, strict=True))

    def check_finite(self, first_row: int = 0) -> None:
        for label, tensor in self._by_label().items():
            check_finite(tensor, "inputs" if self.single else f"inputs ({label})", first_row)


def bound(x: Any, forward: Callable[..., Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that `forward` is called with: those in a tuple, those named in a mapping, or a single one.

    A tuple or a mapping is a single one where `forward` takes it so.
    """
    args, kwargs = ((), dict(x)) if isinstance(x, Mapping) else (x, {}) if isinstance(x, tuple) else ((x,), {})
    try:
        if isinstance(x, Mapping | tuple):
            inspect.signature(forward).bind(*args, **kwargs)
    except TypeError:
        return (x,), {}
    return args, kwargs


def _shape(tensor: Tensor) -> str:
    """Return the shape as text; without rows the number of rows is n."""
    sizes = ["n" if len(tensor) == 0 else str(len(tensor)), *map(str, tensor.shape[1:])]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def is_loader(x: Any) -> bool:
    """Return whether rows come in batches; a list of arrays is a network's several inputs, a list of pairs is not."""
    if isinstance(x, Inputs | Tensor | Mapping | PackedSequence | str) or hasattr(x, "__array__"):
        return False
    if not isinstance(x, tuple | list):
        return isinstance(x, Iterable | Dataset)
    first = x[0] if len(x) else None
    if isinstance(first, tuple | list) and len(first):
        return hasattr(first[0], "__array__") or isinstance(first[0], tuple | list | Mapping)
    return isinstance(first, Mapping)


@storable
@dataclass(frozen=True, eq=False)
class Ranges:
    """The smallest and the largest number of each feature of a table; of other inputs, those of each tensor.

    Whole numbers, which may be words or categories, have none.
    """

    lowest: tuple[np.ndarray | None, ...] = ()  # (d,) or () of each tensor
    highest: tuple[np.ndarray | None, ...] = ()

    @classmethod
    def of(cls, x: Inputs) -> Self:
        ends: list[Any] = []
        for tensor in x.tensors:
            known = tensor.is_floating_point() and tensor.numel() > 0
            by_column = tensor.ndim == 2 and tensor.shape[1] <= MAX_RANGES
            found = torch.aminmax(tensor, dim=0) if by_column and known else torch.aminmax(tensor) if known else None
            ends.append((None, None) if found is None else tuple(end.cpu().double().numpy() for end in found))
        return cls(*zip(*ends, strict=True))

    def merged(self, other: Self) -> Self:
        """Return the ranges of the rows of both; a table whose width changes has one range for all of it."""
        if not (self.lowest and other.lowest):
            return self if self.lowest else other
        if len(self.lowest) != len(other.lowest):
            return type(self)((None,), (None,))
        ends = []
        for mine, theirs, end in ((self.lowest, other.lowest, np.min), (self.highest, other.highest, np.max)):
            ends.append(tuple(_joined(*pair, end) for pair in zip(mine, theirs, strict=True)))
        return type(self)(*ends)

    def excess(self, x: Inputs) -> np.ndarray:  # (b,)
        """Return how far each row is beyond the ranges at most, in widths of these."""
        found = np.zeros(len(x))
        for _, values, low, high in self._ranged(x):
            outside = (values < low.astype(values.dtype)) | (values > high.astype(values.dtype))
            rows, columns = np.nonzero(outside)  # few, where the rows are as they should be
            ends = (end[columns] if end.ndim else end for end in (low, high))
            np.maximum.at(found, rows, _beyond(values[rows, columns], *ends))
        return found

    def are_left(self, excess: np.ndarray) -> bool:
        """Return whether most of the rows are outside: of many rows not far, of a few rows very far."""
        limit = FAR_OF_MANY if len(excess) >= MANY_ROWS else FAR_OF_FEW
        return len(excess) > 0 and float(np.mean(excess > limit)) > 0.5

    def problem(self, x: Inputs, raw: Inputs | None = None) -> tuple[float, str] | None:
        """Return the share of rows that are outside, and where, if these are most; 0 if they are inside as `raw`."""
        if self.are_left(excess := self.excess(x)):
            return float(np.mean(excess > 0)), self.farthest(x)
        return (0.0, "") if raw is not None and len(x) >= MANY_ROWS and self.hold_better(raw, x) else None

    def farthest(self, x: Inputs) -> str:
        """Describe the number that is farthest outside."""
        ranged = [
            (_beyond(values, low, high), label, values, low, high) for label, values, low, high in self._ranged(x)
        ]
        beyond, label, values, low, high = max(ranged, key=lambda each: float(each[0].max()))
        row, column = np.unravel_index(int(beyond.argmax()), beyond.shape)
        ends = (end[column] if end.ndim else end for end in (low, high))
        name = f"feature {column}" if low.ndim else "a number"
        name += "" if x.single else f" of input {label!r}"
        return "{} is {:.4g} in a row, and was from {:.4g} to {:.4g}".format(name, values[row, column], *ends)

    def hold_better(self, one: Inputs, two: Inputs) -> bool:
        """Return whether rows fill the ranges as they are in `one`, and hardly any of them as they are in `two`."""
        filled = self._spread(one)
        inside = not self.are_left(self.excess(one))
        return inside and filled > WELL_FILLED and self._spread(two) < WELL_FILLED * filled

    def _spread(self, x: Inputs) -> float:
        """Return how much of the ranges rows take up, the median over all of them; NaN if there are none."""
        shares = [
            np.ptp(values, axis=0)[width > 0] / width[width > 0]
            for _, values, low, high in self._ranged(x)
            if (width := np.broadcast_to(high - low, values.shape[1:])).size
        ]
        return float(np.median(np.concatenate(shares))) if shares else math.nan

    def _ranged(self, x: Inputs) -> Iterator[tuple[Any, np.ndarray, np.ndarray, np.ndarray]]:
        """Yield the label, the numbers (b, k) and the ranges of each tensor that has ranges."""
        if len(x.tensors) != len(self.lowest) or len(x) == 0:
            return
        for (label, tensor), low, high in zip(x._by_label().items(), self.lowest, self.highest, strict=True):
            if low is None or high is None or not tensor.is_floating_point() or tensor.numel() == 0:
                continue
            values = (tensor if tensor.itemsize > 2 else tensor.float()).numpy(force=True).reshape(len(x), -1)
            if low.ndim and values.shape[1] != len(low):
                low, high = np.asarray(low.min()), np.asarray(high.max())
            yield label, values, low, high


def _beyond(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return how far numbers are beyond a range, in widths of it; 0 where that is none, for a constant feature."""
    with np.errstate(divide="ignore", invalid="ignore"):
        beyond = np.maximum(low - values, values - high) / (high - low)
    return np.where(np.isfinite(beyond), beyond, 0.0)


def _joined(one: Any, two: Any, end: Callable[..., Any]) -> Any:
    if one is None or two is None:
        return None
    return np.asarray(end([one, two], axis=0) if one.shape == two.shape else end([end(one), end(two)]))


def as_tensor(x: Any, what: str) -> Tensor:
    """Return an array or tensor of real numbers as a tensor, sharing its memory where torch can."""
    if not hasattr(x, "__array__"):
        raise TypeError(f"{what} must be a tensor or a NumPy array, got {describe(x)}")
    tensor = x.detach() if isinstance(x, Tensor) else _from_numpy(np.asanyarray(x), what)
    if tensor.ndim == 0:
        raise ValueError(f"{what} must have one row per example, got a single number; for one row give X[:1]")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type == "meta":
        raise TypeError(f"{what} must be an ordinary tensor, got {tensor.layout} on {tensor.device}")
    if tensor.is_complex():
        raise TypeError(f"{what} must be real, got complex numbers")
    return tensor


def _from_numpy(array: np.ndarray, what: str) -> Tensor:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{what} must not be masked: remove the masked rows first")
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{what} must be numbers, got an array of dtype {array.dtype}; try .astype(float)")
    is_long = array.dtype.kind == "f" and array.dtype.itemsize > 8
    dtype = np.dtype(np.float64) if is_long else array.dtype.newbyteorder("=")
    plain = array.dtype == dtype and array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(np.asarray(array) if plain else np.array(array, dtype=dtype))


def check_finite(values: Tensor, what: str, first_row: int = 0, advice: str = "remove or impute such rows") -> None:
    """Raise if a row holds NaN or inf, and name the first such row."""
    if not values.is_floating_point():
        return
    step = max(1, NUMBERS_CHECKED_AT_ONCE // max(1, values[:1].numel()))
    for start in range(0, len(values), step):
        part = values[start : start + step]
        if not torch.isfinite(part).all():
            row = int((~torch.isfinite(part.reshape(len(part), -1)).all(dim=1)).nonzero()[0])
            kind = "NaN" if torch.isnan(part[row]).any() else "an infinite value"
            raise ValueError(f"{what} hold {kind} in row {first_row + start + row}; {advice}")
