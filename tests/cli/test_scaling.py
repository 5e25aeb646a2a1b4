"""Raw tables for networks that were trained on scaled data: what is said once, at fit, is in the band."""

import json
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.preprocessing import StandardScaler

from deltaband import PredictionIntervals
from deltaband.cli import main
from deltaband.cli.output import Refusal
from deltaband.cli.scaling import read_scaling
from tests.support.commands import commands_in, refused, told

NETWORK = """
import json
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

def loaded():
    model = make()
    model.load_state_dict(torch.load("w.pt"))
    return model

def moments():
    with open("scaling.json") as file:
        scaling = json.load(file)
    numbers = [[scaling[name][key] for name in ("area", "age", "price")] for key in ("mean", "std")]
    return torch.tensor(numbers, dtype=torch.float64)

def with_pairs():
    mean, std = moments()
    return {"model": loaded(), "input_transform": (mean[:2], std[:2]), "target_transform": (mean[2:], std[2:])}

def with_a_tuple():
    made = with_pairs()
    return made["model"], made["input_transform"], made["target_transform"]

def with_a_function():
    mean, std = moments()
    return with_pairs() | {"input_transform": lambda x: ((x - mean[:2]) / std[:2]).float()}

def with_scalers():
    from sklearn.preprocessing import StandardScaler
    import pandas as pd
    train = pd.read_csv("train.csv")
    x, y = StandardScaler().fit(train[["area", "age"]].to_numpy()), StandardScaler().fit(train[["price"]].to_numpy())
    return {"model": loaded(), "input_transform": x, "target_transform": y}

def with_an_unknown_part():
    return {"model": loaded(), "scaler": None}

def without_a_model():
    return {"input_transform": (0, 1)}
"""
COLUMNS = ["--features", "area,age", "--target", "price"]
FIT = ["fit", "network:make", "--weights", "w.pt", "--train", "train.csv", *COLUMNS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scaling")
    (folder / "network.py").write_text(NETWORK)
    rng = np.random.default_rng(5)  # not the seed that draws rows for the calibration
    rows = pd.DataFrame({"area": rng.uniform(20, 200, 400), "age": rng.uniform(0, 1e5, 400)})
    rows["price"] = 5e5 + 3e3 * rows.area - rows.age + 2e4 * rng.standard_normal(400)
    rows["one"] = 0.1
    rows["note"] = "n"
    train = rows[:300]
    train.to_csv(folder / "train.csv", index=False)
    rows[300:].to_csv(folder / "test.csv.gz", index=False)
    names = ["area", "age", "price"]
    mean, std = train[names].mean(), train[names].std(ddof=0)
    scaling = {name: {"mean": mean[name], "std": std[name]} for name in names}
    (folder / "scaling.json").write_text(json.dumps(scaling))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    scaled = torch.tensor(((train[names] - mean) / std).to_numpy(), dtype=torch.float32)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.03, weight_decay=1e-3)
    for _ in range(200):
        optimiser.zero_grad()
        torch.nn.functional.mse_loss(model(scaled[:, :2]), scaled[:, 2:]).backward()
        optimiser.step()
    torch.save(model.state_dict(), folder / "w.pt")
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    with commands_in(folder, monkeypatch, "network"):
        yield folder


def by_hand(folder):
    """The intervals of the test rows, made in Python from data that are scaled by hand, and scaled back."""
    train, test = pd.read_csv(folder / "train.csv"), pd.read_csv(folder / "test.csv.gz")
    x, y = StandardScaler().fit(train[["area", "age"]].to_numpy()), StandardScaler().fit(train[["price"]].to_numpy())
    model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model.load_state_dict(torch.load(folder / "w.pt"))
    band = PredictionIntervals(model, weight_decay=1e-3)
    inputs = x.transform(train[["area", "age"]].to_numpy())
    band.fit(inputs, y.transform(train[["price"]].to_numpy()), progress=False)
    intervals = band.predict(x.transform(test[["area", "age"]].to_numpy()))
    return [part.astype(float) * y.scale_[0] + y.mean_[0] for part in intervals]


WAYS = {
    "--standardise": [*FIT, "--standardise"],
    "--scaling": [*FIT, "--scaling", "scaling.json"],
    "pairs of the factory": ["fit", "network:with_pairs", "--train", "train.csv", *COLUMNS],
    "a tuple of the factory": ["fit", "network:with_a_tuple", "--train", "train.csv", *COLUMNS],
    "a function of the factory": ["fit", "network:with_a_function", "--train", "train.csv", *COLUMNS],
    "scalers of the factory": ["fit", "network:with_scalers", "--train", "train.csv", *COLUMNS],
}


