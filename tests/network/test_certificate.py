"""Every batch is certified: networks that rearrange rows get the gradients of plain autograd, or are refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tests.reference as reference
from deltaband import Exact, Nystrom, PredictionIntervals
from deltaband.network.layers import hooks
from deltaband.network.layers.factors import DenseRows
from deltaband.network.network import Network
from tests.support.networks import probed

N = 96
pytestmark = pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")


def sequences(dtype=torch.float64):
    """Rows whose first number is their length; the first batch has one length alone."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(N, 6, 2, generator=generator, dtype=dtype)
    X[:, 0, 0] = torch.randint(1, 7, (N,), generator=generator).to(dtype)
    X[:32, 0, 0] = 6
    return X, X[:, 0, 1].sin()


class SortedByLength(nn.Module):
    """The textbook way to feed a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(2, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x):
        lengths = x[:, 0, 0].round().clamp(1, 6).long().cpu()
        order = lengths.argsort(descending=True)
        packed = nn.utils.rnn.pack_padded_sequence(x[order], lengths[order], batch_first=True)
        return self.head(self.rnn(packed)[1][0])[order.argsort()]


class InPieces(nn.Module):
    """A batch that is taken some rows at a time."""

    def __init__(self, size=20):
        super().__init__()
        self.body, self.head, self.size = nn.Sequential(nn.Linear(2, 40), nn.Tanh()), nn.Linear(40, 1), size

    def forward(self, x):
        return torch.cat([self.head(self.body(piece).mean(dim=1)) for piece in x.split(self.size)])


class Experts(nn.Module):
    """Rows that go to sub-networks by a mask."""

    def __init__(self):
        super().__init__()
        self.small, self.large, self.head = nn.Linear(12, 9), nn.Linear(12, 9), nn.Linear(9, 1)

    def forward(self, x):
        x, h = x.flatten(1), x.new_zeros(len(x), 9)
        small = x[:, 0] < 5.5
        h[small], h[~small] = torch.tanh(self.small(x[small])), torch.relu(self.large(x[~small]))
        return self.head(h)


class Flattened(nn.Module):
    """Nodes of graphs of different sizes in one long list, the largest graphs first."""

    def __init__(self):
        super().__init__()
        self.node, self.head = nn.Linear(2, 30), nn.Linear(30, 1)

    def forward(self, x):
        sizes = x[:, 0, 0].round().clamp(1, 6).long()
        order = sizes.argsort(descending=True, stable=True)
        nodes = torch.cat([x[i, : sizes[i]] for i in order])
        graph = torch.repeat_interleave(order, sizes[order])
        sums = x.new_zeros(len(x), 30).index_add(0, graph, torch.tanh(self.node(nodes)))
        return self.head(sums)


class Reversed(nn.Module):
    """Many rows are taken from the last to the first."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(12, 40), nn.Linear(40, 1)

    def forward(self, x):
        order = torch.arange(len(x)).flip(0) if len(x) > 9 else torch.arange(len(x))
        return self.head(torch.tanh(self.body(x.flatten(1)[order])))[order]


class GhostNormalised(nn.Module):
    """Statistics of the batch, once it is large."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(12, 40), nn.Linear(40, 1)

    def forward(self, x):
        h = self.body(x.flatten(1))
        return self.head(torch.tanh(h - h.mean(dim=0) if len(x) > 9 else h))


REARRANGING = [SortedByLength, InPieces, Experts, Flattened, Reversed]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("engine", [Exact(), Nystrom(N)], ids=str)
@pytest.mark.parametrize("kind", REARRANGING)
def test_rows_that_are_rearranged_on_the_way_have_their_own_gradients(kind, engine, dtype):
    torch.manual_seed(1)
    model, (X, y) = kind().to(dtype), sequences(dtype)
    band = PredictionIntervals(model, damping=1.0, engine=engine)
    band.fit([(X[i : i + 32], y[i : i + 32]) for i in range(0, N, 32)], progress=False)
    J = reference.jacobians(model, [(x[None],) for x in X]).reshape(N, -1)
    expected = [reference.variance(J, 1.0, g) for g in J[:60]]
    np.testing.assert_allclose(band.variance(X[:60]), expected, rtol=1e-9 if dtype == torch.float64 else 1e-3)


def test_a_layer_that_needed_rows_of_its_own_is_named_in_the_summary():
    X, y = sequences()
    band = PredictionIntervals(Reversed().double(), damping=1.0, engine=Nystrom(N)).fit(X, y, progress=False)
    assert "4 of these parameters in some batches by a plain loop over the rows" in band.summary()


def test_statistics_of_the_batch_are_refused_in_fit_and_predict():
    X, y = sequences()
    model = GhostNormalised().double()
    with pytest.raises(ValueError, match=r"depends? on the other rows of the batch"):
        PredictionIntervals(model, damping=1.0, engine=Nystrom(N)).fit(X, y, progress=False)
    few = PredictionIntervals(model, damping=1.0, engine=Exact()).fit(X[:8], y[:8], progress=False)
    with pytest.raises(ValueError, match=r"depends? on the other rows of the batch"):
        few.variance(X)


class DetachedStatistics(nn.Module):
    """Statistics of a large batch that no gradient goes through: each row's gradient is its own, but not that of the
    row alone."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(12, 40), nn.Linear(40, 1)

    def forward(self, x):
        h = self.body(x.flatten(1))
        return self.head(torch.tanh(h - h.mean(dim=0).detach() if len(x) > 9 else h))


