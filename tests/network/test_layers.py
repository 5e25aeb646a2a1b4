"""Gradients layer by layer are the gradients row by row."""

import numpy as np
import pytest
import torch
from torch import nn

from deltaband import Exact, PredictionIntervals
from deltaband.network import gradient_batch
from deltaband.network.gradient_batch import GradientBatch, StoredBlock
from deltaband.network.layers.factors import DenseRows, EmbeddingRows, OuterProducts, inner
from deltaband.network.network import Network
from tests.support.networks import ByFunction, Tied, probed


class Pooled(nn.Module):
    """A layer at every position of a sequence, then the mean."""

    def __init__(self, layer, features, dim=1):
        super().__init__()
        self.layer, self.head, self.dim = layer, nn.Linear(features, 1), dim

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x)).mean(dim=self.dim))


class SequenceFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 50), nn.Linear(50, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x.transpose(0, 1)))).mean(dim=0)


class Flattened(nn.Module):
    """Rows and positions in one dimension on the way."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 50), nn.Linear(50, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x.reshape(-1, 6)))).reshape(len(x), -1).mean(dim=1)


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(40, 40), nn.Linear(40, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(input=x)))))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(7, 30), nn.Linear(7, 30), nn.Linear(7, 3)
        self.head = nn.Linear(30, 1)

    def forward(self, x):
        return self.head(torch.relu(self.first(x)) + torch.sigmoid(self.second(x)))


class Transformer(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(16, 4, 64, batch_first=batch_first), nn.Linear(16, 1)
        self.batch_first = batch_first

    def forward(self, x):
        if self.batch_first:
            return self.head(self.layer(x).mean(dim=1))
        return self.head(self.layer(x.transpose(0, 1)).mean(dim=0))


def randomised(model):
    """Norms with affine parameters and statistics that are not 1 and 0."""
    for module in model.modules():
        if hasattr(module, "running_var") and module.running_var is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    with torch.no_grad():
        for w in model.parameters():
            w.add_(0.1 * torch.randn_like(w))
    return model


def head(features):
    return nn.Linear(features, 1)


# network, input, parameters that need rows of their own
CASES = {
    "linear": lambda: (nn.Sequential(nn.Linear(7, 20), nn.ReLU(inplace=True), head(20)), torch.randn(5, 7), ()),
    "no bias": lambda: (nn.Sequential(nn.Linear(7, 20, bias=False), nn.Tanh(), head(20)), torch.randn(5, 7), ()),
    "positions": lambda: (Pooled(nn.Linear(30, 40), 40), torch.randn(5, 3, 30), ()),
    "many positions": lambda: (Pooled(nn.Linear(3, 4), 4), torch.randn(5, 20, 3), ()),
    "sequence first": lambda: (SequenceFirst(), torch.randn(5, 3, 6), ()),
    "flattened": lambda: (Flattened(), torch.randn(5, 3, 6), ()),
    "repeated": lambda: (Repeated(), torch.randn(5, 40), ()),
    "branching": lambda: (Branching(), torch.randn(5, 7), ("unused.weight", "unused.bias")),
    "embedding": lambda: (Pooled(nn.Embedding(50, 16), 16), torch.randint(0, 50, (5, 4)), ()),
    "padding": lambda: (Pooled(nn.Embedding(50, 16, padding_idx=0), 16), torch.randint(0, 3, (5, 4)), ()),
    "sparse": lambda: (Pooled(nn.Embedding(50, 16, sparse=True), 16), torch.randint(0, 50, (5, 4)), ()),
    "small table": lambda: (Pooled(nn.Embedding(5, 16), 16), torch.randint(0, 5, (5, 4)), ()),
    "layer norm": lambda: (nn.Sequential(nn.LayerNorm((3, 7)), nn.Flatten(), head(21)), torch.randn(5, 3, 7), ()),
    "group norm": lambda: (nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten(), head(24)), torch.randn(5, 4, 6), ()),
    "batch norm": lambda: (nn.Sequential(nn.BatchNorm1d(7), head(7)), torch.randn(5, 7), ()),
    "batch norm, images": lambda: (
        nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), head(48)),
        torch.randn(5, 3, 4, 4),
        (),
    ),
    "convolution 1d": lambda: (
        nn.Sequential(nn.Conv1d(3, 8, 5, stride=2, padding=2), nn.ReLU(), nn.Flatten(), head(80)),
        torch.randn(5, 3, 20),
        (),
    ),
    "convolution 2d": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten(), head(128)),
        torch.randn(5, 3, 8, 8),
        (),
    ),
    "few places": lambda: (
        nn.Sequential(nn.Conv2d(12, 30, 3), nn.ReLU(), nn.Flatten(), head(30)),
        torch.randn(5, 12, 3, 3),
        (),
    ),
    "dilated, circular": lambda: (
        nn.Sequential(
            nn.Conv2d(4, 8, 3, groups=4, dilation=2, padding="same", padding_mode="circular"), nn.Flatten(), head(512)
        ),
        torch.randn(5, 4, 8, 8),
        (),
    ),
    "convolution 3d": lambda: (
        nn.Sequential(nn.Conv3d(2, 4, 3, padding=(1, 0, 2)), nn.Tanh(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), head(4)),
        torch.randn(5, 2, 6, 6, 6),
        (),
    ),
    "tied": lambda: (Tied(11, 16), torch.randint(0, 11, (5, 4)), ("table.weight",)),
    "by function": lambda: (ByFunction(7, 9), torch.randn(5, 7), ("scale", "layer.weight", "layer.bias")),
    "transformer": lambda: (
        Transformer(True),
        torch.randn(5, 6, 16),
        (),
    ),
    "transformer, sequence first": lambda: (
        Transformer(False),
        torch.randn(5, 6, 16),
        (),
    ),
}


def one_by_one(model, x):
    """J, a row at a time, the parameters in the order of their names."""
    weights = {name: w for name, w in model.named_parameters() if w.requires_grad}
    rows = []
    for i in range(len(x)):
        gradients = torch.autograd.grad(model(x[i : i + 1]).reshape(()), list(weights.values()), allow_unused=True)
        rows.append(
            {
                name: (torch.zeros_like(w) if g is None else g.to_dense() if g.is_sparse else g).flatten()
                for (name, w), g in zip(weights.items(), gradients, strict=True)
            }
        )
    return {name: torch.stack([row[name] for row in rows]).double() for name in weights}


def layered(model, x):
    network = probed(Network(model), x)
    outputs, batch = network.gradients(x)
    order = [name for names in network.layers.parameters for name in names] + list(network.layers.rest)
    return network, outputs, batch, order


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_layer_by_layer_equals_row_by_row(case, dtype):
    torch.manual_seed(0)
    model, x, rest = CASES[case]()
    model = randomised(model).to(dtype).eval()
    x = x.to(dtype) if x.is_floating_point() else x
    network, outputs, batch, order = layered(model, x)
    by_name = one_by_one(model, x)
    J = torch.cat([by_name[name] for name in order], dim=1)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-11
    scale = float((J @ J.T).abs().max())
    assert sorted(network.layers.rest) == sorted(rest)
    assert batch.n_parameters == J.shape[1] == sum(w.numel() for w in by_name.values()) // len(x)
    torch.testing.assert_close(outputs, model(x).reshape(-1, 1).detach())
    np.testing.assert_allclose(batch.rows(), J, rtol=0, atol=tolerance * float(J.abs().max()))
    np.testing.assert_allclose(batch.inner(batch), J @ J.T, rtol=0, atol=tolerance * scale)
    np.testing.assert_allclose(batch.squared_norms, (J @ J.T).diagonal(), rtol=0, atol=tolerance * scale)
    np.testing.assert_allclose(
        np.concatenate([columns.copy() for columns in batch.columns(37)], axis=1),
        J,
        rtol=0,
        atol=tolerance * float(J.abs().max()),
    )
    chosen = np.array([0, 3])
    np.testing.assert_allclose(batch.take(chosen).rows(), batch.rows()[chosen], rtol=0, atol=0)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize(
    "layer",
    [nn.Linear(7, 20), nn.LayerNorm(7), nn.BatchNorm1d(7)],
    ids=lambda layer: type(layer).__name__,
)
def test_a_frozen_half_of_a_layer_is_left_out(layer, frozen):
    torch.manual_seed(0)
    getattr(layer, frozen).requires_grad_(False)
    model = nn.Sequential(randomised(layer), nn.Tanh(), head(20 if isinstance(layer, nn.Linear) else 7)).eval()
    x = torch.randn(5, 7)
    _, _, batch, order = layered(model, x)
    by_name = one_by_one(model, x)
    assert f"0.{frozen}" not in order
    np.testing.assert_allclose(batch.rows(), torch.cat([by_name[n] for n in order], dim=1), rtol=1e-4, atol=1e-5)
    getattr(layer, frozen).requires_grad_(True)


def kinds(model, x):
    _, _, batch, _ = layered(model.eval(), x)
    return [type(part) for part in batch.blocks[0].parts()]


def test_rows_are_formed_only_where_that_is_cheaper():
    assert kinds(nn.Sequential(nn.Linear(50, 60), nn.ReLU(), nn.Linear(60, 1)), torch.randn(2, 50)) == [
        OuterProducts,
        DenseRows,
    ]
    assert kinds(Pooled(nn.Linear(50, 60), 60), torch.randn(2, 3, 50)) == [OuterProducts, DenseRows]
    assert kinds(Pooled(nn.Linear(50, 60), 60), torch.randn(2, 30, 50)) == [DenseRows, DenseRows]
    assert kinds(Pooled(nn.Embedding(100, 8), 8), torch.randint(0, 9, (2, 5))) == [EmbeddingRows, DenseRows]
    assert kinds(Pooled(nn.Embedding(10, 8), 8), torch.randint(0, 9, (2, 5))) == [DenseRows, DenseRows]


def test_sequences_of_different_lengths_go_together():
    torch.manual_seed(0)
    model = Pooled(nn.Linear(50, 60), 60).double().eval()
    short, long = torch.randn(3, 2, 50, dtype=torch.float64), torch.randn(4, 40, 50, dtype=torch.float64)
    network = probed(Network(model), short)
    mine, theirs = network.gradients(short)[1], network.gradients(long)[1]
    assert (type(mine.blocks[0].parts()[0]), type(theirs.blocks[0].parts()[0])) == (OuterProducts, DenseRows)
    np.testing.assert_allclose(mine.inner(theirs), mine.rows() @ theirs.rows().T, rtol=1e-10)


@pytest.mark.parametrize("numbers", [1, 50, 2**22])
def test_products_do_not_depend_on_how_many_are_held_at_once(numbers, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    a, b = (
        OuterProducts(torch.randn(n, t, 6, generator=generator), torch.randn(n, t, 7, generator=generator), bias=True)
        for n, t in ((4, 3), (5, 2))
    )
    expected = a.rows().double() @ b.rows().double().T
    monkeypatch.setattr("deltaband.network.layers.factors.PRODUCT_NUMBERS", numbers)
    np.testing.assert_allclose(inner(a, b), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(inner(DenseRows(a.rows()), b), expected, rtol=1e-5, atol=1e-5)


def test_an_input_that_is_changed_behind_autograd_is_refused():
    class Changed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 1)

        def forward(self, x):
            x = torch.sin(x)
            y = self.first(x)
            x.detach().mul_(2)
            return self.second(torch.tanh(y))

    with pytest.raises(TypeError, match="could not be differentiated"):
        Network(Changed()).probe(torch.randn(5, 7))


def test_weights_past_the_module_tree_are_refused():
    hidden = nn.Linear(7, 1)

    class Past(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.Linear(7, 1)
            self.other = lambda x: hidden(x)

        def forward(self, x):
            return self.own(x) + self.other(x)

    with pytest.raises(TypeError, match="past the module tree"):
        Network(Past()).probe(torch.randn(3, 7))


@pytest.mark.filterwarnings("ignore:the network has p")
@pytest.mark.parametrize("case", ["linear", "repeated", "transformer", "few places", "embedding"])
def test_exact_intervals_do_not_depend_on_how_gradients_are_held(case):
    torch.manual_seed(0)
    model, x, _ = CASES[case]()
    model = randomised(model).double()
    shape = (20, *x.shape[1:])
    x = torch.randn(shape, dtype=torch.float64) if x.is_floating_point() else torch.randint(0, 9, shape)
    y = torch.randn(20, dtype=torch.float64)
    band = PredictionIntervals(model, damping=5.0, engine=Exact()).fit(x, y)
    assert band._fits[0].layers is not None
    J = torch.cat(list(one_by_one(model.eval(), x).values()), dim=1).numpy()
    A = J.T @ J + 5.0 * np.eye(J.shape[1])
    u = np.linalg.solve(A, J.T)
    np.testing.assert_allclose(band.leverage(x), np.einsum("ij,ji->i", J, u), rtol=1e-7)
    np.testing.assert_allclose(band.variance(x), np.einsum("ij,ji->i", J, u) - 5.0 * (u**2).sum(axis=0), rtol=1e-6)
    H = J @ u
    assert band.effective_parameters_ == pytest.approx(np.trace(2 * H - H @ H), rel=1e-8)


def test_a_batch_of_blocks_is_taken_from_across_them():
    a, b = torch.arange(6.0).reshape(3, 2), torch.arange(6.0, 10.0).reshape(2, 2)
    batch = GradientBatch.of(a, b)
    np.testing.assert_array_equal(batch.take(np.array([1, 3, 4])).rows(), torch.cat([a, b])[[1, 3, 4]])


# --- rows that tell nothing about which layers do without rows


class TimeMajor(nn.Module):
    """Its layers see (time, rows, features)."""

    def __init__(self, dead=False):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.dead = dead

    def forward(self, x):
        y = self.last(torch.tanh(self.second(torch.tanh(self.first(x.transpose(0, 1))))).mean(dim=0))
        return y * (x[:, :1, 0] > -5) if self.dead else y


class ByFunctionNow(nn.Module):
    """A layer whose weights are used without a call of it, and by some rows only."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(4, 16), nn.Linear(16, 1)

    def forward(self, x):
        h = nn.functional.linear(x[:, 0], self.layer.weight, self.layer.bias).tanh()
        return self.last(h) * (x[:, :1, 0] > -5)


