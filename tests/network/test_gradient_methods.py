"""How gradients come by: what is tried and verified again; and what the user's module keeps."""

import contextlib
import copy
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import tests.reference as reference
from deltaband import Exact, PredictionIntervals
from deltaband.network import per_row
from deltaband.network.layers.hooks import math_attention
from deltaband.network.network import Network
from tests.support.networks import mlp, probed

pytestmark = pytest.mark.filterwarnings("ignore:the network has p", "ignore:n − p")


def rows(n=30, d=3, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def plain_rows(model, x, names, output=0):
    """J of plain autograd, the columns in the order of `names`."""
    by_name = {name: reference.jacobians(model, [(row[None],) for row in x], [name])[:, output] for name in names}
    return np.concatenate([by_name[name] for name in names], axis=1)


# --- a network that does something else with later rows


class Later(nn.Module):
    """A weight that some rows use past its layer."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x):
        late = x[:, :1] > 5
        return self.head(torch.tanh(self.layer(x))) + late * F.linear(x, self.layer.weight).sum(dim=1, keepdim=True)


def test_a_weight_that_later_rows_use_past_its_layer_is_found_out():
    torch.manual_seed(0)
    x = rows()
    network = probed(Network(Later()), x)
    network.gradients(x)
    assert network.model_copy.uncertified == set()
    late = x.clone()
    late[:, 0] = 6.0
    _, gradients = network.gradients(late)
    np.testing.assert_allclose(
        gradients.rows(),
        np.concatenate([plain_rows(network.eval_copy, late, network.layers.order, o) for o in (0, 1)]),
        rtol=1e-5,
        atol=1e-6,
    )
    assert network.model_copy.uncertified == {"layer.weight", "layer.bias"}
    mixed = probed(Network(Later()), torch.cat([x[:4], late[:4]]))
    assert set(mixed.layers.rest) == {"layer.weight", "layer.bias"}


def test_what_is_right_is_certified_in_every_way():
    torch.manual_seed(0)
    x = rows()
    for model in (mlp(dtype=torch.float32), Later(), recurrent(batch_first=True)):
        network = probed(Network(model), x)
        for way in (network, network.with_layers(None)) if network.rows_by_vmap_work(x) else (network,):
            way.gradients(x)
            way.gradients(x[:1])
        assert network.model_copy.uncertified == set()


def recurrent(**options):
    return nn.Sequential(nn.Unflatten(1, (3, 1)), nn.LSTM(1, 1, **options), First())


class First(nn.Module):
    def forward(self, given):
        return given[0][:, 0]


def test_rows_that_depend_on_others_are_found_out_later_too():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x):
            return self.layer(x - (x > 5) * x.mean(dim=0))

    x = rows()
    network = probed(Network(Centred()), x)
    for way in (network, network.with_layers(None)):
        way.gradients(x)
        with pytest.raises(ValueError, match="depends on the other rows of the batch"):
            way.gradients(x + 10)


class Masked(nn.Module):
    """A layer of its own kind, called with a mask that has no rows where a row asks for it."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = Scaled(), nn.Linear(3, 1)

    def forward(self, x):
        late = bool((x > 5).any())
        return self.head(self.layer(x, torch.tensor([1.0, 0.5, 2.0]) if late else None))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x, mask=None):
        return torch.tanh(x * self.scale) if mask is None else torch.tanh(x * self.scale * mask)


def test_rows_that_call_a_layer_otherwise_get_their_gradients_from_a_loop():
    torch.manual_seed(0)
    model, x = Masked(), rows()
    network = probed(Network(model), x)
    assert network.layers.rest == ()
    for n in (7, 3, 1):  # the mask, too, has three numbers
        late = rows(n) + 10
        _, gradients = network.gradients(late)
        expected = plain_rows(model, late, network.layers.order)
        np.testing.assert_allclose(gradients.rows(), expected, rtol=1e-5, atol=1e-6)


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 1)

    def forward(self, x, padding=None):
        return self.head(self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0][:, 0])


