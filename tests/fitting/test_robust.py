"""Robust covariances: sandwiches of each row's own residual, or of those of a cluster, for every engine."""

import copy

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
from deltaband.engines import importance
from deltaband.fitting.robust import ClusterSums

N, DAMPING = 50, 0.3
KINDS = ("HC0", "HC1", "HC2", "HC3")
ENGINES = {
    "auto": 1e-8,
    Exact(): 1e-8,
    Nystrom(2 * N): 1e-6,
    RandomProjection(300): 1e-8,
    FrequentDirections(2 * N): 1e-6,
    RobustFrequentDirections(2 * N): 1e-6,
    ImportantDirections(2 * N): 1e-6,
}

pytestmark = pytest.mark.filterwarnings(
    "ignore:the network has p", "ignore:.*accurate", "ignore:the sketch may", "ignore:rank="
)


def network(hidden=5, m=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, m)).double()


rng = np.random.default_rng(0)
X, NEW = rng.standard_normal((N, 3)), rng.standard_normal((5, 3))
Y = np.sin(X.sum(axis=1))[:, None] + rng.standard_normal((N, 2)) * (0.1 + np.abs(X[:, :2]))
CLUSTERS = rng.integers(0, 9, N)


def dense(model, x):
    """Outputs (n, m) and J (n, m, p)."""
    x = torch.from_numpy(x)
    return model(x).detach().numpy(), reference.jacobians(model, [(row[None],) for row in x])


def variances(model, y, kind, clusters=None, weight=None, damping=DAMPING):
    """q of the new rows, (5, m), in the square of the units of y."""
    outputs, J = dense(model, X)
    root = np.ones_like(y) if weight is None else np.sqrt(weight)
    given = J * root[:, :, None], (y - outputs) * root, damping
    return np.array([[reference.sandwich(*given, g, kind, clusters) for g in row] for row in dense(model, NEW)[1]])


def fitted(model, y, kind, *, damping=DAMPING, engine="auto", **fit):
    return PredictionIntervals(model, damping=damping, robust=kind, engine=engine).fit(X, y, progress=False, **fit)


def found(band):
    return np.reshape(band.noise_std_**2 * band.variance(NEW), (5, -1))


# --- against the formula


@pytest.mark.parametrize("hidden", [5, 40])  # p = 26 and 201
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_every_engine_has_the_sandwich_of_dense_matrices(engine, kind, hidden):
    model, y = network(hidden), Y[:, :1]
    band = fitted(model, y, kind, engine=engine)
    q = variances(model, y, kind)
    np.testing.assert_allclose(found(band), q, rtol=ENGINES[engine])
    s, nu = band.noise_std_, N - band.effective_parameters_
    for what, noise in (("mean", 0.0), ("observation", s**2)):
        half = stats.t.ppf(0.95, nu) * np.sqrt(noise + q[:, 0])
        np.testing.assert_allclose(band.predict(NEW, 0.9, kind=what).upper, band.predict_mean(NEW) + half, rtol=1e-6)


@pytest.mark.parametrize("kind", ["HC0", "HC3"])
def test_a_projection_has_the_sandwich_of_projected_rows(kind):
    model, y = network(40), Y[:, :1]
    band = fitted(model, y, kind, engine=RandomProjection(30, seed=7))
    S = reference.projection(30, [w.shape for w in model.parameters()], seed=7)
    outputs, J = dense(model, X)
    mu, _ = reference.equivalent(J[:, 0] @ S.T, DAMPING)
    q = [reference.sandwich(J @ S.T, y - outputs, mu, S @ g[0], kind) for g in dense(model, NEW)[1]]
    np.testing.assert_allclose(found(band)[:, 0], q, rtol=1e-5)


