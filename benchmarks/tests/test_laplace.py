"""What goes to laplace-torch and what is made of its answers; laplace-torch itself is not needed."""

import importlib
import sys

import numpy as np
import pytest
import torch

import tests.reference as reference
from benchmarks import laplace
from benchmarks.laplace import QUICK, SIZE, SIZES, Answer, compare, difference, faithful, ours, speed, trained
from benchmarks.laplace_worker import Seconds
from benchmarks.measure import Neighbours, Report
from benchmarks.problem import Problem
from benchmarks.workload import Size, network

TINY = Size(n=60, features=5, hidden=4, new_rows=7)


@pytest.fixture
def problem():
    return trained(TINY, epochs=500)


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
    for name in ("benchmarks.laplace_worker", "benchmarks.memory", "benchmarks.problem"):
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


def test_the_networks_have_the_sizes_that_are_said():
    found = {name: sum(w.numel() for w in network(size).parameters()) for name, size in SIZES.items()}
    assert found == {"3k": 3_051, "70k": 68_353, "1M": 1_011_001}
    assert QUICK.features == SIZE.features


def test_an_answer_comes_back_from_its_file(tmp_path):
    Answer(Seconds(1.0, 2.0, 3.0), np.array([4.0, 9.0]), None, 5.0).save(tmp_path / "answer.npz")
    found = Answer.load(tmp_path / "answer.npz", Neighbours())
    assert (found.seconds, found.megabytes) == (Seconds(1.0, 2.0, 3.0), 5.0)
    assert found.off(np.array([1.0, 9.0])) == 0.5


def test_only_forms_with_about_the_right_standard_deviations_are_raced():
    exact, our = np.full(3, 4.0), Answer(Seconds(2.0, 0.0, 0.0), np.full(3, 4.0), None)
    right, wrong = Answer(Seconds(6.0, 0.0, 0.0), 1.05 * exact, None), Answer(Seconds(1.0, 0.0, 0.0), 2 * exact, None)
    found = faithful({"kron": right, "ella": wrong}, our, "")
    assert found["faithful"].measured == 1
    assert (found["speed_fastest_faithful"].measured, found["speed_fastest_faithful"].passed) == (3.0, True)
    assert (found["speed_fastest_of_any"].measured, found["speed_fastest_of_any"].target) == (0.5, "–")
    assert "speed_fastest_faithful" not in faithful({"ella": wrong}, our, "")


def test_what_is_too_large_or_too_slow_has_a_row_that_says_so(path, monkeypatch, tmp_path):
    monkeypatch.setattr(laplace, "LARGEST_MATRIX", 10)
    monkeypatch.setattr(laplace, "ours_alone", lambda *_: answer(1.0))
    monkeypatch.setattr(laplace, "theirs", lambda path, name, *_: None if name == "valla" else answer(2.0))
    report = Report(tmp_path, "some", "Some", keep=False)
    report.gflops["1"] = {"float32": 1.0, "float64": 1.0}
    compare(report, "70k", path, 1, 1, limit=9.0)
    assert report.results["not_tried_full_70k"]["1"].stopped
    assert report.results["seconds_valla_70k"]["1"].figure == "> 9 s"
    assert report.results["seconds_kron_70k"]["1"].measured == 2.0
    assert report.results["faithful_70k"]["1"].measured == 3
    assert "not_tried_full_70k" in (tmp_path / "some.md").read_text()
