import math
import resource
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

import tests.reference as reference
from deltaband import DeltabandWarning, Exact, PredictionIntervals
from deltaband.engines import Known, Problem
from deltaband.engines import projection as engine_module
from deltaband.engines.projection import RandomProjection
from deltaband.network.gradient_batch import GradientBatch, StoredBlock
from deltaband.network.layers import projection
from deltaband.network.layers.factors import DenseRows, EmbeddingRows, OuterProducts
from deltaband.network.layers.projection import Projection, Weight
from deltaband.network.network import Network
from tests.support.networks import Sequence, batch, mlp, probed, regression

SHAPES = [(90, 60, 24), (15, 60, 24), (40, 60, 10), (40, 60, 3), (20, 30, 1)]  # n, p, dim


def sketch(engine, J, chunk=1000, dtype=torch.float64, n_rows=None):
    engine = engine.start(Known(n_rows))
    for i in range(0, len(J), chunk):
        engine.update(batch(J[i : i + chunk], dtype))
    return engine


def projected(S, g):
    return g.projected(S).rows().numpy()


def exact(J, damping):
    return sketch(Exact(), J).finalise(damping)


@pytest.mark.parametrize("name", reference.SPECTRA)
@pytest.mark.parametrize(("n", "p", "dim"), SHAPES)
@pytest.mark.parametrize("damping", [10.0, 0.05])
def test_the_covariance_is_that_of_a_dense_projection_and_explicit_inverses(name, n, p, dim, damping):
    J = reference.matrix(name, n, p)
    g = reference.probes(J)
    S = reference.projection(dim, p, seed=3)
    covariance = sketch(RandomProjection(dim, seed=3), J).finalise(damping)
    h = [reference.projected_leverage(J @ S.T, damping, S @ row) for row in g]
    np.testing.assert_allclose(covariance.leverage(batch(g)), h, rtol=1e-6)
    q = [reference.projected_variance(J @ S.T, damping, S @ row) for row in g]
    assert (np.abs(covariance.variance(batch(g)) - q) <= 1e-6 * np.array(q) + 1e-7 * np.array(h)).all()
    p_star = reference.projected_effective_parameters(J @ S.T, damping, min(n, p))
    assert covariance.effective_parameters == pytest.approx(p_star, abs=1e-5)
    assert covariance.damping == damping
    d = np.linalg.svd(J @ S.T, compute_uv=False)
    d = d[d > 1e-5]
    np.testing.assert_allclose(covariance.spectrum().singular_values[: len(d)], d, rtol=1e-5)


@pytest.mark.parametrize("largest", [1.0, 1e3, 3e5, 1e25])
@pytest.mark.parametrize("scale", [1e-25, 1.0])
def test_products_in_float32_are_as_good_as_those_in_float64_or_taken_again(monkeypatch, largest, scale):
    J = scale * reference.matrix("decaying", 90, 60)
    J[0] *= largest
    g = np.concatenate([scale * reference.probes(J / scale), J[:1]]).astype(np.float32)
    monkeypatch.setattr(engine_module, "DOUBLED_NUMBERS", 0)  # products of few numbers would be in float64
    S, damping = reference.projection(24, 60, seed=3), 1e-3 * scale**2
    covariance = sketch(RandomProjection(24, seed=3), J).finalise(damping)
    rows = batch(g, torch.float32)
    one, many = covariance.variance(rows), covariance.variances(rows, damping * np.array([1.0, 30.0]))
    projected_g = g.astype(float) @ S.T
    truth = covariance.variance(batch(g.astype(float)))
    # what float32 rounds off Sg itself, as off the gradients, is no more than this
    noise = 2**-22 * np.linalg.norm(projected_g, axis=1) * np.sqrt(covariance._equivalent().y.max())
    for q in (one, many[:, 0]):
        assert (np.abs(np.sqrt(q) - np.sqrt(truth)) <= 0.5 * engine_module.ROUNDED_TO * np.sqrt(truth) + noise).all()
    monkeypatch.setattr(engine_module, "ROUNDED_TO", math.inf)
    unchecked = covariance.variance(rows)
    assert (unchecked != one).any() == (
        largest == 3e5
    )  # there it could show; 1e25 leaves one eigenvalue that is not zero


