"""Conformal intervals on the delta method's scale σ(x) = √(1 + b·q_λ(x)).

The scale has two parameters, λ and b, and a grid of them is tried: `Scales`. Choosing among them on the rows that the
quantile is taken on would break the guarantee; choosing on other rows would waste them. Here the choice is part of the
conformal argument instead. For a new row with residual r the choice is made on all n + 1 residuals, the new one
included, by the profile likelihood of a Gaussian,

    argmin over c of  (Σᵢ rᵢ²/σ²_c(xᵢ) + r²/σ²_c(x)) · exp(M_c),
                      M_c = (Σᵢ log σ²_c(xᵢ) + log σ²_c(x) + 2·prior_c)/(n+1),

which treats all n + 1 rows alike: if they are exchangeable, so are the scores |r|/σ under the scale that it picks, and
the usual quantile covers with probability at least 1 − α. As functions of t = r² these are straight lines, so each
scale is the chosen one on an interval [t₋, t₊] of the lower envelope, and the interval for y is known in closed form:
the largest r that lies in [√t₋, √t₊] of some scale and below its quantile times σ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..damping import TYPICAL_RELATIVE_DAMPING
from ..results import Side
from ..storage.encoding import storable

RELATIVE_DAMPINGS = 10.0 ** np.arange(-8, 2)  # λ in units of the largest eigenvalue of JᵀJ
VARIANCE_SHARES = np.array([0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 0.999])  # of σ² that is b·q at the average training row
NUMBERS_AT_ONCE = 2**22  # size of a (rows, candidates, candidates) array


@storable
@dataclass(frozen=True, eq=False)
class Scales:
    """Candidates c for σ² = 1 + b·q_λ, each with its own λ and b."""

    dampings: np.ndarray  # (L,) the different λ
    damping_index: np.ndarray  # (C,) the λ of each candidate, as an index into `dampings`
    b: np.ndarray  # (C,)
    prior: np.ndarray  # (C,) −log of the prior weight

    @classmethod
    def single(cls, damping: float) -> Scales:
        """Return one candidate, b = 1 with the given λ: nothing to choose."""
        return cls(np.array([damping]), np.array([0]), np.array([1.0]), np.array([0.0]))

    @classmethod
    def grid(cls, eigenvalues: np.ndarray, n_rows: int) -> Scales:
        """Return plausible λ and b for a network whose JᵀJ, over n rows, has these eigenvalues, largest first.

        The prior is centred on the typical damping, give or take a decade, and on as much variance as noise, give or
        take a factor e. A few dozen rows leave it at that; some hundred overrule it.
        """
        if len(eigenvalues) == 0:  # a sketch that holds nothing: only the constant width is left
            return cls(np.array([1.0]), np.array([0]), np.array([0.0]), np.array([0.0]))
        e = eigenvalues[:, None]
        dampings = RELATIVE_DAMPINGS * eigenvalues[0]
        average = np.square(e / (e + dampings)).sum(axis=0) / n_rows  # of q over the training rows
        odds = VARIANCE_SHARES / (1 - VARIANCE_SHARES)
        index, share = np.divmod(np.arange(len(dampings) * len(odds)), len(odds))
        decades = np.log10(RELATIVE_DAMPINGS / TYPICAL_RELATIVE_DAMPING)
        prior = 0.5 * decades[index] ** 2 + 0.5 * np.log(odds[share]) ** 2
        constant = 0.5 * np.log(odds[0]) ** 2  # as likely as the smallest share
        b = odds[share] / average[index]
        return cls(dampings, np.append(index, 0), np.append(b, 0.0), np.append(prior, constant))

    def squared(self, q: np.ndarray) -> np.ndarray:  # (rows, L) -> (rows, C)
        """Return σ² of each row under each candidate."""
        return 1.0 + self.b * q[:, self.damping_index]


@storable
@dataclass(frozen=True, eq=False)
class ConformalScale:
    """Calibration rows under every candidate scale, from which the interval of a new row's residual follows.

    It covers with probability at least `level` for rows exchangeable with the calibration rows, whatever the network.
    With one candidate, and scores without ties, also with at most level + 1/(n+1).
    """

    scales: Scales
    unit: float  # of the scores
    signed: np.ndarray  # (n, C) the scores r/σ, each column sorted
    absolute: np.ndarray  # (n, C) and |r|/σ
    sum_squares: np.ndarray  # (C,)
    log_weight: np.ndarray  # (C,) Σ log σ² + 2·prior
    best: int  # the candidate that the calibration rows alone choose

    @classmethod
    def fit(cls, residuals: np.ndarray, q: np.ndarray, scales: Scales) -> ConformalScale:  # (n,), (n, L)
        """Return the scores of the calibration rows, given their residuals and variances under each λ."""
        squared = scales.squared(q)
        # a power of two, which changes no digit, keeps the squares from over- and underflowing
        unit = math.ldexp(1.0, math.frexp(float(np.abs(residuals).max()))[1] - 1)
        signed = residuals[:, None] / unit / np.sqrt(squared)
        sum_squares = np.square(signed).sum(axis=0)
        log_weight = np.log(squared).sum(axis=0) + 2 * scales.prior
        best = int(np.argmin(np.log(np.maximum(sum_squares, 1e-300)) + log_weight / len(residuals)))
        absolute = np.sort(np.abs(signed), axis=0)
        return cls(scales, unit, np.sort(signed, axis=0), absolute, sum_squares, log_weight, best)

    @property
    def n_rows(self) -> int:
        return len(self.signed)

    @property
    def damping(self) -> float:
        """The λ of the best candidate."""
        return float(self.scales.dampings[self.scales.damping_index[self.best]])

    @property
    def b(self) -> float:
        """The b of the best candidate."""
        return float(self.scales.b[self.best])

    @property
    def standardised(self) -> np.ndarray:  # (n,), sorted
        """|r|/σ under the best candidate."""
        return self.unit * self.absolute[:, self.best]

    def scale(self, q: np.ndarray) -> np.ndarray:  # (rows, L) -> (rows,)
        """Return σ(x) under the best candidate."""
        return np.sqrt(self.scales.squared(q)[:, self.best]) if len(q) else np.zeros(0)

    def quantile(self, level: float) -> float:
        """Return the conformal quantile of |r|/σ under the best candidate."""
        return float(self.standardised[conformal_rank(level, self.n_rows) - 1])

    def bounds(
        self, q: np.ndarray, levels: tuple[float, ...], side: Side = "both"
    ) -> tuple[np.ndarray, np.ndarray]:  # (rows, L) -> (rows, levels) twice
        """Return the lower and upper bound of y − ŷ."""
        step = max(1, NUMBERS_AT_ONCE // len(self.scales.b) ** 2)
        parts = [self._largest_residuals(q[i : i + step], levels, side) for i in range(0, len(q), step)]
        return _two_bounds(np.concatenate([*parts, np.zeros((0, len(levels)))]), side)

    def _largest_residuals(self, q: np.ndarray, levels: tuple[float, ...], side: Side) -> np.ndarray:
        """Return the largest residual in the interval of each row and level; negated for the lower side."""
        squared = self.scales.squared(q)
        first, last = (np.sqrt(t)[:, None] for t in self._chosen_between(squared))  # (rows, 1, C)
        scores = {"both": self.absolute, "upper": self.signed, "lower": -self.signed[::-1]}[side]
        cut = np.sqrt(squared)[:, None] * scores[[conformal_rank(level, self.n_rows) - 1 for level in levels]]
        # of each candidate the largest r with |r| within [first, last] and r at most cut
        above = np.where(cut >= first, np.minimum(last, cut), -np.inf)
        below = np.where((cut < first) & (cut >= -last), np.minimum(-first, cut), -np.inf)
        largest = np.where(last >= first, np.maximum(above, below), -np.inf).max(axis=2)
        return self.unit * (np.maximum(largest, 0.0) if side == "both" else largest)

    def _chosen_between(self, squared: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # (rows, C) -> (rows, C) twice
        """Return t₋ and t₊, between which a candidate is the lowest of the lines a + d·t; inf and 0 if it never is."""
        weight = np.exp((self.log_weight + np.log(squared)) / (self.n_rows + 1))
        a, d = self.sum_squares * weight, weight / squared
        rise = a[:, None, :] - a[:, :, None]  # [row, c, other]
        slope = d[:, :, None] - d[:, None, :]
        with np.errstate(divide="ignore", invalid="ignore"):
            crossing = rise / slope
        first = np.where(slope < 0, crossing, np.where((slope == 0) & (rise < 0), np.inf, 0.0)).max(axis=2, initial=0.0)
        last = np.where(slope > 0, crossing, np.inf).min(axis=2)
        never = last < first
        return np.where(never, np.inf, first), np.where(never, 0.0, last)


def _two_bounds(bound: np.ndarray, side: Side) -> tuple[np.ndarray, np.ndarray]:
    """Return −bound and bound; for one side the other bound is infinite."""
    infinite = np.full_like(bound, np.inf)
    return -infinite if side == "upper" else -bound, infinite if side == "lower" else bound


@dataclass(frozen=True, eq=False)
class _Outputs:
    """The scales of several outputs."""

    outputs: tuple[ConformalScale, ...]

    def scale(self, q: Sequence[np.ndarray]) -> np.ndarray:  # m times (rows, L) -> (rows, m)
        """Return σ(x) of each output under its best candidate."""
        return np.stack([output.scale(of_output) for output, of_output in zip(self.outputs, q, strict=True)], axis=1)


@storable
@dataclass(frozen=True, eq=False)
class EachOutput(_Outputs):
    """Outputs that are calibrated one by one."""

    @classmethod
    def fit(cls, residuals: np.ndarray, q: Sequence[np.ndarray], scales: Sequence[Scales]) -> EachOutput:
        """Return the scores of the calibration rows, given residuals (n, m) and m times variances (n, L)."""
        return cls(tuple(map(ConformalScale.fit, residuals.T, q, scales)))

    @property
    def n_rows(self) -> int:
        return self.outputs[0].n_rows

    def bounds(
        self, q: Sequence[np.ndarray], levels: tuple[float, ...], side: Side
    ) -> tuple[np.ndarray, np.ndarray]:  # m times (rows, L) -> (rows, m, levels) twice
        """Return the lower and upper bound of y − ŷ."""
        bounds = [output.bounds(of_output, levels, side) for output, of_output in zip(self.outputs, q, strict=True)]
        return np.stack([low for low, _ in bounds], axis=1), np.stack([high for _, high in bounds], axis=1)


@storable
@dataclass(frozen=True, eq=False)
class AllOutputs(_Outputs):
    """All outputs of a row within their bounds at once, with probability at least `level`:

        score = max over outputs of |r|/(u·σ(x)),

    with its conformal quantile. A third of the rows chooses the σ and the unit u of each output, the others give the
    quantile, so that the guarantee is exact.
    """

    units: np.ndarray  # (m,)
    scores: dict[str, np.ndarray]  # by side, (n,) sorted

    @classmethod
    def fit(cls, residuals: np.ndarray, q: Sequence[np.ndarray], scales: Sequence[Scales], seed: int) -> AllOutputs:
        """As `EachOutput.fit`, with a `seed` that draws the rows for the choice."""
        order = np.random.default_rng(seed).permutation(len(residuals))
        choosing, rest = np.split(order, [len(order) // 3])
        if len(choosing) == 0:
            raise ValueError(f"{len(order)} calibration rows are too few for all outputs at once: it takes at least 3")
        chosen = EachOutput.fit(residuals[choosing], [of_output[choosing] for of_output in q], scales)
        u = np.array([math.sqrt(np.mean(output.standardised**2)) or 1.0 for output in chosen.outputs])
        signed = residuals[rest] / (chosen.scale([of_output[rest] for of_output in q]) * u)  # (rest, m)
        by_side = {"both": np.abs(signed), "upper": signed, "lower": -signed}
        return cls(chosen.outputs, u, {side: np.sort(scores.max(axis=1)) for side, scores in by_side.items()})

    @property
    def n_rows(self) -> int:
        return len(self.scores["both"])

    def bounds(self, q: Sequence[np.ndarray], levels: tuple[float, ...], side: Side) -> tuple[np.ndarray, np.ndarray]:
        """Return the lower and upper bound of y − ŷ."""
        cuts = np.array([self.scores[side][conformal_rank(level, self.n_rows) - 1] for level in levels])
        return _two_bounds((self.scale(q) * self.units)[:, :, None] * cuts, side)


def rows_needed(level: float) -> int:
    """Return the fewest calibration rows for a level: ⌈(n+1)·level⌉ ≤ n."""
    n = max(1, math.floor(level / (1 - level)) - 1)  # rounding makes it too large or too small by one
    while _rank(level, n) > n:
        n += 1
    return n


def conformal_rank(level: float, n: int) -> int:
    """Return which of n sorted scores is the conformal quantile, counted from 1."""
    rank = _rank(level, n)
    if rank > n:
        problem = f"{n} calibration rows are too few for level {level:g}: it takes at least {rows_needed(level)}"
        raise ValueError(f"{problem}; ask for a level of at most {n / (n + 1):.4g}, or calibrate on more rows")
    return max(rank, 1)


def _rank(level: float, n: int) -> int:
    """Return ⌈(n+1)·level⌉ in decimal arithmetic: 0.95·20 is 19, not 19.000000000000004."""
    return math.ceil((n + 1) * level - 1e-9)
