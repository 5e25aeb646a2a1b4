import copy
import math
import subprocess
import sys
import time

import numpy as np
import pytest
import reference
import torch
from conftest import in_threads, mlp, regression
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deltaband import Intervals, NotFittedError
from deltaband.baselines import DeepEnsemble, MCDropout


def dropout_mlp(p: float = 0.3, dtype: torch.dtype = torch.float64, inplace: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Dropout(p, inplace), nn.Linear(3, 8), nn.Tanh(), nn.Dropout(p), nn.Linear(8, 1)).to(dtype)


DROPOUTS = nn.Dropout, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout


def with_dropout_on(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model).eval()
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.train()
        if isinstance(module, nn.TransformerEncoderLayer):
            module.training = True  # its parts are not: only keeps it from the shortcut past its dropout
    return model


class Cube(nn.Module):
    """Overflows."""

    def forward(self, x):
        return x**3


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


def ensemble(members: int = 4, dtype: torch.dtype = torch.float64, **settings) -> DeepEnsemble:
    return DeepEnsemble([mlp(seed=i, dtype=dtype) for i in range(members)], **({"noise_std": 0.2} | settings))


def both(dtype: torch.dtype = torch.float64, **settings) -> list:
    settings = {"noise_std": 0.2} | settings
    return [MCDropout(dropout_mlp(dtype=dtype), passes=50, **settings), ensemble(dtype=dtype, **settings)]


# --- MC-dropout: the numbers


@pytest.mark.parametrize("at_most", [4096, 1000, 26, 20, 7, 1])  # rows in one forward; 20 rows are asked about
def test_the_interval_is_that_of_the_mean_and_variance_over_all_passes(monkeypatch, at_most):
    monkeypatch.setattr("deltaband.gradients.CHUNK_ROWS_AT_MOST", at_most)
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
    monkeypatch.setattr("deltaband.gradients.CHUNK_ROWS_AT_MOST", at_most)
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


# --- MC-dropout: random numbers


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


class Pause(nn.Module):
    """Lets other threads have a turn."""

    def forward(self, x):
        time.sleep(1e-4)
        return x


def test_threads_get_the_numbers_of_one(monkeypatch):
    monkeypatch.setattr("deltaband.gradients.CHUNK_ROWS_AT_MOST", 20)
    bands = [MCDropout(nn.Sequential(Pause(), dropout_mlp()), noise_std=0.2, passes=10), ensemble()]
    inputs = [regression(20, seed=i)[0] for i in range(8)]
    expected = [[band.predict(x) for band in bands] for x in inputs]
    wrong = []

    def work(i):
        for _ in range(5):
            for band, right in zip(bands, expected[i], strict=True):
                if not torch.equal(band.predict(inputs[i]).lower, right.lower):
                    wrong.append(i)

    in_threads(work)
    assert wrong == []


def test_many_passes_share_a_forward_of_bounded_size(monkeypatch):
    monkeypatch.setattr("deltaband.gradients.CHUNK_ROWS_AT_MOST", 100)
    model, sizes = dropout_mlp(), []
    model.register_forward_hook(lambda module, args, output: sizes.append(len(args[0])))
    MCDropout(model, noise_std=0.1, passes=1000).predict(regression(9)[0])
    assert sizes[:2] == [2, 1]  # the look at the network before the passes
    assert sizes[2:] == [99] * 90 + [90]


# --- MC-dropout: noise


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
    with pytest.raises(ValueError, match=r"do not vary.*give noise_stds="):
        band.fit(x, np.ones(9))
    assert band.fit(x, np.ones(9), noise_stds=[0.7]).noise_std_ == 0.7


# --- deep ensembles: the numbers


