"""Quantiles and distributions of the scikit-learn estimators, in the units of y."""

import numpy as np
import pytest
from scipy import stats
from sklearn.compose import TransformedTargetRegressor
from sklearn.exceptions import NotFittedError
from sklearn.neural_network import MLPRegressor
from sklearn.preprocessing import StandardScaler

from deltaband import DeltabandWarning, PredictionIntervals
from deltaband.sklearn import BandRegressor, IntervalRegressor
from tests.support.networks import mlp

ALPHA = [0.9, 0.05, 0.5, 0.3]


def network():
    return MLPRegressor(
        hidden_layer_sizes=(5,), activation="tanh", solver="lbfgs", alpha=0.1, max_iter=2000, random_state=0
    )


def data(n=300, seed=0, m=1):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (n, 2))
    y = np.sin(X[:, :1]) + 0.1 * rng.standard_normal((n, m))
    return X, y[:, 0] if m == 1 else y


def exponential(estimator):
    return TransformedTargetRegressor(estimator, func=np.log, inverse_func=np.exp)


def falling(estimator):
    return TransformedTargetRegressor(estimator, func=np.negative, inverse_func=np.negative)


def scaled(estimator):
    return TransformedTargetRegressor(estimator, transformer=StandardScaler())


WRAPS = {"alone": lambda e: e, "scaled": scaled, "falling": falling, "exponential": exponential}


def fitted(wrap, calibration, m=1):
    X, y = data(m=m)
    y = np.exp(y) if wrap == "exponential" else 1000 * y if wrap == "scaled" else y
    regressor = IntervalRegressor(WRAPS[wrap](network()), calibration=calibration, damping=0.1, random_state=0)
    return regressor.fit(X, y), data(40, seed=1)[0]


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("calibration", [0.0, 0.3])
def test_quantiles_are_the_ends_of_intervals(wrap, calibration):
    regressor, X = fitted(wrap, calibration)
    found = regressor.predict_quantiles(X, ALPHA)
    assert found.shape == (40, 4)
    mean, lower, upper = regressor.predict_interval(X, [0.8, 0.9, 0.4])
    np.testing.assert_allclose(found, np.stack([upper[:, 0], lower[:, 1], mean, lower[:, 2]], axis=1), rtol=1e-9)
    assert (np.diff(found[:, [1, 3, 2, 0]]) > 0).all()
    np.testing.assert_allclose(regressor.predict_quantiles(X, 0.9), found[:, 0], rtol=1e-9)
    np.testing.assert_array_equal(regressor.predict_quantiles(X, 0.5), regressor.predict(X))
    assert regressor.predict_quantiles(X).shape == (40, 3)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("calibration", [0.0, 0.3])
def test_distributions_have_these_quantiles(wrap, calibration):
    regressor, X = fitted(wrap, calibration)
    distribution = regressor.predict_distribution(X)
    steps = calibration > 0 or wrap == "exponential"
    assert type(distribution).__name__ == ("Steps" if steps else "StudentT")
    rtol = 0.005 if wrap == "exponential" and not calibration else 1e-6  # a grid of levels
    np.testing.assert_allclose(distribution.quantile(ALPHA), regressor.predict_quantiles(X, ALPHA), rtol=rtol)
    np.testing.assert_array_equal(distribution.mean, regressor.predict(X))
    y = regressor.predict_quantiles(X, 0.7)
    np.testing.assert_allclose(distribution.cdf(y), 0.7, atol=0.02 if steps else 1e-9)
    assert (distribution.crps(y) > 0).all()


def test_by_the_formula_it_is_students_t():
    regressor, X = fitted("scaled", 0.0)
    mean, std = regressor.predict(X, return_std=True)
    freedom = 300 - regressor.band_.effective_parameters_
    y = mean + np.linspace(-3, 3, len(mean)) * std
    np.testing.assert_allclose(
        regressor.predict_distribution(X).cdf(y), stats.t.cdf((y - mean) / std, freedom), rtol=1e-9
    )


@pytest.mark.parametrize("calibration", [0.0, 0.3])
def test_several_outputs_have_one_each(calibration):
    regressor, X = fitted("alone", calibration, m=2)
    assert regressor.predict_quantiles(X, 0.9).shape == (40, 2)
    assert regressor.predict_quantiles(X, ALPHA).shape == (40, 2, 4)
    found = regressor.predict_distribution(X).quantile(ALPHA)
    np.testing.assert_allclose(found, regressor.predict_quantiles(X, ALPHA), rtol=1e-6)


def test_observations_are_below_quantiles_as_often_as_these_say():
    regressor, (X, y) = fitted("alone", 0.3)[0], data(2000, seed=2)
    below = (y[:, None] <= regressor.predict_quantiles(X, [0.1, 0.5, 0.9])).mean(axis=0)
    assert below == pytest.approx([0.1, 0.5, 0.9], abs=0.06)


@pytest.mark.filterwarnings("ignore:the network")  # is not trained
def test_a_band_answers_under_the_same_names():
    X, y = data()
    band = PredictionIntervals(mlp(2), damping=1.0).fit(X, y, progress=False)
    regressor = BandRegressor(band)
    np.testing.assert_array_equal(regressor.predict_quantiles(X, ALPHA), band.quantile(X, ALPHA))
    np.testing.assert_array_equal(regressor.predict_proba(X).quantile(0.9), band.predict_distribution(X).quantile(0.9))
    np.testing.assert_array_equal(regressor.predict_interval(X, 0.8).lower, band.predict(X, 0.8).lower)


def test_nothing_is_said_of_levels_that_nobody_asked_for():
    X, y = data(600)
    X = np.column_stack([X, np.arange(600) % 2])
    regressor = IntervalRegressor(network(), calibration=0.3, groups=2, random_state=0).fit(X, y)
    found = regressor.predict_distribution(X[:20]).quantile([0.1, 0.9])  # warnings are errors
    np.testing.assert_allclose(found, regressor.predict_quantiles(X[:20], [0.1, 0.9]), rtol=1e-6)
    with pytest.warns(DeltabandWarning, match="far outside of the training rows"):
        regressor.predict_distribution(X[:20] * [1000, 1000, 1])


def test_what_is_no_probability_is_refused():
    regressor, X = fitted("alone", 0.1)  # 30 rows
    for alpha, kind, message in (
        (1.0, ValueError, "alpha must be between 0 and 1"),
        ("low", TypeError, "alpha must be a number or a list"),
    ):
        with pytest.raises(kind, match=message):
            regressor.predict_quantiles(X, alpha)
    with pytest.raises(ValueError, match=r"30 calibration rows are too few for level 0\.98"):
        regressor.predict_quantiles(X, 0.99)
    with pytest.raises(NotFittedError):
        IntervalRegressor(network()).predict_distribution(X)
