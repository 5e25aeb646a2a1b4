"""What is known of the noise, on the command line: the same intervals as from the library."""

import numpy as np
import pandas as pd
import pytest
from torch import nn

from deltaband import PredictionIntervals
from tests.support.commands import commands_in, refused, told

NETWORKS = """
import torch
from torch import nn

class Columns(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, m))

    def forward(self, x):
        return self.body(x)

class Pair(Columns):
    def forward(self, x):
        y = self.body(x)
        return y[:, :1], nn.functional.softplus(y[:, 1:]) + 0.01

class Quantiles(Columns):
    def forward(self, x):
        middle, *widths = self.body(x).split(1, dim=1)
        lower, upper = (nn.functional.softplus(w) + 0.05 for w in widths)
        return torch.cat([middle - lower, middle, middle + upper], dim=1)

def one():
    return _made(Columns(1))

def pair():
    return _made(Pair(2))

def log_variance():
    return _made(Columns(2))

def quantiles():
    return _made(Quantiles(3))

def _made(module):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for w in module.parameters():
            w.copy_(torch.randn(w.shape, generator=generator) * 0.5)
    return module.eval()
"""
COLUMNS = ["--train", "train.csv", "--features", "a,b", "--target", "y", "--own-weights"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("noise")
    (folder / "networks.py").write_text(NETWORKS)
    rng = np.random.default_rng(7)
    rows = pd.DataFrame(rng.uniform(-1, 1, (500, 2)), columns=["a", "b"])
    rows["y"] = np.sin(rows.a) + (0.2 + 0.2 * (rows.b > 0)) * rng.standard_normal(500)
    rows["w"] = 1 / (0.2 + 0.2 * (rows.b > 0)) ** 2
    rows.loc[3, "w"] = 0
    rows["patient"] = [f"patient {i // 5}" for i in range(500)]
    rows[:300].to_csv(folder / "train.csv", index=False)
    rows[300:450].to_csv(folder / "held_out.csv", index=False)
    rows[450:].to_csv(folder / "test.csv", index=False)
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    with commands_in(folder, monkeypatch, "networks"):
        yield folder


def tables(here):
    for name in ("train.csv", "held_out.csv", "test.csv"):
        rows = pd.read_csv(here / name)
        yield rows[["a", "b"]].to_numpy(), rows.y.to_numpy(), rows.w.to_numpy(), rows.patient.to_numpy()


def model(name) -> nn.Module:
    import networks

    return getattr(networks, name)()


def predicted(capsys, factory, *options, predict=()):
    told(capsys, "fit", f"networks:{factory}", *COLUMNS, *options, "--out", "n.band")
    use = ["predict", "n.band", "--model", f"networks:{factory}", "--data", "test.csv"]
    told(capsys, *use, *predict, "--out", "n.csv")
    return pd.read_csv("n.csv")


def check(found, expected):
    np.testing.assert_allclose(found.prediction, expected.mean, rtol=1e-5, atol=1e-6)
    for name, bound in (("lower_95", expected.lower), ("upper_95", expected.upper)):
        if name in found:
            np.testing.assert_allclose(found[name], bound, rtol=1e-4, atol=1e-5)


def test_weights_of_rows_are_a_column(here, capsys):
    (x, y, w, _), _, (x_new, _, w_new, _) = tables(here)
    options = ["--sample-weight", "w", "--weight-decay", 1e-2, "--loss", "weighted_mean"]
    found = predicted(capsys, "one", *options, predict=["--sample-weight", "w"])
    band = PredictionIntervals(model("one"), weight_decay=1e-2, loss="weighted_mean")
    band.fit(x, y, sample_weight=w, progress=False)
    assert band.n_rows_ == 299
    check(found, band.predict(x_new, sample_weight=w_new))
    assert told(capsys, "inspect", "n.band")["training_rows"] == 299
    told(capsys, "predict", "n.band", "--model", "networks:one", "--data", "test.csv", "--out", "equal.csv")
    check(pd.read_csv("equal.csv"), band.predict(x_new))
    use = ["evaluate", "n.band", "--model", "networks:one", "--data", "test.csv"]
    (scores,) = told(capsys, *use, "--sample-weight", "w")["results"]
    assert scores["mean_width"] == pytest.approx(band.predict(x_new, sample_weight=w_new).width.mean(), rel=1e-4)


def test_calibration_rows_are_equals_unless_weights_are_asked_for(here, capsys):
    (x, y, w, _), (x_held, y_held, w_held, _), (x_new, _, w_new, _) = tables(here)
    band = PredictionIntervals(model("one")).fit(x, y, sample_weight=w, progress=False)
    options = ["--sample-weight", "w", "--calibration", "held_out.csv"]
    check(predicted(capsys, "one", *options), band.calibrate(x_held, y_held).predict(x_new))
    use = ["--model", "networks:one", "--data", "test.csv", "--sample-weight", "w", "--out", "w.csv"]
    message = "calibrated without weights: fit with --weighted-calibration, or leave --sample-weight out"
    refused(capsys, 1, message, "predict", "n.band", *use)
    options += ["--weighted-calibration", "--force"]
    found = predicted(capsys, "one", *options, predict=["--sample-weight", "w", "--force"])
    check(found, band.calibrate(x_held, y_held, sample_weight=w_held).predict(x_new, sample_weight=w_new))


def test_a_fraction_for_calibration_has_its_weights_too(here, capsys):
    (x, y, w, _), _, (x_new, _, w_new, _) = tables(here)
    drawn = np.random.default_rng(0).random(300) < 0.5
    band = PredictionIntervals(model("one")).fit(x[~drawn], y[~drawn], sample_weight=w[~drawn], progress=False)
    band.calibrate(x[drawn], y[drawn], sample_weight=w[drawn])
    options = ["--sample-weight", "w", "--calibration", 0.5, "--weighted-calibration"]
    found = predicted(capsys, "one", *options, predict=["--sample-weight", "w"])
    check(found, band.predict(x_new, sample_weight=w_new))


@pytest.mark.parametrize(("factory", "form"), [("pair", "variance"), ("pair", "std"), ("log_variance", "log_variance")])
def test_a_network_may_return_its_own_variance(factory, form, here, capsys):
    (x, y, _, _), _, (x_new, _, _, _) = tables(here)
    found = predicted(capsys, factory, "--variance", form, "--weight-decay", 1e-2)
    band = PredictionIntervals(model(factory), variance=form, weight_decay=1e-2).fit(x, y, progress=False)
    assert found.columns[-1] == "upper_95"
    check(found, band.predict(x_new))


def test_a_network_of_quantiles_is_conformalised(here, capsys):
    (x, y, _, _), (x_held, y_held, _, _), (x_new, _, _, _) = tables(here)
    found = predicted(capsys, "quantiles", "--quantiles", "0.05,0.5,0.95", "--calibration", "held_out.csv")
    band = PredictionIntervals(model("quantiles"), quantiles=(0.05, 0.5, 0.95)).fit(x, y, progress=False)
    check(found, band.calibrate(x_held, y_held).predict(x_new))
    plan = ["plan", "networks:quantiles", *COLUMNS[:-1], "--quantiles", "0.05,0.5,0.95"]
    assert told(capsys, *plan)["parameters"] == 39


@pytest.mark.parametrize("kind", ["HC0", "HC3"])
def test_robust_covariances(kind, here, capsys):
    (x, y, _, _), _, (x_new, _, _, _) = tables(here)
    found = predicted(capsys, "one", "--robust", kind, "--damping", 3, predict=["--kind", "mean"])
    band = PredictionIntervals(model("one"), robust=kind, damping=3.0).fit(x, y, progress=False)
    check(found, band.predict(x_new, kind="mean"))


def test_clusters_are_labels_of_any_kind(here, capsys):
    (x, y, w, patients), _, (x_new, _, _, _) = tables(here)
    options = ["--robust", "HC1", "--clusters", "patient", "--sample-weight", "w", "--damping", 3]
    found = predicted(capsys, "one", *options, predict=["--kind", "mean"])
    band = PredictionIntervals(model("one"), robust="HC1", damping=3.0)
    band.fit(x, y, sample_weight=w, clusters=patients, progress=False)
    check(found, band.predict(x_new, kind="mean"))


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("side", ["lower", "upper"])
def test_one_side_is_one_column_per_level(side, calibrated, here, capsys):
    (x, y, _, _), (x_held, y_held, _, _), (x_new, _, _, _) = tables(here)
    options = ["--damping", 3, *(["--calibration", "held_out.csv", "--noise", "none"] if calibrated else [])]
    found = predicted(capsys, "one", *options, predict=["--side", side, "--level", 0.8, "--level", 0.9])
    new = [name for name in found if name not in ("a", "b", "y", "w", "patient")]
    assert new == ["prediction", f"{side}_80", f"{side}_90", *(["far"] if calibrated else [])]
    band = PredictionIntervals(model("one"), damping=3.0).fit(x, y, progress=False)
    if calibrated:
        band.calibrate(x_held, y_held, noise="none")
    expected = getattr(band.predict(x_new, level=[0.8, 0.9], side=side), side)
    np.testing.assert_allclose(found[[f"{side}_80", f"{side}_90"]], expected, rtol=1e-4, atol=1e-5)


def test_a_calibrated_band_has_a_band_of_the_mean_without_far(here, capsys):
    options = ["--damping", 3, "--calibration", "held_out.csv"]
    found = predicted(capsys, "one", *options, predict=["--kind", "mean"])
    assert list(found)[-3:] == ["prediction", "lower_95", "upper_95"]


def test_options_that_do_not_go_together_are_refused(here, capsys):
    fit = ["fit", "networks:one", *COLUMNS, "--out", "new.band"]
    for code, message, options in (
        (2, "--clusters needs --robust", ["--damping", 1, "--clusters", "patient"]),
        (2, "--quantiles needs --calibration", ["--damping", 1, "--quantiles", "0.1,0.5,0.9"]),
        (2, "--weighted-calibration needs --sample-weight", ["--calibration", 0.2, "--weighted-calibration"]),
        (2, "--weighted-calibration needs --calibration", ["--damping", 1, "--weighted-calibration"]),
        (2, "--robust needs --weight-decay or --damping", ["--calibration", 0.2, "--robust", "HC1"]),
        (2, "--robust must be 'HC0', 'HC1'", ["--damping", 1, "--robust", "HC9"]),
        (2, "--variance must be 'variance', '", ["--damping", 1, "--variance", "sigma"]),
        (2, "--quantiles must be three levels", ["--calibration", 0.2, "--quantiles", "0.1;0.5"]),
        (2, "--quantiles must be three levels in order", ["--calibration", 0.2, "--quantiles", "0.9,0.5,0.1"]),
        (
            2,
            "give --variance or --quantiles, not both",
            ["--calibration", 0.2, "--variance", "std", "--quantiles", "0.1,0.5,0.9"],
        ),
        (2, "give --weights or --own-weights, not both", ["--damping", 1, "--weights", "w.pt"]),
        (
            1,
            "HC3 is not defined for clusters: give --robust HC1",
            ["--damping", 1, "--robust", "HC3", "--clusters", "w"],
        ),
        (1, "has no column 'ww' (did you mean 'w'?)", ["--damping", 1, "--sample-weight", "ww"]),
        (2, "cannot be both a feature and for --sample-weight", ["--damping", 1, "--sample-weight", "a"]),
        (1, "must return a mean and a variance", ["--damping", 1, "--variance", "variance"]),
        (1, "the network failed on 2 features (a, b)", ["--calibration", 0.2, "--quantiles", "0.1,0.5,0.9"]),
    ):
        refused(capsys, code, message, *fit, *options)
    two = ["fit", "networks:log_variance", *COLUMNS, "--damping", 1, "--out", "new.band"]
    message = "the network returns 2 numbers per row, but the number of targets is 1: y; see --variance and --quantiles"
    refused(capsys, 1, message, *two)
    assert not (here / "new.band").exists()
    told(capsys, *fit[:-1], "m.band", "--damping", 1)
    use = ["predict", "m.band", "--model", "networks:one", "--data", "test.csv", "--out", "new.csv"]
    refused(capsys, 2, "--side must be 'both', 'lower' or 'upper', got 'left'", *use, "--side", "left")
    refused(capsys, 2, "--kind must be 'observation' or 'mean', got 'median'", *use, "--kind", "median")
    refused(capsys, 1, "test.csv has no column 'v'", *use, "--sample-weight", "v")


@pytest.mark.parametrize("weight", [0, -2])
def test_a_row_to_be_predicted_needs_a_positive_weight(weight, here, capsys):
    told(capsys, "fit", "networks:one", *COLUMNS, "--damping", 1, "--out", "p.band", "--force")
    rows = pd.read_csv("test.csv")
    rows.loc[4, "w"] = weight
    rows.to_csv("bad.csv", index=False)
    message = f"bad.csv: column 'w' holds the weight {weight} in row 5; only a row with a positive weight"
    for command, options in (("predict", ["--out", "p.csv"]), ("evaluate", [])):
        use = ["p.band", "--model", "networks:one", "--data", "bad.csv", "--sample-weight", "w"]
        refused(capsys, 1, message, command, *use, *options)


def test_weights_that_are_zero_everywhere_are_refused(here, capsys):
    pd.read_csv("train.csv").assign(w=0).to_csv("zero.csv", index=False)
    fit = ["fit", "networks:one", "--train", "zero.csv", *COLUMNS[2:], "--damping", 1, "--sample-weight", "w"]
    refused(capsys, 1, "zero.csv: all rows of column 'w' have weight zero", *fit, "--out", "new.band")
