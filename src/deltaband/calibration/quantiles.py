"""The quantile of scores that a new row's score is compared with: of all calibration rows, of its group, or weighted.

A rule is a function of the scores of the calibration rows and of what is known of the new row without its target, its
`place`: a group, indicators of groups, a weight. The argument is the same for all rules: the candidate scale is chosen
by a symmetric function of the n + 1 pairs of input and residual, so that given the bag of these pairs the scores are
known up to their order, and the rule says which of them the new row's exceeds with probability 1 − level at most.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np

from ..data.inputs import Inputs
from ..network.network import Network
from ..storage.encoding import storable

DEFAULT_LEVEL = 0.95  # what is said about groups and weights where no level is given is said about this one


class Given(NamedTuple):
    """What `predict` is given for rows besides their inputs, to find their quantile."""

    groups: Any = None
    unknown: Any = "error"
    weights: Any = None

    def refuse(self, name: str, why: str) -> None:
        """Raise if something was given that has no meaning for this rule."""
        if getattr(self, name) is not None:
            raise ValueError(f"{name}= was given, but {why}")


class QuantileRule(Protocol):
    """How the quantile of a new row follows from the scores of the calibration rows."""

    @property
    def why_infinite(self) -> str: ...  # where nothing finite can be promised

    @property
    def lines(self) -> list[tuple[str, str]]: ...  # of the summary

    @property
    def warnings(self) -> list[str]: ...  # after a calibration

    def places_of_inputs(self, network: Network, x: Inputs, h: np.ndarray) -> np.ndarray | None:
        """Return the places (rows, k) of rows with leverages (rows, m), if they follow from their inputs."""

    def places(self, n_rows: int, given: Given) -> np.ndarray | None:
        """Return the places (rows, k) of rows from what was given with them; None if they follow from their inputs."""

    def own_places(self, n_rows: int) -> np.ndarray | None:
        """Return the places of the calibration rows, for their own interval score; None if it is not to be computed."""

    def arrange(self, scores: np.ndarray) -> Any:  # (n,)
        """Return the scores of the calibration rows as `quantiles` needs them."""

    def quantiles(self, arranged: Any, place: np.ndarray, levels: tuple[float, ...]) -> np.ndarray:
        """Return the largest score that is accepted of rows at these places, (rows, levels)."""

    def take(self, rows: np.ndarray) -> Self:
        """Return the same rule for some of the calibration rows."""

    def notices(self, place: np.ndarray, levels: tuple[float, ...]) -> list[str]:
        """Return what is to be said where rows at these places are predicted."""


class FromGiven:
    """A rule whose places do not follow from inputs."""

    def places_of_inputs(self, network: Network, x: Inputs, h: np.ndarray) -> None:
        return None


@storable
@dataclass(frozen=True, eq=False)
class AllRows(FromGiven):
    """The ⌈(n+1)·level⌉-th smallest score: P(covered) ≥ level for rows exchangeable with the calibration rows."""

    why_infinite: ClassVar = ""

    @property
    def lines(self) -> list[tuple[str, str]]:
        return []

    @property
    def warnings(self) -> list[str]:
        return []

    def places(self, n_rows: int, given: Given) -> np.ndarray:
        given.refuse("groups", "the calibration knows no groups: give calibrate(x, y, groups=...) as well")
        given.refuse("weights", "the calibration rows had no weights of that kind: give calibrate(x, y, weights=...)")
        return np.zeros((n_rows, 0))

    def own_places(self, n_rows: int) -> np.ndarray:
        return np.zeros((n_rows, 0))

    def arrange(self, scores: np.ndarray) -> np.ndarray:
        return np.sort(scores)

    def quantiles(self, arranged: np.ndarray, place: np.ndarray, levels: tuple[float, ...]) -> np.ndarray:
        return np.broadcast_to(conformal_quantiles(arranged, levels), (len(place), len(levels)))

    def take(self, rows: np.ndarray) -> Self:
        return self

    def notices(self, place: np.ndarray, levels: tuple[float, ...]) -> list[str]:
        return []


ALL_ROWS = AllRows()


def rows_needed(level: float) -> int:
    """Return the fewest calibration rows for a level: ⌈(n+1)·level⌉ ≤ n."""
    start = max(1, math.floor(level / (1 - level)) - 1)  # rounding makes it too large or too small by one
    return next(n for n in itertools.count(start) if conformal_rank(level, n) <= n)


def conformal_quantiles(scores: np.ndarray, levels: tuple[float, ...]) -> np.ndarray:  # (n, …) -> (levels, …)
    """Return the ⌈(n+1)·level⌉-th smallest of scores that are sorted; raise if there are too few."""
    n = len(scores)
    for level in levels:
        if conformal_rank(level, n) > n:
            problem = f"{n} calibration rows are too few for level {level:g}: it takes at least {rows_needed(level)}"
            raise ValueError(f"{problem}; ask for a level of at most {n / (n + 1):.4g}, or calibrate on more rows")
    return scores[[max(conformal_rank(level, n), 1) - 1 for level in levels]]


def conformal_rank(level: float, n: int) -> int:
    """Return ⌈(n+1)·level⌉ in decimal arithmetic: 0.95·20 is 19, not 19.000000000000004."""
    return math.ceil((n + 1) * level - 1e-9)
