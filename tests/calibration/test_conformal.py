import math

import numpy as np
import pytest
import torch
from crepes import ConformalRegressor
from hypothesis import given, settings
from hypothesis import strategies as st
from mapie.regression import SplitConformalRegressor
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tests.reference as reference
from deltaband import DeltabandWarning, Exact, ImportantDirections, PredictionIntervals, RobustFrequentDirections
from deltaband.calibration import ConformalScale, Scales, rows_needed
from deltaband.data.inputs import Inputs
from deltaband.data.row_record import RowRecord, RowSample, row_hashes
from deltaband.sklearn import BandRegressor
from tests.support.networks import mlp, regression

EIGENVALUES = 10.0 ** np.linspace(2, -4, 30)


def variances(n, rng, scales):
    """q of n rows under each λ of the scales, as rows with random gradients have it."""
    squared_projections = rng.standard_normal((n, len(EIGENVALUES))) ** 2 * EIGENVALUES
    e = EIGENVALUES[:, None]
    return squared_projections @ (e / (e + scales.dampings) ** 2) / 100


def heavy_tailed(n, rng, scales, q):
    return rng.standard_t(2.5, n)


def heteroscedastic(n, rng, scales, q):
    return rng.standard_normal(n) * np.sqrt(1 + 50 * q[:, len(scales.dampings) // 2])


def biased(n, rng, scales, q):
    """A network that is always too low, and the lower the less it knows."""
    return 3 + rng.exponential(size=n) * (1 + q[:, 0])


NOISES = [heavy_tailed, heteroscedastic, biased]


# --- the conformal core


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("level", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("side", ["both", "upper", "lower"])
def test_bounds_are_those_of_full_conformal_prediction_residual_by_residual(noise, level, side):
    rng = np.random.default_rng(0)
    scales = Scales.grid(EIGENVALUES, 100)
    q, new = variances(40, rng, scales), variances(4, rng, scales) * np.array([[1], [10], [0.1], [100]])
    r = noise(40, rng, scales, q)
    lower, upper = ConformalScale.fit(r, q, scales).bounds(new, (level,), side)
    for i in range(len(new)):
        reach = 3 * max(np.abs(r).max(), *np.abs([b for b in (lower[i, 0], upper[i, 0]) if np.isfinite(b)]))
        tried = np.linspace(-reach, reach, 301)
        if side == "lower":
            tried = -tried
        accepted = reference.conformal_residuals(
            r if side != "lower" else -r,
            scales.squared(q),
            scales.prior,
            scales.squared(new[i : i + 1])[0],
            level,
            tried if side != "lower" else -tried,
            signed=side != "both",
        )
        step = 2 * reach / 300
        largest = max(accepted)
        bound = -lower[i, 0] if side == "lower" else upper[i, 0]
        assert largest <= bound + 1e-9
        assert bound <= largest + step + 1e-9
        if side == "both":
            assert lower[i, 0] == -upper[i, 0]
        else:
            assert (lower if side == "upper" else upper)[i, 0] == (-np.inf if side == "upper" else np.inf)


def test_without_a_choice_it_is_plain_split_conformal():
    rng = np.random.default_rng(1)
    scales = Scales.single(0.1)
    q, new, r = variances(99, rng, scales), variances(5, rng, scales), rng.standard_normal(99)
    lower, upper = ConformalScale.fit(r, q, scales).bounds(new, (0.9, 0.95))
    scores = np.sort(np.abs(r) / np.sqrt(1 + q[:, 0]))
    for j, rank in enumerate((90, 95)):
        np.testing.assert_allclose(upper[:, j], scores[rank - 1] * np.sqrt(1 + new[:, 0]))
    np.testing.assert_array_equal(lower, -upper)


@pytest.mark.parametrize(("level", "needed"), [(0.5, 1), (0.9, 9), (0.95, 19), (0.99, 99), (0.8, 4)])
def test_the_rows_a_level_needs_are_enough_and_one_less_is_not(level, needed):
    assert rows_needed(level) == needed
    rng = np.random.default_rng(0)
    scales = Scales.single(1.0)
    for n in (needed, needed - 1):
        conformal = ConformalScale.fit(rng.standard_normal(n), variances(n, rng, scales), scales) if n else None
        if n == needed:
            assert np.isfinite(conformal.bounds(variances(3, rng, scales), (level,))[1]).all()
        elif n:
            with pytest.raises(ValueError, match=f"too few for level {level:g}: it takes at least {needed}"):
                conformal.bounds(variances(3, rng, scales), (level,))


def test_ranks_do_not_suffer_from_floating_point():
    scales = Scales.single(1.0)
    for n in range(19, 400):
        conformal = ConformalScale.fit(np.arange(1.0, n + 1), np.zeros((n, 1)), scales)
        assert conformal.quantile(0.95) == -(-(n + 1) * 95 // 100)


@settings(max_examples=50, deadline=None)
@given(n=st.integers(99, 200), seed=st.integers(0, 10**6), noise=st.sampled_from(NOISES))
def test_bounds_widen_with_the_level_and_hold_the_prediction(n, seed, noise):
    rng = np.random.default_rng(seed)
    scales = Scales.grid(EIGENVALUES, 100)
    q = variances(n, rng, scales)
    conformal = ConformalScale.fit(noise(n, rng, scales, q), q, scales)
    _, upper = conformal.bounds(variances(10, rng, scales) * 5, (0.5, 0.8, 0.99))
    assert (upper >= 0).all()
    assert (np.diff(upper, axis=1) >= 0).all()
    assert np.isfinite(upper).all()


def test_zero_residuals_and_zero_variances_are_no_trouble():
    scales = Scales.grid(EIGENVALUES, 100)
    conformal = ConformalScale.fit(np.zeros(30), np.zeros((30, len(scales.dampings))), scales)
    assert (conformal.bounds(np.zeros((3, len(scales.dampings))), (0.9,))[1] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("tune", [True, False])
@pytest.mark.parametrize("n", [39, 150])
def test_the_guarantee_holds_on_average_over_calibration_sets(noise, tune, n):
    """Mean coverage lies in [level, level + 1/(n+1)], within Monte-Carlo error."""
    rng = np.random.default_rng(5)
    scales = Scales.grid(EIGENVALUES, 100) if tune else Scales.single(0.1)
    levels, draws, new = (0.5, 0.8, 0.95), 1500, 4
    covered = np.zeros((draws, 3))
    for i in range(draws):
        q = variances(n + new, rng, scales)
        r = noise(n + new, rng, scales, q)
        lower, upper = ConformalScale.fit(r[:n], q[:n], scales).bounds(q[n:], levels)
        covered[i] = ((lower <= r[n:, None]) & (r[n:, None] <= upper)).mean(axis=0)
    error = covered.std(axis=0) / np.sqrt(draws)
    excess = covered.mean(axis=0) - levels
    assert (excess > -3 * error).all(), excess
    # the tuned interval is the hull of what is accepted: a little more than 1/(n+1) may be added
    slack = 0.01 if tune else 0.0
    assert (excess < 1 / (n + 1) + slack + 3 * error).all(), excess


# --- on a band


def parts(n_train=120, n_calibration=150, n_new=40):
    X, y = regression(n_train + n_calibration + n_new)
    a, b = n_train, n_train + n_calibration
    return (X[:a], y[:a]), (X[a:b], y[a:b]), (X[b:], y[b:])


@pytest.fixture
def band():
    return PredictionIntervals(mlp(), damping=1.0).fit(*parts()[0], progress=False)


def test_calibrated_intervals_are_those_of_the_conformal_core(band):
    _, calibration, (X, _) = parts()
    band.calibrate(*calibration, tune=False)
    r = (calibration[1] - band.model(calibration[0])[:, 0].detach()).numpy()
    sigma = (1 + band.variance(calibration[0])).sqrt().numpy()
    quantile = np.sort(np.abs(r) / sigma)[math.ceil(151 * 0.9) - 1]
    mean, lower, upper = band.predict(X, level=0.9)
    np.testing.assert_allclose(upper - mean, quantile * (1 + band.variance(X)).sqrt(), rtol=1e-9)
    np.testing.assert_allclose(mean - lower, upper - mean, rtol=1e-9)


@pytest.mark.parametrize("tune", [True, False])
@pytest.mark.parametrize("engine", [Exact(), ImportantDirections(30), RobustFrequentDirections(30)], ids=repr)
def test_every_engine_can_be_calibrated(engine, tune):
    training, calibration, (X, y) = parts(n_new=600)
    band = PredictionIntervals(mlp(), damping=1.0, engine=engine).fit(*training, progress=False)
    band.calibrate(*calibration, tune=tune)
    _, lower, upper = band.predict(X, level=[0.8, 0.95])
    covered = ((lower <= y[:, None]) & (y[:, None] <= upper)).double().mean(dim=0)
    assert torch.allclose(covered, torch.tensor([0.8, 0.95], dtype=torch.float64), atol=0.12)
    assert (upper[:, 1] >= upper[:, 0]).all()


@pytest.mark.parametrize("n_train", [120, 30])  # primal and dual
def test_no_damping_no_problem(n_train):
    training, calibration, (X, _) = parts(n_train)
    with_damping = PredictionIntervals(mlp(), damping=1.0)
    without = PredictionIntervals(mlp())
    with_damping.fit(*training).calibrate(*calibration, noise="none")  # which rows are far depends on λ
    without.fit(*training)
    with pytest.raises(ValueError, match="calibrate"):
        without.predict(X)
    without.calibrate(*calibration, noise="none")
    np.testing.assert_allclose(without.predict(X).lower, with_damping.predict(X).lower, rtol=1e-6)
    with pytest.raises(ValueError, match="tune=False takes λ from the fit"):
        without.calibrate(*calibration, tune=False)


def test_no_degrees_of_freedom_no_problem():
    training, calibration, (X, y) = parts()
    training = training[0][:41], training[1][:41]
    model = mlp()
    with pytest.warns(DeltabandWarning, match="unreliable|not positive"):
        band = PredictionIntervals(model, damping=1e-9).fit(*training)
    band.calibrate(*calibration)
    _, lower, upper = band.predict(X, 0.9)
    assert ((lower <= y) & (y <= upper)).double().mean() > 0.75


def test_loaders_arrays_and_tensors_calibrate_alike(band):
    _, (X, y), (new, _) = parts()
    expected = band.calibrate(X, y).predict(new).upper
    for source in ((X.numpy(), y.numpy()[:, None]), (DataLoader(TensorDataset(X, y), 32),)):
        np.testing.assert_allclose(band.calibrate(*source).predict(new).upper, expected, rtol=1e-9)


def test_one_sided_bounds_leave_the_other_side_open(band):
    _, calibration, (X, _) = parts()
    for calibrated in (False, True):
        if calibrated:
            band.calibrate(*calibration)
        upper, lower = band.predict(X, 0.9, side="upper"), band.predict(X, [0.8, 0.9], side="lower")
        assert (upper.lower == -torch.inf).all()
        assert (lower.upper == torch.inf).all()
        assert lower.lower.shape == (40, 2)
        assert (lower.lower[:, 1] <= lower.lower[:, 0]).all()
        assert (lower.lower[:, 1] <= upper.upper).all()
    formula = PredictionIntervals(mlp(), damping=1.0).fit(*parts()[0])
    np.testing.assert_allclose(formula.predict(X, 0.9, side="upper").upper, formula.predict(X, 0.8).upper, rtol=1e-9)
    with pytest.raises(ValueError, match="side must be"):
        band.predict(X, side="left")


def test_the_band_of_the_mean_stays_that_of_the_formula(band):
    _, calibration, (X, _) = parts()
    before = band.predict(X, kind="mean").width
    assert torch.equal(band.calibrate(*calibration).predict(X, kind="mean").width, before)


def test_a_new_fit_forgets_the_calibration(band):
    training, calibration, (X, _) = parts()
    before = band.predict(X).width
    band.calibrate(*calibration).fit(*training, progress=False)
    assert torch.equal(band.predict(X).width, before)


def test_a_failing_calibration_leaves_the_earlier_state(band):
    _, (X, y), (new, _) = parts()
    formula = band.predict(new).width
    bad = X.clone()
    bad[3, 0] = torch.nan
    for source, message in (((bad, y), "row 3"), ((X[:0], y[:0]), "empty"), ((X, y[:5]), "same number of rows")):
        with pytest.raises(ValueError, match=message):
            band.calibrate(*source)
        assert torch.equal(band.predict(new).width, formula)
    calibrated = band.calibrate(X, y).predict(new).width
    with pytest.raises(ValueError, match="row 53"):
        band.calibrate([(X[:50], y[:50]), (bad, y)])
    assert torch.equal(band.predict(new).width, calibrated)
    with pytest.raises(ValueError, match="call fit"):
        PredictionIntervals(mlp()).calibrate(X, y)


def test_too_few_rows_for_a_level_is_an_error_that_names_the_rows_needed(band):
    _, (X, y), (new, _) = parts()
    band.calibrate(X[:30], y[:30])
    band.predict(new, 0.95)
    with pytest.raises(ValueError, match=r"30 calibration rows are too few for level 0\.99: it takes at least 99"):
        band.predict(new, 0.99)


def test_summary_explains_the_calibration(band):
    text = band.calibrate(*parts()[1]).summary()
    for part in (
        "calibrated on         150 rows",
        "damping λ           1 → ",
        "b = ",
        "Gaussian 1.96",
        "95 % widths",
        "of them on average",
        "interval score",
        "p = ",
    ):
        assert part in text, part
    assert len(text.splitlines()) < 25


def test_calibrating_on_training_rows_is_warned_about():
    X, y = regression(200)
    torch.manual_seed(0)
    model = mlp(hidden=40)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(300):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(X[:150])[:, 0], y[:150]).backward()
        optimiser.step()
    band = PredictionIntervals(model, damping=1.0).fit(X[:150], y[:150])
    with pytest.warns(DeltabandWarning, match="were training rows"):
        band.calibrate(X[:100], y[:100])


@pytest.mark.parametrize("n_train", [400, 30])
def test_rows_unlike_the_training_rows_are_warned_about_and_like_ones_are_not(n_train):
    X, y = regression(n_train + 300)
    band = PredictionIntervals(mlp(), damping=0.01).fit(X[:n_train], y[:n_train]) if n_train > 41 else None
    if band is None:
        with pytest.warns(DeltabandWarning):
            band = PredictionIntervals(mlp(), damping=0.01).fit(X[:n_train], y[:n_train])
    band.calibrate(X[n_train:], y[n_train:])  # a warning would be an error
    with pytest.warns(DeltabandWarning, match="do not look like the training rows|far outside of the training rows"):
        band.calibrate(X[n_train:] * 3 + 2, y[n_train:])


# --- packages that nobody here wrote


@pytest.mark.parametrize("level", [0.95, 0.99])
def test_crepes_gives_the_same_intervals_from_our_scale(band, level):
    _, (X, y), (new, _) = parts(n_calibration=250)
    band.calibrate(X, y, tune=False)
    _, sigma_cal = band.predict_mean_and_scale(X)
    mean, sigma = band.predict_mean_and_scale(new)
    crepes = ConformalRegressor().fit((y - band.predict_mean_and_scale(X)[0]).numpy(), sigmas=sigma_cal.numpy())
    theirs = crepes.predict_int(mean.numpy(), sigmas=sigma.numpy(), confidence=level)
    ours = band.predict(new, level)
    np.testing.assert_allclose(theirs[:, 0], ours.lower, rtol=1e-6)
    np.testing.assert_allclose(theirs[:, 1], ours.upper, rtol=1e-6)


def test_crepes_is_one_rank_off_where_floating_point_is(band):
    """(n+1)(1−level) is whole in exact arithmetic and a little less in floating point; int() makes that a rank."""
    _, (X, y), (new, _) = parts()
    ranks = {n: (-(-(n + 1) * 9 // 10), (n + 1) - int((1 - 0.9) * (n + 1))) for n in range(19, 150)}
    off = [n for n, (ours, theirs) in ranks.items() if theirs != ours]
    assert off
    assert all((n + 1) % 10 == 0 and ranks[n][1] == ranks[n][0] + 1 for n in off)
    n = off[0]
    band.calibrate(X[:n], y[:n], tune=False)
    mean_cal, sigma_cal = (part.numpy() for part in band.predict_mean_and_scale(X[:n]))
    mean, sigma = (part.numpy() for part in band.predict_mean_and_scale(new))
    theirs = ConformalRegressor().fit(y[:n].numpy() - mean_cal, sigmas=sigma_cal).predict_int(mean, sigma, None, 0.9)
    scores = np.sort(np.abs(y[:n].numpy() - mean_cal) / sigma_cal)
    np.testing.assert_allclose(band.predict(new, 0.9).upper, mean + scores[ranks[n][0] - 1] * sigma, rtol=1e-6)
    np.testing.assert_allclose(theirs[:, 1], mean + scores[ranks[n][1] - 1] * sigma, rtol=1e-6)


def test_mapie_takes_a_band_as_a_regressor_with_a_standard_deviation(band):
    _, (X, y), (new, _) = parts(n_calibration=250)
    regressor = BandRegressor(band).fit(X.numpy())
    np.testing.assert_allclose(
        regressor.predict(X.numpy()), regressor.predict(X.numpy(), return_std=True)[0], rtol=1e-6
    )
    mapie = SplitConformalRegressor(regressor, confidence_level=0.9, conformity_score="std_normalized", prefit=True)
    mean, bounds = mapie.conformalize(X.numpy(), y.numpy()).predict_interval(new.numpy())
    ours = band.calibrate(X, y, tune=False).predict(new, 0.9)
    np.testing.assert_allclose(mean, ours.mean, rtol=1e-6)
    np.testing.assert_allclose(bounds[:, 1, 0], ours.upper, rtol=1e-6)
    # MAPIE takes its lower bound one rank nearer
    mean_cal, sigma_cal = (part.numpy() for part in band.predict_mean_and_scale(X))
    scores = np.sort(np.abs(y.numpy() - mean_cal) / sigma_cal)
    sigma = band.predict_mean_and_scale(new)[1].numpy()
    np.testing.assert_allclose(bounds[:, 0, 0], mean - scores[math.ceil(251 * 0.9) - 2] * sigma, rtol=1e-6)


# --- what is remembered of training rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8])
def test_equal_rows_have_equal_hashes_however_they_are_batched(dtype):
    x = (torch.randn(200, 5, 3) * 50).to(dtype)
    whole = row_hashes(x)
    np.testing.assert_array_equal(np.concatenate([row_hashes(x[:7]), row_hashes(x[7:])]), whole)
    np.testing.assert_array_equal(row_hashes(x.flip(0)), whole[::-1])
    assert len(np.unique(whole)) == 200


def test_a_sample_of_the_training_rows_is_uniform_and_bounded():
    record = RowRecord(RowSample(512))
    for i in range(0, 20_000, 100):
        record.update(Inputs.of(torch.arange(i, i + 100, dtype=torch.float64)[:, None]), torch.zeros(100, 1))
    sample = record.sample.rows().pieces[0].tensors[0]
    assert len(sample) == 512
    assert abs(sample.mean() - 10_000) < 4 * 20_000 / math.sqrt(12 * 512)
    assert len(record.seen().hashes) == 20_000
