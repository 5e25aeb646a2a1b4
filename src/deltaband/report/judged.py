"""A band judged on rows with known targets: what the page tells, before it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from .. import metrics
from ..calibration.conformal import SEEN, AllOutputs
from ..data.batches import check_pair
from ..data.batches import targets as read_targets
from ..data.inputs import Inputs
from ..data.row_record import share_by_chance
from ..intervals import PredictionIntervals
from ..results import Intervals, parse_levels
from ..validation import check_finite
from .chance import Range, expected, likely

CURVE = (*(round(0.05 * k, 2) for k in range(1, 20)), 0.98, 0.99)  # levels of the calibration curve
NOTICEABLE = 0.1  # a coverage is off if it misses this part more, or less, than it should
ROWS_AT_ONCE = 2**16  # bounds at all levels of all rows would be a lot

Verdict = Literal["as asked", "too low", "too high"]


@dataclass(frozen=True)
class Coverage:
    """How many of n rows are covered at a level."""

    level: float
    covered: int
    n: int
    calibration_rows: int | None = None
    among: int = 1  # as many groups of rows are looked at, and chance has as many chances

    @property
    def share(self) -> float:
        return self.covered / self.n

    @property
    def likely(self) -> Range:
        return likely(self.covered, self.n)

    @cached_property
    def expected(self) -> Range:
        return expected(self.level, self.n, among=self.among)

    @property
    def calibration_explains(self) -> bool:
        """Whether another draw of as few calibration rows might have come out as far off."""
        if self.calibration_rows is None:
            return False
        low, high = expected(self.level, self.n, self.calibration_rows)
        return low <= self.share <= high

    @property
    def verdict(self) -> Verdict:
        """Of this very band: off only where chance does not explain it and it is enough to matter."""
        noticeable = abs(self.share - self.level) > NOTICEABLE * (1 - self.level)
        if noticeable and self.share < self.expected.low:
            return "too low"
        return "too high" if noticeable and self.share > self.expected.high else "as asked"


@dataclass(frozen=True, eq=False)
class Judged:
    """The targets and intervals of one output."""

    name: str
    y: np.ndarray  # (n,)
    intervals: Intervals  # (n,) each
    coverage: Coverage
    curve: tuple[Coverage, ...]  # over levels
    promised: bool = True  # whether the level is promised to this output alone

    @cached_property
    def missed(self) -> np.ndarray:
        return (self.y < self.intervals.lower) | (self.y > self.intervals.upper)

    def of(self, rows: np.ndarray, among: int) -> Coverage:
        """The coverage of a group of rows, one of several."""
        return Coverage(self.coverage.level, len(rows) - int(self.missed[rows].sum()), len(rows), among=among)

    def stands_out(self, rows: np.ndarray, among: int) -> bool:
        """Whether a group is covered too rarely, also beside all rows."""
        least = min(self.coverage.level, self.coverage.share)
        return replace(self.of(rows, among), level=least).verdict == "too low"

    @cached_property
    def width(self) -> np.ndarray:
        return self.intervals.width

    @property
    def relative_width(self) -> float | None:
        """The mean width in standard deviations of the targets; None where these are all equal."""
        return None if np.ptp(self.y) == 0 else float(metrics.mean_width(self.y, self.intervals))

    @property
    def score(self) -> float:
        return float(metrics.interval_score(self.y, self.intervals))

    @property
    def correlation(self) -> float:
        return float(metrics.width_error_correlation(self.y, self.intervals))


@dataclass(frozen=True)
class Judgement:
    """All outputs, and where the level is promised to all of them at once their common coverage."""

    outputs: tuple[Judged, ...]
    together: Coverage | None
    together_curve: tuple[Coverage, ...]
    out_of_reach: tuple[float, ...]  # levels of the curve that so few calibration rows do not allow
    trained_on: float  # the share of rows that were training rows, 0 where chance makes rows equal as often

    @property
    def n_rows(self) -> int:
        return len(self.outputs[0].y)


def judge(band: PredictionIntervals, x: Any, y: Any, level: float, names: Sequence[str] | None) -> Judgement:
    if not isinstance(band, PredictionIntervals):
        raise TypeError(f"a report is about fitted PredictionIntervals, got {type(band).__name__}")
    chosen = band.outputs_
    if np.ndim(level) != 0:
        raise ValueError(f"a report is about one level, got {level!r}")
    (level,) = parse_levels(level)
    X, targets = Inputs.of(x), _targets(band, y)
    check_pair(X, targets)
    if len(X) == 0:
        raise ValueError("a report needs at least one row, got none")
    if names is None:
        names = [f"output {o}" for o in chosen] if len(chosen) > 1 else ["prediction"]
    if len(names) != len(chosen):
        raise ValueError(f"the band has {len(chosen)} outputs, and {len(names)} names were given for them")

    calibration = band.calibration_
    joint = calibration is not None and isinstance(calibration.conformal, AllOutputs) and len(chosen) > 1
    rows = None if calibration is None else calibration.conformal.n_rows
    asked = sorted({*CURVE, level})
    levels = [each for each in asked if rows is None or each == level or (rows + 1) * each <= rows + 1e-9]
    mean, lower, upper, covered, together = _predicted(band, X, targets.numpy(), levels, levels.index(level))

    def curve(counts: np.ndarray) -> tuple[Coverage, ...]:
        return tuple(Coverage(each, int(k), len(X), rows) for each, k in zip(levels, counts, strict=True))

    at = levels.index(level)
    outputs = []
    for o, name in enumerate(names):
        over_levels = curve(covered[o])
        intervals = Intervals(mean[:, o], lower[:, o], upper[:, o], level)
        outputs.append(Judged(name, targets[:, o].numpy(), intervals, over_levels[at], over_levels, not joint))
    jointly = curve(together) if joint else ()
    return Judgement(
        tuple(outputs),
        jointly[at] if joint else None,
        jointly,
        tuple(each for each in asked if each not in levels),
        _trained_on(band, X, read_targets(y)),
    )


def _targets(band: PredictionIntervals, y: Any) -> Tensor:  # (n, m)
    targets = torch.from_numpy(band.select_targets(y))
    check_finite(targets, "targets")
    return targets


def _trained_on(band: PredictionIntervals, X: Inputs, y: Tensor) -> float:
    seen = band.fits_[0].seen
    starts = range(0, len(X), ROWS_AT_ONCE)
    parts = ((X[start : start + ROWS_AT_ONCE], y[start : start + ROWS_AT_ONCE]) for start in starts)
    share = float(np.mean(np.concatenate([np.full(len(x), band.share_seen_in_training(x, part)) for x, part in parts])))
    return share if share > share_by_chance(seen.repeated, len(X)) + SEEN else 0.0


def _predicted(
    band: PredictionIntervals, X: Inputs, y: np.ndarray, levels: list[float], at: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Mean and bounds (n, m) at one of the levels; rows covered (m, levels) at each, and (levels,) in all outputs."""
    parts, covered, together = [], np.zeros((y.shape[1], len(levels))), np.zeros(len(levels))
    for start in range(0, len(X), ROWS_AT_ONCE):
        some = slice(start, start + ROWS_AT_ONCE)
        mean, lower, upper = (np.asarray(part, np.float64) for part in band.predict(X[some], levels))
        n, m = y[some].shape
        mean, lower, upper = mean.reshape(n, m), lower.reshape(n, m, -1), upper.reshape(n, m, -1)
        inside = (lower <= y[some, :, None]) & (y[some, :, None] <= upper)  # (n, m, levels)
        covered += inside.sum(axis=0)
        together += inside.all(axis=1).sum(axis=0)
        parts.append((mean, lower[:, :, at], upper[:, :, at]))
    mean, lower, upper = (np.concatenate(part) for part in zip(*parts, strict=True))
    return mean, lower, upper, covered, together
