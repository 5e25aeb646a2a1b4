"""Outputs of any shape: missing targets, quantiles for shares of a row's outputs, positions, forward mode."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from deltaband import Exact, ImportantDirections, PredictionIntervals, RandomProjection, metrics
from deltaband.calibration.pooled import share_quantile
from deltaband.data.inputs import Inputs
from deltaband.fitting import spec as specs
from deltaband.network.forward import ForwardNetwork
from deltaband.network.network import Network
from tests import reference
from tests.support.fields import DECAY, SHAPE, holes, rows, trained

UNSURE = ("the network has p", ".*random combinations", "the network predicts", "n − p", ".*were training rows")
UNSURE += (".*not accurate enough", "the sketch may miss", "the network explains")
pytestmark = [pytest.mark.filterwarnings(f"ignore:{each}") for each in UNSURE]


@pytest.fixture(scope="module")
def model():
    return trained()


def test_results_have_the_shape_of_what_the_network_returns(model):
    (x, y), (held, of_held) = rows(60), rows(60, 1)
    band = PredictionIntervals(model, weight_decay=DECAY).fit(x, y)
    flat = PredictionIntervals(model, weight_decay=DECAY).fit(x, y.flatten(1))
    for found in (band, flat):
        intervals = found.predict(held, [0.5, 0.9])
        assert intervals.mean.shape == (60, *SHAPE)
        assert intervals.lower.shape == (60, *SHAPE, 2)
        assert found.variance(held).shape == found.leverage(held).shape == (60, *SHAPE)
        assert found.noise_std_.shape == SHAPE
    np.testing.assert_array_equal(band.variance(held), flat.variance(held))
    assert band.covariance(held[:2]).shape == (2, *SHAPE, 2, *SHAPE)
    assert band.sample(held[:2], n=3).shape == (3, 2, *SHAPE)
    assert band.quantile(held, 0.9).shape == band.cdf(held, of_held).shape == (60, *SHAPE)
    assert np.shape(metrics.coverage(of_held, band.predict(held, 0.9))) == SHAPE
    assert np.shape(band.evaluate(held, of_held).rmse) == (24,)
    J = reference.jacobians(model, [(row[None],) for row in x], output=lambda y: y.flatten(1))
    g = reference.jacobians(model, [(held[:1],)], output=lambda y: y.flatten(1))[0]
    q, h, _ = reference.answers(J, band.damping_, g[None])
    np.testing.assert_allclose(band.variance(held[:1]).flatten(1), q, rtol=1e-7)
    np.testing.assert_allclose(band.leverage(held[:1]).flatten(1), h, rtol=1e-7)


def test_shapes_that_do_not_fit_are_refused_with_the_batch(model):
    x, y = rows(20)
    band = PredictionIntervals(model, weight_decay=DECAY)
    with pytest.raises(ValueError, match=r"batch 0.*shape \(4, 3, 2\).*network returns \(2, 3, 4\)"):
        band.fit(x, y.transpose(1, 3))
    with pytest.raises(ValueError, match=r"batch 1, which begins with row 10, have shape \(2, 3, 3\).*batch 0 has"):
        band.fit([(x[:10], y[:10]), (x[10:], y[10:, ..., :3])])
    band.fit(x, y)
    with pytest.raises(ValueError, match=r"shape \(3, 2, 4\)"):
        band.calibrate(x, y.transpose(1, 2))


def test_a_missing_target_is_no_row_of_j_and_counts_for_its_output_alone(model):
    (x, y), new = rows(60), rows(3, 1)[0]
    y = holes(y)
    y[7] = torch.nan  # says nothing
    there = ~torch.isnan(y.flatten(1)).numpy()
    band = PredictionIntervals(model, weight_decay=DECAY, missing="ignore", engine=Exact()).fit(x, y)
    J = reference.jacobians(model, [(row[None],) for row in x], output=lambda y: y.flatten(1))
    g = reference.jacobians(model, [(row[None],) for row in new], output=lambda y: y.flatten(1))
    assert band.n_rows_ == 59
    assert band.damping_ == pytest.approx(there.sum() * DECAY / 2)  # a mean over the targets that there are
    q, h, p_star = reference.answers(J[there][:, None], band.damping_, g)
    np.testing.assert_allclose(band.variance(new).reshape(-1), q.reshape(-1), rtol=1e-6)
    np.testing.assert_allclose(band.leverage(new).reshape(-1), h.reshape(-1), rtol=1e-6)
    assert band.effective_parameters_ == pytest.approx(p_star)
    fit, residuals = band.fits_[0], np.where(there, (model(x) - y).detach().flatten(1).numpy(), 0.0)
    np.testing.assert_array_equal(fit.observed, there.sum(axis=0))
    rows_of_j = J[there]
    A = rows_of_j.T @ rows_of_j + band.damping_ * np.eye(J.shape[-1])
    H = rows_of_j @ np.linalg.solve(A, rows_of_j.T)
    own = np.zeros(24)
    np.add.at(own, np.nonzero(there)[1], np.diag(2 * H - H @ H))
    freedom = there.sum(axis=0) - own
    np.testing.assert_allclose(fit.degrees_of_freedom, freedom, rtol=1e-6)
    s = np.sqrt(np.square(residuals).sum(axis=0) / freedom)
    np.testing.assert_allclose(band.noise_std_.ravel(), s, rtol=1e-6)
    assert "of each output" in band.summary()
    assert "sum of weights" not in band.summary()


def test_masks_in_batches_are_nan_in_arrays_and_zero_weights(model):
    (x, y), new = rows(60), rows(3, 1)[0]
    given = holes(y)
    there = ~torch.isnan(given)
    arrays = PredictionIntervals(model, weight_decay=DECAY, missing="ignore").fit(x, given)
    pieces = [(x[i : i + 20], y[i : i + 20], {"mask": there[i : i + 20]}) for i in (0, 20, 40)]
    masked = PredictionIntervals(model, weight_decay=DECAY, batch=lambda batch: batch).fit(pieces)
    weights = PredictionIntervals(model, damping=arrays.damping_).fit(x, y, sample_weight=there.flatten(1).double())
    for other in (masked, weights):
        np.testing.assert_allclose(other.variance(new), arrays.variance(new), rtol=1e-9)
    for other in (masked, weights):
        np.testing.assert_allclose(other.noise_std_, arrays.noise_std_, rtol=1e-9)
    held, of_held = rows(60, 1)
    zero = (~torch.isnan(holes(of_held))).flatten(1).double()
    options = {"noise": "none", "tune": False}
    weights.calibrate(held, of_held, sample_weight=zero, **options)
    arrays.calibrate(held, holes(of_held), **options)
    np.testing.assert_allclose(weights.predict(new, 0.9).upper, arrays.predict(new, 0.9).upper, rtol=1e-9)
    with pytest.raises(ValueError, match="leave it out of predict"):
        weights.predict(held, 0.9, sample_weight=zero)
    two = PredictionIntervals(model, weight_decay=DECAY, missing="ignore").fit(x[:30], given[:30])
    two.partial_fit(x[30:], given[30:])
    np.testing.assert_allclose(two.noise_std_, arrays.noise_std_, rtol=1e-9)


def test_missing_targets_are_calibrated_per_output_on_what_is_there(model):
    (x, y), (held, of_held) = rows(60), rows(80, 1)
    given, new = holes(of_held), rows(5, 2)[0]
    options = {"noise": "none", "tune": False}
    band = PredictionIntervals(model, weight_decay=DECAY, missing="ignore").fit(x, y).calibrate(held, given, **options)
    found = band.predict(new, 0.9)
    for o in (0, 13, 23):
        there = ~torch.isnan(given.flatten(1)[:, o])
        of_all = of_held.clone()
        alone = PredictionIntervals(model, damping=band.damping_).fit(x, y)
        alone.calibrate(held[there], of_all[there], **options)
        expected = alone.predict(new, 0.9)
        np.testing.assert_allclose(found.lower.flatten(1)[:, o], expected.lower.flatten(1)[:, o], rtol=1e-9)


@pytest.mark.parametrize("joint", [True, "share"])
def test_missing_targets_take_no_part_in_what_a_row_is_promised(model, joint):
    (x, y), (held, of_held), (new, of_new) = rows(60), rows(400, 1), rows(400, 2)
    band = PredictionIntervals(model, weight_decay=DECAY, missing="ignore").fit(x, y)
    band.calibrate(held, holes(of_held), joint=joint, noise="none")
    there = ~torch.isnan(holes(of_new, seed=9)).flatten(1)
    inside = band.predict(new, 0.9).contains(of_new).flatten(1)
    kept = ((inside | ~there).all(dim=1) if joint is True else (inside & there).sum(dim=1) / there.sum(dim=1)).double()
    assert 0.86 < float(kept.mean()) < 0.94


def test_bad_masks_and_targets_that_are_all_missing_are_refused(model):
    x, y = rows(20)
    whole, band = (
        torch.ones(20, *SHAPE, dtype=torch.bool),
        PredictionIntervals(model, weight_decay=DECAY, missing="ignore"),
    )
    masked = PredictionIntervals(model, weight_decay=DECAY, batch=lambda batch: batch)
    with pytest.raises(ValueError, match="missing='ignore'"):
        PredictionIntervals(model, weight_decay=DECAY).fit(x, holes(y))
    with pytest.raises(ValueError, match=r"shape of its targets: expected \(20, 2, 3, 4\), got \(20, 3\)"):
        masked.fit([(x, y, {"mask": whole[:, 0, :, 0]})])
    with pytest.raises(TypeError, match="a mask must be true"):
        masked.fit([(x, y, {"mask": whole.double()})])
    with pytest.raises(TypeError, match="may have sample_weight, clusters, mask, got 'masks'"):
        masked.fit([(x, y, {"masks": whole})])
    with pytest.raises(ValueError, match="or no target"):
        band.fit(x, torch.full_like(y, torch.nan))
    never = y.clone()
    never[:, 1, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="output 12 has no target in any row"):
        band.fit(x, never)
    band.fit(x, y)
    with pytest.raises(ValueError, match="no target among the calibration rows"):
        band.calibrate(x, never)
    with pytest.raises(ValueError, match="missing must be"):
        PredictionIntervals(model, missing="drop")


def naive_share_quantile(scores, level):
    n = len(scores)
    for t in np.sort(scores[~np.isnan(scores)]):
        outside = [np.mean(row[~np.isnan(row)] > t) for row in scores]
        if (sum(outside) + 1) / (n + 1) <= 1 - level + 1e-12:
            return t
    raise ValueError


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9])
def test_the_threshold_of_shares_is_that_of_conformal_risk_control(level):
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((17, 5)).round(1)  # with ties
    assert share_quantile(scores, level) == naive_share_quantile(scores, level)
    scores[rng.random(scores.shape) < 0.4] = np.nan
    scores[:, 0] = 0.3
    assert share_quantile(scores, level) == naive_share_quantile(scores, level)
    one = rng.standard_normal((30, 1))
    assert share_quantile(one, level) == np.sort(one[:, 0])[int(np.ceil(31 * level - 1e-9)) - 1]


def test_shares_horizons_and_outputs_keep_what_they_promise(model):
    (x, y), (held, of_held), (new, of_new) = rows(60), rows(600, 1), rows(600, 2)
    scale, generator = torch.arange(1.0, 25).reshape(SHAPE).double() / 24, torch.Generator().manual_seed(7)
    of_held, of_new = (y + scale * torch.randn(y.shape, generator=generator) for y in (of_held, of_new))
    band = PredictionIntervals(model, weight_decay=DECAY).fit(x, y)
    for joint, axes in (("share", (0, 1, 2, 3)), ("horizon", (0, 2, 3)), ("scale", 0)):
        band.calibrate(held, of_held, joint=joint, noise="none")
        covered = band.predict(new, 0.9).contains(of_new).numpy().mean(axis=axes)
        assert np.shape(covered) == {"share": (), "horizon": (2,), "scale": SHAPE}[joint]
        slack = 0.015 if joint != "scale" else 0.08  # four standard deviations
        assert np.all(np.abs(covered - 0.9) < slack)
        assert "for the quantile" in band.summary()
        upper = band.predict(new, 0.9, side="upper")
        assert bool(torch.isneginf(upper.lower).all())
        assert abs(float((of_new <= upper.upper).double().mean()) - 0.9) < 0.02


def test_modes_that_do_not_go_together_are_refused(model, tmp_path):
    (x, y), (held, of_held) = rows(60), rows(60, 1)
    band = PredictionIntervals(model, weight_decay=DECAY).fit(x, y)
    with pytest.raises(ValueError, match="joint must be"):
        band.calibrate(held, of_held, joint="pixels")
    with pytest.raises(ValueError, match="groups= goes with joint=True or False"):
        band.calibrate(held, of_held, joint="share", groups=np.arange(60) % 2)
    some = PredictionIntervals(model, weight_decay=DECAY, outputs=[0, 1]).fit(x, y)
    with pytest.raises(ValueError, match="leave out outputs="):
        some.calibrate(held, of_held, joint="horizon")
    band.calibrate(held, of_held, joint="share", noise="none")
    with pytest.raises(ValueError, match="too few for level"):
        band.predict(held, 0.99)
    with pytest.raises(ValueError, match="calibrate with joint=False or True"):
        band.monitor()
    band.save(tmp_path / "band.dbi")
    again = PredictionIntervals.load(tmp_path / "band.dbi", model)
    np.testing.assert_array_equal(again.predict(held, 0.9).upper, band.predict(held, 0.9).upper)


@pytest.mark.parametrize("joint", [None, False, True, "share", "horizon", "scale"])
def test_positions_are_columns_of_the_whole(model, joint):
    (x, y), (held, of_held) = rows(60), rows(70, 1)
    band = PredictionIntervals(model, weight_decay=DECAY).fit(x, y)
    if joint is not None:
        band.calibrate(held, of_held, joint=joint, noise="none")
    whole, flat = band.predict(held, [0.5, 0.9]), [23, 0, 13]
    for positions in (flat, [[1, 2, 3], [0, 0, 0], [1, 0, -3]], np.array(flat) - 24):
        some = band.predict(held, [0.5, 0.9], positions=positions)
        for name in ("mean", "lower", "upper"):
            expected = getattr(whole, name).reshape(70, 24, -1)[:, flat].reshape(getattr(some, name).shape)
            np.testing.assert_allclose(getattr(some, name), expected, rtol=1e-9)
    np.testing.assert_allclose(band.variance(held, positions=flat), band.variance(held).flatten(1)[:, flat], rtol=1e-9)
    np.testing.assert_allclose(band.leverage(held, positions=flat), band.leverage(held).flatten(1)[:, flat], rtol=1e-9)


def test_positions_of_outputs_that_were_fitted_one_by_one(model):
    (x, y), (held, of_held) = rows(60), rows(70, 1)
    band = PredictionIntervals(model, weight_decay=DECAY, per_output=True, outputs=[3, 5, 8]).fit(x, y)
    band.calibrate(held, of_held, noise="none")
    some = band.predict(held, 0.9, positions=[8, 3])
    np.testing.assert_allclose(some.upper, band.predict(held, 0.9).upper[:, [2, 0]], rtol=1e-9)
    with pytest.raises(ValueError, match="position 4 is none of the outputs"):
        band.predict(held, positions=[4])


def test_positions_out_of_range_are_refused(model):
    x, y = rows(60)
    band = PredictionIntervals(model, weight_decay=DECAY).fit(x, y)
    for bad, message in (
        ([24], "out of range"),
        ([(0, 3, 0)], r"position \[0, 3, 0\] is out of range: the network returns \(2, 3, 4\)"),
        ([(0, 1)], "each position has 2 indices"),
        ([0.5], "whole numbers"),
        ([], "whole numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            band.predict(x, positions=bad)


def networks():
    conv = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh(), nn.ConvTranspose2d(3, 2, 3, padding=1)
    )
    wide = nn.Sequential(nn.Linear(36, 2), nn.Tanh(), nn.Linear(2, 300, bias=False))
    return {"conv": conv, "linear": nn.Sequential(nn.Flatten(), wide)}


@pytest.mark.parametrize("name", ["conv", "linear"])
@pytest.mark.parametrize("engine", [Exact(), RandomProjection(25), ImportantDirections(20)])
@pytest.mark.parametrize("weighted", [False, True])
def test_forward_mode_gives_what_backward_passes_do(name, engine, weighted, monkeypatch):
    torch.manual_seed(0)
    net, x = networks()[name].double().eval(), torch.randn(12, 1, 6, 6, dtype=torch.float64)
    y = net(x).detach() + 0.1 * torch.randn(net(x).shape, dtype=torch.float64)
    if name == "linear" and not isinstance(engine, RandomProjection):
        net = nn.Sequential(nn.Flatten(), nn.Linear(36, 1), nn.Tanh(), nn.Linear(1, 200, bias=False)).double()
        net[1].weight.requires_grad_(False)
        y = torch.randn(12, 200, dtype=torch.float64)
    w = torch.rand(y.flatten(1).shape, dtype=torch.float64) + 0.5 if weighted else None
    band = PredictionIntervals(net, weight_decay=DECAY, engine=engine).fit(x, y, sample_weight=w)
    network, used = band.spec.fitted_network(band.fits_[0]), []
    expected_kind = y[0].numel() > (25 if isinstance(engine, RandomProjection) else band.n_parameters_)
    assert isinstance(network, ForwardNetwork) == expected_kind
    along = ForwardNetwork._along
    monkeypatch.setattr(ForwardNetwork, "_along", lambda self, *given: used.append(1) or along(self, *given))
    asked = {"sample_weight": w[:3]} if weighted else {}
    fast = band.variance(x[:3]), band.leverage(x[:3]), band.predict(x[:3], 0.9, **asked).upper
    assert bool(used) == expected_kind
    monkeypatch.setattr(specs, "forward", lambda network, S, n_outputs, memory: network)
    slow = band.variance(x[:3]), band.leverage(x[:3]), band.predict(x[:3], 0.9, **asked).upper
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_forward_mode_is_bounded_in_memory_and_left_where_it_is_wrong(monkeypatch):
    torch.manual_seed(0)
    net, x = networks()["conv"].double().eval(), torch.randn(5, 1, 6, 6, dtype=torch.float64)
    band = PredictionIntervals(net, weight_decay=DECAY, engine=RandomProjection(25)).fit(x, net(x).detach() + 0.1)
    expected = band.variance(x)
    monkeypatch.setattr("deltaband.network.forward.COORDINATE_BYTES", 8 * 25 * 10)
    monkeypatch.setattr("deltaband.network.forward.TANGENT_BYTES", 1)
    network = band.spec.fitted_network(band.fits_[0])
    assert network.chunk_rows(x) == 1
    assert next(iter(network.groups(Inputs.of(x)))) == slice(0, 10)
    torch.testing.assert_close(band.variance(x), expected, rtol=1e-9, atol=0)

    class Own(torch.autograd.Function):
        """Has no forward mode."""

        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            return g * 2

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return Own.apply(self.net(x))

    twice = PredictionIntervals(Twice().eval(), weight_decay=DECAY, engine=RandomProjection(25)).fit(
        x, 2 * net(x).detach() + 0.1
    )
    network = twice.spec.fitted_network(twice.fits_[0])
    assert isinstance(network, ForwardNetwork)
    g = network.gradients(Inputs.of(x), slice(0, 2))[1]
    whole = Network(network.model_copy, network.layers, network.head).gradients(Inputs.of(x), slice(0, 2))[1]
    torch.testing.assert_close(g.rows(), whole.rows())


def test_forward_mode_takes_a_share_of_the_memory_that_there_is(monkeypatch):
    torch.manual_seed(0)
    net, x = networks()["conv"].double().eval(), torch.randn(8, 1, 6, 6, dtype=torch.float64)
    band = PredictionIntervals(net, weight_decay=DECAY, engine=RandomProjection(25)).fit(x, net(x).detach() + 0.1)
    expected, widths, along = band.variance(x), [], ForwardNetwork._along

    def noted(self, x, directions, *group):
        widths.append(len(x) * len(directions))
        return along(self, x, directions, *group)

    monkeypatch.setattr(ForwardNetwork, "_along", noted)

    def most(memory, free):
        band.spec = replace(band.spec, memory=memory)
        monkeypatch.setattr(specs, "free_memory", lambda: free)
        widths.clear()
        torch.testing.assert_close(band.variance(x), expected, rtol=1e-9, atol=0)
        return band.spec.fitted_network(band.fits_[0]).chunk_rows(x), max(widths)

    rows, width = most(None, 2**34)
    for memory, free in ((2**19, 2**34), (None, 2**19)):  # bytes
        fewer, narrower = most(memory, free)
        assert 1 <= fewer < rows
        assert 25 <= 25 * narrower < 25 * width
    monkeypatch.setattr(specs, "free_memory", lambda: 0.0)
    network = band.spec.fitted_network(band.fits_[0])
    assert network.chunk_rows(x) == network._at_once(Inputs.of(x)) == 1
    assert next(iter(network.groups(Inputs.of(x)))) == slice(0, 1)


def test_a_few_probes_too_many_are_told_with_the_number_needed():
    torch.manual_seed(0)
    net, x = networks()["conv"].double().eval(), torch.randn(12, 1, 6, 6, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"for 1% it takes (about probes=\d+|all 72 outputs)"):
        PredictionIntervals(net, damping=1e-3, probes=2).fit(x, net(x).detach() + 0.1 * torch.randn(12, 2, 6, 6))
