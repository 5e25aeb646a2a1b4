"""Bands of classifiers: the options that are for them alone or not for them, and what commands say of labels."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..classification import ClassificationIntervals
from ..fitting.classes import Classification
from ..results import level_name
from ..validation import check_choice
from . import options
from .models import LoadedBand
from .output import Usage, format_table
from .tables import Table, to_numbers


def settings(
    engine_text: str, memory: str | None, classes: str, sets: str, weight_decay: float | None, damping: float | None
) -> dict[str, Any]:
    """Return the keywords of ClassificationIntervals, checked before any file is read."""
    chosen: Any = None if classes == "all" else classes
    if classes not in ("all", "predicted"):
        try:
            chosen = [int(each) for each in classes.split(",")]
        except ValueError:
            raise Usage(f"--classes must be predicted, all, or labels as in 0,2, got {classes!r}") from None
    found = {"weight_decay": weight_decay, "damping": damping, "classes": chosen}
    found |= {"engine": options.engine(engine_text), "memory": None if memory is None else options.nbytes(memory)}
    options.checked(check_choice, sets, "sets", Classification.methods)
    options.checked(ClassificationIntervals, nn.PReLU(), **found)  # any module will do
    return found


def is_for_labels(loaded: LoadedBand, given: Mapping[str, Any]) -> bool:
    """Return whether a band is that of a classifier; raise where options were given that are not for it."""
    if not isinstance(loaded.band, ClassificationIntervals):
        return False
    task: Any = loaded.band.spec.task
    task.check_one_label("the command line")
    if option := next((name for name, value in given.items() if value), None):
        raise Usage(f"{option} is not for the band of a classifier, which has intervals of probabilities and sets")
    return True


def added_columns(band: ClassificationIntervals, levels: Sequence[float]) -> list[str]:
    """Return the names of the columns that `answers` are for."""
    named, sets, classes = [level_name(level) for level in levels], band.calibration_ is not None, band.classes_
    several = range(1, band.spec.task.top + 1) if classes is None else classes  # type: ignore[union-attr]
    per_class = [""] if len(several) == 1 else [f"_{'top' if classes is None else ''}{c}" for c in several]
    parts = ["probability", *(f"{side}_{name}" for name in named for side in ("lower", "upper"))]
    added = [f"{part}{ending}" for ending in per_class for part in parts]
    return ["prediction", *added, *(f"set_{name}" for name in named if sets)]


def answers(band: ClassificationIntervals, x: torch.Tensor, levels: Sequence[float]) -> list[Any]:
    """Return the most likely label of each row, intervals of probabilities, and sets as labels with spaces between."""
    found: list[Any] = [band.predict_proba(x).argmax(dim=1).numpy()]
    p = band.predict(x, list(levels)).probability
    mean = np.asarray(p.mean).reshape(len(x), -1)
    lower, upper = (np.asarray(each).reshape(*mean.shape, len(levels)) for each in (p.lower, p.upper))
    for c in range(mean.shape[1]):
        found += [mean[:, c], *(side[:, c, j] for j in range(len(levels)) for side in (lower, upper))]
    if band.calibration_ is not None:
        sets = np.asarray(band.predict_set(x, list(levels)))
        found += [[" ".join(map(str, np.flatnonzero(row))) for row in sets[:, :, j]] for j in range(len(levels))]
    return found


def evaluate(
    loaded: LoadedBand, source: Table, columns: Sequence[str], levels: Sequence[float], path: Path
) -> tuple[dict[str, Any], str]:
    """Return how good labels, probabilities and sets are, by name and as text."""
    k = len(loaded.features)
    parts = [
        to_numbers(rows, columns, path, n, dtype=loaded.dtype)
        for n, rows in source.batches(list(dict.fromkeys(columns)), "evaluating")
    ]
    values = np.concatenate(parts)
    scores = loaded.band.evaluate(torch.from_numpy(values[:, :k]).to(loaded.dtype), values[:, k:], list(levels))
    results, by_class = scores.rows(), scores.class_records()
    about = {"rows": scores.n_rows, "results": results, "classes": by_class}
    about |= {"reliability": [each._asdict() for each in scores.bins]}
    text = f"{scores.n_rows:,} rows of {path}\n{format_table(results)}\n{format_table(by_class)}"
    return about, text
