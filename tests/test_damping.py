import numpy as np
import pytest

import tests.reference as reference
from deltaband import Exact, Nystrom, PredictionIntervals, RandomProjection, RobustFrequentDirections
from deltaband.baselines import DeepEnsemble
from tests.support.networks import mlp, regression


@pytest.mark.parametrize("value", [True, False, np.True_])
def test_a_truth_value_is_no_damping_and_no_noise(model, value):
    for name in ("damping", "weight_decay"):
        with pytest.raises(TypeError, match=f"{name} must be a number, got"):
            PredictionIntervals(model, **{name: value})
    with pytest.raises(TypeError, match="noise_std must be a number, got"):
        DeepEnsemble([model, mlp()], noise_std=value)
    with pytest.raises(ValueError, match="batch_size must be a positive whole number"):
        PredictionIntervals(model, weight_decay=1e-2, loss="sum", batch_size=value)


@pytest.mark.parametrize("kind", [np.float32, np.float64, int])
def test_numbers_of_any_kind_are_taken_without_a_warning(model, kind):
    for name in ("damping", "weight_decay"):
        band = PredictionIntervals(model, **{name: kind(1)}).fit(*regression(80), progress=False)
        assert band.damping_ == (1.0 if name == "damping" else 40.0)


ENGINES = [Exact(), RandomProjection(20), Nystrom(20), RobustFrequentDirections(10)]


@pytest.mark.parametrize("n", [30, 80])  # dual, primal
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_damping_beside_which_nothing_is_left_of_the_gradients_is_refused(engine, n):
    X, y = regression(n)
    for given in ({"damping": 1e30}, {"weight_decay": 1e30}):
        band = PredictionIntervals(mlp(), engine=engine, **given)
        with pytest.raises(ValueError, match=rf"so large against JᵀJ.*give a smaller {next(iter(given))}"):
            band.fit(X, y, progress=False)


@pytest.mark.parametrize("n", [30, 80])
def test_a_large_damping_that_can_be_resolved_has_the_variances_of_the_formula(n):
    X, y = regression(n)
    model = mlp()
    J = reference.jacobians(model, [(x[None],) for x in X]).reshape(n, -1)
    damping = 1e9 * float(np.square(J).sum())
    band = PredictionIntervals(model, engine=Exact(), damping=damping).fit(X, y, progress=False)
    q = band.variance(X)
    assert (q > 0).all()
    np.testing.assert_allclose(q, np.square(J @ J.T).sum(axis=1) / damping**2, rtol=1e-4)  # λ dwarfs the eigenvalues
