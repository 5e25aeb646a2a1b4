"""Networks of several outputs: an interval for each, from one JᵀJ for all of them, or from one for each alone."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tests.reference as reference
from deltaband import (
    Exact,
    ImportantDirections,
    Nystrom,
    PredictionIntervals,
    RandomProjection,
    RobustFrequentDirections,
    metrics,
)
from deltaband.calibration import AllOutputs, Scales
from deltaband.network import network as networks
from deltaband.network import per_row

WD = 1e-2


def three_outputs(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, 3, generator=generator, dtype=torch.float64) * torch.tensor([0.1, 0.3, 0.05])
    return X, torch.stack([X[:, 0].sin(), X[:, 1] * X[:, 2], X.sum(dim=1)], dim=1) + noise


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    X, Y = three_outputs(150)
    model = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=WD)
    for _ in range(300):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(X), Y).backward()
        optimiser.step()
    return model


class Only(nn.Module):
    """One output of a network, as a network."""

    def __init__(self, model, output):
        super().__init__()
        self.model, self.output = model, output

    def forward(self, x):
        return self.model(x)[:, self.output]


def jacobians(model, X):  # (m, n, p)
    return np.stack([reference.jacobian(Only(model, o), X)[1] for o in range(3)])


@pytest.mark.filterwarnings("ignore:the network has p")
@pytest.mark.parametrize("n", [20, 150])  # 60 rows of J for 75 parameters, and 450
def test_q_h_and_effective_parameters_are_those_of_all_rows_of_j(trained, n):
    X, Y = (part[:n] for part in three_outputs(150))
    new = three_outputs(5, seed=1)[0]
    damping = n * 3 * WD / 2
    band = PredictionIntervals(trained, weight_decay=WD, engine=Exact()).fit(X, Y)
    J = jacobians(trained, X).reshape(3 * n, -1)
    assert band.damping_ == pytest.approx(damping)
    assert band.effective_parameters_ == pytest.approx(reference.effective_parameters(J, damping))
    for asked, formula in ((band.variance(new), reference.variance), (band.leverage(new), reference.leverage)):
        expected = [[formula(J, damping, g) for g in of_row] for of_row in jacobians(trained, new).swapaxes(0, 1)]
        np.testing.assert_allclose(asked, expected, rtol=1e-8)


def test_intervals_are_the_formula_with_the_noise_and_the_freedom_of_each_output(trained):
    X, Y = three_outputs(150)
    new = three_outputs(5, seed=1)[0]
    damping = 150 * 3 * WD / 2
    J = jacobians(trained, X)
    rows = J.reshape(450, -1)
    H = rows @ np.linalg.inv(rows.T @ rows + damping * np.eye(rows.shape[1])) @ rows.T
    used = np.diag(2 * H - H @ H).reshape(3, 150).sum(axis=1)
    y, Y_hat = trained(new).detach().numpy(), trained(X).detach().numpy()
    band = PredictionIntervals(trained, weight_decay=WD).fit(X, Y)
    intervals = band.predict(new, [0.5, 0.9])
    assert intervals.mean.shape == (5, 3)
    assert intervals.lower.shape == intervals.upper.shape == (5, 3, 2)
    for o in range(3):
        s = np.sqrt(np.square(Y[:, o].numpy() - Y_hat[:, o]).sum() / (150 - used[o]))
        assert band.noise_std_[o] == pytest.approx(s)
        q = [reference.variance(rows, damping, g) for g in jacobians(trained, new)[o]]
        half = s * np.sqrt(1 + np.array(q))[:, None] * stats.t.ppf([0.75, 0.95], 150 - used[o])
        np.testing.assert_allclose(intervals.lower[:, o], y[:, o, None] - half, rtol=1e-7)
        np.testing.assert_allclose(intervals.upper[:, o], y[:, o, None] + half, rtol=1e-7)
    np.testing.assert_allclose(band.predict(new).mean, y)
    assert "3 (m), one JᵀJ for all" in band.summary()


def test_each_output_alone_is_the_network_of_that_output(trained):
    X, Y = three_outputs(150)
    new = three_outputs(5, seed=1)[0]
    band = PredictionIntervals(trained, weight_decay=WD, per_output=True).fit(X, Y)
    widths = band.predict(new).width
    for o in range(3):
        alone = PredictionIntervals(Only(trained, o), damping=150 * 3 * WD / 2).fit(X, Y[:, o])
        torch.testing.assert_close(widths[:, o], alone.predict(new).width)
        assert band.effective_parameters_[o] == pytest.approx(alone.effective_parameters_)
        np.testing.assert_allclose(band.spectrum(o).singular_values, alone.spectrum().singular_values)
    assert "each alone" in band.summary()
    joint = PredictionIntervals(trained, weight_decay=WD).fit(X, Y)
    assert (band.variance(new) / joint.variance(new)).mean() > 1.05


def test_shared_weights_have_learnt_from_all_outputs():
    """A linear network whose outputs share their weight: least squares on all targets, whose variance is known."""
    torch.manual_seed(0)

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, dtype=torch.float64))

        def forward(self, x):  # two outputs, of three features each
            return torch.stack([x[:, :3] @ self.w, x[:, 3:] @ self.w], dim=1)

    X = torch.randn(40, 6, dtype=torch.float64)
    features = np.concatenate([X[:, :3], X[:, 3:]])
    classical = np.einsum("ij,jk,ik->i", features, np.linalg.inv(features.T @ features), features).reshape(2, 40).T
    joint = PredictionIntervals(Shared(), damping=0.0).fit(X, torch.randn(40, 2))
    own = PredictionIntervals(joint.model, damping=0.0, per_output=True).fit(X, torch.randn(40, 2))
    np.testing.assert_allclose(joint.variance(X), classical, rtol=1e-8)
    assert own.variance(X).mean() > 1.8 * classical.mean()


@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
@pytest.mark.parametrize(
    "engine",
    [Nystrom(450), RandomProjection(75), RobustFrequentDirections(76), ImportantDirections(76), Nystrom(120)],
    ids=repr,
)
@pytest.mark.parametrize("per_output", [False, True])
def test_every_engine_takes_several_outputs(trained, engine, per_output):
    X, Y = three_outputs(150)
    new = three_outputs(50, seed=1)[0]
    settings = {"weight_decay": WD, "per_output": per_output}
    exact = PredictionIntervals(trained, engine=Exact(), **settings).fit(X, Y)
    band = PredictionIntervals(trained, engine=engine, **settings).fit(X, Y)
    tolerance = 0.1 if engine.__class__ is Nystrom and engine.landmarks == 120 and not per_output else 1e-5
    torch.testing.assert_close(band.predict(new).width, exact.predict(new).width, rtol=tolerance, atol=0)


@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
def test_an_error_report_covers_all_outputs(trained):
    X, Y = three_outputs(150)
    new = three_outputs(50, seed=1)[0]
    band = PredictionIntervals(trained, weight_decay=WD, engine=RobustFrequentDirections(4, tail="none")).fit(X, Y)
    exact = PredictionIntervals(trained, weight_decay=WD, engine=Exact()).fit(X, Y)
    real = float((band.predict(new).width / exact.predict(new).width - 1).abs().mean())
    assert real / 3 < band.error_report(new).width < 3 * real


@pytest.mark.filterwarnings("ignore:the network has p")
def test_a_loader_and_arrays_give_the_same(trained):
    X, Y = (part[:20] for part in three_outputs(150))
    expected = PredictionIntervals(trained, weight_decay=WD).fit(X, Y).predict(X).width
    loader = DataLoader(TensorDataset(X, Y), batch_size=7, shuffle=True)
    torch.testing.assert_close(PredictionIntervals(trained, weight_decay=WD).fit(loader).predict(X).width, expected)


def test_rows_that_are_computed_again_are_the_same():
    torch.manual_seed(0)
    X, Y = torch.randn(300, 1, 14, 14, dtype=torch.float64), torch.randn(300, 2)
    layers = nn.Conv2d(1, 12, 3), nn.Tanh(), nn.Conv2d(12, 12, 3), nn.Tanh(), nn.Flatten(), nn.Linear(1200, 2)
    model = nn.Sequential(*layers).double()
    whole = PredictionIntervals(model, damping=100.0, engine=Exact()).fit(X, Y)
    again = PredictionIntervals(model, damping=100.0, engine=Exact(), memory=12e6)
    assert "rows computed again" in str(again.plan(X, Y).chosen)
    torch.testing.assert_close(again.fit(X, Y).predict(X[:20]).width, whole.predict(X[:20]).width)


@pytest.mark.parametrize("per_output", [False, True])
def test_outputs_restrict_all_of_it(trained, per_output):
    X, Y = three_outputs(150)
    band = PredictionIntervals(trained, weight_decay=WD, outputs=[2, 0], per_output=per_output).fit(X, Y)
    assert band.predict(X[:4]).mean.shape == (4, 2)
    torch.testing.assert_close(band.predict(X[:4]).mean, trained(X[:4])[:, [2, 0]].detach())
    fewer = PredictionIntervals(trained, weight_decay=WD, outputs=[-1, 0], per_output=per_output).fit(X, Y[:, [2, 0]])
    torch.testing.assert_close(fewer.predict(X[:4]).width, band.predict(X[:4]).width)
    single = PredictionIntervals(trained, weight_decay=WD, outputs=1).fit(X, Y[:, 1])
    own = PredictionIntervals(trained, weight_decay=WD, per_output=True).fit(X, Y)
    assert isinstance(single.noise_std_, float)
    torch.testing.assert_close(single.predict(X[:4]).width, own.predict(X[:4]).width[:, 1])


class Scaled(torch.nn.Module):
    """A network with a parameter that no layer has, so that its gradients are whole rows."""

    def __init__(self, body):
        super().__init__()
        self.body, self.scale = body, torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return self.scale * self.body(x)


def test_no_more_gradients_are_there_at_once_than_fit_into_memory(trained, monkeypatch):
    X, Y = three_outputs(150)
    trained = Scaled(trained)
    expected = PredictionIntervals(trained, weight_decay=WD).fit(X, Y).predict(X).width
    n_bytes = sum(each.numel() * each.element_size() for each in trained.parameters())
    monkeypatch.setattr(networks, "CHUNK_BYTES_AT_MOST", 2 * n_bytes)  # two gradients
    monkeypatch.setattr(networks, "CHUNK_BYTES", 1)
    monkeypatch.setattr(networks, "LOOPED_ROWS", 0)
    largest = []
    vmapped = per_row.vmapped

    def watched(*arguments):
        y, rows = vmapped(*arguments)
        largest.append(rows.shape[0] * rows.shape[1])
        return y, rows

    monkeypatch.setattr(per_row, "vmapped", watched)
    band = PredictionIntervals(trained, weight_decay=WD).fit(X, Y)
    torch.testing.assert_close(band.predict(X).width, expected)
    assert len(largest) > 300
    assert sum(each > 2 for each in largest) == 2  # the trials, of two rows with three outputs


# --- calibration


@pytest.mark.parametrize("tune", [True, False])
def test_each_output_is_calibrated_as_if_alone(trained, tune):
    X, Y = three_outputs(150)
    held, new = three_outputs(200, seed=2), three_outputs(5, seed=1)[0]
    options = {"tune": tune, "noise": "none"}  # a row is far if it is so in any output
    band = PredictionIntervals(trained, weight_decay=WD, per_output=True).fit(X, Y).calibrate(*held, **options)
    intervals = band.predict(new)
    for o in range(3):
        alone = PredictionIntervals(trained, weight_decay=WD, outputs=o).fit(X, Y)
        alone.calibrate(held[0], held[1][:, o], **options)
        torch.testing.assert_close(intervals.width[:, o], alone.predict(new).width)
        torch.testing.assert_close(band.predict_mean_and_scale(new)[1][:, o], alone.predict_mean_and_scale(new)[1])
    assert "calibrated on" in band.summary()


@pytest.mark.parametrize("side", ["both", "upper", "lower"])
@pytest.mark.parametrize("tuned", [True, False])
def test_all_outputs_at_once_are_covered_at_the_level(side, tuned):
    rng = np.random.default_rng(0)
    n, new, m, level = 90, 20, 3, 0.8
    eigenvalues = np.array([100.0, 10.0, 1.0])
    scales = Scales.grid(eigenvalues, n) if tuned else Scales.single(1.0)
    covered = []
    for trial in range(400):
        q = rng.exponential(size=(m, n + new, len(scales.dampings)))
        shared = rng.normal(size=(n + new, 1))
        r = (shared + rng.normal(size=(n + new, m))) * np.sqrt(1 + q[:, :, 0].T) * np.array([1.0, 10.0, 0.1])
        conformal = AllOutputs.fit(r[:n], [each[:n] for each in q], [scales] * m, seed=trial)
        lower, upper = conformal.bounds([each[n:] for each in q], (level,), side)
        covered.append(((lower[:, :, 0] <= r[n:]) & (r[n:] <= upper[:, :, 0])).all(axis=1).mean())
    error = 4 * np.std(covered) / np.sqrt(len(covered))
    assert level - error < np.mean(covered) < level + 1 / 61 + error


def test_a_joint_calibration_is_wider_than_one_for_each_output(trained):
    X, Y = three_outputs(150)
    held, (new, targets) = three_outputs(400, seed=2), three_outputs(1000, seed=1)
    band = PredictionIntervals(trained, weight_decay=WD).fit(X, Y)
    each = band.calibrate(*held).predict(new, 0.9)
    at_once = band.calibrate(*held, joint=True).predict(new, 0.9)
    assert at_once.width.mean() > 1.1 * each.width.mean()
    inside = (at_once.lower <= targets) & (targets <= at_once.upper)
    assert 0.84 < inside.all(dim=1).double().mean() < 0.96
    assert "all at once" in band.summary()
    with pytest.raises(ValueError, match="too few for all outputs at once"):
        band.calibrate(held[0][:2], held[1][:2], joint=True)


def test_metrics_have_a_number_for_each_output(trained):
    X, Y = three_outputs(150)
    band = PredictionIntervals(trained, weight_decay=WD).fit(X, Y)
    for level, shape in ((0.9, (3,)), ([0.5, 0.9], (3, 2))):
        intervals = band.predict(X, level)
        for metric in (metrics.coverage, metrics.mean_width, metrics.width_error_correlation, metrics.interval_score):
            values = metric(Y, intervals)
            assert values.shape == shape
            single = metric(Y[:, 1], PredictionIntervalsColumn(intervals, 1))
            np.testing.assert_allclose(values[1], single)
    assert isinstance(metrics.calibration_error(Y, band.predict(X, [0.5, 0.9])), float)


def PredictionIntervalsColumn(intervals, o):  # noqa: N802
    return type(intervals)(intervals.mean[:, o], intervals.lower[:, o], intervals.upper[:, o], intervals.level)


# --- bad input


def test_outputs_and_targets_that_do_not_go_together_are_refused(trained):
    X, Y = three_outputs(150)
    with pytest.raises(ValueError, match="returns 3 outputs per row, and the targets have 1 columns"):
        PredictionIntervals(trained, weight_decay=WD).fit(X, Y[:, 0])
    with pytest.raises(ValueError, match=r"outputs=\[3\], but the network has 3: 0 to 2"):
        PredictionIntervals(trained, weight_decay=WD, outputs=3).fit(X, Y)
    with pytest.raises(ValueError, match="more than once"):
        PredictionIntervals(trained, weight_decay=WD, outputs=[0, -3]).fit(X, Y)
    for bad in ([], "first", [0.5], [True]):
        with pytest.raises(ValueError, match="outputs must be"):
            PredictionIntervals(trained, outputs=bad)
    with pytest.raises(ValueError, match="per_output must be True or False"):
        PredictionIntervals(trained, per_output="each")
    with pytest.raises(ValueError, match="once for each output"):
        PredictionIntervals(trained, weight_decay=WD, per_output=True).fit(iter([(X, Y)]))
    band = PredictionIntervals(trained, weight_decay=WD, per_output=True).fit(X, Y)
    with pytest.raises(ValueError, match="from 0 to 2"):
        band.spectrum(3)
    with pytest.raises(ValueError, match="targets have 2 columns"):
        band.calibrate(X, Y[:, :2])


# --- units


def test_intervals_come_back_in_the_original_units(trained):
    from sklearn.preprocessing import StandardScaler

    X, Y = three_outputs(150)
    plain = PredictionIntervals(trained, weight_decay=WD).fit(X, Y)
    scaler = StandardScaler().fit(np.array([[0.0, 5.0, -3.0], [2.0, 9.0, -2.0], [4.0, 7.0, 1.0]]))
    pair = (scaler.mean_, scaler.scale_)
    for transform in (pair, scaler):
        band = PredictionIntervals(trained, weight_decay=WD, target_transform=transform).fit(X, Y)
        for level in (0.9, [0.5, 0.9]):
            expected, got = plain.predict(X[:4], level), band.predict(X[:4], level)
            shape = (1, 3) if level == 0.9 else (1, 3, 1)
            for mine, theirs in zip(map(np.asarray, got), map(np.asarray, expected), strict=True):
                by = shape if mine.ndim == 3 else (1, 3)
                np.testing.assert_allclose(mine, theirs * pair[1].reshape(by) + pair[0].reshape(by), rtol=1e-12)
        np.testing.assert_allclose(band.predict_mean(X[:4]), plain.predict_mean(X[:4]).numpy() * pair[1] + pair[0])
    scaled = PredictionIntervals(trained, weight_decay=WD, target_transform=pair).fit(X, Y)
    np.testing.assert_allclose(scaled.noise_std_, plain.noise_std_ * pair[1])


def test_a_falling_transform_keeps_lower_below_upper(trained):
    from sklearn.preprocessing import FunctionTransformer

    X, Y = three_outputs(150)
    falling = FunctionTransformer(lambda y: -np.log(y), lambda z: np.exp(-z))
    band = PredictionIntervals(trained, weight_decay=WD, target_transform=falling).fit(X, Y)
    plain = PredictionIntervals(trained, weight_decay=WD).fit(X, Y)
    got, expected = band.predict(X[:4].numpy()), plain.predict(X[:4].numpy())
    np.testing.assert_allclose(got.lower, np.exp(-expected.upper), rtol=1e-12)
    np.testing.assert_allclose(got.upper, np.exp(-expected.lower), rtol=1e-12)
    upper, lower = (band.predict(X[:4].numpy(), side=side) for side in ("upper", "lower"))
    np.testing.assert_allclose(upper.upper, np.exp(-plain.predict(X[:4].numpy(), side="lower").lower), rtol=1e-12)
    np.testing.assert_allclose(lower.lower, np.exp(-plain.predict(X[:4].numpy(), side="upper").upper), rtol=1e-12)
    assert (upper.lower == -np.inf).all()
    assert (lower.upper == np.inf).all()


@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 40)])
@pytest.mark.parametrize("inverse", [lambda z: -np.maximum(z, 2.0), lambda z: 1e9 - z])  # constant from 0 to 1; and far
def test_a_transform_that_falls_where_the_predictions_are_swaps_one_sided_bounds(trained, rows, inverse):
    from sklearn.preprocessing import FunctionTransformer

    class Lifted(torch.nn.Module):
        def forward(self, x):
            return self.inner(x) + 20

    X, Y = three_outputs(150)
    lifted = Lifted()
    lifted.inner = trained
    falling = FunctionTransformer(None, inverse)
    band = PredictionIntervals(lifted, weight_decay=WD, target_transform=falling).fit(X, Y + 20)
    plain = PredictionIntervals(lifted, weight_decay=WD).fit(X, Y + 20)
    x = X[rows].numpy()
    upper, both = band.predict(x, side="upper"), band.predict(x)
    np.testing.assert_allclose(upper.upper, inverse(plain.predict(x, side="lower").lower), rtol=1e-12)
    np.testing.assert_allclose(both.lower, inverse(plain.predict(x).upper), rtol=1e-12)
    np.testing.assert_allclose(both.upper, inverse(plain.predict(x).lower), rtol=1e-12)
    assert (upper.lower == -np.inf).all()


def test_targets_in_the_wrong_units_are_suspected(trained):
    X, Y = three_outputs(150)
    with pytest.raises(ValueError, match="the targets of fit are in the original units"):
        PredictionIntervals(trained, weight_decay=WD, target_transform=(100.0, 20.0)).fit(X, 20 * Y + 100)
    for bad in (3.0, (1.0,), "scaler", (0.0, 0.0), (np.nan, 1.0), (0.0, -1.0)):
        with pytest.raises((TypeError, ValueError), match="target_transform"):
            PredictionIntervals(trained, target_transform=bad)
    band = PredictionIntervals(trained, weight_decay=WD, target_transform=([0.0, 1.0], [1.0, 1.0]))
    with pytest.raises(ValueError, match="target_transform has 2 columns, the intervals have 3"):
        band.fit(X, Y)


def test_a_transform_that_is_not_monotone_over_the_intervals_is_refused(trained):
    from sklearn.preprocessing import FunctionTransformer

    X, Y = three_outputs(150)
    root = FunctionTransformer(np.sqrt, np.square)  # takes a bound of −1 to 1, above the prediction
    band = PredictionIntervals(trained, weight_decay=WD, target_transform=root).fit(X, Y)
    for side in ("both", "lower", "upper"):
        with pytest.raises(ValueError, match="not monotone over the intervals"):
            band.predict(X, side=side)
    cut = FunctionTransformer(np.sqrt, lambda z: np.square(np.maximum(z, 0)))
    intervals = PredictionIntervals(trained, weight_decay=WD, target_transform=cut).fit(X, Y).predict(X, [0.5, 0.9])
    assert (intervals.lower >= 0).all()
    assert (intervals.lower <= intervals.mean[:, :, None]).all()
    assert (intervals.mean[:, :, None] <= intervals.upper).all()


def test_a_transform_may_turn_some_outputs_round(trained):
    from sklearn.preprocessing import FunctionTransformer

    X, Y = three_outputs(150)
    signs = np.array([1, -1, 1])
    flip = FunctionTransformer(lambda y: y * signs, lambda z: z * signs)
    plain = PredictionIntervals(trained, weight_decay=WD).fit(X, Y).predict(X.numpy(), [0.5, 0.9])
    band = PredictionIntervals(trained, weight_decay=WD, target_transform=flip).fit(X, Y)
    got = band.predict(X.numpy(), [0.5, 0.9])
    np.testing.assert_allclose(got.lower[:, 1], -plain.upper[:, 1], rtol=1e-12)
    np.testing.assert_allclose(got.upper[:, ::2], plain.upper[:, ::2], rtol=1e-12)
    with pytest.raises(ValueError, match="some outputs and not of others"):
        band.predict(X, side="upper")


def test_a_one_sided_bound_beyond_the_prediction_keeps_its_place(trained):
    from sklearn.preprocessing import FunctionTransformer

    X, Y = three_outputs(150)
    log = FunctionTransformer(np.log, np.exp)
    plain = PredictionIntervals(trained, weight_decay=WD).fit(X, Y).calibrate(X + 0.01, Y + 5)
    band = PredictionIntervals(trained, weight_decay=WD, target_transform=log).fit(X, Y).calibrate(X + 0.01, Y + 5)
    lower = band.predict(X.numpy(), side="lower").lower
    assert (lower > band.predict_mean(X.numpy())).all()
    np.testing.assert_allclose(lower, np.exp(plain.predict(X.numpy(), side="lower").lower), rtol=1e-12)


def test_a_transform_of_other_columns_is_refused_before_the_fit(trained):
    from sklearn.preprocessing import PowerTransformer, StandardScaler

    X, Y = three_outputs(150)
    for scaler, problem in (
        (StandardScaler().fit(Y), "target_transform has 3 columns, the intervals have 2 outputs"),
        (PowerTransformer().fit(Y), "target_transform cannot invert rows of 2 outputs"),
        (PowerTransformer(), "target_transform cannot invert rows of 2 outputs: .* is not fitted"),
    ):
        band = PredictionIntervals(trained, weight_decay=WD, outputs=[0, 2], target_transform=scaler)
        with pytest.raises(ValueError, match=problem):
            band.fit(X, Y)
    with pytest.raises(ValueError, match=r"target_transform=StandardScaler\(\) is not fitted"):
        PredictionIntervals(trained, weight_decay=WD, target_transform=StandardScaler())
