"""`Intervals` and `ClassIntervals`: what `predict` returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:  # pandas is an extra, loaded when a data frame is requested
    from pandas import DataFrame

Side = Literal["both", "lower", "upper"]  # which bounds of an interval are finite


@dataclass(frozen=True, eq=False)
class Intervals:
    """Predictions with a lower and an upper bound, one row per input.

    Unpacks as `mean, lower, upper`. The arrays are NumPy arrays or tensors, like the inputs.

    Args:
        mean: The predictions, of shape (n,), or (n, m) for m outputs.
        lower: The lower bounds, of the same shape; with several levels there is one more axis at the end, (n, levels)
            or (n, m, levels).
        upper: The upper bounds, of the shape of `lower`.
        level: The level or levels of the intervals, between 0 and 1; None where it is unknown.

    Raises:
        ValueError: If a level is not between 0 and 1.
    """

    mean: Any
    lower: Any
    upper: Any
    level: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.level is not None:
            parse_levels(self.level)

    @property
    def width(self) -> Any:
        """The widths, upper − lower."""
        return self.upper - self.lower

    def __iter__(self) -> Iterator[Any]:
        return iter((self.mean, self.lower, self.upper))

    def __len__(self) -> int:
        return len(self.mean)

    def to_pandas(self, index: Any = None, outputs: Sequence[Any] | None = None) -> DataFrame:
        """Return a data frame with the columns prediction, lower_95 and upper_95, and a pair of bounds per level.

        Args:
            index: The index of the frame, for example that of the inputs.
            outputs: Names of the outputs, by default 0, 1, …. With several outputs the columns have two levels:
                `frame[name]` is the frame of one output.

        Returns:
            The data frame, in the precision of the intervals.

        Raises:
            ImportError: If pandas is not installed.
            ValueError: If the number of names is not that of the outputs.
        """
        if np.ndim(self.mean) == 1:
            if outputs is not None:
                raise ValueError("outputs names several outputs, but these intervals are of one output")
            return _data_frame(_frame_columns(self), index)
        m = np.shape(self.mean)[1]
        names = list(range(m)) if outputs is None else list(outputs)
        if len(names) != m:
            raise ValueError(f"the intervals are of {m} outputs, but {len(names)} names were given")
        columns = ((name, _frame_columns(self, o)) for o, name in enumerate(names))
        return _data_frame({(name, key): v for name, part in columns for key, v in part.items()}, index, "output")

    def __repr__(self) -> str:
        from .display.notebook import intervals_text

        return intervals_text(self)

    def _repr_html_(self) -> str:
        from .display.notebook import intervals_html

        return intervals_html(self)


@dataclass(frozen=True, eq=False)
class ClassIntervals:
    """Intervals for the log-odds of each class against all others, and the same intervals as probabilities.

    Args:
        classes: The classes of the columns, a tuple; or the predicted class of each row, an array of shape (n,).
        log_odds: Intervals for the log-odds, with one column per class.
        probability: The same intervals as probabilities.
    """

    classes: Any
    log_odds: Intervals
    probability: Intervals

    def __len__(self) -> int:
        return len(self.log_odds)

    def to_pandas(self, index: Any = None) -> DataFrame:
        """Return a data frame with log_odds, log_odds_lower_95, …, probability, probability_lower_95, ….

        Args:
            index: The index of the frame, for example that of the inputs.

        Returns:
            The data frame. With several classes the columns have two levels: `frame[2]` is the frame of class 2.
            Intervals for predicted classes have the column class before all others.

        Raises:
            ImportError: If pandas is not installed.
        """
        if not isinstance(self.classes, tuple):
            return _data_frame({"class": _to_array(self.classes), **self._columns()}, index)
        if np.ndim(self.log_odds.mean) == 1:
            return _data_frame(self._columns(), index)
        columns = ((name, self._columns(c)) for c, name in enumerate(self.classes))
        return _data_frame({(name, key): v for name, part in columns for key, v in part.items()}, index, "class")

    def _columns(self, which: int | None = None) -> dict[str, np.ndarray]:
        odds = _frame_columns(self.log_odds, which, "log_odds", "log_odds_")
        return {**odds, **_frame_columns(self.probability, which, "probability", "probability_")}

    def __repr__(self) -> str:
        of = f"classes {self.classes}" if isinstance(self.classes, tuple) else "the predicted class of each row"
        return f"ClassIntervals of {of}\nprobability: {self.probability!r}\nlog_odds: {self.log_odds!r}"

    def _repr_html_(self) -> str:
        return f"<p>Probability</p>{self.probability._repr_html_()}<p>Log-odds</p>{self.log_odds._repr_html_()}"


def parse_levels(level: float | Sequence[float]) -> tuple[float, ...]:
    """Return one or several levels as a tuple; raise TypeError or ValueError if they are not between 0 and 1."""
    try:
        levels = tuple(float(value) for value in np.atleast_1d(np.asarray(level, dtype=float)))
    except (TypeError, ValueError):
        raise TypeError(f"level must be a number or a list of numbers between 0 and 1, got {level!r}") from None
    if not levels or not all(0.0 < value < 1.0 for value in levels):
        raise ValueError(f"level must be between 0 and 1, exclusive (0.95 for 95 %), got {level!r}")
    return levels


def level_names(intervals: Intervals, n_levels: int) -> list[str | None]:
    """Return the levels as percentages without a sign, [None] if unknown; raise ValueError if there are not so many."""
    levels = np.atleast_1d(np.asarray(intervals.level, dtype=object))
    if len(levels) != n_levels:
        raise ValueError(f"{len(levels)} levels do not match bounds of {n_levels} columns")
    return [None if level is None else level_name(level) for level in levels]


def level_name(level: float) -> str:
    """Return a level as a percentage without a sign: 95, 99.9, 68.27."""
    return f"{100 * level:.10g}"


def to_numpy(values: Any) -> np.ndarray:
    """Return an array, a tensor or a list as a float64 array."""
    return np.asarray(values.detach().cpu().double() if isinstance(values, Tensor) else values, dtype=np.float64)


def like(x: Any, values: np.ndarray, dtype: torch.dtype, toward: float | None = None) -> Any:
    """Return `values` as the kind of `x`, a tensor on its device or an array, in the precision of the network.

    Args:
        x: The inputs as the user gave them.
        values: The result in float64.
        dtype: The precision of the network.
        toward: ±inf rounds in that direction, so that a bound remains one; by default to the nearest number.
    """
    exact = torch.from_numpy(np.ascontiguousarray(values))
    result = exact.to(dtype)
    if toward is not None:
        short = result < exact if toward > 0 else result > exact
        result = torch.where(short, torch.nextafter(result, torch.full_like(result, toward)), result)
    first = x
    while isinstance(first, Mapping | tuple | list) and len(first):
        first = next(iter(first.values() if isinstance(first, Mapping) else first))
    return result.to(first.device) if isinstance(first, Tensor) else result.numpy()


def _frame_columns(
    intervals: Intervals, output: int | None = None, mean_name: str = "prediction", prefix: str = ""
) -> dict[str, np.ndarray]:
    """Return the columns prediction, lower_95, upper_95, and so on for each level."""
    mean, lower, upper = (_to_array(part) if output is None else _to_array(part)[:, output] for part in intervals)
    if lower.ndim == 1:
        lower, upper = lower[:, None], upper[:, None]
    columns = {mean_name: mean}
    for j, name in enumerate(level_names(intervals, lower.shape[1])):
        suffix = "" if name is None else f"_{name}"
        columns[f"{prefix}lower{suffix}"] = lower[:, j]
        columns[f"{prefix}upper{suffix}"] = upper[:, j]
    return columns


def _data_frame(columns: dict[Any, np.ndarray], index: Any, outer_level: str | None = None) -> DataFrame:
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError("data frames need pandas: pip install pandas") from error
    frame = pd.DataFrame(columns, index=index)
    if isinstance(frame.columns, pd.MultiIndex):
        frame.columns.names = [outer_level, None]
    return frame


def _to_array(values: Any) -> np.ndarray:
    return np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
