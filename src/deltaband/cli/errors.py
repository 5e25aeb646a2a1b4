"""Errors that the command line reports to the user in one line."""

import difflib
from collections.abc import Iterable
from pathlib import Path


class Refusal(Exception):  # noqa: N818 - not a fault of the program
    """A problem with the data, the network or the files; the message is for the user."""

    code = 1


class Usage(Refusal):
    """A problem with the options."""

    code = 2


def near(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'X'?)" for the most similar known name, or an empty text."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    if not matches:  # difflib is case-sensitive
        folded = {each.casefold(): each for each in known}
        matches = [folded[each] for each in difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.5)]
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def check_file(path: Path) -> Path:
    """Return the path of an existing file."""
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path()
        raise Refusal(f"there is no file {path}{near(path.name, [each.name for each in folder.iterdir()])}")
    return path
