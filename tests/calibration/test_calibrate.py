"""Calibration where numbers, rows or calls are unusual."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from deltaband import DeltabandWarning, Exact, FrequentDirections, PredictionIntervals, RobustFrequentDirections
from deltaband.calibration import ConformalScale, Scales, drift_p_value, rows_needed
from deltaband.data.inputs import Inputs
from deltaband.data.row_record import RowRecord, RowSample
from deltaband.metrics import coverage
from deltaband.sklearn import BandRegressor
from tests.support.networks import mlp, regression


class Constant(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))

    def forward(self, x):
        return self.value + 0 * x[:, 0]


class Times(nn.Module):
    def __init__(self, model, factor):
        super().__init__()
        self.model, self.factor = model, factor

    def forward(self, x):
        return self.model(x) * self.factor


def trained(X, y, hidden=40, steps=300):
    torch.manual_seed(0)
    model = mlp(X.shape[1], hidden=hidden)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(X)[:, 0], y).backward()
        optimiser.step()
    return model


# --- numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("side", ["both", "upper", "lower"])
@pytest.mark.parametrize("case", ["ties", "noise below the precision of the outputs"])
def test_rounding_a_bound_never_costs_coverage(dtype, side, case):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4000, 1))
    value, y = (0.43, rng.choice([0.1, 0.3, 0.7], 4000)) if case == "ties" else (1e8, 1e8 + rng.standard_normal(4000))
    band = PredictionIntervals(Constant(value).to(dtype)).fit(x[:1000], y[:1000])
    intervals = band.calibrate(x[1000:2000], y[1000:2000]).predict(x[2000:], level=0.9, side=side)
    assert coverage(y[2000:], intervals) > 0.9 - 4 * np.sqrt(0.9 * 0.1 * (1 / 1000 + 1 / 2000))


@pytest.mark.parametrize("factor", [1e-150, 1e-100, 1e-30, 1e30, 1e100, 1e150])
def test_intervals_scale_with_the_targets(factor):
    X, y = regression(260)
    model = mlp()

    def width(factor):
        band = PredictionIntervals(Times(model, factor)).fit(X[:100], y[:100] * factor)
        return band.calibrate(X[100:250], y[100:250] * factor).predict(X[250:]).width

    np.testing.assert_allclose(width(factor) / factor, width(1.0), rtol=1e-6)


def test_a_network_without_errors_can_be_calibrated_and_described():
    X, y = regression(200)
    band = PredictionIntervals(mlp()).fit(X[:100], y[:100])
    band.calibrate(X[100:], band.predict_mean(X[100:]))
    assert "95 % quantile" in band.summary()
    assert band.predict(X[:5]).width.max() < 1e-12


@pytest.mark.parametrize("engine", [RobustFrequentDirections(1), FrequentDirections(1)], ids=repr)
def test_a_sketch_that_holds_nothing_leaves_the_constant_width(engine):
    X, y = regression(400)
    band = PredictionIntervals(mlp(), engine=engine).fit(X[:200], y[:200])
    width = band.calibrate(X[200:], y[200:], noise="none").predict(X[:5]).width
    np.testing.assert_allclose(width, width[0].item(), rtol=1e-12)
    assert width[0] > 0


@pytest.mark.parametrize("level", [0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999])
def test_the_rows_a_high_level_needs_are_counted_exactly(level):
    assert rows_needed(level) == round(level / (1 - level))


# --- rows


def test_training_rows_among_the_calibration_rows_are_recognised_also_by_a_sketch():
    X, y = regression(400)
    band = PredictionIntervals(trained(X[:100], y[:100]), engine=RobustFrequentDirections(50)).fit(X[:100], y[:100])
    for share in (10, 50, 100):  # of 100
        mixed = torch.cat([torch.arange(share), torch.arange(200, 300 - share)])
        with pytest.warns(DeltabandWarning, match=f"{share}% of the calibration rows were training rows"):
            band.calibrate(X[mixed], y[mixed])


def test_targets_of_another_precision_are_recognised():
    X, y = regression(100)
    band = PredictionIntervals(mlp()).fit(X, y)
    with pytest.warns(DeltabandWarning, match="100% of the calibration rows"):
        band.calibrate(X, y.float())


def test_new_measurements_at_the_same_inputs_are_not_training_rows():
    X, y = regression(100)
    band = PredictionIntervals(mlp()).fit(X, y)
    band.calibrate(X, y + 0.01 * torch.randn(100, dtype=y.dtype))
    assert band._calibration.seen_share == 0
    assert band._calibration.warnings() == []


def test_rows_that_are_repeated_by_chance_are_no_training_rows():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 3, (600, 2)).astype(float), rng.integers(0, 2, 600).astype(float)
    model = trained(torch.from_numpy(x), torch.from_numpy(y))
    band = PredictionIntervals(model).fit(x[:300], y[:300])
    band.calibrate(x[300:], y[300:])
    assert band._calibration.seen_share > 0.9
    assert band._calibration.warnings() == []


def test_the_share_of_repeated_rows_is_counted():
    record = RowRecord(RowSample(512))
    record.update(Inputs.of(torch.tensor([[1.0], [2.0], [1.0]])), torch.zeros(3, 1))
    record.update(Inputs.of(torch.tensor([[2.0], [3.0]])), torch.tensor([[5.0], [0.0]]))
    seen = record.seen()
    assert seen.repeated == pytest.approx(2 / 5)
    assert len(seen.hashes) == 5


@pytest.mark.parametrize("seed", range(10))
def test_categories_are_no_drift(seed):
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, 5, 260)
    X = torch.eye(5, dtype=torch.float64)[kind]
    y = torch.from_numpy(0.3 * kind + 0.3 * rng.standard_normal(260))
    band = PredictionIntervals(trained(X[:60], y[:60], hidden=10, steps=100), engine=Exact()).fit(X[:60], y[:60])
    band.calibrate(X[60:], y[60:])
    assert band._calibration.drift_p_value > 1e-3
    assert band._calibration.warnings() == []


def test_the_drift_test_keeps_its_level_and_finds_what_is_larger_or_smaller():
    rng = np.random.default_rng(0)
    p_values = np.array([drift_p_value(rng.beta(1, 20, 200), rng.beta(1, 20, 150)) for _ in range(400)])
    assert (p_values < 0.05).mean() <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 400)
    training = rng.beta(1, 20, 200)
    assert drift_p_value(training, 3 * rng.beta(1, 20, 150)) < 1e-3
    assert drift_p_value(training, rng.beta(1, 20, 150) / 3) < 1e-3
    assert np.isnan(drift_p_value(np.zeros(0), training))


# --- calls


@pytest.fixture
def band():
    X, y = regression(100)
    return PredictionIntervals(mlp(), damping=1.0).fit(X, y)


def rows(n=50, seed=7):
    return regression(n, seed=seed)


def test_no_rows_have_no_scale(band):
    X, y = rows()
    for fitted in (band, band.calibrate(X, y)):
        mean, scale = fitted.predict_mean_and_scale(X[:0])
        assert len(mean) == len(scale) == len(fitted.predict_mean(X[:0])) == 0


def test_the_prediction_alone_is_that_of_the_intervals_and_is_checked_like_them(band):
    X, _ = rows()
    assert torch.equal(band.predict_mean(X), band.predict(X).mean)
    for bad, message in ((X[:, :2], "could not be evaluated"), (X * torch.nan, "NaN"), (X.int(), "float")):
        for predict in (band.predict_mean, lambda x: BandRegressor(band).predict(x.numpy())):
            with pytest.raises(ValueError, match=message):
                predict(bad)
    with pytest.raises(ValueError, match="not fitted"):
        PredictionIntervals(mlp()).predict_mean(X)


def test_calibrating_other_weights_than_were_fitted_is_refused(band):
    with torch.no_grad():
        next(band.model.parameters()).add_(1.0)
    with pytest.raises(ValueError, match="weights have changed since fit"):
        band.calibrate(*rows())


def test_a_warning_that_is_an_error_leaves_the_earlier_state(band):
    X, y = regression(100)
    before = band.predict(X).width
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DeltabandWarning):
            band.calibrate(X, y)
    assert torch.equal(band.predict(X).width, before)


@pytest.mark.parametrize("seed", [-1, 1.5, "a", None, True])
def test_a_seed_that_is_none_is_refused_before_any_work(band, seed):
    with pytest.raises(ValueError, match="seed must be"):
        band.calibrate(*rows(), seed=seed)


def test_a_list_of_sides_is_refused(band):
    with pytest.raises(ValueError, match="side must be"):
        band.predict(rows()[0], side=np.array(["upper", "lower"]))


# --- the λ that is chosen


@pytest.mark.parametrize("engine", [Exact(), RobustFrequentDirections(20)], ids=repr)
def test_without_damping_the_chosen_one_is_used_wherever_a_band_is_asked_about_rows(engine, tmp_path):
    X, y = regression(100)
    band = PredictionIntervals(trained(X, y, hidden=8), engine=engine).fit(X, y).calibrate(*rows())
    damping = band.calibration_.conformal.outputs[0].damping
    assert f"chosen: {damping:.4g}, also for variance, leverage and kind='mean'" in band.summary()
    known = PredictionIntervals(band.model, damping=damping, engine=engine).fit(X, y)
    band.save(tmp_path / "a.band")
    for each in (band, PredictionIntervals.load(tmp_path / "a.band", band.model)):
        torch.testing.assert_close(each.variance(X), known.variance(X), rtol=1e-5, atol=0)
        torch.testing.assert_close(each.leverage(X), known.leverage(X), rtol=1e-5, atol=0)
        for mine, theirs in zip(each.predict(X, kind="mean"), known.predict(X, kind="mean"), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-8)
    assert band.damping_ is None
    with pytest.raises(ValueError, match="replaces it in predictions alone"):
        band.spectrum()


@pytest.mark.parametrize("per_output", [False, True])
def test_each_output_has_the_damping_that_was_chosen_for_it(per_output):
    X, y = regression(300)
    torch.manual_seed(1)
    Y = torch.stack([y, 20 * X[:, 0] ** 3 + torch.randn(300, dtype=torch.float64)], dim=1)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    band = PredictionIntervals(model, per_output=per_output).fit(X[:100], Y[:100]).calibrate(X[100:], Y[100:])
    dampings = [output.damping for output in band.calibration_.conformal.outputs]
    assert dampings[0] != dampings[1]
    for o, damping in enumerate(dampings):
        known = PredictionIntervals(model, damping=damping, per_output=per_output).fit(X[:100], Y[:100])
        torch.testing.assert_close(band.variance(X)[:, o], known.variance(X)[:, o], rtol=1e-6, atol=0)
        torch.testing.assert_close(band.leverage(X)[:, o], known.leverage(X)[:, o], rtol=1e-6, atol=0)
        mine, theirs = (each.predict(X, kind="mean").width[:, o] for each in (band, known))
        # outputs that share one JᵀJ share p* as they do under a typical λ
        torch.testing.assert_close(mine, theirs, rtol=1e-6 if per_output else 0.1, atol=0)


def test_where_the_constant_width_is_best_the_damping_is_that_of_the_best_other_scale():
    rng = np.random.default_rng(0)
    q, residuals = rng.uniform(0.1, 10, (400, 1)) * np.array([[1.0, 2.0, 3.0]]), rng.standard_normal(400)
    scales = Scales(np.array([1.0, 2.0, 3.0]), np.array([0, 1, 2, 0]), np.array([5.0, 0.01, 5.0, 0.0]), np.zeros(4))
    found = ConformalScale.fit(residuals, q, scales)
    assert (found.b, found.damping) == (0.0, 2.0)
    assert found.own_share(q) == 0.0
    alone = ConformalScale.fit(residuals, q[:, :1], Scales.single(7.0, b=0.0))
    assert alone.damping == 7.0


# --- what is said


def test_summary_leaves_out_what_is_not_known():
    X, y = regression(100)
    text = PredictionIntervals(mlp(), engine=RobustFrequentDirections(20)).fit(X, y).calibrate(*rows(10)).summary()
    assert "nan" not in text
    assert "levels up to 0.90909" in text
    assert "predict needs" not in text
