"""Conformal intervals on the delta method's scale, σ² = (1 + b·q_λ(x))·v(x)^(2γ), v being the learnt noise.

The choice of λ, b and γ among the candidates c of `Scales` is part of the conformal argument: it is made on all n + 1
residuals, that of the new row, r, included, by the profile likelihood of a Gaussian,

    argmin over c of  (Σᵢ rᵢ²/σ²_c(xᵢ) + r²/σ²_c(x)) · exp(M_c),
                      M_c = (Σᵢ log σ²_c(xᵢ) + log σ²_c(x) + 2·prior_c)/(n+1),

so that the scores |r|/σ of exchangeable rows are exchangeable, and their quantile covers with probability ≥ 1 − α; a
`QuantileRule` says which quantile that is for which row.
These are straight lines in t = r²: each scale is chosen on an interval [t₋, t₊] of the lower envelope, and the bound
for y − ŷ is the largest r that lies in [√t₋, √t₊] of some scale and below its quantile times σ.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Self

import numpy as np

from ..fitting.fit import Bounds
from ..results import Side, two_bounds
from ..storage.encoding import storable
from .quantiles import ALL_ROWS, QuantileRule, conformal_quantiles
from .scales import Scales

NUMBERS_AT_ONCE = 2**22  # size of a (rows, candidates or levels) array

LargestScore = Callable[[np.ndarray, np.ndarray], np.ndarray]  # rows, the candidate of each -> r/σ, (rows, levels)


@storable
@dataclass(frozen=True, eq=False)
class ConformalScale:
    """Calibration rows under every candidate scale, from which the interval of a new row's residual follows.

    It covers with probability ≥ `level` for the rows that its rule is about, whatever the network.
    """

    scales: Scales
    rule: QuantileRule
    unit: float  # of the scores
    signed: np.ndarray  # (n, C) the scores r/σ
    sum_squares: np.ndarray  # (C,)
    log_weight: np.ndarray  # (C,) Σ log σ² + 2·prior
    best: int  # the candidate that the calibration rows alone choose

    @classmethod
    def fit(cls, residuals: np.ndarray, q: np.ndarray, scales: Scales, rule: QuantileRule = ALL_ROWS) -> Self:
        """Return the scores of the calibration rows, given their residuals (n,) and variances under each λ, (n, L)."""
        squared = scales.squared(q)
        # a power of two, which changes no digit, keeps the squares from over- and underflowing
        unit = math.ldexp(1.0, math.frexp(float(np.abs(residuals).max()))[1] - 1)
        signed = residuals[:, None] / unit / np.sqrt(squared)
        sum_squares = np.square(signed).sum(axis=0)
        log_weight = np.log(squared).sum(axis=0) + 2 * scales.prior
        best = int(np.argmin(_negative_log_likelihood(sum_squares, log_weight, len(residuals))))
        return cls(scales, rule, unit, signed, sum_squares, log_weight, best)

    @property
    def damping(self) -> float:
        """λ of the best candidate; where that is the constant width, which has none, of the best of the others."""
        varying = np.where(self.scales.b > 0, self.losses, np.inf)
        best = int(varying.argmin()) if self.scales.b.any() else self.best
        return float(self.scales.dampings[self.scales.damping_index[best]])

    @property
    def losses(self) -> np.ndarray:  # (C,)
        """Return how unlikely the calibration rows are under each candidate."""
        return _negative_log_likelihood(self.sum_squares, self.log_weight, len(self.signed))

    def root_mean_square(self, candidate: int) -> float:
        """Return that of |r|/σ over the calibration rows."""
        return self.unit * math.sqrt(float(self.sum_squares[candidate]) / len(self.signed))

    @property
    def b(self) -> float:  # of the best candidate, as what follows
        return float(self.scales.b[self.best])

    @property
    def gamma(self) -> float:
        return 0.0 if self.scales.gamma is None else float(self.scales.gamma[self.best])

    @property
    def standardised(self) -> np.ndarray:  # (n,) |r|/σ, sorted
        return self.unit * np.sort(np.abs(self.signed[:, self.best]))

    def scale(self, q: np.ndarray) -> np.ndarray:  # (rows, L) -> σ(x), (rows,)
        return np.sqrt(self.scales.squared(q)[:, self.best])

    def own_share(self, q: np.ndarray) -> float:  # (rows, L)
        """Return the share of σ that is the model's own uncertainty: the mean of 1 − 1/√(1 + b·q_λ)."""
        q_best = q[:, self.scales.damping_index[self.best]]
        return float(np.mean(1 - 1 / np.sqrt(1 + self.b * q_best)))

    def quantile(self, level: float) -> float:
        """Return the conformal quantile of the scores of all rows."""
        return float(conformal_quantiles(self.standardised, (level,))[0])

    def bounds(
        self, q: np.ndarray, levels: tuple[float, ...], side: Side = "both", place: np.ndarray | None = None
    ) -> Bounds:  # (rows, levels) each
        """Return bounds of the residuals of rows with these variances, at the places that the rule needs."""
        return self._bounds(q, len(levels), side, partial(self._quantiles, self.scores, side, levels, place))

    def scores(self, side: Side, candidate: int) -> np.ndarray:  # (n,)
        return of_side(self.signed[:, candidate], side)

    def _quantiles(
        self,
        scores: Callable[[Side, int], np.ndarray],
        side: Side,
        levels: tuple[float, ...],
        place: np.ndarray | None,
        rows: np.ndarray,
        chosen: np.ndarray,
    ) -> np.ndarray:  # (rows, levels)
        """Return the quantiles of scores under the candidates that are chosen for some rows."""
        found = np.empty((len(rows), len(levels)))
        here = np.zeros((len(rows), 0)) if place is None else place[rows]
        for candidate in np.unique(chosen).tolist():
            at, key = chosen == candidate, (scores.__name__, side, candidate)
            arranged = self._arranged.get(key)
            if arranged is None:
                arranged = self._arranged[key] = self.rule.arrange(scores(side, candidate))
            found[at] = self.rule.quantiles(arranged, here[at], levels)
        return found

    @cached_property
    def _arranged(self) -> dict[tuple[str, Side, int], Any]:
        """The scores of candidates that have been chosen so far, which are few, as the rule needs them."""
        return {}

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
            with np.errstate(over="ignore"):  # lines that are all but parallel cross at infinity
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
    half: np.ndarray  # (n,) H

    @classmethod
    def of(
        cls,
        residuals: np.ndarray,
        q: np.ndarray,
        scales: Scales,
        own_levels: dict[str, float],
        rule: QuantileRule = ALL_ROWS,
    ) -> Self:
        """Return the scores of the calibration rows."""
        return cls(**vars(ConformalScale.fit(residuals, q, scales, rule)), own_levels=own_levels, half=q[:, -1])

    def excess(self, side: Side, candidate: int) -> np.ndarray:  # (n,) H·(|r|/σ − 1)
        return self.half * (self.unit * self.scores(side, candidate) - 1)

    def bounds(
        self, q: np.ndarray, levels: tuple[float, ...], side: Side = "both", place: np.ndarray | None = None
    ) -> Bounds:
        bounds, own = super().bounds(q, levels, side, place), self.own_levels[side]
        columns = [i for i, level in enumerate(levels) if is_own_level(level, own)]
        if columns:

            def largest_score(rows: np.ndarray, chosen: np.ndarray) -> np.ndarray:
                excess = self._quantiles(self.excess, side, (own,), place, rows, chosen)
                return (1 + excess / q[rows, -1:]) / self.unit

            for mine, found in zip(bounds, self._bounds(q, 1, side, largest_score), strict=True):
                mine[:, columns] = found
        return bounds


