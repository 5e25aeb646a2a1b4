"""Coverage, widths and scores of intervals, and how targets are compared with them."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.batches import read_targets
from ..data.inputs import check_finite
from ..results import Intervals, level_names, to_numpy


def coverage(y: Any, intervals: Intervals) -> float | np.ndarray:
    """Compute p_cov, the share of rows with lower ≤ y ≤ upper.

    Args:
        y: The targets, (n,), (n, 1) or (n, m).
        intervals: The intervals of the same rows.

    Returns:
        The share, from 0 to 1.
    """
    y, _, lower, upper = read(y, intervals)
    return result(((lower <= y) & (y <= upper)).mean(axis=0), intervals)


def mean_width(y: Any, intervals: Intervals) -> float | np.ndarray:
    """Compute w_sd = mean(upper − lower)/std(y), with the population's standard deviation √(Σ(y − ȳ)²/n).

    Args:
        y, intervals: As in `coverage`.

    Returns:
        The mean width in standard deviations of the targets.

    Raises:
        ValueError: If all targets are equal.
    """
    y, _, lower, upper = read(y, intervals)
    if (np.ptp(y, axis=0) == 0.0).any():
        raise ValueError("all targets are equal: widths cannot be measured in units of their standard deviation")
    return result((upper - lower).mean(axis=0) / y.std(axis=0), intervals)


def width_error_correlation(y: Any, intervals: Intervals) -> float | np.ndarray:
    """Compute r, Pearson's correlation of upper − lower with |y − mean|.

    Args:
        y, intervals: As in `coverage`.

    Returns:
        The correlation, from −1 to 1; NaN where either is constant or a width is infinite.
    """
    y, mean, lower, upper = read(y, intervals)
    errors, width, eps = np.abs(y - mean), upper - lower, _eps(intervals.lower)
    with np.errstate(all="ignore"):  # of widths that are constant or infinite
        constant = _is_constant(errors, y, mean, eps) | _is_constant(width, lower, upper, eps)
        w, e = width - width.mean(axis=0), errors - errors.mean(axis=0)
        r = (w * e).sum(axis=0) / np.sqrt(np.square(w).sum(axis=0) * np.square(e).sum(axis=0))
    return result(np.where(constant, np.nan, r), intervals)


def interval_score(y: Any, intervals: Intervals) -> float | np.ndarray:
    """Compute Winkler's score, the mean of (upper − lower) + 2/α·(lower − y)₊ + 2/α·(y − upper)₊, α = 1 − level.

    Lower is better: the score rewards narrow intervals and penalises those that miss.

    Args:
        y, intervals: As in `coverage`; the intervals must have a level.

    Returns:
        The score, in the units of `y`.
    """
    y, _, lower, upper = read(y, intervals)
    return result(interval_scores(y, lower, upper, levels_of(intervals, lower)).mean(axis=0), intervals)


def interval_scores(y: np.ndarray, lower: np.ndarray, upper: np.ndarray, level: Any) -> np.ndarray:
    """Return Winkler's score of each row.

    Args:
        y, lower, upper: Targets and bounds, of shapes that broadcast.
        level: The level of the intervals.

    Returns:
        Width and penalty of each row, of the shape that the arrays broadcast to.
    """
    missed_by = np.maximum(lower - y, 0.0) + np.maximum(y - upper, 0.0)
    return upper - lower + 2.0 / (1.0 - level) * missed_by


def calibration_error(y: Any, intervals: Intervals) -> float:
    """Compute the mean |coverage − level| over all levels and outputs.

    Args:
        y, intervals: As in `coverage`; the intervals must have a level.

    Returns:
        One float, however many levels and outputs there are.
    """
    *_, upper = read(y, intervals)
    return float(np.abs(coverage(y, intervals) - levels_of(intervals, upper)).mean())


def result(values: np.ndarray, intervals: Intervals) -> float | np.ndarray:  # (m, levels)
    """Return the values in the shape of the bounds without the axis of the rows, or as a float."""
    shape = np.shape(intervals.lower)[1:]
    return values.reshape(shape) if shape else float(values.item())


def read(y: Any, intervals: Intervals, may_miss: bool = False) -> tuple[np.ndarray, ...]:
    """Return targets (n, m, 1), mean (n, m, 1), lower and upper (n, m, levels), or raise if they do not match."""
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
    means_match = mean.size == n * m
    bounds_match = shape[: len(outputs)] == outputs and len(shape) <= len(outputs) + 1 and lower.shape == upper.shape
    if not (means_match and bounds_match):
        shapes = f"targets {tuple(y.shape)}, mean {mean.shape}, lower {lower.shape}, upper {upper.shape}"
        raise ValueError(f"the mean must be shaped like the targets, the bounds too, or with levels last; got {shapes}")
    check_finite(y.nan_to_num(0.0, torch.inf, -torch.inf) if may_miss else y, "targets")
    if any(np.isnan(part).any() for part in (mean, lower, upper)):
        raise ValueError("the intervals hold NaN")
    return tuple(part.reshape(n, m, -1) for part in (y.numpy(), mean, lower, upper))


def levels_of(intervals: Intervals, bounds: np.ndarray) -> np.ndarray:  # (levels,), one per column of the bounds
    if intervals.level is None:
        raise ValueError("the level of the intervals is not known: give Intervals(mean, lower, upper, level=0.95)")
    level_names(intervals, bounds.shape[2])  # raises if there are not so many
    return np.atleast_1d(np.asarray(intervals.level, dtype=np.float64))


def _is_constant(difference: np.ndarray, a: np.ndarray, b: np.ndarray, eps: float) -> np.ndarray:
    """Return where a − b is constant up to rounding, which depends on the size of `a` and `b`, not of a − b."""
    return np.ptp(difference, axis=0) <= 4 * eps * np.maximum(np.abs(a).max(axis=0), np.abs(b).max(axis=0))


def _eps(values: Any) -> float:
    """Return the machine precision of values; 0 for whole numbers."""
    if isinstance(values, Tensor):
        return torch.finfo(values.dtype).eps if values.is_floating_point() else 0.0
    dtype = np.asarray(values).dtype
    return float(np.finfo(dtype).eps) if dtype.kind == "f" else 0.0
