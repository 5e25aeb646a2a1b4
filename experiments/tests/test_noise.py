"""The experiment on learnt noise."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from deltaband import PredictionIntervals
from deltaband.metrics import conditional
from experiments import data, noise, noise_report
from experiments.__main__ import main
from experiments.rows import Rows
from experiments.tests.small_data import catalogue, made, options, write
from experiments.training import Stack

ADAMW = "adamw 1e-2"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two small data sets, few steps, groups of two splits."""
    monkeypatch.delenv("DELTABAND_DATA", raising=False)
    catalogue(monkeypatch, *made(tmp_path, n=250))
    for name, value in (("STEPS", 20), ("TOGETHER", 2), ("SHIFTED_SPLITS", 1)):
        monkeypatch.setattr(noise, name, value)
    monkeypatch.setattr(conditional, "DIRECTIONS", 5)
    return tmp_path


@pytest.fixture
def split(folder):
    X, y = data.load("first", folder)
    return noise.divided(X, y, "random", 0)


def run(folder, out="noise.csv", *more):
    arguments = ["--splits", "2", "--settings", "adam 1e-4", ADAMW, *more]
    main(["noise", *options(folder, out), *arguments])
    return pd.read_csv(folder / out)


def test_every_method_has_a_row_in_every_cell_and_a_report_follows(folder):
    table = run(folder)
    cells = table.groupby([*noise.KEY, "calibration"]).method.agg(list)
    assert all(sorted(methods) == sorted(noise_report.METHODS) for methods in cells)
    of_all = [key for key in cells.index if key[-1] == "all rows"]
    assert [sum(key[2] == test for key in of_all) for test in ("random", "shifted")] == [8, 2]
    few = {key[-1] for key in cells.index if key[1:3] == (ADAMW, "random")}
    assert few == {"all rows", "30 rows"}  # of 45
    assert {key[-1] for key in cells.index if key[1] != ADAMW or key[2] == "shifted"} == {"all rows"}
    shares = table[[column for column in table if column.startswith(("coverage", "noisiest", "slab"))]].to_numpy()
    assert ((shares >= 0) & (shares <= 1) | np.isnan(shares)).all()
    plain = table[table.method.isin(["constant", "boosted", "q alone", "learnt"])]
    assert (plain.groupby([*noise.KEY, "calibration"]).rmse.nunique() == 1).all()
    of_constant = table[table.method == "constant"]
    np.testing.assert_allclose(of_constant.score_80, of_constant.own_80)

    main(["report", "--results", str(folder)])
    text = (folder / "noise.md").read_text()
    assert text.count("\n## ") == 11
    assert text.count("\n| first | 2 | ") == 3
    assert "nan" not in text.partition("## Few")[0]


def test_an_interrupted_run_goes_on_where_it_stopped_and_trains_no_network_twice(folder, monkeypatch):
    run(folder, "whole.csv")
    whole = (folder / "whole.csv").read_bytes()
    rows_of_cell, computed, trained = noise.rows_of_cell, [], []

    def counted(part, split, *rest):
        if len(computed) == 3:
            raise KeyboardInterrupt
        computed.append((*part[:3], split))
        return rows_of_cell(part, split, *rest)

    monkeypatch.setattr(noise, "rows_of_cell", counted)
    monkeypatch.setattr(noise, "search", lambda *arguments, **named: trained.append(1))
    with pytest.raises(SystemExit) as caught:
        run(folder, "parts.csv")
    assert caught.value.code == 130
    monkeypatch.setattr(noise, "rows_of_cell", rows_of_cell)
    assert Rows(folder / "parts.csv", noise.KEY).done() == set(computed)
    run(folder, "parts.csv")
    assert (folder / "parts.csv").read_bytes() == whole
    assert not trained
    run(folder, "parts.csv")
    assert (folder / "parts.csv").read_bytes() == whole


def test_the_first_splits_come_first_and_the_shift_before_the_others(folder):
    asked = noise.argparse.Namespace(settings=["adam 1e-4", ADAMW], datasets=["second", "first"], splits=3)
    assert [str(part) for part in noise.parts(asked)] == [
        *(f"{name} {setting} random 0-1" for name in ("first", "second") for setting in ("adam 1e-4", ADAMW)),
        *(f"{name} {ADAMW} shifted 0-0" for name in ("first", "second")),
        *(f"{name} {setting} random 2-3" for name in ("first", "second") for setting in ("adam 1e-4", ADAMW)),
    ]


