"""Which engine, in how much memory: plans, refusals, and rows that are computed again."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tests.reference as reference
from deltaband import (
    Exact,
    FrequentDirections,
    ImportantDirections,
    Nystrom,
    PredictionIntervals,
    RandomProjection,
    RobustFrequentDirections,
    machine,
)
from deltaband.data.batches import read
from deltaband.engines import Problem, exact, plan_fit
from deltaband.engines import plan as plans
from tests.support.networks import in_threads, mlp, regression

WIDE = Problem(2_000, 1_000_000, 4, 8_000, 400)
LONG = Problem(1_000_000, 3_000, 4, 800, 40)
BOTH = Problem(50_000, 1_000_000, 4, 8_000, 400)


def chosen(problem, engine=None, memory=1e9, time=1e9):
    option = plan_fit(problem, engine, memory, time).chosen
    return None if option is None else option.engine


# --- predictions of memory


@pytest.mark.parametrize(
    ("engine", "problem", "expected"),
    [
        (Exact(), LONG, 8 * 3_000**2),
        (Exact(), replace(LONG, damped=False), 3 * 8 * 3_000**2),
        (Exact(), WIDE, 8 * 2_000**2 + 2_000 * 8_000),
        (Exact(), replace(WIDE, recomputed=True), 8 * 2_000**2 + 2_000 * 400),
        (Exact(), replace(LONG, n_rows=None), 8 * 3_000**2 + 3_000 * 800),
        (Nystrom(100, tail="none"), BOTH, 32 * 100**2 + 100 * 8_000),
        (Nystrom(100), BOTH, 32 * 100**2 + 300 * 8_000),
        (Nystrom(100_000, tail="none"), WIDE, 32 * 2_000**2 + 2_000 * 8_000),
        (Nystrom(100, choose="leverage", tail="none"), BOTH, 32 * 200**2 + 300 * 8_000),
        (RandomProjection(500), BOTH, 3 * 8 * 500**2),
        (RandomProjection(500), replace(BOTH, n_rows=100), 3 * 8 * 100**2 + 100 * 8 * 500),
        (FrequentDirections(50), LONG, 4 * 50 * 3_000 * 4 + 128 * 50**2),
        (FrequentDirections(5_000), LONG, 4 * 3_001 * 3_000 * 4 + 128 * 3_001**2),
    ],
)
def test_what_an_engine_holds_follows_from_the_sizes(engine, problem, expected):
    assert engine.cost(problem).nbytes == pytest.approx(expected)


@pytest.mark.parametrize("engine", [ImportantDirections, RobustFrequentDirections, FrequentDirections])
def test_an_automatic_rank_stays_within_its_memory_and_uses_it(engine):
    assert 0.95e8 < engine(memory=1e8).cost(LONG).nbytes <= 1e8


@pytest.mark.parametrize(
    "engine", [Exact(), Nystrom(500), RandomProjection(500), RobustFrequentDirections(50), ImportantDirections(50)]
)
@pytest.mark.parametrize("problem", [WIDE, LONG, BOTH])
def test_more_rows_take_more_time(engine, problem):
    more = replace(problem, n_rows=10 * problem.n_rows)
    assert 0 < engine.cost(problem).flops < engine.cost(more).flops


@pytest.mark.parametrize("engine", [Nystrom(500), RandomProjection(500), RobustFrequentDirections(50)])
def test_a_limited_engine_has_the_same_settings_and_no_more_directions(engine):
    assert repr(engine.resized(10**6)) == repr(engine)
    assert engine.resized(20).cost(LONG).nbytes <= engine.cost(LONG).nbytes
    assert Nystrom(500, choose="leverage", tail="none", seed=3).resized(20).landmarks == 20
    assert RobustFrequentDirections(50, tail="none", compress=True).resized(20).rank == 10


# --- the choice


def test_exact_where_it_fits():
    assert isinstance(chosen(WIDE), Exact)
    assert isinstance(chosen(LONG), Exact)


def test_rows_are_computed_again_where_only_their_inputs_fit():
    schedule = plan_fit(replace(WIDE, factor_bytes=4_000_000), None, 1e9, 3600.0)
    assert schedule.chosen.problem.recomputed
    assert schedule.chosen.nbytes <= 1e9
    assert "rows computed again" in str(schedule)


def test_a_projection_where_exact_does_not_fit_as_large_as_the_memory_allows(monkeypatch):
    monkeypatch.setattr(plans, "_flops_per_second", lambda: 5e10)
    engine = chosen(BOTH, memory=1e8)
    assert isinstance(engine, RandomProjection)
    assert plans.Option(engine, BOTH).nbytes <= 0.5e8 < plans.Option(RandomProjection(engine.dim + 1), BOTH).nbytes
    assert chosen(BOTH, memory=1e10).dim == plans.LARGEST_AUTO_SIZE


def test_landmarks_where_a_projection_would_take_much_longer(monkeypatch):
    monkeypatch.setattr(plans, "_flops_per_second", lambda: 5e10)
    huge = replace(BOTH, n_parameters=50_000_000)
    assert isinstance(chosen(huge, memory=9e8), RandomProjection)  # from factors
    huge = replace(huge, factor_bytes=20_000, positions=2_000)
    engine = chosen(huge, memory=9e8, time=300.0)
    assert isinstance(engine, Nystrom)
    assert plans.Option(engine, huge).nbytes <= 4.5e8 < plans.Option(Nystrom(engine.landmarks + 1), huge).nbytes


def test_a_projection_where_the_data_can_be_read_only_once():
    assert isinstance(chosen(replace(BOTH, reiterable=False)), RandomProjection)
    assert isinstance(chosen(replace(BOTH, n_rows=None, reiterable=False)), RandomProjection)


def test_an_approximation_where_exact_would_take_hours(monkeypatch):
    monkeypatch.setattr(plans, "_flops_per_second", lambda: 1e10)
    assert isinstance(chosen(LONG, time=3600.0), Exact)
    assert isinstance(chosen(replace(LONG, n_rows=10_000_000), time=3600.0), RandomProjection)


def test_auto_is_as_accurate_as_its_time_allows(monkeypatch):
    monkeypatch.setattr(plans, "_flops_per_second", lambda: 1e10)
    slow = replace(LONG, n_rows=100_000)  # exact: 95 s
    assert isinstance(chosen(slow, time=200.0), Exact)
    found = [plan_fit(slow, None, 1e9, seconds).chosen for seconds in (20.0, 40.0)]
    assert all(option.seconds <= seconds for option, seconds in zip(found, (20.0, 40.0), strict=True))
    sizes = [getattr(option.engine, option.engine.size_setting) for option in found]
    assert sizes[0] < sizes[1]
    assert isinstance(chosen(slow, time=0.01), Exact)  # nothing is as fast as that, and the others are slower still


def test_the_default_time_is_a_minute_or_twenty_passes_of_gradients():
    assert plan_fit(WIDE).time == 60.0
    assert plan_fit(replace(WIDE, row_seconds=0.01)).time == pytest.approx(20 * 2_000 * 0.01)


def test_exact_is_never_refused_for_its_time():
    slow = replace(LONG, row_seconds=1.0)
    assert plan_fit(slow, Exact(), 1e9, time=1.0).chosen.engine == Exact()


def test_a_plan_says_what_exact_would_have_cost(monkeypatch):
    monkeypatch.setattr(plans, "_flops_per_second", lambda: 1e10)
    schedule = plan_fit(replace(LONG, n_rows=10_000_000), None, 1e9)
    assert schedule.exact_cost in str(schedule)
    assert "Exact() would take about 3 h" in schedule.exact_cost
    assert plan_fit(WIDE, Exact(), 1e9).exact_cost == ""


def test_the_time_of_a_fit_has_what_comes_before_and_after_its_rows():
    exact = Exact()

    def seconds(engine=exact, **sizes):
        return plans.Option(engine, replace(WIDE, row_seconds=1e-2, **sizes)).seconds

    assert seconds(setup_seconds=3.0) - seconds() == pytest.approx(3.0)
    assert seconds(asked_rows=100) - seconds() > 100 * 1e-2
    assert seconds(asked_rows=100, single=True) == seconds()  # the dual form knows them
    assert seconds(asked_rows=10**6) < 2.1 * seconds()  # there are no more than those of the fit
    sampled = seconds(Nystrom(500)) - seconds(Nystrom(500, tail="none"))
    assert sampled == pytest.approx(200 * 1e-2)  # the rows that the tail is measured on


def test_rows_that_have_to_be_formed_take_time():
    of_rows = plans.Option(RobustFrequentDirections(10), WIDE)
    operations = of_rows.engine.cost(WIDE).flops / plans._flops_per_second()
    assert of_rows.seconds > 1.5 * operations


def test_inner_products_take_the_time_that_was_measured(monkeypatch):
    monkeypatch.setattr(plans, "_flops_per_second", lambda: 1e12)
    measured = replace(WIDE, pair_seconds=1e-5)
    longer = plans.Option(Exact(), measured).seconds - plans.Option(Exact(), WIDE).seconds
    assert longer == pytest.approx(WIDE.n_rows**2 / 2 * 1e-5, rel=0.01)


def test_rows_computed_again_take_a_pass_for_the_layers_that_fit_together():
    option = plan_fit(replace(WIDE, factor_bytes=4_000_000, row_seconds=1e-3), Exact(), 2e9).chosen
    assert option.problem.passes == 1 + math.ceil(2_000 * 4e6 / option.problem.room)
    assert option.seconds >= option.problem.passes * 2_000 * 1e-3


def test_nothing_is_chosen_where_nothing_fits():
    schedule = plan_fit(BOTH, None, 1e3)
    assert schedule.chosen is None
    assert "→" not in str(schedule)
    assert "too large" in str(schedule)


def test_an_engine_of_the_users_is_taken_or_refused_but_not_replaced():
    engine = ImportantDirections(100)
    assert chosen(BOTH, engine, 2e9) is engine
    assert chosen(BOTH, engine, 1e9) is None
    assert chosen(BOTH, Exact(), 1e9) is None


def test_half_of_what_is_free_is_for_us_to_choose_and_all_of_it_for_the_user(monkeypatch):
    monkeypatch.setattr(plans, "free_memory", lambda: 100e6)
    assert plan_fit(LONG).memory == 50e6
    assert plan_fit(LONG, Exact()).memory == 100e6
    assert isinstance(plan_fit(LONG).chosen.engine, RandomProjection)
    assert isinstance(plan_fit(LONG, Exact()).chosen.engine, Exact)


def test_a_limit_of_a_process_counts_in_its_plan():
    resource = pytest.importorskip("resource")
    if not Path("/proc/self/status").exists():
        pytest.skip("the system does not say how much a process takes")
    X, y = regression(60)
    band = PredictionIntervals(mlp(), damping=1.0, engine=Exact())
    before, (soft, hard) = band.plan(X, y).memory, resource.getrlimit(resource.RLIMIT_AS)
    taken = 1024 * machine._entry(Path("/proc/self/status"), "VmSize:")
    try:
        resource.setrlimit(resource.RLIMIT_AS, (int(taken) + 2**28, hard))
        within = band.plan(X, y).memory
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert 0 < within <= 2**28 < before


def test_a_plan_counts_what_certifying_a_batch_takes():
    certificate = 2 * WIDE.n_parameters * WIDE.itemsize
    assert plan_fit(WIDE, Exact(), 1e9).chosen.nbytes == Exact().cost(WIDE).nbytes + certificate


def test_the_table_marks_the_choice_and_what_is_too_large(monkeypatch):
    monkeypatch.setattr(plans, "_flops_per_second", lambda: 5e10)
    table = str(plan_fit(BOTH, None, 1e9)).splitlines()
    assert table[0] == "n = 50,000 rows, p = 1,000,000 parameters, 1 GB for the fit"
    assert [line[2:18] for line in table if line.startswith("→")] == ["RandomProjection"]
    assert "20.4 GB" in table[2]
    assert table[2].endswith("too large")


# --- bands


def test_a_plan_is_what_the_fit_does():
    X, y = regression(60)
    for hidden, form in ((5, "primal"), (30, "dual")):
        band = PredictionIntervals(mlp(hidden=hidden), damping=1.0)
        assert f"Exact(), {form} form" in str(band.plan(X, y).chosen)
        assert f"exact, {form}" in band.fit(X, y).summary()
    X, y = regression(1000)
    band = PredictionIntervals(mlp(hidden=200), damping=1.0, memory=6e6)
    assert isinstance(band.plan(X, y).chosen.engine, RandomProjection)
    assert "random projection" in band.fit(X, y).summary()


def test_a_plan_reads_the_first_batch_alone_and_leaves_the_band_as_it_was():
    read_batches = []

    class Rows(TensorDataset):
        def __getitem__(self, index):
            read_batches.append(index)
            return super().__getitem__(index)

    band = PredictionIntervals(mlp(), damping=1.0)
    text = str(band.plan(DataLoader(Rows(*regression(60)), batch_size=10)))
    assert read_batches == list(range(10))
    assert text.startswith("n = 60 rows, p = 41 parameters")
    with pytest.raises(ValueError, match="not fitted"):
        band.summary()


def test_a_plan_leaves_the_random_numbers_alone():
    loader = DataLoader(TensorDataset(*regression(60)), batch_size=10, shuffle=True)
    state = torch.get_rng_state()
    PredictionIntervals(mlp(), damping=1.0).plan(loader)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_refused_generator_says_that_it_has_begun():
    band = PredictionIntervals(mlp(hidden=40), damping=1.0, engine=Exact(), memory=1e4)
    with pytest.raises(MemoryError, match="made anew"):
        band.fit(iter([regression(100)]), n_rows=100)


def test_a_plan_would_use_up_a_generator():
    X, y = regression(20)
    batches = iter([(X, y)])
    with pytest.raises(ValueError, match="only once"):
        PredictionIntervals(mlp(), damping=1.0).plan(batches)
    assert len(list(batches)) == 1


def test_a_generator_gives_all_its_rows_to_the_fit():
    X, y = regression(30)
    batches = ((X[i : i + 7], y[i : i + 7]) for i in range(0, 30, 7))
    assert PredictionIntervals(mlp(), damping=1.0).fit(batches).n_rows_ == 30


def test_a_loader_starts_once_for_a_pass():
    starts = []

    class Loader:
        def __iter__(self):
            starts.append(None)
            return iter([regression(30)])

    PredictionIntervals(mlp(), damping=1.0).fit(Loader())
    assert len(starts) == 1
    PredictionIntervals(mlp(hidden=30), damping=1.0, engine=Nystrom(30)).fit(Loader())
    assert len(starts) == 3


@pytest.mark.parametrize("source", [[], [(torch.zeros(0, 3), torch.zeros(0))]])
def test_looking_at_nothing_is_an_error(source):
    with pytest.raises(ValueError, match="empty"):
        read(source).peek()


def test_a_fit_that_does_not_fit_is_refused_with_the_table_and_changes_nothing():
    X, y = regression(200)
    model = mlp(hidden=40)
    band = PredictionIntervals(model, damping=1.0, engine=Exact(), memory=1e5)
    with pytest.raises(MemoryError, match=r"would not fit(.|\n)*Exact\(\), dual form(.|\n)*too large"):
        band.fit(X, y)
    with pytest.raises(ValueError, match="not fitted"):
        band.predict(X)
    band = PredictionIntervals(model, damping=1.0, engine=RobustFrequentDirections(100), memory=1e5)
    with pytest.raises(MemoryError, match=r"RobustFrequentDirections\(rank=100\)"):
        band.fit(X, y)


@pytest.mark.parametrize("n", [30, 200])  # dual, primal
def test_eigenvectors_that_do_not_fit_are_refused_and_calibration_can_do_without(monkeypatch, n):
    X, y = regression(n)
    band = PredictionIntervals(mlp(hidden=20), damping=1.0).fit(X, y)
    monkeypatch.setattr(exact, "free_memory", lambda: 1e3)
    with pytest.raises(MemoryError, match="tune=False"):
        band.calibrate(*regression(20, seed=1))
    with pytest.raises(MemoryError, match="eigenvectors"):
        band.spectrum()
    band.calibrate(*regression(20, seed=1), tune=False)


@pytest.mark.parametrize("memory", [0, -1.0, float("nan"), float("inf"), "1GB", True])
def test_memory_is_a_number_of_bytes(memory):
    with pytest.raises(ValueError, match="memory must be a positive number of bytes"):
        PredictionIntervals(mlp(), memory=memory)


# --- rows that are computed again


def convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 6, 3, padding=1),
        nn.Tanh(),
        nn.Conv1d(6, 8, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(48, 1),
    ).double()


def images(n=60):
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(n, 2, 8, generator=generator, dtype=torch.float64)
    return X, X.mean(dim=(1, 2)) + 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)


@pytest.fixture
def again(monkeypatch):
    """A band that computes its rows again, a few at a time."""
    monkeypatch.setattr("deltaband.network.network.CHUNK_BYTES", 4000)
    monkeypatch.setattr("deltaband.network.network.CHUNK_ROWS_AT_LEAST", 1)
    monkeypatch.setattr(Problem, "recomputed_bytes", property(lambda p: 10 * p.factor_bytes))

    def make(model, X, y, **settings):
        kept = PredictionIntervals(model, engine=Exact(), **settings).plan(X, y).chosen
        band = PredictionIntervals(model, engine=Exact(), memory=kept.nbytes - 1, **settings)
        assert band.plan(X, y).chosen.problem.recomputed
        return band

    return make


@pytest.mark.filterwarnings("ignore:the network has p")
def test_rows_computed_again_give_the_formula(again):
    model, (X, y) = convolutional(), images()
    band = again(model, X, y, damping=0.7).fit(X, y)
    _, J = reference.jacobian(model, X)
    new = images(5)[0] * 1.5
    _, g = reference.jacobian(model, new)
    np.testing.assert_allclose(band.variance(new), [reference.variance(J, 0.7, row) for row in g], rtol=1e-8)
    np.testing.assert_allclose(band.leverage(new), [reference.leverage(J, 0.7, row) for row in g], rtol=1e-8)
    assert band.effective_parameters_ == pytest.approx(reference.effective_parameters(J, 0.7), rel=1e-10)


@pytest.mark.filterwarnings("ignore:the network has p", "ignore:the model's weights have changed")
def test_rows_computed_again_have_the_weights_of_the_fit(again):
    model, (X, y) = convolutional(), images()
    band, kept = again(model, X, y, damping=0.7).fit(X, y), PredictionIntervals(model, damping=0.7).fit(X, y)
    with torch.no_grad():
        model[0].weight += 0.1
    np.testing.assert_allclose(band.variance(X), kept.variance(X), rtol=1e-10)


@pytest.mark.filterwarnings("ignore:the network has p")
def test_rows_computed_again_have_arrays_of_their_own(again):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = convolutional(), np.array([1.5])

        def forward(self, x):
            return self.inner(x * float(self.scale[0]))

    model, (X, y) = Scaled(), images()
    band, kept = again(model, X, y, damping=0.7).fit(X, y), PredictionIntervals(model, damping=0.7).fit(X, y)
    model.scale[0] = 0.1
    np.testing.assert_allclose(band.variance(X), kept.variance(X), rtol=1e-10)


@pytest.mark.filterwarnings("ignore:the network has p")
def test_rows_computed_again_calibrate_and_answer_many_threads(again):
    model, (X, y) = convolutional(), images()
    kept = PredictionIntervals(model, damping=0.7).fit(X[:40], y[:40]).calibrate(X[40:], y[40:])
    band = again(model, X[:40], y[:40], damping=0.7).fit(X[:40], y[:40]).calibrate(X[40:], y[40:])
    expected = kept.predict(X, 0.8)
    answers = {}

    def work(i):
        answers[i] = band.predict(X, 0.8)

    in_threads(work)
    for i in range(8):
        np.testing.assert_allclose(answers[i].lower, expected.lower, rtol=1e-8)


def test_rows_computed_again_need_no_order_of_the_loader(again):
    model, (X, y) = convolutional(), images()
    loader = DataLoader(TensorDataset(X, y), batch_size=9, shuffle=True)
    band = again(model, X, y, damping=30.0).fit(loader)
    kept = PredictionIntervals(model, damping=30.0).fit(X, y)
    np.testing.assert_allclose(band.variance(X), kept.variance(X), rtol=1e-8)


def test_rows_computed_again_have_the_inputs_and_weights_of_the_fit(again):
    model, (X, y) = convolutional(), images()
    w = 0.5 + torch.arange(len(X), dtype=torch.float64) % 3
    given = [each.clone() for each in (X, y, w)]
    band = again(model, X, y, damping=0.7).fit(*given[:2], sample_weight=given[2])
    for each in given:
        each.fill_(1e3)
    kept = PredictionIntervals(model, damping=0.7).fit(X, y, sample_weight=w)
    np.testing.assert_allclose(band.variance(X), kept.variance(X), rtol=1e-10)
