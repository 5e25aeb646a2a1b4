import numpy as np
import pytest
import torch
from torch import nn

from deltaband import DeltabandWarning, Exact, PredictionIntervals, RandomProjection
from deltaband.data.inputs import Inputs
from deltaband.network.network import Network
from deltaband.network.probes import ProbeError, Probes, probes_for
from tests import reference

DECAY = 1e-3
FEW = "ignore:.*random combinations of the"


def images(n, size=5, seed=0):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, size, size, generator=rng, dtype=torch.float64)
    y = x.roll(1, 2).sin() + 0.1 * torch.randn(x.shape, generator=rng, dtype=torch.float64)
    return x, y


def small_cnn(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 1, 3, padding=1)).double()


def trained(x, y):
    model = small_cnn()
    optimiser = torch.optim.Adam(model.parameters(), 2e-2, weight_decay=DECAY)
    for _ in range(150):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimiser.step()
    return model


@pytest.fixture(scope="module")
def fields():
    x, y = images(40)
    return trained(x, y), x, y


def rows_of_jacobian(model, x):  # (b, m, p)
    return torch.from_numpy(reference.jacobians(model, [(row[None],) for row in x]))


def probed(model, **options):
    return PredictionIntervals(model, weight_decay=DECAY, engine=Exact(), **options)