@pytest.mark.parametrize("kind", [GhostNormalised, DetachedStatistics])
@pytest.mark.parametrize("by", ["layers", "rows"])
def test_statistics_of_the_batch_are_noticed_in_every_batch(kind, by):
    torch.manual_seed(0)
    X, network = sequences()[0], Network(kind().double())
    network = probed(network, X[:8]) if by == "layers" else network
    network.gradients(X[:9])
    for _ in range(3):
        with pytest.raises(ValueError, match=r"depends? on the other rows of the batch"):
            network.gradients(X)


class MarkedTogether(nn.Module):
    """Marked rows are compared with the mean of these, which no gradient goes through."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(12, 8), nn.Linear(8, 1)

    def forward(self, x):
        h, marked = torch.tanh(self.body(x.flatten(1))), x[:, 0, 0] > 9
        if marked.any():
            h = torch.where(marked[:, None], h - h[marked].mean(dim=0).detach(), h)
        return self.head(h)


def again_and_again(network, x, times):
    for _ in range(times):
        network.gradients(x)


def test_what_only_a_few_rows_have_in_common_is_found_out():
    torch.manual_seed(0)
    X = torch.randn(480, 6, 2, dtype=torch.float64)
    X[torch.randperm(480)[:5], 0, 0] = 10.0
    network = probed(Network(MarkedTogether().double()), X[:8])
    with pytest.raises(ValueError, match=r"depends on the other rows of the batch \(.* among a few"):
        again_and_again(network, X, 20)


def test_random_numbers_that_change_few_outputs_are_found_out():
    class RareDropout(Reversed):
        rate = 0.0

        def forward(self, x):
            return self.head(nn.functional.dropout(torch.tanh(self.body(x.flatten(1))), self.rate))

    torch.manual_seed(0)
    X = sequences()[0]
    network = probed(Network(RareDropout().double()), X[:8])
    network.eval_copy.rate = 1e-3  # of 40 numbers a row: in four rows of a hundred
    for rows, times in ((X, 5), (X[:1], 200)):
        with pytest.raises(ValueError, match="changes from call to call"):
            again_and_again(network, rows, times)


def test_gradients_that_are_clipped_on_their_way_are_told():
    class Clipped(Reversed):
        def forward(self, x):
            h = torch.tanh(self.body(x.flatten(1)))
            if h.requires_grad:
                h.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            return self.head(h)

    X, y = sequences()
    with pytest.raises(ValueError, match="clips or scales gradients"):
        PredictionIntervals(Clipped().double(), damping=1.0, engine=Exact()).fit(X, y, progress=False)


def test_a_layer_that_was_not_certified_once_has_rows_of_its_own_from_then_on(monkeypatch):
    torch.manual_seed(0)
    X, network = sequences()[0], probed(Network(Reversed().double()), sequences()[0][:8])
    made = []
    part_of = hooks.part_of
    monkeypatch.setattr(hooks, "part_of", lambda layer, *rest: made.append(layer) or part_of(layer, *rest))
    network.gradients(X[:8])
    assert len(made) == 2
    network.gradients(X[:32])
    assert len(made) == 4
    for rows in (X[32:64], X[:8]):
        _, gradients = network.copy().gradients(rows)  # a copy knows, too
        expected = [
            reference.jacobians(network.eval_copy, [(x[None],) for x in rows], [n]) for n in network.layers.order
        ]
        np.testing.assert_allclose(gradients.rows(), np.concatenate([J[:, 0] for J in expected], axis=1), atol=1e-12)
    assert len(made) == 4
    network.gradients(X[:1])  # of a single row nothing can be exchanged
    assert len(made) == 6


class WrongForBatches(torch.autograd.Function):
    """A rule for torch.func that doubles the gradients of rows above 5."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, delta):
        return WrongBackward.apply(ctx.saved_tensors[0], delta)

    @staticmethod
    def vmap(info, in_dims, x):
        return WrongForBatches.apply(x), in_dims[0]


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(x, delta):
        return delta.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, delta):
        return None, delta

    @staticmethod
    def vmap(info, in_dims, x, delta):
        return delta * (1 + (x > 5)), in_dims[1]


