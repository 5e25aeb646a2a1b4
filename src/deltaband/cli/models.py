"""MODEL: the network that a name or a file stands for, and its weights."""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import Refusal, Usage, near, one_line, with_kind
from .telling import quiet

HOW = "MODEL must be package.module:factory, or a .pt2 file of torch.export"


def network(model: str, weights: Path | None = None, trust: bool = False) -> nn.Module:
    """A module in eval mode. Nothing is imported but what `model` names."""
    with quiet():
        if model.endswith(".pt2"):
            made = _exported(Path(model), trust)
        else:
            with _here_first():
                made = _made(model)
    if weights is not None:
        fill(made, read_weights(weights), str(weights))
    return made


@contextmanager
def _here_first() -> Iterator[None]:
    """The current folder comes before all others for the user's code, as with `python -m`, and behind them afterwards:
    what is imported here later is what is installed."""
    here = str(Path.cwd())
    if here in sys.path[:-1]:  # where the user has put it
        yield
        return
    sys.path[:] = [here, *(each for each in sys.path if each != here)]
    try:
        yield
    finally:
        sys.path[:] = [*(each for each in sys.path if each != here), here]


def _made(model: str) -> nn.Module:
    module_name, colon, path = model.partition(":")
    if not colon or not module_name or not path:
        raise Usage(f"{HOW}, got {model!r}")
    if module_name.endswith(".py") or "/" in module_name:
        named = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise Usage(f"MODEL names a module, not a file: {named}:{path}")
    value: Any = _imported(module_name)
    for part in path.split("."):
        if not hasattr(value, part):
            known = [name for name in vars(value) if callable(getattr(value, name))]
            raise Refusal(f"module {module_name} has no {part!r}{near(part, known)}")
        value = getattr(value, part)
    if not isinstance(value, nn.Module):
        value = _called(value, model)
    return value.eval()


def _imported(name: str) -> Any:
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            files = [path.stem for path in Path().glob("*.py")]
            where = "neither in the current folder nor installed"
            raise Refusal(f"there is no module {error.name!r}{near(error.name, files)}, {where}") from error
        raise Refusal(f"importing {name} failed: {with_kind(error)}") from error
    except (Exception, SystemExit) as error:
        raise Refusal(f"importing {name} failed: {with_kind(error)}") from error


def _called(factory: Any, model: str) -> nn.Module:
    if not callable(factory):
        raise Refusal(f"{model} is {type(factory).__name__}; a function that returns a torch.nn.Module is expected")
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise Refusal(f"{model} must be callable without arguments: {error}") from error
    except ValueError:  # built in: no signature
        pass
    try:
        made = factory()
    except (Exception, SystemExit) as error:
        raise Refusal(f"{model} raised {with_kind(error)}") from error
    if not isinstance(made, nn.Module):
        raise Refusal(f"{model} returned {type(made).__name__}; a torch.nn.Module is expected")
    return made


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """A state dict, from safetensors or from torch.save; never anything that could run code."""
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
            f"{path} is not a file of tensors alone; anything else could run code and is not loaded: save the state "
            "dict, torch.save(model.state_dict(), ...), or as safetensors"
        ) from error
    except Exception as error:  # of whatever kind: it depends on where the file is wrong
        raise Refusal(f"{path} could not be read as a state dict of torch.save: {one_line(error)}") from error
    other = next((k for k, v in state.items() if not isinstance(v, Tensor)), None) if isinstance(state, dict) else ""
    if other is not None:
        what = f"its entry {other!r} is no tensor" if other else f"it holds {type(state).__name__}"
        raise Refusal(f"{path} is not a state dict: {what}; save model.state_dict() alone")
    return state


def fill(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Put the weights into the network, or name the first that does not fit."""
    own = model.state_dict()
    for name in [*own, *state]:
        if name not in state:
            raise Refusal(f"the weights do not fit the network: {source} has no {name!r}{near(name, state)}")
        if name not in own:
            raise Refusal(
                f"the weights do not fit the network: it has no {name!r}{near(name, own)}, which is in {source}"
            )
        if own[name].shape != state[name].shape:
            theirs, mine = tuple(state[name].shape), tuple(own[name].shape)
            raise Refusal(
                f"the weights do not fit the network: {name!r} is {theirs} in {source} and {mine} in the network"
            )
    model.load_state_dict(state)


def _exported(path: Path, trust: bool) -> nn.Module:
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
        if node.op == "call_function" and _trains(node):
            raise Refusal(
                f"{path} was exported in training mode ({node.name} draws or counts): call model.eval() first"
            )
    return program.module()


def _trains(node: Any) -> bool:
    """Whether a dropout or a norm of an exported graph does what it does in training."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    drops = given.get("dropout_p", 0.0)
    return given.get("train") is True or given.get("training") is True or (isinstance(drops, float) and drops > 0)
