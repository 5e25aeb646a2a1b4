"""The methods of the experiment on groups, shift and time: intervals of new rows around one network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Self

import numpy as np
import torch
from crepes import ConformalRegressor
from crepes.extras import DifficultyEstimator
from mapie.conformity_scores import AbsoluteConformityScore, ResidualNormalisedScore
from mapie.regression import SplitConformalRegressor, TimeSeriesRegressor
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.ensemble import GradientBoostingRegressor
from torch import nn

from deltaband import Intervals, PredictionIntervals
from deltaband.sklearn import BandRegressor

from .noise import constant_width
from .protocol import Samples

LEVEL = 0.9
STEP = 0.01  # of adaptive conformal inference: our default, MAPIE has none
Bounds = tuple[np.ndarray, np.ndarray]  # (n,) lower and upper


class Held(NamedTuple):
    """A network, the rows that it was trained on, calibration rows and new ones, and what its outputs are."""

    band: PredictionIntervals
    training: Samples
    calibration: Samples
    new: Samples
    outputs: tuple[np.ndarray, np.ndarray, np.ndarray]  # of these
    seed: int
    groups: list[np.ndarray] | None = None  # of calibration rows and new ones, as what follows
    overlapping: list[np.ndarray] | None = None
    weights: tuple[np.ndarray, np.ndarray] | None = None  # density ratios

    @classmethod
    def of(cls, network: nn.Module, weight_decay: float, parts: list[Samples], seed: int) -> Self:
        """From training rows, those of early stopping, calibration rows and new ones."""
        training, _, calibration, new = parts
        band = PredictionIntervals(network, weight_decay=weight_decay).fit(*training, progress=False)
        outputs = tuple(band.predict_mean(part.x) for part in (training, calibration, new))
        return cls(band, training, calibration, new, outputs, seed)

    def of_new(self, kept: np.ndarray) -> Self:
        """With some of the new rows."""
        new, outputs = Samples(*(each[kept] for each in self.new)), (*self.outputs[:2], self.outputs[2][kept])
        return self._replace(new=new, outputs=outputs)


def methods(study: str, held: Held) -> dict[str, Callable[[], Bounds]]:
    """By name, what gives the intervals of the new rows of a study."""
    found = {"constant": partial(constant, held)}
    if study in ("feature", "prediction"):
        return found | {
            "crepes Mondrian": partial(crepes, held, by_group=True),
            "crepes normalised": partial(crepes, held, normalised=True),
            "crepes normalised Mondrian": partial(crepes, held, by_group=True, normalised=True),
            "MAPIE boosted": partial(mapie_boosted, held),
            "plain": partial(calibrated, held),
            "grouped": partial(calibrated, held, "groups"),
            "overlapping": partial(calibrated, held, "overlapping"),
        }
    if study == "order":
        return found | {
            "crepes online": partial(crepes, held, online=True),
            "crepes normalised online": partial(crepes, held, normalised=True, online=True),
            "MAPIE ACI": partial(mapie_series, held, "aci"),
            "MAPIE EnbPI": partial(mapie_series, held, "enbpi"),
            "plain": partial(calibrated, held),
            **{method: partial(in_time, held, method) for method in ("aci", "pid", "window")},
        }
    ours = {"plain": partial(calibrated, held), "weighted": partial(calibrated, held, "target")}
    if held.weights is not None:
        ours["true ratio"] = partial(calibrated, held, "weights")
    others = {
        "crepes normalised": partial(crepes, held, normalised=True),
        "MAPIE boosted": partial(mapie_boosted, held),
    }
    return found | others | ours


def calibrated(held: Held, by: str | None = None) -> Bounds:
    """Ours, with what it is by."""
    of_rows, of_new = {}, {}
    if by == "target":
        of_rows = {"target": held.new.x}
    elif by == "weights":
        of_rows, of_new = ({"weights": each} for each in held.weights or ())
    elif by is not None:
        of_rows, of_new = ({"groups": each} for each in getattr(held, by))
        of_new |= {"unknown": "pool"} if by == "groups" else {}
    held.band.calibrate(*held.calibration, **of_rows)
    return _bounds(held.band.predict(held.new.x, LEVEL, **of_new))


def in_time(held: Held, method: str) -> Bounds:
    """Ours, each new row told to the next."""
    return _bounds(held.band.calibrate(*held.calibration).online(LEVEL, method).replay(*held.new))


def constant(held: Held) -> Bounds:
    """Split conformal with absolute residuals."""
    _, calibration, new = held.outputs
    intervals = constant_width(calibration, held.calibration.y, new, (LEVEL,))
    return intervals.lower[:, 0], intervals.upper[:, 0]


def crepes(held: Held, *, by_group: bool = False, normalised: bool = False, online: bool = False) -> Bounds:
    """crepes' conformal regressors; distances of their normalisation are of the network's inputs."""
    training, calibration, new = held.outputs
    sigmas = (None, None)
    if normalised:
        estimator = DifficultyEstimator().fit(X=held.training.x, residuals=held.training.y - training, scaler=True)
        sigmas = estimator.apply(held.calibration.x), estimator.apply(held.new.x)
    bins = held.groups if by_group and held.groups is not None else (None, None)
    regressor = ConformalRegressor().fit(held.calibration.y - calibration, sigmas=sigmas[0], bins=bins[0])
    if online:
        found = regressor.predict_int_online(new, held.new.y, sigmas=sigmas[1], bins=bins[1], confidence=LEVEL)
    else:
        found = regressor.predict_int(new, sigmas=sigmas[1], bins=bins[1], confidence=LEVEL)
    return found[:, 0], found[:, 1]


def mapie_boosted(held: Held) -> Bounds:
    """MAPIE's residual_normalized, learnt by gradient boosting."""
    boosting = ResidualNormalisedScore(GradientBoostingRegressor(random_state=held.seed), random_state=held.seed)
    mapie = SplitConformalRegressor(BandRegressor(held.band), LEVEL, boosting, prefit=True)
    _, bounds = mapie.conformalize(*held.calibration).predict_interval(held.new.x)
    return bounds[:, 0, 0], bounds[:, 1, 0]


