"""Conformal intervals on the delta method's scale, σ² = (1 + b·q_λ(x))·v(x)^(2γ), v being the learnt noise.

The choice of λ, b and γ among the candidates c of `Scales` is part of the conformal argument: it is made on all n + 1
residuals, that of the new row, r, included, by the profile likelihood of a Gaussian,

    argmin over c of  (Σᵢ rᵢ²/σ²_c(xᵢ) + r²/σ²_c(x)) · exp(M_c),
                      M_c = (Σᵢ log σ²_c(xᵢ) + log σ²_c(x) + 2·prior_c)/(n+1),

so that the scores |r|/σ of exchangeable rows are exchangeable, and their quantile covers with probability ≥ 1 − α.
These are straight lines in t = r²: each scale is chosen on an interval [t₋, t₊] of the lower envelope, and the bound
for y − ŷ is the largest r that lies in [√t₋, √t₊] of some scale and below its quantile times σ.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from ..damping import TYPICAL_RELATIVE_DAMPING
from ..fitting.fit import Bounds, two_bounds
from ..results import Side
from ..storage.encoding import storable

RELATIVE_DAMPINGS = 10.0 ** np.arange(-8, 2)  # λ in units of the largest eigenvalue of JᵀJ
VARIANCE_SHARES = np.array([0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 0.999])  # of σ² that is b·q at the average training row
NOISE_POWERS = np.array([0.0, 0.25, 0.5, 0.75, 1.0])  # γ
NUMBERS_AT_ONCE = 2**22  # size of a (rows, candidates or levels) array

LargestScore = Callable[[np.ndarray, np.ndarray], np.ndarray]  # rows, the candidate of each -> r/σ, (rows, levels)


@storable
@dataclass(frozen=True, eq=False)
class Scales:
    """Candidates c for σ² = (1 + b·q_λ)·v^(2γ), each with its own λ, b and γ.

    `q` in what follows is (rows, L), the variance under each λ; where the noise is learnt, log v is in a last column.
    """

    dampings: np.ndarray  # (L,) the different λ
    damping_index: np.ndarray  # (C,) the λ of each candidate, as an index into `dampings`
    b: np.ndarray  # (C,)
    prior: np.ndarray  # (C,) −log of the prior weight
    gamma: np.ndarray | None = None  # (C,) where the noise is learnt

    @classmethod
    def single(cls, damping: float, b: float = 1.0) -> Self:
        return cls(np.array([damping]), np.array([0]), np.array([b]), np.array([0.0]))

    def with_noise(self) -> Self:
        """Return each candidate with each γ; the prior is centred on ½."""
        gamma = np.repeat(NOISE_POWERS, len(self.b))
        index, b, prior = (np.tile(each, len(NOISE_POWERS)) for each in (self.damping_index, self.b, self.prior))
        return type(self)(self.dampings, index, b, prior + 0.5 * ((gamma - 0.5) / 0.5) ** 2, gamma)

    @classmethod
    def grid(cls, eigenvalues: np.ndarray, n_rows: int) -> Self:
        """Return plausible λ and b for a network whose JᵀJ, over n rows, has these eigenvalues, largest first.

        The prior is centred on the typical damping, ± a decade, and on as much variance as noise, ± a factor e.
        """
        if len(eigenvalues) == 0:  # a sketch that holds nothing: only the constant width is left
            return cls.single(1.0, b=0.0)
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

    def squared(self, q: np.ndarray) -> np.ndarray:  # -> σ², (rows, C)
        squared = 1.0 + self.b * q[:, self.damping_index]
        return squared if self.gamma is None else squared * np.exp(2 * self.gamma * q[:, -1:])


@storable
@dataclass(frozen=True, eq=False)
class ConformalScale:
    """Calibration rows under every candidate scale, from which the interval of a new row's residual follows.

    It covers with probability ≥ `level` for rows exchangeable with the calibration rows, whatever the network.
    """

    scales: Scales
    unit: float  # of the scores
    signed: np.ndarray  # (n, C) the scores r/σ, each column sorted
    absolute: np.ndarray  # (n, C) and |r|/σ
    sum_squares: np.ndarray  # (C,)
    log_weight: np.ndarray  # (C,) Σ log σ² + 2·prior
    best: int  # the candidate that the calibration rows alone choose

    @classmethod
    def fit(cls, residuals: np.ndarray, q: np.ndarray, scales: Scales) -> Self:  # (n,), (n, L)
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
    def damping(self) -> float:  # of the best candidate, as what follows
        return float(self.scales.dampings[self.scales.damping_index[self.best]])

    @property
    def b(self) -> float:
        return float(self.scales.b[self.best])

    @property
    def gamma(self) -> float:
        return 0.0 if self.scales.gamma is None else float(self.scales.gamma[self.best])

    @property
    def standardised(self) -> np.ndarray:  # (n,) |r|/σ, sorted
        return self.unit * self.absolute[:, self.best]

    def scale(self, q: np.ndarray) -> np.ndarray:  # (rows, L) -> σ(x), (rows,)
        return np.sqrt(self.scales.squared(q)[:, self.best])

    def quantile(self, level: float) -> float:
        return float(conformal_quantiles(self.standardised, (level,))[0])

    def bounds(self, q: np.ndarray, levels: tuple[float, ...], side: Side = "both") -> Bounds:  # (rows, levels) each
        scores = {"both": self.absolute, "upper": self.signed, "lower": -self.signed[::-1]}[side]
        quantiles = conformal_quantiles(scores, levels).T  # (C, levels)
        return self._bounds(q, len(levels), side, lambda rows, chosen: quantiles[chosen])

    def _bounds(self, q: np.ndarray, n_levels: int, side: Side, largest_score: LargestScore) -> Bounds:
        step = max(1, NUMBERS_AT_ONCE // max(len(self.scales.b), n_levels))
        largest = np.full((len(q), n_levels), -np.inf)
        for first in range(0, len(q), step):
            squared = self.scales.squared(q[first : first + step])
            for rows, chosen, start, end in self._envelope(squared):
                lower, upper, at = np.sqrt(start)[:, None], np.sqrt(end)[:, None], first + rows
                cut = np.sqrt(squared[rows, chosen])[:, None] * largest_score(at, chosen)
                # the largest r with |r| within [lower, upper] and r at most cut
                above = np.where(cut >= lower, np.minimum(upper, cut), -np.inf)
                below = np.where((cut < lower) & (cut >= -upper), np.minimum(-lower, cut), -np.inf)
                largest[at] = np.maximum(largest[at], np.maximum(above, below))
        return two_bounds(self.unit * (np.maximum(largest, 0.0) if side == "both" else largest), side)

    def _envelope(self, squared: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """Walk along the lowest of the lines a + d·t, from t = 0 on, for all rows of σ² (rows, C) at once.

        Yields:
            The rows that are still on their way, the candidate of each, and t₋ and t₊, between which it is the lowest.
        """
        weight = np.exp((self.log_weight + np.log(squared)) / (len(self.signed) + 1))
        a, d = self.sum_squares * weight, weight / squared
        rows, start = np.arange(len(squared)), np.zeros(len(squared))
        chosen = a.argmin(axis=1)
        while len(rows):
            height, slope = a[rows, chosen, None], d[rows, chosen, None]
            flatter = d[rows] < slope
            crossing = np.full(flatter.shape, np.inf)
            np.divide(a[rows] - height, slope - d[rows], out=crossing, where=flatter)
            following = crossing.argmin(axis=1)
            end = np.maximum(crossing.min(axis=1), start)
            yield rows, chosen, start, end
            goes_on = np.isfinite(end)
            rows, chosen, start = rows[goes_on], following[goes_on], end[goes_on]


@storable
@dataclass(frozen=True, eq=False)
class QuantileScale(ConformalScale):
    """The same for a network that predicts quantiles: residuals from their centre, in units of half their distance H.

    At the level between these quantiles the scores are those of conformalised quantile regression, in units of the
    target: |r|·H/σ − H. With σ = 1 it is that method itself. `q` has H in a last column.
    """

    own_levels: dict[str, float]  # by side
    excess: dict[str, np.ndarray]  # by side, (n, C) H·(r/σ − 1), each column sorted

    @classmethod
    def of(cls, residuals: np.ndarray, q: np.ndarray, scales: Scales, own_levels: dict[str, float]) -> Self:
        """Return the scores of the calibration rows."""
        signed = residuals[:, None] / np.sqrt(scales.squared(q))
        by_side = {"both": np.abs(signed), "upper": signed, "lower": -signed}
        excess = {side: np.sort(q[:, -1:] * (scores - 1), axis=0) for side, scores in by_side.items()}
        return cls(**vars(ConformalScale.fit(residuals, q, scales)), own_levels=own_levels, excess=excess)

    def bounds(self, q: np.ndarray, levels: tuple[float, ...], side: Side = "both") -> Bounds:
        bounds, own = super().bounds(q, levels, side), self.own_levels[side]
        columns = [i for i, level in enumerate(levels) if math.isclose(level, own)]
        if columns:
            excess = conformal_quantiles(self.excess[side], (own,)).T  # (C, 1)

            def largest_score(rows: np.ndarray, chosen: np.ndarray) -> np.ndarray:
                return (1 + excess[chosen] / q[rows, -1:]) / self.unit

            for mine, found in zip(bounds, self._bounds(q, 1, side, largest_score), strict=True):
                mine[:, columns] = found
        return bounds


@storable
@dataclass(frozen=True, eq=False)
class EachOutput:
    """Outputs that are calibrated one by one."""

    outputs: tuple[ConformalScale, ...]

    def scale(self, q: Sequence[np.ndarray]) -> np.ndarray:  # m times (rows, L) -> σ(x), (rows, m)
        return np.stack([output.scale(of_output) for output, of_output in zip(self.outputs, q, strict=True)], axis=1)

    @property
    def n_rows(self) -> int:
        return len(self.outputs[0].signed)

    def bounds(self, q: Sequence[np.ndarray], levels: tuple[float, ...], side: Side) -> Bounds:  # (rows, m, levels)
        bounds = [output.bounds(of_output, levels, side) for output, of_output in zip(self.outputs, q, strict=True)]
        return np.stack([low for low, _ in bounds], axis=1), np.stack([high for _, high in bounds], axis=1)


@storable
@dataclass(frozen=True, eq=False)
class AllOutputs(EachOutput):
    """All outputs of a row within their bounds at once: score = max over outputs of |r|/(u·σ(x)).

    A third of the rows chooses the σ and the unit u of each output, the others give the quantile of the score.
    """

    units: np.ndarray  # (m,)
    scores: dict[str, np.ndarray]  # by side, (n,) sorted

    @classmethod
    def fit(cls, residuals: np.ndarray, q: Sequence[np.ndarray], scales: Sequence[Scales], seed: int) -> Self:
        """Return the scores of calibration rows with residuals (n, m) and m times variances under each λ, (n, L)."""
        order = np.random.default_rng(seed).permutation(len(residuals))
        choosing, rest = np.split(order, [len(order) // 3])
        if len(choosing) == 0:
            raise ValueError(f"{len(order)} calibration rows are too few for all outputs at once: it takes at least 3")
        chosen = EachOutput(tuple(map(ConformalScale.fit, residuals[choosing].T, [v[choosing] for v in q], scales)))
        u = np.array([math.sqrt(np.mean(output.standardised**2)) or 1.0 for output in chosen.outputs])
        signed = residuals[rest] / (chosen.scale([v[rest] for v in q]) * u)  # (rest, m)
        by_side = {"both": np.abs(signed), "upper": signed, "lower": -signed}
        return cls(chosen.outputs, u, {side: np.sort(scores.max(axis=1)) for side, scores in by_side.items()})

    @property
    def n_rows(self) -> int:
        return len(self.scores["both"])

    def bounds(self, q: Sequence[np.ndarray], levels: tuple[float, ...], side: Side) -> Bounds:  # (rows, m, levels)
        scale = (self.scale(q) * self.units)[:, :, None]
        return two_bounds(scale * conformal_quantiles(self.scores[side], levels), side)


def rows_needed(level: float) -> int:
    """Return the fewest calibration rows for a level: ⌈(n+1)·level⌉ ≤ n."""
    start = max(1, math.floor(level / (1 - level)) - 1)  # rounding makes it too large or too small by one
    return next(n for n in itertools.count(start) if _rank(level, n) <= n)


def conformal_quantiles(scores: np.ndarray, levels: tuple[float, ...]) -> np.ndarray:  # (n, …) -> (levels, …)
    """Return the ⌈(n+1)·level⌉-th smallest of scores that are sorted; raise if there are too few."""
    n = len(scores)
    for level in levels:
        if _rank(level, n) > n:
            problem = f"{n} calibration rows are too few for level {level:g}: it takes at least {rows_needed(level)}"
            raise ValueError(f"{problem}; ask for a level of at most {n / (n + 1):.4g}, or calibrate on more rows")
    return scores[[max(_rank(level, n), 1) - 1 for level in levels]]


def _rank(level: float, n: int) -> int:
    """Return ⌈(n+1)·level⌉ in decimal arithmetic: 0.95·20 is 19, not 19.000000000000004."""
    return math.ceil((n + 1) * level - 1e-9)
