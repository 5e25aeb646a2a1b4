"""A fitted band as a scikit-learn regressor."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

try:
    from sklearn.base import BaseEstimator, RegressorMixin
except ImportError as error:  # pragma: no cover
    raise ImportError("this needs scikit-learn: pip install 'deltaband[sklearn]'") from error

from .intervals import PredictionIntervals


class BandRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """`predict(X)` is the network's prediction; `predict(X, return_std=True)` adds what the width is proportional to.

    What takes regressors with a standard deviation takes this one, for instance MAPIE's
    `SplitConformalRegressor(..., conformity_score="std_normalized", prefit=True)`. The network is trained and the band
    fitted before: `fit` checks only that they are. The rows it is conformalised on must not be those that the band was
    calibrated on; a band that knows λ needs no calibration of its own for this.
    """

    def __init__(self, band: PredictionIntervals) -> None:
        self.band = band

    @property
    def is_fitted(self) -> bool:
        return hasattr(self.band, "n_rows_")

    def __sklearn_is_fitted__(self) -> bool:
        return self.is_fitted

    def fit(self, X: Any, y: Any = None) -> Self:
        self.band.summary()  # raises where it is not fitted
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        # float64 whatever the network's precision: scores are compared with targets that are
        if return_std:
            mean, scale = self.band.prediction_and_scale(np.asarray(X))
            return mean.astype(np.float64), scale.astype(np.float64)
        return self.band.prediction(np.asarray(X)).astype(np.float64)
