"""Tables 1 and 2 with the paper's values beside ours: Markdown and CSV from `results/methods.csv`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from . import data, paper
from .arguments import RESULTS
from .reproduce import KEY, METHODS
from .rows import Rows
from .score import KEY as SKETCHES_KEY
from .score import METHODS as SKETCHES

METRICS = ("p_cov", "r", "w_sd", "score")
TITLES = {
    "p_cov": "Coverage p_cov of 95 % intervals (in bold: nearest to 0.95)",
    "r": "Correlation r of width and absolute error (in bold: the highest; – where the width is constant)",
    "w_sd": "Mean width w_sd, in standard deviations of the training targets",
    "score": "Interval score, in the same unit (in bold: the lowest); the paper has none",
}
BEST: dict[str, Callable[[pd.Series], float]] = {
    "p_cov": lambda means: (means - 0.95).abs().min(),
    "r": lambda means: -means.max(),
    "score": lambda means: means.min(),
}
TABLE_1 = ("exact", "exact on 80 %", "directions", "compressed")
TABLE_2 = [method for method in METHODS if method != "exact on 80 %"]
P_COV_TOLERANCE, WIDTH_TOLERANCE = 0.02, 0.15


def summarise(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard error over the splits of each (data, method), and the paper's value where it has one."""
    groups = rows.groupby(["data", "method"])
    parts = {"splits": groups.size()}
    for name in (*METRICS, "effective_parameters"):
        parts[name] = groups[name].mean()
        parts[f"{name}_error"] = groups[name].sem()
    parts["seconds"] = groups["seconds"].median()  # others worked on the machine now and then
    table = pd.DataFrame(parts)
    table.insert(
        1, "setting", groups.setting.agg(lambda settings: settings.mode().iat[0] if settings.notna().any() else "")
    )
    for metric in paper.Values._fields:
        table[f"{metric}_paper"] = [_printed(name, method, metric) for name, method in table.index]
    return table


def _printed(name: str, method: str, metric: str) -> float:
    if method.startswith("exact") and name in paper.EXACT:
        return getattr(paper.EXACT[name][0], metric)
    values = paper.TABLE_2.get(method, {}).get(name)
    return np.nan if values is None else getattr(values, metric)


def table_1(table: pd.DataFrame) -> Iterator[str]:
    yield "## Table 1: exact against Important Directions"
    yield ""
    yield (
        "Ours (the paper's). In the authors' code the exact method takes J from the 80 % of the training part that are "
        'not validation rows: "exact on 80 %". Important Directions to the letter of Algorithm 3, and compressed to k, '
        "as in the authors' code; the paper's column is theirs. Seconds are fit and prediction, without training, on "
        "different machines; ours are medians."
    )
    yield ""
    yield "| data | | p_cov | r | w_sd | p* | seconds |"
    yield "|---|---|---|---|---|---|---|"
    for name in data.NAMES:
        if name not in table.index.get_level_values("data"):
            yield f"| {name} | {_not_run(name)} | | | | | |"
            continue
        for method in TABLE_1:
            if (name, method) not in table.index:
                continue
            cell = table.loc[(name, method)]
            seconds = (
                paper.EXACT.get(name, (None, None))[1]
                if method.startswith("exact")
                else paper.DIRECTIONS_SECONDS.get(name)
            )
            values = [f"{cell[m]:.3f}{_beside(cell[f'{m}_paper'])}" for m in ("p_cov", "r", "w_sd")]
            values += [f"{cell.effective_parameters:.0f}", f"{cell.seconds:.1f}{_beside(seconds, '.0f')}"]
            yield f"| {name} | {method} | " + " | ".join(values) + " |"
    yield ""


def table_2(table: pd.DataFrame) -> Iterator[str]:
    yield "## Table 2: all methods"
    yield ""
    yield "Mean over the splits ± standard error (the paper's value)."
    for metric in METRICS:
        yield ""
        yield f"### {TITLES[metric]}"
        yield ""
        yield "| data | splits | " + " | ".join(TABLE_2) + " |"
        yield "|---|---|" + "---|" * len(TABLE_2)
        for name in data.NAMES:
            if name not in table.index.get_level_values("data"):
                yield f"| {name} | {_not_run(name)} |" + " |" * len(TABLE_2)
                continue
            part = table.loc[name].reindex(TABLE_2)
            splits = "–".join(f"{count:.0f}" for count in sorted({part.splits.min(), part.splits.max()}))
            yield f"| {name} | {splits} | " + " | ".join(_cells(part, metric)) + " |"
    yield ""


