"""Parameters that users choose by patterns of their names, or by a function."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

NAMES_IN_ERROR = 20


def matching(parameters: Mapping[str, nn.Parameter], choice: Any, plain: Callable[[str], str]) -> set[str]:
    """Return the names of the trainable parameters that a list of patterns or a function chooses, or raise.

    `plain` is what names and patterns are compared as.
    """
    trainable = {name: w for name, w in parameters.items() if w.requires_grad}
    listed = ", ".join(list(trainable)[:NAMES_IN_ERROR])
    if len(trainable) > NAMES_IN_ERROR:
        listed += f" and {len(trainable) - NAMES_IN_ERROR} more"
    is_word = isinstance(choice, str)
    if callable(choice):
        found = {name for name, w in trainable.items() if choice(name, w)}
        if not found:
            raise ValueError(f"the function given as parameters chooses none of the trainable ones: {listed}")
        return found
    if is_word or not isinstance(choice, Sequence) or not choice or not all(isinstance(each, str) for each in choice):
        expected = "'all', 'last', a list of names such as ['head.*'], or a function of name and parameter"
        raise (ValueError if is_word else TypeError)(f"parameters must be {expected}, got {choice!r}")
    found = set()
    for pattern in choice:
        chosen = {name for name in parameters if fnmatchcase(name, plain(pattern))}
        if not chosen & set(trainable):
            reason = f"only frozen parameters ({min(chosen)})" if chosen else "no parameter"
            raise ValueError(f"{pattern!r} matches {reason}; trainable are: {listed}")
        found |= chosen & set(trainable)
    return found
