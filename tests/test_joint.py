"""Covariances, sums and samples of predictions, against the dense formula."""

import numpy as np
import pytest
import torch
from torch import nn

import tests.reference as reference
from deltaband import (
    Exact,
    ImportantDirections,
    Nystrom,
    PredictionIntervals,
    RandomProjection,
    RobustFrequentDirections,
)
from tests.support.networks import mlp, regression, trained, trained_mlp

pytestmark = pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
X, Y = regression(80)
NEW, OTHER = regression(7, seed=5)[0], regression(4, seed=6)[0]
DAMPING = 0.5


def two_outputs():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    Y2 = torch.stack([Y, X[:, 0] - Y / 2], dim=1)
    return trained(model, X, Y2), Y2


@pytest.fixture(scope="module")
def model():
    return trained_mlp()


@pytest.fixture(scope="module")
def band(model):
    return PredictionIntervals(model, damping=DAMPING).fit(X, Y, progress=False)


@pytest.fixture(scope="module")
def calibrated(model):
    band = PredictionIntervals(model, damping=DAMPING).fit(X, Y, progress=False)
    return band.calibrate(*regression(120, seed=9))


def rows_of(model, x, m=1):
    return reference.jacobians(model, [(each[None],) for each in x])[:, :m]  # (n, m, p)


# --- covariance


@pytest.mark.parametrize("by", ["variance", "leverage"])
@pytest.mark.parametrize("n", [80, 20])  # more rows than the 41 parameters, and fewer
def test_it_is_the_dense_formula(model, n, by):
    band = PredictionIntervals(model, damping=DAMPING).fit(X[:n], Y[:n], progress=False)
    J, g, other = (rows_of(model, each)[:, 0] for each in (X[:n], NEW, OTHER))
    expected = band.noise_std_**2 * reference.between(J, DAMPING, g, other)[by]
    found = band.covariance(NEW, OTHER, by=by)
    assert isinstance(found, torch.Tensor)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9 * np.abs(expected).max())
    np.testing.assert_allclose(band.covariance(OTHER, NEW, by=by), expected.T, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    "engine", [Exact(), Nystrom(12), RandomProjection(25), RobustFrequentDirections(8), ImportantDirections(8)]
)
@pytest.mark.parametrize("by", ["variance", "leverage"])
def test_its_diagonal_is_q_or_h_by_every_engine(model, engine, by):
    band = PredictionIntervals(model, damping=DAMPING, engine=engine).fit(X, Y, progress=False)
    C = band.covariance(NEW, by=by).numpy()
    np.testing.assert_array_equal(C, C.T)
    q = getattr(band, by)(NEW).numpy()
    clear = q > 0  # of a projection it may have been cut off
    np.testing.assert_allclose(C.diagonal()[clear] / band.noise_std_**2, q[clear], rtol=1e-6)
    if not isinstance(engine, RandomProjection):
        assert np.linalg.eigvalsh(C).min() > -1e-9 * C.max()


@pytest.mark.parametrize("by", ["variance", "leverage"])
def test_outputs_vary_together_where_they_are_fitted_together(by):
    model, Y2 = two_outputs()
    band = PredictionIntervals(model, damping=DAMPING).fit(X, Y2, progress=False)
    J = rows_of(model, X, 2).reshape(160, -1)
    g, other = rows_of(model, NEW, 2).reshape(14, -1), rows_of(model, OTHER, 2).reshape(8, -1)
    s = band.noise_std_
    expected = reference.between(J, DAMPING, g, other)[by].reshape(7, 2, 4, 2) * s[:, None, None] * s
    np.testing.assert_allclose(band.covariance(NEW, OTHER, by=by), expected, rtol=1e-6, atol=1e-10)


def test_outputs_that_are_fitted_alone_have_no_covariance():
    model, Y2 = two_outputs()
    band = PredictionIntervals(model, damping=DAMPING, per_output=True).fit(X, Y2, progress=False)
    C = band.covariance(NEW).numpy()
    assert not C[:, 0, :, 1].any()
    assert not C[:, 1, :, 0].any()
    for o in (0, 1):
        alone = PredictionIntervals(model, damping=DAMPING, outputs=o).fit(X, Y2, progress=False)
        np.testing.assert_allclose(C[:, o, :, o], alone.covariance(NEW), rtol=1e-9)


