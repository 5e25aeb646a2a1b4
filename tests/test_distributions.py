"""Quantiles, distributions and their scores, against predict, SciPy and numerical integration."""

import warnings

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn

from deltaband import PredictionIntervals, metrics
from deltaband.distributions import Steps, StudentT
from tests.support.networks import regression, trained, trained_mlp

pytestmark = pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
X, Y = regression(80)
X_CAL, Y_CAL = regression(59, seed=4)
NEW, Y_NEW = regression(6, seed=5)
DAMPING = 0.5
LEVELS = [0.1, 0.5, 0.8, 0.9]


class Log:
    """Of targets that were trained on as log y."""

    def transform(self, y):
        return np.log(y)

    def inverse_transform(self, z):
        return np.exp(z)


class Falling(Log):
    def transform(self, y):
        return -np.log(y)

    def inverse_transform(self, z):
        return np.exp(-z)


def made(model=None, **options):
    return PredictionIntervals(model or trained_mlp(), damping=DAMPING, **options).fit(X, Y, progress=False)


@pytest.fixture(scope="module")
def formula():
    return made()


@pytest.fixture(scope="module")
def calibrated():
    return made().calibrate(X_CAL, Y_CAL)


def two_outputs():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    Y2 = torch.stack([Y, X[:, 0] - Y / 2], dim=1)
    return PredictionIntervals(trained(model, X, Y2), damping=DAMPING).fit(X, Y2, progress=False)


def numeric_crps(distribution, row, y):
    """∫ (F(z) − 1{y ≤ z})² dz."""

    def integrand(z):
        F = distribution.cdf(np.full(len(distribution), z))[row]
        return (F - (y <= z)) ** 2

    low, high = distribution.mean[row] - 60, distribution.mean[row] + 60
    return integrate.quad(integrand, low, y, limit=400)[0] + integrate.quad(integrand, y, high, limit=400)[0]


# --- the formula


def test_by_the_formula_it_is_students_distribution(formula):
    found = formula.predict_distribution(NEW)
    assert isinstance(found, StudentT)
    freedom = formula.n_rows_ - formula.effective_parameters_
    scale = formula.noise_std_ * np.sqrt(1 + formula.variance(NEW).numpy())
    t = stats.t(freedom, formula.predict_mean(NEW).numpy(), scale)
    np.testing.assert_allclose(found.quantile(0.9), t.ppf(0.9), rtol=1e-9)
    np.testing.assert_allclose(found.cdf(Y_NEW), t.cdf(Y_NEW), rtol=1e-9)
    np.testing.assert_allclose(formula.cdf(NEW, Y_NEW), t.cdf(Y_NEW), rtol=1e-9)
    np.testing.assert_allclose(formula.quantile(NEW, [0.05, 0.5]), np.stack([t.ppf(0.05), t.ppf(0.5)], 1), rtol=1e-9)


@pytest.mark.parametrize("y", [-3.0, 0.1, 8.0])
def test_its_crps_is_the_integral(formula, y):
    found = formula.predict_distribution(NEW)
    assert found.crps(np.full(6, y))[2] == pytest.approx(numeric_crps(found, 2, y), rel=1e-5)


@pytest.mark.parametrize("freedom", [1.5, 7.3, 1e7])
def test_the_crps_of_a_standard_t(freedom):
    found = StudentT(np.zeros(2), np.ones(2), np.array([freedom]))
    z = np.linspace(-2000, 2000, 4_000_001)
    expected = np.trapezoid((stats.t.cdf(z, freedom) - (z >= 0.7)) ** 2, z)
    assert found.crps(np.array([0.7, 0.7]))[0] == pytest.approx(expected, rel=0.02 if freedom < 2 else 1e-3)


def test_a_t_of_few_degrees_has_no_crps_and_one_without_spread_is_a_point():
    assert np.isinf(StudentT(np.zeros(1), np.ones(1), np.array([0.8])).crps(np.zeros(1))).all()
    point = StudentT(np.zeros(2), np.zeros(2), np.array([9.0]))
    np.testing.assert_array_equal(point.crps(np.array([0.0, 2.0])), [0, 2])
    np.testing.assert_array_equal(point.cdf(np.array([-1.0, 2.0])), [0, 1])
    np.testing.assert_array_equal(point.quantile(0.9), [0, 0])