@pytest.mark.parametrize(("n", "p", "dim"), SHAPES)
def test_one_covariance_answers_for_every_damping(n, p, dim):
    J = reference.matrix("decaying", n, p)
    g = batch(reference.probes(J))
    engine = RandomProjection(dim)
    dampings = np.array([1e-9, 1e-2, 0.3, 10.0])
    for covariance in (sketch(engine, J).finalise(0.3).eigendecomposed(), sketch(engine, J).finalise(None)):
        many = covariance.variances(g, dampings)
        for column, damping in zip(many.T, dampings, strict=True):
            one, direct = covariance.at(damping), sketch(engine, J).finalise(damping)
            np.testing.assert_allclose(column, direct.variance(g), rtol=1e-12)
            np.testing.assert_array_equal(one.leverage(g), direct.leverage(g))
            assert one.effective_parameters == direct.effective_parameters
            assert one.missed_parameters == direct.missed_parameters
        assert math.isnan(covariance.error_bound)
        assert covariance.describe() == f"random projection of {p} to {dim} dimensions"
    assert covariance.damping is None
    with pytest.raises(ValueError, match="not chosen yet"):
        covariance.variance(g)


@pytest.mark.parametrize("name", reference.SPECTRA)
@pytest.mark.parametrize(("n", "dim"), [(90, 24), (15, 24)])
def test_the_variance_is_what_the_leverage_says_at_other_dampings(name, n, dim):
    J = reference.matrix(name, n, 60)
    g = batch(reference.probes(J))
    covariance = sketch(RandomProjection(dim), J).finalise(30.0)
    step = 1e-3
    more, less = (covariance.at(30.0 * math.exp(sign * step)).leverage(g) for sign in (1, -1))
    q = covariance.leverage(g) + (more - less) / (2 * step)  # h + λ ∂h/∂λ
    np.testing.assert_allclose(covariance.variance(g), np.maximum(q, 0.0), rtol=1e-5, atol=1e-6 * more.max())


CASES = [  # n, p, dim and λ over the largest eigenvalue, such that tr H < dim
    *(("decaying", *shape) for shape in [(60, 300, 120, 1e-2), (60, 2000, 80, 1e-3), (400, 150, 80, 1e-3)]),
    *(("step", *shape) for shape in [(60, 300, 120, 0.1), (60, 2000, 80, 0.1), (400, 150, 80, 0.1)]),
    *(("flat", *shape) for shape in [(60, 300, 120, 0.5), (60, 2000, 120, 0.5), (400, 150, 80, 3.0)]),
    *(("deficient", *shape) for shape in [(60, 300, 120, 0.1), (60, 2000, 80, 0.1), (400, 150, 80, 0.1)]),
]


