"""Tables in files, read some rows at a time: CSV, Parquet and npz, by the file's suffix.

Cells of a CSV file stay text until they are asked for as `numbers`, so that what is carried along is not changed.
"""

from __future__ import annotations

import csv
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
import torch

from .errors import Refusal, listed, near

BLOCK_BYTES = 2**20  # of a CSV file at a time
BATCH_ROWS = 8192  # of the others
SUFFIXES = (".csv", ".parquet", ".npz")
MISSING = ("", "na", "n/a", "nan", "null", "none")


class Table(ABC):
    """A file of named columns."""

    names: list[str]
    n_rows: int | None = None  # where that is known before the last row is read

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def batches(self, names: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """All rows, with all columns or some; again from the first row with each call."""

    def columns(self, name: str) -> list[str]:
        """The columns that a name stands for: itself, or in npz those of an array of two dimensions."""
        return [name] if name in self.names else []

    def select(self, wanted: Sequence[str]) -> list[str]:
        """Columns by name, several in one string being separated by commas."""
        found: list[str] = []
        for text in wanted:
            for name in [text] if self.columns(text) else text.split(","):
                if not self.columns(name):
                    have = listed(self.names)
                    raise Refusal(f"{self.path} has no column {name!r}{near(name, self.names)}; it has {have}")
                found += self.columns(name)
        if repeated := next((name for name in found if found.count(name) > 1), None):
            raise Refusal(f"column {repeated!r} is named more than once")
        return found


def open_table(path: Path) -> Table:
    kinds: dict[str, type[Table]] = dict(zip(SUFFIXES, (_Csv, _Parquet, _Npz), strict=True))
    if path.suffix.lower() not in kinds:
        raise Refusal(f"{path}: the suffix must be one of {', '.join(SUFFIXES)}")
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path()
        raise Refusal(f"there is no file {path}{near(path.name, [each.name for each in folder.iterdir()])}")
    try:
        table = kinds[path.suffix.lower()](path)
    except UnicodeDecodeError as error:
        raise Refusal(f"{path} is not in UTF-8 (byte {error.start}): save it as UTF-8") from error
    except (pa.ArrowException, zipfile.BadZipFile) as error:
        raise Refusal(f"{path} could not be read: {error}") from error
    if repeated := next((name for name in table.names if table.names.count(name) > 1), None):
        raise Refusal(f"{path} has more than one column {repeated!r}")
    return table


class _Csv(Table):
    """Comma-separated, in UTF-8, the first line being the names."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with path.open(newline="", encoding="utf-8-sig") as lines:
            header = next(filter(None, csv.reader(lines)), None)
        if header is None:
            raise Refusal(f"{path} is empty: a first line with the names of the columns is expected")
        if len(header) == 1 and (separator := next((each for each in ";\t|" if each in header[0]), None)):
            raise Refusal(f"{path}: columns seem to be separated by {separator!r}; commas are expected")
        self.names = header

    def batches(self, names: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        try:
            yield from pa.csv.open_csv(
                self.path,
                pa.csv.ReadOptions(block_size=BLOCK_BYTES, use_threads=False),
                pa.csv.ParseOptions(newlines_in_values=True),
                pa.csv.ConvertOptions(
                    column_types=dict.fromkeys(self.names, pa.string()),
                    strings_can_be_null=False,
                    include_columns=list(names or self.names),
                ),
            )
        except pa.ArrowInvalid as error:
            if "Empty CSV" in str(error):  # a header without a line's end
                return
            raise Refusal(f"{self.path} could not be read: {error}") from error


class _Parquet(Table):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with pa.parquet.ParquetFile(path) as file:
            self.names, self.n_rows = list(file.schema_arrow.names), file.metadata.num_rows

    def batches(self, names: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        with pa.parquet.ParquetFile(self.path) as file:
            for rows in file.iter_batches(BATCH_ROWS, columns=list(names or self.names)):
                yield rows.select(list(names or self.names))


class _Npz(Table):
    """Arrays with a row for each example: `y` (n,) is a column, `X` (n, k) is the columns X0 … X(k−1).

    Arrays are read from the archive as a stream, compressed or not. Those in Fortran's order are read whole: their rows
    are all over the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._arrays: dict[str, list[str]] = {}
        lengths: dict[str, int] = {}
        with zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                name = member.removesuffix(".npy")
                with archive.open(member) as file:
                    shape, _, _ = _header(file, path, name)
                if len(shape) not in (1, 2):
                    raise Refusal(f"{path}: array {name!r} is {shape}; one or two dimensions are expected")
                self._arrays[name] = [name] if len(shape) == 1 else [f"{name}{i}" for i in range(shape[1])]
                lengths[name] = shape[0]
        if not lengths:
            raise Refusal(f"{path} is empty: it holds no arrays")
        if len(set(lengths.values())) > 1:
            sizes = listed(f"{name} {n}" for name, n in lengths.items())
            raise Refusal(f"{path}: all arrays must have as many rows: {sizes}")
        self.n_rows = next(iter(lengths.values()))
        self.names = [name for columns in self._arrays.values() for name in columns]

    def columns(self, name: str) -> list[str]:
        return self._arrays.get(name) or super().columns(name)

    def batches(self, names: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        wanted = list(names or self.names)
        needed = [name for name, columns in self._arrays.items() if not set(columns).isdisjoint(wanted)]
        with ExitStack() as stack:
            archive = stack.enter_context(zipfile.ZipFile(self.path))
            files = [stack.enter_context(archive.open(f"{name}.npy")) for name in needed]
            blocks = [_blocks(file, self.path, name) for name, file in zip(needed, files, strict=True)]
            for of_arrays in zip(*blocks, strict=True):
                found: dict[str, np.ndarray] = {}
                for name, block in zip(needed, of_arrays, strict=True):
                    found.update(zip(self._arrays[name], np.ascontiguousarray(block.T), strict=True))
                yield pa.RecordBatch.from_arrays([pa.array(found[name]) for name in wanted], wanted)


def _header(file: IO[bytes], path: Path, name: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether in Fortran's order, and type."""
    try:
        version = np.lib.format.read_magic(file)
        read: Any = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        return read(file)
    except ValueError as error:
        raise Refusal(f"{path}: {name!r} is not an array as numpy.savez writes it: {error}") from error


def _blocks(file: IO[bytes], path: Path, name: str) -> Iterator[np.ndarray]:  # each (b, k)
    (n, *others), fortran, dtype = _header(file, path, name)
    if dtype.hasobject:
        raise Refusal(f"{path}: array {name!r} holds Python objects, which could run code: not read")
    k = others[0] if others else 1
    step = n if fortran and others else BATCH_ROWS
    for start in range(0, n, max(step, 1)):
        b = min(step, n - start)
        content = file.read(b * k * dtype.itemsize)
        if len(content) < b * k * dtype.itemsize:
            raise Refusal(f"{path}: array {name!r} ends before its last row")
        read = np.frombuffer(content, dtype).reshape(b, k, order="F" if fortran else "C")
        native = read.astype(dtype.newbyteorder("="))
        yield from (native[i : i + BATCH_ROWS] for i in range(0, b, BATCH_ROWS))


def numbers(
    rows: pa.RecordBatch,
    names: Sequence[str],
    path: Path,
    first: int = 0,
    missing: bool = False,
    dtype: torch.dtype = torch.float64,
) -> np.ndarray:  # (b, len(names))
    """Columns in float64, all finite, in `dtype` too; with `missing` NaN where a cell is empty.

    `first` is how many rows of the file came before; an error names the first bad row, counted from 1.
    """
    found = np.empty((len(rows), len(names)))
    bad: list[tuple[int, str, str]] = []
    for j, name in enumerate(names):
        column = rows.column(name)
        try:
            found[:, j] = _floats(column)
        except pa.ArrowException:
            texts = column.cast(pa.string()).to_pylist() if _is_text(column.type) else [str(column.type)]
            row = next((i for i, text in enumerate(texts) if not _is_number(text)), 0)
            bad.append((row, name, _what(texts[row])))
            continue
        wrong = np.abs(found[:, j]) > torch.finfo(dtype).max
        if not missing:
            wrong |= np.isnan(found[:, j])
        if wrong.any():
            row = int(wrong.argmax())
            value = found[row, j]
            if np.isnan(value):
                what = _what(column[row].as_py())
            elif np.isinf(value):
                what = "an infinite value"
            else:
                what = f"a value ({value:g}) that is too large for the network's {str(dtype).removeprefix('torch.')}"
            bad.append((row, name, what))
    if bad:
        row, name, what = min(bad)
        advice = "remove or impute such rows" if "value" in what else "numbers are expected"
        raise Refusal(f"{path}: column {name!r} holds {what} in row {first + row + 1}; {advice}")
    return found


def values(column: pa.Array) -> list[Any]:
    """Cells as they are, None where missing; text is numbers where all of it can be."""
    cells = column.to_pylist()
    if not _is_text(column.type):
        return cells
    texts = [None if cell is None or cell.strip().lower() in MISSING else cell for cell in cells]
    return [text and float(text) for text in texts] if all(map(_is_number, texts)) else texts


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind)


def _floats(column: pa.Array) -> np.ndarray:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if _is_text(column.type):
        column = pc.utf8_trim_whitespace(column)
        column = pc.if_else(pc.is_in(pc.utf8_lower(column), pa.array(MISSING)), None, column)
    elif pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    elif pa.types.is_temporal(column.type):
        raise pa.ArrowInvalid("moments are not numbers")
    return column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)


def _is_number(text: str | None) -> bool:
    """Or a missing one."""
    try:
        _floats(pa.array([text], pa.string()))
    except pa.ArrowException:
        return False
    return True


def _what(cell: Any) -> str:
    if not isinstance(cell, str):
        return "a missing value"
    if cell.strip().lower() in MISSING:
        return f"a missing value ({cell!r})" if cell else "a missing value (an empty cell)"
    return f"text ({cell[:40]!r})"
