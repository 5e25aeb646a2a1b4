"""No file runs code, and the command line imports what the user named and what is installed, nothing else."""

import json
import pickle
import shutil
import sys

import pytest
import torch

from deltaband import ArtefactError, ClassificationIntervals, PredictionIntervals, storage
from tests.support.commands import FIT, Evil, make_folder, run
from tests.support.networks import mlp

SEEN = """
import json, sys
from deltaband.cli import main
code = main()
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
sys.exit(code)
"""
POISON = "from pathlib import Path\nPath(__file__).with_name('poisoned').write_text(__name__)\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("security")
    make_folder(folder)
    return folder


def malicious(path, way):
    """A pickle that makes a file called "ran" in the current folder, as it may come."""
    if way == "pickle":
        path.write_bytes(pickle.dumps(Evil()))
    else:
        torch.save({"0.weight": Evil()}, path, pickle_module=pickle, _use_new_zipfile_serialization=way == "torch")


@pytest.mark.parametrize("way", ["pickle", "torch", "old torch"])
@pytest.mark.parametrize("suffix", [".band", ".pt", ".safetensors"])
def test_a_malicious_pickle_in_the_place_of_a_band_does_not_run(way, suffix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"evil{suffix}"
    malicious(path, way)
    for read in (
        lambda: PredictionIntervals.load(path, mlp()),
        lambda: ClassificationIntervals.load(path, mlp()),
        lambda: storage.inspect(path),
        lambda: storage.weights(path),
    ):
        with pytest.raises(ArtefactError, match=r"evil.* is not a band of deltaband, or it is damaged"):
            read()
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    with path.open("rb") as file:
        pickle.load(file) if way == "pickle" else torch.load(file, weights_only=False)
    assert (tmp_path / "ran").exists()  # it would have


@pytest.mark.parametrize("way", ["pickle", "torch", "old torch"])
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".safetensors"])
def test_a_malicious_pickle_in_the_place_of_weights_does_not_run(way, suffix, folder, monkeypatch, capsys):
    from deltaband.cli import main

    monkeypatch.chdir(folder)
    path = folder / f"weights{suffix}"
    malicious(path, way)
    arguments = [str(path) if each == "w.pt" else each for each in FIT]
    assert main([*arguments, "--damping", "1", "--out", "new.band"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"deltaband: error: {path}")
    assert err.count("\n") == 1
    path.unlink()
    assert not (folder / "ran").exists()
    assert not (folder / "new.band").exists()


@pytest.mark.parametrize("command", ["inspect", "predict"])
def test_a_malicious_pickle_does_not_run_on_the_command_line(command, folder, monkeypatch, capsys):
    from deltaband.cli import main

    monkeypatch.chdir(folder)
    malicious(folder / "evil.band", "torch")
    more = ["--model", "network:make", "--data", "test.csv", "--out", "new.csv"] if command == "predict" else []
    assert main([command, "evil.band", *more]) == 1
    assert "is not a band of deltaband" in capsys.readouterr().err
    assert not (folder / "ran").exists()


def test_only_what_is_named_is_imported_from_the_current_folder(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    python = [sys.executable, "-P", "-c", SEEN]
    fit = [*FIT, "--weight-decay", "1e-3", "--calibration", "test.csv", "--json", "--force", "--out", "y.band"]
    code, out, err = run(*fit, folder=tmp_path, python=python)
    assert (code, err) == (0, "")
    names = {*json.loads(out.splitlines()[-1]), "sitecustomize", "usercustomize", "conftest", "helpers"}
    names -= {"network", "__main__", "__mp_main__"}
    assert {"torch", "numpy", "pyarrow", "typer", "scipy", "json"} <= names
    poisoned = tmp_path / "poisoned"
    for name in names:
        (tmp_path / f"{name}.py").write_text(POISON)
    predict = ["predict", "y.band", "--model", "network:make", "--data", "test.csv", "--force", "--out"]
    report = ["report", "y.band", "--model", "network:make", "--data", "test.csv", "--force", "--out", "r.html"]
    for command in (["inspect", "y.band"], fit, [*predict, "p.csv"], [*predict, "p.parquet"], report):
        code, _, err = run(*command, folder=tmp_path)
        assert not poisoned.exists(), f"{command[0]} imports {poisoned.read_text()}.py"
        assert (code, err) == (0, "")
