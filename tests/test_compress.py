"""`compress`: an exact band in a form of fixed cost."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

import tests.reference as reference
from deltaband import Exact, PredictionIntervals, RandomProjection
from deltaband.engines.projection import ProjectedCovariance
from tests.support.networks import mlp, regression

N = {"dual": 300, "primal": 1500}
NEW = regression(80, seed=9)[0]


def exact(form, **options):
    X, y = regression(N[form])
    model = mlp(hidden=200)  # p = 1001
    return PredictionIntervals(model, **({"damping": 30.0} | options), engine=Exact()).fit(X, y, progress=False)


@pytest.mark.parametrize("form", N)
@pytest.mark.parametrize("tolerance", [0.01, 0.002])
def test_widths_are_those_of_dense_gradients_within_the_tolerance(form, tolerance):
    band = exact(form)
    assert f"exact, {form} form" in band.summary()
    small = band.compress(tolerance, NEW)
    X, y = regression(N[form])
    outputs, J = reference.jacobian(band.model, X)
    A = np.linalg.inv(J.T @ J + 30.0 * np.eye(J.shape[1]))
    _, g = reference.jacobian(band.model, NEW)
    q = np.einsum("ij,ij->i", g @ A @ (J.T @ J), g @ A)
    H = J @ A @ J.T
    nu = len(X) - np.trace(2 * H - H @ H)
    width = 2 * stats.t.ppf(0.975, nu) * np.sqrt(np.sum((y.numpy() - outputs) ** 2) / nu * (1 + q))
    off = np.abs(small.predict(NEW).width.numpy() / width - 1)
    assert off.max() <= tolerance * (1 + 1e-6)
    covariance = small.fits_[0].covariance
    assert isinstance(covariance, ProjectedCovariance)
    assert covariance.S.dim < 1001
    report = small.fits_[0].error
    assert report.measured
    assert report.largest == pytest.approx(off.max(), rel=1e-3, abs=1e-7)
    assert report.width == pytest.approx(off.mean(), rel=1e-3, abs=1e-7)
    assert f"{off.max():.2%} at most, measured on 80 rows" in small.summary()
    assert small.engine == RandomProjection(covariance.S.dim)
    assert band.engine == Exact()  # which stays as it is
    assert "exact" in band.summary()


def test_a_smaller_tolerance_takes_more_dimensions():
    band = exact("primal")
    dims = [band.compress(tolerance, NEW).fits_[0].covariance.S.dim for tolerance in (0.03, 0.002)]
    assert dims[0] < dims[1]


def test_without_rows_it_measures_on_training_rows():
    small = exact("dual").compress()
    assert small.fits_[0].error.n_rows == 300
    assert small.fits_[0].error.largest <= 0.01


@pytest.mark.parametrize("form", N)
@pytest.mark.parametrize("damping", [30.0, None])
def test_a_calibration_stays_and_its_widths_are_off_by_no_more_than_was_measured(form, damping):
    X_cal, y_cal = regression(150, seed=5)
    band = exact(form, damping=damping).calibrate(X_cal, y_cal, noise="none")
    small = band.compress(0.02, NEW)
    ratio = small.predict(NEW, level=0.9).width / band.predict(NEW, level=0.9).width
    assert 0 < (ratio - 1).abs().max() <= 0.021  # candidates in between count for a little
    assert small.fits_[0].error.largest > 0
    assert "measured on 80 rows" in small.summary()
    again = small.calibrate(X_cal, y_cal, noise="none")
    assert again is small
    new_X, new_y = regression(1500, seed=6)
    answer = small.predict(new_X, level=0.9)
    assert 0.8 < ((answer.lower <= new_y) & (new_y <= answer.upper)).double().mean() < 0.97


@pytest.mark.parametrize("form", N)
def test_files_and_further_rows(form, tmp_path):
    small = exact(form).compress(0.01, NEW)
    small.save(tmp_path / "small.band")
    loaded = PredictionIntervals.load(tmp_path / "small.band", small.model)
    for mine, theirs in zip(small.predict(NEW), loaded.predict(NEW), strict=True):
        assert torch.equal(mine, theirs)
    assert "at most, measured on 80 rows" in loaded.summary()
    X, y = regression(200, seed=3)
    more = loaded.partial_fit(X, y)
    X_all, y_all = (torch.cat(pair) for pair in zip(regression(N[form]), (X, y), strict=True))
    whole = PredictionIntervals(small.model, damping=30.0, engine=Exact()).fit(X_all, y_all, progress=False)
    assert (more.predict(NEW).width / whole.predict(NEW).width - 1).abs().max() < 0.02


def test_several_outputs_alone_and_together():
    X = torch.randn(200, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    Y = torch.stack([X[:, 0].sin(), X[:, 1] * X[:, 2]], dim=1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 150), torch.nn.Tanh(), torch.nn.Linear(150, 2)).double()
    for per_output in (False, True):
        band = PredictionIntervals(model, damping=20.0, engine=Exact(), per_output=per_output)
        band.fit(X, Y, progress=False)
        small = band.compress(0.02, X[:50])
        assert (small.predict(X[:50]).width / band.predict(X[:50]).width - 1).abs().max() <= 0.02


def test_what_cannot_be_compressed_is_refused():
    band = exact("dual")
    with pytest.raises(ValueError, match=r"within 0.00% of exact would take too many dimensions"):
        band.compress(1e-12)
    for tolerance in (0, -1, math.nan, "small"):
        with pytest.raises(ValueError, match="tolerance must be"):
            band.compress(tolerance)
    with pytest.raises(ValueError, match="compress is for exact fits"):
        band.compress(0.01, NEW).compress(0.01)
    with pytest.raises(ValueError, match="robust"):
        exact("dual", robust="HC1").compress()
    with pytest.raises(ValueError, match="λ is not known"):
        exact("dual", damping=None).compress()


def test_a_band_from_a_file_has_no_training_rows_to_measure_on(tmp_path):
    band = exact("dual")
    band.save(tmp_path / "exact.band")
    loaded = PredictionIntervals.load(tmp_path / "exact.band", band.model)
    with pytest.raises(ValueError, match="give x="):
        loaded.compress()
    assert loaded.compress(0.01, NEW).fits_[0].error.n_rows == 80
