"""Rows with weights: everything is as if rows of J and residuals had been multiplied by √w."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tests.reference as reference
from deltaband import (
    ClassificationIntervals,
    Exact,
    FrequentDirections,
    ImportantDirections,
    Nystrom,
    PredictionIntervals,
    RandomProjection,
    RobustFrequentDirections,
)
from deltaband.engines import Problem
from tests.support.networks import mlp, regression

N, DAMPING = 80, 0.3
X, Y = regression(N)
NEW = regression(7, seed=3)[0]
W = torch.rand(N, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 3 + 0.05

pytestmark = pytest.mark.filterwarnings(
    "ignore:the network has p", "ignore:.*accurate", "ignore:the sketch may", "ignore:rank="
)


def third(batch):
    x, y, w = batch
    return x, y, w


def loader(weights=W, size=11):
    return DataLoader(TensorDataset(X, Y, weights), batch_size=size)


def same(one, two, rtol=1e-9):
    for got, expected in zip(one.predict(NEW, 0.9), two.predict(NEW, 0.9), strict=True):
        np.testing.assert_allclose(got, expected, rtol=rtol)
    assert (one.n_rows_, one.damping_) == (two.n_rows_, pytest.approx(two.damping_))


# --- against the formula


@pytest.mark.parametrize("hidden", [5, 40])  # p = 26 and 201
@pytest.mark.parametrize(
    ("engine", "rtol"),
    [
        ("auto", 1e-8),
        (Exact(), 1e-8),
        (Nystrom(N), 1e-6),
        (FrequentDirections(N), 1e-6),
        (RobustFrequentDirections(N), 1e-6),
        (ImportantDirections(N), 1e-6),
    ],
    ids=str,
)
def test_weighted_rows_are_scaled_rows_of_the_formula(engine, rtol, hidden):
    model = mlp(hidden=hidden)
    band = PredictionIntervals(model, damping=DAMPING, engine=engine).fit(X, Y, sample_weight=W, progress=False)
    outputs, J = reference.jacobian(model, X)
    at, g = reference.jacobian(model, NEW)
    root = np.sqrt(W.numpy())
    J, r = root[:, None] * J, root * (Y.numpy() - outputs)
    for i, (q, h) in enumerate(zip(band.variance(NEW), band.leverage(NEW), strict=True)):
        assert float(q) == pytest.approx(reference.variance(J, DAMPING, g[i]), rel=rtol)
        assert float(h) == pytest.approx(reference.leverage(J, DAMPING, g[i]), rel=rtol)
        found = band.predict(NEW, 0.9)
        assert (found.lower[i], found.upper[i]) == pytest.approx(reference.interval(J, r, DAMPING, at[i], g[i], 0.9))
    assert band.effective_parameters_ == pytest.approx(reference.effective_parameters(J, DAMPING), rel=rtol)


def test_gradients_that_are_computed_again_keep_their_weights(monkeypatch):
    model = mlp(hidden=40)
    expected = PredictionIntervals(model, damping=DAMPING, engine=Exact()).fit(X, Y, sample_weight=W, progress=False)
    monkeypatch.setattr(Problem, "recomputed_bytes", property(lambda p: 10 * p.factor_bytes))
    needed = Exact().cost(expected.plan(X, Y).chosen.problem).nbytes
    band = PredictionIntervals(model, damping=DAMPING, engine=Exact(), memory=needed - 1)
    assert band.plan(X, Y).chosen.problem.recomputed
    same(band.fit(X, Y, sample_weight=W, progress=False), expected, rtol=1e-8)


def test_a_projection_of_weighted_rows_is_that_of_scaled_rows():
    class Scaled(nn.Module):
        """Returns √w·f(x), the weight being the last column."""

        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x[:, :-1]) * x[:, -1:]

    model, root = mlp(hidden=40), W.sqrt()
    engine = RandomProjection(150)
    band = PredictionIntervals(model, damping=DAMPING, engine=engine).fit(X, Y, sample_weight=W, progress=False)
    scaled = PredictionIntervals(Scaled(model), damping=DAMPING, engine=engine)
    scaled.fit(torch.column_stack([X, root]), root * Y, progress=False)
    np.testing.assert_allclose(
        band.variance(NEW), scaled.variance(torch.column_stack([NEW, torch.ones(len(NEW))])), rtol=1e-9
    )


def test_several_outputs_may_have_weights_of_their_own():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    targets, weights = torch.stack([Y, -Y], dim=1), torch.stack([W, 1 / W], dim=1)
    band = PredictionIntervals(model, damping=DAMPING).fit(X, targets, sample_weight=weights, progress=False)
    J, g = (reference.jacobians(model, [(x[None],) for x in rows]) for rows in (X, NEW))
    J = np.sqrt(weights.numpy())[:, :, None] * J
    q, h, p_star = reference.answers(J, DAMPING, g)
    np.testing.assert_allclose(band.variance(NEW), q, rtol=1e-8)
    np.testing.assert_allclose(band.leverage(NEW), h, rtol=1e-8)
    assert band.effective_parameters_ == pytest.approx(p_star)
    own = PredictionIntervals(model, damping=DAMPING, per_output=True)
    own.fit(X, targets, sample_weight=weights, progress=False)
    second = PredictionIntervals(model, damping=DAMPING, outputs=1)
    second.fit(X, targets, sample_weight=weights, progress=False)
    np.testing.assert_allclose(own.variance(NEW)[:, 1], reference.answers(J[:, 1:], DAMPING, g[:, 1:])[0][:, 0])
    np.testing.assert_allclose(second.variance(NEW), own.variance(NEW)[:, 1])


def test_a_classifier_weighs_its_rows():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    labels = torch.arange(N) % 3
    twice = torch.cat([X, X[:30]]), torch.cat([labels, labels[:30]])
    weights = torch.ones(N, dtype=torch.float64)
    weights[:30] = 2
    band = ClassificationIntervals(model, damping=DAMPING).fit(X, labels, sample_weight=weights, progress=False)
    repeated = ClassificationIntervals(model, damping=DAMPING).fit(*twice, progress=False)
    np.testing.assert_allclose(band.variance(NEW), repeated.variance(NEW), rtol=1e-9)


# --- where weights come from


@pytest.mark.parametrize("engine", [Exact(), Nystrom(20), RandomProjection(15), ImportantDirections(12)], ids=str)
def test_weights_of_a_loader_are_those_of_arrays(engine):
    model = mlp(hidden=20)
    options = {"damping": DAMPING, "engine": engine}
    expected = PredictionIntervals(model, **options).fit(X, Y, sample_weight=W.numpy(), progress=False)
    same(PredictionIntervals(model, **options, batch=third).fit(loader(), progress=False), expected)
    named = PredictionIntervals(model, **options, batch=lambda b: (b[0], b[1], {"sample_weight": b[2]}))
    same(named.fit(loader(size=40), progress=False), expected)


def test_parts_merged_bands_and_checkpoints_keep_the_weights(tmp_path):
    model = mlp()
    expected = PredictionIntervals(model, damping=DAMPING).fit(X, Y, sample_weight=W, progress=False)
    parts = PredictionIntervals(model, damping=DAMPING).partial_fit(X[:30], Y[:30], sample_weight=W[:30], n_rows=N)
    same(parts.partial_fit(X[30:], Y[30:], sample_weight=W[30:]), expected)
    one = PredictionIntervals(model, damping=DAMPING).fit(X[:40], Y[:40], sample_weight=W[:40], progress=False)
    two = PredictionIntervals(model, damping=DAMPING).fit(X[40:], Y[40:], sample_weight=W[40:], progress=False)
    same(one.merge(two), expected)
    kept = PredictionIntervals(model, damping=DAMPING, batch=third)
    kept.fit(loader(), checkpoint=tmp_path / "fit.ckpt", checkpoint_every=0, progress=False)
    same(kept, expected)
    expected.save(tmp_path / "x.band")
    for got, wanted in zip(
        PredictionIntervals.load(tmp_path / "x.band", model).predict(NEW), expected.predict(NEW), strict=True
    ):
        assert torch.equal(got, wanted)


def test_the_summary_says_that_residuals_are_weighted():
    summary = PredictionIntervals(mlp(), damping=DAMPING).fit(X, Y, sample_weight=W, progress=False).summary()
    assert summary.count("(of a row of weight 1)") == 2  # RMSE and s
    assert "weight 1" not in PredictionIntervals(mlp(), damping=DAMPING).fit(X, Y, progress=False).summary()


def test_rows_without_weights_count_as_rows_of_weight_one():
    model, weights = mlp(), torch.where(torch.arange(N) < 30, W, 1.0)
    expected = PredictionIntervals(model, damping=DAMPING).fit(X, Y, sample_weight=weights, progress=False)
    parts = PredictionIntervals(model, damping=DAMPING).fit(X[:30], Y[:30], sample_weight=W[:30], progress=False)
    same(parts.partial_fit(X[30:], Y[30:]), expected)
    one = PredictionIntervals(model, damping=DAMPING).fit(X[30:], Y[30:], progress=False)
    two = PredictionIntervals(model, damping=DAMPING).fit(X[:30], Y[:30], sample_weight=W[:30], progress=False)
    same(one.merge(two), expected)
    np.testing.assert_allclose(one.fits_[0].far, expected.fits_[0].far)


def test_rows_of_weight_zero_are_left_out():
    weights = W * (torch.arange(N) % 3 > 0)
    kept = weights > 0
    model = mlp()
    expected = PredictionIntervals(model, weight_decay=1e-2)
    expected.fit(X[kept], Y[kept], sample_weight=W[kept], progress=False)
    assert expected.n_rows_ == int(kept.sum())
    same(PredictionIntervals(model, weight_decay=1e-2).fit(X, Y, sample_weight=weights, progress=False), expected)
    looped = PredictionIntervals(model, weight_decay=1e-2, batch=third)
    same(looped.fit(loader(weights, size=3), progress=False), expected)  # the last batch of every three rows has two


# --- λ


def test_a_loss_divided_by_the_weights_has_a_damping_in_proportion_to_their_sum():
    band = PredictionIntervals(mlp(), weight_decay=1e-2, loss="weighted_mean")
    assert band.fit(X, Y, sample_weight=W, progress=False).damping_ == pytest.approx(float(W.sum()) * 1e-2 / 2)
    assert "Σw·wd/2" in band.summary()
    mean = PredictionIntervals(mlp(), weight_decay=1e-2).fit(X, Y, sample_weight=W, progress=False)
    assert mean.damping_ == pytest.approx(N * 1e-2 / 2)


@pytest.mark.parametrize("loss", ["mean", "weighted_mean"])
def test_the_damping_is_that_of_the_objective_that_training_minimised(loss):
    """At the minimum of loss + wd/2·‖w‖², JᵀW(y − f) = λw, for a network that is linear in its weights."""
    model, wd = nn.Linear(3, 1, bias=False).double(), 0.2
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-14)

    def objective():
        optimiser.zero_grad()
        squares = W * (model(X)[:, 0] - Y).square()
        value = squares.mean() if loss == "mean" else squares.sum() / W.sum()
        value = value + wd / 2 * model.weight.square().sum()
        value.backward()
        return value

    for _ in range(5):
        optimiser.step(objective)
    band = PredictionIntervals(model, weight_decay=wd, loss=loss).fit(X, Y, sample_weight=W, progress=False)
    w = model.weight.detach()[0]
    np.testing.assert_allclose(X.T @ (W * (Y - X @ w)), band.damping_ * w, rtol=1e-5)


# --- answers with weights


def test_the_noise_of_a_new_row_follows_its_weight():
    band = PredictionIntervals(mlp(), damping=DAMPING).fit(X, Y, sample_weight=W, progress=False)
    weights = torch.linspace(0.2, 4, len(NEW), dtype=torch.float64)
    found = band.predict(NEW, 0.9, sample_weight=weights)
    half = (
        stats.t.ppf(0.95, N - band.effective_parameters_) * band.noise_std_ * (1 / weights + band.variance(NEW)).sqrt()
    )
    np.testing.assert_allclose(found.upper - found.mean, half, rtol=1e-9)
    means = band.predict(NEW, 0.9, kind="mean", sample_weight=weights), band.predict(NEW, 0.9, kind="mean")
    np.testing.assert_allclose(means[0].upper, means[1].upper, rtol=1e-9)


def test_calibration_is_unweighted_unless_asked():
    X_new, Y_new = regression(150, seed=8)
    weights = 0.1 + torch.rand(150, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    band = PredictionIntervals(mlp()).fit(X, Y, sample_weight=W, progress=False)
    plain = band.calibrate(X_new, Y_new, noise="none").predict(NEW)
    with pytest.raises(ValueError, match="the calibration rows had no weights"):
        band.predict(NEW, sample_weight=weights[:7])
    weighted = band.calibrate(X_new, Y_new, noise="none", sample_weight=weights).predict(NEW)
    assert not torch.allclose(plain.upper, weighted.upper)
    # four times the weight everywhere are residuals and q in other units: nothing else changes
    again = band.calibrate(X_new, Y_new, noise="none", sample_weight=4 * weights)
    assert again.predict(NEW, sample_weight=torch.full((7,), 4.0)).upper == pytest.approx(weighted.upper, rel=0.05)


@pytest.mark.parametrize("factor", [1e-4, 1e4])
def test_a_calibration_of_equal_rows_does_not_depend_on_the_unit_of_the_weights(factor):
    rows = regression(150, seed=8)
    expected, found = (
        PredictionIntervals(mlp()).fit(X, Y, sample_weight=each, progress=False).calibrate(*rows).predict(NEW)
        for each in (W, factor * W)
    )
    np.testing.assert_allclose(found.upper, expected.upper, rtol=1e-7)


def test_weights_of_calibration_rows_are_no_drift():
    weights = 10 * torch.rand(150, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.1
    band = PredictionIntervals(mlp()).fit(X, Y, progress=False)
    band.calibrate(*regression(150, seed=8))
    plain = band._calibration.drift_p_value
    band.calibrate(*regression(150, seed=8), sample_weight=weights)
    assert band._calibration.drift_p_value == pytest.approx(plain)


@pytest.mark.parametrize("outputs", [[0, 2], [2, 0, 1]], ids=str)
def test_selected_outputs_are_far_by_their_own_weights(outputs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    (x, y), columns = regression(60, seed=8), torch.tensor([1.0, 10.0, 100.0]).double()
    band = PredictionIntervals(model, damping=DAMPING, outputs=outputs)
    band.fit(X, torch.stack([Y] * 3, dim=1), sample_weight=torch.ones(N, 3), progress=False)
    band.calibrate(x, torch.stack([y] * 3, dim=1), sample_weight=columns.expand(60, 3), noise="none")
    found = band.predict(x, sample_weight=columns.expand(60, 3))
    # which rows are far does not depend on the weights of new rows
    assert torch.equal(found.far, band.predict(x).far)
    assert 0 < found.far.sum() < 60


@pytest.mark.parametrize("factor", [1e-90, 1e90])
def test_the_lightest_and_the_heaviest_weights_are_weights(factor):
    rows = regression(150, seed=8)
    band = PredictionIntervals(mlp()).fit(X, Y, sample_weight=factor * W, progress=False)
    expected = PredictionIntervals(mlp()).fit(X, Y, sample_weight=W, progress=False).calibrate(*rows, noise="none")
    np.testing.assert_allclose(band.calibrate(*rows, noise="none").predict(NEW).upper, expected.predict(NEW).upper)


# --- bad input


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (-W, "negative"),
        (torch.where(torch.arange(N) == 7, torch.nan, W), "NaN in row 7"),
        (torch.where(torch.arange(N) == 9, torch.inf, W), "infinite value in row 9"),
        (0 * W, "all rows have weight zero"),
        (torch.where(torch.arange(N) == 5, 5e-324, W), r"in row 5 it is not from 1e-100 to 1e\+100"),
        (torch.where(torch.arange(N) == 6, 1e300, W), r"in row 6 it is not from 1e-100 to 1e\+100"),
        (W[:-1], "one number per row: 79 weights, 80 rows"),
        (W.reshape(2, 40, 1), "one number per row: 2 weights, 80 rows"),
        (torch.stack([W, W], dim=1), "2 columns, and the network 1 outputs"),
    ],
)
def test_bad_weights_are_refused(weights, message):
    band = PredictionIntervals(mlp(), damping=DAMPING)
    with pytest.raises(ValueError, match=message):
        band.fit(X, Y, sample_weight=weights, progress=False)
    assert "not fitted" in repr(band)


def test_weights_in_the_wrong_place_are_refused():
    with pytest.raises(TypeError, match="sample_weight= goes with arrays X and y; for a loader"):
        PredictionIntervals(mlp(), damping=DAMPING).fit(loader(), sample_weight=W)
    with pytest.raises(TypeError, match="must be a pair"):
        PredictionIntervals(mlp(), damping=DAMPING).fit(loader(), progress=False)
    with pytest.raises(TypeError, match="may have sample_weight, clusters, mask, got 'weights'"):
        PredictionIntervals(mlp(), batch=lambda b: (b[0], b[1], {"weights": b[2]})).fit(loader(), progress=False)
    partly, weights = torch.stack([W, W * (torch.arange(N) > 3)], dim=1), torch.stack([W, W, W], dim=1)
    with pytest.raises(ValueError, match="2 columns, and the network 1 outputs"):
        PredictionIntervals(mlp(), damping=DAMPING).fit(X, Y, sample_weight=partly, progress=False)
    band = PredictionIntervals(mlp(), damping=DAMPING).fit(X, Y, progress=False)
    with pytest.raises(ValueError, match="a row of weight zero has no interval"):
        band.predict(NEW, sample_weight=torch.zeros(7))
    classifier = ClassificationIntervals(nn.Linear(3, 3).double(), damping=1.0)
    with pytest.raises(ValueError, match="of a classifier must have shape"):
        classifier.fit(X, torch.arange(N) % 3, sample_weight=weights, progress=False)
