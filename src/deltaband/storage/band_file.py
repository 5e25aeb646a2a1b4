"""A band in one file: safetensors with its metadata, no pickle anywhere.

The tensors are numbered; the metadata hold, as JSON, the tree of values that names them (see `encoding`), what
`inspect` shows, and a digest over all of it. Reading a file runs no code of the file's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..classification import ClassificationIntervals
from ..data.row_record import Sample
from ..errors import ArtefactError
from ..fitting.band import Band
from ..intervals import PredictionIntervals
from ..network.model_copy import unwrap
from ..network.network import Network
from . import container as artefact
from .encoding import Decoder, Encoder

KINDS: dict[str, type[Band]] = {cls.__name__: cls for cls in (PredictionIntervals, ClassificationIntervals)}
WEIGHTS = "weights."  # before their names, among the tensors
FUNCTIONS = ("output", "batch", "target_transform")  # which no file holds


def save(
    band: Band,
    path: str | Path,
    *,
    weights: bool = False,
    sample: bool = False,
    notes: Mapping[str, str] | None = None,
    overwrite: bool = True,
) -> None:
    """Write a fitted band; a crash leaves the file that was there before.

    `weights=True` puts the model's weights beside it; `sample=True` the training rows, up to 4,096 of them, that
    `error_report` compares with; `notes` are short texts of the caller's.
    """
    tensors, metadata = _packed(band, weights, sample, notes or {})
    artefact.write(Path(path), tensors, metadata, overwrite=overwrite)


def size(band: Band, *, weights: bool = False, sample: bool = False) -> int:
    """The bytes that `save` would write."""
    return artefact.size(*_packed(band, weights, sample, {}))


def load(
    path: str | Path,
    model: nn.Module,
    *,
    strict: bool = True,
    output: Any = None,
    batch: Any = None,
    target_transform: Any = None,
) -> Band:
    """The band that was saved, for the model that it was fitted to; it predicts the same, bit for bit.

    A model whose weights are others is an error that names the first of them; a warning with `strict=False`.
    Functions are not in the file: `output`, `batch` and a scaler given as `target_transform` have to be given again.
    """
    tensors, metadata = artefact.read(Path(path), "band")
    try:
        about, tree = json.loads(metadata["band"]), json.loads(metadata["tree"])
        again = {"output": output, "batch": batch, "target_transform": target_transform}
        kind, shapes = KINDS[about["kind"]], dict(about["parameters"])
        options = _functions(path, about["functions"], again)

        def network(outputs: tuple[int, ...], layers: Any) -> Network:
            head = band._fitted_head(outputs)
            return band._network(head).with_layers(layers).copy(own_weights=True)

        decode = Decoder(tensors, network)
        options |= decode(tree["options"])
    except ArtefactError:
        raise
    except Exception as error:
        raise ArtefactError(f"{path} is no band that this version understands: {error}") from error
    _check_shapes(path, model, shapes)
    band = kind(model, **options)
    try:
        held = {name: decode(tree["held"][name]) for name in kind._held}
    except Exception as error:
        raise ArtefactError(f"{path} is no band that this version understands: {error}") from error
    vars(band).update(held)
    _check_weights(path, band, strict, recomputed='"network"' in metadata["tree"])
    return band


def inspect(path: str | Path) -> dict[str, Any]:
    """What a file says about the band in it; no model is needed, and none is looked for."""
    _, metadata = artefact.read(Path(path), "band")
    return {
        "format": int(metadata["format"]),
        "deltaband": metadata["deltaband"],
        "torch": metadata["torch"],
        "bytes": Path(path).stat().st_size,
        **json.loads(metadata["band"]),
        "notes": json.loads(metadata["notes"]),
    }


def weights(path: str | Path) -> dict[str, Tensor]:
    """The model's weights, if they are in the file: a state dict."""
    tensors, _ = artefact.read(Path(path), "band")
    found = {name.removeprefix(WEIGHTS): w.clone() for name, w in tensors.items() if name.startswith(WEIGHTS)}
    if not found:
        raise ArtefactError(f"{path} holds no weights: it was saved without weights=True")
    return found


def _packed(
    band: Band, weights: bool, sample: bool, notes: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    fits = band._fitted()
    encode, held = Encoder(), {}
    for name in band._held:
        value = getattr(band, name)
        if name == "_fits":
            trees = []
            for fit in fits:
                encode.outputs = fit.outputs
                trees.append(encode(fit if sample else replace(fit, sample=Sample())))
            held[name] = {"tuple": trees}
        else:
            held[name] = encode(value)
    network = band._network()
    about = {
        "kind": type(band).__name__,
        "summary": band.summary(),
        "engine": repr(fits[0].engine),
        "training_rows": fits[0].n_rows,
        "n_parameters": fits[0].n_parameters,
        "damping": band.damping_,
        "effective_parameters": [fit.effective_parameters for fit in fits],
        **band._about(),
        "parameters": {name: list(w.shape) for name, w in network.parameters.items()},
        "fingerprint": hashlib.blake2b(repr(fits[0].fingerprint).encode(), digest_size=16).hexdigest(),
        "functions": band._functions(),
        "holds_weights": weights,
        "holds_sample": sample and any(len(fit.sample) > 0 for fit in fits),
    }
    metadata = {
        "band": artefact.as_json(about),
        "tree": artefact.as_json({"options": encode(band._options()), "held": held}),
        "notes": artefact.as_json({str(key): str(value) for key, value in notes.items()}),
    }
    tensors = encode.tensors
    if weights:
        for name, w in unwrap(band.model).state_dict().items():
            if not isinstance(w, Tensor):
                raise TypeError(f"{name!r} in the model's state dict is no tensor but {type(w).__name__}: not saved")
            tensors[WEIGHTS + name] = w.detach().cpu().contiguous().clone()
    return tensors, metadata


def _functions(path: str | Path, needed: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    for name in FUNCTIONS:
        if name in needed and given[name] is None:
            raise ArtefactError(
                f"{path} was fitted with {name}={needed[name]}, which no file holds: give {name}= again"
            )
        if name not in needed and given[name] is not None:
            raise ArtefactError(f"{path} was fitted without {name}: leave it out")
    return {name: given[name] for name in needed}


def _check_shapes(path: str | Path, model: nn.Module, saved: Mapping[str, list[int]]) -> None:
    shapes = {name: list(w.shape) for name, w in unwrap(model).named_parameters()}
    for name, shape in saved.items():
        if shapes.get(name) != shape:
            found = f"is {tuple(shapes[name])}" if name in shapes else "is not there"
            raise ArtefactError(
                f"{path} does not belong to this model: parameter {name!r} has shape {tuple(shape)} in the file and "
                f"{found} in the model"
            )


def _check_weights(path: str | Path, band: Band, strict: bool, recomputed: bool) -> None:
    fit, network = band._fitted()[0], band._network()
    try:
        changed = band._changed_weights(network, fit)
    except ValueError as error:
        raise ArtefactError(f"{path} does not belong to this model: {error}") from None
    if changed is None:
        return
    was, now = (digests.get(changed, "not there") for digests in (fit.fingerprint, network.fingerprint))
    message = f"the band was fitted to other weights than this model has: first {changed!r} ({was}, now {now})"
    if strict or recomputed:
        reason = "it computes its training rows again, with the weights" if recomputed else "strict=False only warns"
        raise ArtefactError(f"{path}: {message}; {reason}")
    band._warn_of_changes(network, fit)
