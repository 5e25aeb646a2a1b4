"""Tables into files, some rows at a time, and whole or not at all."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from ..storage.atomic import atomic, writable
from .errors import Refusal, Usage
from .tables import SUFFIXES

Write = Callable[[pa.RecordBatch], None]


def check_output(path: Path, force: bool, suffix: str | None = None, inputs: Sequence[Path | None] = ()) -> None:
    """Before any work: whether the file can be written, and may be; never one that the command reads."""
    if suffix is not None and path.suffix.lower() != suffix:
        raise Usage(f"--out {path}: a name that ends in {suffix} is expected")
    for read in inputs:
        if read is not None and path.exists() and read.exists() and path.samefile(read):
            raise Usage(f"--out {path} is what the command reads: give another name")
    if path.exists() and path.is_file() and not force:
        raise Refusal(f"{path} exists already: give --force to replace it, or another --out")
    try:
        writable(path)
    except OSError as error:
        raise Refusal(f"--out: {error}") from error


def check_table(path: Path, force: bool) -> None:
    if path.suffix.lower() not in SUFFIXES:
        raise Usage(f"--out {path}: the suffix must be one of {', '.join(SUFFIXES)}")
    check_output(path, force)


@contextmanager
def written(path: Path, force: bool) -> Iterator[Write]:
    """A function that takes rows; the file appears at the end of the block. Of npz all rows wait in memory for that."""
    kinds = dict(zip(SUFFIXES, (_csv, _parquet, _npz), strict=True))
    with atomic(path, overwrite=force) as temporary, kinds[path.suffix.lower()](temporary) as write:
        yield write


@contextmanager
def _csv(path: Path) -> Iterator[Write]:
    with path.open("w", newline="", encoding="utf-8") as file:
        lines, begun = csv.writer(file, lineterminator="\n"), False

        def write(rows: pa.RecordBatch) -> None:
            nonlocal begun
            if not begun:
                lines.writerow(rows.schema.names)
                begun = True
            lines.writerows(zip(*(_texts(column) for column in rows.columns), strict=True))

        yield write


@contextmanager
def _parquet(path: Path) -> Iterator[Write]:
    writer: pa.parquet.ParquetWriter | None = None

    def write(rows: pa.RecordBatch) -> None:
        nonlocal writer
        if writer is None:
            writer = pa.parquet.ParquetWriter(path, rows.schema)
        writer.write_batch(rows)

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()


@contextmanager
def _npz(path: Path) -> Iterator[Write]:
    parts: list[pa.RecordBatch] = []
    yield parts.append
    table = pa.Table.from_batches(parts)
    with zipfile.ZipFile(path, "w") as archive:  # as numpy.savez, which has names of its own that no column may have
        for name in table.column_names:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, _array(table.column(name)), allow_pickle=False)


def _texts(column: pa.Array) -> list[str | None]:
    """As short as each number can be told by; None is an empty cell."""
    return column.cast(pa.string()).to_pylist()


def _array(column: pa.ChunkedArray) -> np.ndarray:
    array = column.to_numpy()
    return array if array.dtype.kind in "fiub" else np.array(["" if each is None else str(each) for each in array])
