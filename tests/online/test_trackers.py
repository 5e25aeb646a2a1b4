"""Thresholds that follow a stream of scores: their long-run coverage, whatever the scores, and MAPIE's numbers."""

import math
import warnings
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mapie.conformity_scores import AbsoluteConformityScore
from mapie.regression import TimeSeriesRegressor
from sklearn.base import BaseEstimator, RegressorMixin

from deltaband.online.trackers import TRACKERS, AdaptiveInference, QuantileControl, RollingWindow, quantile

FIRST = np.abs(np.random.default_rng(0).standard_normal(50))


def followed(tracker, scores, late=0):
    """The thresholds, and which scores were above theirs; `scores` are numbers or functions of the threshold."""
    thresholds, missed, waiting, largest = [], [], deque(), 0.0
    for score in scores:
        threshold = tracker.threshold()
        s = float(score(threshold) if callable(score) else score)
        thresholds.append(threshold)
        missed.append(s > threshold)
        waiting.append((s, missed[-1]))
        largest = max(largest, s)
        if len(waiting) > late:
            tracker.update(*waiting.popleft())
    while waiting:
        tracker.update(*waiting.popleft())
    return np.array(thresholds), np.array(missed), largest


def above(threshold):  # a miss, wherever one is possible
    return 1e6 if math.isinf(threshold) and threshold > 0 else max(threshold, 0.0) * 1.001 + 1e-9


def below(threshold):
    return max(min(threshold, 1e6), 0.0)


ADVERSARIES = {
    "misses wherever possible": [above] * 3000,
    "never misses": [below] * 3000,
    "zero": [0.0] * 3000,
    "in turns": ([above] * 50 + [below] * 50) * 30,
    "drifts up": np.abs(np.random.default_rng(1).standard_normal(3000)) * np.linspace(1, 20, 3000),
    "drifts down": np.abs(np.random.default_rng(2).standard_normal(3000)) * np.linspace(20, 0, 3000),
    "explodes": 1.02 ** np.arange(1500),
    "Cauchy": np.abs(np.random.default_rng(3).standard_cauchy(3000)),
}


@pytest.mark.parametrize("late", [0, 7])
@pytest.mark.parametrize("method", ["aci", "pid"])
@pytest.mark.parametrize("name", ADVERSARIES)
def test_the_share_of_misses_stays_within_the_stated_bound_on_any_series(name, method, late):
    for level in (0.5, 0.9):
        tracker = TRACKERS[method].start(FIRST, level)
        _, missed, largest = followed(tracker, ADVERSARIES[name], late)
        n = len(missed)
        assert abs(missed.mean() - (1 - level)) <= tracker.bound(n, late, largest) + 1e-12


@settings(max_examples=200, deadline=None)
@given(
    moves=st.lists(st.sampled_from([above, below, 0.0, 0.7, 3.0]), min_size=1, max_size=400),
    level=st.sampled_from([0.1, 0.5, 0.8, 0.95]),
    step=st.sampled_from([0.003, 0.05, 0.4]),
    method=st.sampled_from(["aci", "pid"]),
    late=st.integers(0, 20),
)
def test_no_sequence_breaks_the_bound(moves, level, step, method, late):
    tracker = TRACKERS[method].start(FIRST, level, step=step)
    _, missed, largest = followed(tracker, moves, late)
    assert abs(missed.mean() - (1 - level)) <= tracker.bound(len(moves), late, largest) + 1e-12


@pytest.mark.parametrize("method", ["aci", "pid"])
def test_the_bound_is_what_is_stated(method):
    tracker = TRACKERS[method].start(FIRST, 0.9)
    if method == "aci":
        assert tracker.bound(1000, 3, 5.0) == pytest.approx((0.9 + 0.01 * 4) / (0.01 * 1000))
    else:
        steps = (5.0 / tracker.first - 1) / 0.1
        assert tracker.bound(1000, 3, 5.0) == pytest.approx((steps + 4) / 1000)
        assert tracker.bound(10**6, 0, 1e9) == pytest.approx(math.pi / 2 / math.log(10**6 + 1), rel=1e-5)
    assert math.isnan(TRACKERS["window"].start(FIRST, 0.9).bound(1000, 0, 5.0))