def _cells(part: pd.DataFrame, metric: str) -> Iterator[str]:
    best = BEST[metric](part[metric]) if metric in BEST else np.nan
    for _, cell in part.iterrows():
        if np.isnan(cell[metric]):
            yield "–"
            continue
        text = f"{cell[metric]:.3f} ± {cell[f'{metric}_error']:.3f}"
        own = BEST[metric](pd.Series([cell[metric]])) if metric in BEST else 0.0
        yield (f"**{text}**" if np.isclose(own, best, rtol=0.0, atol=1e-9) else text) + _beside(
            cell.get(f"{metric}_paper")
        )


def _not_run(name: str) -> str:
    return "not run yet" if data.CATALOGUE[name].checksum else "not run: data not at hand"


def _beside(value: float | None, form: str = ".3g") -> str:
    return "" if value is None or np.isnan(value) else f" ({value:{form}})"


def agreement(table: pd.DataFrame) -> Iterator[str]:
    """Is Important Directions what the paper printed, data set by data set?"""
    yield "## Agreement of Important Directions with the paper"
    yield ""
    yield f"Met: p_cov within {P_COV_TOLERANCE}, w_sd within {WIDTH_TOLERANCE:.0%}."
    yield ""
    yield "| data | method | p_cov − paper's | w_sd / paper's | met |"
    yield "|---|---|---|---|---|"
    for method in ("directions", "compressed"):
        met = []
        for name in data.NAMES:
            if (name, method) not in table.index or np.isnan(table.loc[(name, method)].p_cov_paper):
                continue
            cell = table.loc[(name, method)]
            difference, ratio = cell.p_cov - cell.p_cov_paper, cell.w_sd / cell.w_sd_paper
            met.append(abs(difference) <= P_COV_TOLERANCE and abs(ratio - 1) <= WIDTH_TOLERANCE)
            yield f"| {name} | {method} | {difference:+.3f} | {ratio:.3f} | {'yes' if met[-1] else 'no'} |"
        yield f"| all | {method} | | | {sum(met)} of {len(met)} |"
    yield ""


def scores(table: pd.DataFrame, methods: pd.DataFrame) -> Iterator[str]:
    """The study of the score as a table, with p* from the rows of the exact method."""
    exact = {}
    if not methods.empty:
        exact = methods[(methods.method == "exact") & (methods.split == 0)].set_index("data").effective_parameters
    yield "# Which directions to keep: mean error of the width against exact, in per cent"
    yield ""
    yield "| data | p | n | p* | rank | " + " | ".join(SKETCHES) + " | shared by the last two |"
    yield "|---|---|---|---|---|" + "---|" * (len(SKETCHES) + 1)
    for name in (name for name in data.NAMES if name in set(table.data)):
        for rank, part in table[table.data == name].groupby("rank"):
            errors = part.set_index("method").width_error
            first = part.iloc[0]
            yield (
                f"| {name} | {first.parameters:,} | {first.n_training:,} | "
                f"{f'{exact[name]:.0f}' if name in exact else '–'} | {rank} | "
                + " | ".join(
                    f"**{100 * errors[m]:.2f}**" if errors[m] == errors.min() else f"{100 * errors[m]:.2f}"
                    for m in SKETCHES
                )
                + f" | {first.overlap:.0%} |"
            )
    yield ""


def write(folder: Path = RESULTS) -> bool:
    """Whatever there are results of; False where there are none."""
    methods, sketches = Rows(folder / "methods.csv", KEY).read(), Rows(folder / "score.csv", SKETCHES_KEY).read()
    if not methods.empty:
        table = summarise(methods)
        table.to_csv(folder / "tables.csv", float_format="%.4g")
        lines = ["# The paper's evaluation, reproduced", "", *table_1(table), *table_2(table), *agreement(table)]
        (folder / "tables.md").write_text("\n".join(lines))
    if not sketches.empty:
        (folder / "score.md").write_text("\n".join(scores(sketches, methods)))
    return not (methods.empty and sketches.empty)
