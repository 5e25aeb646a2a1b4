import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.reference as reference
from deltaband import DeltabandWarning, Exact
from deltaband.engines import Known
from deltaband.engines.exact import factorise
from tests.support.networks import batch

SHAPES = [(60, 25), (25, 60), (30, 30)]


def fit(J, damping, chunk=1000, n_rows=None, dtype=torch.float64):
    engine = Exact().start(Known(n_rows))
    for i in range(0, len(J), chunk):
        engine.update(batch(J[i : i + chunk], dtype))
    return engine.finalise(damping)


def spectral(J, damping, g):
    """q and h from the SVD of J, the most accurate dense form there is in float64."""
    _, d, V = np.linalg.svd(J, full_matrices=True)
    d2 = np.zeros(J.shape[1])
    d2[: len(d)] = d**2
    z2 = (g @ V.T) ** 2
    return z2 @ (d2 / (d2 + damping) ** 2), z2 @ (1 / (d2 + damping))


@pytest.mark.parametrize("name", reference.SPECTRA)
@pytest.mark.parametrize(("n", "p"), SHAPES)
@pytest.mark.parametrize("damping", [10.0, 0.3, 1e-2])
def test_variance_leverage_and_effective_parameters_are_those_of_explicit_inverses(name, n, p, damping):
    J = reference.matrix(name, n, p)
    covariance = fit(J, damping)
    g = reference.probes(J)
    np.testing.assert_allclose(
        covariance.variance(batch(g)), [reference.variance(J, damping, row) for row in g], rtol=1e-8, atol=1e-10
    )
    np.testing.assert_allclose(
        covariance.leverage(batch(g)), [reference.leverage(J, damping, row) for row in g], rtol=1e-8
    )
    assert covariance.effective_parameters == pytest.approx(reference.effective_parameters(J, damping), abs=1e-7)


@pytest.mark.parametrize("name", reference.SPECTRA)
@pytest.mark.parametrize(("n", "p"), [*SHAPES, (400, 150), (150, 400)])
@pytest.mark.parametrize("relative", [1e-6, 1e-4, 1e-2, 1.0])
def test_the_promised_accuracy_holds_down_to_a_millionth_of_the_largest_eigenvalue(name, n, p, relative):
    J = reference.matrix(name, n, p)
    damping = relative * np.linalg.norm(J, 2) ** 2
    g = reference.probes(J)
    q, h = spectral(J, damping, g)
    assert (np.abs(fit(J, damping).variance(batch(g)) - q) <= 1e-6 * q + 1e-9 * h).all()


@pytest.mark.parametrize("name", reference.SPECTRA)
@pytest.mark.parametrize(("n", "p"), [(400, 150), (150, 400)])
@pytest.mark.parametrize("relative", [1e-6, 1e-4, 1e-2, 1.0])
def test_float32_gradients_keep_their_promise_too(name, n, p, relative):
    J = reference.matrix(name, n, p).astype(np.float32).astype(np.float64)
    damping = relative * np.linalg.norm(J, 2) ** 2
    g = reference.probes(J).astype(np.float32).astype(np.float64)
    q, h = spectral(J, damping, g)
    covariance = fit(J, damping, dtype=torch.float32)
    assert (np.abs(covariance.variance(batch(g, torch.float32)) - q) <= 1e-3 * q + 1e-6 * h).all()
    np.testing.assert_allclose(covariance.leverage(batch(g, torch.float32)), h, rtol=1e-3)


def test_accumulating_in_float32_would_break_the_promise_already_at_a_thousandth():
    """Why the Gram matrix is always summed up in float64, not only where λ is below 1e-3 of the largest eigenvalue."""
    J = reference.matrix("deficient", 400, 150).astype(np.float32)
    damping = 1e-3 * np.linalg.norm(J, 2) ** 2
    g = reference.probes(J.astype(np.float64))
    q, h = spectral(J.astype(np.float64), damping, g)
    A = (J.T @ J).astype(np.float64) + damping * np.eye(150)
    u = np.linalg.solve(A, g.T).T
    q32 = (g * u).sum(axis=1) - damping * (u * u).sum(axis=1)
    assert (np.abs(q32 - q) > 1e-3 * q + 1e-6 * h).any()


