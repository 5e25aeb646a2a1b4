"""The test of exchangeability: how often it is wrong, how soon it is right, and MAPIE's numbers."""

import math

import numpy as np
import pytest
from mapie.exchangeability_testing import OnlineMartingaleTest
from scipy.stats import kstest

from deltaband.online.martingale import ONE_SIDED, TWO_SIDED, ConformalMartingale, SimpleJumper, rounded

STREAMS, N_FIRST, N = 1000, 100, 300


def stream(seed, draw=lambda rng, n: rng.standard_normal(n) ** 2, n=N, bets=TWO_SIDED):
    scores = draw(np.random.default_rng(seed), N_FIRST + n)
    return ConformalMartingale.start(scores[:N_FIRST], bets, (0, seed)), scores[N_FIRST:]


@pytest.fixture(scope="module")
def exchangeable():
    """The largest log money that each of many exchangeable streams has seen, and that after 20 rows."""
    paths = [martingale.update(scores) for martingale, scores in map(stream, range(STREAMS))]
    return np.max(paths, axis=1), np.array([path[19] for path in paths])


@pytest.mark.parametrize("level", [0.2, 0.1, 0.05, 0.01])
def test_at_most_the_stated_share_of_exchangeable_streams_ever_raises_an_alarm(exchangeable, level):
    assert (exchangeable[0] >= -math.log(level)).mean() <= level


def test_the_money_neither_grows_nor_shrinks_on_average(exchangeable):
    money = np.exp(exchangeable[1])
    assert money.mean() == pytest.approx(1.0, abs=4 * money.std() / math.sqrt(STREAMS))
    assert money.std() > 0.1


def test_dependence_on_the_calibration_scores_alone_is_no_reason_for_an_alarm():
    """Scores that are exchangeable but not independent: each stream has a scale of its own."""
    largest = []
    for seed in range(300):
        martingale, scores = stream(seed, lambda rng, n: rng.exponential() * np.abs(rng.standard_cauchy(n)), n=150)
        largest.append(martingale.update(scores).max())
    assert (np.array(largest) >= math.log(20)).mean() <= 0.05


def test_ties_are_no_reason_for_an_alarm_and_p_values_are_uniform(monkeypatch):
    seen = []
    update = SimpleJumper.update
    monkeypatch.setattr(SimpleJumper, "update", lambda self, p: seen.append(p) or update(self, p))
    martingale, scores = stream(0, lambda rng, n: rng.integers(0, 2, n).astype(float), n=4000)
    martingale.update(scores)
    assert kstest(seen, "uniform").pvalue > 0.01
    assert abs(np.corrcoef(seen[1:], seen[:-1])[0, 1]) < 0.05


def test_equal_rows_with_other_roundings_are_equal():
    """As leverages of the same row are, alone and in a batch: all larger than before, by a rounding."""
    martingale = ConformalMartingale.start(np.full(100, 0.37), ONE_SIDED, (0, 0))
    assert martingale.update(np.full(500, 0.37 * (1 + 1e-6))).max() < math.log(20)
    assert len(np.unique(rounded(np.array([1.0, 1.0001, 1.02])))) == 2
    assert np.isfinite(rounded(np.zeros(2))).all()


@pytest.mark.parametrize(("factor", "delay"), [(2.0, 100), (4.0, 50), (0.5, 80)])
def test_a_change_of_scale_is_found_soon(factor, delay):
    found = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        scores = np.abs(rng.standard_normal(1000)) * np.append(np.ones(600), np.full(400, factor))
        path = ConformalMartingale.start(scores[:500], TWO_SIDED, (0, seed)).update(scores[500:])
        assert path[:100].max() < math.log(100)
        found.append(np.flatnonzero(path[100:] >= math.log(100))[0])
    assert np.median(found) < delay


def test_a_change_after_a_long_quiet_time_is_found_where_a_plain_jumper_has_lost_its_money():
    rng = np.random.default_rng(0)
    scores = np.abs(rng.standard_normal(30_500))
    scores[30_200:] *= 4
    martingale = ConformalMartingale.start(scores[:200], TWO_SIDED, (0, 0))
    martingale.update(scores[200:30_200])
    assert martingale.path.max() < math.log(100)
    assert martingale.jumper.log_money < -40
    path = martingale.update(scores[30_200:])
    assert 0 < np.flatnonzero(path >= math.log(100))[0] < 130
    assert martingale.jumper.log_money < math.log(100)


def test_one_sided_bets_are_lost_where_scores_shrink():
    rng = np.random.default_rng(0)
    first, smaller = rng.exponential(size=300), 0.2 * rng.exponential(size=300)
    assert ConformalMartingale.start(first, ONE_SIDED, (0, 0)).update(smaller).max() < math.log(10)
    assert ConformalMartingale.start(first, TWO_SIDED, (0, 0)).update(smaller).max() > math.log(100)
    assert ConformalMartingale.start(first, ONE_SIDED, (0, 0)).update(5 * rng.exponential(size=300)).max() > math.log(
        100
    )


def test_rows_in_parts_are_the_same_rows():
    whole, scores = stream(3)
    parts, _ = stream(3)
    path = whole.update(scores)
    pieces = [parts.update(scores[start : start + 7]) for start in range(0, len(scores), 7)]
    np.testing.assert_array_equal(np.concatenate(pieces), path)
    np.testing.assert_array_equal(parts.path, path)


def test_the_jumper_and_its_p_values_are_those_of_mapie():
    martingale, scores = stream(5)
    theirs = OnlineMartingaleTest(task="regression", jump_size=0.01, warn=False)
    theirs.rng = np.random.default_rng((0, 5))
    theirs.conformity_score_history = list(martingale.scores)
    for score in scores[:200]:
        value = rounded(np.array([score]))[0]
        p = theirs.compute_p_value(value, np.array(theirs.conformity_score_history))
        theirs.conformity_score_history.append(value)
        money = theirs.update_simple_jumper_martingale(p)
        martingale.update(np.array([score]))
        assert math.exp(martingale.jumper.log_money) == pytest.approx(money, rel=1e-9)


def test_the_money_is_that_of_bettors_who_start_at_every_row():
    """Naively: one half bets from the start, of the other half 1/(t(t+1)) from row t on, all with the same odds."""
    martingale, scores = stream(7, n=60)
    before, odds = 0.0, []
    for score in scores:
        martingale.update(np.array([score]))
        odds.append(math.exp(martingale.jumper.log_money - before))
        before = martingale.jumper.log_money
    for t in (1, 17, 60):
        starts = sum(np.prod(odds[k - 1 : t]) / (k * (k + 1)) for k in range(1, t + 1))
        money = 0.5 * np.prod(odds[:t]) + 0.5 * (starts + 1 / (t + 1))
        assert math.exp(martingale.path[t - 1]) == pytest.approx(money, rel=1e-9)
