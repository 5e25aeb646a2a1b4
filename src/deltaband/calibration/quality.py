"""How good a calibration is, by its own rows: an interval score by cross-validation, and a test of drift."""

import math
from collections.abc import Callable

import numpy as np

from ..fitting.fit import Bounds, left_out
from ..metrics import interval_scores
from ..transforms import TargetTransform
from .conformal import ConformalScale
from .quantiles import QuantileRule, rows_needed
from .scales import Scales

SCORE_LEVEL = 0.95  # of the interval scores before and after


def cross_calibrated_bounds(
    fitted: Callable[..., ConformalScale],
    seed: int,
    rule: QuantileRule,
    residuals: np.ndarray,
    q: np.ndarray,
    scales: Scales,
) -> Bounds:  # (n,) each
    """Return bounds of residuals, each tenth of the rows calibrated by the others; NaN if these are too few."""
    place, (lower, upper) = rule.own_places(len(residuals)), np.full((2, len(residuals)), np.nan)
    there = np.flatnonzero(~np.isnan(residuals))
    order = there[np.random.default_rng(seed).permutation(len(there))]
    for part in np.array_split(order, min(10, len(order))):
        rest = np.setdiff1d(order, part)
        if place is not None and len(rest) >= rows_needed(SCORE_LEVEL):
            by_rest = fitted(residuals[rest], q[rest], scales, rule=rule.take(rest))
            low, high = by_rest.bounds(q[part], (SCORE_LEVEL,), "both", place[part])
            lower[part], upper[part] = low[:, 0], high[:, 0]
    return lower, upper


def mean_score(
    y: np.ndarray, lower: np.ndarray, upper: np.ndarray, units: TargetTransform | None, seen: np.ndarray
) -> float:
    """Return the mean interval score of bounds (n, m) of the targets that are seen, in the original units; NaN where
    some bounds have none."""
    if np.isnan(lower[seen]).any():
        return math.nan
    lower, upper = np.where(seen, lower, y), np.where(seen, upper, y)
    if units is not None:
        try:
            lower, upper = units.to_original_bounds(y, lower, upper)
        except ValueError:  # the transform has no inverse there, which `predict` will say
            return math.nan
        y = units.to_original(y)
    return float(interval_scores(y, lower, upper, SCORE_LEVEL)[seen].mean())


def drift_p_value(training: np.ndarray, calibration: np.ndarray) -> float:
    """Return the p-value of "these are leverages of rows like the training rows"; NaN without training leverages.

    A new row's leverage lies between that of the same row among the training rows, h, and that of the row left out of
    them, h/(1 − h). Two one-sided Kolmogorov–Smirnov tests: is it smaller than h, is it larger than h/(1 − h)?
    """
    if len(training) == 0:
        return math.nan
    from scipy.stats import ks_2samp

    rounding = 1e-4  # leverages of equal rows differ by this much at most
    smaller = ks_2samp(calibration, (1 - rounding) * training, alternative="greater", method="asymp").pvalue
    larger = ks_2samp(calibration, (1 + rounding) * left_out(training), alternative="less", method="asymp").pvalue
    return min(1.0, 2 * float(min(smaller, larger)))