@pytest.mark.parametrize("name", reference.SPECTRA)
def test_primal_and_dual_agree_on_the_same_rows(name):
    J = reference.matrix(name, 20, 30)
    g = batch(reference.probes(J))
    dual, primal = fit(J, 0.2, n_rows=20), fit(J, 0.2, n_rows=1000)
    assert "dual form" in dual.describe()
    assert "primal form" in primal.describe()
    np.testing.assert_allclose(dual.variance(g), primal.variance(g), rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(dual.leverage(g), primal.leverage(g), rtol=1e-9)
    assert dual.effective_parameters == pytest.approx(primal.effective_parameters, abs=1e-9)
    np.testing.assert_allclose(dual.spectrum().singular_values, primal.spectrum().singular_values, rtol=1e-6, atol=1e-6)


def test_rows_of_a_stream_without_a_length_are_kept_until_they_are_as_many_as_the_parameters():
    J = reference.matrix("decaying", 50, 20)
    engine = Exact().start()
    engine.update(batch(J[:19]))
    assert engine.gram is None
    engine.update(batch(J[19:20]))
    assert engine.kept == []
    engine.update(batch(J[20:]))
    np.testing.assert_allclose(engine.finalise(0.1).variance(batch(J)), fit(J, 0.1).variance(batch(J)), rtol=1e-10)


def test_a_known_length_folds_from_the_first_row_on():
    engine = Exact().start(Known(50))
    engine.update(batch(reference.matrix("decaying", 50, 20)[:3]))
    assert engine.kept == []


def test_the_primal_form_holds_one_square_matrix():
    J = reference.matrix("decaying", 90, 40)
    engine = Exact().start(Known(90))
    engine.update(batch(J))
    gram = engine.gram
    covariance = engine.finalise(0.5)
    assert covariance.matrix is gram
    np.testing.assert_allclose(np.triu(gram, 1), np.triu(J.T @ J, 1), atol=1e-10)
    L = np.tril(gram)
    np.testing.assert_allclose(L @ L.T, J.T @ J + 0.5 * np.eye(40), atol=1e-10)


def test_no_damping_works_where_the_rows_determine_the_parameters():
    J = reference.matrix("step", 60, 10)
    covariance = fit(J, 0.0)
    g = reference.probes(J)
    expected = [row @ np.linalg.inv(J.T @ J) @ row for row in g]
    np.testing.assert_allclose(covariance.variance(batch(g)), expected, rtol=1e-8)
    np.testing.assert_allclose(covariance.leverage(batch(g)), expected, rtol=1e-8)
    assert covariance.effective_parameters == 10


@pytest.mark.parametrize(("n", "p"), [(60, 25), (25, 60)])
def test_no_damping_is_an_error_where_they_do_not(n, p):
    with pytest.raises(ValueError, match="damping"):
        fit(reference.matrix("deficient", n, p), 0.0)


@pytest.mark.parametrize("name", reference.SPECTRA)
@pytest.mark.parametrize(("n", "p"), SHAPES)
def test_the_eigenbasis_answers_for_every_damping(name, n, p):
    J = reference.matrix(name, n, p)
    g = batch(reference.probes(J))
    spectral = [fit(J, 0.3).eigendecomposed(), fit(J, None)]
    dampings = np.array([1e-2, 0.3, 10.0])
    for covariance in spectral:
        many = covariance.variances(g, dampings)
        for column, damping in zip(many.T, dampings, strict=True):
            one, direct = covariance.at(damping), fit(J, damping)
            np.testing.assert_allclose(column, direct.variance(g), rtol=1e-7, atol=1e-9)
            np.testing.assert_allclose(one.variance(g), direct.variance(g), rtol=1e-7, atol=1e-9)
            np.testing.assert_allclose(one.leverage(g), direct.leverage(g), rtol=1e-7)
            assert one.effective_parameters == pytest.approx(direct.effective_parameters, abs=1e-7)
    assert spectral[0].damping == 0.3
    assert spectral[1].damping is None
    with pytest.raises(ValueError, match="not chosen yet"):
        spectral[1].variance(g)


def test_rounding_that_shows_is_warned_about():
    rng = np.random.default_rng(0)
    A = rng.normal(size=(500, 9)) * 50
    J = np.c_[A, A.sum(axis=1)]  # collinear
    far = J[:3].copy()
    far[:, 9] += 100
    with pytest.warns(DeltabandWarning, match="rounding shows"):
        fit(J, 500 * 1e-6 / 2).variance(batch(far))
    fit(J, 500 * 1e-2 / 2).variance(batch(far))


def test_a_huge_damping_is_no_overflow():
    assert fit(reference.matrix("flat", 30, 10), 1e200).effective_parameters == pytest.approx(0, abs=1e-6)


def test_one_row_and_one_parameter_are_enough():
    covariance = fit(np.array([[2.0]]), 1.0)
    assert covariance.variance(batch(np.array([[3.0]]))) == pytest.approx([9 * 4 / 25])
    assert covariance.leverage(batch(np.array([[3.0]]))) == pytest.approx([9 / 5])


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40),
    p=st.integers(1, 40),
    log_damping=st.floats(-4, 3),
    seed=st.integers(0, 10**6),
    name=st.sampled_from(reference.SPECTRA),
)
def test_bounds_that_hold_for_every_matrix(n, p, log_damping, seed, name):
    J = reference.matrix(name, n, p, seed)
    damping = 10.0**log_damping
    covariance = fit(J, damping)
    g = reference.probes(J, seed)
    q, h = covariance.variance(batch(g)), covariance.leverage(batch(g))
    squared = (g**2).sum(axis=1)
    assert (q >= 0).all()
    assert (q <= h * (1 + 1e-9)).all()  # JᵀJ ≤ A
    assert (q <= squared / (4 * damping) * (1 + 1e-9)).all()  # d²/(d²+λ)² ≤ 1/(4λ)
    assert (h <= squared / damping * (1 + 1e-9)).all()
    assert -1e-6 <= covariance.effective_parameters <= min(n, p) + 1e-6


def test_the_effective_size_is_that_of_the_inverse():
    J = reference.matrix("decaying", 700, 600)  # larger than one block
    M = np.asfortranarray(np.triu(J.T @ J))
    _, effective_size, _, remainders = factorise(M, 0.3)
    damped_inverse = 0.3 * np.linalg.inv(J.T @ J + 0.3 * np.eye(600))
    assert effective_size == pytest.approx(600 - np.linalg.norm(damped_inverse) ** 2, rel=1e-8)
    np.testing.assert_allclose(remainders, np.diag(damped_inverse), rtol=1e-8)


@pytest.mark.parametrize("damping", [1e-3, 0.3, None])
def test_the_dual_form_knows_the_leverages_of_its_own_rows(damping):
    J = reference.matrix("decaying", 60, 200)
    covariance = fit(J, damping)
    if damping is None:
        damping, covariance = 0.7, covariance.at(0.7)
    expected = np.diag(J @ np.linalg.solve(J.T @ J + damping * np.eye(200), J.T))
    np.testing.assert_allclose(covariance.own_leverages, np.sort(expected), rtol=1e-6, atol=1e-9)
