import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tests.reference as reference
from deltaband import Exact, PredictionIntervals
from deltaband.data.inputs import Inputs
from deltaband.data.row_record import RowSample
from deltaband.engines import Known, Problem, nystrom
from deltaband.engines.nystrom import Nystrom, ResidualSpectrum, spread
from deltaband.network.network import Network
from tests.support.networks import batch, mlp, regression

SHAPES = [(90, 25), (30, 60), (40, 40)]


def stream(engine, J, chunk=1000, dtype=torch.float64, sample=None):
    """The sample is J itself where none is given: its first rows are the landmarks, the last ones probes."""
    engine = engine.start(Known(sample=batch(J if sample is None else sample, dtype)))
    for i in range(0, len(J), chunk):
        engine.update(batch(J[i : i + chunk], dtype))
    return engine


def exact(J, damping):
    engine = Exact().start()
    engine.update(batch(J))
    return engine.finalise(damping)


def shuffled(name, n, p, seed=0):
    """Rows in random order, as a sample has them."""
    return np.random.default_rng(seed).permutation(reference.matrix(name, n, p, seed))


@pytest.mark.parametrize("chunk", [1000, 7, 1])
@pytest.mark.parametrize("name", reference.SPECTRA)
@pytest.mark.parametrize(("n", "p"), SHAPES)
@pytest.mark.parametrize("damping", [10.0, 0.05])
def test_without_a_tail_it_is_the_delta_method_on_rows_projected_onto_the_landmarks(name, n, p, damping, chunk):
    J = reference.matrix(name, n, p)
    covariance = stream(Nystrom(8, tail="none"), J, chunk).finalise(damping)
    inside = reference.projected(J, J[:8])
    g = reference.probes(J)
    expected = [reference.variance(inside, damping, row) for row in g]
    np.testing.assert_allclose(covariance.variance(batch(g)), expected, rtol=1e-6, atol=1e-9)
    # The part of g outside stays: it is in no row of `inside`, but in h.
    expected = [reference.leverage(inside, damping, row) for row in g]
    np.testing.assert_allclose(covariance.leverage(batch(g)), expected, rtol=1e-6)
    p_star = reference.effective_parameters(inside, damping)
    assert covariance.effective_parameters == pytest.approx(p_star, rel=1e-7)
    singular_values = np.linalg.svd(inside, compute_uv=False)[: len(covariance.eigenvalues)]
    np.testing.assert_allclose(covariance.spectrum().singular_values, singular_values, rtol=1e-6, atol=1e-7)
    assert covariance.tail.energy == pytest.approx(np.sum((J - inside) ** 2), rel=1e-6)


@pytest.mark.parametrize("name", reference.SPECTRA)
@pytest.mark.parametrize(("n", "p"), SHAPES)
@pytest.mark.parametrize("damping", [10.0, 0.05])
def test_the_tail_is_the_naive_one_with_all_its_eigenvalues_written_out(name, n, p, damping):
    J = reference.matrix(name, n, p)
    covariance = stream(Nystrom(8), J, 11).finalise(damping)
    inside = reference.projected(J, J[:8])
    q, h, parameters = reference.tail(J, inside, damping, (J - inside)[8:], n - 8)
    g = reference.probes(J)
    g_inside = reference.projected(g, J[:8])
    rho = np.sum((g - g_inside) ** 2, axis=1)
    expected = [reference.variance(inside, damping, row) for row in g] + rho * q
    np.testing.assert_allclose(covariance.variance(batch(g)), expected, rtol=1e-6, atol=1e-9)
    expected = [reference.leverage(inside, damping, row) for row in g_inside] + rho * h
    np.testing.assert_allclose(covariance.leverage(batch(g)), expected, rtol=1e-6)
    found = reference.effective_parameters(inside, damping)
    at_most = covariance.tail.parameters_at_most(damping)
    assert covariance.effective_parameters == pytest.approx(found + min(parameters, at_most), rel=1e-6)


