"""Models in low precision, through a float32 copy; adapters beside frozen parts; autocast in `forward`."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import tests.reference as reference
from deltaband import ClassificationIntervals, Exact, PredictionIntervals, storage
from deltaband.network import precision
from deltaband.network.network import Network

DAMPING = 0.5
pytestmark = pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")


def network(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    model[1].running_mean.normal_()
    return model.to(dtype)


def rows(n=60):
    X = torch.randn(n, 3, generator=torch.Generator().manual_seed(1))
    return X, X.sin().sum(dim=1)


def expected(model, X, new):
    model = copy.deepcopy(model).double().eval()
    J, g = (reference.jacobian(model, each.double())[1][:, None] for each in (X, new))
    return reference.answers(J, DAMPING, g)[0][:, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_low_precision_are_fitted_through_a_float32_copy(dtype, tmp_path):
    model, (X, y) = network(dtype), rows()
    state = copy.deepcopy(model.state_dict())
    band = PredictionIntervals(model, damping=DAMPING, engine=Exact(), precision="float32").fit(X[:50], y[:50])
    np.testing.assert_allclose(band.variance(X[50:]), expected(model, X[:50], X[50:]), rtol=1e-4)
    in_their_precision = PredictionIntervals(model, damping=DAMPING, engine=Exact(), precision="float32")
    in_their_precision.fit(X[:50].to(dtype), y[:50].to(dtype))
    assert in_their_precision.predict(X[50:].to(dtype)).mean.dtype == torch.float32
    assert all(
        torch.equal(state[name], now) and now.dtype == state[name].dtype for name, now in model.state_dict().items()
    )
    band.save(tmp_path / "band")
    again = storage.load(tmp_path / "band", model)
    assert torch.equal(again.predict(X[50:]).upper, band.predict(X[50:]).upper)


def test_a_classifier_in_low_precision_is_the_same_as_its_float32_copy():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).bfloat16()
    X, labels = rows()[0], torch.arange(60) % 3
    band = ClassificationIntervals(model, damping=DAMPING, precision="float32").fit(X, labels)
    plain = ClassificationIntervals(copy.deepcopy(model).float(), damping=DAMPING).fit(X, labels)
    assert torch.equal(band.predict(X).probability.upper, plain.predict(X).probability.upper)


def test_tied_weights_and_buffers_are_copied_once_and_as_float32():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.there, self.back = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.back.weight, self.head = self.there.weight, nn.Linear(7, 1)
            self.register_buffer("shift", torch.ones(7))

        def forward(self, x):
            return self.head(self.back(torch.tanh(self.there(x))) + self.shift)

    torch.manual_seed(0)
    model = Tied().half()
    band = PredictionIntervals(model, damping=DAMPING, precision="float32")
    module = band.spec.network().eval_copy
    assert module.back.weight is module.there.weight
    assert {w.dtype for w in (*module.parameters(), *module.buffers())} == {torch.float32}
    assert band.spec.network().model_copy.own_bytes == 4 * (28 + 8 + 7)
    band.fit(torch.arange(60) % 7, torch.randn(60))
    assert band.n_parameters_ == 28 + 8


def test_changed_weights_are_noticed_and_new_ones_used():
    model, (X, y) = network(torch.bfloat16), rows()
    band = PredictionIntervals(model, damping=DAMPING, precision="float32").fit(X, y)
    before = band.predict_mean(X)
    with torch.no_grad():
        model[5].bias += 1
    with pytest.warns(UserWarning, match="weights have changed"):
        assert torch.allclose(band.predict_mean(X), before + 1, atol=0.02)


def test_the_copy_counts_as_memory(monkeypatch):
    model, (X, y) = network(torch.bfloat16), rows()
    own = 4 * sum(each.numel() for each in (*model.parameters(), *model.buffers()) if each.is_floating_point())
    plan = PredictionIntervals(model, damping=DAMPING, precision="float32", memory=1e9).plan(X, y)
    assert plan.memory == 1e9 - own
    monkeypatch.setattr(precision, "free_memory", lambda: own - 1)
    with pytest.raises(MemoryError, match="the float32 copy of the model takes"):
        PredictionIntervals(model, damping=DAMPING, precision="float32")


class Cast(nn.Module):
    """Autocast in `forward`, as mixed-precision training has it."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 16), nn.Linear(16, 1)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            h = torch.tanh(self.body(x))
            with torch.autocast("cpu", enabled=False):
                h = h.float() * 2
            return self.head(h)