@pytest.mark.parametrize("by_layers", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_gradients_of_combinations_are_those_of_plain_autograd(fields, by_layers, weighted):
    model, x, _ = fields
    network, rows = Network(model), Inputs.of(x[:6])
    if weighted:
        rows = rows.with_extras(
            weight=torch.rand(6, 25, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        )
    network = network.with_layers(network.probe(x).layers if by_layers else None).with_probes(Probes(3, seed=5))
    outputs, gradients = network.gradients(rows)
    c = Probes(3, seed=5).combinations(rows, 25, x)
    expected = torch.einsum("brm,bmp->rbp", c, rows_of_jacobian(model, x[:6])).flatten(0, 1)
    found = network.with_layers(None).gradients(rows)[1].rows() if by_layers else gradients.rows()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(gradients.inner(gradients), expected @ expected.T, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(outputs, model(x[:6]).detach().flatten(1))


def test_combinations_are_signs_with_the_roots_of_weights_and_of_one_over_r():
    x = Inputs.of(torch.randn(5, 2, generator=torch.Generator().manual_seed(0)))
    c = Probes(4).combinations(x, 7, torch.zeros(1))
    torch.testing.assert_close(c.abs(), torch.full((5, 4, 7), 0.5))
    assert len({tuple(row.flatten().tolist()) for row in c}) == 5
    w = torch.arange(35.0, dtype=torch.float64).reshape(5, 7)
    torch.testing.assert_close(
        Probes(4).combinations(x.with_extras(weight=w), 7, torch.zeros(1)), c * w.float().sqrt()[:, None]
    )
    assert not torch.equal(Probes(4, seed=1).combinations(x, 7, torch.zeros(1)), c)


def test_sums_over_combinations_are_unbiased(fields):
    model, x, _ = fields
    J = rows_of_jacobian(model, x[:4])
    expected = torch.einsum("bmp,bmq->pq", J, J)
    total, n = torch.zeros_like(expected), 2000
    for seed in range(n):
        g = torch.einsum("brm,bmp->brp", Probes(2, seed).combinations(Inputs.of(x[:4]), 25, x), J).flatten(0, 1)
        total += g.T @ g / n
    # the standard deviation of an entry is at most √(Mᵢᵢ Mⱼⱼ)
    error = (total - expected) / (expected.diagonal().outer(expected.diagonal())).sqrt()
    assert float(error.abs().max()) < 5 / np.sqrt(n)


def test_a_fit_sums_up_the_combinations_and_nothing_else(fields):
    model, x, y = fields
    band = probed(model, probes=6).fit(x, y.flatten(1))
    J = rows_of_jacobian(model, x)
    g = torch.einsum("brm,bmp->brp", Probes(6).combinations(Inputs.of(x), 25, x), J).flatten(0, 1).numpy()
    q, h, p_star = reference.answers(g[:, None], band.damping_, J[:3].numpy())
    np.testing.assert_allclose(band.variance(x[:3]).flatten(1), q, rtol=1e-6)
    np.testing.assert_allclose(band.leverage(x[:3]).flatten(1), h, rtol=1e-6)
    assert band.effective_parameters_ == pytest.approx(p_star)
    assert band.damping_ == pytest.approx(40 * 25 * DECAY / 2)
    np.testing.assert_allclose(band.fits_[0].losses, ((model(x) - y) ** 2).detach().flatten(1).sum(dim=0), rtol=1e-9)


@pytest.mark.filterwarnings(FEW)
@pytest.mark.parametrize("engine", [Exact(), RandomProjection(45)])
def test_batches_parts_and_merges_give_the_same_fit(fields, engine):
    model, x, y = fields
    y = y.flatten(1)

    def fresh():
        return PredictionIntervals(model, damping=1e4, engine=engine, probes=4)

    whole = fresh().fit(x, y)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    batches = fresh().fit([(x[i], y[i]) for i in order.split(7)])
    parts = fresh().partial_fit(x[:11], y[:11]).partial_fit(x[11:], y[11:])
    merged = fresh().fit(x[:25], y[:25]).merge(fresh().fit(x[25:], y[25:]))
    for other in (batches, parts, merged):
        np.testing.assert_allclose(other.variance(x[:2]), whole.variance(x[:2]), rtol=1e-7)


@pytest.mark.filterwarnings(FEW)
def test_the_dual_form_computes_combinations_again(fields):
    model, x, y = fields
    options = {"probes": 2, "parameters": "all"}
    whole = probed(model, **options).fit(x[:12], y[:12].flatten(1))
    small = PredictionIntervals(model, weight_decay=DECAY, engine=Exact(), probes=2, memory=60_000)
    found = small.fit(x[:12], y[:12].flatten(1))
    np.testing.assert_allclose(found.variance(x[:2]), whole.variance(x[:2]), rtol=1e-7)


@pytest.mark.parametrize("count", [2, 6, 24])
def test_the_reported_error_is_that_of_the_widths(fields, count):
    model, x, y = fields
    exact = probed(model).fit(x, y.flatten(1)).variance(x).numpy()
    off = []
    with pytest.warns(DeltabandWarning) if count < 3 else _quiet():
        for seed in range(4):
            x_ = x.clone()
            x_[:, 0, 0, 0] += 1e-9 * seed  # other signs
            band = probed(model, probes=count).fit(x_, y.flatten(1))
            off.append(np.sqrt((1 + band.variance(x).numpy()) / (1 + exact)) - 1)
    actual, reported = np.sqrt(np.mean(np.square(off))), band.error_report().probes
    assert 0.5 * actual < reported < 2.5 * actual
    assert f"{reported:.2%}" in band.summary()


def _quiet():
    from contextlib import nullcontext

    return nullcontext()


def test_too_few_combinations_are_warned_of_with_the_number_that_it_takes(fields):
    model, x, y = fields
    with pytest.warns(DeltabandWarning, match="1 random combinations .* about probes=") as found:
        probed(model, probes=1).fit(x, y.flatten(1))
    needed = int(str(found[0].message).split("probes=")[1].split(" ")[0])
    assert probed(model, probes=needed).fit(x, y.flatten(1)).error_report().probes <= 0.015


def test_how_many_it_takes_follows_from_both_parts_of_the_error():
    for random, bias in ((0.04, 0.0), (0.0, 0.04), (0.03, 0.02)):
        error = ProbeError(random, bias, 10)
        r = error.needed(0.01)
        assert np.hypot(random * np.sqrt(10 / r), bias * 10 / r) <= 0.01 + 1e-9
        r -= 1
        assert np.hypot(random * np.sqrt(10 / r), bias * 10 / r) > 0.01 - 1e-9


def test_few_outputs_are_all_taken_and_many_are_combined():
    assert probes_for(64, 1000, 1000) is None
    assert probes_for(4096, 1000, 1000) == Probes(8)
    assert probes_for(4096, 1000, 1000, asked=4096) is None
    assert probes_for(10, 1000, 1000, asked=3) == Probes(3)
    # Σq = p*: √(1 + q) is off by q/2 · p*/(nr) on average
    p, n, m = 50_000, 500, 4096
    r = probes_for(m, n, p).count
    assert 0.5 * p / (n * m) * p / (n * r) <= 0.01 < 0.5 * p / (n * m) * p / (n * (r - 1))


def test_robust_covariances_want_every_output(fields):
    model, x, y = fields
    with pytest.raises(ValueError, match="probes=25"):
        probed(model, robust="HC1", probes=3).fit(x, y.flatten(1))


@pytest.mark.parametrize("probes", [0, -1, 2.5, "many"])
def test_a_number_of_combinations_is_a_positive_whole_number(probes):
    with pytest.raises((TypeError, ValueError), match="probes"):
        PredictionIntervals(small_cnn(), weight_decay=DECAY, probes=probes)


@pytest.mark.filterwarnings(FEW)
def test_files_keep_the_combinations(fields, tmp_path):
    model, x, y = fields
    band = probed(model, probes=4).fit(x, y.flatten(1))
    band.save(tmp_path / "a.band")
    again = PredictionIntervals.load(tmp_path / "a.band", model)
    np.testing.assert_array_equal(again.variance(x[:3]), band.variance(x[:3]))
    assert again.fits_[0].probes == Probes(4)
    assert again.error_report().probes == band.error_report().probes
    more = again.partial_fit(*[images(9, seed=3)[0], images(9, seed=3)[1].flatten(1)])
    whole = probed(model, probes=4).fit(
        torch.cat([x, images(9, seed=3)[0]]), torch.cat([y, images(9, seed=3)[1]]).flatten(1)
    )
    np.testing.assert_allclose(more.variance(x[:3]), whole.variance(x[:3]), rtol=1e-7)
