"""The numbers of a classifier's report: sets of labels and probabilities on rows with known labels."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..classification import ClassificationIntervals
from ..data.batches import read_targets
from ..data.labels import check_labels
from ..metrics import LabelScores, evaluate_labels
from ..results import ClassIntervals, parse_levels
from .columns import Breakdown, Column, Group, group_by_value
from .evaluation import CURVE_LEVELS, Coverage, Covered

DOUBTFUL_ROWS = 25  # in the table of rows


@dataclass(frozen=True, eq=False)
class LabelEvaluation(Covered):
    """Sets of labels at one level; without a calibration the most likely labels alone."""

    coverage: Coverage
    curve: tuple[Coverage, ...]  # over levels
    y: np.ndarray  # (n,)
    predicted: np.ndarray  # (n,)
    probabilities: np.ndarray  # (n, C)
    sets: np.ndarray  # (n, C)
    scores: LabelScores
    reliability: tuple[Coverage, ...]  # of the bins: their mean probability is the level
    has_sets: bool

    @property
    def has_own_level(self) -> bool:
        """Whether there is a level that groups of rows can be compared with."""
        return self.has_sets

    @cached_property
    def missed(self) -> np.ndarray:
        return ~self.sets[np.arange(len(self.y)), self.y]

    @cached_property
    def width(self) -> np.ndarray:
        """How many labels each set holds."""
        return self.sets.sum(axis=1).astype(np.float64)


def evaluate(band: ClassificationIntervals, x: Any, y: Any, level: float) -> LabelEvaluation:
    """Compare sets of labels of `x`, and probabilities, with the labels `y`."""
    if np.ndim(level) != 0:
        raise ValueError(f"a report is about one level, got {level!r}")
    band.spec.task.check_one_label("a report")  # type: ignore[union-attr]
    (level,), calibration = parse_levels(level), band.calibration_
    p = np.asarray(band.predict_proba(x))
    labels = check_labels(read_targets(y), p.shape[1]).numpy()
    if len(p) != len(labels):
        raise ValueError(f"{len(p)} inputs, {len(labels)} labels: there must be one for each")
    if len(labels) == 0:
        raise ValueError("a report needs at least one row, got none")
    predicted, n = p.argmax(axis=1), len(p)
    sets, levels = (predicted[:, None] == np.arange(p.shape[1]))[:, :, None], [level]
    if calibration is not None:
        rows = int(calibration.counts.min()) if calibration.by_class else calibration.n_rows
        levels = [each for each in sorted({*CURVE_LEVELS, level}) if each == level or each <= rows / (rows + 1)]
        sets = np.asarray(band.predict_set(x, levels))
    scores = evaluate_labels(labels, p, sets, levels)
    covered, calibrated = sets[np.arange(n), labels].sum(axis=0), None if calibration is None else calibration.n_rows
    curve = tuple(Coverage(each, int(k), n, calibrated) for each, k in zip(levels, covered, strict=True))
    at = levels.index(level)
    reliability = tuple(Coverage(each.confidence, each.correct, each.n_rows) for each in scores.bins)
    about = (curve[at], curve, labels, predicted, p, sets[:, :, at], scores, reliability)
    return LabelEvaluation(*about, calibration is not None)


def section(
    band: ClassificationIntervals, found: LabelEvaluation, x: Any, columns: Mapping[str, Column]
) -> dict[str, Any]:
    """Return what the page shows besides these numbers: groups of rows, and the rows that are most doubtful."""
    breakdowns = [
        Breakdown("true label", Column(found.y.astype(float)), _by_label(found.y), "y"),
        Breakdown("predicted label", Column(found.predicted.astype(float)), _by_label(found.predicted), "labels"),
    ]
    if found.has_sets:
        breakdowns.append(Breakdown("size of the set", Column(found.width), _by_label(found.width.astype(int)), "size"))
    breakdowns += [Breakdown(name, each, group_by_value(each), f"data[{name!r}]") for name, each in columns.items()]
    confidence = found.probabilities.max(axis=1)
    doubtful = np.argsort(confidence, kind="stable")[:DOUBTFUL_ROWS]
    of_true = breakdowns[0].groups
    rare = [each.name for each in of_true if found.has_sets and found.is_undercovered(each.rows, len(of_true))]
    intervals = band.predict(band.spec.inputs(x)[doubtful.tolist()].as_given(), found.coverage.level)
    return {
        "breakdowns": breakdowns,
        "undercovered": rare,
        "doubtful": [(row, *_bounds(intervals, k, found, row)) for k, row in enumerate(doubtful)],
    }


def _bounds(intervals: ClassIntervals, k: int, found: LabelEvaluation, row: int) -> tuple[float, float]:
    """Return those of the most likely label's probability; NaN where there are intervals for others alone."""
    of_row, label, classes = intervals.probability, found.predicted[row], intervals.classes
    lower, upper = (np.reshape(np.asarray(each)[k], -1) for each in (of_row.lower, of_row.upper))
    if not isinstance(classes, tuple) or label in classes:
        place = classes.index(label) if isinstance(classes, tuple) else 0
        return float(lower[place]), float(upper[place])
    if found.sets.shape[1] == 2:  # the other label has the opposite interval
        return 1 - float(upper[0]), 1 - float(lower[0])
    return math.nan, math.nan


def _by_label(values: np.ndarray) -> list[Group]:
    return [Group(str(value), np.flatnonzero(values == value)) for value in np.unique(values)]
