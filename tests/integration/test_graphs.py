"""PyTorch Geometric as it is: `Data` in lists and in its own batches, convolutions, poolings and norms of its own."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import tests.reference as reference
from deltaband import Exact, OpaqueBatch, PredictionIntervals
from tests.support.graphs import FEATURES, molecules

with warnings.catch_warnings():  # it compiles functions as torch no longer likes it
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch_geometric import nn as graph
    from torch_geometric.data import Batch, Data
    from torch_geometric.loader import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # its own
DAMPING = 0.5


def graphs(n, seed=0):
    return [
        Data(x=each.atoms, edge_index=each.bonds, y=each.energy, edge_attr=each.atoms[each.bonds[0], :2])
        for each in molecules(n, seed, torch.float64)
    ]


def collate(some):
    batch = Batch.from_data_list(some)
    return batch, batch.y


class Network(nn.Module):
    """Two convolutions, a norm and a mean over the nodes."""

    def __init__(self, convolution, width=6):
        super().__init__()
        self.one, self.two = convolution(FEATURES, width), convolution(width, width)
        self.norm, self.out = graph.BatchNorm(width), graph.Linear(width, 1)

    def forward(self, data):
        edges = (data.edge_index, data.edge_attr) if isinstance(self.one, graph.GINEConv) else (data.edge_index,)
        h = self.norm(torch.tanh(self.one(data.x, *edges)))
        return self.out(graph.global_mean_pool(torch.tanh(self.two(h, *edges)), data.batch, data.num_graphs))


def gin(before, after):
    return graph.GINConv(nn.Sequential(nn.Linear(before, after), nn.ReLU(), nn.Linear(after, after)))


def gine(before, after):
    return graph.GINEConv(nn.Linear(before, after), edge_dim=2)


CONVOLUTIONS = {  # and by how many parameters a plain loop is needed
    "GraphConv": (graph.GraphConv, 0),
    "SAGEConv": (graph.SAGEConv, 0),
    "GINConv": (gin, 0),
    "GINEConv": (gine, 0),
    "GCNConv": (graph.GCNConv, 2),  # its bias is its own
    "GATConv": (graph.GATConv, 6),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_bands_of_graphs_are_those_of_the_dense_formula(name):
    torch.manual_seed(0)
    convolution, looped = CONVOLUTIONS[name]
    model, items = Network(convolution).double().eval(), graphs(90)
    band = PredictionIntervals(model, damping=DAMPING, engine=Exact(), collate=collate).fit(items[:80])
    J = reference.jacobians(model, [(Batch.from_data_list([each]),) for each in items])
    q, h, p_star = reference.answers(J[:80], DAMPING, J[80:])
    np.testing.assert_allclose(band.variance(items[80:]), q[:, 0], rtol=1e-7)
    np.testing.assert_allclose(band.leverage(items[80:]), h[:, 0], rtol=1e-7)
    assert band.effective_parameters_ == pytest.approx(p_star, rel=1e-7)
    rest = band.fits_[0].layers.rest
    assert len(rest) == looped, rest


def test_the_loader_of_the_library_gives_opaque_batches():
    torch.manual_seed(0)
    model, items = Network(gin).double().eval(), graphs(70)
    loader = DataLoader(items, batch_size=32)
    opaque = PredictionIntervals(
        model, damping=DAMPING, batch=lambda data: (OpaqueBatch(data, data.num_graphs), data.y)
    ).fit(loader)
    band = PredictionIntervals(model, damping=DAMPING, collate=collate).fit(items)
    assert torch.allclose(opaque.variance(loader), band.variance(items), rtol=1e-8)
    assert torch.allclose(opaque.predict(loader).upper, band.predict(items).upper, rtol=1e-8)
