"""The study of what is said of data that are not what a network was trained on, on one small data set."""

import numpy as np
import pytest

from experiments import misuse
from experiments.__main__ import main
from experiments.rows import Rows
from experiments.tests.small_data import options, small


def test_right_uses_are_silent_and_wrong_ones_are_not(folder, monkeypatch):
    small(monkeypatch, folder, "first")
    monkeypatch.setattr(misuse, "SIZES", (60,))
    monkeypatch.setattr(misuse, "STEPS", 200)
    main(["misuse", *options(folder, "misuse.csv"), "--splits=1"])
    table = Rows(folder / "misuse.csv", misuse.KEY).read()
    assert len(table) == 3  # ways of training
    assert not table[list(misuse.RIGHT)].to_numpy().any()
    text = (folder / "misuse.md").read_text()
    assert "| right: scaled data | 3 | 0 |" in text


@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
def test_raw_data_are_not_taken_for_scaled_ones():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3))
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * rng.normal(size=200)
    said = misuse.run(100 + 20 * x, 50 + 17 * y, "adam 1e-2", 100, 0)
    assert [name for name, something in said.items() if something == (name in misuse.RIGHT)] == []
