"""The rows of a table as batches of inputs and targets, again and again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .errors import Refusal
from .tables import Table, numbers
from .telling import bar


@dataclass(frozen=True)
class Part:
    """The rows where `numpy.random.default_rng(seed).random(n) < fraction`, or all others: anyone can draw them."""

    fraction: float
    seed: int
    held_out: bool


@dataclass(frozen=True)
class Pairs:
    """Re-iterable batches `(x, y)` of a file."""

    table: Table
    features: Sequence[str]
    targets: Sequence[str]
    dtype: torch.dtype  # of the network
    scale: tuple[np.ndarray, np.ndarray] | None = None  # mean and standard deviation that targets were scaled with
    part: Part | None = None
    n_rows: int | None = None  # of this part; known after `checked`
    doing: str | None = None  # for a progress bar

    def __iter__(self) -> Iterator[tuple[Tensor, np.ndarray]]:
        with bar(self.doing, self.n_rows) as progress:
            for x, y in self._read():
                if self.scale is not None:
                    y = (y - self.scale[0]) / self.scale[1]
                yield torch.from_numpy(x).to(self.dtype), y
                progress.update(len(x))

    def _read(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All rows of the part, checked."""
        rng = np.random.default_rng(self.part.seed) if self.part is not None else None
        done, k = 0, len(self.features)
        for rows in self.table.batches([*self.features, *self.targets]):
            values = numbers(rows, [*self.features, *self.targets], self.table.path, done, dtype=self.dtype)
            done += len(rows)
            if rng is not None and self.part is not None:
                values = values[(rng.random(len(rows)) < self.part.fraction) == self.part.held_out]
            if len(values):
                yield values[:, :k], values[:, k:]

    def first(self) -> tuple[Tensor, np.ndarray]:
        """The first batch of the file, whatever part this is of it."""
        for pair in replace(self, part=None, doing=None):
            return pair
        raise Refusal(f"{self.table.path} has no rows")

    def checked(self) -> Pairs:
        """With the number of rows, every cell having been looked at: a long fit must not end at a bad one."""
        with bar(f"checking {self.table.path.name}", self.table.n_rows) as progress:
            n = 0
            for x, _ in self._read():
                n += len(x)
                progress.update(len(x))
        if n == 0:
            some = "" if self.part is None else f" left for {'calibration' if self.part.held_out else 'the fit'}"
            raise Refusal(f"{self.table.path} has no rows{some}")
        return replace(self, n_rows=n)
