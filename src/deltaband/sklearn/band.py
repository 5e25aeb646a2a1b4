"""A fitted band as a scikit-learn regressor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin

from ..distributions import Distribution
from ..intervals import PredictionIntervals
from ..results import Intervals, Side


@dataclass(eq=False, repr=False)
class BandRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """A fitted band as a regressor with a standard deviation, for libraries that take such regressors.

    An example is MAPIE's `SplitConformalRegressor(..., conformity_score="std_normalized", prefit=True)`, conformalised
    on other rows than the band was calibrated on. A band that knows λ needs no calibration of its own for this.

    Args:
        band: A fitted `PredictionIntervals`.
    """

    band: PredictionIntervals

    @property
    def is_fitted(self) -> bool:
        return hasattr(self.band, "n_rows_")

    def __sklearn_is_fitted__(self) -> bool:
        return self.is_fitted

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Return the regressor itself: nothing is trained.

        Args:
            X, y, sample_weight: Ignored.

        Returns:
            The regressor.

        Raises:
            NotFittedError: If the band is not fitted.
        """
        self.band.summary()
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the network's prediction in float64, and with `return_std=True` the scale of the interval's width.

        Args:
            X: The rows to predict, an array.
            return_std: Whether to return the scale too.

        Returns:
            The prediction, or a pair of it and the scale σ(x) that the width of an interval is proportional to.
        """
        X = np.asarray(X)
        if not return_std:
            return self.band.predict_mean(X).astype(np.float64)
        return tuple(part.astype(np.float64) for part in self.band.predict_mean_and_scale(X))

    def predict_interval(
        self, X: Any, level: float | Sequence[float] = 0.95, *, side: Side = "both", **given: Any
    ) -> Intervals:
        """Return the band's intervals.

        Args:
            X: The rows to predict, an array.
            level: One level, or several for one column each.
            side: "upper" and "lower" give one bound at the level; the other is infinite.
            given: What else `PredictionIntervals.predict` takes, as `groups`.

        Returns:
            `Intervals`, which unpack as mean, lower, upper.
        """
        return self.band.predict(np.asarray(X), level, side=side, **given)

    def predict_quantiles(self, X: Any, alpha: float | Sequence[float] = (0.05, 0.5, 0.95), **given: Any) -> Any:
        """Return quantiles of new observations.

        Args:
            X: The rows to predict, an array.
            alpha: The probability below, between 0 and 1, or several.
            given: What else `PredictionIntervals.quantile` takes.

        Returns:
            (n,), or (n, m) for m outputs; for several probabilities with one more axis.
        """
        return self.band.quantile(np.asarray(X), alpha, **given)

    def predict_proba(self, X: Any, **given: Any) -> Distribution:
        """Return the distributions of new observations, as skpro's regressors do.

        Args:
            X: The rows to predict, an array.
            given: What else `PredictionIntervals.predict_distribution` takes.

        Returns:
            A value with `quantile(p)`, `cdf(y)` and `crps(y)`.
        """
        return self.band.predict_distribution(np.asarray(X), **given)