def test_a_sketch_has_the_sandwich_in_its_directions():
    model, y = network(40), Y[:, :1]
    band = fitted(model, y, "HC0", engine=ImportantDirections(8))
    outputs, J = dense(model, X)
    sketch = reference.Directions(8, DAMPING, importance)
    for row in J[:, 0]:
        sketch.add(row)
    d, V, shift = sketch.finish()
    inverse = V.T @ np.diag(1 / (d**2 + shift + DAMPING)) @ V
    q = [sum(((y - outputs)[i, 0] * g[0] @ inverse @ J[i, 0]) ** 2 for i in range(N)) for g in dense(model, NEW)[1]]
    np.testing.assert_allclose(found(band)[:, 0], q, rtol=1e-6)


@pytest.mark.parametrize("hidden", [5, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_a_row_are_one_cluster(kind, hidden):
    model = network(hidden, m=2)
    weight = np.random.default_rng(1).uniform(0.3, 3, (N, 2))
    np.testing.assert_allclose(found(fitted(model, Y, kind)), variances(model, Y, kind), rtol=1e-8)
    weighted = fitted(model, Y, kind, sample_weight=weight)
    np.testing.assert_allclose(found(weighted), variances(model, Y, kind, weight=weight), rtol=1e-8)


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("kind", ["HC0", "HC1"])
def test_clusters_may_come_in_any_order_and_be_words(kind, m):
    model, y = network(m=m), Y[:, :m]
    q = variances(model, y, kind, CLUSTERS)
    band = fitted(model, y, kind, clusters=CLUSTERS)
    np.testing.assert_allclose(found(band), q, rtol=1e-8)
    t = stats.t.ppf(0.95, len(set(CLUSTERS)) - 1)
    half = np.squeeze(t * np.sqrt(q))
    np.testing.assert_allclose(band.predict(NEW, 0.9, kind="mean").upper, band.predict_mean(NEW) + half, rtol=1e-8)

    words = [f"patient {c}" for c in CLUSTERS]
    np.testing.assert_allclose(found(fitted(model, y, kind, clusters=words)), q, rtol=1e-8)
    rows = TensorDataset(*map(torch.from_numpy, (X, y, CLUSTERS)))
    loader = DataLoader(rows, batch_size=7, shuffle=True)
    streamed = PredictionIntervals(
        model, damping=DAMPING, robust=kind, batch=lambda b: (b[0], b[1], {"clusters": b[2]})
    )
    np.testing.assert_allclose(found(streamed.fit(loader, progress=False)), q, rtol=1e-8)


def test_sums_over_clusters_grow_chunk_by_chunk():
    sums, expected, draw = ClusterSums(3, None), {}, np.random.default_rng(2)
    for _ in range(20):
        labels, rows = draw.integers(-40, 40, 13), draw.standard_normal((13, 3))
        sums.add(labels, rows)
        for label, row in zip(labels, rows, strict=True):
            expected[label] = expected.get(label, 0) + row
    assert len(sums) == len(expected) > 40
    np.testing.assert_allclose(sums.sums.T @ sums.sums, sum(np.outer(s, s) for s in expected.values()), rtol=1e-12)
    with pytest.raises(MemoryError, match="80 clusters of 3 numbers each take"):
        ClusterSums(3, 1000.0).add(np.arange(80), np.zeros((80, 3)))


def test_per_output_is_a_sandwich_for_each():
    model = network(m=2)
    band = PredictionIntervals(model, damping=DAMPING, robust="HC3", per_output=True).fit(X, Y, progress=False)
    for o in (0, 1):
        alone = PredictionIntervals(model, damping=DAMPING, robust="HC3", outputs=o).fit(X, Y, progress=False)
        np.testing.assert_allclose(band.predict(NEW).upper[:, o], alone.predict(NEW).upper, rtol=1e-9)


class Shared(nn.Module):
    """Two outputs of the same weights."""

    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(torch.from_numpy(w))

    def forward(self, x):
        return (x @ self.w)[:, None].expand(-1, 2)


def test_a_quiet_output_beside_a_loud_one_has_the_variance_that_it_has():
    draw, x0 = np.random.default_rng(3), np.array([[1.0, -1.0, 2.0]])
    X = draw.standard_normal((60, 3))
    at, plain, robust = [], [], []
    for _ in range(150):
        y = (X @ [1.0, 2.0, 3.0])[:, None] + draw.standard_normal((60, 2)) * [0.1, 1.0]
        model = Shared(np.linalg.lstsq(X, y.mean(axis=1), rcond=None)[0])
        at.append(x0 @ model.w.detach().numpy())
        for kind, into in ((None, plain), ("HC1", robust)):
            band = PredictionIntervals(model, damping=0.0, robust=kind, noise="none").fit(X, y, progress=False)
            into.append(band.noise_std_[0] ** 2 * band.variance(x0)[0, 0])
    true = np.var(at)
    assert np.mean(plain) / true < 0.15
    assert np.mean(robust) / true == pytest.approx(1, abs=0.25)  # of a variance over 150 draws: 0.12


# --- what stays as it was


@pytest.mark.parametrize("tune", [False, True])
def test_a_calibration_is_the_same(tune):
    model, y, x_cal = network(), Y[:, 0], np.random.default_rng(5).standard_normal((60, 3))
    y_cal = np.sin(x_cal.sum(axis=1))
    plain, robust = fitted(model, y, None), fitted(model, y, "HC3")
    for band in (plain, robust):
        band.calibrate(x_cal, y_cal, tune=tune)
    np.testing.assert_allclose(robust.predict(NEW).upper, plain.predict(NEW).upper, rtol=1e-7)
    np.testing.assert_allclose(robust.leverage(NEW), plain.leverage(NEW), rtol=1e-7)
    assert robust.effective_parameters_ == pytest.approx(plain.effective_parameters_)
    assert robust.calibration_.score_before != plain.calibration_.score_before


@pytest.mark.parametrize("hidden", [5, 40])
def test_a_file_holds_it_bit_for_bit(tmp_path, hidden):
    model = network(hidden, m=2)
    before = copy.deepcopy(model.state_dict())
    band = fitted(model, Y, "HC1", clusters=CLUSTERS)
    assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())
    band.save(tmp_path / "robust.band")
    loaded = PredictionIntervals.load(tmp_path / "robust.band", model)
    assert (loaded.predict(NEW, kind="mean").upper == band.predict(NEW, kind="mean").upper).all()
    assert (loaded.variance(NEW) == band.variance(NEW)).all()
    assert "robust HC1 over 9 clusters" in loaded.summary()
    with pytest.raises(ValueError, match="partial_fit does not go with robust='HC1'"):
        loaded.partial_fit(X, Y)


def test_a_checkpoint_resumes_also_from_the_second_pass(tmp_path):
    model, path = network(), tmp_path / "fit.checkpoint"

    class Ended(Exception):  # noqa: N818
        pass

    class Loader(DataLoader):
        passes = 0

        def __iter__(self):
            self.passes += 1
            for i, rows in enumerate(super().__iter__()):
                if self.passes == 2 and i == 3:
                    raise Ended
                yield rows

    loader = Loader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y[:, 0])), batch_size=8)
    band = PredictionIntervals(model, damping=DAMPING, robust="HC3")
    with pytest.raises(Ended):
        band.fit(loader, checkpoint=path, checkpoint_every=0, progress=False)
    assert path.exists()
    band.fit(loader, checkpoint=path, checkpoint_every=0, progress=False)
    assert not path.exists()
    np.testing.assert_allclose(found(band), found(fitted(model, Y[:, 0], "HC3")), rtol=1e-9)


