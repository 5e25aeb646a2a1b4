"""Conformal calibration on the delta method's scale σ(x) = √(1 + b·q_λ(x)).

The scale has two knobs, λ and b, and a grid of them is tried: `Scales`. Choosing among them on the rows that the
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from ..data.row_record import share_by_chance
from ..engines import Covariance
from ..metrics import interval_scores
from ..network.gradient_batch import GradientBatch
from ..storage.encoding import storable

Side = Literal["both", "lower", "upper"]

# λ in units of the largest eigenvalue of JᵀJ, and how much of σ² is b·q at the average training row.
RELATIVE_DAMPINGS = 10.0 ** np.arange(-8, 2)
SHARES = np.array([0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 0.999])
# Where nothing is known: λ around 1e-4 of the largest eigenvalue, give or take a decade, and as much variance as noise,
# give or take a factor e. A few dozen rows leave it at that; some hundred overrule it.
PRIOR_RELATIVE_DAMPING = 1e-4

DRIFT = 1e-3  # the p-value below which calibration and training rows are said to differ
SEEN = 0.05  # the share of training rows, more than by chance, from which on they are said to be among the others
BLOCK = 2**22  # numbers in a (rows, scales, scales) array


@storable
@dataclass(frozen=True)
class Scales:
    """Candidates for σ² = 1 + b·q_λ."""

    dampings: np.ndarray  # (L,) the different λ
    which: np.ndarray  # (C,) the λ of each candidate, as an index of `dampings`
    b: np.ndarray  # (C,)
    prior: np.ndarray  # (C,) −log of its weight

    @classmethod
    def single(cls, damping: float) -> Scales:
        """b = 1 and one λ: nothing to choose."""
        return cls(np.array([damping]), np.array([0]), np.array([1.0]), np.array([0.0]))

    @classmethod
    def grid(cls, eigenvalues: np.ndarray, n_rows: int) -> Scales:
        """λ and b around what is plausible for a network whose JᵀJ, over n rows, has these eigenvalues."""
        if len(eigenvalues) == 0:  # a sketch that holds nothing: only the constant width is left
            return cls(np.array([1.0]), np.array([0]), np.array([0.0]), np.array([0.0]))
        e = eigenvalues[:, None]
        dampings = RELATIVE_DAMPINGS * eigenvalues[0]
        average = np.square(e / (e + dampings)).sum(axis=0) / n_rows  # of q over the training rows
        odds = SHARES / (1 - SHARES)
        which, share = np.divmod(np.arange(len(dampings) * len(SHARES)), len(SHARES))
        decades = np.log10(RELATIVE_DAMPINGS / PRIOR_RELATIVE_DAMPING)
        prior = 0.5 * decades[which] ** 2 + 0.5 * np.log(odds[share]) ** 2
        constant = 0.5 * np.log(odds[0]) ** 2  # as likely as the smallest share
        return cls(
            dampings, np.append(which, 0), np.append(odds[share] / average[which], 0.0), np.append(prior, constant)
        )

    def squared(self, q: np.ndarray) -> np.ndarray:  # (rows, L) -> (rows, C)
        """σ² of each row under each candidate."""
        return 1.0 + self.b * q[:, self.which]


@storable
@dataclass(init=False, eq=False)
class ConformalScale:
    """Calibration rows under every candidate scale: ask it for the interval of a new row's residual.

    Covers with probability at least `level` for rows exchangeable with the calibration rows, whatever the network.
    With one candidate, and scores without ties, also with at most level + 1/(n+1).
    """

    scales: Scales
    n_rows: int
    _unit: float
    _signed: np.ndarray  # (n, C)
    _absolute: np.ndarray  # (n, C)
    _sum_squares: np.ndarray  # (C,)
    _log_weight: np.ndarray  # (C,)
    chosen: int

    def __init__(self, residuals: np.ndarray, q: np.ndarray, scales: Scales) -> None:  # (n,), (n, L)
        squared = scales.squared(q)
        self.scales = scales
        self.n_rows = len(residuals)
        # a power of two, which changes no digit, keeps the squares from over- and underflowing
        self._unit = math.ldexp(1.0, math.frexp(float(np.abs(residuals).max()))[1] - 1)
        signed = residuals[:, None] / self._unit / np.sqrt(squared)
        self._signed = np.sort(signed, axis=0)  # (n, C)
        self._absolute = np.sort(np.abs(signed), axis=0)
        self._sum_squares = np.square(signed).sum(axis=0)  # (C,)
        self._log_weight = np.log(squared).sum(axis=0) + 2 * scales.prior  # (C,)
        n = self.n_rows
        # the choice of the calibration rows alone, for those who want one scale
        self.chosen = int(np.argmin(np.log(np.maximum(self._sum_squares, 1e-300)) + self._log_weight / n))

    @property
    def damping(self) -> float:
        return float(self.scales.dampings[self.scales.which[self.chosen]])

    @property
    def b(self) -> float:
        return float(self.scales.b[self.chosen])

    @property
    def standardised(self) -> np.ndarray:  # (n,), sorted
        """|r|/σ under that choice."""
        return self._unit * self._absolute[:, self.chosen]

    def scale(self, q: np.ndarray) -> np.ndarray:  # (rows, L) -> (rows,)
        """σ(x) under the choice of the calibration rows alone."""
        return np.sqrt(self.scales.squared(q)[:, self.chosen]) if len(q) else np.zeros(0)

    def quantile(self, level: float) -> float:
        """The conformal quantile of |r|/σ under that choice."""
        return float(self.standardised[rank_of(level, self.n_rows) - 1])

    def bounds(
        self, q: np.ndarray, levels: tuple[float, ...], side: Side = "both"
    ) -> tuple[np.ndarray, np.ndarray]:  # (rows, L) -> (rows, levels) twice
        """Lower and upper bound of y − ŷ."""
        lower, upper = [], []
        step = max(1, BLOCK // len(self.scales.b) ** 2)
        for i in range(0, len(q), step):
            low, high = self._bounds(q[i : i + step], levels, side)
            lower.append(low)
            upper.append(high)
        empty = np.zeros((0, len(levels)))
        return np.concatenate([*lower, empty]), np.concatenate([*upper, empty])

    def _bounds(self, q: np.ndarray, levels: tuple[float, ...], side: Side) -> tuple[np.ndarray, np.ndarray]:
        squared = self.scales.squared(q)
        first, last = (np.sqrt(t) for t in self._chosen_on(squared))  # |r| for which a scale is the chosen one
        scores = {"both": self._absolute, "upper": self._signed, "lower": -self._signed[::-1]}[side]
        cuts = [np.sqrt(squared) * scores[rank_of(level, self.n_rows) - 1] for level in levels]
        largest = _largest if side == "both" else _largest_signed
        bound = self._unit * np.stack([largest(first, last, cut) for cut in cuts], axis=1)
        infinite = np.full_like(bound, np.inf)
        return -infinite if side == "upper" else -bound, infinite if side == "lower" else bound

    def _chosen_on(self, squared: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # (rows, C) -> (rows, C) twice
        """t₋ and t₊: where each candidate is the lowest of the lines a + d·t; inf and 0 where it never is."""
        weight = np.exp((self._log_weight + np.log(squared)) / (self.n_rows + 1))
        a, d = self._sum_squares * weight, weight / squared
        rise = a[:, None, :] - a[:, :, None]  # [row, c, other]
        slope = d[:, :, None] - d[:, None, :]
        with np.errstate(divide="ignore", invalid="ignore"):
            crossing = rise / slope
        first = np.where(slope < 0, crossing, np.where((slope == 0) & (rise < 0), np.inf, 0.0)).max(axis=2)
        last = np.where(slope > 0, crossing, np.inf).min(axis=2)
        first = np.maximum(first, 0.0)
        never = last < first
        return np.where(never, np.inf, first), np.where(never, 0.0, last)


def _largest(first: np.ndarray, last: np.ndarray, cut: np.ndarray) -> np.ndarray:
    """The largest |r| that is within [first, last] and at most cut, over all candidates: (rows, C) -> (rows,)."""
    return np.where(cut >= first, np.minimum(last, cut), 0.0).max(axis=1)


def _largest_signed(first: np.ndarray, last: np.ndarray, cut: np.ndarray) -> np.ndarray:
    """The largest r with |r| within [first, last] and r at most cut, over all candidates."""
    possible = last >= first
    above = np.where(possible & (cut >= first), np.minimum(last, cut), -np.inf)
    below = np.where(possible & (cut < first) & (cut >= -last), np.minimum(-first, cut), -np.inf)
    return np.maximum(above, below).max(axis=1)


@storable
@dataclass(init=False, eq=False)
class EachOutput:
    """Every output calibrated on its own."""

    outputs: tuple[ConformalScale, ...]
    n_rows: int

    def __init__(self, outputs: Sequence[ConformalScale]) -> None:
        self.outputs = tuple(outputs)
        self.n_rows = self.outputs[0].n_rows

    def bounds(
        self, q: Sequence[np.ndarray], levels: tuple[float, ...], side: Side
    ) -> tuple[np.ndarray, np.ndarray]:  # m times (rows, L) -> (rows, m, levels) twice
        """Lower and upper bound of y − ŷ."""
        bounds = [output.bounds(of_output, levels, side) for output, of_output in zip(self.outputs, q, strict=True)]
        return np.stack([low for low, _ in bounds], axis=1), np.stack([high for _, high in bounds], axis=1)

    def scale(self, q: Sequence[np.ndarray]) -> np.ndarray:  # (rows, m)
        """σ(x) under the choice of the calibration rows alone."""
        return np.stack([output.scale(of_output) for output, of_output in zip(self.outputs, q, strict=True)], axis=1)


@storable
@dataclass(init=False, eq=False)
class AllOutputs:
    """All outputs of a row within their bounds at once, with probability at least `level`:

        score = max over outputs of |r|/(u·σ(x)),

    with its conformal quantile. A third of the rows chooses the σ and the unit u of each output, the others give the
    quantile, so that the guarantee is exact.
    """

    outputs: tuple[ConformalScale, ...]
    n_rows: int
    _units: np.ndarray  # (m,)
    _scores: dict[str, np.ndarray]

    def __init__(
        self, residuals: np.ndarray, q: Sequence[np.ndarray], scales: Sequence[Scales], seed: int
    ) -> None:  # (n, m), m times (n, L)
        order = np.random.default_rng(seed).permutation(len(residuals))
        choosing, rest = np.split(order, [len(order) // 3])
        if len(choosing) == 0:
            raise ValueError(f"{len(order)} calibration rows are too few for all outputs at once: it takes at least 3")
        self.outputs = tuple(
            ConformalScale(residuals[choosing, o], q[o][choosing], of_output) for o, of_output in enumerate(scales)
        )
        self.n_rows = len(rest)
        units = [math.sqrt(float(np.mean(output.standardised**2))) for output in self.outputs]
        self._units = np.array([unit or 1.0 for unit in units])
        signed = residuals[rest] / self._spread([of_output[rest] for of_output in q])  # (rest, m)
        self._scores = {
            "both": np.sort(np.abs(signed).max(axis=1)),
            "upper": np.sort(signed.max(axis=1)),
            "lower": np.sort(-signed.min(axis=1)),
        }

    def bounds(self, q: Sequence[np.ndarray], levels: tuple[float, ...], side: Side) -> tuple[np.ndarray, np.ndarray]:
        cuts = np.array([self._scores[side][rank_of(level, self.n_rows) - 1] for level in levels])
        bound = self._spread(q)[:, :, None] * cuts
        infinite = np.full_like(bound, np.inf)
        return -infinite if side == "upper" else -bound, infinite if side == "lower" else bound

    def scale(self, q: Sequence[np.ndarray]) -> np.ndarray:
        return np.stack([output.scale(of_output) for output, of_output in zip(self.outputs, q, strict=True)], axis=1)

    def _spread(self, q: Sequence[np.ndarray]) -> np.ndarray:  # (rows, m)
        return self.scale(q) * self._units


@storable
@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found, in one piece."""

    covariances: tuple[Covariance, ...]  # of each fit, answering for every λ of its scales
    scales: tuple[Scales, ...]
    conformal: EachOutput | AllOutputs
    score_before: float  # interval score at 95 % on the calibration rows by the formula; NaN where it has none
    score_after: float  # and conformal, each tenth of the rows calibrated by the others; NaN where they are too few
    drift: float  # p-value of "calibration rows have the leverages of training rows"; NaN where not tested
    seen: float  # share of the calibration rows that were training rows
    repeated: float  # and how large it would be by chance, from repetitions among the training rows
    n_rows: int

    def warnings(self) -> list[str]:
        """Where the guarantee rests on something that looks doubtful."""
        if self.seen > share_by_chance(self.repeated, self.n_rows) + SEEN:
            return [
                f"{self.seen:.0%} of the calibration rows were training rows ({self.repeated:.0%} would be by chance): "
                "their residuals are too small, so will be the intervals; calibrate on rows that the network was not "
                "trained on"
            ]
        if self.drift < DRIFT:
            return [
                "the calibration rows do not look like the training rows (their leverages differ, p = "
                f"{self.drift:.1g}): the guarantee is for new rows that are like the calibration rows"
            ]
        return []

    @property
    def questions(self) -> list[Callable[[GradientBatch], np.ndarray]]:
        """For each fit: q under each λ of the scales."""
        pairs = zip(self.covariances, self.scales, strict=True)
        return [partial(scale_variances, covariance, scales) for covariance, scales in pairs]


