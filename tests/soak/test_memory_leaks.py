"""Many questions: the same answers from eight threads as from one, and no memory that grows with their number."""

import gc
import sys
from pathlib import Path

import pytest
import torch

from deltaband import ClassificationIntervals, Exact, Nystrom, PredictionIntervals, RobustFrequentDirections
from tests.support.classifiers import classifier, labelled
from tests.support.networks import in_threads, mlp, regression

pytestmark = pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
THREADS, QUESTIONS = 8, 1000
BOUND = 8.0  # MB
X, Y = regression(200)


def formula():
    return PredictionIntervals(mlp(), damping=0.5, engine=Exact()).fit(X, Y, progress=False)


def dual():
    return PredictionIntervals(mlp(hidden=80), damping=0.5).fit(X, Y, progress=False)


def calibrated():
    return PredictionIntervals(mlp()).fit(X, Y, progress=False).calibrate(*regression(100, seed=5))


def sketched():
    band = PredictionIntervals(mlp(), damping=0.5, engine=RobustFrequentDirections(10))
    return band.fit(X, Y, progress=False).calibrate(*regression(100, seed=5), tune=False)


def pending():
    """Its rows are taken in, and what they amount to is not worked out before the first question."""
    band = PredictionIntervals(mlp(hidden=80), damping=0.5, engine=Nystrom(40))
    for start in range(0, 200, 50):
        band.partial_fit(X[start : start + 50], Y[start : start + 50])
    return band


def classes():
    return ClassificationIntervals(classifier(3), damping=0.7).fit(*labelled(100), progress=False)


BANDS = [formula, dual, calibrated, sketched, pending, classes]


def numbers(answer):
    parts = (*answer.log_odds, *answer.probability) if hasattr(answer, "log_odds") else tuple(answer)
    return b"".join(each.numpy().tobytes() for each in parts)


@pytest.mark.parametrize("make", BANDS)
def test_a_thousand_questions_from_eight_threads_have_the_answers_of_one(make):
    inputs = [regression(5 + i, seed=i)[0] for i in range(THREADS)]
    expected = [numbers(make().predict(x, (0.5, 0.9))) for x in inputs]
    band, done, wrong = make(), [0] * THREADS, []

    def work(i):
        for turn in range(QUESTIONS // THREADS):
            which = (i + turn) % THREADS
            if numbers(band.predict(inputs[which], (0.5, 0.9))) != expected[which]:
                wrong.append((i, turn))
            done[i] += 1

    in_threads(work, THREADS)
    assert sum(done) == QUESTIONS
    assert wrong == []
    print(f"{make.__name__}: {sum(done)} questions from {THREADS} threads, {len(wrong)} other answers")


def resident() -> float:
    """Memory of this process in MB, after everything that can be let go is."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize(("make", "count"), [(formula, 10_000), (calibrated, 4_000), (classes, 4_000)])
def test_memory_does_not_grow_over_ten_thousand_questions(make, count):
    band = make()
    rows = torch.randn(16, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for i in range(500):  # warm
        band.predict(rows[: 1 + i % 16])
    before, objects = resident(), len(gc.get_objects())
    for i in range(count):
        band.predict(rows[: 1 + i % 16])
    grown, more = resident() - before, len(gc.get_objects()) - objects
    print(f"{make.__name__}: {grown:+.1f} MB and {more:+d} objects after {count} questions")
    assert grown < BOUND
    assert more < 1000
