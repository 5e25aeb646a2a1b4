"""References that nobody here wrote, and a simulation: the interval covers as often as it says."""

import numpy as np
import pytest
import statsmodels.api as sm
import torch
from mapie.regression import ConformalizedQuantileRegressor
from scipy.optimize import curve_fit
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.linear_model import LinearRegression
from torch import nn

from deltaband import Exact, Nystrom, PredictionIntervals, RandomProjection


class Exponential(nn.Module):
    """y = a·exp(−b·x) + c."""

    def __init__(self, a=1.0, b=1.0, c=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([a, b, c], dtype=torch.float64))

    def forward(self, x):
        return self.w[0] * torch.exp(-self.w[1] * x[:, 0]) + self.w[2]


def exponential(x, a, b, c):
    return a * np.exp(-b * x) + c


def slopes(x, a, b, c):
    return np.stack([np.exp(-b * x), -a * x * np.exp(-b * x), np.ones_like(x)], axis=1)


def linear(parameters):
    """The network with this intercept and these slopes."""
    model = nn.Linear(len(parameters) - 1, 1).double()
    with torch.no_grad():
        model.bias[:] = float(parameters[0])
        model.weight[:] = torch.as_tensor(np.array(parameters[1:]))
    return model


@pytest.mark.parametrize("damping", [0.0, 1e-10])
@pytest.mark.parametrize("level", [0.5, 0.8, 0.95, 0.99])
def test_a_linear_network_gives_the_ols_interval_of_statsmodels(level, damping):
    rng = np.random.default_rng(0)
    X, new = rng.standard_normal((60, 4)), 3 * rng.standard_normal((15, 4))
    y = X @ [1.0, -2.0, 0.5, 0.0] + 3 + 0.7 * rng.standard_normal(60)
    ols = sm.OLS(y, sm.add_constant(X)).fit()
    frame = ols.get_prediction(sm.add_constant(new)).summary_frame(alpha=1 - level)

    band = PredictionIntervals(linear(ols.params), damping=damping).fit(X, y, progress=False)
    observation, mean = band.predict(new, level), band.predict(new, level, kind="mean")
    np.testing.assert_allclose(observation.mean, frame["mean"], rtol=1e-6)
    np.testing.assert_allclose(observation.lower, frame["obs_ci_lower"], rtol=1e-6)
    np.testing.assert_allclose(observation.upper, frame["obs_ci_upper"], rtol=1e-6)
    np.testing.assert_allclose(mean.lower, frame["mean_ci_lower"], rtol=1e-6)
    np.testing.assert_allclose(mean.upper, frame["mean_ci_upper"], rtol=1e-6)
    assert band.noise_std_ == pytest.approx(np.sqrt(ols.scale), rel=1e-9)
    leverage = ols.get_influence().hat_matrix_diag
    np.testing.assert_allclose(band.leverage(X), leverage, rtol=1e-6)


def test_a_nonlinear_fit_gives_the_standard_errors_of_curve_fit():
    rng = np.random.default_rng(1)
    x = rng.uniform(0, 4, 50)
    y = exponential(x, 2.5, 1.3, 0.5) + 0.05 * rng.standard_normal(50)
    fitted, covariance = curve_fit(exponential, x, y, p0=(1, 1, 0), jac=slopes, ftol=1e-14, xtol=1e-14)
    band = PredictionIntervals(Exponential(*fitted), damping=0.0).fit(x[:, None], y, progress=False)
    new = np.linspace(0, 6, 20)
    G = slopes(new, *fitted)
    standard_error = np.sqrt(np.einsum("ij,jk,ik->i", G, covariance, G))
    np.testing.assert_allclose(band.noise_std_ * np.sqrt(band.variance(new[:, None])), standard_error, rtol=1e-6)


@pytest.mark.slow
def test_intervals_cover_as_often_as_they_say_for_data_that_follow_the_model():
    levels, simulations = [0.5, 0.8, 0.95], 1500
    rng = np.random.default_rng(2)
    covered = np.zeros(3)
    for _ in range(simulations):
        x = rng.uniform(0, 4, 25)
        y = exponential(x, 2.5, 1.3, 0.5) + 0.1 * rng.standard_normal(25)
        fitted, _ = curve_fit(exponential, x, y, p0=(2.5, 1.3, 0.5), jac=slopes)
        band = PredictionIntervals(Exponential(*fitted), damping=0.0, engine=Exact())
        band.fit(x[:, None], y, progress=False)
        new = rng.uniform(0, 4, 1)
        target = exponential(new, 2.5, 1.3, 0.5) + 0.1 * rng.standard_normal(1)
        _, lower, upper = band.predict(new[:, None], level=levels)
        covered += ((lower <= target[:, None]) & (target[:, None] <= upper))[0]
    error = np.sqrt(np.multiply(levels, np.subtract(1, levels)) / simulations)
    assert (np.abs(covered / simulations - levels) < 3 * error).all(), covered / simulations


