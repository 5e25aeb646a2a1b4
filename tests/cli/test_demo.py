"""`deltaband demo` prints its tables, saves its pictures, and shows what it promises."""

import contextlib
import importlib.util
import io
import re

import numpy as np
import pytest
import torch

from deltaband import Exact
from deltaband.cli import main, tour

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """What a run with little training prints and saves. Untrained networks may deserve the library's warnings."""
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        tour.tour(out, steps=150)
    return out, printed.getvalue()


def test_the_table_has_a_line_for_each_engine_on_each_data_set(short_run):
    _, header, *lines = short_run[1].split("\n\n")[1].splitlines()
    names = ["data", "engine", "coverage", "width", "width–error r", "score", "p*", "seconds"]
    assert re.split(r"\s{2,}", header) == names
    assert [tuple(line.split()[:2]) for line in lines] == [
        ("gap", "Exact()"),
        ("gap", "ImportantDirections(rank=20)"),
        ("gap", "RobustFrequentDirections(rank=20)"),
        ("diabetes", "Exact()"),
        ("diabetes", "ImportantDirections(rank=100)"),
        ("diabetes", "RobustFrequentDirections(rank=100)"),
    ]
    assert len({len(line) for line in (header, *lines)}) == 1  # the columns are aligned
    for line in lines:
        coverage, width, r, score, p_star, seconds = map(float, line.split()[2:])
        assert 0.5 < coverage <= 1
        assert min(width, score, p_star) > 0
        assert -1 <= r <= 1
        assert seconds >= 0


def test_the_usual_case_comes_first_and_covers(short_run):
    first, *scores = short_run[1].split("\n\n")[0].splitlines()
    assert first.startswith("The usual case")
    at_90 = next(line for line in scores if line.split()[:2] == ["90", "%"])
    assert 0.8 < float(at_90.split()[2]) / 100 < 0.99


def test_the_command_takes_a_folder_and_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tour, "tour", lambda out: print(f"into {out}"))
    assert main(["demo", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"into {tmp_path}\n"
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert main(["demo"]) == 1
    assert "pip install 'deltaband[all]'" in capsys.readouterr().err


def test_all_pictures_are_saved_where_the_last_line_says(short_run):
    out, printed = short_run
    saved = re.findall(r"[^\s,]+\.png", printed.splitlines()[-1])
    names = ["gap.png", "gap-dark.png", "diabetes.png", "diabetes-dark.png"]
    assert saved == [str(out / name) for name in names]
    for name in names:
        content = (out / name).read_bytes()
        assert content.startswith(PNG)
        assert len(content) > 20_000  # not an empty canvas


@pytest.mark.slow
def test_the_band_opens_in_the_gap():
    problem = tour.gap()
    assert not (np.abs(problem.x) < 1).any()
    band = problem.fit(Exact())
    assert band.effective_parameters_ < band.n_rows_ / 4
    width = band.predict(np.array([[-2.0], [0.0], [2.0]])).width
    assert width[1] > 2 * max(width[0], width[2])


@pytest.mark.slow
@pytest.mark.parametrize("make", [tour.gap, tour.diabetes])
def test_the_demo_is_healthy_and_its_sketches_agree_with_the_exact_band(make):
    problem = make(1000)
    exact, *sketches = tour.compare(problem)  # a DeltabandWarning would be an error
    assert 0.9 <= exact["coverage"] <= 1.0
    for score in sketches:
        for name in ("coverage", "mean_width", "width_error_correlation", "interval_score"):
            assert score[name] == pytest.approx(exact[name], rel=0.02, abs=0.02)


def test_training_leaves_the_number_of_threads_alone():
    before = torch.get_num_threads()
    tour.gap(steps=1)
    assert torch.get_num_threads() == before