@pytest.mark.parametrize(
    "case", ["one row at a time", "one row first", "equal rows", "dead rows", "by function", "all dead"]
)
def test_rows_that_tell_nothing_do_not_mislead(case):
    from torch.utils.data import DataLoader, TensorDataset

    from deltaband import Exact, PredictionIntervals

    torch.manual_seed(0)
    model = (ByFunctionNow() if case == "by function" else TimeMajor(dead="dead" in case)).double()
    X, y = torch.randn(40, 6, 4, dtype=torch.float64), torch.randn(40, dtype=torch.float64)
    data = [(X, y)]
    if case == "one row at a time":
        data = DataLoader(TensorDataset(X, y), batch_size=1)
    elif case == "one row first":
        data = [(X[:1], y[:1]), (X[1:], y[1:])]
    elif case == "equal rows":
        X[:20] = 0.0
        data = [(X[:20], y[:20]), (X[20:], y[20:])]
    elif case in ("dead rows", "by function"):
        X[:2, 0, 0] = -9.0
    else:
        X[:20, 0, 0] = -9.0
        data = [(X[:20], y[:20]), (X[20:], y[20:])]
    band = PredictionIntervals(model, damping=0.5, engine=Exact()).fit(data)
    new = torch.randn(7, 6, 4, dtype=torch.float64)
    J, g = (torch.cat(list(one_by_one(model, x).values()), dim=1) for x in (X, new))
    A = torch.linalg.inv(J.T @ J + 0.5 * torch.eye(J.shape[1], dtype=torch.float64))
    torch.testing.assert_close(band.leverage(new), ((g @ A) * g).sum(dim=1), rtol=1e-8, atol=1e-10)


