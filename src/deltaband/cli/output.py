"""What users see: results on stdout, as text or JSON; everything else, also what their own code prints, on stderr."""

import difflib
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

MAX_ERROR_CHARACTERS = 800
MAX_LISTED_NAMES = 12


class Refusal(Exception):  # noqa: N818 - not a fault of the program
    """A problem with the data, the network or the files; the message is for the user."""

    code = 1


class Usage(Refusal):
    code = 2  # a problem with the options


def near(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'X'?)" for the most similar known name, or an empty text."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    if not matches:  # difflib is case-sensitive
        folded = {each.casefold(): each for each in known}
        matches = [folded[each] for each in difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.6)]
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def check_file(path: Path) -> Path:
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path()
        raise Refusal(f"there is no file {path}{near(path.name, [each.name for each in folder.iterdir()])}")
    return path


def print_result(result: Mapping[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        encoded = json.dumps(result, default=lambda value: value.tolist() if hasattr(value, "tolist") else str(value))
        plain = json.loads(encoded, parse_constant=lambda _: None)  # NaN and ∞ become null
        text = json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False)
    print(strip_control_characters(text), flush=True)


def say(text: str) -> None:
    """Print what was done that is not a result, on stderr."""
    print(f"deltaband: {strip_control_characters(text)}", file=sys.stderr)


def strip_control_characters(text: str) -> str:
    """Replace characters that a terminal would obey: names and notes come from files."""
    return "".join(each if each.isprintable() or each == "\n" else "�" for each in text)


def join_names(names: Iterable[str]) -> str:
    every = list(names)
    rest = len(every) - MAX_LISTED_NAMES
    return ", ".join(every[:MAX_LISTED_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line, with the type of the error where the message needs it."""
    text = str(error)
    if isinstance(error, MemoryError):  # the lines after the first are the table of a plan
        text = f"{text.splitlines()[0]}; `deltaband plan` shows what would fit" if text else "out of memory"
    clear = isinstance(error, Refusal | ValueError | TypeError | MemoryError | OSError) and text
    return (" ".join(text.split()) if clear else with_type(error))[:MAX_ERROR_CHARACTERS]


def with_type(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lay out rows of the same keys as columns: text to the left, numbers to the right."""
    columns = []
    for name in rows[0]:
        cells = [name, *(_format(row[name]) for row in rows)]
        align = "<" if all(isinstance(row[name], str) for row in rows) else ">"
        columns.append([f"{cell:{align}{max(map(len, cells))}}" for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def format_fields(values: Mapping[str, Any], indent: str = "") -> str:
    """Lay out one line for each value, with nested values indented below their name."""
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            lines += [f"{indent}{key}", format_fields(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key:<{max(24 - len(indent), 1)}} {_format(value)}")
    return "\n".join(lines)


def progress_bar(label: str | None, n_rows: int | None) -> Any:
    """Return a tqdm bar that shows after a second, on terminals only; none without a label."""
    disable = True if label is None else None  # None: unless stderr is a terminal
    return tqdm(total=n_rows, desc=label, unit=" rows", delay=1, leave=False, disable=disable, file=sys.stderr)


def _format(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_format, value))
    if isinstance(value, float | np.floating):
        return "–" if math.isnan(value) else f"{value:.4g}"
    return "–" if value is None else str(value)
