"""Every warning points at the line of the user's code that called the library."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.neural_network import MLPRegressor
from torch.utils.data import DataLoader, TensorDataset

from deltaband import ClassificationIntervals, DeltabandWarning, PredictionIntervals
from deltaband.report import write
from deltaband.sklearn import IntervalRegressor
from tests.support.classifiers import classifier, labelled
from tests.support.networks import mlp, regression, trained_mlp

X, Y = regression()
TOO_LITTLE = 1e-6  # damping, for that few rows


def fitted():
    return PredictionIntervals(trained_mlp(), damping=1.0).fit(X, Y)


def calibrated():
    return fitted().calibrate(*regression(200, seed=1))


def changed(band=None):
    """A band whose model was trained further after the fit."""
    band = band or fitted()
    with torch.no_grad():
        band.model[0].bias += 1.0
    return band


def unfinished():
    """A band that has rows to take in."""
    return PredictionIntervals(mlp(), damping=TOO_LITTLE).partial_fit(X[:12], Y[:12])


def classifying():
    return ClassificationIntervals(classifier(3), damping=1.0).fit(*labelled())


def changed_classifier():
    band = classifying()
    with torch.no_grad():
        next(band.model.parameters()).mul_(1.5)
    return band


def regressor():
    return IntervalRegressor(
        MLPRegressor(hidden_layer_sizes=(4,), alpha=1e-6, max_iter=20_000, random_state=0, solver="lbfgs")
    )


def rows_one_by_one():
    yield from DataLoader(TensorDataset(X[:12], Y[:12]), batch_size=1)


SITUATIONS = {
    "fit": (lambda: PredictionIntervals(mlp(), damping=TOO_LITTLE), lambda band: band.fit(X[:12], Y[:12])),
    "fit of a generator": (
        lambda: PredictionIntervals(mlp(), damping=TOO_LITTLE),
        lambda band: band.fit(rows_one_by_one(), n_rows=12),
    ),
    "partial_fit": (calibrated, lambda band: band.partial_fit(X, Y)),
    "predict after partial_fit": (unfinished, lambda band: band.predict(X)),
    "merge": (fitted, lambda band: band.merge(fitted())),
    "calibrate": (fitted, lambda band: band.calibrate(X, Y)),
    "predict": (changed, lambda band: band.predict(X)),
    "predict_mean": (changed, lambda band: band.predict_mean(X)),
    "predict_mean_and_scale": (changed, lambda band: band.predict_mean_and_scale(X)),
    "variance": (changed, lambda band: band.variance(X)),
    "leverage": (changed, lambda band: band.leverage(X)),
    "plot": (changed, lambda band: band.plot(X, Y)),
    "predict_distribution": (changed, lambda band: band.predict_distribution(X)),
    "predict_linear": (changed, lambda band: band.predict_linear(X[:5], np.ones((1, 5)))),
    "covariance": (changed, lambda band: band.covariance(X[:5], X[5:9])),
    "sample": (changed, lambda band: band.sample(X[:5])),
    "online": (calibrated, lambda band: band.online(0.999).predict(X[:1])),
    "monitor": (lambda: changed(calibrated()), lambda band: band.monitor().update(X[:5])),
    "evaluate": (changed, lambda band: band.evaluate(X, Y)),
    "predict of a loader": (changed, lambda band: band.predict(DataLoader(TensorDataset(X, Y), batch_size=32))),
    "ClassificationIntervals.fit": (
        lambda: ClassificationIntervals(classifier(10), damping=1e-3),
        lambda band: band.fit(labelled(4)[0], torch.zeros(4)),
    ),
    "ClassificationIntervals.calibrate": (classifying, lambda band: band.calibrate(*labelled())),
    "ClassificationIntervals.merge": (lambda: (classifying(), classifying()), lambda bands: bands[0].merge(bands[1])),
    "ClassificationIntervals.predict": (changed_classifier, lambda band: band.predict(labelled(4)[0])),
    "IntervalRegressor.fit": (regressor, lambda estimator: estimator.fit(X.numpy()[:20], Y.numpy()[:20])),
    "IntervalRegressor.calibrate": (
        lambda: regressor().set_params(estimator__alpha=1.0).fit(X.numpy(), Y.numpy()),
        lambda estimator: estimator.calibrate(X.numpy(), Y.numpy()),
    ),
}


def check_line(said, line):
    ours = [warning for warning in said if issubclass(warning.category, DeltabandWarning)]
    assert ours
    assert len({str(warning.message) for warning in ours}) == len(ours)  # nothing is said twice
    assert [(warning.filename, warning.lineno) for warning in ours] == [(__file__, line)] * len(ours)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_warning_shows_the_users_line(situation):
    prepare, call = SITUATIONS[situation]
    subject = prepare()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call(subject)
    check_line(said, call.__code__.co_firstlineno)


def test_a_warning_of_a_report_or_a_file_shows_the_users_line(tmp_path):
    band, path = changed(), tmp_path / "band.safetensors"
    fitted().save(path)
    for call in (
        lambda: write(tmp_path / "report.html", band, X, Y),
        lambda: PredictionIntervals.load(path, band.model, strict=False),
    ):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            call()
        check_line(said, call.__code__.co_firstlineno)


def test_a_call_through_the_users_own_function_shows_the_line_in_it():
    def evaluate(band):
        return np.asarray(band.predict(X).lower)

    band = changed()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        evaluate(band)
    check_line(said, evaluate.__code__.co_firstlineno + 1)
