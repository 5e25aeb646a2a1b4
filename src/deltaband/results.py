"""`Intervals` and `ClassIntervals`, which `predict` returns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from . import display
from .data.batches import read_targets
from .data.inputs import check_finite
from .data.items import leaves
from .display import Markup, decimals, element, fixed

if TYPE_CHECKING:  # pandas is an extra, loaded when a data frame is requested
    from pandas import DataFrame

Side = Literal["both", "lower", "upper"]  # which bounds of an interval are finite

MAX_TABLE_ROWS, MAX_TABLE_OUTPUTS = 5, 3  # of more outputs a table shows the first alone


@dataclass(frozen=True, eq=False, repr=False)
class Intervals:
    """Predictions with a lower and an upper bound, one row per input.

    Unpacks as `mean, lower, upper`. The arrays are NumPy arrays or tensors, like the inputs.

    Args:
        mean: The predictions, of shape (n,), or (n, m) for m outputs.
        lower: The lower bounds, of the same shape; with several levels (n, levels) or (n, m, levels).
        upper: The upper bounds, of the shape of `lower`.
        level: The level or levels of the intervals, between 0 and 1; None where it is unknown.
        far: Which rows are far from the training rows, of shape (n,); None where that is unknown.
    """

    mean: Any
    lower: Any
    upper: Any
    level: float | tuple[float, ...] | None = None
    far: Any = None

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

    def __getitem__(self, rows: Any) -> Intervals:
        """Return the intervals of some rows, given as a slice, a mask or a list of numbers."""
        rows = rows.bool() if isinstance(rows, Tensor) and rows.dtype == torch.uint8 else rows  # a mask, as in torch
        numbers = to_numpy(rows, None if len(rows) else np.intp) if isinstance(rows, Tensor | list) else rows
        chosen = np.arange(len(self))[numbers]
        if chosen.ndim != 1:
            raise TypeError(f"rows are a slice, a mask or a list of numbers (intervals[3:4] is row 3), got {rows!r}")
        mean, lower, upper, far = (_rows(part, chosen) for part in (self.mean, self.lower, self.upper, self.far))
        return Intervals(mean, lower, upper, self.level, far)

    def contains(self, y: Any) -> Any:
        """Return which targets lie within their intervals, lower ≤ y ≤ upper.

        Args:
            y: The targets, (n,), (n, 1) or (n, m).

        Returns:
            True or False for each bound, of the shape and kind of `lower`.

        Raises:
            ValueError: If there are not as many targets as intervals.
        """
        targets, (_, lower, upper) = read_targets(y).numpy(), interval_arrays(self, np.float64)
        if targets.shape != lower.shape[:2]:
            raise ValueError(f"expected targets of shape {lower.shape[:2]}, one per interval, got {targets.shape}")
        check_finite(torch.from_numpy(targets), "targets")
        inside = (lower <= targets[:, :, None]) & (targets[:, :, None] <= upper)
        return like(self.lower, inside.reshape(np.shape(self.lower)), torch.bool)

    def to_pandas(self, index: Any = None, outputs: Sequence[Any] | None = None) -> DataFrame:
        """Return a data frame with the columns prediction, lower_95 and upper_95, and a pair of bounds per level.

        Calibrated intervals have a column `far`, which is true where a row is far from the training rows.

        Args:
            index: The index of the frame, for example that of the inputs.
            outputs: Names of the outputs, by default 0, 1, …; of several, `frame[name]` is the frame of one.

        Returns:
            The data frame, in the precision of the intervals.

        Raises:
            ValueError: If there are not as many names as outputs.
        """
        several = np.ndim(self.mean) > 1
        if outputs is not None and not several:
            raise ValueError("outputs names several outputs, but these intervals are of one output")
        m = math.prod(np.shape(self.mean)[1:])
        names = list(range(m) if outputs is None else outputs)
        if len(names) != m:
            raise ValueError(f"the intervals are of {m} outputs, but {len(names)} names were given")
        parts = {name: self._columns(o) for o, name in enumerate(names)}
        return data_frame(parts, index, "output" if several else None)

    def _columns(self, output: int = 0, mean_name: str = "prediction", prefix: str = "") -> dict[str, np.ndarray]:
        mean, lower, upper = (part[:, output] for part in interval_arrays(self))
        columns = {mean_name: mean}
        for j, name in enumerate(level_names(self, lower.shape[1])):
            suffix = "" if name is None else f"_{name}"
            columns |= {f"{prefix}lower{suffix}": lower[:, j], f"{prefix}upper{suffix}": upper[:, j]}
        return columns if self.far is None else columns | {f"{prefix}far": to_numpy(self.far, None)}

    def __repr__(self) -> str:
        return display.text_table(*self._table())

    def _repr_html_(self) -> str:
        title, cells, below = self._table()
        table, lines = display.html_table(cells), [element("p", text) for text in below]
        return element("div", element("p", element("b", title)), self._picture(), table, *lines)

    def _table(self) -> tuple[str, list[list[str]], list[str]]:
        """Return a title, the header and the first rows, and a line that says how many more there are, if any."""
        mean, lower, upper = interval_arrays(self, np.float64)
        n, m, n_levels = lower.shape
        levels = [] if self.level is None else list(map(level_name, parse_levels(self.level)))
        title = f"Intervals of {n:,} row{'s'[: n != 1]}" + (f", {m} outputs" if m > 1 else "")
        names = [f" {name}" for name in levels] or [""]
        if len(names) != n_levels:
            names = [f" {j}" for j in range(n_levels)]
        outputs = [0] if m > MAX_TABLE_OUTPUTS else range(m)
        columns = ["prediction", *(end + name for name in names for end in ("lower", "upper"))]
        header = ["row", *((f"{o}: " if m > 1 else "") + column for o in outputs for column in columns)]
        bounds = np.stack([lower, upper], axis=3).reshape(n, m, 2 * n_levels)
        values = np.concatenate([mean[:, :, None], bounds], axis=2)[:MAX_TABLE_ROWS]
        places = [decimals(upper[:, o] - lower[:, o]) for o in outputs]  # outputs may have different units
        rows = [
            [str(k), *(fixed(float(value), d) for o, d in zip(outputs, places, strict=True) for value in row[o])]
            for k, row in enumerate(values)
        ]
        below = [f"… {n - MAX_TABLE_ROWS:,} more"] if n > MAX_TABLE_ROWS else []
        return ", ".join([title, *(f"{level} %" for level in levels)]), [header, *rows], below

    def _picture(self) -> Markup:
        """Draw the predictions of the first output in ascending order, within their intervals."""
        values = np.column_stack([part[:, 0] for part in interval_arrays(self, np.float64)])
        finite = values[np.isfinite(values).all(axis=1)]
        if len(finite) < 2:
            return Markup("")
        order = np.argsort(finite[:, 0], kind="stable")
        shown = finite[display.evenly_spaced(order, display.CURVE_POINTS)]
        mean, (lower, upper) = shown[:, 0], np.split(shown[:, 1:].T, 2)  # (n,), (levels, n)
        position = np.linspace(1, len(order), len(shown))
        labels = "rows, sorted by prediction", "prediction and interval"
        axes = display.Axes((1.0, float(len(order))), display.axis_limits(shown), *labels, height=display.SMALL_HEIGHT)
        widest_first = np.argsort(-(upper - lower).mean(axis=1), kind="stable")
        areas = [axes.area(position, lower[j], upper[j], fill=display.BAND) for j in widest_first]
        line = axes.line(position, mean, stroke=display.BLUE)
        picture = axes.picture(*areas, line, describe="Predictions within their intervals")
        return element("div", picture, style=display.SMALL_STYLE)


@dataclass(frozen=True, eq=False, repr=False)
class ClassIntervals:
    """Intervals for the log-odds of each class against all others, and the same intervals as probabilities.

    Args:
        classes: The classes of the columns, a tuple; or those of each row, the predicted one, an array of shape (n,),
            or several from the most likely on, (n, k).
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
            Intervals for the most likely classes have the column class before all others, and `frame[0]` is the frame
            of the first of several.
        """
        alike, several = isinstance(self.classes, tuple), np.ndim(self.log_odds.mean) == 2
        names = [None] if not several else self.classes if alike else range(self.classes.shape[1])
        parts = {name: self._columns(c) for c, name in enumerate(names)}
        return data_frame(parts, index, ("class" if alike else "rank") if several else None)

    def _columns(self, which: int) -> dict[str, np.ndarray]:
        predicted = {}
        if not isinstance(self.classes, tuple):
            classes = to_numpy(self.classes, dtype=None)
            predicted["class"] = classes if classes.ndim == 1 else classes[:, which]
        odds = self.log_odds._columns(which, "log_odds", "log_odds_")
        return predicted | odds | self.probability._columns(which, "probability", "probability_")

    def __repr__(self) -> str:
        likely = np.shape(self.classes)[1:]
        of = "the predicted class of each row" if not likely else f"the {likely[0]} most likely classes of each row"
        of = f"classes {self.classes}" if isinstance(self.classes, tuple) else of
        return f"ClassIntervals of {of}\nprobability: {self.probability!r}\nlog_odds: {self.log_odds!r}"

    def _repr_html_(self) -> str:
        return f"<p>Probability</p>{self.probability._repr_html_()}<p>Log-odds</p>{self.log_odds._repr_html_()}"


def _rows(part: Any, chosen: np.ndarray) -> Any:
    """Return some rows of an array, a tensor or a list; None stays None."""
    if part is None:
        return None
    return (
        part[torch.from_numpy(chosen.copy()).to(part.device)] if isinstance(part, Tensor) else np.asarray(part)[chosen]
    )


def two_bounds(bound: np.ndarray, side: Side) -> tuple[np.ndarray, np.ndarray]:
    """Return −bound and bound; for one side the other bound is infinite."""
    infinite = np.full_like(bound, np.inf)
    return -infinite if side == "upper" else -bound, infinite if side == "lower" else bound


def concatenated(parts: Sequence[Any]) -> Any:
    """Return results for several batches of rows as one: arrays, tensors, tuples of them, or intervals."""
    first = parts[0]
    match first:
        case Intervals():
            pieces = zip(*((part.mean, part.lower, part.upper, part.far) for part in parts), strict=True)
            mean, lower, upper, far = (None if piece[0] is None else concatenated(piece) for piece in pieces)
            return Intervals(mean, lower, upper, first.level, far)
        case ClassIntervals():
            classes = [part.classes for part in parts]
            same = classes[0] if isinstance(classes[0], tuple) else concatenated(classes)
            scores = (concatenated([getattr(part, name) for part in parts]) for name in ("log_odds", "probability"))
            return ClassIntervals(same, *scores)
        case tuple():
            return tuple(map(concatenated, zip(*parts, strict=True)))
    return torch.cat(list(parts)) if isinstance(first, Tensor) else np.concatenate(parts)


def check_kind_and_side(kind: Any, side: Any) -> None:
    if not isinstance(kind, str) or kind not in ("observation", "mean"):
        raise ValueError(f"kind must be 'observation' or 'mean', got {kind!r}")
    if not isinstance(side, str) or side not in ("both", "lower", "upper"):
        raise ValueError(f"side must be 'both', 'lower' or 'upper', got {side!r}")


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


def interval_arrays(intervals: Intervals, dtype: type | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean as (n, m) and the bounds as (n, m, levels)."""
    mean, lower, upper = (to_numpy(part, dtype) for part in intervals)
    m = int(np.prod(mean.shape[1:]))
    n_levels = lower.size // mean.size if mean.size else np.asarray(intervals.level).size
    return mean.reshape(-1, m), lower.reshape(-1, m, n_levels), upper.reshape(-1, m, n_levels)


