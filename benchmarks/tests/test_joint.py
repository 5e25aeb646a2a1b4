"""What is made of the answers of laplace-torch and crepes."""

import numpy as np
import pytest

import tests.reference as reference
from benchmarks.joint import QUICK, difference, in_float64, scores, targets

pytestmark = pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")


@pytest.fixture(scope="module")
def problem():
    return in_float64(QUICK)


def test_the_dense_posterior_is_no_different_and_another_one_is(problem):
    J, g = (reference.jacobian(problem.model, rows)[1] for rows in (problem.X, problem.new[:9]))
    dense = reference.between(J, problem.damping, g, g)["leverage"]
    few = type(problem)(problem.model, problem.X, problem.y, problem.new[:9], problem.damping)
    assert difference(few, dense).passed
    assert not difference(few, dense + 1e-4 * np.eye(9) * dense.max()).passed


def test_both_scores_are_of_the_same_rows(problem, monkeypatch):
    monkeypatch.setattr("benchmarks.joint.CALIBRATION_ROWS", 100)
    for result in scores(problem, targets(problem)).values():
        assert result.measured == pytest.approx(1, abs=0.02)
