"""`--engine name[:key=value,…]` and `--memory`, as they are written on a command line."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any, Literal

from .. import engines as covariance
from ..engines import Engine
from .errors import Usage, near

UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def _spelled(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


ENGINES: dict[str, type] = {
    _spelled(made.__name__): made
    for made in (
        covariance.Exact,
        covariance.Nystrom,
        covariance.RandomProjection,
        covariance.ImportantDirections,
        covariance.RobustFrequentDirections,
        covariance.FrequentDirections,
    )
}


def engine(text: str) -> Engine | Literal["auto"]:
    """`auto`, `exact`, `important-directions:rank=200,tail=estimate`: settings are those of the constructor."""
    name, _, rest = text.partition(":")
    if text == "auto":
        return "auto"
    if name not in ENGINES:
        raise Usage(f"--engine: there is no {name!r}{near(name, ENGINES)}; there are auto, {', '.join(ENGINES)}")
    made, values = ENGINES[name], {}
    settings = _settings(made)
    takes = f"takes {', '.join(settings)}" if settings else "has no settings"
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in settings:
            raise Usage(f"--engine: {part!r} is no key=value of {name}{near(key, settings)}, which {takes}")
        values[key] = nbytes(value, "memory") if key == "memory" else _value(value)
    try:
        return made(**values)
    except (TypeError, ValueError) as error:
        raise Usage(f"--engine {text}: {error}") from error


def nbytes(text: str, option: str = "--memory") -> float:
    """`2GB`, `500 MiB` or a number of bytes."""
    match = re.fullmatch(r"\s*(\d+\.?\d*(?:e\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if match is None or not float(match[1]):
        raise Usage(f"{option} must be a number of bytes such as 2GB or 500MB, got {text!r}")
    return float(match[1]) * UNITS[match[2] or ""]


def _settings(made: type) -> dict[str, inspect.Parameter]:
    """Those that can be written: not functions."""
    parameters = inspect.signature(made).parameters
    return {name: each for name, each in parameters.items() if not callable(each.default)}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text.capitalize() if text.lower() in ("true", "false") else text)
    except (SyntaxError, ValueError):
        return text
