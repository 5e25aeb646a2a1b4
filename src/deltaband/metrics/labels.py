"""`LabelScores`: how good predicted labels, their probabilities and sets of labels are, as a table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..data.batches import read_targets
from ..data.labels import check_labels
from ..display import element, fixed, html_table, number, percent, text_table
from ..results import level_name, parse_levels, to_numpy

MAX_BINS, BIN_ROWS_AT_LEAST = 10, 10  # of a reliability diagram


class Bin(NamedTuple):
    """Rows whose predicted labels have similar probabilities."""

    n_rows: int
    confidence: float  # the mean probability of the predicted label
    correct: int  # how many of these labels are the true ones


@dataclass(frozen=True, eq=False, repr=False)
class LabelScores:
    """How good a classifier and its sets of labels are on some rows; printed, a table.

    Attributes:
        n_rows: The number of rows.
        accuracy: The share of rows whose most likely label is the true one.
        log_loss: The mean of −log π of the true label.
        calibration_error: The mean over rows of |confidence − accuracy| of their bin.
        bins: A reliability diagram, in as many rows each as there are: the most likely labels by their probability.
        class_rows: How many rows each true label has, (C,).
        class_accuracy: The share of these whose most likely label is the true one, (C,); NaN without rows.
        levels: The levels of sets; none without sets.
        coverage: The share of rows whose set holds the true label, (levels,).
        mean_size: How many labels a set holds on average, (levels,).
        class_coverage: The coverage of the rows of each true label, (C, levels); NaN without rows.
        class_size: The mean size of their sets, (C, levels).
    """

    n_rows: int
    accuracy: float
    log_loss: float
    calibration_error: float
    bins: tuple[Bin, ...]
    class_rows: np.ndarray
    class_accuracy: np.ndarray
    levels: tuple[float, ...]
    coverage: np.ndarray
    mean_size: np.ndarray
    class_coverage: np.ndarray
    class_size: np.ndarray

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each level, or one without sets, with what does not depend on the level in each."""
        same = {"accuracy": self.accuracy, "log_loss": self.log_loss, "calibration_error": self.calibration_error}
        sets = zip(self.levels, self.coverage.tolist(), self.mean_size.tolist(), strict=True)
        return [{"level": p, "coverage": share, "mean_size": size} | same for p, share, size in sets] or [same]

    def class_records(self) -> list[dict[str, Any]]:
        """Return a row for each label and level, or for each label without sets."""
        found = []
        for c, (n, accuracy) in enumerate(zip(self.class_rows.tolist(), self.class_accuracy.tolist(), strict=True)):
            about = {"label": c, "rows": n, "accuracy": accuracy}
            pairs = zip(self.levels, self.class_coverage[c].tolist(), self.class_size[c].tolist(), strict=True)
            found += [about | {"level": p, "coverage": s, "mean_size": size} for p, s, size in pairs] or [about]
        return found

    def __repr__(self) -> str:
        return "\n".join(text_table(title, cells) for title, cells in self._tables())

    def _repr_html_(self) -> str:
        parts = [(element("p", element("b", title)), html_table(cells)) for title, cells in self._tables()]
        return element("div", *(part for pair in parts for part in pair))

    def _tables(self) -> list[tuple[str, list[list[str]]]]:
        title = f"Scores on {self.n_rows:,} row{'s'[: self.n_rows != 1]}"
        return [(title, _cells(self.rows())), ("By true label", _cells(self.class_records()))]


def evaluate_labels(y: Any, probabilities: Any, sets: Any = None, levels: float | Sequence[float] = ()) -> LabelScores:
    """Compute how good probabilities of labels, and sets of labels, are.

    Args:
        y: The true labels, (n,), from 0 to C − 1.
        probabilities: Of each label, (n, C).
        sets: Whether each label is in the set, (n, C), or (n, C, levels).
        levels: The levels of the sets.

    Returns:
        The scores; printed, a table.

    Raises:
        ValueError: If shapes do not fit together, there are no rows, or a label is none of C.
    """
    p, targets = to_numpy(probabilities), read_targets(y)
    if p.ndim != 2 or not len(p) or len(p) != len(targets):
        raise ValueError(f"expected probabilities (n, C) of n labels, n > 0, got {p.shape} of {len(targets)}")
    asked = () if sets is None else parse_levels(levels)
    held = np.zeros((*p.shape, 0), dtype=bool) if sets is None else to_numpy(sets, dtype=None).reshape(*p.shape, -1)
    if held.shape[2] != len(asked):
        raise ValueError(f"sets of {held.shape[2]} levels do not match {len(asked)} levels")
    labels, n = check_labels(targets, p.shape[1]).numpy(), len(p)
    likely, rows = p.argmax(axis=1), np.arange(n)
    confidence, correct = p[rows, likely], likely == labels
    order = np.argsort(confidence, kind="stable")
    parts = np.array_split(order, min(MAX_BINS, max(1, n // BIN_ROWS_AT_LEAST)))
    bins = tuple(Bin(len(part), float(confidence[part].mean()), int(correct[part].sum())) for part in parts)
    covered, sizes = held[rows, labels].astype(float), held.sum(axis=1).astype(float)  # (n, levels)
    of_label = labels[:, None] == np.arange(p.shape[1])  # (n, C)
    counts = of_label.sum(axis=0)
    with np.errstate(invalid="ignore"):
        by_label = [of_label.T @ each / counts[:, None] for each in (correct[:, None].astype(float), covered, sizes)]
    return LabelScores(
        n,
        float(correct.mean()),
        float(-np.log(np.maximum(p[rows, labels], np.finfo(float).tiny)).mean()),
        sum(abs(each.n_rows * each.confidence - each.correct) for each in bins) / n,
        bins,
        counts,
        by_label[0][:, 0],
        asked,
        covered.mean(axis=0),
        sizes.mean(axis=0),
        *by_label[1:],
    )


def _cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [[name.replace("_", " ") for name in rows[0]], *([_cell(*item) for item in row.items()] for row in rows)]


def _cell(name: str, value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return "–"
    if name in ("coverage", "accuracy"):
        return percent(value)
    return f"{level_name(value)} %" if name == "level" else fixed(value, 2) if name == "mean_size" else number(value, 3)
