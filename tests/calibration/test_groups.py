"""Intervals that cover each group of rows, by labels and by indicators of groups that overlap."""

import math
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from crepes import ConformalRegressor
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tests.reference as reference
from deltaband import DeltabandWarning, PredictionIntervals
from deltaband.calibration import AllOutputs, ConformalScale, Scales, rows_needed
from deltaband.calibration.groups import UNKNOWN, ByGroup
from deltaband.calibration.overlap import Overlapping
from deltaband.calibration.quantiles import conformal_quantiles
from tests.support.networks import mlp, regression

EIGENVALUES = 10.0 ** np.linspace(2, -4, 30)
SCALES = Scales.grid(EIGENVALUES, 100)


def drawn(n, rng, shares=(0.5, 0.3, 0.2)):
    """Variances under each λ, groups, and residuals whose size depends on both."""
    squared_projections = rng.standard_normal((n, len(EIGENVALUES))) ** 2 * EIGENVALUES
    e = EIGENVALUES[:, None]
    q = squared_projections @ (e / (e + SCALES.dampings) ** 2) / 100
    groups = rng.choice(len(shares), n, p=shares)
    return q, groups, rng.standard_t(4, n) * np.sqrt(1 + 50 * q[:, 5]) * np.array([1.0, 3.0, 0.3, 5.0, 2.0])[groups]


def band_and_rows(n=300, n_new=80, seed=0, **settings):
    X, y = regression(100 + n + n_new, seed=seed)
    rng = np.random.default_rng(seed)
    groups = np.array(["day", "night", "holiday"])[rng.choice(3, len(X), p=[0.5, 0.3, 0.2])]
    y = y + torch.from_numpy(np.where(groups == "night", 2.0, 0.1) * rng.standard_normal(len(X)))
    band = PredictionIntervals(mlp(), damping=0.1, **settings).fit(X[:100], y[:100], progress=False)
    parts = [slice(100, 100 + n), slice(100 + n, None)]
    return band, *[(X[part], y[part], groups[part]) for part in parts]


# --- the guarantee


@pytest.mark.parametrize("side", ["both", "upper", "lower"])
@pytest.mark.parametrize("level", [0.5, 0.8])
def test_bounds_by_group_are_those_of_full_conformal_prediction_residual_by_residual(side, level):
    rng = np.random.default_rng(0)
    q, groups, r = drawn(44, rng)
    new, rule = q[40:] * np.array([[1], [10], [0.1], [100]]), ByGroup.of(groups[:40].tolist())
    place = np.array([[rule.labels.index(g)] for g in groups[40:]])
    lower, upper = ConformalScale.fit(r[:40], q[:40], SCALES, rule).bounds(new, (level,), side, place)
    for i in range(4):
        same = np.append(groups[:40] == groups[40 + i], True)

        def accepts(scores, level, same=same):
            return reference.accepted_by_rank(scores[same], level)

        check_by_residuals(r[:40], q[:40], new[i : i + 1], level, side, accepts, (lower[i, 0], upper[i, 0]))


@pytest.mark.parametrize("side", ["both", "upper"])
def test_bounds_of_overlapping_groups_are_those_of_full_conformal_prediction_residual_by_residual(side):
    rng = np.random.default_rng(1)
    q, _, r = drawn(44, rng)
    indicators = np.column_stack([np.ones(44), rng.random((44, 2)) < 0.5])
    rule = Overlapping(None, indicators[:40])
    lower, upper = ConformalScale.fit(r[:40], q[:40], SCALES, rule).bounds(q[40:], (0.7,), side, indicators[40:])
    for i in range(2):
        accepts = partial(reference.accepted_by_regression, np.vstack([indicators[:40], indicators[40 + i]]))
        check_by_residuals(r[:40], q[:40], q[40 + i : 41 + i], 0.7, side, accepts, (lower[i, 0], upper[i, 0]))


def check_by_residuals(r, q, new, level, side, accepts, bounds):
    """The bound is accepted, and nothing beyond it."""
    bound, sign = (-bounds[0], -1) if side == "lower" else (bounds[1], 1)
    reach = 3 * max(np.abs(r).max(), abs(bound))
    tried = np.append(np.linspace(-reach, reach, 101), bound - 1e-7 * reach)
    squared = SCALES.squared(q), SCALES.prior, SCALES.squared(new)[0]
    accepted = reference.conformal_residuals(sign * r, *squared, level, tried, side != "both", accepts)
    assert tried[-1] in accepted
    assert max(accepted) <= bound + 1e-9 * reach


