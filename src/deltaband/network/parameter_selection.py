"""The choice of parameters whose gradients are taken: all that were trained, the last layer, or some by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

ParameterChoice = Literal["all", "last"] | Sequence[str] | Callable[[str, nn.Parameter], bool]
NAMES_IN_ERROR = 20


def select_parameters(model: nn.Module, choice: ParameterChoice) -> frozenset[str]:
    """Return the names of the trainable parameters that are chosen.

    A tied parameter may be chosen by any of its names; the first of them is returned.
    """
    first = {id(w): name for name, w in model.named_parameters()}
    everything = {_plain(name): w for name, w in model.named_parameters(remove_duplicate=False)}
    trainable = {name: w for name, w in everything.items() if w.requires_grad}
    if isinstance(choice, str):
        if choice not in ("all", "last"):
            raise ValueError(
                f"parameters must be 'all', 'last', a list of names such as ['head.*'], or a function of name and "
                f"parameter; got {choice!r}"
            )
        found = set(trainable)
        if choice == "last" and trainable:
            last = last_layer(model)
            found = {name for name in trainable if _owner(name) == last}
    elif callable(choice):
        found = {name for name, w in trainable.items() if choice(name, w)}
        if not found:
            raise ValueError(f"the function given as parameters chooses none of the trainable ones: {_list(trainable)}")
    elif isinstance(choice, Sequence) and choice and all(isinstance(pattern, str) for pattern in choice):
        found = set()
        for pattern in choice:
            matching = {name for name in everything if fnmatchcase(name, _plain(pattern))}
            if not matching & set(trainable):
                reason = f"only frozen parameters ({min(matching)})" if matching else "no parameter"
                raise ValueError(f"{pattern!r} matches {reason}; trainable are: {_list(trainable)}")
            found |= matching & set(trainable)
    else:
        raise TypeError(f"parameters must be 'all', 'last', a list of names or a function, got {choice!r}")
    return frozenset(first[id(trainable[name])] for name in found)


def layers_of(model: nn.Module) -> list[str]:
    """Return the names of the modules that have trainable parameters, in the order of registration."""
    parameters = model.named_parameters(remove_duplicate=False)
    return list(dict.fromkeys(_owner(name) for name, w in parameters if w.requires_grad))


def last_layer(model: nn.Module) -> str:
    """Return the name of the module that was registered last."""
    return layers_of(model)[-1]


def _plain(name: str) -> str:
    """Remove what torch.compile adds to a name."""
    return name.replace("_orig_mod.", "")


def _owner(name: str) -> str:
    """Return the name of the module that a parameter belongs to; for a parametrised weight that is the layer."""
    name = _plain(name)
    if ".parametrizations." in name:
        return name.split(".parametrizations.")[0]
    return "" if name.startswith("parametrizations.") else name.rpartition(".")[0]


def _list(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:NAMES_IN_ERROR]) + (
        f" and {len(names) - NAMES_IN_ERROR} more" if len(names) > NAMES_IN_ERROR else ""
    )
