"""Intervals for rows whose inputs are distributed otherwise than those of the calibration rows."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tests.reference as reference
from deltaband import DeltabandWarning, PredictionIntervals
from deltaband.calibration import ConformalScale, Scales
from deltaband.calibration.quantiles import AllRows
from deltaband.calibration.shift import Weighted
from tests.calibration.test_groups import SCALES, check_by_residuals, drawn
from tests.support.networks import mlp, regression


def ratio(x):
    return torch.exp(x[:, 0])


def band_and_rows(n=400, n_new=100):
    X, y = regression(100 + n + n_new)
    band = PredictionIntervals(mlp(), damping=0.1).fit(X[:100], y[:100], progress=False)
    return band, X[100 : 100 + n], y[100 : 100 + n], X[100 + n :]


# --- the guarantee


@pytest.mark.parametrize("side", ["both", "upper", "lower"])
@pytest.mark.parametrize("level", [0.5, 0.8])
def test_weighted_bounds_are_those_of_full_conformal_prediction_residual_by_residual(side, level):
    rng = np.random.default_rng(0)
    q, _, r = drawn(44, rng)
    w = rng.gamma(1.0, size=44)
    rule = Weighted(w[:40], None)
    lower, upper = ConformalScale.fit(r[:40], q[:40], SCALES, rule).bounds(q[40:], (level,), side, w[40:, None])
    for i in range(4):
        accepts = partial(reference.accepted_by_weight, np.append(w[:40], w[40 + i]))
        check_by_residuals(r[:40], q[:40], q[40 + i : 41 + i], level, side, accepts, (lower[i, 0], upper[i, 0]))


@pytest.mark.slow
@pytest.mark.parametrize("tune", [True, False])
def test_with_the_true_ratio_shifted_rows_are_covered_at_the_level(tune):
    """Inputs are chosen with a probability proportional to w; y given x is the same, and noisier where w is large."""
    rng, levels, n = np.random.default_rng(1), (0.5, 0.8), 120
    scales = SCALES if tune else Scales.single(0.1)
    covered, plain = [], []
    for _ in range(3000 if tune else 4000):
        z = rng.uniform(0, 1, n + 1)
        while rng.uniform() > z[-1] ** 3:  # of the new row, whose density is proportional to z³
            z[-1] = rng.uniform()
        q, _, r = drawn(n + 1, rng)
        q, r, w = q[:, : len(scales.dampings)], r * (0.1 + z**4), z**3
        conformal = ConformalScale.fit(r[:n], q[:n], scales, Weighted(w[:n], None))
        _, upper = conformal.bounds(q[n:], levels, "both", w[n:, None])
        covered.append(np.abs(r[n]) <= upper[0])
        _, upper = ConformalScale.fit(r[:n], q[:n], scales).bounds(q[n:], levels)
        plain.append(np.abs(r[n]) <= upper[0])
    error = 4 * np.sqrt(0.25 / len(covered))
    assert (np.mean(covered, axis=0) >= np.array(levels) - error).all()
    assert (np.mean(covered, axis=0) <= np.array(levels) + error + 0.05).all()
    assert (np.mean(plain, axis=0) < np.array(levels) - 0.1).all()


def test_equal_weights_are_no_weights():
    rng = np.random.default_rng(2)
    for n in (19, 39, 99, 150):
        scores, place = rng.standard_normal(n), np.ones((1, 1))
        levels = (*tuple(k / (n + 1) for k in range(1, n + 1)), 0.5, 0.8, 0.95)
        for weight in (1.0, 1e-30, 1 / 3, 1e30):
            rule = Weighted(np.full(n, weight), None)
            found = rule.quantiles(rule.arrange(scores), weight * place, levels)
            expected = AllRows().quantiles(np.sort(scores), place, levels)
            np.testing.assert_array_equal(found, expected)
    band, X, y, new = band_and_rows()
    plain = band.calibrate(X, y).predict(new, (0.5, 0.95))
    found = band.calibrate(X, y, weights=np.full(400, 7.0)).predict(new, (0.5, 0.95), weights=np.full(100, 7.0))
    assert torch.equal(found.upper, plain.upper)


def test_a_weight_that_is_too_large_for_the_level_leads_to_an_infinite_interval():
    rule = Weighted(np.ones(99), None)
    place, scores = np.array([[1.0], [5.2], [5.3], [1e6]]), np.arange(99.0)
    found = rule.quantiles(rule.arrange(scores), place, (0.95,))
    # 0.95·(99 + w) ≤ 99 up to w = 5.21
    assert found[:, 0].tolist() == [94.0, 98.0, math.inf, math.inf]


# --- what users see


def test_a_function_and_its_values_give_the_same():
    band, X, y, new = band_and_rows()
    by_function = band.calibrate(X, y, weights=ratio).predict(new, 0.9)
    by_values = band.calibrate(X, y, weights=ratio(X)).predict(new, 0.9, weights=ratio(new))
    assert torch.equal(by_function.upper, by_values.upper)
    assert not torch.equal(by_function.upper, band.calibrate(X, y).predict(new, 0.9).upper)


@pytest.mark.slow
def test_target_rows_mend_the_coverage_of_shifted_rows():
    """The noise grows along the first input, and so does the density of the rows to be predicted."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(9000, 3, generator=generator, dtype=torch.float64)
    y = X.sum(dim=1).sin() + torch.exp(X[:, 0]) * torch.randn(9000, generator=generator, dtype=torch.float64)
    band = PredictionIntervals(mlp(), damping=1.0).fit(X[:500], y[:500], progress=False)
    shifted = torch.rand(9000, generator=generator) < torch.sigmoid(2 * X[:, 0] - 2)
    rows, shifted_y = X[3000:][shifted[3000:]], y[3000:][shifted[3000:]]

    def missed(intervals):
        return 1 - float(((intervals.lower <= shifted_y) & (shifted_y <= intervals.upper)).double().mean())

    plain = missed(band.calibrate(X[500:3000], y[500:3000], noise="none").predict(rows, 0.9))
    mended = missed(band.calibrate(X[500:3000], y[500:3000], noise="none", target=rows[:500]).predict(rows, 0.9))
    assert plain > 0.2
    assert abs(mended - 0.1) < 0.04


