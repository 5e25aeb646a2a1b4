"""The pass over the calibration data: fits and held-out rows in, a `Calibration` out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from ..data.batches import Batches
from ..data.inputs import Inputs
from ..data.row_record import pair_hashes, share_by_chance
from ..engines import Covariance
from ..fitting.fit import (
    Bounds,
    Fit,
    KnownRows,
    Reference,
    RowFunction,
    evaluate_rows,
    in_units_of_noise,
    left_out,
)
from ..fitting.spec import CROSSED, FitSpec
from ..metrics import interval_scores
from ..network.gradient_batch import GradientBatch
from ..network.network import Network
from ..results import Side
from ..storage.encoding import storable
from .conformal import AllOutputs, ConformalScale, EachOutput, QuantileScale, Scales, rows_needed
from .noise import GivenNoise, Noise, learn, with_output

DRIFT_P_VALUE = 1e-3  # below it, calibration and training rows are reported to differ
EXCESS_SEEN_SHARE = 0.05  # of rows, beyond chance, from which on training rows among others are reported
SCORE_LEVEL = 0.95  # of the interval scores before and after

Targets = Callable[[Tensor], np.ndarray]  # of a batch, any columns -> (b, m)


@storable
@dataclass(frozen=True, eq=False)
class Calibration:
    """The result of a calibration."""

    covariances: tuple[Covariance, ...]  # one per fit, which answers for every λ of its scales
    scales: tuple[Scales, ...]
    conformal: EachOutput  # or AllOutputs
    guard: EachOutput | None  # the same without learnt noise, for rows far from the training rows
    noise: tuple[Noise, ...] | str  # v of each output, or why it is constant
    weighted: bool  # whether the rows had weights
    crossed: int  # how many rows had quantiles, that the network predicts, in the wrong order
    far: np.ndarray  # (m,) the leverage from which on a row is far
    score_before: float  # interval score on the calibration rows by the formula; NaN where it has no answer
    score_after: float  # and conformal, each tenth of the rows calibrated by the others; NaN where they are too few
    drift_p_value: float  # of "calibration rows have the leverages of training rows"; NaN where not tested
    seen_share: float  # of the calibration rows that were training rows
    repeated_share: float  # of the training rows that equal another, as many as may be seen by chance
    n_rows: int

    def warnings(self) -> list[str]:
        if self.crossed:
            return [CROSSED.format(self.crossed, self.n_rows)]
        if self.seen_share > share_by_chance(self.repeated_share, self.n_rows) + EXCESS_SEEN_SHARE:
            what = f"{self.seen_share:.0%} of the calibration rows were training rows ({self.repeated_share:.0%} would"
            advice = "the intervals will be too narrow; calibrate on rows that the network was not trained on"
            return [f"{what} be by chance): {advice}"]
        if self.drift_p_value < DRIFT_P_VALUE:
            what = f"do not look like the training rows (their leverages differ, p = {self.drift_p_value:.1g})"
            return [f"the calibration rows {what}: the guarantee is for new rows that are like the calibration rows"]
        return []

    def check_storable(self) -> None:
        """Raise if a file cannot hold this calibration."""
        if given := next((each for each in self.noise if isinstance(each, GivenNoise)), None):
            advice = "save the band before it is calibrated, and calibrate it again after load"
            raise TypeError(f"noise={given.name} is a function or regressor of your own, which no file holds: {advice}")

    @property
    def row_functions(self) -> list[RowFunction]:
        """For each fit the function of gradients that returns h, and q under each λ of the scales, (b, 1 + L)."""
        pairs = zip(self.covariances, self.scales, strict=True)
        return [partial(covariance.leverage_and_variances, dampings=scales.dampings) for covariance, scales in pairs]

    def known(self, network: Callable[[], Network], x: Inputs, to: Reference, found: Sequence[np.ndarray]) -> KnownRows:
        """Return what is known of rows, given what they are compared with and the values of the functions."""
        if len(x) == 0:
            none = [np.zeros((0, len(output.scales.dampings) + 1)) for output in self.conformal.outputs]
            return KnownRows(none, to.unit, np.zeros(0, dtype=bool))
        h, q = np.stack([each[:, 0] for each in found], axis=1), [each[:, 1:] for each in found]
        h = h if x.weight is None else h / x.weight.numpy()
        if isinstance(self.conformal.outputs[0], QuantileScale):
            q = _in_units(q, to.unit)
        q = q if isinstance(self.noise, str) else _with_noise(self.noise, network(), x, to.mean, q)
        far: np.ndarray = np.any(h > self.far, axis=1) if len(self.far) else np.zeros(len(h), dtype=bool)
        return KnownRows(q, to.unit, far)

    def scale(self, rows: KnownRows) -> np.ndarray:  # (n, m)
        return rows.unit * self.conformal.scale(rows.q)

    def bounds(self, rows: KnownRows, levels: tuple[float, ...], side: Side) -> Bounds:  # (n, m, levels) each
        """Return bounds of y − centre; of rows far from the training rows the wider of those with and without v.

        Both cover with their probability, and which rows are far does not depend on their targets.
        """
        lower, upper = self.conformal.bounds(rows.q, levels, side)
        if self.guard is not None and rows.far is not None and rows.far.any():
            low, high = self.guard.bounds([each[rows.far] for each in rows.q], levels, side)
            lower[rows.far], upper[rows.far] = np.minimum(lower[rows.far], low), np.maximum(upper[rows.far], high)
        return lower * rows.unit[:, :, None], upper * rows.unit[:, :, None]


def _in_units(q: Sequence[np.ndarray], half: np.ndarray) -> list[np.ndarray]:
    """Return q in units of half the distance of quantiles, which is added as a last column."""
    return [np.column_stack([each / np.square(half), half]) for each in q]


def _with_noise(
    noise: Sequence[Noise], network: Network, x: Inputs, outputs: np.ndarray, q: Sequence[np.ndarray]
) -> list[np.ndarray]:
    base, prepared = network.features(x), network.prepare(x)
    log_v = [each.log(prepared, with_output(base, outputs[:, o])) for o, each in enumerate(noise)]
    return [np.column_stack(pair) for pair in zip(q, log_v, strict=True)]


def calibrate(
    spec: FitSpec,
    fits: Sequence[Fit],
    batches: Batches,
    targets_of: Targets,
    *,
    tune: bool,
    joint: bool,
    noise: Any,
    seed: int,
) -> Calibration:
    """Return the calibration of fits on the rows of `batches`."""
    quantiles = spec.task.quantiles
    if quantiles is not None and joint:
        raise ValueError("joint=True is for several outputs; a network that predicts quantiles has one")
    if not isinstance(noise, str) and (quantiles is not None or not tune):
        raise ValueError("no noise is added with tune=False, nor to quantiles: leave out noise=")
    networks = [spec.fitted_network(fit) for fit in fits]
    spec.check_weights(networks[0], fits[0])
    covariances, scales = zip(*(_candidates(fit, tune) for fit in fits), strict=True)
    learnt = [learn(noise if quantiles is None and tune else "none", fit) for fit in fits]
    constant = next((each for each in learnt if isinstance(each, str)), None)
    v = [each for of_fit in learnt if not isinstance(of_fit, str) for each in of_fit]
    functions = [partial(_answers, *each) for each in zip(fits, covariances, scales, strict=True)]
    parts, triples, weighted = [], list(zip(fits, networks, functions, strict=True)), False
    crossed = 0
    for x, targets, first in batches.chunks(lambda x: max(networks[0].chunk_rows(x), fits[0].rows_at_once)):
        rows = []
        for fit, network, function in triples:
            weighed = spec.weigh(x, fit.outputs, fit.n_returned, first)
            rows.append(evaluate_rows(network, weighed, function, fit.rows_at_once, first))
            if (given := weighed.extras.get("given")) is not None:  # leverages are compared as those of weight 1
                rows[-1][1][:, :, 1] /= given.numpy()
        of_outputs = [of_fit[:, o] for _, of_fit in rows for o in range(of_fit.shape[1])]  # each (b, 2 + L)
        outputs = np.concatenate([part for part, _ in rows], axis=1)
        to = spec.reference(fits, x, outputs, first)
        if constant is None:
            of_outputs = _with_noise(v, networks[0], x, outputs, of_outputs)
        weighted, crossed = weighted or x.weight is not None, crossed + to.crossed
        r = (targets_of(targets) - to.centre) / to.unit
        parts.append((r, to.unit, pair_hashes(networks[0].prepare(x), targets), *of_outputs))
    if not parts:
        raise ValueError("the calibration data are empty (a generator can be read only once)")
    r, unit, hashes, *answers = (np.concatenate(part) for part in zip(*parts, strict=True))
    formula, h, q = zip(*((of_output[:, 0], of_output[:, 1], of_output[:, 2:]) for of_output in answers), strict=True)
    fitted: Any = ConformalScale.fit
    if quantiles is not None:
        own_levels = {"both": quantiles[2] - quantiles[0], "upper": quantiles[2], "lower": 1 - quantiles[0]}
        q, fitted = _in_units(q, unit), partial(QuantileScale.of, own_levels=own_levels)
    units = [_unit_of_b(fit, quantiles is not None, weighted or not tune) for fit in fits]
    scales = tuple(replace(each, b=each.b * unit_of_b) for each, unit_of_b in zip(scales, units, strict=True))
    plain = [of_fit for fit, of_fit in zip(fits, scales, strict=True) for _ in range(fit.n_outputs)]
    candidates = plain if constant is not None else [each.with_noise() for each in plain]

    def conformal(candidates: list[Scales]) -> EachOutput:
        if joint:
            return AllOutputs.fit(r, q, candidates, seed)
        return EachOutput(tuple(map(fitted, r.T, q, candidates)))

    after = before = np.nan
    if not joint:
        after = float(np.mean(list(map(partial(cross_calibrated_score, fitted, seed), r.T, q, candidates, unit.T))))
    if quantiles is None:
        q_formula = np.stack(in_units_of_noise(fits, formula), axis=1)
        half = np.concatenate([fit.half_width(SCORE_LEVEL) for fit in fits]) * np.sqrt(1 + q_formula)
        before = float((unit * interval_scores(r, -half, half, SCORE_LEVEL)).mean())
    training = [leverages for fit in fits if len(fit.leverages) for leverages in fit.leverages.T]
    p_values = list(map(drift_p_value, training, h))
    drift = min(1.0, r.shape[1] * min(p_values)) if p_values else np.nan  # Bonferroni: a test for each output
    seen = fits[0].seen
    found = (before, after, drift, seen.share(hashes), seen.repeated)
    far = np.concatenate([fit.far for fit in fits])
    guard, noise = (None, constant) if constant is not None else (conformal(plain), tuple(v))
    about = (weighted, crossed, far)
    return Calibration(covariances, scales, conformal(candidates), guard, noise, *about, *found, n_rows=len(r))


def _candidates(fit: Fit, tune: bool) -> tuple[Covariance, Scales]:
    """Return the candidate scales of a fit, and the covariance that answers for their λ."""
    if tune:
        spectral = fit.covariance.eigendecomposed()
        spectral = spectral if fit.reference.damping is None else spectral.at(fit.reference.damping)
        return spectral, Scales.grid(spectral.eigenvalues, fit.n_rows * fit.n_outputs)
    if fit.covariance.damping is None:
        raise ValueError("tune=False takes λ from the fit, which has none: give weight_decay or damping, or tune")
    return fit.covariance, Scales.single(fit.covariance.damping)


def _unit_of_b(fit: Fit, quantiles: bool, weighted: bool) -> float:
    """Return what makes b·q a multiple of what it is added to: a square of the target, or noise of weight 1."""
    if quantiles:
        return float(fit.losses[0]) / fit.n_rows
    return 1.0 if weighted else fit.total_weight / fit.n_rows


def _answers(fit: Fit, covariance: Covariance, scales: Scales, g: GradientBatch) -> np.ndarray:  # (b, 2 + L)
    """Return q by the formula, the leverage, and q under every λ of the scales."""
    formula = np.full(len(g), np.nan) if fit.covariance.damping is None else fit.variance(g)
    return np.column_stack([formula, fit.reference.leverage(g), covariance.variances(g, scales.dampings)])


def cross_calibrated_score(
    fitted: Callable[..., ConformalScale],
    seed: int,
    residuals: np.ndarray,
    q: np.ndarray,
    scales: Scales,
    unit: np.ndarray,
) -> float:
    """Return the mean interval score with each tenth of the rows calibrated by the others; NaN if these are too few."""
    order = np.random.default_rng(seed).permutation(len(residuals))
    scores = []
    for part in np.array_split(order, min(10, len(order))):
        rest = np.setdiff1d(order, part)
        if len(rest) < rows_needed(SCORE_LEVEL):
            return math.nan
        lower, upper = fitted(residuals[rest], q[rest], scales).bounds(q[part], (SCORE_LEVEL,))
        scores.append(unit[part] * interval_scores(residuals[part], lower[:, 0], upper[:, 0], SCORE_LEVEL))
    return float(np.concatenate(scores).mean())


def drift_p_value(training: np.ndarray, calibration: np.ndarray) -> float:
    """Return the p-value of "these are leverages of rows like the training rows"; NaN without training leverages.

    A new row's leverage lies between that of the same row among the training rows, h, and that of the row left out of
    them, h/(1 − h). Two one-sided Kolmogorov–Smirnov tests: is it smaller than h, is it larger than h/(1 − h)?
    """
    if len(training) == 0:
        return math.nan
    from scipy.stats import ks_2samp

    rounding = 1e-4  # leverages of equal rows differ by this much at most
    smaller = ks_2samp(calibration, (1 - rounding) * training, alternative="greater", method="asymp").pvalue
    larger = ks_2samp(calibration, (1 + rounding) * left_out(training), alternative="less", method="asymp").pvalue
    return min(1.0, 2 * float(min(smaller, larger)))
