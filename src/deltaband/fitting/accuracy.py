"""How far the widths of an approximate engine are from the exact ones, estimated on a sample of training rows.

The same engine and the exact method are fitted to the same sample, with λ in proportion. Their q differ by a factor,
row by row, and so do their p*; these factors are applied to the q and p* of the fit itself. (To scale a sample's q up
to all rows instead would be biased.) With a sample of several times p* rows the leading eigenvalues of JᵀJ over n are
those of all rows, and so is what an engine of a given size makes of them.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..data.inputs import Inputs
from ..data.row_record import Sample
from ..engines import Covariance, Engine, Exact, Known, Option, Problem, largest
from ..error_report import ErrorReport
from ..errors import DeltabandWarning, warn
from ..machine import on_free_cores
from ..network.gradient_batch import PRODUCT_ROWS, GradientBatch, RowBuffer
from ..network.network import Network, plain_autograd
from ..validation import check_int
from .fit import Fit, evaluate_sample
from .spec import FitSpec

SAMPLE_ROWS_AT_MOST, SAMPLE_ROWS_AT_LEAST = 4096, 64
SAMPLE_GRADIENT_BYTES = 2**30
# Fewer say little of a sketch: what it ends in depends on how long ago it has shrunk.
TELLING_ROWS = 1024
SHARE_OF_FIT = 0.08  # of a fit's time, for the comparison at its end
LITTLE_WORK = 1e9  # operations that it may take in any case: some hundredths of a second
COMPARED_ROWS = 200  # training rows whose widths are compared, if the user gives none
SAMPLE_INPUT_BYTES = 2**26  # which a fit keeps


def affordable_rows(engine: Engine, problem: Problem, memory: float) -> int:
    """Return how many rows a sample may have so that the exact method on them takes at most half of the memory.

    It is 0 where they would be too few, or where there is no room for a second engine beside the first.
    """
    if 1.5 * engine.cost(problem).nbytes > memory:
        return 0
    room = min(memory / 2, SAMPLE_GRADIENT_BYTES)
    most = min(SAMPLE_ROWS_AT_MOST, SAMPLE_INPUT_BYTES // problem.input_bytes)
    rows = largest(lambda n: Exact().cost(replace(problem, n_rows=n)).nbytes <= room, most)
    rows = min(rows, int(room // problem.factor_bytes))
    return rows if rows >= SAMPLE_ROWS_AT_LEAST else 0


def with_error(network: Network, fit: Fit, option: Option, seconds: float, noise: bool) -> Fit:
    """Add the report of as many rows as a small part of the fit's time allows; none where those would say little."""
    if fit.covariance.damping is None:
        return fit

    most, allowed = fit.n_compared * fit.gradients_per_row, SHARE_OF_FIT * seconds

    def is_cheap(n: int) -> bool:
        problem = replace(option.problem, n_rows=n, recomputed=False, setup_seconds=0.0, asked_rows=0)
        options = [Option(engine, problem) for engine in (Exact(), option.engine.resized(max(n // 2, 1)))]
        little = sum(each.engine.cost(problem).flops for each in options) <= LITTLE_WORK
        return little or sum(each.seconds for each in options) <= allowed

    rows = largest(is_cheap, most)
    if rows < min(TELLING_ROWS, most):
        return fit
    return replace(fit, error=report(network, fit, None, rows, noise))


@on_free_cores()
def compared(spec: FitSpec, fits: Sequence[Fit]) -> tuple[Fit, ...]:
    """Add the reports that the fits had no time for, unless the model's weights have changed, and warn."""
    found = []
    for fit in fits:
        network = spec.network(spec.task.head(fit.outputs)).with_probes(fit.probes)
        waits = fit.error is None and min(fit.n_compared, len(fit.sample)) and fit.covariance.damping is not None
        if waits and not spec.changed_weight(network, fit):
            fit = replace(fit, error=report(network, fit, noise=spec.task.has_noise))
            for message in fit.inaccuracies(math.inf, ""):
                warn(message)
        found.append(fit)
    return tuple(found)


@on_free_cores()
def worst_report(spec: FitSpec, fits: Sequence[Fit], x: Any, sample: int | None) -> ErrorReport:
    """Estimate the errors of fits over the rows `x` or over training rows, and return the largest."""
    least = SAMPLE_ROWS_AT_LEAST
    if sample is not None:
        check_int(sample, "sample", least)
    X = None if x is None else spec.inputs(x)
    if X is not None:
        X.check_finite()
        if len(X) == 0:
            raise ValueError("x has no rows: give some, or none at all for an estimate over training rows")
        spec.network().validate(X)
    reports = []
    for fit in fits:
        probes = 0.0 if fit.probe_error is None else fit.probe_error.width
        if fit.covariance.is_exact:
            reports.append(ErrorReport(0.0, 0.0, 0.0, 0, repr(fit.engine), probes=probes))
            continue
        if not min(fit.n_compared, len(fit.sample)):
            raise ValueError(
                f"an estimate needs {least} training rows, and memory for the exact method on them; a band from a file "
                "has none unless it was saved with save(..., sample=True)"
            )
        network = spec.network(spec.task.head(fit.outputs)).with_probes(fit.probes)
        spec.check_weights(network, fit)
        rows = None if X is None else spec.weigh(X, fit.outputs, fit.n_returned)
        made = report(network, fit, rows, sample or SAMPLE_ROWS_AT_MOST, spec.task.has_noise)
        reports.append(replace(made, probes=probes))
    return max(reports, key=lambda report: report.width)


def report(
    network: Network, fit: Fit, x: Inputs | None = None, n_sample: int = SAMPLE_ROWS_AT_MOST, noise: bool = True
) -> ErrorReport:
    """Estimate the error of a fit over the rows `x`, or over training rows that the comparison leaves out.

    Widths are t·s·√(1 + q), or without noise in proportion to √q.

    On fewer rows p* is smaller, and an engine of the same size more accurate: it gets a size in proportion to p*. More
    directions than half of the sample would be exact there: it gets half, if the sample is small against the data. So
    the estimate is one of a smaller engine's error.
    """
    sample = fit.sample.between(0, fit.n_compared)
    if x is None:
        cut = len(sample) - max(1, min(COMPARED_ROWS, len(sample) // 4))
        sample, rest = sample.between(0, cut), sample.between(cut, len(sample))
    else:
        rest = Sample((x,), (np.arange(len(x)),))
    m = fit.gradients_per_row
    sample = sample.between(0, -(-n_sample // m))
    covariance = fit.covariance
    assert covariance.damping is not None
    if not covariance.resolves_damping:
        return ErrorReport(math.inf, math.inf, math.nan, len(sample) * m, repr(fit.engine))
    from scipy.special import stdtrit

    n, n_rows, p_star = len(sample) * m, fit.n_rows * m, fit.effective_parameters
    damping = covariance.damping * n / n_rows
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeltabandWarning)
        own = network.with_layers(fit.layers)
        with plain_autograd(network.device):
            rows = list(gradients(own, sample))  # of both fits
        of_exact = _fitted(fit, Exact(), rows, damping)
        exact = of_exact.effective_parameters
        share = min(1.0, exact / p_star) if n < n_rows and p_star > 0 else 1.0
        engine = fit.engine.resized(n // 2 if n < n_rows / 2 else n, share)
        of_engine = _fitted(fit, engine, rows, damping)
        sketched = of_engine.effective_parameters
        asked = [of_exact, of_engine] if fit.by_rows else [of_exact, of_engine, covariance]

        def variances(g: GradientBatch) -> np.ndarray:  # (b, 2 or 3)
            return np.stack([each.variance(g) for each in asked], axis=1)

        q_exact, q_sketched, *others = np.moveaxis(evaluate_sample(own, rest, variances, fit.rows_at_once), -1, 0)
        q = others[0] if others else evaluate_sample(network, rest, covariance.variance, fit.rows_at_once)
    if fit.probes is not None:  # q of a combination is 1/r of the sum over outputs, on average
        q, q_sketched, q_exact = (each * m / fit.n_outputs for each in (q, q_sketched, q_exact))
    true_q = _corrected(q, q_sketched, q_exact, n / n_rows)
    # of more rows p* is larger, but not more than in proportion
    true_p_star = min(float(_corrected(p_star, sketched, exact, 1.0)), exact * n_rows / n)
    freedom, true_freedom = fit.degrees_of_freedom, fit.observed - true_p_star * fit.shares
    if fit.probes is not None:
        freedom, true_freedom = freedom[:1], true_freedom[:1]  # the same for all outputs
    if not noise:
        some = true_q > 0  # where there is none, none is right
        error = np.abs(np.sqrt(np.where(some, q, 1.0) / np.where(some, true_q, 1.0)) - 1)
    elif freedom.min() > 0:
        student = stdtrit(freedom, 0.975) / stdtrit(true_freedom, 0.975)
        error = np.abs(np.sqrt((1 + q) / (1 + true_q) * true_freedom / freedom) * student - 1)
    else:  # no widths at all, where there should be
        error = np.full(q.shape, np.inf)
    p_star_error = p_star / true_p_star - 1 if true_p_star > 0 else 0.0
    return ErrorReport(float(error.mean()), float(error.max()), p_star_error, n, repr(engine))


def _corrected(value: Any, sketched: Any, exact: Any, share: float) -> Any:
    """Correct a value by the factor that the engine is off on the sample.

    Where it has lost nearly everything there is no such factor, and the sample's exact value is used.
    """
    known = sketched > np.maximum(0.01 * exact, np.finfo(np.float64).tiny)
    return np.where(known, value * exact / np.where(known, sketched, 1.0), exact * share)


def _fitted(fit: Fit, engine: Engine, rows: list[GradientBatch], damping: float) -> Covariance:
    """Return the covariance of an engine fitted to some rows."""
    n, sample = sum(map(len, rows)), None
    if engine.sample_size:  # the rows are in random order
        sample = GradientBatch.concatenate(rows).between(0, engine.sample_size).merged()
    started = engine.start(Known(n, damping, sample))
    buffer = RowBuffer(lambda batch: started.update(batch.merged()), PRODUCT_ROWS)
    for batch in rows:
        buffer.add(batch)
    buffer.flush()
    return started.finalise(damping)


def gradients(network: Network, rows: Sample) -> Iterator[GradientBatch]:
    """Yield the gradients of the rows of a sample."""
    for piece in rows.pieces:
        for x in piece.split(network.chunk_rows(piece)):
            for group in network.groups(x):
                yield network.gradients(x, group)[1]
