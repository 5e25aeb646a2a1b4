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

    Raises:
        ValueError: If targets and intervals do not match, or hold NaN.
    """
    rows = _read(y, intervals)
    return rows.result(rows.covered.mean(axis=0))


def mean_width(y: Any, intervals: Intervals) -> float | np.ndarray:
    """Compute w_sd = mean(upper − lower)/std(y), with the population's standard deviation √(Σ(y − ȳ)²/n).

    Args:
        y: The targets, (n,), (n, 1) or (n, m).
        intervals: The intervals of the same rows.

    Returns:
        The mean width in standard deviations of the targets.

    Raises:
        ValueError: If all targets are equal; or as for `coverage`.
    """
    rows = _read(y, intervals)
    if (np.ptp(rows.y, axis=0) == 0.0).any():
        raise ValueError("all targets are equal: widths cannot be measured in units of their standard deviation")
    return rows.result(rows.width.mean(axis=0) / rows.y.std(axis=0))


def width_error_correlation(y: Any, intervals: Intervals) -> float | np.ndarray:
    """Compute r, Pearson's correlation of upper − lower with |y − mean|.

    Args:
        y: The targets, (n,), (n, 1) or (n, m).
        intervals: The intervals of the same rows.

    Returns:
        The correlation, from −1 to 1; NaN where either is constant or a width is infinite.

    Raises:
        ValueError: If targets and intervals do not match, or hold NaN.
    """
    rows = _read(y, intervals)
    r = np.full(rows.width.shape[1:], np.nan)
    for o, j in np.ndindex(r.shape):
        y_, mean, width = rows.y[:, o, 0], rows.mean[:, o, 0], rows.width[:, o, j]
        errors = np.abs(y_ - mean)
        constant = _is_constant(errors, y_, mean, rows.eps)
        if constant or not np.isfinite(width).all():
            continue
        if not _is_constant(width, rows.lower[:, o, j], rows.upper[:, o, j], rows.eps):
            w, e = width - width.mean(), errors - errors.mean()
            r[o, j] = w @ e / np.sqrt((w @ w) * (e @ e))
    return rows.result(r)


def interval_score(y: Any, intervals: Intervals) -> float | np.ndarray:
    """Compute Winkler's score, the mean of (upper − lower) + 2/α·(lower − y)₊ + 2/α·(y − upper)₊, α = 1 − level.

    Lower is better: the score rewards narrow intervals and penalises those that miss.

    Args:
        y: The targets, (n,), (n, 1) or (n, m).
        intervals: The intervals of the same rows.

    Returns:
        The score, in the units of `y`.

    Raises:
        ValueError: If the intervals have no level; or as for `coverage`.
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
        y: The targets, (n,), (n, 1) or (n, m).
        intervals: The intervals of the same rows.

    Returns:
        One float, however many levels and outputs there are.

    Raises:
        ValueError: If the intervals have no level; or as for `coverage`.
    """
    rows = _read(y, intervals)
    return float(np.abs(rows.covered.mean(axis=0) - _levels(rows, intervals)).mean())


class _Rows(NamedTuple):
    """Targets and intervals in float64."""

    y: np.ndarray  # (n, m, 1)
    mean: np.ndarray  # (n, m, 1)
    lower: np.ndarray  # (n, m, levels)
    upper: np.ndarray  # (n, m, levels)
    eps: float  # machine precision of the bounds as given
    shape: tuple[int, ...]  # of a result

    @property
    def width(self) -> np.ndarray:  # (n, m, levels)
        return self.upper - self.lower

    @property
    def covered(self) -> np.ndarray:  # (n, m, levels)
        return (self.lower <= self.y) & (self.y <= self.upper)

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
        raise ValueError(
            "the mean must have the shape of the targets, and the bounds that shape, or one more axis for the levels; "
            f"got targets {tuple(y.shape)}, mean {mean.shape}, lower {lower.shape}, upper {upper.shape}"
        )
    check_finite(y, "targets")
    if any(np.isnan(part).any() for part in (mean, lower, upper)):
        raise ValueError("the intervals hold NaN")
    lower, upper = (part.reshape(n, m, -1) for part in (lower, upper))
    return _Rows(y.numpy()[:, :, None], mean.reshape(n, m, 1), lower, upper, _eps(intervals.lower), shape)


def _levels(rows: _Rows, intervals: Intervals) -> np.ndarray:  # (levels,)
    """Return the levels of the intervals, one per column of the bounds."""
    if intervals.level is None:
        raise ValueError("the level of the intervals is not known: give Intervals(mean, lower, upper, level=0.95)")
    levels = np.atleast_1d(np.asarray(intervals.level, dtype=np.float64))
    if len(levels) != rows.lower.shape[2]:
        raise ValueError(f"{len(levels)} levels do not go with bounds of {rows.lower.shape[2]} columns")
    return levels


def _is_constant(difference: np.ndarray, a: np.ndarray, b: np.ndarray, eps: float) -> bool:
    """Return whether a − b is constant up to rounding, which depends on the size of `a` and `b`, not of a − b."""
    return bool(np.ptp(difference) <= 4 * eps * max(np.abs(a).max(), np.abs(b).max()))


def _eps(values: Any) -> float:
    """Return the machine precision of values; 0 for whole numbers."""
    if isinstance(values, Tensor):
        return torch.finfo(values.dtype).eps if values.is_floating_point() else 0.0
    dtype = np.asarray(values).dtype
    return float(np.finfo(dtype).eps) if dtype.kind == "f" else 0.0