def test_chosen_outputs_come_in_their_order():
    model, Y2 = two_outputs()
    both = PredictionIntervals(model, damping=DAMPING).fit(X, Y2, progress=False)
    turned = PredictionIntervals(model, damping=DAMPING, outputs=[1, 0]).fit(X, Y2, progress=False)
    np.testing.assert_allclose(turned.covariance(NEW)[:, [1, 0]][:, :, :, [1, 0]], both.covariance(NEW), rtol=1e-9)


@pytest.mark.parametrize("clustered", [False, True])
def test_robust_covariances_are_those_of_the_sandwich(model, clustered):
    clusters = np.arange(80) // 4 if clustered else None
    kind = "HC1" if clustered else "HC3"
    band = PredictionIntervals(model, damping=DAMPING, robust=kind).fit(X, Y, clusters=clusters, progress=False)
    C = band.covariance(NEW).numpy()
    np.testing.assert_allclose(C.diagonal(), band.noise_std_**2 * band.variance(NEW).numpy(), rtol=1e-9)
    J, residuals = rows_of(model, X), (Y[:, None] - model(X)).detach().numpy()
    g = rows_of(model, NEW)[:, 0]

    def form(v):
        return reference.sandwich(J, residuals, DAMPING, v, kind, clusters)

    expected = (form(g[0] + g[1]) - form(g[0] - g[1])) / 4
    assert C[0, 1] == pytest.approx(expected, rel=1e-6)


def test_units_are_those_of_the_targets(model, band):
    scaled = PredictionIntervals(model, damping=DAMPING, target_transform=(5.0, 3.0)).fit(X, Y, progress=False)
    np.testing.assert_allclose(scaled.covariance(NEW, OTHER), 9 * band.covariance(NEW, OTHER), rtol=1e-9)


def test_pieces_do_not_matter(band, monkeypatch):
    whole = band.covariance(NEW, OTHER)
    monkeypatch.setattr("deltaband.joint.GRADIENT_BYTES", 1)
    np.testing.assert_allclose(band.covariance(NEW, OTHER), whole, rtol=1e-12)


def test_no_rows_and_one_row(band):
    assert band.covariance(NEW[:0]).shape == (0, 0)
    assert band.covariance(NEW, NEW[:0]).shape == (7, 0)
    assert band.covariance(NEW[:0], NEW).shape == (0, 7)
    np.testing.assert_allclose(band.covariance(NEW[:1]), band.covariance(NEW)[:1, :1], rtol=1e-12)
    assert isinstance(band.covariance(NEW.numpy()), np.ndarray)


def test_the_calibrated_scale_has_the_mean_square_of_the_calibration_rows(calibrated):
    """s² and b are such that (b·q + 1)·s² is the mean square of residuals: by hand, from the scale that it chose."""
    x, y = regression(120, seed=9)
    errors = calibrated.errors()
    q = calibrated.calibration_.covariances[0].at(errors.fits[0].covariance.damping)
    assert q.damping in calibrated.calibration_.scales[0].dampings
    C = calibrated.covariance(x).numpy()
    total = C.diagonal() + errors.rows(calibrated.spec.known_inputs(calibrated.fits_, x)).noise[:, 0]
    r = (y - calibrated.predict_mean(x)).numpy()
    assert np.mean(r**2 / total) == pytest.approx(1.0, rel=1e-9)


def test_calibration_answers_where_the_formula_has_no_damping(model):
    band = PredictionIntervals(model).fit(X, Y, progress=False)
    with pytest.raises(ValueError, match="λ is not known"):
        band.covariance(NEW)
    band.calibrate(*regression(120, seed=9))
    assert (band.covariance(NEW).diagonal() > 0).all()


def test_a_matrix_that_does_not_fit_is_refused(band, monkeypatch):
    monkeypatch.setattr("deltaband.joint.free_memory", lambda: 100)
    with pytest.raises(MemoryError, match=r"covariances of 7 and 7 rows take .* predict_linear"):
        band.covariance(NEW)


def test_loaders_and_bad_words_are_refused(band):
    loader = torch.utils.data.DataLoader(NEW, batch_size=2)
    for ask in (band.covariance, band.sample, lambda x: band.predict_linear(x, np.ones(7))):
        with pytest.raises(TypeError, match="not a loader"):
            ask(loader)
    with pytest.raises(ValueError, match="by must be 'variance' or 'leverage', got 'mean'"):
        band.covariance(NEW, by="mean")
    with pytest.raises(ValueError, match="NaN"):
        band.covariance(torch.full((2, 3), torch.nan, dtype=torch.float64))


