"""The pass over the calibration data: fits and held-out rows in, a `Calibration` out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from ..data.batches import Batches
from ..data.row_record import pair_hashes, share_by_chance
from ..engines import Covariance
from ..fitting.fit import Fit, RowFunction, evaluate_rows
from ..metrics import interval_scores
from ..network.gradient_batch import GradientBatch
from ..network.network import Network
from ..storage.encoding import storable
from .conformal import AllOutputs, ConformalScale, EachOutput, Scales, rows_needed

DRIFT_P_VALUE = 1e-3  # below it, calibration and training rows are reported to differ
EXCESS_SEEN_SHARE = 0.05  # of rows, beyond chance, from which on training rows among others are reported
SCORE_LEVEL = 0.95  # of the interval scores before and after

Residuals = Callable[[np.ndarray, Tensor], np.ndarray]  # outputs (b, m), targets -> (b, m)


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
