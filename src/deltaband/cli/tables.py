"""Tables in files, read and written batch by batch: CSV, Parquet and npz, by the suffix of the file.

Cells of a CSV file stay text until they are converted (see `rows`), so that columns which are only copied stay as
they are.
"""

from __future__ import annotations

import csv
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from ..storage.atomic import atomic, writable
from .errors import Refusal, Usage, near
from .output import join_names

CSV_BLOCK_BYTES = 2**20
BATCH_ROWS = 8192  # of the other formats

Write = Callable[[pa.RecordBatch], None]


class Table(ABC):
    """A file of named columns."""

    names: list[str]
    n_rows: int | None = None  # None: unknown before the last row is read

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def batches(self, names: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield all rows, with all columns or the named ones; each call starts again at the first row."""

    def expand(self, name: str) -> list[str]:
        """Return the columns that a name stands for: itself, or those of an npz array of two dimensions."""
        return [name] if name in self.names else []

    def select(self, wanted: Sequence[str]) -> list[str]:
        """Return columns by name; one text may hold several names, separated by commas."""
        selected: list[str] = []
        for text in wanted:
            for name in [text] if self.expand(text) else text.split(","):
                if not self.expand(name):
                    has = join_names(self.names)
                    raise Refusal(f"{self.path} has no column {name!r}{near(name, self.names)}; it has {has}")
                selected += self.expand(name)
        if repeated := next((name for name in selected if selected.count(name) > 1), None):
            raise Refusal(f"column {repeated!r} is named more than once")
        return selected


class _Csv(Table):
    """A comma-separated file in UTF-8 whose first line holds the names."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with path.open(newline="", encoding="utf-8-sig") as lines:
            header = next(filter(None, csv.reader(lines)), None)
            self._header_alone = next(lines, None) is None
        if header is None:
            raise Refusal(f"{path} is empty: a first line with the names of the columns is expected")
        if len(header) == 1 and (separator := next((each for each in ";\t|" if each in header[0]), None)):
            raise Refusal(f"{path}: columns seem to be separated by {separator!r}; commas are expected")
        self.names = header

    def batches(self, names: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        if self._header_alone:  # an error for pyarrow if the line does not end
            return
        try:
            with self.path.open("rb") as file:
                yield from pa.csv.open_csv(
                    file,
                    pa.csv.ReadOptions(block_size=CSV_BLOCK_BYTES, use_threads=False),
                    pa.csv.ParseOptions(newlines_in_values=True),
                    pa.csv.ConvertOptions(
                        column_types=dict.fromkeys(self.names, pa.string()),
                        strings_can_be_null=False,
                        include_columns=list(names or self.names),
                    ),
                )
        except pa.ArrowInvalid as error:
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
    """Arrays with one row per example: `y` (n,) is a column, `X` (n, k) is the columns X0 … X(k−1).

    All arrays are held in memory. One that cannot be read, such as one of Python objects, is an error where it is used.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if not zipfile.is_zipfile(path):
            raise Refusal(f"{path} could not be read: it is not a file of numpy.savez")
        self._arrays: dict[str, list[str]] = {}
        self._columns: dict[str, np.ndarray] = {}
        self._unreadable: dict[str, Exception] = {}
        lengths: dict[str, int] = {}
        with np.load(path, allow_pickle=False) as arrays:
            for name in arrays.files:
                try:
                    array = np.asarray(arrays[name])
                except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
                    self._arrays[name], self._unreadable[name] = [name], error
                    continue
                if array.ndim not in (1, 2):
                    raise Refusal(f"{path}: array {name!r} has shape {array.shape}; expected one or two dimensions")
                lengths[name] = len(array)
                self._arrays[name] = [name] if array.ndim == 1 else [f"{name}{i}" for i in range(array.shape[1])]
                native = array.astype(array.dtype.newbyteorder("="), copy=False)
                columns = np.ascontiguousarray(native.reshape(len(array), -1).T)
                self._columns.update(zip(self._arrays[name], columns, strict=True))
        if not self._arrays:
            raise Refusal(f"{path} is empty: it holds no arrays")
        if len(set(lengths.values())) > 1:
            sizes = join_names(f"{name} {n}" for name, n in lengths.items())
            raise Refusal(f"{path}: all arrays must have the same number of rows: {sizes}")
        self.n_rows = next(iter(lengths.values()), 0)
        self.names = [name for columns in self._arrays.values() for name in columns]

    def expand(self, name: str) -> list[str]:
        return self._arrays.get(name) or super().expand(name)

    def batches(self, names: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        names = list(names or self.names)
        for name in names:
            if name in self._unreadable:
                raise Refusal(f"{self.path}: array {name!r} could not be read: {self._unreadable[name]}")
        for start in range(0, self.n_rows or 0, BATCH_ROWS):
            columns = [pa.array(self._columns[name][start : start + BATCH_ROWS]) for name in names]
            yield pa.RecordBatch.from_arrays(columns, names)


READERS: dict[str, type[Table]] = {".csv": _Csv, ".parquet": _Parquet, ".npz": _Npz}


def open_table(path: Path) -> Table:
    """Return the table in a file; its rows are read later."""
    if path.suffix.lower() not in READERS:
        raise Refusal(f"{path}: the suffix must be one of {', '.join(READERS)}")
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path()
        raise Refusal(f"there is no file {path}{near(path.name, [each.name for each in folder.iterdir()])}")
    try:
        table = READERS[path.suffix.lower()](path)
    except UnicodeDecodeError as error:
        raise Refusal(f"{path} is not in UTF-8 (byte {error.start}): save it as UTF-8") from error
    except (pa.ArrowException, zipfile.BadZipFile) as error:
        raise Refusal(f"{path} could not be read: {error}") from error
    if repeated := next((name for name in table.names if table.names.count(name) > 1), None):
        raise Refusal(f"{path} has more than one column {repeated!r}")
    return table


def check_output(path: Path, force: bool, suffixes: Sequence[str], inputs: Sequence[Path | None] = ()) -> None:
    """Check before any work that the file can and may be written, and that it is not one that the command reads."""
    if path.suffix.lower() not in suffixes:
        raise Usage(f"--out {path}: the name must end in {' or '.join(suffixes)}")
    for read in inputs:
        if read is not None and path.exists() and read.exists() and path.samefile(read):
            raise Usage(f"--out {path} is a file that the command reads: give another name")
    if path.is_file() and not force:
        raise Refusal(f"{path} exists already: give --force to replace it, or another --out")
    try:
        writable(path)
    except OSError as error:
        raise Refusal(f"--out: {error}") from error


@contextmanager
def table_writer(path: Path, force: bool) -> Iterator[Write]:
    """Yield a function that writes rows; the file appears at the end of the block. Rows for npz are held in memory."""
    with atomic(path, overwrite=force) as temporary, WRITERS[path.suffix.lower()](temporary) as write:
        yield write


@contextmanager
def _csv_writer(path: Path) -> Iterator[Write]:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")

        def write(rows: pa.RecordBatch) -> None:
            if file.tell() == 0:
                writer.writerow(rows.schema.names)
            texts = (column.cast(pa.string()).to_pylist() for column in rows.columns)  # None is an empty cell
            writer.writerows(zip(*texts, strict=True))

        yield write


@contextmanager
def _parquet_writer(path: Path) -> Iterator[Write]:
    with ExitStack() as stack:
        writers: list[pa.parquet.ParquetWriter] = []

        def write(rows: pa.RecordBatch) -> None:
            if not writers:  # the schema is that of the first rows
                writers.append(stack.enter_context(pa.parquet.ParquetWriter(path, rows.schema)))
            writers[0].write_batch(rows)

        yield write


@contextmanager
def _npz_writer(path: Path) -> Iterator[Write]:
    parts: list[pa.RecordBatch] = []
    yield parts.append
    table = pa.Table.from_batches(parts)
    with zipfile.ZipFile(path, "w") as archive:  # numpy.savez cannot write a column that is called "file"
        for name in table.column_names:
            array = table.column(name).to_numpy()
            if array.dtype.kind not in "fiub":
                array = np.array(["" if each is None else str(each) for each in array])
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


WRITERS: dict[str, Callable[[Path], AbstractContextManager[Write]]] = {
    ".csv": _csv_writer,
    ".parquet": _parquet_writer,
    ".npz": _npz_writer,
}
