"""`deltaband export`: the program answers as the band does."""

import json

import pandas as pd
import torch

from deltaband import PredictionIntervals
from deltaband.cli import main
from tests.support.commands import FIT, make_folder

WIDE = """
import torch
from torch import nn


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 60), nn.Tanh(), nn.Linear(60, 1))
"""


def test_a_program_is_written_from_a_band_file_and_refusals_say_why(tmp_path, monkeypatch, capsys):
    make_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main([*FIT, "--damping", "1", "--out", "x.band"]) == 0
    capsys.readouterr()
    command = ["export", "x.band", "--model", "network:make", "--level", "0.8", "--level", "0.9"]
    assert main([*command, "--out", "x.onnx.zip"]) == 2
    assert "must end in .pt2 or .onnx" in capsys.readouterr().err
    assert main([*command, "--out", "x.pt2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["levels"] == [0.8, 0.9]
    from network import make

    model = make()
    model.load_state_dict(torch.load("w.pt", weights_only=True))
    x = torch.randn(7, 2, generator=torch.Generator().manual_seed(0))
    expected = PredictionIntervals.load("x.band", model).predict(x, [0.8, 0.9])
    for mine, theirs in zip(torch.export.load("x.pt2").module()(x), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert main([*command, "--out", "x.pt2"]) == 1
    assert "exists already" in capsys.readouterr().err
    compress = [*command, "--out", "y.pt2", "--data", "train.csv", "--tolerance"]
    assert main([*compress, "1e-9"]) == 1
    assert "would take too many dimensions" in capsys.readouterr().err
    assert main([*compress, "0"]) == 1
    assert "tolerance must be" in capsys.readouterr().err
    for alone in (["--tolerance", "0.1"], ["--data", "train.csv"]):
        assert main([*command, "--out", "y.pt2", *alone]) == 2
        assert "--tolerance and --data need each other" in capsys.readouterr().err


def test_a_compressed_program_has_the_widths_of_the_rows_within_the_tolerance(tmp_path, monkeypatch, capsys):
    make_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wide_network.py").write_text(WIDE)
    fit = ["fit", "wide_network:make", "--own-weights", *FIT[4:], "--damping", "1000", "--out", "x.band"]
    assert main(fit) == 0, capsys.readouterr().err
    command = ["export", "x.band", "--model", "wide_network:make", "--out", "x.pt2", "--tolerance", "0.1"]
    assert main([*command, "--data", "train.csv"]) == 0, capsys.readouterr().err
    from wide_network import make

    x = torch.from_numpy(pd.read_csv("train.csv")[["a", "b"]].to_numpy()).float()
    exact = PredictionIntervals.load("x.band", make()).predict(x)
    _mean, lower, upper = torch.export.load("x.pt2").module()(x)
    off = ((upper - lower) / exact.width - 1).abs().max()
    assert 0 < off <= 0.1
