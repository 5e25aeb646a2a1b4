import numpy as np
import pytest
import reference
import torch
from conftest import batch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaband import DeltabandWarning, Exact, FrequentDirections, ImportantDirections, RobustFrequentDirections
from deltaband.covariance import importance, magnitude

ENGINES = {
    ImportantDirections: (importance, True),
    RobustFrequentDirections: (magnitude, True),
    FrequentDirections: (magnitude, False),
}
SHAPES = [(90, 25), (30, 60)]


def sketch(engine, J, damping, chunk=1000, dtype=torch.float64, n_rows=None):
    engine = engine.start(n_rows=n_rows, damping=damping)
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
    covariance = sketch(engine(8, compress=compress), J, damping).finalise(damping)
    np.testing.assert_allclose(np.sort(covariance._squared), np.sort(d**2), rtol=1e-6)
    assert covariance._shift == pytest.approx(shift, rel=1e-8)
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
    covariance = sketch(engine(12), J, 0.5, dtype=torch.float32).finalise(0.5)
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


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rank", [8, "auto"])
@pytest.mark.parametrize("chunk", [1, 3, 16, 50])
def test_a_block_equals_its_rows_one_at_a_time(engine, rank, chunk):
    J = reference.matrix("decaying", 210, 120)
    whole = sketch(engine(rank), J, 0.3).finalise(0.3)
    parts = sketch(engine(rank), J, 0.3, chunk).finalise(0.3)
    np.testing.assert_allclose(parts._squared, whole._squared, rtol=1e-9)
    assert parts._shift == pytest.approx(whole._shift, rel=1e-12)


def test_the_buffer_holds_up_to_twice_the_rank_less_one_and_compress_brings_it_below_the_rank():
    J = reference.matrix("flat", 100, 60)
    letter = sketch(ImportantDirections(10), J, 1.0)
    held = letter._filled
    assert 10 <= held <= 19
    assert len(letter.finalise(1.0)._squared) == held
    assert len(sketch(ImportantDirections(10, compress=True), J, 1.0).finalise(1.0)._squared) <= 10


def test_exact_ties_agree_with_the_reference_in_everything_that_does_not_depend_on_the_choice():
    J = np.eye(12)[np.arange(48) % 12]  # every singular value occurs twelve times
    d, _, shift = naive(RobustFrequentDirections, J, 5, 1.0)
    covariance = sketch(RobustFrequentDirections(5), J, 1.0).finalise(1.0)
    assert covariance._shift == pytest.approx(shift)
    np.testing.assert_allclose(np.sort(covariance._squared), np.sort(d**2), atol=1e-12)


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
def test_a_large_rank_does_not_reserve_memory_that_it_cannot_use(engine):
    started = sketch(engine(10**6), reference.matrix("flat", 5, 7), 1.0, n_rows=5)
    assert len(started._buffer) == 2 * (5 + 1)


@pytest.mark.parametrize("name", reference.SPECTRA)
@pytest.mark.parametrize(("n", "p"), [(200, 40), (60, 80)])
@pytest.mark.parametrize("compress", [False, True])
def test_frequent_directions_certifies_its_error(name, n, p, compress):
    J = reference.matrix(name, n, p)
    covariance = sketch(FrequentDirections(10, compress=compress), J, 0.1).finalise(0.1)
    V = covariance._V.numpy()
    difference = np.linalg.eigvalsh(J.T @ J - (V.T * covariance._squared) @ V)
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
    V = covariance._V.numpy()
    approximation = (V.T * covariance._squared) @ V + covariance._shift * np.eye(40)
    assert np.linalg.norm(J.T @ J - approximation, 2) <= covariance.error_bound + 1e-9


@pytest.mark.parametrize("engine", ENGINES)
def test_merged_sketches_keep_their_certificate(engine):
    J = reference.matrix("decaying", 160, 40)
    one, two = sketch(engine(10), J[:70], 0.1), sketch(engine(10), J[70:], 0.1)
    one.merge(two)
    covariance = one.finalise(0.1)
    V = covariance._V.numpy()
    approximation = (V.T * covariance._squared) @ V + covariance._shift * np.eye(40)
    assert np.linalg.norm(J.T @ J - approximation, 2) <= covariance.error_bound + 1e-9


@pytest.mark.parametrize("engine", ENGINES)
def test_merging_without_a_shrink_equals_one_pass(engine):
    J = reference.matrix("decaying", 15, 40)
    one, two = sketch(engine(10), J[:7], 0.1), sketch(engine(10), J[7:], 0.1)
    one.merge(two)
    np.testing.assert_allclose(one.finalise(0.1)._squared, sketch(engine(10), J, 0.1).finalise(0.1)._squared, rtol=1e-9)


def test_an_empty_sketch_merges_both_ways():
    J = reference.matrix("decaying", 15, 40)
    full, empty = sketch(ImportantDirections(10), J, 0.1), ImportantDirections(10).start(damping=0.1)
    full.merge(empty)
    empty.merge(full)
    np.testing.assert_allclose(full.finalise(0.1)._squared, empty.finalise(0.1)._squared)


