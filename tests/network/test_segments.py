"""Items with any number of rows in a layer: hooks find out whose these are, and are compared with plain autograd."""

import numpy as np
import pytest
import torch
from torch import nn

import tests.reference as reference
from deltaband import Exact, OpaqueBatch, PredictionIntervals
from deltaband.data.items import BatchItems, Items
from deltaband.network.layers.segments import owners
from deltaband.network.network import Network
from tests.support.graphs import MessagePassing, Molecule, collate, molecules

DAMPING = 0.3
pytestmark = pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")


def by_loops(model, items):
    return reference.jacobians(model.eval(), [(collate([each])[0],) for each in items])


def as_items(items):
    return Items.of_items(items, collate)


def as_batches(items):
    """Two opaque batches, of which the rows are taken in another order."""
    parts = [
        BatchItems.of_batch(OpaqueBatch((collate(part)[0],), len(part))) for part in (items[::2], items[1::2]) if part
    ]
    rows = BatchItems.cat(parts)
    n = len(parts[0])
    return rows[np.array([i // 2 if i % 2 == 0 else n + i // 2 for i in range(len(items))])]


def in_the_order_of_the_model(network, rows):
    """Return J (n, m, p) with the columns as the model has its parameters."""
    sizes = {name: w.numel() for name, w in network.parameters.items()}
    starts = dict(zip(network.layers.order, np.cumsum([0, *map(sizes.get, network.layers.order)]), strict=False))
    columns = np.concatenate([np.arange(starts[name], starts[name] + sizes[name]) for name in sizes])
    _, g = network.gradients(rows)
    return g.rows().double().numpy()[:, columns]


@pytest.mark.parametrize("n", [1, 2, 40, 100])  # one, and more than one digit of powers of two holds
@pytest.mark.parametrize("rows_of", [as_items, as_batches])
def test_gradients_of_items_by_hooks_are_those_of_each_item_alone(rows_of, n):
    torch.manual_seed(0)
    model, items = MessagePassing().double(), molecules(n, dtype=torch.float64)
    network = Network(model)
    probed = network.probe(as_items(molecules(8, seed=1, dtype=torch.float64)))
    assert probed.layers.rest == ()  # all layers by hooks
    network = network.with_layers(probed.layers)
    found = in_the_order_of_the_model(network, rows_of(items))
    np.testing.assert_allclose(found, by_loops(model, items)[:, 0], rtol=1e-9, atol=1e-10)
    assert not network.model_copy.uncertified


def test_several_outputs_of_items_have_their_gradients_too():
    torch.manual_seed(0)
    model, items = MessagePassing(outputs=3).double(), molecules(20, dtype=torch.float64)
    network = Network(model)
    network = network.with_layers(network.probe(as_items(items)).layers)
    found = in_the_order_of_the_model(network, as_items(items)).reshape(3, 20, -1).swapaxes(0, 1)
    np.testing.assert_allclose(found, by_loops(model, items), rtol=1e-9, atol=1e-10)


def test_parameters_that_no_layer_owns_come_by_loops_item_by_item():
    torch.manual_seed(0)
    model, items = MessagePassing(own=True).double(), molecules(30, dtype=torch.float64)
    band = PredictionIntervals(model, damping=DAMPING, engine=Exact(), collate=collate).fit(items)
    assert "1 parameter by a plain loop" in str(band.summary())
    J = by_loops(model, items)
    q, h, _ = reference.answers(J, DAMPING, J)
    np.testing.assert_allclose(band.variance(items).numpy(), q[:, 0], rtol=1e-8)
    np.testing.assert_allclose(band.leverage(items).numpy(), h[:, 0], rtol=1e-8)


class Mixing(MessagePassing):
    """Every atom sees the mean of all atoms of the batch in its messages: graphs depend on each other."""

    def forward(self, graph):
        atoms = graph["atoms"]
        return super().forward({**graph, "atoms": atoms + 0.1 * self.atom(atoms).mean()})


def test_networks_whose_items_depend_on_each_other_are_refused():
    torch.manual_seed(0)
    items = molecules(20)
    with pytest.raises(ValueError, match="depends on the other rows"):
        PredictionIntervals(Mixing(), damping=DAMPING).fit(items, collate=collate)


def test_rows_of_several_items_have_no_owner():
    w = torch.randn(6, 3, requires_grad=True, dtype=torch.float64)
    shared = torch.zeros(4, 6, dtype=torch.float64)
    shared[torch.arange(4), torch.arange(4)] = torch.tensor([1.0, -2.0, 3.0, 1e-12], dtype=torch.float64)

    def found(weights):
        y = (weights @ w.sin()).sum(dim=1, keepdim=True)
        return owners(y, lambda y: {"layer": [[torch.autograd.grad(y.sum(), w, retain_graph=True)[0]]]})["layer"][0]

    assert found(shared).tolist() == [0, 1, 2, 3, -1, -1]
    shared[1, 5] = shared[2, 5] = 1.0
    assert found(shared) is None


class EqualSizes(nn.Module):
    """The rows of an item lie far apart: all first atoms, then all second ones."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, x):
        n = len(x)
        return self.out(torch.tanh(self.layer(x.movedim(1, 0).reshape(-1, 2))).reshape(-1, n, 3).sum(dim=0))


def test_rows_of_an_item_need_not_be_next_to_each_other():
    torch.manual_seed(0)
    X = torch.randn(30, 4, 2, dtype=torch.float64)
    model = EqualSizes().double()
    network = Network(model)
    rows = Items.of_items(X.unbind(), lambda some: (torch.stack(some), None))
    network = network.with_layers(network.probe(rows).layers)
    assert network.layers.rest == ()
    J = reference.jacobians(model, [(x[None],) for x in X])[:, 0]
    np.testing.assert_allclose(in_the_order_of_the_model(network, rows), J, rtol=1e-9, atol=1e-12)


def test_batches_of_large_networks_whose_rows_have_other_outputs_are_told_with_their_rows():
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 3)

        def forward(self, x):
            return self.layer(x)[:, : 3 - int(x[0, 0] > 5)]

    X = torch.randn(5000, 2).clamp(max=4)
    X[4096:, 0] = 6
    with pytest.raises(ValueError, match=r"rows 4096 to 4999: the network returns 2 numbers .* returned 3"):
        PredictionIntervals(Cut(), damping=DAMPING).fit(X, torch.randn(5000, 3))


def lonely(k):
    """A molecule without bonds."""
    return Molecule(torch.randn(k, 4).double(), torch.zeros(2, 0, dtype=torch.long), torch.zeros(1).double())


@pytest.mark.parametrize("at", [0, 30])  # what the layers are probed on, or later
def test_graphs_without_nodes_or_edges_have_the_gradients_that_they_have_alone(at):
    torch.manual_seed(0)
    model, items = MessagePassing().double(), molecules(30, dtype=torch.float64)
    empty = [lonely(k) for k in (0, 1, 3, 0, 2, 1, 0, 4)]
    items[at:at] = empty
    band = PredictionIntervals(model, damping=DAMPING, engine=Exact(), collate=collate).fit(items)
    assert "5 layers by hooks" in band.summary()
    J = by_loops(model, items)
    expected = dict(zip(map(id, items), reference.answers(J, DAMPING, J)[0][:, 0], strict=True))
    for some in (items, empty, empty[:1], empty[1:2]):
        np.testing.assert_allclose(band.variance(some).numpy(), [expected[id(each)] for each in some], rtol=1e-8)


@pytest.mark.parametrize("n", [1, 12])
def test_a_single_item_and_copies_of_it_can_be_fitted_to(n):
    torch.manual_seed(0)
    model, items = MessagePassing().double(), molecules(3, dtype=torch.float64)
    band = PredictionIntervals(model, damping=DAMPING, engine=Exact(), collate=collate).fit(items[:1] * n)
    J = by_loops(model, items)
    q = reference.answers(np.repeat(J[:1], n, axis=0), DAMPING, J)[0][:, 0]
    np.testing.assert_allclose(band.variance(items).numpy(), q, rtol=1e-8)


def test_a_collate_function_that_changes_the_order_of_inputs_alone_is_told():
    torch.manual_seed(0)
    items = molecules(20)

    def by_size(some):
        return collate(sorted(some, key=lambda each: len(each.atoms)))[0], collate(some)[1]

    with pytest.raises(ValueError, match="a collate function that changes items, or their order"):
        PredictionIntervals(MessagePassing(), damping=DAMPING).fit(items, collate=by_size)


def test_nan_in_an_item_is_told_with_its_row():
    items = molecules(9)
    items[5].atoms[0, 0] = torch.nan
    with pytest.raises(ValueError, match="outputs hold NaN in row 5"):
        PredictionIntervals(MessagePassing(), damping=DAMPING).fit(items, collate=collate)
