"""`Scores`: all measures of intervals on some rows, as a table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..data.extras import check_some
from ..data.groups import rows_of
from ..display import element, fixed, html_table, number, percent, text_table
from ..results import Intervals, data_frame, level_name, to_numpy
from ..validation import check_choice
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
    missing: Literal["ignore"] | None = None,
) -> Scores:
    """Compute how good intervals are, by output and level.

    Args:
        y, intervals: As in `coverage`; the intervals must have a level.
        outputs: Names of the outputs.
        joint: Whether a level is for all outputs of a row at once; their joint coverage is then among the scores.
        x: Features (n, d) of the rows, for the coverage of the worst slab.
        groups: Groups of the rows, for the coverage of each: see `coverage_by_group`.
        missing: "ignore": targets that are NaN are none. Each output is measured on those that it has, and rows without
            any are left out.

    Returns:
        The scores; printed, a table.

    Raises:
        ValueError: If shapes, names or levels do not fit together, or an output has no target.
    """
    if missing is not None:
        check_choice(missing, "missing", ("ignore",))
    targets, mean, lower, upper = read(y, intervals, missing is not None)
    n, m, n_levels = lower.shape
    names = tuple(map(str, outputs)) if outputs is not None else tuple(f"output {o}" for o in range(m))
    if len(names) != m:
        raise ValueError(f"the intervals are of {m} outputs, but {len(names)} names were given")
    if np.isnan(targets).any():
        return _on_those_there(y, intervals, outputs, joint, x, groups)
    several = m > 1 or np.ndim(intervals.mean) > 1
    of_all = _all_inside(targets, lower, upper) if joint and m > 1 else None
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


def _all_inside(y: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:  # (levels,)
    """Return the share of the rows that have targets whose targets are all inside."""
    missing = np.isnan(y)
    inside = (missing | ((lower <= y) & (y <= upper))).all(axis=1)
    return inside[~missing.all(axis=(1, 2))].mean(axis=0)


def _on_those_there(
    y: Any, intervals: Intervals, outputs: Sequence[str] | None, joint: bool, x: Any, groups: Any
) -> Scores:
    """Return the scores where some targets are NaN; outputs that have them in the same rows are measured together."""
    targets, *bounds = read(y, intervals, True)
    there, dtype = ~np.isnan(targets[:, :, 0]), to_numpy(intervals.lower, None).dtype
    check_some(there)
    m, levels = there.shape[1], tuple(levels_of(intervals, bounds[1]).tolist())
    patterns, which = np.unique(there, axis=1, return_inverse=True)
    scores: dict[str, np.ndarray] = {name: np.empty((m, len(levels))) for name in SCORE_NAMES}
    scores |= {name: np.empty((m, 1)) for name in ("rmse", "crps")}
    by_group: dict[Any, list[Any]] = {}
    for k, pattern in enumerate(patterns.T):
        of, rows = which.reshape(-1) == k, np.flatnonzero(pattern)
        mean, lower, upper = (part[rows][:, of].astype(dtype) for part in bounds)
        about: dict[str, Any] = {
            "x": None if x is None else rows_of(x, rows),
            "groups": None if groups is None else rows_of(groups, rows),
        }
        part = evaluate(targets[rows][:, of, 0], Intervals(mean[:, :, 0], lower, upper, levels), **about)
        for name, values in scores.items():
            values[of] = np.reshape(getattr(part, name), (-1, values.shape[1]))
        for label, (size, *shares) in (part.by_group or {}).items():
            whole = by_group.setdefault(label, [0, *np.full((3, m, len(levels)), np.nan)])
            whole[0] = max(whole[0], size)
            for values, share in zip(whole[1:], shares, strict=True):
                values[of] = share
    several = m > 1 or np.ndim(intervals.mean) > 1
    shape, names = (m, -1) if several else (-1,), [f"output {o}" for o in range(m)] if several else ["prediction"]
    found: dict[str, Any] = {name: values.reshape(shape) for name, values in scores.items()}
    found |= {name: found[name].reshape(-1) if several else float(found[name][0]) for name in ("rmse", "crps")}
    return Scores(
        levels,
        **found,
        by_group={label: GroupCoverage(*of_label) for label, of_label in by_group.items()} if by_group else None,
        n_rows=int(there.any(axis=1).sum()),
        outputs=tuple(names if outputs is None else map(str, outputs)),
        joint_coverage=_all_inside(targets, *bounds[1:]) if joint and m > 1 else None,
    )
