"""Small data sets made here, as files and in the catalogue of the experiments."""

import gzip
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments import data, protocol, reproduce


def write(folder: Path, text: str | bytes, name: str = "tiny") -> Path:
    path = folder / f"{name}.csv.gz"
    partial = folder / f"{name}.{os.getpid()}"  # others may be reading the file
    partial.write_bytes(gzip.compress(text.encode() if isinstance(text, str) else text))
    return partial.replace(path)


def catalogue(monkeypatch: pytest.MonkeyPatch, *entries: data.DataSet) -> None:
    monkeypatch.setattr(data, "CATALOGUE", {entry.name: entry for entry in entries})
    monkeypatch.setattr(data, "NAMES", tuple(entry.name for entry in entries))


def made(folder: Path, names: tuple[str, ...] = ("first", "second"), n: int = 120) -> list[data.DataSet]:
    """Writes a data set of n rows and two features for each name; returns what the catalogue has to say of them."""
    rng = np.random.default_rng(0)
    entries = []
    for name in names:
        X = rng.standard_normal((n, 2)).round(3)
        y = (X.sum(axis=1) + 0.3 * rng.standard_normal(n)).round(3)
        write(folder, pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "target": y}).to_csv(index=False), name)
        entries.append(data.DataSet(name, n, 2, None, data.checksum(X, y), "nowhere"))
    return entries


def small(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    """The data sets are small, and the epochs of training are a few."""
    catalogue(monkeypatch, *made(folder, names or ("first", "second")))
    for module, name, value in (
        (protocol, "TOGETHER", 2),
        (protocol, "PATIENCE", 3),
        (protocol, "EPOCHS_AT_LEAST", 5),
        (protocol, "DROPOUT_EPOCHS", 4),
        (reproduce, "PASSES", 50),
        (reproduce, "PASSES_OF_THE_SEARCH", 20),
    ):
        monkeypatch.setattr(module, name, value)


def options(folder: Path, out: str, networks: str = "networks") -> list[str]:
    """For a command that reads data, keeps networks and writes results, all in one folder."""
    return ["--data", str(folder), "--out", str(folder / out), "--networks", str(folder / networks)]
