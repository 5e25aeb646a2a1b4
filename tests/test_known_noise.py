"""Networks that say themselves how large the noise is: by a variance, or by quantiles."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tests.reference as reference
from deltaband import (
    ArtefactError,
    DeltabandWarning,
    Exact,
    Nystrom,
    PredictionIntervals,
    RandomProjection,
    RobustFrequentDirections,
    metrics,
)
from deltaband.calibration import Scales
from deltaband.calibration.conformal import QuantileScale
from tests.support.networks import regression

N, DAMPING = 80, 0.3
X, Y = regression(N)
NEW = regression(7, seed=3)[0]
FORMS = {"variance": lambda v: v, "log_variance": torch.log, "std": torch.sqrt}


class MeanVariance(nn.Module):
    """Two heads on one body; as a tuple, or as columns, the means first."""

    def __init__(self, form="variance", m=1, columns=False, hidden=6):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(3, hidden), nn.Tanh())
        self.mean, self.spread = nn.Linear(hidden, m), nn.Linear(hidden, m)
        self.form, self.columns = FORMS[form], columns
        self.double()

    def forward(self, x):
        h = self.body(x)
        mean, spread = self.mean(h), self.form(nn.functional.softplus(self.spread(h)) + 0.05)
        return torch.cat([mean, spread], dim=1) if self.columns else (mean, spread)


class Quantiles(nn.Module):
    """Middle ± a positive width."""

    def __init__(self, crossing=False):
        super().__init__()
        torch.manual_seed(4)
        self.net, self.crossing = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double(), crossing

    def forward(self, x):
        z = self.net(x)
        down, up = nn.functional.softplus(z[:, 0]) + 0.1, nn.functional.softplus(z[:, 2]) + 0.1
        return torch.stack([z[:, 1] - down, z[:, 1], z[:, 1] + (-up if self.crossing else up)], dim=1)


def naive(model, m=1):
    """Rows of J of the means and residuals, over σ; and means, gradients and σ² of the new rows."""
    J, g = (
        reference.jacobians(model, [(x[None],) for x in rows], output=lambda y: y[0].reshape(-1)) for rows in (X, NEW)
    )
    with torch.no_grad():
        (mean, variance), (at, new) = model(X), model(NEW)
    targets = torch.stack([Y] * m, dim=1)
    return (
        J / variance.sqrt().numpy()[:, :, None],
        ((targets - mean) / variance.sqrt()).numpy(),
        at.numpy(),
        g,
        new.numpy(),
    )


# --- variances


@pytest.mark.parametrize("hidden", [6, 40])
@pytest.mark.parametrize("engine", ["auto", Exact(), Nystrom(N)], ids=str)
def test_intervals_of_a_network_with_a_variance_head_are_those_of_weighted_least_squares(engine, hidden):
    model = MeanVariance(hidden=hidden)
    band = PredictionIntervals(model, damping=DAMPING, variance="variance", engine=engine).fit(X, Y, progress=False)
    J, r, at, g, variance = (each.reshape(len(each), -1) for each in naive(model))
    nu = N - reference.effective_parameters(J, DAMPING)
    s = np.sqrt((r**2).sum() / nu)
    q = np.array([reference.variance(J, DAMPING, each) for each in g])
    half = stats.t.ppf(0.95, nu) * s * np.sqrt(variance[:, 0] + q)
    found, mean = band.predict(NEW, 0.9), band.predict(NEW, 0.9, kind="mean")
    np.testing.assert_allclose(found.mean, at[:, 0], rtol=1e-10)
    np.testing.assert_allclose(found.upper, at[:, 0] + half, rtol=1e-7)
    np.testing.assert_allclose(mean.upper, at[:, 0] + stats.t.ppf(0.95, nu) * s * np.sqrt(q), rtol=1e-7)
    np.testing.assert_allclose(band.variance(NEW), q, rtol=1e-6)
    np.testing.assert_allclose(band.predict_mean_and_scale(NEW)[1], np.sqrt(variance[:, 0] + q), rtol=1e-7)
    assert band.noise_std_ == pytest.approx(s)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_variance_gives_the_same_intervals(form, columns):
    expected = PredictionIntervals(MeanVariance(), damping=DAMPING, variance="variance").fit(X, Y, progress=False)
    band = PredictionIntervals(MeanVariance(form, columns=columns), damping=DAMPING, variance=form)
    np.testing.assert_allclose(band.fit(X, Y, progress=False).predict(NEW).upper, expected.predict(NEW).upper)
    picked = PredictionIntervals(
        MeanVariance("log_variance"), damping=DAMPING, output=lambda y: y[0], variance=lambda y: y[1].exp()
    )
    np.testing.assert_allclose(picked.fit(X, Y, progress=False).predict(NEW).upper, expected.predict(NEW).upper)


class OneVariance(nn.Module):
    """As many means as asked for, and a variance in some shape that `GaussianNLLLoss` or a product with them takes."""

    def __init__(self, m, shape):
        super().__init__()
        torch.manual_seed(3)
        self.mean, self.shape = nn.Linear(3, m).double(), shape
        self.log = (
            nn.Parameter(torch.linspace(-1, 1, m).double()) if shape == "(1, m)" else nn.Parameter(torch.ones(()))
        )

    def forward(self, x):
        variance = self.log.exp().double()
        if self.shape in ("(b,)", "(b, 1)"):
            variance = variance + x[:, 0].square()
        return self.mean(x), {"()": variance, "(1,)": variance[None], "(b,)": variance}.get(
            self.shape, variance[..., None]
        )


@pytest.mark.parametrize("m", [1, 2, 40])
@pytest.mark.parametrize("shape", ["()", "(1,)", "(b,)", "(b, 1)"])
def test_a_variance_may_be_the_same_for_all_outputs_or_all_rows(shape, m):
    model, targets = OneVariance(m, shape), torch.stack([Y] * m, dim=1)
    found = PredictionIntervals(model, damping=DAMPING, variance="variance").fit(X, targets, progress=False)
    expected = PredictionIntervals(
        model,
        damping=DAMPING,
        output=lambda y: y[0],
        variance=lambda y: y[1].reshape(-1, 1).expand(len(y[0]), m),
    ).fit(X, targets, progress=False)
    new = regression(m, seed=5)[0]  # as many rows as outputs
    torch.testing.assert_close(found.predict(new).upper, expected.predict(new).upper)
    single = PredictionIntervals(
        model, damping=DAMPING, output=lambda y: y[0], variance=lambda y: y[1].expand(len(y[0]))
    )
    if shape in ("()", "(1,)", "(b,)"):  # one column from a function stands for all outputs
        single.fit(X, targets, progress=False)
        torch.testing.assert_close(single.predict(new).upper, expected.predict(new).upper)


def test_variances_that_belong_to_no_output_are_refused():
    class Three(MeanVariance):
        def forward(self, x):
            mean, variance = super().forward(x)
            return mean, torch.cat([variance, variance[:, :1]], dim=1)

    targets = torch.stack([Y, Y], dim=1)
    with pytest.raises(ValueError, match=r"variances of shape \(2, 3\) for means of shape \(2, 2\): give one for each"):
        PredictionIntervals(Three(m=2), damping=1.0, variance="variance").fit(X, targets, progress=False)
    picked = PredictionIntervals(Three(m=2), damping=1.0, output=lambda y: y[0], variance=lambda y: y[1])
    with pytest.raises(ValueError, match="3 variances and 2 predictions per row"):
        picked.fit(X, targets, progress=False)


@pytest.mark.parametrize("per_output", [False, True])
def test_outputs_of_unequal_noise_are_weighted_by_it(per_output):
    model = MeanVariance(m=2)
    band = PredictionIntervals(model, damping=DAMPING, variance="variance", per_output=per_output)
    band.fit(X, torch.stack([Y, Y], dim=1), progress=False)
    J, _, at, g, _ = naive(model, m=2)
    if per_output:
        q = np.stack([reference.answers(J[:, [o]], DAMPING, g[:, [o]])[0][:, 0] for o in (0, 1)], axis=1)
    else:
        q, _, p_star = reference.answers(J, DAMPING, g)
        assert band.effective_parameters_ == pytest.approx(p_star)
    np.testing.assert_allclose(band.variance(NEW), q, rtol=1e-7)
    np.testing.assert_allclose(band.predict(NEW).mean, at)


def test_the_damping_of_a_gaussian_likelihood_is_n_times_the_decay():
    band = PredictionIntervals(MeanVariance(), weight_decay=1e-2, variance="variance").fit(X, Y, progress=False)
    assert band.damping_ == pytest.approx(N * 1e-2)
    assert "n·wd, weight decay 0.01" in band.summary()
    assert "in units of the network's own σ" in band.summary()
    two = PredictionIntervals(MeanVariance(m=2), weight_decay=1e-2, variance="variance")
    assert two.fit(X, torch.stack([Y, Y], dim=1), progress=False).damping_ == pytest.approx(2 * N * 1e-2)


def test_a_likelihood_at_its_minimum_has_that_damping():
    """At the minimum of NLL + wd/2·‖w‖² with a known variance, JᵀW(y − f) = λw."""
    variance = 0.1 + torch.rand(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows, wd = torch.column_stack([X, variance]), 0.2

    class Known(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))

        def forward(self, x):
            return (x[:, :3] @ self.w)[:, None], x[:, 3:]

    model = Known()
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-14)

    def objective():
        optimiser.zero_grad()
        mean, var = model(rows)
        value = nn.GaussianNLLLoss()(mean[:, 0], Y, var[:, 0]) + wd / 2 * model.w.square().sum()
        value.backward()
        return value

    for _ in range(5):
        optimiser.step(objective)
    band = PredictionIntervals(model, weight_decay=wd, variance="variance").fit(rows, Y, progress=False)
    w = model.w.detach()
    np.testing.assert_allclose(X.T @ ((Y - X @ w) / variance), band.damping_ * w, rtol=1e-5)


def test_weights_and_variances_multiply():
    model, w = MeanVariance(), torch.rand(N, dtype=torch.float64) + 0.5
    band = PredictionIntervals(model, damping=DAMPING, variance="variance")
    band.fit(X, Y, sample_weight=w, progress=False)
    J, _, _, g, _ = (each.reshape(len(each), -1) for each in naive(model))
    J = J * w.sqrt().numpy()[:, None]
    np.testing.assert_allclose(band.variance(NEW), [reference.variance(J, DAMPING, each) for each in g], rtol=1e-7)


def test_a_loader_parts_files_and_a_projection_know_the_variance(tmp_path):
    model = MeanVariance()
    expected = PredictionIntervals(model, damping=DAMPING, variance="variance").fit(X, Y, progress=False)
    looped = PredictionIntervals(model, damping=DAMPING, variance="variance")
    looped.fit(DataLoader(TensorDataset(X, Y), batch_size=9), progress=False)
    parts = PredictionIntervals(model, damping=DAMPING, variance="variance")
    parts.partial_fit(X[:30], Y[:30], n_rows=N).partial_fit(X[30:], Y[30:])
    for band in (looped, parts):
        np.testing.assert_allclose(band.predict(NEW).upper, expected.predict(NEW).upper, rtol=1e-9)
    expected.calibrate(*regression(60, seed=9), noise="auto").save(tmp_path / "x.band")
    loaded = PredictionIntervals.load(tmp_path / "x.band", model)
    assert torch.equal(loaded.predict(NEW).upper, expected.predict(NEW).upper)
    picked = PredictionIntervals(model, damping=DAMPING, output=lambda y: y[0], variance=lambda y: y[1])
    picked.fit(X, Y, progress=False).save(tmp_path / "y.band")
    with pytest.raises(ArtefactError, match="give variance= again"):
        PredictionIntervals.load(tmp_path / "y.band", model, output=lambda y: y[0])
    again = PredictionIntervals.load(tmp_path / "y.band", model, output=lambda y: y[0], variance=lambda y: y[1])
    assert torch.equal(again.predict(NEW).upper, picked.predict(NEW).upper)
    projected = PredictionIntervals(model, damping=DAMPING, variance="variance", engine=RandomProjection(60))
    assert projected.fit(X, Y, progress=False).predict(NEW).upper.shape == (7,)


def test_calibrated_widths_are_quantiles_of_residuals_in_units_of_the_variance_and_q():
    model, (x, y) = MeanVariance(), regression(60, seed=9)
    band = PredictionIntervals(model, damping=DAMPING, variance="variance").fit(X, Y, progress=False)
    with torch.no_grad():
        (mean, variance), (_, new) = ([each[:, 0] for each in model(rows)] for rows in (x, NEW))
    scores = ((y - mean).abs() / (variance + band.variance(x)).sqrt()).sort().values
    found = band.calibrate(x, y, tune=False, noise="none").predict(NEW, 0.8)
    half = scores[int(np.ceil(61 * 0.8)) - 1] * (new + band.variance(NEW)).sqrt()
    np.testing.assert_allclose(found.upper - found.mean, half, rtol=1e-7)


def test_the_noise_of_a_variance_head_is_a_factor_whatever_the_units_of_the_targets():
    model = MeanVariance()
    plain, scaled = (
        PredictionIntervals(model, damping=DAMPING, variance="variance", target_transform=units).fit(
            X, Y, progress=False
        )
        for units in (None, (100.0, 20.0))
    )
    assert scaled.noise_std_ == plain.noise_std_
    np.testing.assert_allclose(scaled.predict(NEW).upper, 100 + 20 * plain.predict(NEW).upper)


@pytest.mark.filterwarnings("ignore:.*accurate enough")
def test_an_error_report_of_new_rows_is_in_units_of_their_own_variance():
    model = MeanVariance(hidden=20)
    with torch.no_grad():  # σ² far from 1
        model.spread.bias -= 6
    (x, _), options = regression(200, seed=6), {"damping": DAMPING, "variance": "variance"}
    exact = PredictionIntervals(model, engine=Exact(), **options).fit(X, Y, progress=False)
    rough = PredictionIntervals(model, engine=RobustFrequentDirections(6), **options).fit(X, Y, progress=False)
    rough_width, width = (found.upper - found.lower for found in (band.predict(x) for band in (rough, exact)))
    error = (rough_width / width - 1).abs()
    assert error.mean() > 0.02
    assert rough.error_report(x).width == pytest.approx(float(error.mean()), rel=0.3)


@pytest.mark.slow
def test_calibrated_variances_cover_as_often_as_they_say():
    model = MeanVariance()
    band = PredictionIntervals(model, variance="variance").fit(X, Y, progress=False)
    covered = []
    for seed in range(60):
        x, y = regression(45, seed=100 + seed)
        band.calibrate(x[:39], y[:39], noise="none")
        covered.append(metrics.coverage(y[39:], band.predict(x[39:], 0.8)))
    assert np.mean(covered) == pytest.approx(0.8, abs=0.05)


def test_a_variance_that_is_none_is_refused_by_its_row():
    class Bad(MeanVariance):
        def __init__(self, value, row=70):
            super().__init__()
            self.value, self.row = value, X[row]

        def forward(self, x):
            mean, variance = super().forward(x)
            return mean, torch.where((x == self.row).all(dim=1, keepdim=True), self.value, variance)

    for value in (0.0, -1.0, torch.nan):
        band = PredictionIntervals(Bad(value), damping=DAMPING, variance="variance")
        with pytest.raises(ValueError, match=r"variance that the model returns is .* in row 70"):
            band.fit(X, Y, progress=False)
    band = PredictionIntervals(Bad(-1.0, row=3), damping=DAMPING, variance="variance").fit(X[4:], Y[4:], progress=False)
    with pytest.raises(ValueError, match=r"variance that the model returns is -1.0 in row 3"):
        band.predict(X)


def test_no_rows_have_no_intervals():
    for m in (1, 2):
        targets = Y if m == 1 else torch.stack([Y, Y], dim=1)
        band = PredictionIntervals(MeanVariance(m=m), damping=DAMPING, variance="variance")
        band.fit(X[:40], targets[:40], progress=False)
        for _ in ("the formula", "calibrated"):
            found = band.predict(X[:0], [0.5, 0.9])
            assert found.upper.shape == ((0, 2) if m == 1 else (0, m, 2))
            assert [len(part) for part in band.predict_mean_and_scale(X[:0])] == [0, 0]
            band.calibrate(X[40:], targets[40:])


def test_a_function_that_picks_no_tensor_is_told_so():
    band = PredictionIntervals(MeanVariance(), damping=DAMPING, output=lambda y: y[0], variance=lambda y: {"var": y[1]})
    with pytest.raises(ValueError, match=r"variance= must pick one tensor .* got dict"):
        band.fit(X, Y, progress=False)


def test_what_does_not_fit_together_is_refused():
    model = MeanVariance()
    for options, message in (
        ({"variance": "sigma"}, "variance must be 'variance', 'log_variance' or 'std'"),
        ({"variance": lambda y: y[1]}, "give output="),
        ({"variance": "std", "output": lambda y: y[0]}, "with output= give a function"),
        ({"variance": "std", "quantiles": (0.1, 0.5, 0.9)}, "not both"),
        ({"quantiles": (0.1, 0.9)}, "three levels in order"),
        ({"quantiles": "low"}, "three levels in order, .* got 'low'"),
        ({"quantiles": (0.1, None, 0.9)}, "three levels in order, .* got"),
        ({"quantiles": (0.9, 0.5, 0.1)}, "three levels in order"),
    ):
        with pytest.raises(ValueError, match=message):
            PredictionIntervals(model, damping=1.0, **options)
    with pytest.raises(TypeError, match="variance must be"):
        PredictionIntervals(model, damping=1.0, variance=3)
    with pytest.raises(TypeError, match=r"got tuple; pick the prediction .*\[0\] .*cat\(out, 1\); .*, give variance="):
        PredictionIntervals(model, damping=1.0).fit(X, Y, progress=False)
    with pytest.raises(TypeError, match=r"got dict; pick the prediction .* out\['price'\] "):
        PredictionIntervals(Named(), damping=1.0).fit(X, Y, progress=False)
    with pytest.raises(ValueError, match=r"a mean and a variance .* by two functions, output= and variance="):
        PredictionIntervals(nn.Linear(3, 1).double(), variance="variance").fit(X, Y, progress=False)
    with pytest.raises(ValueError, match="three quantiles"):
        PredictionIntervals(nn.Linear(3, 4).double(), quantiles=(0.1, 0.5, 0.9)).fit(X, Y, progress=False)


# --- quantiles


def test_a_network_of_quantiles_is_calibrated_before_it_answers():
    band = PredictionIntervals(Quantiles(), quantiles=(0.05, 0.5, 0.95), damping=1.0).fit(X, Y, progress=False)
    for options in ({}, {"kind": "mean"}):
        with pytest.raises(ValueError, match="the formula is for squared losses, not for quantiles"):
            band.predict(NEW, **options)
    calibration = regression(60, seed=9)
    found = band.calibrate(*calibration).predict(NEW, 0.9)
    with torch.no_grad():
        torch.testing.assert_close(found.mean, Quantiles()(NEW)[:, 1])
    assert bool((found.lower < found.mean).all() & (found.mean < found.upper).all())
    with pytest.raises(ValueError, match="joint=True is for several outputs"):
        band.calibrate(*calibration, joint=True)
    assert "quantiles             0.05, 0.5, 0.95" in band.summary()


def excess(residuals, squared, halves, signed):
    """Scores of conformalised quantile regression, widened by σ."""
    scores = residuals / np.sqrt(squared)
    return halves * ((scores if signed else np.abs(scores)) - 1)


@pytest.mark.parametrize("side", ["both", "upper", "lower"])
def test_quantiles_are_those_of_full_conformal_prediction_at_their_own_level(side):
    rng, n, own = np.random.default_rng(0), 25, 0.8
    scales = Scales.grid(10.0 ** np.linspace(2, -3, 12), 60)
    q = rng.gamma(1.0, size=(n + 4, len(scales.dampings)))
    halves = rng.uniform(0.5, 2, n + 4)
    r = rng.standard_normal(n) * np.sqrt(1 + q[:n, 3])
    q = np.column_stack([q, halves])
    scale = QuantileScale.of(r, q[:n], scales, {"both": own, "upper": own, "lower": own})
    lower, upper = scale.bounds(q[n:], (0.5, own), side)
    squared, tried = scales.squared(q), np.linspace(-8, 8, 3201)
    for i in range(4):
        accepted = []
        for t in tried:
            every, s2 = np.append(-r if side == "lower" else r, t), squared[[*range(n), n + i]]
            likelihood = (n + 1) * np.log((every[:, None] ** 2 / s2).sum(axis=0)) + np.log(s2).sum(axis=0)
            best = int(np.argmin(likelihood + 2 * scales.prior))
            scores = excess(every, s2[:, best], halves[[*range(n), n + i]], side != "both")
            if (scores[:-1] < scores[-1]).sum() + 1 <= np.ceil((n + 1) * own - 1e-9):
                accepted.append(t)
        found = (-lower if side == "lower" else upper)[i, 1]
        assert found == pytest.approx(max(accepted), abs=0.011)


def test_quantiles_that_cross_are_sorted_counted_and_warned_of():
    calibration = regression(60, seed=9)
    band = PredictionIntervals(Quantiles(crossing=True), quantiles=(0.05, 0.5, 0.95)).fit(X, Y, progress=False)
    with pytest.warns(DeltabandWarning, match="60 of 60 rows are in the wrong order"):
        band.calibrate(*calibration)
    with pytest.warns(DeltabandWarning, match="7 of 7 rows are in the wrong order"):
        found = band.predict(NEW, 0.9)
    assert bool((found.lower <= found.mean).all() & (found.mean <= found.upper).all())


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_quantiles_that_are_not_finite_are_refused_by_their_row(value):
    class Broken(Quantiles):
        def forward(self, x):
            lower, middle, upper = super().forward(x).unbind(dim=1)
            return torch.stack([lower, middle, torch.where((x == bad).all(dim=1), value, upper)], dim=1)

    (x, y), bad = regression(60, seed=9), regression(60, seed=9)[0][41]
    band = PredictionIntervals(Broken(), quantiles=(0.05, 0.5, 0.95)).fit(X, Y, progress=False)
    with pytest.raises(ValueError, match=r"outputs hold .* in row 41"):
        band.calibrate(x, y)
    band.calibrate(x[:40], y[:40])
    with pytest.raises(ValueError, match=r"outputs hold .* in row 1"):
        band.predict(x[40:])


def test_quantiles_in_a_file_answer_bit_for_bit(tmp_path):
    band = PredictionIntervals(Quantiles(), quantiles=(0.1, 0.5, 0.9)).fit(X, Y, progress=False)
    band.calibrate(*regression(60, seed=9)).save(tmp_path / "q.band")
    loaded = PredictionIntervals.load(tmp_path / "q.band", band.model)
    for level in (0.5, 0.8):
        for one, two in zip(band.predict(NEW, level), loaded.predict(NEW, level), strict=True):
            assert torch.equal(one, two)


def test_levels_of_quantiles_may_be_in_float32():
    exact, rounded = (
        PredictionIntervals(Quantiles(), quantiles=levels).fit(X[:50], Y[:50], progress=False).calibrate(X[50:], Y[50:])
        for levels in ((0.05, 0.5, 0.95), torch.tensor([0.05, 0.5, 0.95]))
    )
    for side, level in (("both", 0.9), ("upper", 0.95), ("lower", 0.95)):
        bounds = exact.predict(NEW, level, side=side), rounded.predict(NEW, level, side=side)
        torch.testing.assert_close(tuple(bounds[0]), tuple(bounds[1]), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_quantiles_cover_as_often_as_they_say():
    band = PredictionIntervals(Quantiles(), quantiles=(0.1, 0.5, 0.9)).fit(X, Y, progress=False)
    covered = {0.8: [], 0.5: []}
    for seed in range(60):
        x, y = regression(45, seed=100 + seed)
        band.calibrate(x[:39], y[:39])
        for level, found in covered.items():
            found.append(metrics.coverage(y[39:], band.predict(x[39:], level)))
    for level, found in covered.items():
        assert np.mean(found) == pytest.approx(level, abs=0.06)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1).double()

    def forward(self, x):
        return {"price": self.layer(x)}


class Times(nn.Module):
    """A network whose outputs are in other units."""

    def __init__(self, model, factor):
        super().__init__()
        self.model, self.factor = model, factor

    def forward(self, x):
        return self.factor * self.model(x)


@pytest.mark.parametrize("tune", [True, False])
@pytest.mark.parametrize("factor", [1e-6, 0.01, 1e6])
def test_intervals_of_quantiles_are_proportional_to_the_units_of_the_targets(factor, tune):
    def found(factor):
        band = PredictionIntervals(Times(Quantiles(), factor), quantiles=(0.05, 0.5, 0.95), damping=factor**2)
        x, y = regression(60, seed=9)
        band.fit(X, factor * Y, progress=False).calibrate(x, factor * y, tune=tune)
        return band.predict(NEW, [0.5, 0.9])

    np.testing.assert_allclose(found(factor).upper, factor * found(1.0).upper, rtol=1e-6)


def test_quantiles_take_weights_in_fit_alone():
    band = PredictionIntervals(Quantiles(), quantiles=(0.05, 0.5, 0.95))
    band.fit(X, Y, sample_weight=torch.rand(N) + 0.5, progress=False)
    with pytest.raises(ValueError, match="fit alone"):
        band.calibrate(*regression(60, seed=9), sample_weight=torch.ones(60))
    band.calibrate(*regression(60, seed=9))
    with pytest.raises(ValueError, match="fit alone"):
        band.predict(NEW, sample_weight=torch.ones(7))


def test_the_summary_says_what_widths_are_proportional_to():
    rows = regression(60, seed=9)
    band = PredictionIntervals(Quantiles(), quantiles=(0.05, 0.5, 0.95)).fit(X, Y, progress=False)
    assert "predict needs a calibration" in band.summary()
    assert "√(H² + b·q)" in band.calibrate(*rows).summary()
    band = PredictionIntervals(MeanVariance(), variance="variance").fit(X, Y, progress=False)
    assert "√(σ² + b·q)" in band.calibrate(*rows).summary()
