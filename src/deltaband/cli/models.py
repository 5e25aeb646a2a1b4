"""The user's network, from the name of a factory or from a file, with its weights or with its band file."""

import importlib
import json
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import storage
from ..intervals import PredictionIntervals
from .output import Refusal, Usage, check_file, near, one_line, with_type


class LoadedBand(NamedTuple):
    band: PredictionIntervals
    dtype: torch.dtype  # of the network
    features: list[str]
    targets: list[str]


def load_band(
    path: Path, model: str | None, trust: bool, features: Sequence[str] | None, targets: Sequence[str] | None
) -> LoadedBand:
    """Load a band file into the network that `model` names; column names are given only if the file has none."""
    about = storage.inspect(check_file(path))
    if about["kind"] != PredictionIntervals.__name__:
        raise Refusal(f"{path} holds {about['kind']}: the command line supports PredictionIntervals only")
    if model is None:
        named = about["notes"].get("model", "package.module:factory")
        option = f"--model {named} --trust" if named.endswith(".pt2") else f"--model {named}"
        raise Usage(f"{path} needs the network it was fitted with: pass {option}, if you trust that code")
    names = []
    for kind, given, option in (("features", features, "--features"), ("targets", targets, "--target")):
        saved = about["notes"].get(kind)
        if saved is not None and given:
            raise Usage(f"{path} already names its {kind}: {saved}; they cannot be changed")
        if saved is None and not given:
            raise Usage(f"{path} was saved without the names of its {kind}: give {option}")
        names.append(",".join(given).split(",") if given else list(json.loads(saved)))
    network = load_network(model, trust=trust)
    if about["holds_weights"]:  # otherwise the factory's own must be those of the fit, which loading checks
        _set_weights(network, storage.weights(path), path)
    return LoadedBand(PredictionIntervals.load(path, network), network_dtype(network), *names)


def load_network(model: str, weights: Path | None = None, trust: bool = False) -> nn.Module:
    """Return the network in eval mode; nothing is imported but the module that `model` names."""
    with redirect_stdout(sys.stderr):
        network = _load_exported(Path(model), trust) if model.endswith(".pt2") else _make_network(model)
    if weights is not None:
        _set_weights(network, _read_weights(check_file(weights)), weights)
    return network


def network_dtype(model: nn.Module) -> torch.dtype:
    return next((w.dtype for w in model.parameters() if w.is_floating_point() and w.requires_grad), torch.float32)


@contextmanager
def current_folder_first() -> Iterator[None]:
    """Put the current folder first in `sys.path`, as `python -m` does, and after what is installed afterwards."""
    here = str(Path.cwd())
    if here in sys.path[:-1]:  # the user has put it there
        yield
        return
    sys.path[:] = [here, *(each for each in sys.path if each != here)]
    try:
        yield
    finally:
        sys.path[:] = [*(each for each in sys.path if each != here), here]


@current_folder_first()
def _make_network(model: str) -> nn.Module:
    module_name, _, path = model.partition(":")
    if not module_name or not path:
        raise Usage(f"MODEL must be package.module:factory, or a .pt2 file of torch.export, got {model!r}")
    if module_name.endswith(".py") or "/" in module_name:
        named = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise Usage(f"MODEL must name a module, not a file: {named}:{path}")
    value = import_module(module_name)
    for part in path.split("."):
        if not hasattr(value, part):
            known = [name for name in vars(value) if callable(getattr(value, name))]
            raise Refusal(f"module {module_name} has no {part!r}{near(part, known)}")
        value = getattr(value, part)
    try:
        network = value() if callable(value) and not isinstance(value, nn.Module) else value
    except (Exception, SystemExit) as error:
        raise Refusal(f"{model} raised {with_type(error)}") from error
    if not isinstance(network, nn.Module):
        expected = "a torch.nn.Module is expected, or a function without arguments that returns one"
        raise Refusal(f"{model} gives {type(network).__name__}; {expected}")
    return network.eval()


@current_folder_first()
def import_module(name: str, option: str = "") -> Any:
    """Import a module of the user's; an error begins with the option that names it."""
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            raise Refusal(f"{option}importing {name} failed: {with_type(error)}") from error
        hint = near(missing, [path.stem for path in Path().glob("*.py")])
        where = "neither in the current folder nor installed"
        raise Refusal(f"{option}there is no module {missing!r}{hint}, {where}") from error


def _read_weights(path: Path) -> Mapping[str, Tensor]:
    """Read a state dict from safetensors or from torch.save; never anything that could run code."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        why = "anything else could run code and is not loaded: save model.state_dict(), or as safetensors"
        raise Refusal(f"{path} does not hold tensors alone; {why}") from error
    except Exception as error:  # the type depends on where the file is damaged
        raise Refusal(f"{path} could not be read as a state dict: {one_line(error)}") from error
    if not isinstance(state, dict):
        raise Refusal(f"{path} is not a state dict: it holds {type(state).__name__}; save model.state_dict() alone")
    if other := next((name for name, value in state.items() if not isinstance(value, Tensor)), None):
        raise Refusal(f"{path} is not a state dict: its entry {other!r} is not a tensor; save model.state_dict() alone")
    return state


def _set_weights(model: nn.Module, state: Mapping[str, Tensor], source: Path) -> None:
    own = model.state_dict()
    for name in [*own, *state]:
        given, expected = (tuple(each[name].shape) if name in each else "missing" for each in (state, own))
        if given != expected:
            hint = near(name, (own.keys() | state.keys()) - {name}) if "missing" in (given, expected) else ""
            fit = f"{name!r} is {given} in {source} and {expected} in the network{hint}"
            raise Refusal(f"the weights do not fit the network: {fit}")
    model.load_state_dict(state)


def _load_exported(path: Path, trust: bool) -> nn.Module:
    if not trust:
        raise Refusal(f"loading {path} can run code that is in it: give --trust if you know where it comes from")
    check_file(path)
    try:
        program = torch.export.load(path)
    except Exception as error:
        raise Refusal(f"{path} could not be loaded by torch.export.load: {one_line(error)}") from error
    for node in program.graph.nodes:
        example = node.meta.get("val") if node.name in program.graph_signature.user_inputs else None
        rows = (*example.shape, 1)[0] if isinstance(example, Tensor) else None  # one row without dimensions
        if isinstance(rows, int):
            how = "give torch.export.export a dynamic batch dimension, dynamic_shapes=({0: torch.export.Dim('rows')},)"
            raise Refusal(f"{path} was exported for batches of {rows} rows: {how}")
        if node.op == "call_function" and _is_in_training_mode(node):
            raise Refusal(f"{path} was exported in training mode (see {node.name}): call model.eval() first")
    return program.module()


def _is_in_training_mode(node: Any) -> bool:
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    given = dict(zip((each.name for each in arguments), node.args, strict=False)) | dict(node.kwargs)
    dropout = given.get("dropout_p", 0.0)
    return given.get("train") is True or given.get("training") is True or (isinstance(dropout, float) and dropout > 0)