class _Zero(RegressorMixin, BaseEstimator):
    """What residuals are residuals of."""

    def fit(self, X: np.ndarray, y: np.ndarray) -> Self:
        self.fitted_ = True
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        return np.zeros(len(X))


def mapie_series(held: Held, method: str) -> Bounds:
    """MAPIE's TimeSeriesRegressor on residuals, row by row.

    Where ACI has to cover more than it ever saw, MAPIE says that scores are too few and keeps its level; the interval
    is infinite then, and the level is moved as such an interval moves it.
    """
    _, calibration, new = held.outputs
    residuals = held.calibration.y - calibration
    zero = _Zero().fit(residuals[:, None], residuals)
    regressor = TimeSeriesRegressor(zero, method, cv="prefit", conformity_score=AbsoluteConformityScore())
    regressor.fit(np.zeros((len(residuals), 1)), residuals)
    x, half = np.zeros((1, 1)), []
    for residual in held.new.y - new:
        target = np.array([residual])
        try:
            half.append(float(regressor.predict(x, confidence_level=LEVEL)[1][0, 1, 0]))
            if method == "aci":
                regressor.adapt_conformal_inference(x, target, gamma=STEP, confidence_level=LEVEL)
        except ValueError as error:
            if method != "aci" or "too low" not in str(error):
                raise
            half.append(np.inf)
            (alpha,) = regressor.current_alpha
            regressor.current_alpha[alpha] += STEP * alpha
        regressor.update(x, target)
    return new - half, new + half


def _bounds(intervals: Intervals) -> Bounds:
    return tuple(torch.as_tensor(each).double().numpy() for each in (intervals.lower, intervals.upper))
