"""Tables in files, read and written batch by batch: CSV, also compressed, Parquet and npz, by the suffix of the file.

Cells of a CSV file stay text until `to_numbers` converts them: columns which are only copied stay as they are.
"""

import csv
import gzip
import itertools
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
import torch

from ..storage.container import writable
from .output import Refusal, Usage, check_file, join_names, near, progress_bar

CSV_BLOCK_BYTES = 2**20
BATCH_ROWS = 8192  # of the other formats
UNREADABLE = (pa.ArrowInvalid, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError)  # damaged files
MISSING_TEXTS = ("", "na", "n/a", "nan", "null", "none")


@dataclass(frozen=True)
class Table:
    path: Path
    names: list[str]
    read: Callable[[list[str]], Iterable[pa.RecordBatch]]  # all rows of these columns, from the first row at each call
    n_rows: int | None = None  # None: unknown before the last row is read
    arrays: Mapping[str, list[str]] = field(default_factory=dict)  # the columns of each npz array
    index: Sequence[str] = ()  # columns that a data frame had as its index

    def batches(self, names: Sequence[str] = (), label: str | None = None) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the rows of all or the named columns, at least one, each batch after the number of rows before it."""
        n = 0
        with progress_bar(label, self.n_rows) as bar:
            try:
                for rows in self.read(list(names or self.names)):
                    if len(rows):
                        yield n, rows
                    n += len(rows)
                    bar.update(len(rows))
            except UNREADABLE as error:
                raise Refusal(f"{self.path} could not be read: {error}") from error
        if n == 0:
            raise Refusal(f"{self.path} has no rows")

    def numbers(self, names: Sequence[str], dtype: torch.dtype, label: str) -> Iterator[np.ndarray]:
        """Yield the named columns of all rows as checked numbers (b, len(names)), with a progress bar."""
        for n_before, rows in self.batches(names, label):
            yield to_numbers(rows, names, self.path, n_before, dtype=dtype)

    def select(self, wanted: Sequence[str], why: str = "") -> list[str]:
        """Return columns by name; one text may hold several names, separated by commas. An error says `why`."""
        known = {**{name: [name] for name in self.names}, **self.arrays}
        selected: list[str] = []
        for name in itertools.chain.from_iterable([text] if text in known else text.split(",") for text in wanted):
            if name not in known:
                hint, has = near(name, self.names), join_names(self.names)
                raise Refusal(f"{self.path} has no column {name!r}{hint}{why}; it has {has}")
            selected += known[name]
        if repeated := next((name for name in selected if selected.count(name) > 1), None):
            raise Refusal(f"column {repeated!r} is named more than once")
        return selected


def suffix(path: Path) -> str:
    """Return the suffix of a file as the tables here know it, such as .csv.gz."""
    return next((each for each in READERS if path.name.lower().endswith(each)), path.suffix.lower())


def open_table(path: Path) -> Table:
    if suffix(path) not in READERS:
        raise Refusal(f"{path}: the suffix must be one of {', '.join(READERS)}")
    check_file(path)
    try:
        table = READERS[suffix(path)](path)
    except UnicodeDecodeError as error:
        raise Refusal(f"{path} is not in UTF-8 (byte {error.start}): save it as UTF-8") from error
    except (pa.ArrowException, *UNREADABLE) as error:
        raise Refusal(f"{path} could not be read: {error}") from error
    if repeated := next((name for name in table.names if table.names.count(name) > 1), None):
        raise Refusal(f"{path} has more than one column {repeated!r}")
    return table


def to_numbers(
    rows: pa.RecordBatch,
    names: Sequence[str],
    path: Path,
    n_before: int = 0,
    allow_missing: bool = False,
    dtype: torch.dtype = torch.float64,
    otherwise: str = "",  # what else to do about text
) -> np.ndarray:  # (b, len(names))
    """Convert columns to float64; all must be finite, also in `dtype`, but for empty cells with `allow_missing`."""
    numbers = np.empty((len(rows), len(names)))
    bad_cells: list[tuple[int, str, str, str]] = []  # row, column, what it holds, what to do
    for j, name in enumerate(names):
        column = rows.column(name)
        values = _to_floats(column)
        if values is None:
            row = next(i for i in range(len(column)) if _to_floats(column[i : i + 1]) is None)
            text = f"text ({str(column[row].as_py())[:40]!r})"
            what = text if _is_text(column.type) else f"values of type {column.type}"
            bad_cells.append((row, name, what, f"numbers are expected{otherwise}"))
            continue
        wrong = (np.abs(values) > torch.finfo(dtype).max) | (np.isnan(values) & (not allow_missing))
        if wrong.any():
            row = int(wrong.argmax())
            what = _describe_value(values[row], column[row].as_py(), dtype)
            bad_cells.append((row, name, what, "remove or impute such rows"))
        numbers[:, j] = values
    if bad_cells:
        row, name, what, advice = min(bad_cells)  # the first row; rows are counted from 1
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


def check_output(path: Path, force: bool, suffixes: Iterable[str], inputs: Sequence[Path] = ()) -> None:
    """Check before any work that the file can and may be written, and that it is not one that the command reads."""
    if suffix(path) not in suffixes:
        raise Usage(f"--out {path}: the name must end in {' or '.join(suffixes)}")
    if any(path.exists() and read.exists() and path.samefile(read) for read in inputs):
        raise Usage(f"--out {path} is a file that the command reads: give another name")
    if path.is_file() and not force:
        raise Refusal(f"{path} exists already: give --force to replace it, or another --out")
    try:
        writable(path)
    except OSError as error:
        raise Refusal(f"--out: {error}") from error


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
    if pa.types.is_temporal(column.type):
        return None
    try:
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if pa.types.is_boolean(column.type):
            column = column.cast(pa.int8())
        elif _is_text(column.type):
            column = pc.utf8_trim_whitespace(column)
            column = pc.if_else(pc.is_in(pc.utf8_lower(column), pa.array(MISSING_TEXTS)), None, column)
        return column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    except pa.ArrowException:
        return None


def _open_csv(path: Path) -> Table:
    opened = gzip.open if suffix(path) == ".csv.gz" else open
    with opened(path, "rt", newline="", encoding="utf-8-sig") as lines:
        header = next(filter(None, csv.reader(lines)), None)
        has_rows = next(lines, None) is not None
    if header is None:
        raise Refusal(f"{path} is empty: a first line with the names of the columns is expected")
    if len(header) == 1 and (separator := next((each for each in ";\t|" if each in header[0]), None)):
        raise Refusal(f"{path}: columns seem to be separated by {separator!r}; commas are expected")

    def read(names: list[str]) -> Iterator[pa.RecordBatch]:
        options = pa.csv.ConvertOptions(
            column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=False, include_columns=names
        )
        blocks = pa.csv.ReadOptions(block_size=CSV_BLOCK_BYTES, use_threads=False)
        with opened(path, "rb") as file:
            if has_rows:  # a header alone is an error for pyarrow if the line does not end
                yield from pa.csv.open_csv(file, blocks, pa.csv.ParseOptions(newlines_in_values=True), options)

    return Table(path, header, read, index=[name for name in header[:1] if not name])  # a column without a name


def _open_parquet(path: Path) -> Table:
    def read(names: list[str]) -> Iterator[pa.RecordBatch]:
        with pa.parquet.ParquetFile(path) as file:
            yield from (rows.select(names) for rows in file.iter_batches(BATCH_ROWS, columns=names))

    with pa.parquet.ParquetFile(path) as file:
        schema = file.schema_arrow
        index = [name for name in (schema.pandas_metadata or {}).get("index_columns", []) if isinstance(name, str)]
        return Table(path, list(schema.names), read, file.metadata.num_rows, index=index)


def _open_npz(path: Path) -> Table:
    """Load arrays with one row per example: `y` (n,) is a column, `X` (n, k) is the columns X0 … X(k−1).

    An array that cannot be read, such as one of Python objects, is an error where it is used.
    """
    arrays: dict[str, list[str]] = {}
    columns: dict[str, pa.Array | Exception] = {}
    lengths: dict[str, int] = {}
    with path.open("rb") as file, np.lib.npyio.NpzFile(file) as archive:
        for name in archive.files:
            arrays[name] = [name]
            try:
                array = np.asarray(archive[name])
                if array.ndim not in (1, 2):
                    raise Refusal(f"{path}: array {name!r} has shape {array.shape}; expected one or two dimensions")
                native = array.astype(array.dtype.newbyteorder("="), copy=False)
                parts = [pa.array(column) for column in np.atleast_2d(native.T)]
            except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, pa.ArrowException) as error:
                columns[name] = error
                continue
            if array.ndim == 2:
                arrays[name] = [f"{name}{i}" for i in range(array.shape[1])]
            lengths[name] = len(array)
            columns.update(zip(arrays[name], parts, strict=True))
    if not arrays:
        raise Refusal(f"{path} is empty: it holds no arrays")
    if len(set(lengths.values())) > 1:
        sizes = join_names(f"{name} {n}" for name, n in lengths.items())
        raise Refusal(f"{path}: all arrays must have the same number of rows: {sizes}")

    def read(names: list[str]) -> Iterator[pa.RecordBatch]:
        for name in names:
            if isinstance(columns[name], Exception):
                raise Refusal(f"{path}: array {name!r} could not be read: {columns[name]}")
        yield from pa.table({name: columns[name] for name in names}).to_batches(BATCH_ROWS)

    return Table(path, [*itertools.chain(*arrays.values())], read, max(lengths.values(), default=0), arrays)


def _write_csv(path: Path, batches: Iterable[pa.RecordBatch]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        _write_lines(file, batches)


def _write_compressed_csv(path: Path, batches: Iterable[pa.RecordBatch]) -> None:
    with gzip.open(path, "wt", newline="", encoding="utf-8") as file:
        _write_lines(file, batches)


def _write_lines(file: IO[str], batches: Iterable[pa.RecordBatch]) -> None:
    writer = csv.writer(file, lineterminator="\n")
    for i, rows in enumerate(batches):
        if i == 0:
            writer.writerow(rows.schema.names)
        texts = (column.cast(pa.string()).to_pylist() for column in rows.columns)  # None is an empty cell
        writer.writerows(zip(*texts, strict=True))


def _write_parquet(path: Path, batches: Iterable[pa.RecordBatch]) -> None:
    first = next(others := iter(batches))
    with pa.parquet.ParquetWriter(path, first.schema) as writer:
        for rows in itertools.chain([first], others):
            writer.write_batch(rows)


def _write_npz(path: Path, batches: Iterable[pa.RecordBatch]) -> None:
    table = pa.Table.from_batches(batches)
    with zipfile.ZipFile(path, "w") as archive:  # numpy.savez cannot write a column that is called "file"
        for name in table.column_names:
            array = table.column(name).to_numpy()
            if array.dtype.kind not in "fiub":
                array = np.array(["" if each is None else str(each) for each in array])
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


READERS: dict[str, Callable[[Path], Table]] = {
    ".csv": _open_csv,
    ".csv.gz": _open_csv,
    ".parquet": _open_parquet,
    ".npz": _open_npz,
}
# they write rows, at least one, as they come; those for npz are held in memory
WRITERS = {".csv": _write_csv, ".csv.gz": _write_compressed_csv, ".parquet": _write_parquet, ".npz": _write_npz}