def is_own_level(level: float, own: float) -> bool:
    """Return whether a level is the network's own, up to what float32 has rounded."""
    return math.isclose(level, own, rel_tol=1e-6)


@storable
@dataclass(frozen=True, eq=False)
class EachOutput:
    """Outputs that are calibrated one by one."""

    outputs: tuple[ConformalScale, ...]

    def scale(self, q: Sequence[np.ndarray]) -> np.ndarray:  # m times (rows, L) -> σ(x), (rows, m)
        return np.stack([output.scale(of_output) for output, of_output in zip(self.outputs, q, strict=True)], axis=1)

    @property
    def n_rows(self) -> int:
        """The rows of the output that has fewest."""
        return min(len(output.signed) for output in self.outputs)

    @property
    def rule(self) -> QuantileRule:
        return self.outputs[0].rule

    def bounds(
        self, q: Sequence[np.ndarray], levels: tuple[float, ...], side: Side, place: np.ndarray | None = None
    ) -> Bounds:  # (rows, m, levels) each
        pairs = zip(self.outputs, q, strict=True)
        bounds = [output.bounds(of_output, levels, side, place) for output, of_output in pairs]
        return np.stack([low for low, _ in bounds], axis=1), np.stack([high for _, high in bounds], axis=1)


@storable
@dataclass(frozen=True, eq=False)
class AllOutputs(EachOutput):
    """All outputs of a row within their bounds at once: score = max over outputs of |r|/(u·σ(x)).

    A third of the rows chooses the σ and the unit u of each output, the others give the quantile of the score.
    """

    units: np.ndarray  # (m,)
    signed: np.ndarray  # (n, m) scores of the other rows
    rule_of_others: QuantileRule

    @classmethod
    def fit(
        cls,
        residuals: np.ndarray,
        q: Sequence[np.ndarray],
        scales: Sequence[Scales],
        seed: int,
        rule: QuantileRule = ALL_ROWS,
    ) -> Self:
        """Return the scores of calibration rows with residuals (n, m) and m times variances under each λ, (n, L)."""
        choosing, rest = thirds(len(residuals), seed)
        chosen = alone(residuals[choosing], [v[choosing] for v in q], scales)
        u = np.array([math.sqrt(np.mean(output.standardised**2)) or 1.0 for output in chosen.outputs])
        signed = residuals[rest] / (chosen.scale([v[rest] for v in q]) * u)  # (rest, m)
        return cls(chosen.outputs, u, signed, rule.take(rest))

    @property
    def n_rows(self) -> int:
        return len(self.signed)

    @property
    def rule(self) -> QuantileRule:
        return self.rule_of_others

    @cached_property
    def _arranged(self) -> dict[Side, Any]:
        """The largest scores of rows, by side, as the rule needs them."""
        return {}

    def bounds(
        self, q: Sequence[np.ndarray], levels: tuple[float, ...], side: Side, place: np.ndarray | None = None
    ) -> Bounds:  # (rows, m, levels) each
        scale = (self.scale(q) * self.units)[:, :, None]
        arranged = self._arranged.get(side)
        if arranged is None:
            arranged = self._arranged[side] = self.rule.arrange(np.nanmax(of_side(self.signed, side), axis=1))
        place = np.zeros((len(scale), 0)) if place is None else place
        return two_bounds(scale * self.rule.quantiles(arranged, place, levels)[:, None, :], side)


