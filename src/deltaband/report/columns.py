"""Columns of values beside the rows of a report, and groups of rows by them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from itertools import pairwise
from numbers import Real
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from ..display import INFINITY, decimals, fixed, number
from ..validation import describe

MISSING = "missing"
MAX_SINGLE_NUMBERS = 8  # a column with at most so many different numbers has a group for each
MAX_CATEGORIES = 10  # of more categories the rarest share the last group
LAST_DATE = "9999-12-31"
N_QUANTILE_GROUPS = 5  # for a column of many different numbers


@dataclass(frozen=True)
class Column:
    """A column: float64 with NaN where missing, dates in seconds; or text, objects with None where missing."""

    values: np.ndarray  # (n,)
    kind: Literal["number", "date", "text"] = "number"

    def of(self, rows: np.ndarray) -> Self:
        """Return the values of some rows."""
        return replace(self, values=self.values[rows])

    @cached_property
    def _decimals(self) -> int | None:
        finite = self.values[np.isfinite(self.values)]
        whole = len(finite) > 0 and bool((finite == np.round(finite)).all()) and np.abs(finite).max() < 1e12
        return 0 if whole else decimals(self.values)

    def format(self, value: Any) -> str:
        if value is None or value != value:
            return MISSING
        if self.kind == "text":
            return str(value)
        if self.kind == "number":
            return fixed(float(value), self._decimals)
        return str(np.datetime64(int(value), "s")).removesuffix("T00:00:00").replace("T", " ")


class Group(NamedTuple):
    name: str
    rows: np.ndarray  # (k,) indices


class Breakdown(NamedTuple):
    """Rows in groups by a column."""

    name: str
    column: Column
    groups: list[Group]
    values: str  # an expression for the column
    of_band: bool = False  # whether that asks the band, which should be the same later on

    @property
    def call(self) -> str:
        """The call that calibrates so that each of these groups is covered as often as asked."""
        return f"{'old = copy.copy(band); ' if self.of_band else ''}band.calibrate(x, y, groups={self._labels})"

    @property
    def _labels(self) -> str:
        column, values = self.column, self.values
        missing = any(value is None or value != value for value in column.values)
        if column.kind == "text":
            return f"[str(each) for each in {values}]" if missing else values
        if column.kind == "number" and not missing and len(np.unique(column.values)) <= MAX_SINGLE_NUMBERS:
            return values
        edges = ", ".join(_edge(column, *pair) for pair in pairwise(column.values[group.rows] for group in self.groups))
        if column.kind == "date":
            return f"np.searchsorted(np.array([{edges}], 'datetime64[s]'), np.asarray({values}, 'datetime64[s]'))"
        return f"np.searchsorted([{edges}], np.asarray({values}{', float' if missing else ''}))"


def _edge(column: Column, of_group: np.ndarray, of_next: np.ndarray) -> str:
    """Return a number from the last value of a group to below the first of the next, which may be infinite or NaN."""
    last, first = float(of_group.max()), float(of_next.min())
    if column.kind == "date":
        return repr(column.format(last) if np.isfinite(first) else LAST_DATE)
    if not np.isfinite(first):
        return "np.inf" if np.isnan(first) else "np.finfo(float).max"
    shorter = (f"{last:.{digits}g}" for digits in range(3, 17))
    return next((text for text in shorter if last <= float(text) < first), f"{last:.17g}")


def named_items(given: Mapping[str, Any] | None, what: str) -> dict[str, Any]:
    """Return the values by name of an optional mapping, or of a data frame."""
    if given is not None and not hasattr(given, "items"):
        raise TypeError(f"{what} must be a mapping of names to values, got {describe(given)}")
    return {} if given is None else {str(name): value for name, value in given.items()}


def read_column(name: str, values: Any, n: int) -> Column:
    """Return a column of n rows; pandas, NumPy, tensors and lists are accepted."""
    if hasattr(values, "detach"):  # a tensor, possibly on a GPU
        values = values.detach().cpu()
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise TypeError(f"column {name!r} must be a sequence of {n} values, got {describe(values)}")
    array = np.asarray(values) if hasattr(values, "__array__") else _object_array(values)
    if array.ndim != 1 or len(array) != n:
        raise ValueError(f"column {name!r} must have a value for each of the {n} rows, got {array.shape}")
    if array.dtype.kind not in "fiuM":
        listed = [None if _is_missing(value) else value for value in array.tolist()]
        present = [value for value in listed if value is not None]
        if present and all(isinstance(value, Real) and not isinstance(value, bool | np.bool_) for value in present):
            array = np.array([np.nan if value is None else float(value) for value in listed])
        elif present and all(isinstance(value, date) and getattr(value, "tzinfo", None) is None for value in present):
            array = np.array(listed, dtype="datetime64[s]")
        else:
            return Column(_object_array([None if value is None else str(value) for value in listed]), "text")
    if array.dtype.kind == "M":
        seconds = array.astype("datetime64[s]")
        return Column(np.where(np.isnat(seconds), np.nan, seconds.astype(np.int64).astype(np.float64)), "date")
    return Column(array.astype(np.float64))


def _object_array(values: Any) -> np.ndarray:
    """Return one entry per value, even where values have a length themselves."""
    array = np.empty(len(values), dtype=object)
    array[:] = [*values]
    return array


def _is_missing(value: Any) -> bool:
    is_nan = isinstance(value, Real) and value != value
    return value is None or is_nan or type(value).__name__ in ("NAType", "NaTType")  # pandas' equivalents


def group_by_value(column: Column) -> list[Group]:
    """Group numbers by quantiles, from small to large; text, and few different numbers, by value."""
    if column.kind == "text":
        return _group_categories(column)
    values = column.values
    finite = np.flatnonzero(np.isfinite(values))
    found = values[finite]
    different = np.unique(found)
    if len(different) <= MAX_SINGLE_NUMBERS:
        groups = [Group(column.format(value), finite[found == value]) for value in different]
    else:
        last = np.ceil(np.arange(1, N_QUANTILE_GROUPS) * len(found) / N_QUANTILE_GROUPS).astype(int) - 1  # if no ties
        part = np.searchsorted(np.unique(np.sort(found)[last]), found, side="left")
        groups = [
            Group(f"{column.format(of_part.min())} to {column.format(of_part.max())}", finite[part == k])
            for k in range(N_QUANTILE_GROUPS)
            if len(of_part := found[part == k])
        ]
    others = [Group(INFINITY, np.flatnonzero(np.isinf(values))), Group(MISSING, np.flatnonzero(np.isnan(values)))]
    return groups + [group for group in others if len(group.rows)]


def group_by_width(width: np.ndarray) -> list[Group]:
    """Group rows by quantiles of their width; one group where all widths are equal up to rounding."""
    if not np.isfinite(width).all():
        return group_by_value(Column(width))
    if np.ptp(width) <= 1e-5 * np.abs(width).max():
        return [Group(f"all {number(float(width.mean()))}", np.arange(len(width)))]
    parts = [rows for rows in np.array_split(np.argsort(width, kind="stable"), N_QUANTILE_GROUPS) if len(rows)]
    edges = [(float(width[rows[0]]), float(width[rows[-1]])) for rows in parts]
    digits = next((k for k in (3, 4, 5) if len({number(low, k) for low, _ in edges}) == len(edges)), 6)
    names = [f"{number(low, digits)} to {number(high, digits)}" for low, high in edges]
    return list(map(Group, names, parts))


def group_by_distance(far: np.ndarray) -> list[Group]:
    """Group rows by whether they are far from the training rows."""
    return [Group(name, np.flatnonzero(which)) for name, which in (("no", ~far), ("yes", far)) if which.any()]


def _group_categories(column: Column) -> list[Group]:
    names = [MISSING if value is None else value for value in column.values]
    different, which, count = np.unique(np.array(names, dtype=str), return_inverse=True, return_counts=True)
    order = np.argsort(-count, kind="stable")
    shown = order if len(order) <= MAX_CATEGORIES else order[: MAX_CATEGORIES - 1]
    groups = [Group(str(different[k]), np.flatnonzero(which == k)) for k in shown]
    if len(shown) < len(order):
        groups.append(Group(f"{len(order) - len(shown):,} others", np.flatnonzero(~np.isin(which, shown))))
    return groups
