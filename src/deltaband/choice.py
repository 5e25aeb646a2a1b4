"""Which parameters of a network take part: all that were trained, those of the last layer, or some by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

Choice = Literal["all", "last"] | Sequence[str] | Callable[[str, nn.Parameter], bool]
LISTED = 20  # names in an error


def chosen(model: nn.Module, choice: Choice) -> frozenset[str]:
    """The names of the trainable parameters that are chosen."""
    trainable = {name: w for name, w in model.named_parameters() if w.requires_grad}
    if isinstance(choice, str):
        if choice not in ("all", "last"):
            raise ValueError(
                f"parameters must be 'all', 'last', a list of names such as ['head.*'], or a function of name and "
                f"parameter; got {choice!r}"
            )
        return frozenset(trainable) if choice == "all" or not trainable else frozenset(_last(trainable))
    if callable(choice):
        names = frozenset(name for name, w in trainable.items() if choice(name, w))
        if not names:
            raise ValueError(f"the function given as parameters chooses none of the trainable ones: {_list(trainable)}")
        return names
    if not isinstance(choice, Sequence) or not all(isinstance(pattern, str) for pattern in choice) or not choice:
        raise TypeError(f"parameters must be 'all', 'last', a list of names or a function, got {choice!r}")
    found: set[str] = set()
    for pattern in choice:
        matching = {name for name in trainable if fnmatchcase(name, pattern)}
        if not matching:
            frozen = [
                name for name, w in model.named_parameters() if not w.requires_grad and fnmatchcase(name, pattern)
            ]
            reason = f"matches only frozen parameters ({frozen[0]})" if frozen else "matches no parameter"
            raise ValueError(f"{pattern!r} {reason}; trainable are: {_list(trainable)}")
        found |= matching
    return frozenset(found)


def _last(names: Sequence[str] | dict[str, nn.Parameter]) -> list[str]:
    """Those of the module that was registered last."""
    last = owner(list(names)[-1])
    return [name for name in names if owner(name) == last]


def owner(name: str) -> str:
    """The name of the module that a parameter belongs to; that of a parametrised weight is the layer."""
    if ".parametrizations." in name:
        return name.split(".parametrizations.")[0]
    return name.rpartition(".")[0]


def _list(names: dict[str, nn.Parameter]) -> str:
    listed = ", ".join(list(names)[:LISTED])
    return listed + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