def to_numpy(values: Any, dtype: type | None = np.float64) -> np.ndarray:
    """Return an array, a tensor or a list as an array; `dtype=None` keeps its type."""
    if isinstance(values, Tensor):  # NumPy has no bfloat16
        values = (values if dtype is None else values.double()).numpy(force=True)
    return np.asarray(values, dtype=dtype)


def like(x: Any, values: np.ndarray, dtype: torch.dtype, toward: float | None = None) -> Any:
    """Return `values` as the kind of `x`, a tensor on its device or an array, in the precision of the network.

    `toward=±inf` rounds in that direction, so that a bound remains one; by default to the nearest number.
    """
    exact = torch.from_numpy(np.ascontiguousarray(values))
    result = exact.to(dtype)
    if toward is not None:
        short = result < exact if toward > 0 else result > exact
        result = torch.where(short, torch.nextafter(result, torch.full_like(result, toward)), result)
    first = x
    while isinstance(first, Mapping | tuple | list) and len(first):
        first = next(iter(first.values() if isinstance(first, Mapping) else first))
    if not hasattr(first, "__array__"):  # items
        first = next((leaf for leaf in leaves(first) if hasattr(leaf, "__array__")), None)
    return result.to(first.device) if isinstance(first, Tensor) else result.numpy()


def data_frame(parts: Mapping[Any, Mapping[str, Any]], index: Any = None, outer_level: str | None = None) -> DataFrame:
    """Return the columns of all parts, below the names of these if the outer level has a name."""
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError("data frames need pandas: pip install 'deltaband[pandas]'") from error
    frames = {name: pd.DataFrame(columns, index=index) for name, columns in parts.items()}
    return pd.concat(frames, axis=1, names=[outer_level]) if outer_level else next(iter(frames.values()))
