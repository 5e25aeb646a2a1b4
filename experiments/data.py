"""The paper's data sets from a folder of `<name>.csv.gz` files: numeric columns, the target last."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd

NAMES = ("yacht", "boston", "energy", "concrete", "wine-red", "ailerons", "protein", "superconduct", "sgemm")


def folder(given: str | None) -> Path:
    name = given or os.environ.get("DELTABAND_DATA")
    if not name:
        raise SystemExit("where are the data sets? give --data DIR or set DELTABAND_DATA")
    if not Path(name).is_dir():
        raise SystemExit(f"{name} is not a folder")
    return Path(name)


def load(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:  # (n, d), (n,)
    table = pd.read_csv(folder / f"{name}.csv.gz").to_numpy(dtype=np.float64)
    return table[:, :-1], table[:, -1]