@pytest.mark.parametrize("way", WAYS)
def test_raw_tables_have_the_intervals_of_scaled_data_in_original_units(way, here, capsys):
    told(capsys, *WAYS[way], "--weight-decay", 1e-3, "--out", "p.band")
    factory = WAYS[way][1]
    plain = "network:make" if factory != "network:with_a_function" else factory  # numbers are in the band
    use = ["p.band", "--model", plain, "--data", "test.csv.gz"]
    told(capsys, "predict", *use, "--out", "out.csv.gz")
    found = pd.read_csv("out.csv.gz")
    for name, expected in zip(("prediction", "lower_95", "upper_95"), by_hand(here), strict=True):
        np.testing.assert_allclose(found[name], expected, rtol=1e-5)
    (scores,) = told(capsys, "evaluate", *use)["results"]
    assert 0.88 < scores["coverage"] < 1
    assert 1.5e4 < scores["rmse"] < 3e4  # in the units of the file
    told(capsys, "report", *use, "--out", "r.html")
    assert 1.5e4 < np.ravel(told(capsys, "inspect", "p.band")["noise_std"])[0] < 3e4


def test_a_transform_that_no_file_holds_is_asked_of_the_factory(here, capsys):
    told(capsys, *WAYS["a function of the factory"], "--weight-decay", 1e-3, "--out", "p.band")
    use = ["p.band", "--model", "network:loaded", "--data", "test.csv.gz"]
    refused(capsys, 1, "which no file holds: let the factory of --model return it", "evaluate", *use)


def calibrated(folder, calibration):
    """The upper bounds of the test rows by the library, from data that are scaled by hand, and scaled back."""
    train, test = pd.read_csv(folder / "train.csv"), pd.read_csv(folder / "test.csv.gz")
    held_out = test
    if calibration == "0.4":
        drawn = np.random.default_rng(0).random(300) < 0.4
        train, held_out = train[~drawn], train[drawn]
    names = ["area", "age", "price"]
    scaler = StandardScaler().fit(train[names].to_numpy())
    (x, y), (x_held, y_held), (x_new, _) = (
        np.split(scaler.transform(rows[names].to_numpy()), [2], axis=1) for rows in (train, held_out, test)
    )
    model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model.load_state_dict(torch.load(folder / "w.pt"))
    band = PredictionIntervals(model).fit(x, y, progress=False).calibrate(x_held, y_held)
    return band.predict(x_new).upper * scaler.scale_[2] + scaler.mean_[2]


def test_calibration_takes_raw_rows_too(here, capsys):
    for calibration in ("test.csv.gz", "0.4"):
        found = told(capsys, *FIT, "--standardise", "--calibration", calibration, "--out", "c.band", "--force")
        assert found["calibration_rows"] > 90
        rows = pd.read_csv("train.csv")
        if calibration == "0.4":
            rows = rows[np.random.default_rng(0).random(300) >= 0.4]  # what the fit has left
        assert found["scaling"]["area"]["mean"] == pytest.approx(rows.area.mean())
        assert found["scaling"]["price"]["std"] == pytest.approx(rows.price.std(ddof=0))
        use = ["c.band", "--model", "network:make", "--data", "test.csv.gz", "--force"]
        told(capsys, "predict", *use, "--out", "c.csv")
        np.testing.assert_allclose(pd.read_csv("c.csv").upper_95, calibrated(here, calibration), rtol=1e-5)
    assert told(capsys, "inspect", "c.band")["notes"]["scaling"]["age"]["std"] > 2e4


