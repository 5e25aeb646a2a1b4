"""A CSV of results that grows cell by cell, so that a run that was interrupted goes on where it stopped.

A cell is the rows of one key, such as (data, setting, split). They are written in one write that ends with a line
break, so a process killed while writing leaves at most one torn cell, at the end of the file: it does not count as
done, and the next `append` removes it. (Only a write cut exactly between two of its rows would go unnoticed.) One
run writes a file; any number may read it meanwhile. A second one that writes it ends at the first cell that both have.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pandas as pd

from .errors import Unusable

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

Key = tuple[str | int, ...]


class Rows:
    """`Rows(path, key=("data", "setting", "split"))`: the file need not exist yet."""

    def __init__(self, path: Path, key: Sequence[str] = ("data", "setting", "split")):
        self.path = Path(path)
        self.key = tuple(key)

    def done(self) -> set[Key]:
        """The keys of the finished cells; whole numbers are `int`, all else is `str`."""
        header, *lines = self._sound() or [""]
        return {self._key_of(_fields(header), _fields(line)) for line in lines}

    def read(self) -> pd.DataFrame:
        """The rows of the finished cells; none, with the columns of the key, where there is no file."""
        lines = self._sound()
        if not lines:
            return pd.DataFrame(columns=list(self.key))
        table = pd.read_csv(io.StringIO("\n".join(lines)))
        for name in table.select_dtypes(exclude="number"):
            numbers = pd.to_numeric(table[name], errors="coerce").notna()
            words = table[name].notna() & ~numbers
            if 0 < words.sum() <= numbers.sum():
                i = int(words.argmax())
                raise Unusable(f"{self.path}, line {i + 2}: a number expected for {name}, got {table[name][i]!r}")
        return table

    def append(self, rows: Sequence[dict[str, object]]) -> None:
        """Add one finished cell: all its rows, with the columns of the rows that are there."""
        if not rows:
            raise ValueError("a cell has at least one row")
        keys = {tuple(row[name] for name in self.key) for row in rows}
        if len(keys) != 1:
            raise ValueError(f"a cell is the rows of one key, got {sorted(map(str, keys))}")
        (key,) = keys
        if tuple(_value(str(part)) for part in key) != key:
            raise ValueError(f"a key is made of words and whole numbers, or it is not found again; got {key}")
        with self._alone() as file:
            lines = self._sound()
            columns = _fields(lines[0]) if lines else list(rows[0])
            for row in rows:
                if list(row) != columns:
                    raise Unusable(f"{self.path} has the columns {', '.join(columns)}; the row has {', '.join(row)}")
            if key in self.done():
                raise Unusable(f"{self.path} has the cell {key} already: another run writes to the same file")
            text = pd.DataFrame(rows).to_csv(header=not lines, index=False, float_format="%.6g", lineterminator="\n")
            file.truncate(sum(len(line.encode()) + 1 for line in lines))
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def _alone(self) -> Iterator[BinaryIO]:
        """The file, while no other run may change it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("ab")
        except OSError as error:
            raise Unusable(f"{self.path} cannot be written: {error}") from error
        with file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def _sound(self) -> list[str]:
        """The lines of the file, the header first, without a torn cell at the end; none where there is no header."""
        if not self.path.exists():
            return []
        *whole, torn = self.path.read_bytes().split(b"\n")
        if not whole:
            begun, header = torn.decode(errors="replace"), f"{self.key[0]},"
            if not (begun.startswith(header) or header.startswith(begun)):
                raise Unusable(f"{self.path} holds something else than results: {begun[:60]!r}")
            return []
        lines = [self._decoded(line, number) for number, line in enumerate(whole, start=1)]
        rest = torn.decode(errors="replace")
        header = _fields(lines[0])
        if absent := [name for name in self.key if name not in header]:
            raise Unusable(f"{self.path} has no column {', '.join(absent)}; its header is {lines[0]!r}")
        if not rest and len(lines) > 1 and len(_fields(lines[-1])) != len(header):
            rest = lines.pop()
        for number, line in enumerate(lines, start=1):
            if len(_fields(line)) != len(header) or line.count('"') % 2:
                raise Unusable(f"{self.path}, line {number}: {len(header)} fields expected, got {line!r}")
        if rest and len(lines) > 1:
            last = self._key_of(header, _fields(lines[-1]))
            if self._may_belong(header, _fields(rest), _fields(lines[-1])):
                while len(lines) > 1 and self._key_of(header, _fields(lines[-1])) == last:
                    lines.pop()
        return lines

    def _decoded(self, line: bytes, number: int) -> str:
        try:
            return line.decode()
        except UnicodeDecodeError:
            raise Unusable(f"{self.path}, line {number}: text expected, got {line!r}") from None

    def _key_of(self, header: list[str], fields: list[str]) -> Key:
        return tuple(_value(fields[header.index(name)]) for name in self.key)

    def _may_belong(self, header: list[str], torn: list[str], fields: list[str]) -> bool:
        """Whether a torn row can be of the same cell as the row before it; its last field may be cut short."""
        places = [header.index(name) for name in self.key]
        return all(
            fields[place].startswith(torn[place]) if place == len(torn) - 1 else fields[place] == torn[place]
            for place in places
            if place < len(torn)
        )


def write_table(results: Path, key: Sequence[str], markdown: Callable[[pd.DataFrame], str]) -> bool:
    """The table beside its results, where there are any."""
    table = Rows(results, key).read()
    if not table.empty:
        results.with_suffix(".md").write_text(markdown(table))
    return not table.empty


def _fields(line: str) -> list[str]:
    return next(csv.reader([line]), [])


def _value(text: str) -> str | int:
    return int(text) if text.removeprefix("-").isdecimal() else text