@pytest.mark.slow
def test_each_group_is_covered_at_the_level_on_average_over_calibration_sets():
    """P(covered | group) ≥ level, although groups differ by a factor of ten and the scale is chosen on all rows."""
    rng, levels, n = np.random.default_rng(2), (0.5, 0.8), 100
    covered, count = np.zeros((3, 2)), np.zeros((3, 1))
    for _ in range(2500):
        q, groups, r = drawn(n + 6, rng)
        rule = ByGroup.of([*range(3), *groups[3:n].tolist()])
        groups[:3] = range(3)
        _lower, upper = ConformalScale.fit(r[:n], q[:n], SCALES, rule).bounds(q[n:], levels, "both", groups[n:, None])
        inside = np.abs(r[n:, None]) <= upper
        np.add.at(covered, groups[n:], inside)
        np.add.at(count, groups[n:], 1)
    error = 4 * np.sqrt(0.25 / count)
    assert (covered / count >= np.array(levels) - error).all()
    assert (covered / count <= np.array(levels) + error + 0.09).all()  # 1/(n_g + 1), and the hull of what is accepted


@pytest.mark.slow
def test_groups_that_are_too_small_are_covered_at_the_level_on_average_and_each_as_often_as_its_rows_allow():
    rng, level, n = np.random.default_rng(3), 0.9, 80
    shares = (0.8, 0.05, 0.05, 0.05, 0.05)
    of_small, alone = [], {}
    for _ in range(4000):
        q, groups, r = drawn(n + 8, rng, shares)
        rule = ByGroup.of(groups[:n].tolist())
        if not set(groups[n:]) <= set(rule.labels):
            continue
        place = np.array([[rule.labels.index(g)] for g in groups[n:]])
        _, upper = ConformalScale.fit(r[:n], q[:n], Scales.single(0.1), rule).bounds(q[n:], (level,), "both", place)
        inside = np.abs(r[n:]) <= upper[:, 0]
        small = rule.counts[place[:, 0]] < rows_needed(level)
        if rule.counts[rule.pool(level)].sum() < n:  # not the quantile of all rows
            of_small += inside[small].tolist()
        for group, count, within in zip(groups[n:][small], rule.counts[place[small, 0]], inside[small], strict=True):
            alone.setdefault((group, count), []).append(within)
    assert len(of_small) > 4000
    assert np.mean(of_small) >= level - 4 * math.sqrt(level * (1 - level) / len(of_small) * 8)
    for (_, count), within in alone.items():
        p = count / (count + 1)
        assert np.mean(within) >= p - 4 * math.sqrt(p * (1 - p) / len(within)) - 1e-9


@pytest.mark.slow
def test_each_of_several_overlapping_groups_is_covered_at_the_level():
    rng, level, n = np.random.default_rng(4), 0.8, 120
    found = {g: [] for g in range(4)}
    for _ in range(500):
        q, _, r = drawn(n + 10, rng)
        indicators = np.column_stack([np.ones(n + 10), rng.random((n + 10, 3)) < (0.5, 0.3, 0.7)])
        r = r * np.exp(indicators @ np.array([0.0, 1.0, -1.0, 0.5]))
        rule = Overlapping(None, indicators[:n])
        conformal = ConformalScale.fit(r[:n], q[:n], Scales.single(0.1), rule)
        _, upper = conformal.bounds(q[n:], (level,), "both", indicators[n:])
        for g in range(4):
            found[g] += (np.abs(r[n:]) <= upper[:, 0])[indicators[n:, g] == 1].tolist()
    for inside in found.values():
        error = 4 * math.sqrt(level * (1 - level) / len(inside) * 2)  # rows of one draw share their calibration rows
        assert level - error <= np.mean(inside) <= level + error + 4 / (0.3 * n)


# --- references


@pytest.mark.parametrize("level", [0.85, 0.95])
def test_crepes_gives_the_same_mondrian_intervals(level):
    band, (X, y, groups), (new, _, new_groups) = band_and_rows()
    band.calibrate(X, y, tune=False, groups=groups)
    mean, sigma = band.predict_mean_and_scale(new)
    centre, sigma_cal = band.predict_mean_and_scale(X)
    crepes = ConformalRegressor().fit((y - centre).numpy(), sigmas=sigma_cal.numpy(), bins=groups)
    theirs = crepes.predict_int(mean.numpy(), sigmas=sigma.numpy(), bins=new_groups, confidence=level)
    ours = band.predict(new, level, groups=new_groups)
    np.testing.assert_allclose(theirs[:, 0], ours.lower, rtol=1e-6)
    np.testing.assert_allclose(theirs[:, 1], ours.upper, rtol=1e-6)


