"""`Checkpoint`: a fit under way in a file, from which the same call of `fit` resumes after whatever has ended it."""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..data.batches import Batches
from ..data.inputs import Inputs
from ..errors import ArtefactError, DamagedArtefactError, warn
from ..network.stored import network_hook, network_maker
from ..storage import container
from ..storage.container import writable
from ..storage.encoding import Decoder, Encoder
from ..validation import check_seconds
from .accumulator import FitAccumulator
from .fit import Fit
from .spec import FitSpec, first_difference

CHECKPOINT_SECONDS = 60.0
WRITING_TIME_SHARE = 0.1  # of the fit's time, at most; unless `checkpoint_every` is 0: then whenever possible
START_OVER = "give what was given before, or delete the file to start over"

GeneratorStates = tuple[Tensor, ...]  # of torch's own generator and of those that a loader has


class UnfinishedFit(NamedTuple):
    """A fit under way, as it was read from a file."""

    done: tuple[Fit, ...]  # of the outputs before
    rows: dict[str, Any]  # the state of a FitAccumulator
    order: GeneratorStates
    answers: tuple[Inputs, Tensor] | None  # some rows, and what the network returns for them
    run: str  # equal in the files of several processes


class Checkpoint:
    """One file with the state of a fit, and its predecessor beside it."""

    def __init__(self, spec: FitSpec, path: Path | str, every: float, batches: Batches, process: str = "") -> None:
        self.path = writable(Path(path).expanduser())
        self.run = ""
        self._previous = self.path.with_name(self.path.name + ".previous")
        self._spec, self._every = spec, check_seconds(every, "checkpoint_every")
        self._wait, self._last_written = self._every, time.monotonic()
        options = spec.configuration()
        self._about: dict[str, Any] = {
            "options": {**options, "process": process} if process else options,
            "weights": spec.network().fingerprint,
            "n_rows": batches.n_rows,
        }
        self._answers: tuple[Inputs, Tensor] | None = None
        self._newest_is_whole = False
        self._loader: ReplayableLoader | None = None
        self._taken = np.zeros(0, dtype=np.uint64)  # the hashes of the rows that were taken in
        self._n_met = 0  # how many of them have come again

    def read(self) -> UnfinishedFit | None:
        """Return the fit in the file, None if there is no file.

        Raises:
            ArtefactError: If the file is of another fit.
        """
        if not self.path.exists():
            return self._read(self._previous) if self._previous.exists() else None
        try:
            found = self._read(self.path)
        except DamagedArtefactError as error:
            if not self._previous.exists():
                raise ArtefactError(f"{error}; give another path, or delete the file to start over") from error
            found = self._read(self._previous)
            warn(f"{error}; the fit resumes from {self._previous.name}")
            return found
        self._newest_is_whole = True
        return found

    def _read(self, path: Path) -> UnfinishedFit:
        tensors, texts = container.read(path, "checkpoint")
        self._check(path, json.loads(texts["checkpoint"]))
        decode = Decoder(tensors, network_maker(self._spec.stored_network))
        try:
            return UnfinishedFit(**decode(json.loads(texts["tree"])))
        except Exception as error:
            raise ArtefactError(f"{path} is not a checkpoint that this version understands: {error}") from error

    def _check(self, path: Path, was: dict[str, Any]) -> None:
        now = self._about
        if name := first_difference(was["options"], now["options"]):
            before, given = was["options"].get(name), now["options"].get(name)
            raise ArtefactError(f"{path} is of a fit with {name}={before}, and this one has {given}: {START_OVER}")
        if name := first_difference(was["weights"], now["weights"]):
            raise ArtefactError(f"{path} is of a fit to another model: first {name!r} differs; {START_OVER}")
        if was["n_rows"] != now["n_rows"]:
            raise ArtefactError(
                f"{path} is of a fit to {was['n_rows']} rows, and these are {now['n_rows']}: {START_OVER}"
            )

    def replayable(self, batches: Batches, found: UnfinishedFit | None) -> Batches:
        """Return the batches in the order that they had, or in one that can be restored later."""
        if found is not None:
            self.run, self._taken = found.run, found.rows["record"]["hashes"]
        if not batches.reiterable:
            return batches
        self._loader = ReplayableLoader(batches.source, None if found is None else found.order)
        return replace(batches, source=self._loader)

    def check_outputs(self, batches: Batches, found: UnfinishedFit | None) -> Batches:
        """Raise if the network returns other numbers than it did; return the batches as if nothing had been read."""
        if found is not None and found.answers is not None and not self._spec.still_returns(*found.answers):
            raise ArtefactError(
                f"{self.path} is of a fit to another network, as other numbers show for the first rows: {START_OVER}"
            )
        first, batches = batches.peek()
        first.x.check_storable()
        self._answers = (first.x, self._spec.model_outputs(first.x))
        return batches

    def check_row(self, first: int, hashes: np.ndarray) -> None:
        """Raise unless these rows are the ones that were taken in."""
        other = np.flatnonzero(self._taken[first : first + len(hashes)] != hashes)
        if len(other):
            raise ArtefactError(
                f"{self.path} is of a fit to other data, or to the same rows in another order: row {first + other[0]} "
                "differs. Give the same data in the same order, or delete the file to start over"
            )
        self._n_met += len(hashes)

    def check_all_rows_came(self) -> None:
        """Raise if the data ended before the rows that were taken in had come again."""
        if self._n_met < len(self._taken):
            raise ArtefactError(
                f"{self.path} is of a fit that had taken in {len(self._taken)} rows, and these are {self._n_met}: give "
                "the same data, or delete the file to start over"
            )

    def write_if_due(self, done: Sequence[Fit], rows: FitAccumulator) -> None:
        """Write the state if it is time to."""
        if time.monotonic() - self._last_written < self._wait:
            return
        start = time.monotonic()
        self.try_to_write(done, rows)
        self._last_written = time.monotonic()
        seconds = self._last_written - start
        self._wait = max(self._every, seconds / WRITING_TIME_SHARE) if self._every else 0.0

    def try_to_write(self, done: Sequence[Fit], rows: FitAccumulator) -> None:
        """Write the state; if that fails, warn, and leave what is on the disk."""
        try:
            self.write(done, rows)
        except OSError as error:
            warn(f"the checkpoint {self.path} was not written at row {rows.n_rows}, and the fit continues: {error}")

    def write(self, done: Sequence[Fit], rows: FitAccumulator) -> None:
        """Write the state to the file; the file that was there becomes the previous one."""
        encode, fits = Encoder(), []
        for fit in done:
            encode.hooks = network_hook(fit.outputs)
            fits.append(encode(fit))
        encode.hooks = network_hook(rows.start.outputs)
        tree = {
            "done": {"tuple": fits},
            "rows": encode(rows.state()),
            "order": encode(() if self._loader is None else self._loader.order),
            "answers": encode(self._answers),
            "run": self.run,
        }
        texts = {
            "checkpoint": container.as_json(self._about),
            "tree": container.as_json({"dict": [[name, each] for name, each in tree.items()]}),
        }
        # a damaged file replaces none
        previous = self._previous if self._newest_is_whole else None
        container.write(self.path, encode.tensors, texts, previous=previous)
        self._newest_is_whole = True

    def remove(self) -> None:
        """Delete both files, the newer one last."""
        self._previous.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)