def alone(
    residuals: np.ndarray,
    q: Sequence[np.ndarray],
    scales: Sequence[Scales],
    rule: QuantileRule = ALL_ROWS,
    fitted: Callable[..., ConformalScale] = ConformalScale.fit,
) -> EachOutput:
    """Return each output with its calibration rows: those with a target, whose residuals (n, m) are not NaN."""
    found = []
    for o, (r, v, of_output) in enumerate(zip(residuals.T, q, scales, strict=True)):
        there = np.flatnonzero(~np.isnan(r))
        if len(there) == 0:
            raise ValueError(f"output {o} has no target among the {len(r)} rows that choose the scale: give more rows")
        found.append(fitted(r[there], v[there], of_output, rule=rule if len(there) == len(r) else rule.take(there)))
    return EachOutput(tuple(found))


def thirds(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which of n rows choose the scale, a third of them, and which the quantiles follow from."""
    order = np.random.default_rng(seed).permutation(n)
    choosing, rest = np.split(order, [n // 3])
    if len(choosing) == 0:
        raise ValueError(f"{n} calibration rows are too few for all outputs at once: it takes at least 3")
    return choosing, rest


def of_side(signed: np.ndarray, side: Side) -> np.ndarray:
    """Return the scores of which the largest bound a residual on this side."""
    return np.abs(signed) if side == "both" else signed if side == "upper" else -signed


def _negative_log_likelihood(sum_squares: np.ndarray, log_weight: np.ndarray, n: int) -> np.ndarray:  # (C,)
    """Return twice the negative log-likelihood of each candidate, per row, up to constants and with the prior."""
    return np.log(np.maximum(sum_squares, 1e-300)) + log_weight / n