# --- what is refused


@pytest.mark.parametrize(
    ("options", "clusters", "message"),
    [
        ({"robust": None}, CLUSTERS, 'give PredictionIntervals.*robust="HC1"'),
        ({"robust": "HC2"}, CLUSTERS, "HC2 is not defined for clusters"),
        ({"robust": "HC1"}, CLUSTERS[:-1], r"clusters must have one label per row: shape \(49,\), 50 rows"),
        ({"robust": "HC1"}, np.zeros(N, dtype=int), "all rows are in one cluster"),
        ({"robust": "HC1"}, [None, *"ab" * 24, "c"], "clusters have no label in row 0"),
        ({"robust": "HC1", "damping": None}, None, "needs λ: give the optimiser's weight_decay"),
    ],
)
def test_bad_clusters_and_options_are_refused(options, clusters, message):
    band = PredictionIntervals(network(), **{"damping": DAMPING, **options})
    with pytest.raises(ValueError, match=message):
        band.fit(X, Y[:, 0], clusters=clusters, progress=False)
    assert "not fitted" in repr(band)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="robust must be 'HC0', 'HC1', 'HC2' or 'HC3', got 'HC4'"):
        PredictionIntervals(network(), damping=1.0, robust="HC4")
    with pytest.raises(ValueError, match="not for quantiles"):
        PredictionIntervals(network(m=3), damping=1.0, robust="HC1", quantiles=(0.1, 0.5, 0.9))
    with pytest.raises(TypeError, match="clusters must be whole numbers or words, got float64"):
        fitted(network(), Y[:, 0], "HC1", clusters=np.linspace(0, 1, N))
    with pytest.raises(TypeError, match="clusters= goes with arrays"):
        PredictionIntervals(network(), damping=1.0, robust="HC1").fit([(X, Y[:, 0])], clusters=CLUSTERS)
    with pytest.raises(ValueError, match="clusters are for robust covariances"):
        ClassificationIntervals(network(m=2), damping=1.0).fit(X, Y[:, 0] > 0, clusters=CLUSTERS)