def test_rows_that_are_not_shifted_have_nearly_equal_weights():
    band, X, y, new = band_and_rows(400, 400)
    band.calibrate(X, y, target=new)
    assert band.calibration_.rule.effective_rows > 300
    assert f"{band.calibration_.rule.effective_rows:.1f} of 400" in band.summary()
    assert "stand for 400 target rows" in band.summary()


def test_rows_beyond_the_calibration_rows_get_infinite_intervals_and_that_is_said():
    band, X, y, new = band_and_rows()
    with pytest.warns(DeltabandWarning, match=r"effective sample size of \d+\.\d of 400 rows"):
        band.calibrate(X, y, target=new + 4)
    assert "infinite intervals at 95 %" in band.summary()
    with pytest.warns(DeltabandWarning, match="of 100 rows have infinite intervals: calibration rows like them"):
        found = band.predict(new + 4, 0.95)
    assert torch.isinf(found.upper).any()


def test_a_ratio_that_was_estimated_is_saved_and_loaded_bit_for_bit(tmp_path):
    band, X, y, new = band_and_rows()
    band.calibrate(X, y, target=new + 0.3).save(tmp_path / "x.band")
    loaded = PredictionIntervals.load(tmp_path / "x.band", band.model)
    for before, after in zip(*(each.predict(new, 0.9) for each in (band, loaded)), strict=True):
        assert torch.equal(before, after)
    assert loaded.summary() == band.summary()


def test_weights_that_were_given_are_saved_and_functions_are_not(tmp_path):
    band, X, y, new = band_and_rows()
    band.calibrate(X, y, weights=ratio(X)).save(tmp_path / "x.band")
    loaded = PredictionIntervals.load(tmp_path / "x.band", band.model)
    assert torch.equal(loaded.predict(new, weights=ratio(new)).upper, band.predict(new, weights=ratio(new)).upper)
    with pytest.raises(TypeError, match="weights=ratio is a function or regressor of your own, which no file holds"):
        band.calibrate(X, y, weights=ratio).save(tmp_path / "y.band")
    assert not (tmp_path / "y.band").exists()


def test_several_outputs_share_the_weights():
    X, _ = regression(500)
    y = torch.stack([X.sum(dim=1), X[:, 0]], dim=1)
    model = torch.nn.Linear(3, 2).double()
    for joint in (True, False):
        band = PredictionIntervals(model, damping=1.0).fit(X[:100], y[:100], progress=False)
        found = band.calibrate(X[100:400], y[100:400], joint=joint, target=X[400:] + 0.2).predict(X[400:], 0.9)
        assert found.upper.shape == (100, 2)
        assert band.calibration_.rule.effective_rows > 100


