"""Ctrl-C at random moments leaves band, model and files as they were, or as the call should leave them."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from deltaband import Exact, Nystrom, PredictionIntervals, RobustFrequentDirections
from tests.support.interruptions import Interrupter
from tests.support.networks import mlp, regression

MOMENTS = 25  # of each operation: 200 in all
NEW = regression(7, seed=9)[0]
ENGINES = (Exact(), Exact(), Nystrom(30), RobustFrequentDirections(12))
SIZES = (80, 30, 80, 80)  # of the fit; 41 parameters: primal and dual form
pytestmark = pytest.mark.filterwarnings(
    "ignore::deltaband.DeltabandWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",  # files that are closed only when they are forgotten
)


class Operation(NamedTuple):
    prepare: Callable[[int, Path], PredictionIntervals]  # a band to begin with
    run: Callable[[PredictionIntervals, Path], object]


def new(i: int, folder: Path) -> PredictionIntervals:
    return PredictionIntervals(mlp().train(), damping=1.0, engine=ENGINES[i % 4])


def fitted(i: int, folder: Path) -> PredictionIntervals:
    return new(i, folder).fit(*regression(SIZES[i % 4]), progress=False)


def in_parts(i: int, folder: Path) -> PredictionIntervals:
    return new(i, folder).partial_fit(*regression(SIZES[i % 4]), n_rows=SIZES[i % 4] + 5)


def calibrated(i: int, folder: Path) -> PredictionIntervals:
    return fitted(i, folder).calibrate(*regression(40, seed=1), tune=False, noise="none")


def saved(i: int, folder: Path) -> PredictionIntervals:
    band = fitted(i, folder)
    band.save(folder / "y.band")
    return band.calibrate(*regression(40, seed=1), tune=False, noise="none")


def predictions(band: PredictionIntervals) -> np.ndarray:
    return np.stack([each.numpy() for each in band.predict(NEW)[:3]])


OPERATIONS = {
    "fit": Operation(calibrated, lambda band, folder: band.fit(*regression(90, seed=2), progress=False)),
    "partial_fit": Operation(in_parts, lambda band, folder: band.partial_fit(*regression(5, seed=3))),
    "partial_fit after fit": Operation(calibrated, lambda band, folder: band.partial_fit(*regression(5, seed=3))),
    "the first answer after partial_fit": Operation(in_parts, lambda band, folder: band.summary()),
    "calibrate": Operation(calibrated, lambda band, folder: band.calibrate(*regression(50, seed=4))),
    "predict": Operation(calibrated, lambda band, folder: band.predict(regression(60, seed=5)[0])),
    "save": Operation(saved, lambda band, folder: band.save(folder / "y.band")),
    "load": Operation(saved, lambda band, folder: PredictionIntervals.load(folder / "y.band", band.model)),
}


def state(model: torch.nn.Module) -> list[object]:
    """All that a user can see of a model."""
    weights = [(name, w.requires_grad, w.grad, w.detach().numpy().tobytes()) for name, w in model.named_parameters()]
    modules = [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m))) for m in model.modules()]
    return [*weights, *modules]


@pytest.mark.parametrize("name", OPERATIONS)
def test_ctrl_c_at_a_random_moment_leaves_everything_as_it_was_or_as_it_should_be(name, tmp_path):
    operation, moments, interrupted = OPERATIONS[name], random.Random(name), 0
    befores, afters, lines = [], [], []
    for i in range(len(ENGINES)):
        befores.append(predictions(operation.prepare(i, tmp_path)))
        band, count = operation.prepare(i, tmp_path), Interrupter()
        assert not count(partial(operation.run, band, tmp_path))
        afters.append(predictions(band))
        lines.append(count.lines)
    (tmp_path / "y.band").unlink(missing_ok=True)
    for i in range(MOMENTS):
        variant = i % len(ENGINES)
        before, after = befores[variant], afters[variant]
        band = operation.prepare(i, tmp_path)
        model, files = state(band.model), {path.name for path in tmp_path.iterdir()}
        interrupted += Interrupter(moments.randrange(lines[variant]))(partial(operation.run, band, tmp_path))
        assert state(band.model) == model
        assert {path.name for path in tmp_path.iterdir()} == files
        if files:
            read = predictions(PredictionIntervals.load(tmp_path / "y.band", band.model))
            assert np.array_equal(read, predictions(fitted(i, tmp_path))) or np.array_equal(read, after)
        found = predictions(band)
        assert np.array_equal(found, before) or np.array_equal(found, after)
        if not np.array_equal(found, after):  # and the same call works now
            operation.run(band, tmp_path)
            np.testing.assert_allclose(predictions(band), after, rtol=1e-9)
    assert interrupted >= MOMENTS - 2  # a line or two may come when all is done


def test_rows_taken_in_after_an_interrupted_completion_are_added_to_the_others():
    for i, engine in enumerate(ENGINES):
        counted = in_parts(i, Path())
        count = Interrupter()
        count(counted.summary)
        for moment in range(count.lines // 7, count.lines, count.lines // 7):
            band = in_parts(i, Path())
            assert Interrupter(moment)(band.summary)
            band.partial_fit(*regression(5, seed=3))
            whole = in_parts(i, Path()).partial_fit(*regression(5, seed=3))
            torch.testing.assert_close(band.variance(NEW), whole.variance(NEW), rtol=1e-6, atol=1e-12)
            assert band.n_rows_ == whole.n_rows_, engine
