"""The record of rows: their hashes, a random sample, the ranges of inputs, and moments of targets and outputs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from torch import Tensor

from ..storage.encoding import storable
from .inputs import Inputs, Ranges

CLEARLY_BETTER = 4  # how many times smaller the variance of residuals is in units that fit clearly better
BADLY_SCALED = 2  # how many times more of the variance a line through the outputs may explain than they do themselves
NEGLIGIBLE_GAIN = 0.02  # of the variance, that such a line may add whatever the outputs explain
CONSTANT = 0.01  # of the squares of targets that do not vary, which a network for them may be off
ROUNDING = 64 * np.finfo(np.float64).eps  # of sums of squares

REPEATED_ROWS_SHARE = 0.01  # more rows that came before, beyond what equal rows explain, are not an accident


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


@storable
@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over rows of products of targets y, the network's outputs f, and z, the targets if they were in other units.

    A trained network explains about as much of the variance of y as the best line through its outputs does. One that
    has no weights loaded, or gets inputs or targets in other units than in training, does not.
    """

    sums: np.ndarray  # (9, m): 1, y, f, z, y², f², z², yf, zf

    @classmethod
    def of(cls, y: np.ndarray, f: np.ndarray, z: np.ndarray | None, weight: Any = None) -> Self:  # (b, m) each
        z = np.full_like(y, np.nan) if z is None else z
        with np.errstate(all="ignore"):  # z may be anything
            products = np.stack([np.ones_like(y), y, f, z, y * y, f * f, z * z, y * f, z * f])
            if weight is None:
                return cls(products.sum(axis=1))
            w = np.asarray(weight)  # of weight zero nothing counts, not even NaN
            return cls(np.multiply(products, w, out=np.zeros_like(products), where=w > 0).sum(axis=1))

    @property
    def explained(self) -> np.ndarray:  # (m,)
        """R²: the share of the variance of the targets that the outputs explain; below 0, less than their mean."""
        return self._explained(1)

    @property
    def explained_in_other_units(self) -> np.ndarray:  # (m,)
        return self._explained(3)

    @property
    def correlated(self) -> np.ndarray:  # (m,)
        """The share that the best line through the outputs explains."""
        slope, _ = self.line
        with np.errstate(all="ignore"):  # of targets that are all zero, NaN
            return np.clip(slope * self._covariance / self._variance(1), 0.0, 1.0)

    @property
    def line(self) -> tuple[np.ndarray, np.ndarray]:
        """Slope and intercept of the targets over the outputs."""
        n, y, f, *_ = self.sums
        varies = self.sums[5] - f**2 / n > ROUNDING * self.sums[5]
        slope = np.divide(self._covariance, self._variance(2), out=np.zeros_like(n), where=varies)
        return slope, (y - slope * f) / n

    @property
    def std(self) -> np.ndarray:  # (m,) of the targets
        return np.sqrt(self._variance(1) / self.sums[0])

    @property
    def _covariance(self) -> np.ndarray:
        n, y, f, *_ = self.sums
        return self.sums[7] - y * f / n

    def _variance(self, of: int) -> np.ndarray:
        """Return Σ(v − mean)² of targets, outputs or other targets; of those that rounding hides, 1 % of Σv²."""
        n, square = self.sums[0], self.sums[of + 3]
        found = square - self.sums[of] ** 2 / n
        return np.where(found > ROUNDING * square, found, CONSTANT * square)

    def _explained(self, of: int) -> np.ndarray:
        square, product = self.sums[of + 3], self.sums[7 if of == 1 else 8]
        rss = np.maximum(square - 2 * product + self.sums[5], 0.0)
        with np.errstate(all="ignore"):  # targets that are all zero have no variance: NaN
            return 1 - rss / self._variance(of)

    def misfits(self, least: float = 0.0) -> np.ndarray:  # (m,) bool
        """Return whose outputs explain less than `least`, or far less than a line through them would."""
        gain = self.correlated - self.explained
        badly_scaled = (self.explained * BADLY_SCALED < self.correlated) & (gain > NEGLIGIBLE_GAIN)
        return (self.explained < least) | (badly_scaled & (least >= 0))

    def fit_other_units(self) -> bool:
        """Return whether most outputs fit the targets clearly better if these are in other units."""
        own, other = self.explained, self.explained_in_other_units
        better = (other > 0) & (CLEARLY_BETTER * (1 - other) < 1 - own) & (own < 1 / CLEARLY_BETTER)
        return bool(better.mean() > 0.5)


