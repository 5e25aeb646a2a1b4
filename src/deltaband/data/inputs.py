"""The inputs of a network: one tensor, several, or tensors by name, each with one row per example."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..storage.encoding import storable
from ..validation import describe

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
                raise TypeError(f"inputs must be a tensor or a NumPy array, or several of them, got {describe(x)}")
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
        return chosen.beside(**{name: extra[index] for name, extra in self.extras.items()}) if self.extras else chosen

    def beside(self, **extras: Tensor) -> Self:
        """Return the same rows with these extras, besides or instead of those they have."""
        return replace(self, extras={**self.extras, **extras})

    def alone(self) -> Self:
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
        if self.single:
            return self.tensors, {}
        args, kwargs = ((), self._by_label()) if self.names else (self.tensors, {})
        try:
            inspect.signature(forward).bind(*args, **kwargs)
        except TypeError:
            return (args or kwargs,), {}
        return args, kwargs

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        if len(parts) == 1:
            return parts[0]
        extras = {name: torch.cat([part.extras[name] for part in parts]) for name in parts[0].extras}
        tensors = tuple(map(torch.cat, zip(*(part.tensors for part in parts), strict=True)))
        return replace(parts[0], tensors=tensors, extras=extras)

    @property
    def row_format(self) -> tuple[Any, ...]:
        """Names, shapes and types of a row: inputs with equal ones can be concatenated."""
        extras = tuple((name, extra.shape[1:]) for name, extra in sorted(self.extras.items()))
        return (self.names, self.single, extras, *((tensor.shape[1:], tensor.dtype) for tensor in self.tensors))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def __str__(self) -> str:
        labels = [""] if self.single else [f"{label}: " for label in self._by_label()]
        labelled = zip(labels, self.tensors, strict=True)
        return ", ".join(f"{label}shape {tuple(tensor.shape)} and {tensor.dtype}" for label, tensor in labelled)

    def _by_label(self) -> dict[Any, Tensor]:
        return dict(zip(self.names or range(len(self.tensors)), self.tensors, strict=True))

    def check_finite(self, first_row: int = 0) -> None:
        for label, tensor in self._by_label().items():
            check_finite(tensor, "inputs" if self.single else f"inputs ({label})", first_row)


def as_tensor(x: Any, what: str) -> Tensor:
    """Return an array or tensor of real numbers as a tensor, sharing its memory where torch can."""
    if not hasattr(x, "__array__"):
        raise TypeError(f"{what} must be a tensor or a NumPy array, got {describe(x)}")
    tensor = x.detach() if isinstance(x, Tensor) else _from_numpy(np.asanyarray(x), what)
    if tensor.ndim == 0:
        raise ValueError(f"{what} must have one row per example, got a single number")
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
