"""Proper scores of whole forecasts: quantiles by pinball loss, distributions by the CRPS."""

from typing import Any

import numpy as np

from ..data.batches import read_targets
from ..data.inputs import as_tensor, check_finite
from ..distributions import Distribution
from ..results import Intervals
from .intervals import interval_scores, levels_of, read, result


def pinball_loss(y: Any, intervals: Intervals) -> float | np.ndarray:
    """Compute the mean pinball loss of the bounds, τ·(y − b)₊ + (1 − τ)·(b − y)₊ for a bound b that is a τ quantile.

    The bounds of a level are quantiles of (1 − level)/2 and (1 + level)/2, and their losses are averaged; a bound whose
    other side is infinite in all rows is a quantile of the level itself, or of 1 − level.

    Args:
        y, intervals: As in `coverage`; the intervals must have a level.

    Returns:
        The loss, in the units of `y`; lower is better.
    """
    y, _, lower, upper = read(y, intervals)
    level = levels_of(intervals, lower)
    if np.isneginf(lower).all():
        losses = _pinball(y, upper, level)
    elif np.isposinf(upper).all():
        losses = _pinball(y, lower, 1 - level)
    else:
        losses = (_pinball(y, lower, (1 - level) / 2) + _pinball(y, upper, (1 + level) / 2)) / 2
    return result(losses.mean(axis=0), intervals)


def _pinball(y: np.ndarray, bound: np.ndarray, quantile: np.ndarray) -> np.ndarray:
    return quantile * np.maximum(y - bound, 0.0) + (1 - quantile) * np.maximum(bound - y, 0.0)


def crps(y: Any, forecast: Any) -> float | np.ndarray:
    """Compute the mean continuous ranked probability score, ∫ (F(z) − 1{y ≤ z})² dz, F being the forecast.

    Of intervals it is the integral ½·∫ α·S(α) dα of their interval scores S over α = 1 − level, by the trapezoid rule
    over the levels there are, the prediction being the interval of level 0. A few levels give a rough value, which
    serves to compare intervals of the same levels. Of draws it is exact for their empirical distribution, and of what
    `predict_distribution` returns for that.

    Args:
        y: The targets, (n,), (n, 1) or (n, m).
        forecast: A `Distribution`, `Intervals` with two bounds and a level or several, or draws (n, draws) or
            (n, m, draws).

    Returns:
        The score, in the units of `y`, lower is better: a float, or (m,) for m outputs.

    Raises:
        ValueError: If shapes do not fit together, or intervals have one bound only.
    """
    if isinstance(forecast, Distribution):
        scores = forecast.crps(y)
        if len(scores) == 0:
            raise ValueError("there are no rows")
        return scores.mean(axis=0) if scores.ndim > 1 else float(scores.mean())
    if not isinstance(forecast, Intervals):
        return _crps_of_draws(y, forecast)
    _, _, lower, upper = read(y, forecast)
    if np.isneginf(lower).all() != np.isposinf(upper).all():
        raise ValueError("the CRPS needs intervals with two bounds, got one-sided ones")
    return crps_of_two_bounds(y, forecast)


def crps_of_two_bounds(y: Any, forecast: Intervals) -> float | np.ndarray:
    """Return the same of intervals that have two bounds, of which one may be infinite in all rows."""
    found = crps_of_rows(forecast, *read(y, forecast)).mean(axis=0)
    return found if np.ndim(forecast.mean) > 1 else float(found.item())


def crps_of_rows(
    forecast: Intervals, targets: np.ndarray, mean: np.ndarray, lower: np.ndarray, upper: np.ndarray
) -> np.ndarray:  # (n, m)
    """Return the scores of what `read` has read."""
    alpha = 1 - levels_of(forecast, lower)
    order = np.argsort(alpha)
    alpha, scores = alpha[order], interval_scores(targets, lower, upper, 1 - alpha)[:, :, order]
    nodes = np.concatenate([[0.0], alpha, [1.0]])
    ends = np.zeros_like(targets), 2 * np.abs(targets - mean)
    heights = np.concatenate([ends[0], alpha * scores, ends[1]], axis=2)  # (n, m, 2 + levels)
    return np.sum((heights[:, :, 1:] + heights[:, :, :-1]) / 2 * np.diff(nodes), axis=2) / 2


def _crps_of_draws(y: Any, draws: Any) -> float | np.ndarray:
    targets = read_targets(y)
    check_finite(targets, "targets")
    x = as_tensor(draws, "draws").cpu().double()
    several = x.ndim == 3
    x = x if several else x[:, None]
    if x.ndim != 3 or x.shape[:2] != targets.shape or x.shape[2] == 0 or len(x) == 0:
        shapes = f"targets {tuple(targets.shape)}, draws {tuple(np.shape(draws))}"
        raise ValueError(f"draws must have shape (n, draws), or (n, m, draws) for m outputs; got {shapes}")
    check_finite(x.reshape(len(x), -1), "draws")
    ordered, n = np.sort(x.numpy(), axis=2), x.shape[2]
    apart = ordered @ (2 * np.arange(1, n + 1) - n - 1) / n**2  # half of the mean |X − X'|
    found = (np.abs(ordered - targets.numpy()[:, :, None]).mean(axis=2) - apart).mean(axis=0)
    return found if several else float(found.item())
