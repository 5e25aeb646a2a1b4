"""Questions leave nothing behind; `make soak` asks ten thousand."""

import gc

import pytest
import torch

from deltaband import PredictionIntervals
from tests.support.classifiers import classifier, fitted, labelled
from tests.support.networks import mlp, regression


@pytest.mark.parametrize("kind", ["formula", "calibrated", "classes"])
@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
def test_no_tensors_are_left_of_questions(kind):
    if kind == "classes":
        band = fitted(classifier(3), labelled(60))
    else:
        band = PredictionIntervals(mlp(), damping=0.5).fit(*regression(80), progress=False)
    if kind == "calibrated":
        band.calibrate(*regression(60, seed=5))
    x = regression(5, seed=7)[0]

    def tensors():
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    band.predict(x)
    before = tensors()
    for _ in range(20):
        band.predict(x)
    assert tensors() == before
