"""The calibration experiment as a Markdown table: `results/calibration.md` from `results/calibration.csv`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from .calibration import KEY, LEVEL, RESULTS, SETTINGS
from .data import NAMES
from .rows import Rows

METHODS = ("formula", "constant", "boosted", "ours")


def table(cells: pd.DataFrame, setting: str) -> list[str]:
    """Mean interval score ± standard error and coverage of each method, the lowest score in bold."""
    lines = [
        f"## {setting}",
        "",
        "| data | splits | " + " | ".join(f"{m}: score | cov." for m in METHODS) + " | ours against best other |",
        "|---|---|" + "---|---|" * len(METHODS) + "---|",
    ]
    for name in NAMES:
        rows = cells[(cells.setting == setting) & (cells.data == name)]
        if rows.empty:
            continue
        scores = rows.pivot(index="split", columns="method", values="score").reindex(columns=METHODS)
        means, errors = scores.mean(), scores.sem()
        coverage = rows.groupby("method").p_cov.mean().reindex(METHODS)  # the formula may have given none
        parts = []
        for method in METHODS:
            text = f"{means[method]:.3g} ± {errors[method]:.2g}"
            parts.append(f"{f'**{text}**' if means[method] == means.min() else text} | {coverage[method]:.3f}")
        difference = scores["ours"] - scores[means.drop("ours").idxmin()]
        verdict = f"{difference.mean():+.3f} ± {difference.sem():.3f}"
        lines.append(f"| {name} | {len(scores)} | " + " | ".join(parts) + f" | {verdict} |")
    return [*lines, ""]


def scores(cells: pd.DataFrame) -> list[str]:
    """All mean interval scores in one table, the lowest of each way of training in bold: what the docs show."""
    heads = [f"{setting}: {method}" if method == METHODS[0] else method for setting in SETTINGS for method in METHODS]
    lines = ["| data | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    means = cells.groupby(["data", "setting", "method"]).score.mean()
    for name in (name for name in NAMES if name in set(cells.data)):
        parts = []
        for setting in SETTINGS:
            row = means[name, setting]
            parts += [_bold(row.get(m, np.nan), row.min()) for m in METHODS]
        lines.append(f"| {name} | " + " | ".join(parts) + " |")
    return lines


def _settings(cells: pd.DataFrame) -> list[str]:
    """Those that there are results of."""
    return [setting for setting in SETTINGS if setting in set(cells.setting)]


def _bold(score: float, lowest: float) -> str:
    return f"**{score:.3g}**" if score == lowest else f"{score:.3g}"


def joint_coverage(cells: pd.DataFrame) -> str:
    """One test over all cells: is our mean coverage within [level, level + 1/(n+1)]?"""
    ours = cells[cells.method == "ours"]
    excess = ours.p_cov - LEVEL
    allowed = (1 / (ours.n_calibration + 1)).mean()
    # splits of one data set share rows: a mean for each (data, setting) is what can be called independent
    means = excess.groupby([ours.data, ours.setting]).mean()
    error = means.std(ddof=1) / np.sqrt(len(means))
    with np.errstate(divide="ignore", invalid="ignore"):  # of few cells
        below, above = stats.norm.cdf(means.mean() / error), stats.norm.sf((means.mean() - allowed) / error)
    return (
        f"Coverage of ours minus {LEVEL:.0%}, mean over {len(means)} cells: {means.mean():+.4f} ± {error:.4f}; allowed "
        f"[0, {allowed:.4f}]; one-sided p of falling short {below:.2f}, of exceeding {above:.2f}."
    )


def summary(cells: pd.DataFrame) -> list[str]:
    lines = []
    for setting in _settings(cells):
        rows = cells[cells.setting == setting]
        scores = rows.groupby(["data", "method"]).score.agg(["mean", "sem"]).fillna({"sem": 0.0}).unstack("method")
        means = scores["mean"].reindex(columns=METHODS).fillna(np.inf)
        best = means.idxmin(axis=1)
        near = sum(
            means.loc[name, "ours"] <= means.loc[name].min() + scores.loc[name, ("sem", best[name])]
            for name in means.index
        )
        ranks = means.rank(axis=1).mean()
        lines.append(
            f"- {setting}: ours has the lowest mean score on {(best == 'ours').sum()} of {len(means)} data sets, and "
            f"one within a standard error of the lowest on {near}; mean ranks "
            + ", ".join(f"{m} {ranks[m]:.2f}" for m in METHODS)
        )
    return lines


def write(folder: Path = RESULTS.parent) -> bool:
    """The table, where there are results; False where there are none."""
    rows = Rows(folder / RESULTS.name, KEY)
    cells = rows.read()
    if cells.empty:
        return False
    text = ["# Calibration: 95 % intervals on real data", "", *summary(cells), "", joint_coverage(cells), ""]
    for setting in _settings(cells):
        text += table(cells, setting)
    rows.path.with_suffix(".md").write_text("\n".join(text))
    return True
