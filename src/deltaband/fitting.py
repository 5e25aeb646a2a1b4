"""What a fit begins with: a look at the data, a plan, and an engine that is started."""

from __future__ import annotations

import time

import numpy as np

from . import error
from .accumulation import Accumulation, bar
from .asking import checked_gradients
from .batch import CHUNK_ROWS_AT_LEAST, GradientBatch
from .covariance import Engine, Plan, Problem, plan
from .damping import Damping
from .data import EMPTY, Batches
from .gradients import Network
from .inputs import Inputs
from .trace import RowSample
from .twin import fingerprint, plain_autograd


def planned(
    network: Network,
    batches: Batches,
    engine: Engine | None,
    damping: Damping,
    memory: float | None,
    in_all: int | None,
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
        None if in_all is None else in_all * m,
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


def begun(
    network: Network,
    batches: Batches,
    engine: Engine | None,  # None: the best that fits
    damping: Damping,
    memory: float | None,
    progress: bool,
    in_all: int | None,  # rows, if the batches are not all that will come
) -> tuple[Accumulation, Batches]:
    """Nothing taken in yet, and the data as if nothing had been read."""
    weights = fingerprint(network.twin)  # as the model has them: a forward pass may write to the twin's buffers
    schedule, x, batches = planned(network, batches, engine, damping, memory, in_all)
    option = schedule.chosen
    if option is None:
        used = "" if batches.twice else " (its first batch is read: a generator has to be made anew)"
        raise MemoryError(
            f"this fit would not fit into memory: give a smaller engine, or more memory={used}\n{schedule}"
        )
    problem, layers = option.problem, network.layers
    assert layers is not None
    if option.engine.wants_rows(problem):
        network.take_rows(x)
    with plain_autograd(network.device):
        sample = _sample(option.engine, network, batches, progress) if option.engine.sample_size else None
        started = option.engine.start(
            n_rows=problem.n_rows, damping=damping.at(in_all, network.n_returned), sample=sample
        )
    return Accumulation(network, layers, started, option, schedule.memory, weights), batches


def check(engine: Engine, batches: Batches, damping: Damping, in_all: int | None) -> None:
    """Whether these data will do for this engine, before any of them is read."""
    if engine.needs_damping and damping.at(in_all) is None:
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
    with bar("deltaband, drawing a sample", batches, progress) as shown:
        for x, _, _ in batches.chunks(network.check):
            drawn.update(network.prepare(x))
            shown.update(len(x))
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