@settings(max_examples=30, deadline=None)
@given(
    members=st.integers(2, 6),
    n=st.integers(1, 30),
    noise_std=st.floats(0, 3),
    level=st.floats(0.01, 0.99),
    seed=st.integers(0, 99),
)
def test_an_ensemble_is_the_mean_and_variance_of_its_members(members, n, noise_std, level, seed):
    models = [mlp(seed=seed + i) for i in range(members)]
    x = regression(n, seed=seed)[0]
    intervals = DeepEnsemble(models, noise_std=noise_std).predict(x, level)
    outputs = np.array([reference.jacobian(model, x)[0] for model in models])
    lower, upper = reference.gaussian_intervals(outputs, noise_std, level)
    np.testing.assert_allclose(intervals.mean, outputs.mean(axis=0), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(intervals.lower, lower, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(intervals.upper, upper, rtol=1e-10, atol=1e-12)


def test_the_noise_of_an_ensemble_is_the_error_of_a_single_member():
    x, y = regression(50)
    band = ensemble(noise_std=None)
    assert band.fit(x.numpy(), y.numpy()[:, None]) is band
    errors = [np.mean((y.numpy() - reference.jacobian(model, x)[0]) ** 2) for model in band.models]
    assert band.noise_std_ == pytest.approx(np.sqrt(np.mean(errors)), rel=1e-12)
    assert torch.equal(band.predict(x).lower, ensemble(noise_std=band.noise_std_).predict(x).lower)


def test_an_ensemble_of_dropout_networks_predicts_in_eval_mode(data):
    models = [dropout_mlp(0.5).train(), mlp().train()]
    mean = DeepEnsemble(models, noise_std=0.1).predict(data[0]).mean
    expected = sum(copy.deepcopy(model).eval()(data[0])[:, 0].detach() for model in models) / 2
    np.testing.assert_allclose(mean, expected, rtol=1e-12)


def test_members_of_different_precision_answer_in_the_higher():
    models = nn.ModuleList([mlp(dtype=torch.float32), mlp(seed=1, dtype=torch.float64)])
    assert DeepEnsemble(models, noise_std=0.1).predict(regression(4)[0]).mean.dtype == torch.float64


# --- what both share


@pytest.mark.parametrize("which", [0, 1])
def test_numpy_in_numpy_out_and_tensor_in_tensor_out_in_the_networks_precision(which):
    band, x = both(dtype=torch.float32)[which], regression(6)[0]
    from_array, from_tensor = band.predict(x.numpy()), band.predict(x)
    assert isinstance(from_array, Intervals)
    for array, tensor in zip(from_array, from_tensor, strict=True):
        assert isinstance(array, np.ndarray)
        assert isinstance(tensor, torch.Tensor)
        assert array.dtype == np.float32
        assert tensor.shape == (6,)
        assert not tensor.requires_grad
        np.testing.assert_array_equal(array, tensor)


@pytest.mark.parametrize("which", [0, 1])
def test_a_list_of_levels_gives_a_column_each(which):
    band, x = both()[which], regression(7)[0]
    many = band.predict(x, level=[0.5, 0.9, 0.99])
    assert many.lower.shape == many.upper.shape == (7, 3)
    assert many.level == (0.5, 0.9, 0.99)
    for column, level in enumerate(many.level):
        one = band.predict(x, level=level)
        assert torch.equal(many.lower[:, column], one.lower)
        assert torch.equal(many.upper[:, column], one.upper)
        assert one.level == level


@pytest.mark.parametrize("which", [0, 1])
def test_no_rows_in_no_rows_out(which):
    band = both(dtype=torch.float32)[which]
    assert band.predict(torch.zeros(0, 3)).lower.shape == (0,)
    empty = band.predict(np.zeros((0, 3)), level=[0.5, 0.9])
    assert empty.lower.shape == (0, 2)
    assert empty.mean.dtype == np.float32


@pytest.mark.parametrize("which", [0, 1])
def test_outputs_of_shape_n_and_n_1_are_the_same(which):
    class Flat(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)[:, 0]

    x = regression(5)[0]
    column = both()[which].predict(x)
    flat = [
        MCDropout(Flat(dropout_mlp()), passes=50, noise_std=0.2),
        DeepEnsemble([Flat(mlp(seed=i)) for i in range(4)], noise_std=0.2),
    ][which].predict(x)
    assert torch.equal(flat.lower, column.lower)


@settings(max_examples=25, deadline=None)
@given(
    which=st.sampled_from([0, 1]),
    noise=st.floats(0, 10),
    levels=st.lists(st.floats(0.01, 0.999), min_size=2, max_size=4),
)
def test_intervals_hold_the_mean_and_widen_with_level_and_noise(which, noise, levels):
    x = 3 * regression(5, seed=3)[0]
    mean, lower, upper = both(noise_std=noise)[which].predict(x, sorted(levels))
    more = both(noise_std=noise + 0.5)[which].predict(x, sorted(levels))
    assert (lower < mean[:, None]).all()
    assert (upper > mean[:, None]).all()
    assert (torch.diff(upper - lower, dim=1) >= 0).all()
    assert (more.width > upper - lower).all()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("context", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_callers_context_does_not_matter(which, context):
    band, (x, y) = both(dtype=torch.float32, noise_std=None)[which], regression(20)
    outside = band.fit(x, y).predict(x)
    with context():
        inside = band.fit(x, y).predict(x)
        assert torch.equal(inside.lower, outside.lower)


@pytest.mark.parametrize("which", [0, 1])
def test_the_users_networks_are_not_touched_for_a_moment(which):
    x, y = regression(30)
    nets = [nn.Sequential(Cube(), nn.BatchNorm1d(3), dropout_mlp()).double().train() for _ in range(2)]
    seen = []

    def look(module, args, output):
        seen.append({m.training for net in nets for m in net.modules()})

    for net in nets:
        net[2][1].weight.requires_grad_(False)
        net.register_forward_hook(look)
    before = copy.deepcopy([net.state_dict() for net in nets])
    band = [MCDropout(nets[0], passes=20), DeepEnsemble(nets)][which]
    band.fit(x, y)
    band.predict(x)
    with pytest.raises(ValueError, match="outputs hold"):
        band.predict(x * 1e200)
    with pytest.raises(ValueError, match="could not be evaluated"):
        band.predict(x[:, :2])
    assert seen
    assert all(modes == {True} for modes in seen)
    for net, state in zip(nets, before, strict=True):
        assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())
        assert [w.requires_grad for w in net[2].parameters()] == [False, True, True, True]
        assert all(w.grad is None for w in net.parameters())
        assert [len(m._forward_hooks) for m in net.modules()] == [1] + [0] * 8


def test_new_weights_count_from_the_next_call_on(data):
    for band in both():
        before = band.predict(data[0]).mean
        with torch.no_grad():
            (band.model if isinstance(band, MCDropout) else band.models[0])[-1].bias += 4.0
        shift = 4.0 if isinstance(band, MCDropout) else 1.0
        np.testing.assert_allclose(band.predict(data[0]).mean, before + shift, rtol=1e-9)


@pytest.mark.parametrize("which", [0, 1])
def test_without_a_noise_predict_wants_a_fit_first(which, data):
    band = both(noise_std=None)[which]
    with pytest.raises(NotFittedError, match=r"give (MCDropout|DeepEnsemble) noise_std=, or call fit"):
        band.predict(data[0])
    assert not hasattr(band, "noise_std_")
    band.fit(*data)
    assert len(band.predict(data[0])) == 80


@pytest.mark.parametrize("which", [0, 1])
def test_a_failed_fit_changes_nothing(which, data):
    band = both()[which]
    with pytest.raises(ValueError, match="targets hold NaN in row 3"):
        band.fit(data[0], torch.where(torch.arange(80) == 3, torch.nan, data[1]))
    assert band.noise_std_ == 0.2


# --- bad input


@pytest.mark.parametrize("which", [0, 1])
def test_bad_rows_are_named(which, data):
    band, (x, y) = both()[which], data
    bad = x.clone()
    bad[3, 0] = float("nan")
    for ask in (band.predict, lambda x: band.fit(x, y)):
        with pytest.raises(ValueError, match="inputs hold NaN in row 3"):
            ask(bad)
    with pytest.raises(ValueError, match=r"could not be evaluated on a batch of shape \(2, 2\)"):
        band.predict(x[:, :2])
    with pytest.raises(TypeError, match="inputs must be a tensor or a NumPy array"):
        band.predict([[1.0, 2.0, 3.0]])
    with pytest.raises(ValueError, match="80 inputs, 79 targets"):
        band.fit(x, y[:79])
    with pytest.raises(ValueError, match="held-out data are empty"):
        band.fit(x[:0], y[:0])
    with pytest.raises(TypeError, match="targets must be"):
        band.fit(x, None)


@pytest.mark.parametrize("at_most", [4096, 7])
def test_bad_outputs_are_named_by_their_row_in_x(monkeypatch, at_most):
    monkeypatch.setattr("deltaband.gradients.CHUNK_ROWS_AT_MOST", at_most)
    x = regression(30)[0]
    x[17] = 1e200
    nets = [nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.2), Cube()).double() for _ in range(2)]
    with pytest.raises(ValueError, match=r"^the network's outputs hold an infinite value in row 17"):
        MCDropout(nets[0], noise_std=0.1, passes=5).predict(x)
    with pytest.raises(ValueError, match=r"^models\[0\]: the network's outputs hold an infinite value in row 17"):
        DeepEnsemble(nets, noise_std=0.1).predict(x)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("level", [0.0, 1.0, 95, float("nan"), [], [0.5, 1.5]])