class Plain(Cast):
    def forward(self, x):
        return self.head(2 * torch.tanh(self.body(x)))


def test_autocast_in_forward_is_off_in_the_copy_and_on_in_the_model():
    torch.manual_seed(0)
    model, (X, y) = Cast(), rows()
    plain = Plain().double()
    plain.load_state_dict(model.state_dict())
    band = PredictionIntervals(model, damping=DAMPING, engine=Exact(), precision="float32").fit(X[:50], y[:50])
    np.testing.assert_allclose(band.variance(X[50:]), expected(plain, X[:50], X[50:]), rtol=1e-4)
    assert model(X).dtype == torch.bfloat16  # as ever
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(TypeError, match=r"computes 'body' in torch\.bfloat16.*precision='float32'"):
        PredictionIntervals(model, damping=DAMPING).fit(X, y)
    rows_by = Network(band.spec.network().model_copy).rows_by_vmap_work(X[:4])
    assert rows_by  # torch.func, too


def test_a_forward_that_converts_to_low_precision_itself_is_refused():
    class Converting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x):
            return self.layer(x.bfloat16())

    with pytest.raises(ValueError, match="forward converts to a lower precision itself"):
        PredictionIntervals(Converting().bfloat16(), damping=DAMPING, precision="float32").fit(*rows())


@pytest.mark.parametrize("given", ["float64", 32, torch.float32])
def test_another_precision_is_refused(given):
    with pytest.raises(ValueError, match="precision must be 'float32'"):
        PredictionIntervals(network(torch.float32), damping=DAMPING, precision=given)


class Adapted(nn.Module):
    """LoRA: a frozen layer in bfloat16, and a product of two small matrices beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x.to(self.base.weight.dtype)).float() + self.up(self.down(x))


def test_adapters_on_a_frozen_base_have_the_gradients_of_plain_autograd():
    torch.manual_seed(0)
    base, (X, y) = nn.Linear(3, 8).bfloat16(), rows()
    model = nn.Sequential(Adapted(base), nn.Tanh(), nn.Linear(8, 1))  # as it is: no gradient passes through the base
    band = PredictionIntervals(model, damping=DAMPING, engine=Exact()).fit(X[:50], y[:50])
    J, g = (reference.jacobian(model, each)[1][:, None] for each in (X[:50], X[50:]))
    np.testing.assert_allclose(band.variance(X[50:]), reference.answers(J, DAMPING, g)[0][:, 0], rtol=1e-4)

    model = nn.Sequential(Adapted(base), nn.Tanh(), Adapted(nn.Linear(8, 1).bfloat16()))
    with pytest.raises(ValueError, match=r"'\S+base.weight', which they pass through, rounds them.*'float32'"):
        PredictionIntervals(model, damping=DAMPING).fit(X, y)

    class Converted(Adapted):
        def forward(self, x):
            return self.base(x.to(self.base.weight.dtype)) + self.up(self.down(x))

    model = nn.Sequential(Converted(base), nn.Tanh(), Converted(nn.Linear(8, 1).bfloat16()))
    band = PredictionIntervals(model, damping=DAMPING, engine=Exact(), precision="float32").fit(X[:50], y[:50])
    assert band.n_parameters_ == 2 * (3 + 8 + 8 + 1)
    np.testing.assert_allclose(band.variance(X[50:]), expected(model, X[:50], X[50:]), rtol=1e-4)
