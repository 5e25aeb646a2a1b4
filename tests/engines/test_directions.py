from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard

import tests.reference as reference
from deltaband import (
    DeltabandWarning,
    Exact,
    FrequentDirections,
    ImportantDirections,
    PredictionIntervals,
    RobustFrequentDirections,
)
from deltaband.engines import Known, importance, magnitude
from deltaband.engines.spectral import PowerLawTail, power_law
from deltaband.network.gradient_batch import GradientBatch
from tests.support.networks import batch, mlp, regression

ENGINES = {
    ImportantDirections: (importance, True),
    RobustFrequentDirections: (magnitude, True),
    FrequentDirections: (magnitude, False),
}
SPREAD = [ImportantDirections, RobustFrequentDirections]  # those that can estimate their tail
SHAPES = [(90, 25), (30, 60)]
NONE_HELD = np.zeros(0)


def paper(engine, rank, **settings):
    """The algorithm as printed."""
    return engine(rank, **settings, **({} if engine is FrequentDirections else {"tail": "none"}))


def sketch(engine, J, damping, chunk=1000, dtype=torch.float64, n_rows=None):
    engine = engine.start(Known(n_rows, damping))
    for i in range(0, len(J), chunk):
        engine.update(batch(J[i : i + chunk], dtype))
    return engine


