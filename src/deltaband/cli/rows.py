"""Rows of a table as numbers for a network: cells are converted and checked, and stored for a fit."""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from .errors import Refusal
from .output import progress_bar
from .tables import BATCH_ROWS, Table

MISSING_TEXTS = ("", "na", "n/a", "nan", "null", "none")
MAX_BYTES_IN_MEMORY = 2**27  # stored rows that take more go to a temporary file


@dataclass(frozen=True)
class StoredRows:
    """Rows as numbers, read and checked once: batches `(x, y)` that can be iterated again and again."""

    file: IO[bytes]  # (n, features + targets) float64
    n_features: int
    n_targets: int
    dtype: torch.dtype  # of the network
    scale: tuple[np.ndarray, np.ndarray] | None  # mean and standard deviation that targets were scaled with
    selected: np.ndarray  # (n,) bool
    progress_label: str | None = None

    @property
    def n_rows(self) -> int:
        return int(self.selected.sum())

    def __iter__(self) -> Iterator[tuple[Tensor, np.ndarray]]:
        width = self.n_features + self.n_targets
        with progress_bar(self.progress_label, self.n_rows) as bar:
            for start in range(0, len(self.selected), BATCH_ROWS):
                self.file.seek(start * width * 8)
                values = np.frombuffer(self.file.read(BATCH_ROWS * width * 8)).reshape(-1, width)
                values = values[self.selected[start : start + BATCH_ROWS]]
                x, y = values[:, : self.n_features], values[:, self.n_features :]
                if self.scale is not None:
                    y = (y - self.scale[0]) / self.scale[1]
                if len(values):
                    yield torch.from_numpy(x).to(self.dtype), y
                bar.update(len(values))


def store_rows(file: IO[bytes], batches: Iterable[np.ndarray]) -> int:
    """Append rows to a file and return how many there were."""
    n = 0
    for values in batches:
        try:
            file.write(values.tobytes())
        except OSError as error:
            raise Refusal(f"rows could not be stored in {tempfile.gettempdir()} (see TMPDIR): {error}") from error
        n += len(values)
    return n


def number_batches(table: Table, names: Sequence[str], dtype: torch.dtype, label: str) -> Iterator[np.ndarray]:
    """Yield the named columns of all rows as checked numbers (b, len(names)), with a progress bar."""
    for n_before, rows in table.batches(names, label):
        yield to_numbers(rows, names, table.path, n_before, dtype=dtype)


def to_numbers(
    rows: pa.RecordBatch,
    names: Sequence[str],
    path: Path,
    n_before: int = 0,
    allow_missing: bool = False,
    dtype: torch.dtype = torch.float64,
) -> np.ndarray:  # (b, len(names))
    """Convert columns to float64; all must be finite, also in `dtype`, but for empty cells with `allow_missing`.

    `n_before` counts the rows of the file before these: an error names the first bad row, counted from 1.
    """
    numbers = np.empty((len(rows), len(names)))
    bad_cells: list[tuple[int, str, str, str]] = []  # row, column, what it holds, what to do
    for j, name in enumerate(names):
        column = rows.column(name)
        values = _to_floats(column)
        if values is None:
            row = next(i for i in range(len(column)) if _to_floats(column[i : i + 1]) is None)
            text = f"text ({str(column[row].as_py())[:40]!r})"
            what = text if _is_text(column.type) else f"values of type {column.type}"
            bad_cells.append((row, name, what, "numbers are expected"))
            continue
        wrong = (np.abs(values) > torch.finfo(dtype).max) | (np.isnan(values) & (not allow_missing))
        if wrong.any():
            row = int(wrong.argmax())
            what = _describe_value(values[row], column[row].as_py(), dtype)
            bad_cells.append((row, name, what, "remove or impute such rows"))
        numbers[:, j] = values
    if bad_cells:
        row, name, what, advice = min(bad_cells)
        raise Refusal(f"{path}: column {name!r} holds {what} in row {n_before + row + 1}; {advice}")
    return numbers


def group_values(column: pa.Array) -> list[Any]:
    """Return the cells, None where missing; text becomes numbers where all of it can."""
    cells: list[Any] = column.to_pylist()
    if not _is_text(column.type):
        return cells
    if (values := _to_floats(column)) is not None:
        return [None if np.isnan(value) else value for value in values.tolist()]
    return [None if cell is None or cell.strip().lower() in MISSING_TEXTS else cell for cell in cells]


def _describe_value(value: float, cell: Any, dtype: torch.dtype) -> str:
    if np.isinf(value):
        return "an infinite value"
    if not np.isnan(value):
        return f"a value ({value:g}) that is too large for the network's {str(dtype).removeprefix('torch.')}"
    if not isinstance(cell, str):
        return "a missing value"
    return f"a missing value ({cell!r})" if cell else "a missing value (an empty cell)"


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind)


def _to_floats(column: pa.Array) -> np.ndarray | None:
    """Convert a column to float64, NaN where a cell is missing; None where that is not possible."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if _is_text(column.type):
        column = pc.utf8_trim_whitespace(column)
        column = pc.if_else(pc.is_in(pc.utf8_lower(column), pa.array(MISSING_TEXTS)), None, column)
    elif pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    elif pa.types.is_temporal(column.type):
        return None
    try:
        return column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    except pa.ArrowException:
        return None
