"""Rows of a fit: which columns are for what, and their numbers, read and checked once and stored."""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Self

import numpy as np
import torch
from torch import Tensor

from .output import Refusal, Usage, progress_bar, say
from .tables import BATCH_ROWS, Table, group_values, to_numbers


@dataclass(frozen=True)
class Columns:
    """The columns of a table that a fit takes."""

    features: list[str]
    targets: list[str]
    weight: str | None = None
    clusters: str | None = None

    @classmethod
    def of(
        cls,
        table: Table,
        targets: Sequence[str],
        features: Sequence[str] | None,
        exclude: Sequence[str] | None = None,
        weight: str | None = None,
        clusters: str | None = None,
    ) -> Self:
        """Return the columns that options name; features are all others unless they are named."""
        uses = {"--target": table.select(targets), "--exclude": table.select(exclude or [])}
        uses |= {option: table.select([name]) for option, name in _beside(weight, clusters) if name is not None}
        taken: dict[str, str] = {}
        for option, names in uses.items():
            for name in names:
                if name in taken:
                    raise Usage(f"column {name!r} cannot be for {taken[name]} and {option} at once")
                taken[name] = option
        index = [] if features else [name for name in table.index if name not in taken]
        for name in index:
            say(f"{table.path}: column {name!r} is the index of a data frame, and not a feature")
        named = features or [name for name in table.names if name not in index]
        chosen = [name for name in table.select(named) if taken.get(name) != "--exclude"]
        if features and (both := next((name for name in chosen if name in taken), None)):
            raise Usage(f"column {both!r} cannot be both a feature and for {taken[both]}")
        chosen = [name for name in chosen if name not in taken]
        if not chosen:
            raise Refusal(f"{table.path} has no columns for features: all are for {' and '.join(uses)}")
        return cls(chosen, uses["--target"], weight, clusters)

    @property
    def extras(self) -> list[str]:
        """The names that a batch has its weights and clusters under."""
        return [name for name, column in (("sample_weight", self.weight), ("clusters", self.clusters)) if column]

    def read(self, table: Table, dtype: torch.dtype, why: str = "") -> Iterator[np.ndarray]:
        """Yield the rows as checked numbers: features, targets, weights, and numbers that stand for clusters."""
        numbers = [*self.features, *self.targets, *([self.weight] if self.weight else [])]
        known: dict[Any, int] = {}
        heaviest = 0.0
        names = table.select([*numbers, *([self.clusters] if self.clusters else [])], why)
        for n_before, rows in table.batches(names, f"checking {table.path.name}"):
            advice = "; --exclude leaves columns out"
            values = to_numbers(rows, numbers, table.path, n_before, dtype=dtype, otherwise=advice)
            if self.weight and (bad := values[:, -1] < 0).any():
                row = n_before + int(bad.argmax()) + 1
                raise Refusal(f"{table.path}: column {self.weight!r} holds a negative weight in row {row}")
            heaviest = max(heaviest, values[:, -1].max())
            if self.clusters:
                labels = group_values(rows.column(self.clusters))
                if None in labels:
                    row = n_before + labels.index(None) + 1
                    raise Refusal(
                        f"{table.path}: column {self.clusters!r} holds no label in row {row}; give each row one"
                    )
                values = np.column_stack([values, [known.setdefault(label, len(known)) for label in labels]])
            yield values
        if self.weight and heaviest == 0:
            raise Refusal(f"{table.path}: all rows of column {self.weight!r} have weight zero")


@dataclass(frozen=True)
class StoredRows:
    """Rows as numbers: batches `(x, y)`, or `(x, y, weights and clusters)`, that can be iterated again and again."""

    file: IO[bytes]  # (n, all columns) float64
    columns: Columns
    dtype: torch.dtype  # of the inputs
    selected: np.ndarray  # (n,) bool
    extras: Sequence[str] = ()  # those of the columns' that batches have
    progress_label: str | None = None

    @property
    def n_rows(self) -> int:
        return int(self.selected.sum())

    def values(self) -> Iterator[np.ndarray]:
        """Yield the selected rows with all their columns."""
        width = len(self.columns.features) + len(self.columns.targets) + len(self.columns.extras)
        with progress_bar(self.progress_label, self.n_rows) as bar:
            for start in range(0, len(self.selected), BATCH_ROWS):
                self.file.seek(start * width * 8)
                values = np.frombuffer(self.file.read(BATCH_ROWS * width * 8)).reshape(-1, width)
                chosen = values[self.selected[start : start + BATCH_ROWS]]
                if len(chosen):
                    yield chosen
                bar.update(len(chosen))

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        k, m = len(self.columns.features), len(self.columns.targets)
        for values in self.values():
            x, y, others = np.split(values, [k, k + m], axis=1)
            extras = dict(zip(self.columns.extras, others.T, strict=True))
            if "clusters" in extras:
                extras["clusters"] = extras["clusters"].astype(np.int64)
            batch: tuple[Tensor, np.ndarray] = torch.from_numpy(x).to(self.dtype), y
            yield (*batch, {name: extras[name] for name in self.extras}) if self.extras else batch


def as_stored(batch: Any) -> Any:
    """Return a batch of `StoredRows`, which is what a fit takes: its `batch` function."""
    return batch


def store(file: IO[bytes], columns: Columns, batches: Iterable[np.ndarray], dtype: torch.dtype) -> StoredRows:
    """Write all rows to a file."""
    n = 0
    for values in batches:
        try:
            file.write(values.tobytes())
        except OSError as error:
            raise Refusal(f"rows could not be stored in {tempfile.gettempdir()} (see TMPDIR): {error}") from error
        n += len(values)
    return StoredRows(file, columns, dtype, np.ones(n, dtype=bool))


def _beside(weight: str | None, clusters: str | None) -> list[tuple[str, str | None]]:
    return [("--sample-weight", weight), ("--clusters", clusters)]
