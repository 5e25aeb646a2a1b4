"""The paper's eleven data sets: from a folder that the user gives, else from OpenML.

A file is `<folder>/<name>.csv.gz`: a header row, numeric columns, the last one called `target`. OpenML's copies come
through scikit-learn, which keeps them in its data home. The ids below could be looked up when they were recorded, but
not fetched: what protects a user from a wrong or changed copy is that shape and content are verified, whatever the
source. Without a checksum (ct, year: neither could be had) only the shape is.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.datasets import fetch_openml

from .errors import Unusable


class Missing(Unusable):
    """A data set that can be had neither from the folder nor from OpenML."""


class Malformed(Unusable):
    """A data set that is there and is not what it should be."""


@dataclass(frozen=True)
class DataSet:
    name: str
    rows: int
    features: int
    openml: int | None  # the data id; None where no usable copy is known
    checksum: str | None  # see `checksum`; None where the data could not be had
    elsewhere: str  # who else has it
    targets: tuple[str, ...] = ()  # OpenML's columns whose mean is the target; none: the one that OpenML calls so
    dropped: tuple[str, ...] = ()  # OpenML's columns that are neither feature nor target


CONCRETE_STRENGTH = "Concrete compressive strength(MPa. megapascals)"
# Smallest first. Of the authors' ids, energy's (1472) has its target coded as classes and yacht's (40691) is red wine.
CATALOGUE = {
    entry.name: entry
    for entry in (
        DataSet("yacht", 308, 6, 42370, "eefa7bf8d46c0fca", "UCI 243"),
        DataSet("boston", 506, 13, 531, "4826411a6be86e63", "StatLib"),
        DataSet("energy", 768, 8, 44960, "7770b2c82a8ba110", "UCI 242", ("heating_load",), ("cooling_load",)),
        # the copy whose target has two decimals; UCI's spreadsheet, and perhaps OpenML 44959, have more
        DataSet("concrete", 1030, 8, 4353, "a2338b2e238e3283", "UCI 165", (CONCRETE_STRENGTH,)),
        DataSet("wine-red", 1599, 11, 44972, "e56711c820fbc7a9", "UCI 186"),
        DataSet("ailerons", 13_750, 40, 296, "2f4a2dd77bb0a4aa", "L. Torgo's regression data sets"),
        DataSet("superconduct", 21_263, 81, 44964, "a4d552579e651fa5", "UCI 464"),
        DataSet("protein", 45_730, 9, 44963, "5e01ffb69ac50f12", "UCI 265"),
        DataSet("ct", 53_500, 384, None, None, "UCI 206"),
        # the authors take the median of the four runs
        DataSet("sgemm", 241_600, 14, 43144, "614d8423a67a6720", "UCI 440", ("Run1", "Run2", "Run3", "Run4")),
        DataSet("year", 515_345, 90, 44027, None, "UCI 203"),
    )
}
NAMES = tuple(CATALOGUE)


def folder(given: str | None) -> Path | None:
    """`--data`, else DELTABAND_DATA, else None: then all comes from OpenML."""
    for origin, name in (("--data", given), ("DELTABAND_DATA", os.environ.get("DELTABAND_DATA"))):
        if name:
            if not Path(name).is_dir():
                raise SystemExit(f"{origin}: {name} is not a folder")
            return Path(name)
    return None


def load(name: str, folder: Path | None) -> tuple[np.ndarray, np.ndarray]:  # (n, d), (n,)
    """The verified data set, or `Missing`, or `Malformed`."""
    wanted = CATALOGUE[name]
    path = None if folder is None else folder / f"{name}.csv.gz"
    if path is not None and path.exists():
        source = f"{name} ({path})"
        X, y = _read(path, source)
    else:
        source = f"{name} (OpenML {wanted.openml})"
        X, y = _fetch(wanted, path, source)
    if X.shape != (wanted.rows, wanted.features):
        expected, got = (f"{n} rows and {d} features" for n, d in ((wanted.rows, wanted.features), X.shape))
        raise Malformed(f"{source}: expected {expected}, got {got}")
    if wanted.checksum is not None and (got := checksum(X, y)) != wanted.checksum:
        raise Malformed(f"{source}: expected content with checksum {wanted.checksum}, got {got}")
    return X, y


@dataclass
class Available:
    """Iterates over (name, X, y) of the data sets that can be had, and says on stderr which cannot.

    One that is missing is nothing unusual. One that is malformed is: the rest goes on, and the exit code is then 1.
    """

    names: Sequence[str]
    folder: Path | None
    malformed: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(set(self.names))

    def __iter__(self) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        for name in dict.fromkeys(self.names):
            try:
                X, y = load(name, self.folder)
            except Missing as error:
                print(f"missing: {error}", file=sys.stderr, flush=True)
            except Malformed as error:
                print(f"malformed: {error}", file=sys.stderr, flush=True)
                self.malformed.append(name)
            else:
                yield name, X, y


def checksum(X: np.ndarray, y: np.ndarray) -> str:
    """16 hexadecimal digits that depend on the rows, but not on their order or their last digits.

    Each column is cut to steps of 2⁻²⁰ of its scale, the power of two above its largest value, and the rows are sorted.
    The steps start at an irrational offset: no decimal or fraction lies just where its last digit would decide.
    """
    table = np.column_stack([X, y])
    scale = np.frexp(np.abs(table).max(axis=0) * (1 + 2**-30))[1]  # so that 1 and 0.999… have the same
    steps = np.floor(np.ldexp(table, 20 - scale) + (3 - 5**0.5) / 2).astype("<i4")
    steps = steps[np.lexsort(steps.T)]
    return hashlib.sha256(scale.astype("<i4").tobytes() + steps.tobytes()).hexdigest()[:16]


def _read(path: Path, source: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        table = pd.read_csv(path, low_memory=False)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise Malformed(f"{source}: expected a gzipped CSV file, got {_told(error)}") from error
    if table.columns[-1] != "target":
        raise Malformed(f"{source}: expected a header whose last column is 'target', got {table.columns[-1]!r}")
    if not isinstance(table.index, pd.RangeIndex):  # pandas takes surplus fields for row names
        raise Malformed(f"{source}: expected rows of {table.shape[1]} fields as in the header, got more")
    numbers = _numbers(table, source)
    return numbers[:, :-1], numbers[:, -1]


def _fetch(wanted: DataSet, path: Path | None, source: str) -> tuple[np.ndarray, np.ndarray]:
    looked = "no folder given (--data DIR or DELTABAND_DATA)" if path is None else f"there is no {path}"
    if wanted.openml is None:
        raise Missing(
            f"{wanted.name}: {looked}, and OpenML has no usable copy known to us; get it from {wanted.elsewhere}"
        )
    options = {"target_column": list(wanted.targets) or "default-target", "as_frame": True, "parser": "pandas"}
    # All is numbers, also what OpenML calls nominal, with or without quotes; some scikit-learns stumble over categories
    # that pandas 3.1 reads as integers.
    options["read_csv_kwargs"] = {"dtype": None, "quotechar": "'"}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "A network error occurred|Invalid cache")  # one line at the end is enough
            warnings.filterwarnings("ignore", ".*has flag is_ignore")
            bunch = fetch_openml(data_id=wanted.openml, **options)
    except (OSError, EOFError, HTTPException) as error:
        raise Missing(
            f"{wanted.name}: {looked}, and OpenML {wanted.openml} could not be reached ({_told(error)}); "
            f"it is also at {wanted.elsewhere}"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise Malformed(f"{source}: expected a table with a target, got {_told(error)}") from error
    if bunch.target is None:
        raise Malformed(f"{source}: expected a table with a target, got one without")
    features = bunch.data.drop(columns=list(wanted.dropped), errors="ignore")
    return _numbers(features, source), _numbers(pd.DataFrame(bunch.target), source).mean(axis=1)


def _numbers(table: pd.DataFrame, source: str) -> np.ndarray:
    numbers = np.empty(table.shape)
    for place, (name, column) in enumerate(table.items()):
        try:
            numbers[:, place] = column.to_numpy(np.float64, na_value=np.nan)
        except (ValueError, TypeError) as error:
            raise Malformed(f"{source}: expected numbers in column {name!r}, got {_told(error)}") from error
        if not np.isfinite(numbers[:, place]).all():
            row = np.flatnonzero(~np.isfinite(numbers[:, place]))[0]
            raise Malformed(f"{source}: expected numbers in column {name!r}, got {numbers[row, place]} in row {row}")
    return numbers


def _told(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
