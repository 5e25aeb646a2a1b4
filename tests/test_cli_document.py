"""The commands of docs/cli.md are run, with the files it shows."""

import re
import shlex
import sys
from pathlib import Path

import pandas as pd
from made_commands import COMMAND, run

DOCUMENT = Path(__file__).parent.parent / "docs" / "cli.md"


def test_the_commands_of_the_document_run(tmp_path):
    blocks = re.findall(r"^```(python \S+\.py|sh)\n(.*?)^```", DOCUMENT.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert {kind.split()[0] for kind, _ in blocks} == {"python", "sh"}
    for kind, block in blocks:
        if kind != "sh":
            (tmp_path / kind.split()[1]).write_text(block)
            continue
        for line in block.replace("\\\n", " ").splitlines():
            program, *arguments = shlex.split(line)
            python = {"deltaband": COMMAND, "python": [sys.executable]}[program]
            code, out, err = run(*arguments, folder=tmp_path, python=python)
            assert (code, err) == (0, ""), line
    levels = out.splitlines()[2:]
    assert [line.split()[1] for line in levels] == ["0.5", "0.95"]
    assert float(levels[1].split()[2]) > 0.9
    given, found = (pd.read_csv(tmp_path / name) for name in ("new.csv", "new_with_bands.csv"))
    assert list(found) == [*given, "prediction", "lower_50", "upper_50", "lower_95", "upper_95"]
    pd.testing.assert_frame_equal(found[list(given)], given)
    assert found.prediction.corr(found.price) > 0.95  # in the units of the file
