"""The one loop of a fit, for a single process or several: look at the data, plan, start an engine, take in the rows."""

import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..data.batches import EMPTY_DATA_MESSAGE, Batches
from ..data.inputs import Inputs
from ..data.row_record import RowSample, Sample
from ..engines import Engine, Exact, Known, Plan, Problem, plan_fit
from ..errors import EmptyDataError, warn
from ..machine import on_free_cores
from ..network.gradient_batch import GradientBatch
from ..network.network import Network, Probe, plain_autograd
from ..network.probes import probes_for
from ..network.speed import measured_speeds
from . import accuracy, robust
from .accumulator import LEVERAGE_ROWS, FitAccumulator, Start
from .checkpoint import Checkpoint
from .fit import Fit, Outputs, checked_gradients
from .spec import FitSpec

QUICK_FLOPS = 1e9  # an exact fit of fewer takes less than to measure how fast this machine is


class OneProcess:
    """The processes that fit together, where there is this one alone; a `ProcessGroup` is several of them."""

    rank, size, name = 0, 1, ""

    def step(self) -> AbstractContextManager[None]:
        """Run a block in each process; an exception in one of them ends it in all."""
        return nullcontext()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank."""
        return [value]

    def share(self, value: Any, lead: int) -> Any:
        """Return the lead's value in all processes."""
        return value

    def own_rows(self, batches: Batches) -> Batches:
        """Leave out the rows that a DistributedSampler repeats so that all processes have equally many: the last."""
        return batches

    def own_path(self, path: str | Path) -> Path:
        """Return the path with the number of this process before its suffix."""
        return Path(path)

    def check_same_spec(self, spec: FitSpec, batches: Batches) -> None:
        """Raise unless all processes were given the same options, weights and sampler."""

    def agree(self, groups: list[Outputs], n_rows: int | None) -> tuple[int, list[Outputs], int | None]:
        """Return the first process that has rows, the groups it has found, and how many rows there are in all."""
        return 0, groups, n_rows

    def check_same_outputs(self, spec: FitSpec, batches: Batches, lead: int) -> Batches:
        """Raise unless all networks return the same for rows of the lead; return the batches as if not read yet."""
        return batches

    def memory_per_fit(self, spec: FitSpec, n_fits: int) -> float | None:
        """Return the bytes that each of several fits may take in each process; None: what the plan allows one."""
        return spec.memory_per_fit(n_fits)

    def collect_sample(self, sample: RowSample, lead: int) -> None:
        """Merge the rows that all processes have drawn into the sample of the lead."""

    def merge_rows(self, rows: FitAccumulator) -> list[int]:
        """Merge the rows of all processes in each of them, and return the ranks whose rows were there already."""
        return []

    def agree_on_fit(self, fit: Fit, network: Network) -> Fit:
        """Return the same fit in all processes to the last digit, which other processors may round differently."""
        return fit


@on_free_cores()
def fit(
    spec: FitSpec,
    read: Callable[[], Batches],
    progress: bool,
    checkpoint: str | Path | None,
    checkpoint_every: float,
    group: OneProcess,
) -> tuple[FitSpec, tuple[Fit, ...], Checkpoint | None]:
    """Fit to all rows of all processes, once for each group of outputs.

    Returns:
        What was fitted, the fits, and the checkpoint of this process, which the caller removes once it has stored them.
    """
    progress = progress and group.rank == 0
    kept = found = None
    with group.step():
        if group.size > 1:
            robust.refuse_parts(spec, "distributed=True")
        batches = group.own_rows(read())
        if checkpoint is not None:
            kept = Checkpoint(spec, group.own_path(checkpoint), checkpoint_every, batches, group.name)
            found = kept.read()
    group.check_same_spec(spec, batches)
    runs = group.gather(None if found is None else found.run)
    with group.step():
        if len(set(runs)) > 1:  # some were ended before they had begun, or their files are gone
            if found is not None and kept is not None:
                warn(f"{kept.path} is not used: the processes have no checkpoints of one run; the fit starts over")
            found = None
        batches = batches if kept is None else kept.replayable(batches, found)
        if group.size == 1:
            check_engine(spec, batches, batches.n_rows)
        unsettled, (spec, groups, batches) = spec, _inspect_if_any(spec, batches, group)
        if kept is not None and groups:
            batches = kept.check_outputs(batches, found)
    lead, groups, n_rows = group.agree(groups, batches.n_rows)
    if unsettled.takes_last_layer:
        spec = replace(unsettled, parameters=group.share(spec.parameters, lead))
    batches = group.check_same_outputs(spec, batches, lead)
    with group.step():
        check_engine(spec, batches, n_rows)
    memory = group.memory_per_fit(spec, len(groups))
    run = group.share(secrets.token_hex(8), 0)
    fits = [] if found is None else list(found.done)
    for outputs in groups[len(fits) :]:
        skipped = None
        if found is not None and kept is not None:
            rows, found, skipped = FitAccumulator.from_state(spec, found.rows), None, kept.check_row
        else:
            rows, batches = started(spec, outputs, batches, lead, n_rows, memory, progress, group)
            with group.step():
                if kept is not None and group.size > 1:
                    kept.run = f"{run}, {len(fits)}"
                    kept.try_to_write(fits, rows)
        with group.step():
            rows.take(batches, progress, skipped, None if kept is None else partial(kept.write_if_due, fits))
            if kept is not None:
                kept.check_all_rows_came()
        repeated = group.merge_rows(rows)
        with group.step():
            for rank in repeated:
                warn(
                    f"process {rank} has read rows that another process has read as well, and they count twice: give "
                    "each its own share of them, for instance with a DistributedSampler"
                )
            finished = rows.finish()
            if spec.task.robust is not None:
                with batches.progress_bar("deltaband, robust covariance", progress) as shown:
                    finished = robust.with_sandwich(spec, finished, rows.network, batches, shown)
        fits.append(group.agree_on_fit(finished, rows.network))
    return spec, tuple(fits), kept


