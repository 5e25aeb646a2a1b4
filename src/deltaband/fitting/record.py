"""Fits as values of a file: what is written of them, and whether they belong to a model."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from ..data.row_record import Sample
from ..errors import ArtefactError
from ..network.model_copy import unwrap
from ..network.network import Network
from ..network.stored import network_hook, network_maker
from ..storage import WEIGHTS, StoredBand
from ..storage.container import as_json
from ..storage.encoding import Decoder, Encoder
from .fit import Fit
from .spec import FitSpec, all_outputs

MADE_UP_ROWS = 4  # for which functions are compared
TOLERANCE = 1e-3  # other machines round differently


def record_of(
    spec: FitSpec, fits: Sequence[Fit], calibration: Any, about: dict[str, Any], *, weights: bool, sample: bool
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return everything that a file holds of fits and their calibration, as tensors and texts."""
    first = fits[0]
    about = {
        **about,
        "engine": repr(first.engine),
        "training_rows": first.n_rows,
        "n_parameters": first.n_parameters,
        "damping": first.covariance.damping,
        "effective_parameters": [fit.effective_parameters for fit in fits],
        **spec.task.about(fits),
        "calibration_rows": None if calibration is None else calibration.n_rows,
        "parameters": {name: list(w.shape) for name, w in spec.network().parameters.items()},
        "fingerprint": hashlib.blake2b(repr(first.fingerprint).encode(), digest_size=16).hexdigest(),
        "functions": spec.functions(),
        "holds_weights": weights,
        "holds_sample": sample and any(len(fit.sample) > 0 for fit in fits),
    }
    encode, trees = Encoder(), []
    for fit in fits:
        encode.hooks = network_hook(fit.outputs)
        trees.append(encode(fit if sample else replace(fit, sample=Sample(), residuals=Sample())))
    if calibration is not None:
        calibration.check_storable()
    tree = {"options": encode(spec.options()), "fits": trees, "calibration": encode(calibration)}
    tree["returned"] = encode(_returned(spec, fits))
    state = unwrap(spec.model).state_dict() if weights else {}
    for name, w in state.items():
        if not isinstance(w, Tensor):
            raise TypeError(f"{name!r} in the model's state dict is not a tensor but {type(w).__name__}: not saved")
        encode.tensors[WEIGHTS + name] = w.detach().cpu().contiguous().clone()
    return encode.tensors, {"band": as_json(about), "tree": as_json(tree)}


def _returned(spec: FitSpec, fits: Sequence[Fit]) -> np.ndarray | None:  # (rows, k)
    """Return what the model, with the functions that no file holds, computes for rows that are made up.

    None where there are no such functions, or where the network cannot be evaluated on such rows.
    """
    format, task = fits[0].format, spec.task
    if format is None or not spec.functions().keys() & {"output", "variance", "target_transform"}:
        return None
    try:
        x = format.made_up(MADE_UP_ROWS)
        parts = [spec.model_outputs(x).numpy()]
        if task.scaler is not None and task.units is not None:
            parts.append(task.units.to_original(parts[0][:, list(all_outputs(fits))]))
        return np.concatenate([*parts, spec.companion(x)] if callable(task.variance) else parts, axis=1)
    except Exception:
        return None


def _check_returned(stored: StoredBand, spec: FitSpec, fits: Sequence[Fit]) -> None:
    """Raise unless these functions return what those did that the band was fitted with."""
    was = Decoder(stored.tensors)(stored.tree["returned"])
    if was is None:
        return
    now = _returned(spec, fits)
    if now is None or not _close(was, now):
        names = " and ".join(f"{name}=" for name in spec.functions() if name != "batch")
        raise ArtefactError(
            f"{stored.path}: {names} is not what the band was fitted with: for the same weights and rows it returns "
            "something else; give the same functions again"
        )


def _close(was: np.ndarray, now: np.ndarray) -> bool:
    """Return whether all columns are the same, up to rounding in units of their largest number."""
    if was.shape != now.shape:
        return False
    largest = np.abs(np.nan_to_num(was, posinf=0.0, neginf=0.0)).max(axis=0)
    with np.errstate(invalid="ignore"):  # ∞ − ∞
        return bool(((np.abs(now - was) <= TOLERANCE * largest) | (now == was) | np.isnan(now) & np.isnan(was)).all())


def check_shapes(stored: StoredBand, model: nn.Module) -> None:
    """Raise unless the model's parameters have the shapes that were saved."""
    shapes = {name: list(w.shape) for name, w in unwrap(model).named_parameters()}
    for name, shape in stored.shapes.items():
        if shapes.get(name) != shape:
            found = f"is {tuple(shapes[name])}" if name in shapes else "is not there"
            raise ArtefactError(
                f"{stored.path} does not belong to this model: parameter {name!r} has shape {tuple(shape)} in the file "
                f"and {found} in the model"
            )


def restored(stored: StoredBand, spec: FitSpec, strict: bool) -> tuple[tuple[Fit, ...], Any]:
    """Return the fits and the calibration of a file, if they belong to the weights of the spec's model."""
    networks = []  # that compute the training rows again

    def stored_network(*about: Any) -> Network:
        networks.append(spec.stored_network(*about))
        return networks[-1]

    fits, calibration = stored.decoded(network_maker(stored_network))
    recomputes = bool(networks)
    fit, network = fits[0], spec.network()
    try:
        changed = spec.changed_weight(network, fit)
    except ValueError as error:
        raise ArtefactError(f"{stored.path} does not belong to this model: {error}") from None
    if changed is None:
        _check_returned(stored, spec, fits)
        return fits, calibration
    if strict or recomputes:
        was, now = (digests.get(changed, "not there") for digests in (fit.fingerprint, network.fingerprint))
        reason = "it computes its training rows again, with the weights" if recomputes else "strict=False only warns"
        raise ArtefactError(
            f"{stored.path}: the band was fitted to other weights than this model has: first {changed!r} ({was}, now "
            f"{now}); {reason}"
        )
    spec.warn_of_changed_weights(network, fit)
    return fits, calibration
