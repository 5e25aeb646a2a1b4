"""What the command line refuses, in one line each."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Refusal(Exception):  # noqa: N818 - it is no fault of the program
    """Something is wrong with the data, the network or the files; the message is for the user."""

    code = 1


class Usage(Refusal):
    """Something is wrong with the options."""

    code = 2


def near(name: str, known: Iterable[str]) -> str:
    """What may have been meant."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    if not matches:  # difflib minds upper and lower case
        folded = {each.casefold(): each for each in known}
        matches = [folded[each] for each in difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.5)]
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def listed(names: Iterable[str], most: int = 12) -> str:
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def one_line(error: BaseException, most: int = 800) -> str:
    """The message alone where it speaks for itself, with the kind of error where it does not."""
    text = str(error)
    if isinstance(error, MemoryError):  # what follows is the table of a plan
        text = f"{text.splitlines()[0]}; `deltaband plan` shows what would fit" if text else "out of memory"
    spoken = isinstance(error, Refusal | ValueError | TypeError | MemoryError | OSError) and text
    return (" ".join(text.split()) if spoken else with_kind(error))[:most]


def with_kind(error: BaseException) -> str:
    """For errors of somebody else's code."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
