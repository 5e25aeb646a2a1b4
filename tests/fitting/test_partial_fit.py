"""Rows in parts, and bands that are added up, are one fit."""

import itertools
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import tests.reference as reference
from deltaband import (
    ClassificationIntervals,
    DeltabandWarning,
    Exact,
    FrequentDirections,
    ImportantDirections,
    NotFittedError,
    Nystrom,
    PredictionIntervals,
    RandomProjection,
    RobustFrequentDirections,
)
from deltaband.errors import MisfitWarning
from tests.support.networks import in_threads, mlp, regression

pytestmark = pytest.mark.filterwarnings(
    "ignore:the network has p",
    "ignore:most of these rows",
    "ignore:rank=",
    "ignore:n − p",
    "ignore:.*accurate",
    "ignore:the sketch may",
)
X, Y = regression(240)
CUTS = (0, 1, 41, 100, 239, 240)  # one row, fewer than p, more
GRAMS = [Exact(), RandomProjection(20), "auto"]
SKETCHES = [RobustFrequentDirections(15), FrequentDirections(15), ImportantDirections(15)]


def made(covariance, hidden=8, **options):
    options = options or {"damping": 1.0}
    return PredictionIntervals(mlp(hidden=hidden), engine=covariance, **options)


def in_parts(band, cuts=CUTS, ask=False, order=slice(None)):
    for start, stop in list(itertools.pairwise(cuts))[order]:
        band.partial_fit(X[start:stop], Y[start:stop], n_rows=len(X))
        if ask and band._partial[0].n_rows > 45:
            band.variance(X[:2])
    return band


def alike(band, other, rtol=1e-9):
    new = regression(20, seed=3)[0]
    np.testing.assert_allclose(band.variance(new), other.variance(new), rtol=rtol)
    np.testing.assert_allclose(band.leverage(new), other.leverage(new), rtol=rtol)
    np.testing.assert_allclose(band.predict(new).upper, other.predict(new).upper, rtol=rtol)
    assert band.effective_parameters_ == pytest.approx(other.effective_parameters_, rel=rtol)
    assert band.noise_std_ == pytest.approx(other.noise_std_, rel=rtol)
    assert (band.n_rows_, band.damping_) == (other.n_rows_, other.damping_)
    return True


# --- exactly


@pytest.mark.parametrize("engine", GRAMS, ids=repr)
@pytest.mark.parametrize("hidden", [8, 80])  # p = 41 and 401
@pytest.mark.parametrize("options", [{"damping": 1.0}, {"weight_decay": 1e-2}], ids=["λ", "wd"])
def test_parts_in_any_order_are_one_fit(engine, hidden, options):
    whole = made(engine, hidden, **options).fit(X, Y, progress=False)
    assert alike(in_parts(made(engine, hidden, **options)), whole)
    assert alike(in_parts(made(engine, hidden, **options), order=slice(None, None, -1)), whole)


@pytest.mark.parametrize("engine", GRAMS, ids=repr)
@pytest.mark.parametrize("hidden", [8, 80])
def test_a_band_that_is_asked_between_its_parts_ends_the_same(engine, hidden):
    whole = made(engine, hidden).fit(X, Y, progress=False)
    assert alike(in_parts(made(engine, hidden), ask=True), whole)


def test_parts_are_the_formula():
    band = in_parts(made(Exact()))
    _, J = reference.jacobian(band.model, X)
    _, g = reference.jacobian(band.model, X[:5] * 1.5)
    np.testing.assert_allclose(band.variance(X[:5] * 1.5), [reference.variance(J, 1.0, row) for row in g], rtol=1e-8)


@pytest.mark.parametrize("engine", GRAMS, ids=repr)
@pytest.mark.parametrize("hidden", [8, 80])
@pytest.mark.parametrize("cut", [30, 120, 230])
def test_bands_that_are_merged_are_one_fit(engine, hidden, cut):
    first, second = made(engine, hidden), made(engine, hidden)
    first.fit(X[:cut], Y[:cut], progress=False)
    second.fit(X[cut:], Y[cut:], progress=False)
    before = second.predict(X[:5]).upper
    whole = made(engine, hidden).fit(X, Y, progress=False)
    assert alike(first.merge(second), whole)
    np.testing.assert_array_equal(second.predict(X[:5]).upper, before)  # the other stays as it is
    assert second.n_rows_ == 240 - cut


