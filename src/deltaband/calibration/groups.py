"""Groups of rows, each covered at the level: labels, of which each row has one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, Self

import numpy as np

from ..data.groups import Label, read_labels
from ..storage.encoding import storable
from .quantiles import DEFAULT_LEVEL, FromGiven, Given, conformal_quantiles, rows_needed

UNKNOWN = -1  # the code of a group without calibration rows
MAX_NAMED = 5  # groups that a message names


@storable
@dataclass(frozen=True, eq=False)
class ByGroup(FromGiven):
    """The quantile of the row's own group (Mondrian): P(covered | group) ≥ level for each group of enough rows.

    Given all labels, the rows of a group are exchangeable, and the scale is chosen on all rows alike. A group of fewer
    than `rows_needed(level)` rows is too small for a level. Its rows get the larger of two scores:

    - the quantile of all groups together that have at most so many rows: P(covered | the group is too small) ≥ level,
      which is an average over such groups. Where they are not enough together it is the quantile of all rows, which
      promises nothing to small groups in particular;
    - the largest of the group's own n_g scores: P(covered | group) ≥ n_g/(n_g + 1).
    """

    labels: tuple[Label, ...]
    code: np.ndarray  # (n,) the group of each calibration row, as an index into the labels

    why_infinite: ClassVar = ""

    @classmethod
    def of(cls, labels: Sequence[Label]) -> Self:
        known = {label: code for code, label in enumerate(dict.fromkeys(labels))}
        return cls(tuple(known), np.array([known[label] for label in labels], dtype=np.int64))

    @cached_property
    def counts(self) -> np.ndarray:
        return np.bincount(self.code, minlength=len(self.labels))

    def too_small(self, level: float) -> list[int]:
        """Return the groups that are too small for a level, the smallest first."""
        return [int(code) for code in np.argsort(self.counts, kind="stable") if self.counts[code] < rows_needed(level)]

    def pool(self, level: float) -> list[int]:
        """Return the groups whose rows a group that is too small shares its quantile with."""
        needed = rows_needed(level)
        # all n + 1 rows are counted alike only if the new row counts, too: it makes its own group larger by one
        small = np.flatnonzero(self.counts <= needed)
        return list(range(len(self.labels)) if self.counts[small].sum() < needed else small)

    @property
    def lines(self) -> list[tuple[str, str]]:
        smallest, largest = self.counts.min(), self.counts.max()
        rows = f"{smallest:,} rows" if smallest == largest else f"{smallest:,} to {largest:,} rows"
        lines = [("  groups", f"{len(self.labels)} of {rows}: each its own quantile")]
        if small := self.too_small(DEFAULT_LEVEL):
            lines.append(
                (f"  too small for {100 * DEFAULT_LEVEL:g} %", f"{self._named(small)}: {self._shared(DEFAULT_LEVEL)}")
            )
        return lines

    @property
    def warnings(self) -> list[str]:
        return self._too_small(DEFAULT_LEVEL, self.too_small(DEFAULT_LEVEL))

    def notices(self, place: np.ndarray, levels: tuple[float, ...]) -> list[str]:
        """Return a message for groups of these rows that are too small for a level, unless `warnings` named them."""
        here, said = np.unique(place), self.too_small(DEFAULT_LEVEL)
        level = max(levels)
        return self._too_small(level, [code for code in self.too_small(level) if code in here and code not in said])

    def _too_small(self, level: float, groups: list[int]) -> list[str]:
        if not groups:
            return []
        what = f"too few calibration rows for level {level:g}, which takes {rows_needed(level)}: {self._named(groups)}"
        return [f"groups have {what}. For them {self._shared(level)}. Calibrate on more of their rows"]

    def _shared(self, level: float) -> str:
        pool, own = self.pool(level), "and their own largest score counts; it keeps n/(n + 1) in a group of n rows"
        if len(pool) == len(self.labels):
            return f"the larger of the quantile of all rows {own}"
        rows = f"{self.counts[pool].sum():,} rows"
        return f"the larger of one quantile of all small groups, {rows}, {own}, and the level on average over these"

    def _named(self, groups: list[int]) -> str:
        named = [f"{self.labels[code]!r} ({self.counts[code]:,})" for code in groups[:MAX_NAMED]]
        return ", ".join(named) + (f" and {len(groups) - MAX_NAMED:,} more" if len(groups) > MAX_NAMED else "")

    def places(self, n_rows: int, given: Given) -> np.ndarray:  # (rows, 1)
        given.refuse("weights", "the calibration is by groups, not by weights: leave out weights=")
        if given.groups is None:
            raise ValueError("the calibration is by groups: give predict(..., groups=) the group of each row as well")
        labels, known = read_labels(given.groups, n_rows), {label: code for code, label in enumerate(self.labels)}
        place = np.array([known.get(label, UNKNOWN) for label in labels], dtype=np.int64)
        if given.unknown == "error" and (place == UNKNOWN).any():
            row = int(np.argmax(place == UNKNOWN))
            advice = "calibrate with rows of it, or give unknown='pool' for the quantile of all rows"
            raise ValueError(f"group {labels[row]!r} of row {row} was not among the calibration rows: {advice}")
        return place[:, None]

    def own_places(self, n_rows: int) -> np.ndarray:
        return self.code[:, None]

    def arrange(self, scores: np.ndarray) -> list[np.ndarray]:
        """Return the sorted scores of each group."""
        ordered = scores[np.lexsort((scores, self.code))]
        ends = np.append(0, np.cumsum(self.counts))
        return [ordered[start:end] for start, end in pairwise(ends.tolist())]  # np.split takes ten times as long

    def quantiles(self, arranged: list[np.ndarray], place: np.ndarray, levels: tuple[float, ...]) -> np.ndarray:
        codes, which = np.unique(place[:, 0], return_inverse=True)
        return np.column_stack([self._quantiles(arranged, codes, level) for level in levels])[which]

    def _quantiles(self, arranged: list[np.ndarray], codes: np.ndarray, level: float) -> np.ndarray:
        """Return the quantile of each of these groups."""

        def of(*groups: np.ndarray) -> float:
            return float(conformal_quantiles(np.sort(np.concatenate(groups)), (level,))[0])

        needed, unknown = rows_needed(level), codes == UNKNOWN
        small = ~unknown & (self.counts[codes] < needed)
        found = np.empty(len(codes))
        if unknown.any():
            found[unknown] = of(*arranged)
        if small.any():
            shared = of(*(arranged[code] for code in self.pool(level)))
            found[small] = [arranged[code].max(initial=shared) for code in codes[small]]
        large = ~(unknown | small)
        found[large] = [conformal_quantiles(arranged[code], (level,))[0] for code in codes[large]]
        return found

    def take(self, rows: np.ndarray) -> Self:
        return replace(self, code=self.code[rows])