def test_the_spread_is_the_mean_over_an_interval_and_has_its_limit_at_zero():
    for x in (1e-3, 0.5, 40.0):
        t = x * (np.arange(200_000) + 0.5) / 200_000
        np.testing.assert_allclose(spread(x), (np.mean(1 / (1 + t)), np.mean(t / (1 + t) ** 2)), rtol=1e-8)
    np.testing.assert_allclose(spread(0.0), (1.0, 0.0), atol=1e-9)


def test_no_estimate_makes_an_eigenvalue_of_the_tail_larger_than_their_sum():
    e = np.array([1.0])
    wild, bounded = (ResidualSpectrum(2.0, 1.0, pairs, n_rows=10, rank=5) for pairs in (1e9, 4.0))
    assert wild.variance(e, 0.5) == bounded.variance(e, 0.5)
    assert wild.leverage(e, 0.5) == bounded.leverage(e, 0.5)
    assert wild.parameters(e, 0.5) == bounded.parameters(e, 0.5)


@pytest.mark.parametrize("name", reference.SPECTRA)
@pytest.mark.parametrize(("n", "p"), SHAPES)
@pytest.mark.parametrize("landmarks", ["all", "more"])
@pytest.mark.parametrize("settings", [{}, {"tail": "none"}, {"choose": "leverage"}])
def test_all_rows_as_landmarks_are_exact(name, n, p, landmarks, settings):
    J = reference.matrix(name, n, p)
    covariance = stream(Nystrom(n if landmarks == "all" else 10**6, **settings), J, 13).finalise(0.1)
    truth = exact(J, 0.1)
    g = batch(reference.probes(J))
    np.testing.assert_allclose(covariance.variance(g), truth.variance(g), rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(covariance.leverage(g), truth.leverage(g), rtol=1e-6)
    assert covariance.effective_parameters == pytest.approx(truth.effective_parameters, rel=1e-6)
    assert covariance.error_bound == covariance.missed_parameters == 0


def test_neither_chunks_nor_the_order_of_rows_matter():
    J = shuffled("decaying", 120, 40)
    whole = stream(Nystrom(15), J).finalise(0.3)
    g = batch(reference.probes(J))
    for chunk, rows in ((1, J), (7, J[::-1].copy()), (50, np.random.default_rng(1).permutation(J))):
        other = stream(Nystrom(15), rows, chunk, sample=J).finalise(0.3)
        np.testing.assert_allclose(other.variance(g), whole.variance(g), rtol=1e-9)
        np.testing.assert_allclose(other.leverage(g), whole.leverage(g), rtol=1e-9)
        assert other.effective_parameters == pytest.approx(whole.effective_parameters, rel=1e-10)
        assert other.missed_parameters == pytest.approx(whole.missed_parameters, rel=1e-9)


def test_equal_landmarks_are_no_trouble():
    J = reference.matrix("decaying", 60, 30)
    sample = np.concatenate([J[:6], J[:6], J[3:4], 2 * J[5:6], J[20:]])
    once = stream(Nystrom(6, tail="none"), J, sample=J).finalise(0.2)
    twice = stream(Nystrom(14, tail="none"), J, sample=sample).finalise(0.2)
    g = batch(reference.probes(J))
    assert len(twice.eigenvalues) == 6
    np.testing.assert_allclose(twice.variance(g), once.variance(g), rtol=1e-8, atol=1e-12)
    assert twice.error_bound == pytest.approx(once.error_bound, rel=1e-8)


def test_rows_that_are_zero_are_no_trouble_either():
    J = np.concatenate([np.zeros((5, 20)), reference.matrix("decaying", 40, 20)])
    covariance = stream(Nystrom(5), J).finalise(0.5)
    assert len(covariance.eigenvalues) == 0  # all landmarks are zero, and everything is tail
    assert covariance.missed_parameters > 0
    assert stream(Nystrom(5), np.zeros((8, 3))).finalise(1.0).effective_parameters == 0


@pytest.mark.parametrize(("n", "p"), [(400, 120), (200, 600)])
@pytest.mark.parametrize("relative", [1e-1, 1e-2, 1e-3])
def test_on_decaying_spectra_the_tail_makes_every_answer_better(n, p, relative):
    A = shuffled("decaying", n + 60, p)
    J, new = A[:n], batch(A[n:])
    damping = relative * np.linalg.norm(J, 2) ** 2
    truth = exact(J, damping)

    def errors(tail):
        covariance = stream(Nystrom(20, tail=tail), J).finalise(damping)
        return [
            np.abs(covariance.variance(new) / truth.variance(new) - 1).mean(),
            np.abs(covariance.leverage(new) / truth.leverage(new) - 1).mean(),
            abs(covariance.effective_parameters / truth.effective_parameters - 1),
        ]

    without, corrected = np.array(errors("none")), np.array(errors("estimate"))
    assert (corrected < 0.6 * without).all()
    assert corrected[2] < 0.15


def wide_network(landmarks, **settings):
    """Widths of a ReLU network's intervals relative to the exact ones, and the two p*."""
    torch.manual_seed(0)
    X, y = regression(400, 5)
    model = nn.Sequential(nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1)).double()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        (model(X)[:, 0] - y).square().mean().backward()
        optimiser.step()
    new = torch.randn(100, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    bands = [
        PredictionIntervals(model, weight_decay=1e-2, engine=engine).fit(X, y, progress=False)
        for engine in (Exact(), Nystrom(landmarks, **settings))
    ]
    widths = [(band.predict(new).upper - band.predict(new).lower).numpy() for band in bands]
    return np.abs(widths[1] / widths[0] - 1).mean(), [band.effective_parameters_ for band in bands]


@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
def test_on_a_network_the_tail_makes_the_widths_better():
    corrected, (truth, estimated) = wide_network(150)
    without, (_, found) = wide_network(150, tail="none")
    assert corrected < 0.3 * without
    assert abs(estimated - truth) < 0.2 * abs(found - truth)


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(1, 50),
    p=st.integers(1, 40),
    landmarks=st.integers(1, 15),
    log_damping=st.floats(-3, 3),
    seed=st.integers(0, 10**6),
    name=st.sampled_from(reference.SPECTRA),
    tail=st.sampled_from(["estimate", "none"]),
    choose=st.sampled_from(["random", "leverage"]),
)
def test_bounds_that_hold_for_every_matrix(n, p, landmarks, log_damping, seed, name, tail, choose):
    J = shuffled(name, n, p, seed)
    damping = 10.0**log_damping
    covariance = stream(Nystrom(landmarks, tail=tail, choose=choose, seed=seed), J).finalise(damping)
    truth = exact(J, damping)
    g = batch(reference.probes(J, seed))
    q, h = covariance.variance(g), covariance.leverage(g)
    loose = 1 + 1e-6
    # what is certified
    p_star = truth.effective_parameters
    assert p_star <= covariance.effective_parameters + covariance.missed_parameters + 1e-5
    if tail == "none":
        assert covariance.effective_parameters <= p_star + 1e-5
    V = covariance.basis.landmarks.rows().numpy().T @ covariance.basis.T
    difference = J.T @ J - (V * covariance.eigenvalues) @ V.T
    assert np.linalg.norm(difference, 2) <= covariance.error_bound + 1e-4 * np.linalg.norm(J) ** 2
    assert (q >= 0).all()
    assert (q <= h * loose).all()
    assert -1e-9 <= covariance.effective_parameters <= min(n, p) + 1e-6


