"""Networks and inputs that are awkward to handle, and that users have: each as it would be by plain autograd."""

import numpy as np
import pytest
import torch
from torch import nn

import tests.reference as reference
from deltaband import Exact, Nystrom, PredictionIntervals

FORMS = [(Exact(), 60), (Exact(), 20), (Nystrom(20), 20)]  # n > p, n < p, and landmarks that are all rows
pytestmark = [
    pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated"),
]


def rows(n, *shape, dtype=torch.float64):
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def trained(model, x):
    """A step of training, after which old-style weight_norm holds a weight that cannot be copied."""
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    model(x).square().mean().backward()
    optimiser.step()
    model.zero_grad()
    model(x)  # its weight is part of a graph now
    return model


def check(model, x, engine, rtol=1e-8):
    """Compare q with that of gradients of single rows by plain autograd, and the user's data with what they were."""
    given = x.clone()
    band = PredictionIntervals(model, damping=1.0, engine=engine).fit(given, torch.zeros(len(x)), progress=False)
    J = reference.jacobians(model, [(row.clone()[None],) for row in x]).reshape(len(x), -1)
    for few in (x[:1], x[:3], x):
        expected = [reference.variance(J, 1.0, g) for g in J[: len(few)]]
        np.testing.assert_allclose(band.variance(few.clone()), expected, rtol=rtol)
    assert torch.equal(given, x)
    return band


class Normed(nn.Sequential):
    def __init__(self, norm):
        super().__init__(norm(nn.Linear(3, 5)), nn.Tanh(), norm(nn.Linear(5, 1)))


@pytest.mark.parametrize(("engine", "n"), FORMS)
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_old_style_norms_of_weights_work_after_training(norm, engine, n):
    torch.manual_seed(0)
    x = rows(n, 3)
    model = trained(Normed(norm).double(), x).eval()
    band = check(model, x, engine)
    weight = model[0].weight
    band.predict(x)
    assert model[0].weight is weight  # the user's model is as it was


class InPlace(nn.Module):
    """Works on what it is given."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 6), nn.Linear(6, 1)

    def forward(self, x):
        x -= 1.0
        x.mul_(2.0).clamp_(-3, 3)
        h = self.body(x)
        return self.head(torch.tanh_(h))


@pytest.mark.parametrize(("engine", "n"), FORMS)
def test_a_network_that_works_on_its_input_in_place_gets_a_copy(engine, n):
    torch.manual_seed(0)
    x = rows(n, 3)
    band = check(InPlace().double(), x, engine)
    array = x.numpy().copy()
    band.calibrate(array, np.zeros(n))
    means = [band.predict(array).mean, np.concatenate([band.predict(array[i : i + 1]).mean for i in range(n)])]
    np.testing.assert_allclose(*means, rtol=1e-12)
    assert np.array_equal(array, x.numpy())


class OfNumbers(nn.Module):
    """A row is a single number."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(1, 10), nn.Linear(10, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x[:, None]))).squeeze(1)


@pytest.mark.parametrize(("engine", "n"), FORMS)
def test_rows_without_dimensions_are_numbers(engine, n):
    torch.manual_seed(0)
    x = rows(n)
    band = check(OfNumbers().double(), x, engine)
    assert band.predict(x[:5].numpy()).mean.shape == (5,)
    with pytest.raises(ValueError, match="one row per example, got a single number"):
        band.predict(x[0])


def test_numbers_for_a_network_of_one_feature_are_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"if each row is one feature, pass x\[:, None\]"):
        PredictionIntervals(nn.Linear(1, 1), damping=1.0).fit(rows(30), torch.zeros(30))


@pytest.mark.parametrize("as_array", [False, True])
def test_inputs_in_float64_are_those_of_a_network_in_float32(as_array):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)), rows(60, 3)
    given = x.numpy() if as_array else x
    double = PredictionIntervals(model, damping=1.0).fit(given, torch.zeros(60), progress=False)
    single = PredictionIntervals(model, damping=1.0).fit(x.float(), torch.zeros(60), progress=False)
    for ours, expected in zip(double.predict(given)[:3], single.predict(x.float())[:3], strict=True):
        np.testing.assert_array_equal(ours, expected)
    for few in (given[:1], given[:2]):  # one and a few rows take other ways
        np.testing.assert_allclose(double.variance(few), single.variance(x.float())[: len(few)], rtol=1e-4)
