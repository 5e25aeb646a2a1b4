import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tests.reference as reference
from deltaband.baselines import MCDropout
from tests.support.networks import Cube, dropout_mlp, mlp, regression

DROPOUTS = nn.Dropout, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout


def with_dropout_on(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model).eval()
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.train()
        if isinstance(module, nn.TransformerEncoderLayer):
            module.training = True  # its parts are not: only keeps it from the shortcut past its dropout
    return model


class Scripted(nn.Dropout):
    """Dropout whose random numbers are read from a table, one a row, so that each pass is known."""

    def __init__(self):
        super().__init__(0.5)
        self.table = np.random.default_rng(0).uniform(0, 2, 100_000)
        self.position = 0

    def forward(self, x):
        if not self.training:
            return x
        factors = self.table[self.position : self.position + len(x)]
        self.position += len(x)
        return x * torch.from_numpy(factors).to(x.dtype)[:, None]


def scripted_mlp() -> nn.Sequential:
    return nn.Sequential(mlp()[0], nn.Tanh(), Scripted(), mlp()[2])


# --- the numbers


@pytest.mark.parametrize("at_most", [4096, 1000, 26, 20, 7, 1])  # rows in one forward; 20 rows are asked about
def test_the_interval_is_that_of_the_mean_and_variance_over_all_passes(monkeypatch, at_most):
    monkeypatch.setattr("deltaband.network.network.CHUNK_ROWS_AT_MOST", at_most)
    model, x, passes = scripted_mlp(), regression(20)[0], 203
    intervals = MCDropout(model, noise_std=0.3, passes=passes).predict(x, level=0.8)
    naive = with_dropout_on(model)
    parts = [reference.dropout_passes(naive, part, passes, 0) for part in x.split(at_most)]
    outputs = np.concatenate(parts, axis=1)
    lower, upper = reference.gaussian_intervals(outputs, 0.3, 0.8)
    assert outputs.std(axis=0).min() > 1e-3
    np.testing.assert_allclose(intervals.mean, outputs.mean(axis=0), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(intervals.lower, lower, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(intervals.upper, upper, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("at_most", [4096, 26, 7])
def test_the_likelihood_is_the_log_of_the_mean_density_over_passes(monkeypatch, at_most):
    monkeypatch.setattr("deltaband.network.network.CHUNK_ROWS_AT_MOST", at_most)
    model, (x, y), passes = scripted_mlp(), regression(20), 203
    band = MCDropout(model, passes=passes)
    naive = with_dropout_on(model)
    parts = [reference.dropout_passes(naive, part, passes, 0) for part in x.split(at_most)]
    outputs = np.concatenate(parts, axis=1)
    sigma = [2.0, 0.5, 0.3]
    expected = [reference.dropout_log_likelihood(outputs, y.numpy(), s) for s in sigma]
    np.testing.assert_allclose(band.log_likelihood(x, y, sigma), expected, rtol=1e-11)
    np.testing.assert_allclose(band.log_likelihood(x.numpy(), y[:, None], 0.5), expected[1:2], rtol=1e-11)


def test_a_likelihood_too_small_for_a_float_is_still_a_number():
    x, y = regression(5)
    band = MCDropout(scripted_mlp(), passes=100)
    value = band.log_likelihood(x, y + 1000, 0.1)[0]
    assert value == pytest.approx(-0.5 * 1000**2 / 0.1**2, rel=0.01)


@pytest.mark.parametrize("noise_std", [1e-160, 1e-200, 5e-324])
def test_a_noise_whose_square_is_no_number_is_unlikely_where_a_pass_errs_and_likely_where_none_does(noise_std):
    x, y = regression(5)
    constant = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1)).double()
    nn.init.zeros_(constant[1].weight)
    nn.init.constant_(constant[1].bias, 0.5)
    band = MCDropout(constant, passes=10)
    assert band.log_likelihood(x, y, [1.0, noise_std])[1] == -np.inf
    density = -math.log(noise_std) - 0.5 * math.log(2 * math.pi)
    assert band.log_likelihood(x, torch.full_like(y, 0.5), noise_std)[0] == pytest.approx(density)
    assert band.fit(x, y, noise_stds=[noise_std, 1.0]).noise_std_ == 1.0


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_variance_of_dropout_before_one_layer_is_the_closed_form(p):
    passes, noise_std = 20_000, 0.2
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(p), nn.Linear(6, 1)).double()
    x = torch.randn(7, 6, dtype=torch.float64)
    intervals = MCDropout(model, noise_std=noise_std, passes=passes).predict(x, level=0.9)
    w = model[1].weight.detach()[0]
    terms = w**2 * x**2 * p / (1 - p)
    variance = terms.sum(dim=1)
    found = (intervals.width / (2 * 1.6448536269514722)) ** 2 - noise_std**2
    excess = (1 - 6 * p * (1 - p)) / (p * (1 - p))  # of one mask; the excess kurtosis of a sum is smaller
    kurtosis = 3 + excess * (terms**2).sum(dim=1) / variance**2
    assert (abs(found / variance - 1) < 4 * ((kurtosis - 1) / passes).sqrt()).all()
    assert (abs(intervals.mean - model.eval()(x)[:, 0].detach()) < 4 * (variance / passes).sqrt()).all()


