"""What a band remembers of its training rows: a hash of each, and the leverages of some."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from .inputs import Inputs


class SeenRows(NamedTuple):
    """Which rows were trained on."""

    hashes: np.ndarray  # sorted
    repeated: float  # the share of training rows that another training row is equal to

    def share(self, hashes: np.ndarray) -> float:
        """How many of these rows were trained on."""
        return float(np.isin(hashes, self.hashes).mean())


class RowSample:
    """Up to `size` rows of a stream, drawn uniformly from those that have the shape of the first."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self._size = size
        self._rng = np.random.default_rng(seed)
        self._keys = np.zeros(0)
        self._rows: Inputs | None = None

    def update(self, x: Inputs) -> None:
        keys = self._rng.random(len(x))
        if self._rows is None:
            self._rows, self._keys = x, keys
        elif self._rows.kind == x.kind:
            if len(self._keys) == self._size:  # most rows of a long stream are not among the smallest keys any more
                x, keys = x[keys < self._keys.max()], keys[keys < self._keys.max()]
            self._rows, self._keys = Inputs.cat([self._rows, x]), np.concatenate([self._keys, keys])
        if len(self._keys) > self._size:
            smallest = np.argpartition(self._keys, self._size)[: self._size]
            self._rows, self._keys = self._rows[smallest], self._keys[smallest]

    def rows(self) -> Inputs | None:
        """In random order; None if none came."""
        return None if self._rows is None else self._rows[np.argsort(self._keys)]


class RowTrace:
    """Takes in the training rows as they stream by."""

    def __init__(self, sample_size: int) -> None:
        self._hashes: list[np.ndarray] = []
        self._sample = RowSample(sample_size)

    def update(self, x: Inputs, y: Tensor) -> None:
        self._hashes.append(pair_hashes(x, y))
        self._sample.update(x)

    def seen(self) -> SeenRows:
        hashes, counts = np.unique(np.concatenate(self._hashes), return_counts=True)
        return SeenRows(hashes, float(counts[counts > 1].sum() / counts.sum()))

    def sample(self) -> Inputs:
        """Some of the rows, drawn uniformly from those that have the shape of the first, in random order."""
        rows = self._sample.rows()
        assert rows is not None
        return rows


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