def test_a_level_outside_zero_and_one_is_refused(which, level, data):
    with pytest.raises(ValueError, match="level must be between 0 and 1"):
        both()[which].predict(data[0], level)


@pytest.mark.parametrize("make", [lambda s: MCDropout(dropout_mlp(), noise_std=s), lambda s: ensemble(noise_std=s)])
def test_a_noise_that_is_no_standard_deviation_is_refused(make):
    for value in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="noise_std must be a finite number"):
            make(value)
    with pytest.raises(TypeError, match="noise_std must be a number"):
        make("little")


@pytest.mark.parametrize("noise_stds", [[], [0.1, 0.0], -1.0, [np.nan], [[0.1]], [np.inf]])
def test_candidates_for_the_noise_must_be_positive_numbers(noise_stds, data):
    with pytest.raises(ValueError, match="noise_stds must be positive finite numbers"):
        MCDropout(dropout_mlp(), passes=5).fit(*data, noise_stds=noise_stds)


@pytest.mark.parametrize(
    "setting", [{"passes": 1}, {"passes": 10.0}, {"passes": True}, {"seed": -1}, {"seed": True}, {"seed": None}]
)
def test_passes_and_seed_must_be_whole_numbers(setting):
    with pytest.raises(ValueError, match=f"{next(iter(setting))} must be a whole number"):
        MCDropout(dropout_mlp(), **setting)


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


def test_networks_that_cannot_be_used_are_refused(data):
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got str"):
        MCDropout("model")
    with pytest.raises(TypeError, match=r"models\[1\]: model must be a torch\.nn\.Module, got str"):
        DeepEnsemble([mlp(), "model"])
    with pytest.raises(TypeError, match="a list of networks, got one network"):
        DeepEnsemble(mlp())
    for few in ([], [mlp()]):
        with pytest.raises(ValueError, match=f"at least 2 networks, got {len(few)}"):
            DeepEnsemble(few)
    twice = mlp()
    with pytest.raises(ValueError, match="more than once"):
        DeepEnsemble([twice, mlp(), twice])
    two_outputs = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2)).double()
    with pytest.raises(ValueError, match=r"^the network returns 2 outputs a row"):
        MCDropout(two_outputs, noise_std=0.1).predict(data[0])
    with pytest.raises(ValueError, match=r"models\[1\]: the network returns 2 outputs a row"):
        DeepEnsemble([mlp(), two_outputs], noise_std=0.1).predict(data[0])


def test_importing_the_baselines_does_not_load_scipy():
    code = "import sys, deltaband.baselines; print('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
