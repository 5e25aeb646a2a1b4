"""Groups on the command line: the same intervals as from the library."""

import json
import re

import numpy as np
import pandas as pd
import pytest
import torch

from deltaband import PredictionIntervals
from deltaband.cli import main, tables
from deltaband.cli.groups import _text

NETWORK = """
import torch
from torch import nn

def make():
    generator = torch.Generator().manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    with torch.no_grad():
        for w in network.parameters():
            w.copy_(torch.randn(w.shape, generator=generator) * 0.5)
    return network
"""
FIT = ["fit", "groups_network:make", "--own-weights", "--target", "y", "--damping", "1"]
USE = ["--model", "groups_network:make"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("groups")
    (folder / "groups_network.py").write_text(NETWORK)
    rng = np.random.default_rng(0)
    for name, n in (("train", 200), ("held", 300), ("test", 200)):
        table = pd.DataFrame(rng.standard_normal((n, 2)), columns=["a", "b"])
        table["site"] = rng.choice([1, 2, 3], n)
        table["y"] = table.a + rng.standard_normal(n) * table.site
        table.to_csv(folder / f"{name}.csv", index=False)
        table.to_parquet(folder / f"{name}.parquet")
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    fit = [*FIT, "--train", "train.csv", "--calibration", "held.csv", "--groups", "site", "--out", "g.band", "--force"]
    assert main(fit) == 0
    return folder


def by_hand(folder):
    import groups_network

    train, held = (pd.read_csv(folder / f"{name}.csv") for name in ("train", "held"))
    band = PredictionIntervals(groups_network.make(), damping=1.0)
    band.fit(torch.tensor(train[["a", "b"]].to_numpy()).float(), train.y.to_numpy(), progress=False)
    x = torch.tensor(held[["a", "b"]].to_numpy()).float()
    return band.calibrate(x, held.y.to_numpy(), groups=held.site.astype(str))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_column_of_groups_gives_the_intervals_of_the_library(here, suffix):
    assert main(["predict", "g.band", *USE, "--data", f"test.{suffix}", "--out", "p.parquet", "--force"]) == 0
    found, test = pd.read_parquet(here / "p.parquet"), pd.read_csv(here / "test.csv")
    x = torch.tensor(test[["a", "b"]].to_numpy()).float()
    expected = by_hand(here).predict(x, groups=test.site.astype(str))
    np.testing.assert_allclose(found.upper_95, expected.upper, rtol=1e-5)


def test_evaluate_and_report_are_about_the_groups(here, capsys):
    capsys.readouterr()
    assert main(["evaluate", "g.band", *USE, "--data", "test.csv", "--level", "0.8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["group"] for row in found["groups"]} == {"1", "2", "3"}
    assert all(row["lower"] < row["coverage"] < row["upper"] for row in found["groups"])
    assert found["results"][0]["worst_slab_coverage"] > 0.4
    assert main(["evaluate", "g.band", *USE, "--data", "test.csv"]) == 0
    assert "group" in capsys.readouterr().out
    assert main(["report", "g.band", *USE, "--data", "test.csv", "--out", "r.html", "--force"]) == 0
    assert "Coverage by site" in (here / "r.html").read_text()


def test_unknown_and_missing_groups_are_refused_or_pooled(here, capsys):
    test = pd.read_csv(here / "test.csv")
    test.assign(site=np.where(np.arange(200) < 7, test.site, 9)).to_csv(here / "other.csv", index=False)
    predict = ["predict", "g.band", *USE, "--data", "other.csv", "--out", "o.csv", "--force"]
    message = "column 'site': group '9' in row 8 was not among the calibration rows"
    for command in (predict, ["evaluate", *predict[1:-3]], ["report", *predict[1:-2], "o.html", "--force"]):
        assert main(command) == 1
        assert message in capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patched:  # rows are counted from the first of the file
        patched.setattr(tables, "CSV_BLOCK_BYTES", 300)
        assert main(predict) == 1
    assert message in capsys.readouterr().err
    assert main([*predict, "--unknown", "ignore"]) == 2
    assert "--unknown must be 'error' or 'pool', got 'ignore'" in capsys.readouterr().err
    assert main([*predict, "--unknown", "pool"]) == 0
    test.assign(site=np.nan).to_csv(here / "other.csv", index=False)
    capsys.readouterr()
    assert main(predict) == 1
    assert "column 'site' holds no group in row 1" in capsys.readouterr().err
    test.drop(columns="site").to_csv(here / "other.csv", index=False)
    assert main(predict) == 1
    assert "no column 'site', which has the groups" in capsys.readouterr().err


def test_groups_need_a_calibration_and_a_band_that_has_them(here, capsys):
    assert main([*FIT, "--train", "train.csv", "--groups", "site", "--out", "n.band"]) == 2
    assert "--groups needs --calibration" in capsys.readouterr().err
    fit = [*FIT, "--train", "train.csv", "--calibration", "held.csv", "--out", "n.band", "--groups"]
    assert main([*fit, "y"]) == 2
    assert "--groups y is a target, which new rows do not have" in capsys.readouterr().err
    plain = [
        *FIT,
        "--train",
        "train.csv",
        "--exclude",
        "site",
        "--calibration",
        "held.csv",
        "--out",
        "n.band",
        "--force",
    ]
    assert main(plain) == 0
    capsys.readouterr()
    predict = ["predict", "n.band", *USE, "--data", "test.csv", "--out", "n.csv", "--force"]
    assert main([*predict, "--groups", "site"]) == 2
    assert "not calibrated by groups" in capsys.readouterr().err
    assert main([*predict, "--unknown", "pool"]) == 2


def test_a_share_of_the_training_rows_has_its_own_groups(here, capsys):
    share = [*FIT, "--train", "held.csv", "--calibration", "0.5", "--groups", "site", "--out", "s.band", "--force"]
    assert main([*share, "--json"]) == 0
    capsys.readouterr()
    assert main(["inspect", "s.band"]) == 0
    assert re.search(r"groups +3 of \d+ to \d+ rows", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("cell", "label"),
    [("3", "3"), (3, "3"), (3.0, "3"), ("3.50", "3.5"), ("03", "03"), (" a ", "a"), ("NA", None), (None, None)],
)
def test_labels_do_not_depend_on_the_format_of_the_file(cell, label):
    assert _text(cell) == label