# --- calibrated


@pytest.mark.parametrize("options", [{}, {"noise": "none"}, {"tune": False}])
def test_pairs_of_quantiles_are_the_intervals(options):
    band = made().calibrate(X_CAL, Y_CAL, **options)
    intervals = band.predict(NEW, LEVELS)
    p = [(1 - level) / 2 for level in LEVELS] + [(1 + level) / 2 for level in LEVELS]
    expected = np.concatenate([intervals.lower, intervals.upper], axis=1)
    np.testing.assert_array_equal(band.quantile(NEW, p), expected)
    found = band.predict_distribution(NEW)
    assert isinstance(found, Steps)
    np.testing.assert_array_equal(found.quantile(p), expected)
    np.testing.assert_array_equal(found.quantile(0.5), band.predict_mean(NEW))
    np.testing.assert_array_equal(band.quantile(NEW, 0.5), band.predict_mean(NEW))


def test_every_level_is_a_pair_of_quantiles(calibrated):
    found = calibrated.predict_distribution(NEW)
    for level in np.linspace(0.003, 59 / 60, 200):
        interval = calibrated.predict(NEW, level)
        np.testing.assert_array_equal(found.quantile((1 - level) / 2), interval.lower)
        np.testing.assert_array_equal(found.quantile((1 + level) / 2), interval.upper)


def test_one_sided_quantiles_are_the_one_sided_bounds(calibrated):
    p = [0.05, 0.5, 0.9]
    expected = calibrated.predict(NEW, p, side="upper").upper
    np.testing.assert_array_equal(calibrated.quantile(NEW, p, symmetric=False), expected)
    found = calibrated.predict_distribution(NEW, symmetric=False)
    np.testing.assert_array_equal(found.quantile(p), expected)


def test_the_cdf_is_the_share_of_steps(calibrated):
    found = calibrated.predict_distribution(NEW)
    assert len(found.cumulative) == 2 * 59
    for p, value in zip(found.cumulative, found.values.T, strict=True):
        np.testing.assert_allclose(found.cdf(value), np.maximum(p, found.cdf(value)))  # steps may be tied
    far = found.cdf(np.stack([np.full(6, -1e9), found.mean, np.full(6, 1e9)], axis=1))
    np.testing.assert_allclose(far, np.tile([1 / 120, 0.5, 119 / 120], (6, 1)), atol=1e-12)
    grid = np.linspace(-4, 4, 101)
    assert (np.diff(found.cdf(grid[None]), axis=1) >= 0).all()


def test_the_crps_of_steps_is_that_of_draws():
    values = np.array([[-1.0, 0.5, 2.0], [0.0, 0.0, np.inf]])
    steps = Steps(np.zeros(2), values, np.array([0.25, 0.5, 0.75]), 0.0, False)
    y = np.array([0.7, 0.4])
    found = steps.crps(y)
    assert found[0] == pytest.approx(metrics.crps(y[:1], values[:1]))
    assert found[1] == pytest.approx(0.4)  # what is infinite is left out


def test_probabilities_are_uniform_on_new_rows():
    """P(F(y) ≤ u) is u, within a simulation's error, for the one-sided distribution."""
    x, y = regression(4_000, seed=11)
    band = made().calibrate(x[:200], y[:200])
    u = np.sort(band.cdf(x[200:], y[200:], symmetric=False).numpy())
    assert np.abs(u - np.arange(1, len(u) + 1) / len(u)).max() < 0.1


def test_many_calibration_rows_are_thinned(monkeypatch):
    monkeypatch.setattr("deltaband.distributions.MAX_STEPS", 20)
    band = made().calibrate(X_CAL, Y_CAL)
    found = band.predict_distribution(NEW)
    assert found.values.shape == (6, 40)
    assert (found.quantile(0.9) >= band.quantile(NEW, 0.9).numpy() - 1e-12).all()