def plan(spec: FitSpec, batches: Batches) -> Plan:
    """Return the plan of a fit to these batches, of which only the first rows are read."""
    spec, groups, batches = inspect_first_rows(spec, batches)
    network = spec.network(spec.task.head(groups[0]))
    return _planned(spec, network, batches, batches.n_rows, spec.memory_per_fit(len(groups)), timed=True)[0]


def inspect_first_rows(spec: FitSpec, batches: Batches) -> tuple[FitSpec, list[Outputs], Batches]:
    """Check the first rows, and return what is settled, what each fit is for, and the data as if nothing were read."""
    first, batches = batches.peek()
    spec = spec.settled(first.x)
    outputs, batches = spec.model_outputs(first.x), replace(batches, row_shape=spec.network().shape(first.x))
    spec.task.check_first_rows(outputs, first.y)
    if batches.targets is not None:  # a long pass must not end in an error that the arrays could have given
        spec.task.check_targets(batches.targets, outputs.shape[1])
    groups = spec.task.groups(outputs.shape[1])
    if "cluster" in first.x.extras:
        robust.check_clusters(spec)
    spec.weigh(first.x, groups[0], outputs.shape[1])
    if spec.task.robust is not None and probes_for(len(groups[0]), None, 0, spec.probes) is not None:
        many = f"robust= takes the residual of each of the {len(groups[0]):,} outputs of a row with its gradient"
        raise ValueError(f"{many}: give probes={len(groups[0])} if that is affordable, or leave robust= out")
    if len(groups) > 1 and not batches.reiterable:
        raise ValueError(
            "per_output=True reads the data once for each output, which an iterator or generator does not allow: "
            "give arrays X and y, a DataLoader, or a list of batches"
        )
    return spec, groups, batches


def check_engine(spec: FitSpec, batches: Batches, n_rows: int | None) -> None:
    """Raise unless these data will do for the engine, before any of them is read."""
    if spec.task.robust is not None:
        robust.check_repeatable(spec, batches)
    engine, damping = spec.engine, spec.damping
    if engine is None:
        return
    name = type(engine).__name__
    if engine.needs_damping and damping.at(n_rows) is None:
        raise ValueError(
            f"{name} needs λ from the first row on: "
            + (
                "λ follows from the number of rows, and this loader has no length: give fit(..., n_rows=...)"
                if damping.is_known
                else "give weight_decay or damping, or use Exact or RobustFrequentDirections"
            )
        )
    if engine.sample_size and not batches.reiterable:
        raise ValueError(
            f"{name} reads the data twice, which an iterator or generator does not allow: give arrays X and y, a "
            "DataLoader, or a list of batches"
        )


def _inspect_if_any(spec: FitSpec, batches: Batches, group: OneProcess) -> tuple[FitSpec, list[Outputs], Batches]:
    """Look at the first rows; one of several processes may have none."""
    try:
        return inspect_first_rows(spec, batches)
    except EmptyDataError:
        if group.size == 1:
            raise
        return spec, [], replace(batches, source=[], n_rows=0)


def started(
    spec: FitSpec,
    outputs: Outputs,
    batches: Batches,
    lead: int,
    n_rows: int | None,
    memory: float | None,
    progress: bool,
    group: OneProcess,
) -> tuple[FitAccumulator, Batches]:
    """Return an accumulator without rows, and the data as if nothing had been read: one process plans for all."""
    start = None
    with group.step():
        if group.rank == lead:
            start, batches = _planned_start(spec, outputs, batches, n_rows, memory)
    start = group.share(start, lead)
    assert start is not None
    engine, sample = start.option.engine, None
    with group.step():
        if engine.sample_size:
            sample = _drawn(start, spec, batches, progress, group.rank)
    if sample is not None:
        group.collect_sample(sample, lead)
    state = None
    with group.step():
        if group.rank == lead:
            rows = None if sample is None else sample.rows()
            state = _first_state(spec, start, batches, n_rows, rows)
    if group.size == 1:
        assert state is not None
        return state, batches
    shared = group.share(None if state is None else state.state(), lead)
    return FitAccumulator.from_state(spec, shared, group.rank), batches