def test_a_single_row_of_indices_gets_rows():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 1))
    assert Network(model).probe(torch.tensor([[1, 2, 3]])).layers.batch_dims == {}
    assert len(Network(model).probe(torch.tensor([[1, 2, 3], [4, 5, 1]])).layers.batch_dims) == 2


def test_what_is_kept_of_a_slice_is_the_slice():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Sequential(nn.Linear(16, 200), nn.Tanh(), nn.Linear(200, 1))

        def forward(self, x):
            return self.f(x[:, -1])

    _, _, batch, _ = layered(Last(), torch.randn(50, 100, 16))
    for part in batch.blocks[0].parts():
        for tensor in (part.x, part.delta) if isinstance(part, OuterProducts) else (part.values,):
            assert tensor.untyped_storage().nbytes() <= 2 * tensor.nbytes


def test_a_large_layer_is_compared_one_row_and_some_columns_at_a_time(monkeypatch):
    model = nn.Sequential(nn.Linear(20, 700), nn.Tanh(), nn.Linear(700, 700), nn.Tanh(), nn.Linear(700, 1))
    held = []
    columns = OuterProducts.columns

    def watched(self, start, stop):
        held.append((stop - start) * len(self))
        return columns(self, start, stop)

    monkeypatch.setattr(OuterProducts, "columns", watched)
    monkeypatch.setattr("deltaband.network.checks.COMPARED_COLUMNS", 10_000)
    Network(model).probe(torch.randn(30, 20))
    assert len(held) > 8 * 700 * 700 // 10_000
    assert max(held) <= 10_000