@pytest.mark.parametrize(("name", "n", "p", "dim", "relative"), CASES)
def test_on_average_over_seeds_next_to_nothing_of_the_bias_of_a_projection_is_left(name, n, p, dim, relative):
    all_rows = reference.matrix(name, n + 30, p)
    J, new = all_rows[:n], all_rows[n:]
    groups = batch(J[:30]), batch(new)
    damping = relative * np.linalg.norm(J, 2) ** 2

    def answers(covariance, S=lambda g: g):  # p*, then the mean q and the mean h of rows of J and of new ones
        q, h = ([ask(S(g)).mean() for g in groups] for ask in (covariance.variance, covariance.leverage))
        return np.array([covariance.effective_parameters, *q, *h])

    truth = answers(exact(J, damping))
    plain, corrected, missed = [], [], []
    for seed in range(12):
        S = Projection(dim, p, seed)
        plain.append(answers(exact(projected(S, batch(J)), damping), lambda g, S=S: g.projected(S)))
        covariance = sketch(RandomProjection(dim, seed=seed), J, n_rows=n).finalise(damping)
        corrected.append(answers(covariance))
        missed.append(covariance.missed_parameters)
    size = truth[[0, 3, 4, 3, 4]]  # q may be next to nothing, h is not
    before, after = (np.abs(np.mean(found, axis=0) - truth) / size for found in (plain, corrected))
    assert after.max() < 0.02
    assert after[0] < before[0] / 8
    assert after[1:].mean() < before[1:].mean() / 6
    errors = np.abs(np.array(corrected)[:, 0] - truth[0])
    assert np.sqrt(np.mean(errors**2)) < np.mean(missed) < max(1.0, 0.1 * truth[0])


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
@pytest.mark.parametrize(("n", "dim", "damping"), [(150, 128, 10.0), (150, 128, 0.3), (400, 300, 1.0)])
def test_of_a_network_about_a_hundredth_is_left(activation, n, dim, damping):
    torch.manual_seed(0)
    hidden = [nn.Linear(10, 40), activation(), nn.Linear(40, 40), activation()]
    model = nn.Sequential(*hidden, nn.Linear(40, 1)).double()
    X = torch.randn(n + 40, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    g = probed(Network(model), X).gradients(X)[1]
    J, groups = g.between(0, n), (g.between(0, 30), g.between(n, n + 40))

    def fitted(engine, J):
        accumulator = engine.start(Known(n))
        accumulator.update(J)
        return accumulator.finalise(damping)

    def answers(covariance, S=None):  # p*, then the mean h of rows of J and of new ones
        h = (covariance.leverage(rows if S is None else rows.projected(S)).mean() for rows in groups)
        return np.array([covariance.effective_parameters, *h])

    truth, plain, corrected, missed = answers(fitted(Exact(), J)), [], [], []
    for seed in range(12):
        S = Projection(dim, g.n_parameters, seed)
        plain.append(answers(fitted(Exact(), J.projected(S)), S))
        covariance = fitted(RandomProjection(dim, seed=seed), J)
        corrected.append(answers(covariance))
        missed.append(covariance.missed_parameters)
    before, after = (np.abs(np.mean(found, axis=0) / truth - 1) for found in (plain, corrected))
    assert after.max() < 0.03
    assert after.mean() < before.mean() / 3
    errors = np.abs(np.array(corrected)[:, 0] - truth[0])
    assert np.sqrt(np.mean(errors**2)) < np.mean(missed) < max(3.0, 0.1 * truth[0])


@pytest.mark.parametrize("name", reference.SPECTRA)
def test_below_the_smallest_damping_that_can_be_told_the_answers_are_those_for_it(name):
    J = reference.matrix(name, 90, 60)
    g = batch(reference.probes(J))
    covariance = sketch(RandomProjection(10), J).finalise(None)
    least = 1 / np.mean(1 / covariance.eigenvalues)  # where μ is 0
    at, below = covariance.at(least * (1 + 1e-8)), [covariance.at(least * factor) for factor in (0.99, 1e-3, 1e-200)]
    assert at.effective_parameters >= 10  # tr H is
    for one in below:
        np.testing.assert_allclose(one.variance(g), at.variance(g), rtol=1e-4, atol=1e-6 * at.leverage(g).max())
        np.testing.assert_allclose(one.leverage(g), at.leverage(g), rtol=1e-6)
        assert one.effective_parameters == pytest.approx(at.effective_parameters, rel=1e-5)
        assert one.missed_parameters == 60 - one.effective_parameters


@pytest.mark.parametrize("damping", [1e-200, 1e-12, 1.0])
def test_one_row_and_rows_of_zeros_are_no_trouble(damping):
    row = np.arange(1.0, 31.0)[None]
    for J, p_star in ((row, exact(row, damping).effective_parameters), (np.zeros((40, 30)), 0.0)):
        covariance = sketch(RandomProjection(12), J).finalise(damping)
        assert covariance.effective_parameters == pytest.approx(p_star, abs=1e-7)
        np.testing.assert_allclose(covariance.variance(batch(J)), exact(J, damping).variance(batch(J)), rtol=0.5)
        assert np.isfinite(covariance.leverage(batch(row))).all()
        assert 0 <= covariance.missed_parameters <= 1e-3 + 40 * (p_star > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 7, 59, 60, 1000])
def test_how_the_columns_are_chunked_does_not_matter(monkeypatch, width, dtype):
    g = batch(reference.matrix("decaying", 20, 60), dtype)
    S = reference.projection(14, 60, seed=0)
    monkeypatch.setattr(projection, "COLUMNS_AT_ONCE", width)
    rows = GradientBatch.concatenate([g, g]).projected(Projection(14, 60, 0)).rows()
    expected = g.rows().double().numpy() @ S.T
    assert rows.dtype == dtype
    rounding = 1e-12 if dtype == torch.float64 else 2e-6
    np.testing.assert_allclose(rows, np.concatenate([expected, expected]), rtol=rounding, atol=rounding)


def test_there_are_never_many_projected_rows_of_a_batch(monkeypatch):
    J = reference.matrix("decaying", 40, 60)
    whole = sketch(RandomProjection(50), J).finalise(0.1)
    monkeypatch.setattr(engine_module, "CHUNK_BYTES", 8 * 50 * 7)
    monkeypatch.setattr(engine_module, "CHUNK_ROWS_AT_LEAST", 3)
    some = sketch(RandomProjection(50), J)
    assert [len(kept) for kept in some.kept] == [7, 7, 7, 7, 7, 5]
    some = some.finalise(0.1)
    for n in (40, 7, 1, 0):
        np.testing.assert_allclose(some.variance(batch(J[:n])), whole.variance(batch(J[:n])), rtol=1e-9)
        np.testing.assert_allclose(some.leverage(batch(J[:n])), whole.leverage(batch(J[:n])), rtol=1e-9)


