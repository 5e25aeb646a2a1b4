"""Groups that may overlap, as indicators of rows: a quantile that is right in each of them at once.

For indicators φ(x) ∈ {0, 1}^G, the first of which is 1 for all rows, the quantile of a new row is φ(x)·β where β is the
quantile regression of the scores on the indicators over all n + 1 rows, with the new row's score at +∞ (Gibbs, Cherian
and Candès, 2023):

    min over β of  Σᵢ ρ(sᵢ − φᵢ·β) − level·φ(x)·β,    ρ(u) = max(level·u, (level − 1)·u).

A score s is accepted by the regression that has it among its rows if and only if it is at most the smallest φ(x)·β of
a minimum. Where the sum has no minimum nothing finite can be promised.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from ..data.groups import group_names, read_indicators
from ..storage.encoding import storable
from .quantiles import DEFAULT_LEVEL, FromGiven, Given, rows_needed

SLACK = 1e-6  # of the new row's multiplier: it leads to the smallest of several minima, and costs 1e-6·(1 − level)
TOLERANCE = 1e-9
JITTER = 1e-12  # of the largest score: of equal scores the minimum would be degenerate
STEPS_PER_COLUMN = 200


@storable
@dataclass(frozen=True, eq=False)
class Overlapping(FromGiven):
    """P(covered | row in group) ≥ level for each group, and for all rows: indicators (n, G), the first all ones.

    As exactly as n + 1 exchangeable rows allow: the regression treats them alike, and its residuals are above zero for
    a share of 1 − level of the rows of each group at most.
    """

    names: tuple[str, ...] | None  # of the groups, where they have any
    indicators: np.ndarray  # (n, 1 + G)

    why_infinite: ClassVar = "a group of theirs has too few calibration rows for the level to be kept in it"

    @classmethod
    def of(cls, groups: Any, n_rows: int) -> Self:
        return cls(group_names(groups), _with_ones(read_indicators(groups, n_rows)))

    @property
    def counts(self) -> np.ndarray:  # (G,)
        return self.indicators[:, 1:].sum(axis=0).astype(int)

    def _named(self, level: float) -> list[str]:
        """Return the groups that are too small for a level, with their rows."""
        names, needed = self.names or range(len(self.counts)), rows_needed(level)
        return [f"{name} ({n:,})" for name, n in zip(names, self.counts, strict=True) if n < needed]

    @property
    def lines(self) -> list[tuple[str, str]]:
        small, rows = self._named(DEFAULT_LEVEL), f"{self.counts.min():,} to {self.counts.max():,} rows"
        lines = [("  groups", f"{len(self.counts)} that may overlap, of {rows}: a quantile by regression")]
        too_small = f"{', '.join(small)}: their rows get infinite intervals"
        return [*lines, (f"  too small for {100 * DEFAULT_LEVEL:g} %", too_small)] if small else lines

    @property
    def warnings(self) -> list[str]:
        if not (small := self._named(DEFAULT_LEVEL)):
            return []
        needed = f"level {DEFAULT_LEVEL:g}, which takes {rows_needed(DEFAULT_LEVEL)}"
        advice = "their rows will get infinite intervals; leave out these columns, or calibrate on more of their rows"
        return [f"groups have too few calibration rows for {needed}: {', '.join(small)}. {advice.capitalize()}"]

    def notices(self, place: np.ndarray, levels: tuple[float, ...]) -> list[str]:
        return []

    def places(self, n_rows: int, given: Given) -> np.ndarray:  # (rows, 1 + G)
        given.refuse("weights", "the calibration is by groups, not by weights: leave out weights=")
        if given.groups is None:
            raise ValueError(
                "the calibration is by groups: give predict(..., groups=) the indicators of each row as well"
            )
        found, names = _with_ones(read_indicators(given.groups, n_rows)), group_names(given.groups)
        if found.shape[1] != self.indicators.shape[1]:
            expected = self.indicators.shape[1] - 1
            raise ValueError(f"groups must have a column for each of {expected} groups, got {found.shape[1] - 1}")
        if names is not None and self.names is not None and names != self.names:
            expected, got = (", ".join(each) for each in (self.names, names))
            raise ValueError(f"groups must have the columns {expected} in this order, got {got}")
        return found

    def own_places(self, n_rows: int) -> None:
        return None  # it would take a regression for each fold, candidate and kind of row

    @cached_property
    def _independent(self) -> tuple[np.ndarray, np.ndarray]:
        """Columns that are linearly independent, and all columns as combinations of them, (columns, 1 + G)."""
        columns: list[int] = []
        for column in range(self.indicators.shape[1]):
            tried = self.indicators[:, [*columns, column]]
            if np.linalg.matrix_rank(tried) == len(columns) + 1:
                columns.append(column)
        combinations = np.linalg.lstsq(self.indicators[:, columns], self.indicators, rcond=None)[0]
        return np.array(columns), combinations

    def arrange(self, scores: np.ndarray) -> "Regressions":
        rng = np.random.default_rng(0)
        jitter = JITTER * np.abs(scores).max() * rng.uniform(0, 1, len(scores))
        return Regressions(self.indicators[:, self._independent[0]], scores + jitter)

    def quantiles(self, arranged: "Regressions", place: np.ndarray, levels: tuple[float, ...]) -> np.ndarray:
        kinds, which = np.unique(place, axis=0, return_inverse=True)
        columns, combinations = self._independent
        found = np.full((len(kinds), len(levels)), np.inf)
        for i, kind in enumerate(kinds):
            if np.allclose(kind[columns] @ combinations, kind):  # else no calibration rows say anything about it
                found[i] = [arranged.quantile(kind[columns], level) for level in levels]
        return found[which.reshape(-1)]

    def take(self, rows: np.ndarray) -> Self:
        return replace(self, indicators=self.indicators[rows])


class Vertex(NamedTuple):
    """Some rows that the regression passes through, and the multipliers of all rows, τ above it and τ − 1 below."""

    basis: np.ndarray  # (d,)
    multipliers: np.ndarray  # (n,) zero for rows of the basis


@dataclass(frozen=True, eq=False)
class Regressions:
    """Quantile regressions of the same scores, by the simplex method with long steps (Barrodale and Roberts, 1973).

    Each starts from the regression without a new row, of which it is a few steps away.
    """

    phi: np.ndarray  # (n, d) linearly independent columns
    scores: np.ndarray  # (n,)
    _starts: dict[float, Vertex] = field(default_factory=dict)
    _found: dict[tuple[bytes, float], float] = field(default_factory=dict)

    def quantile(self, new: np.ndarray, level: float) -> float:
        key = new.tobytes(), level
        if key not in self._found:
            if level not in self._starts:
                start = self._minimum(self._first(level), np.zeros(len(new)), level)
                assert start is not None
                self._starts[level] = start[0]
            minimum = self._minimum(self._starts[level], (level - SLACK) * new, level)
            self._found[key] = np.inf if minimum is None else float(new @ minimum[1])
        return self._found[key]

    def _first(self, level: float) -> Vertex:
        """Return a vertex: any rows that determine a regression."""
        basis: list[int] = []
        rest = self.phi.copy()  # after elimination of the columns so far
        for column in range(self.phi.shape[1]):
            row = int(np.abs(rest[:, column]).argmax())
            basis.append(row)
            rest = rest - np.outer(rest[:, column] / rest[row, column], rest[row])
        return Vertex(np.array(basis), self._multipliers(np.array(basis), level))

    def _multipliers(self, basis: np.ndarray, level: float) -> np.ndarray:
        residuals = self.scores - self.phi @ np.linalg.solve(self.phi[basis], self.scores[basis])
        multipliers = np.where(residuals > 0, level, level - 1)
        multipliers[basis] = 0.0
        return multipliers

    def _minimum(self, start: Vertex, pull: np.ndarray, level: float) -> tuple[Vertex, np.ndarray] | None:
        """Return where Σ ρ(sᵢ − φᵢ·β) − pull·β is least, and β; None if nowhere."""
        basis, multipliers = start.basis.copy(), start.multipliers.copy()
        for _ in range(STEPS_PER_COLUMN * self.phi.shape[1]):
            inverse = np.linalg.inv(self.phi[basis])  # (d, d)
            own = -(pull + multipliers @ self.phi) @ inverse  # the multipliers of the basis that make it stationary
            excess = np.maximum(own - level, level - 1 - own)
            leaving = int(excess.argmax())
            if excess[leaving] <= TOLERANCE:
                return Vertex(basis, multipliers), inverse @ self.scores[basis]
            up = own[leaving] > level  # whether the row of the basis comes to lie above the regression
            rates = (1.0 if up else -1.0) * (self.phi @ inverse[:, leaving])  # of residuals, along the edge
            residuals = self.scores - self.phi @ (inverse @ self.scores[basis])
            towards = np.flatnonzero(np.where(multipliers > 0, rates < -TOLERANCE, rates > TOLERANCE))
            towards = towards[~np.isin(towards, basis)]
            steps = np.maximum(-residuals[towards] / rates[towards], 0.0)
            order = np.argsort(steps, kind="stable")
            passed = np.cumsum(np.abs(rates[towards[order]]))
            last = int(np.searchsorted(passed, excess[leaving] - TOLERANCE))
            if last == len(order):
                return None
            crossed = towards[order[:last]]
            multipliers[crossed] += np.where(multipliers[crossed] > 0, -1.0, 1.0)
            entering = towards[order[last]]
            multipliers[basis[leaving]] = level if up else level - 1
            multipliers[entering] = 0.0
            basis[leaving] = entering
        raise ArithmeticError("the quantile regression of the scores did not come to an end")


def _with_ones(indicators: np.ndarray) -> np.ndarray:
    return np.column_stack([np.ones(len(indicators)), indicators])