@pytest.mark.parametrize("inplace", [False, True])
def test_a_deep_network_agrees_with_a_loop_over_passes_up_to_chance(inplace):
    model, x, passes = dropout_mlp(inplace=inplace), regression(6)[0], 3000
    mine = MCDropout(model, noise_std=0.0, passes=passes, seed=5).predict(x, level=0.9)
    # the loop needs a fresh input each time, the first layer may work in place
    naive = with_dropout_on(model)
    outputs = np.concatenate([reference.dropout_passes(naive, x.clone(), 1, seed) for seed in range(passes)])
    std = outputs.std(axis=0)
    kurtosis = ((outputs - outputs.mean(axis=0)) ** 4).mean(axis=0) / std**4
    found = mine.width.numpy() / (2 * 1.6448536269514722)
    assert (abs(mine.mean.numpy() - outputs.mean(axis=0)) < 4 * std * math.sqrt(2 / passes)).all()
    assert (abs(found**2 / std**2 - 1) < 4 * np.sqrt(2 * (kurtosis - 1) / passes)).all()


class Encoder(nn.Module):
    """In eval mode and without gradients PyTorch takes a shortcut past the dropout of its layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.layer(x)[:, 0])


class Images(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.convolution, self.dropout, self.head = nn.Conv2d(1, 6, 3), dropout, nn.Linear(24, 1)

    def forward(self, x):
        return self.head(self.dropout(self.convolution(x)).flatten(1))[:, 0]


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Encoder, (5, 3, 4)),
        (lambda: Images(nn.Dropout2d(0.4)), (5, 1, 4, 4)),
        (lambda: Images(nn.AlphaDropout(0.4)), (5, 1, 4, 4)),
        (lambda: Images(nn.FeatureAlphaDropout(0.4)), (5, 1, 4, 4)),
    ],
    ids=["transformer", "Dropout2d", "AlphaDropout", "FeatureAlphaDropout"],
)
def test_every_kind_of_dropout_module_is_on_and_rows_of_any_shape_go(make, shape):
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    width = MCDropout(model, noise_std=0.0, passes=400).predict(x).width
    outputs = reference.dropout_passes(with_dropout_on(model), x, 400, 1)
    assert (outputs.std(axis=0) > 0.01).all()
    np.testing.assert_allclose(width / 3.92, outputs.std(axis=0), rtol=0.25)


def test_whole_numbers_stay_indices_of_an_embedding():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Dropout(1e-12), nn.Linear(8, 1)).eval()
    x = torch.tensor([[0, 1], [4, 2], [3, 3]])
    mean = MCDropout(model, noise_std=0.1, passes=10).predict(x).mean
    np.testing.assert_allclose(mean, model(x)[:, 0].detach(), rtol=1e-5)


def test_batch_norm_stays_in_eval_mode(data):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(1e-12), nn.BatchNorm1d(3), nn.Linear(3, 1)).double().train()
    model[1].running_mean += 3.0
    intervals = MCDropout(model, noise_std=0.5, passes=20).predict(data[0])
    expected = copy.deepcopy(model).eval()(data[0])[:, 0].detach()
    np.testing.assert_allclose(intervals.mean, expected, rtol=1e-9)
    np.testing.assert_allclose(intervals.width, 2 * 1.959963984540054 * 0.5, rtol=1e-12)


# --- random numbers


def test_the_same_seed_gives_the_same_numbers_whatever_the_global_generator_does(data):
    model = dropout_mlp()
    first = MCDropout(model, noise_std=0.1, passes=30).predict(data[0])
    torch.rand(17)
    band = MCDropout(model, noise_std=0.1, passes=30)
    for again in (band.predict(data[0]), band.predict(data[0])):
        assert torch.equal(again.lower, first.lower)
        assert torch.equal(again.mean, first.mean)
    other = MCDropout(model, noise_std=0.1, passes=30, seed=1).predict(data[0])
    assert not torch.isclose(other.mean, first.mean, rtol=1e-9).any()


def test_the_global_generator_is_left_as_it_was(data):
    x, y = data
    band = MCDropout(nn.Sequential(Cube(), dropout_mlp()), passes=30)
    before = torch.get_rng_state()
    band.fit(x, y)
    band.predict(x)
    with pytest.raises(ValueError, match="outputs hold"):
        band.predict(x * 1e200)
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_and_passes_have_masks_of_their_own():
    x = torch.ones(200, 3, dtype=torch.float64)
    mean = MCDropout(dropout_mlp(), noise_std=0.1, passes=2).predict(x).mean
    assert len(mean.unique()) > 100


def test_many_passes_share_a_forward_of_bounded_size(monkeypatch):
    monkeypatch.setattr("deltaband.network.network.CHUNK_ROWS_AT_MOST", 100)
    model, sizes = dropout_mlp(), []
    model.register_forward_hook(lambda module, args, output: sizes.append(len(args[0])))
    MCDropout(model, noise_std=0.1, passes=1000).predict(regression(9)[0])
    assert sizes[:2] == [2, 1]  # the look at the network before the passes
    assert sizes[2:] == [99] * 90 + [90]


# --- noise


def test_fit_takes_the_noise_of_highest_likelihood():
    x, y = regression(60)
    band = MCDropout(dropout_mlp(), passes=200)
    grid = (3.0, 1.0, 0.5, 0.1)
    assert band.fit(x, y, noise_stds=grid) is band
    likelihoods = band.log_likelihood(x, y, grid)
    assert 0 < np.argmax(likelihoods) < 3
    assert band.noise_std_ == grid[np.argmax(likelihoods)]
    wide = MCDropout(dropout_mlp(), noise_std=band.noise_std_, passes=200).predict(x)
    assert torch.equal(band.predict(x).lower, wide.lower)


@settings(max_examples=15, deadline=None)
@given(noise=st.floats(0.05, 1.0), scale=st.sampled_from([1e-3, 1.0, 1e4]))
def test_fit_without_candidates_finds_the_noise_at_any_scale_of_the_targets(noise, scale):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 1))
    model = nn.Sequential(nn.Dropout(1e-6), nn.Linear(1, 1)).double()
    nn.init.constant_(model[1].weight, scale)
    nn.init.zeros_(model[1].bias)
    y = scale * (x[:, 0] + noise * rng.standard_normal(400))
    assert MCDropout(model, passes=3).fit(x, y).noise_std_ == pytest.approx(noise * scale, rel=0.25)


def test_targets_that_do_not_vary_need_candidates():
    band, x = MCDropout(dropout_mlp(), passes=20), regression(9)[0]
    with pytest.raises(ValueError, match=r"all targets are equal.*give noise_stds="):
        band.fit(x, np.ones(9))
    assert band.fit(x, np.ones(9), noise_stds=[0.7]).noise_std_ == 0.7


# --- bad input


@pytest.mark.parametrize("noise_stds", [[], [0.1, 0.0], -1.0, [np.nan], [[0.1]], [np.inf]])
def test_candidates_for_the_noise_must_be_positive_numbers(noise_stds, data):
    with pytest.raises(ValueError, match="noise_stds must be positive finite numbers"):
        MCDropout(dropout_mlp(), passes=5).fit(*data, noise_stds=noise_stds)


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("passes", value) for value in (1, 10.0, True)), *(("seed", value) for value in (-1, True, None, 2**63, 2**64))],
)
def test_passes_and_seed_must_be_whole_numbers(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a whole number"):
        MCDropout(dropout_mlp(), **{name: value})


def test_the_largest_seed_is_one(data):
    assert len(MCDropout(dropout_mlp(), noise_std=0.1, passes=5, seed=2**63 - 1).predict(data[0])) == 80


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(nn.functional.dropout(x, 0.5, self.training))


@pytest.mark.parametrize("model", [mlp(), dropout_mlp(p=0.0), Functional()], ids=["none", "p = 0", "functional"])
def test_a_network_without_dropout_is_refused(model):
    with pytest.raises(ValueError, match=r"no dropout module .* with p > 0, so nothing in it is stochastic"):
        MCDropout(model)


def test_dropout_that_the_forward_goes_past_is_noticed(data):
    class Past(Functional):
        def __init__(self):
            super().__init__()
            self.forgotten = nn.Dropout(0.5)

    band = MCDropout(Past().double(), noise_std=0.1, passes=5)
    with pytest.raises(ValueError, match="forward does not pass through any"):
        band.predict(data[0])
