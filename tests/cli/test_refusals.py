"""What goes wrong on a command line: one line on stderr that says what to do, an exit code, and nothing written.

Every case is a real command; they are run two at a time, since starting one takes seconds.
"""

import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from deltaband.cli import main
from tests.support.commands import FIT, make_folder, rows, run

WD = ["--weight-decay", "1e-3", "--out", "new.band"]
PREDICT = ["predict", "y.band", "--model", "network:make", "--out", "new.csv", "--data"]
EVALUATE = ["evaluate", "y.band", "--model", "network:make", "--data"]


def fit(*changes, **replaced):
    """The command of a fit with something else instead of something."""
    return [replaced.get(str(each).replace(".", "_").replace(":", "_").replace(",", "_"), each) for each in FIT] + [
        *changes
    ]


CASES = {  # name: command, exit code, what the line says
    "a missing feature": (
        [*PREDICT, "near.csv"],
        1,
        "near.csv has no column 'a' (did you mean 'A'?), which the band was fitted with; it has A, b, y",
    ),
    "a missing target at fit": (fit(*WD, y="Y"), 1, "train.csv has no column 'Y' (did you mean 'y'?); it has a, b, y"),
    "no target at evaluate": (
        [*EVALUATE, "features.csv"],
        1,
        "features.csv has no column 'y', which the band predicts, and which is needed here; it has a, b",
    ),
    "no target at report": (
        ["report", "y.band", "--model", "network:make", "--data", "features.csv", "--out", "new.html"],
        1,
        "features.csv has no column 'y'",
    ),
    "an unknown column to report by": (
        ["report", "y.band", "--model", "network:make", "--data", "test.csv", "--by", "nota", "--out", "new.html"],
        1,
        "test.csv has no column 'nota' (did you mean 'note'?)",
    ),
    "text among numbers": (
        fit(*WD, train_csv="text.csv"),
        1,
        "text.csv: column 'b' holds text ('many') in row 3; numbers are expected",
    ),
    "text at predict": ([*PREDICT, "text.csv"], 1, "column 'b' holds text ('many') in row 3"),
    "an empty cell": (
        fit(*WD, train_csv="gap.csv"),
        1,
        "gap.csv: column 'a' holds a missing value (an empty cell) in row 2; remove or impute such rows",
    ),
    "NaN": ([*EVALUATE, "nan.parquet"], 1, "nan.parquet: column 'y' holds a missing value in row 4"),
    "an empty file": (fit(*WD, train_csv="empty.csv"), 1, "empty.csv is empty"),
    "a header alone": (fit(*WD, train_csv="header.csv"), 1, "header.csv has no rows"),
    "a header alone at predict": ([*PREDICT, "header.csv"], 1, "header.csv has no rows"),
    "no such data": ([*PREDICT, "tests.csv"], 1, "there is no file tests.csv (did you mean 'test.csv'?)"),
    "no such factory": (
        fit(*WD, network_make="network:mak"),
        1,
        "module network has no 'mak' (did you mean 'make'?)",
    ),
    "no such module": (
        fit(*WD, network_make="netwrk:make"),
        1,
        "there is no module 'netwrk' (did you mean 'network'?), neither in the current folder nor installed",
    ),
    "a factory that raises": (
        fit(*WD, network_make="network:broken"),
        1,
        "network:broken raised RuntimeError: the weights are elsewhere",
    ),
    "weights of another network": (
        fit(*WD, network_make="network:wide"),
        1,
        "the weights do not fit the network: '0.weight' is (8, 2) in w.pt and (9, 2) in the network",
    ),
    "another network at predict": (
        ["predict", "y.band", "--model", "network:wide", "--data", "test.csv", "--out", "new.csv"],
        1,
        "'0.weight' is (8, 2) in y.band and (9, 2) in the network",
    ),
    "weights that would run code": (
        fit(*WD, w_pt="evil.pt"),
        1,
        "evil.pt does not hold tensors alone",
    ),
    "an exported file without --trust": (
        fit(*WD, network_make="network.pt2"),
        1,
        "loading network.pt2 can run code that is in it: give --trust",
    ),
    "a folder that is not there": (fit("--damping", "1", "--out", "none/new.band"), 1, "there is no folder"),
    "an output that is there": (fit("--damping", "1", "--out", "y.band"), 1, "y.band exists already: give --force"),
    "an output of an unknown kind": (
        ["predict", "y.band", "--model", "network:make", "--data", "test.csv", "--out", "new.xlsx"],
        2,
        "--out new.xlsx: the name must end in .csv or .csv.gz or .parquet or .npz",
    ),
    "columns that are there already": (
        [*PREDICT, "predicted.csv"],
        1,
        "predicted.csv has a column 'prediction' already: rename or drop it",
    ),
    "an unknown engine": (
        fit(*WD, "--engine", "exakt"),
        2,
        "--engine: there is no 'exakt' (did you mean 'exact'?); there are auto, exact, frequent-directions, "
        "important-directions, nystrom, random-projection, robust-frequent-directions",
    ),
    "a bad level": (
        [*PREDICT, "test.csv", "--level", "95"],
        2,
        "--level must be between 0 and 1 (0.95 for 95 %), got 95",
    ),
    "weight decay and damping": (fit(*WD, "--damping", "1"), 2, "give --weight-decay or --damping, not both"),
    "neither, without calibration": (
        fit("--out", "new.band"),
        2,
        "give --weight-decay or --damping, or --calibration, which needs neither",
    ),
    "noise of another name": (
        fit("--damping", "1", "--noise", "loud", "--out", "new.band"),
        2,
        "--noise must be 'auto' or 'none', got 'loud'",
    ),
    "a missing option": (["fit", "network:make"], 2, "Missing option '--train'; see deltaband fit --help"),
    "what is no band": (
        ["inspect", "w.safetensors"],
        1,
        "w.safetensors is a safetensors file, but not a band of deltaband",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    make_folder(folder)
    test = rows(10, 2)[["a", "b", "y"]]
    test.rename(columns={"a": "A"}).to_csv(folder / "near.csv", index=False)
    test[["a", "b"]].to_csv(folder / "features.csv", index=False)
    test.assign(prediction=1.0).to_csv(folder / "predicted.csv", index=False)
    (folder / "text.csv").write_text("a,b,y\n1,2,3\n1,2,3\n1,many,3\nfew,2,3\n")
    (folder / "gap.csv").write_text("a,b,y\n1,2,3\n,2,3\n")
    (folder / "empty.csv").write_text("")
    (folder / "header.csv").write_text("a,b,y\n")
    test.assign(y=[0.0, 0.0, 0.0, np.nan] + [0.0] * 6).to_parquet(folder / "nan.parquet", index=False)
    (folder / "network.pt2").write_text("whatever")
    assert run(*FIT, "--weight-decay", "1e-3", "--out", "y.band", folder=folder)[0] == 0
    return folder


@pytest.fixture(scope="module")
def outcomes(folder):
    """The files that were there before, and what became of each command."""
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda case: run(*case[0], folder=folder), CASES.values())
    return before, dict(zip(CASES, results, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_in_one_line(outcomes, name):
    code, out, err = outcomes[1][name]
    _, expected, message = CASES[name]
    assert err.startswith("deltaband: error: "), err
    assert message in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert (code, out) == (expected, "")


def test_nothing_is_written_or_run_by_a_refused_command(folder, outcomes):
    before, _ = outcomes
    assert not (folder / "ran").exists()
    after = {path: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != "imported"}
    assert after == {path: content for path, content in before.items() if path.name != "imported"}


def test_debug_shows_where_an_error_came_from(folder):
    code, _, err = run(*fit(*WD, network_make="network:broken"), "--debug", folder=folder)
    assert code == 1
    assert "Traceback" in err
    assert "in broken" in err
    assert err.splitlines()[-1].startswith("deltaband: error: network:broken raised")


# --- more of the same, in this process


@pytest.fixture
def refused(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))

    def check(code, message, *arguments):
        assert main([str(each) for each in arguments]) == code
        err = capsys.readouterr().err
        assert re.search(message, err), err
        assert err.count("\n") == 1
        return err

    return check


def test_networks_that_are_none_are_refused(refused):
    assert refused(2, "MODEL must be package.module:factory", *fit(*WD, network_make="network"))
    assert refused(2, "must name a module, not a file: network:make", *fit(*WD, network_make="./network.py:make"))
    assert refused(
        1,
        "network:asking raised TypeError: .*missing 1 required positional argument: 'size'",
        *fit(*WD, network_make="network:asking"),
    )
    assert refused(
        1, "network:number gives int; a torch.nn.Module is expected", *fit(*WD, network_make="network:number")
    )
    assert refused(
        1,
        "gives NoneType; a torch.nn.Module is expected, or a function without arguments that returns one",
        *fit(*WD, network_make="network:__doc__"),
    )
    assert refused(
        1,
        "returns 2 numbers per row, but the number of targets is 1: y",
        *[e for e in fit(*WD, "--own-weights", network_make="network:two") if e not in ("--weights", "w.pt")],
    )
    assert refused(
        1,
        r"failed on 4 features \(a, b, z, note\)|column 'note' holds text",
        *[e for e in fit(*WD) if e not in ("--features", "a,b")],
    )


def test_a_network_that_nobody_has_trained_is_refused(refused, folder, capsys):
    (folder / "untrained.py").write_text(
        "import torch\nfrom torch import nn\n\ndef make():\n    torch.manual_seed(0)\n    return nn.Linear(2, 1)\n\n"
        "made = make()\n\ndef trained():\n    net = make()\n"
        "    net.load_state_dict({'weight': torch.tensor([[1.0, 1.0]]), 'bias': torch.zeros(1)})\n    return net\n"
    )
    bare = [each for each in fit(*WD) if each not in ("--weights", "w.pt")]
    for factory in ("make", "made"):
        command = [f"untrained:{factory}" if each == "network:make" else each for each in bare]
        told = refused(1, "are the random numbers that it was initialised with", *command)
        assert f"of untrained:{factory}" in told
        assert (
            "(weight, bias): give --weights FILE, or let the factory load them; if they are right, give --own" in told
        )
        sys.modules.pop("untrained")
    command = ["untrained:trained" if each == "network:make" else each for each in bare]
    own = [*[each if each != "untrained:trained" else "untrained:make" for each in command], "--own-weights"]
    for words, said in ((command, "^$"), (own, "the network predicts its training rows worse than their mean would")):
        assert main([str(each) for each in words]) == 0
        (folder / "new.band").unlink()
        assert re.search(said, capsys.readouterr().err)
    plan = ["plan", "untrained:make", "--train", "train.csv", "--features", "a,b", "--target", "y"]
    assert main(plan) == 0  # sizes do not depend on weights


def test_modules_that_do_not_import_are_refused(refused, folder):
    (folder / "lacking.py").write_text("import nothing_of_the_kind\n")
    (folder / "leaving.py").write_text("raise SystemExit('bye')\n")
    assert refused(
        1, "importing lacking failed: .*No module named 'nothing_of_the_kind'", *fit(*WD, network_make="lacking:make")
    )
    assert refused(1, "importing leaving failed: SystemExit: .*bye", *fit(*WD, network_make="leaving:make"))


def test_weights_that_are_none_are_refused(refused, folder):
    (folder / "junk.pt").write_bytes(b"junk")
    (folder / "junk.safetensors").write_bytes(b"junk")
    torch.save({"epoch": 3}, folder / "checkpoint.pt")
    torch.save({"0.weight": torch.zeros(8, 2)}, folder / "few.pt")
    state = torch.load(folder / "w.pt")
    torch.save({**state, "3.bias": torch.zeros(1)}, folder / "many.pt")
    assert refused(1, "there is no file w9.pt", *fit(*WD, w_pt="w9.pt"))
    assert refused(1, "junk.pt", *fit(*WD, w_pt="junk.pt"))
    assert refused(1, "junk.safetensors could not be read", *fit(*WD, w_pt="junk.safetensors"))
    assert refused(1, "is not a state dict: its entry 'epoch' is not a tensor", *fit(*WD, w_pt="checkpoint.pt"))
    assert refused(1, r"'0.bias' is missing in few.pt and \(8,\) in the network", *fit(*WD, w_pt="few.pt"))
    assert refused(1, r"'3.bias' is \(1,\) in many.pt and missing in the network", *fit(*WD, w_pt="many.pt"))


def test_options_that_make_no_sense_are_refused(refused):
    assert refused(2, "--loss must be one of 'mean', 'half_mean', 'sum'", *fit(*WD, "--loss", "huber"))
    assert refused(2, "--batch-size goes with --loss sum", *fit(*WD, "--batch-size", 10))
    assert refused(2, "--weight-decay must be a finite number", *fit("--weight-decay", "nan", "--out", "new.band"))
    assert refused(2, "is not a key=value of exact, which has no settings", *fit(*WD, "--engine", "exact:rank=3"))
    assert refused(
        2,
        "did you mean 'rank'.*which takes rank, compress, memory, tail",
        *fit(*WD, "--engine", "important-directions:rnk=3"),
    )
    assert refused(2, "rank must be .* a positive whole number", *fit(*WD, "--engine", "important-directions:rank=-3"))
    assert refused(2, "--memory must be a number of bytes such as 2GB", *fit(*WD, "--memory", "lots"))
    assert refused(2, "fraction between 0 and 1", *fit("--calibration", "1.5", "--out", "new.band"))
    assert refused(1, "there is no file held.csv", *fit("--calibration", "held.csv", "--out", "new.band"))
    assert refused(1, "features.csv has no column 'y'", *fit("--calibration", "features.csv", "--out", "new.band"))
    assert refused(2, "give --target-mean and --target-std together", *fit(*WD, "--target-mean", "3"))
    assert refused(
        2,
        "--target-mean and --target-std: finite numbers are expected, and --target-std above 0",
        *fit(*WD, "--target-mean", 3, "--target-std", 0),
    )
    assert refused(2, "column 'y' cannot be both a feature and for --target", *fit(*WD, a_b="a,y"))
    assert refused(1, "column 'a' is named more than once", *fit(*WD, a_b="a,a"))
    assert refused(2, "some of 0.5, 0.5 are the same", *PREDICT, "test.csv", "--level", 0.5, "--level", 0.5)
    assert refused(2, "No such command 'fitt'", "fitt")
    assert refused(
        1, "memory.*`deltaband plan` shows what would fit", *fit(*WD, "--engine", "exact", "--memory", "1kB")
    )


def test_an_output_in_a_folder_without_permission_is_refused_before_the_work(refused, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # root may write anywhere
    assert refused(
        1, "--out: no permission to write into", *fit("--damping", "1", "--out", "new.band", train_csv="none.csv")
    )


def test_what_a_command_reads_is_never_replaced(refused, folder):
    page = ["report", "y.band", "--model", "network:make", "--data", "test.csv", "--force", "--out"]
    (folder / "as.band").symlink_to("train.csv")
    before = (folder / "train.csv").read_bytes()
    assert refused(2, "is a file that the command reads", *fit("--damping", "1", "--force", "--out", "as.band"))
    assert refused(2, "the name must end in .band", *fit("--damping", "1", "--force", "--out", "train.csv"))
    assert refused(2, "the name must end in .html", *page, "test.csv")
    assert refused(2, "the name must end in .html", *page, "y.band")
    (folder / "as.band").unlink()
    assert (folder / "train.csv").read_bytes() == before


def test_tables_with_another_separator_or_a_bare_header_are_told(refused, folder):
    (folder / "semicolons.csv").write_text("a;b;y\n1;2;3\n")
    (folder / "bare.csv").write_text("a,b,y")
    assert refused(1, "columns seem to be separated by ';'; commas are expected", *fit(*WD, train_csv="semicolons.csv"))
    assert refused(1, "bare.csv has no rows", *fit(*WD, train_csv="bare.csv"))


def test_what_the_users_code_prints_does_not_get_into_the_results(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (folder / "talking.py").write_text(
        "from torch import nn\nprint('imported')\n\nclass Talking(nn.Linear):\n    def forward(self, x):\n"
        "        print('called')\n        return super().forward(x)\n\ndef make():\n    print('made')\n"
        "    return Talking(2, 1)\n"
    )
    arguments = ["--features", "a,b", "--target", "y", "--train", "train.csv", "--json"]
    for command in (
        ["plan", "talking:make"],
        ["fit", "talking:make", "--own-weights", "--damping", "1", "--out", "talking.band"],
    ):
        assert main([*command, *arguments]) == 0
        out, err = capsys.readouterr()
        json.loads(out)
        assert "made" in err
    use = ["--model", "talking:make", "--data", "test.csv", "--json"]
    assert main(["evaluate", "talking.band", *use]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["rows"] > 0
    assert "called" in err
    (folder / "talking.band").unlink()


def test_too_few_calibration_rows_are_told_when_they_are_used(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main([*map(str, fit("--calibration", "near19.csv", "--out", "few.band"))]) == 1  # there is none
    rows(5, 9).to_csv(folder / "five.csv", index=False)
    assert main([*map(str, fit("--calibration", "five.csv", "--out", "few.band"))]) == 0
    assert "5 calibration rows allow levels up to 0.833: 0.95 needs 19 of them" in capsys.readouterr().err
    assert main(["evaluate", "few.band", "--model", "network:make", "--data", "test.csv"]) == 1
    assert "ask for a level of at most 0.8333, or calibrate on more rows" in capsys.readouterr().err
    (folder / "few.band").unlink()
