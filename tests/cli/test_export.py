"""`deltaband export`: the program answers as the band does."""

import json

import torch

from deltaband import PredictionIntervals
from deltaband.cli import main
from tests.support.commands import FIT, make_folder


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
    assert main([*command, "--out", "y.pt2", "--tolerance", "1e-9"]) == 1
    assert "would take too many dimensions" in capsys.readouterr().err
    assert main([*command, "--out", "y.pt2", "--tolerance", "0"]) == 1
    assert "tolerance must be" in capsys.readouterr().err