# --- scores


@pytest.mark.parametrize("which", ["formula", "calibrated"])
def test_the_score_is_the_mean_crps(request, which):
    band = request.getfixturevalue(which)
    found = band.predict_distribution(NEW)
    assert band.score(NEW, Y_NEW) == pytest.approx(found.crps(Y_NEW).mean())
    assert metrics.crps(Y_NEW, found) == pytest.approx(found.crps(Y_NEW).mean())
    # and near that of the intervals of many levels, and of draws
    levels = np.linspace(0.01, 0.97, 97)
    assert metrics.crps(Y_NEW, band.predict(NEW, levels)) == pytest.approx(band.score(NEW, Y_NEW), rel=0.05)
    draws = found.quantile((np.arange(400) + 0.5) / 400 * 0.96 + 0.02)
    assert metrics.crps(Y_NEW, draws) == pytest.approx(band.score(NEW, Y_NEW), rel=0.05)


def test_pieces_do_not_matter(calibrated, monkeypatch):
    whole = calibrated.score(NEW, Y_NEW), calibrated.cdf(NEW, Y_NEW)
    monkeypatch.setattr("deltaband.forecaster.DEFAULT_BATCH_ROWS", 4)
    assert calibrated.score(NEW, Y_NEW) == pytest.approx(whole[0])
    np.testing.assert_array_equal(calibrated.cdf(NEW, Y_NEW), whole[1])


# --- what bands differ in


def test_several_outputs():
    band, Y2 = two_outputs(), torch.stack([Y_NEW, Y_NEW], dim=1)
    for each in (band, two_outputs().calibrate(X_CAL, torch.stack([Y_CAL, Y_CAL], 1))):
        found = each.predict_distribution(NEW)
        assert found.quantile(0.3).shape == each.quantile(NEW, 0.3).shape == (6, 2)
        np.testing.assert_allclose(found.quantile([0.2, 0.7]), each.quantile(NEW, [0.2, 0.7]), rtol=1e-9)
        assert each.cdf(NEW, Y2).shape == (6, 2)
        assert each.cdf(NEW, np.zeros((1, 1, 5))).shape == (6, 2, 5)
        assert each.score(NEW, Y2).shape == metrics.crps(Y2, found).shape == (2,)
        np.testing.assert_allclose(each.cdf(NEW, Y2), found.cdf(Y2))
    with pytest.raises(ValueError, match="all outputs of a row at once"):
        two_outputs().calibrate(X_CAL, torch.stack([Y_CAL, Y_CAL], 1), joint=True).quantile(NEW, 0.9)


def test_affine_units(formula):
    band = made(target_transform=(5.0, 3.0))
    for p in (0.1, 0.8):
        np.testing.assert_allclose(band.quantile(NEW, p), 5 + 3 * formula.quantile(NEW, p), rtol=1e-9)
        expected = 5 + 3 * formula.predict_distribution(NEW).quantile(p)
        np.testing.assert_allclose(band.predict_distribution(NEW).quantile(p), expected, rtol=1e-9)
    assert band.score(NEW, 5 + 3 * Y_NEW) == pytest.approx(3 * formula.score(NEW, Y_NEW))


@pytest.mark.parametrize("calibrate", [False, True])
@pytest.mark.parametrize("transform", [Log(), Falling()])
def test_curved_units(calibrate, transform):
    plain, band = made(), made(target_transform=transform)
    if calibrate:
        plain, band = (each.calibrate(X_CAL, Y_CAL) for each in (plain, band))
    falling = isinstance(transform, Falling)
    for p in (0.1, 0.75):
        expected = transform.inverse_transform(plain.quantile(NEW, 1 - p if falling else p).numpy())
        np.testing.assert_allclose(band.quantile(NEW, p), expected, rtol=1e-9)
        np.testing.assert_allclose(band.predict_distribution(NEW).quantile(p), expected, rtol=0.05)
        one_sided = band.quantile(NEW, p, symmetric=False)
        np.testing.assert_allclose(band.predict_distribution(NEW, symmetric=False).quantile(p), one_sided, rtol=0.05)
    z = plain.cdf(NEW, Y_NEW).numpy()
    y = transform.inverse_transform(Y_NEW.numpy())
    np.testing.assert_allclose(band.cdf(NEW, y), 1 - z if falling else z, atol=0.02)


