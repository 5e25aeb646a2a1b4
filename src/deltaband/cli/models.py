"""The user's network, from the name of a factory or from a file, with its weights or with its band file."""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import storage
from ..intervals import PredictionIntervals
from .errors import Refusal, Usage, near
from .output import one_line, user_output_to_stderr, with_type


@dataclass(frozen=True)
class LoadedBand:
    """The band in a file, with the names of its columns."""

    band: PredictionIntervals
    features: list[str]
    targets: list[str]

    @property
    def dtype(self) -> torch.dtype:
        return network_dtype(self.band.model)


def load_band(
    path: Path,
    model: str | None,
    trust: bool,
    features: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
) -> LoadedBand:
    """Load a band file into the network that `model` names; column names are given only if the file has none."""
    about = inspect_band(path)
    notes = about["notes"]
    if about["kind"] != PredictionIntervals.__name__:
        raise Refusal(f"{path} holds {about['kind']}: the command line supports PredictionIntervals only")
    if model is None:
        named = notes.get("model")
        option = f"--model {named}" if named else "--model package.module:factory"
        trusted = " --trust" if named and named.endswith(".pt2") else ""
        fitted_with = f" it was fitted with, {named}" if named else ""
        raise Usage(f"{path} needs the network{fitted_with}: pass {option}{trusted}, if you trust that code")
    names = [_column_names(notes, *given, path) for given in (("features", features), ("targets", targets))]
    network = load_network(model, trust=trust)
    if about["holds_weights"]:  # otherwise the factory's own must be those of the fit, which loading checks
        _set_weights(network, storage.weights(path), str(path))
    band = storage.load(path, network)
    assert isinstance(band, PredictionIntervals)
    return LoadedBand(band, *names)


def inspect_band(path: Path) -> dict[str, Any]:
    """Return everything that a band file says without a network."""
    if not path.is_file():
        raise Refusal(f"there is no file {path}")
    return storage.inspect(path)


def band_notes(model: str, features: Sequence[str], targets: Sequence[str], **files: str) -> dict[str, str]:
    """Return the notes to save with a band, which `load_band` reads."""
    return {"model": model, "features": json.dumps(list(features)), "targets": json.dumps(list(targets)), **files}


def load_network(model: str, weights: Path | None = None, trust: bool = False) -> nn.Module:
    """Return the network in eval mode; nothing is imported but the module that `model` names."""
    with user_output_to_stderr():
        if model.endswith(".pt2"):
            network = _load_exported(Path(model), trust)
        else:
            with current_folder_first():
                network = _make_network(model)
    if weights is not None:
        _set_weights(network, _read_weights(weights), str(weights))
    return network


def network_dtype(model: nn.Module) -> torch.dtype:
    """Return the precision that the network computes in."""
    dtypes = (w.dtype for w in model.parameters() if w.is_floating_point() and w.requires_grad)
    return next(dtypes, torch.float32)


def _column_names(notes: Mapping[str, str], kind: str, given: Sequence[str] | None, path: Path) -> list[str]:
    if kind in notes:
        if given:
            raise Usage(f"{path} already names its {kind}: {notes[kind]}; they cannot be changed")
        return list(json.loads(notes[kind]))
    if not given:
        option = "--features" if kind == "features" else "--target"
        raise Usage(f"{path} was saved without the names of its {kind}: give {option}")
    return [name for text in given for name in text.split(",")]


@contextmanager
def current_folder_first() -> Iterator[None]:
    """Put the current folder first in `sys.path`, as `python -m` does, and last afterwards.

    So user code comes from there, and whatever is imported later is what is installed.
    """
    here = str(Path.cwd())
    if here in sys.path[:-1]:  # the user has put it there
        yield
        return
    sys.path[:] = [here, *(each for each in sys.path if each != here)]
    try:
        yield
    finally:
        sys.path[:] = [*(each for each in sys.path if each != here), here]


def _make_network(model: str) -> nn.Module:
    module_name, _, path = model.partition(":")
    if not module_name or not path:
        raise Usage(f"MODEL must be package.module:factory, or a .pt2 file of torch.export, got {model!r}")
    if module_name.endswith(".py") or "/" in module_name:
        named = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise Usage(f"MODEL must name a module, not a file: {named}:{path}")
    value: Any = _import_module(module_name)
    for part in path.split("."):
        if not hasattr(value, part):
            known = [name for name in vars(value) if callable(getattr(value, name))]
            raise Refusal(f"module {module_name} has no {part!r}{near(part, known)}")
        value = getattr(value, part)
    return (value if isinstance(value, nn.Module) else _call_factory(value, model)).eval()