def test_a_mask_that_only_later_batches_have_costs_no_loop(monkeypatch):
    torch.manual_seed(0)
    model, x = Attentive(), rows(30, 20).reshape(30, 5, 4)
    network = probed(Network(model), x)
    monkeypatch.setattr(per_row, "looped", None)
    padding = torch.arange(5) >= torch.tensor([[2], [5], [3]]).repeat(10, 1)
    _, gradients = network.gradients({"x": x, "padding": padding})
    rows_of = [(row[None], mask[None]) for row, mask in zip(x, padding, strict=True)]
    expected = np.concatenate([reference.jacobians(model, rows_of, [n])[:, 0] for n in network.layers.order], axis=1)
    np.testing.assert_allclose(gradients.rows(), expected, rtol=1e-5, atol=1e-6)


def test_a_row_that_goes_past_all_weights_has_no_gradient():
    class Past(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.table = nn.Linear(3, 1), nn.EmbeddingBag(5, 1, mode="max")

        def forward(self, x):
            if bool((x > 5).all()):
                return x.sum(dim=1, keepdim=True)
            return self.layer(x) + self.table(x.abs().long().clamp(max=4))

    x = rows()
    network = probed(Network(Past()), x)
    assert network.layers.vmap is False
    assert float(network.gradients(x + 10)[1].squared_norms.max()) == 0.0
    assert float(network.gradients(x)[1].squared_norms.min()) > 0.0


# --- tables


class Places(nn.Module):
    """Places that no row has to itself, in a network that looks them up in one of two ways."""

    def __init__(self, index):
        super().__init__()
        self.words, self.places, self.head, self.index = nn.Embedding(9, 4), nn.Embedding(12, 4), nn.Linear(4, 1), index

    def forward(self, x):
        return self.head(torch.tanh(self.words(x) + self.places(self.index(x.shape[1]))).mean(dim=1))


@pytest.mark.parametrize("steps", [3, 8, 12])  # 8 are as many as the rows that the network is tried on
@pytest.mark.parametrize("index", [torch.arange, lambda t: torch.arange(t)[None]], ids=["(t,)", "(1, t)"])
def test_places_that_all_rows_share_have_gradients_of_each_row(steps, index):
    torch.manual_seed(0)
    model, x = Places(index), torch.randint(0, 9, (30, steps))
    network = probed(Network(model), x)
    assert network.layers.rest == ()
    for part in (x, x[:steps], x[:1]):
        _, gradients = network.gradients(part)
        expected = plain_rows(model, part, network.layers.order)
        np.testing.assert_allclose(gradients.rows(), expected, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(gradients.inner(gradients), expected @ expected.T, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"sparse": True}, {"max_norm": 0.7}], ids=str)
def test_a_table_is_had_without_its_options_for_training(kind, options):
    torch.manual_seed(0)
    table = kind(9, 4, **options)
    pooled = [] if kind is nn.EmbeddingBag else [nn.Flatten(), nn.Linear(20, 4)]
    model = nn.Sequential(table, *pooled, nn.Tanh(), nn.Linear(4, 1))
    x = torch.randint(0, 9, (30, 5))
    weight = table.weight.detach().clone()
    bands = [PredictionIntervals(model, damping=1.0, engine=Exact()).fit(x, torch.zeros(30))]
    predicted = bands[0].predict_mean(x)
    assert torch.equal(table.weight, weight)  # max_norm would have shortened it
    torch.testing.assert_close(predicted, model(x)[:, 0].detach())
    twice = bands[0].predict_mean(x)  # now that the model itself has
    assert torch.equal(predicted, twice)
    for name in ("scale_grad_by_freq", "sparse"):
        setattr(table, name, False)
    bands.append(PredictionIntervals(model, damping=1.0, engine=Exact()).fit(x, torch.zeros(30)))
    torch.testing.assert_close(*(band.variance(x) for band in bands))


