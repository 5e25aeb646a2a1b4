"""One fit in several processes: each takes in its share of the rows, and all end with the same band."""

from __future__ import annotations

import os
import secrets
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data.distributed import DistributedSampler

from . import artefact, fitting
from .accumulation import Accumulation
from .checkpoint import Checkpoint
from .covariance.memory import free_memory
from .data import EMPTY, Batches
from .encoding import Encoder
from .fitted import Fit
from .gradients import Network
from .team import Team
from .trace import RowSample
from .twin import fingerprint
from .warning import DeltabandWarning

if TYPE_CHECKING:
    from .band import Band

Groups = list[tuple[int, ...]]


def fits(
    band: Band, batches: Batches, progress: bool, path: str | Path | None, every: float
) -> tuple[tuple[Fit, ...], Checkpoint | None]:
    """A fit for each of the band's groups of outputs, to the rows of all processes; and the checkpoint, if there is a
    path, of this one."""
    team = Team()
    progress = progress and team.rank == 0
    kept = found = None
    with team.step():
        batches = own_rows(batches, team)
        if path is not None:
            kept = Checkpoint(band, _own_path(path, team), every, batches, f"{team.rank} of {team.size}")
            found = kept.read()
    _check_alike(band, team)
    runs = team.gather(None if found is None else found.run)
    if len(set(runs)) > 1:  # some were ended before they had begun: nothing is lost but what the others had done
        found = None
    with team.step():
        batches = batches if kept is None else kept.ordered(batches, found)
        groups, batches = _looked(band, batches)
    lead, groups, in_all = _in_common(groups, batches, team)
    with team.step():
        if band._engine is not None:
            fitting.check(band._engine, batches, band._damping, in_all)
    memory = _memory(band, len(groups), team)
    run = team.share(secrets.token_hex(8), 0)
    done = [] if found is None else list(found.done)
    for outputs in groups[len(done) :]:
        network = band._network(band._fitted_head(outputs))
        seen = keep = None
        if kept is not None:
            keep = partial(kept.keep, done, outputs)
        if found is not None and kept is not None:
            rows, found, seen = Accumulation.from_state(found.rows, network), None, kept.seen
        else:
            rows, batches = _begun(band, network, batches, lead, in_all, memory, progress, team)
            with team.step():
                if kept is not None:
                    kept.run = f"{run}, {len(done)}"
                    kept.write(done, outputs, rows)
        with team.step():
            rows.take(batches, partial(band._squares, outputs), progress, seen, keep)
            if kept is not None:
                kept.check_all_seen()
        gather(rows, team)
        with team.step():
            fit = replace(rows.finish(band._damping, band._noise), outputs=outputs)
        done.append(_agreed(fit, team, network))
    return tuple(done), kept