# --- sums


@pytest.mark.parametrize("kind", ["observation", "mean"])
@pytest.mark.parametrize("side", ["both", "upper"])
def test_single_rows_are_predicted_as_by_predict(band, kind, side):
    sums = band.predict_linear(NEW, np.eye(7), [0.5, 0.9], kind=kind, side=side)
    single = band.predict(NEW, [0.5, 0.9], kind=kind, side=side)
    for mine, theirs in zip(sums, single, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9)
    assert sums.level == (0.5, 0.9)


@pytest.mark.parametrize(
    "engine", [Exact(), Nystrom(12), RandomProjection(25), RobustFrequentDirections(8), ImportantDirections(8)]
)
def test_sums_have_the_variance_that_the_covariance_says(model, engine):
    band = PredictionIntervals(model, damping=DAMPING, engine=engine).fit(X, Y, progress=False)
    W = np.random.default_rng(0).standard_normal((5, 7))
    expected = np.einsum("ki,ij,kj->k", W, band.covariance(NEW).numpy(), W)
    mean = band.predict_linear(NEW, W, kind="mean")
    first = band.predict_linear(NEW, np.eye(7)[:1], kind="mean")
    one = float(first.width[0]) / float(band.covariance(NEW)[0, 0]) ** 0.5
    width = mean.width.numpy() / one
    np.testing.assert_allclose(np.square(width), np.maximum(expected, 0), rtol=1e-6, atol=1e-9 * np.abs(expected).max())
    noisy = band.predict_linear(NEW, W)
    noise = band.noise_std_**2 * np.square(W).sum(axis=1)
    np.testing.assert_allclose(np.square(noisy.width.numpy() / one), np.maximum(expected, 0) + noise, rtol=1e-6)
    np.testing.assert_allclose(noisy.mean, W @ band.predict_mean(NEW).numpy(), rtol=1e-9)


def test_the_difference_of_a_row_to_itself_is_certain(band):
    x = torch.cat([NEW[:1], NEW[:1]])
    difference = band.predict_linear(x, [1.0, -1.0], kind="mean")
    assert difference.mean.shape == (1,)
    assert difference.width[0] < 1e-7 * band.predict(NEW[:1], kind="mean").width[0]


def test_sums_are_of_each_output_or_over_outputs():
    model, Y2 = two_outputs()
    for per_output in (False, True):
        band = PredictionIntervals(
            model, damping=DAMPING, target_transform=([1.0, 2.0], [2.0, 5.0]), per_output=per_output
        ).fit(X, Y2, progress=False)
        C, W = band.covariance(NEW).numpy(), np.random.default_rng(1).standard_normal((3, 7))
        each = band.predict_linear(NEW, W, kind="mean")
        assert each.mean.shape == (3, 2)
        np.testing.assert_allclose(each.mean, W @ band.predict_mean(NEW).numpy(), rtol=1e-9)
        one = band.predict(NEW[:1], kind="mean").width.numpy()[0] / np.sqrt(C[0, [0, 1], 0, [0, 1]])
        expected = np.stack([np.einsum("ki,ij,kj->k", W, C[:, o, :, o], W) for o in (0, 1)], axis=1)
        np.testing.assert_allclose(np.square(each.width.numpy() / one), expected, rtol=1e-6)
        over = np.random.default_rng(2).standard_normal((3, 7, 2))
        both = band.predict_linear(NEW, over, kind="mean")
        assert both.mean.shape == (3,)
        expected = np.einsum("kio,iojp,kjp->k", over, C, over)
        np.testing.assert_allclose(np.square(both.width.numpy() / one.max()), expected, rtol=1e-6)


def test_weights_of_rows_say_how_large_their_noise_is(model, band):
    w = np.array([1.0, 4, 1, 1, 2, 1, 1])
    sums = band.predict_linear(NEW, np.eye(7), sample_weight=w)
    np.testing.assert_allclose(sums.width, band.predict(NEW, sample_weight=w).width, rtol=1e-9)


def test_sums_of_many_rows_take_no_matrix(band, monkeypatch):
    monkeypatch.setattr("deltaband.joint.Errors.covariance", None)
    total = band.predict_linear(X.repeat(30, 1), np.ones(2400))
    assert total.width[0] > 0


