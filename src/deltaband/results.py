"""`Intervals` and `ClassIntervals`: what `predict` returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:  # pandas is an extra
    from pandas import DataFrame

Side = Literal["both", "lower", "upper"]  # which bounds of an interval are finite


@dataclass(frozen=True, eq=False)
class Intervals:
    """Predictions with their bounds, one row per input, and one column per output if the network has several; with a
    list of levels the bounds have one number a level behind that.

    Unpacks as `mean, lower, upper`.
    """

    mean: Any  # (n,) or (n, m)
    lower: Any  # (n,) or (n, m), with the levels behind it if there are several
    upper: Any
    level: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.level is not None:
            parse_levels(self.level)

    @property
    def width(self) -> Any:
        return self.upper - self.lower

    def __iter__(self) -> Iterator[Any]:
        return iter((self.mean, self.lower, self.upper))

    def __len__(self) -> int:
        return len(self.mean)

    def to_pandas(self, index: Any = None, outputs: Sequence[Any] | None = None) -> DataFrame:
        """A frame with the columns prediction, lower_95 and upper_95; for several levels a pair of bounds each.

        Several outputs stand beside each other below a name each, 0, 1, … or those given as `outputs`: `frame[0]` is
        the frame of the first alone. `index` becomes the frame's.
        """
        from .display.frames import of_intervals

        return of_intervals(self, index, outputs)

    def __repr__(self) -> str:
        from .display.notebook import text

        return text(self)

    def _repr_html_(self) -> str:
        from .display.notebook import html

        return html(self)


@dataclass(frozen=True, eq=False)
class ClassIntervals:
    """For each input and class an interval of its log-odds against all others, and the same as probabilities.

    One column a class; with a list of levels the bounds have one number a level behind that.
    """

    classes: Any  # what the columns are about, a tuple; or of each row the predicted class, (n,)
    log_odds: Intervals
    probability: Intervals

    def __len__(self) -> int:
        return len(self.log_odds)

    def to_pandas(self, index: Any = None) -> DataFrame:
        """A frame with log_odds, log_odds_lower_95, …, probability, probability_lower_95, …, below the number of each
        class; of one class alone without that, and of predicted classes behind the column class."""
        from .display.frames import of_classes

        return of_classes(self, index)

    def __repr__(self) -> str:
        of = f"classes {self.classes}" if isinstance(self.classes, tuple) else "the predicted class of each row"
        return f"ClassIntervals of {of}\nprobability: {self.probability!r}\nlog_odds: {self.log_odds!r}"

    def _repr_html_(self) -> str:
        return f"<p>Probability</p>{self.probability._repr_html_()}<p>Log-odds</p>{self.log_odds._repr_html_()}"


def parse_levels(level: float | Sequence[float]) -> tuple[float, ...]:
    """Levels as a tuple, checked."""
    try:
        levels = tuple(float(value) for value in np.atleast_1d(np.asarray(level, dtype=float)))
    except (TypeError, ValueError):
        raise TypeError(f"level must be a number or a list of numbers between 0 and 1, got {level!r}") from None
    if not levels or not all(0.0 < value < 1.0 for value in levels):
        raise ValueError(f"level must be between 0 and 1, exclusive (0.95 for 95 %), got {level!r}")
    return levels


def to_numpy(values: Any) -> np.ndarray:
    """Arrays, tensors and lists alike, in float64."""
    return np.asarray(values.detach().cpu().double() if isinstance(values, Tensor) else values, dtype=np.float64)


def like(x: Any, values: np.ndarray, dtype: torch.dtype, toward: float | None = None) -> Any:
    """`values` as what the user brought: a tensor on x's device, or an array; in the network's precision.

    `toward` ±inf rounds that way, so that a bound is still one.
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