def test_the_bounds_come_down_to_the_truth_as_the_tail_does():
    J = shuffled("decaying", 200, 60)
    truth = exact(J, 1.0)
    gaps = []
    for landmarks in (10, 25, 45):
        covariance = stream(Nystrom(landmarks), J).finalise(1.0)
        missed = covariance.effective_parameters + covariance.missed_parameters - truth.effective_parameters
        gaps.append([missed, covariance.error_bound])
    assert (np.diff(gaps, axis=0) < 0).all()
    assert gaps[-1][0] < 0.1


def test_a_flat_spectrum_is_within_its_certificate_and_far_from_nothing():
    """The bound of p* is attained where all of the tail's eigenvalues are equal and nothing couples it to the span."""
    J = 3.0 * np.eye(30)
    covariance = stream(Nystrom(10, tail="none"), J).finalise(2.0)
    missing = exact(J, 2.0).effective_parameters - covariance.effective_parameters
    assert missing == pytest.approx(covariance.missed_parameters, rel=1e-9)
    assert missing == pytest.approx(20 * (1 - (2 / 11) ** 2))


@pytest.mark.parametrize("tail", ["estimate", "none"])
def test_one_fit_answers_for_every_damping(tail):
    J = shuffled("decaying", 90, 40)
    g = batch(reference.probes(J))
    free = stream(Nystrom(12, tail=tail), J).finalise(None)
    assert free.damping is None
    with pytest.raises(ValueError, match="not chosen yet"):
        free.variance(g)
    dampings = np.array([0.01, 0.5, 20.0])
    many = free.eigendecomposed().variances(g, dampings)
    for column, damping in zip(many.T, dampings, strict=True):
        one = stream(Nystrom(12, tail=tail), J).finalise(damping)
        np.testing.assert_allclose(column, one.variance(g), rtol=1e-10)
        np.testing.assert_allclose(free.at(damping).leverage(g), one.leverage(g), rtol=1e-10)
        assert free.at(damping).effective_parameters == pytest.approx(one.effective_parameters, rel=1e-10)
        assert free.at(damping).missed_parameters == pytest.approx(one.missed_parameters, rel=1e-9)


