"""What runs where the gradients are. There is no other device here than the CPU: a copy to it is an error instead."""

from functools import reduce

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tests.reference as reference
from deltaband import Exact, PredictionIntervals, RandomProjection
from deltaband.engines.projection import ProjectedCovariance
from deltaband.network.gradient_batch import GradientBatch, StoredBlock
from deltaband.network.layers.factors import inner
from deltaband.network.layers.projection import Projection
from deltaband.network.network import Network
from tests.support.networks import Sequence, probed

X = torch.randint(50, (9, 2), generator=torch.Generator().manual_seed(1))


def gradients(dtype=torch.float64):
    model = Sequence().to(dtype)
    network = probed(Network(model), X)
    return network, network.gradients(X)[1]


@pytest.fixture
def g():
    """Gradients; their certificate has copied three numbers per layer."""
    return gradients()[1]


@pytest.fixture
def no_copies(g, monkeypatch):
    """Gradients may not leave their device."""

    def refused(self, *args, **kwargs):
        raise AssertionError("a copy to the CPU")

    for name in ("cpu", "numpy", "tolist", "__array__"):
        monkeypatch.setattr(Tensor, name, refused)


def on_meta(g):
    return [part.map(lambda tensor: tensor.to("meta")) for part in g.blocks[0].parts()]


def test_no_gradient_is_copied_to_be_projected(g, no_copies):
    assert Projection(16, g.n_parameters, 0)(g.blocks[0].parts()).shape == (9, 16)


def test_no_gradient_is_copied_for_inner_products_and_norms(g, no_copies):
    parts = g.blocks[0].parts()
    products = reduce(torch.add, map(inner, parts, parts))
    norms = reduce(torch.add, (part.squared_norms() for part in parts))
    assert torch.allclose(products.diagonal(), norms)


def test_of_inner_products_of_batches_only_the_products_are_copied(monkeypatch):
    _, g = gradients()
    copied, cpu = [], Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self: copied.append(self.shape) or cpu(self))
    found = g.inner(g)
    assert copied == [(9, 9)]
    rows = g.rows().numpy()
    np.testing.assert_allclose(found, rows @ rows.T, rtol=1e-10)


def test_rows_elsewhere_are_multiplied_by_torch_as_those_here_by_blas(monkeypatch):
    rows = torch.from_numpy(reference.matrix("decaying", 20, 60))
    one, two = GradientBatch.of(rows[:12]), GradientBatch.of(rows[12:])
    here = one.inner(two)
    monkeypatch.setattr(GradientBatch, "rows_on_cpu", False)
    np.testing.assert_allclose(one.inner(two), here, rtol=1e-12)
    np.testing.assert_allclose(here, rows[:12].numpy() @ rows[12:].numpy().T, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shapes_and_precisions_hold_on_a_device_without_numbers(dtype):
    _, g = gradients(dtype)
    parts = on_meta(g)
    projected = Projection(16, g.n_parameters, 0)(parts)
    assert (projected.device.type, projected.shape, projected.dtype) == ("meta", (9, 16), dtype)
    products = reduce(torch.add, map(inner, parts, parts))
    assert (products.device.type, products.shape, products.dtype) == ("meta", (9, 9), torch.float64)
    assert all(part.squared_norms().device.type == "meta" for part in parts)
    assert not GradientBatch((StoredBlock(parts),)).rows_on_cpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_predictions_by_projection_copy_answers_alone(dtype, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 1)).to(dtype)
    x = torch.randn(200, 4, dtype=dtype)
    band = PredictionIntervals(model, damping=1.0, engine=RandomProjection(32))
    covariance = band.fit(x, x[:, 0], progress=False).fits_[0].covariance
    assert isinstance(covariance, ProjectedCovariance)
    g = probed(Network(model), x).gradients(x[:50])[1]
    covariance.variance(g)  # the basis is put where the gradients are, once
    copied, cpu = [], Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self: copied.append(self.shape) or cpu(self))
    covariance.variance(g)
    assert copied == [(50, 1)]


def test_an_exact_fit_by_torch_products_is_that_of_dense_rows(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 1)).double()
    x = torch.randn(60, 4, dtype=torch.float64)
    monkeypatch.setattr(GradientBatch, "rows_on_cpu", False)
    band = PredictionIntervals(model, damping=1.0, engine=Exact()).fit(x, x[:, 0], progress=False)
    _, J = reference.jacobian(model, x)
    q = [reference.variance(J, 1.0, row) for row in J[:5]]
    np.testing.assert_allclose(band.variance(x[:5]).numpy(), q, rtol=1e-9)
