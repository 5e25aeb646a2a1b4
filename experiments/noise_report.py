"""The noise experiment as Markdown tables: `results/noise.md` from `results/noise.csv`."""

from __future__ import annotations

import numpy as np
import pandas as pd

from . import data
from .calibration import SETTINGS
from .noise import FEW_ROWS, LEVELS

METHODS = ("constant", "boosted", "q alone", "learnt", "mean-variance", "ensemble", "quantiles")
AROUND = {  # the networks whose means, or medians, are centres
    "plain": "learnt",
    "mean-variance": "mean-variance",
    "ensemble": "ensemble",
    "quantiles": "quantiles",
}
PERCENT = [round(100 * level) for level in LEVELS]


def markdown(cells: pd.DataFrame) -> str:
    everything = _of(cells)
    lines = [
        "# Noise that differs from row to row",
        "",
        *summary(cells),
        "",
        "## All methods",
        "",
        *overview(cells),
        "",
    ]
    for level in PERCENT:
        lines += [f"## Interval score at {level} % relative to q alone", "", *by_data(everything, level), ""]
    for setting in _settings(everything):
        lines += [f"## Interval score and coverage at 95 %, {setting}", "", *scores(everything, setting), ""]
    lines += ["## Coverage at 80 % among the noisiest fifth", "", *_table(everything, "noisiest_80"), ""]
    lines += ["## Coverage at 80 % in the worst slab", "", *_table(everything, "slab_80"), ""]
    lines += ["## RMSE of the centres", "", *centres(everything), ""]
    if (cells.calibration != "all rows").any():
        lines += ["## Few calibration rows", "", *few_rows(cells), ""]
    if (cells.test == "shifted").any():
        lines += ["## Shift along the first principal component", "", *shift(cells), ""]
    return "\n".join(lines)


def _of(cells: pd.DataFrame, calibration: str = "all rows", test: str = "random") -> pd.DataFrame:
    return cells[(cells.calibration == calibration) & (cells.test == test)]


def _settings(cells: pd.DataFrame) -> list[str]:
    return [setting for setting in SETTINGS if setting in set(cells.setting)]


def _names(cells: pd.DataFrame) -> list[str]:
    return [name for name in data.NAMES if name in set(cells.data)]


def log_ratios(cells: pd.DataFrame, level: int, against: str = "q alone") -> pd.DataFrame:
    """log(score/other score) of each method, (data, split) by method, a mean over the ways of training.

    The other is that of q alone on the same rows, or, against "own", a constant width around the method's own centre.
    """
    columns = ["data", "split", "setting"]
    logs = np.log(cells.pivot(index=columns, columns="method", values=f"score_{level}"))
    others = np.log(cells.pivot(index=columns, columns="method", values=f"own_{level}"))
    other = others if against == "own" else logs[[against]].to_numpy()
    return (logs - other).groupby(["data", "split"]).mean().reindex(columns=METHODS)


def ratios(cells: pd.DataFrame, level: int, against: str = "q alone") -> pd.Series:
    """Geometric means over data sets, each with the same weight, of each method."""
    return np.exp(log_ratios(cells, level, against).groupby("data").mean().mean())


def summary(cells: pd.DataFrame) -> list[str]:
    """What learnt noise is worth."""
    everything = _of(cells)
    lines = []
    for level in PERCENT:
        own, around = ratios(everything, level, "own"), log_ratios(everything, level, "own")
        against = {other: log_ratios(everything, level, other).learnt for other in ("q alone", "ensemble")}
        by_own = _against(around.learnt - around.ensemble, "ensemble", 3)
        lines.append(
            f"- {level} %: the interval score with learnt noise, a geometric mean over data sets, is "
            f"{_against(against['q alone'], 'q alone', 1)}, and {_against(against['ensemble'], 'ensemble', 3)}. "
            f"Relative to a constant width around the same centre it is {own.learnt:.3f}, that of the ensemble "
            f"{own.ensemble:.3f}: by that measure it is {by_own}."
        )
    return [*lines, "- Where it falls short, and why: docs/calibration.md, Where learnt noise falls short."]