def test_rows_that_come_once_or_in_parts_are_refused():
    band, read = PredictionIntervals(network(), damping=DAMPING, robust="HC1"), []

    def batches():
        read.append(1)
        yield X, Y[:, 0]

    with pytest.raises(ValueError, match="reads the data twice"):
        band.fit(batches())
    assert not read
    with pytest.raises(ValueError, match=r"partial_fit does not go with robust='HC1': .* second pass"):
        band.partial_fit(X, Y[:, 0])
    band.fit(X, Y[:, 0], progress=False)
    with pytest.raises(ValueError, match="merge does not go with"):
        band.merge(fitted(network(), Y[:, 0], "HC1"))


def test_rows_with_and_without_clusters_are_refused():
    batches = [(X[:20], Y[:20, 0], {"clusters": CLUSTERS[:20]}), (X[20:], Y[20:, 0], {})]
    band = PredictionIntervals(network(), damping=DAMPING, robust="HC1", batch=lambda batch: batch)
    for each in (batches, batches[::-1]):
        with pytest.raises(ValueError, match="some rows have clusters and some have none"):
            band.fit(each, n_rows=N, progress=False)


def test_a_row_that_the_network_follows_has_no_hc3():
    x = np.column_stack([X, np.arange(N) == 7])
    model = nn.Linear(4, 1).double()
    with pytest.raises(ValueError, match=r'row 7 has the leverage h = 1.* give robust="HC1"'):
        PredictionIntervals(model, damping=0.0, robust="HC3").fit(x, Y[:, 0], progress=False)
    PredictionIntervals(model, damping=0.0, robust="HC1").fit(x, Y[:, 0], progress=False)


def test_without_degrees_of_freedom_there_is_no_formula():
    with pytest.warns(UserWarning, match="n − p\\* = 0 is not positive"):
        band = PredictionIntervals(nn.Linear(3, 1).double(), damping=0.0, robust="HC1").fit(X[:4], Y[:4, 0])
    with pytest.raises(ValueError, match="no degrees of freedom"):
        band.predict(NEW)