@pytest.mark.parametrize("change", ["other rows", "signs", "fewer", "parameters"])
def test_different_landmarks_do_not_merge(change):
    J = reference.matrix("decaying", 40, 20)
    other = {"other rows": J[20:], "signs": -J, "fewer": J[:3], "parameters": np.pad(J, ((0, 0), (0, 1)))}[change]
    with pytest.raises(ValueError, match="different landmarks"):
        stream(Nystrom(8), J).merge(stream(Nystrom(8), other))


def test_an_accumulator_is_empty_after_it_has_been_finalised_and_keeps_its_landmarks():
    J = shuffled("decaying", 50, 20)
    engine = stream(Nystrom(8), J)
    first = engine.finalise(0.2)
    with pytest.raises(ValueError, match="no rows"):
        engine.finalise(0.2)
    engine.update(batch(J))
    np.testing.assert_array_equal(engine.finalise(0.2).variance(batch(J)), first.variance(batch(J)))


def rare_kind():
    """300 rows within two directions and small noise, and among them six that have a direction each of their own."""
    rng = np.random.default_rng(0)
    J = rng.standard_normal((300, 2)) @ rng.standard_normal((2, 50)) + 1e-3 * rng.standard_normal((300, 50))
    J[::50] = 8 * np.linalg.qr(rng.standard_normal((50, 6)))[0].T
    return rng.permutation(J), J[::50]


def test_leverage_finds_rows_of_a_rare_kind():
    J, _ = rare_kind()

    def unseen(**settings):
        return [
            stream(Nystrom(20, seed=seed, **settings), J, sample=np.random.default_rng(seed).permutation(J)[:240])
            .finalise(1.0)
            .tail.energy
            for seed in range(12)
        ]

    by_chance, by_leverage = np.mean(unseen()), np.mean(unseen(choose="leverage"))
    # Probes and rows that are not in the sample cannot be chosen: about two of the six.
    assert by_leverage < 0.75 * by_chance