def test_important_directions_of_different_damping_do_not_merge():
    one = sketch(ImportantDirections(5), np.eye(3), 1.0)
    with pytest.raises(ValueError, match="different λ"):
        one.merge(sketch(ImportantDirections(5), np.eye(3), 2.0))


def test_important_directions_wants_its_damping_first_and_keeps_to_it():
    with pytest.raises(ValueError, match="before the first row"):
        ImportantDirections(5).update(batch(np.eye(3)))
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
    np.testing.assert_allclose(np.sort(mine._squared), np.sort(d**2), rtol=1e-6)
    as_rfd = sketch(ImportantDirections(6, score=magnitude), J, 1.0).finalise(1.0)
    rfd = sketch(RobustFrequentDirections(6), J, 1.0).finalise(1.0)
    np.testing.assert_array_equal(as_rfd._squared, rfd._squared)


def test_a_score_may_work_in_place():
    def in_place(d, damping):
        d /= d.max()
        return d

    J = reference.matrix("decaying", 100, 40)
    mine = sketch(ImportantDirections(6, score=in_place), J, 1.0).finalise(1.0)
    np.testing.assert_array_equal(mine._squared, sketch(RobustFrequentDirections(6), J, 1.0).finalise(1.0)._squared)


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
    assert flat._k > 100
    J = reference.matrix("decaying", 400, 200)
    low = J @ np.linalg.svd(J)[2][:20].T @ np.linalg.svd(J)[2][:20]  # 20 directions and nothing else
    assert sketch(RobustFrequentDirections(), low, 1.0)._k == 32


def test_an_automatic_rank_that_never_shrinks_is_exact():
    J = reference.matrix("decaying", 300, 60)
    covariance = sketch(ImportantDirections(), J, 0.1).finalise(0.1)
    exact = sketch(Exact(), J, 0.1).finalise(0.1)
    assert covariance.error_bound == 0
    assert covariance.effective_parameters == pytest.approx(exact.effective_parameters, rel=1e-6)


def test_an_automatic_rank_keeps_to_its_memory():
    J = reference.matrix("flat", 300, 100)
    memory = 4 * 40 * 100 * 8 + 4 * 80**2 * 8  # two buffers of 2k rows, four (2k)² matrices
    assert sketch(RobustFrequentDirections(memory=memory), J, 1.0)._k == 40


@pytest.mark.parametrize("memory", ["1G", 0, -1, float("inf"), float("nan")])
def test_a_memory_that_is_no_memory_is_refused(memory):
    with pytest.raises(ValueError, match="memory must be"):
        RobustFrequentDirections(memory=memory)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sketch_answers_for_every_damping(engine):
    J = reference.matrix("decaying", 90, 25)
    covariance = sketch(engine(8), J, 0.5).finalise(0.5).diagonalised()
    g = batch(reference.probes(J))
    dampings = np.array([0.01, 0.5, 20.0])
    many = covariance.variances(g, dampings)
    for column, damping in zip(many.T, dampings, strict=True):
        np.testing.assert_allclose(column, covariance.at(damping).variance(g), rtol=1e-12)
    np.testing.assert_allclose(many[:, 1], covariance.variance(g), rtol=1e-12)
    assert covariance.at(20.0).effective_parameters < covariance.effective_parameters


def test_the_settings_of_the_user_are_never_touched():
    mine = ImportantDirections(4)
    sketch(mine, np.eye(20), 1.0)
    assert mine._buffer is None


def test_no_damping_is_an_error_where_directions_are_missing():
    with pytest.raises(ValueError, match="damping 0"):
        sketch(FrequentDirections(5), reference.matrix("flat", 40, 20), 0.0).finalise(0.0)


def test_a_sketch_without_rows_says_so():
    with pytest.raises(ValueError, match="no rows"):
        FrequentDirections(3).finalise(1.0)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 60),
    p=st.integers(1, 30),
    rank=st.integers(1, 12),
    log_damping=st.floats(-3, 3),
    seed=st.integers(0, 10**6),
    name=st.sampled_from(reference.SPECTRA),
    engine=st.sampled_from(list(ENGINES)),
)
@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
def test_bounds_that_hold_for_every_sketch(n, p, rank, log_damping, seed, name, engine):
    J = reference.matrix(name, n, p, seed)
    damping = 10.0**log_damping
    covariance = sketch(engine(rank), J, damping).finalise(damping)
    exact = sketch(Exact(), J, damping).finalise(damping)
    g = batch(reference.probes(J, seed))
    q, h = covariance.variance(g), covariance.leverage(g)
    assert (q >= 0).all()
    assert (q <= h * (1 + 1e-6)).all()
    assert 0 <= covariance.effective_parameters <= len(covariance._squared) + 1e-9
    assert exact.effective_parameters <= covariance.effective_parameters + covariance.missed_parameters + 1e-6


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
