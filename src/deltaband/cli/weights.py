"""Weights of a network in a file, as people have them: a state dict, or a checkpoint that holds one under some name."""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..network.model_copy import unwrap
from .output import Refusal, join_names, near, one_line, say

StateDict = Mapping[str, Tensor]

STATE_DICT_NAMES = ("state_dict", "model_state_dict", "model")  # the first of these in a checkpoint is the network
WRAPPERS = re.compile(r"((module|model)\.)*")  # DataParallel and others, Lightning modules
COMPILED = "_orig_mod."  # torch.compile


def load_weights(network: nn.Module, path: Path) -> None:
    """Set the weights of the network to those in a file; what had to be unwrapped is said on stderr."""
    entry, state = _find_state_dict(_read(path), path)
    taken_off, state, others = _without_prefix(state, list(unwrap(network).state_dict()), path)
    set_weights(network, state, path)
    said = [f"took its entry {entry!r}"] if entry else []
    said += [f"took {' and '.join(map(repr, taken_off))} off the names"] if taken_off else []
    said += [f"left out {join_names(others)}"] if others else []
    if said:
        say(f"{path}: {', '.join(said)}")


def set_weights(network: nn.Module, state: StateDict, source: Path) -> None:
    """Set all weights of the network, or raise with the first that does not fit."""
    network = unwrap(network)
    own = network.state_dict()
    for name in [*own, *state]:
        given, expected = (tuple(each[name].shape) if name in each else "missing" for each in (state, own))
        if given != expected:
            hint = near(name, (own.keys() | state.keys()) - {name}) if "missing" in (given, expected) else ""
            fit = f"{name!r} is {given} in {source} and {expected} in the network{hint}"
            raise Refusal(f"the weights do not fit the network: {fit}")
    network.load_state_dict(state)


def _read(path: Path) -> Any:
    """Read safetensors or a file of torch.save; never anything that could run code."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if found is None:
            raise Refusal(f"{path} could not be read as a state dict: is it a file of torch.save?") from error
        what = f"does not hold tensors alone but {found[1]}, and loading that could run code"
        loaded = f"torch.load('{path.name}', weights_only=False)"
        advice = f"in Python, if you trust it, save {loaded}['state_dict'] alone, or .state_dict() of a whole model"
        raise Refusal(f"{path} {what}: {advice}") from error
    except Exception as error:  # the type depends on where the file is damaged
        why = "it is TorchScript; save model.state_dict()" if "TorchScript" in str(error) else one_line(error)
        raise Refusal(f"{path} could not be read as a state dict: {why}") from error


def _find_state_dict(content: Any, path: Path) -> tuple[str | None, StateDict]:
    """Return the state dict in a file, and the name of the entry that it is, if it is not the whole file."""
    if not isinstance(content, Mapping):
        kind = type(content).__name__
        raise Refusal(f"{path} is not a state dict: it holds {kind}; save model.state_dict() alone")
    if _is_state_dict(content):
        return None, content
    found = [name for name, value in content.items() if isinstance(name, str) and value and _is_state_dict(value)]
    entry = next((name for name in STATE_DICT_NAMES if name in found), found[0] if len(found) == 1 else None)
    if entry is not None:
        return entry, content[entry]
    if len(found) > 1:
        raise Refusal(f"{path} holds several state dicts, {join_names(found)}: save the one that is meant alone")
    other = next(name for name, value in content.items() if not isinstance(value, Tensor))
    raise Refusal(f"{path} is not a state dict: its entry {other!r} is not a tensor; save model.state_dict() alone")


def _without_prefix(state: StateDict, names: list[str], path: Path) -> tuple[list[str], StateDict, list[str]]:
    """Return the parts of a state dict that a network of these names has, without what is before these names.

    The first of the results is what was taken off, the last the names that belong to something else.
    """
    if all(name in state for name in names):
        return [], state, []
    plain = {name.replace(COMPILED, ""): weight for name, weight in state.items()}  # layers may be compiled, too
    starts = [name.removesuffix(names[0]) for name in plain if f".{name}".endswith(f".{names[0]}")]
    fitting = [start for start in starts if all(f"{start}{name}" in plain for name in names)]
    if len(fitting) > 1:
        fitting = [start for start in fitting if WRAPPERS.fullmatch(start)] or fitting
    if len(fitting) > 1:
        raise Refusal(f"{path} has the network's weights under {join_names(fitting)}: save those that are meant alone")
    wrappers = [found[0] for name in plain if (found := WRAPPERS.match(name))]  # for a message about what is below
    prefix = fitting[0] if fitting else min(wrappers, key=len, default="")
    below = {name.removeprefix(prefix): weight for name, weight in plain.items() if name.startswith(prefix)}
    taken_off = [each for each in (prefix, COMPILED if plain.keys() != state.keys() else "") if each]
    return taken_off, below, [name for name in plain if not name.startswith(prefix)]


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(each, Tensor) for each in value.values())
