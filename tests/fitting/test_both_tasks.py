"""What fits of every task have in common: parts, merged bands, checkpoints and files end in the band of one pass."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from deltaband import (
    ArtefactError,
    ClassificationIntervals,
    Exact,
    ImportantDirections,
    Nystrom,
    PredictionIntervals,
    RandomProjection,
    RobustFrequentDirections,
)
from tests.support.networks import mlp, regression

pytestmark = pytest.mark.filterwarnings(
    "ignore:the network has p",
    "ignore:the training rows determine",
    "ignore:rank=",
    "ignore:.*accurate",
    "ignore:the sketch may",
)
N = 200
X, Y = regression(N)
NEW = regression(20, seed=3)[0]
CUTS = (0, 1, 41, 100, 199, N)
EXACT_SUMS = [Exact(), RandomProjection(15), "auto"]
ENGINES = [*EXACT_SUMS, Nystrom(30), RobustFrequentDirections(12), ImportantDirections(12)]


def classifier(n_classes):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, n_classes)).double()


class Ended(Exception):  # noqa: N818
    """A loader that stops in the middle."""


class Ending(DataLoader):
    """Ends in the middle of the pass with this number."""

    ends_in = 1
    passes = 0

    def __iter__(self):
        self.passes += 1
        for i, batch in enumerate(super().__iter__()):
            if i >= 12 and self.passes == self.ends_in:
                raise Ended
            yield batch


KINDS = {
    "regression": (lambda **options: PredictionIntervals(mlp(), **options), Y),
    "two outputs": (lambda **options: PredictionIntervals(classifier(2), **options), torch.stack([Y, Y**2], 1)),
    "classes": (lambda **options: ClassificationIntervals(classifier(3), **options), torch.arange(N) % 3),
    "one logit": (lambda **options: ClassificationIntervals(classifier(1), **options), torch.arange(N) % 2),
}


@pytest.fixture(params=KINDS)
def kind(request):
    """A function that makes a band, and the targets of X."""
    make, y = KINDS[request.param]
    return lambda engine="auto", **options: make(engine=engine, **(options or {"damping": 1.0})), y


def numbers(band):
    """Everything that a band says about new rows and itself."""
    about = [band.effective_parameters_, band.n_rows_, band.damping_, band.error_bound_]
    sums = [np.concatenate([fit.losses, fit.counts]) for fit in band.fits_]
    return [np.asarray(each, dtype=float) for each in (band.variance(NEW), band.leverage(NEW), *about, *sums)]


def assert_alike(band, other, rtol=1e-9):
    for one, two in zip(numbers(band), numbers(other), strict=True):
        np.testing.assert_allclose(one, two, rtol=rtol)


@pytest.mark.parametrize("engine", EXACT_SUMS, ids=repr)
def test_parts_are_one_fit(kind, engine):
    make, y = kind
    whole, parts = make(engine).fit(X, y, progress=False), make(engine)
    for start, stop in itertools.pairwise(CUTS):
        parts.partial_fit(X[start:stop], y[start:stop], n_rows=N)
    assert_alike(parts, whole)


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
def test_parts_that_are_asked_between_keep_all_rows(kind, engine):
    make, y = kind
    parts = make(engine)
    for start, stop in ((0, 100), (100, N)):
        parts.partial_fit(X[start:stop], y[start:stop], n_rows=N)
        parts.variance(NEW)
    whole = make(engine).fit(X, y, progress=False)
    assert parts.n_rows_ == N
    for fit, other in zip(parts.fits_, whole.fits_, strict=True):
        np.testing.assert_allclose(fit.losses, other.losses, rtol=1e-9)
        np.testing.assert_allclose(fit.counts, other.counts, rtol=1e-9)


@pytest.mark.parametrize("engine", EXACT_SUMS, ids=repr)
def test_merged_bands_are_one_fit(kind, engine):
    make, y = kind
    whole = make(engine).fit(X, y, progress=False)
    one, two = (make(engine).fit(X[part], y[part], progress=False) for part in (slice(0, 120), slice(120, None)))
    assert_alike(one.merge(two), whole)


def test_bands_of_different_tasks_are_not_merged():
    regressor = PredictionIntervals(classifier(3), damping=1.0).fit(X, torch.stack([Y] * 3, 1), progress=False)
    other = ClassificationIntervals(classifier(3), damping=1.0).fit(X, torch.arange(N) % 3, progress=False)
    with pytest.raises(TypeError, match="merge takes another PredictionIntervals, got ClassificationIntervals"):
        regressor.merge(other)
    with pytest.raises(ValueError, match="bands of different per_output cannot be merged"):
        other.merge(
            ClassificationIntervals(classifier(3), damping=1.0, per_output=True).fit(
                X, torch.arange(N) % 3, progress=False
            )
        )


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
def test_a_fit_that_was_ended_resumes_to_the_same_band(kind, engine, tmp_path, monkeypatch):
    monkeypatch.setattr("deltaband.network.network.CHUNK_ROWS_AT_MOST", 16)
    monkeypatch.setattr("deltaband.fitting.accumulator.PRODUCT_ROWS", 32)
    make, y = kind
    path, rows = tmp_path / "fit.ckpt", TensorDataset(X, y)
    ending = Ending(rows, 10)
    ending.ends_in = 2 if isinstance(engine, Nystrom) else 1  # which draws its landmarks first
    with pytest.raises(Ended):
        make(engine).fit(ending, checkpoint=path, checkpoint_every=0, progress=False)
    assert path.exists()
    resumed = make(engine).fit(DataLoader(rows, 10), checkpoint=path, progress=False)
    assert_alike(resumed, make(engine).fit(DataLoader(rows, 10), progress=False), rtol=0)
    assert not path.exists()


def test_a_checkpoint_of_another_task_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("deltaband.network.network.CHUNK_ROWS_AT_MOST", 16)
    path, model = tmp_path / "fit.ckpt", classifier(2)
    with pytest.raises(Ended):
        PredictionIntervals(model, damping=1.0).fit(
            Ending(TensorDataset(X, torch.stack([Y, Y], 1)), 10), checkpoint=path, checkpoint_every=0, progress=False
        )
    with pytest.raises(ArtefactError, match="is of a fit with kind='Regression', and this one has 'Classification'"):
        ClassificationIntervals(model, damping=1.0).fit(X, torch.arange(N) % 2, checkpoint=path, progress=False)


@pytest.mark.parametrize("engine", EXACT_SUMS, ids=repr)
def test_a_band_from_a_file_takes_in_more_rows(kind, engine, tmp_path):
    make, y = kind
    half = make(engine).fit(X[:100], y[:100], progress=False)
    half.save(tmp_path / "half.band")
    loaded = type(half).load(tmp_path / "half.band", half.model)
    assert_alike(loaded.partial_fit(X[100:], y[100:]), make(engine).fit(X, y, progress=False))


@pytest.mark.parametrize("engine", EXACT_SUMS, ids=repr)
def test_bands_that_are_both_from_files_are_merged(kind, engine, tmp_path):
    make, y = kind
    for i, part in enumerate((slice(0, 120), slice(120, None))):
        make(engine).fit(X[part], y[part], progress=False).save(tmp_path / f"{i}.band")
    whole = make(engine).fit(X, y, progress=False)
    one, two = (type(whole).load(tmp_path / f"{i}.band", whole.model) for i in range(2))
    assert_alike(one.merge(two), whole)


@pytest.mark.parametrize("damping", [1, 1.0, np.float64(1.0), np.float32(1.0), np.int64(1)])
def test_equal_numbers_are_equal_options(kind, damping, tmp_path):
    make, y = kind
    make(damping=1.0).fit(X[:100], y[:100], progress=False).save(tmp_path / "x.band")
    band = make(damping=damping).fit(X[100:], y[100:], progress=False)
    assert band.merge(type(band).load(tmp_path / "x.band", band.model)).n_rows_ == N


def test_a_part_with_bad_targets_changes_nothing(kind):
    make, y = kind
    band = make().fit(X[:100], y[:100], progress=False)
    before = numbers(band)
    bad = y[100:].double().clone()
    bad[3] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        band.partial_fit(X[100:], bad)
    for one, two in zip(numbers(band), before, strict=True):
        np.testing.assert_array_equal(one, two)


def test_weights_that_change_before_the_fit_is_completed_are_an_error(kind):
    make, y = kind
    band = make().partial_fit(X, y)
    w = next(band.model.parameters())
    before = w.detach().clone()
    w.data += 1
    with pytest.raises(ValueError, match="weights have changed before the fit was completed"):
        band.variance(NEW)
    w.data = before
    assert_alike(band, make().fit(X, y, progress=False))


def test_accuracy_is_that_of_all_parts():
    y, model = torch.arange(N) % 3, classifier(3)
    band = ClassificationIntervals(model, damping=1.0)
    for start, stop in itertools.pairwise(CUTS):
        band.partial_fit(X[start:stop], y[start:stop])
    right = float((model(X).argmax(dim=1) == y).double().mean())
    assert f"training accuracy     {100 * right:.2f}%" in band.summary()
    assert copy.deepcopy(band).summary() == band.summary()
