"""What a band remembers of its training rows: a hash of each, and the leverages of some."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..storage.encoding import storable
from .inputs import Inputs


@storable
class SeenRows(NamedTuple):
    """Which rows were trained on."""

    hashes: np.ndarray  # (n,) sorted

    def share(self, hashes: np.ndarray) -> float:
        """How many of these rows were trained on."""
        return float(np.isin(hashes, self.hashes).mean())

    @property
    def repeated(self) -> float:
        """The share of training rows that another training row is equal to."""
        same = self.hashes[1:] == self.hashes[:-1]
        return float((np.append(same, False) | np.append(False, same)).mean())


def share_by_chance(repeated: float, n: int) -> float:
    """How many of n new rows may equal training rows where so many training rows equal another."""
    return repeated + 4 * math.sqrt(repeated * (1 - repeated) / n)


@storable
@dataclass(frozen=True)
class Sample:
    """Rows in random order, those that can be put together in one piece each."""

    pieces: tuple[Inputs, ...] = ()
    order: tuple[np.ndarray, ...] = ()  # of the rows of each piece, among all

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def between(self, start: int, stop: int) -> Sample:
        """The rows from one place in the order to another."""
        within = [(place >= start) & (place < stop) for place in self.order]
        chosen = [(x[w], place[w]) for x, place, w in zip(self.pieces, self.order, within, strict=True) if w.any()]
        return Sample(tuple(x for x, _ in chosen), tuple(place - start for _, place in chosen))


class RowSample:
    """Up to `size` rows of a stream, drawn uniformly."""

    def __init__(self, size: int, seed: int | list[int] = 0) -> None:
        self._size = size
        self._rng = np.random.default_rng(seed)
        self._kept: dict[Any, tuple[Inputs, np.ndarray]] = {}  # by kind: the rows, and a key of each
        self._limit = np.inf  # above the keys of all rows that can still be among the smallest

    def update(self, x: Inputs) -> None:
        keys = self._rng.random(len(x))
        few = np.flatnonzero(keys < self._limit)  # most rows of a long stream are not
        if len(few) == 0:
            return
        self._keep(*((x, keys) if len(few) == len(x) else (x[few], keys[few])))

    def resume(self, sample: Sample, n_rows: int) -> None:
        """Go on where a sample of n rows ended: their keys are the smallest of n, drawn anew."""
        gaps = np.cumsum(self._rng.exponential(size=len(sample)))
        keys = gaps / (gaps[-1:].sum() + self._rng.gamma(n_rows + 1 - len(sample)))
        if 0 < len(sample) < n_rows:
            self._limit = float(np.nextafter(keys[-1], np.inf))
        for x, order in zip(sample.pieces, sample.order, strict=True):
            self._kept[x.kind] = (x, keys[order])

    def state(self) -> dict[str, Any]:
        return {
            "size": self._size,
            "generator": self._rng.bit_generator.state,
            "kept": tuple(self._kept.values()),
            "limit": self._limit,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> RowSample:
        made = cls(state["size"])
        made._rng.bit_generator.state = state["generator"]
        made._kept = {x.kind: (x, keys) for x, keys in state["kept"]}
        made._limit = state["limit"]
        return made

    def merge(self, other: RowSample) -> None:
        self._limit = min(self._limit, other._limit)
        self._cut()
        for x, keys in other._kept.values():
            if len(few := np.flatnonzero(keys < self._limit)):
                self._keep(x[few], keys[few])

    def _keep(self, x: Inputs, keys: np.ndarray) -> None:
        if x.kind in self._kept:
            mine, of_mine = self._kept[x.kind]
            x, keys = Inputs.cat([mine, x]), np.concatenate([of_mine, keys])
        self._kept[x.kind] = (x, keys)
        every = np.concatenate([keys for _, keys in self._kept.values()])
        if len(every) > self._size:
            self._limit = float(np.partition(every, self._size)[self._size])
            self._cut()

    def _cut(self) -> None:
        kept = {kind: (x, keys, keys < self._limit) for kind, (x, keys) in self._kept.items()}
        self._kept = {kind: (x[w], keys[w]) for kind, (x, keys, w) in kept.items() if w.any()}

    def rows(self) -> Sample:
        if not self._kept:
            return Sample()
        every = np.sort(np.concatenate([keys for _, keys in self._kept.values()]))
        places = [np.searchsorted(every, keys) for _, keys in self._kept.values()]
        sorted_ = [(x[np.argsort(p)], np.sort(p)) for (x, _), p in zip(self._kept.values(), places, strict=True)]
        return Sample(tuple(x for x, _ in sorted_), tuple(place for _, place in sorted_))


class RowTrace:
    """Takes in the training rows as they stream by."""

    def __init__(self, sample_size: int, seed: int = 0) -> None:
        self._hashes: list[np.ndarray] = []
        self._sample = RowSample(sample_size, seed)

    @classmethod
    def resumed(cls, seen: SeenRows, sample: Sample, sample_size: int) -> RowTrace:
        """Of rows that were seen before, some of which are at hand."""
        trace = cls(sample_size, seed=int(seen.hashes.sum(dtype=np.uint64)))
        trace._hashes.append(seen.hashes)
        trace._sample.resume(sample, len(seen.hashes))
        return trace

    def state(self) -> dict[str, Any]:
        return {"hashes": self.hashes(), "sample": self._sample.state()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> RowTrace:
        made = cls(0)
        made._hashes, made._sample = [state["hashes"]], RowSample.from_state(state["sample"])
        return made

    def hashes(self) -> np.ndarray:  # (n,)
        """Of all rows, in the order they came in."""
        return np.concatenate([np.zeros(0, dtype=np.uint64), *self._hashes])

    def merge(self, other: RowTrace) -> None:
        self._hashes += other._hashes
        self._sample.merge(other._sample)

    def update(self, x: Inputs, y: Tensor) -> None:
        self._hashes.append(pair_hashes(x, y))
        self._sample.update(x)

    def seen(self) -> SeenRows:
        return SeenRows(np.sort(self.hashes()))

    def sample(self) -> Sample:
        """Some of the rows, drawn uniformly."""
        return self._sample.rows()


def pair_hashes(x: Inputs, y: Tensor) -> np.ndarray:  # (b,) uint64
    """Of inputs and targets together; the targets in float32, so that their precision makes no difference."""
    hashes = row_hashes(y.float())
    for tensor in x.tensors:
        hashes = row_hashes(tensor) * np.uint64(0x9E3779B97F4A7C15) + hashes * np.uint64(0xD1B54A32D192ED03)
    return hashes


def row_hashes(x: Tensor) -> np.ndarray:  # (b,) uint64
    """Equal rows have equal hashes; whole-number arithmetic, so that no rounding depends on how rows are batched."""
    raw = x.cpu().contiguous().numpy().reshape(len(x), -1).view(np.uint8)
    padded = np.zeros((len(raw), -(-raw.shape[1] // 4) * 4), dtype=np.uint8)
    padded[:, : raw.shape[1]] = raw
    words = padded.view(np.uint32).astype(np.uint64)
    weights = np.random.default_rng(0).integers(1, 2**63, words.shape[1], dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    return (words * weights).sum(axis=1, dtype=np.uint64)
