"""A copy of the model that is kept between calls never answers for a model that has changed."""

import collections
import functools

import numpy as np
import pytest
import torch
from torch import nn

from deltaband import PredictionIntervals
from deltaband.network.model_copy import ModelCopy
from tests.support.networks import regression

X, Y = regression(60)
pytestmark = pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")


class Gain:
    """State outside of any module."""

    def __init__(self, value=1.0):
        self.value = value

    def hook(self, module, args, output):
        return output * self.value


class Slots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Holder(nn.Module):
    """Multiplies by what `read` finds in its attribute `held`."""

    def __init__(self, held, read):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1).double()
        self.held, self.read = held, read

    def forward(self, x):
        return self.linear(x) * self.read(self.held)


def nested(depth):
    return [1.0] if depth == 0 else [nested(depth - 1)]


def deepest(value):
    while isinstance(value[0], list):
        value = value[0]
    return value


def set_item(value, new):
    value[0] = new


HELD = {
    "partial": (lambda: functools.partial(dict, v=[1.0]), lambda h: h()["v"][0], lambda h: set_item(h()["v"], 3.0)),
    "deque": (lambda: collections.deque([1.0]), lambda h: h[0], lambda h: set_item(h, 3.0)),
    "bytearray": (lambda: bytearray([1]), lambda h: h[0], lambda h: set_item(h, 3)),
    "slots": (lambda: Slots(1.0), lambda h: h.value, lambda h: setattr(h, "value", 3.0)),
    "object": (lambda: Gain(1.0), lambda h: h.value, lambda h: setattr(h, "value", 3.0)),
    "long list": (lambda: [1.0] * 2000, lambda h: h[0], lambda h: set_item(h, 3.0)),
    "deep list": (lambda: nested(9), lambda h: deepest(h)[0], lambda h: set_item(deepest(h), 3.0)),
    "array in a list": (lambda: [np.ones(2)], lambda h: h[0][0], lambda h: set_item(h[0], 3.0)),
    "tensor in a list": (lambda: [torch.ones(500)], lambda h: h[0][7], lambda h: h[0].data.view(-1).fill_(3.0)),
    "large tensor": (lambda: torch.ones(2**17), lambda h: h[7], lambda h: h.data[7].fill_(3.0)),
    "bound method": (lambda: Gain(1.0).hook, lambda h: h.__self__.value, lambda h: setattr(h.__self__, "value", 3.0)),
}


@pytest.mark.parametrize("name", HELD)
def test_state_of_any_kind_is_seen_by_the_next_call(name):
    make, read, change = HELD[name]
    held = make()
    model = Holder(held, read)
    band = PredictionIntervals(model, damping=1.0).fit(X, Y, progress=False)
    band.predict(X)
    change(held)
    np.testing.assert_allclose(band.predict(X).mean, model(X)[:, 0].detach(), rtol=1e-12)


def test_a_hook_that_is_a_method_is_seen_by_the_next_call():
    gain, model = Gain(), nn.Linear(3, 1).double()
    model.register_forward_hook(gain.hook)
    band = PredictionIntervals(model, damping=1.0).fit(X, Y, progress=False)
    band.predict(X)
    gain.value = 4.0
    np.testing.assert_allclose(band.predict(X).mean, model(X)[:, 0].detach(), rtol=1e-12)


@pytest.mark.parametrize(("before", "after"), [(1, True), (1, 1.0)])
def test_an_equal_value_of_another_type_is_another_value(before, after):
    model = Holder(before, lambda held: 2.0 if type(held) is type(before) and str(held) == str(before) else 5.0)
    band = PredictionIntervals(model, damping=1.0).fit(X, Y, progress=False)
    band.predict(X)
    model.held = after
    np.testing.assert_allclose(band.predict(X).mean, model(X)[:, 0].detach(), rtol=1e-12)