@pytest.mark.parametrize("method", ["aci", "pid"])
def test_coverage_comes_back_after_a_change_that_a_fixed_threshold_never_recovers_from(method):
    rng = np.random.default_rng(4)
    scores = np.abs(rng.standard_normal(4000)) * np.repeat([1.0, 4.0], 2000)
    _, missed, _ = followed(TRACKERS[method].start(FIRST, 0.9), scores)
    fixed = scores > quantile(FIRST, 0.9)
    assert fixed[2000:].mean() > 0.6
    assert missed[:2000].mean() == pytest.approx(0.1, abs=0.02)
    assert missed[2500:].mean() == pytest.approx(0.1, abs=0.02)
    _, of_window, _ = followed(RollingWindow.start(FIRST, 0.9), scores)
    assert of_window[2500:].mean() == pytest.approx(0.1, abs=0.03)


def test_pid_is_the_recursion_of_the_paper():
    level, eta, gain, saturation, T = 0.8, 0.1, 2.0, 1.5, 300
    scores = np.abs(np.random.default_rng(5).standard_normal(T)) * np.linspace(1, 3, T)
    first = np.sort(FIRST)[math.ceil(51 * level) - 1]
    thresholds, missed, _ = followed(QuantileControl.start(FIRST, level, eta, gain, saturation), scores)
    q, q_p, errors = first, first, 0.0
    for t in range(T):
        assert thresholds[t] == pytest.approx(q)
        error = float(scores[t] > q)
        q_p += eta * first * (error - (1 - level))  # quantile tracking
        errors += error - (1 - level)
        n = t + 1
        q = q_p + gain * first * math.tan(errors * math.log(n + 1) / (saturation * (n + 1)))
        assert missed[t] == error


def test_quantiles_at_levels_beyond_all_scores_are_infinite_and_at_zero_cover_nothing():
    assert quantile(np.arange(1.0, 20.0), 0.95) == 19.0
    assert quantile(np.arange(1.0, 19.0), 0.95) == math.inf
    assert quantile(FIRST, 1.2) == math.inf
    assert quantile(FIRST, 0.0) == -math.inf
    assert quantile(FIRST, -0.3) == -math.inf


class Nothing(RegressorMixin, BaseEstimator):
    def fit(self, X, y):
        self.fitted_ = True
        return self

    def predict(self, X):
        return np.zeros(len(X))


def mapie(method, residuals):
    X = np.zeros((len(residuals), 1))
    model = Nothing().fit(X, residuals)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        score = AbsoluteConformityScore()
        return TimeSeriesRegressor(model, method=method, cv="prefit", conformity_score=score).fit(X, residuals)


@pytest.mark.parametrize("method", ["aci", "enbpi"])
def test_thresholds_are_those_of_mapie_on_the_same_residuals(method):
    rng, n, T, step = np.random.default_rng(6), 200, 300, 0.005
    r = rng.standard_normal(n + T) * np.append(np.ones(n + 150), np.full(150, 1.3))
    theirs, ours = mapie(method, r[:n]), AdaptiveInference.start(np.abs(r[:n]), 0.9, step)
    if method == "enbpi":  # of a network that is not trained again it is the rolling window
        ours = RollingWindow.start(np.abs(r[:n]), 0.9)
    x, found = np.zeros((1, 1)), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for residual in r[n:]:
            _, bounds = theirs.predict(x, confidence_level=0.9)
            found.append(float(bounds[0, 1, 0]))
            assert ours.threshold() == pytest.approx(found[-1], rel=1e-12)
            if method == "aci":
                theirs.adapt_conformal_inference(x, np.array([residual]), gamma=step, confidence_level=0.9)
                assert ours.current == pytest.approx(
                    theirs.current_alpha[0.1] - step * (0.1 - (abs(residual) > found[-1]))
                )
            theirs.update(x, np.array([residual]))
            ours.update(abs(residual), abs(residual) > found[-1])
    assert len(set(found)) > 20


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("aci", {"step": 0}),
        ("aci", {"step": math.nan}),
        ("aci", {"window": 0}),
        ("aci", {"window": 2.5}),
        ("pid", {"gain": -1}),
        ("pid", {"step": "fast"}),
        ("pid", {"saturation": 0.0}),
        ("window", {"window": -3}),
    ],
)
def test_settings_that_make_no_sense_are_refused(method, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TRACKERS[method].start(FIRST, 0.9, **wrong)


def test_scores_that_are_all_zero_do_not_divide_by_zero():
    thresholds, missed, _ = followed(QuantileControl.start(np.zeros(30), 0.9), [0.0] * 10 + [1.0] * 10)
    assert np.isfinite(thresholds).all()
    assert missed.any()