@pytest.mark.parametrize("seed", range(40))
def test_regressions_agree_with_a_linear_program_also_with_ties_and_dependent_columns(seed):
    rng = np.random.default_rng(seed)
    n, G = int(rng.integers(5, 200)), int(rng.integers(1, 8))
    indicators = rng.random((n, G)) < rng.random(G) if seed % 3 else np.eye(G)[rng.integers(0, G, n)]
    scores = np.round(rng.standard_normal(n), 1 if seed % 2 else 12)
    rule = Overlapping.of(indicators, n)
    arranged = rule.arrange(scores)
    for level in (0.5, 0.8, 0.9, 0.95):
        new = np.append(1.0, indicators[rng.integers(n)] if rng.random() < 0.5 else rng.random(G) < 0.4)
        expected = reference.regression_quantile(rule.indicators, scores, new, level)
        found = rule.quantiles(arranged, new[None], (level,))[0, 0]
        assert found == expected or abs(found - expected) < 1e-7


def test_indicators_of_groups_that_do_not_overlap_give_the_quantiles_of_labels():
    band, (X, y, groups), (new, _, new_groups) = band_and_rows()
    by_label = band.calibrate(X, y, groups=groups).predict(new, (0.5, 0.9), groups=new_groups)
    indicators, of_new = (pd.get_dummies(each) for each in (groups, new_groups))
    by_indicator = band.calibrate(X, y, groups=indicators).predict(new, (0.5, 0.9), groups=of_new)
    np.testing.assert_allclose(by_indicator.upper, by_label.upper, rtol=1e-9)
    np.testing.assert_allclose(by_indicator.lower, by_label.lower, rtol=1e-9)


def test_one_group_is_no_group():
    band, (X, y, _), (new, _, _) = band_and_rows()
    plain = band.calibrate(X, y).predict(new, (0.5, 0.9))
    for groups in (["all"] * 300, np.ones((300, 1))):
        one = band.calibrate(X, y, groups=groups).predict(new, (0.5, 0.9), groups=groups[: len(new)])
        np.testing.assert_allclose(one.upper, plain.upper, rtol=1e-9)


# --- what users see


def test_a_group_with_more_noise_gets_wider_intervals_and_the_level():
    band, (X, y, groups), (new, new_y, new_groups) = band_and_rows(1500, 1500)
    plain = band.calibrate(X, y, noise="none").predict(new, 0.8)
    found = band.calibrate(X, y, noise="none", groups=groups).predict(new, 0.8, groups=new_groups)
    night = torch.from_numpy(new_groups == "night")

    def share(intervals):
        return float(((intervals.lower <= new_y) & (new_y <= intervals.upper))[night].double().mean())

    assert share(plain) < 0.6
    assert abs(share(found) - 0.8) < 0.07
    assert found.width[night].min() > found.width[~night].max()
    assert "3 of " in band.summary()


@pytest.mark.parametrize("tune", [True, False])
@pytest.mark.parametrize("labels", [["a", "b"], [3, 1], [0.5, 2.0], [True, False], ["1", 1]], ids=str)
def test_labels_of_any_kind_are_saved_and_loaded_bit_for_bit(labels, tune, tmp_path):
    band, (X, y, _), (new, _, _) = band_and_rows()
    groups = [labels[i % 2] for i in range(300)]
    band.calibrate(X, y, groups=groups, tune=tune).save(tmp_path / "x.band")
    loaded = PredictionIntervals.load(tmp_path / "x.band", band.model)
    for before, after in zip(*(b.predict(new, 0.9, groups=groups[:80]) for b in (band, loaded)), strict=True):
        assert torch.equal(before, after)
    assert loaded.calibration_.rule.labels == tuple(labels)
    assert loaded.summary() == band.summary()


