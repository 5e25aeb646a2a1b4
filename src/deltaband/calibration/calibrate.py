"""The pass over the calibration data: fits and held-out rows in, a `Calibration` out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from ..data.batches import Batches
from ..data.inputs import MANY_ROWS, Inputs
from ..data.row_record import pair_hashes, share_by_chance
from ..display import evenly_spaced
from ..engines import Covariance
from ..errors import MisfitMessage, warn
from ..fitting import sanity
from ..fitting.fit import (
    Bounds,
    Fit,
    KnownRows,
    Reference,
    RowFunction,
    evaluate_rows,
    in_units_of_noise,
)
from ..fitting.some_outputs import some_outputs
from ..fitting.spec import CROSSED, FitSpec, all_outputs
from ..fitting.tasks import Regression
from ..fitting.weights import targets_there
from ..machine import on_free_cores
from ..network.network import Network
from ..results import Side
from ..storage.encoding import storable
from ..transforms import TargetTransform
from .candidates import answers_to, candidates_of, share_unit
from .conformal import AllOutputs, ConformalScale, EachOutput, QuantileScale, alone
from .groups import ByGroup
from .noise import GivenNoise, Noise, learn, with_output
from .overlap import Overlapping
from .pooled import Joint, PooledOutputs, blocks
from .quality import SCORE_LEVEL, cross_calibrated_bounds, drift_p_value, mean_score
from .quantiles import Given, QuantileRule, rows_needed
from .scales import Scales
from .shift import GivenRatio, Weighted

DRIFT_P_VALUE = 1e-3  # below it, calibration and training rows are reported to differ
EXCESS_SEEN_SHARE = 0.05  # of rows, beyond chance, from which on training rows among others are reported
WIDTH_ROWS = 1_000  # calibration rows, at most, whose widths the summary speaks of

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
    leverages: np.ndarray  # (n, m) of the calibration rows
    score_before: float  # interval score on the calibration rows by the formula; NaN where it has no answer
    score_after: float  # and conformal, each tenth of the rows calibrated by the others; NaN where they are too few
    drift_p_value: float  # of "calibration rows have the leverages of training rows"; NaN where not tested
    seen_share: float  # of the calibration rows that were training rows
    repeated_share: float  # of the training rows that equal another, as many as may be seen by chance
    n_rows: int
    own_share: np.ndarray  # (m,) the share of σ that is the model's own uncertainty, on average
    widths: np.ndarray  # (m, 2) of 95 % intervals of calibration rows, the smallest and the largest; NaN: too few rows
    suspicions: tuple[str, ...]  # what does not look as if the network had been trained for such rows

    def warnings(self) -> list[str]:
        return [*self._warnings(), *self.rule.warnings]

    def _warnings(self) -> list[str]:
        if self.crossed:
            return [CROSSED.format(self.crossed, self.n_rows)]
        if self.seen_share > share_by_chance(self.repeated_share, self.n_rows) + EXCESS_SEEN_SHARE:
            what = f"{self.seen_share:.0%} of the calibration rows were training rows ({self.repeated_share:.0%} would"
            advice = "the intervals will be too narrow; calibrate on rows that the network was not trained on"
            return [f"{what} be by chance): {advice}"]
        if self.suspicions:
            return list(map(MisfitMessage, self.suspicions))
        if self.drift_p_value < DRIFT_P_VALUE:
            what = f"do not look like the training rows (their leverages differ, p = {self.drift_p_value:.1g})"
            advice = "the guarantee is for new rows that are like the calibration rows: if new rows are to be like the"
            return [f"the calibration rows {what}; {advice} training rows, shuffle before you split"]
        return []

    def check_storable(self) -> None:
        """Raise if a file cannot hold this calibration."""
        given = [f"noise={each.name}" for each in self.noise if isinstance(each, GivenNoise)]
        if isinstance(self.rule, Weighted) and isinstance(self.rule.ratio, GivenRatio):
            given.append(f"weights={self.rule.ratio.name}")
        if given:
            advice = "save the band before it is calibrated, and calibrate it again after load"
            raise TypeError(f"{given[0]} is a function or regressor of your own, which no file holds: {advice}")

    @property
    def rule(self) -> QuantileRule:
        return self.conformal.rule

    @property
    def is_joint(self) -> bool:
        """Whether a level is for all outputs of a row at once."""
        return isinstance(self.conformal, AllOutputs)

    @property
    def misses(self) -> bool:
        """Whether some targets of the calibration rows were missing."""
        return len({len(output.signed) for output in self.conformal.outputs}) > 1

    @property
    def is_by_group(self) -> bool:
        return isinstance(self.rule, ByGroup | Overlapping)

    @property
    def rows_per_quantile(self) -> int:
        """The rows of the smallest group, those that are too small for 95 % aside; all rows without groups."""
        counts = self.rule.counts if isinstance(self.rule, ByGroup | Overlapping) else np.zeros(0)
        return int(counts[counts >= rows_needed(SCORE_LEVEL)].min(initial=self.conformal.n_rows))

    def with_damping(self, fits: Sequence[Fit]) -> tuple[Fit, ...]:
        """Return fits that have no λ as if they had been given that which was chosen here for each output."""
        dampings, found = (output.damping for output in self.conformal.outputs), []
        for fit, covariance in zip(fits, self.covariances, strict=True):
            spectral = covariance.eigendecomposed()
            found += _with_covariances(fit, [spectral.at(next(dampings)) for _ in range(fit.n_outputs)])
        return tuple(found)

    @property
    def row_functions(self) -> list[RowFunction]:
        """For each fit the function of gradients that returns h, and q under each λ of the scales, (b, 1 + L)."""
        pairs = zip(self.covariances, self.scales, strict=True)
        return [partial(covariance.leverage_and_variances, dampings=scales.dampings) for covariance, scales in pairs]

    def known(self, network: Callable[[], Network], x: Inputs, to: Reference, found: Sequence[np.ndarray]) -> KnownRows:
        """Return what is known of rows, given what they are compared with and the values of the functions."""
        if len(x) == 0:
            none = [np.zeros((0, len(output.scales.dampings) + 1)) for output in self.conformal.outputs]
            return KnownRows(none, to.unit, np.zeros(0, dtype=bool), np.zeros((0, 1)), np.zeros((0, len(none))))
        h, q = np.stack([each[:, 0] for each in found], axis=1), [each[:, 1:] for each in found]
        h = h if x.weight is None else h / x.weight.numpy()
        if isinstance(self.conformal.outputs[0], QuantileScale):
            q = _in_units(q, to.unit)
        q = q if isinstance(self.noise, str) else _with_noise(self.noise, network(), x, to.mean, q)
        far: np.ndarray = np.any(h > self.far, axis=1) if len(self.far) else np.zeros(len(h), dtype=bool)
        return KnownRows(q, to.unit, far, self.rule.places_of_inputs(network(), x, h), h)

    def placed(self, rows: KnownRows, given: Given) -> KnownRows:
        """Return rows with what their quantile depends on, if it was given with them."""
        if given.unknown == "pool" and not isinstance(self.rule, ByGroup):
            raise ValueError("unknown='pool' is for a calibration by groups of which each row has one: leave it out")
        place = self.rule.places(len(rows.unit), given)
        return rows if place is None else rows._replace(place=place)

    def scale(self, rows: KnownRows) -> np.ndarray:  # (n, m)
        return rows.unit * self.conformal.scale(rows.q)

    def bounds(self, rows: KnownRows, levels: tuple[float, ...], side: Side) -> Bounds:  # (n, m, levels) each
        """Return bounds of y − centre; of rows far from the training rows the wider of those with and without v.

        Both cover with their probability, and which rows are far does not depend on their targets.
        """
        lower, upper = self.conformal.bounds(rows.q, levels, side, rows.place)
        if self.guard is not None and rows.far is not None and rows.far.any():
            place = None if rows.place is None else rows.place[rows.far]
            low, high = self.guard.bounds([each[rows.far] for each in rows.q], levels, side, place)
            lower[rows.far], upper[rows.far] = np.minimum(lower[rows.far], low), np.maximum(upper[rows.far], high)
        if rows.place is not None:
            infinite = int(np.isinf(lower if side == "lower" else upper).any(axis=(1, 2)).sum())
            what = f"{infinite:,} of {len(lower):,} rows have infinite intervals: {self.rule.why_infinite}"
            warn(*self.rule.notices(rows.place, levels), *([what] if infinite else []))
        return lower * rows.unit[:, :, None], upper * rows.unit[:, :, None]


def _with_covariances(fit: Fit, covariances: Sequence[Covariance]) -> list[Fit]:
    """Return the same fit with another covariance for each output: one fit for all where these have one λ.

    The shares of p* stay those under the λ that leverages are compared under.
    """
    if len({covariance.damping for covariance in covariances}) == 1:
        return [replace(fit, covariance=covariances[0])]
    return [replace(some_outputs(fit, [o]), covariance=each) for o, each in enumerate(covariances)]


def _in_units(q: Sequence[np.ndarray], half: np.ndarray) -> list[np.ndarray]:
    """Return q in units of half the distance of quantiles, which is added as a last column."""
    return [np.column_stack([each / np.square(half), half]) for each in q]


def _with_noise(
    noise: Sequence[Noise], network: Network, x: Inputs, outputs: np.ndarray, q: Sequence[np.ndarray], first: int = 0
) -> list[np.ndarray]:
    base, prepared = network.features(x), network.prepare(x)
    log_v = [each.log(prepared, with_output(base, outputs[:, o]), first) for o, each in enumerate(noise)]
    return [np.column_stack(pair) for pair in zip(q, log_v, strict=True)]


@on_free_cores()
def calibrate(
    spec: FitSpec,
    fits: Sequence[Fit],
    batches: Batches,
    targets_of: Targets,
    *,
    tune: bool,
    joint: Joint,
    noise: Any,
    seed: int,
    rule: QuantileRule,
) -> Calibration:
    """Return the calibration of fits on the rows of `batches`, to whose scores the rule applies."""
    quantiles = spec.task.quantiles
    if quantiles is not None and joint:
        raise ValueError(f"joint={joint!r} is for several outputs; a network that predicts quantiles has one")
    if not isinstance(noise, str) and (quantiles is not None or not tune):
        raise ValueError("no noise is added with tune=False, nor to quantiles: leave out noise=")
    networks = [spec.fitted_network(fit) for fit in fits]
    spec.check_weights(networks[0], fits[0])
    covariances, scales = zip(*(candidates_of(fit, tune) for fit in fits), strict=True)
    functions = [partial(answers_to, *each) for each in zip(fits, covariances, scales, strict=True)]
    parts, triples, weighted = [], list(zip(fits, networks, functions, strict=True)), False
    crossed, v, strange = 0, None, ""
    batches = replace(batches, row_shape=fits[0].shape)
    for x, targets, first in batches.chunks(lambda x: max(networks[0].chunk_rows(x), fits[0].rows_at_once)):
        there = [targets_there(spec.task, x, fit.outputs, fit.n_returned) for fit in fits]
        x, rows = x.without("observed"), []
        for fit, network, function in triples:
            weighed = spec.weigh(x, fit.outputs, fit.n_returned, first)
            rows.append(evaluate_rows(network, weighed, function, fit.rows_at_once, first))
            if (given := weighed.extras.get("given")) is not None:  # leverages are compared as those of weight 1
                rows[-1][1][:, :, 1] /= given.numpy()
        of_outputs = [of_fit[:, o] for _, of_fit in rows for o in range(of_fit.shape[1])]  # each (b, 2 + L)
        outputs = np.concatenate([part for part, _ in rows], axis=1)
        to = spec.reference(fits, x, outputs, first)
        if v is None:  # the first rows show whether the noise is that of rows of weight 1
            v = _learnt(noise if quantiles is None and tune else "none", fits, x.weight is not None)
        if not isinstance(v, str):
            of_outputs = _with_noise(v, networks[0], x, outputs, of_outputs, first)
        weighted, crossed = weighted or x.weight is not None, crossed + to.crossed
        ranges, hashes = fits[0].ranges, pair_hashes(networks[0].prepare(x), targets)
        excess = ranges.excess(x)
        strange = strange or (ranges.farthest(x) if ranges.are_left(excess) else "")
        y = targets_of(targets)
        known = [each.numpy() > 0 for each in there if each is not None]
        seen = np.concatenate(known, axis=1) if known else np.ones(y.shape, dtype=bool)
        parts.append((np.where(seen, y, to.mean), seen, *to[:3], excess, hashes, *of_outputs))
    if v is None:
        raise ValueError("the calibration data are empty (a generator can be read only once)")
    y, seen, mean, centre, unit, excess, hashes, *answers = (np.concatenate(part) for part in zip(*parts, strict=True))
    if not seen.any(axis=0).all():
        none = all_outputs(fits)[int(np.argmin(seen.any(axis=0)))]
        raise ValueError(f"output {none} has no target among the calibration rows: leave it out with outputs=")
    assert isinstance(spec.task, Regression)
    spec.task.check_units(y, mean, "calibrate")
    suspicions = spec.task.suspicions(fits, np.where(seen, y, np.nan), mean, "the calibration rows", "scaled")
    if strange and fits[0].n_rows >= MANY_ROWS and fits[0].ranges.are_left(excess):
        suspicions = [sanity.inputs(float(np.mean(excess > 0)), strange, "the calibration rows")]
    r = np.where(seen, (y - centre) / unit, np.nan)
    formula, h, q = zip(*((of_output[:, 0], of_output[:, 1], of_output[:, 2:]) for of_output in answers), strict=True)
    fitted: Any = ConformalScale.fit
    if quantiles is not None:
        own_levels = {"both": quantiles[2] - quantiles[0], "upper": quantiles[2], "lower": 1 - quantiles[0]}
        q, fitted = _in_units(q, unit), partial(QuantileScale.of, own_levels=own_levels)
    units = [share_unit(fit, quantiles is not None, weighted or not tune) for fit in fits]
    scales = tuple(replace(each, b=each.b * unit_of_b) for each, unit_of_b in zip(scales, units, strict=True))
    plain = [of_fit for fit, of_fit in zip(fits, scales, strict=True) for _ in range(fit.n_outputs)]
    varying = plain if isinstance(v, str) else [each.with_noise() for each in plain]

    def conformal(candidates: list[Scales]) -> EachOutput:
        if joint is True:
            return AllOutputs.fit(r, q, candidates, seed, rule)
        if joint:
            return PooledOutputs.fit(r, q, candidates, seed, blocks(joint, fits[0].shape, r.shape[1]))
        return alone(r, q, candidates, rule, fitted)

    after = before = np.nan
    if not joint:
        folds = [cross_calibrated_bounds(fitted, seed, rule, *each) for each in zip(r.T, q, varying, strict=True)]
        lower, upper = (centre + unit * np.stack(ends, axis=1) for ends in zip(*folds, strict=True))
        after = mean_score(y, lower, upper, spec.task.units, seen)
    if quantiles is None:
        q_formula = np.stack(in_units_of_noise(fits, formula), axis=1)
        half = np.concatenate([fit.half_width(SCORE_LEVEL) for fit in fits]) * np.sqrt(1 + q_formula)
        before = mean_score(y, centre - unit * half, centre + unit * half, spec.task.units, seen)
    training = [leverages for fit in fits if len(fit.leverages) for leverages in fit.leverages.T]
    p_values = list(map(drift_p_value, training, h))
    drift = min(1.0, r.shape[1] * min(p_values)) if p_values else np.nan  # Bonferroni: a test for each output
    trained = fits[0].seen
    found = (before, after, drift, trained.share(hashes), trained.repeated)
    far = np.concatenate([fit.far for fit in fits])
    chosen, guard = conformal(varying), None if isinstance(v, str) else conformal(plain)
    own_share = np.array([output.own_share(of_output) for output, of_output in zip(chosen.outputs, q, strict=True)])
    leverages = np.stack(h, axis=1)
    about = (weighted, crossed, far, leverages, *found, len(r), own_share)
    no_widths = np.full((len(own_share), 2), np.nan)
    calibration = Calibration(covariances, scales, chosen, guard, v, *about, no_widths, tuple(map(str, suspicions)))
    few = evenly_spaced(np.arange(len(r)), WIDTH_ROWS)
    is_far = np.any(leverages > far, axis=1) if len(far) else np.zeros(len(r), dtype=bool)
    place = rule.own_places(len(r))
    if place is None:
        return calibration
    shown = KnownRows([of_output[few] for of_output in q], unit[few], is_far[few], place[few])
    return replace(calibration, widths=_widths(calibration, shown, mean[few], centre[few], spec.task.units))


def _learnt(noise: Any, fits: Sequence[Fit], weighted: bool) -> tuple[Noise, ...] | str:
    """Return v of each output, or why it is constant."""
    learnt = [learn(noise, fit, weighted) for fit in fits]
    constant = next((each for each in learnt if isinstance(each, str)), None)
    return tuple(v for of_fit in learnt for v in of_fit) if constant is None else constant  # type: ignore[misc]


def _widths(
    calibration: Calibration, rows: KnownRows, mean: np.ndarray, centre: np.ndarray, units: TargetTransform | None
) -> np.ndarray:  # (m, 2)
    """Return the smallest and the largest width of the 95 % intervals of these rows, in the original units."""
    if calibration.conformal.n_rows < rows_needed(SCORE_LEVEL):
        return calibration.widths
    lower, upper = (centre + bound[:, :, 0] for bound in calibration.bounds(rows, (SCORE_LEVEL,), "both"))
    try:
        lower, upper = (lower, upper) if units is None else units.to_original_bounds(mean, lower, upper)
    except ValueError:  # the transform has no inverse there, which `predict` will say
        return calibration.widths
    return np.stack([(upper - lower).min(axis=0), (upper - lower).max(axis=0)], axis=1)
