"""The command line, from a trained network to intervals, as a user runs it."""

import json
import math
import signal
import sys
import time

import numpy as np
import pandas as pd
import pytest
import torch

from deltaband import PredictionIntervals, metrics
from deltaband.cli import main
from tests.support.commands import FIT, commands_in, make_folder, run, start, told

USE = ["--model", "network:make"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a band of one target, y.band, made by the real command."""
    folder = tmp_path_factory.mktemp("cli")
    make_folder(folder)
    code, out, err = run(*FIT, "--weight-decay", 1e-3, "--out", "y.band", folder=folder)
    assert (code, err) == (0, "")
    assert "MB: y from a, b" in out
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    with commands_in(folder, monkeypatch, "network"):
        yield folder


def model(folder):
    made = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    made.load_state_dict(torch.load(folder / "w.pt"))
    return made


def by_hand(folder, **options):
    """The band that the command should have made."""
    train = pd.read_csv(folder / "train.csv")
    band = PredictionIntervals(model(folder), **({"weight_decay": 1e-3} | options))
    return band.fit(train[["a", "b"]].to_numpy(), train.y.to_numpy(), progress=False)


def close(found, expected):
    names = [found.pop("target"), expected.pop("target")]
    found, expected = ({key: math.nan if v is None else v for key, v in each.items()} for each in (found, expected))
    return names[0] == names[1] and found == pytest.approx(expected, rel=1e-4, nan_ok=True)


# --- each command, as it is installed


def test_predict_adds_the_intervals_of_the_library_to_the_rows_as_they_were(folder):
    code, out, err = run(
        "predict",
        "y.band",
        *USE,
        "--data",
        "test.csv",
        "--level",
        0.5,
        "--level",
        0.975,
        "--out",
        "p.csv",
        folder=folder,
    )
    assert (code, err) == (0, "")
    assert out == "80 rows with prediction, lower_50, upper_50, lower_97.5, upper_97.5 in p.csv\n"
    lines, given = (folder / "p.csv").read_text().splitlines(), (folder / "test.csv").read_text().splitlines()
    assert all(line.startswith(before + ",") for line, before in zip(lines, given, strict=True))  # cell for cell
    found, test = pd.read_csv(folder / "p.csv"), pd.read_csv(folder / "test.csv")
    intervals = by_hand(folder).predict(test[["a", "b"]].to_numpy(), level=[0.5, 0.975])
    np.testing.assert_allclose(found.prediction, intervals.mean, rtol=1e-6)
    np.testing.assert_allclose(found[["lower_50", "lower_97.5"]], intervals.lower, rtol=1e-5)
    np.testing.assert_allclose(found[["upper_50", "upper_97.5"]], intervals.upper, rtol=1e-5)


def test_evaluate_tells_the_metrics_of_the_library(folder):
    code, out, err = run("evaluate", "y.band", *USE, "--data", "test.parquet", "--json", folder=folder)
    assert (code, err) == (0, "")
    (found,) = json.loads(out)["results"]
    test = pd.read_csv(folder / "test.csv")
    intervals = by_hand(folder).predict(test[["a", "b"]].to_numpy())
    y = test.y.to_numpy()
    expected = {
        "target": "y",
        "level": 0.95,
        "coverage": metrics.coverage(y, intervals),
        "worst_slab_coverage": None,  # of 80 rows
        "mean_width": intervals.width.mean(),
        "interval_score": metrics.interval_score(y, intervals),
        "pinball_loss": metrics.pinball_loss(y, intervals),
        "width_error_correlation": metrics.width_error_correlation(y, intervals),
        "rmse": np.sqrt(np.mean((y - intervals.mean) ** 2)),
        "crps": metrics.crps(y, intervals),
    }
    assert close(found, expected)
    code, out, err = run("evaluate", "y.band", *USE, "--data", "test.csv", folder=folder)
    assert out.splitlines()[1].split() == ["target", *expected]


def test_report_writes_the_page_of_the_library(folder):
    arguments = ["report", "y.band", *USE, "--data", "test.csv", "--by", "z", "--by", "note", "--out", "r.html"]
    code, out, err = run(*arguments, "--level", 0.8, "--title", "Ours & theirs", "--json", folder=folder)
    assert (code, err) == (0, "")
    assert json.loads(out) == {"out": "r.html", "rows": 80, "by": ["z", "note"]}
    page = (folder / "r.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert all(text in page for text in ("Ours &amp; theirs", "80", "test.csv", "network:make"))


def test_inspect_imports_nothing_and_predict_only_what_is_named(folder):
    (folder / "imported").unlink(missing_ok=True)
    code, out, err = run("inspect", "y.band", "--json", folder=folder)
    found = json.loads(out)
    assert (code, err, found["training_rows"], found["notes"]["model"]) == (0, "", 150, "network:make")
    assert found["notes"]["features"] == ["a", "b"]
    code, out, err = run("predict", "y.band", "--data", "test.csv", "--out", "none.csv", folder=folder)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "pass --model network:make" in err
    assert not (folder / "imported").exists()
    assert not (folder / "none.csv").exists()


def test_plan_shows_sizes_and_engines(folder):
    code, out, err = run(
        "plan",
        "network:make",
        "--train",
        "train.csv",
        "--features",
        "a,b",
        "--weight-decay",
        1,
        "--json",
        folder=folder,
    )
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["rows"], found["parameters"], found["features"]) == (150, 33, ["a", "b"])
    chosen = [each for each in found["engines"] if each["chosen"]]
    assert [each["engine"] for each in chosen] == ["Exact(), primal form (33²)"]
    assert all(each["memory_bytes"] > 0 and each["seconds"] > 0 for each in found["engines"])


def test_help_teaches_and_the_version_is_told(folder):
    code, out, _ = run("--help", folder=folder)
    assert code == 0
    assert "deltaband predict price.band" in out
    assert main(["--version"]) == 0
    for command in ("plan", "fit", "predict", "evaluate", "inspect", "report"):
        assert f"\n  {command} " in out


@pytest.mark.parametrize("command", ["plan", "fit", "predict", "evaluate", "inspect", "report"])
def test_the_help_of_each_command_has_an_example(command, capsys):
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "Example" in out
    assert f"      deltaband {command}" in out or f"    deltaband {command}" in out
    assert "--json" in out


# --- Ctrl-C and memory


def interrupted(folder, *arguments):
    """Exit code and stderr after Ctrl-C in the middle of the work, and the files that were there then."""
    (folder / "under_way").unlink(missing_ok=True)
    process = start(*arguments, folder=folder, SLOW="2")
    while not (folder / "under_way").exists() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(0.5)
    there = set(folder.iterdir())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    return process.returncode, err, there


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_leaves_no_half_written_file(folder):
    slow = [each if each != "network:make" else "network:slow" for each in FIT]
    fit = [*slow, "--weight-decay", 1, "--out", "slow.band"]
    assert interrupted(folder, *fit)[:2] == (130, "deltaband: interrupted\n")
    assert not (folder / "slow.band").exists()
    assert run(*fit, folder=folder)[0] == 0
    before = set(folder.iterdir())
    predict = ["predict", "slow.band", "--model", "network:slow", "--data", "test.csv", "--out", "half.csv"]
    code, err, there = interrupted(folder, *predict)
    assert (code, err) == (130, "deltaband: interrupted\n")
    assert len(there - before) == 1  # the file under way
    assert set(folder.iterdir()) == before


MEASURED = """
import resource, sys
from deltaband.cli import main
code = main()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units elsewhere")
def test_predict_does_not_hold_a_large_file_in_memory(folder):
    def peak(data):
        arguments = ["predict", "y.band", *USE, "--data", data, "--out", "large_out.csv", "--force"]
        code, _, err = run(*arguments, folder=folder, python=[sys.executable, "-P", "-c", MEASURED])
        assert code == 0, err
        return int(err.splitlines()[-1]) / 1024  # MB

    text = "x" * 20_000
    with (folder / "large.csv").open("w") as file:
        file.write("a,b,text\n")
        file.writelines(f"0.1,0.2,{text}\n" for _ in range(10_000))
    small, large = peak("test.csv"), peak("large.csv")
    assert (folder / "large_out.csv").stat().st_size > 200e6
    for name in ("large.csv", "large_out.csv"):
        (folder / name).unlink()
    assert large - small < 100  # of 200


COUNTED = """
import sys
from pathlib import Path
from deltaband.cli import main

opened = []
watched = {Path(name).resolve() for name in ("train.csv", "test.csv")}

def record(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)) and Path(str(arguments[0])).resolve() in watched:
        opened.append(Path(arguments[0]).name)

sys.addaudithook(record)
code = main()
print(*opened, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--calibration", 0.3], ["train.csv"] * 2),  # the header, then all rows
        (["--calibration", "test.csv"], ["test.csv", "train.csv", "train.csv", "test.csv"]),
        # An engine that needs several passes gets them from the stored rows: the file is not read again.
        (["--damping", 1, "--engine", "nystrom:landmarks=20,choose=leverage"], ["train.csv"] * 2),
    ],
    ids=["fraction", "file", "several passes"],
)
def test_fit_opens_each_table_twice(folder, options, expected):
    counted = [sys.executable, "-P", "-W", "ignore", "-c", COUNTED]
    code, _, err = run(*FIT, *options, "--out", "counted.band", "--force", folder=folder, python=counted)
    assert code == 0, err
    assert err.splitlines()[-1].split() == expected


# --- what the commands can, in this process


def test_columns_are_found_by_name_in_every_format(here, capsys):
    shown = {}
    for name in ("test.csv", "test.parquet"):
        for suffix in (".csv", ".parquet", ".npz"):
            out = here / f"{name}{suffix}"
            found = told(capsys, "predict", "y.band", *USE, "--data", name, "--out", out)
            assert found["columns"] == ["prediction", "lower_95", "upper_95"]
            if suffix == ".npz":
                shown[out] = {key: value[:, None] for key, value in np.load(out).items()}
                assert shown[out]["note"].dtype.kind == "U"
            else:
                shown[out] = pd.read_csv(out) if suffix == ".csv" else pd.read_parquet(out)
                shown[out] = {key: shown[out][[key]].to_numpy() for key in shown[out]}
    first = next(iter(shown.values()))
    for each in shown.values():
        assert set(each) == {"a", "b", "y", "z", "note", "prediction", "lower_95", "upper_95"}
        for key in first:
            if key == "note":
                assert (each[key] == first[key]).all()
            else:
                np.testing.assert_allclose(each[key].astype(float), first[key], rtol=1e-6)


def test_targets_that_are_not_known_yet_are_carried_along(here, capsys):
    (here / "some.csv").write_text("y,a,b\n,0.1,0.2\n1.5,0.3,0.4\n")
    told(capsys, "predict", "y.band", *USE, "--data", "some.csv", "--out", "some.parquet")
    assert pd.read_parquet("some.parquet").y.fillna(-1).to_list() == [-1, 1.5]
    told(capsys, "predict", "y.band", *USE, "--data", "some.csv", "--out", "some_out.csv")
    assert (here / "some_out.csv").read_text().splitlines()[1].startswith(",0.1,0.2,")


def test_arrays_of_npz_are_columns_and_their_name_stands_for_all_of_them(here, capsys):
    arguments = ["fit", "network:trained", "--train", "train.npz", "--target", "y", "--damping", 0.075]
    assert told(capsys, *arguments, "--features", "X", "--out", "n.band")["features"] == ["X0", "X1"]
    found = told(capsys, "evaluate", "n.band", "--model", "network:trained", "--data", "test.npz")
    same = told(capsys, "evaluate", "y.band", *USE, "--data", "test.csv")
    assert close(found["results"][0], same["results"][0])
    told(capsys, "predict", "n.band", "--model", "network:trained", "--data", "test.npz", "--out", "n.npz")
    with np.load("n.npz") as arrays:
        assert sorted(arrays) == ["X0", "X1", "k", "lower_95", "prediction", "upper_95", "y"]


def test_several_targets_have_their_names_behind_and_their_own_units(here, capsys):
    scale = ["--target-mean", 0, "--target-mean", -3, "--target-std", 1, "--target-std", 6]
    arguments = ["fit", "network:two", "--train", "train.csv", "--features", "a,b", "--target", "y", "--target", "z"]
    arguments.append("--own-weights")
    found = told(capsys, *arguments, *scale, "--damping", 1, "--out", "two.band")
    assert found["targets"] == ["y", "z"]
    use = ["two.band", "--model", "network:two", "--data", "test.csv"]
    columns = told(capsys, "predict", *use, "--out", "two.csv")["columns"]
    assert columns == [f"{name}_{target}" for target in "yz" for name in ("prediction", "lower_95", "upper_95")]
    import network

    test = pd.read_csv("test.csv")
    outputs = network.two()(torch.tensor(test[["a", "b"]].to_numpy(), dtype=torch.float32)).detach().numpy()
    shown = pd.read_csv("two.csv")
    np.testing.assert_allclose(shown.prediction_z, outputs[:, 1] * 6 - 3, rtol=1e-5)
    assert (shown.lower_95_y < shown.prediction_y).all()
    assert [each["target"] for each in told(capsys, "evaluate", *use)["results"]] == ["y", "z"]


def test_a_calibration_fraction_holds_out_the_rows_that_the_help_says(here, capsys):
    found = told(capsys, *FIT, "--calibration", 0.4, "--seed", 3, "--out", "c.band")
    held = np.random.default_rng(3).random(150) < 0.4
    assert (found["rows"], found["calibration_rows"]) == (150 - held.sum(), held.sum())
    train, test = pd.read_csv("train.csv"), pd.read_csv("test.csv")
    x, y = train[["a", "b"]].to_numpy(), train.y.to_numpy()
    band = PredictionIntervals(model(here)).fit(x[~held], y[~held], progress=False).calibrate(x[held], y[held])
    told(capsys, "predict", "c.band", *USE, "--data", "test.csv", "--level", 0.8, "--out", "c.csv")
    expected = band.predict(test[["a", "b"]].to_numpy(), level=0.8).lower
    np.testing.assert_allclose(pd.read_csv("c.csv").lower_80, expected, rtol=1e-4)
    assert told(capsys, "inspect", "c.band")["calibration_rows"] == held.sum()


def test_a_calibration_file_does_without_weight_decay(here, capsys):
    found = told(capsys, *FIT, "--calibration", "test.csv", "--out", "f.band")
    assert (found["rows"], found["calibration_rows"], found["damping"]) == (150, 80, None)
    assert found["effective_parameters"] is None  # not a number


def test_noise_is_learnt_and_far_rows_are_told(here, capsys):
    found = told(capsys, *FIT, "--calibration", "test.csv", "--noise", "auto", "--out", "n.band")
    assert (found["rows"], found["calibration_rows"]) == (150, 80)
    assert "learnt" in told(capsys, "inspect", "n.band")["summary"]
    new = pd.read_csv("test.csv")
    new.loc[:4, "a"] = 50.0
    new.to_csv("new.csv", index=False)
    for out in ("out.csv", "out.parquet"):
        columns = told(capsys, "predict", "n.band", "--model", "network:make", "--data", "new.csv", "--out", out)[
            "columns"
        ]
        assert columns == ["prediction", "lower_95", "upper_95", "far"]
    far = pd.read_parquet("out.parquet")["far"]
    assert far.dtype == bool
    assert far[:5].all()
    assert far[5:].mean() < 0.3
    assert (pd.read_csv("out.csv")["far"] == far).all()


def test_engines_losses_and_weights_reach_the_library(here, capsys):
    arguments = [each if each != "w.pt" else "w.safetensors" for each in FIT]
    engine = ["--engine", "robust-frequent-directions:rank=33", "--memory", "500MB"]
    found = told(
        capsys, *arguments, *engine, "--weight-decay", 0.02, "--loss", "sum", "--batch-size", 10, "--out", "e.band"
    )
    assert found["damping"] == pytest.approx(150 * 0.02 / 20)
    assert told(capsys, "inspect", "e.band")["engine"].startswith("RobustFrequentDirections(rank=33")


def test_warnings_are_one_line_each_on_stderr(here, capsys):
    pd.read_csv("train.csv")[:40].to_csv("few.csv", index=False)
    few = [each if each != "train.csv" else "few.csv" for each in FIT]
    assert main([*few, "--damping", "1e-9", "--out", "w.band"]) == 0
    err = capsys.readouterr().err
    assert err.startswith("deltaband: warning: ")
    assert err.count("\n") == 1


def test_a_band_saved_by_python_needs_names_and_takes_the_factorys_weights(here, capsys):
    by_hand(here).save("p.band")
    use = ["p.band", "--model", "network:trained", "--data", "test.csv"]
    assert main(["evaluate", *use]) == 2
    assert "was saved without the names of its features: give --features" in capsys.readouterr().err
    named = ["--features", "a,b", "--target", "y"]
    found = told(capsys, "evaluate", *use, *named)
    same = ["evaluate", "y.band", *USE, "--data", "test.csv"]
    assert close(found["results"][0], told(capsys, *same)["results"][0])
    assert main([*same, *named]) == 2
    assert "they cannot be changed" in capsys.readouterr().err


def test_the_package_itself_does_not_import_the_command_line(folder):
    seen = "import sys, deltaband; sys.exit(any(name in sys.modules for name in ('typer', 'pyarrow', 'deltaband.cli')))"
    assert run(folder=folder, python=[sys.executable, "-P", "-c", seen])[0] == 0


def test_without_its_extra_the_command_says_what_to_install(monkeypatch, capsys):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["--help"]) == 1
    assert capsys.readouterr().err == "deltaband: error: missing typer and pyarrow: pip install 'deltaband[cli]'\n"
