"""The coverage of the last targets: exact bounds, and how often a block of them raises a false alarm."""

import numpy as np
import pytest
from scipy.stats import binomtest

from deltaband.online.coverage import RollingCoverage, Share


@pytest.mark.parametrize(("covered", "n"), [(0, 5), (5, 5), (17, 20), (180, 200), (1, 1)])
def test_bounds_are_those_of_clopper_and_pearson(covered, n):
    interval = binomtest(covered, n).proportion_ci(0.95, "exact")
    assert Share(covered, n).bounds == pytest.approx((interval.low, interval.high))


def test_only_the_last_targets_count_and_blocks_are_whole():
    coverage = RollingCoverage(0.9, 10, 50)
    coverage.update(np.array([False] * 5 + [True] * 17), 0.01)
    assert coverage.rolling == (10, 10)
    assert coverage.blocks.tolist() == [5, 10]
    coverage.update(np.array([False] * 3), 0.01)
    assert coverage.rolling == (7, 10)


@pytest.mark.parametrize("n_calibration", [30, 300])
def test_exchangeable_rows_raise_an_alarm_at_most_as_often_as_stated(n_calibration):
    """Whatever the few calibration rows were: their chance is part of the statement."""
    level, false_alarms, alarms, binomial = 0.9, 0.1, 0, 0
    for seed in range(1000):
        scores = np.random.default_rng(seed).random(n_calibration + 400)
        rank = int(np.ceil((n_calibration + 1) * level - 1e-9))
        covered = scores[n_calibration:] <= np.sort(scores[:n_calibration])[rank - 1]
        alarms += bool(RollingCoverage(level, 100, n_calibration).update(covered, false_alarms))
        binomial += binomtest(int(covered[:100].sum()), 100, level, "less").pvalue <= false_alarms / 2
    assert alarms / 1000 <= false_alarms
    if n_calibration == 30:
        assert binomial / 1000 > false_alarms  # a test that takes the coverage for the level is wrong more often


def test_a_fall_of_the_coverage_is_found_and_after_how_many_targets():
    rng = np.random.default_rng(0)
    covered = np.append(rng.random(1000) < 0.95, rng.random(400) < 0.8)
    found = RollingCoverage(0.95, 200, 500).update(covered, 0.01)
    assert [after for after, _ in found] == [1200, 1400]
    assert found[0][1].share == pytest.approx(0.8, abs=0.06)
