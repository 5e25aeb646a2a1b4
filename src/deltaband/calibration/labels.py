"""Split-conformal sets of labels: a threshold for scores of classes, from those of the true ones of calibration rows.

With the probabilities π of the network and u uniform in (0, 1):

    LAC: 1 − π_c,    APS: Σ_{π_k > π_c} π_k + u·π_c.

The set of a row holds the classes whose score is at most the ⌈(n+1)·level⌉-th smallest of the true classes' scores: of
all calibration rows, or class by class of those of the class. For a row exchangeable with them it holds the true class
with probability ≥ level, with `by_class` given that class.

Where a row may have several labels, its score is the largest of those that it has, so that the set holds all of them
with probability ≥ level; with `by_class` each label of a row has its own, and the set holds it with that probability.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ..data.batches import Batches
from ..data.labels import check_labels, check_several_labels
from ..data.row_record import pair_hashes, share_by_chance
from ..fitting.classes import Classification
from ..fitting.fit import Fit, check_outputs
from ..fitting.spec import FitSpec
from ..storage.encoding import storable
from .calibrate import EXCESS_SEEN_SHARE
from .quantiles import conformal_quantiles, rows_needed

DIGITS = 3  # of logits, after the point, that a row is known by


def probabilities(z: Tensor, several: bool = False) -> np.ndarray:  # (b, M) -> (b, C)
    """Return those of logits; a single one is that of class 1. Each stands alone where a row has several labels."""
    z = z.detach().cpu().double()
    if several:
        return z.sigmoid().numpy()
    z = torch.cat([torch.zeros_like(z), z], dim=1) if z.shape[1] == 1 else z
    return z.softmax(dim=1).numpy()


def uniforms(z: Tensor, seed: int) -> np.ndarray:  # (n, M) -> (n,)
    """Return a random number for each row that is the same in whatever batch it comes: a digest of its logits."""
    rows = np.round(z.detach().cpu().double().numpy(), DIGITS) + 0.0
    start = hashlib.blake2b(str(seed).encode(), digest_size=8)
    found = np.empty(len(rows))
    for i, row in enumerate(rows):
        digest = start.copy()
        digest.update(row.tobytes())
        found[i] = (int.from_bytes(digest.digest(), "big") + 0.5) / 2**64
    return found


def scores(method: str, p: np.ndarray, u: np.ndarray) -> np.ndarray:  # (n, C), (n,) -> (n, C)
    """Return how little each class conforms."""
    if method == "lac":
        return 1 - p
    order = np.argsort(-p, axis=1, kind="stable")
    ordered = np.take_along_axis(p, order, axis=1)
    found = np.empty_like(p)
    before = np.cumsum(ordered, axis=1) - ordered
    np.put_along_axis(found, order, before + u[:, None] * ordered, axis=1)
    return found


@storable
@dataclass(frozen=True, eq=False)
class LabelCalibration:
    """The scores of the true classes of calibration rows."""

    method: str
    by_class: bool
    seed: int
    scores: np.ndarray  # (n,) sorted within each class
    labels: np.ndarray  # (n,)
    n_classes: int
    seen_share: float  # of the calibration rows that were training rows
    repeated_share: float  # of the training rows that equal another
    several: bool = False  # whether a row may have several labels

    @classmethod
    def fit(cls, spec: FitSpec, fits: Sequence[Fit], batches: Batches, method: str, by_class: bool, seed: int) -> Self:
        """Return the scores of the rows of `batches`."""
        network = spec.network()
        spec.check_weights(network, fits[0])
        n_returned, task = fits[0].n_returned, spec.task
        assert isinstance(task, Classification)
        several = task.several
        found, labels, hashes = [], [], []
        for x, targets, first in batches.chunks(partial(_rows_at_once, network)):
            x.check_finite(first)
            y = (check_several_labels if several else check_labels)(targets, n_returned).numpy()
            z = network.outputs(x)
            check_outputs(z, first)
            rows, label = np.nonzero(y) if several else (np.arange(len(y)), y)
            score = scores(method, probabilities(z, several), uniforms(z, seed))[rows, label]
            if several and not by_class:
                largest, label = np.zeros(len(y)), np.zeros(len(y), dtype=int)  # no label is none too little likely
                np.maximum.at(largest, rows, score)
                score = largest
            found.append(score)
            labels.append(label)
            hashes.append(pair_hashes(network.prepare(x), targets))
        if not found:
            raise ValueError("the calibration data are empty (a generator can be read only once)")
        score, label = np.concatenate(found), np.concatenate(labels)
        order, seen = np.lexsort([score, label]), fits[0].seen
        about = (task.n_labels(n_returned), seen.share(np.concatenate(hashes)), seen.repeated, several)
        return cls(method, by_class, seed, score[order], label[order], *about)

    @property
    def n_rows(self) -> int:
        return len(self.scores)

    @property
    def counts(self) -> np.ndarray:  # (C,)
        """How many rows each class has."""
        return np.bincount(self.labels, minlength=self.n_classes)

    def thresholds(self, levels: tuple[float, ...]) -> np.ndarray:  # (C, levels)
        """Return the largest score of each class that is in a set."""
        if not self.by_class:
            return np.tile(conformal_quantiles(np.sort(self.scores), levels), (self.n_classes, 1))
        needed, counts = max(map(rows_needed, levels)), self.counts
        if (few := np.flatnonzero(counts < needed)).size:
            raise ValueError(
                f"class {few[0]} has {counts[few[0]]} calibration rows, too few for level {max(levels):g} by class: "
                f"it takes at least {needed} of each; calibrate on more rows, or with by_class=False"
            )
        return np.stack([conformal_quantiles(self.scores[self.labels == c], levels) for c in range(self.n_classes)])

    def sets(self, z: Tensor, levels: tuple[float, ...], allow_empty: bool) -> np.ndarray:  # -> (n, C, levels)
        """Return which classes are in the sets of rows with these logits."""
        p = probabilities(z, self.several)
        found = scores(self.method, p, uniforms(z, self.seed))[:, :, None]
        members: np.ndarray = np.asarray(found <= self.thresholds(levels))
        if not allow_empty:
            empty: np.ndarray = np.count_nonzero(members, axis=1) == 0  # (n, levels)
            likely: np.ndarray = np.arange(p.shape[1]) == p.argmax(axis=1)[:, None]
            members |= likely[:, :, None] & empty[:, None, :]
        return members

    def warnings(self) -> list[str]:
        if self.seen_share <= share_by_chance(self.repeated_share, self.n_rows) + EXCESS_SEEN_SHARE:
            return []
        what = f"{self.seen_share:.0%} of the calibration rows were training rows"
        return [f"{what}: sets will be too small; calibrate on rows that the network was not trained on"]

    def check_storable(self) -> None:
        """Raise if a file cannot hold this calibration: any can."""

    def lines(self) -> list[tuple[str, str]]:
        """Return lines for the summary."""
        smallest = int(self.counts.min()) if self.by_class else self.n_rows
        what = "labels" if self.several and self.by_class else "rows"
        rows = f"{self.n_rows:,} {what}" + (f", at least {smallest:,} of each class" if self.by_class else "")
        how = f"{self.method.upper()}{', class by class' if self.by_class else ''}"
        return [("label sets", f"{how}, calibrated on {rows}: levels up to {smallest / (smallest + 1):.5g}")]


def _rows_at_once(network: Any, x: Any) -> int:
    return int(network.chunk_rows(x))
