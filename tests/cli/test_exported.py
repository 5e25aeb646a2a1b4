"""Networks of torch.export on the command line: trusted ones work as their originals do."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from deltaband import DeltabandWarning, Nystrom, PredictionIntervals
from deltaband.cli import main
from deltaband.cli.models import load_network
from deltaband.cli.output import Refusal
from tests.support.commands import make_folder, run

DYNAMIC = ({0: torch.export.Dim("rows")},)


def original() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    make_folder(folder)
    x = (torch.zeros(4, 2),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        for name, model, shapes in (
            ("network", original().eval(), DYNAMIC),
            ("static", original().eval(), None),
            ("training", original().train(), DYNAMIC),
        ):
            torch.export.save(torch.export.export(model, x, dynamic_shapes=shapes), folder / f"{name}.pt2")
    return folder


@pytest.mark.slow
def test_an_exported_network_gets_the_intervals_of_its_original(folder):
    fit = [
        "fit",
        "network.pt2",
        "--trust",
        "--train",
        "train.csv",
        "--features",
        "a,b",
        "--target",
        "y",
        "--damping",
        1,
    ]
    code, _, err = run(*fit, "--out", "y.band", folder=folder)
    assert code == 0
    assert err.startswith("deltaband: warning: the network predicts its training rows worse than their mean would")
    use = ["predict", "y.band", "--data", "test.csv", "--out", "p.csv"]
    code, _, err = run(*use, folder=folder)
    assert code == 2
    assert "pass --model network.pt2 --trust, if you trust that code" in err
    code, out, err = run(*use, "--model", "network.pt2", "--trust", "--json", folder=folder)
    assert (code, err) == (0, "")
    assert json.loads(out)["rows"] == 80
    train, test = pd.read_csv(folder / "train.csv"), pd.read_csv(folder / "test.csv")
    band = PredictionIntervals(original(), damping=1.0)
    band.fit(train[["a", "b"]].to_numpy(), train.y.to_numpy(), progress=False)
    expected = band.predict(test[["a", "b"]].to_numpy())
    np.testing.assert_allclose(pd.read_csv(folder / "p.csv").upper_95, expected.upper, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch, of its own exported modules
def test_gradients_of_an_exported_network_come_by_torch_func_where_no_rows_are_wanted(folder):
    exported = load_network(str(folder / "network.pt2"), trust=True).network
    x, y = torch.randn(60, 2), torch.randn(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeltabandWarning)
        bands = [
            PredictionIntervals(model, damping=1.0, engine=Nystrom(20)).fit(x, y, progress=False)
            for model in (exported, original())
        ]
    assert "torch.func" in bands[0].summary()
    torch.testing.assert_close(bands[0].predict(x).width, bands[1].predict(x).width, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_what_cannot_be_asked_row_by_row_is_refused(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for name, message in (
        ("static.pt2", "was exported for batches of 4 rows: give torch.export.export a dynamic batch dimension"),
        ("training.pt2", "was exported in training mode"),
        ("none.pt2", "there is no file none.pt2"),
        ("train.csv.pt2", "could not be loaded by torch.export.load"),
    ):
        if name == "train.csv.pt2":
            (folder / name).write_text("a,b\n")
        with pytest.raises(Refusal, match=message):
            load_network(name, trust=True)
    assert main(["plan", "static.pt2", "--trust", "--train", "train.csv", "--features", "a,b"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
