"""The experiment on groups, shift and time as Markdown tables: `results/world.md` from `results/world.csv`."""

from __future__ import annotations

import numpy as np
import pandas as pd

from . import data
from .world import PARTS, SERIES
from .world_methods import LEVEL

TITLES = {
    "feature": "Groups: quintiles of a feature",
    "prediction": "Groups: quintiles of the prediction",
    "tilted": "Shift: rows drawn along the first principal component",
    "beyond": "Shift: the highest fifth along the first principal component",
    "order": "One after another: files in their order, and series in time",
}
LOWEST = {
    "feature": "lowest quintile",
    "prediction": "lowest quintile",
    "tilted": "lowest fifth",
    "beyond": "lowest fifth",
    "order": "lowest fifth",
}
COLUMNS = [f"part_{k + 1}" for k in range(PARTS)]


def markdown(cells: pd.DataFrame) -> str:
    lines = [
        "# Promises to groups, under shift and in time",
        "",
        f"Intervals at {LEVEL:.0%} around the same networks; `python -m experiments world --help` says what is what. "
        "Scores are geometric means of ratios to those of constant width; in scores infinite bounds count as the "
        "training range widened by itself.",
        "",
    ]
    for study, title in TITLES.items():
        if not (of_study := cells[cells.study == study]).empty:
            lines += [f"## {title}", "", *overview(of_study, LOWEST[study]), "", *by_data(of_study), ""]
    return "\n".join(lines)


def _methods(cells: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(cells.method))


def _means(cells: pd.DataFrame, column: str) -> pd.DataFrame:
    """Over splits: data sets by methods, in order."""
    names = [name for name in (*SERIES, *data.NAMES) if name in set(cells.data)]
    return cells.groupby(["data", "method"])[column].mean().unstack().loc[names, _methods(cells)]


def lowest(cells: pd.DataFrame) -> pd.DataFrame:
    """The coverage of the part that is covered least, each a mean over splits."""
    return pd.concat([_means(cells, column) for column in COLUMNS]).groupby(level=0, sort=False).min()


def ratios(cells: pd.DataFrame) -> pd.DataFrame:
    """Of scores to those of constant width on the same split, geometric means over splits."""
    logs = np.log(cells.pivot(index=["data", "split"], columns="method", values="score"))
    of_data = np.exp(logs.sub(logs.constant, axis=0).groupby("data").mean())
    return of_data.loc[_means(cells, "score").index, _methods(cells)]


def overview(cells: pd.DataFrame, name_of_lowest: str) -> list[str]:
    """A row a method, over all data sets."""
    coverage, score = _means(cells, "coverage"), ratios(cells)
    columns = {
        "coverage": coverage.mean().map("{:.1%}".format),
        "lowest of a data set": coverage.min().map("{:.1%}".format),
        f"{name_of_lowest}, mean": lowest(cells).mean().map("{:.1%}".format),
        "score": np.exp(np.log(score).mean()).map("{:.3f}".format),
        "infinite": _means(cells, "infinite").mean().map("{:.1%}".format),
    }
    lines = ["| method | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    return lines + [
        f"| {method} | " + " | ".join(column[method] for column in columns.values()) + " |"
        for method in _methods(cells)
    ]


def by_data(cells: pd.DataFrame) -> list[str]:
    """A row a data set: coverage, that of the part that is covered least, and score relative to constant width."""
    coverage, part, score, splits = _means(cells, "coverage"), lowest(cells), ratios(cells), cells.groupby("data").split
    lines = [
        "Coverage / that of the part that is covered least / score.",
        "",
        "| data | splits | " + " | ".join(_methods(cells)) + " |",
        "|---|---|" + "---|" * len(_methods(cells)),
    ]
    for name in coverage.index:
        texts = (
            f"{coverage.loc[name, m]:.3f} / {part.loc[name, m]:.2f} / {score.loc[name, m]:.3f}" for m in _methods(cells)
        )
        lines.append(f"| {name} | {splits.nunique()[name]} | " + " | ".join(texts) + " |")
    return lines