@pytest.mark.parametrize("persistent", [True, False])
def test_one_element_of_a_large_buffer(persistent):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1).double()
            self.register_buffer("table", torch.ones(5000), persistent=persistent)

        def forward(self, x):
            return self.linear(x) * self.table[4321]

    model = Scaled()
    band = PredictionIntervals(model, damping=1.0).fit(X, Y, progress=False)
    band.predict(X)
    model.table.data[4321] = 3.0
    np.testing.assert_allclose(band.predict(X).mean, model(X)[:, 0].detach(), rtol=1e-12)


def test_a_network_that_records_its_inputs_does_not_grow():
    class Recording(nn.Linear):
        def __init__(self):
            super().__init__(3, 1, dtype=torch.float64)
            self.seen = []

        def forward(self, x):
            self.seen.append(x)
            return super().forward(x)

    model = Recording()
    band = PredictionIntervals(model, damping=1.0).fit(X, Y, progress=False)
    for _ in range(50):
        band.predict(X)
    assert model.seen == []
    assert len(band.spec.network().eval_copy.seen) == 0


def test_weights_are_hashed_anew_by_what_depends_on_them():
    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 100), nn.Tanh(), nn.Linear(100, 1)).double()

    def write(model):  # an element that no call compares
        model[0].weight.data.view(-1)[1] = 3.0

    model = network()
    band = PredictionIntervals(model, damping=1.0)
    write(model)
    band.fit(X, Y, progress=False).calibrate(X + 0.01, Y)  # nothing has changed since fit
    model = network()
    band = PredictionIntervals(model, damping=1.0).partial_fit(X[:30], Y[:30])
    write(model)
    with pytest.raises(ValueError, match="weights are not the same for all parts"):
        band.partial_fit(X[30:], Y[30:])
    model = network()
    band = PredictionIntervals(model, damping=1.0).fit(X, Y, progress=False)
    write(model)
    with pytest.raises(ValueError, match="weights have changed since fit"):
        band.calibrate(X + 0.01, Y)


def test_what_cannot_be_copied_says_so_as_ever():
    with pytest.raises(ValueError, match="is not initialised: call the lazy module once"):
        PredictionIntervals(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1)), damping=1.0)
    with pytest.raises(TypeError, match="on the meta device and has no weights"):
        PredictionIntervals(nn.Linear(3, 1, device="meta"), damping=1.0)


@pytest.mark.parametrize("make", [torch.Tensor.conj, lambda z: z.imag.neg(), lambda z: torch._neg_view(z.real)])
def test_buffers_that_are_views_of_a_kind(make):
    model = nn.Linear(3, 1).double()
    model.register_buffer("f", make(torch.randn(3, dtype=torch.cfloat)))
    assert PredictionIntervals(model, damping=1.0).fit(X, Y, progress=False).predict(X).mean.isfinite().all()


def test_the_copy_is_kept_for_networks_that_return_a_variance(monkeypatch):
    made, init = [], ModelCopy.__init__
    monkeypatch.setattr(ModelCopy, "__init__", lambda self, *a, **k: made.append(1) or init(self, *a, **k))
    model = nn.Linear(3, 2).double()
    band = PredictionIntervals(model, damping=1.0, variance="log_variance").fit(X, Y, progress=False)
    first = band.predict(X).upper
    made.clear()
    np.testing.assert_array_equal(band.predict(X).upper, first)
    assert not made
    with torch.no_grad():
        model.bias += 1.0
    assert not np.allclose(band.predict(X).upper, first)
    assert made


def test_what_a_partial_function_holds_is_seen_by_the_next_call():
    gain, table = Gain(1.0), {"scale": 1.0}
    output = functools.partial(lambda held, y, of: y * held.value * of["scale"], gain, of=table)
    model = nn.Linear(3, 1).double()
    band = PredictionIntervals(model, damping=1.0, output=output).fit(X, Y, progress=False)
    for change in (lambda: setattr(gain, "value", 2.0), lambda: table.update(scale=3.0)):
        band.predict(X)
        change()
        expected = (model(X) * gain.value * table["scale"])[:, 0].detach()
        np.testing.assert_allclose(band.predict(X).mean, expected, rtol=1e-12)
