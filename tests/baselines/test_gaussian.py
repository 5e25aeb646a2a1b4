import copy
import subprocess
import sys
import time
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tests.reference as reference
from deltaband import Intervals, NotFittedError
from deltaband.baselines import DeepEnsemble, MCDropout
from tests.support.networks import Cube, dropout_mlp, in_threads, mlp, regression


def ensemble(members: int = 4, dtype: torch.dtype = torch.float64, **settings) -> DeepEnsemble:
    return DeepEnsemble([mlp(seed=i, dtype=dtype) for i in range(members)], **({"noise_std": 0.2} | settings))


def both(dtype: torch.dtype = torch.float64, **settings) -> list:
    settings = {"noise_std": 0.2} | settings
    return [MCDropout(dropout_mlp(dtype=dtype), passes=50, **settings), ensemble(dtype=dtype, **settings)]


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


@pytest.mark.parametrize("make", [lambda nets: MCDropout(nets[0], passes=50), DeepEnsemble])
@pytest.mark.parametrize("context", [nullcontext, torch.inference_mode])
def test_frozen_networks_are_as_good_as_others(make, context):
    nets, (x, y) = [dropout_mlp(), mlp()], regression(20)
    expected = make(nets).fit(x, y).predict(x).lower
    for net in nets:
        net.requires_grad_(False)
    with context():
        assert torch.equal(make(nets).fit(x, y).predict(x).lower, expected)
    assert not any(w.requires_grad for net in nets for w in net.parameters())


def test_the_precision_of_a_frozen_network_is_still_checked():
    for half in (dropout_mlp(dtype=torch.float16), dropout_mlp(dtype=torch.float16).requires_grad_(False)):
        for make in (MCDropout, lambda model: DeepEnsemble([model, mlp()])):
            with pytest.raises(TypeError, match=r"parameter '1\.weight' is torch.float16, expected float32 or float64"):
                make(half)


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


class Pause(nn.Module):
    """Lets other threads have a turn."""

    def forward(self, x):
        time.sleep(1e-4)
        return x


def test_threads_get_the_numbers_of_one(monkeypatch):
    monkeypatch.setattr("deltaband.network.network.CHUNK_ROWS_AT_MOST", 20)
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
    monkeypatch.setattr("deltaband.network.network.CHUNK_ROWS_AT_MOST", at_most)
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
