import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import LinearRegression
from sklearn.neighbors import KNeighborsRegressor
from torch import nn

import tests.reference as reference
from deltaband import Exact, ImportantDirections, PredictionIntervals, metrics
from deltaband.calibration import ConformalScale, Scales
from deltaband.calibration.noise import BAGS, BOOSTING, SMALLEST_RESIDUAL, BoostedNoise
from deltaband.data.inputs import Inputs
from deltaband.fitting import accumulator
from deltaband.network.network import MAX_FEATURES, Network

EIGENVALUES = 10.0 ** np.linspace(2, -4, 30)
DAMPING = 10.0
NO_INPUTS = Inputs((torch.zeros(0),))


def noisy(n, seed=0):
    """A wave whose noise is eleven times as large where the second feature is large."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (n, 3))
    return X, np.sin(2 * X[:, 0]) + true_noise(X) * rng.standard_normal(n)


def true_noise(X):
    return 0.05 + 0.5 * np.asarray(X[:, 1] > 0.5)


def fitted(n=1500, engine="auto", **options):
    X, y = noisy(n)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 1)).double()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4)
    inputs, targets = torch.from_numpy(X), torch.from_numpy(y)
    for _ in range(300):
        optimiser.zero_grad()
        (model(inputs)[:, 0] - targets).square().mean().backward()
        optimiser.step()
    return PredictionIntervals(model, damping=DAMPING, engine=engine, **options).fit(X, y, progress=False)


@pytest.fixture(scope="module")
def trained():
    return fitted()


@pytest.fixture
def band(trained):
    copy = PredictionIntervals(trained.model, damping=DAMPING)
    return copy.fit(*noisy(1500), progress=False)


# --- the scale


def candidates(n, rng):
    """Scales with learnt noise, and q and log v of n rows."""
    scales = Scales.grid(EIGENVALUES, 100).with_noise()
    z2 = rng.standard_normal((n, len(EIGENVALUES))) ** 2 * EIGENVALUES
    e = EIGENVALUES[:, None]
    q = z2 @ (e / (e + scales.dampings) ** 2) / 100
    return scales, np.column_stack([q, rng.normal(size=n)])


def as_learnt(rng, q):
    return rng.standard_normal(len(q)) * np.exp(q[:, -1])


def heavy_tailed_as_learnt(rng, q):
    return rng.standard_t(2.5, len(q)) * np.exp(q[:, -1])


def opposite_of_what_was_learnt(rng, q):
    return rng.standard_normal(len(q)) * np.exp(-q[:, -1])


def unrelated_to_what_was_learnt(rng, q):
    return rng.standard_normal(len(q))


NOISES = [as_learnt, heavy_tailed_as_learnt, opposite_of_what_was_learnt, unrelated_to_what_was_learnt]


def test_candidates_without_noise_come_first_and_are_those_without_it():
    plain = Scales.grid(EIGENVALUES, 100)
    rng = np.random.default_rng(0)
    scales, q = candidates(20, rng)
    np.testing.assert_array_equal(scales.squared(q)[:, : len(plain.b)], plain.squared(q))
    v = np.exp(q[:, -1:])
    np.testing.assert_allclose(scales.squared(q)[:, -len(plain.b) :], plain.squared(q) * v**2)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("side", ["both", "upper", "lower"])
def test_bounds_are_those_of_full_conformal_prediction(noise, side):
    rng = np.random.default_rng(3)
    scales, q = candidates(42, rng)
    r, new = noise(rng, q[:40]), q[40:]
    bounds = ConformalScale.fit(r, q[:40], scales).bounds(new, (0.8,), side)
    sign = -1 if side == "lower" else 1
    for i in range(len(new)):
        bound = sign * bounds[0 if side == "lower" else 1][i, 0]
        reach = 3 * max(np.abs(r).max(), abs(bound))
        within = bound - 1e-9 * reach  # on the grid alone, a short part of what is accepted may be overlooked
        tried = np.append(np.linspace(-reach, reach, 151), within)
        row = scales.squared(new[i : i + 1])[0]
        accepted = reference.conformal_residuals(
            sign * r, scales.squared(q[:40]), scales.prior, row, 0.8, tried, signed=side != "both"
        )
        assert max(accepted) - 1e-9 <= bound <= max(accepted) + 2 * reach / 150 + 1e-9


def simulated(noise, n, draws, bounds, new=4, levels=(0.5, 0.8, 0.95)):
    """Return mean coverage less its level for new rows, and the standard error of that."""
    rng, covered = np.random.default_rng(5), np.zeros((draws, len(levels)))
    for i in range(draws):
        scales, q = candidates(n + new, rng)
        r = noise(rng, q)
        lower, upper = bounds(ConformalScale.fit(r[:n], q[:n], scales), q[n:], levels)
        covered[i] = ((lower <= r[n:, None]) & (r[n:, None] <= upper)).mean(axis=0)
    return covered.mean(axis=0) - levels, covered.std(axis=0) / np.sqrt(draws)


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(("n", "draws"), [(19, 2000), (150, 800)])
def test_the_guarantee_holds_whatever_was_learnt(noise, n, draws):
    excess, error = simulated(noise, n, draws, ConformalScale.bounds)
    assert (excess > -3 * error).all(), excess
    assert (excess < 1 / (n + 1) + 0.01 + 3 * error).all(), excess


@pytest.mark.slow
def test_the_simulation_finds_a_choice_that_the_new_row_has_no_part_in():
    def by_calibration_rows_alone(scale, q, levels):
        bound = scale.scale(q)[:, None] * [scale.quantile(level) for level in levels]
        return -bound, bound

    excess, error = simulated(as_learnt, 19, 2000, by_calibration_rows_alone)
    assert excess[-1] < -3 * error[-1]


def heteroscedastic(rng, X):
    return true_noise(X) * rng.standard_normal(len(X))


def heavy_tailed(rng, X):
    return true_noise(X) * rng.standard_t(2.5, len(X))


def of_one_size(rng, X):
    return rng.standard_normal(len(X))


def learnt_before(trained):
    (v,) = trained.calibrate(*noisy(100, 1)).calibration_.noise
    return lambda X: np.exp(v.log(NO_INPUTS, np.column_stack([X, trained.predict_mean(X)])))


def opposite(trained):
    return lambda X: 1 / true_noise(X)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")  # one of a hundred calibration sets looks odd
@pytest.mark.parametrize(
    ("noise", "v"), [(heteroscedastic, learnt_before), (heavy_tailed, opposite), (of_one_size, opposite)]
)
def test_calibrated_bands_cover_as_they_say_from_few_rows(trained, noise, v):
    """From inputs to intervals, with the wider ones of far rows; an opposite v is small where the noise is large."""
    rng, n, new, draws, level = np.random.default_rng(8), 39, 30, 100, 0.8
    given, covered = v(trained), []
    band = PredictionIntervals(trained.model, damping=DAMPING).fit(*noisy(200), progress=False)
    for _ in range(draws):
        X = rng.uniform(-2, 2, (n + new, 3))
        y = trained.predict_mean(X) + noise(rng, X)
        found = band.calibrate(X[:n], y[:n], noise=given).predict(X[n:], level)
        covered.append(((found.lower <= y[n:]) & (y[n:] <= found.upper)).mean())
    error, excess = np.std(covered) / np.sqrt(draws), np.mean(covered) - level
    assert -3 * error < excess < 1 / (n + 1) + 0.01 + 3 * error


# --- what is learnt


@pytest.mark.parametrize("n", [80, 400, 6000])
def test_trees_as_arrays_are_those_of_scikit_learn(n):
    rng = np.random.default_rng(1)
    X = rng.standard_normal((n, 4))
    r = np.abs(rng.standard_normal(n)) * (1 + X[:, 0] ** 2)
    found = BoostedNoise.fit(X, r).log(NO_INPUTS, X)
    halves, expected = np.random.default_rng(0), np.zeros(n)
    order = np.lexsort([*X.T, r])
    new, X = X, X[order]
    target = np.maximum(r[order] / r.mean(), SMALLEST_RESIDUAL)
    for bag in range(BAGS):
        rows = halves.permutation(n)[: (n + 1) // 2]
        rate = 0.05 if n < 5000 else 0.1
        model = HistGradientBoostingRegressor(
            loss="gamma", learning_rate=rate, early_stopping=False, random_state=bag, **BOOSTING
        )
        expected += np.log(model.fit(X[rows], target[rows]).predict(new)) / BAGS
    np.testing.assert_allclose(found, np.clip(expected, *np.log([target.min(), target.max()])), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_what_is_learnt_stays_within_the_residuals_even_where_most_are_zero(share):
    rng = np.random.default_rng(2)
    X = rng.standard_normal((400, 3))
    r = np.abs(rng.standard_normal(400)) * (rng.random(400) < share)
    log_v = BoostedNoise.fit(X, r).log(NO_INPUTS, rng.standard_normal((1000, 3)))
    assert log_v.min() >= np.log(SMALLEST_RESIDUAL)
    assert log_v.max() <= np.log(r.max() / r.mean())


def test_the_order_of_the_rows_does_not_matter():
    rng = np.random.default_rng(3)
    X, r = rng.standard_normal((300, 3)), rng.exponential(size=300)
    order = rng.permutation(300)
    one, other = BoostedNoise.fit(X, r), BoostedNoise.fit(X[order], r[order])
    np.testing.assert_allclose(one.log(NO_INPUTS, X), other.log(NO_INPUTS, X), rtol=1e-12)


def test_learnt_noise_is_nearly_as_good_as_the_true_one(band):
    calibration, (X, y) = noisy(500, 1), noisy(3000, 2)
    scores = {}
    for name, noise in (("none", "none"), ("auto", "auto"), ("true", true_noise)):
        found = band.calibrate(*calibration, noise=noise).predict(X, [0.8, 0.95])
        assert np.all(np.abs(metrics.coverage(y, found) - [0.8, 0.95]) < 0.06)
        scores[name] = metrics.interval_score(y, found)
    assert np.all(scores["auto"] < 0.75 * scores["none"])
    assert np.all(scores["auto"] < 1.1 * scores["true"])


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("per_output", [False, True])
def test_each_output_has_its_own_noise(joint, per_output):
    X, y = noisy(900)
    Y = np.column_stack([y, y[::-1]])
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    band = PredictionIntervals(model, damping=1.0, per_output=per_output).fit(X[:500], Y[:500], progress=False)
    band.calibrate(X[500:], Y[500:], noise="auto", joint=joint)
    assert len(band.calibration_.noise) == 2
    assert band.predict(X[:5]).lower.shape == (5, 2)
    mean, scale = band.predict_mean_and_scale(X[:5])
    assert mean.shape == scale.shape == (5, 2)


@pytest.mark.parametrize("engine", [Exact(), ImportantDirections(80)], ids=repr)
def test_a_calibration_with_noise_is_saved_without_pickle_and_is_the_same_afterwards(engine, tmp_path):
    band = fitted(400, engine).calibrate(*noisy(200, 1), noise="auto")
    band.save(tmp_path / "noise.band")
    loaded = PredictionIntervals.load(tmp_path / "noise.band", band.model)
    X = noisy(50, 3)[0]
    for one, other in zip(band.predict(X), loaded.predict(X), strict=True):
        np.testing.assert_array_equal(one, other)
    assert loaded.summary() == band.summary()
    assert "learnt" in band.summary()


def test_residuals_are_in_a_file_only_if_rows_are(tmp_path):
    band = fitted(300)
    for sample in (False, True):
        band.save(tmp_path / "band", sample=sample)
        loaded = PredictionIntervals.load(tmp_path / "band", band.model)
        assert len(loaded.fits_[0].residuals) == (300 if sample else 0)
    expected = band.calibrate(*noisy(200, 1), noise="auto").predict(noisy(20, 3)[0]).upper
    np.testing.assert_array_equal(
        loaded.calibrate(*noisy(200, 1), noise="auto").predict(noisy(20, 3)[0]).upper, expected
    )


def test_parts_of_the_rows_and_merged_bands_keep_residuals_of_all_of_them():
    whole = fitted(300)
    X, y = noisy(300)
    parts = PredictionIntervals(whole.model, damping=DAMPING)
    for rows in (slice(0, 100), slice(100, 300)):
        parts.partial_fit(X[rows], y[rows])
    one, other = (PredictionIntervals(whole.model, damping=DAMPING, engine=Exact()) for _ in range(2))
    merged = one.partial_fit(X[:120], y[:120], n_rows=300).merge(other.partial_fit(X[120:], y[120:], n_rows=300))
    for band in (parts, merged):
        (piece,) = band.fits_[0].residuals.pieces
        (expected,) = whole.fits_[0].residuals.pieces
        for mine, theirs in zip(piece.tensors, expected.tensors, strict=True):
            np.testing.assert_allclose(np.sort(mine, axis=0), np.sort(theirs, axis=0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [lambda: KNeighborsRegressor(20), lambda: true_noise], ids=["regressor", "function"])
def test_noise_of_ones_own(band, make, tmp_path):
    X, y = noisy(2000, 2)
    plain = metrics.interval_score(y, band.calibrate(*noisy(500, 1), noise="none").predict(X))
    found = band.calibrate(*noisy(500, 1), noise=make()).predict(X)
    assert metrics.interval_score(y, found) < 0.8 * plain
    with pytest.raises(TypeError, match="save the band before it is calibrated"):
        band.save(tmp_path / "x.band")
    assert not list(tmp_path.iterdir())


# --- rows far from the training rows


def test_far_rows_are_told_and_get_the_wider_interval(band):
    X = noisy(200, 2)[0]
    X[:20] *= 5
    plain = band.calibrate(*noisy(500, 1), noise="none").predict(X)
    learnt = band.calibrate(*noisy(500, 1), noise="auto").predict(X)
    np.testing.assert_array_equal(plain.far, learnt.far)
    assert learnt.far[:20].mean() > 0.9
    assert learnt.far[20:].mean() < 0.2
    far = learnt.far
    assert (learnt.upper[far] >= plain.upper[far]).all()
    assert (learnt.lower[far] <= plain.lower[far]).all()
    assert (learnt.upper[~far] < plain.upper[~far]).any()
    frame = learnt.to_pandas()
    np.testing.assert_array_equal(frame["far"], far)
    assert band.predict(torch.from_numpy(X)).far.dtype == torch.bool


def test_how_far_rows_are_is_known_only_after_a_calibration(band):
    assert band.predict(noisy(5)[0]).far is None
    assert "far" not in band.predict(noisy(5)[0]).to_pandas()
    assert len(band.calibrate(*noisy(100, 1), noise="auto").predict(np.zeros((0, 3))).far) == 0


# --- features


def test_features_of_a_table_are_its_columns_and_of_others_what_the_last_layer_is_given():
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 1))
    x = torch.randn(7, 2, 5)
    found = Network(model).features(x)
    np.testing.assert_allclose(found, model[:5](x).detach().numpy(), rtol=1e-5)
    assert not any(module._forward_pre_hooks for module in model.modules())
    table = torch.randn(7, 3)
    np.testing.assert_array_equal(Network(nn.Linear(3, 1)).features(table), table.numpy())
    wide = torch.randn(7, 500)
    assert Network(nn.Linear(500, 1)).features(wide).shape == (7, MAX_FEATURES)
    assert Network(nn.Sequential(nn.Conv1d(2, 1, 5), nn.Flatten())).features(x).shape == (7, 0)


class RowByRow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, x):
        return torch.stack([self.layer(row.mean(dim=0)) for row in x])


class SequenceFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x):
        return self.layers(x.permute(1, 0, 2)).mean(dim=0)


@pytest.mark.parametrize("model", [RowByRow(), SequenceFirst()], ids=["row by row", "sequence first"])
@pytest.mark.parametrize("b", [1, 4, 6])
def test_a_dimension_that_is_as_long_as_the_rows_by_chance_holds_no_features(model, b):
    assert Network(model).features(torch.randn(b, 4, 6)).shape == (b, 0)
    X, y = torch.randn(b + 100, 4, 6), torch.randn(b + 100)
    band = PredictionIntervals(model, damping=100.0, engine=Exact())
    band.partial_fit(X[:b], y[:b]).partial_fit(X[b:], y[b:]).calibrate(X[b:] + 0.1, y[b:], noise="auto")
    assert torch.isfinite(band.predict(X[:b]).upper).all()


class Moments(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(torch.stack([x.mean(dim=1), x.std(dim=1)], dim=1))


def test_rows_of_several_lengths_have_noise_by_their_prediction_alone():
    parts = [(torch.randn(40, length), torch.randn(40)) for length in (5, 6, 7)]
    band = PredictionIntervals(Moments(), damping=10.0).fit(parts, progress=False)
    band.calibrate([(x + 0.1, y) for x, y in parts], noise="auto")
    one = PredictionIntervals(band.model, damping=10.0).fit(torch.randn(100, 5), torch.randn(100), progress=False)
    one.calibrate(torch.randn(60, 5), torch.randn(60), noise="auto")
    for length in (5, 12):
        for each in (band, one):
            assert torch.isfinite(each.predict(torch.randn(9, length)).upper).all()


def test_a_function_is_given_a_copy_of_what_the_network_is_given():
    given = []

    def noise(x):
        given.append((x["a"].dtype, sorted(x)))
        return x["a"].mul_(2.0)[:, 0].abs() + 1.0

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, a, b):
            return self.layer(a + b)

    X = {"a": np.random.default_rng(0).normal(size=(100, 2)), "b": np.zeros((100, 2))}
    before = X["a"].copy()
    band = PredictionIntervals(Named(), damping=1.0).fit(X, np.zeros(100), progress=False)
    band.calibrate({name: each[:50] + 0.1 for name, each in X.items()}, np.ones(50), noise=noise)
    band.predict(X)
    np.testing.assert_array_equal(X["a"], before)
    assert set(map(str, given)) == {"(torch.float32, ['a', 'b'])"}


def test_columns_of_double_precision_keep_their_digits():
    table = torch.tensor([[1.7e9], [1.7e9 + 1]], dtype=torch.float64)
    np.testing.assert_array_equal(Network(nn.Linear(1, 1).double()).features(table), table.numpy())


def test_images_have_learnt_noise_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 1))
    X, y = torch.randn(300, 1, 6, 6), torch.randn(300)
    band = PredictionIntervals(model, damping=30.0, engine=ImportantDirections(60)).fit(
        X[:200], y[:200], progress=False
    )
    found = band.calibrate(X[200:], y[200:], noise="auto").predict(X[:3])
    assert torch.isfinite(found.upper).all()


def test_features_do_not_depend_on_the_default_precision():
    x, network = torch.randn(5, MAX_FEATURES + 9), Network(nn.Linear(MAX_FEATURES + 9, 1))
    expected = network.features(x)
    torch.set_default_dtype(torch.float64)
    try:
        np.testing.assert_array_equal(network.features(x), expected)
    finally:
        torch.set_default_dtype(torch.float32)


# --- bad input, and nothing to learn from


def test_nothing_is_kept_where_it_is_not_wanted():
    band = fitted(200, noise="none")
    assert len(band.fits_[0].residuals) == 0
    band.calibrate(*noisy(100, 1), noise="auto")
    assert "the fit kept no residuals" in band.summary()


def test_where_memory_is_short_few_residuals_are_kept():
    X, y = noisy(400)
    model = nn.Linear(3, 1).double()
    needed = PredictionIntervals(model, damping=1.0).plan(X, y).chosen.nbytes
    kept = [
        len(PredictionIntervals(model, damping=1.0, memory=needed + more).fit(X, y, progress=False).fits_[0].residuals)
        for more in (0, 50_000, 10**9)
    ]
    assert kept[0] == 0 < kept[1] < 400 == kept[2]


@pytest.mark.filterwarnings("ignore::deltaband.errors.MisfitWarning")
@pytest.mark.parametrize("way", ["fit", "partial_fit", "merge"])
def test_the_residuals_of_many_rows_are_a_uniform_sample(way, monkeypatch):
    monkeypatch.setattr(accumulator, "RESIDUAL_ROWS", 2_000)
    n, model = 12_000, nn.Linear(1, 1).double()
    X = torch.arange(n, dtype=torch.float64)[:, None] / n
    y = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    part = n if way == "fit" else 9_000
    band, other = (PredictionIntervals(model, damping=1.0, engine=Exact()) for _ in range(2))
    band.fit(X[:part], y[:part], progress=False)
    if way == "partial_fit":
        band.partial_fit(X[part:], y[part:])
    elif way == "merge":
        band.merge(other.fit(X[part:], y[part:], progress=False))
    rows = np.concatenate([piece.tensors[0][:, 0] for piece in band.fits_[0].residuals.pieces])
    assert len(rows) == len(np.unique(rows)) == 2_000
    counts = np.histogram(rows, 10, (0, 1))[0]
    assert stats.chisquare(counts).pvalue > 1e-4, counts


def test_too_few_rows_have_the_same_noise_everywhere():
    band = fitted(40).calibrate(*noisy(100, 1), noise="auto")
    assert "40 residuals of training rows are too few to learn the noise from" in band.summary()
    np.testing.assert_array_equal(
        band.predict(noisy(9, 2)[0]).upper, band.calibrate(*noisy(100, 1), noise="none").predict(noisy(9, 2)[0]).upper
    )


class Duck:
    def fit(self, X, y):
        return self

    def predict(self, X):
        return np.ones(len(X))


class Negative(LinearRegression):
    def predict(self, X):
        return np.full(len(X), -1.0)


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        ("always", "noise must be 'auto', 'none', a regressor or a function of the inputs, got 'always'"),
        (3.0, "noise must be 'auto', 'none', a regressor or a function"),
        (lambda X: np.zeros(len(X)), "must be positive and finite, from 1e-100 to 1e\\+100; it is 0 in row 0"),
        (lambda X: np.full(len(X), np.nan), "positive and finite.*; it is nan in row 0"),
        (lambda X: np.full(len(X), 1e200), "from 1e-100 to 1e\\+100; it is 1e\\+200 in row 0"),
        (lambda X: np.ones(3), "must return one number per row"),
        (Negative(), "noise=Negative must be positive and finite.*; it is -1 in row 0; take a regressor with a gamma"),
        (LinearRegression, "a regressor that can be copied, one made and not yet fitted"),
        (Duck(), "a regressor that can be copied, .* got Duck"),
    ],
)
def test_bad_noise_is_refused_and_changes_nothing(band, noise, message):
    with pytest.raises((TypeError, ValueError), match=message):
        band.calibrate(*noisy(100, 1), noise=noise)
    assert band.calibration_ is None


def test_bad_noise_is_told_by_its_row_among_all_calibration_rows(band):
    X, y = noisy(6000, 1)
    X[4321] = 3.0
    with pytest.raises(ValueError, match="it is 0 in row 4321"):
        band.calibrate(X, y, noise=lambda x: (x[:, 0] < 2.5) * 1.0)


def test_a_regressor_without_residuals_to_learn_from_is_refused():
    band = fitted(200, noise="none")
    with pytest.raises(ValueError, match="noise=KNeighborsRegressor has nothing to learn from: the fit kept no"):
        band.calibrate(*noisy(100, 1), noise=KNeighborsRegressor(5))


def test_the_largest_range_of_noise_is_no_trouble(band):
    found = band.calibrate(*noisy(200, 1), noise=lambda x: np.where(x[:, 0] > 0, 1e-99, 1e99)).predict(noisy(50, 2)[0])
    assert np.isfinite(found.upper).all()


def test_noise_that_would_not_be_used_is_refused(band):
    with pytest.raises(ValueError, match="leave out noise="):
        band.calibrate(*noisy(100, 1), noise=lambda X: np.ones(len(X)), tune=False)


@pytest.mark.parametrize("noise", ["learn", None, True, lambda x: x])
def test_the_constructor_takes_auto_or_none(noise):
    with pytest.raises(ValueError, match="noise must be 'auto' or 'none'"):
        PredictionIntervals(nn.Linear(2, 1), damping=1.0, noise=noise)


# --- rows with weights


def unequal(n, seed):
    """Rows whose noise is as large as their weights say, and these are a function of a feature."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (n, 3))
    weight = np.where(X[:, 1] > 0, 0.04, 1.0)
    return X, np.sin(2 * X[:, 0]) + 0.1 * rng.standard_normal(n) / np.sqrt(weight), weight


