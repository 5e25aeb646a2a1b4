"""What goes to the screen: results on stdout, as text or JSON; everything else on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, redirect_stdout
from typing import Any

import numpy as np


def tell(found: Mapping[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        text = json.dumps(plain(found), indent=2, ensure_ascii=False, allow_nan=False)
    print(shown(text), flush=True)


def quiet() -> AbstractContextManager[Any]:
    """What the user's code prints goes to stderr: stdout is for results."""
    return redirect_stdout(sys.stderr)


def shown(text: str) -> str:
    """Without what a terminal would obey: names and notes come from files."""
    return "".join(each if each.isprintable() or each == "\n" else "�" for each in text)


def plain(value: Any) -> Any:
    """What JSON has words for; null for numbers it has none for."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns under their names: text to the left, numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(name), *(len(row[j]) for row in cells)) for j, name in enumerate(header)]
    left = [all(isinstance(row[j], str) for row in rows) for j in range(len(header))]

    def line(texts: Sequence[str]) -> str:
        each = zip(texts, widths, left, strict=True)
        return "  ".join(text.ljust(width) if is_text else text.rjust(width) for text, width, is_text in each).rstrip()

    return "\n".join(map(line, [header, *cells]))


def listing(values: Mapping[str, Any], indent: str = "") -> str:
    """A line for each; what is in it, if anything is, below."""
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            lines += [f"{indent}{key}", listing(value, indent + "  ")]
        else:
            text = ", ".join(map(_cell, value)) if isinstance(value, list | tuple) else _cell(value)
            lines.append(f"{indent}{key:<{max(24 - len(indent), 1)}} {text}")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float | np.floating):
        return "–" if math.isnan(value) else f"{value:.4g}"
    return "–" if value is None else str(value)


def bar(doing: str | None, total: int | None) -> Any:
    """It stays away from what is done within a second, and from whatever is not a terminal."""
    from tqdm import tqdm

    disable = True if doing is None else None  # None: unless stderr is a terminal
    return tqdm(total=total, desc=doing, unit=" rows", delay=1, leave=False, disable=disable, file=sys.stderr)