@pytest.mark.parametrize("engine", [Exact(), Nystrom(60), RandomProjection(5)], ids=str)
def test_weighted_rows_give_the_wls_intervals_of_statsmodels(engine):
    rng = np.random.default_rng(3)
    X, new, w = rng.standard_normal((60, 4)), 3 * rng.standard_normal((15, 4)), rng.uniform(0.1, 3, 60)
    y = X @ [1.0, -2.0, 0.5, 0.0] + 3 + rng.standard_normal(60) / np.sqrt(w)
    wls = sm.WLS(y, sm.add_constant(X), w).fit()
    model = linear(wls.params)
    damping = 0.0 if engine == Exact() else 1e-11  # the others need one
    band = PredictionIntervals(model, damping=damping, engine=engine).fit(X, y, sample_weight=w, progress=False)
    for weights in (None, rng.uniform(0.5, 2, 15)):
        frame = wls.get_prediction(sm.add_constant(new), weights=1 if weights is None else weights).summary_frame(0.1)
        found, mean = (band.predict(new, 0.9, kind=kind, sample_weight=weights) for kind in ("observation", "mean"))
        np.testing.assert_allclose(found.lower, frame["obs_ci_lower"], rtol=1e-8)
        np.testing.assert_allclose(found.upper, frame["obs_ci_upper"], rtol=1e-8)
        np.testing.assert_allclose(mean.upper, frame["mean_ci_upper"], rtol=1e-8)
    assert band.noise_std_ == pytest.approx(np.sqrt(wls.scale), rel=1e-9)
    assert band.effective_parameters_ == pytest.approx(5, rel=1e-8)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("kind", "clustered"),
    [("HC0", False), ("HC1", False), ("HC2", False), ("HC3", False), ("HC0", True), ("HC1", True)],
)
def test_robust_covariances_give_the_standard_errors_and_intervals_of_statsmodels(kind, clustered, weighted):
    rng = np.random.default_rng(4)
    X, new, c = rng.standard_normal((60, 4)), 3 * rng.standard_normal((15, 4)), rng.integers(0, 12, 60)
    w = rng.uniform(0.3, 3, 60) if weighted else np.ones(60)
    y = X @ [1.0, -2.0, 0.5, 0.0] + 3 + (0.2 + np.abs(X[:, 0])) * rng.standard_normal(60)
    unfitted = sm.WLS(y, sm.add_constant(X), w)
    if clustered:
        about = {"groups": c, "use_correction": kind == "HC1"}
        fitted = unfitted.fit(cov_type="cluster", cov_kwds=about, use_t=True)
    else:
        fitted = unfitted.fit(cov_type=kind, use_t=True)
    expected = fitted.t_test(sm.add_constant(new))

    given = {"sample_weight": w if weighted else None, "clusters": c if clustered else None}
    band = PredictionIntervals(linear(fitted.params), damping=0.0, robust=kind).fit(X, y, **given, progress=False)
    np.testing.assert_allclose(band.noise_std_ * np.sqrt(band.variance(new)), expected.sd, rtol=1e-8)
    mean = band.predict(new, 0.9, kind="mean")
    np.testing.assert_allclose(np.stack([mean.lower, mean.upper], 1), expected.conf_int(alpha=0.1), rtol=1e-8)


def test_weighted_least_squares_of_scikit_learn_has_those_intervals():
    rng = np.random.default_rng(4)
    X, new, w = rng.standard_normal((50, 3)), rng.standard_normal((9, 3)), rng.uniform(0.1, 3, 50)
    y = X @ [1.0, -2.0, 0.5] + 3 + rng.standard_normal(50) / np.sqrt(w)
    sklearn = LinearRegression().fit(X, y, sample_weight=w)
    band = PredictionIntervals(linear([sklearn.intercept_, *sklearn.coef_]), damping=0.0)
    band.fit(X, y, sample_weight=w, progress=False)
    np.testing.assert_allclose(band.predict_mean(new), sklearn.predict(new), rtol=1e-9)
    frame = sm.WLS(y, sm.add_constant(X), w).fit().get_prediction(sm.add_constant(new)).summary_frame(0.05)
    np.testing.assert_allclose(band.predict(new).upper, frame["obs_ci_upper"], rtol=1e-8)


class Ordered(nn.Module):
    """Three quantiles that do not cross."""

    def forward(self, z):
        down, up = nn.functional.softplus(z[:, 0]), nn.functional.softplus(z[:, 2])
        return torch.stack([z[:, 1] - down, z[:, 1], z[:, 1] + up], dim=1)


class QuantilePrediction(RegressorMixin, BaseEstimator):
    """One quantile of a network, for MAPIE."""

    def __init__(self, model=None, column=0):
        self.model, self.column = model, column
        self.fitted_ = True

    def fit(self, X, y):
        return self

    def predict(self, X):
        with torch.no_grad():
            return self.model(torch.from_numpy(X))[:, self.column].numpy()


@pytest.mark.parametrize("level", [0.8, 0.9])
def test_a_network_of_quantiles_gives_the_cqr_intervals_of_mapie(level):
    rng = np.random.default_rng(5)
    X = rng.standard_normal((500, 3))
    y = X[:, 0] + (0.2 + np.abs(X[:, 1])) * rng.standard_normal(500)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 3), Ordered()).double()
    levels = torch.tensor([(1 - level) / 2, 0.5, (1 + level) / 2], dtype=torch.float64)
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-2)
    inputs, targets = torch.from_numpy(X[:200]), torch.from_numpy(y[:200])
    for _ in range(300):
        optimiser.zero_grad()
        error = targets[:, None] - model(inputs)
        torch.maximum(levels * error, (levels - 1) * error).mean().backward()
        optimiser.step()

    regressors = [QuantilePrediction(model, column) for column in (0, 2, 1)]
    mapie = ConformalizedQuantileRegressor(regressors, confidence_level=level, prefit=True)
    mapie.conformalize(X[200:400], y[200:400])
    _, bounds = mapie.predict_interval(X[400:], symmetric_correction=True)
    # with so much damping q is zero, and nothing but CQR is left
    band = PredictionIntervals(model, quantiles=levels.tolist(), damping=1e14).fit(X[:200], y[:200], progress=False)
    found = band.calibrate(X[200:400], y[200:400], tune=False).predict(X[400:], level)
    np.testing.assert_allclose(found.lower, bounds[:, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(found.upper, bounds[:, 1, 0], rtol=1e-6)
