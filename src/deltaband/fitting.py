"""The pass over the training data: a network, its data and an engine in, a `Fit` out."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import error
from .asking import ask, checked_gradients
from .batch import CHUNK_ROWS_AT_LEAST, MERGED_BYTES, PRODUCT_ROWS, GradientBatch, Held
from .capture import DEPENDS_ON_NOTHING
from .covariance import Engine, Exact, Plan, Problem, plan
from .damping import Damping
from .data import EMPTY, Batches
from .fitted import Fit
from .gradients import Network, plain_autograd, twin
from .recomputed import Recomputed
from .trace import RowSample, RowTrace

PRODUCT_BYTES = 32 * 2**20  # of inner products with all training rows, in one question
LEVERAGES = 512  # training rows whose leverages new rows are compared with


def planned(
    network: Network, batches: Batches, engine: Engine | None, damping: Damping, memory: float | None
) -> tuple[Plan, Batches]:
    """The plan, and the data as if nothing had been read. The network knows its layers afterwards."""
    x, batches = batches.peek()
    with plain_autograd(network.device):
        network.check(x)
        layers = network.examine(x)
        start = time.perf_counter()
        network.gradients(x[:CHUNK_ROWS_AT_LEAST])
        seconds = time.perf_counter() - start
    problem = Problem(
        batches.n_rows,
        network.n_parameters,
        network.dtype.itemsize,
        layers.factor_bytes,
        network.prepare(x[:1]).nbytes,
        layers.inner_flops,
        seconds / len(x[:CHUNK_ROWS_AT_LEAST]),
        damped=damping.given,
        twice=batches.twice,
    )
    return plan(problem, engine, memory), batches


def fit(
    model: nn.Module,
    batches: Batches,
    engine: Engine | None,  # None: the best that fits
    damping: Damping,
    memory: float | None,
    progress: bool,
) -> Fit:
    network = Network(model)
    if engine is not None:
        _check(engine, batches, damping)
    schedule, batches = planned(network, batches, engine, damping, memory)
    option, layers = schedule.chosen, network.layers
    if option is None:
        used = "" if batches.twice else " (its first batch is read: a generator has to be made anew)"
        raise MemoryError(
            f"this fit would not fit into memory: give a smaller engine, or more memory={used}\n{schedule}"
        )
    assert layers is not None
    problem = option.problem
    if option.engine.wants_rows(problem):
        network.layers = None
    remember = _Inputs(network, problem, schedule.memory - option.nbytes) if problem.recomputed else None
    # one by one, rows are asked for; inner products are faster for many at once
    rows_at_once = 1
    if remember is not None:
        rows_at_once = remember.together
    elif network.layers is not None:
        rows_at_once = min(PRODUCT_ROWS, max(1, MERGED_BYTES // problem.factor_bytes))
    n_sample = 0
    if not isinstance(option.engine, Exact):
        n_sample = error.affordable(option.engine, problem, schedule.memory)
    n_leverages = max(1, min(LEVERAGES, error.INPUT_BYTES // problem.input_bytes))
    trace = RowTrace(max(n_leverages, n_sample))
    with plain_autograd(network.device):
        sample = _sample(option.engine, network, batches, progress) if option.engine.sample_size else None
        started = option.engine.start(n_rows=batches.n_rows, damping=damping.at(batches.n_rows), sample=sample)
        del sample  # the engine has what it wants of it
        rss, count = _pass(network, batches, started, rows_at_once, remember, trace, progress)
    settings = started.limited(2 * count)
    found = Fit(
        started.finalise(damping.at(count)),
        settings,
        rss,
        count,
        network.n_parameters,
        network.dtype,
        network.fingerprint(),
        layers,
        network.layers is None,
        trace.seen(),
        rows_at_once=min(rows_at_once, max(CHUNK_ROWS_AT_LEAST, PRODUCT_BYTES // (8 * count))),
    )
    rows = trace.sample()
    if found.covariance.error_bound == 0.0:
        _, h = ask(network, rows[:n_leverages], found.reference.leverage, found.rows_at_once)
        return replace(found, leverages=h)
    if min(len(rows), n_sample) < error.FEWEST_ROWS:
        return found
    found = replace(found, sample=rows[:n_sample])
    return found if found.covariance.damping is None else replace(found, error=error.report(model, found))


def _pass(
    network: Network,
    batches: Batches,
    engine: Engine,
    rows_at_once: int,
    remember: _Inputs | None,
    trace: RowTrace,
    progress: bool,
) -> tuple[float, int]:
    """Every row goes to the engine and the trace; the residual sum of squares, and how many rows there were."""
    rss, count, energy = 0.0, 0, 0.0
    waiting: list[GradientBatch] = []
    with _bar("deltaband", batches, progress) as bar:
        for x, targets, first in batches.chunks(network.check):
            outputs, gradients = checked_gradients(network, x, first)
            waiting.append(gradients if remember is None else remember(x))
            if sum(map(len, waiting)) >= rows_at_once:
                engine.update(_together(waiting))
                waiting = []
            trace.update(network.prepare(x), targets)
            rss += float((targets - outputs.cpu().double()).square().sum())
            energy += float(gradients.squared_norms.sum())
            count += len(x)
            bar.update(len(x))
    if waiting:
        engine.update(_together(waiting))
    if count == 0:  # the second time
        raise ValueError(EMPTY)
    if energy == 0.0:
        raise ValueError(DEPENDS_ON_NOTHING)
    if batches.n_rows is not None and count != batches.n_rows:
        raise ValueError(f"{batches.n_rows} rows were announced but {count} came: give n_rows={count}")
    return rss, count


def _check(engine: Engine, batches: Batches, damping: Damping) -> None:
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
    drawn = RowSample(engine.sample_size, engine.seed)
    with _bar("deltaband, drawing a sample", batches, progress) as bar:
        for x, _, _ in batches.chunks(network.check):
            drawn.update(network.prepare(x))
            bar.update(len(x))
    X = drawn.rows()
    if X is None:
        raise ValueError(EMPTY)
    parts = []
    for x in torch.split(X, network.check(X)):
        _, gradients = network.gradients(x)
        # The pass to come names a row that is not finite by its number in the data.
        finite = np.flatnonzero(np.isfinite(gradients.squared_norms))
        parts += [gradients.take(finite)] if len(finite) else []
    if not parts:
        for x, _, first in batches.chunks(network.check):
            checked_gradients(network, x, first)
    return GradientBatch.concatenate(parts).merged()


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
        assert network.layers is not None
        self._model = twin(network.twin, own_weights=True)
        self._layers = network.layers
        self._network = network
        # half is for the rows that meet them
        weights = problem.n_parameters * problem.itemsize
        self.together = int((problem.recomputed_bytes - weights + spare / 2) // (2 * problem.factor_bytes))

    def __call__(self, x: Tensor) -> GradientBatch:
        prepared = self._network.prepare(x)
        return GradientBatch(
            (Recomputed(self._model, self._layers, prepared, self._network.n_parameters, self.together),)
        )