# --- the user's module, and his process


def test_the_module_is_as_it_was_after_an_exception_at_any_of_its_calls():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).train()
    left = [0]  # calls until one fails

    def fail(module, args, output):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt  # of no kind that anything here would catch

    model[1].register_forward_hook(fail)
    state = copy.deepcopy(model.state_dict())
    band = PredictionIntervals(model, damping=1.0, engine=Exact())
    interrupted = 0
    while left[0] <= 0:  # until a fit has fewer calls than it would take to fail
        interrupted += 1
        left[0] = interrupted
        with contextlib.suppress(KeyboardInterrupt):
            band.fit(rows(), torch.zeros(30))
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert all(module.training for module in model.modules())
        assert all(w.grad is None and w.requires_grad for w in model.parameters())
        assert [len(module._forward_hooks) for module in model] == [0, 1, 0]
    assert interrupted > 6
    assert band.n_rows_ == 30


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, within torch.compile
def test_wrapped_networks_are_the_networks_within():
    torch.manual_seed(0)
    model = mlp(dtype=torch.float32)
    q = PredictionIntervals(model, damping=1.0).fit(rows(), torch.zeros(30)).variance(rows())
    in_place = copy.deepcopy(model)
    in_place.compile()
    wrapped = [torch.compile(model), nn.DataParallel(model), nn.DataParallel(torch.compile(model)), in_place]
    for each in [*wrapped, torch.compile(nn.DataParallel(model)), torch.optim.swa_utils.AveragedModel(model)]:
        band = PredictionIntervals(each, damping=1.0).fit(rows(), torch.zeros(30))
        torch.testing.assert_close(band.variance(rows()), q)


def test_the_switch_for_attention_is_turned_back_by_whoever_leaves_last():
    enabled = torch.backends.cuda.flash_sdp_enabled
    first, second = threading.Event(), threading.Event()
    before, within = enabled(), []

    def work():
        with math_attention():
            first.set()
            second.wait(10)
            within.append(enabled())

    thread = threading.Thread(target=work)
    thread.start()
    first.wait(10)
    with math_attention():
        pass
    second.set()
    thread.join()
    assert within == [False]
    assert enabled() == before


def test_an_activation_that_a_layer_keeps_does_not_get_in_the_way():
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.kept = nn.Parameter(torch.randn(3)), None

        def forward(self, x):
            self.kept = torch.softmax(x * self.scale, dim=1)
            return self.kept

    model = nn.Sequential(Kept(), nn.Linear(3, 1))
    model(rows())
    band = PredictionIntervals(model, damping=1.0, engine=Exact()).fit(rows(), torch.zeros(30))
    assert torch.isfinite(band.variance(rows())).all()
    assert model[0].kept.requires_grad


@pytest.mark.parametrize("batch_size", [8, 16, 500])
def test_a_fit_finds_out_that_later_rows_use_a_weight_past_its_layer(batch_size):
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 30), nn.Linear(30, 1)

        def forward(self, x):
            past = torch.relu(x[:, 0] - 1) * (x @ self.inner.weight.T).sum(dim=1)
            return self.outer(torch.tanh(self.inner(x)))[:, 0] + past

    torch.manual_seed(0)
    X = torch.randn(120, 4)
    X = X[X[:, 0].argsort()]
    loader = [(X[i : i + batch_size], torch.zeros(len(X[i : i + batch_size]))) for i in range(0, 120, batch_size)]
    band = PredictionIntervals(Gate(), damping=1.0, engine=Exact())
    exact = band.fit(loader).effective_parameters_
    assert exact == pytest.approx(reference.effective_parameters(reference.jacobian(band.model, X)[1], 1.0), rel=1e-4)
    if batch_size == 500:  # such rows are among those that were looked at
        assert "in some batches" not in band.summary()
    else:
        assert "in some batches by a plain loop" in band.summary()
