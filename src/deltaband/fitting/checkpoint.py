"""A fit under way in a file, from which the same call of `fit` goes on after whatever has ended it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from ..data.batches import Batches
from ..data.inputs import Inputs
from ..errors import ArtefactError, DamagedArtefactError, warn
from ..network.network import Network
from ..storage import container as artefact
from ..storage.atomic import writable
from ..storage.encoding import Decoder, Encoder
from .accumulator import Accumulation
from .fit import Fit
from .replayable import Order, Ordered

if TYPE_CHECKING:
    from .band import Band

EVERY = 60.0  # seconds
WRITING = 0.1  # of the time, at most; unless `every` is 0: then whenever it can be


class UnderWay(NamedTuple):
    """A fit that is not finished, as it was read."""

    done: tuple[Fit, ...]  # of the outputs before
    rows: dict[str, Any]  # the state of an accumulation
    order: Order
    answers: tuple[Inputs, Tensor] | None  # some rows, and what the network returns for them
    run: str  # what the files of several processes have in common


class Checkpoint:
    """One file, and the one before it beside it."""

    def __init__(self, band: Band, path: str | Path, every: float, batches: Batches, process: str = "") -> None:
        if isinstance(every, bool) or not isinstance(every, int | float | np.number) or not 0 <= every < np.inf:
            raise ValueError(f"checkpoint_every must be a number of seconds ≥ 0, got {every!r}")
        self.path = writable(Path(path).expanduser())
        self.run = ""
        self._process = process
        self._previous = self.path.with_name(self.path.name + ".previous")
        self._band, self._every = band, float(every)
        self._wait, self._last = self._every, time.monotonic()
        self._about = self._described(batches.n_rows)
        self._answers: tuple[Inputs, Tensor] | None = None
        self._whole = False  # whether the newest file is known to be
        self._source: Ordered | None = None
        self._seen = np.zeros(0, dtype=np.uint64)  # the hashes of the rows that were taken in
        self._met = 0  # how many of them have come again

    def read(self) -> UnderWay | None:
        """What is there; nothing where no file is. An `ArtefactError` where it is of another fit."""
        if not self.path.exists():
            return self._read(self._previous) if self._previous.exists() else None
        try:
            found = self._read(self.path)
        except DamagedArtefactError as error:
            if not self._previous.exists():
                raise ArtefactError(f"{error}; give another path, or delete the file to begin anew") from error
            found = self._read(self._previous)
            warn(f"{error}; the fit goes on from {self._previous.name}")
            return found
        self._whole = True
        return found

    def _read(self, path: Path) -> UnderWay:
        tensors, texts = artefact.read(path, "checkpoint")
        self._check(path, json.loads(texts["checkpoint"]))
        decode = Decoder(tensors, self._network)
        try:
            return UnderWay(**decode(json.loads(texts["tree"])))
        except Exception as error:
            raise ArtefactError(f"{path} is no checkpoint that this version understands: {error}") from error

    def ordered(self, batches: Batches, found: UnderWay | None) -> Batches:
        """The batches in the order that they had, or in one that can be had again."""
        if found is not None:
            self.run, self._seen = found.run, found.rows["trace"]["hashes"]
        if not batches.twice:
            return batches
        self._source = Ordered(batches.source, None if found is None else found.order)
        return replace(batches, source=self._source)

    def look(self, batches: Batches, found: UnderWay | None) -> Batches:
        """Whether the network answers as it did; the batches as if nothing had been read."""
        if found is not None and found.answers is not None and not self._band._answers_like(*found.answers):
            raise ArtefactError(
                f"{self.path} is of a fit to another network: for the first rows this one returns other numbers. Give "
                "what was given before, or delete the file to begin anew"
            )
        x, _, batches = batches.peek()
        self._answers = (x, self._band._answers(x))
        return batches

    def seen(self, first: int, hashes: np.ndarray) -> None:
        """Whether these rows are those that were taken in."""
        other = np.flatnonzero(self._seen[first : first + len(hashes)] != hashes)
        if len(other):
            raise ArtefactError(
                f"{self.path} is of a fit to other data, or to the same rows in another order: row {first + other[0]} "
                "is not the one that it was. Give the same data in the same order, or delete the file to begin anew"
            )
        self._met += len(hashes)

    def check_all_seen(self) -> None:
        if self._met < len(self._seen):
            raise ArtefactError(
                f"{self.path} is of a fit that had taken in {len(self._seen)} rows, and these are {self._met}: give "
                "the same data, or delete the file to begin anew"
            )

    def keep(self, done: Sequence[Fit], outputs: tuple[int, ...], rows: Accumulation) -> None:
        """Write, if it is time to; what is on the disk stays there if that fails."""
        if time.monotonic() - self._last < self._wait:
            return
        start = time.monotonic()
        self.try_to_write(done, outputs, rows)
        self._last = time.monotonic()
        self._wait = max(self._every, (self._last - start) / WRITING) if self._every else 0.0

    def try_to_write(self, done: Sequence[Fit], outputs: tuple[int, ...], rows: Accumulation) -> None:
        try:
            self.write(done, outputs, rows)
        except OSError as error:
            warn(f"the checkpoint {self.path} was not written at row {rows.count}, and the fit goes on: {error}")

    def write(self, done: Sequence[Fit], outputs: tuple[int, ...], rows: Accumulation) -> None:
        encode, fits = Encoder(), []
        for fit in done:
            encode.outputs = fit.outputs
            fits.append(encode(fit))
        encode.outputs = outputs
        order = () if self._source is None else self._source.order
        tree = {
            "done": {"tuple": fits},
            "rows": encode(rows.state()),
            "order": encode(order),
            "answers": encode(self._answers),
            "run": self.run,
        }
        texts = {
            "checkpoint": artefact.as_json(self._about),
            "tree": artefact.as_json({"dict": [[name, each] for name, each in tree.items()]}),
        }
        # a damaged file takes nobody's place
        artefact.write(self.path, encode.tensors, texts, previous=self._previous if self._whole else None)
        self._whole = True

    def remove(self) -> None:
        """The newest one last."""
        self._previous.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def _described(self, n_rows: int | None) -> dict[str, Any]:
        """What the fit is to, and how."""
        options = self._band._given()
        return {
            "options": {**options, "process": self._process} if self._process else options,
            "weights": self._band._network().fingerprint,
            "n_rows": n_rows,
        }

    def _check(self, path: Path, was: dict[str, Any]) -> None:
        now = self._about
        again = "give what was given before, or delete the file to begin anew"
        for name in {**was["options"], **now["options"]}:
            before, given = was["options"].get(name), now["options"].get(name)
            if before != given:
                raise ArtefactError(f"{path} is of a fit with {name}={before}, and this one has {given}: {again}")
        for name in {**was["weights"], **now["weights"]}:
            if was["weights"].get(name) != now["weights"].get(name):
                raise ArtefactError(f"{path} is of a fit to another model: first {name!r} is not the same; {again}")
        if was["n_rows"] != now["n_rows"]:
            raise ArtefactError(f"{path} is of a fit to {was['n_rows']} rows, and these are {now['n_rows']}: {again}")

    def _network(self, outputs: tuple[int, ...], layers: Any) -> Network:
        head = self._band._fitted_head(outputs)
        return self._band._network(head).with_layers(layers).copy(own_weights=True)
