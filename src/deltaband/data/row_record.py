"""The record of the training rows: a hash of each row, and a random sample of the rows."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from torch import Tensor

from ..storage.encoding import storable
from .inputs import Inputs


@storable
@dataclass(frozen=True, eq=False)
class SeenRows:
    """The hashes of the rows that a fit has read."""

    hashes: np.ndarray  # (n,) sorted

    def share(self, hashes: np.ndarray) -> float:
        return float(np.isin(hashes, self.hashes).mean())

    @property
    def repeated(self) -> float:
        """The share of the seen rows that equal another seen row."""
        same = self.hashes[1:] == self.hashes[:-1]
        return float((np.append(same, False) | np.append(False, same)).mean())


def share_by_chance(repeated: float, n: int) -> float:
    """Return the share of n new rows that may equal training rows by chance, given the share of repeated ones."""
    return repeated + 4 * math.sqrt(repeated * (1 - repeated) / n)


@storable
@dataclass(frozen=True, eq=False)
class Sample:
    """Rows in random order, in one piece per row format."""

    pieces: tuple[Inputs, ...] = ()
    order: tuple[np.ndarray, ...] = ()  # positions of the rows of each piece in the whole sample

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def between(self, start: int, stop: int) -> Self:
        within = [(place >= start) & (place < stop) for place in self.order]
        pieces = zip(self.pieces, self.order, within, strict=True)
        return type(self)(*zip(*((x[w], place[w] - start) for x, place, w in pieces if w.any()), strict=True))


class RowSample:
    """Up to `size` rows of a stream, drawn uniformly: those with the smallest random keys."""

    def __init__(self, size: int, seed: int | list[int] = 0) -> None:
        self._size = size
        self._rng = np.random.default_rng(seed)
        self._kept: dict[Any, tuple[Inputs, np.ndarray]] = {}  # by row format: the rows, and the key of each
        self._key_limit = np.inf  # keys of rows that can still be among the smallest lie below

    def update(self, x: Inputs, make: Callable[[np.ndarray], Inputs] | None = None) -> None:
        """Take in the rows of `x`, or what `make` makes of those that are kept, given their numbers."""
        keys = self._rng.random(len(x))
        if make is None:
            self._add(x, keys)
        elif len(few := np.flatnonzero(keys < self._key_limit)):
            self._add(make(few), keys[few])

    def resume(self, sample: Sample, n_rows: int) -> None:
        """Continue from a sample of `n_rows` rows, whose keys, the smallest of that many, are drawn again."""
        gaps = np.cumsum(self._rng.exponential(size=len(sample)))
        keys = gaps / (gaps[-1:].sum() + self._rng.gamma(n_rows + 1 - len(sample)))
        if 0 < len(sample) < n_rows:
            self._key_limit = float(np.nextafter(keys[-1], np.inf))
        for x, order in zip(sample.pieces, sample.order, strict=True):
            self._kept[x.row_format] = (x, keys[order])

    def state(self) -> dict[str, Any]:
        generator, kept = self._rng.bit_generator.state, tuple(self._kept.values())
        return {"size": self._size, "generator": generator, "kept": kept, "limit": self._key_limit}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        made = cls(state["size"])
        made._rng.bit_generator.state = state["generator"]
        made._kept = {x.row_format: (x, keys) for x, keys in state["kept"]}
        made._key_limit = state["limit"]
        return made

    def merge(self, other: Self) -> None:
        self._cut(min(self._key_limit, other._key_limit))
        for x, keys in other._kept.values():
            self._add(x, keys)

    def _add(self, x: Inputs, keys: np.ndarray) -> None:
        few = np.flatnonzero(keys < self._key_limit)  # most rows of a long stream are not
        if len(few) == 0:
            return
        x, keys = (x, keys) if len(few) == len(x) else (x[few], keys[few])
        if x.row_format in self._kept:
            mine, of_mine = self._kept[x.row_format]
            x, keys = Inputs.cat([mine, x]), np.concatenate([of_mine, keys])
        self._kept[x.row_format] = (x, keys)
        every = np.concatenate([keys for _, keys in self._kept.values()])
        if len(every) > self._size:
            self._cut(float(np.partition(every, self._size)[self._size]))

    def _cut(self, key_limit: float) -> None:
        self._key_limit = key_limit
        kept = [(x, keys, keys < key_limit) for x, keys in self._kept.values()]
        self._kept = {x.row_format: (x[w], keys[w]) for x, keys, w in kept if w.any()}

    def rows(self) -> Sample:
        """Return the rows drawn so far, in the order of their keys."""
        every = np.sort(np.concatenate([np.zeros(0), *(keys for _, keys in self._kept.values())]))
        pieces = [(x[np.argsort(keys)], np.searchsorted(every, np.sort(keys))) for x, keys in self._kept.values()]
        return Sample(*zip(*pieces, strict=True))


@dataclass(eq=False)
class RowRecord:
    """The hashes and a sample of the training rows, updated as they stream by."""

    sample: RowSample
    parts: list[np.ndarray] = field(default_factory=list)  # of the hashes

    @classmethod
    def from_seen(cls, seen: SeenRows, sample: Sample, sample_size: int) -> Self:
        """Continue the record of a fit, of which the hashes and a sample of its rows are left."""
        drawn = RowSample(sample_size, seed=int(seen.hashes.sum(dtype=np.uint64)))
        drawn.resume(sample, len(seen.hashes))
        return cls(drawn, [seen.hashes])

    def state(self) -> dict[str, Any]:
        return {"hashes": self.hashes(), "sample": self.sample.state()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        return cls(RowSample.from_state(state["sample"]), [state["hashes"]])

    def update(self, x: Inputs, y: Tensor) -> None:
        self.parts.append(pair_hashes(x, y))
        self.sample.update(x)

    def merge(self, other: Self) -> None:
        self.parts += other.parts
        self.sample.merge(other.sample)

    def hashes(self) -> np.ndarray:  # (n,), in the order in which the rows came
        return np.concatenate([np.zeros(0, dtype=np.uint64), *self.parts])

    def seen(self) -> SeenRows:
        return SeenRows(np.sort(self.hashes()))


def pair_hashes(x: Inputs, y: Tensor) -> np.ndarray:  # (b,) uint64
    """Return the hash of each row, inputs and targets together; in float32, as the precision of targets may differ."""
    hashes = row_hashes(y.float())
    for tensor in x.tensors:
        hashes = row_hashes(tensor) * np.uint64(0x9E3779B97F4A7C15) + hashes * np.uint64(0xD1B54A32D192ED03)
    return hashes


def row_hashes(x: Tensor) -> np.ndarray:  # (b,) uint64
    """Return the hash of each row, in whole-number arithmetic: no rounding depends on how rows are batched."""
    raw = x.cpu().contiguous().numpy().reshape(len(x), -1).view(np.uint8)
    words = np.pad(raw, ((0, 0), (0, -raw.shape[1] % 4))).view(np.uint32).astype(np.uint64)
    weights = np.random.default_rng(0).integers(1, 2**63, words.shape[1], dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    return (words * weights).sum(axis=1, dtype=np.uint64)