def naive(engine, J, rank, damping, compress=False):
    score, robust = ENGINES[engine]
    directions = reference.Directions(rank, damping, score, robust, compress)
    for row in J:
        directions.add(row)
    return directions.finish()


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", reference.SPECTRA)
@pytest.mark.parametrize(("n", "p"), SHAPES)
@pytest.mark.parametrize("damping", [10.0, 0.05])
def test_a_sketch_is_the_algorithm_row_by_row_with_full_svds(engine, name, n, p, damping, compress):
    J = reference.matrix(name, n, p)
    d, V, shift = naive(engine, J, 8, damping, compress)
    covariance = sketch(paper(engine, 8, compress=compress), J, damping).finalise(damping)
    np.testing.assert_allclose(np.sort(covariance.squared), np.sort(d**2), rtol=1e-6)
    assert covariance.floor == pytest.approx(shift, rel=1e-8)
    g = reference.probes(J)
    expected = [reference.directions_variance(d, V, shift, damping, row) for row in g]
    np.testing.assert_allclose(covariance.variance(batch(g)), expected, rtol=1e-6, atol=1e-9)
    expected = [reference.directions_leverage(d, V, shift, damping, row) for row in g]
    np.testing.assert_allclose(covariance.leverage(batch(g)), expected, rtol=1e-6)
    p_star = reference.directions_effective_parameters(d, shift, damping)
    assert covariance.effective_parameters == pytest.approx(p_star, rel=1e-6)
    np.testing.assert_allclose(covariance.spectrum().singular_values, np.sort(np.sqrt(d**2 + shift))[::-1], rtol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_float32_rows_give_the_same_sketch_to_single_precision(engine):
    J = reference.matrix("decaying", 200, 50)
    d, V, shift = naive(engine, J, 12, 0.5)
    covariance = sketch(paper(engine, 12), J, 0.5, dtype=torch.float32).finalise(0.5)
    g = reference.probes(J)
    expected = [reference.directions_variance(d, V, shift, 0.5, row) for row in g]
    np.testing.assert_allclose(covariance.variance(batch(g, torch.float32)), expected, rtol=1e-3, atol=1e-5)
    assert covariance.effective_parameters == pytest.approx(
        reference.directions_effective_parameters(d, shift, 0.5), rel=1e-4
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("relative", [1e-4, 1e-6, 1e-8])
def test_float32_rows_keep_leverage_and_variance_at_small_damping(engine, relative):
    J = reference.matrix("decaying", 300, 40).astype(np.float32).astype(np.float64)
    damping = relative * np.linalg.norm(J, 2) ** 2
    g = reference.probes(J).astype(np.float32).astype(np.float64)
    covariance = sketch(engine(150), J, damping, dtype=torch.float32, n_rows=40)  # nothing is left out
    with pytest.warns(DeltabandWarning, match="leaves nothing out"):
        covariance = covariance.finalise(damping)
    expected = [reference.leverage(J, damping, row) for row in g]
    np.testing.assert_allclose(covariance.leverage(batch(g, torch.float32)), expected, rtol=2e-2)
    expected = [reference.variance(J, damping, row) for row in g]
    np.testing.assert_allclose(covariance.variance(batch(g, torch.float32)), expected, rtol=2e-2, atol=1e-6 / damping)


def test_the_buffer_holds_up_to_twice_the_rank_less_one_and_compress_brings_it_below_the_rank():
    J = reference.matrix("flat", 100, 60)
    letter = sketch(ImportantDirections(10), J, 1.0)
    held = letter.filled
    assert 10 <= held <= 19
    assert len(letter.finalise(1.0).squared) == held
    assert len(sketch(ImportantDirections(10, compress=True), J, 1.0).finalise(1.0).squared) <= 10


def test_exact_ties_agree_with_the_reference_in_everything_that_does_not_depend_on_the_choice():
    J = np.eye(12)[np.arange(48) % 12]  # every singular value occurs twelve times
    d, _, shift = naive(RobustFrequentDirections, J, 5, 1.0)
    covariance = sketch(RobustFrequentDirections(5), J, 1.0).finalise(1.0)
    assert covariance.accumulated["shift"] == pytest.approx(shift)
    np.testing.assert_allclose(np.sort(covariance.squared), np.sort(d**2), atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["decaying", "deficient"])
@pytest.mark.parametrize(("n", "p", "rank"), [(15, 40, 20), (60, 12, 13), (60, 12, 40)])
def test_a_rank_beyond_the_matrix_is_exact_and_warns(engine, name, n, p, rank):
    J = reference.matrix(name, n, p)
    g = batch(reference.probes(J))
    with pytest.warns(DeltabandWarning, match=f"rank={rank} is larger"):
        covariance = sketch(engine(rank), J, 0.1, n_rows=n).finalise(0.1)
    exact = sketch(Exact(), J, 0.1).finalise(0.1)
    np.testing.assert_allclose(covariance.variance(g), exact.variance(g), rtol=1e-5, atol=1e-9)
    assert covariance.effective_parameters == pytest.approx(exact.effective_parameters, rel=1e-6)
    assert covariance.missed_parameters == pytest.approx(0, abs=1e-4)
    assert covariance.error_bound == 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("damping", [0.1, None])
@pytest.mark.parametrize(("n", "p"), [(19, 50), (19, 12)])
def test_fewer_rows_than_fill_the_buffer_are_exact_and_go_on_as_if_there_had_been_no_end(engine, damping, n, p):
    if damping is None and engine is ImportantDirections:
        pytest.skip("needs λ")
    J = reference.matrix("decaying", n + 30, p)
    rows = sketch(engine(10), J[:n], damping)
    covariance = rows.finish(damping)
    assert covariance.is_exact
    g, at = reference.probes(J), covariance.at(0.1)
    q, h, p_star = reference.answers(J[:n, None], 0.1, g[:, None])
    np.testing.assert_allclose(at.variance(batch(g)), q[:, 0], rtol=1e-6, atol=1e-10)
    np.testing.assert_allclose(at.leverage(batch(g)), h[:, 0], rtol=1e-6)
    assert at.effective_parameters == pytest.approx(p_star, rel=1e-8)
    again = engine(10).resume(covariance, n, p)
    again.update(batch(J[n:]))
    other = sketch(engine(10), J, damping)
    assert (again.n_rows, again.shift, again.energy) == pytest.approx((other.n_rows, other.shift, other.energy))
    e, f = (each.finalise(damping).eigenvalues for each in (again, other))
    np.testing.assert_allclose(e, f, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_large_rank_does_not_reserve_memory_that_it_cannot_use(engine):
    started = sketch(engine(10**6), reference.matrix("flat", 5, 7), 1.0, n_rows=5)
    assert started.buffer is None
    started.update(batch(reference.matrix("flat", 7, 7)))  # more than were announced
    assert len(started.buffer) == 2 * (5 + 1)


@pytest.mark.parametrize("name", reference.SPECTRA)
@pytest.mark.parametrize(("n", "p"), [(200, 40), (60, 80)])
@pytest.mark.parametrize("compress", [False, True])
def test_frequent_directions_certifies_its_error(name, n, p, compress):
    J = reference.matrix(name, n, p)
    covariance = sketch(FrequentDirections(10, compress=compress), J, 0.1).finalise(0.1)
    V = covariance.directions.numpy()
    difference = np.linalg.eigvalsh(J.T @ J - (V.T * covariance.squared) @ V)
    slack = 1e-10 * np.linalg.norm(J) ** 2
    assert difference.min() >= -slack
    assert difference.max() <= covariance.error_bound + slack
    d = np.linalg.svd(J, compute_uv=False)
    for j in range(10):  # the a-priori bound of the literature: ‖J − J_j‖²_F / (k − j)
        assert covariance.error_bound <= np.sum(d[j:] ** 2) / (10 - j) + slack


@pytest.mark.parametrize("engine", [ImportantDirections, RobustFrequentDirections])
@pytest.mark.parametrize("name", reference.SPECTRA)
def test_the_other_sketches_certify_theirs(engine, name):
    J = reference.matrix(name, 200, 40)
    covariance = sketch(engine(10), J, 0.1).finalise(0.1)
    V = covariance.directions.numpy()
    approximation = (V.T * covariance.squared) @ V + covariance.floor * np.eye(40)
    assert np.linalg.norm(J.T @ J - approximation, 2) <= covariance.error_bound + 1e-9


@pytest.mark.parametrize("engine", ENGINES)
def test_merged_sketches_keep_their_certificate(engine):
    J = reference.matrix("decaying", 160, 40)
    one, two = sketch(engine(10), J[:70], 0.1), sketch(engine(10), J[70:], 0.1)
    one.merge(two)
    covariance = one.finalise(0.1)
    V = covariance.directions.numpy()
    approximation = (V.T * covariance.squared) @ V + covariance.floor * np.eye(40)
    assert np.linalg.norm(J.T @ J - approximation, 2) <= covariance.error_bound + 1e-9


@pytest.mark.parametrize("engine", ENGINES)
def test_merging_without_a_shrink_equals_one_pass(engine):
    J = reference.matrix("decaying", 15, 40)
    one, two = sketch(engine(10), J[:7], 0.1), sketch(engine(10), J[7:], 0.1)
    one.merge(two)
    whole = sketch(engine(10), J, 0.1).finalise(0.1)
    np.testing.assert_allclose(one.finalise(0.1).eigenvalues, whole.eigenvalues, rtol=1e-9)


def test_important_directions_of_different_damping_do_not_merge():
    one = sketch(ImportantDirections(5), np.eye(3), 1.0)
    with pytest.raises(ValueError, match="different λ"):
        one.merge(sketch(ImportantDirections(5), np.eye(3), 2.0))


def test_important_directions_wants_its_damping_first_and_keeps_to_it():
    with pytest.raises(ValueError, match="before the first row"):
        ImportantDirections(5).start().update(batch(np.eye(3)))
    with pytest.raises(ValueError, match="was made with λ"):
        sketch(ImportantDirections(2), np.eye(3), 1.0).finalise(2.0)


def test_a_score_of_ones_own_replaces_the_papers():
    J = reference.matrix("decaying", 100, 40)

    def smallest(d, damping):
        return -d

    mine = sketch(ImportantDirections(6, score=smallest), J, 1.0).finalise(1.0)
    directions = reference.Directions(6, 1.0, smallest)
    for row in J:
        directions.add(row)
    d, _, _ = directions.finish()
    np.testing.assert_allclose(np.sort(mine.squared), np.sort(d**2), rtol=1e-6)
    as_rfd = sketch(ImportantDirections(6, score=magnitude), J, 1.0).finalise(1.0)
    rfd = sketch(RobustFrequentDirections(6), J, 1.0).finalise(1.0)
    np.testing.assert_array_equal(as_rfd.squared, rfd.squared)


def test_a_score_may_work_in_place():
    def in_place(d, damping):
        d /= d.max()
        return d

    J = reference.matrix("decaying", 100, 40)
    mine = sketch(ImportantDirections(6, score=in_place), J, 1.0).finalise(1.0)
    np.testing.assert_array_equal(mine.squared, sketch(RobustFrequentDirections(6), J, 1.0).finalise(1.0).squared)


@pytest.mark.parametrize(
    "score",
    [lambda d, damping: d[:-1], lambda d, damping: d * np.nan, lambda d, damping: d * 1j, lambda d, damping: ["a"] * 4],
)
def test_a_score_that_is_no_score_is_refused(score):
    with pytest.raises(ValueError, match="one finite number for each"):
        sketch(ImportantDirections(2, score=score), reference.matrix("flat", 20, 10), 1.0)


@pytest.mark.parametrize("rank", [0, -3, 2.5, True, "many", None, np.array([1, 2])])
def test_a_rank_that_is_no_rank_is_refused(rank):
    with pytest.raises(ValueError, match="rank must be"):
        ImportantDirections(rank)


def test_an_automatic_rank_grows_while_the_spectrum_has_not_decayed():
    flat = sketch(RobustFrequentDirections(), reference.matrix("flat", 400, 200), 1.0)
    assert flat.k > 100
    J = reference.matrix("decaying", 400, 200)
    low = J @ np.linalg.svd(J)[2][:20].T @ np.linalg.svd(J)[2][:20]  # 20 directions and nothing else
    assert sketch(RobustFrequentDirections(), low, 1.0).k == 32


def test_an_automatic_rank_that_never_shrinks_is_exact():
    J = reference.matrix("decaying", 300, 60)
    covariance = sketch(ImportantDirections(), J, 0.1).finalise(0.1)
    exact = sketch(Exact(), J, 0.1).finalise(0.1)
    assert covariance.error_bound == 0
    assert covariance.effective_parameters == pytest.approx(exact.effective_parameters, rel=1e-6)


def test_an_automatic_rank_keeps_to_its_memory():
    J = reference.matrix("flat", 300, 100)
    memory = 4 * 40 * 100 * 8 + 4 * 80**2 * 8  # two buffers of 2k rows, four (2k)² matrices
    assert sketch(RobustFrequentDirections(memory=memory), J, 1.0).k == 40


@pytest.mark.parametrize("memory", ["1G", 0, -1, float("inf"), float("nan")])
def test_a_memory_that_is_no_memory_is_refused(memory):
    with pytest.raises(ValueError, match="memory must be"):
        RobustFrequentDirections(memory=memory)


def test_no_damping_is_an_error_where_directions_are_missing():
    with pytest.raises(ValueError, match="damping 0"):
        sketch(FrequentDirections(5), reference.matrix("flat", 40, 20), 0.0).finalise(0.0)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 60),
    p=st.integers(1, 30),
    rank=st.integers(1, 12),
    log_damping=st.floats(-3, 3),
    seed=st.integers(0, 10**6),
    name=st.sampled_from(reference.SPECTRA),
    engine=st.sampled_from([*ENGINES, partial(ImportantDirections, tail="estimate")]),
    compress=st.booleans(),
)
@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
def test_bounds_that_hold_for_every_sketch(n, p, rank, log_damping, seed, name, engine, compress):
    J = reference.matrix(name, n, p, seed)
    damping = 10.0**log_damping
    covariance = sketch(engine(rank, compress=compress), J, damping).finalise(damping)
    exact = sketch(Exact(), J, damping).finalise(damping)
    g = batch(reference.probes(J, seed))
    q, h = covariance.variance(g), covariance.leverage(g)
    assert (q >= 0).all()
    assert (q <= h * (1 + 1e-6)).all()
    held = len(covariance.eigenvalues) if covariance.added_tail is None else min(n, p)
    assert 0 <= covariance.effective_parameters <= held + 1e-9
    missed = covariance.missed_parameters + 1e-6
    assert exact.effective_parameters <= covariance.effective_parameters + missed
    if covariance.added_tail is not None:  # an estimate, which may be off either way
        assert exact.effective_parameters >= covariance.effective_parameters - missed


def test_a_sketch_that_misses_nothing_says_so_and_one_that_misses_much_says_how_much():
    J = reference.matrix("flat", 100, 50)
    enough = sketch(FrequentDirections(50), J[:60, :20], 1.0, n_rows=1000)
    small = sketch(FrequentDirections(5), J, 1.0).finalise(1.0)
    exact = sketch(Exact(), J, 1.0).finalise(1.0)
    missed = exact.effective_parameters - small.effective_parameters
    assert missed > 10
    assert missed <= small.missed_parameters <= 50
    with pytest.warns(DeltabandWarning, match="larger than min"):
        assert enough.finalise(1.0).missed_parameters == pytest.approx(0, abs=1e-6)


# tail="estimate"


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("engine", SPREAD)
@pytest.mark.parametrize("name", reference.SPECTRA)
@pytest.mark.parametrize(("n", "p"), [*SHAPES, (58, 12)])
@pytest.mark.parametrize("damping", [10.0, 0.05])
def test_a_spread_tail_is_the_formula_on_the_diary_of_the_algorithm(engine, name, n, p, damping, compress):
    J = reference.matrix(name, n, p)
    directions = reference.SpreadDirections(8, damping, ENGINES[engine][0], compress)
    for row in J:
        directions.add(row)
    d, V, _ = directions.finish()
    held, tail = directions.eigenvalues(d, min(n, p))
    covariance = sketch(engine(8, tail="estimate", compress=compress), J, damping).finalise(damping)
    np.testing.assert_allclose(covariance.eigenvalues, held, rtol=1e-6)
    g = reference.probes(J)
    rho = np.array([row @ row - sum((V @ row) ** 2) for row in g])
    q, h = reference.left_out(tail, n - len(d), damping) if len(tail) else (0.0, 1 / damping)
    q = (g @ V.T) ** 2 @ (held / (held + damping) ** 2) + rho * q
    h = (g @ V.T) ** 2 @ (1 / (held + damping)) + rho * h
    np.testing.assert_allclose(covariance.variance(batch(g)), q, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(covariance.leverage(batch(g)), h, rtol=1e-6, atol=1e-9)
    p_star = sum(1 - (damping / (e + damping)) ** 2 for e in [*held, *tail])
    assert covariance.effective_parameters == pytest.approx(p_star, rel=1e-6)


@pytest.mark.parametrize("damping", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("count", [5, 15, 16])
def test_the_tail_of_a_row_is_what_a_row_left_out_has(damping, count):
    e = 10.0 ** np.linspace(1, -2, count)
    U = hadamard(16)[:, :count] / 4.0  # so all rows are alike
    J = (U * np.sqrt(e)) @ np.linalg.qr(np.random.default_rng(0).standard_normal((40, count)))[0].T
    for i in range(16):
        rest, g = np.delete(J, i, axis=0), J[i]
        tail = PowerLawTail(e, 16)
        assert g @ g * tail.variance(e, damping) == pytest.approx(reference.variance(rest, damping, g), rel=1e-6)
        assert g @ g * tail.leverage(e, damping) == pytest.approx(reference.leverage(rest, damping, g), rel=1e-6)
    assert tail.parameters(e, damping) == pytest.approx(reference.effective_parameters(J, damping), rel=1e-6)


def test_directions_that_rows_have_to_themselves_add_nothing_to_the_variance_of_a_new_row():
    alone = PowerLawTail(np.full(30, 2.0), 30)
    assert alone.variance(NONE_HELD, 0.5) == pytest.approx(0.0, abs=1e-12)
    assert alone.leverage(NONE_HELD, 0.5) == pytest.approx(1 / 0.5)
    assert PowerLawTail(np.full(30, 2.0), 300).variance(NONE_HELD, 0.5) > 0.1


@settings(max_examples=80, deadline=None)
@given(log_energy=st.floats(-12, 6), count=st.integers(1, 300), log_largest=st.floats(-6, 6), after=st.integers(1, 500))
def test_a_power_law_has_its_energy_falls_and_starts_where_it_should(log_energy, count, log_largest, after):
    energy, largest = 10.0**log_energy, 10.0**log_largest
    e = power_law(energy, count, largest, after)
    assert len(e) == count
    assert e.sum() == pytest.approx(energy, rel=1e-9)
    assert (np.diff(e) <= 0).all()
    assert e[0] <= max(largest, energy / count) * (1 + 1e-9)
    if energy > count * largest * (1 + 1e-9):
        np.testing.assert_allclose(e, energy / count)
    elif energy < 0.999 * count * largest and e[-1] > 1e-300 and count > 1:  # one exponent for all of them
        slopes = np.log(e[1:] / e[0]) / np.log((after + np.arange(2, count + 1)) / (after + 1))
        np.testing.assert_allclose(slopes, slopes[0], rtol=1e-5, atol=1e-6)
        assert e[0] * (1 + 1 / after) ** -slopes[0] == pytest.approx(largest, rel=1e-3)


def test_a_power_law_of_nothing_is_nothing():
    assert len(power_law(1.0, 0, 1.0, 5)) == 0
    np.testing.assert_array_equal(power_law(0.0, 3, 1.0, 5), 0)
    np.testing.assert_array_equal(power_law(1.0, 3, 0.0, 5), 0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_the_energy_is_exact_for_any_chunks_and_after_a_merge(engine, dtype, chunk):
    J = reference.matrix("decaying", 100, 40).astype(np.float32).astype(np.float64)
    whole = sketch(engine(6), J, 0.1, chunk, dtype)
    assert whole.energy == pytest.approx(np.sum(J**2), rel=1e-13)
    one, two = sketch(engine(6), J[:33], 0.1, chunk, dtype), sketch(engine(6), J[33:], 0.1, chunk, dtype)
    one.merge(two)
    assert one.energy == pytest.approx(np.sum(J**2), rel=1e-13)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("engine", SPREAD)
@pytest.mark.parametrize("name", reference.SPECTRA)
@pytest.mark.parametrize(("n", "p"), SHAPES)
def test_held_eigenvalues_and_tail_add_up_to_the_energy(engine, name, n, p, compress, merged):
    J = reference.matrix(name, n, p)
    started = sketch(engine(6, tail="estimate", compress=compress), J[: n // 3 if merged else n], 0.1)
    if merged:
        started.merge(sketch(engine(6, tail="estimate"), J[n // 3 :], 0.1))
    covariance = started.finalise(0.1)
    assert covariance.added_tail is not None
    total = covariance.eigenvalues.sum() + covariance.added_tail.eigenvalues.sum()
    assert total == pytest.approx(np.sum(J**2), rel=1e-9)


def test_merged_sketches_have_let_go_what_both_have():
    J = reference.matrix("decaying", 40, 40)
    one, two = (sketch(ImportantDirections(10, tail="estimate"), rows, 0.01) for rows in (0.1 * J[:20], J[20:]))
    let_go = [(sketch.above, sketch.n_above, sketch.delta2) for sketch in (one, two)]
    assert let_go[1][0] > let_go[0][0] > 0
    assert let_go[1][1] > let_go[0][1] > 0
    one.merge(two)  # without a shrink
    (above, n_above, delta2), (more, n_more, delta2_more) = let_go
    assert one.above == above + more
    assert one.n_above == max(n_above, n_more)
    assert one.delta2 == max(delta2, delta2_more)


def width_error(engine, J, g, damping):
    """The mean of |width/exact − 1|, and the error of p*."""

    def asked(engine):
        covariance = sketch(engine, J, damping).finalise(damping)
        freedom = len(J) - covariance.effective_parameters
        return np.sqrt((1 + covariance.variance(batch(g))) / freedom), covariance.effective_parameters

    (width, p_star), (exact, exact_p_star) = asked(engine), asked(Exact())
    return np.abs(width / exact - 1).mean(), abs(p_star - exact_p_star)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("rank", [20, 30])
@pytest.mark.parametrize(("n", "p"), [(400, 150), (150, 400)])
@pytest.mark.parametrize("damping", [1.0, 10.0])
def test_a_spread_tail_brings_widths_and_p_star_nearer_to_exact(n, p, rank, damping, compress):
    rows = reference.matrix("decaying", n + 50, p, seed=3)
    J, g = rows[:n], rows[n:]  # none of J, but of its kind
    width, p_star = width_error(RobustFrequentDirections(rank, compress=compress), J, g, damping)
    plain, plain_p_star = width_error(RobustFrequentDirections(rank, compress=compress, tail="none"), J, g, damping)
    assert width < 0.6 * plain
    assert p_star < 0.7 * plain_p_star


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("hidden", [12, 100])  # n > p, n < p
def test_a_spread_tail_brings_the_widths_of_a_network_nearer_to_exact(hidden, compress):
    X, _ = regression(300, 6)
    _, rows = reference.jacobian(mlp(6, hidden), X)
    width, _ = width_error(RobustFrequentDirections(15, compress=compress), rows[:200], rows[200:], 1.0)
    plain, _ = width_error(RobustFrequentDirections(15, compress=compress, tail="none"), rows[:200], rows[200:], 1.0)
    assert width < 0.5 * plain


@pytest.mark.parametrize("engine", SPREAD)
@pytest.mark.parametrize(("n", "p", "rank"), [(15, 40, 15), (15, 40, 20), (60, 12, 13)])
@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
def test_where_nothing_is_left_out_there_is_no_tail(engine, n, p, rank):
    J = reference.matrix("decaying", n, p)
    g = batch(reference.probes(J))
    covariance = sketch(engine(rank, tail="estimate"), J, 0.1, n_rows=n).finalise(0.1)
    exact = sketch(Exact(), J, 0.1).finalise(0.1)
    assert covariance.added_tail is None
    assert covariance.error_bound == 0
    np.testing.assert_allclose(covariance.variance(g), exact.variance(g), rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(covariance.leverage(g), exact.leverage(g), rtol=1e-5)
    assert covariance.effective_parameters == pytest.approx(exact.effective_parameters, rel=1e-6)


@pytest.mark.parametrize("engine", SPREAD)
@pytest.mark.parametrize("name", reference.SPECTRA)
def test_the_certificate_holds_wherever_the_tail_lies(engine, name):
    J = reference.matrix(name, 200, 40)
    covariance = sketch(engine(10, tail="estimate"), J, 0.1).finalise(0.1)
    V = covariance.directions.numpy()
    others = np.linalg.svd(V, full_matrices=True)[2][len(V) :]
    held = (V.T * covariance.eigenvalues) @ V
    for seed in range(5):
        Q = np.linalg.qr(np.random.default_rng(seed).standard_normal((len(others), len(others))))[0]
        W = (Q @ others)[: len(covariance.added_tail.eigenvalues)]
        approximation = held + (W.T * covariance.added_tail.eigenvalues) @ W
        assert np.linalg.norm(J.T @ J - approximation, 2) <= covariance.error_bound + 1e-9


def test_large_directions_that_the_score_lets_go_are_not_spread_over_the_small_ones():
    rng = np.random.default_rng(0)
    d = np.concatenate([np.full(5, 300.0), 10.0 ** np.linspace(0.5, -2, 95)])
    U, V = (np.linalg.qr(rng.standard_normal((size, 100)))[0] for size in (400, 150))
    J = (U * d) @ V.T
    covariance = sketch(ImportantDirections(20, tail="estimate", compress=True), J, 1.0).finalise(1.0)
    assert covariance.accumulated["energy"] > 1000 * covariance.eigenvalues.sum()  # it has let them go
    assert (covariance.added_tail.eigenvalues > 1e4).sum() == 5
    exact = sketch(Exact(), J, 1.0).finalise(1.0).effective_parameters
    none = sketch(ImportantDirections(20, compress=True), J, 1.0).finalise(1.0).effective_parameters
    assert none < exact - 8
    assert covariance.effective_parameters == pytest.approx(exact, abs=3)


@pytest.mark.parametrize("engine", [RobustFrequentDirections(6), ImportantDirections(6, tail="estimate")], ids=repr)
@pytest.mark.parametrize("hidden", [8, 40])  # n > p, n < p
@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
def test_a_band_with_a_spread_tail_can_be_calibrated(engine, hidden):
    X, y = regression(400)
    band = PredictionIntervals(mlp(hidden=hidden), damping=1.0, engine=engine).fit(X[:100], y[:100])
    band.calibrate(X[100:300], y[100:300])
    predicted = band.predict(X[300:], level=0.9)
    inside = (predicted.lower <= y[300:]) & (y[300:] <= predicted.upper)
    assert 0.75 <= inside.double().mean() <= 1.0
    assert predicted.width.std() > 0


def test_a_tail_that_makes_p_star_too_large_is_owned_up_to():
    J = reference.matrix("deficient", 100, 200)  # 50 directions, and nothing after them
    covariance = sketch(RobustFrequentDirections(5), J, 1e-3).finalise(1e-3)
    exact = sketch(Exact(), J, 1e-3).finalise(1e-3).effective_parameters
    assert covariance.effective_parameters > exact + 40
    assert covariance.missed_parameters >= covariance.effective_parameters - exact


def test_no_tail_is_the_default_of_the_papers_sketch_and_a_spread_one_of_robust_frequent_directions():
    J = reference.matrix("decaying", 90, 25)
    for engine, default, other in (
        (ImportantDirections, "none", "estimate"),
        (RobustFrequentDirections, "estimate", "none"),
    ):
        assert engine(8).tail == default
        assert repr(engine(8)) == repr(engine(8, tail=default)) == f"{engine.__name__}(rank=8)"
        assert repr(engine(8, tail=other)) == f"{engine.__name__}(rank=8, tail={other!r})"
        assert "tail" not in sketch(engine(8), J, 0.1).finalise(0.1).describe()
        assert f"tail={other!r}" in sketch(engine(8, tail=other), J, 0.1).finalise(0.1).describe()


@pytest.mark.parametrize("tail", ["even", None, True, 1.0, ["estimate"], np.array(["none", "estimate"])])
@pytest.mark.parametrize("engine", SPREAD)
def test_a_tail_that_is_no_tail_is_refused(engine, tail):
    with pytest.raises(ValueError, match="tail must be 'none' or 'estimate'"):
        engine(5, tail=tail)


def test_sketches_of_different_tail_do_not_merge():
    one = sketch(RobustFrequentDirections(5), np.eye(3), 1.0)
    with pytest.raises(ValueError, match="different tail"):
        one.merge(sketch(RobustFrequentDirections(5, tail="none"), np.eye(3), 1.0))


def test_a_spread_tail_needs_damping_where_rows_cannot_determine_all_directions():
    wide, long = reference.matrix("flat", 20, 40), reference.matrix("flat", 80, 20)
    with pytest.raises(ValueError, match="damping 0"):
        sketch(RobustFrequentDirections(5), wide, 0.0).finalise(0.0)
    covariance = sketch(RobustFrequentDirections(5), long, 0.0).finalise(0.0)
    assert np.isfinite(covariance.variance(batch(long))).all()
    assert covariance.effective_parameters == pytest.approx(20)


def test_a_sketch_that_holds_nothing_still_has_its_tail():
    J = reference.matrix("flat", 30, 10)
    covariance = sketch(RobustFrequentDirections(1), J, 1.0).finalise(1.0)
    assert len(covariance.eigenvalues) == 0
    assert covariance.added_tail.eigenvalues.sum() == pytest.approx(np.sum(J**2))
    assert (covariance.variance(batch(J)) > 0).all()


@pytest.mark.parametrize("tail", ["none", "estimate"])
def test_answers_about_many_rows_never_form_all_of_them(tail, monkeypatch):
    X, y = regression(200, 4)
    band = PredictionIntervals(mlp(4), damping=1.0, engine=RobustFrequentDirections(5, tail=tail)).fit(X, y)
    expected = band.variance(X), band.leverage(X)
    monkeypatch.setattr(GradientBatch, "rows", lambda self: pytest.fail("all rows at once"))
    monkeypatch.setattr("deltaband.network.gradient_batch.CHUNK_ROWS_AT_LEAST", 7)
    monkeypatch.setattr("deltaband.network.gradient_batch.CHUNK_BYTES", 1)
    for ours, before in zip((band.variance(X), band.leverage(X)), expected, strict=True):
        torch.testing.assert_close(ours, before, rtol=1e-4, atol=1e-6)
