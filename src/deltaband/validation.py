"""Numbers as users bring them, checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

FINITE_NUMBERS = 2**20  # looked at at once: what is asked of all of them takes as much memory again


def check_finite(values: Tensor, what: str, first_row: int = 0, advice: str = "remove or impute such rows") -> None:
    """Raise if a row holds NaN or inf, and name the first."""
    if not values.is_floating_point():
        return
    step = max(1, FINITE_NUMBERS // max(1, values[:1].numel()))
    for start in range(0, len(values), step):
        part = values[start : start + step]
        if bool(torch.isfinite(part).all()):
            continue
        bad = ~torch.isfinite(part.reshape(len(part), -1)).all(dim=1)
        row = int(bad.nonzero()[0])
        kind = "NaN" if bool(torch.isnan(part[row]).any()) else "an infinite value"
        raise ValueError(f"{what} hold {kind} in row {first_row + start + row}; {advice}")


def from_numpy(array: np.ndarray, what: str) -> Tensor:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{what} must not be masked: remove the masked rows first")
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{what} must be numbers, got an array of dtype {array.dtype}; try .astype(float)")
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:  # of either byte order
        array = array.astype(np.float64)
    if not array.dtype.isnative or any(stride < 0 for stride in array.strides) or not array.flags.writeable:
        array = np.array(array, dtype=array.dtype.newbyteorder("="))
    return torch.from_numpy(np.asarray(array))


def whole_numbers(values: Any, refusal: str) -> tuple[int, ...]:
    """One whole number or several; a ValueError with the refusal where it is anything else."""
    try:
        numbers = (values,) if isinstance(values, int | np.integer) else tuple(values)
    except TypeError:
        numbers = ()
    if not numbers or any(isinstance(each, bool) or not isinstance(each, int | np.integer) for each in numbers):
        raise ValueError(f"{refusal}, got {values!r}")
    return tuple(map(int, numbers))


def described(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    shape = getattr(value, "shape", None)
    return type(value).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")
