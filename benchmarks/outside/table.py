"""A table that is measured cell by cell: a CSV that an interrupted run goes on with, and Markdown made from it."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from deltaband import DeltabandWarning, Intervals, metrics
from deltaband.calibration import conformal_quantiles
from experiments import data
from experiments.arguments import on_data
from experiments.errors import Unusable
from experiments.rows import Key, Rows, write_table

RESULTS = Path(__file__).parent / "results"
Cell = tuple[Key, Callable[[], list[dict[str, object]]]]  # the key of its rows, and what measures the other columns


def fill(
    name: str,
    about: str,
    key: Sequence[str],
    cells: Callable[[argparse.Namespace], Iterator[Cell]],
    markdown: Callable[[pd.DataFrame], str],
    arguments: Sequence[str],
) -> Path:
    """Measure what is not there yet, write the Markdown, and return the path of the CSV."""
    parser = on_data(name, about, f"{name}.csv", package="benchmarks.outside", results=RESULTS)
    options = parser.parse_args(arguments)
    options.data = data.folder(options.data)
    warnings.simplefilter("ignore", DeltabandWarning)
    rows = Rows(options.out, key)
    done = rows.done()
    try:
        for cell, measure in tqdm(cells(options), unit="cell", mininterval=1.0):
            if cell not in done:
                rows.append([dict(zip(key, cell, strict=True)) | row for row in measure()])
    finally:  # an interrupted run has a table, too
        written = write_table(options.out, key, markdown)
    if not written:
        raise Unusable("none of the data sets can be used")
    return options.out


def scaled(
    residuals: np.ndarray, held: np.ndarray | float, mean: np.ndarray, new: np.ndarray | float, level: float
) -> Intervals:
    """Split conformal intervals of new rows, as wide as their scales; residuals and scales of held-out rows."""
    half = conformal_quantiles(np.sort(np.abs(residuals) / held), (level,))[0] * new
    return Intervals(mean, mean - half, mean + half, level)


def scores(y: np.ndarray, intervals: Intervals) -> dict[str, float]:
    """Coverage, mean width and interval score at one level."""
    return {
        "coverage": float(metrics.coverage(y, intervals)),
        "width": float(np.mean(intervals.upper - intervals.lower)),
        "score": float(metrics.interval_score(y, intervals)),
    }


def lines(table: pd.DataFrame, *, digits: int = 3) -> list[str]:
    """The rows of a Markdown table, under its own column names."""
    header = [str(column) for column in table.columns]
    body = [[cell if isinstance(cell, str) else f"{cell:.{digits}f}" for cell in row] for row in table.to_numpy()]
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *body)]
