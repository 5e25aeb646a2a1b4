"""Measures of the quality of intervals, on rows that the network was not trained on.

Every metric takes the targets `y`, (n,), (n, 1) or (n, m), and the `Intervals` that `predict` returned for the same
rows. For one output and level it returns a float, for several an array: (levels,), (m,) or (m, levels).

Example:
    >>> import numpy as np
    >>> from deltaband import Intervals, metrics
    >>> mean = np.zeros(4)
    >>> metrics.coverage(np.array([0.0, 0.5, -0.5, 2.0]), Intervals(mean, mean - 1, mean + 1, level=0.9))
    0.75
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .data.batches import read_targets
from .results import Intervals, to_numpy
from .validation import check_finite


def coverage(y: Any, intervals: Intervals) -> float | np.ndarray:
    """Compute p_cov, the share of rows with lower ≤ y ≤ upper.

    Args:
        y: The targets, (n,), (n, 1) or (n, m).
        intervals: The intervals of the same rows.

    Returns:
        The share, from 0 to 1.
    """
    rows = _read(y, intervals)
    return rows.result(((rows.lower <= rows.y) & (rows.y <= rows.upper)).mean(axis=0))


def mean_width(y: Any, intervals: Intervals) -> float | np.ndarray:
    """Compute w_sd = mean(upper − lower)/std(y), with the population's standard deviation √(Σ(y − ȳ)²/n).

    Args:
        y, intervals: As in `coverage`.

    Returns:
        The mean width in standard deviations of the targets; an error if all targets are equal.
    """
    rows = _read(y, intervals)
    if (np.ptp(rows.y, axis=0) == 0.0).any():
        raise ValueError("all targets are equal: widths cannot be measured in units of their standard deviation")
    return rows.result((rows.upper - rows.lower).mean(axis=0) / rows.y.std(axis=0))


def width_error_correlation(y: Any, intervals: Intervals) -> float | np.ndarray:
    """Compute r, Pearson's correlation of upper − lower with |y − mean|.

    Args:
        y, intervals: As in `coverage`.

    Returns:
        The correlation, from −1 to 1; NaN where either is constant or a width is infinite.
    """
    rows = _read(y, intervals)
    errors, width, eps = np.abs(rows.y - rows.mean), rows.upper - rows.lower, _eps(intervals.lower)
    with np.errstate(all="ignore"):  # of widths that are constant or infinite
        constant = _is_constant(errors, rows.y, rows.mean, eps) | _is_constant(width, rows.lower, rows.upper, eps)
        w, e = width - width.mean(axis=0), errors - errors.mean(axis=0)
        r = (w * e).sum(axis=0) / np.sqrt(np.square(w).sum(axis=0) * np.square(e).sum(axis=0))
    return rows.result(np.where(constant, np.nan, r))


def interval_score(y: Any, intervals: Intervals) -> float | np.ndarray:
    """Compute Winkler's score, the mean of (upper − lower) + 2/α·(lower − y)₊ + 2/α·(y − upper)₊, α = 1 − level.

    Lower is better: the score rewards narrow intervals and penalises those that miss.

    Args:
        y, intervals: As in `coverage`; the intervals must have a level.

    Returns:
        The score, in the units of `y`.
    """
    rows = _read(y, intervals)
    return rows.result(interval_scores(rows.y, rows.lower, rows.upper, _levels(rows, intervals)).mean(axis=0))


def interval_scores(y: np.ndarray, lower: np.ndarray, upper: np.ndarray, level: Any) -> np.ndarray:
    """Return Winkler's score of each row."""
    missed_by = np.maximum(lower - y, 0.0) + np.maximum(y - upper, 0.0)
    return upper - lower + 2.0 / (1.0 - level) * missed_by


def calibration_error(y: Any, intervals: Intervals) -> float:
    """Compute the mean |coverage − level| over all levels and outputs.

    Args:
        y, intervals: As in `coverage`; the intervals must have a level.

    Returns:
        One float, however many levels and outputs there are.
    """
    levels = _levels(_read(y, intervals), intervals)
    return float(np.abs(coverage(y, intervals) - levels).mean())


class _Rows(NamedTuple):
    """Targets and intervals in float64."""

    y: np.ndarray  # (n, m, 1)
    mean: np.ndarray  # (n, m, 1)
    lower: np.ndarray  # (n, m, levels)
    upper: np.ndarray  # (n, m, levels)
    shape: tuple[int, ...]  # of a result

    def result(self, values: np.ndarray) -> float | np.ndarray:  # (m, levels)
        """Return the values in the shape of the bounds, or as a float."""
        return values.reshape(self.shape) if self.shape else float(values.item())


def _read(y: Any, intervals: Intervals) -> _Rows:
    """Return targets and intervals in common shapes, or raise if they do not match."""
    if not isinstance(intervals, Intervals):
        raise TypeError(f"expected Intervals, as predict returns them, got {type(intervals).__name__}")
    y = read_targets(y)
    mean, lower, upper = (np.atleast_1d(to_numpy(part)) for part in intervals)
    n, m = y.shape
    if n == 0:
        raise ValueError("there are no rows to evaluate the intervals on")
    if not n == len(mean) == len(lower) == len(upper):
        raise ValueError(f"targets and intervals must have the same number of rows: {n} targets, {len(mean)} intervals")
    outputs = () if m == 1 and lower.ndim <= 2 else mean.shape[1:]
    shape = lower.shape[1:]
    means_match = mean.size == n * m and mean.ndim <= 2
    bounds_match = shape[: len(outputs)] == outputs and len(shape) <= len(outputs) + 1 and lower.shape == upper.shape
    if not (means_match and bounds_match):
        shapes = f"targets {tuple(y.shape)}, mean {mean.shape}, lower {lower.shape}, upper {upper.shape}"
        raise ValueError(f"the mean must be shaped like the targets, the bounds too, or with levels last; got {shapes}")
    check_finite(y, "targets")
    if any(np.isnan(part).any() for part in (mean, lower, upper)):
        raise ValueError("the intervals hold NaN")
    lower, upper = (part.reshape(n, m, -1) for part in (lower, upper))
    return _Rows(y.numpy()[:, :, None], mean.reshape(n, m, 1), lower, upper, shape)


def _levels(rows: _Rows, intervals: Intervals) -> np.ndarray:  # (levels,)
    """Return the levels of the intervals, one per column of the bounds."""
    if intervals.level is None:
        raise ValueError("the level of the intervals is not known: give Intervals(mean, lower, upper, level=0.95)")
    levels = np.atleast_1d(np.asarray(intervals.level, dtype=np.float64))
    if len(levels) != rows.lower.shape[2]:
        raise ValueError(f"{len(levels)} levels do not go with bounds of {rows.lower.shape[2]} columns")
    return levels


def _is_constant(difference: np.ndarray, a: np.ndarray, b: np.ndarray, eps: float) -> np.ndarray:
    """Return where a − b is constant up to rounding, which depends on the size of `a` and `b`, not of a − b."""
    return np.ptp(difference, axis=0) <= 4 * eps * np.maximum(np.abs(a).max(axis=0), np.abs(b).max(axis=0))


def _eps(values: Any) -> float:
    """Return the machine precision of values; 0 for whole numbers."""
    if isinstance(values, Tensor):
        return torch.finfo(values.dtype).eps if values.is_floating_point() else 0.0
    dtype = np.asarray(values).dtype
    return float(np.finfo(dtype).eps) if dtype.kind == "f" else 0.0
