"""Columns of the user's: numbers, dates or text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime
from functools import cached_property
from numbers import Real
from typing import Any, Literal

import numpy as np

from ..display.numerals import decimals, fixed, number
from ..validation import describe

MISSING = "missing"
DAY = 86_400.0


@dataclass(frozen=True)
class Column:
    values: np.ndarray  # (n,) float64, NaN where missing, dates in seconds; of text objects, None where missing
    kind: Literal["number", "date", "text"] = "number"

    @cached_property
    def _decimals(self) -> int | None:
        finite = self.values[np.isfinite(self.values)]
        whole = len(finite) > 0 and bool((finite == np.round(finite)).all()) and np.abs(finite).max() < 1e12
        return 0 if whole else decimals(self.values)

    @property
    def is_text(self) -> bool:
        return self.kind == "text"

    def shown(self, value: Any) -> str:
        if value is None or value != value:
            return MISSING
        if self.kind == "text":
            return str(value)
        if self.kind == "number":
            return number(float(value)) if self._decimals is None else fixed(float(value), self._decimals)
        moment = np.datetime64(int(value), "s")
        return str(moment.astype("datetime64[D]") if value % DAY == 0 else moment).replace("T", " ")


def read(columns: Mapping[str, Any] | None, n: int) -> dict[str, Column]:
    if columns is None:
        return {}
    if not hasattr(columns, "items"):
        raise TypeError(f"columns must be a mapping of names to values, got {describe(columns)}")
    return {str(name): _column(str(name), values, n) for name, values in columns.items()}


def _column(name: str, values: Any, n: int) -> Column:
    if hasattr(values, "detach"):  # a tensor, which may be on a GPU
        values = values.detach().cpu()
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise TypeError(f"column {name!r} must be a sequence of {n} values, got {describe(values)}")
    array = np.asarray(values) if hasattr(values, "__array__") else _objects(values)
    if array.ndim != 1 or len(array) != n:
        raise ValueError(f"column {name!r} must have a value for each of the {n} rows, got {array.shape}")
    if array.dtype.kind in "fiu":
        return Column(array.astype(np.float64))
    if array.dtype.kind == "M":
        return _dates(array)
    listed = [None if _is_missing(value) else value for value in array.tolist()]
    there = [value for value in listed if value is not None]
    if there and all(isinstance(value, Real) and not isinstance(value, bool | np.bool_) for value in there):
        return Column(np.array([np.nan if value is None else float(value) for value in listed]))
    if there and all(isinstance(value, date) and getattr(value, "tzinfo", None) is None for value in there):
        return _dates(np.array(listed, dtype="datetime64[s]"))
    return Column(_objects([None if value is None else _text(value) for value in listed]), "text")


def _dates(array: np.ndarray) -> Column:
    seconds = array.astype("datetime64[s]")
    return Column(np.where(np.isnat(seconds), np.nan, seconds.astype(np.int64).astype(np.float64)), "date")


def _objects(values: Any) -> np.ndarray:
    """One entry a value, even where values have a length themselves."""
    array = np.empty(len(values), dtype=object)
    array[:] = [*values]
    return array


def _text(value: Any) -> str:
    return value.isoformat(" ") if isinstance(value, datetime) else str(value)


def _is_missing(value: Any) -> bool:
    """None, NaN, and what pandas has in their place."""
    return (
        value is None or type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, Real) and value != value)
    )