def _import_module(name: str) -> Any:
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (name == missing or name.startswith(f"{missing}.")):
            hint = near(missing, [path.stem for path in Path().glob("*.py")])
            where = "neither in the current folder nor installed"
            raise Refusal(f"there is no module {missing!r}{hint}, {where}") from error
        raise Refusal(f"importing {name} failed: {with_type(error)}") from error


def _call_factory(factory: Any, model: str) -> nn.Module:
    if not callable(factory):
        raise Refusal(f"{model} is {type(factory).__name__}; a function that returns a torch.nn.Module is expected")
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise Refusal(f"{model} must be callable without arguments: {error}") from error
    except ValueError:  # built in: no signature
        pass
    try:
        network = factory()
    except (Exception, SystemExit) as error:
        raise Refusal(f"{model} raised {with_type(error)}") from error
    if not isinstance(network, nn.Module):
        raise Refusal(f"{model} returned {type(network).__name__}; a torch.nn.Module is expected")
    return network


def _read_weights(path: Path) -> Mapping[str, Tensor]:
    """Read a state dict from safetensors or from torch.save; never anything that could run code."""
    if not path.is_file():
        raise Refusal(f"there is no file {path}")
    if path.suffix == ".safetensors":
        import safetensors
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except safetensors.SafetensorError as error:
            raise Refusal(f"{path} could not be read: {error}") from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise Refusal(
            f"{path} does not hold tensors alone; anything else could run code and is not loaded: save the state "
            "dict, torch.save(model.state_dict(), ...), or as safetensors"
        ) from error
    except Exception as error:  # the type depends on where the file is damaged
        raise Refusal(f"{path} could not be read as a state dict of torch.save: {one_line(error)}") from error
    if not isinstance(state, dict):
        raise Refusal(f"{path} is not a state dict: it holds {type(state).__name__}; save model.state_dict() alone")
    if other := next((name for name, value in state.items() if not isinstance(value, Tensor)), None):
        raise Refusal(f"{path} is not a state dict: its entry {other!r} is not a tensor; save model.state_dict() alone")
    return state


def _set_weights(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load the weights into the network, or name the first that does not fit."""
    own, misfit = model.state_dict(), "the weights do not fit the network"
    for name in [*own, *state]:
        if name not in state:
            raise Refusal(f"{misfit}: {source} has no {name!r}{near(name, state)}")
        if name not in own:
            raise Refusal(f"{misfit}: it has no {name!r}{near(name, own)}, which is in {source}")
        if own[name].shape != state[name].shape:
            given, expected = tuple(state[name].shape), tuple(own[name].shape)
            raise Refusal(f"{misfit}: {name!r} is {given} in {source} and {expected} in the network")
    model.load_state_dict(state)


def _load_exported(path: Path, trust: bool) -> nn.Module:
    if not trust:
        raise Refusal(f"loading {path} can run code that is in it: give --trust if you know where it comes from")
    if not path.is_file():
        raise Refusal(f"there is no file {path}")
    try:
        program = torch.export.load(path)
    except Exception as error:
        raise Refusal(f"{path} could not be loaded by torch.export.load: {one_line(error)}") from error
    inputs = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in inputs and isinstance(node.meta["val"], Tensor):
            rows = node.meta["val"].shape[0] if node.meta["val"].ndim else 1
            if isinstance(rows, int):
                raise Refusal(
                    f"{path} was exported for batches of {rows} rows: give torch.export.export a dynamic batch "
                    "dimension, dynamic_shapes=({0: torch.export.Dim('rows')},)"
                )
        if node.op == "call_function" and _is_in_training_mode(node):
            raise Refusal(f"{path} was exported in training mode (see {node.name}): call model.eval() first")
    return program.module()


def _is_in_training_mode(node: Any) -> bool:
    """Return whether a dropout or a norm of an exported graph behaves as in training."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    dropout = given.get("dropout_p", 0.0)
    return given.get("train") is True or given.get("training") is True or (isinstance(dropout, float) and dropout > 0)
