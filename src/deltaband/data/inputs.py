"""The inputs of a network: one tensor, several, or tensors by name, each with one row per example."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..storage.encoding import storable
from ..validation import check_finite, describe, tensor_from_numpy


@storable
@dataclass(frozen=True)
class Inputs:
    """Rows of one tensor, of several (`names` is None), or of tensors by name."""

    tensors: tuple[Tensor, ...]
    names: tuple[str, ...] | None = None
    single: bool = True

    @classmethod
    def of(cls, x: Any) -> Inputs:
        """Return the inputs in a tensor or array, in a tuple or list of them, or in a mapping.

        The memory of an array is shared where torch can.
        """
        if isinstance(x, Inputs):
            return x
        if isinstance(x, PackedSequence):
            raise TypeError("a packed sequence has no rows: give the padded tensor and lengths, and pack in forward")
        if isinstance(x, Mapping):
            if not all(isinstance(name, str) for name in x):
                raise TypeError(f"inputs by name need names that are strings, got {list(x)}")
            made = cls(tuple(_tensor(x[name], f"input {name!r}") for name in x), tuple(x), single=False)
        elif isinstance(x, tuple | list):
            if not all(isinstance(part, Tensor | np.ndarray) or hasattr(part, "__array__") for part in x):
                raise TypeError(f"inputs must be a tensor or a NumPy array, or several of them, got {describe(x)}")
            made = cls(tuple(_tensor(part, f"input {i}") for i, part in enumerate(x)), single=False)
        else:
            made = cls((_tensor(x, "inputs"),))
        if not made.tensors:
            raise ValueError(f"inputs are an empty {type(x).__name__}: give at least one tensor")
        if len({len(tensor) for tensor in made.tensors}) > 1:
            sizes = ", ".join(f"{name}: {len(t)}" for name, t in zip(made._labels(), made.tensors, strict=True))
            raise ValueError(f"all inputs must have the same number of rows, got {sizes}")
        return made

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: Any) -> Inputs:
        return self.map(lambda tensor: tensor[index])

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Return inputs with `change` applied to every tensor."""
        return replace(self, tensors=tuple(map(change, self.tensors)))

    def split(self, size: int) -> Iterator[Inputs]:
        """Yield the rows in parts of `size`; no rows are one empty part."""
        for start in range(0, max(len(self), 1), size):
            yield self[start : start + size]

    def arguments(self, forward: Callable[..., Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for `forward`: one per tensor, by name where named, or a single one if it takes that."""
        if self.single:
            return self.tensors, {}
        args = self.tensors if self.names is None else ()
        kwargs = {} if self.names is None else dict(zip(self.names, self.tensors, strict=True))
        try:
            inspect.signature(forward).bind(*args, **kwargs)
        except TypeError:
            return (args or kwargs,), {}
        return args, kwargs

    @staticmethod
    def cat(parts: Sequence[Inputs]) -> Inputs:
        """Return the rows of all parts, which have one format."""
        if len(parts) == 1:
            return parts[0]
        return replace(parts[0], tensors=tuple(map(torch.cat, zip(*(part.tensors for part in parts), strict=True))))

    @property
    def row_format(self) -> tuple[Any, ...]:
        """Names, shapes and types of a row: inputs with equal ones can be concatenated."""
        return (self.names, self.single, *((tensor.shape[1:], tensor.dtype) for tensor in self.tensors))

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def __str__(self) -> str:
        descriptions = [f"shape {tuple(tensor.shape)} and {tensor.dtype}" for tensor in self.tensors]
        if self.single:
            return descriptions[0]
        return ", ".join(f"{name}: {what}" for name, what in zip(self._labels(), descriptions, strict=True))

    def _labels(self) -> Sequence[str]:
        return self.names if self.names is not None else [str(i) for i in range(len(self.tensors))]

    def check_finite(self, first_row: int = 0) -> None:
        """Raise if a row holds NaN or inf; `first_row` is the index of the first row in the data."""
        for label, tensor in zip(self._labels(), self.tensors, strict=True):
            check_finite(tensor, "inputs" if self.single else f"inputs ({label})", first_row)


def _tensor(x: Any, what: str) -> Tensor:
    if isinstance(x, Tensor):
        tensor = x.detach()
    elif isinstance(x, np.ndarray) or hasattr(x, "__array__"):
        tensor = tensor_from_numpy(np.asanyarray(x), what)
    else:
        raise TypeError(f"{what} must be a tensor or a NumPy array, got {describe(x)}")
    if tensor.ndim == 0:
        raise ValueError(f"{what} must have one row per example, got a single number")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type == "meta":
        raise TypeError(f"{what} must be an ordinary tensor, got {tensor.layout} on {tensor.device}")
    if tensor.is_complex():
        raise TypeError(f"{what} must be real, got complex numbers")
    return tensor
