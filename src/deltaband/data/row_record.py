"""The record of the training rows: a hash of each row, and a random sample of the rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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
        """Return the share of these rows that are among the seen ones."""
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

    def between(self, start: int, stop: int) -> Sample:
        """Return the rows at the positions from `start` to before `stop`."""
        within = [(place >= start) & (place < stop) for place in self.order]
        chosen = [(x[w], place[w]) for x, place, w in zip(self.pieces, self.order, within, strict=True) if w.any()]
        return Sample(tuple(x for x, _ in chosen), tuple(place - start for _, place in chosen))


class RowSample:
    """Up to `size` rows of a stream, drawn uniformly: those with the smallest random keys."""

    def __init__(self, size: int, seed: int | list[int] = 0) -> None:
        self._size = size
        self._rng = np.random.default_rng(seed)
        self._kept: dict[Any, tuple[Inputs, np.ndarray]] = {}  # by row format: the rows, and the key of each
        self._key_limit = np.inf  # keys of rows that can still be among the smallest lie below

    def update(self, x: Inputs) -> None:
        """Take in the next rows of the stream."""
        keys = self._rng.random(len(x))
        few = np.flatnonzero(keys < self._key_limit)  # most rows of a long stream are not
        if len(few) == 0:
            return
        self._keep(*((x, keys) if len(few) == len(x) else (x[few], keys[few])))

    def resume(self, sample: Sample, n_rows: int) -> None:
        """Continue from a sample of `n_rows` rows, whose keys, the smallest of that many, are drawn again."""
        gaps = np.cumsum(self._rng.exponential(size=len(sample)))
        keys = gaps / (gaps[-1:].sum() + self._rng.gamma(n_rows + 1 - len(sample)))
        if 0 < len(sample) < n_rows:
            self._key_limit = float(np.nextafter(keys[-1], np.inf))
        for x, order in zip(sample.pieces, sample.order, strict=True):
            self._kept[x.row_format] = (x, keys[order])

    def state(self) -> dict[str, Any]:
        """Return what `from_state` restores the sample from."""
        return {
            "size": self._size,
            "generator": self._rng.bit_generator.state,
            "kept": tuple(self._kept.values()),
            "limit": self._key_limit,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> RowSample:
        """Restore a sample from its `state()`."""
        made = cls(state["size"])
        made._rng.bit_generator.state = state["generator"]
        made._kept = {x.row_format: (x, keys) for x, keys in state["kept"]}
        made._key_limit = state["limit"]
        return made

    def merge(self, other: RowSample) -> None:
        """Become the sample of both streams."""
        self._key_limit = min(self._key_limit, other._key_limit)
        self._cut()
        for x, keys in other._kept.values():
            if len(few := np.flatnonzero(keys < self._key_limit)):
                self._keep(x[few], keys[few])

    def _keep(self, x: Inputs, keys: np.ndarray) -> None:
        if x.row_format in self._kept:
            mine, of_mine = self._kept[x.row_format]
            x, keys = Inputs.cat([mine, x]), np.concatenate([of_mine, keys])
        self._kept[x.row_format] = (x, keys)
        every = np.concatenate([keys for _, keys in self._kept.values()])
        if len(every) > self._size:
            self._key_limit = float(np.partition(every, self._size)[self._size])
            self._cut()

    def _cut(self) -> None:
        kept = {row_format: (x, keys, keys < self._key_limit) for row_format, (x, keys) in self._kept.items()}
        self._kept = {row_format: (x[w], keys[w]) for row_format, (x, keys, w) in kept.items() if w.any()}

    def rows(self) -> Sample:
        """Return the rows drawn so far, in the order of their keys."""
        if not self._kept:
            return Sample()
        every = np.sort(np.concatenate([keys for _, keys in self._kept.values()]))
        places = [np.searchsorted(every, keys) for _, keys in self._kept.values()]
        sorted_ = [(x[np.argsort(p)], np.sort(p)) for (x, _), p in zip(self._kept.values(), places, strict=True)]
        return Sample(tuple(x for x, _ in sorted_), tuple(place for _, place in sorted_))


class RowRecord:
    """The hashes and a sample of the training rows, updated as they stream by."""

    def __init__(self, sample_size: int, seed: int = 0) -> None:
        self._hashes: list[np.ndarray] = []
        self._sample = RowSample(sample_size, seed)

    @classmethod
    def from_seen(cls, seen: SeenRows, sample: Sample, sample_size: int) -> RowRecord:
        """Continue the record of a fit, of which the hashes and a sample of its rows are left."""
        record = cls(sample_size, seed=int(seen.hashes.sum(dtype=np.uint64)))
        record._hashes.append(seen.hashes)
        record._sample.resume(sample, len(seen.hashes))
        return record

    def state(self) -> dict[str, Any]:
        """Return what `from_state` restores the record from."""
        return {"hashes": self.hashes(), "sample": self._sample.state()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> RowRecord:
        """Restore a record from its `state()`."""
        record = cls(0)
        record._hashes, record._sample = [state["hashes"]], RowSample.from_state(state["sample"])
        return record

    def update(self, x: Inputs, y: Tensor) -> None:
        """Take in the next rows."""
        self._hashes.append(pair_hashes(x, y))
        self._sample.update(x)

    def merge(self, other: RowRecord) -> None:
        """Add the rows of another record."""
        self._hashes += other._hashes
        self._sample.merge(other._sample)

    def hashes(self) -> np.ndarray:  # (n,)
        """Return the hashes of all rows, in the order in which they came."""
        return np.concatenate([np.zeros(0, dtype=np.uint64), *self._hashes])

    def seen(self) -> SeenRows:
        """Return the hashes of all rows, sorted."""
        return SeenRows(np.sort(self.hashes()))

    def sample(self) -> Sample:
        """Return some of the rows, drawn uniformly."""
        return self._sample.rows()


def pair_hashes(x: Inputs, y: Tensor) -> np.ndarray:  # (b,) uint64
    """Return the hash of each row, inputs and targets together; in float32, as the precision of targets may differ."""
    hashes = row_hashes(y.float())
    for tensor in x.tensors:
        hashes = row_hashes(tensor) * np.uint64(0x9E3779B97F4A7C15) + hashes * np.uint64(0xD1B54A32D192ED03)
    return hashes


def row_hashes(x: Tensor) -> np.ndarray:  # (b,) uint64
    """Return the hash of each row, in whole-number arithmetic: no rounding depends on how rows are batched."""
    raw = x.cpu().contiguous().numpy().reshape(len(x), -1).view(np.uint8)
    padded = np.zeros((len(raw), -(-raw.shape[1] // 4) * 4), dtype=np.uint8)
    padded[:, : raw.shape[1]] = raw
    words = padded.view(np.uint32).astype(np.uint64)
    weights = np.random.default_rng(0).integers(1, 2**63, words.shape[1], dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    return (words * weights).sum(axis=1, dtype=np.uint64)
