"""Groups of rows, from a column: labels are texts, the same for numbers in a CSV file and in Parquet."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..calibration.groups import ByGroup
from ..intervals import PredictionIntervals
from ..validation import check_choice
from . import options
from .models import LoadedBand
from .output import Refusal, Usage
from .rows import StoredRows
from .tables import MISSING_TEXTS, Table

NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")


def labels(rows: pa.RecordBatch, name: str, path: Path, n_before: int = 0) -> list[str]:
    """Return the labels in a column, or raise where there is none."""
    found = [_text(value) for value in rows.column(name).to_pylist()]
    if None in found:
        row = n_before + found.index(None) + 1
        raise Refusal(f"{path}: column {name!r} holds no group in row {row}; give such rows a group of their own")
    return [label for label in found if label is not None]


def _text(value: Any) -> str | None:
    text = "" if value is None else str(value).strip()
    if text.lower() in MISSING_TEXTS:
        return None
    # each cell by itself: 3, 3.0 and 3.00 are one group, while 03 and 3 may be codes of two
    return f"{float(text):.15g}" if NUMBER.fullmatch(text) else text


def given(
    rows: pa.RecordBatch, name: str, unknown: str, loaded: LoadedBand, path: Path, n_before: int = 0
) -> dict[str, Any]:
    """Return what `predict` is given of the groups of rows, or raise where one is unknown."""
    found = labels(rows, name, path, n_before)
    assert loaded.band.calibration_ is not None
    rule = loaded.band.calibration_.rule
    if unknown == "error" and isinstance(rule, ByGroup):
        known = set(rule.labels)
        if (row := next((i for i, label in enumerate(found) if label not in known), None)) is not None:
            advice = "calibrate with rows of it, or give --unknown pool for the quantile of all rows"
            what = f"group {found[row]!r} in row {n_before + row + 1} was not among the calibration rows"
            raise Refusal(f"{path}: column {name!r}: {what}: {advice}")
    return {"groups": found, "unknown": unknown}


def all_labels(table: Table, name: str) -> np.ndarray:  # (n,)
    table.select([name], ", which has the groups")
    return np.array([label for n, rows in table.batches([name]) for label in labels(rows, name, table.path, n)])


def calibrate(band: PredictionIntervals, held_out: StoredRows, groups: np.ndarray, **settings: Any) -> None:
    """Calibrate by groups; their rows are held in memory."""
    batches = list(held_out)
    weights = [batch[2]["sample_weight"] for batch in batches if len(batch) > 2]
    x, y = (np.concatenate([np.asarray(batch[part]) for batch in batches]) for part in (0, 1))
    band.calibrate(x, y, groups=groups, sample_weight=np.concatenate(weights) if weights else None, **settings)


def column(loaded: LoadedBand, given: str | None, source: Table, unknown: str) -> str | None:
    """Return the column that has the groups of rows to be predicted, if the band was calibrated by groups."""
    options.checked(check_choice, unknown, "unknown", ("error", "pool"))
    calibration = loaded.band.calibration_
    by_group = calibration is not None and calibration.is_by_group
    name = given or (loaded.groups if by_group else None)
    if unknown != "error" and name is None:
        raise Usage("--unknown is for bands that were calibrated by groups, see --groups of fit")
    if given and not by_group:
        raise Usage("the band was not calibrated by groups: leave --groups out, or fit with it")
    if name is None and by_group:
        raise Usage("the band was calibrated by groups: give --groups, the column that has them")
    return None if name is None else source.select([name], ", which has the groups")[0]
