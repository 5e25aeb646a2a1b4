"""A band file and the network it belongs to, put together again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..intervals import PredictionIntervals
from ..storage import band_file as storage
from .errors import Refusal, Usage
from .models import fill, network


@dataclass(frozen=True)
class Loaded:
    """A band, and the columns it is about."""

    band: PredictionIntervals
    features: Sequence[str]
    targets: Sequence[str]
    notes: dict[str, str]

    @property
    def dtype(self) -> torch.dtype:
        return dtype(self.band.model)


def notes(model: str, features: Sequence[str], targets: Sequence[str], **others: str) -> dict[str, str]:
    """What `load` will want to know."""
    return {"model": model, "features": json.dumps(list(features)), "targets": json.dumps(list(targets)), **others}


def about(path: Path) -> dict[str, Any]:
    """All that the file tells without a network."""
    if not path.is_file():
        raise Refusal(f"there is no file {path}")
    return storage.inspect(path)


def load(
    path: Path,
    model: str | None,
    trust: bool,
    features: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
) -> Loaded:
    found = about(path)
    known = found["notes"]
    if found["kind"] != PredictionIntervals.__name__:
        raise Refusal(f"{path} holds {found['kind']}: the command line is for PredictionIntervals")
    if model is None:
        named = known.get("model")
        which = f"--model {named}" if named else "--model package.module:factory"
        trusted = " --trust" if named and named.endswith(".pt2") else ""
        by = f" it was fitted with, {named}" if named else ""
        raise Usage(f"{path} needs the network{by}: pass {which}{trusted}, if you trust that code")
    features = _names(known, "features", features, path)
    targets = _names(known, "targets", targets, path)
    made = network(model, trust=trust)
    if found["holds_weights"]:  # else the factory's own must be those of the fit, which loading finds out
        fill(made, storage.weights(path), str(path))
    band = storage.load(path, made)
    assert isinstance(band, PredictionIntervals)
    return Loaded(band, features, targets, known)


def _names(known: dict[str, str], what: str, given: Sequence[str] | None, path: Path) -> list[str]:
    if what in known:
        if given:
            raise Usage(f"{path} knows its {what}: {known[what]}; they cannot be others")
        return list(json.loads(known[what]))
    if not given:
        option = "--features" if what == "features" else "--target"
        raise Usage(f"{path} was saved without the names of its {what}: give {option}")
    return [name for text in given for name in text.split(",")]


def dtype(model: nn.Module) -> torch.dtype:
    """What the network computes in."""
    kinds = (w.dtype for w in model.parameters() if w.is_floating_point() and w.requires_grad)
    return next(kinds, torch.float32)