def scale_variances(covariance: Covariance, scales: Scales, g: GradientBatch) -> np.ndarray:  # (b, L)
    """q under each λ of the scales."""
    return covariance.variances(g, scales.dampings)


def cross_calibrated_score(
    residuals: np.ndarray, q: np.ndarray, scales: Scales, seed: int, level: float = 0.95
) -> float:
    """The mean interval score when each tenth of the rows is calibrated by the others; NaN where they are too few."""
    order = np.random.default_rng(seed).permutation(len(residuals))
    scores = []
    for part in np.array_split(order, min(10, len(order))):
        rest = np.setdiff1d(order, part)
        if len(rest) < rows_needed(level):
            return math.nan
        lower, upper = ConformalScale(residuals[rest], q[rest], scales).bounds(q[part], (level,))
        scores.append(interval_scores(residuals[part], lower[:, 0], upper[:, 0], level))
    return float(np.concatenate(scores).mean())


def rows_needed(level: float) -> int:
    """The fewest calibration rows for a level: ⌈(n+1)·level⌉ ≤ n."""
    n = max(1, math.floor(level / (1 - level)) - 1)  # rounding makes it too large or too small by one
    while _rank(level, n) > n:
        n += 1
    return n


def rank_of(level: float, n: int) -> int:
    """Which of n sorted scores is the conformal quantile, counted from 1."""
    rank = _rank(level, n)
    if rank > n:
        raise ValueError(
            f"{n} calibration rows are too few for level {level:g}: it takes at least {rows_needed(level)}; ask for a "
            f"level of at most {n / (n + 1):.4g}, or calibrate on more rows"
        )
    return max(rank, 1)


def _rank(level: float, n: int) -> int:
    """⌈(n+1)·level⌉, in the arithmetic of decimals: 0.95·20 is 19, not 19.000000000000004."""
    return math.ceil((n + 1) * level - 1e-9)


def drift(training: np.ndarray, calibration: np.ndarray) -> float:
    """p-value of "these are leverages of rows like the training rows"; NaN where there is nothing to compare with.

    A new row's leverage is larger than that of the same row among the training rows, h, and smaller than that of the
    row left out of them, h/(1 − h). So it is compared with both, by one-sided Kolmogorov–Smirnov tests: is it smaller
    than h, is it larger than h/(1 − h)?
    """
    if len(training) == 0:
        return math.nan
    from scipy.stats import ks_2samp

    left_out = training / np.maximum(1 - training, np.finfo(np.float64).eps)
    rounding = 1e-4  # leverages of equal rows differ by this much at most
    smaller = ks_2samp(calibration, (1 - rounding) * training, alternative="greater", method="asymp").pvalue
    larger = ks_2samp(calibration, (1 + rounding) * left_out, alternative="less", method="asymp").pvalue
    return min(1.0, 2 * float(min(smaller, larger)))
