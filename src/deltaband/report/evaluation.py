"""The coverage and widths of intervals on rows with known targets: the numbers of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from .. import metrics
from ..calibration.calibrate import EXCESS_SEEN_SHARE
from ..calibration.conformal import AllOutputs
from ..data.batches import check_lengths, read_targets
from ..data.inputs import Inputs
from ..data.row_record import share_by_chance
from ..intervals import PredictionIntervals
from ..results import Intervals, parse_levels
from ..validation import check_finite

CURVE_LEVELS = (*(round(0.05 * k, 2) for k in range(1, 20)), 0.98, 0.99)
CONFIDENCE = 0.95  # of every statement about chance
MIN_RELATIVE_DEVIATION = 0.1  # of the share of missed rows; a smaller deviation from 1 − level does not matter
ROWS_PER_CHUNK = 2**16  # limits the memory for the bounds of all levels

Verdict = Literal["as asked", "too low", "too high"]


class Range(NamedTuple):
    low: float
    high: float


def chance_range(level: float, n: int, calibration_rows: int | None = None, n_groups: int = 1) -> Range:
    """Return where the covered share of n rows lies, up to chance, if the coverage equals the level.

    The share is binomial. With c calibration rows the range is over all draws of these: the coverage then is
    Beta(k, c + 1 − k), where k is the rank of the score that is the quantile, and the share is beta-binomial. With
    several groups each range is wider, so that the shares of all groups lie in theirs together.
    """
    from scipy.stats import betabinom, binom

    if calibration_rows is None:
        distribution = binom(n, level)
    else:
        k = min(int(np.ceil((calibration_rows + 1) * level - 1e-9)), calibration_rows)
        distribution = betabinom(n, k, calibration_rows + 1 - k)
    alpha = (1 - CONFIDENCE) / 2 / n_groups
    return Range(float(distribution.ppf(alpha)) / n, float(distribution.ppf(1 - alpha)) / n)


@dataclass(frozen=True)
class Coverage:
    """How many of n rows are covered at a level."""

    level: float
    covered: int
    n: int
    calibration_rows: int | None = None
    n_groups: int = 1  # how many groups of rows are examined

    @property
    def share(self) -> float:
        return self.covered / self.n

    @property
    def confidence_interval(self) -> Range:
        """The interval of Clopper and Pearson for the coverage."""
        from scipy.special import betaincinv

        alpha, missed = (1 - CONFIDENCE) / 2, self.n - self.covered
        low = betaincinv(self.covered, missed + 1, alpha) if self.covered else 0.0
        high = betaincinv(self.covered + 1, missed, 1 - alpha) if missed else 1.0
        return Range(float(low), float(high))

    @cached_property
    def chance_range(self) -> Range:
        return chance_range(self.level, self.n, n_groups=self.n_groups)

    @property
    def calibration_explains(self) -> bool:
        """Whether the verdict is a deviation, and other calibration rows, as many, could have led to it as well."""
        if self.verdict == "as asked" or self.calibration_rows is None:
            return False
        low, high = chance_range(self.level, self.n, self.calibration_rows)
        return low <= self.share <= high

    @property
    def verdict(self) -> Verdict:
        """Whether the share deviates from the level by more than chance explains, and by enough to matter."""
        relevant = abs(self.share - self.level) > MIN_RELATIVE_DEVIATION * (1 - self.level)
        if relevant and self.share < self.chance_range.low:
            return "too low"
        return "too high" if relevant and self.share > self.chance_range.high else "as asked"


@dataclass(frozen=True, eq=False)
class OutputEvaluation:
    """The targets and intervals of one output."""

    name: str
    y: np.ndarray  # (n,)
    intervals: Intervals  # (n,) each
    coverage: Coverage
    curve: tuple[Coverage, ...]  # over levels
    has_own_level: bool = True  # False where the level is for all outputs together

    @cached_property
    def missed(self) -> np.ndarray:
        return (self.y < self.intervals.lower) | (self.y > self.intervals.upper)

    def coverage_of(self, rows: np.ndarray, n_groups: int) -> Coverage:
        """Return the coverage of one of several groups of rows."""
        covered = len(rows) - int(self.missed[rows].sum())
        return Coverage(self.coverage.level, covered, len(rows), n_groups=n_groups)

    def is_undercovered(self, rows: np.ndarray, n_groups: int) -> bool:
        """Return whether a group is covered too rarely, also in comparison with all rows."""
        least = min(self.coverage.level, self.coverage.share)
        return replace(self.coverage_of(rows, n_groups), level=least).verdict == "too low"

    @cached_property
    def width(self) -> np.ndarray:
        return self.intervals.width

    @property
    def relative_width(self) -> float | None:
        """The mean width in standard deviations of the targets; None where all targets are equal."""
        return None if np.ptp(self.y) == 0 else float(metrics.mean_width(self.y, self.intervals))

    @property
    def score(self) -> float:
        return float(metrics.interval_score(self.y, self.intervals))

    @property
    def correlation(self) -> float:
        return float(metrics.width_error_correlation(self.y, self.intervals))


@dataclass(frozen=True)
class Evaluation:
    """All outputs, and their joint coverage where the level is for all of them together."""

    outputs: tuple[OutputEvaluation, ...]
    joint_coverage: Coverage | None
    joint_curve: tuple[Coverage, ...]
    unavailable_levels: tuple[float, ...]  # levels of the curve that need more calibration rows
    share_seen_in_training: float

    @property
    def n_rows(self) -> int:
        return len(self.outputs[0].y)


def evaluate(band: PredictionIntervals, x: Any, y: Any, level: float, names: Sequence[str] | None) -> Evaluation:
    """Compare the intervals of `x` with the targets `y`; `names` are those of the outputs."""
    if not isinstance(band, PredictionIntervals):
        raise TypeError(f"a report is about fitted PredictionIntervals, got {type(band).__name__}")
    chosen = band.outputs_
    if np.ndim(level) != 0:
        raise ValueError(f"a report is about one level, got {level!r}")
    (level,) = parse_levels(level)
    inputs, targets = Inputs.of(x), torch.from_numpy(band.select_targets(y))
    check_finite(targets, "targets")
    check_lengths(inputs, targets)
    if len(inputs) == 0:
        raise ValueError("a report needs at least one row, got none")
    if names is None:
        names = [f"output {o}" for o in chosen] if len(chosen) > 1 else ["prediction"]
    names = [str(name) for name in names]
    if len(names) != len(chosen):
        raise ValueError(f"the band has {len(chosen)} outputs, but {len(names)} names were given")

    calibration = band.calibration_
    joint = calibration is not None and isinstance(calibration.conformal, AllOutputs) and len(chosen) > 1
    n_calibration = None if calibration is None else calibration.conformal.n_rows
    wanted = sorted({*CURVE_LEVELS, level})
    levels = [
        each for each in wanted
        if n_calibration is None or each == level or (n_calibration + 1) * each <= n_calibration + 1e-9
    ]  # fmt: skip
    at = levels.index(level)
    mean, lower, upper, covered, jointly_covered = _predict(band, inputs, targets.numpy(), levels, at)

    def curve(counts: np.ndarray) -> tuple[Coverage, ...]:
        return tuple(Coverage(each, int(k), len(inputs), n_calibration) for each, k in zip(levels, counts, strict=True))

    outputs = []
    for o, name in enumerate(names):
        over_levels = curve(covered[o])
        intervals = Intervals(mean[:, o], lower[:, o], upper[:, o], level)
        y_o = targets[:, o].numpy()
        outputs.append(OutputEvaluation(name, y_o, intervals, over_levels[at], over_levels, not joint))
    joint_curve = curve(jointly_covered) if joint else ()
    return Evaluation(
        tuple(outputs),
        joint_curve[at] if joint else None,
        joint_curve,
        tuple(each for each in wanted if each not in levels),
        _share_seen_in_training(band, inputs, read_targets(y)),
    )


def _share_seen_in_training(band: PredictionIntervals, x: Inputs, y: torch.Tensor) -> float:
    """Return the share of rows that were training rows; 0 where repetitions among the training rows explain it."""
    chunks = [slice(start, start + ROWS_PER_CHUNK) for start in range(0, len(x), ROWS_PER_CHUNK)]
    share = sum(len(x[chunk]) * band.share_seen_in_training(x[chunk], y[chunk]) for chunk in chunks) / len(x)
    return share if share > share_by_chance(band.fits_[0].seen.repeated, len(x)) + EXCESS_SEEN_SHARE else 0.0


def _predict(
    band: PredictionIntervals, x: Inputs, y: np.ndarray, levels: list[float], at: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return mean and bounds (n, m) at one level, and covered rows per output (m, levels) and jointly (levels,)."""
    parts, covered, jointly_covered = [], np.zeros((y.shape[1], len(levels))), np.zeros(len(levels))
    for start in range(0, len(x), ROWS_PER_CHUNK):
        chunk = slice(start, start + ROWS_PER_CHUNK)
        mean, lower, upper = (np.asarray(part, np.float64) for part in band.predict(x[chunk], levels))
        n, m = y[chunk].shape
        mean, lower, upper = mean.reshape(n, m), lower.reshape(n, m, -1), upper.reshape(n, m, -1)
        inside = (lower <= y[chunk, :, None]) & (y[chunk, :, None] <= upper)  # (n, m, levels)
        covered += inside.sum(axis=0)
        jointly_covered += inside.all(axis=1).sum(axis=0)
        parts.append((mean, lower[:, :, at], upper[:, :, at]))
    mean, lower, upper = (np.concatenate(part) for part in zip(*parts, strict=True))
    return mean, lower, upper, covered, jointly_covered