def _planned(
    spec: FitSpec, network: Network, batches: Batches, n_rows: int | None, memory: float | None, timed: bool
) -> tuple[Plan, Network, Inputs, Batches, Probe]:
    """Return the plan, the network that the fit takes, the first rows, unread data, and what these rows show."""
    began = time.perf_counter()
    looked, batches = batches.peek()
    x = looked.x.without_extras()
    with plain_autograd(network.device):
        probe = network.probe(x)
        layers, network, m = probe.layers, network.with_layers(probe.layers), probe.n_outputs
        probes = None if m == 1 else probes_for(m, n_rows, network.n_parameters, spec.probes)
    network, m = network.with_probes(probes), m if probes is None else probes.count
    problem = Problem(
        None if n_rows is None else n_rows * m,
        network.n_parameters,
        network.dtype.itemsize,
        layers.factor_bytes,
        -(-network.prepare(x[:1]).nbytes // m),
        layers.inner_flops,
        damped=spec.damping.is_known and spec.task.robust is None,  # else there will be eigenvectors
        reiterable=batches.reiterable,
        positions=layers.positions,
        asked_rows=m * LEVERAGE_ROWS,
        single=m == 1 and probes is None,
    )
    if timed and (n_rows is None or Exact().cost(problem).flops > QUICK_FLOPS):
        with plain_autograd(network.device):
            row_seconds, pair_seconds = measured_speeds(network, x)
        problem = replace(problem, row_seconds=row_seconds, pair_seconds=pair_seconds)
    problem = replace(problem, setup_seconds=time.perf_counter() - began)
    return plan_fit(problem, spec.engine, memory, spec.time), network, x, batches, probe


def _planned_start(
    spec: FitSpec, outputs: Outputs, batches: Batches, n_rows: int | None, memory: float | None
) -> tuple[Start, Batches]:
    network = spec.network(spec.task.head(outputs)).copy()
    weights = network.fingerprint  # as the model has them: a forward pass may write to the copy's buffers
    timed = spec.engine is None or not spec.engine.is_exact  # else nothing depends on it
    schedule, network, x, batches, found = _planned(spec, network, batches, n_rows, memory, timed)
    option = schedule.chosen
    if option is None:
        used = "" if batches.reiterable else " (its first batch has been read: a generator has to be made anew)"
        raise MemoryError(
            f"this fit would not fit into memory: give a smaller engine, or more memory={used}\n{schedule}"
        )
    # rows of layers that all have factors are as fast as by torch.func, whose first call imports a compiler for seconds
    wants_rows = option.engine.cost(option.problem).wants_rows and bool(found.layers.rest)
    by_rows = wants_rows and network.rows_by_vmap_work(x)
    form = (found.layers, by_rows, found.n_outputs, found.n_returned, weights)
    about = (schedule.exact_cost, found.shape, network.probes)
    return Start(outputs, option, schedule.memory, *form, *about), batches


def _drawn(start: Start, spec: FitSpec, batches: Batches, progress: bool, rank: int) -> RowSample:
    """Draw `sample_size` training rows in a pass that computes no gradients; each process draws others."""
    # Each row has a key of its own, and what follows are sums over all rows: a loader may shuffle as it likes, and
    # leave out some of the sampled rows the second time.
    engine, network = start.option.engine, start.network(spec)
    sample = RowSample(-(-engine.sample_size // start.gradients_per_row), [engine.seed, rank] if rank else engine.seed)
    with plain_autograd(network.device), batches.progress_bar("deltaband, drawing a sample", progress) as shown:
        for x, _, first in batches.chunks(network.chunk_rows):
            sample.update(network.prepare(spec.weigh(x, start.outputs, start.n_returned, first)))
            shown.update(len(x))
    return sample


def _first_state(
    spec: FitSpec, start: Start, batches: Batches, n_rows: int | None, sample: Sample | None
) -> FitAccumulator:
    """Return an accumulator without rows, its engine started with what is known."""
    engine, network = start.option.engine, start.network(spec)
    damping = spec.damping.at(n_rows, start.n_returned)
    with plain_autograd(network.device):
        gradients = None if sample is None else _sample_gradients(engine, network, batches, sample)
        sums = engine.start(Known(start.option.problem.n_rows, damping, gradients))
    return FitAccumulator(spec, start, sums)


def _sample_gradients(engine: Engine, network: Network, batches: Batches, rows: Sample) -> GradientBatch:
    if len(rows) == 0:
        raise EmptyDataError(EMPTY_DATA_MESSAGE)
    parts = []
    for gradients in accuracy.gradients(network, rows):
        # the pass to come names a row that is not finite by its number in the data
        finite = np.flatnonzero(np.isfinite(gradients.squared_norms))
        parts += [gradients.take(finite)] if len(finite) else []
    if not parts:
        for x, _, first in batches.chunks(network.chunk_rows):
            list(checked_gradients(network, x, first))
    several, sample = network.gradients_per_row(rows.pieces[0]) > 1, GradientBatch.concatenate(parts)
    sample = sample.shuffled(engine.seed) if several else sample.merged()  # several come output by output
    return sample.between(0, engine.sample_size)
