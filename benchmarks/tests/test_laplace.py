"""What goes to laplace-torch and what is made of its answers; laplace-torch itself is not needed."""

import importlib
import sys

import numpy as np
import pytest
import torch

import tests.reference as reference
from benchmarks.laplace import QUICK, SIZE, Answer, difference, ours, speed, trained
from benchmarks.laplace_worker import Seconds
from benchmarks.problem import Problem
from benchmarks.workload import Size, network

TINY = Size(n=60, features=5, hidden=4, new_rows=7)


@pytest.fixture
def problem():
    return trained(TINY, epochs=2)


@pytest.fixture
def path(problem, tmp_path):
    problem.save(tmp_path / "problem.npz")
    return tmp_path / "problem.npz"


def answer(total):
    return Answer(Seconds(total, 0.0, 0.0), np.ones(3), None)


def test_the_file_rebuilds_the_network_and_its_data(problem, path):
    again = Problem.load(path)
    assert str(again.model) == str(problem.model)
    assert torch.equal(again.model(problem.new), problem.model(problem.new))
    for name in ("X", "y", "new"):
        assert torch.equal(getattr(again, name), getattr(problem, name))
    assert again.damping == problem.damping


def test_a_posterior_with_noise_1_and_prior_precision_λ_has_our_leverage_as_its_variance(problem, path):
    _, J = reference.jacobian(problem.model, problem.X)
    _, G = reference.jacobian(problem.model, problem.new)
    H, sigma_noise, prior_precision = J.T @ J, 1.0, problem.damping  # H: the GGN of half the sum of squares
    precision = H / sigma_noise**2 + prior_precision * np.eye(J.shape[1])
    functional_variance = np.einsum("np,pq,nq->n", G, np.linalg.inv(precision), G)
    result = difference("", functional_variance, ours(path, repeats=1).variance)
    assert result.passed
    assert result.measured < 1e-5


def test_the_other_side_does_not_import_deltaband(monkeypatch):
    monkeypatch.setitem(sys.modules, "deltaband", None)
    for name in ("benchmarks.laplace_worker", "benchmarks.problem"):
        monkeypatch.delitem(sys.modules, name)
    assert importlib.import_module("benchmarks.laplace_worker")


def test_what_was_stopped_counts_as_a_lower_bound():
    def results(our, limit):
        pairs = {"full": (our, None), "full_backpack": (our, answer(3.0)), "full_asdl": (our, answer(4.0))}
        return speed(pairs, limit)

    found = results(answer(2.0), limit=50.0)
    assert (found["speed_default"].figure, found["speed_default"].passed) == ("> 25×", True)
    assert (found["speed_fastest"].figure, found["speed_fastest"].passed) == ("1.5×", True)
    assert results(answer(20.0), limit=50.0)["speed_default"].cell == "**> 2.5×**"


def test_the_network_has_3051_parameters():
    assert sum(w.numel() for w in network(SIZE).parameters()) == 3_051
    assert QUICK.features == SIZE.features