# --- rows at once


def test_frozen_layers_and_inputs_count_where_rows_are_put_together():
    front = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(front.requires_grad_(False), nn.Linear(16, 1))
    row_bytes = 4 * (3 * 32 * 32 + 2 * 2 * 16 * 32 * 32)
    assert Network(model).chunk_rows(torch.randn(32, 3, 32, 32)) <= max(64, 8 * 2**20 // row_bytes)
    pooled = nn.Sequential(nn.AdaptiveAvgPool1d(8), nn.Flatten(), nn.Linear(8, 1))
    assert Network(pooled).chunk_rows(torch.randn(8, 1, 50_000)) == 64


def test_a_layer_called_without_gradients_has_none():
    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = nn.Linear(7, 9), nn.Linear(7, 9), nn.Linear(9, 1)

        def forward(self, x):
            with torch.no_grad():
                h = self.first(x)
            return self.last(h + self.second(x).tanh())

    model, x = Detached(), torch.randn(6, 7)
    _, _, batch, order = layered(model, x)
    by_name = one_by_one(model, x)
    J = torch.cat([by_name[name] for name in order], dim=1)
    torch.testing.assert_close(batch.rows().double(), J, rtol=1e-4, atol=1e-5)
    assert (by_name["first.weight"] == 0).all()


# --- rows that many others are compared with


def float32_batches(n=3, positions=2):
    torch.manual_seed(0)
    for _ in range(n):
        parts = [
            OuterProducts(torch.randn(4, positions, 5), torch.randn(4, positions, 6), True),
            EmbeddingRows(torch.randint(0, 7, (4, positions)), torch.randn(4, positions, 3), 7),
            DenseRows(torch.randn(4, 2)),
        ]
        yield GradientBatch((StoredBlock(parts),))


def test_rows_in_float64_are_the_same_rows_in_one_block():
    J, other = GradientBatch.concatenate(float32_batches()), next(float32_batches(1))
    once = J.in_float64
    assert len(once.blocks) == 1
    assert once.rows().dtype == torch.float64
    np.testing.assert_allclose(once.rows(), J.rows().double(), rtol=1e-6, atol=1e-6)
    dense = other.rows().double() @ J.rows().double().T
    np.testing.assert_allclose(other.inner(once), dense, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(other.inner(once), other.inner(J), rtol=1e-13, atol=1e-13)
    assert J.in_float64 is once


@pytest.mark.parametrize("why", ["too large", "of different numbers of positions"])
def test_rows_stay_as_they_are_where_float64_would_take_much_memory_or_they_do_not_stack(why, monkeypatch):
    J = GradientBatch.concatenate(float32_batches())
    if why == "too large":
        monkeypatch.setattr(gradient_batch, "FLOAT64_BYTES", sum(8 * 4 * n for n in (10, 12, 2, 6, 2)) * 3 - 1)
    else:
        J = GradientBatch.concatenate([*float32_batches(1), *float32_batches(1, positions=3)])
    assert J.in_float64 is J
