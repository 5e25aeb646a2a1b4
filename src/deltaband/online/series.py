"""The state of a series: its streams of scores, and its predictions that wait for their targets."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..storage.encoding import storable
from .trackers import Tracker


@storable
@dataclass
class StreamState:
    """A stream of scores, of one output or of all, and what has become of its predictions."""

    tracker: Tracker
    n_waiting: int = 0
    n_observed: int = 0
    n_missed: int = 0
    n_infinite: int = 0  # predictions
    late: int = 0  # scores that were not known yet when a prediction was made, at most
    largest: float = 0.0  # score

    def predicted(self, threshold: float) -> None:
        self.late = max(self.late, self.n_waiting)
        self.n_waiting += 1
        self.n_infinite += threshold == math.inf

    def observed(self, score: float, threshold: float) -> None:
        """Take in a score; NaN if it will never be known."""
        self.n_waiting -= 1
        if not math.isnan(score):
            missed = score > threshold
            self.tracker.update(score, missed)
            self.n_observed, self.n_missed = self.n_observed + 1, self.n_missed + missed
            self.largest = max(self.largest, score)

    @property
    def bound(self) -> float:
        return self.tracker.bound(self.n_observed, self.late, self.largest) if self.n_observed else math.nan


@storable
@dataclass
class WaitingRow:
    """A prediction, some of whose targets have not come yet."""

    hash: int  # of the inputs
    centre: np.ndarray  # (m,)
    scale: np.ndarray  # (m,)
    thresholds: np.ndarray  # (streams,)
    waits: np.ndarray  # (streams,) bool


@storable
@dataclass
class SeriesState:
    """One series: its streams, and its predictions that wait for targets, in order."""

    streams: list[StreamState]
    waiting: list[WaitingRow] = field(default_factory=list)

    @property
    def thresholds(self) -> np.ndarray:  # (streams,)
        return np.array([each.tracker.threshold() for each in self.streams])

    def predicted(self, hash_: int, centre: np.ndarray, scale: np.ndarray, thresholds: np.ndarray) -> None:
        for each, threshold in zip(self.streams, thresholds.tolist(), strict=True):
            each.predicted(threshold)
        self.waiting.append(WaitingRow(hash_, centre, scale, thresholds, np.ones(len(thresholds), dtype=bool)))

    def observed(self, row: WaitingRow, stream: int, score: float) -> None:
        row.waits[stream] = False
        self.streams[stream].observed(score, float(row.thresholds[stream]))

    def tidy(self) -> None:
        """Forget rows that have all their targets; these come in order, and so are the first."""
        done = next((i for i, row in enumerate(self.waiting) if row.waits.any()), len(self.waiting))
        del self.waiting[:done]

    def first_waiting(self, streams: Sequence[int]) -> Iterator[WaitingRow]:
        return (row for row in self.waiting if any(row.waits[stream] for stream in streams))


@storable
@dataclass
class AwaitedTargets:
    """Which rows wait for targets that come in any order, by a hash of their inputs; equal rows are counted."""

    counts: dict[int, list[int]] = field(default_factory=dict)  # of each stream

    def expect(self, hashes: Sequence[int], missing: np.ndarray) -> None:
        """Remember the streams of rows that have no target yet, (n, streams)."""
        for hash_, waits in zip(hashes, missing.astype(int).tolist(), strict=True):
            if any(waits):
                before = self.counts.get(hash_, [0] * len(waits))
                self.counts[hash_] = [a + b for a, b in zip(before, waits, strict=True)]

    def take(self, hashes: Sequence[int], known: np.ndarray) -> None:
        """Forget the streams of rows whose targets have come, (n, streams), or raise and change nothing."""
        left = {hash_: self.counts.get(hash_, [0] * known.shape[1]) for hash_ in hashes}
        for i, (hash_, came) in enumerate(zip(hashes, known.astype(int).tolist(), strict=True)):
            left[hash_] = [a - b for a, b in zip(left[hash_], came, strict=True)]
            if min(left[hash_]) < 0:
                advice = "give its inputs to update first, without the target, and observe it once"
                raise ValueError(f"row {i} of x waits for no target: {advice}")
        self.counts = {hash_: n for hash_, n in (self.counts | left).items() if any(n)}