def test_what_is_malformed_is_left_out_and_told(folder, capsys):
    write(folder, "a,b,target\n1.5,-2,10\n", "first")
    with pytest.raises(SystemExit) as caught:
        run(folder, "rows.csv", "--splits", "1", "--settings", "adam 1e-4")
    assert caught.value.code == 1
    assert set(pd.read_csv(folder / "rows.csv").data) == {"second"}
    assert capsys.readouterr().err.startswith("malformed: first ")


# --- its parts


@pytest.mark.parametrize("n", [None, 30])
def test_one_pass_gives_the_intervals_of_calibrate_with_and_without_learnt_noise(split, n):
    model = Stack.initial(2, [0]).network(0)
    found = noise.Ours(model, 1e-2, split).intervals(n)
    for name, learnt in (("q alone", "none"), ("learnt", "auto")):
        band = PredictionIntervals(model, weight_decay=1e-2).fit(*split.training, progress=False)
        band.calibrate(*(each[:n] for each in split.calibration), noise=learnt)
        expected = band.predict(split.test.x, noise.LEVELS)
        for a, b in zip(found[name], expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_losses_are_those_of_torch_and_of_the_definition():
    generator = torch.Generator().manual_seed(0)
    y, outputs = torch.randn(2, 9, generator=generator), torch.randn(2, 9, 7, generator=generator)
    likelihood = nn.GaussianNLLLoss(reduction="none")(outputs[:, :, 0], y, outputs[:, :, 1].exp())
    torch.testing.assert_close(noise.gaussian(outputs[:, :, :2], y), likelihood)
    found = noise.pinball(outputs, y)
    for m in range(2):
        for b in range(9):
            above = [(y[m, b] - q).item() for q in outputs[m, b]]
            each = [tau * e if e > 0 else (tau - 1) * e for tau, e in zip(noise.QUANTILES, above, strict=True)]
            assert found[m, b].item() == pytest.approx(np.mean(each), rel=1e-5)


def test_a_mean_variance_network_is_never_surer_than_its_likelihood_was():
    inner = nn.Linear(1, 2)
    with torch.no_grad():
        inner.weight.copy_(torch.tensor([[2.0], [100.0]]))
        inner.bias.zero_()
    found = noise.Bounded(inner)(torch.tensor([[-1.0], [0.05], [3.0]]))
    torch.testing.assert_close(found, torch.tensor([[-2.0, -10.0], [0.1, 5.0], [6.0, 10.0]]))


@pytest.mark.parametrize("test", ["random", "shifted"])
def test_rows_are_divided_without_overlap(test):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((300, 3)) @ np.diag([1.0, 2.0, 3.0])
    X[:, 1] += X[:, 0]
    parts = noise.divided(X, np.arange(300.0), test, 4)
    sizes = {"random": [184, 32, 54, 30], "shifted": [164, 28, 48, 60]}[test]
    assert [len(part.y) for part in parts] == sizes
    targets = np.concatenate([part.y for part in parts])
    assert len(np.unique(targets.round(4))) == 300
    learnt = np.concatenate([parts.training.x, parts.held.x])
    np.testing.assert_allclose(learnt.mean(axis=0), 0.0, atol=1e-5)
    np.testing.assert_allclose(learnt.std(axis=0), 1.0, rtol=1e-5)
    if test == "shifted":
        units = (X - X.mean(axis=0)) / X.std(axis=0)
        component = np.linalg.svd(units)[2][0]
        along = units @ component * np.sign(component[np.abs(component).argmax()])
        unit = np.concatenate([parts.training.y, parts.held.y])
        tested = np.argsort(along)[240:]  # targets count the rows
        all_targets = np.sort(targets)
        np.testing.assert_allclose(np.sort(parts.test.y), all_targets[np.sort(tested)], rtol=1e-5)
        assert unit.std() == pytest.approx(1.0, rel=1e-5)


def test_the_noisiest_fifth_is_where_the_noise_is(split):
    rng = np.random.default_rng(0)
    x = [rng.uniform(-1, 1, (n, 2)).astype(np.float32) for n in (400, 200)]
    y = [(rng.standard_normal(len(each)) * (0.1 + (each[:, 0] > 0.6))).astype(np.float32) for each in x]
    calibration, test = (noise.Samples(*each) for each in zip(x, y, strict=True))
    found = noise.noisiest_fifth(split._replace(calibration=calibration, test=test), np.zeros(400), np.zeros(200))
    assert len(found) == 40
    assert (x[1][found, 0] > 0.55).mean() > 0.9