def test_the_numbers_are_those_of_standard_scaler_for_constant_columns_as_well(here, capsys):
    (here / "three.py").write_text(
        "from torch import nn\nimport torch\ndef make():\n    net = nn.Linear(3, 1)\n"
        "    net.load_state_dict({'weight': torch.ones(1, 3), 'bias': torch.zeros(1)})\n    return net\n"
    )
    fit = ["fit", "three:make", "--train", "train.csv", "--exclude", "note", "--target", "price", "--damping", 1]
    assert main([*map(str, fit), "--standardise", "--out", "t.band", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "--standardise: column 'one' is the same in all training rows, and only centred" in err
    found = json.loads(out)
    assert found["features"] == ["area", "age", "one"]
    names = ["area", "age", "one", "price"]
    scaler = StandardScaler().fit(pd.read_csv("train.csv")[names].to_numpy())
    scaling = pd.DataFrame(found["scaling"])[names]
    np.testing.assert_allclose(scaling.loc["mean"], scaler.mean_, rtol=1e-12)
    np.testing.assert_allclose(scaling.loc["std"], scaler.scale_, rtol=1e-12)
    refused(
        capsys,
        1,
        "--standardise: the target 'one' is the same in all training rows",
        *[*FIT[:-1], "one", "--standardise", "--damping", 1, "--out", "one.band"],
    )


def test_targets_alone_and_features_alone_can_have_been_scaled(here, capsys):
    raw = ["--target-mean", 0, "--target-std", 1]
    said = "--standardise"
    for way in ([said], ["--scaling", "features.json"]):
        scaling = json.loads((here / "scaling.json").read_text())
        (here / "features.json").write_text(json.dumps({name: scaling[name] for name in ("area", "age")}))
        found = told(capsys, *FIT, *way, *raw, "--damping", 1, "--out", "f.band", "--force")
        assert list(found["scaling"]) == ["area", "age"]
        told(
            capsys, "predict", "f.band", "--model", "network:make", "--data", "test.csv.gz", "--out", "f.csv", "--force"
        )
        assert pd.read_csv("f.csv").prediction.abs().max() < 10  # the network's own numbers
    price = scaling["price"]
    told(capsys, *FIT, "--target-mean", price["mean"], "--target-std", price["std"], "--damping", 1, "--out", "t.band")


SCALING = {"area": {"mean": 110, "std": 52}, "age": {"mean": 5e4, "std": 2.8e4}, "price": {"mean": 8e5, "std": 1e5}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "could not be read as JSON"),
        ("[1]", 'holds list; expected an object such as {"area": {"mean": 110, "std": 52}, …}'),
        ({**SCALING, "aera": {"mean": 0, "std": 1}}, "there is no column 'aera' (did you mean 'area'?)"),
        ({"area": SCALING["area"], "price": SCALING["price"]}, "has no entry for the feature 'age'"),
        ({"area": SCALING["area"], "age": SCALING["age"]}, "has no entry for the target 'price'"),
        ({**SCALING, "age": {"mean": 1, "std": 0}}, "the std of 'age' is 0; it must be above 0"),
        ({**SCALING, "age": {"mean": 1, "std": -2}}, "the std of 'age' is -2; it must be above 0"),
        ({**SCALING, "age": {"mean": float("nan"), "std": 1}}, "the mean of 'age' is NaN; a finite number is expected"),
        ({**SCALING, "age": {"mean": 1, "std": float("inf")}}, "the std of 'age' is Infinity; a finite number"),
        ({**SCALING, "age": {"mean": "1", "std": 1}}, "the mean of 'age' is \"1\"; a finite number is expected"),
        ({**SCALING, "age": {"mean": True, "std": 1}}, "the mean of 'age' is true; a finite number is expected"),
        ({**SCALING, "age": [1, 2]}, "'age' is [1, 2]; expected"),
        ({**SCALING, "age": {"mean": 1, "scale": 2}}, "expected an object such as"),
        ('{"area": {"mean": 1, "std": 1}, "area": {"mean": 2, "std": 1}}', "'area' is in it more than once"),
    ],
)
def test_a_scaling_that_is_none_is_refused(content, message, tmp_path):
    path = tmp_path / "s.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(Refusal) as error:
        read_scaling(path, ["area", "age"], ["price"], ["area", "age", "price", "note"])
    assert message in str(error.value)


def test_a_scaling_may_have_more_columns_of_the_table_and_any_order(tmp_path):
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"note": {"mean": 0, "std": 1}, **SCALING}))
    found = read_scaling(path, ["age", "area"], ["price"], ["area", "age", "price", "note"])
    np.testing.assert_array_equal(found.of(["age", "area"]), [[5e4, 110], [2.8e4, 52]])


