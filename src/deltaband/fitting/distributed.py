"""One fit in several processes: each takes in its share of the rows, and all end with the same band."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data.distributed import DistributedSampler

from ..data.batches import EMPTY, Batches
from ..data.row_record import RowSample
from ..engines.memory import free_memory
from ..errors import EmptyDataError, warn
from ..network.network import Network, OutputShape
from ..storage import container as artefact
from ..storage.encoding import Encoder
from . import start as fitting
from .accumulator import Accumulation
from .checkpoint import Checkpoint
from .fit import Fit
from .process_group import Team
from .replayable import samplers

if TYPE_CHECKING:
    from .band import Band

Groups = list[tuple[int, ...]]


def fits(
    band: Band, read: Callable[[], Batches], progress: bool, path: str | Path | None, every: float
) -> tuple[tuple[Fit, ...], Checkpoint | None]:
    """A fit for each of the band's groups of outputs, to the rows of all processes; and the checkpoint, if there is a
    path, of this one."""
    team = Team()
    progress = progress and team.rank == 0
    kept = found = None
    with team.step():
        batches = own_rows(read(), team)
        if path is not None:
            kept = Checkpoint(band, _own_path(path, team), every, batches, f"{team.rank} of {team.size}")
            found = kept.read()
    _check_alike(band, batches, team)
    runs = team.gather(None if found is None else found.run)
    with team.step():
        if len(set(runs)) > 1:  # some were ended before they had begun, or their files are gone
            _warn_of_loss(found is not None, kept)
            found = None
        batches = batches if kept is None else kept.ordered(batches, found)
        groups, batches = _looked(band, batches)
        if kept is not None and groups:
            batches = kept.look(batches, found)
    lead, groups, in_all = _in_common(groups, batches, team)
    batches = _same_answers(band, batches, lead, team)
    with team.step():
        if band._engine is not None:
            fitting.check(band._engine, batches, band._damping, in_all)
    memory = _memory(band, len(groups), team)
    run = team.share(secrets.token_hex(8), 0)
    done = [] if found is None else list(found.done)
    for outputs in groups[len(done) :]:
        network = band._network(band._fitted_head(outputs)).copy()
        seen = keep = None
        if kept is not None:
            keep = partial(kept.keep, done, outputs)
        if found is not None and kept is not None:
            rows, found, seen = Accumulation.from_state(found.rows, network, band._engine), None, kept.seen
        else:
            rows, batches = _begun(band, network, batches, lead, in_all, memory, progress, team)
            with team.step():
                if kept is not None:
                    kept.run = f"{run}, {len(done)}"
                    kept.try_to_write(done, outputs, rows)
        with team.step():
            rows.take(batches, partial(band._squares, outputs), progress, seen, keep)
            if kept is not None:
                kept.check_all_seen()
        repeated = gather(rows, team)
        with team.step():
            _warn_of_repeats(repeated)
            fit = replace(rows.finish(band._damping, band._noise), outputs=outputs)
        done.append(_agreed(fit, team, network))
    return tuple(done), kept


def own_rows(batches: Batches, team: Team) -> Batches:
    """The batches without the rows that a DistributedSampler gives a second time, so that all processes have as many:
    the last ones."""
    sampler = _sampler(batches)
    if sampler is None:
        return batches
    if (sampler.rank, sampler.num_replicas) != (team.rank, team.size):
        raise ValueError(
            f"the DistributedSampler is for process {sampler.rank} of {sampler.num_replicas}, and this is process "
            f"{team.rank} of {team.size}"
        )
    own = min(sampler.num_samples, -(-max(len(sampler.dataset) - team.rank, 0) // team.size))  # type: ignore[arg-type]
    if own < sampler.num_samples and not getattr(batches.source, "in_order", True):
        raise ValueError("a DataLoader with in_order=False does not tell which rows its sampler gives twice")
    return replace(batches, limit=own, n_rows=None if batches.n_rows is None else min(own, batches.n_rows))


def _sampler(batches: Batches) -> DistributedSampler[Any] | None:
    """The loader's DistributedSampler; one that draws its rows in its own way is nobody's."""
    found = (each for each in samplers(batches.source) if isinstance(each, DistributedSampler))
    return next((each for each in found if type(each).__iter__ is DistributedSampler.__iter__), None)


def gather(rows: Accumulation, team: Team) -> list[int]:
    """The rows of all processes, in each of them: sums are added up, all else is merged in pairs and then shared. The
    processes are told whose rows were there already."""
    n = sum(team.gather(rows.count))
    rows.check_size(n)
    summed = rows.add_up(team.total, n)
    apart, repeated = 1, []
    while apart < team.size:
        if team.rank % (2 * apart) == apart:
            team.send(rows.state(engine=not summed), team.rank - apart)
            break
        if team.rank + apart < team.size:
            other = team.receive(team.rank + apart, rows.network_of)
            repeated += [team.rank + apart] if rows.shares_rows(other["trace"]["hashes"]) else []
            rows.merge_state(other)
        apart *= 2
    shared = team.share(rows.state(engine=not summed), 0, rows.network_of)
    if team.rank:
        rows.resume(shared)
    return sorted(rank for ranks in team.gather(repeated) for rank in ranks)


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
    weights = network.fingerprint
    found, engine, damping = None, band._engine, band._damping
    with team.step():
        if team.rank == lead:
            found, batches = fitting.chosen(network, batches, engine, damping, memory, in_all)
    about = None if found is None else (*found[:4], *found.shape)
    option, memory, layers, by_rows, n_outputs, n_returned = team.share(about, lead)
    found = fitting.Chosen(option, memory, layers, by_rows, OutputShape(n_outputs, n_returned))
    network = found.network(network)
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
    return Accumulation.from_state(team.share(state, lead), network, engine, team.rank), batches


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
    except EmptyDataError:
        return [], replace(batches, source=[], n_rows=0)


def _in_common(groups: Groups, batches: Batches, team: Team) -> tuple[int, Groups, int | None]:
    """The first process that has rows, the groups that it has found, and how many rows there are in all."""
    every = team.gather([groups, batches.n_rows])
    lead = next((rank for rank, (found, _) in enumerate(every) if found), None)
    if lead is None:
        raise EmptyDataError(EMPTY)
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


def _check_alike(band: Band, batches: Batches, team: Team) -> None:
    sampler, names = _sampler(batches), ("seed", "epoch", "shuffle", "drop_last")
    drawn = {} if sampler is None else {name: getattr(sampler, name) for name in names}
    every = team.gather([band._given(), band._network().fingerprint, drawn])
    kinds = ("", "weights of ", "DistributedSamplers, in their ")
    for rank, each in enumerate(every):
        for what, mine, theirs in zip(kinds, every[0], each, strict=True):
            for name in {**mine, **theirs}:
                if mine.get(name) != theirs.get(name):
                    raise ValueError(f"processes 0 and {rank} have different {what}{name}: all must be given the same")


def _agreed(fit: Fit, team: Team, network: Network) -> Fit:
    """The same in all processes to the last digit, which other processors may round otherwise."""
    encode = Encoder()
    tree = artefact.as_json(encode(fit))
    if len(set(team.gather(artefact.digest(encode.tensors, {"fit": tree})))) == 1:
        return fit
    shared: Fit = team.share(fit, 0, lambda outputs, layers: network.with_layers(layers).copy(own_weights=True))
    return shared


def _same_answers(band: Band, batches: Batches, lead: int, team: Team) -> Batches:
    """Whether all networks return the same for some rows of the lead; its batches as if nothing had been read."""
    asked = None
    with team.step():
        if team.rank == lead:
            x, _, batches = batches.peek()
            asked = (x, band._answers(x))
    x, answers = team.share(asked, lead)
    with team.step():
        if not band._answers_like(x, answers):
            raise ValueError(
                f"the network of process {team.rank} does not return for the same rows what that of process {lead} "
                "does: all must be given the same"
            )
    return batches


def _warn_of_repeats(ranks: list[int]) -> None:
    for rank in ranks:
        warn(
            f"process {rank} has read rows that another one has read as well, and they count twice: give each its own "
            "share of them, with a DistributedSampler for instance"
        )


def _warn_of_loss(had: bool, kept: Checkpoint | None) -> None:
    if had and kept is not None:
        warn(f"{kept.path} is not used: not all processes have a checkpoint of the same run, and the fit begins anew")


def _own_path(path: str | Path, team: Team) -> Path:
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, not a file")
    return path.with_name(f"{path.stem}.{team.rank}{path.suffix}")
