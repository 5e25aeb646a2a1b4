"""scikit-learn estimators: intervals for a regressor that holds a network, and a fitted band as a regressor."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from numbers import Real
from typing import Any, Literal, Self

import numpy as np
import torch
from scipy.sparse import issparse
from torch import nn

try:
    from sklearn.base import BaseEstimator, RegressorMixin, clone
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_array, get_tags, indexable
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:  # pragma: no cover
    raise ImportError("this needs scikit-learn ≥ 1.6: pip install 'deltaband[sklearn]'") from error

from ..engines import Engine
from ..errors import DeltabandWarning
from ..intervals import PredictionIntervals
from ..results import Intervals, parse_levels
from .unwrap import Wrapped, find


class IntervalRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """A regressor that holds a network, with prediction intervals.

    `estimator` is an `MLPRegressor` or a skorch regressor: alone, as the last step of a `Pipeline`, in a
    `TransformedTargetRegressor`, or several of these in each other. `fit` trains a clone of it, and fits a band to the
    same rows. Within a `FrozenEstimator` a trained network is kept: give `fit` the rows that it was trained on.

    λ of the band follows from how the network was trained:

    ==================================  ==================================================
    network                             λ, n the rows trained on
    ==================================  ==================================================
    `MLPRegressor`, lbfgs, one output   alpha
    `MLPRegressor`, sgd or adam         alpha·n/b, b the batch size (`deltaband.sklearn.mlp.damping`)
    skorch, `MSELoss`                   n·wd/2, wd the optimiser's coupled `weight_decay`
    ==================================  ==================================================

    or is given, as `damping` or as the `weight_decay` of a mean squared error (λ = n·weight_decay/2). Neglected is that
    scikit-learn penalises no biases, and that early stopping or skorch's `train_split` has held out some of the rows
    that the band is fitted to. Where λ is not known, as without weight decay, there are intervals only after a
    calibration; where it is small, as with scikit-learn's default alpha, they are far better after one.

    `calibration` is the share of the rows that `fit` holds out to calibrate on, for intervals that are conformal.
    `level` is the default of `predict_interval`. `engine` and `memory` are those of `PredictionIntervals`.
    `random_state` draws the rows held out, and does not touch the estimator's own.

    After `fit`: `estimator_`, `band_` (a `PredictionIntervals` in the units that the network was trained in),
    `noise_std_` in the same units, `n_features_in_`, and `feature_names_in_` where X has such.
    """

    def __init__(
        self,
        estimator: Any,
        *,
        damping: float | None = None,
        weight_decay: float | None = None,
        calibration: float = 0.0,
        level: float = 0.95,
        engine: Engine | Literal["auto"] = "auto",
        memory: float | None = None,
        random_state: Any = None,
    ) -> None:
        self.estimator = estimator
        self.damping = damping
        self.weight_decay = weight_decay
        self.calibration = calibration
        self.level = level
        self.engine = engine
        self.memory = memory
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        """Train a clone of the estimator, unless it is frozen, fit the band, and calibrate if that was asked for."""
        self._check_settings()
        validate_data(self, X, y, skip_check_array=True)  # what else X must be, the estimator knows
        X, y = indexable(X, _targets(y))
        held_out = None
        if self.calibration:
            X, X_held_out, y, y_held_out = train_test_split(
                X, y, test_size=self.calibration, random_state=self.random_state
            )
            held_out = X_held_out, y_held_out
        estimator = clone(self.estimator)
        if not find(estimator).steps and issparse(X):
            raise TypeError("X is sparse, which the network cannot have: give X.toarray(), or a Pipeline that does it")
        estimator.fit(X, y)
        prediction = _prediction(estimator, X)
        wrapped = find(estimator, fitted=True)
        damping = self.damping
        if damping is None and self.weight_decay is None:
            damping = wrapped.damping(len(y), prediction[:1].size)
        band = self._band(wrapped.module(), damping)
        inputs = wrapped.inputs(X)
        wrapped.check_shape(inputs, y)
        with warnings.catch_warnings():
            if held_out is not None:  # what these warnings advise is about to happen
                warnings.filterwarnings("ignore", ".*calibrate", DeltabandWarning)
            band.fit(inputs, wrapped.to_network(y), progress=False)
        _check_same(prediction, wrapped.to_units(_columns(band.predict_mean(inputs))).reshape(prediction.shape))
        self.estimator_, self.band_, self.noise_std_ = estimator, band, band.noise_std_
        return self if held_out is None else self.calibrate(*held_out)

    def calibrate(self, X: Any, y: Any) -> Self:
        """Make the intervals conformal with rows that the network was not trained on, as `PredictionIntervals` does.

        It goes on from the `fit` before, and is for a frozen network; for another, `calibration` does it.
        """
        self._check_inputs(X)
        X, y = indexable(X, _targets(y))
        wrapped = self._wrapped()
        inputs, targets = wrapped.inputs(X), wrapped.to_network(y)
        self.band_.calibrate(inputs, targets)
        mean, scale = map(_columns, self.band_.predict_mean_and_scale(inputs))
        noise = np.sqrt(np.mean(np.square((targets - mean) / scale), axis=0))  # (m,)
        self.noise_std_ = float(noise[0]) if len(noise) == 1 else noise
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The estimator's prediction; with `return_std=True` also the standard deviation of a new observation.

        That is s·√(1 + q), noise and uncertainty of the prediction together, by the formula. After a calibration it is
        s·√(1 + b·q), with b and λ chosen and s, the root mean square of residuals over that scale, taken on the
        calibration rows. Where the target is transformed, the transform must be affine.
        """
        self._check_inputs(X)
        mean = _prediction(self.estimator_, X)
        if not return_std:
            return mean
        self._check_noise()
        wrapped = self._wrapped()
        z, scale = map(_columns, self.band_.predict_mean_and_scale(wrapped.inputs(X)))
        return mean, wrapped.std(z, self.noise_std_ * scale).reshape(mean.shape)

    def predict_interval(self, X: Any, level: float | Sequence[float] | None = None) -> Intervals:
        """The estimator's prediction and bounds for a new observation, in the units of y; a column for each of a list.

        Where the target is transformed, the bounds are those of the network's output, transformed back.
        """
        self._check_inputs(X)
        self._check_noise()
        wrapped = self._wrapped()
        mean = _prediction(self.estimator_, X)
        found = self.band_.predict(wrapped.inputs(X), self.level if level is None else level)
        shape = found.lower.shape  # that of the mean, with the levels behind it if there are several
        by_level = (np.moveaxis(part.reshape(*_columns(mean).shape, -1), 2, 0) for part in (found.lower, found.upper))
        lower, upper = (np.moveaxis(part, 0, 2).reshape(shape) for part in wrapped.bounds(*by_level))
        middle = mean if lower.ndim == mean.ndim else mean[..., None]  # which rounding may have put outside
        return Intervals(mean, np.minimum(lower, middle), np.maximum(upper, middle), found.level)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        if hasattr(self.estimator, "__sklearn_tags__"):
            inner = get_tags(self.estimator)
            tags.input_tags = inner.input_tags
            tags.regressor_tags = inner.regressor_tags or tags.regressor_tags
            tags.non_deterministic = inner.non_deterministic
            tags.input_tags.sparse = False
        return tags

    def _band(self, module: nn.Module, damping: float | None) -> PredictionIntervals:
        return PredictionIntervals(
            module, damping=damping, weight_decay=self.weight_decay, engine=self.engine, memory=self.memory
        )

    def _check_settings(self) -> None:
        """What is wrong with the settings is said before the training."""
        wrapped = find(self.estimator)
        self._band(nn.PReLU(), self.damping)  # any module will do; this one takes no random numbers
        parse_levels(self.level)
        share = self.calibration
        if isinstance(share, bool) or not isinstance(share, Real) or not 0 <= share < 1:
            raise ValueError(f"calibration must be the share of the rows to hold out, from 0 to below 1, got {share!r}")
        if share and wrapped.frozen:
            raise ValueError(
                "calibration holds rows out of the training, which a frozen network has behind it: leave it at 0, fit, "
                "and call calibrate(X, y) with rows that the network was not trained on"
            )

    def _check_inputs(self, X: Any) -> None:
        check_is_fitted(self)
        if getattr(X, "ndim", 2) == 1 and hasattr(self, "n_features_in_"):
            raise ValueError("Expected 2D array, got 1D array instead. Reshape your data: X.reshape(1, -1) is one row")
        validate_data(self, X, skip_check_array=True, reset=False)

    def _check_noise(self) -> None:
        if not np.isnan(self.noise_std_).any():
            return
        if self.band_.damping_ is None:
            why = "λ is not known: no weight decay of a squared loss tells it; give damping= or weight_decay="
        else:
            why = "n − p* leaves no degrees of freedom for the noise: the formula has no answer; give a larger damping="
        raise ValueError(f"{why}, or calibration=0.2, or call calibrate(X, y) with rows not used in training")

    def _wrapped(self) -> Wrapped:
        """The network, which must be that of the fit: a frozen one is the user's, who may have trained it again."""
        wrapped = find(self.estimator_, fitted=True)
        now, then = (list(module.parameters()) for module in (wrapped.module(), self.band_.model))
        if len(now) != len(then) or not all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(now, then, strict=True)):
            raise ValueError("the network's weights have changed since fit: call fit again")
        return wrapped


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
            mean, scale = self.band.predict_mean_and_scale(np.asarray(X))
            return mean.astype(np.float64), scale.astype(np.float64)
        return self.band.predict_mean(np.asarray(X)).astype(np.float64)