def _against(ratio: pd.Series, other: str, percent: int) -> str:  # log, by data and split
    logs = ratio.groupby("data").agg(["mean", "sem"])
    of_data = np.exp(logs["mean"])
    worse = [name for name in data.NAMES if name in of_data and of_data[name] > 1 + percent / 100]
    named = ", ".join(f"{name} ({of_data[name]:.3f} ± {of_data[name] * logs['sem'][name]:.3f})" for name in worse)
    better = f"lower on {(of_data < 1).sum()} of {len(of_data)} and more than {percent} % higher on {named or 'none'}"
    return f"{np.exp(logs['mean'].mean()):.3f} of that of {other}, {better}"


def overview(cells: pd.DataFrame) -> list[str]:
    """One row a method: what the documents show."""
    everything = _of(cells)
    heads = [f"score {level} %" for level in PERCENT] + [f"own centre {level} %" for level in PERCENT[1:]]
    heads += ["noisiest fifth, 80 %", "worst slab, 80 %"]
    shifted = _of(cells, test="shifted")
    heads += ["shift, 95 %"] if len(shifted) else []
    columns = [ratios(everything, level).map("{:.3f}".format) for level in PERCENT]
    columns += [ratios(everything, level, "own").map("{:.3f}".format) for level in PERCENT[1:]]
    columns += [_mean(everything, name).map("{:.1%}".format) for name in ("noisiest_80", "slab_80")]
    columns += [_mean(shifted, "coverage_95").map("{:.1%}".format)] if len(shifted) else []
    lines = ["| method | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    return lines + [f"| {method} | " + " | ".join(column[method] for column in columns) + " |" for method in METHODS]


def _mean(cells: pd.DataFrame, column: str) -> pd.Series:
    """Over splits and settings, then over data sets, of each method."""
    return cells.groupby(["data", "method"])[column].mean().groupby("method").mean().reindex(METHODS)


def which(cells: pd.DataFrame) -> str:
    """The row of scores of README's table: relative to a constant width around the plain network."""
    means = ratios(_of(cells), 95, "constant")
    return f"| interval score | {means.learnt:.2f} | {means.boosted:.2f} | – | {means.ensemble:.2f} |"


def each_data_set(cells: pd.DataFrame, setting: str = "adam 1e-4") -> list[str]:
    """Mean interval scores at 95 % of one way of training, the lowest in bold."""
    heads = {
        "constant": "constant width",
        "boosted": "MAPIE, boosted residuals",
        "q alone": '`calibrate(noise="none")`',
        "learnt": "`calibrate`",
        "ensemble": "5 mean-variance networks",
        "quantiles": "quantile network (CQR)",
    }
    lines = ["| data | " + " | ".join(heads.values()) + " |", "|---|" + "---|" * len(heads)]
    of_setting = _of(cells)[_of(cells).setting == setting]
    means = of_setting.groupby(["data", "method"]).score_95.mean().unstack()[list(heads)]
    for name in _names(of_setting):
        lowest = means.loc[name].min()
        lines.append(f"| {name} | " + " | ".join(_bold(f"{v:.3g}", v == lowest) for v in means.loc[name]) + " |")
    return lines


def by_data(cells: pd.DataFrame, level: int) -> list[str]:
    """Geometric means of ratios ± standard errors over splits, the lowest of a data set in bold."""
    logs = log_ratios(cells, level)
    others = [method for method in METHODS if method != "q alone"]
    lines = ["| data | splits | " + " | ".join(others) + " |", "|---|---|" + "---|" * len(others)]
    for name in _names(cells):
        of_data = logs.loc[name]
        means, errors = np.exp(of_data.mean()), of_data.sem()
        texts = (_bold(f"{means[m]:.3f} ± {means[m] * errors[m]:.3f}", means[m] == means.min()) for m in others)
        lines.append(f"| {name} | {len(of_data)} | " + " | ".join(texts) + " |")
    means = ratios(cells, level)
    return [*lines, "| all | | " + " | ".join(f"{means[method]:.3f}" for method in others) + " |"]


def scores(cells: pd.DataFrame, setting: str) -> list[str]:
    """Mean scores ± standard errors, the lowest in bold, and coverages."""
    lines = [
        "| data | " + " | ".join(f"{m}: score | cov." for m in METHODS) + " |",
        "|---|" + "---|---|" * len(METHODS),
    ]
    of_setting = cells[cells.setting == setting]
    for name in _names(of_setting):
        rows = of_setting[of_setting.data == name].groupby("method")
        means, errors, coverage = rows.score_95.mean(), rows.score_95.sem(), rows.coverage_95.mean()
        texts = (
            f"{_bold(f'{means[m]:.3g} ± {errors[m]:.2g}', means[m] == means.min())} | {coverage[m]:.3f}"
            for m in METHODS
        )
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    return lines


def _table(cells: pd.DataFrame, column: str) -> list[str]:
    """Means over splits and settings, of each data set and method, and over all data sets."""
    lines = ["| data | " + " | ".join(METHODS) + " |", "|---|" + "---|" * len(METHODS)]
    means = cells.groupby(["data", "method"])[column].mean().unstack()
    for name in _names(cells):
        lines.append(f"| {name} | " + " | ".join(f"{means.loc[name, method]:.3f}" for method in METHODS) + " |")
    overall = _mean(cells, column)
    return [*lines, "| all | " + " | ".join(f"{overall[method]:.3f}" for method in METHODS) + " |"]


def centres(cells: pd.DataFrame) -> list[str]:
    lines = ["| data | " + " | ".join(AROUND) + " |", "|---|" + "---|" * len(AROUND)]
    means = cells.groupby(["data", "method"]).rmse.mean().unstack()[list(AROUND.values())]
    for name in _names(cells):
        lowest = means.loc[name].min()
        texts = (_bold(f"{value:.3f}", value == lowest) for value in means.loc[name])
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    return lines


def few_rows(cells: pd.DataFrame) -> list[str]:
    """With AdamW: scores relative to q alone on as many rows, where there are as many."""
    last = list(SETTINGS)[-1]
    heads, columns = [], []
    for n in FEW_ROWS:
        few = _of(cells, f"{n} rows")
        if few.empty:
            continue
        heads += [f"{n} rows: {what}" for what in ("80 %", "95 %", "cov. 95 %")]
        columns += [ratios(few, level).map("{:.3f}".format) for level in PERCENT[1:]]
        columns += [_mean(few, "coverage_95").map("{:.3f}".format)]
    lines = [f"Scores relative to q alone on the same rows, with {last}.", ""]
    lines += ["| method | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    return lines + [f"| {method} | " + " | ".join(column[method] for column in columns) + " |" for method in METHODS]


def shift(cells: pd.DataFrame) -> list[str]:
    """Coverage where test rows are unlike all others."""
    shifted = _of(cells, test="shifted")
    lines = ["Coverage of 95 % intervals, scores relative to q alone, and mean widths relative to constant.", ""]
    heads = [*_names(shifted), "all", "score 80 %", "score 95 %", "width 95 %"]
    means = shifted.groupby(["data", "method"]).coverage_95.mean().unstack()
    overall = _mean(shifted, "coverage_95")
    relative = [ratios(shifted, level) for level in PERCENT[1:]]
    widths = np.log(shifted.groupby(["data", "method"]).width_95.mean().unstack())
    relative.append(np.exp(widths.sub(widths.constant, axis=0).mean()))
    lines += ["| method | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for method in METHODS:
        texts = [f"{means.loc[name, method]:.3f}" for name in _names(shifted)]
        texts += [f"{overall[method]:.3f}", *(f"{each[method]:.3f}" for each in relative)]
        lines.append(f"| {method} | " + " | ".join(texts) + " |")
    return lines


def _bold(text: str, is_bold: bool) -> str:
    return f"**{text}**" if is_bold else text
