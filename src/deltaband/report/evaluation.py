"""The numbers of the report: coverage and widths on rows with known targets, and groups of rows by their values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from numbers import Real
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from ..calibration import EXCESS_SEEN_SHARE, AllOutputs
from ..data.batches import check_lengths, read_targets
from ..data.inputs import Inputs, check_finite
from ..data.row_record import share_by_chance
from ..display import INFINITY, decimals, fixed, number
from ..intervals import PredictionIntervals
from ..results import Intervals, interval_arrays, parse_levels
from ..validation import describe

CURVE_LEVELS = (*(round(0.05 * k, 2) for k in range(1, 20)), 0.98, 0.99)
CONFIDENCE = 0.95  # of every statement about chance
MIN_RELATIVE_DEVIATION = 0.1  # of the share of missed rows; a smaller deviation from 1 − level does not matter
ROWS_PER_CHUNK = 2**16  # limits the memory for the bounds of all levels
MISSING = "missing"
MAX_SINGLE_NUMBERS = 8  # a column with at most so many different numbers has a group for each
MAX_CATEGORIES = 10  # of more categories the rarest share the last group
N_QUANTILE_GROUPS = 5  # for a column of many different numbers


def chance_range(level: float, n: int, calibration_rows: int | None = None, n_groups: int = 1) -> tuple[float, float]:
    """Return where the covered share of n rows lies, up to chance, if the coverage equals the level.

    The share is binomial. With c calibration rows the range is over all draws of these: the coverage then is
    Beta(k, c + 1 − k), where k is the rank of the score that is the quantile, and the share is beta-binomial. With
    several groups each range is wider, so that the shares of all groups lie in theirs together.
    """
    from scipy.stats import betabinom, binom

    distribution = binom(n, level)
    if calibration_rows is not None:
        k = min(int(np.ceil((calibration_rows + 1) * level - 1e-9)), calibration_rows)
        distribution = betabinom(n, k, calibration_rows + 1 - k)
    alpha = (1 - CONFIDENCE) / 2 / n_groups
    return float(distribution.ppf(alpha)) / n, float(distribution.ppf(1 - alpha)) / n


@dataclass(frozen=True)
class Coverage:
    level: float
    covered: int  # of n rows
    n: int
    calibration_rows: int | None = None
    n_groups: int = 1  # how many groups of rows are examined

    @property
    def share(self) -> float:
        return self.covered / self.n

    @cached_property
    def confidence_interval(self) -> tuple[float, float]:
        """The interval of Clopper and Pearson for the coverage."""
        from scipy.stats import binomtest

        low, high = binomtest(self.covered, self.n, self.level).proportion_ci(CONFIDENCE, "exact")
        return float(low), float(high)

    @cached_property
    def chance_range(self) -> tuple[float, float]:
        return chance_range(self.level, self.n, n_groups=self.n_groups)

    @property
    def verdict(self) -> Literal["as asked", "too low", "too high"]:
        """Whether the share deviates from the level by more than chance explains, and by enough to matter."""
        low, high = self.chance_range
        if low <= self.share <= high or abs(self.share - self.level) <= MIN_RELATIVE_DEVIATION * (1 - self.level):
            return "as asked"
        return "too low" if self.share < low else "too high"

    @property
    def calibration_explains(self) -> bool:
        """Whether the verdict is a deviation, and other calibration rows, as many, could have led to it as well."""
        if self.verdict == "as asked" or self.calibration_rows is None:
            return False
        low, high = chance_range(self.level, self.n, self.calibration_rows)
        return low <= self.share <= high


@dataclass(frozen=True, eq=False)
class OutputEvaluation:
    name: str
    y: np.ndarray  # (n,)
    intervals: Intervals  # (n,) each
    coverage: Coverage
    curve: tuple[Coverage, ...]  # over levels
    has_own_level: bool = True  # False where the level is for all outputs together

    @cached_property
    def missed(self) -> np.ndarray:
        return (self.y < self.intervals.lower) | (self.y > self.intervals.upper)

    @cached_property
    def width(self) -> np.ndarray:
        return self.intervals.width

    def coverage_of(self, rows: np.ndarray, n_groups: int) -> Coverage:
        covered = len(rows) - int(self.missed[rows].sum())
        return Coverage(self.coverage.level, covered, len(rows), n_groups=n_groups)

    def is_undercovered(self, rows: np.ndarray, n_groups: int) -> bool:
        """Return whether a group is covered too rarely, also in comparison with all rows."""
        least = min(self.coverage.level, self.coverage.share)
        return replace(self.coverage_of(rows, n_groups), level=least).verdict == "too low"


class Evaluation(NamedTuple):
    """All outputs, and their joint coverage where the level is for all of them together."""

    outputs: list[OutputEvaluation]
    joint_coverage: Coverage | None
    joint_curve: tuple[Coverage, ...]
    unavailable_levels: list[float]  # levels of the curve that need more calibration rows
    share_seen_in_training: float  # 0 where repetitions among the training rows explain it


def evaluate(band: PredictionIntervals, x: Any, y: Any, level: float, names: Sequence[str] | None) -> Evaluation:
    """Compare the intervals of `x` with the targets `y`; `names` are those of the outputs."""
    if not isinstance(band, PredictionIntervals):
        raise TypeError(f"a report is about fitted PredictionIntervals, got {type(band).__name__}")
    chosen = band.outputs_
    if np.ndim(level) != 0:
        raise ValueError(f"a report is about one level, got {level!r}")
    (level,) = parse_levels(level)
    inputs, targets = Inputs.of(x), band.select_targets(y)
    check_finite(torch.from_numpy(targets), "targets")
    check_lengths(inputs, torch.from_numpy(targets))
    if len(inputs) == 0:
        raise ValueError("a report needs at least one row, got none")
    if names is None:
        names = [f"output {o}" for o in chosen] if len(chosen) > 1 else ["prediction"]
    if len(names) != len(chosen):
        raise ValueError(f"the band has {len(chosen)} outputs, but {len(names)} names were given")

    conformal = None if band.calibration_ is None else band.calibration_.conformal
    joint = isinstance(conformal, AllOutputs) and len(chosen) > 1
    n_calibration = None if conformal is None else conformal.n_rows
    highest = 1.0 if n_calibration is None else (n_calibration + 1e-9) / (n_calibration + 1)
    wanted = sorted({*CURVE_LEVELS, level})
    levels = [each for each in wanted if each == level or each <= highest]
    at = levels.index(level)

    seen, parts, covered = 0.0, [], np.zeros((len(chosen) + 1, len(levels)), dtype=np.int64)  # the last row: jointly
    all_targets = read_targets(y)
    for start in range(0, len(inputs), ROWS_PER_CHUNK):
        chunk = slice(start, start + ROWS_PER_CHUNK)
        found = band.predict(inputs[chunk], levels)
        mean, lower, upper = interval_arrays(found, np.float64)
        far = np.zeros(len(mean), dtype=bool) if found.far is None else np.asarray(found.far)
        inside = (lower <= targets[chunk, :, None]) & (targets[chunk, :, None] <= upper)  # (n, m, levels)
        covered += np.vstack([inside.sum(axis=0), inside.all(axis=1).sum(axis=0)])
        parts.append((mean, lower[:, :, at], upper[:, :, at], far))
        seen += len(mean) * band.share_seen_in_training(inputs[chunk], all_targets[chunk]) / len(inputs)
    mean, lower, upper, far = (np.concatenate(part) for part in zip(*parts, strict=True))
    *curves, joint_curve = (
        tuple(Coverage(each, int(k), len(inputs), n_calibration) for each, k in zip(levels, counts, strict=True))
        for counts in covered
    )
    outputs = []
    for o, (name, curve) in enumerate(zip(names, curves, strict=True)):
        intervals = Intervals(mean[:, o], lower[:, o], upper[:, o], level, far)
        outputs.append(OutputEvaluation(str(name), targets[:, o], intervals, curve[at], curve, not joint))
    by_chance = share_by_chance(band.fits_[0].seen.repeated, len(inputs)) + EXCESS_SEEN_SHARE
    unavailable = [each for each in wanted if each not in levels]
    joint_coverage = joint_curve[at] if joint else None
    return Evaluation(outputs, joint_coverage, joint_curve, unavailable, seen if seen > by_chance else 0.0)


@dataclass(frozen=True)
class Column:
    """A column: float64 with NaN where missing, dates in seconds; or text, objects with None where missing."""

    values: np.ndarray  # (n,)
    kind: Literal["number", "date", "text"] = "number"

    @cached_property
    def _decimals(self) -> int | None:
        finite = self.values[np.isfinite(self.values)]
        whole = len(finite) > 0 and bool((finite == np.round(finite)).all()) and np.abs(finite).max() < 1e12
        return 0 if whole else decimals(self.values)

    def format(self, value: Any) -> str:
        if value is None or value != value:
            return MISSING
        if self.kind == "text":
            return str(value)
        if self.kind == "number":
            return fixed(float(value), self._decimals)
        return str(np.datetime64(int(value), "s")).removesuffix("T00:00:00").replace("T", " ")


class Group(NamedTuple):
    name: str
    rows: np.ndarray  # (k,) indices


def named_items(given: Mapping[str, Any] | None, what: str) -> dict[str, Any]:
    """Return the values by name of an optional mapping, or of a data frame."""
    if given is not None and not hasattr(given, "items"):
        raise TypeError(f"{what} must be a mapping of names to values, got {describe(given)}")
    return {} if given is None else {str(name): value for name, value in given.items()}


def read_column(name: str, values: Any, n: int) -> Column:
    """Return a column of n rows; pandas, NumPy, tensors and lists are accepted."""
    if hasattr(values, "detach"):  # a tensor, possibly on a GPU
        values = values.detach().cpu()
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise TypeError(f"column {name!r} must be a sequence of {n} values, got {describe(values)}")
    array = np.asarray(values) if hasattr(values, "__array__") else _object_array(values)
    if array.ndim != 1 or len(array) != n:
        raise ValueError(f"column {name!r} must have a value for each of the {n} rows, got {array.shape}")
    if array.dtype.kind not in "fiuM":
        listed = [None if _is_missing(value) else value for value in array.tolist()]
        present = [value for value in listed if value is not None]
        if present and all(isinstance(value, Real) and not isinstance(value, bool | np.bool_) for value in present):
            array = np.array([np.nan if value is None else float(value) for value in listed])
        elif present and all(isinstance(value, date) and getattr(value, "tzinfo", None) is None for value in present):
            array = np.array(listed, dtype="datetime64[s]")
        else:
            return Column(_object_array([None if value is None else str(value) for value in listed]), "text")
    if array.dtype.kind == "M":
        seconds = array.astype("datetime64[s]")
        return Column(np.where(np.isnat(seconds), np.nan, seconds.astype(np.int64).astype(np.float64)), "date")
    return Column(array.astype(np.float64))


def _object_array(values: Any) -> np.ndarray:
    """Return one entry per value, even where values have a length themselves."""
    array = np.empty(len(values), dtype=object)
    array[:] = [*values]
    return array


def _is_missing(value: Any) -> bool:
    is_nan = isinstance(value, Real) and value != value
    return value is None or is_nan or type(value).__name__ in ("NAType", "NaTType")  # pandas' equivalents


def group_by_value(column: Column) -> list[Group]:
    """Group numbers by quantiles, from small to large; text, and few different numbers, by value."""
    if column.kind == "text":
        return _group_categories(column)
    values = column.values
    finite = np.flatnonzero(np.isfinite(values))
    found = values[finite]
    different = np.unique(found)
    if len(different) <= MAX_SINGLE_NUMBERS:
        groups = [Group(column.format(value), finite[found == value]) for value in different]
    else:
        last = np.ceil(np.arange(1, N_QUANTILE_GROUPS) * len(found) / N_QUANTILE_GROUPS).astype(int) - 1  # if no ties
        part = np.searchsorted(np.unique(np.sort(found)[last]), found, side="left")
        groups = [
            Group(f"{column.format(of_part.min())} to {column.format(of_part.max())}", finite[part == k])
            for k in range(N_QUANTILE_GROUPS)
            if len(of_part := found[part == k])
        ]
    others = [Group(INFINITY, np.flatnonzero(np.isinf(values))), Group(MISSING, np.flatnonzero(np.isnan(values)))]
    return groups + [group for group in others if len(group.rows)]


def group_by_width(width: np.ndarray) -> list[Group]:
    """Group rows by quantiles of their width; one group where all widths are equal up to rounding."""
    if not np.isfinite(width).all():
        return group_by_value(Column(width))
    if np.ptp(width) <= 1e-5 * np.abs(width).max():
        return [Group(f"all {number(float(width.mean()))}", np.arange(len(width)))]
    parts = [rows for rows in np.array_split(np.argsort(width, kind="stable"), N_QUANTILE_GROUPS) if len(rows)]
    edges = [(float(width[rows[0]]), float(width[rows[-1]])) for rows in parts]
    digits = next((k for k in (3, 4, 5) if len({number(low, k) for low, _ in edges}) == len(edges)), 6)
    names = [f"{number(low, digits)} to {number(high, digits)}" for low, high in edges]
    return list(map(Group, names, parts))


def group_by_distance(far: np.ndarray) -> list[Group]:
    """Group rows by whether they are far from the training rows."""
    return [Group("no", np.flatnonzero(~far)), Group("yes", np.flatnonzero(far))] if far.any() else []


def _group_categories(column: Column) -> list[Group]:
    names = [MISSING if value is None else value for value in column.values]
    different, which, count = np.unique(np.array(names, dtype=str), return_inverse=True, return_counts=True)
    order = np.argsort(-count, kind="stable")
    shown = order if len(order) <= MAX_CATEGORIES else order[: MAX_CATEGORIES - 1]
    groups = [Group(str(different[k]), np.flatnonzero(which == k)) for k in shown]
    if len(shown) < len(order):
        groups.append(Group(f"{len(order) - len(shown):,} others", np.flatnonzero(~np.isin(which, shown))))
    return groups
