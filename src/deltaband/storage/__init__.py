"""Fitted estimators in one file: safetensors with metadata, no pickle anywhere.

The tensors are numbered; the metadata hold, as JSON, the tree of values that names them, what `inspect` shows, and a
digest over all of it. Reading a file runs no code of the file.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from ..errors import ArtefactError
from . import container
from .encoding import Decoder, registered

WEIGHTS = "weights."  # of the names of weights among the tensors


@dataclass(frozen=True)
class StoredBand:
    """The content of a file, of which the fits are decoded when a network can be made."""

    path: Path
    shapes: dict[str, list[int]]  # of the model's parameters
    options: dict[str, Any]
    tree: dict[str, Any]
    tensors: Mapping[str, Tensor]

    def decoded(self, hooks: Mapping[str, Callable[[Any], Any]]) -> tuple[tuple[Any, ...], Any]:  # fits, calibration
        decode = Decoder(self.tensors, hooks)
        with _understanding(self.path):
            return tuple(map(decode, self.tree["fits"])), decode(self.tree["calibration"])


class Stored(ABC):
    """What can be written to a file and read again: `to_record` and `from_stored` say what of it."""

    @abstractmethod
    def to_record(self, *, weights: bool = False, sample: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return everything that a file holds of this estimator, tensors and texts."""

    @classmethod
    @abstractmethod
    def from_stored(cls, stored: StoredBand, model: nn.Module, strict: bool, functions: Mapping[str, Any]) -> Self:
        """Return the estimator of a file."""

    def save(self, path: str | Path, *, weights: bool = False, sample: bool = False) -> None:
        """Write the fitted estimator to one file, which `load` reads.

        Args:
            path: The file.
            weights: Whether to write the weights themselves.
            sample: Whether to add training rows, which `error_report` and `calibrate(noise="auto")` need.
        """
        save(self, path, weights=weights, sample=sample)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module, *, strict: bool = True, **functions: Any) -> Self:
        """Return the estimator that was saved; it predicts the same, bit for bit. No code in the file is run.

        Args:
            path: The file.
            model: The model that it was fitted to.
            strict: Whether other weights are an error, which names the first that differs; else a warning.
            functions: Those of `output=`, `batch=`, `variance=`, `input_transform=` and `target_transform=` that it was
                constructed with: these are not in the file. A pair (mean, std) and an affine scaler are.

        Returns:
            The fitted estimator.

        Raises:
            ArtefactError: If the file is damaged or does not belong to the model.
        """
        band = load(path, model, strict=strict, **functions)
        if not isinstance(band, cls):
            raise TypeError(f"{path} holds {type(band).__name__}: load it with {type(band).__name__}.load")
        return band


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
    tensors, texts = band.to_record(weights=weights, sample=sample)
    texts["notes"] = container.as_json({str(key): str(note) for key, note in (notes or {}).items()})
    container.write(Path(path), tensors, texts, overwrite=overwrite)


def size(band: Any, *, weights: bool = False, sample: bool = False) -> int:
    """Return the number of bytes that `save` would write.

    Args:
        band, weights, sample: As in `save`.

    Returns:
        Bytes.
    """
    return container.size(*band.to_record(weights=weights, sample=sample))


def load(
    path: str | Path,
    model: nn.Module,
    *,
    strict: bool = True,
    output: Any = None,
    batch: Any = None,
    collate: Any = None,
    variance: Any = None,
    input_transform: Any = None,
    target_transform: Any = None,
) -> Any:
    """Return the `PredictionIntervals` or `ClassificationIntervals` that was saved; it predicts the same, bit for bit.

    Args:
        path: The file.
        model: The model that it was fitted to.
        strict: Whether other weights are an error, which names the first that differs; else a warning.
        output, variance: The functions that it was constructed with, which are not in the file; others are an error.
        batch: The function that turns batches of a loader into inputs and targets, if loaders are to be read.
        collate: The function that makes batches of items.
        input_transform, target_transform: The function or scaler that it was constructed with; a pair (mean, std) and
            scikit-learn's StandardScaler, MinMaxScaler, MaxAbsScaler and RobustScaler are in the file.

    Returns:
        The fitted estimator.

    Raises:
        ArtefactError: If the file is damaged or does not belong to the model.
    """
    tensors, texts = container.read(Path(path), "band")
    with _understanding(Path(path)):
        tree, about = json.loads(texts["tree"]), json.loads(texts["band"])
        stored = StoredBand(Path(path), about["parameters"], Decoder(tensors)(tree["options"]), tree, tensors)
        needed, restore = about["functions"], registered(about["kind"]).from_stored
    given = {"output": output, "batch": batch, "collate": collate, "variance": variance}
    given |= {"input_transform": input_transform, "target_transform": target_transform}
    for name, value in given.items():
        if name in needed and value is None and name not in ("batch", "collate"):  # how to read
            function = f"{name}={needed[name]}, which no file holds"
            raise ArtefactError(f"{path} was fitted with {function}: give {name}= again")
        if name not in needed and value is not None:
            known = "was fitted without" if stored.options.get(name) is None else "holds the numbers of its"
            raise ArtefactError(f"{path} {known} {name}: leave it out")
    return restore(stored, model, strict, {name: given[name] for name in needed})


def inspect(path: str | Path) -> dict[str, Any]:
    """Return what a file says about the estimator in it, as a dictionary of plain values; no model is needed.

    Args:
        path: The file.

    Returns:
        Versions, size, options, the summary and the notes that it was saved with, by name.
    """
    _, texts = container.read(Path(path), "band")
    versions = {"format": int(texts["format"]), "deltaband": texts["deltaband"], "torch": texts["torch"]}
    about, notes = json.loads(texts["band"]), json.loads(texts["notes"])
    return {**versions, "bytes": Path(path).stat().st_size, **about, "notes": notes}


def weights(path: str | Path) -> dict[str, Tensor]:
    """Return the model's state dict, if the file holds it.

    Args:
        path: The file.

    Returns:
        Tensors by the names of the model's parameters and buffers.

    Raises:
        ArtefactError: If the file was saved without weights.
    """
    tensors, _ = container.read(Path(path), "band")
    found = {name.removeprefix(WEIGHTS): w.clone() for name, w in tensors.items() if name.startswith(WEIGHTS)}
    if not found:
        raise ArtefactError(f"{path} holds no weights: it was saved without weights=True")
    return found


@contextmanager
def _understanding(path: Path) -> Iterator[None]:
    """Turn any error in the block, which reads the content of a file, into an ArtefactError."""
    try:
        yield
    except Exception as error:
        raise ArtefactError(f"{path} is not a band that this version understands: {error}") from error
