import pickle

import numpy as np
import pytest
from sklearn import config_context
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score, cross_validate
from sklearn.neural_network import MLPRegressor

from deltaband import PredictionIntervals, metrics
from deltaband.sklearn import BandRegressor, IntervalRegressor, IntervalScorer
from tests.support.networks import mlp


def network(**settings):
    options = {"hidden_layer_sizes": (5,), "activation": "tanh", "solver": "lbfgs", "alpha": 0.1, "max_iter": 2000}
    return MLPRegressor(**options | settings, random_state=0)


def data(n=150, m=1):
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (n, 2))
    y = np.sin(X[:, :1]) + 0.1 * rng.standard_normal((n, m))
    return X, y[:, 0] if m == 1 else y


def test_it_is_minus_the_interval_score_of_each_fold():
    X, y = data()
    regressor = IntervalRegressor(network(), level=0.8)
    found = {level: cross_val_score(regressor, X, y, cv=3, scoring=IntervalScorer(level)) for level in (None, 0.95)}
    for i, (train, test) in enumerate(KFold(3).split(X)):
        fitted = IntervalRegressor(network()).fit(X[train], y[train])
        for level, scores in found.items():
            intervals = fitted.predict_interval(X[test], level or 0.8)
            assert scores[i] == pytest.approx(-metrics.interval_score(y[test], intervals))


def test_a_search_chooses_by_it_and_it_has_weights():
    X, y = data()
    search = GridSearchCV(
        IntervalRegressor(network()), {"estimator__alpha": [0.1, 50.0]}, cv=3, scoring=IntervalScorer()
    )
    assert search.fit(X, y).best_params_ == {"estimator__alpha": 0.1}
    fitted, w = IntervalRegressor(network()).fit(X, y), np.random.default_rng(1).integers(0, 3, len(y))
    repeated = np.repeat(X, w, axis=0), np.repeat(y, w)
    assert IntervalScorer()(fitted, X, y, sample_weight=w) == pytest.approx(IntervalScorer()(fitted, *repeated))
    with pytest.raises(ValueError, match="Negative"):
        IntervalScorer()(fitted, X, y, sample_weight=-w)


def test_several_scorers_of_several_outputs_with_routing():
    X, y = data(m=2)
    scorers = {"80": IntervalScorer(0.8), "95": IntervalScorer(0.95)}
    regressor = IntervalRegressor(network(), damping=0.1)
    with config_context(enable_metadata_routing=True):
        found = cross_validate(regressor, X, y, cv=2, scoring=scorers, return_estimator=True)
    intervals = found["estimator"][0].predict_interval(X[:75], 0.8)
    assert found["test_80"][0] == pytest.approx(-np.mean(metrics.interval_score(y[:75], intervals)))
    assert (found["test_95"] < found["test_80"]).all()


@pytest.mark.filterwarnings("ignore:the network")  # is not trained
def test_a_band_is_scored_too():
    X, y = data()
    band = PredictionIntervals(mlp(2), damping=1.0).fit(X, y, progress=False)
    expected = metrics.interval_score(y, band.predict(X, 0.9))
    assert IntervalScorer(0.9)(BandRegressor(band), X, y) == pytest.approx(-expected)
    assert IntervalScorer((0.9,))(BandRegressor(band), X, y) == pytest.approx(-expected)
    assert pickle.loads(pickle.dumps(IntervalScorer(0.9))) == IntervalScorer(0.9)


def test_what_cannot_be_scored_is_refused():
    X, y = data()
    with pytest.raises(TypeError, match="an estimator with predict_interval, got LinearRegression"):
        IntervalScorer()(LinearRegression().fit(X, y), X, y)
    for level, kind, message in (
        (1.5, ValueError, "level must be between 0 and 1"),
        ([0.5, 0.9], ValueError, "one level"),
        ("high", TypeError, "level must be a number"),
    ):
        with pytest.raises(kind, match=message):
            IntervalScorer(level)
    fitted = IntervalRegressor(network()).fit(X, y)
    with pytest.raises(ValueError, match="one interval per target"):
        IntervalScorer()(fitted, X, y[:-1])
    with pytest.raises(ValueError, match="NaN"):
        IntervalScorer()(fitted, X, np.where(np.arange(len(y)) == 3, np.nan, y))
