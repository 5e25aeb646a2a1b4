"""The commands of docs/cli.md are run, with the files it shows."""

import sys

import pandas as pd

from tests.support.commands import COMMAND, run
from tests.support.documents import ROOT, blocks, commands


def test_the_commands_of_the_document_run(tmp_path):
    shown = blocks(ROOT / "docs" / "cli.md")
    files = [block for block in shown if block.language == "python"]
    assert [block.tag for block in files] == ["network.py", "train.py", "factory.py"]
    for block in files:
        (tmp_path / block.tag).write_text(block.text)
    printed = {}
    for block in shown:
        for program, *arguments in commands(block) if block.language == "bash" else []:
            python = {"deltaband": COMMAND, "python": [sys.executable]}[program]
            code, out, err = run(*arguments, folder=tmp_path, python=python)
            assert (code, err) == (0, ""), arguments
            printed[arguments[0]] = out
    levels = printed["evaluate"].splitlines()[2:]
    assert [line.split()[1] for line in levels] == ["0.5", "0.95"]
    assert float(levels[1].split()[2]) > 0.9
    given, found = (pd.read_csv(tmp_path / name) for name in ("new.csv.gz", "new_with_bands.csv"))
    assert list(found) == [*given, "prediction", "lower_50", "upper_50", "lower_95", "upper_95", "far"]
    pd.testing.assert_frame_equal(found[list(given)], given)
    assert found.prediction.corr(found.price) > 0.95  # in the units of the file