def test_networks_that_return_other_numbers_are_not_merged():
    def leaky(slope, rows):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(slope), nn.Linear(8, 1)).double()
        return PredictionIntervals(model, damping=1.0).fit(X[rows], Y[rows], progress=False)

    with pytest.raises(ValueError, match="the same weights, but do not return the same"):
        leaky(0.01, slice(100)).merge(leaky(0.5, slice(100, 240)))


def test_a_warning_that_is_an_error_changes_nothing():
    band = made(Exact()).fit(X[:100], Y[:100], progress=False).calibrate(X[100:160], Y[100:160])
    before = band.predict(X[:9]).upper
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", MisfitWarning)  # of random weights
        with pytest.raises(DeltabandWarning, match="end the calibration"):
            band.partial_fit(X[160:], Y[160:])
        with pytest.raises(DeltabandWarning, match="end the calibration"):
            band.merge(made(Exact()).fit(X[160:], Y[160:], progress=False))
    np.testing.assert_array_equal(band.predict(X[:9]).upper, before)
    assert band.n_rows_ == 100


def test_rows_that_are_there_already_are_told():
    band = made(Exact()).fit(X[:100], Y[:100], progress=False)
    with pytest.warns(DeltabandWarning, match="most of these rows have been fitted to already"):
        band.merge(band)
    assert band.n_rows_ == 200
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        band.merge(made(Exact()).fit(X[100:], Y[100:], progress=False))
    # rows that repeat one another anyway are none that were read twice
    few = torch.arange(3.0, dtype=torch.float64).repeat(50)[:, None].expand(-1, 3).contiguous()
    one, other = (made(Exact()).fit(few, few[:, 0], progress=False) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.merge(other)


def test_merging_is_the_same_in_either_order():
    for engine in (Exact(), RandomProjection(20)):
        thirds = [made(engine).fit(X[i::3], Y[i::3], progress=False) for i in range(3)]
        one = made(engine).fit(X[0::3], Y[0::3], progress=False).merge(thirds[1]).merge(thirds[2])
        other = made(engine).fit(X[2::3], Y[2::3], progress=False).merge(thirds[1]).merge(thirds[0])
        assert alike(one, other)


def test_a_fit_and_a_file_go_on(tmp_path):
    for engine in (Exact(), RandomProjection(20)):
        whole = made(engine).fit(X, Y, progress=False)
        band = made(engine).fit(X[:100], Y[:100], progress=False)
        band.save(tmp_path / "x.band")
        loaded = PredictionIntervals.load(tmp_path / "x.band", band.model)
        assert alike(band.partial_fit(X[100:], Y[100:]), whole)
        assert alike(loaded.partial_fit(X[100:], Y[100:]), whole)


def test_without_a_damping():
    def calibrated(band):
        return band.calibrate(*regression(60, seed=9)).predict(X[:9]).upper

    for engine in (Exact(), RobustFrequentDirections(50), RandomProjection(20)):
        for hidden in (8, 80):
            whole = PredictionIntervals(mlp(hidden=hidden), engine=engine).fit(X, Y, progress=False)
            parts = PredictionIntervals(mlp(hidden=hidden), engine=engine).fit(X[:90], Y[:90], progress=False)
            parts.partial_fit(X[90:], Y[90:])
            tolerance = 1e-9 if not isinstance(engine, RobustFrequentDirections) else 0.02
            np.testing.assert_allclose(calibrated(parts), calibrated(whole), rtol=tolerance)


@pytest.mark.parametrize("per_output", [False, True])
def test_several_outputs(per_output):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    y = torch.stack([Y, -2 * Y], dim=1)
    whole = PredictionIntervals(model, damping=0.5, per_output=per_output).fit(X, y, progress=False)
    parts = PredictionIntervals(model, damping=0.5, per_output=per_output)
    for start in range(0, 240, 60):
        parts.partial_fit(X[start : start + 60], y[start : start + 60])
    np.testing.assert_allclose(parts.variance(X[:7]), whole.variance(X[:7]), rtol=1e-9)
    # p* of each output is shared by a sample of the rows, which may be another one
    np.testing.assert_allclose(parts.noise_std_, whole.noise_std_, rtol=1e-3)


# --- sketches


@pytest.mark.parametrize("engine", SKETCHES, ids=repr)
@pytest.mark.parametrize("merge", [False, True])
def test_sketches_stay_within_their_certified_bound(engine, merge):
    if merge:
        band = made(engine).fit(X[:100], Y[:100], progress=False)
        band.merge(made(engine).fit(X[100:], Y[100:], progress=False))
    else:
        band = in_parts(made(engine), ask=True)
    _, J = reference.jacobian(band.model, X)
    covariance = band.fits_[0].covariance
    V = covariance.directions.double().numpy()
    sketch = (V.T * covariance.eigenvalues) @ V
    if covariance.floor:
        sketch += covariance.floor * (np.eye(J.shape[1]) - V.T @ V)
    error = np.linalg.norm(J.T @ J - sketch, 2)
    assert error <= covariance.error_bound * (1 + 1e-6) + 1e-8 * np.linalg.norm(J, 2) ** 2
    if not isinstance(engine, ImportantDirections):  # which may let the largest directions go
        assert covariance.error_bound < 0.1 * np.linalg.norm(J, 2) ** 2


def test_landmarks_come_from_the_first_part():
    first = made(Nystrom(41)).partial_fit(X[:100], Y[:100])
    whole = made(Exact()).fit(X, Y, progress=False)
    first.partial_fit(X[100:], Y[100:])
    np.testing.assert_allclose(first.variance(X[:9]), whole.variance(X[:9]), rtol=1e-2)
    assert first.n_rows_ == 240
    again = made(Nystrom(41)).fit(X[:100], Y[:100], progress=False).partial_fit(X[100:], Y[100:])
    np.testing.assert_allclose(again.variance(X[:9]), first.variance(X[:9]), rtol=1e-6)


def test_equal_landmarks_are_merged_and_others_refused():
    band = made(Nystrom(100)).fit(X[:100], Y[:100], progress=False)
    twice = made(Nystrom(100)).fit(X[:100], Y[:100], progress=False).merge(band)
    doubled = made(Exact()).fit(torch.cat([X[:100]] * 2), torch.cat([Y[:100]] * 2), progress=False)
    np.testing.assert_allclose(twice.variance(X[:9]), doubled.variance(X[:9]), rtol=1e-6)
    with pytest.raises(ValueError, match="sums over different landmarks cannot be merged"):
        band.merge(made(Nystrom(100)).fit(X[100:], Y[100:], progress=False))
    assert band.n_rows_ == 100


# --- what else there is of the rows


def test_calibration_ends_with_new_rows():
    band = made(Exact()).fit(X[:100], Y[:100], progress=False).calibrate(*regression(60, seed=9))
    with pytest.warns(DeltabandWarning, match="new training rows end the calibration"):
        band.partial_fit(X[100:], Y[100:])
    whole = made(Exact()).fit(X, Y, progress=False)
    assert alike(band, whole)
    band.calibrate(*regression(60, seed=9))
    with pytest.warns(DeltabandWarning, match="new training rows end the calibration"):
        band.merge(made(Exact()).fit(X[:9], Y[:9], progress=False))


def test_training_rows_of_all_parts_are_recognised():
    for band in (
        in_parts(made(Exact())),
        made(Exact()).fit(X[:100], Y[:100], progress=False).merge(made(Exact()).fit(X[100:], Y[100:], progress=False)),
    ):
        with pytest.warns(DeltabandWarning, match="100% of the calibration rows were training rows"):
            band.calibrate(torch.cat([X[:30], X[-30:]]), torch.cat([Y[:30], Y[-30:]]))


def test_the_sample_of_the_rows_is_of_all_parts_alike():
    X_, Y_ = regression(3000, n_inputs=3)
    X_[:, 0] = torch.arange(3000)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    for asked in (False, True):
        band = PredictionIntervals(model, damping=1.0, engine=Exact())
        for start in (0, 1000, 2000):
            band.partial_fit(X_[start : start + 1000], Y_[start : start + 1000])
            if asked:
                band.variance(X_[:1])
        band.variance(X_[:1])
        sample = band._fits[0].sample
        parts = np.bincount(np.concatenate([x.tensors[0][:, 0].numpy() for x in sample.pieces]).astype(int) // 1000)
        assert parts.sum() == 512
        assert (np.abs(parts - 512 / 3) < 50).all()  # nearly five standard deviations


def test_an_error_report_is_of_all_rows():
    band = in_parts(made(RobustFrequentDirections(5)))
    assert band.error_report(sample=200).n_rows == 180  # a quarter of 240 is asked about


# --- what can go wrong


def test_a_part_that_fails_changes_nothing():
    bad = X[100:200].clone()
    bad[57, 1] = np.nan
    whole = made(Exact()).fit(X, Y, progress=False)
    band = made(Exact()).partial_fit(X[:100], Y[:100])

    def breaking():
        yield X[100:150], Y[100:150]
        raise RuntimeError("the disk is gone")

    for attempt in (lambda: band.partial_fit(bad, Y[100:200]), lambda: band.partial_fit([(bad, Y[100:200])])):
        with pytest.raises(ValueError, match="row 57"):
            attempt()
    with pytest.raises(RuntimeError, match="the disk is gone"):
        band.partial_fit(breaking())
    with pytest.raises(ValueError, match="same number of rows"):
        band.partial_fit(X[:5], Y[:4])
    assert band.n_rows_ == 100
    assert alike(band.partial_fit(X[100:], Y[100:]), whole)


def test_the_exact_dual_grows_until_its_memory_ends():
    band = PredictionIntervals(mlp(hidden=200), damping=1.0, engine=Exact(), memory=4.2e5)
    band.partial_fit(X[:80], Y[:80], n_rows=80)
    band.partial_fit(X[80:100], Y[80:100])
    with pytest.raises(MemoryError, match=re.escape("as RandomProjection(), or give more memory")):
        band.partial_fit(X[100:], Y[100:])
    assert band.n_rows_ == 100
    whole = PredictionIntervals(band.model, damping=1.0).fit(X[: band.n_rows_], Y[: band.n_rows_], progress=False)
    assert alike(band, whole)


def test_weights_that_change_between_parts_are_an_error():
    band = made(Exact()).partial_fit(X[:100], Y[:100])
    with torch.no_grad():
        band.model[0].weight += 0.1
    with pytest.raises(ValueError, match="weights are not the same for all parts"):
        band.partial_fit(X[100:], Y[100:])
    band = made(Exact()).fit(X[:100], Y[:100], progress=False)
    with torch.no_grad():
        band.model[0].weight += 0.1
    with pytest.raises(ValueError, match=re.escape("changed since fit (first: '0.weight')")):
        band.partial_fit(X[100:], Y[100:])


def test_a_sketch_that_needs_its_damping_says_what_to_give():
    band = made(ImportantDirections(10), weight_decay=1e-2)
    with pytest.raises(ValueError, match="n_rows="):
        band.partial_fit(X[:100], Y[:100])
    band.partial_fit(X[:100], Y[:100], n_rows=240).partial_fit(X[100:], Y[100:])
    assert band.damping_ == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: made(Exact(), damping=2.0), "different damping"),
        (lambda: made(RandomProjection(20)), "different engine"),
        (lambda: made(Exact(), damping=1.0, target_transform=(1.0, 2.0)), "target_transform"),
        (lambda: PredictionIntervals(mlp(seed=1), damping=1.0, engine=Exact()), "weights are not the same"),
        (lambda: PredictionIntervals(mlp(hidden=9), damping=1.0, engine=Exact()), "weights are not the same"),
    ],
)
def test_bands_that_do_not_go_together(other, message):
    band = made(Exact()).fit(X, Y, progress=False)
    with pytest.raises(ValueError, match=message):
        band.merge(other().fit(X, Y, progress=False))
    assert band.n_rows_ == 240