def test_known_variance_and_weights():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = trained_mlp()

        def forward(self, x):
            return torch.cat([self.mean(x), 0.1 + x[:, :1] ** 2], dim=1)

    band = made(Two(), variance="variance")
    np.testing.assert_allclose(band.predict_distribution(NEW).quantile(0.95), band.predict(NEW, 0.9).upper, rtol=1e-9)
    weighted = made()
    w = np.array([1.0, 2, 3, 4, 5, 6])
    found = weighted.predict_distribution(NEW, sample_weight=w).quantile(0.95)
    np.testing.assert_allclose(found, weighted.predict(NEW, 0.9, sample_weight=w).upper, rtol=1e-9)
    np.testing.assert_allclose(weighted.quantile(NEW, 0.95, sample_weight=w), found, rtol=1e-9)
    np.testing.assert_allclose(weighted.cdf(NEW, found, sample_weight=w), 0.95, rtol=1e-9)
    band.calibrate(X_CAL, Y_CAL)
    found = band.predict_distribution(NEW)
    np.testing.assert_array_equal(found.quantile(0.95), band.predict(NEW, 0.9).upper)


def test_groups():
    groups, new = np.arange(59) % 2, np.array([0, 1, 0, 1, 0, 1])
    band = made().calibrate(X_CAL, Y_CAL, groups=groups)
    interval = band.predict(NEW, 0.8, groups=new)
    np.testing.assert_array_equal(band.quantile(NEW, 0.9, groups=new), interval.upper)
    found = band.predict_distribution(NEW, groups=new).quantile([0.1, 0.9])
    assert (found[:, 0] <= interval.lower.numpy()).all()  # levels are those of all rows: at least the quantile
    assert (found[:, 1] >= interval.upper.numpy()).all()
    assert band.score(NEW, Y_NEW, groups=new) > 0
    with pytest.raises(ValueError, match="by groups"):
        band.quantile(NEW, 0.9)
    with pytest.raises(ValueError, match=r"groups must have one per row: 6 rows, groups of shape \(5,\)"):
        band.score(NEW, Y_NEW, groups=new[:5])


def test_groups_that_overlap_have_quantiles_alone():
    indicators = np.stack([np.ones(59), np.arange(59) % 2], axis=1)
    band = made().calibrate(X_CAL, Y_CAL, groups=indicators)
    asked = {"groups": indicators[:6]}
    np.testing.assert_array_equal(band.quantile(NEW, 0.9, **asked), band.predict(NEW, 0.8, **asked).upper)
    with pytest.raises(ValueError, match="each level of each row takes an optimisation of its own"):
        band.predict_distribution(NEW, **asked)


def test_density_ratios():
    band = made().calibrate(X_CAL, Y_CAL, weights=np.linspace(0.5, 2, 59))
    asked = {"weights": np.full(6, 1.2)}
    upper = band.predict(NEW, 0.8, **asked).upper.numpy()
    np.testing.assert_array_equal(band.quantile(NEW, 0.9, **asked), upper)
    found = band.predict_distribution(NEW, **asked)
    assert (found.quantile(0.9) >= upper).all()
    assert np.isfinite(band.score(NEW, Y_NEW, **asked))


def test_networks_that_predict_quantiles():
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = trained_mlp()

        def forward(self, x):
            y = self.net(x)
            return torch.cat([y - 1, y + 0.8, y + 1], dim=1)

    band = PredictionIntervals(Three(), quantiles=(0.1, 0.5, 0.9)).fit(X, Y, progress=False)
    with pytest.raises(ValueError, match="calibrate"):
        band.predict_distribution(NEW)
    band.calibrate(X_CAL, Y_CAL)
    p = np.array([0.02, 0.1, 0.3, 0.49, 0.5, 0.51, 0.7, 0.9, 0.98])
    assert (np.diff(band.quantile(NEW, p)) >= 0).all()
    assert (np.diff(band.predict_distribution(NEW).quantile(p)) >= 0).all()


