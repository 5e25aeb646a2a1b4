"""Classifiers on the command line: labels, probabilities, sets, and options that are not for them."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from deltaband import ClassificationIntervals
from deltaband.cli import main
from tests.support.commands import commands_in, refused, told

NETWORK = """
import torch
from torch import nn


def make():
    model = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 3))
    model.load_state_dict(torch.load("c.pt"))
    return model


def scaled():
    return {"model": make(), "target_transform": (0.0, 1.0)}
"""
FIT = ["fit", "labels:make", "--train", "train.csv", "--target", "kind", "--features", "a,b", "--damping", 1.0]
FIT += ["--classes"]
USE = ["--model", "labels:make", "--data", "test.csv"]


def rows(n, seed):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, n))
    kind = (a + 0.5 * rng.normal(size=n) > 0).astype(int) + (b > 0.7)
    return pd.DataFrame({"a": a, "b": b, "kind": kind, "site": np.where(a > 0, "north", "south")})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labels")
    train = rows(300, 0)
    train.to_csv(folder / "train.csv", index=False)
    rows(200, 1).to_csv(folder / "held_out.csv", index=False)
    rows(250, 2).to_csv(folder / "test.csv", index=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 3))
    x, y = torch.tensor(train[["a", "b"]].to_numpy(), dtype=torch.float32), torch.tensor(train.kind.to_numpy())
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=1 / 300)
    for _ in range(200):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    torch.save(model.state_dict(), folder / "c.pt")
    (folder / "labels.py").write_text(NETWORK)
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    with commands_in(folder, monkeypatch, "labels"):
        yield folder


def by_hand(folder, classes=None):
    model = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 3))
    model.load_state_dict(torch.load(folder / "c.pt"))
    train = pd.read_csv(folder / "train.csv")
    band = ClassificationIntervals(model, damping=1.0, classes=classes)
    return band.fit(train[["a", "b"]].to_numpy(np.float32), train.kind.to_numpy(), progress=False)


def calibrated(folder, classes=None, **options):
    held_out = pd.read_csv(folder / "held_out.csv")
    x = held_out[["a", "b"]].to_numpy(np.float32)
    return by_hand(folder, classes).calibrate(x, held_out.kind.to_numpy(), **options)


def test_labels_probabilities_and_sets_of_the_library_are_added_to_the_rows(here, capsys):
    told(capsys, *FIT, "predicted", "--calibration", "held_out.csv", "--sets", "aps", "--by-class", "--out", "c.band")
    told(capsys, "predict", "c.band", *USE, "--level", 0.5, "--level", 0.8, "--out", "p.csv")
    test, found = pd.read_csv(here / "test.csv"), pd.read_csv(here / "p.csv", dtype={"set_50": str, "set_80": str})
    added = ["prediction", "probability", "lower_50", "upper_50", "lower_80", "upper_80", "set_50", "set_80"]
    assert list(found) == [*test, *added]
    band = calibrated(here, "predicted", method="aps", by_class=True)
    x = test[["a", "b"]].to_numpy(np.float32)
    intervals = band.predict(x, [0.5, 0.8])
    assert np.array_equal(found.prediction, intervals.classes)
    np.testing.assert_allclose(found.probability, intervals.probability.mean, rtol=1e-5)
    np.testing.assert_allclose(found[["lower_50", "lower_80"]], intervals.probability.lower, rtol=1e-4)
    np.testing.assert_allclose(found[["upper_50", "upper_80"]], intervals.probability.upper, rtol=1e-4)
    sets = band.predict_set(x, 0.8)
    assert [row.split(" ") for row in found.set_80] == [np.flatnonzero(row).astype(str).tolist() for row in sets]
    told(capsys, "predict", "c.band", *USE, "--out", "p.parquet", "--level", 0.5)
    assert pd.read_parquet(here / "p.parquet").set_50.tolist() == found.set_50.tolist()


def test_all_classes_have_columns_of_their_own_and_no_sets_without_a_calibration(here, capsys):
    told(capsys, *FIT, "all", "--standardise", "--out", "all.band")
    told(capsys, "predict", "all.band", *USE, "--out", "p.csv")
    parts = [f"{name}_{c}" for c in range(3) for name in ("probability", "lower_95", "upper_95")]
    found = pd.read_csv(here / "p.csv")
    assert list(found)[4:] == ["prediction", *parts]
    assert np.array_equal(found[[f"probability_{c}" for c in range(3)]].to_numpy().argmax(axis=1), found.prediction)
    told(capsys, *FIT, "0,2", "--out", "some.band")
    told(capsys, "predict", "some.band", *USE, "--out", "q.csv")
    assert list(pd.read_csv(here / "q.csv"))[4:] == ["prediction", *parts[:3], *parts[6:]]


def test_evaluate_prints_the_scores_of_the_library(here, capsys):
    fitted = told(capsys, *FIT, "predicted", "--calibration", "held_out.csv", "--out", "c.band")
    assert fitted["calibration_rows"] == 200
    assert fitted["noise_std"] is None
    found = told(capsys, "evaluate", "c.band", *USE, "--level", 0.6, "--level", 0.9)
    test = pd.read_csv(here / "test.csv")
    x = test[["a", "b"]].to_numpy(np.float32)
    expected = calibrated(here, "predicted").evaluate(x, test.kind.to_numpy(), [0.6, 0.9])
    assert found["rows"] == 250
    for mine, theirs in ((found["results"], expected.rows()), (found["classes"], expected.class_records())):
        for a, b in zip(mine, theirs, strict=True):
            assert a == pytest.approx(b, rel=1e-4)
    assert [each["correct"] for each in found["reliability"]] == [each.correct for each in expected.bins]
    assert main(["evaluate", "c.band", *map(str, USE)]) == 0
    assert "mean_size" in capsys.readouterr().out


def test_a_report_and_a_look_into_the_file(here, capsys):
    told(capsys, *FIT, "predicted", "--calibration", "held_out.csv", "--out", "c.band")
    told(capsys, "report", "c.band", *USE, "--by", "site", "--level", 0.9, "--out", "r.html")
    html = (here / "r.html").read_text()
    assert "Coverage by true label" in html
    assert "Coverage by site" in html
    assert told(capsys, "inspect", "c.band")["kind"] == "ClassificationIntervals"


@pytest.mark.parametrize(
    ("code", "message", "arguments"),
    [
        (2, "--loss is for predictions of numbers", [*FIT, "predicted", "--loss", "sum"]),
        (2, "--noise is for predictions of numbers", [*FIT, "predicted", "--noise", "none"]),
        (2, "--target-mean is for", [*FIT, "all", "--target-mean", 0, "--target-std", 1]),
        (2, "--by-class needs --calibration", [*FIT, "predicted", "--by-class"]),
        (2, "--sets needs --classes", [*FIT[:-1], "--sets", "aps"]),
        (2, "--classes must be predicted, all, or labels as in 0,2, got 'some'", [*FIT, "some"]),
        (
            2,
            "--classes needs --weight-decay or --damping (any, --damping 1 say, for sets of labels alone)",
            [*FIT[:-3], "--classes", "all", "--calibration", "0.2"],
        ),
        (2, "one --target is expected, the column of labels, got kind, site", [*FIT, "all", "--target", "site"]),
        (1, "there is no class 3", [*FIT, "0,3"]),
        (2, "sets must be 'lac' or 'aps'", [*FIT, "all", "--sets", "raps", "--calibration", "0.2"]),
        (1, "labels must be whole numbers from 0 to 2", [*FIT[:5], "b", "--features", "a,kind", *FIT[8:], "all"]),
        (2, "returns target_transform, and --classes says", ["fit", "labels:scaled", *FIT[2:], "all"]),
    ],
)
def test_options_that_do_not_go_with_labels_are_refused(here, capsys, code, message, arguments):
    refused(capsys, code, message, *arguments, "--out", "new.band")


def test_commands_about_numbers_refuse_the_band_of_a_classifier(here, capsys):
    told(capsys, *FIT, "predicted", "--calibration", "held_out.csv", "--out", "c.band")
    takes = "holds ClassificationIntervals: this command takes PredictionIntervals"
    refused(capsys, 1, takes, "monitor", "c.band", *USE)
    refused(capsys, 1, takes, "export", "c.band", *USE[:2], "--out", "c.pt2")
    refused(
        capsys,
        2,
        "--side is not for the band of a classifier",
        "predict",
        "c.band",
        *USE,
        "--side",
        "upper",
        "--out",
        "o.csv",
    )
    refused(capsys, 2, "--groups is not for", "evaluate", "c.band", *USE, "--groups", "site")
    refused(capsys, 2, "--monitor is not for", "report", "c.band", *USE, "--monitor", "--out", "r.html")
    refused(
        capsys,
        1,
        "200 calibration rows are too few for level 0.999",
        "predict",
        "c.band",
        *USE,
        "--level",
        0.999,
        "--out",
        "o.csv",
    )


def test_the_band_of_rows_with_several_labels_is_refused(here, capsys):
    model = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 3))
    model.load_state_dict(torch.load("c.pt"))
    x = torch.tensor(rows(60, 3)[["a", "b"]].to_numpy(), dtype=torch.float32)
    marks = torch.stack([x[:, 0] > 0, x[:, 1] > 0, x.sum(dim=1) > 1], dim=1).float()
    ClassificationIntervals(model, damping=1.0, loss="bce").fit(x, marks, progress=False).save("several.band")
    band = ["several.band", *USE, "--features", "a,b", "--target", "kind"]
    for command in (["predict", *band, "--out", "p.csv"], ["evaluate", *band], ["report", *band, "--out", "r.html"]):
        refused(capsys, 1, "the command line is for classifiers of one label a row", *command)
    assert not (here / "p.csv").exists()
    assert not (here / "r.html").exists()
