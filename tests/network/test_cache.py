"""Networks from a cache are those of the model as it is now, and cost no copy and no hash where nothing has changed."""

import copy
import pickle
import re
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from deltaband import DeltabandWarning, Exact, PredictionIntervals
from deltaband.network import model_copy
from deltaband.network.model_copy import ModelCopyCache
from deltaband.network.network import LOOPED_ROWS, Network
from tests import reference
from tests.support.networks import in_threads, mlp, regression

X, Y = regression(60)


class Normed(nn.Module):
    """A network with buffers, dropout and attributes that its outputs depend on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 1))
        self.temperature = 1.0
        self.options = {"shift": [0.0]}
        self.offset = torch.zeros(1)
        self.double()
        self.offset = self.offset.double()

    def forward(self, x):
        return self.body(x) * self.temperature + self.options["shift"][0] + self.offset


def fitted(model, engine=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeltabandWarning)
        return PredictionIntervals(model, damping=1.0, engine=engine or Exact()).fit(X, Y, progress=False)


def test_an_unchanged_model_is_copied_once_and_called_once_per_batch_and_certificate(monkeypatch):
    model = Normed().train()
    band = fitted(model)
    band.predict(X[:1])
    calls = []
    model.body.register_forward_hook(lambda module, args, output: calls.append(len(output)))
    band.predict(X[:30])  # notices the hook
    calls.clear()
    copied = []
    monkeypatch.setattr(model_copy, "eval_copy", lambda *args: copied.append(args))
    monkeypatch.setattr(model_copy, "_digest", lambda tensor: copied.append(tensor))
    for rows in (1, 1, 30):
        band.predict(X[:rows])
    assert copied == []
    assert calls == [1, 1, 30, 1]  # all rows for the certificate; torch.func shows one


def cached(cache, model, *given, head=None):
    return Network(cache.get(model, *given), head=head)


def test_a_cache_gives_the_same_copy_until_something_changes():
    model, cache = Normed(), ModelCopyCache()
    first = cached(cache, model)
    assert cached(cache, model, head=lambda y: y).model_copy is first.model_copy
    model.train()
    model.eval()
    model(X).sum().backward()
    model.zero_grad()
    assert cached(cache, model).model_copy is first.model_copy


def in_place(model):
    with torch.no_grad():
        model.body[0].weight.add_(0.5)


def through_data(model):
    model.body[0].weight.data.mul_(1.5)


def replaced_data(model):
    model.body[0].weight.data = model.body[0].weight.data * 1.5


def replaced(model):
    model.body[0].weight = nn.Parameter(model.body[0].weight.detach() * 1.5)


def another_module(model):
    model.body[4] = nn.Linear(6, 1).double()


def loaded(model):
    model.load_state_dict({name: w * 1.5 for name, w in model.state_dict().items()})


def trained(model):
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    model(X).square().mean().backward()
    optimiser.step()


def buffer_in_place(model):
    model.body[1].running_mean.add_(1.0)


def buffer_through_data(model):
    model.body[1].running_var.data.fill_(7.0)


def buffer_replaced(model):
    model.body[1].running_mean = torch.ones(6, dtype=torch.float64)


def attribute(model):
    model.temperature = 2.0


def nested_attribute(model):
    model.options["shift"][0] = 3.0


def tensor_attribute(model):
    model.offset.add_(1.0)


def activation(model):
    model.body[2] = nn.ReLU()


def hook(model):
    model.body.register_forward_hook(lambda module, args, output: 2 * output)


CHANGES = [in_place, through_data, replaced_data, replaced, another_module, loaded, trained]
BUFFERS = [buffer_in_place, buffer_through_data, buffer_replaced]
ATTRIBUTES = [attribute, nested_attribute, tensor_attribute, activation, hook]


@pytest.mark.parametrize("change", [*CHANGES, *BUFFERS, *ATTRIBUTES])
def test_whatever_changes_is_seen_by_the_next_prediction(change):
    model, cache = Normed(), ModelCopyCache()
    model(X)
    model.eval()
    cached(cache, model).gradients(X)
    change(model)
    network, fresh = cached(cache, model), Network(model)
    outputs, g = network.gradients(X)
    torch.testing.assert_close(outputs, model(X).detach())
    assert torch.equal(g.rows(), fresh.gradients(X)[1].rows())
    assert network.fingerprint == fresh.fingerprint


@pytest.mark.parametrize("change", [*CHANGES, *BUFFERS, activation])
def test_changed_weights_are_warned_of_and_no_others(change):
    model = Normed()
    band = fitted(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        band.predict(X[:2])
        model.train()
        model.zero_grad()
        model.eval()
        band.predict(X[:2])
    change(model)
    for rows in (1, 5):
        with pytest.warns(DeltabandWarning, match="weights have changed since fit"):
            band.predict(X[:rows])


def test_parameters_that_are_frozen_or_moved_are_noticed():
    model, cache = mlp(), ModelCopyCache()
    assert cached(cache, model).n_parameters == 41
    model[0].requires_grad_(False)
    assert cached(cache, model).n_parameters == 9
    model[0].requires_grad_(True)
    assert cached(cache, model).n_parameters == 41
    model.float()
    assert cached(cache, model).dtype == torch.float32
    assert cached(cache, model, ["2.*"]).n_parameters == 9
    assert cached(cache, model, "all", lambda y: y[:, 0]).outputs(X).shape == (60, 1)
    assert cached(cache, mlp(3, 4)).n_parameters == 21


def test_a_write_that_misses_the_sampled_elements_is_found_by_a_hash_in_time(monkeypatch):
    model = mlp(3, 100)
    band = fitted(model)
    band.predict(X[:1])
    model[0].weight.data.view(-1)[1] += 1.0  # sampled is every 18th
    monkeypatch.setattr(model_copy, "HASH_SECONDS", 0.0)
    monkeypatch.setattr(model_copy, "HASH_SHARE", 1e9)
    band.spec.networks._thread.entry.expires = 0.0
    with pytest.warns(DeltabandWarning, match="weights have changed since fit"):
        band.predict(X[:1])


def test_an_expired_entry_hands_on_what_it_knows_about_inputs(monkeypatch):
    monkeypatch.setattr(model_copy, "HASH_SECONDS", 0.0)
    monkeypatch.setattr(model_copy, "HASH_SHARE", 1e9)
    model, cache = Normed(), ModelCopyCache()
    network = cached(cache, model)
    network.validate(X)
    again = cached(cache, model).model_copy
    assert again is not network.model_copy
    assert again.accepted == network.model_copy.accepted != {}


def test_a_copy_whose_buffers_a_call_has_written_to_is_not_used_again():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1).double()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.layer(x)

    model, cache = Counting(), ModelCopyCache()
    for _ in range(3):
        network = cached(cache, model)
        assert network.eval_copy.calls == 0
        network.outputs(X)
    assert model.calls == 0


def test_a_model_made_in_inference_mode_is_never_cached():
    with torch.inference_mode():
        model = mlp()
    cache = ModelCopyCache()
    first = cached(cache, model)
    assert cached(cache, model).model_copy is not first.model_copy
    before = first.outputs(X)
    with torch.inference_mode():
        model[2].bias += 1.0
    torch.testing.assert_close(cached(cache, model).outputs(X), before + 1.0)


def test_a_network_is_validated_once_for_each_kind_of_inputs_and_again_for_several_rows():
    calls = []
    model = mlp()
    model.register_forward_hook(lambda module, args, output: calls.append(len(output)))
    network = Network(model)
    network.outputs(X[:1])
    assert calls == [1, 1]
    network.outputs(X[:1])
    assert calls == [1, 1, 1]
    calls.clear()
    network.outputs(X)
    assert calls == [2, 1, 60]
    Network(network.model_copy, head=lambda y: 2 * y).copy().gradients(X)
    assert calls[3:] == [60, 1]  # all rows for the certificate; torch.func shows one
    calls.clear()
    network.outputs(X.float())
    assert calls == [2, 1, 60]


def test_a_batch_is_checked_although_a_single_row_was_accepted():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1).double()

        def forward(self, x):
            return self.layer(x - x.mean(dim=0) * (len(x) > 1))

    network = Network(Centred())
    network.gradients(X[:1])
    with pytest.raises(ValueError, match="depends on the other rows"):
        network.gradients(X)


def test_rows_that_fail_where_others_of_their_kind_did_not_are_explained():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 1))
    network = Network(model)
    good, bad = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[1, 2, 30], [4, 5, 6]])
    network.gradients(good)
    for ask in (network.gradients, network.outputs, network.with_layers(network.probe(good).layers).gradients):
        with pytest.raises(ValueError, match=r"could not be evaluated on a batch of shape \(2, 3\).*Embedding"):
            ask(bad)


@pytest.mark.parametrize("rows", range(1, LOOPED_ROWS + 3))
@pytest.mark.parametrize("n_outputs", [1, 3])
def test_few_rows_have_the_gradients_of_many(rows, n_outputs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, n_outputs)).double()
    expected = reference.jacobians(model, [(x[None],) for x in X[:rows]], list(dict(model.named_parameters())))
    network = Network(model)
    for each in (network, network.with_layers(network.probe(X).layers)):
        outputs, g = each.gradients(X[:rows])
        torch.testing.assert_close(outputs, model(X[:rows]).detach())
        np.testing.assert_allclose(g.rows(), np.concatenate(list(expected.swapaxes(0, 1))), rtol=1e-10, atol=1e-12)


def test_a_network_cannot_be_changed_and_others_share_its_copy():
    network = Network(mlp())
    layers, *sizes = network.probe(X)
    other = network.with_layers(layers)
    assert other.layers == layers
    assert sizes == [1, 1, (1,)]
    assert other.eval_copy is network.eval_copy
    assert network.layers is None
    own = other.copy(own_weights=True)
    assert own.layers is layers
    assert own.eval_copy[0].weight.data_ptr() != network.eval_copy[0].weight.data_ptr()


@pytest.mark.parametrize("engine", [Exact(), None], ids=["exact", "auto"])
def test_eight_threads_predict_as_one_does(engine):
    model = Normed().train()
    band = fitted(model, engine)
    expected = [band.predict(X[i : i + 1 + 7 * i]).upper for i in range(8)]
    wrong = []

    def work(i):
        for _ in range(20):
            if not torch.equal(band.predict(X[i : i + 1 + 7 * i]).upper, expected[i]):
                wrong.append(i)

    in_threads(work)
    assert wrong == []
    assert model.training


@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
def test_predictions_while_another_thread_replaces_weights_end_with_the_new_ones():
    model = Normed().eval()
    band = fitted(model)
    stop, failed = threading.Event(), []

    def replace():
        for _ in range(50):
            model.body[0].weight = nn.Parameter(model.body[0].weight.detach() + 0.01)
            model.body[1].running_mean = model.body[1].running_mean + 0.01
            with torch.no_grad():
                model.body[4].bias.add_(0.01)
        stop.set()

    def work(i):
        if i == 0:
            replace()
        while not stop.is_set():
            try:
                band.predict(X[:3])
            except ValueError as error:
                if not re.search("another thread trains it|changes from call to call", str(error)):
                    failed.append(error)
            except Exception as error:
                failed.append(error)

    in_threads(work, 4)
    assert failed == []
    torch.testing.assert_close(band.predict_mean(X), model(X)[:, 0].detach())


def test_a_band_can_be_copied_and_pickled():
    band = fitted(Normed().eval())
    expected = band.predict(X).upper
    other = copy.deepcopy(band)
    assert torch.equal(other.predict(X).upper, expected)
    with torch.no_grad():
        band.model.body[4].bias.add_(1.0)
    assert torch.equal(other.predict(X).upper, expected)
    cache = ModelCopyCache()
    cached(cache, mlp())
    assert isinstance(pickle.loads(pickle.dumps(cache)), ModelCopyCache)
    assert isinstance(copy.copy(cache), ModelCopyCache)


def test_tensors_of_every_layout_and_type_are_sampled():
    tensors = [
        torch.arange(100.0),
        torch.arange(100.0).reshape(10, 10).T,
        torch.ones(3, 4, 5)[:, ::2],
        torch.ones(7, dtype=torch.bfloat16),
        torch.ones(7, dtype=torch.bool),
        torch.ones(7, dtype=torch.complex128),
        torch.zeros(()),
        torch.zeros(0, 3),
    ]
    for tensor in tensors:
        read = model_copy._sample(tensor, model_copy.SAMPLED_ELEMENTS)
        before = read()
        assert read() == before
        if tensor.numel():
            tensor.data.copy_(torch.zeros_like(tensor) if bool(tensor.any()) else torch.ones_like(tensor))
            assert read() != before