def test_arrays_tensors_and_float32():
    model = trained_mlp(dtype=torch.float32)
    band = PredictionIntervals(model, damping=DAMPING).fit(X.float(), Y.float(), progress=False)
    assert band.quantile(NEW.float(), 0.9).dtype == torch.float32
    assert isinstance(band.quantile(NEW.float().numpy(), 0.9), np.ndarray)
    assert band.cdf(NEW.float().numpy(), 0.0).shape == (6,)
    assert band.quantile(NEW[:0].float(), [0.1, 0.9]).shape == (0, 2)
    assert len(band.predict_distribution(NEW[:0].float())) == 0
    assert repr(band.predict_distribution(NEW.float())) == "StudentT of 6 rows"
    loader = torch.utils.data.DataLoader(NEW.float(), batch_size=4)
    np.testing.assert_allclose(band.quantile(loader, 0.9), band.quantile(NEW.float(), 0.9), rtol=1e-5)
    for ask in (band.predict_distribution, lambda x: band.cdf(x, 0.0), lambda x: band.score(x, Y_NEW)):
        with pytest.raises(TypeError, match=r"not a loader|no loader"):
            ask(loader)


# --- bad input


@pytest.mark.parametrize("p", [0, 1, -0.1, 1.5, float("nan"), [], [0.5, 1.0], [[0.5]]])
def test_quantiles_outside_of_0_and_1(formula, p):
    for ask in (lambda p: formula.quantile(NEW, p), formula.predict_distribution(NEW).quantile):
        with pytest.raises(ValueError, match=r"p must be between 0 and 1, exclusive \(0.9 for the 90 % quantile\)"):
            ask(p)


def test_quantiles_that_are_no_numbers(formula):
    with pytest.raises(TypeError, match="p must be a number or a list of numbers"):
        formula.quantile(NEW, "half")


def test_a_level_too_high_for_the_calibration_rows(calibrated):
    with pytest.raises(ValueError, match=r"59 calibration rows are too few for level 0.998"):
        calibrated.quantile(NEW, 0.999)
    found = calibrated.predict_distribution(NEW)
    for p in (0.999, 0.001):
        with pytest.raises(ValueError, match=r"59 calibration rows have no quantile 0.*: from 0.008333 to 0.9917"):
            found.quantile(p)


def test_targets_that_do_not_fit(formula, calibrated):
    for band in (formula, calibrated):
        found = band.predict_distribution(NEW)
        for y in (np.zeros(5), np.full(6, np.nan), np.zeros((6, 2))):
            with pytest.raises(ValueError, match=r"targets|shape|finite"):
                found.crps(y)
            with pytest.raises(ValueError, match=r"targets|shape|finite"):
                band.score(NEW, y)
        with pytest.raises(ValueError, match="y must have the shape of the predictions"):
            found.cdf(np.zeros(5))
        with pytest.raises(ValueError, match=r"y must have one number per row, 6 of them, got shape \(5,\)"):
            band.cdf(NEW, np.zeros(5))
        with pytest.raises(ValueError, match="NaN"):
            found.cdf(np.nan)
        with pytest.raises(ValueError, match="symmetric must be True or False"):
            band.quantile(NEW, 0.5, symmetric="yes")
    with pytest.raises(ValueError, match="groups= and weights= are for intervals that were calibrated with them"):
        formula.predict_distribution(NEW, groups=np.zeros(6))


def test_what_the_network_is_unsure_of_is_said_once(calibrated):
    """Steps reach levels that groups have too few rows for: nothing is said of those, but of the rows it is."""
    changed = made(model := trained_mlp()).calibrate(X_CAL, Y_CAL)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.warns(match="weights have changed"):
        changed.predict_distribution(NEW)
    band = made().calibrate(X_CAL, Y_CAL, groups=["a"] * 50 + ["b"] * 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        band.predict_distribution(NEW, groups=["a"] * 6)