def test_merge_takes_a_fitted_band_of_its_kind():
    band = made(Exact()).fit(X, Y, progress=False)
    with pytest.raises(NotFittedError):
        band.merge(made(Exact()))
    with pytest.raises(NotFittedError):
        made(Exact()).merge(band)
    for other in (None, 3, ClassificationIntervals(mlp(), damping=1.0)):
        with pytest.raises(TypeError, match="merge takes another PredictionIntervals"):
            band.merge(other)


def test_threads_may_ask_for_what_is_not_worked_out_yet():
    whole, band, answers = made(Exact()).fit(X, Y, progress=False), in_parts(made(Exact())), {}
    in_threads(lambda i: answers.__setitem__(i, band.variance(X[:9])))
    assert len(answers) == 8
    for q in answers.values():
        np.testing.assert_allclose(q, whole.variance(X[:9]), rtol=1e-9)


def test_fit_starts_anew():
    band = in_parts(made(Exact())).fit(X[:100], Y[:100], progress=False)
    assert band.n_rows_ == 100
    band = made(Exact()).partial_fit(X[:50], Y[:50])
    band.fit(X, Y, progress=False)
    assert band.n_rows_ == 240


def test_warnings_come_when_it_is_worked_out():
    band = PredictionIntervals(mlp(hidden=80), damping=1e-6, engine=Exact())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        band.partial_fit(X[:60], Y[:60])
    with pytest.warns(DeltabandWarning, match="p\\*"):
        assert band.n_rows_ == 60
