"""Intervals for scikit-learn's networks."""

import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from sklearn import config_context
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import RandomForestRegressor
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.model_selection import GridSearchCV, cross_val_score, cross_validate, train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, PowerTransformer, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from deltaband import DeltabandWarning, Exact, ImportantDirections, PredictionIntervals
from deltaband.errors import UnreliableFormulaWarning
from deltaband.sklearn import IntervalRegressor
from deltaband.sklearn.unwrap import find_network


def data(n=150, seed=0):
    """y > 0, with noise of standard deviation 0.1 around a sine."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (n, 2))
    return X, 3 + np.sin(X[:, 0]) + 0.5 * X[:, 1] + 0.1 * rng.standard_normal(n)


def network(**settings):
    settings = {"hidden_layer_sizes": (6,), "activation": "tanh", "solver": "lbfgs", "alpha": 0.1, **settings}
    return MLPRegressor(**{"max_iter": 3000, "random_state": 0, **settings})


def log_target(regressor):
    return TransformedTargetRegressor(regressor, func=np.log, inverse_func=np.exp)


def scaled_target(regressor):
    return TransformedTargetRegressor(regressor, transformer=StandardScaler())


def coverage(regressor, units=lambda y: y):
    X, y = data(2000, seed=1)
    y = units(y)
    _, lower, upper = regressor.predict_interval(X)
    return np.mean((lower <= y) & (y <= upper))


# --- scikit-learn's contract


@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning", "ignore::sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks(
    [
        IntervalRegressor(MLPRegressor(max_iter=100, random_state=0)),
        IntervalRegressor(MLPRegressor(max_iter=100, random_state=0), calibration=0.3, random_state=0),
        IntervalRegressor(make_pipeline(StandardScaler(), scaled_target(network()))),
    ],
    expected_failed_checks=lambda regressor: (
        {"check_sample_weight_equivalence_on_dense_data": "repeated rows are held out, or scaled, one by one"}
        if regressor.calibration or isinstance(regressor.estimator, Pipeline)
        else {}
    ),
)
def test_it_is_an_estimator_as_scikit_learn_expects(estimator, check):
    check(estimator)


def test_it_takes_part_in_cross_validation_and_grid_search():
    X, y = data()
    regressor = IntervalRegressor(make_pipeline(StandardScaler(), network()))
    assert cross_val_score(regressor, X, y, cv=3).min() > 0.9
    search = GridSearchCV(IntervalRegressor(network()), {"estimator__alpha": [0.1, 50.0]}, cv=3).fit(X, y)
    assert search.best_params_ == {"estimator__alpha": 0.1}
    assert search.best_estimator_.band_.damping_ == 0.1


def test_a_clone_is_unfitted_and_a_pickle_gives_the_same_intervals():
    X, y = data()
    regressor = IntervalRegressor(network(), engine=Exact(), level=0.8).fit(X, y)
    again = pickle.loads(pickle.dumps(regressor))
    np.testing.assert_allclose(again.predict_interval(X).lower, regressor.predict_interval(X).lower, rtol=1e-9)
    with pytest.raises(NotFittedError):
        clone(regressor).predict_interval(X)
    assert clone(regressor).set_params(estimator__alpha=2.0).fit(X, y).band_.damping_ == 2.0


def test_fit_leaves_the_estimator_it_was_given_alone():
    X, y = data()
    estimator, state = network(), torch.get_rng_state()
    regressor = IntervalRegressor(estimator).fit(X, y)
    assert not hasattr(estimator, "coefs_")
    assert hasattr(regressor.estimator_, "coefs_")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_frame_is_known_by_its_columns():
    X, y = data()
    frame = pd.DataFrame(X, columns=["a", "b"], index=np.arange(len(X)) + 1000)
    regressor = IntervalRegressor(make_pipeline(StandardScaler(), network()), calibration=0.3, random_state=0)
    regressor.fit(frame, pd.Series(y, index=frame.index))
    assert list(regressor.feature_names_in_) == ["a", "b"]
    assert regressor.n_features_in_ == 2
    assert regressor.predict_interval(frame).mean.shape == (150,)
    for method in (regressor.predict, regressor.predict_interval):
        with pytest.raises(ValueError, match="Feature names must be in the same order"):
            method(frame[["b", "a"]])


# --- the intervals


def test_the_intervals_are_those_of_the_band_of_the_network():
    X, y = data()
    regressor = IntervalRegressor(network()).fit(X, y)
    mean, lower, upper = intervals = regressor.predict_interval(X, level=0.9)
    np.testing.assert_array_equal(mean, network().fit(X, y).predict(X))
    band = PredictionIntervals(regressor.band_.model, damping=0.1).fit(X, y, progress=False)
    np.testing.assert_allclose(lower, band.predict(X, 0.9).lower)
    np.testing.assert_allclose(upper, band.predict(X, 0.9).upper)
    assert intervals.level == 0.9
    assert {part.dtype for part in intervals} == {np.dtype(np.float64)}
    assert regressor.predict_interval(X[:4], [0.5, 0.9]).lower.shape == (4, 2)
    assert regressor.predict_interval(X[:4]).level == 0.95


def test_the_standard_deviation_is_that_of_a_new_observation():
    X, y = data()
    regressor = IntervalRegressor(network()).fit(X, y)
    mean, std = regressor.predict(X, return_std=True)
    band = regressor.band_
    np.testing.assert_array_equal(mean, regressor.predict(X))
    np.testing.assert_allclose(std, band.noise_std_ * np.sqrt(1 + band.variance(X)))
    new, target = data(2000, seed=1)
    mean, std = regressor.predict(new, return_std=True)
    assert np.mean(np.square((target - mean) / std)) == pytest.approx(1, abs=0.15)


def test_the_intervals_cover_new_observations():
    X, y = data()
    assert 0.92 < coverage(IntervalRegressor(network()).fit(X, y)) < 0.98


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_calibration_makes_a_network_honest_whose_formula_is_not():
    X, y = data(300)
    default = MLPRegressor(learning_rate_init=0.01, max_iter=100, random_state=0)
    with pytest.warns(DeltabandWarning, match="calibrate"):
        formula = IntervalRegressor(default).fit(X, y)
    calibrated = IntervalRegressor(default, calibration=0.3, random_state=0).fit(X, y)  # without that warning
    assert calibrated.band_.n_rows_ == 210
    assert 0.9 < coverage(calibrated) < 0.99 < coverage(formula)
    new, target = data(2000, seed=1)
    assert calibrated.predict_interval(new).width.mean() < 0.7 * formula.predict_interval(new).width.mean()
    mean, std = calibrated.predict(new, return_std=True)
    assert np.mean(np.square((target - mean) / std)) == pytest.approx(1, abs=0.5)


def test_warnings_point_at_the_users_line_and_a_calibration_drops_those_about_the_formula():
    X, y = data(20)
    settings = {"damping": 1e-6, "engine": ImportantDirections(1000), "random_state": 0}
    with pytest.warns(DeltabandWarning) as formula:
        IntervalRegressor(network(hidden_layer_sizes=(20,)), **settings).fit(X, y)
    assert UnreliableFormulaWarning in {warning.category for warning in formula}
    with pytest.warns(DeltabandWarning, match="rank=1000 is larger") as calibrated:
        IntervalRegressor(network(hidden_layer_sizes=(20,)), calibration=0.3, **settings).fit(X, y)
    assert UnreliableFormulaWarning not in {warning.category for warning in calibrated}
    assert {warning.filename for warning in [*formula, *calibrated]} == {__file__}


def test_a_given_damping_or_weight_decay_is_what_counts():
    X, y = data()
    assert IntervalRegressor(network(), damping=3.0).fit(X, y).band_.damping_ == 3.0
    assert IntervalRegressor(network(), weight_decay=0.02).fit(X, y).band_.damping_ == pytest.approx(1.5)


# --- weights


@pytest.mark.parametrize(
    "wrap",
    [
        lambda e: e,
        scaled_target,
        lambda e: make_pipeline(StandardScaler(), e),
        lambda e: make_pipeline(MinMaxScaler(), scaled_target(make_pipeline(StandardScaler(), e))),
    ],
    ids=["alone", "scaled target", "pipeline", "nested"],
)
def test_weights_reach_the_network_and_the_band(wrap):
    X, y = data()
    w = np.random.default_rng(2).uniform(0.1, 4, len(y))
    regressor = IntervalRegressor(wrap(network())).fit(X, y, sample_weight=w)
    unweighted = IntervalRegressor(wrap(network())).fit(X, y)
    assert np.abs(regressor.predict(X) - unweighted.predict(X)).max() > 1e-3
    inner = find_network(regressor.estimator_, fitted=True)
    Z, z = inner.inputs(X), inner.to_network(y)
    alone = network().fit(Z, z[:, 0], sample_weight=w)
    np.testing.assert_allclose(inner.network.predict(Z), alone.predict(Z), rtol=1e-6)
    band = PredictionIntervals(inner.module(), damping=0.1).fit(Z, z, sample_weight=w, progress=False)
    np.testing.assert_allclose(regressor.band_.predict(Z).width, band.predict(Z).width)
    assert regressor.noise_std_ == pytest.approx(band.noise_std_)


def test_a_weight_of_zero_leaves_a_row_out():
    X, y = data()
    w = (np.arange(len(y)) % 3 > 0).astype(float)
    y[w == 0] += 100
    with_zeros = IntervalRegressor(network()).fit(X, y, sample_weight=w)
    without = IntervalRegressor(network()).fit(X[w > 0], y[w > 0])
    assert with_zeros.band_.n_rows_ == 100
    np.testing.assert_allclose(with_zeros.predict_interval(X).width, without.predict_interval(X).width, rtol=0.02)


def test_weights_are_held_out_with_their_rows():
    X, y = data(300)
    w = np.where(X[:, 0] > 0, 4.0, 1.0)
    regressor = IntervalRegressor(network(), calibration=0.3, random_state=0).fit(X, y, sample_weight=w)
    X_fit, _, y_fit, _, w_fit, _ = train_test_split(X, y, w, test_size=0.3, random_state=0)
    expected = IntervalRegressor(network()).fit(X_fit, y_fit, sample_weight=w_fit)
    assert regressor.band_.noise_std_ == pytest.approx(expected.band_.noise_std_)
    assert regressor.band_.calibration_ is not None


def test_rows_of_weight_zero_are_not_calibrated_on_either():
    X, y = data(300)
    w = (np.arange(len(y)) % 3 > 0).astype(float)
    y[w == 0] += 1000
    regressor = IntervalRegressor(network(), calibration=0.3, random_state=0).fit(X, y, sample_weight=w)
    held_out = train_test_split(w, test_size=0.3, random_state=0)[1]
    assert regressor.band_.calibration_.n_rows == int(held_out.sum())
    assert regressor.predict_interval(X).width.max() < 100


@pytest.mark.parametrize("wrap", [lambda e: e, lambda e: make_pipeline(MinMaxScaler(), e)])
def test_weights_are_routed_as_scikit_learn_routes_them(wrap):
    X, y = data()
    w = np.random.default_rng(2).uniform(0.1, 4, len(y))
    with config_context(enable_metadata_routing=True):
        regressor = IntervalRegressor(wrap(network().set_fit_request(sample_weight=True)))
        regressor = regressor.set_fit_request(sample_weight=True).set_score_request(sample_weight=False)
        found = cross_validate(regressor, X, y, cv=2, params={"sample_weight": w}, return_estimator=True)
    direct = IntervalRegressor(wrap(network())).fit(X[75:], y[75:], sample_weight=w[75:])  # the first of two folds
    assert found["estimator"][0].noise_std_ == pytest.approx(direct.noise_std_)


def test_a_frozen_network_is_not_trained_with_the_weights_of_the_band():
    X, y = data()
    w = np.linspace(0.5, 2, len(y))
    trained = network().fit(X, y, sample_weight=w)
    found = IntervalRegressor(FrozenEstimator(trained)).fit(X, y, sample_weight=w)
    assert found.noise_std_ == pytest.approx(IntervalRegressor(network()).fit(X, y, sample_weight=w).noise_std_)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (np.ones(149), "inconsistent|has a shape|shape"),
        (np.full(150, -1.0), "[Nn]egative"),
        (np.full(150, np.nan), "NaN"),
        (np.zeros(150), "zero"),
    ],
)
def test_weights_that_are_none_are_refused(weight, message):
    with pytest.raises(ValueError, match=message):
        IntervalRegressor(network()).fit(*data(), sample_weight=weight)


# --- pipelines, transformed targets and frozen estimators


def test_a_pipeline_is_the_network_on_transformed_rows():
    X, y = data()
    Z = StandardScaler().fit_transform(X)
    for pipeline in (
        make_pipeline(StandardScaler(), network()),
        make_pipeline(StandardScaler(), make_pipeline(network())),
    ):
        found = IntervalRegressor(pipeline).fit(X, y).predict_interval(X)
        np.testing.assert_allclose(found.lower, IntervalRegressor(network()).fit(Z, y).predict_interval(Z).lower)


def test_a_scaled_target_gives_bounds_and_deviations_in_the_original_units():
    X, y = data()
    y = 1000 * y
    scaler = StandardScaler().fit(y[:, None])
    inner = IntervalRegressor(network()).fit(X, scaler.transform(y[:, None])[:, 0])
    outer = IntervalRegressor(scaled_target(network())).fit(X, y)
    np.testing.assert_allclose(outer.predict(X), outer.estimator_.predict(X))
    np.testing.assert_allclose(outer.predict_interval(X).width, scaler.scale_ * inner.predict_interval(X).width)
    std, inner_std = (regressor.predict(X, return_std=True)[1] for regressor in (outer, inner))
    np.testing.assert_allclose(std, scaler.scale_ * inner_std)


@pytest.mark.parametrize(
    "nested",
    [
        log_target(network()),
        log_target(make_pipeline(StandardScaler(), network())),
        make_pipeline(StandardScaler(), log_target(network())),
        make_pipeline(MinMaxScaler(), log_target(make_pipeline(StandardScaler(), scaled_target(network())))),
    ],
    ids=range(4),
)
def test_a_log_target_gives_bounds_in_the_original_units(nested):
    X, y = data()
    regressor = IntervalRegressor(nested).fit(X, np.exp(y))
    mean, lower, upper = regressor.predict_interval(X, [0.5, 0.95])
    np.testing.assert_allclose(np.log(upper / mean[:, None]), np.log(mean[:, None] / lower), rtol=1e-6)
    assert 0.92 < coverage(regressor, units=np.exp) < 0.98
    with pytest.raises(ValueError, match="affine"):
        regressor.predict(X, return_std=True)


@pytest.mark.parametrize("calibration", [0.0, 0.3])
@pytest.mark.parametrize("side", ["upper", "lower"])
def test_one_side_is_a_bound_at_the_level(side, calibration):
    X, y = data(400)
    rising = IntervalRegressor(network(), calibration=calibration, random_state=0).fit(X, y)
    falling = TransformedTargetRegressor(network(), func=np.negative, inverse_func=np.negative)
    falling = IntervalRegressor(falling, calibration=calibration, random_state=0).fit(X, y)
    new, targets = data(600, seed=1)
    for regressor in (rising, falling):
        found, both = regressor.predict_interval(new, 0.9, side=side), regressor.predict_interval(new, 0.8)
        bound, other = (found.upper, -found.lower) if side == "upper" else (-found.lower, found.upper)
        assert np.isposinf(other).all()
        assert np.mean((targets if side == "upper" else -targets) <= bound) == pytest.approx(0.9, abs=0.05)
        if not calibration:
            end = both.upper if side == "upper" else -both.lower
            np.testing.assert_allclose(bound, end, rtol=1e-9, atol=1e-12)
    low = rising.predict_interval(new, 0.1, side=side)
    assert (low.upper < low.mean if side == "upper" else low.lower > low.mean).all()
    with pytest.raises(ValueError, match="side must be 'both', 'lower' or 'upper', got 'left'"):
        rising.predict_interval(new, side="left")


def test_a_falling_transform_swaps_the_bounds():
    X, y = data()
    inverse = TransformedTargetRegressor(network(), func=np.reciprocal, inverse_func=np.reciprocal)
    mean, lower, upper = IntervalRegressor(inverse).fit(X, y).predict_interval(X)
    assert (lower < mean).all()
    assert (mean < upper).all()
    far = TransformedTargetRegressor(network(), func=lambda y: 1e8 - y, inverse_func=lambda z: 1e8 - z)
    width = IntervalRegressor(far).fit(X, 1e8 + y).predict_interval(X).width
    assert width == pytest.approx(IntervalRegressor(network()).fit(X, -y).predict_interval(X).width, rel=0.02)


def test_a_transform_that_is_not_monotone_is_refused_and_one_that_ends_gives_no_bound():
    X, y = data()
    y = (y - y.min()) ** 2  # near 0 the square root of the lower bound would be negative
    root = TransformedTargetRegressor(network(), func=np.sqrt, inverse_func=np.square)
    with pytest.raises(ValueError, match="not monotone"):
        IntervalRegressor(root).fit(X, y).predict_interval(X)
    root.set_params(inverse_func=lambda z: np.square(np.maximum(z, 0)))
    assert IntervalRegressor(root).fit(X, y).predict_interval(X).lower.min() == 0
    power = TransformedTargetRegressor(network(), transformer=PowerTransformer(method="box-cox"))
    _, lower, upper = IntervalRegressor(power).fit(X, y + 1e-3).predict_interval(X, level=1 - 1e-12)
    assert np.isneginf(lower).any()
    assert not np.isnan(lower).any()
    assert np.isfinite(upper).all()


@pytest.mark.parametrize("wrap", [lambda e: e, scaled_target, lambda e: make_pipeline(StandardScaler(), e)])
def test_a_frozen_estimator_keeps_its_network(wrap):
    X, y = data()
    trained = wrap(network()).fit(X, y)
    regressor = IntervalRegressor(FrozenEstimator(trained)).fit(X, y)
    assert regressor.estimator_.estimator is trained
    trained_again = IntervalRegressor(wrap(network())).fit(X, y)
    np.testing.assert_allclose(regressor.predict_interval(X).lower, trained_again.predict_interval(X).lower)


def test_a_frozen_network_is_calibrated_on_rows_of_its_own():
    X, y = data(300)
    frozen = FrozenEstimator(scaled_target(network(alpha=0.0)).fit(X[:150], y[:150]))
    regressor = IntervalRegressor(frozen).fit(X[:150], y[:150])
    with pytest.raises(ValueError, match="λ is not known"):
        regressor.predict_interval(X)
    assert 0.9 < coverage(regressor.calibrate(X[150:], y[150:])) < 0.99
    with pytest.raises(ValueError, match="a frozen network is trained already"):
        IntervalRegressor(frozen, calibration=0.2).fit(X, y)


def test_a_frozen_network_that_is_trained_again_is_noticed():
    X, y = data()
    trained = network().fit(X, y)
    regressor = IntervalRegressor(FrozenEstimator(trained)).fit(X, y)
    trained.fit(X, 2 * y)
    with pytest.raises(ValueError, match="changed since fit"):
        regressor.predict_interval(X)


# --- what is refused, and what is not


@pytest.mark.parametrize(
    ("estimator", "error", "message"),
    [
        (RandomForestRegressor(), TypeError, "MLPRegressor or a skorch regressor.*got RandomForestRegressor"),
        (make_pipeline(StandardScaler(), RandomForestRegressor()), TypeError, "got RandomForestRegressor"),
        (TransformedTargetRegressor(), TypeError, "got None"),
        (MLPClassifier(), TypeError, "MLPClassifier is a classifier"),
        (FrozenEstimator(network()), NotFittedError, "not fitted yet"),
    ],
)
def test_what_holds_no_network_for_regression_is_refused(estimator, error, message):
    with pytest.raises(error, match=message):
        IntervalRegressor(estimator).fit(*data())


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"calibration": 1}, ValueError, "share of the rows"),
        ({"calibration": -0.1}, ValueError, "share of the rows"),
        ({"level": 95}, ValueError, "between 0 and 1"),
        ({"engine": "exakt"}, ValueError, "engine must be"),
        ({"damping": 1.0, "weight_decay": 1.0}, ValueError, "not both"),
    ],
)
def test_wrong_settings_are_said_before_the_training(settings, error, message):
    with pytest.raises(error, match=message):
        IntervalRegressor(network(solver="no training comes that far"), **settings).fit(*data())


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("target", [lambda regressor: regressor, scaled_target, log_target])
def test_several_outputs_have_an_interval_each(target):
    X, y = data()
    Y = np.column_stack([y, 10 * np.exp(X[:, 1]) + 0.1 * y])
    with pytest.warns(DeltabandWarning, match="λ does not follow"):  # lbfgs minimises neither the mean nor the sum
        unknown = IntervalRegressor(target(network())).fit(X, Y)
    with pytest.raises(ValueError, match="λ is not known"):
        unknown.predict_interval(X)
    regressor = IntervalRegressor(target(network()), damping=0.1).fit(X, Y)
    one = regressor.predict_interval(X[:5], level=0.9)
    several = regressor.predict_interval(X[:5], level=[0.5, 0.9])
    assert one.mean.shape == one.lower.shape == (5, 2)
    assert several.lower.shape == (5, 2, 2)
    np.testing.assert_allclose(several.upper[:, :, 1], one.upper)
    np.testing.assert_allclose(one.mean, regressor.estimator_.predict(X[:5]))
    band = regressor.band_.predict(X[:5], level=0.9)
    transformer = getattr(regressor.estimator_, "transformer_", None)
    expected = band.upper if transformer is None else transformer.inverse_transform(band.upper)
    np.testing.assert_allclose(one.upper, expected)
    if target is not log_target:
        _, std = regressor.predict(X[:5], return_std=True)
        assert std.shape == (5, 2)
        assert (np.ptp(std / one.width, axis=0) < 1e-6).all()  # t is that of the output
    calibrated = IntervalRegressor(target(network()), calibration=0.3, random_state=0).fit(X, Y)
    assert calibrated.predict_interval(X).width.shape == Y.shape
    inside = (calibrated.predict_interval(X).lower <= Y) & (calibrated.predict_interval(X).upper >= Y)
    assert (inside.mean(axis=0) > 0.9).all()


def test_targets_of_other_shapes_than_the_outputs_are_refused():
    X, y = data()
    with pytest.raises(ValueError, match="returns 2 outputs per row, and the targets have 1 columns"):
        IntervalRegressor(FrozenEstimator(network().fit(X, np.column_stack([y, y])))).fit(X, y)
    with pytest.raises(ValueError, match="y must have shape"):
        IntervalRegressor(network()).fit(X, y.reshape(-1, 1, 1))


def test_sparse_rows_are_refused_where_they_reach_the_network():
    X, y = data()
    with pytest.raises(TypeError, match="X is sparse"):
        IntervalRegressor(network()).fit(sparse.csr_matrix(X), y)
    with pytest.raises(TypeError, match="dense data is required"):
        IntervalRegressor(make_pipeline(OneHotEncoder(), network())).fit(X.round(), y)


def test_missing_values_are_for_the_pipeline():
    X, y = data()
    X[3, 0] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        IntervalRegressor(network()).fit(X, y)
    assert len(IntervalRegressor(make_pipeline(SimpleImputer(), network())).fit(X, y).predict_interval(X)) == 150


def test_lists_whole_numbers_a_constant_target_and_a_single_row_are_data_too():
    X, y = data()
    assert (
        len(IntervalRegressor(network(), calibration=0.3).fit(X.tolist(), y.tolist()).predict_interval(X.tolist()))
        == 150
    )
    assert np.isfinite(IntervalRegressor(network()).fit(X, y.round().astype(int)).predict_interval(X).width).all()
    assert IntervalRegressor(network()).fit(X, np.ones(150)).predict_interval(X).width.max() < 0.01
    with pytest.warns(DeltabandWarning):
        assert IntervalRegressor(network()).fit(X[:1], y[:1]).predict_interval(X).mean.shape == (150,)


def test_a_fit_that_has_failed_is_none():
    X, y = data(60)
    regressor = IntervalRegressor(network().set_params(activation="no such"))
    with pytest.raises(ValueError, match="activation"):
        regressor.fit(X, y)
    for asked in (regressor.predict, regressor.predict_interval, regressor.predict_quantiles):
        with pytest.raises(NotFittedError):
            asked(X)


def test_a_column_of_groups_is_covered_group_by_group():
    X, y = data(1500)
    frame = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "night": (np.arange(1500) % 3 == 0).astype(float)})
    y = y + np.where(frame.night == 1, 2.0, 0.0) * np.random.default_rng(1).standard_normal(1500)
    regressor = IntervalRegressor(network(), calibration=0.4, groups="night", random_state=0)
    regressor.fit(frame[:900], y[:900])
    by_number = clone(regressor).set_params(groups=2).fit(frame[:900].to_numpy(), y[:900])
    found = regressor.predict_interval(frame[900:], 0.8)
    assert len(regressor.band_.calibration_.rule.labels) == 2
    inside = (found.lower <= y[900:]) & (y[900:] <= found.upper)
    for night in (0, 1):
        assert abs(inside[frame.night[900:] == night].mean() - 0.8) < 0.1
    np.testing.assert_allclose(by_number.predict_interval(frame[900:].to_numpy(), 0.8).upper, found.upper)
    other = frame[900:].assign(night=2.0)
    with pytest.raises(ValueError, match=r"group 2\.0 of row 0 was not among the calibration rows"):
        regressor.predict_interval(other)
    assert np.isfinite(regressor.predict_interval(other, unknown="pool").upper).all()
    of_frame = clone(regressor).set_params(groups=2).fit(frame[:900], y[:900])
    np.testing.assert_array_equal(of_frame.predict_interval(frame[900:], 0.8).upper, found.upper)


def test_a_column_of_groups_is_looked_for_before_the_training_and_takes_a_calibration(monkeypatch):
    X, y = data(100)
    frame = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "night": np.arange(100) % 2})
    regressor = IntervalRegressor(network(), groups="night").fit(frame, y)
    for asked in (regressor.predict_interval, regressor.predict_quantiles, regressor.predict_distribution):
        with pytest.raises(ValueError, match=r"groups= .* calibrated with them"):
            asked(frame)
    monkeypatch.setattr(MLPRegressor, "fit", None)
    with pytest.raises(ValueError, match="groups must be a column of X, by name or number, got 'day'"):
        IntervalRegressor(network(), groups="day").fit(frame, y)