def test_rows_of_weight_zero_are_left_out_with_their_ratios():
    band, X, y, new = band_and_rows()
    kept = np.arange(400) % 2 > 0
    band.calibrate(X[kept], y[kept], weights=ratio(X[kept]), sample_weight=np.ones(200))
    expected = band.predict(new, weights=ratio(new))
    band.calibrate(X, y, weights=ratio(X), sample_weight=kept.astype(float))
    assert torch.equal(band.predict(new, weights=ratio(new)).upper, expected.upper)


def test_rows_that_are_left_with_no_weight_at_all_promise_nothing():
    band, X, y, new = band_and_rows()
    kept = np.arange(400) % 2 > 0
    with pytest.warns(DeltabandWarning, match="effective sample size of 0.0 of 200 rows"):
        band.calibrate(X, y, weights=(~kept).astype(float), sample_weight=kept.astype(float))
    with pytest.warns(DeltabandWarning, match="100 of 100 rows have infinite intervals"):
        assert torch.isinf(band.predict(new, weights=np.ones(100)).upper).all()


# --- bad input


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.zeros(400), "all weights are zero"),
        (np.append(np.ones(399), np.inf), "it is inf in row 399"),
        (np.append(np.ones(399), np.nan), "it is nan in row 399"),
        (np.append(np.ones(399), -1.0), "it is -1 in row 399"),
        (np.ones(399), "one number per row: 400 rows"),
        (np.ones((400, 2)), "one number per row: 400 rows"),
        ("target", "weights must be a tensor or a NumPy array"),
        (lambda x: x[:, 0] * torch.inf, "in row 0"),
        (lambda x: x, "one number per row: 400 rows"),
        (lambda x: 0 * x[:, 0], "all weights are zero"),
    ],
)
def test_weights_that_are_no_ratios_are_refused(weights, message):
    band, X, y, _ = band_and_rows()
    with pytest.raises((TypeError, ValueError), match=message):
        band.calibrate(X, y, weights=weights)
    assert band.calibration_ is None


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (torch.ones(50, 2), "rows like the calibration rows"),
        (torch.ones(50, 3, 1), "rows like the calibration rows"),
        ({"x": torch.ones(50, 3)}, "rows like the calibration rows"),
        (torch.ones(5, 3), "5 target rows and 400 calibration rows are too few"),
        (torch.full((50, 3), torch.nan), "target rows hold NaN in row 0"),
        ("all", "target must be inputs as `predict` takes them: inputs must be a tensor or a NumPy array, got str"),
        ([[1.0, 2.0]], "target must be inputs"),
    ],
)
def test_target_rows_of_another_kind_are_refused(target, message):
    band, X, y, _ = band_and_rows()
    with pytest.raises((TypeError, ValueError), match=message):
        band.calibrate(X, y, target=target)


def test_weights_in_one_call_and_not_in_the_other_are_refused():
    band, X, y, new = band_and_rows()
    band.calibrate(X, y)
    with pytest.raises(ValueError, match="calibration rows had no weights"):
        band.predict(new, weights=ratio(new))
    band.calibrate(X, y, weights=ratio(X))
    with pytest.raises(ValueError, match="had weights: give predict"):
        band.predict(new)
    with pytest.raises(ValueError, match="one number per row: 100 rows"):
        band.predict(new, weights=ratio(X))
    with pytest.raises(ValueError, match="in row 0"):
        band.predict(new, weights=np.full(100, np.inf))
    with pytest.raises(ValueError, match="not by groups"):
        band.predict(new, weights=ratio(new), groups=["a"] * 100)
    for asked in ({"weights": ratio}, {"target": new}):
        band.calibrate(X, y, **asked)
        with pytest.raises(ValueError, match="follow from their inputs"):
            band.predict(new, weights=ratio(new))


def test_promises_of_several_kinds_at_once_are_refused():
    band, X, y, new = band_and_rows()
    with pytest.raises(ValueError, match="give one of them"):
        band.calibrate(X, y, weights=ratio, target=new)
    with pytest.raises(ValueError, match="groups= and target= are different promises"):
        band.calibrate(X, y, groups=["a"] * 400, target=new)
    for asked in ({"weights": ratio}, {"target": new}):
        with pytest.raises(TypeError, match="goes with arrays"):
            band.calibrate(DataLoader(TensorDataset(X, y), batch_size=50), **asked)