def rank_correlation(y: np.ndarray, f: np.ndarray) -> np.ndarray:  # (n, m) each -> (m,)
    """Return what the rank correlation of each column with the other's is at most, by a bound of 97.5 %.

    That of ranks has no outliers. Where y is NaN nothing counts.
    """
    there = ~np.isnan(y)
    n = there.sum(axis=0)
    ranks = [np.argsort(np.argsort(np.where(there, each, np.inf), axis=0), axis=0) - (n - 1) / 2 for each in (y, f)]
    with np.errstate(divide="ignore", invalid="ignore"):  # equal ranks; a single row
        found = np.clip(12 * (ranks[0] * ranks[1]).sum(axis=0, where=there) / (n * (n**2 - 1)), -1.0, 1.0)
        return np.tanh(np.arctanh(found) + 1.96 / np.sqrt(np.maximum(n - 3, 1)))


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
    """The hashes, a sample and the ranges of the training rows, updated as they stream by."""

    sample: RowSample
    parts: list[np.ndarray] = field(default_factory=list)  # of the hashes
    ranges: Ranges = field(default_factory=Ranges)

    @classmethod
    def from_seen(cls, seen: SeenRows, ranges: Ranges, sample: Sample, sample_size: int) -> Self:
        """Continue the record of a fit, of which hashes, ranges and a sample of its rows are left."""
        drawn = RowSample(sample_size, seed=int(seen.hashes.sum(dtype=np.uint64)))
        drawn.resume(sample, len(seen.hashes))
        return cls(drawn, [seen.hashes], ranges)

    def state(self) -> dict[str, Any]:
        return {"hashes": self.hashes(), "sample": self.sample.state(), "ranges": self.ranges}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        return cls(RowSample.from_state(state["sample"]), [state["hashes"]], state["ranges"])

    def update(self, x: Inputs, y: Tensor) -> None:
        self.parts.append(pair_hashes(x, y))
        self.sample.update(x)
        self.ranges = self.ranges.merged(Ranges.of(x))

    def merge(self, other: Self) -> None:
        self.parts += other.parts
        self.ranges = self.ranges.merged(other.ranges)
        self.sample.merge(other.sample)

    def hashes(self) -> np.ndarray:  # (n,), in the order in which the rows came
        return np.concatenate([np.zeros(0, dtype=np.uint64), *self.parts])

    def seen(self) -> SeenRows:
        return SeenRows(np.sort(self.hashes()))

    def shares_rows(self, hashes: np.ndarray) -> bool:
        """Return whether more of these rows have come already than there are equal rows anyway."""
        if len(hashes) == 0 or not any(map(len, self.parts)):
            return False
        seen = self.seen()
        return seen.share(hashes) > max(share_by_chance(seen.repeated, len(hashes)), REPEATED_ROWS_SHARE)


def pair_hashes(x: Inputs, y: Tensor) -> np.ndarray:  # (b,) uint64
    """Return the hash of each row, inputs and targets together; in float32, as the precision of targets may differ."""
    hashes = row_hashes(y.float())
    for tensor in x.hashed:
        hashes = row_hashes(tensor) * np.uint64(0x9E3779B97F4A7C15) + hashes * np.uint64(0xD1B54A32D192ED03)
    return hashes


def row_hashes(x: Tensor) -> np.ndarray:  # (b,) uint64
    """Return the hash of each row, in whole-number arithmetic: no rounding depends on how rows are batched."""
    raw = x.cpu().contiguous().numpy().reshape(len(x), -1).view(np.uint8)
    words = np.pad(raw, ((0, 0), (0, -raw.shape[1] % 4))).view(np.uint32).astype(np.uint64)
    weights = np.random.default_rng(0).integers(1, 2**63, words.shape[1], dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    return (words * weights).sum(axis=1, dtype=np.uint64)
