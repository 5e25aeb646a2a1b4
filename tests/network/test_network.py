import copy
import threading

import numpy as np
import pytest
import torch
from torch import nn

import tests.reference as reference
from deltaband import Exact, Nystrom, PredictionIntervals, RandomProjection, RobustFrequentDirections
from deltaband.network.gradient_batch import GradientBatch
from deltaband.network.network import Network
from tests.support.networks import in_threads, mlp, regression


class Tied(nn.Module):
    """One weight matrix used twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 5).requires_grad_(False)
        self.head = nn.Linear(5, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x))).squeeze(-1)


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 4, 2), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.5))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.body(x[:, None]).flatten(1))


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x):
        return self.used(x)[:, 0]


def weight_normed():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 1))


NETWORKS = {
    "mlp": mlp,
    "tied": Tied,
    "frozen": Frozen,
    "convolutional": Convolutional,
    "unused parameter": Unused,
    "weight norm": weight_normed,
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_those_of_plain_autograd_in_eval_mode(name, dtype):
    torch.manual_seed(0)
    model = NETWORKS[name]().to(dtype)
    X = regression(20)[0].to(dtype)
    model(X)  # in train mode: BatchNorm has now something to remember
    outputs, gradients = Network(model).gradients(X)
    expected_outputs, J = reference.jacobian(copy.deepcopy(model).eval(), X)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    np.testing.assert_allclose(outputs.detach()[:, 0], expected_outputs, atol=tolerance)
    np.testing.assert_allclose(gradients.rows(), J, atol=tolerance)
    assert gradients.rows().dtype == dtype


def test_frozen_parameters_are_left_out_and_tied_ones_count_once():
    assert Network(Frozen()).n_parameters == 6
    assert Network(Tied()).n_parameters == 9 + 3 + 3 + 4


def state_of(model):
    return {
        "training": [m.training for m in model.modules()],
        "requires_grad": [w.requires_grad for w in model.parameters()],
        "grad": [w.grad for w in model.parameters()],
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "identity": [id(w) for w in model.parameters()],
        "hooks": [len(m._forward_hooks) for m in model.modules()],
    }


def assert_same(before, after):
    for key in ("training", "requires_grad", "grad", "identity", "hooks"):
        assert before[key] == after[key], key
    for name, value in before["state"].items():
        assert torch.equal(value, after["state"][name]), name


@pytest.mark.parametrize("training", [True, False])
def test_the_users_module_is_left_as_it_was(training):
    model = Convolutional().train(training)
    model.head.register_forward_hook(lambda module, args, output: None)
    before = state_of(model)
    X = torch.randn(10, 3)
    network = Network(model)
    network.validate(X)
    network.gradients(X)
    with pytest.raises((ValueError, TypeError)):
        network.validate(torch.randn(4, 99, 3))
    with pytest.raises((TypeError, ValueError)):
        network.gradients(torch.randn(4, 1))
    assert_same(before, state_of(model))


def test_the_copy_shares_the_parameters_and_nothing_else():
    model = Convolutional()
    copied = Network(model).eval_copy
    pairs = list(zip(model.parameters(), copied.parameters(), strict=True))
    assert all(a.data_ptr() == b.data_ptr() and a is not b for a, b in pairs)
    assert not {id(b) for b in model.buffers()} & {id(b) for b in copied.buffers()}
    assert not {id(m) for m in model.modules()} & {id(m) for m in copied.modules()}
    assert not any(m.training for m in copied.modules())


def test_old_style_weight_norm_with_its_non_leaf_weight_is_copied_too():
    with pytest.warns(FutureWarning):
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 1))
    X = torch.randn(6, 3)
    model(X)
    _, J = reference.jacobian(model, X)
    np.testing.assert_allclose(Network(model).gradients(X)[1].rows(), J, atol=1e-5)


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_the_callers_context_does_not_matter(context, model):
    X = torch.randn(5, 3, dtype=torch.float64)
    expected = Network(model).gradients(X)[1].rows()
    with context():
        inside = Network(model).gradients(X.clone())[1].rows()
    assert torch.equal(expected, inside)


def test_a_model_made_in_inference_mode_is_as_good_as_another():
    def made():
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).eval()

    X, plain = torch.randn(6, 3), made()
    _, J = reference.jacobian(plain, X)
    with torch.inference_mode():
        model = made()
        model.load_state_dict(plain.state_dict())
    np.testing.assert_allclose(Network(model).gradients(X)[1].rows(), J, atol=1e-5)
    with torch.inference_mode():
        np.testing.assert_allclose(Network(model).gradients(X)[1].rows(), J, atol=1e-5)
    assert all(w.is_inference() for w in model.parameters())


@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
@pytest.mark.parametrize("engine", [Exact(), Nystrom(8), RandomProjection(8), RobustFrequentDirections(8)])
def test_the_default_device_does_not_matter(engine):
    model, X, y = mlp(), torch.randn(30, 3), torch.randn(30)

    def asked():
        band = PredictionIntervals(model, damping=1.0, engine=engine).fit(X, y)
        alone = PredictionIntervals(model, damping=1.0).fit(X[:1], y[:1])
        return band.predict(X).upper, alone.leverage(X)

    expected = asked()
    with torch.device("meta"):  # any other than the model's
        assert all(map(torch.equal, expected, asked()))


def test_eight_threads_get_the_numbers_of_one():
    model = Convolutional().train()
    inputs = [torch.randn(30, 3, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    expected = [Network(model).gradients(x)[1].rows() for x in inputs]
    wrong = []

    def work(i):
        for _ in range(25):
            if not torch.equal(Network(model).gradients(inputs[i])[1].rows(), expected[i]):
                wrong.append(i)

    in_threads(work)
    assert wrong == []
    assert model.training


def test_inner_products_are_those_of_the_rows():
    a, b = torch.randn(7, 500), torch.randn(4, 500)
    batch = GradientBatch.concatenate([GradientBatch.of(a[:3]), GradientBatch.of(a[3:])])
    expected = a.double() @ b.double().T
    np.testing.assert_allclose(batch.inner(GradientBatch.of(b)), expected, rtol=1e-12)
    np.testing.assert_allclose(batch.rows(), a)
    np.testing.assert_allclose(batch.squared_norms, a.double().square().sum(dim=1))
    assert len(batch) == 7


def test_inner_products_do_not_depend_on_how_many_columns_go_at_once(monkeypatch):
    a, b = torch.randn(7, 500), torch.randn(4, 500)
    whole = GradientBatch.of(a).inner(GradientBatch.of(b))
    monkeypatch.setattr("deltaband.network.network.CHUNK_BYTES", 8 * 7 * 13)
    np.testing.assert_allclose(GradientBatch.of(a).inner(GradientBatch.of(b)), whole, rtol=1e-9)


def test_a_chunk_is_bounded_by_memory():
    assert Network(mlp(3, 4)).chunk_rows(torch.randn(5, 3)) == 4096
    wide = Network(mlp(1000, 1000, torch.float32))  # a million parameters: 4 MB a row
    assert 1 <= wide.chunk_rows(torch.randn(5, 1000)) * wide.n_parameters * 4 <= 256 * 2**20
    # few parameters, but 8 · 64 · 64 activations a row
    images = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.LazyLinear(1))
    x = torch.randn(2, 3, 64, 64)
    images(x)
    images[3].requires_grad_(False)
    assert Network(images).chunk_rows(x) * 8 * 64 * 64 * 4 <= 256 * 2**20


def test_a_fingerprint_tells_weights_and_buffers_apart(model):
    before = Network(model).fingerprint
    assert Network(copy.deepcopy(model)).fingerprint == before
    with torch.no_grad():
        model[2].bias += 1e-12
    after = Network(model).fingerprint
    assert [name for name in before if before[name] != after[name]] == ["2.bias"]
    model[1] = nn.ReLU()
    assert Network(model).fingerprint != after
    norm = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    before = Network(norm).fingerprint
    norm(torch.randn(5, 3))
    assert Network(norm).fingerprint != before


class Returns(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.what = what

    def forward(self, x):
        return self.what(self.layer(x))


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        (lambda y: (y[:, 0], y[:, 1].exp()), TypeError, r"output=lambda out: out\[0\]"),
        (lambda y: {"mean": y[:, 0]}, TypeError, "one tensor, got dict"),
        (lambda y: y.sum(), ValueError, r"shape \(\) for a batch of 2 rows"),
        (lambda y: y[:1, 0], ValueError, r"expected \(2,\)"),
        (lambda y: y[:, 0].round().long(), TypeError, "real numbers"),
    ],
)
def test_a_network_without_numbers_for_each_row_is_refused(what, error, message):
    with pytest.raises(error, match=message):
        Network(Returns(what)).validate(torch.randn(5, 3))


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        x -= 5
        return self.layer(x.relu_())


def test_a_network_that_works_on_its_input_in_place_does_not_touch_the_users_data():
    model = InPlace()
    X = torch.randn(6, 3) + 5
    before = X.clone()
    network = Network(model)
    network.validate(X)
    outputs, gradients = network.gradients(X)
    assert torch.equal(X, before)
    _, J = reference.jacobian(model, X.clone())
    np.testing.assert_allclose(gradients.rows(), J, atol=1e-6)
    assert torch.allclose(outputs, model(before.clone()), atol=1e-6)


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x - x.mean(dim=0))


@pytest.mark.parametrize(
    "model", [Centred(), nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 1))]
)
def test_a_network_that_mixes_the_rows_of_a_batch_is_refused(model):
    with pytest.raises(ValueError, match=r"depends on the other rows|evaluated on a single row"):
        Network(model).validate(torch.randn(5, 3))


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


def test_buffers_written_in_forward_are_those_of_the_copy():
    model = Counter()
    network = Network(model)
    network.validate(torch.randn(5, 3))
    with pytest.raises(TypeError, match=r"torch\.func could not"):
        network.gradients(torch.randn(5, 3))
    assert model.calls == 0


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 1), nn.Linear(3, 1)
        self.skip = lambda x: self.a(x)

    def forward(self, x):
        return self.b(x.tanh()) + self.skip(x)


def test_weights_reached_past_the_module_tree_are_refused():
    with pytest.raises(TypeError, match="reached past the module tree"):
        Network(Hidden()).gradients(torch.randn(5, 3))


class Itself(nn.Linear):
    def __deepcopy__(self, memo):
        return self


def test_a_module_that_copies_to_itself_is_refused_and_stays_in_train_mode():
    model = nn.Sequential(Itself(3, 1))
    with pytest.raises(TypeError, match="parts of the model itself"):
        Network(model)
    assert all(module.training for module in model.modules())


def test_backward_hooks_do_not_get_in_the_way():
    model = mlp()
    X = torch.randn(4, 3, dtype=torch.float64)
    _, J = reference.jacobian(model, X)
    model[0].register_full_backward_hook(lambda module, grad_input, grad_output: None)
    np.testing.assert_allclose(Network(model).gradients(X)[1].rows(), J, atol=1e-12)
    assert len(model[0]._backward_hooks) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, within torch.compile
def test_wrappers_are_looked_through():
    model = mlp()
    assert Network(nn.DataParallel(model)).n_parameters == 41
    assert Network(torch.compile(model)).n_parameters == 41


def test_rows_of_the_wrong_shape_are_refused_with_the_networks_own_words(model):
    with pytest.raises(ValueError, match=r"batch of shape \(2, 4\)"):
        Network(model).validate(torch.randn(5, 4))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(1, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.gru(x[..., None])[0][:, -1])


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x) + torch.randn(1)


def test_what_torch_func_cannot_do_is_said():
    with pytest.raises(TypeError, match=r"torch\.func could not"):
        Network(Recurrent()).gradients(torch.randn(5, 3))


def test_an_output_that_changes_from_call_to_call_is_refused():
    with pytest.raises(ValueError, match="changes from call to call"):
        Network(Noisy()).gradients(torch.randn(5, 3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Initializing zero-element")
def test_models_that_cannot_be_used_are_refused():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got function"):
        Network(lambda x: x)
    with pytest.raises(ValueError, match="no trainable parameters"):
        Network(nn.Sequential(nn.Linear(2, 1)).requires_grad_(False))
    with pytest.raises(ValueError, match="no trainable parameters"):
        Network(nn.ReLU())
    with pytest.raises(TypeError, match="bfloat16"):
        Network(mlp().bfloat16())
    with pytest.raises(TypeError, match="meta device"):
        Network(mlp().to("meta"))
    with pytest.raises(ValueError, match="no elements"):
        Network(nn.Linear(0, 0))
    with pytest.raises(TypeError, match="TorchScript"):
        Network(torch.jit.trace(mlp(), torch.randn(2, 3, dtype=torch.float64)))
    with pytest.raises(TypeError, match="TorchScript"):  # a part of it
        Network(nn.Sequential(torch.jit.trace(mlp(), torch.randn(2, 3, dtype=torch.float64)), nn.Linear(1, 1)))
    uncopyable = mlp()
    uncopyable.lock = threading.Lock()
    with pytest.raises(TypeError, match="could not be copied"):
        Network(uncopyable)
