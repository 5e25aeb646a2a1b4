"""How far an approximate engine's widths are from the exact ones, estimated on a sample of the training rows.

The same engine and the exact method are fitted to the same sample, with λ in proportion. Their q differ by a factor,
row by row, and so do their p*; these factors are applied to the q and p* of the fit itself. (To scale a sample's q up
to all rows instead would be biased.) With a sample of several times p* rows the leading eigenvalues of JᵀJ over n are
those of all rows, and so is what an engine of a given size makes of them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.inputs import Inputs
from ..data.row_record import Sample
from ..engines import Engine, Exact, Problem
from ..engines.memory import largest
from ..errors import DeltabandWarning
from ..network.gradient_batch import PRODUCT_ROWS, GradientBatch
from ..network.model_copy import plain_autograd
from ..network.network import Network
from .evaluate import ask_sample

if TYPE_CHECKING:
    from .fit import Fit

MOST_ROWS, FEWEST_ROWS = 4096, 64
MOST_BYTES = 2**30  # of the gradients of a sample
ASKED = 200  # training rows whose widths are compared, if the user asks for none
INPUT_BYTES = 2**26  # and of its inputs, which a fit keeps
TOLERABLE = 0.05


@dataclass(frozen=True)
class ErrorReport:
    """Relative errors of an approximate engine against the exact method."""

    width: float  # mean of |width/exact − 1|
    largest: float  # of |width/exact − 1| over the rows asked
    effective_parameters: float  # p*/exact − 1
    n_rows: int  # of the sample; 0 where the fit is exact
    engine: str  # as fitted to the sample

    def __str__(self) -> str:
        if self.n_rows == 0:
            return "exact: there is nothing to estimate"
        if math.isnan(self.effective_parameters):
            return f"widths are too small by an unknown amount: λ is out of reach of {self.engine}"
        return (
            f"widths are off by {self.width:.2%} on average and {self.largest:.2%} at most, p* by "
            f"{self.effective_parameters:+.2%} ({self.engine} against Exact() on {self.n_rows:,} training rows)"
        )


def affordable(engine: Engine, problem: Problem, memory: float) -> int:
    """How many rows a sample may have, so that the exact method on them takes at most half of the memory; 0 where they
    would be too few, or where there is no room for the engine a second time, beside what it holds of the first."""
    if 1.5 * engine.nbytes(problem) > memory:
        return 0
    room = min(memory / 2, MOST_BYTES)
    most = min(MOST_ROWS, INPUT_BYTES // problem.input_bytes)
    rows = largest(lambda n: Exact().nbytes(replace(problem, n_rows=n)) <= room, most)
    return rows if rows >= FEWEST_ROWS else 0


def report(
    network: Network, fit: Fit, x: Inputs | None = None, n_sample: int = MOST_ROWS, noise: bool = True
) -> ErrorReport:
    """Over the rows `x`, or some training rows that the comparison leaves out. Widths are t·s·√(1 + q), or without
    noise in proportion to √q.

    On fewer rows p* is smaller, and an engine of the same size more accurate: it gets a size in proportion to p*. More
    directions than half of the sample would be exact there: it gets half, if the sample is small against the data. So
    the estimate is one of a smaller engine's error.
    """
    sample = fit.sample.between(0, fit.n_compared)
    if x is None:
        cut = len(sample) - max(1, min(ASKED, len(sample) // 4))
        sample, rest = sample.between(0, cut), sample.between(cut, len(sample))
    else:
        rest = Sample((x,), (np.arange(len(x)),))
    m = fit.n_outputs
    sample = sample.between(0, -(-n_sample // m))
    covariance = fit.covariance
    assert covariance.damping is not None
    if not covariance.in_reach:
        return ErrorReport(math.inf, math.inf, math.nan, len(sample) * m, repr(fit.engine))
    from scipy.special import stdtrit

    n, n_rows, p_star = len(sample) * m, fit.n_rows * m, fit.effective_parameters
    damping = covariance.damping * n / n_rows
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeltabandWarning)
        exact, q_exact = _fitted(network, fit, Exact(), sample, damping, rest)
        share = min(1.0, exact / p_star) if n < n_rows and p_star > 0 else 1.0
        engine = fit.engine.limited(n // 2 if n < n_rows / 2 else n, share)
        sketched, q_sketched = _fitted(network, fit, engine, sample, damping, rest)
        q = ask_sample(network.with_layers(fit.asked_layers), rest, covariance.variance, fit.rows_at_once)
    true_q = _corrected(q, q_sketched, q_exact, n / n_rows)
    # of more rows p* is larger, but not more than in proportion
    true_p_star = min(float(_corrected(p_star, sketched, exact, 1.0)), exact * n_rows / n)
    freedom, true_freedom = fit.degrees_of_freedom, fit.n_rows - true_p_star * fit.shares
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
    """By the factor that the engine is off on the sample. Where it has lost nearly all, there is no factor, and the
    sample's exact value has to do."""
    known = sketched > np.maximum(0.01 * exact, np.finfo(np.float64).tiny)
    return np.where(known, value * exact / np.where(known, sketched, 1.0), exact * share)


def _fitted(
    network: Network, fit: Fit, engine: Engine, rows: Sample, damping: float, asked: Sample
) -> tuple[float, np.ndarray]:
    """p* of the engine fitted to some rows, and its q of others."""
    n, itemsize = len(rows) * fit.n_outputs, network.dtype.itemsize
    problem = Problem(n, network.n_parameters, itemsize, fit.layers.factor_bytes, rows.pieces[0][:1].nbytes)
    network = network.with_layers(None if engine.wants_rows(problem) and fit.by_rows else fit.layers)
    with plain_autograd(network.device):
        sample = None
        if engine.sample_size:  # the rows are in random order
            leading = gradients(network, rows.between(0, -(-engine.sample_size // fit.n_outputs)))
            sample = GradientBatch.concatenate(leading).merged().between(0, engine.sample_size)
        started = engine.start(n_rows=n, damping=damping, sample=sample)
        waiting: list[GradientBatch] = []
        for batch in gradients(network, rows):
            waiting.append(batch)
            if network.layers is None or sum(map(len, waiting)) >= PRODUCT_ROWS:
                started.update(GradientBatch.concatenate(waiting).merged())
                waiting = []
        if waiting:
            started.update(GradientBatch.concatenate(waiting).merged())
        covariance = started.finalise(damping)
    return covariance.effective_parameters, ask_sample(network, asked, covariance.variance, fit.rows_at_once)


def gradients(network: Network, rows: Sample) -> Iterator[GradientBatch]:
    """Of the rows of a sample."""
    for piece in rows.pieces:
        for x in piece.split(network.chunk_rows(piece)):
            for group in network.groups(x):
                yield network.gradients(x, group)[1]