def test_leverage_takes_most_of_the_rows_that_stand_alone_and_no_row_twice():
    J, alone = rare_kind()
    found = 0
    for seed in range(30):
        chosen = Nystrom(20, choose="leverage", seed=seed).choose_landmarks(batch(J)).rows().numpy()
        assert len(np.unique(chosen, axis=0)) == 20
        found += sum((chosen == row).all(axis=1).any() for row in alone)
    assert found > 0.6 * 6 * 30  # by chance it would be 20 of 300


def test_the_seed_decides_what_leverage_takes_and_nothing_else_does():
    J = shuffled("flat", 200, 50)
    first, again, other = (
        Nystrom(10, choose="leverage", seed=seed).choose_landmarks(batch(J)).rows().numpy() for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_probes_are_no_landmarks():
    J = shuffled("decaying", 100, 40)
    for engine, count in ((Nystrom(10), 10), (Nystrom(10, choose="leverage"), 10), (Nystrom(95), 95)):
        started = engine.start(Known(sample=batch(J)))
        landmarks = started.basis.landmarks.rows().numpy()
        assert len(landmarks) == count
        assert started.pairs > 0
        probes = J[-(len(J) - 10) // 2 :] if engine.choose == "leverage" else J[count:]
        assert not any((landmarks == probe).all(axis=1).any() for probe in probes)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"landmarks": 0}, "landmarks must be"),
        ({"landmarks": 2.5}, "landmarks must be"),
        ({"landmarks": True}, "landmarks must be"),
        ({"landmarks": "all"}, "landmarks must be"),
        ({"choose": "best"}, "choose must be"),
        ({"choose": None}, "choose must be"),
        ({"tail": True}, "tail must be"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 0.5}, "seed must be"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Nystrom(**wrong)


def test_it_says_what_it_needs():
    with pytest.raises(ValueError, match=r"start\(Known\(sample=...\)\)"):
        Nystrom(5).start(Known(100))
    with pytest.raises(ValueError, match="no rows"):
        Nystrom(5).start(Known(sample=batch(np.eye(3)))).finalise(1.0)
    assert Nystrom(500).sample_size == 500 + nystrom.PROBE_ROWS
    assert Nystrom(500, choose="leverage").sample_size == 1000 + nystrom.PROBE_ROWS
    assert Nystrom(500, tail="none").sample_size == 500
    assert not Nystrom().needs_damping
    assert not Nystrom().cost(Problem(10, 10, 8, 80, 8)).wants_rows


def test_no_damping_works_where_the_landmarks_determine_the_parameters_and_is_an_error_elsewhere():
    J = reference.matrix("step", 60, 10)
    covariance = stream(Nystrom(20), J).finalise(0.0)
    expected = [row @ np.linalg.inv(J.T @ J) @ row for row in J]
    np.testing.assert_allclose(covariance.variance(batch(J)), expected, rtol=1e-6)
    assert covariance.effective_parameters == 10
    with pytest.raises(ValueError, match="span 5 of 10"):
        stream(Nystrom(5), J).finalise(0.0)


def test_it_describes_itself():
    assert repr(Nystrom()) == "Nystrom(landmarks=2000)"
    assert repr(Nystrom(50, choose="leverage", seed=3)) == "Nystrom(landmarks=50, choose='leverage', seed=3)"
    J = np.diag([3.0, 2.0, 1.0])
    covariance = stream(Nystrom(2), J).finalise(1.0)
    assert covariance.describe() == "Nyström, 2 landmarks (2 directions, 92.86 % of ‖J‖²)"


# --- through PredictionIntervals


def band(engine, model=None, **settings):
    return PredictionIntervals(model or mlp(), engine=engine, **(settings or {"weight_decay": 1e-2}))


def loader(X, y, **settings):
    return DataLoader(TensorDataset(X, y), batch_size=16, **settings)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("source", ["arrays", "shuffling loader", "list"])