def test_the_total_of_a_calibrated_band_is_covered():
    """Sums of 20 new observations, 300 of them: 90 % and some more are within their intervals."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6400, 3, generator=generator, dtype=torch.float64)
    y = x.sum(dim=1).sin() + 0.3 * torch.randn(6400, generator=generator, dtype=torch.float64)
    model = trained(mlp(hidden=30), x[:200], y[:200])
    band = PredictionIntervals(model).fit(x[:200], y[:200], progress=False).calibrate(x[200:400], y[200:400])
    new, W = x[400:], np.kron(np.eye(300), np.ones(20))
    inside = band.predict_linear(new, W, 0.9).contains(W @ y[400:].numpy())
    assert 0.84 < inside.double().mean() < 0.985


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(6), r"weights must have shape \(7,\) for a sum over the rows, or \(k, 7\) for k of them; got \(6,\)"),
        (np.ones((7, 2)), r"got \(7, 2\)"),
        (np.ones((2, 7, 2)), r"got \(2, 7, 2\)"),
        (1.0, "weights"),
        (np.array([np.nan] * 7), "weights must be finite; got nan"),
        ("abc", "weights"),
    ],
)
def test_bad_weights_are_refused(band, weights, message):
    with pytest.raises((ValueError, TypeError), match=message):
        band.predict_linear(NEW, weights)


def test_weights_of_tensors_lists_and_no_sums(band):
    lists = band.predict_linear(NEW, [1.0] * 7)
    np.testing.assert_allclose(band.predict_linear(NEW.numpy(), torch.ones(7)).upper, lists.upper)
    assert band.predict_linear(NEW, np.zeros((0, 7))).mean.shape == (0,)
    zero = band.predict_linear(NEW, np.zeros(7))
    assert float(zero.width[0]) == float(zero.mean[0]) == 0
    assert band.predict_linear(NEW[:0], np.zeros((2, 0))).width.tolist() == [0, 0]


# --- samples


@pytest.mark.parametrize("by", ["variance", "leverage"])
def test_samples_have_the_covariance_within_their_error(band, by):
    n = 20_000
    drawn = band.sample(NEW, n, seed=3, by=by).numpy()
    assert drawn.shape == (n, 7)
    C = band.covariance(NEW, by=by).numpy()
    error = np.sqrt((np.outer(C.diagonal(), C.diagonal()) + C**2) / n)  # of an empirical covariance
    assert (np.abs(np.cov(drawn.T) - C) < 5 * error).all()
    assert (np.abs(drawn.mean(axis=0) - band.predict_mean(NEW).numpy()) < 5 * np.sqrt(C.diagonal() / n)).all()


def test_a_seed_gives_the_same_functions(band):
    np.testing.assert_array_equal(band.sample(NEW, 3, seed=1), band.sample(NEW, 3, 1))
    assert not np.allclose(band.sample(NEW, 3, seed=1), band.sample(NEW, 3, seed=2))
    assert band.sample(NEW).shape == (1, 7)
    assert band.sample(NEW[:0], 4).shape == (4, 0)


def test_samples_of_outputs_and_of_a_curved_transform():
    model, Y2 = two_outputs()
    band = PredictionIntervals(model, damping=DAMPING).fit(X, Y2, progress=False)
    assert band.sample(NEW, 5).shape == (5, 7, 2)

    class Log:
        def transform(self, y):
            return np.log(y)

        def inverse_transform(self, z):
            return np.exp(z)

    curved = PredictionIntervals(model, damping=DAMPING, target_transform=Log()).fit(X, Y2, progress=False)
    np.testing.assert_allclose(curved.sample(NEW, 5, 1), band.sample(NEW, 5, 1).exp(), rtol=1e-9)
    for ask in (curved.covariance, lambda x: curved.predict_linear(x, np.ones(7))):
        with pytest.raises(ValueError, match="not affine"):
            ask(NEW)


@pytest.mark.parametrize(("n", "seed"), [(0, 0), (1.5, 0), (1, -1), ("x", 0)])
def test_counts_and_seeds_are_checked(band, n, seed):
    with pytest.raises(ValueError, match="must be"):
        band.sample(NEW, n, seed)


def test_networks_of_quantiles_have_none():
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            y = self.net(x)
            return torch.cat([y - 1, y, y + 1], dim=1)

    band = PredictionIntervals(Three(), quantiles=(0.1, 0.5, 0.9)).fit(X, Y, progress=False)
    with pytest.raises(ValueError, match="trained for quantiles has no covariance"):
        band.covariance(NEW)
