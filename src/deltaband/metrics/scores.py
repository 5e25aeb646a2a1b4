"""`Scores`: all measures of intervals on some rows, as a table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..display import element, fixed, html_table, number, percent, text_table
from ..results import Intervals, data_frame, level_name
from .conditional import SLAB_ROWS_AT_LEAST, GroupCoverage, coverage_by_group, worst_slab_coverage
from .forecasts import crps, pinball_loss
from .intervals import coverage, interval_score, levels_of, read, width_error_correlation

SCORE_NAMES = (
    "coverage",
    "worst_slab_coverage",
    "mean_width",
    "interval_score",
    "pinball_loss",
    "width_error_correlation",
)
ALL_AT_ONCE = "all at once"  # stands for the outputs together


@dataclass(frozen=True, eq=False, repr=False)
class Scores:
    """How good intervals are on some rows, by level; printed, a table.

    Attributes:
        levels: The levels of the intervals.
        coverage: The share of targets within their intervals, (levels,), or (m, levels) for m outputs.
        mean_width: The mean of upper − lower, in the units of the targets, of the same shape.
        interval_score: Winkler's score, lower is better, of the same shape.
        width_error_correlation: How far wide intervals are where errors are large, of the same shape.
        rmse: The root mean squared error of the predictions, a float, or (m,).
        crps: The continuous ranked probability score over these levels, see `crps`, a float, or (m,).
        pinball_loss: The mean loss of the bounds as quantiles, of the shape of `coverage`.
        worst_slab_coverage: See `worst_slab_coverage`, of the same shape; NaN without features or with few rows.
        n_rows: The number of rows.
        outputs: Names of the outputs.
        by_group: What `coverage_by_group` found, where groups were given; else None.
        joint_coverage: Where a level is for all outputs of a row at once: the share of such rows, (levels,); else None.
    """

    levels: tuple[float, ...]
    coverage: np.ndarray
    mean_width: np.ndarray
    interval_score: np.ndarray
    width_error_correlation: np.ndarray
    rmse: float | np.ndarray
    crps: float | np.ndarray
    pinball_loss: np.ndarray
    worst_slab_coverage: np.ndarray
    n_rows: int
    outputs: tuple[str, ...] = ("prediction",)
    joint_coverage: np.ndarray | None = None
    by_group: dict[Any, GroupCoverage] | None = None

    def rows(self) -> list[dict[str, Any]]:
        """Return the scores of each output and level by name; the last are of all outputs at once, if there are."""
        of_outputs = [np.repeat(each, len(self.levels)) for each in (self.rmse, self.crps)]
        columns = [np.reshape(getattr(self, name), -1) for name in SCORE_NAMES]
        keys = [{"output": name, "level": level} for name in self.outputs for level in self.levels]
        names = (*SCORE_NAMES, "rmse", "crps")
        values = np.column_stack([*columns, *of_outputs]).tolist()
        found = [key | dict(zip(names, each, strict=True)) for key, each in zip(keys, values, strict=True)]
        joint = [] if self.joint_coverage is None else zip(self.levels, self.joint_coverage, strict=True)
        unknown = dict.fromkeys(names, math.nan)
        return found + [
            {"output": ALL_AT_ONCE, "level": p} | unknown | {"coverage": float(share)} for p, share in joint
        ]

    def group_rows(self) -> list[dict[str, Any]]:
        """Return the coverage of each output, group and level, with its exact bounds; none without groups."""
        found = []
        for label, group in (self.by_group or {}).items():
            parts = [np.reshape(each, (len(self.outputs), -1)) for each in group[1:]]
            for o, name in enumerate(self.outputs):
                for j, level in enumerate(self.levels):
                    shares = dict(
                        zip(("coverage", "lower", "upper"), (float(each[o, j]) for each in parts), strict=True)
                    )
                    found.append({"output": name, "group": label, "rows": group.n_rows, "level": level} | shares)
        return found

    def to_pandas(self) -> Any:
        """Return the rows as a data frame."""
        return data_frame({None: {name: [row[name] for row in self.rows()] for name in self.rows()[0]}})

    def __repr__(self) -> str:
        text = text_table(self._title(), self._cells())
        return text if self.by_group is None else f"{text}\n{text_table('Coverage by group', self._group_cells())}"

    def _repr_html_(self) -> str:
        tables = [(self._title(), self._cells())]
        tables += [] if self.by_group is None else [("Coverage by group", self._group_cells())]
        parts = [(element("p", element("b", title)), html_table(cells)) for title, cells in tables]
        return element("div", *(part for pair in parts for part in pair))

    def _title(self) -> str:
        return f"Scores on {self.n_rows:,} row{'s'[: self.n_rows != 1]}"

    def _cells(self) -> list[list[str]]:
        cells = [["output", "level", "coverage", "worst slab", "mean width", "interval score", "width–error r"]]
        cells[0] += ["RMSE", "CRPS"]
        for row in self.rows():
            shown = [f"{level_name(row['level'])} %", percent(row["coverage"])]
            shown.append("–" if math.isnan(row["worst_slab_coverage"]) else percent(row["worst_slab_coverage"]))
            r = fixed(row["width_error_correlation"], 2)
            shown += [number(row["mean_width"]), number(row["interval_score"]), r]
            cells.append([str(row["output"]), *shown, number(row["rmse"]), number(row["crps"])])
        return cells if len(self.outputs) > 1 else [line[1:] for line in cells]

    def _group_cells(self) -> list[list[str]]:
        """Return a line per output, group and level."""
        cells = [["output", "group", "rows", "level", "coverage", "true share"]]
        for row in self.group_rows():
            name, group, rows, level, *shares = row.values()
            share, low, high = map(percent, shares)
            cells.append([name, str(group), f"{rows:,}", f"{level_name(level)} %", share, f"{low} to {high}"])
        return cells if len(self.outputs) > 1 else [line[1:] for line in cells]


def evaluate(
    y: Any,
    intervals: Intervals,
    outputs: Sequence[str] | None = None,
    *,
    joint: bool = False,
    x: Any = None,
    groups: Any = None,
) -> Scores:
    """Compute how good intervals are, by output and level.

    Args:
        y, intervals: As in `coverage`; the intervals must have a level.
        outputs: Names of the outputs.
        joint: Whether a level is for all outputs of a row at once; their joint coverage is then among the scores.
        x: Features (n, d) of the rows, for the coverage of the worst slab.
        groups: Groups of the rows, for the coverage of each: see `coverage_by_group`.

    Returns:
        The scores; printed, a table.

    Raises:
        ValueError: If shapes, names or levels do not fit together.
    """
    targets, mean, lower, upper = read(y, intervals)
    n, m, n_levels = lower.shape
    several = m > 1 or np.ndim(intervals.mean) > 1
    names = tuple(map(str, outputs)) if outputs is not None else tuple(f"output {o}" for o in range(m))
    if len(names) != m:
        raise ValueError(f"the intervals are of {m} outputs, but {len(names)} names were given")
    of_all = ((lower <= targets) & (targets <= upper)).all(axis=1).mean(axis=0) if joint and m > 1 else None
    found = {
        "coverage": coverage(y, intervals),
        "mean_width": (upper - lower).mean(axis=0),
        "interval_score": interval_score(y, intervals),
        "pinball_loss": pinball_loss(y, intervals),
        "width_error_correlation": width_error_correlation(y, intervals),
    }
    shape = (m, n_levels) if several else (n_levels,)
    with_slab = x is not None and n >= SLAB_ROWS_AT_LEAST and np.shape(x)[1] > 0
    found["worst_slab_coverage"] = worst_slab_coverage(y, intervals, x) if with_slab else np.full(shape, np.nan)
    two_sided = np.isinf(lower).all() == np.isinf(upper).all()
    rmse = np.sqrt(np.square(targets - mean).mean(axis=(0, 2)))  # (m,)
    return Scores(
        tuple(levels_of(intervals, lower).tolist()),
        **{name: np.reshape(score, shape) for name, score in found.items()},
        rmse=rmse if several else float(rmse[0]),
        crps=crps(y, intervals) if two_sided else np.full(m, np.nan) if several else math.nan,
        by_group=None if groups is None else coverage_by_group(y, intervals, groups),
        n_rows=n,
        outputs=names if several or outputs is not None else ("prediction",),
        joint_coverage=of_all,
    )