def test_a_scaler_must_have_been_fitted_to_the_same_columns(here, capsys):
    (here / "framed.py").write_text(
        "from network import *\nimport pandas as pd\nfrom sklearn.pipeline import make_pipeline\n"
        "from sklearn.preprocessing import StandardScaler\n\ndef make():\n    train = pd.read_csv('train.csv')\n"
        "    x = make_pipeline(StandardScaler()).fit(train[['area', 'age']])\n"
        "    return loaded(), x, StandardScaler().fit(train[['price']])\n"
    )
    fit = ["fit", "framed:make", "--train", "train.csv", "--target", "price", "--weight-decay", 1e-3, "--out", "p.band"]
    message = "the input_transform that framed:make returns was fitted to area, age, and --features is age, area: give"
    refused(capsys, 2, message, *fit, "--features", "age,area")
    assert main([*map(str, fit), "--features", "area,age"]) == 0
    assert capsys.readouterr().err == ""
    told(capsys, "predict", "p.band", "--model", "framed:make", "--data", "test.csv.gz", "--out", "out.csv")
    np.testing.assert_allclose(pd.read_csv("out.csv").upper_95, by_hand(here)[2], rtol=1e-5)
    sys.modules.pop("framed")


def test_new_rows_of_a_scaled_band_are_watched_in_the_units_of_the_file(here, capsys):
    pd.read_csv("test.csv.gz")[:50].to_csv("held_out.csv", index=False)
    pd.read_csv("test.csv.gz")[50:].to_csv("new.csv", index=False)
    told(capsys, *FIT, "--standardise", "--calibration", "held_out.csv", "--out", "m.band")
    assert (
        told(capsys, "monitor", "m.band", "--model", "network:make", "--data", "new.csv", "--level", 0.9)["alarms"]
        == []
    )


def test_ways_to_scale_exclude_each_other(here, capsys):
    out = ["--damping", 1, "--out", "new.band"]
    refused(capsys, 2, "give --standardise or --scaling, not both", *FIT, "--standardise", "--scaling", "s.json", *out)
    refused(capsys, 1, "there is no file s.json", *FIT, "--scaling", "s.json", *out)
    pairs = WAYS["pairs of the factory"]
    message = "network:with_pairs returns input_transform and target_transform itself: leave --standardise out"
    refused(capsys, 2, message, *pairs, "--standardise", *out)
    message = "returns target_transform itself: leave --target-mean and --target-std out"
    refused(capsys, 2, message, *pairs, "--target-mean", 0, "--target-std", 1, *out)
    unknown = ["fit", "network:with_an_unknown_part", *pairs[2:], *out]
    refused(
        capsys, 1, "returns a dictionary with 'scaler'; expected model, input_transform and target_transform", *unknown
    )
    without = ["fit", "network:without_a_model", *pairs[2:], *out]
    refused(capsys, 1, "gives NoneType; a torch.nn.Module is expected", *without)


def test_a_function_of_the_factory_may_make_other_columns(here, capsys):
    (here / "wider.py").write_text(
        "import torch\nfrom torch import nn\n\ndef make():\n    net = nn.Linear(3, 1)\n"
        "    net.load_state_dict({'weight': torch.ones(1, 3), 'bias': torch.zeros(1)})\n"
        "    return net, lambda x: torch.cat([x / 1000, x[:, :1] * x[:, 1:] / 1e6], dim=1)\n"
    )
    rows = ["wider:make", "--train", "train.csv", *COLUMNS]
    assert told(capsys, "plan", *rows)["parameters"] == 4
    told(capsys, "fit", *rows, "--damping", 1, "--out", "w.band")
    told(capsys, "predict", "w.band", "--model", "wider:make", "--data", "test.csv.gz", "--out", "w.csv")
    found = pd.read_csv("w.csv")
    expected = (found.area + found.age) / 1000 + found.area * found.age / 1e6
    np.testing.assert_allclose(found.prediction, expected, rtol=1e-5)
    sys.modules.pop("wider")


def test_a_monotone_transform_of_targets_reaches_the_file(here, capsys):
    """A logarithm, say, which is no pair of numbers: the factory gives it again."""
    (here / "logs.py").write_text(
        "from network import *\nfrom sklearn.preprocessing import FunctionTransformer\nimport numpy as np\n"
        "def make():\n    log = FunctionTransformer(np.log, np.exp)\n"
        "    return with_pairs() | {'target_transform': log}\n"
    )
    fit = ["fit", "logs:make", "--train", "train.csv", *COLUMNS, "--damping", 1, "--out", "l.band"]
    told(capsys, *fit)
    told(capsys, "predict", "l.band", "--model", "logs:make", "--data", "test.csv.gz", "--out", "l.csv")
    found = pd.read_csv("l.csv")
    assert (found.lower_95 > 0).all()
    ratio = np.log(found.upper_95 / found.prediction) / np.log(found.prediction / found.lower_95)
    np.testing.assert_allclose(ratio, 1, rtol=1e-3)
    sys.modules.pop("logs")
