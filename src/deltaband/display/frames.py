"""Intervals as pandas frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ..results import ClassIntervals, Intervals
from .numerals import level_name

if TYPE_CHECKING:  # pandas is an extra, loaded when a frame is asked for
    from pandas import DataFrame


def of_intervals(intervals: Intervals, index: Any, outputs: Sequence[Any] | None) -> DataFrame:
    mean = _array(intervals.mean)
    if mean.ndim == 1:
        if outputs is not None:
            raise ValueError("outputs names several outputs, and these intervals are of one")
        return _frame(_columns(intervals, None), index)
    names = list(range(mean.shape[1])) if outputs is None else list(outputs)
    if len(names) != mean.shape[1]:
        raise ValueError(f"the intervals are of {mean.shape[1]} outputs, and {len(names)} names were given for them")
    return _frame({(name, key): v for o, name in enumerate(names) for key, v in _columns(intervals, o).items()}, index)


def of_classes(intervals: ClassIntervals, index: Any) -> DataFrame:
    if isinstance(intervals.classes, tuple):
        names: tuple[Any, ...] = intervals.classes
        if _array(intervals.log_odds.mean).ndim == 1:
            return _frame(_both(intervals, None), index)
        columns = {(name, key): v for c, name in enumerate(names) for key, v in _both(intervals, c).items()}
        return _frame(columns, index, "class")
    return _frame({"class": _array(intervals.classes), **_both(intervals, None)}, index)


def _both(intervals: ClassIntervals, which: int | None) -> dict[str, np.ndarray]:
    return {
        **_columns(intervals.log_odds, which, "log_odds", "log_odds_"),
        **_columns(intervals.probability, which, "probability", "probability_"),
    }


def _columns(
    intervals: Intervals, output: int | None, mean_name: str = "prediction", prefix: str = ""
) -> dict[str, np.ndarray]:
    """prediction, lower_95, upper_95, and so on for every level."""
    mean, lower, upper = (_array(part) if output is None else _array(part)[:, output] for part in intervals)
    levels = np.atleast_1d(np.asarray(intervals.level, dtype=object))
    if lower.ndim == 1:
        lower, upper = lower[:, None], upper[:, None]
    if lower.shape[1] != len(levels):
        raise ValueError(f"{len(levels)} levels do not go with bounds of {lower.shape[1]} columns")
    columns = {mean_name: mean}
    for j, level in enumerate(levels):
        suffix = "" if level is None else f"_{level_name(level)}"
        columns[f"{prefix}lower{suffix}"] = lower[:, j]
        columns[f"{prefix}upper{suffix}"] = upper[:, j]
    return columns


def _frame(columns: dict[Any, np.ndarray], index: Any, above: str = "output") -> DataFrame:
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError("frames need pandas: pip install 'deltaband[cli]', or pandas alone") from error
    frame = pd.DataFrame(columns, index=index)
    if isinstance(frame.columns, pd.MultiIndex):
        frame.columns.names = [above, None]
    return frame


def _array(values: Any) -> np.ndarray:
    """As precise as it came."""
    return np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
