"""What a fit begins with: a look at the data, a plan, and an engine that is started."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from ..damping import Damping
from ..data.batches import EMPTY, Batches
from ..data.inputs import Inputs
from ..data.row_record import RowSample, Sample
from ..engines import Engine, Option, Plan, Problem, plan_fit
from ..errors import EmptyDataError
from ..network.gradient_batch import CHUNK_ROWS_AT_LEAST, GradientBatch
from ..network.layers.hooks import Layers
from ..network.model_copy import plain_autograd
from ..network.network import Network, OutputShape, Probe
from . import accuracy as error
from .accumulator import Accumulation, bar
from .evaluate import checked_gradients


def planned(
    network: Network,
    batches: Batches,
    engine: Engine | None,
    damping: Damping,
    memory: float | None,
    in_all: int | None,
) -> tuple[Plan, Inputs, Batches, Probe]:
    """The plan, the first rows, the data as if nothing had been read, and what the network shows on them."""
    x, _, batches = batches.peek()
    with plain_autograd(network.device):
        probe = network.probe(x)
        layers, network = probe.layers, network.with_layers(*probe)
        looked = x[:CHUNK_ROWS_AT_LEAST]
        start = time.perf_counter()
        network.gradients(looked, next(network.groups(looked)))
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
    return plan_fit(problem, engine, memory), x, batches, probe


class Chosen(NamedTuple):
    """What a fit is made with. The network gives what the engine asks for: rows in one piece, or layer by layer."""

    option: Option
    memory: float
    layers: Layers
    by_rows: bool
    shape: OutputShape

    def network(self, network: Network) -> Network:
        return network.with_layers(None if self.by_rows else self.layers, self.shape)


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
    weights = network.fingerprint  # as the model has them: a forward pass may write to the copy's buffers
    found, batches = chosen(network, batches, engine, damping, memory, in_all)
    network = found.network(network)
    sample = None
    if found.option.engine.sample_size:
        sample = drawn(found.option.engine, network, batches, progress).rows()
    return started(network, batches, found, weights, damping.at(in_all, network.n_returned), sample), batches


def chosen(
    network: Network,
    batches: Batches,
    engine: Engine | None,
    damping: Damping,
    memory: float | None,
    in_all: int | None,
) -> tuple[Chosen, Batches]:
    schedule, x, batches, probe = planned(network, batches, engine, damping, memory, in_all)
    option = schedule.chosen
    if option is None:
        used = "" if batches.twice else " (its first batch is read: a generator has to be made anew)"
        raise MemoryError(
            f"this fit would not fit into memory: give a smaller engine, or more memory={used}\n{schedule}"
        )
    by_rows = option.engine.wants_rows(option.problem) and network.rows_by_vmap_work(x)
    return Chosen(option, schedule.memory, probe.layers, by_rows, probe.shape), batches


def drawn(engine: Engine, network: Network, batches: Batches, progress: bool, process: int = 0) -> RowSample:
    """`sample_size` training rows, in a pass that computes no gradients; other ones in each process."""
    # Each row has a key of its own, and what follows are sums over all rows: a loader may shuffle as it likes, and do
    # without some of the sampled rows the second time.
    seed = [engine.seed, process] if process else engine.seed
    sample = RowSample(-(-engine.sample_size // network.n_outputs), seed)
    with plain_autograd(network.device), bar("deltaband, drawing a sample", batches, progress) as shown:
        for x, _, _ in batches.chunks(network.chunk_rows):
            sample.update(network.prepare(x))
            shown.update(len(x))
    return sample


def started(
    network: Network,
    batches: Batches,
    found: Chosen,
    weights: dict[str, str],
    damping: float | None,
    sample: Sample | None,
) -> Accumulation:
    engine = found.option.engine
    with plain_autograd(network.device):
        gradients = None if sample is None else _gradients(engine, network, batches, sample)
        started = engine.start(n_rows=found.option.problem.n_rows, damping=damping, sample=gradients)
    return Accumulation(network, found.layers, started, found.option, found.memory, weights)


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


def _gradients(engine: Engine, network: Network, batches: Batches, rows: Sample) -> GradientBatch:
    if len(rows) == 0:
        raise EmptyDataError(EMPTY)
    parts = []
    for gradients in error.gradients(network, rows):
        # The pass to come names a row that is not finite by its number in the data.
        finite = np.flatnonzero(np.isfinite(gradients.squared_norms))
        parts += [gradients.take(finite)] if len(finite) else []
    if not parts:
        for x, _, first in batches.chunks(network.chunk_rows):
            for _ in checked_gradients(network, x, first):
                pass
    sample = GradientBatch.concatenate(parts).merged()
    return sample if len(sample) <= engine.sample_size else sample.between(0, engine.sample_size)
