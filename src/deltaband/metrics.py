"""How good intervals are, judged on rows that the network was not trained on.

Every metric takes the targets `y`, (n,) or (n, 1), and the `Intervals` that `predict` gave for the same rows. For one
level it returns a float, for several an array with one number a level.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import data as reading
from .result import Intervals, to_numpy


def coverage(y: Any, intervals: Intervals) -> float | np.ndarray:
    """p_cov, the share of rows with lower ≤ y ≤ upper."""
    rows = _read(y, intervals)
    return rows.answer(((rows.lower <= rows.y) & (rows.y <= rows.upper)).mean(axis=0))


def mean_width(y: Any, intervals: Intervals) -> float | np.ndarray:
    """w_sd = mean(upper − lower)/std(y), with the population's standard deviation, √(Σ(y − ȳ)²/n)."""
    rows = _read(y, intervals)
    if np.ptp(rows.y) == 0.0:
        raise ValueError("all targets are equal: widths cannot be measured in units of their standard deviation")
    return rows.answer(rows.width.mean(axis=0) / rows.y.std())


def width_error_correlation(y: Any, intervals: Intervals) -> float | np.ndarray:
    """r, Pearson's correlation of upper − lower with |y − mean|; NaN where either is constant, or a width infinite."""
    rows = _read(y, intervals)
    errors = np.abs(rows.y - rows.mean)[:, 0]
    constant_errors = _is_constant(errors, rows.y, rows.mean, rows.eps)
    r = np.full(rows.width.shape[1], np.nan)
    for j, (width, lower, upper) in enumerate(zip(rows.width.T, rows.lower.T, rows.upper.T, strict=True)):
        if not constant_errors and np.isfinite(width).all() and not _is_constant(width, lower, upper, rows.eps):
            w, e = width - width.mean(), errors - errors.mean()
            r[j] = w @ e / np.sqrt((w @ w) * (e @ e))
    return rows.answer(r)


def interval_score(y: Any, intervals: Intervals) -> float | np.ndarray:
    """Winkler's score, the mean of (upper − lower) + 2/α·(lower − y)₊ + 2/α·(y − upper)₊, α = 1 − level.

    In the units of `y`. Lower is better: it rewards narrow intervals and fines those that miss.
    """
    rows = _read(y, intervals)
    return rows.answer(interval_scores(rows.y, rows.lower, rows.upper, _levels(rows, intervals)).mean(axis=0))


def interval_scores(y: np.ndarray, lower: np.ndarray, upper: np.ndarray, level: Any) -> np.ndarray:
    """Winkler's score of each row."""
    missed_by = np.maximum(lower - y, 0.0) + np.maximum(y - upper, 0.0)
    return upper - lower + 2.0 / (1.0 - level) * missed_by


def calibration_error(y: Any, intervals: Intervals) -> float:
    """mean |coverage − level| over the levels: one float, however many levels there are."""
    levels = _levels(_read(y, intervals), intervals)
    return float(np.abs(coverage(y, intervals) - levels).mean())


class _Rows(NamedTuple):
    """Targets and intervals in float64."""

    y: np.ndarray  # (n, 1)
    mean: np.ndarray  # (n, 1)
    lower: np.ndarray  # (n, levels)
    upper: np.ndarray  # (n, levels)
    eps: float  # of the precision that the bounds came in
    several: bool

    @property
    def width(self) -> np.ndarray:  # (n, levels)
        return self.upper - self.lower

    def answer(self, values: np.ndarray) -> float | np.ndarray:  # (levels,)
        return values if self.several else float(values[0])


def _read(y: Any, intervals: Intervals) -> _Rows:
    if not isinstance(intervals, Intervals):
        raise TypeError(f"expected Intervals, as predict returns them, got {type(intervals).__name__}")
    targets = reading.targets(y)
    mean, lower, upper = (np.atleast_1d(to_numpy(part)) for part in intervals)
    n = len(targets)
    if n == 0:
        raise ValueError("there are no rows to judge the intervals by")
    if not n == len(mean) == len(lower) == len(upper):
        raise ValueError(f"targets and intervals must have as many rows: {n} targets, {len(mean)} intervals")
    if mean.size != n or lower.ndim > 2 or lower.shape != upper.shape:
        raise ValueError(
            "the mean must have shape (n,), the bounds (n,) or (n, levels); "
            f"got mean {mean.shape}, lower {lower.shape}, upper {upper.shape}"
        )
    reading.check_finite(targets, "targets")
    if any(np.isnan(part).any() for part in (mean, lower, upper)):
        raise ValueError("the intervals hold NaN")
    eps = _eps(intervals.lower)
    return _Rows(
        _columns(targets.numpy()), _columns(mean), _columns(lower), _columns(upper), eps, several=lower.ndim == 2
    )


def _levels(rows: _Rows, intervals: Intervals) -> np.ndarray:  # (levels,)
    if intervals.level is None:
        raise ValueError("the level of the intervals is not known: give Intervals(mean, lower, upper, level=0.95)")
    levels = np.atleast_1d(np.asarray(intervals.level, dtype=np.float64))
    if len(levels) != rows.lower.shape[1]:
        raise ValueError(f"{len(levels)} levels do not go with bounds of {rows.lower.shape[1]} columns")
    return levels


def _is_constant(difference: np.ndarray, a: np.ndarray, b: np.ndarray, eps: float) -> bool:
    """Whether a − b is constant up to rounding, which is as large as `a` and `b`, not as their difference, make it."""
    return bool(np.ptp(difference) <= 4 * eps * max(np.abs(a).max(), np.abs(b).max()))


def _columns(values: np.ndarray) -> np.ndarray:  # (n,) or (n, levels) -> (n, levels)
    return values.reshape(len(values), -1)


def _eps(values: Any) -> float:
    if isinstance(values, Tensor):
        return torch.finfo(values.dtype).eps if values.is_floating_point() else 0.0
    dtype = np.asarray(values).dtype
    return float(np.finfo(dtype).eps) if dtype.kind == "f" else 0.0
