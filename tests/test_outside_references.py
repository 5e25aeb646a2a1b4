"""References that nobody here wrote, and a simulation: the interval covers as often as it says."""

import numpy as np
import pytest
import statsmodels.api as sm
import torch
from scipy.optimize import curve_fit
from torch import nn

from deltaband import Exact, PredictionIntervals


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


@pytest.mark.parametrize("damping", [0.0, 1e-10])
@pytest.mark.parametrize("level", [0.5, 0.8, 0.95, 0.99])
def test_a_linear_network_gives_the_ols_interval_of_statsmodels(level, damping):
    rng = np.random.default_rng(0)
    X, new = rng.standard_normal((60, 4)), 3 * rng.standard_normal((15, 4))
    y = X @ [1.0, -2.0, 0.5, 0.0] + 3 + 0.7 * rng.standard_normal(60)
    ols = sm.OLS(y, sm.add_constant(X)).fit()
    frame = ols.get_prediction(sm.add_constant(new)).summary_frame(alpha=1 - level)

    model = nn.Linear(4, 1).double()
    with torch.no_grad():
        model.bias[:] = float(ols.params[0])
        model.weight[:] = torch.from_numpy(ols.params[1:])
    band = PredictionIntervals(model, damping=damping).fit(X, y, progress=False)
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
