"""The pass over the training data: a network, its data and an engine in, a `Fit` out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import error
from .asking import ask_sample, checked_gradients
from .batch import CHUNK_ROWS_AT_LEAST, MERGED_BYTES, PRODUCT_ROWS, GradientBatch, Held
from .capture import DEPENDS_ON_NOTHING
from .covariance import Engine, Exact, Plan, Problem, plan
from .damping import Damping
from .data import EMPTY, Batches
from .fitted import Fit
from .gradients import Network
from .inputs import Inputs
from .recomputed import Recomputed
from .trace import RowSample, RowTrace, Sample
from .twin import fingerprint, plain_autograd

PRODUCT_BYTES = 32 * 2**20  # of inner products with all training rows, in one question
LEVERAGES = 512  # training rows whose leverages new rows are compared with


Squares = Callable[[Tensor, Tensor, int], Tensor]  # outputs (b, m), targets, outputs returned -> squares (b, m)


def planned(
    network: Network, batches: Batches, engine: Engine | None, damping: Damping, memory: float | None
) -> tuple[Plan, Inputs, Batches]:
    """The plan, the first rows, and the data as if nothing had been read. The network knows its layers afterwards."""
    x, _, batches = batches.peek()
    with plain_autograd(network.device):
        network.check(x)
        layers = network.examine(x)
        looked = x[:CHUNK_ROWS_AT_LEAST]
        start = time.perf_counter()
        network.gradients(looked, next(network.groups()))
        seconds = time.perf_counter() - start
    m = network.n_outputs
    problem = Problem(
        None if batches.n_rows is None else batches.n_rows * m,
        network.n_parameters,
        network.dtype.itemsize,
        layers.factor_bytes,
        -(-network.prepare(x[:1]).nbytes // m),
        layers.inner_flops,
        seconds / (len(looked) * m),
        damped=damping.given,
        twice=batches.twice,
    )
    return plan(problem, engine, memory), x, batches


def fit(
    network: Network,
    batches: Batches,
    engine: Engine | None,  # None: the best that fits
    damping: Damping,
    memory: float | None,
    progress: bool,
    squares: Squares,
    noise: bool = True,  # whether widths are those of observations, √(1 + q), or in proportion to √q
) -> Fit:
    weights = fingerprint(network.twin)  # as the model has them: a forward pass may write to the twin's buffers
    schedule, x, batches = planned(network, batches, engine, damping, memory)
    option, layers = schedule.chosen, network.layers
    if option is None:
        used = "" if batches.twice else " (its first batch is read: a generator has to be made anew)"
        raise MemoryError(
            f"this fit would not fit into memory: give a smaller engine, or more memory={used}\n{schedule}"
        )
    assert layers is not None
    problem, m = option.problem, network.n_outputs
    if option.engine.wants_rows(problem):
        network.take_rows(x)
    remember = _Inputs(network, problem, schedule.memory - option.nbytes) if problem.recomputed else None
    # rows are taken as they come; inner products are faster for many at once
    rows_at_once = 0
    if remember is not None:
        rows_at_once = remember.together
    elif network.layers is not None:
        rows_at_once = min(PRODUCT_ROWS, max(1, MERGED_BYTES // problem.factor_bytes))
    n_sample = 0
    if not isinstance(option.engine, Exact):
        n_sample = error.affordable(option.engine, problem, schedule.memory) // m
    n_leverages = max(1, min(LEVERAGES, error.INPUT_BYTES // (m * problem.input_bytes)))
    trace = RowTrace(max(n_leverages, n_sample))
    with plain_autograd(network.device):
        sample = _sample(option.engine, network, batches, progress) if option.engine.sample_size else None
        n_rows = batches.n_rows
        started = option.engine.start(
            n_rows=problem.n_rows, damping=damping.at(n_rows, network.n_returned), sample=sample
        )
        del sample  # the engine has what it wants of it
        rss, count = _pass(network, batches, started, rows_at_once, remember, trace, squares, progress)
    settings = started.limited(2 * count * m)
    found = Fit(
        started.finalise(damping.at(count, network.n_returned)),
        settings,
        rss,
        count,
        network.n_parameters,
        network.dtype,
        weights,
        layers,
        network.layers is None,
        trace.seen(),
        n_returned=network.n_returned,
        rows_at_once=min(rows_at_once, max(CHUNK_ROWS_AT_LEAST, PRODUCT_BYTES // (8 * count * m))),
    )
    rows = trace.sample()
    exact = found.covariance.error_bound == 0.0
    if exact or (m > 1 and found.covariance.damping is not None):
        found = _with_leverages(found, network, rows.between(0, n_leverages), exact)
    if exact or min(len(rows), n_sample) * m < error.FEWEST_ROWS:
        return found
    found = replace(found, sample=rows.between(0, n_sample))
    return (
        found if found.covariance.damping is None else replace(found, error=error.report(network, found, noise=noise))
    )


def _with_leverages(found: Fit, network: Network, rows: Sample, exact: bool) -> Fit:
    """What some of the training rows have: how p* is shared among the outputs, and h itself where it is exact."""
    covariance = found.reference

    def question(g: GradientBatch) -> np.ndarray:
        return np.stack([covariance.leverage(g), covariance.variance(g)], axis=1)

    if network.n_outputs == 1:
        return replace(found, leverages=ask_sample(network, rows, covariance.leverage, found.rows_at_once))
    answers = ask_sample(network, rows, question, found.rows_at_once)  # (rows, m, 2)
    h, q = answers[:, :, 0], answers[:, :, 1]
    own = np.maximum(2 * h - q, 0.0).sum(axis=0)  # of the diagonal of 2H − H²
    shares = own / own.sum() if own.sum() > 0 else np.full(len(own), 1 / len(own))
    return replace(found, shares=shares, leverages=h if exact else found.leverages)


def _pass(
    network: Network,
    batches: Batches,
    engine: Engine,
    rows_at_once: int,
    remember: _Inputs | None,
    trace: RowTrace,
    squares: Squares,
    progress: bool,
) -> tuple[np.ndarray, int]:
    """Every row goes to the engine and the trace; the residual sums of squares, and how many rows there were."""
    rss, count, energy = np.zeros(network.n_outputs), 0, 0.0
    waiting: list[GradientBatch] = []
    with _bar("deltaband", batches, progress) as bar:
        for chunk, (x, targets, first) in enumerate(batches.chunks(network.check)):
            if chunk & (chunk - 1) == 0:  # the first, the second, the third, the fifth, the ninth …
                network.verify(x)
            outputs = []
            for group, (part, gradients) in zip(network.groups(), checked_gradients(network, x, first), strict=True):
                outputs.append(part.cpu())
                waiting.append(gradients if remember is None else remember(x, group))
                if sum(map(len, waiting)) >= rows_at_once:
                    engine.update(_together(waiting))
                    waiting = []
                energy += float(gradients.squared_norms.sum())
            trace.update(network.prepare(x), targets)
            rss += squares(torch.cat(outputs, dim=1), targets, network.n_returned).sum(dim=0).numpy()
            count += len(x)
            bar.update(len(x))
    if waiting:
        engine.update(_together(waiting))
    if count == 0:  # the second time
        raise ValueError(EMPTY)
    if energy == 0.0:
        raise ValueError(DEPENDS_ON_NOTHING)
    if not np.isfinite(rss).all():
        raise ValueError("the squares of the residuals are too large for numbers: scale the targets")
    if batches.n_rows is not None and count != batches.n_rows:
        raise ValueError(f"{batches.n_rows} rows were announced but {count} came: give n_rows={count}")
    return rss, count


def check(engine: Engine, batches: Batches, damping: Damping) -> None:
    """Whether these data will do for this engine, before any of them is read."""
    if engine.needs_damping and damping.at(batches.n_rows) is None:
        raise ValueError(
            f"{type(engine).__name__} needs λ from the first row on: "
            + (
                "λ follows from the number of rows, which this loader does not tell; give fit(..., n_rows=...)"
                if damping.given
                else "give weight_decay or damping, or use Exact or RobustFrequentDirections"
            )
        )
    if engine.sample_size and not batches.twice:
        raise ValueError(
            f"{type(engine).__name__} reads the data twice, which an iterator or generator does not allow: "
            "give arrays X and y, a DataLoader, or a list of batches"
        )


def _sample(engine: Engine, network: Network, batches: Batches, progress: bool) -> GradientBatch:
    """The gradients of `sample_size` training rows, drawn in a pass that computes no others."""
    # Each row has a key of its own, and what follows are sums over all rows: a loader may shuffle as it likes, and do
    # without some of the sampled rows the second time.
    drawn = RowSample(-(-engine.sample_size // network.n_outputs), engine.seed)
    with _bar("deltaband, drawing a sample", batches, progress) as bar:
        for x, _, _ in batches.chunks(network.check):
            drawn.update(network.prepare(x))
            bar.update(len(x))
    rows = drawn.rows()
    if len(rows) == 0:
        raise ValueError(EMPTY)
    parts = []
    for gradients in error.gradients(network, rows):
        # The pass to come names a row that is not finite by its number in the data.
        finite = np.flatnonzero(np.isfinite(gradients.squared_norms))
        parts += [gradients.take(finite)] if len(finite) else []
    if not parts:
        for x, _, first in batches.chunks(network.check):
            for _ in checked_gradients(network, x, first):
                pass
    sample = GradientBatch.concatenate(parts).merged()
    return sample if len(sample) <= engine.sample_size else sample.between(0, engine.sample_size)


def _together(batches: list[GradientBatch]) -> GradientBatch:
    batch = GradientBatch.concatenate(batches)
    return batch.merged() if all(isinstance(block, Held) for block in batch.blocks) else batch


def _bar(description: str, batches: Batches, progress: bool) -> Any:
    """It stays away where the work is done within two seconds."""
    from tqdm.auto import tqdm

    return tqdm(total=batches.n_rows, desc=description, unit=" rows", delay=2, leave=False, disable=not progress)


class _Inputs:
    """Of each row the input alone, in the place of its gradient."""

    def __init__(self, network: Network, problem: Problem, spare: float) -> None:
        self._network = network.again(network.layers, own_weights=True)
        # half is for the rows that meet them
        weights = problem.n_parameters * problem.itemsize
        self.together = int((problem.recomputed_bytes - weights + spare / 2) // (2 * problem.factor_bytes))

    def __call__(self, x: Inputs, group: slice) -> GradientBatch:
        return GradientBatch((Recomputed(self._network, self._network.prepare(x), group, self.together),))
