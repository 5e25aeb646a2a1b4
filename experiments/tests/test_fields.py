import json
import math

import pandas as pd
import pytest

from experiments import fields


@pytest.mark.filterwarnings("ignore")  # of networks that are hardly trained
def test_both_parts_are_measured_and_not_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fields, "SIZE", 16)
    fields.main(["--small", "--out", str(tmp_path)])
    about = json.loads((tmp_path / "fields.json").read_text())
    assert about["outputs"] == 256
    assert 0.5 < about["coverage_by_pixel"] <= 1
    assert (tmp_path / "fields.png").stat().st_size > 1000
    table = pd.read_csv(tmp_path / "horizons.csv")
    assert len(table) == 3 * 25
    assert set(table.method) == {"formula", "one quantile per horizon", "all horizons at once"}
    monkeypatch.setattr(fields, "unet", None)
    monkeypatch.setattr(fields, "lstm", None)
    capsys.readouterr()
    fields.main(["--small", "--out", str(tmp_path)])
    assert "coverage_by_pixel" in capsys.readouterr().out


def test_the_noise_of_fields_is_what_it_is_said_to_be():
    _, observed, mean, noise = fields.fields(20, seed=0)
    scores = (observed - mean) / noise
    assert abs(float(scores.mean())) < 5 / math.sqrt(scores.numel())
    assert abs(float(scores.std()) - 1) < 5 / math.sqrt(2 * scores.numel())