@pytest.mark.parametrize("own_variance", [False, True])
def test_learnt_noise_is_that_of_rows_of_weight_1_where_the_calibration_is_weighted(trained, own_variance):
    model, options = trained.model, {}
    if own_variance:  # a network that says the same variance everywhere

        class WithVariance(nn.Module):
            def __init__(self):
                super().__init__()
                self.mean = trained.model

            def forward(self, x):
                return self.mean(x), torch.full((len(x), 1), 0.01, dtype=x.dtype)

        model, options = WithVariance(), {"variance": "variance"}
    X, y, weight = unequal(1500, 1)
    with torch.no_grad():
        y = y - np.sin(2 * X[:, 0]) + trained.model(torch.from_numpy(X))[:, 0].numpy()
    band = PredictionIntervals(model, damping=DAMPING, **options).fit(X, y, sample_weight=weight, progress=False)
    new, targets, w = unequal(600, 2)
    noisy_rows, columns = new[:, 1] > 0.1, np.column_stack([new, trained.model(torch.from_numpy(new)).detach().numpy()])

    def ratio(**weights):
        (v,) = band.calibrate(new, targets, **weights).calibration_.noise
        found = np.exp(v.log(NO_INPUTS, columns))
        return found[noisy_rows].mean() / found[new[:, 1] < -0.1].mean()

    assert ratio(sample_weight=w) == pytest.approx(1.0, abs=0.25)
    assert ratio() > 3.5  # the noise of rows as they come is five times as large there