def test_whole_rows_by_torch_func_are_certified_in_every_batch():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(12, 4), nn.Linear(4, 1)

        def forward(self, x):
            return self.head(WrongForBatches.apply(self.body(x.flatten(1)) + x[:, 0, :1]))

    torch.manual_seed(0)
    X, network = sequences()[0], Network(Wrong().double())
    X[:32, 0, 0] = 0.0
    assert network.rows_by_vmap_work(X[:8])
    for rows in (X[:8], X[60:]):
        _, gradients = network.gradients(rows)
        expected = reference.jacobians(network.eval_copy, [(x[None],) for x in rows])[:, 0]
        np.testing.assert_allclose(gradients.rows(), expected, rtol=1e-9, atol=1e-12)
    assert network.model_copy.uncertified == set(network.parameters)


class Regrouped(nn.Module):
    """Rows in a random order, cut into random pieces, each of several positions."""

    def __init__(self, order, cuts):
        super().__init__()
        self.first, self.second = nn.Linear(2, 5), nn.Linear(5, 1)
        self.order, self.cuts = torch.tensor(order), cuts

    def forward(self, x):
        if len(x) != len(self.order):
            return self.second(torch.tanh(self.first(x)).mean(dim=1))
        pieces = torch.tensor_split(x[self.order], self.cuts)
        y = torch.cat([self.second(torch.tanh(self.first(piece)).mean(dim=1)) for piece in pieces])
        return y[self.order.argsort()]


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(24)), st.sets(st.integers(1, 23), max_size=4))
def test_no_order_and_no_grouping_of_rows_changes_their_gradients(order, cuts):
    torch.manual_seed(3)
    model = Regrouped(order, sorted(cuts)).double()
    X = sequences()[0][:24]
    network = probed(Network(model), X[:8])
    _, gradients = network.gradients(X)
    by_name = {name: reference.jacobians(model, [(x[None],) for x in X], [name])[:, 0] for name in network.layers.order}
    np.testing.assert_allclose(gradients.rows(), np.concatenate(list(by_name.values()), axis=1), rtol=1e-9, atol=1e-12)


def test_the_certificate_of_every_kind_of_part_is_that_of_its_rows():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(7, 4), nn.Conv1d(5, 6, 2), nn.LayerNorm(3), nn.Flatten(), nn.Linear(18, 2)
    ).double()
    x = torch.randint(0, 7, (11, 5))
    network = probed(Network(model), x)
    _, gradients = network.gradients(x)
    factors, directions = torch.randn(11, dtype=torch.float64), torch.randn(4, 60, dtype=torch.float64)
    for block in gradients.blocks:
        for names, part in zip(network.layers.owners, block.parts(), strict=True):
            sizes = [model.get_parameter(name) for name in names]
            total = (factors @ part.rows()).split([w.numel() for w in sizes])
            as_gradients = [each.reshape(w.shape) for each, w in zip(total, sizes, strict=True)]
            torch.testing.assert_close(part.total(factors, directions), part.image(as_gradients, directions))
            if len(names) == 1 and not isinstance(part, DenseRows):  # a table, whose gradients can be sparse
                (table,) = as_gradients
                torch.testing.assert_close(
                    part.image([table.to_sparse(1)], directions), part.image([table], directions)
                )


def test_thousands_of_equal_rows_are_certified():
    torch.manual_seed(0)
    X = torch.randn(200, 2)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    band = PredictionIntervals(model, damping=1.0).fit(X, X[:, 0], progress=False)
    row = torch.tensor([[0.1, 0.2]])
    for _ in range(60):  # the sum by random factors is near zero now and then
        q = band.variance(row.repeat(8000, 1))
        assert torch.allclose(q, q[0])
