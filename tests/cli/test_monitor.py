"""`deltaband monitor`: what the library finds, as text and JSON."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from deltaband import PredictionIntervals
from deltaband.cli import main
from tests.support.commands import FIT, make_folder, rows

WATCH = ["monitor", "x.band", "--model", "network:make", "--level", "0.9"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")
    make_folder(folder)
    rows(200, 5).to_csv(folder / "held_out.csv", index=False)
    changed = rows(400, 6)
    changed.loc[150:, "y"] += np.random.default_rng(0).normal(0, 1, 250)
    changed.to_csv(folder / "changed.csv", index=False)
    far = rows(300, 7)[["a", "b"]]
    far.loc[100:] *= 4
    far.to_csv(folder / "far.csv", index=False)
    return folder


@pytest.fixture
def here(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    if not (folder / "x.band").exists():
        assert main([*FIT, "--calibration", "held_out.csv", "--noise", "none", "--out", "x.band"]) == 0
        capsys.readouterr()
    return folder


def test_alarms_are_those_of_the_library_in_text_in_json_and_in_a_file(here, capsys):
    from network import make

    assert main([*WATCH, "--data", "changed.csv", "--out", "alarms.json"]) == 0
    text = capsys.readouterr().out
    assert main([*WATCH, "--data", "changed.csv", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((here / "alarms.json").read_text())
    model = make()
    model.load_state_dict(torch.load("w.pt", weights_only=True))
    band, data = PredictionIntervals.load("x.band", model), pd.read_csv("changed.csv")
    monitor = band.monitor(0.9)
    monitor.update(torch.tensor(data[["a", "b"]].to_numpy(), dtype=torch.float32), data.y.to_numpy())
    assert text == monitor.summary() + "\n"
    assert printed["alarms"][0]["kind"] == "exchangeability"
    assert 150 < printed["alarms"][0]["after"] < 230
    assert printed["rows"] == 400


def test_targets_may_be_missing_altogether_or_in_some_rows(here, capsys):
    assert main([*WATCH, "--data", "far.csv"]) == 0
    assert "ALARM leverage: after 1" in capsys.readouterr().out
    some = rows(100, 8)
    some.loc[::4, "y"] = np.nan
    some.to_csv("some.csv", index=False)
    assert main([*WATCH, "--data", "some.csv", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["errors"][0]["n"], found["alarms"]) == (100, 75, [])


def test_a_report_has_a_section_about_it_if_asked_to(here, capsys):
    report = ["report", "x.band", "--model", "network:make", "--level", "0.9", "--data", "changed.csv"]
    assert main([*report, "--out", "plain.html"]) == 0
    assert main([*report, "--monitor", "--out", "watched.html"]) == 0
    assert 'id="monitor"' not in (here / "plain.html").read_text()
    assert "errors are larger than those of the calibration rows were" in (here / "watched.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["--data", "changed.csv", "--false-alarms", "2"],
            2,
            "--false-alarms must be a probability from 1e-300 to below 1, got 2",
        ),
        (["--data", "changed.csv", "--out", "x.txt"], 2, "the name must end in .json"),
        (["--data", "note.csv"], 1, "has no column 'a'"),
        (["--data", "changed.csv", "--window", "0"], 2, "window"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(here, capsys, arguments, code, message):
    pd.DataFrame({"note": ["x"]}).to_csv("note.csv", index=False)
    assert main([*WATCH, *arguments]) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_band_without_a_calibration_is_refused(here, capsys):
    assert main([*FIT, "--weight-decay", "1e-3", "--out", "plain.band"]) == 0
    capsys.readouterr()
    assert main(["monitor", "plain.band", "--model", "network:make", "--data", "changed.csv"]) == 1
    assert "scores of held-out rows are needed to start from" in capsys.readouterr().err