def entries(weight, start, stop):  # (stop − start, count) twice
    return (each.numpy().T for each in weight.entries(start, stop, torch.empty(0, dtype=torch.float64)))


@settings(max_examples=40, deadline=None)
@given(
    dim=st.integers(1, 5000),
    seed=st.integers(0, 2**100),
    shape=st.sampled_from([(400, 1), (1, 400), (20, 20), (3, 200), (20_000, 1), (17_000, 2)]),
    start=st.integers(0, 300),
    width=st.integers(1, 100),
)
def test_a_column_is_the_same_whichever_others_are_asked_for(dim, seed, shape, start, width):
    weight = Weight(Projection(dim, 10**6, seed), 7, *shape)
    at, values = entries(weight, start, start + width)
    all_at, all_values = entries(weight, 0, start + width)
    np.testing.assert_array_equal(at, all_at[start:])
    np.testing.assert_array_equal(values, all_values[start:])
    assert at.shape == values.shape
    assert (at >= 0).all()
    assert (at < dim).all()
    np.testing.assert_allclose((values**2).sum(axis=1), 1)
    if 1 in shape and dim >= 4:
        assert (at >= dim * np.arange(4) // 4).all()  # one in each quarter, so all are distinct
        assert (at < dim * np.arange(1, 5) // 4).all()


def test_a_seed_is_the_same_projection_on_every_machine():
    at, values = entries(Weight(Projection(4000, 10**8, 0), 0, 100, 1), 0, 3)
    assert at.tolist() == [[34, 1818, 2804, 3151], [797, 1883, 2159, 3152], [548, 1207, 2287, 3616]]
    assert (2 * values).tolist() == [[-1, -1, 1, -1], [-1, -1, -1, 1], [-1, 1, 1, -1]]
    at, values = entries(Weight(Projection(4000, 10**8, 2**70 + 1), 12_345, 3000, 2000), 5_999_999, 6_000_000)
    assert at.tolist() == [[2212, 268, 3901, 1957]]
    assert (2 * values).tolist() == [[-1, 1, 1, -1]]


@pytest.mark.parametrize("shape", [(40_000, 1), (1, 40_000), (200, 200)])
def test_places_and_signs_are_uniform(shape):
    at, values = entries(Weight(Projection(40, 10**6, 5), 0, *shape), 0, 40_000)
    counts = np.bincount(at.ravel(), minlength=40)  # 4000 each, with a standard deviation of 60 where all are drawn
    spread = 1 if 1 in shape else 10  # of a matrix there are 2·400 draws
    assert np.abs(counts - 4000).max() < 5 * 60 * spread
    signed = np.bincount(at.ravel(), weights=2 * values.ravel(), minlength=40)
    assert np.abs(signed).max() < 5 * math.sqrt(4000) * spread


def test_projected_inner_products_are_unbiased_and_vary_as_the_docstring_says():
    rng = np.random.default_rng(0)
    p, dim, n_seeds = 30, 12, 3000
    g = rng.standard_normal((4, p))
    g[1] += 2 * g[0]  # nearly parallel
    g[3] = 0.0
    g[3, 4:7] = 1.0  # and one with few entries, where columns that fall together show
    found = np.empty((n_seeds, 4, 4))
    for seed in range(n_seeds):
        rows = projected(Projection(dim, p, seed), batch(g))
        found[seed] = rows @ rows.T
    true = g @ g.T
    together = g**2 @ (g**2).T
    variance = (np.outer(true.diagonal(), true.diagonal()) + true**2 - 2 * together) / dim
    assert (np.abs(found.mean(axis=0) - true) < 5 * np.sqrt(variance / n_seeds)).all()
    np.testing.assert_allclose(found.var(axis=0), variance, rtol=0.25)


def test_projected_outer_products_are_unbiased_and_vary_as_the_docstring_says():
    generator = torch.Generator().manual_seed(0)
    o, a, dim, n_seeds = 12, 15, 32, 3000
    delta, x = (torch.randn(4, 1, size, generator=generator, dtype=torch.float64) for size in (o, a))
    delta[1], x[1] = delta[1] + 2 * delta[0], x[1] + 2 * x[0]  # nearly parallel
    x[2] = x[0]  # one factor in common
    g = GradientBatch((StoredBlock((OuterProducts(x, delta, bias=False),)),))
    found = np.empty((n_seeds, 4, 4))
    for seed in range(n_seeds):
        rows = projected(Projection(dim, o * a, seed), g)
        found[seed] = rows @ rows.T
    D, X = ((each[:, 0] @ each[:, 0].T).numpy() for each in (delta, x))
    norms_d, norms_x = (np.outer(gram.diagonal(), gram.diagonal()) for gram in (D, X))
    variance = (norms_d * norms_x + norms_d * X**2 + D**2 * norms_x + 3 * (D * X) ** 2) / dim
    assert (np.abs(found.mean(axis=0) - D * X) < 5 * np.sqrt(variance / n_seeds)).all()
    assert (found.var(axis=0) < 1.1 * variance).all()  # places that fall together within a factor make it a little less
    assert (found.var(axis=0) > 0.6 * variance).all()


def test_the_error_of_the_variance_falls_with_the_dimension():
    J = reference.matrix("decaying", 60, 1000)
    damping = 1e-2 * np.linalg.norm(J, 2) ** 2
    q = exact(J, damping).variance(batch(J))

    def error(dim):
        engines = [sketch(RandomProjection(dim, seed=seed), J).finalise(damping) for seed in range(4)]
        return np.mean([np.abs(engine.variance(batch(J)) / q - 1).mean() for engine in engines])

    errors = [error(dim) for dim in (40, 160, 640)]
    assert errors[1] < errors[0] / 1.7
    assert errors[2] < errors[1] / 1.7
    assert errors[2] < 0.05


def test_different_projections_do_not_merge():
    one = sketch(RandomProjection(10), np.eye(20))
    for other in (RandomProjection(11), RandomProjection(10, seed=1)):
        with pytest.raises(ValueError, match=r"RandomProjection\(dim=10\) and RandomProjection\(dim=1"):
            one.merge(sketch(other, np.eye(20)))
    with pytest.raises(ValueError, match="20 and 30"):
        one.merge(sketch(RandomProjection(10), np.eye(30)))
    np.testing.assert_array_equal(
        one.finalise(1.0).variance(batch(np.eye(20))),
        sketch(RandomProjection(10), np.eye(20)).finalise(1.0).variance(batch(np.eye(20))),
    )


@pytest.mark.parametrize(("n", "form"), [(60, "primal"), (10, "dual")])
@pytest.mark.parametrize("dim", [25, 26, 4000])
def test_a_dimension_that_is_not_below_the_number_of_parameters_is_exact(n, form, dim):
    J = reference.matrix("decaying", n, 25)
    g = batch(reference.probes(J))
    covariance = sketch(RandomProjection(dim, seed=4), J).finalise(0.1)
    assert f"exact, {form} form" in covariance.describe()
    np.testing.assert_array_equal(covariance.variance(g), exact(J, 0.1).variance(g))
    np.testing.assert_array_equal(covariance.leverage(g), exact(J, 0.1).leverage(g))
    assert covariance.effective_parameters == exact(J, 0.1).effective_parameters
    assert (covariance.error_bound, covariance.missed_parameters) == (0.0, 0.0)


def test_it_asks_for_no_rows_unless_it_is_exact_and_exact_does():
    assert not RandomProjection(10).cost(Problem(500, 11, 8, 88, 8)).wants_rows
    assert not RandomProjection(10).cost(Problem(5, 10, 8, 80, 8)).wants_rows
    assert RandomProjection(10).cost(Problem(10, 10, 8, 80, 8)).wants_rows


def shapes_of(model, network):
    return [dict(model.named_parameters())[name].shape for name in network.layers.order]


FORMS = {"by flops": projection.TRANSFORM, "from factors": -math.inf, "formed": math.inf}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("width", "dim"), [(1, 14), (7, 15), (60, 1), (1000, 2), (10_000, 64)])
def test_a_layer_is_projected_without_its_rows(monkeypatch, width, dim, form, dtype):
    x = torch.randint(50, (9, 2), generator=torch.Generator().manual_seed(1))
    model = Sequence().to(dtype)
    network = probed(Network(model), x)
    g = network.gradients(x)[1]
    assert {type(part) for part in g.blocks[0].parts()} == {EmbeddingRows, OuterProducts, DenseRows}
    expected = g.rows().double().numpy() @ reference.projection(dim, shapes_of(model, network), seed=0).T
    monkeypatch.setattr(projection, "COLUMNS_AT_ONCE", width)
    monkeypatch.setattr(projection, "NUMBERS_AT_ONCE", 20 * width)
    monkeypatch.setattr(projection, "TRANSFORMED_AT_ONCE", 20 * width)
    monkeypatch.setattr(projection, "TRANSFORM", FORMS[form])
    monkeypatch.setattr(OuterProducts, "rows", None)
    monkeypatch.setattr(GradientBatch, "rows", None)
    rounding = 1e-12 if dtype == torch.float64 else 1e-5
    found = g.projected(Projection(dim, g.n_parameters, 0)).blocks[0].parts()[0].values
    np.testing.assert_allclose(found, expected, rtol=rounding, atol=rounding)


class Everything(nn.Module):
    """Layers of every kind: convolutions, one in groups, a norm, attention, a recurrent layer, one used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.grouped = nn.Conv1d(4, 6, 3, padding=1), nn.Conv1d(6, 6, 3, groups=2)
        self.norm, self.attention = nn.LayerNorm(6), nn.MultiheadAttention(6, 2, batch_first=True)
        self.recurrent, self.twice = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 5)
        self.table, self.last = nn.Parameter(torch.randn(3, 2, 5)), nn.Linear(5, 1)

    def forward(self, x):  # (b, 4, t)
        x = self.norm(self.grouped(self.convolution(x).tanh()).mT)
        x = self.recurrent(x + self.attention(x, x, x)[0])[0][:, -1]
        x = self.twice(self.twice(x).tanh()).tanh()
        return self.last(x * self.table.sum(dim=(0, 1)).sigmoid())[:, 0]


def test_layers_of_every_kind_have_the_projection_that_the_shapes_of_their_weights_say():
    x = torch.randn(6, 4, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = Everything().double()
    network = probed(Network(model), x)
    assert len(network.layers.batch_dims) == 7
    J = reference.jacobians(model, [(row[None],) for row in x])[:, 0]  # in the order of the model
    sizes = np.cumsum([0, *(w.numel() for w in model.parameters())])
    columns = {name: J[:, i:j] for (name, _), i, j in zip(model.named_parameters(), sizes, sizes[1:], strict=False)}
    rows = np.concatenate([columns[name] for name in network.layers.order], axis=1)
    S = reference.projection(37, shapes_of(model, network), seed=2)
    found = projected(Projection(37, network.n_parameters, 2), network.gradients(x)[1])
    np.testing.assert_allclose(found, rows @ S.T, rtol=1e-9, atol=1e-9 * np.abs(rows @ S.T).max())


@pytest.mark.parametrize("lengths", [(2, 30), (30, 2)])
def test_rows_of_other_lengths_have_the_same_projection_whether_their_gradients_are_formed_or_not(lengths):
    model = Sequence().double()
    generator = torch.Generator().manual_seed(1)
    short, long = (torch.randint(50, (9, length), generator=generator) for length in lengths)
    network = probed(Network(model), short)
    S = reference.projection(40, shapes_of(model, network), seed=0)
    kinds = set()
    for x in (short, long):
        g = network.gradients(x)[1]
        kinds.add(tuple(type(part) for part in g.blocks[0].parts()))
        np.testing.assert_allclose(projected(Projection(40, g.n_parameters, 0), g), g.rows().numpy() @ S.T, atol=1e-12)
    assert len(kinds) == 2


@pytest.mark.parametrize(("t", "by_factors"), [(1, True), (4, True), (1000, False)])
def test_many_positions_are_put_together_before_they_are_projected(monkeypatch, t, by_factors):
    used = []
    transformed, add_formed = Weight.transformed, Weight.add_formed
    monkeypatch.setattr(Weight, "transformed", lambda self, *args: used.append(True) or transformed(self, *args))
    monkeypatch.setattr(Weight, "add_formed", lambda self, *args: used.append(False) or add_formed(self, *args))
    part = OuterProducts(torch.randn(3, t, 200), torch.randn(3, t, 300), bias=False)
    rows = Projection(1024, 60_000, 0)((part,))
    assert used == [by_factors]
    monkeypatch.setattr(projection, "TRANSFORM", math.inf if by_factors else -math.inf)
    other = Projection(1024, 60_000, 0)((part,))
    assert used == [by_factors, *[not by_factors] * (len(used) - 1)]
    assert len(used) > 1
    np.testing.assert_allclose(rows, other, atol=1e-6 * float(other.abs().max()) * math.sqrt(t))


def test_what_a_large_layer_needs_grows_with_its_sides_and_not_with_its_weights():
    b, a, o, dim = 3, 10_000, 10_000, 512  # 100 million weights
    part = OuterProducts(torch.ones(b, 1, a), torch.ones(b, 1, o), bias=True)
    GradientBatch((StoredBlock((part,)),)).projected(Projection(dim, part.n_parameters, 1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    GradientBatch((StoredBlock((part,)),)).projected(Projection(dim, part.n_parameters, 0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2**20  # of NumPy; the weights would take 400 MB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB, of torch


def test_of_the_rows_of_a_large_layer_there_are_never_more_than_some_columns():
    b, a, o = 200, 1000, 1000
    generator = torch.Generator().manual_seed(0)
    g = GradientBatch((StoredBlock((OuterProducts(*torch.randn(2, b, 1, a, generator=generator), bias=True),)),))
    most = max(columns.nbytes for columns in g.columns(10_000))
    assert most == 8 * b * 10_000  # all rows would be 1.6 GB
    formed = [g.blocks[0].parts()[0].columns(start, start + 10_000) for start in (0, 4_500, o * a - 9_000)]
    for columns in formed:
        assert columns.shape == (b, 10_000)
        assert columns.untyped_storage().nbytes() <= 4 * b * (10_000 + 2 * a)


def test_a_known_length_folds_from_the_first_row_on_so_that_memory_does_not_grow_with_the_rows():
    engine = RandomProjection(10).start(Known(50))
    for row in reference.matrix("flat", 50, 30):
        engine.update(batch(row[None]))
        assert engine.kept == []
        assert engine.gram.shape == (10, 10)


def test_no_more_than_some_columns_of_the_projection_exist_at_a_time():
    p = 600_000
    g = GradientBatch.of(torch.ones(2, p))
    S = Projection(100, p, 0)
    batch(np.ones((1, 1))).projected(S)  # SciPy is loaded
    tracemalloc.start()
    g.projected(S)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 2**20  # all of S would be 29 MB, the rows in float64 10 MB


@pytest.mark.parametrize(("n", "p", "dim"), SHAPES)
def test_no_damping_is_an_error_since_directions_are_missing(n, p, dim):
    with pytest.raises(ValueError, match=f"{dim} of {p} directions"):
        sketch(RandomProjection(dim), reference.matrix("flat", n, p)).finalise(0.0)


def test_no_damping_works_where_nothing_is_projected():
    J = reference.matrix("step", 60, 10)
    covariance = sketch(RandomProjection(10), J).finalise(0.0)
    np.testing.assert_array_equal(covariance.variance(batch(J)), exact(J, 0.0).variance(batch(J)))


@pytest.mark.parametrize("dim", [0, -3, 2.5, True, "auto", None, 2**31, np.array([1, 2])])
def test_a_dimension_that_is_no_dimension_is_refused(dim):
    with pytest.raises(ValueError, match="dim must be"):
        RandomProjection(dim)


@pytest.mark.parametrize("seed", [-1, 0.5, False, "x", None])
def test_a_seed_that_is_no_seed_is_refused(seed):
    with pytest.raises(ValueError, match="seed must be"):
        RandomProjection(10, seed=seed)


def test_numbers_of_numpy_are_numbers():
    engine = RandomProjection(np.int64(10), seed=np.uint8(3))
    assert (engine.dim, engine.seed) == (10, 3)
    assert (repr(engine), repr(RandomProjection())) == (
        "RandomProjection(dim=10, seed=3)",
        "RandomProjection(dim=4000)",
    )


def test_the_settings_of_the_user_are_never_touched_and_an_engine_is_empty_in_the_end():
    mine = RandomProjection(4, seed=2)
    J = reference.matrix("flat", 8, 12)
    engine = sketch(mine, J)
    first = engine.finalise(1.0).variance(batch(J))
    for empty in (mine.start(), engine):
        with pytest.raises(ValueError, match="no rows"):
            empty.finalise(1.0)
    engine.update(batch(J))
    again = engine.finalise(1.0)
    np.testing.assert_array_equal(again.variance(batch(J)), first)
    assert again.missed_parameters == sketch(mine, J).finalise(1.0).missed_parameters


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 40),
    p=st.integers(1, 30),
    dim=st.integers(1, 35),
    log_damping=st.floats(-3, 3),
    seed=st.integers(0, 10**6),
    name=st.sampled_from(reference.SPECTRA),
)
def test_bounds_that_hold_for_every_projection(n, p, dim, log_damping, seed, name):
    J = reference.matrix(name, n, p, seed)
    damping = 10.0**log_damping
    covariance = sketch(RandomProjection(dim, seed=seed), J).finalise(damping)
    g = batch(reference.probes(J, seed))
    q, h = covariance.variance(g), covariance.leverage(g)
    assert (q >= 0).all()
    assert (q <= h * (1 + 1e-6)).all()
    assert -1e-6 <= covariance.effective_parameters <= min(n, p) + 1e-6
    assert 0 <= covariance.missed_parameters <= min(n, p) + 1e-6


@pytest.mark.parametrize("n", [80, 25])  # primal and dual: dim = 30
@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
def test_predict_is_formula_2_of_the_paper_with_projected_gradients(n):
    model, (X, y) = mlp(), regression(n)
    new = regression(6, seed=9)[0]
    band = PredictionIntervals(model, damping=1.0, engine=RandomProjection(30, seed=7)).fit(X, y, progress=False)
    intervals = band.predict(new, level=0.8)
    S = reference.projection(30, [w.shape for w in model.parameters()], seed=7)
    outputs, J = reference.jacobian(model, X)
    predictions, gradients = reference.jacobian(model, new)
    nu = n - reference.projected_effective_parameters(J @ S.T, 1.0, min(n, 41))
    for i in range(6):
        q = reference.projected_variance(J @ S.T, 1.0, S @ gradients[i])
        half = stats.t.ppf(0.9, nu) * np.sqrt(np.sum((y.numpy() - outputs) ** 2) / nu * (1 + q))
        assert intervals.lower[i].item() == pytest.approx(predictions[i] - half, rel=1e-7)
        assert intervals.upper[i].item() == pytest.approx(predictions[i] + half, rel=1e-7)
    assert "random projection of 41 to 30 dimensions" in band.summary()
    assert math.isnan(band.error_bound_)


@pytest.mark.parametrize("damping", [1.0, None])
def test_calibration_works_with_and_without_a_damping(damping):
    model, (X, y) = mlp(hidden=40), regression(200)
    x_cal, y_cal = regression(120, seed=1)
    band = PredictionIntervals(model, damping=damping, engine=RandomProjection(120)).fit(X, y, progress=False)
    intervals = band.calibrate(x_cal, y_cal).predict(X[:20])
    assert torch.isfinite(intervals.lower).all()
    assert (intervals.lower < intervals.upper).all()
    assert "calibrated on         120 rows" in band.summary()
    x_new, y_new = regression(2000, seed=2)
    lower, upper = band.predict(x_new, level=0.9).lower, band.predict(x_new, level=0.9).upper
    assert 0.8 < ((lower <= y_new) & (y_new <= upper)).double().mean() < 0.97


def test_widths_are_nearly_those_of_the_exact_method_on_a_network():
    model, (X, y) = mlp(hidden=200), regression(300)  # p = 1001
    new = regression(100, seed=3)[0]
    truth, near = (
        PredictionIntervals(model, damping=30.0, engine=engine).fit(X, y, progress=False)
        for engine in (Exact(), RandomProjection(600))
    )
    assert truth.effective_parameters_ > 10
    assert near.effective_parameters_ == pytest.approx(truth.effective_parameters_, rel=0.01)
    ratio = near.predict(new).width / truth.predict(new).width
    assert (ratio - 1).abs().max() < 0.02
    assert (ratio - 1).abs().mean() < 0.002


def test_a_dimension_below_the_effective_parameters_is_warned_about_and_one_above_is_near():
    model, (X, y) = mlp(hidden=200), regression(300)
    truth = PredictionIntervals(model, damping=0.3, engine=Exact()).fit(X, y, progress=False)
    assert truth.effective_parameters_ > 35
    with pytest.warns(DeltabandWarning, match="not accurate enough"):
        PredictionIntervals(model, damping=0.3, engine=RandomProjection(10)).fit(X, y, progress=False)
    near = PredictionIntervals(model, damping=0.3, engine=RandomProjection(60)).fit(X, y, progress=False)
    assert near.effective_parameters_ == pytest.approx(truth.effective_parameters_, rel=0.03)
    assert (near.predict(X).width / truth.predict(X).width - 1).abs().mean() < 0.005
