"""Coverage among some of the rows, and scores of whole forecasts."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binomtest, norm
from sklearn.metrics import mean_pinball_loss

from deltaband import Intervals, PredictionIntervals, metrics
from tests.support.networks import mlp, regression


def normal(n=2000, levels=(0.5, 0.9), seed=0):
    """Targets from the standard normal distribution, with its own quantiles."""
    y, half = np.random.default_rng(seed).standard_normal(n), norm.ppf((1 + np.array(levels)) / 2)
    return y, Intervals(np.zeros(n), np.tile(-half, (n, 1)), np.tile(half, (n, 1)), tuple(levels))


def one_level(n=2000, seed=0):
    y, found = normal(n, (0.9,), seed)
    return y, Intervals(found.mean, found.lower[:, 0], found.upper[:, 0], 0.9)


# --- groups


@pytest.mark.parametrize("kind", [list, np.array, pd.Series])
def test_the_coverage_of_a_group_has_the_bounds_of_an_exact_binomial_test(kind):
    y, intervals = normal()
    groups = np.array(["a", "b", "c"])[np.arange(2000) % 3]
    found = metrics.coverage_by_group(y, intervals, kind(groups.tolist()), confidence=0.8)
    assert list(found) == ["a", "b", "c"]
    for label, group in found.items():
        rows = groups == label
        assert group.n_rows == rows.sum()
        for level in (0, 1):
            inside = int((np.abs(y[rows]) <= intervals.upper[0, level]).sum())
            exact = binomtest(inside, int(rows.sum())).proportion_ci(0.8, "exact")
            assert group.coverage[level] == inside / rows.sum()
            assert (group.lower[level], group.upper[level]) == pytest.approx((exact.low, exact.high), abs=1e-12)


def test_groups_may_overlap_and_all_or_none_of_their_rows_be_covered():
    y, intervals = one_level()
    covered = np.abs(y) <= intervals.upper[0]
    indicators = pd.DataFrame({"covered": covered, "missed": ~covered, "all": True, "none": False})
    found = metrics.coverage_by_group(y, intervals, indicators)
    assert list(found) == ["covered", "missed", "all"]
    assert found["all"].coverage == metrics.coverage(y, intervals)
    assert (found["covered"].coverage, found["covered"].upper) == (1.0, 1.0)
    assert (found["missed"].coverage, found["missed"].lower) == (0.0, 0.0)
    assert list(metrics.coverage_by_group(y, intervals, indicators.to_numpy())) == [0, 1, 2]


def test_a_column_of_labels_is_no_matrix_of_indicators():
    with pytest.raises(TypeError, match=r"must be of 0 and 1.*labels are given as \(n,\)"):
        metrics.coverage_by_group(*one_level(2), pd.DataFrame({"site": ["north", "south"]}))


def test_groups_must_be_those_of_the_rows():
    y, intervals = one_level()
    with pytest.raises(ValueError, match="one label per row: 2000 rows"):
        metrics.coverage_by_group(y, intervals, ["a"] * 5)
    with pytest.raises(ValueError, match="no label in row 1999"):
        metrics.coverage_by_group(y, intervals, np.append(np.ones(1999), np.nan))


# --- slabs


@pytest.mark.parametrize("wrong", [0, 1, 1.5, math.nan, "high"])
def test_a_confidence_is_a_probability(wrong):
    with pytest.raises(ValueError, match="confidence must be a number above 0 and below 1, got"):
        metrics.coverage_by_group(*one_level(), ["a"] * 2000, confidence=wrong)


def test_the_worst_slab_is_found_where_nothing_is_covered():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4_000, 2))
    everywhere, not_there = rng.random(4_000) < 0.8, np.abs(x[:, 0]) > 0.3
    found = metrics.worst_slabs(x, np.column_stack([everywhere, not_there, np.ones(4_000, bool)]), 0)
    assert found[0] == pytest.approx(0.8, abs=0.08)
    assert found[1] < 0.2
    assert found[2] == 1.0


def test_the_worst_slab_does_not_depend_on_the_units_of_features():
    y, intervals = normal(2000)
    x = np.random.default_rng(1).standard_normal((2000, 3))
    y = np.where(x[:, 0] > 1, 3 * y, y)
    found = metrics.worst_slab_coverage(y, intervals, x)
    assert found.shape == (2,)
    assert (found < metrics.coverage(y, intervals) - 0.1).all()
    np.testing.assert_allclose(metrics.worst_slab_coverage(y, intervals, x * [1e6, 1, 1e-6] + 7), found, atol=0.02)
    constant = np.column_stack([x, np.ones(2000)])
    assert (metrics.worst_slab_coverage(y, intervals, torch.from_numpy(constant)) <= 1).all()


def test_slabs_need_features_and_rows():
    y, intervals = one_level(99)
    with pytest.raises(ValueError, match="at least 100 rows, got 99"):
        metrics.worst_slab_coverage(y, intervals, np.ones((99, 1)))
    y, intervals = one_level(100)
    with pytest.raises(ValueError, match=r"features \(n, d\) of the 100 rows"):
        metrics.worst_slab_coverage(y, intervals, np.ones(100))
    with pytest.raises(ValueError, match="x hold NaN"):
        metrics.worst_slab_coverage(y, intervals, np.full((100, 1), np.nan))
    for wrong in (0, -0.2, 2, math.nan, "all", True):
        with pytest.raises(ValueError, match="share must be a number above 0 and of at most 1, got"):
            metrics.worst_slab_coverage(y, intervals, np.ones((100, 1)), share=wrong)
    with pytest.raises(ValueError, match="seed must be a whole number ≥ 0, got -1"):
        metrics.worst_slab_coverage(y, intervals, np.ones((100, 1)), seed=-1)
    x = np.random.default_rng(1).standard_normal((100, 2))
    whole = metrics.worst_slab_coverage(y, intervals, x, share=1)
    assert whole == pytest.approx(metrics.coverage(y, intervals), abs=0.1)  # that of the half it is measured on
    assert metrics.worst_slab_coverage(y, intervals, x * 1e300, share=1) == whole


# --- forecasts


def test_pinball_loss_is_that_of_scikit_learn():
    y, intervals = normal()
    for level in (0, 1):
        p = intervals.level[level]
        both = mean_pinball_loss(y, intervals.lower[:, level], alpha=(1 - p) / 2) + mean_pinball_loss(
            y, intervals.upper[:, level], alpha=(1 + p) / 2
        )
        assert metrics.pinball_loss(y, intervals)[level] == pytest.approx(both / 2)
    expected = metrics.interval_score(y, intervals) * (1 - np.array(intervals.level)) / 4
    np.testing.assert_allclose(metrics.pinball_loss(y, intervals), expected)


@pytest.mark.parametrize("side", ["upper", "lower"])
def test_the_pinball_loss_of_one_bound_is_that_of_its_own_level(side):
    y, intervals = one_level()
    infinite = np.full(len(y), np.inf)
    if side == "upper":
        one, alpha, bound = Intervals(intervals.mean, -infinite, intervals.upper, 0.9), 0.9, intervals.upper
    else:
        one, alpha, bound = Intervals(intervals.mean, intervals.lower, infinite, 0.9), 0.1, intervals.lower
    assert metrics.pinball_loss(y, one) == pytest.approx(mean_pinball_loss(y, bound, alpha=alpha))
    with pytest.raises(ValueError, match="two bounds"):
        metrics.crps(y, one)
    assert math.isnan(metrics.evaluate(y, one).crps)


def test_infinite_intervals_have_an_infinite_crps():
    y, found = normal()
    infinite = Intervals(found.mean, found.lower - math.inf, found.upper + math.inf, found.level)
    assert metrics.crps(y, infinite) == metrics.evaluate(y, infinite).crps == math.inf


def test_the_crps_of_many_levels_is_that_of_the_distribution():
    """Of a standard normal forecast it is z(2Φ(z) − 1) + 2φ(z) − 1/√π."""
    y, intervals = normal(500, tuple(np.linspace(0.002, 0.9998, 400)))
    exact = np.mean(y * (2 * norm.cdf(y) - 1) + 2 * norm.pdf(y) - 1 / math.sqrt(math.pi))
    assert metrics.crps(y, intervals) == pytest.approx(exact, rel=2e-3)
    draws = norm.ppf((np.arange(2000) + 0.5) / 2000)
    assert metrics.crps(y, np.tile(draws, (500, 1))) == pytest.approx(exact, rel=2e-3)
    shuffled = tuple(np.random.default_rng(0).permutation(400))
    other = Intervals(
        intervals.mean,
        intervals.lower[:, shuffled],
        intervals.upper[:, shuffled],
        tuple(intervals.level[i] for i in shuffled),
    )
    assert metrics.crps(y, other) == pytest.approx(metrics.crps(y, intervals))


def test_the_crps_of_draws_is_that_of_a_loop_and_has_a_value_per_output():
    rng = np.random.default_rng(0)
    y, draws = rng.standard_normal((4, 2)), rng.standard_normal((4, 2, 7))
    expected = np.zeros(2)
    for i in range(4):
        for o in range(2):
            x = draws[i, o]
            apart = sum(abs(a - b) for a in x for b in x) / 49
            expected[o] += (sum(abs(a - y[i, o]) for a in x) / 7 - apart / 2) / 4
    np.testing.assert_allclose(metrics.crps(y, draws), expected)
    assert metrics.crps(y[:, 0], draws[:, 0]) == pytest.approx(expected[0])
    assert metrics.crps(y[:, 0], torch.from_numpy(draws[:, 0, :1])) == pytest.approx(
        np.abs(y[:, 0] - draws[:, 0, 0]).mean()
    )
    for bad in (draws, draws[:3, 0], draws[:, 0, :0]):
        with pytest.raises(ValueError, match="draws must have shape"):
            metrics.crps(y[:, 0], bad)


# --- in evaluate


def test_evaluate_has_all_of_it():
    X, y = regression(500)
    groups = np.where(X[:, 0] > 0, "right", "left")
    band = PredictionIntervals(mlp(), damping=0.1).fit(X[:100], y[:100], progress=False)
    band.calibrate(X[100:300], y[100:300])
    scores, found = band.evaluate(X[300:], y[300:], (0.5, 0.9), groups=groups[300:]), band.predict(X[300:], (0.5, 0.9))
    for label, expected in metrics.coverage_by_group(y[300:], found, groups[300:]).items():
        for mine, theirs in zip(scores.by_group[label], expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(scores.worst_slab_coverage, metrics.worst_slab_coverage(y[300:], found, X[300:]))
    np.testing.assert_array_equal(scores.pinball_loss, metrics.pinball_loss(y[300:], found))
    assert scores.crps == metrics.crps(y[300:], found)
    assert {"crps", "pinball_loss", "worst_slab_coverage"} <= set(scores.rows()[0])
    text = repr(scores)
    assert "worst slab" in text
    assert "Coverage by group" in text
    assert "right" in scores._repr_html_()
    assert "Coverage by group" not in repr(band.evaluate(X[300:], y[300:]))
    assert np.isnan(band.evaluate(X[450:], y[450:]).worst_slab_coverage).all()  # too few rows


@pytest.mark.parametrize("by", ["labels", "indicators", "weights"])
def test_a_band_that_was_calibrated_by_groups_or_weights_is_evaluated_with_them(by):
    X, y = regression(3000)
    groups = np.where(X[:, 0] > 0, "right", "left")
    given = {
        "labels": {"groups": pd.Series(groups)},
        "indicators": {"groups": pd.get_dummies(groups)},
        "weights": {"weights": torch.exp(X[:, 0])},
    }[by]
    first, last = ({name: each[rows] for name, each in given.items()} for rows in (slice(100, 300), slice(300, None)))
    band = PredictionIntervals(mlp(), damping=0.1).fit(X[:100], y[:100], progress=False)
    band.calibrate(X[100:300], y[100:300], **first)
    scores, found = band.evaluate(X[300:], y[300:], 0.8, **last), band.predict(X[300:], 0.8, **last)
    assert scores.coverage[0] == metrics.coverage(y[300:], found)  # in several batches, each with its own rows of them
    with pytest.raises(ValueError, match="give predict"):
        band.evaluate(X[300:], y[300:], 0.8)