def _targets(y: Any) -> np.ndarray:  # (n,) or (n, m), as it came
    y = check_array(y, dtype=None, ensure_2d=False, allow_nd=True, input_name="y")
    if y.dtype.kind in "USM":
        raise TypeError(f"y must be numbers, got an array of dtype {y.dtype}")
    if y.ndim > 2:
        raise ValueError(f"y must have shape (n,), or (n, m) for m outputs, got {y.shape}")
    return y


def _prediction(estimator: Any, X: Any) -> np.ndarray:  # (n,), or (n, m) for several outputs
    prediction = np.asarray(estimator.predict(X), dtype=np.float64)
    return prediction.reshape(-1) if prediction.shape[1:] == (1,) else prediction


def _columns(values: np.ndarray) -> np.ndarray:  # (n,) or (n, m) -> (n, m)
    return values.reshape(len(values), -1)


def _check_same(own: np.ndarray, ours: np.ndarray) -> None:
    """A guard against regressors that do more than ask their network."""
    if not (np.abs(own - ours) <= 1e-3 * (np.abs(ours) + np.ptp(own, axis=0))).all():
        raise ValueError(
            "the estimator predicts something other than its network's outputs (has a skorch regressor a "
            "predict_nonlinearity, or a predict of its own?): intervals around these would be wrong"
        )