def test_indicators_are_saved_and_loaded_bit_for_bit(tmp_path):
    band, (X, y, groups), (new, _, new_groups) = band_and_rows()
    indicators = pd.DataFrame({"night": groups == "night", "x": X[:, 0] > 0})
    of_new = pd.DataFrame({"night": new_groups == "night", "x": new[:, 0] > 0})
    band.calibrate(X, y, groups=indicators).save(tmp_path / "x.band")
    loaded = PredictionIntervals.load(tmp_path / "x.band", band.model)
    for before, after in zip(*(b.predict(new, 0.9, groups=of_new) for b in (band, loaded)), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("kind", [list, np.array, pd.Series, pd.Categorical])
def test_labels_may_come_in_any_sequence(kind):
    band, (X, y, groups), (new, _, new_groups) = band_and_rows()
    expected = band.calibrate(X, y, groups=groups).predict(new, groups=new_groups).upper
    band.calibrate(X, y, groups=kind(groups.tolist()))
    assert torch.equal(band.predict(new, groups=kind(new_groups.tolist())).upper, expected)


def test_an_unknown_group_is_an_error_or_gets_the_quantile_of_all_rows():
    band, (X, y, groups), (new, _, new_groups) = band_and_rows()
    pooled = band.calibrate(X, y).predict(new)
    band.calibrate(X, y, groups=groups)
    named = np.where(np.arange(80) % 2, new_groups, "evening")
    with pytest.raises(ValueError, match=r"group 'evening' of row 0 .*unknown='pool'"):
        band.predict(new, groups=named)
    found, own = band.predict(new, groups=named, unknown="pool"), band.predict(new, groups=new_groups)
    assert torch.equal(found.upper[::2], pooled.upper[::2])
    assert torch.equal(found.upper[1::2], own.upper[1::2])
    with pytest.raises(ValueError, match="unknown must be 'error' or 'pool'"):
        band.predict(new, groups=new_groups, unknown="ignore")


def test_a_group_with_one_row_is_named_and_gets_what_its_rows_and_others_allow():
    band, (X, y, groups), (new, _, _new_groups) = band_and_rows()
    groups[7] = "lonely"
    with pytest.warns(
        DeltabandWarning, match=r"too few calibration rows for level 0.95, which takes 19: 'lonely' \(1\)"
    ):
        band.calibrate(X, y, groups=groups)
    assert "'lonely' (1)" in band.summary()
    assert "'lonely' (1)" in "".join(band.warnings_)
    pooled = band.predict(new, groups=["?"] * 80, unknown="pool")
    found = band.predict(new, groups=["lonely"] * 80)
    assert (found.upper >= pooled.upper).all()
    assert torch.isfinite(found.upper).all()


def test_groups_too_small_for_a_higher_level_are_named_when_rows_of_them_are_predicted():
    band, (X, y, groups), (new, _, new_groups) = band_and_rows()
    band.calibrate(X, y, groups=groups)  # no warning: each has more than 19 rows
    with pytest.warns(DeltabandWarning, match="too few calibration rows for level 0.99, which takes 99: 'holiday'"):
        band.predict(new, 0.99, groups=new_groups)
    band.predict(new[:2], 0.99, groups=["day"] * 2)


def test_what_small_groups_share_is_computed_once_however_many_they_are(monkeypatch):
    """With one label per row a calibration would otherwise never come to an end."""
    counted = []

    def quantiles(scores, levels):
        counted.append(len(scores))
        return conformal_quantiles(scores, levels)

    monkeypatch.setattr("deltaband.calibration.groups.conformal_quantiles", quantiles)
    rule, scores = ByGroup.of(range(400)), np.random.default_rng(0).standard_normal(400)
    found = rule.quantiles(rule.arrange(scores), np.arange(400)[:, None], (0.8, 0.9))
    expected = np.maximum(conformal_quantiles(np.sort(scores), (0.8, 0.9)), scores[:, None])
    np.testing.assert_array_equal(found, expected)
    assert counted == [400, 400]


def test_small_groups_share_the_quantile_of_all_small_groups():
    rule = ByGroup.of(["big"] * 40 + ["a"] * 8 + ["b"] * 6 + ["c"] * 9)
    scores = np.concatenate([np.arange(40.0), 100 + np.arange(23.0)])
    arranged, needed = rule.arrange(scores), rows_needed(0.9)
    assert [rule.labels[code] for code in rule.pool(0.9)] == ["a", "b", "c"]  # c has just enough, and counts as well
    assert needed == 9
    found = rule.quantiles(arranged, np.array([[0], [1], [2], [3], [UNKNOWN]]), (0.9,))[:, 0]
    pooled = np.sort(scores[40:])[math.ceil(24 * 0.9) - 1]
    assert found.tolist() == [36.0, pooled, pooled, 122.0, np.sort(scores)[math.ceil(64 * 0.9) - 1]]
    # where they are too few together, all rows count, and the own largest score
    rule = ByGroup.of(["big"] * 40 + ["a"] * 2)
    arranged = rule.arrange(np.append(np.arange(40.0), [7.0, 1000.0]))
    assert rule.quantiles(arranged, np.array([[1]]), (0.9,))[0, 0] == 1000.0


def test_rows_of_overlapping_groups_without_enough_rows_get_infinite_intervals_and_are_counted():
    band, (X, y, _), (new, _, _) = band_and_rows()
    indicators = np.zeros((300, 2), dtype=bool)
    indicators[::2, 0], indicators[:5, 1] = True, True
    with pytest.warns(DeltabandWarning, match=r"too few calibration rows for level 0.95, which takes 19: 1 \(5\)"):
        band.calibrate(X, y, groups=indicators)
    with pytest.warns(DeltabandWarning, match="3 of 80 rows have infinite intervals"):
        found = band.predict(new, 0.9, groups=np.column_stack([np.ones(80), np.arange(80) < 3]))
    assert torch.isinf(found.upper).tolist() == [True] * 3 + [False] * 77
    # rows of no group, and a combination that no calibration row had
    assert torch.isfinite(band.predict(new, 0.9, groups=np.zeros((80, 2))).upper).all()


def test_rows_far_from_the_training_rows_keep_the_wider_interval_of_their_group():
    band, (X, y, groups), (new, _, new_groups) = band_and_rows(noise="auto")
    band.calibrate(X, y, groups=groups)
    assert band.calibration_.guard is not None
    found = band.predict(new * 4, groups=new_groups)
    assert found.far.any()
    without = band.calibrate(X, y, groups=groups, noise="none").predict(new * 4, groups=new_groups)
    assert (found.width[found.far] >= without.width[found.far] * (1 - 1e-12)).all()


def test_rows_of_weight_zero_are_left_out_with_their_groups():
    band, (X, y, groups), (new, _, new_groups) = band_and_rows()
    kept = np.arange(300) % 3 > 0
    band.calibrate(X[kept], y[kept], groups=groups[kept], sample_weight=np.ones(200))
    expected = band.predict(new, groups=new_groups)
    band.calibrate(X, y, groups=groups, sample_weight=kept.astype(float))
    assert torch.equal(band.predict(new, groups=new_groups).upper, expected.upper)


@pytest.mark.parametrize("joint", [True, False])
def test_several_outputs_are_covered_in_each_group(joint):
    rng = np.random.default_rng(0)
    X = torch.from_numpy(rng.standard_normal((1600, 2)))
    groups = rng.choice(2, 1600)
    y = X @ torch.ones(2, 2, dtype=torch.float64) + torch.from_numpy(
        rng.standard_normal((1600, 2)) * (1 + 9 * groups[:, None])
    )
    band = PredictionIntervals(nn.Linear(2, 2).double(), damping=1.0).fit(X[:100], y[:100], progress=False)
    band.calibrate(X[100:900], y[100:900], joint=joint, groups=groups[100:900])
    assert isinstance(band.calibration_.conformal, AllOutputs) == joint
    found = band.predict(X[900:], 0.8, groups=groups[900:])
    inside = (found.lower <= y[900:]) & (y[900:] <= found.upper)
    inside = inside.all(dim=1) if joint else inside.double().mean(dim=1)
    for group in (0, 1):
        assert abs(float(inside.double()[groups[900:] == group].mean()) - 0.8) < 0.08


def test_a_network_that_predicts_quantiles_can_be_calibrated_by_groups():
    rng = np.random.default_rng(0)
    X = torch.from_numpy(rng.standard_normal((1100, 1)))
    groups = rng.choice(2, 1100)
    y = X[:, 0] + torch.from_numpy(rng.standard_normal(1100) * (1 + 4 * groups))

    model = nn.Linear(1, 3).double()
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.copy_(torch.tensor([-1.0, 0.0, 1.0]))
    band = PredictionIntervals(model, quantiles=(0.1, 0.5, 0.9)).fit(X[:100], y[:100], progress=False)
    band.calibrate(X[100:600], y[100:600], groups=groups[100:600])
    found = band.predict(X[600:], 0.8, groups=groups[600:])
    inside = (found.lower <= y[600:]) & (y[600:] <= found.upper)
    for group in (0, 1):
        assert abs(float(inside[groups[600:] == group].double().mean()) - 0.8) < 0.08


# --- bad input


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (["a"] * 299, "one label per row: 300 rows"),
        ("night", "one label per row, 300 of them, got str"),
        (7, "one label per row, 300 of them, got int"),
        ([None] + ["a"] * 299, "no label in row 0"),
        (np.append(np.ones(299), np.nan), "no label in row 299"),
        (pd.Series(["a"] * 299 + [pd.NA]), "no label in row 299"),
        (np.ones(300, dtype=complex), "words or numbers, got complex"),
        (np.full(300, np.datetime64("2026-01-01")), "words or numbers"),
        (np.full((300, 2), 0.5), "of 0 and 1, got"),
        (np.full((300, 2), np.nan), "of 0 and 1, got"),
        (np.full((300, 2), "a"), "of 0 and 1, got"),
        (np.ones((299, 2)), "for each of 300 rows"),
        (np.ones((300, 0)), "for each of 300 rows"),
    ],
)
def test_groups_that_are_not_groups_are_refused(groups, message):
    band, (X, y, _), _ = band_and_rows()
    before = band.calibrate(X, y).calibration_
    with pytest.raises((TypeError, ValueError), match=message):
        band.calibrate(X, y, groups=groups)
    assert band.calibration_ is before


