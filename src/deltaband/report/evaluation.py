"""The numbers of the report: coverage and widths on rows with known targets."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from .. import metrics
from ..calibration import EXCESS_SEEN_SHARE, AllOutputs
from ..data.batches import check_lengths, read_targets
from ..data.extras import check_some
from ..data.groups import rows_of
from ..data.inputs import Inputs, check_finite
from ..data.row_record import share_by_chance
from ..errors import warn
from ..intervals import PredictionIntervals
from ..metrics.forecasts import crps_of_rows
from ..results import Intervals, interval_arrays, parse_levels

CURVE_LEVELS = (*(round(0.05 * k, 2) for k in range(1, 20)), 0.98, 0.99)
CONFIDENCE = 0.95  # of every statement about chance
MIN_RELATIVE_DEVIATION = 0.1  # of the share of missed rows; a smaller deviation from 1 − level does not matter
ROWS_PER_CHUNK = 2**16  # limits the memory for the bounds of all levels


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


class Covered:
    """How often rows are covered, in all and in groups."""

    coverage: Coverage
    missed: Any  # (n,) bool

    def coverage_of(self, rows: np.ndarray, n_groups: int) -> Coverage:
        covered = len(rows) - int(self.missed[rows].sum())
        return Coverage(self.coverage.level, covered, len(rows), n_groups=n_groups)

    def is_undercovered(self, rows: np.ndarray, n_groups: int) -> bool:
        """Return whether a group is covered too rarely, also in comparison with all rows."""
        least = min(self.coverage.level, self.coverage.share)
        return replace(self.coverage_of(rows, n_groups), level=least).verdict == "too low"


@dataclass(frozen=True, eq=False)
class OutputEvaluation(Covered):
    name: str
    y: np.ndarray  # (n,)
    intervals: Intervals  # (n,) each
    coverage: Coverage
    curve: tuple[Coverage, ...]  # over levels
    has_own_level: bool = True  # False where the level is for all outputs together
    crps: float = math.nan  # over the levels of the curve
    worst_slab: float = math.nan  # coverage between the two parallel planes where it is lowest
    numbers: np.ndarray | None = None  # (n,) those of the rows, where others have no target

    @cached_property
    def rows(self) -> np.ndarray:
        return np.arange(len(self.y)) if self.numbers is None else self.numbers

    @cached_property
    def missed(self) -> np.ndarray:
        return (self.y < self.intervals.lower) | (self.y > self.intervals.upper)

    @cached_property
    def width(self) -> np.ndarray:
        return self.intervals.width


class Evaluation(NamedTuple):
    """All outputs, and their joint coverage where the level is for all of them together."""

    outputs: list[OutputEvaluation]
    joint_coverage: Coverage | None
    joint_curve: tuple[Coverage, ...]
    unavailable_levels: list[float]  # levels of the curve that need more calibration rows
    share_seen_in_training: float  # 0 where repetitions among the training rows explain it
    n_rows: int
    suspicions: list[str]  # why these rows do not look like those that the network was trained on


def check_band(band: Any) -> None:
    if not isinstance(band, PredictionIntervals):
        raise TypeError(
            f"a report is about fitted PredictionIntervals or ClassificationIntervals, got {type(band).__name__}"
        )


def evaluate(
    band: PredictionIntervals,
    x: Any,
    y: Any,
    level: float,
    names: Sequence[str] | None,
    given: Mapping[str, Any] | None = None,
    may_miss: bool = False,
) -> Evaluation:
    """Compare the intervals of `x` with the targets `y`; `names` are those of the outputs, `given` is for `predict`.

    With `may_miss`, as with a band's `missing="ignore"`, a target that is NaN is none.
    """
    check_band(band)
    chosen = band.outputs_
    if np.ndim(level) != 0:
        raise ValueError(f"a report is about one level, got {level!r}")
    (level,) = parse_levels(level)
    inputs, targets = band.spec.known_inputs(band.fits_, x), band.select_targets(y)
    there = ~(np.isnan(targets) & (may_miss or band.spec.task.may_miss))
    check_finite(torch.from_numpy(np.where(there, targets, 0.0)), "targets")
    check_lengths(inputs, torch.from_numpy(targets))
    if len(inputs) == 0:
        raise ValueError("a report needs at least one row, got none")
    check_some(there)
    if names is None:
        names = [f"output {o}" for o in chosen] if len(chosen) > 1 else ["prediction"]
    if len(names) != len(chosen):
        raise ValueError(f"the band has {len(chosen)} outputs, but {len(names)} names were given")

    conformal = None if band.calibration_ is None else band.calibration_.conformal
    joint = isinstance(conformal, AllOutputs) and len(chosen) > 1
    n_calibration = None if conformal is None else conformal.n_rows
    n_rows = None if band.calibration_ is None else band.calibration_.rows_per_quantile
    highest = 1.0 if n_rows is None else (n_rows + 1e-9) / (n_rows + 1)
    wanted = sorted({*CURVE_LEVELS, level})
    levels = [each for each in wanted if each == level or each <= highest]
    at = levels.index(level)

    seen, parts, covered = 0.0, [], np.zeros((len(chosen) + 1, len(levels)), dtype=np.int64)  # the last row: jointly
    all_targets, crps = read_targets(y), np.zeros(len(chosen))
    for start in range(0, len(inputs), ROWS_PER_CHUNK):
        chunk = slice(start, start + ROWS_PER_CHUNK)
        here: dict[str, Any] = {
            name: each if isinstance(each, str) else rows_of(each, chunk) for name, each in (given or {}).items()
        }
        found = band.predict(inputs[chunk], levels, **here)
        mean, lower, upper = interval_arrays(found, np.float64)
        far = np.zeros(len(mean), dtype=bool) if found.far is None else np.asarray(found.far)
        inside = (lower <= targets[chunk, :, None]) & (targets[chunk, :, None] <= upper)  # (n, m, levels)
        some = there[chunk].any(axis=1)
        jointly = (inside | ~there[chunk, :, None]).all(axis=1)[some]
        covered += np.vstack([inside.sum(axis=0), jointly.sum(axis=0)])
        scores = crps_of_rows(found, targets[chunk, :, None], mean[:, :, None], lower, upper)
        crps += scores.sum(axis=0, where=there[chunk]) / there.sum(axis=0)
        parts.append((mean, lower[:, :, at], upper[:, :, at], far))
        seen += len(mean) * band.share_seen_in_training(inputs[chunk], all_targets[chunk]) / len(inputs)
    mean, lower, upper, far = (np.concatenate(part) for part in zip(*parts, strict=True))
    *curves, joint_curve = (
        tuple(Coverage(each, int(k), n, n_calibration) for each, k in zip(levels, counts, strict=True))
        for counts, n in zip(covered, (*there.sum(axis=0).tolist(), int(there.any(axis=1).sum())), strict=True)
    )
    outputs = []
    for o, (name, curve) in enumerate(zip(names, curves, strict=True)):
        rows = np.flatnonzero(there[:, o])
        y_of, intervals = targets[rows, o], Intervals(mean[:, o], lower[:, o], upper[:, o], level, far)[rows]
        slab = _worst_slab(band, inputs[rows], y_of, intervals)
        about = (not joint, float(crps[o]), slab)
        outputs.append(OutputEvaluation(str(name), y_of, intervals, curve[at], curve, *about, rows))
    by_chance = share_by_chance(band.fits_[0].seen.repeated, len(inputs)) + EXCESS_SEEN_SHARE
    unavailable = [each for each in wanted if each not in levels]
    joint_coverage = joint_curve[at] if joint else None
    suspicions = band.suspicions(targets, Intervals(mean, lower, upper, level))
    warn(*suspicions)
    seen = seen if seen > by_chance else 0.0
    return Evaluation(outputs, joint_coverage, joint_curve, unavailable, seen, len(inputs), suspicions)


def _worst_slab(band: PredictionIntervals, inputs: Inputs, y: np.ndarray, intervals: Intervals) -> float:
    """Return the coverage in the worst slab of the rows; NaN where there are too few of them."""
    if len(inputs) < metrics.SLAB_ROWS_AT_LEAST:
        return math.nan
    features = band.spec.network().features(inputs)
    return float(metrics.worst_slab_coverage(y, intervals, features)) if features.shape[1] else math.nan