def test_with_all_rows_as_landmarks_intervals_are_the_exact_ones(data, source, dtype):
    X, y = (part.to(dtype) for part in data)
    model = mlp(dtype=dtype)
    torch.manual_seed(3)
    training = {
        "arrays": (X.numpy(), y.numpy()),
        "shuffling loader": (loader(X, y, shuffle=True),),
        "list": ([(X[:30], y[:30]), (X[30:], y[30:])],),
    }[source]
    truth = band(Exact(), model).fit(X, y)
    mine = band(Nystrom(), model).fit(*training)
    tolerance = {"rtol": 1e-7, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-5}
    np.testing.assert_allclose(mine.variance(X), truth.variance(X), **tolerance)
    np.testing.assert_allclose(mine.predict(X).upper, truth.predict(X).upper, **tolerance)
    assert mine.error_bound_ == 0
    assert len(mine._fits[0].leverages) == 80  # as for `Exact`
    assert "80 landmarks" in mine.summary()


@pytest.mark.parametrize("engine", [Nystrom(12), Nystrom(12, choose="leverage")])
@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
def test_landmarks_are_training_rows_whether_the_loader_shuffles_or_not(data, engine):
    X, y = data
    model = mlp()
    rows = reference.jacobian(model, X)[1]
    torch.manual_seed(3)
    for training in ((X, y), (loader(X, y, shuffle=True),)):
        covariance = band(engine, model).fit(*training)._fits[0].covariance
        landmarks = covariance.basis.landmarks.rows().numpy()
        assert len(landmarks) == 12
        order = [np.abs(rows - landmark).max(axis=1).argmin() for landmark in landmarks]
        assert len(set(order)) == 12
        # parameters may come in another order than autograd's, inner products do not
        np.testing.assert_allclose(
            landmarks @ landmarks.T, rows[order] @ rows[order].T, rtol=1e-9, atol=1e-12 * np.abs(rows).max()
        )
        naive = reference.projected(rows, rows[order])
        assert covariance.tail.energy == pytest.approx(np.sum((rows - naive) ** 2), rel=1e-6)


@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
def test_the_seed_draws_the_landmarks(data):
    def landmarks(seed):
        return band(Nystrom(12, seed=seed)).fit(*data)._fits[0].covariance.basis.landmarks.rows()

    assert torch.equal(landmarks(1), landmarks(1))
    assert not torch.equal(landmarks(1), landmarks(2))


def test_a_generator_is_refused_before_it_is_touched(data):
    X, y = data
    taken = []

    def batches():
        taken.append(1)
        yield X, y

    with pytest.raises(ValueError, match=r"reads the data twice.*DataLoader"):
        band(Nystrom()).fit(batches(), n_rows=80)
    with pytest.raises(ValueError, match="reads the data twice"):
        band(Nystrom()).fit(zip([X], [y], strict=True))
    assert not taken
    band(Exact()).fit(batches())  # which reads once


def test_something_that_claims_to_be_readable_twice_and_is_not_is_an_error(data):
    class Once:
        def __init__(self):
            self.batches = iter([data])

        def __iter__(self):
            return self.batches

    with pytest.raises(ValueError, match="empty"):
        band(Nystrom()).fit(Once())


def test_no_data_is_an_error():
    with pytest.raises(ValueError, match="empty"):
        band(Nystrom(), damping=1.0).fit([])


def test_a_gradient_that_is_not_finite_is_named_by_its_row(data):
    class Steep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1).double()

        def forward(self, x):
            return self.layer(x) / (x[:, :1] - 5.0)

    class Only(Nystrom):
        sample_size = 1

    X, y = data
    X = X.clone()
    X[17, 0] = 5.0
    with pytest.raises(ValueError, match="in row 17;"):
        band(Nystrom(20), Steep()).fit(X, y)
    X[3:, 0] = 5.0  # and the sample has nothing else
    with pytest.raises(ValueError, match="in row 3;"):
        band(Only(), Steep()).fit(X, y)