def test_groups_in_one_call_and_not_in_the_other_are_refused():
    band, (X, y, groups), (new, _, new_groups) = band_and_rows()
    with pytest.raises(ValueError, match="calibrated with them"):
        band.predict(new, groups=new_groups)
    band.calibrate(X, y)
    with pytest.raises(ValueError, match="knows no groups"):
        band.predict(new, groups=new_groups)
    band.calibrate(X, y, groups=groups)
    with pytest.raises(ValueError, match="by groups: give predict"):
        band.predict(new)
    with pytest.raises(ValueError, match="one label per row: 80 rows"):
        band.predict(new, groups=new_groups[:5])
    with pytest.raises(ValueError, match="not by weights"):
        band.predict(new, groups=new_groups, weights=np.ones(80))
    with pytest.raises(ValueError, match="calibrated with them"):
        band.predict(new, kind="mean", groups=new_groups)
    band.calibrate(X, y, groups=pd.get_dummies(groups))
    with pytest.raises(ValueError, match="a column for each of 3 groups, got 2"):
        band.predict(new, groups=np.ones((80, 2)))
    with pytest.raises(ValueError, match="must have the columns day, holiday, night in this order, got"):
        band.predict(new, groups=pd.get_dummies(new_groups).rename(columns={"day": "evening"}))
    with pytest.raises(ValueError, match="by groups: give predict"):
        band.predict(new)
    with pytest.raises(ValueError, match="unknown='pool' is for a calibration by groups of which each row has one"):
        band.predict(new, groups=pd.get_dummies(new_groups), unknown="pool")
    with pytest.raises(ValueError, match="unknown must be 'error' or 'pool', got 'ignore'"):
        band.predict(new, groups=pd.get_dummies(new_groups), unknown="ignore")


def test_groups_go_with_arrays():
    band, (X, y, groups), (new, new_y, new_groups) = band_and_rows()
    loader = DataLoader(TensorDataset(X, y), batch_size=50)
    with pytest.raises(TypeError, match="groups= goes with arrays"):
        band.calibrate(loader, groups=groups)
    band.calibrate(X, y, groups=groups)
    with pytest.raises(TypeError, match="groups= goes with arrays: give the inputs of all rows as one, not a loader"):
        band.predict(DataLoader(TensorDataset(new, new_y), batch_size=50), groups=new_groups)


def test_no_rows_have_no_intervals_whatever_their_groups():
    band, (X, y, groups), (new, _, _) = band_and_rows()
    assert len(band.calibrate(X, y, groups=groups).predict(new[:0], groups=[])) == 0
    assert len(band.calibrate(X, y, groups=pd.get_dummies(groups)).predict(new[:0], groups=np.ones((0, 3)))) == 0


def test_a_plot_takes_the_groups_that_predict_needs():
    band, (X, y, groups), (new, new_y, new_groups) = band_and_rows()
    axes = band.calibrate(X, y, groups=groups).plot(new, new_y, level=0.9, groups=new_groups)
    assert axes.lines or axes.collections
    plt.close(axes.figure)