def own_rows(batches: Batches, team: Team) -> Batches:
    """The batches without the rows that a DistributedSampler gives a second time, so that all processes have as many:
    the last ones."""
    source = batches.source
    sampler = getattr(getattr(source, "batch_sampler", None), "sampler", getattr(source, "sampler", None))
    if not isinstance(sampler, DistributedSampler):
        return batches
    if (sampler.rank, sampler.num_replicas) != (team.rank, team.size):
        raise ValueError(
            f"the DistributedSampler is for process {sampler.rank} of {sampler.num_replicas}, and this is process "
            f"{team.rank} of {team.size}"
        )
    own = min(sampler.num_samples, -(-max(len(sampler.dataset) - team.rank, 0) // team.size))  # type: ignore[arg-type]
    if own < sampler.num_samples and not getattr(source, "in_order", True):
        raise ValueError("a DataLoader with in_order=False does not tell which rows its sampler gives twice")
    return replace(batches, limit=own, n_rows=own if batches.n_rows is None else min(own, batches.n_rows))


def gather(rows: Accumulation, team: Team) -> None:
    """The rows of all processes, in each of them: sums are added up, all else is merged in pairs and then shared."""
    n = sum(team.gather(rows.count))
    rows.check_size(n)
    summed = rows.add_up(team.total, n)
    apart = 1
    while apart < team.size:
        if team.rank % (2 * apart) == apart:
            team.send(rows.state(engine=not summed), team.rank - apart)
            break
        if team.rank + apart < team.size:
            other = team.receive(team.rank + apart, rows.network_of)
            _warn_of_repeats(rows, other, team.rank + apart)
            rows.merge_state(other)
        apart *= 2
    shared = team.share(rows.state(engine=not summed), 0, rows.network_of)
    if team.rank:
        rows.resume(shared)


def _begun(
    band: Band,
    network: Network,
    batches: Batches,
    lead: int,
    in_all: int | None,
    memory: float,
    progress: bool,
    team: Team,
) -> tuple[Accumulation, Batches]:
    """As `fitting.begun`, with one plan and one sample for all: the lead makes them."""
    weights = fingerprint(network.twin)
    found, engine, damping = None, band._engine, band._damping
    with team.step():
        if team.rank == lead:
            found, batches = fitting.chosen(network, batches, engine, damping, memory, in_all)
    about = None if found is None else (*found, network.layers is None, network.n_outputs, network.n_returned)
    option, memory, layers, by_rows, network.n_outputs, network.n_returned = team.share(about, lead)
    network.layers = None if by_rows else layers
    found = fitting.Chosen(option, memory, layers)
    sample, wanted = None, option.engine.sample_size
    with team.step():
        if wanted:
            sample = fitting.drawn(option.engine, network, batches, progress, team.rank)
    if sample is not None:
        _collect(sample, lead, team)
    state = None
    with team.step():
        if team.rank == lead:
            at = damping.at(in_all, network.n_returned)
            drawn = None if sample is None else sample.rows()
            state = fitting.started(network, batches, found, weights, at, drawn).state()
    return Accumulation.from_state(team.share(state, lead), network, team.rank), batches


def _collect(sample: RowSample, lead: int, team: Team) -> None:
    """The rows that all processes have drawn, in the sample of the lead."""
    for rank in range(team.size):
        if rank != lead and team.rank == lead:
            sample.merge(RowSample.from_state(team.receive(rank)))
        elif rank != lead and team.rank == rank:
            team.send(sample.state(), lead)


def _looked(band: Band, batches: Batches) -> tuple[Groups, Batches]:
    """The groups of outputs, of which a process without rows knows nothing."""
    try:
        return band._look(batches)
    except ValueError as error:
        if str(error) != EMPTY:
            raise
    return [], replace(batches, source=[], n_rows=0)


def _in_common(groups: Groups, batches: Batches, team: Team) -> tuple[int, Groups, int | None]:
    """The first process that has rows, the groups that it has found, and how many rows there are in all."""
    every = team.gather([groups, batches.n_rows])
    lead = next((rank for rank, (found, _) in enumerate(every) if found), None)
    if lead is None:
        raise ValueError(EMPTY)
    for rank, (found, _) in enumerate(every):
        if found and found != every[lead][0]:
            raise ValueError(f"the networks of processes {lead} and {rank} return different numbers of outputs")
    lengths = [n for _, n in every]
    return lead, [tuple(group) for group in every[lead][0]], None if None in lengths else sum(lengths)


def _memory(band: Band, n_fits: int, team: Team) -> float:
    """What each process may hold; several of them may share the memory of one machine."""
    if band.memory is not None:
        return float(band.memory) / n_fits
    here = int(os.environ.get("LOCAL_WORLD_SIZE", team.size))
    free = min(team.gather(free_memory() / here))
    return free * (0.5 if band._engine is None else 1.0) / n_fits


def _check_alike(band: Band, team: Team) -> None:
    about = [band._given(), fingerprint(band._network().twin)]
    every = team.gather(about)
    for rank, (options, weights) in enumerate(every):
        for what, mine, theirs in (("", every[0][0], options), ("weights of ", every[0][1], weights)):
            for name in {**mine, **theirs}:
                if mine.get(name) != theirs.get(name):
                    raise ValueError(f"processes 0 and {rank} have different {what}{name}: all must be given the same")


def _agreed(fit: Fit, team: Team, network: Network) -> Fit:
    """The same in all processes to the last digit, which other processors may round otherwise."""
    encode = Encoder()
    tree = artefact.as_json(encode(fit))
    if len(set(team.gather(artefact.digest(encode.tensors, {"fit": tree})))) == 1:
        return fit
    shared: Fit = team.share(fit, 0, lambda outputs, layers: network.again(layers, own_weights=True))
    return shared


def _warn_of_repeats(rows: Accumulation, other: dict[str, Any], rank: int) -> None:
    # rows are rarely equal by chance
    if rows.shares_rows(other["trace"]["hashes"]):
        warnings.warn(
            f"process {rank} has read rows that another one has read as well, and they count twice: give each its own "
            "share of them, with a DistributedSampler for instance",
            DeltabandWarning,
            stacklevel=4,
        )


def _own_path(path: str | Path, team: Team) -> Path:
    path = Path(path)
    return path.with_name(f"{path.stem}.{team.rank}{path.suffix}")