class ReplayableLoader:
    """A loader whose random order can be restored."""

    def __init__(self, source: Iterable[Any], order: GeneratorStates | None = None) -> None:
        """Wrap a loader; `order` is the order of the first time that it is read."""
        self._source = source
        self._next_order = order
        self.order: GeneratorStates = ()  # in which it was last begun

    def __iter__(self) -> Iterator[Any]:
        generators = _generators(self._source)
        if self._next_order is not None and len(self._next_order) == 1 + len(generators):
            torch.set_rng_state(self._next_order[0])
            for generator, state in zip(generators, self._next_order[1:], strict=True):
                generator.set_state(state)
        self._next_order = None
        self.order = (torch.get_rng_state(), *(generator.get_state() for generator in generators))
        if getattr(self._source, "_iterator", None) is not None:  # persistent workers: torch draws them no new seed
            torch.empty((), dtype=torch.int64).random_(generator=self._source.generator)  # type: ignore[attr-defined]
        return iter(self._source)


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the generators of a DataLoader and of its samplers."""
    found = (getattr(owner, "generator", None) for owner in (loader, *samplers(loader)))
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def samplers(loader: Any) -> Iterator[Any]:
    """Yield the samplers of a DataLoader, and those that they draw from."""
    for name in ("batch_sampler", "sampler"):
        sampler = getattr(loader, name, None)
        while sampler is not None:
            yield sampler
            sampler = getattr(sampler, "sampler", None)
