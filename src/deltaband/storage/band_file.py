"""The file of a fitted estimator: what it holds, how it is written and read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from ..errors import ArtefactError
from . import container
from .encoding import Decoder, Encoder

Hooks = Mapping[Any, Callable[[Any], Any]]  # how networks are written and restored, which no file holds

WEIGHTS_PREFIX = "weights."  # of their names among the tensors

T = TypeVar("T", bound=type)
ESTIMATORS: dict[str, Any] = {}  # by the name that a file has for their kind


def loadable(estimator: T) -> T:
    """Register a class of estimators, so that `load` finds it by its name."""
    ESTIMATORS[estimator.__name__] = estimator
    return estimator


@dataclass(frozen=True)
class BandRecord:
    """What a file holds of an estimator."""

    about: dict[str, Any]  # what `inspect` shows
    options: dict[str, Any]  # the arguments that it was constructed with, functions aside
    fits: tuple[Any, ...]
    calibration: Any
    weights: Mapping[str, Any]  # the model's state dict, or nothing
    hooks: Callable[[tuple[int, ...]], Hooks]  # for the outputs of a fit

    def encoded(self, notes: Mapping[str, str]) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the tensors and texts of the file."""
        encode, trees = Encoder(), []
        for fit in self.fits:
            encode.hooks = self.hooks(fit.outputs)
            trees.append(encode(fit))
        tree = {"options": encode(self.options), "fits": trees, "calibration": encode(self.calibration)}
        texts = {
            "band": container.as_json(self.about),
            "tree": container.as_json(tree),
            "notes": container.as_json({str(key): str(value) for key, value in notes.items()}),
        }
        tensors = encode.tensors
        for name, w in self.weights.items():
            if not isinstance(w, Tensor):
                raise TypeError(f"{name!r} in the model's state dict is not a tensor but {type(w).__name__}: not saved")
            tensors[WEIGHTS_PREFIX + name] = w.detach().cpu().contiguous().clone()
        return tensors, texts


@dataclass(frozen=True)
class StoredBand:
    """The content of a file, of which the fits are decoded when a network can be made."""

    path: Path
    kind: str  # the name of the estimator's class
    functions: dict[str, str]  # the arguments that no file holds, by name
    shapes: dict[str, list[int]]  # of the model's parameters
    options: dict[str, Any]
    tree: dict[str, Any]
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> StoredBand:
        """Read a file, check it, and decode the options."""
        tensors, texts = container.read(path, "band")
        try:
            tree = json.loads(texts["tree"])
            options = Decoder(tensors)(tree["options"])
            about = json.loads(texts["band"])
            return cls(path, about["kind"], about["functions"], about["parameters"], options, tree, tensors)
        except Exception as error:
            raise _not_understood(path, error) from error

    def decoded(self, hooks: Hooks) -> tuple[tuple[Any, ...], Any]:
        """Return the fits and the calibration."""
        decode = Decoder(self.tensors, hooks)
        try:
            return tuple(decode(fit) for fit in self.tree["fits"]), decode(self.tree["calibration"])
        except Exception as error:
            raise _not_understood(self.path, error) from error


def save(
    band: Any,
    path: str | Path,
    *,
    weights: bool = False,
    sample: bool = False,
    notes: Mapping[str, str] | None = None,
    overwrite: bool = True,
) -> None:
    """Write a fitted estimator to a file; a crash leaves the file that was there before.

    Args:
        band: The estimator.
        path: The file.
        weights: Whether to write the model's weights, too.
        sample: Whether to write up to 4,096 training rows, which `error_report` needs.
        notes: Short texts of your own, which `inspect` shows.
        overwrite: Whether a file that exists is replaced; else it is an error.
    """
    tensors, texts = band.to_record(weights=weights, sample=sample).encoded(notes or {})
    container.write(Path(path), tensors, texts, overwrite=overwrite)


def size(band: Any, *, weights: bool = False, sample: bool = False) -> int:
    """Return the bytes that `save` would write.

    Args:
        band: The estimator.
        weights: As in `save`.
        sample: As in `save`.

    Returns:
        A number of bytes.
    """
    return container.size(*band.to_record(weights=weights, sample=sample).encoded({}))


def load(
    path: str | Path,
    model: nn.Module,
    *,
    strict: bool = True,
    output: Any = None,
    batch: Any = None,
    target_transform: Any = None,
) -> Any:
    """Return the estimator that was saved; it predicts the same, bit for bit.

    Args:
        path: The file.
        model: The model that it was fitted to.
        strict: Whether other weights are an error, which names the first that differs; else a warning.
        output: The function that it was constructed with: functions are not in the file.
        batch: Likewise.
        target_transform: The scaler that it was constructed with; a pair (mean, std) is in the file.

    Returns:
        A fitted `PredictionIntervals` or `ClassificationIntervals`.

    Raises:
        ArtefactError: If the file is damaged or does not belong to the model.
    """
    stored = StoredBand.read(Path(path))
    given = {"output": output, "batch": batch, "target_transform": target_transform}
    needed = stored.functions
    for name, value in given.items():
        if name in needed and value is None:
            raise ArtefactError(
                f"{path} was fitted with {name}={needed[name]}, which no file holds: give {name}= again"
            )
        if name not in needed and value is not None:
            raise ArtefactError(f"{path} was fitted without {name}: leave it out")
    estimator = ESTIMATORS.get(stored.kind)
    if estimator is None:
        raise _not_understood(path, KeyError(stored.kind))
    return estimator.from_stored(stored, model, strict, {name: given[name] for name in needed})


def inspect(path: str | Path) -> dict[str, Any]:
    """Return what a file says about the estimator in it, without a model.

    Args:
        path: The file.

    Returns:
        A dictionary of plain values.
    """
    _, texts = container.read(Path(path), "band")
    return {
        "format": int(texts["format"]),
        "deltaband": texts["deltaband"],
        "torch": texts["torch"],
        "bytes": Path(path).stat().st_size,
        **json.loads(texts["band"]),
        "notes": json.loads(texts["notes"]),
    }


def weights(path: str | Path) -> dict[str, Tensor]:
    """Return the model's weights, if they are in the file.

    Args:
        path: The file.

    Returns:
        A state dict.

    Raises:
        ArtefactError: If the file was saved without weights.
    """
    tensors, _ = container.read(Path(path), "band")
    prefix = WEIGHTS_PREFIX
    found = {name.removeprefix(prefix): w.clone() for name, w in tensors.items() if name.startswith(prefix)}
    if not found:
        raise ArtefactError(f"{path} holds no weights: it was saved without weights=True")
    return found


def _not_understood(path: str | Path, error: Exception) -> ArtefactError:
    return ArtefactError(f"{path} is not a band that this version understands: {error}")
