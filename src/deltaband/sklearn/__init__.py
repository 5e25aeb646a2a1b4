"""scikit-learn estimators: intervals for a regressor that holds a network, a fitted band as a regressor; a scorer."""

import warnings
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any, Literal, Self

import numpy as np
import torch
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.model_selection import train_test_split
from sklearn.utils import _safe_indexing, check_array, get_tags, indexable
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import nn

from ..distributions import (
    Distribution,
    Steps,
    StudentT,
    ends_of,
    levels_of,
    levels_of_steps,
    parse_probabilities,
)
from ..engines import Engine
from ..errors import UnreliableFormulaWarning, silenced, warn
from ..forecaster import SMALLEST_LEVEL
from ..intervals import PredictionIntervals
from ..results import Intervals, Side, check_kind_and_side, interval_arrays, parse_levels
from .band import BandRegressor
from .scoring import IntervalScorer
from .unwrap import WrappedNetwork, find_network, weight_arguments

__all__ = ["BandRegressor", "IntervalRegressor", "IntervalScorer"]

RELATIVE_TOLERANCE = 1e-3  # between the predictions of the estimator and of its network


@dataclass(eq=False, repr=False)  # scikit-learn reads the settings from __init__, and has its own repr
class IntervalRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Prediction intervals for a regressor that contains a network.

    `fit` trains a clone of the estimator and fits a band to the same rows. λ of the band follows from how the network
    was trained:

    ==================================  ==================================================
    network                             λ, n the rows trained on
    ==================================  ==================================================
    `MLPRegressor`, lbfgs, one output   alpha
    `MLPRegressor`, sgd or adam         alpha·n/b, b the batch size (`deltaband.sklearn.unwrap.mlp_damping`)
    skorch, `MSELoss`                   n·wd/2, wd the optimiser's coupled `weight_decay`
    ==================================  ==================================================

    This neglects that scikit-learn does not penalise biases, and that some of the rows may have been held out of the
    training. Where λ is not known, as with AdamW or without weight decay, there are intervals only after a calibration,
    and `fit` says so; where it is small, as with scikit-learn's default alpha, they are far better after one.

    Args:
        estimator: An `MLPRegressor` or a skorch regressor: alone, as the last step of a `Pipeline`, in a
            `TransformedTargetRegressor`, or several of these nested. A trained network in a `FrozenEstimator` is
            kept: give `fit` the rows that it was trained on.
        damping: λ itself, instead of the table's.
        weight_decay: The weight decay of a mean squared error, λ = n·weight_decay/2, instead of the table's λ.
        calibration: The share of the rows that `fit` holds out to calibrate on, for conformal intervals.
        groups: The column of X, by name or number, whose values are groups of rows: a calibration, without which there
            are no intervals then, covers each of them at the level. The estimator gets it as any other column.
        level: The default level of `predict_interval`.
        engine, memory: See `PredictionIntervals`.
        random_state: Seed or generator for drawing the rows held out; the estimator has its own.

    Attributes:
        estimator_: The trained estimator.
        band_: The `PredictionIntervals`, in the units that the network was trained in.
        noise_std_: The standard deviation of the noise, in the same units.
        n_features_in_: The number of features, where X has two dimensions.
        feature_names_in_: The names of the features, where X has such.
    """

    estimator: Any
    _: KW_ONLY
    damping: float | None = None
    weight_decay: float | None = None
    calibration: float = 0.0
    groups: Any = None
    level: float = 0.95
    engine: Engine | str = "auto"
    memory: float | None = None
    random_state: Any = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train a clone of the estimator, unless it is frozen, fit the band, and calibrate it if `calibration` is set.

        Args:
            X: The training rows, as the estimator takes them.
            y: Their targets (n,), or (n, m) for m outputs.
            sample_weight: The weights (n,) of the rows, for the network and for the band: a row of weight w has the
                noise variance s²/w. Intervals are for rows of weight 1. Calibration takes the rows as equals; those of
                weight zero are left out everywhere.

        Returns:
            The regressor itself.

        Raises:
            TypeError: If the estimator does not contain a network for regression.
            ValueError: If a setting is wrong, or the estimator predicts something other than its network's outputs.
        """
        network = find_network(self.estimator)
        self._new_band(nn.PReLU(), self.damping)  # any module will do; this one draws no random numbers
        parse_levels(self.level)
        share: Any = self.calibration
        if isinstance(share, bool) or not isinstance(share, Real) or not 0 <= float(share) < 1:
            raise ValueError(f"calibration must be the share of the rows to hold out, from 0 to below 1, got {share!r}")
        if share and network.frozen:
            why = "calibration holds rows out of the training, but a frozen network is trained already"
            raise ValueError(f"{why}: leave it at 0, fit, and call calibrate(X, y) with rows not used in training")
        validate_data(self, X, y, skip_check_array=True)  # the estimator checks the rest of X
        self._groups(X)  # a column that is not there is reported before the training
        X, y = indexable(X, _check_targets(y))
        weight = None if sample_weight is None else _check_sample_weight(sample_weight, X, ensure_non_negative=True)
        held_out: tuple[Any, ...] = ()
        if self.calibration:
            rows = np.arange(len(y)) if weight is None else weight
            parts = train_test_split(X, y, rows, test_size=self.calibration, random_state=self.random_state)
            X, y, held_out = parts[0], parts[2], (parts[1], parts[3])
            if weight is not None:
                weight, given = parts[4], np.flatnonzero(parts[5])  # a row of weight zero is none
                held_out = (_safe_indexing(held_out[0], given), held_out[1][given])
        estimator = clone(self.estimator)
        if issparse(X) and not network.steps:
            raise TypeError("X is sparse, which the network cannot take: give X.toarray(), or a Pipeline that does it")
        estimator.fit(X, y, **weight_arguments(estimator, weight))
        prediction = _predict(estimator, X)
        network = find_network(estimator, fitted=True)
        damping = self.damping
        if damping is None and self.weight_decay is None:
            damping = network.damping(len(y), prediction[:1].size)
            if damping is None and not held_out and not network.frozen:
                why = "λ does not follow from how the network was trained, as with AdamW or without weight decay"
                warn(f"{why}: intervals need calibration=0.2, or damping=")
        band = self._new_band(network.module(), damping)
        inputs = network.inputs(X)
        network.check_shape(inputs, y)
        with warnings.catch_warnings():
            if held_out:  # the calibration makes up for it
                warnings.simplefilter("ignore", UnreliableFormulaWarning)
            band.fit(inputs, network.to_network(y), sample_weight=weight, progress=False)
        outputs = network.units.to_original(_columns(band.predict_mean(inputs))).reshape(prediction.shape)
        tolerance = RELATIVE_TOLERANCE * (np.abs(outputs) + np.ptp(prediction, axis=0))
        if not (np.abs(prediction - outputs) <= tolerance).all():
            why = "has a skorch regressor a predict_nonlinearity, or a predict of its own?"
            raise ValueError(f"the estimator predicts something other than its network's outputs: {why}")
        self.estimator_, self.band_, self.noise_std_ = estimator, band, band.noise_std_
        return self.calibrate(*held_out) if held_out else self

    def calibrate(self, X: Any, y: Any) -> Self:
        """Make the intervals of a frozen network conformal, after `fit`; for any other network, set `calibration`.

        Args:
            X: Rows that the network was not trained on.
            y: Their targets.

        Returns:
            The regressor itself.
        """
        self._check_inputs(X)
        X, y = indexable(X, _check_targets(y))
        network = self._fitted_network(needs_noise=False)
        inputs, targets = network.inputs(X), network.to_network(y)
        self.band_.calibrate(inputs, targets, groups=self._groups(X))
        mean, scale = map(_columns, self.band_.predict_mean_and_scale(inputs))
        noise = np.sqrt(np.mean(np.square((targets - mean) / scale), axis=0))  # (m,)
        self.noise_std_ = float(noise[0]) if len(noise) == 1 else noise
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the estimator's prediction, and with `return_std=True` the standard deviation of a new observation.

        That is s·√(1 + q); after a calibration s·√(1 + b·q), with b and λ as calibrated, and s the root mean square of
        the calibration residuals over that scale.

        Args:
            X: The rows to predict.
            return_std: Whether to return the standard deviation too; a transform of the target must then be affine.

        Returns:
            The prediction (n,) or (n, m), or a pair of it and the standard deviation of the same shape.

        Raises:
            ValueError: If `return_std=True` is asked of a target whose transform is not affine.
        """
        self._check_inputs(X)
        mean = _predict(self.estimator_, X)
        if not return_std:
            return mean
        if (std := self._std(X)) is None:
            why = "a standard deviation keeps its meaning only under an affine transform of the target"
            raise ValueError(f"{why}; use predict_interval, whose bounds follow any monotone one")
        return mean, std.reshape(mean.shape)

    def predict_interval(
        self,
        X: Any,
        level: float | Sequence[float] | None = None,
        *,
        side: Side = "both",
        unknown: Literal["error", "pool"] = "error",
    ) -> Intervals:
        """Return the estimator's prediction with bounds for a new observation, in the units of y.

        Where the target is transformed, the bounds are those of the network's output, transformed back.

        Args:
            X: The rows to predict.
            level: One level, or several for one column each; that of the constructor by default.
            side: "upper" and "lower" give one bound at the level; the other is infinite.
            unknown: What a group that no calibration row had leads to, as in `PredictionIntervals.predict`.

        Returns:
            `Intervals`, which unpack as mean, lower, upper.
        """
        self._check_inputs(X)
        check_kind_and_side("observation", side)
        network, mean = self._fitted_network(), _predict(self.estimator_, X)
        groups = self._groups(X)
        asked, inputs, of_network = self.level if level is None else level, network.inputs(X), side
        if side != "both" and network.units.is_decreasing(_columns(self.band_.predict_mean(inputs))):
            of_network = "lower" if side == "upper" else "upper"
        found = self.band_.predict(inputs, asked, side=of_network, groups=groups, unknown=unknown)
        bounds = network.units.to_original_bounds(*interval_arrays(found, np.float64))
        lower, upper = (bound.reshape(found.lower.shape) for bound in bounds)
        if side != "both":  # at a low level a bound may lie on the other side of the prediction
            return Intervals(mean, lower, upper, found.level, found.far)
        middle = mean if lower.ndim == mean.ndim else mean[..., None]  # rounding may have put it outside
        return Intervals(mean, np.minimum(lower, middle), np.maximum(upper, middle), found.level, found.far)

    def predict_quantiles(
        self,
        X: Any,
        alpha: float | Sequence[float] = (0.05, 0.5, 0.95),
        *,
        unknown: Literal["error", "pool"] = "error",
    ) -> np.ndarray:
        """Return quantiles of new observations, in the units of y: ends of intervals, and the prediction for ½.

        Args:
            X: The rows to predict.
            alpha: The probability below, between 0 and 1, or several.
            unknown: As in `predict_interval`.

        Returns:
            (n,), or (n, m) for m outputs; for several probabilities with one more axis.
        """
        probabilities = parse_probabilities(alpha, "alpha")
        intervals = self.predict_interval(X, [*levels_of(probabilities), SMALLEST_LEVEL], unknown=unknown)
        found = ends_of(probabilities, *interval_arrays(intervals))
        return found.reshape(*intervals.mean.shape, *([] if np.ndim(alpha) == 0 else [len(probabilities)]))

    def predict_distribution(self, X: Any, *, unknown: Literal["error", "pool"] = "error") -> Distribution:
        """Return the distributions of new observations, in the units of y.

        Student's t by the formula; after a calibration, or under a transform of the target that is not affine, steps
        at the bounds of intervals. See `PredictionIntervals.predict_distribution`.

        Args:
            X: The rows to predict.
            unknown: As in `predict_interval`.

        Returns:
            A value with `quantile(p)`, `cdf(y)` and `crps(y)`.
        """
        mean, calibration = self.predict(X), self.band_.calibration_
        std = self._std(X) if calibration is None and self.groups is None else None
        if std is not None:
            return StudentT(mean, std.reshape(mean.shape), np.concatenate([fit.t_freedom for fit in self.band_.fits_]))
        n_rows = None if calibration is None else calibration.conformal.n_rows
        levels = levels_of_steps(n_rows)
        self.band_.predict_mean(self._fitted_network().inputs(X))  # whatever there is to say of these rows is said
        with silenced():  # about the highest of these levels
            found = self.predict_interval(X, levels.tolist(), unknown=unknown)
        return Steps.of_bounds(levels, found.mean, found.lower, found.upper, n_rows)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        if hasattr(self.estimator, "__sklearn_tags__"):
            inner = get_tags(self.estimator)
            tags.input_tags, tags.non_deterministic = inner.input_tags, inner.non_deterministic
            tags.regressor_tags = inner.regressor_tags or tags.regressor_tags
            tags.input_tags.sparse = False
        return tags

    def _new_band(self, module: nn.Module, damping: float | None) -> PredictionIntervals:
        settings: dict[str, Any] = {"weight_decay": self.weight_decay, "engine": self.engine, "memory": self.memory}
        return PredictionIntervals(module, damping=damping, **settings)

    def _groups(self, X: Any) -> Any:  # (n,)
        if self.groups is None:
            return None
        try:
            named = self.groups in getattr(X, "columns", ())
            return X[self.groups] if named else np.asarray(X)[:, self.groups]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"groups must be a column of X, by name or number, got {self.groups!r}") from error

    def _check_inputs(self, X: Any) -> None:
        check_is_fitted(self, "noise_std_")  # validating X sets attributes of a fit that has failed
        if getattr(X, "ndim", 2) == 1 and hasattr(self, "n_features_in_"):
            raise ValueError("Expected 2D array, got 1D array instead. Reshape your data: X.reshape(1, -1) is one row")
        validate_data(self, X, skip_check_array=True, reset=False)

    def _std(self, X: Any) -> np.ndarray | None:
        """Return the standard deviations of new observations (n, m); None where a transform is not affine."""
        network = self._fitted_network()
        z, scale = map(_columns, self.band_.predict_mean_and_scale(network.inputs(X)))
        return network.std(z, self.noise_std_ * scale)

    def _fitted_network(self, needs_noise: bool = True) -> WrappedNetwork:
        """Return the network, which must be that of the fit: users may have trained a frozen one again."""
        if needs_noise and np.isnan(self.noise_std_).any():
            why = "λ is not known: it does not follow from the training; give damping= or weight_decay="
            if self.band_.damping_ is not None:
                why = "n − p* leaves no degrees of freedom for the noise; give a larger damping="
            raise ValueError(f"{why}, or calibration=0.2, or call calibrate(X, y) with rows not used in training")
        network = find_network(self.estimator_, fitted=True)
        now, then = (list(module.parameters()) for module in (network.module(), self.band_.model))
        if len(now) != len(then) or not all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(now, then, strict=True)):
            raise ValueError("the network's weights have changed since fit: call fit again")
        return network


def _check_targets(y: Any) -> np.ndarray:  # (n,) or (n, m), as given
    y = check_array(y, dtype=None, ensure_2d=False, allow_nd=True, input_name="y")
    if y.dtype.kind in "USM":
        raise TypeError(f"y must be numbers, got an array of dtype {y.dtype}")
    if y.ndim > 2:
        raise ValueError(f"y must have shape (n,), or (n, m) for m outputs, got {y.shape}")
    return y


def _predict(estimator: Any, X: Any) -> np.ndarray:  # (n,), or (n, m) for several outputs
    prediction = np.asarray(estimator.predict(X), dtype=np.float64)
    return prediction.reshape(-1) if prediction.shape[1:] == (1,) else prediction


def _columns(values: np.ndarray) -> np.ndarray:  # (n,) or (n, m) -> (n, m)
    return values.reshape(len(values), -1)
