import numpy as np
import pytest

from deltaband import PredictionIntervals
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
