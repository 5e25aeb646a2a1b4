"""Mean-variance ensembles and quantile networks."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

import tests.reference as reference
from deltaband import Intervals
from deltaband.baselines import MeanVarianceEnsemble, QuantileNetwork
from tests.support.networks import Cube, mlp, regression

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)


def several(outputs: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)).to(dtype)


def quantile_network(dtype: torch.dtype = torch.float64) -> QuantileNetwork:
    """Its quantiles are around 0.3·(−2, −1, 0, 1, 2), and cross here and there."""
    model = several(5, dtype=dtype)
    with torch.no_grad():
        model[-1].weight *= 0.4
        model[-1].bias.copy_(0.3 * torch.arange(-2.0, 3.0))
    return QuantileNetwork(model, LEVELS)


def each(dtype: torch.dtype = torch.float64) -> list:
    models = [several(2, seed, dtype) for seed in range(3)]
    return [MeanVarianceEnsemble(models), MeanVarianceEnsemble(models[:1]), quantile_network(dtype)]


KINDS = {"ensemble": 0, "network": 1, "quantiles": 2}
every = pytest.mark.parametrize("which", KINDS.values(), ids=KINDS)


# --- mean and variance


@settings(max_examples=30, deadline=None)
@given(members=st.integers(1, 5), n=st.integers(1, 20), level=st.floats(0.01, 0.99), seed=st.integers(0, 99))
def test_an_ensemble_is_a_mixture_of_gaussians(members, n, level, seed):
    models = [several(2, seed + i) for i in range(members)]
    x = regression(n, seed=seed)[0]
    outputs = np.stack([model(x).detach().numpy() for model in models])
    outputs[:, :, 1] = np.exp(outputs[:, :, 1])
    mean, std = reference.mixture(outputs)
    found = MeanVarianceEnsemble(models).predict(x.numpy(), level)
    lower, upper = stats.norm.interval(level, mean, std)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found.lower, lower, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(found.upper, upper, rtol=1e-9, atol=1e-11)


class Said(nn.Module):
    """Mean and log variance of a network, said in another way."""

    def __init__(self, inner, say):
        super().__init__()
        self.inner, self.say = inner, say

    def forward(self, x):
        mean, log_variance = self.inner(x).unbind(dim=1)
        return self.say(mean, log_variance)


@pytest.mark.parametrize(
    ("variance", "say"),
    [
        ("log_variance", lambda mean, log: (mean, log)),
        ("log_variance", lambda mean, log: [mean[:, None], log[:, None]]),
        ("variance", lambda mean, log: (mean, log.exp())),
        ("variance", lambda mean, log: torch.stack([mean, log.exp()], dim=1)),
        ("std", lambda mean, log: (mean, (log / 2).exp())),
    ],
)
def test_a_variance_can_be_said_in_several_ways(variance, say, data):
    model = several(2)
    expected = MeanVarianceEnsemble([model]).calibrate(*data).predict(data[0])
    found = MeanVarianceEnsemble([Said(model, say)], variance).calibrate(*data).predict(data[0])
    np.testing.assert_allclose(found.lower, expected.lower, rtol=1e-10)
    np.testing.assert_allclose(found.upper, expected.upper, rtol=1e-10)


@pytest.mark.parametrize(
    ("variance", "last", "message"),
    [
        ("variance", -1.0, "variance of row 0 is -1, expected a positive number; is it what variance='variance' says"),
        ("std", 0.0, "variance of row 0 is 0, expected a positive number; is it what variance='std' says"),
        ("log_variance", 1e3, "network's outputs hold an infinite value in row 0"),
    ],
)
def test_what_is_no_variance_is_named(variance, last, message, data):
    model = several(2, 1)
    with torch.no_grad():
        model[-1].weight[1], model[-1].bias[1] = 0.0, last
    positive = Said(several(2), lambda mean, log: (mean, torch.ones_like(log)))
    band = MeanVarianceEnsemble([positive, model], variance)
    for ask in (lambda: band.predict(data[0]), lambda: band.calibrate(*data)):
        with pytest.raises(ValueError, match=rf"^models\[1\]: the {message}"):
            ask()


# --- quantiles


def test_without_calibration_the_nearest_pair_of_quantiles_is_the_interval(data):
    x = data[0]
    band = quantile_network()
    outputs = np.array([sorted(row) for row in band.model(x).detach().tolist()])
    assert (np.diff(band.model(x).detach().numpy(), axis=1) < 0).any()  # some cross
    levels = [0.9, 0.5, 0.99, 0.71, 0.69, 0.1]
    found = band.predict(x.numpy(), levels)
    np.testing.assert_allclose(found.mean, outputs[:, 2], rtol=1e-12)
    for column, first in enumerate([0, 1, 0, 0, 1, 1]):
        np.testing.assert_allclose(found.lower[:, column], outputs[:, first], rtol=1e-12)
        np.testing.assert_allclose(found.upper[:, column], outputs[:, 4 - first], rtol=1e-12)


def test_quantiles_moved_inwards_do_not_pass_each_other():
    model = several(3)
    with torch.no_grad():
        model[-1].weight.zero_()
        model[-1].bias.copy_(torch.tensor([-1.0, 0.2, 1.0]))
    band = QuantileNetwork(model, (0.25, 0.5, 0.75))
    x, y = torch.zeros(99, 3).double(), torch.linspace(-0.2, 0.2, 99)
    lower, upper = (bound[0].item() for bound in list(band.calibrate(x, y).predict(x, 0.5))[1:])
    assert (lower, upper) == pytest.approx((-0.1, 0.1), abs=0.01)  # inwards: the interval was far too wide
    with torch.no_grad():
        model[-1].bias.copy_(torch.tensor([-0.1, 0.0, 0.1]))  # as if these were other rows
    _, lower, upper = band.predict(x)
    assert torch.equal(lower, upper)
    assert lower[0] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    "levels", [(0.1, 0.9), (0.5,), (0.1, 0.5, 0.8), (0.9, 0.5, 0.1), (0.1, 0.4, 0.9), (0.1, 0.1, 0.5, 0.9, 0.9)]
)
def test_levels_that_are_no_pairs_about_the_median_are_refused(levels):
    with pytest.raises(ValueError, match=r"^levels must ascend, symmetric about 0\.5 in the middle"):
        QuantileNetwork(several(len(levels)), levels)
    with pytest.raises(ValueError, match="level must be between 0 and 1"):
        QuantileNetwork(several(3), (0.0, 0.5, 1.0))


# --- both


@every
@pytest.mark.parametrize("n", [9, 19, 40])
def test_after_calibration_intervals_are_those_of_split_conformal_prediction(which, n, data):
    band, (x, y) = each()[which], data
    band.calibrate(x[:n], y[:n].numpy()[:, None])
    level = 0.9
    mean, lower, upper = (bound.numpy() for bound in band.predict(x[n:], level))
    raw = each()[which]
    if isinstance(raw, QuantileNetwork):
        low, high = (raw.predict(x, level).lower.numpy(), raw.predict(x, level).upper.numpy())

        def score(row, target):
            return max(low[row] - target, target - high[row])
    else:
        centre, lower_one = raw.predict(x, 0.5).mean.numpy(), raw.predict(x, 0.5).lower.numpy()

        def score(row, target):
            return abs(target - centre[row]) / (centre[row] - lower_one[row])

    scores = np.array([score(row, y[row].item()) for row in range(n)])
    for i in range(len(x) - n):
        margin = 1e-6 * (upper[i] - lower[i])
        for target, inside in (
            (lower[i] + margin, True),
            (upper[i] - margin, True),
            (lower[i] - margin, False),
            (upper[i] + margin, False),
        ):
            assert reference.accepted(scores, score(n + i, target), level) is inside
        assert lower[i] < mean[i] < upper[i] or which == 2


@every
def test_calibrated_intervals_cover_whatever_the_network(which):
    covered = []
    for seed in range(40):
        x, y = regression(1_049, seed=seed)
        found = each()[which].calibrate(x[:49], y[:49]).predict(x[49:], 0.8)
        covered.append(((found.lower <= y[49:]) & (y[49:] <= found.upper)).double().mean().item())
    error = np.std(covered, ddof=1) / np.sqrt(len(covered))
    assert abs(np.mean(covered) - 0.8) < 4 * error + 1e-9  # 50·0.8 is whole: the coverage is exactly the level
    assert error < 0.02


@every
def test_numpy_in_numpy_out_and_several_levels_give_a_column_each(which, data):
    x, y = data
    band = each(torch.float32)[which]
    for _ in range(2):
        found = band.predict(x.numpy(), [0.5, 0.8])
        assert isinstance(found, Intervals)
        assert found.lower.shape == found.upper.shape == (80, 2)
        assert found.level == (0.5, 0.8)
        assert found.mean.dtype == found.lower.dtype == np.float32
        one = band.predict(x, 0.8)
        assert isinstance(one.lower, torch.Tensor)
        assert one.level == 0.8
        np.testing.assert_array_equal(one.lower, found.lower[:, 1])
        np.testing.assert_array_equal(one.upper, found.upper[:, 1])
        assert band.predict(x[:0], [0.5, 0.8]).lower.shape == (0, 2)
        assert band.calibrate(x, y) is band


@every
def test_a_failed_calibration_changes_nothing_and_the_model_is_never_touched(which, data):
    x, y = data
    band = each()[which]
    models = [band.model] if isinstance(band, QuantileNetwork) else band.models
    for model in models:
        model.train()
    before = copy.deepcopy([model.state_dict() for model in models])
    expected = band.calibrate(x, y).predict(x)
    for bad, message in (
        ((x, torch.where(torch.arange(80) == 3, torch.nan, y)), "targets hold NaN in row 3"),
        ((torch.where(torch.arange(80)[:, None] == 4, torch.nan, x), y), "inputs hold NaN in row 4"),
        ((x, y[:79]), "80 inputs, 79 targets"),
        ((x[:0], y[:0]), "held-out data are empty"),
        ((x, torch.stack([y, y], dim=1)), r"targets must have shape \(n,\) or \(n, 1\)"),
        ((x[:, :2], y), "could not be evaluated"),
    ):
        with pytest.raises(ValueError, match=message):
            band.calibrate(*bad)
    assert torch.equal(band.predict(x).lower, expected.lower)
    for model, state in zip(models, before, strict=True):
        assert model.training
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
        assert all(w.grad is None for w in model.parameters())


@every
def test_too_few_calibration_rows_for_a_level_are_an_error(which, data):
    band = each()[which].calibrate(data[0][:18], data[1][:18])
    with pytest.raises(ValueError, match=r"18 calibration rows are too few for level 0\.95: it takes at least 19"):
        band.predict(data[0], 0.95)
    assert len(band.predict(data[0], 0.9)) == 80


def test_networks_that_cannot_be_used_are_refused(data):
    x = data[0]
    with pytest.raises(TypeError, match="a list of networks, got one network"):
        MeanVarianceEnsemble(several(2))
    with pytest.raises(ValueError, match="at least 1 network, got 0"):
        MeanVarianceEnsemble([])
    with pytest.raises(ValueError, match="more than once"):
        MeanVarianceEnsemble([several(2)] * 2)
    with pytest.raises(TypeError, match=r"models\[1\]: model must be a torch\.nn\.Module, got str"):
        MeanVarianceEnsemble([several(2), "model"])
    with pytest.raises(ValueError, match="variance must be 'variance', 'log_variance' or 'std', got 'precision'"):
        MeanVarianceEnsemble([several(2)], "precision")
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got str"):
        QuantileNetwork("model")
    with pytest.raises(
        ValueError, match=r"models\[1\]: .*the model must return a mean and a log-variance as a tuple or as columns"
    ):
        MeanVarianceEnsemble([several(2), mlp()]).predict(x)
    with pytest.raises(ValueError, match=r"^the network returns 5 outputs a row, expected 7"):
        QuantileNetwork(several(5)).predict(x)
    overflowing = nn.Sequential(several(3), Cube())
    with torch.no_grad():
        overflowing[0][-1].bias += 1e200
    with pytest.raises(ValueError, match="the network's outputs hold an infinite value in row 0"):
        QuantileNetwork(overflowing, (0.1, 0.5, 0.9)).predict(x)
