"""Metrics against loops, and against cases that can be worked out by hand."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from deltaband import Intervals
from deltaband.metrics import calibration_error, coverage, interval_score, mean_width, width_error_correlation

METRICS = [coverage, mean_width, width_error_correlation, interval_score, calibration_error]


def loop_coverage(y, mean, lower, upper, level):
    return sum(lo <= t <= up for t, lo, up in zip(y, lower, upper, strict=True)) / len(y)


def loop_mean_width(y, mean, lower, upper, level):
    centre = sum(y) / len(y)
    std = math.sqrt(sum((t - centre) ** 2 for t in y) / len(y))
    return sum(up - lo for lo, up in zip(lower, upper, strict=True)) / len(y) / std


def loop_correlation(y, mean, lower, upper, level):
    w = [up - lo for lo, up in zip(lower, upper, strict=True)]
    e = [abs(t - m) for t, m in zip(y, mean, strict=True)]
    w_bar, e_bar = sum(w) / len(w), sum(e) / len(e)
    covariance = sum((a - w_bar) * (b - e_bar) for a, b in zip(w, e, strict=True))
    return covariance / math.sqrt(sum((a - w_bar) ** 2 for a in w) * sum((b - e_bar) ** 2 for b in e))


def loop_score(y, mean, lower, upper, level):
    total = 0.0
    for t, lo, up in zip(y, lower, upper, strict=True):
        total += up - lo
        if t < lo:
            total += 2 / (1 - level) * (lo - t)
        if t > up:
            total += 2 / (1 - level) * (t - up)
    return total / len(y)


def loop_calibration_error(y, mean, lower, upper, level):
    return abs(loop_coverage(y, mean, lower, upper, level) - level)


LOOPS = [loop_coverage, loop_mean_width, loop_correlation, loop_score, loop_calibration_error]
PAIRS = pytest.mark.parametrize(("metric", "loop"), list(zip(METRICS, LOOPS, strict=True)))


@pytest.fixture
def judged():
    """Targets, and intervals of three levels that are not centred and miss some of them on both sides."""
    rng = np.random.default_rng(0)
    mean = rng.standard_normal(50)
    y = mean + rng.standard_normal(50)
    lower = mean[:, None] - rng.uniform(0.2, 2.0, (50, 3))
    upper = mean[:, None] + rng.uniform(0.2, 2.0, (50, 3))
    assert (y < lower[:, 0]).any()
    assert (y > upper[:, 0]).any()
    return y, Intervals(mean, lower, upper, (0.5, 0.8, 0.95))


def one_level(intervals, j):
    return Intervals(intervals.mean, intervals.lower[:, j], intervals.upper[:, j], intervals.level[j])


def simple(level=0.9):
    """Errors 0, 1, 2, 3 around intervals of width 2, 2, 4, 4: the last target is missed by 1."""
    mean = np.zeros(4)
    half = np.array([1.0, 1.0, 2.0, 2.0])
    return np.array([0.0, 1.0, -2.0, 3.0]), Intervals(mean, mean - half, mean + half, level)


@PAIRS
@pytest.mark.parametrize("j", [0, 1, 2])
def test_a_metric_equals_its_loop(judged, metric, loop, j):
    y, intervals = judged
    one = one_level(intervals, j)
    value = metric(y, one)
    assert isinstance(value, float)
    assert value == pytest.approx(loop(y, *one, one.level), rel=1e-12)


@PAIRS
def test_several_levels_are_the_levels_one_at_a_time(judged, metric, loop):
    y, intervals = judged
    each = [metric(y, one_level(intervals, j)) for j in range(3)]
    value = metric(y, intervals)
    if metric is calibration_error:
        assert isinstance(value, float)
        assert value == pytest.approx(np.mean(each), rel=1e-12)
    else:
        assert isinstance(value, np.ndarray)
        np.testing.assert_allclose(value, each, rtol=1e-12)


@pytest.mark.parametrize("metric", [coverage, mean_width, width_error_correlation, interval_score])
def test_a_list_of_one_level_gives_an_array_of_one(metric):
    y, intervals = simple()
    column = Intervals(intervals.mean, intervals.lower[:, None], intervals.upper[:, None], (0.9,))
    np.testing.assert_allclose(metric(y, column), [metric(y, intervals)])


@pytest.mark.parametrize("metric", METRICS)
def test_tensors_and_arrays_of_either_shape_give_the_same(judged, metric):
    y, intervals = judged
    expected = metric(y, intervals)
    as_tensors = Intervals(*(torch.tensor(part, requires_grad=True) for part in intervals), intervals.level)
    for targets in (y[:, None], torch.from_numpy(y), torch.from_numpy(y)[:, None], list(y)):
        np.testing.assert_array_equal(metric(targets, intervals), expected)
        np.testing.assert_array_equal(metric(targets, as_tensors), expected)


def test_the_bounds_themselves_are_covered():
    y, intervals = simple()
    assert coverage(y, intervals) == 0.75


def test_the_width_is_in_units_of_the_population_std():
    y, intervals = simple()
    assert mean_width(y, intervals) == pytest.approx(3 / np.std([0, 1, -2, 3], ddof=0))


def test_widths_that_grow_with_the_errors_correlate():
    y, intervals = simple()
    # widths 2 2 4 4 and errors 0 1 2 3, less their means: −1 −1 1 1 and −1.5 −.5 .5 1.5
    assert width_error_correlation(y, intervals) == pytest.approx(4 / math.sqrt(4 * 5))


def test_widths_proportional_to_the_errors_correlate_fully():
    y = np.array([1.0, -2.0, 3.0])
    proportional = Intervals(np.zeros(3), -np.abs(y), np.abs(y), 0.9)
    assert width_error_correlation(y, proportional) == pytest.approx(1.0)


def test_a_miss_costs_two_over_alpha_for_each_unit():
    y, intervals = simple(level=0.9)
    assert interval_score(y, intervals) == pytest.approx(3 + 2 / 0.1 * 1 / 4)
    below = Intervals(-intervals.mean, -intervals.upper, -intervals.lower, 0.9)
    assert interval_score(-y, below) == pytest.approx(interval_score(y, intervals))


def test_the_true_quantiles_have_the_lowest_score():
    y = np.random.default_rng(1).standard_normal(4000)
    scores = []
    for z in (1.0, 1.645, 2.5):
        mean = np.zeros_like(y)
        scores.append(interval_score(y, Intervals(mean, mean - z, mean + z, 0.9)))
    assert np.argmin(scores) == 1


def test_the_calibration_error_is_averaged_over_levels():
    y = np.arange(10.0)
    mean = np.zeros(10)
    upper = np.stack([np.full(10, 4.5), np.full(10, 8.5)], axis=1)  # 5 and 9 of 10 are covered
    assert calibration_error(y, Intervals(mean, upper - 100, upper, (0.6, 0.7))) == pytest.approx((0.1 + 0.2) / 2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_constant_width_has_no_correlation(dtype):
    rng = np.random.default_rng(0)
    mean = 100 * rng.standard_normal(200)
    y = mean + rng.standard_normal(200)
    parts = (part.astype(dtype) for part in (mean, mean - 0.1, mean + 0.1))
    intervals = Intervals(*parts, 0.95)
    assert np.ptp(intervals.width) > 0  # by rounding alone
    assert math.isnan(width_error_correlation(y, intervals))


def test_a_width_that_varies_more_than_rounding_has_a_correlation():
    rng = np.random.default_rng(0)
    mean = rng.standard_normal(200)
    half = 1 + 1e-5 * rng.uniform(size=200)
    parts = (part.astype(np.float32) for part in (mean, mean - half, mean + half))
    assert math.isfinite(width_error_correlation(mean + rng.standard_normal(200), Intervals(*parts, 0.95)))


def test_one_constant_level_leaves_the_others_their_correlation(judged):
    y, intervals = judged
    lower, upper = intervals.lower.copy(), intervals.upper.copy()
    lower[:, 1], upper[:, 1] = -1.0, 1.0
    r = width_error_correlation(y, Intervals(intervals.mean, lower, upper, intervals.level))
    assert np.isnan(r).tolist() == [False, True, False]


def test_constant_errors_have_no_correlation():
    y, intervals = simple()
    assert math.isnan(width_error_correlation(intervals.mean + 0.1, intervals))
    assert math.isnan(width_error_correlation(y[:1], Intervals(*(part[:1] for part in intervals), 0.9)))


def test_infinite_bounds_cover_and_do_not_crash():
    y, intervals = simple()
    one_sided = Intervals(intervals.mean, np.full(4, -np.inf), intervals.upper, 0.9)
    assert coverage(y, one_sided) == 0.75
    assert mean_width(y, one_sided) == math.inf
    assert interval_score(y, one_sided) == math.inf
    assert math.isnan(width_error_correlation(y, one_sided))
    assert coverage(y, Intervals(intervals.mean, np.full(4, -np.inf), np.full(4, np.inf))) == 1.0


def test_coverage_width_and_correlation_need_no_level():
    y, intervals = simple(level=None)
    assert coverage(y, intervals) == 0.75
    assert mean_width(y, intervals) > 0
    assert width_error_correlation(y, intervals) > 0


@pytest.mark.parametrize("metric", [interval_score, calibration_error])
def test_a_missing_level_is_an_error_where_it_is_needed(metric):
    y, intervals = simple(level=None)
    with pytest.raises(ValueError, match="level of the intervals is not known"):
        metric(y, intervals)


@pytest.mark.parametrize("metric", [interval_score, calibration_error])
def test_levels_must_go_with_the_columns(metric):
    y, intervals = simple(level=(0.5, 0.9))
    with pytest.raises(ValueError, match="2 levels do not match bounds of 1 columns"):
        metric(y, intervals)


@pytest.mark.parametrize("metric", METRICS)
def test_lengths_that_differ_are_an_error(metric):
    y, intervals = simple()
    with pytest.raises(ValueError, match="3 targets, 4 intervals"):
        metric(y[:3], intervals)


@pytest.mark.parametrize("metric", METRICS)
def test_no_rows_are_an_error(metric):
    empty = np.zeros(0)
    with pytest.raises(ValueError, match="no rows"):
        metric(empty, Intervals(empty, empty, empty, 0.9))


@pytest.mark.parametrize("metric", METRICS)
def test_nan_in_the_targets_is_an_error_that_names_the_row(metric):
    y, intervals = simple()
    y[2] = np.nan
    with pytest.raises(ValueError, match="NaN in row 2"):
        metric(y, intervals)


@pytest.mark.parametrize("metric", METRICS)
def test_nan_in_the_intervals_is_an_error(metric):
    y, intervals = simple()
    intervals.upper[1] = np.nan
    with pytest.raises(ValueError, match="intervals hold NaN"):
        metric(y, intervals)


def test_bounds_of_different_shapes_are_an_error():
    y, intervals = simple()
    with pytest.raises(ValueError, match=r"lower \(4,\), upper \(4, 1\)"):
        coverage(y, Intervals(intervals.mean, intervals.lower, intervals.upper[:, None], 0.9))


def test_equal_targets_have_no_unit_of_width():
    y = np.full(3, 0.1)
    assert y.std() > 0  # by rounding alone
    with pytest.raises(ValueError, match="all targets are equal"):
        mean_width(y, Intervals(y, y - 1, y + 1, 0.9))


def test_metrics_load_neither_scipy_nor_scikit_learn():
    check = "import deltaband.metrics, sys; sys.exit(bool({'scipy', 'sklearn'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
