"""Intervals for the networks of skorch."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.compose import TransformedTargetRegressor
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier, NeuralNetRegressor
from skorch.dataset import ValidSplit
from torch import nn

from deltaband import DeltabandWarning
from deltaband.sklearn import IntervalRegressor


class Torch(nn.Module):
    def __init__(self, flat=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
        self.flat = flat

    def forward(self, X):
        return self.layers(X)[:, 0] if self.flat else self.layers(X)


def skorch(**settings):
    settings = {"optimizer": torch.optim.Adam, "lr": 0.03, "max_epochs": 80, "batch_size": 50, **settings}
    return NeuralNetRegressor(Torch, verbose=0, **{"train_split": None, **settings})


def data(n=150):
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (n, 2)).astype(np.float32)
    y = 3 + np.sin(X[:, :1]) + 0.5 * X[:, 1:] + 0.1 * rng.standard_normal((n, 1))
    return X, y.astype(np.float32)


def coverage(regressor, X, y):
    _, lower, upper = regressor.predict_interval(X)
    return np.mean((lower <= y[:, 0]) & (y[:, 0] <= upper))


@pytest.mark.parametrize(
    ("settings", "damping"),
    [
        ({"optimizer__weight_decay": 0.002}, 150 * 0.001),
        ({"optimizer__weight_decay": 0.002, "train_split": ValidSplit(5)}, 120 * 0.001),
        ({"optimizer__weight_decay": 0.002, "criterion__reduction": "sum", "batch_size": 40}, 4 * 0.001),
        ({"optimizer__weight_decay": 0.002, "criterion": nn.L1Loss}, None),
        ({"optimizer": torch.optim.AdamW}, None),  # decoupled
        ({}, None),
    ],
    ids=["mean", "held out", "sum", "not squared", "decoupled", "no decay"],
)
def test_lambda_of_skorch_follows_from_its_optimiser_and_loss(settings, damping):
    regressor = IntervalRegressor(skorch(max_epochs=1, **settings))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeltabandWarning)
        regressor.fit(*data())
    assert regressor.band_.damping_ == (damping and pytest.approx(damping))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: net,
        lambda net: make_pipeline(StandardScaler(), net),
        lambda net: TransformedTargetRegressor(net, transformer=StandardScaler()),
        lambda net: FrozenEstimator(net.fit(*data())),
    ],
    ids=["alone", "pipeline", "scaled target", "frozen"],
)
def test_skorch_has_intervals_with_weight_decay(wrap):
    X, y = data()
    regressor = IntervalRegressor(wrap(skorch(optimizer__weight_decay=1e-3))).fit(X, y)
    mean, lower, _ = regressor.predict_interval(X)
    assert mean.shape == lower.shape == (150,)
    assert mean.dtype == lower.dtype == regressor.predict(X, return_std=True)[1].dtype == np.float64
    assert 0.9 < coverage(regressor, X, y) < 1


def test_skorch_needs_a_calibration_without_weight_decay():
    X, y = data(300)
    regressor = IntervalRegressor(skorch(), random_state=0)
    with pytest.warns(DeltabandWarning, match="calibration=0.2"):
        regressor.fit(X, y)
    for ask in (regressor.predict_interval, lambda x: regressor.predict(x, return_std=True)):
        with pytest.raises(ValueError, match=r"λ is not known.*calibration=0.2"):
            ask(X)
    assert 0.9 < coverage(regressor.set_params(calibration=0.3).fit(X, y), X, y) < 1
    assert regressor.predict(X, return_std=True)[1].shape == (300,)


def test_adamw_says_at_fit_that_intervals_need_a_calibration():
    X, y = data()
    net = skorch(optimizer=torch.optim.AdamW)
    with pytest.warns(
        DeltabandWarning, match=r"as with AdamW .*: intervals need calibration=0\.2, or damping="
    ) as said:
        IntervalRegressor(net).fit(X, y)
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        IntervalRegressor(net, calibration=0.3, random_state=0).fit(X, y)
        frozen = IntervalRegressor(FrozenEstimator(net.fit(X[:100], y[:100]))).fit(X[:100], y[:100])
        frozen.calibrate(X[100:], y[100:])


def test_skorch_is_trained_without_weights_and_the_band_of_a_trained_net_takes_them():
    X, y = data()
    w = np.linspace(0.5, 2, len(y))
    net = skorch(optimizer__weight_decay=1e-3)
    with pytest.raises(ValueError, match=r"NeuralNetRegressor\.fit takes no sample_weight: .*FrozenEstimator"):
        IntervalRegressor(make_pipeline(StandardScaler(), net)).fit(X, y, sample_weight=w)
    frozen = FrozenEstimator(net.fit(X, y))
    weighted, equal = IntervalRegressor(frozen).fit(X, y, sample_weight=w), IntervalRegressor(frozen).fit(X, y)
    assert weighted.noise_std_ != equal.noise_std_


def test_skorch_takes_part_in_cross_validation():
    assert cross_val_score(IntervalRegressor(skorch(optimizer__weight_decay=1e-3)), *data(), cv=3).min() > 0.8


@pytest.mark.parametrize(
    ("estimator", "error", "message"),
    [
        (NeuralNetClassifier(Torch), TypeError, "NeuralNetClassifier is a classifier"),
        (FrozenEstimator(skorch()), NotFittedError, "not fitted yet"),
    ],
)
def test_what_is_no_trained_regressor_is_refused(estimator, error, message):
    with pytest.raises(error, match=message):
        IntervalRegressor(estimator).fit(*data())


def test_a_network_that_is_trained_again_is_noticed():
    X, y = data()
    net = skorch(optimizer__weight_decay=1e-3, max_epochs=20).fit(X, y)
    regressor = IntervalRegressor(FrozenEstimator(net)).fit(X, y)
    net.fit(X, 2 * y)
    with pytest.raises(ValueError, match="changed since fit"):
        regressor.predict_interval(X)


def test_targets_that_torch_would_broadcast_are_noticed():
    X, y = data()
    net = skorch(optimizer__weight_decay=1e-3, max_epochs=1)
    with pytest.warns(UserWarning, match="broadcasting"), pytest.raises(ValueError, match=r"give y.reshape\(-1, 1\)"):
        IntervalRegressor(net).fit(X, y[:, 0])
    flat = net.set_params(module__flat=True, max_epochs=80)
    assert IntervalRegressor(flat).fit(X, y[:, 0]).predict(X).shape == (150,)


def test_predictions_that_are_not_the_outputs_of_the_network_are_refused():
    X, y = data()
    with pytest.raises(ValueError, match="predict_nonlinearity"):
        IntervalRegressor(skorch(predict_nonlinearity=torch.exp, optimizer__weight_decay=1e-3)).fit(X, y)
