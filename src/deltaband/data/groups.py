"""Groups of rows: a label for each row, or indicators of groups that may overlap."""

from numbers import Real
from typing import Any

import numpy as np

from ..validation import describe

Label = str | int | float


def read_labels(groups: Any, n_rows: int) -> list[Label]:
    """Return one label per row as values of Python, or raise."""
    if hasattr(groups, "detach"):
        groups = groups.detach().cpu()
    if isinstance(groups, str | bytes) or not hasattr(groups, "__len__"):
        raise TypeError(f"groups must have one label per row, {n_rows} of them, got {describe(groups)}")
    values = np.asarray(groups) if hasattr(groups, "__array__") else groups
    if len(values) != n_rows or np.ndim(values) != 1:
        shape = np.shape(values)
        raise ValueError(f"groups must have one label per row: {n_rows} rows, groups of shape {shape}")
    labels = [value.item() if isinstance(value, np.generic) else value for value in values]
    for row, label in enumerate(labels):
        if (
            label is None
            or type(label).__name__ in ("NAType", "NaTType")
            or (isinstance(label, float) and label != label)
        ):
            raise ValueError(
                f"groups have no label in row {row}: give such rows a label of their own, or leave them out"
            )
        if not isinstance(label, str | Real):
            raise TypeError(f"labels of groups must be words or numbers, got {describe(label)} in row {row}")
    return [label if isinstance(label, str | int) else float(label) for label in labels]


def read_indicators(groups: Any, n_rows: int) -> np.ndarray:  # (n, G)
    """Return a matrix of 0 and 1, or raise."""
    array = np.asarray(groups.detach().cpu() if hasattr(groups, "detach") else groups)
    if array.ndim != 2 or len(array) != n_rows or array.shape[1] == 0:
        raise ValueError(f"groups must have a row of indicators for each of {n_rows} rows, got shape {array.shape}")
    try:
        numbers = array.astype(np.float64)
    except (TypeError, ValueError):
        got = f"got {describe(array)} of {array.dtype}: labels are given as (n,)"
        raise TypeError(f"a matrix of groups must be of 0 and 1, {got}") from None
    bad = ~np.isin(numbers, (0.0, 1.0)).all(axis=1)
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(f"a matrix of groups must be of 0 and 1, got {numbers[row]} in row {row}")
    return numbers


def group_names(indicators: Any) -> tuple[str, ...] | None:
    """Return the names of the columns, where they have any."""
    return tuple(map(str, indicators.columns)) if hasattr(indicators, "columns") else None


def rows_of(values: Any, rows: slice | np.ndarray) -> Any:
    """Return some rows of an array, a list, or what pandas has."""
    if isinstance(values, list | tuple) and not isinstance(rows, slice):
        return [values[row] for row in rows]
    return values.iloc[rows] if hasattr(values, "iloc") else values[rows]