def test_a_network_that_depends_on_nothing_is_an_error(data):
    model = mlp()
    with torch.no_grad():
        for w in model.parameters():
            w.zero_()
    model[2].bias.requires_grad_(False)
    model[0].requires_grad_(False)
    with pytest.raises(ValueError, match="all gradients are zero"):
        band(Nystrom(), model).fit(*data)


@pytest.mark.parametrize("engine", [Nystrom(15), Nystrom(15, tail="none"), Nystrom(15, choose="leverage")])
def test_calibration_works_without_a_damping(engine):
    X, y = regression(160)
    fitted = PredictionIntervals(mlp(), engine=engine).fit(X[:80], y[:80])
    assert fitted.damping_ is None
    fitted.calibrate(X[80:], y[80:])
    new = torch.randn(300, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    intervals = fitted.predict(new, level=0.9)
    truth = new.sum(dim=1).sin()
    assert ((intervals.lower <= truth) & (truth <= intervals.upper)).double().mean() > 0.8
    assert torch.isfinite(intervals.upper - intervals.lower).all()


def test_a_sketch_that_may_miss_much_says_so(data):
    from deltaband import DeltabandWarning

    with pytest.warns(DeltabandWarning, match="not accurate enough"):
        band(Nystrom(2, tail="none"), weight_decay=1e-3).fit(*data)
    few = [part[:30] for part in data]  # too few for an estimate: the bound speaks
    with pytest.warns(DeltabandWarning, match="may miss up to"):
        band(Nystrom(2, tail="none"), weight_decay=1e-3).fit(*few)


def test_no_row_is_formed_for_a_network_of_linear_layers(data, monkeypatch):
    from deltaband.network.layers.factors import OuterProducts

    form = OuterProducts.rows

    def refuse(self):
        assert self.n_parameters < 900, "a row of the large layer was formed"  # for small ones rows are the cheaper way
        return form(self)

    model = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1)).double()
    fitted = band(Nystrom(), model).fit(*data)
    monkeypatch.setattr(OuterProducts, "rows", refuse)
    assert torch.isfinite(fitted.leverage(data[0])).all()


def test_the_layers_of_landmarks_and_rows_are_found_out_once(data, monkeypatch):
    """Another look, at other rows, might see other parts, which have no inner products with these."""
    looks = []
    probe = Network.probe
    monkeypatch.setattr(Network, "probe", lambda self, x: (looks.append(1), probe(self, x))[1])
    band(Nystrom()).fit(*data)
    assert len(looks) == 1


@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
def test_the_certificates_hold_for_the_rows_of_the_second_pass_where_a_loader_drops_others_each_time(data):
    class Dropping:
        first = True

        def __iter__(self):
            rows = slice(0, 60) if self.first else slice(20, 80)
            self.first = False
            yield X[rows], y[rows]

    X, y = data
    model = mlp()
    fitted = band(Nystrom(8), model, damping=0.05).fit(Dropping())
    truth = band(Exact(), model, damping=0.05).fit(X[20:], y[20:])
    covariance = fitted._fits[0].covariance
    assert truth.effective_parameters_ <= covariance.effective_parameters + covariance.missed_parameters
    assert covariance.tail.energy > 0


@pytest.mark.parametrize("chunk", [1, 3, 10])
def test_every_row_of_a_stream_is_as_likely_in_a_sample(chunk):
    X = Inputs.of(torch.arange(10))
    counts, firsts = np.zeros(10), np.zeros(10)
    for seed in range(600):
        drawn = RowSample(3, seed)
        for i in range(0, 10, chunk):
            drawn.update(X[i : i + chunk])
        rows = drawn.rows().pieces[0].tensors[0].numpy()
        assert len(set(rows)) == 3
        counts[rows] += 1
        firsts[rows[0]] += 1
    assert np.abs(counts - 180).max() < 45  # four standard deviations
    assert np.abs(firsts - 60).max() < 30  # and the order is random too
