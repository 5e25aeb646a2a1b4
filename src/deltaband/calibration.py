"""Conformal calibration: fits and held-out rows in, intervals on the delta method's scale σ(x) = √(1 + b·q_λ(x)).

The choice of λ and b among the candidates c of `Scales` is part of the conformal argument: it is made on all n + 1
residuals, that of the new row, r, included, by the profile likelihood of a Gaussian,

    argmin over c of  (Σᵢ rᵢ²/σ²_c(xᵢ) + r²/σ²_c(x)) · exp(M_c),
                      M_c = (Σᵢ log σ²_c(xᵢ) + log σ²_c(x) + 2·prior_c)/(n+1),

so that the scores |r|/σ of exchangeable rows are exchangeable, and their quantile covers with probability ≥ 1 − α.
These are straight lines in t = r²: each scale is chosen on an interval [t₋, t₊] of the lower envelope, and the bound
for y − ŷ is the largest r that lies in [√t₋, √t₊] of some scale and below its quantile times σ.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np
from torch import Tensor

from .damping import TYPICAL_RELATIVE_DAMPING
from .data.batches import Batches
from .data.row_record import pair_hashes, share_by_chance
from .engines import Covariance
from .fitting.fit import Fit, RowFunction, evaluate_rows
from .metrics import interval_scores
from .network.gradient_batch import GradientBatch
from .network.network import Network
from .results import Side
from .storage.encoding import storable

RELATIVE_DAMPINGS = 10.0 ** np.arange(-8, 2)  # λ in units of the largest eigenvalue of JᵀJ
VARIANCE_SHARES = np.array([0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 0.999])  # of σ² that is b·q at the average training row
NUMBERS_AT_ONCE = 2**22  # size of a (rows, candidates, candidates or levels) array
DRIFT_P_VALUE = 1e-3  # below it, calibration and training rows are reported to differ
EXCESS_SEEN_SHARE = 0.05  # of rows, beyond chance, from which on training rows among others are reported
SCORE_LEVEL = 0.95  # of the interval scores before and after

Bounds = tuple[np.ndarray, np.ndarray]  # lower and upper, of y − ŷ
Residuals = Callable[[np.ndarray, Tensor], np.ndarray]  # outputs (b, m), targets -> (b, m)


@storable
@dataclass(frozen=True, eq=False)
class Scales:
    """Candidates c for σ² = 1 + b·q_λ, each with its own λ and b."""

    dampings: np.ndarray  # (L,) the different λ
    damping_index: np.ndarray  # (C,) the λ of each candidate, as an index into `dampings`
    b: np.ndarray  # (C,)
    prior: np.ndarray  # (C,) −log of the prior weight

    @classmethod
    def single(cls, damping: float, b: float = 1.0) -> Self:
        return cls(np.array([damping]), np.array([0]), np.array([b]), np.array([0.0]))

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

    def squared(self, q: np.ndarray) -> np.ndarray:  # (rows, L) -> σ², (rows, C)
        return 1.0 + self.b * q[:, self.damping_index]


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
    def standardised(self) -> np.ndarray:  # (n,) |r|/σ, sorted
        return self.unit * self.absolute[:, self.best]

    def scale(self, q: np.ndarray) -> np.ndarray:  # (rows, L) -> σ(x), (rows,)
        return np.sqrt(self.scales.squared(q)[:, self.best])

    def quantile(self, level: float) -> float:
        return float(_quantiles(self.standardised, (level,))[0])

    def bounds(self, q: np.ndarray, levels: tuple[float, ...], side: Side = "both") -> Bounds:  # (rows, levels) each
        n_candidates = len(self.scales.b)
        step = max(1, NUMBERS_AT_ONCE // (n_candidates * max(n_candidates, len(levels))))
        parts = [self._largest_residuals(q[i : i + step], levels, side) for i in range(0, len(q), step)]
        return _two_bounds(np.concatenate([*parts, np.zeros((0, len(levels)))]), side)

    def _largest_residuals(self, q: np.ndarray, levels: tuple[float, ...], side: Side) -> np.ndarray:
        """Return the largest residual in the interval of each row and level; negated for the lower side."""
        squared = self.scales.squared(q)
        first, last = (np.sqrt(t)[:, None] for t in self._chosen_between(squared))  # (rows, 1, C)
        scores = {"both": self.absolute, "upper": self.signed, "lower": -self.signed[::-1]}[side]
        cut = np.sqrt(squared)[:, None] * _quantiles(scores, levels)
        # of each candidate the largest r with |r| within [first, last] and r at most cut
        above = np.where(cut >= first, np.minimum(last, cut), -np.inf)
        below = np.where((cut < first) & (cut >= -last), np.minimum(-first, cut), -np.inf)
        largest = np.where(last >= first, np.maximum(above, below), -np.inf).max(axis=2)
        return self.unit * (np.maximum(largest, 0.0) if side == "both" else largest)

    def _chosen_between(self, squared: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # (rows, C) -> (rows, C) twice
        """Return t₋ and t₊, between which a candidate is the lowest of the lines a + d·t; inf and 0 if it never is."""
        weight = np.exp((self.log_weight + np.log(squared)) / (len(self.signed) + 1))
        a, d = self.sum_squares * weight, weight / squared
        rise = a[:, None, :] - a[:, :, None]  # [row, c, other]
        slope = d[:, :, None] - d[:, None, :]
        with np.errstate(divide="ignore", invalid="ignore"):
            crossing = rise / slope
        first = np.where(slope < 0, crossing, np.where((slope == 0) & (rise < 0), np.inf, 0.0)).max(axis=2, initial=0.0)
        last = np.where(slope > 0, crossing, np.inf).min(axis=2)
        never = last < first
        return np.where(never, np.inf, first), np.where(never, 0.0, last)


def _two_bounds(bound: np.ndarray, side: Side) -> Bounds:
    """Return −bound and bound; for one side the other bound is infinite."""
    infinite = np.full_like(bound, np.inf)
    return -infinite if side == "upper" else -bound, infinite if side == "lower" else bound


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
        return _two_bounds((self.scale(q) * self.units)[:, :, None] * _quantiles(self.scores[side], levels), side)


def rows_needed(level: float) -> int:
    """Return the fewest calibration rows for a level: ⌈(n+1)·level⌉ ≤ n."""
    start = max(1, math.floor(level / (1 - level)) - 1)  # rounding makes it too large or too small by one
    return next(n for n in itertools.count(start) if _rank(level, n) <= n)


def _quantiles(scores: np.ndarray, levels: tuple[float, ...]) -> np.ndarray:  # (n, …), sorted -> (levels, …)
    n = len(scores)
    for level in levels:
        if _rank(level, n) > n:
            problem = f"{n} calibration rows are too few for level {level:g}: it takes at least {rows_needed(level)}"
            raise ValueError(f"{problem}; ask for a level of at most {n / (n + 1):.4g}, or calibrate on more rows")
    return scores[[max(_rank(level, n), 1) - 1 for level in levels]]


def _rank(level: float, n: int) -> int:
    """Return ⌈(n+1)·level⌉ in decimal arithmetic: 0.95·20 is 19, not 19.000000000000004."""
    return math.ceil((n + 1) * level - 1e-9)


@storable
@dataclass(frozen=True, eq=False)
class Calibration:
    """The result of a calibration."""

    covariances: tuple[Covariance, ...]  # one per fit, which answers for every λ of its scales
    scales: tuple[Scales, ...]
    conformal: EachOutput  # or AllOutputs
    score_before: float  # interval score on the calibration rows by the formula; NaN where it has no answer
    score_after: float  # and conformal, each tenth of the rows calibrated by the others; NaN where they are too few
    drift_p_value: float  # of "calibration rows have the leverages of training rows"; NaN where not tested
    seen_share: float  # of the calibration rows that were training rows
    repeated_share: float  # of the training rows that equal another, as many as may be seen by chance
    n_rows: int

    def warnings(self) -> list[str]:
        if self.seen_share > share_by_chance(self.repeated_share, self.n_rows) + EXCESS_SEEN_SHARE:
            what = f"{self.seen_share:.0%} of the calibration rows were training rows ({self.repeated_share:.0%} would"
            advice = "the intervals will be too narrow; calibrate on rows that the network was not trained on"
            return [f"{what} be by chance): {advice}"]
        if self.drift_p_value < DRIFT_P_VALUE:
            what = f"do not look like the training rows (their leverages differ, p = {self.drift_p_value:.1g})"
            return [f"the calibration rows {what}: the guarantee is for new rows that are like the calibration rows"]
        return []

    @property
    def variance_functions(self) -> list[RowFunction]:
        """For each fit the function of gradients that returns q under each λ of the scales, (b, L)."""
        pairs = zip(self.covariances, self.scales, strict=True)
        return [partial(covariance.variances, dampings=scales.dampings) for covariance, scales in pairs]


def calibrate(
    fitted: Sequence[tuple[Fit, Network]], batches: Batches, residuals: Residuals, *, tune: bool, joint: bool, seed: int
) -> Calibration:
    """Return the calibration of fits, each with its network, on the rows of `batches`."""
    fits, networks = zip(*fitted, strict=True)
    covariances, scales = zip(*(_candidates(fit, tune) for fit in fits), strict=True)
    functions = [partial(_answers, *each) for each in zip(fits, covariances, scales, strict=True)]
    parts, triples = [], list(zip(fits, networks, functions, strict=True))
    for x, targets, first in batches.chunks(lambda x: max(networks[0].chunk_rows(x), fits[0].rows_at_once)):
        rows = [evaluate_rows(network, x, function, fit.rows_at_once, first) for fit, network, function in triples]
        of_outputs = [of_fit[:, o] for _, of_fit in rows for o in range(of_fit.shape[1])]  # each (b, 2 + L)
        r = residuals(np.concatenate([outputs for outputs, _ in rows], axis=1), targets)
        parts.append((r, pair_hashes(networks[0].prepare(x), targets), *of_outputs))
    if not parts:
        raise ValueError("the calibration data are empty (a generator can be read only once)")
    r, hashes, *answers = (np.concatenate(part) for part in zip(*parts, strict=True))
    formula, h, q = zip(*((of_output[:, 0], of_output[:, 1], of_output[:, 2:]) for of_output in answers), strict=True)
    candidates = [of_fit for fit, of_fit in zip(fits, scales, strict=True) for _ in range(fit.n_outputs)]
    if not joint:
        conformal = EachOutput(tuple(map(ConformalScale.fit, r.T, q, candidates)))
        after = float(np.mean(list(map(partial(cross_calibrated_score, seed=seed), r.T, q, candidates))))
    else:
        conformal, after = AllOutputs.fit(r, q, candidates, seed), np.nan
    half = np.concatenate([fit.half_width(SCORE_LEVEL) for fit in fits]) * np.sqrt(1 + np.stack(formula, axis=1))
    before = float(interval_scores(r, -half, half, SCORE_LEVEL).mean())
    training = [leverages for fit in fits if len(fit.leverages) for leverages in fit.leverages.T]
    p_values = list(map(drift_p_value, training, h))
    drift = min(1.0, r.shape[1] * min(p_values)) if p_values else np.nan  # Bonferroni: a test for each output
    seen = fits[0].seen
    scores = (before, after, drift, seen.share(hashes), seen.repeated)
    return Calibration(covariances, scales, conformal, *scores, n_rows=len(r))


def _candidates(fit: Fit, tune: bool) -> tuple[Covariance, Scales]:
    """Return the candidate scales of a fit, and the covariance that answers for their λ."""
    if tune:
        spectral = fit.covariance.eigendecomposed()
        return spectral, Scales.grid(spectral.eigenvalues, fit.n_rows * fit.n_outputs)
    if fit.covariance.damping is None:
        raise ValueError("tune=False takes λ from the fit, which has none: give weight_decay or damping, or tune")
    return fit.covariance, Scales.single(fit.covariance.damping)


def _answers(fit: Fit, covariance: Covariance, scales: Scales, g: GradientBatch) -> np.ndarray:  # (b, 2 + L)
    """Return q by the formula, the leverage, and q under every λ of the scales."""
    formula = np.full(len(g), np.nan) if fit.covariance.damping is None else fit.covariance.variance(g)
    return np.column_stack([formula, fit.reference.leverage(g), covariance.variances(g, scales.dampings)])


def cross_calibrated_score(residuals: np.ndarray, q: np.ndarray, scales: Scales, seed: int) -> float:
    """Return the mean interval score with each tenth of the rows calibrated by the others; NaN if these are too few."""
    order = np.random.default_rng(seed).permutation(len(residuals))
    scores = []
    for part in np.array_split(order, min(10, len(order))):
        rest = np.setdiff1d(order, part)
        if len(rest) < rows_needed(SCORE_LEVEL):
            return math.nan
        lower, upper = ConformalScale.fit(residuals[rest], q[rest], scales).bounds(q[part], (SCORE_LEVEL,))
        scores.append(interval_scores(residuals[part], lower[:, 0], upper[:, 0], SCORE_LEVEL))
    return float(np.concatenate(scores).mean())


def drift_p_value(training: np.ndarray, calibration: np.ndarray) -> float:
    """Return the p-value of "these are leverages of rows like the training rows"; NaN without training leverages.

    A new row's leverage lies between that of the same row among the training rows, h, and that of the row left out of
    them, h/(1 − h). Two one-sided Kolmogorov–Smirnov tests: is it smaller than h, is it larger than h/(1 − h)?
    """
    if len(training) == 0:
        return math.nan
    from scipy.stats import ks_2samp

    left_out = training / np.maximum(1 - training, np.finfo(np.float64).eps)
    rounding = 1e-4  # leverages of equal rows differ by this much at most
    smaller = ks_2samp(calibration, (1 - rounding) * training, alternative="greater", method="asymp").pvalue
    larger = ks_2samp(calibration, (1 + rounding) * left_out, alternative="less", method="asymp").pvalue
    return min(1.0, 2 * float(min(smaller, larger)))
