"""`--engine name[:key=value,…]` or `--engine module:Class[:key=value,…]`, and `--memory`."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import sys
from pathlib import Path
from typing import Any, Literal

from ..engines import Engine, registered_engines
from .errors import Refusal, Usage, near

UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def engine(text: str) -> Engine | Literal["auto"]:
    """Return the engine that an option names.

    Args:
        text: `auto`; a registered engine such as `exact` or `important-directions:rank=200,tail=estimate`; or one of
            the user's own by module and class, such as `my_engines:Diagonal` or `my_engines:Diagonal:rank=3`.

    Raises:
        Usage: If there is no such engine, or it does not take these settings.
    """
    if text == "auto":
        return "auto"
    name, _, rest = text.partition(":")
    engines = registered_engines()
    if name in engines:
        cls = engines[name]
    elif rest and "=" not in rest.partition(":")[0]:
        attribute, _, rest = rest.partition(":")
        cls, name = _own_engine(name, attribute), f"{name}:{attribute}"
    else:
        own = __name__.partition(".")[0]
        known = sorted(engines, key=lambda each: (not engines[each].__module__.startswith(own), each))
        raise Usage(f"--engine: there is no {name!r}{near(name, known)}; there are auto, {', '.join(known)}")
    settings = [each.name for each in dataclasses.fields(cls) if not callable(each.default)]  # those that text can give
    takes = f"takes {', '.join(settings)}" if settings else "has no settings"
    values: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in settings:
            raise Usage(f"--engine: {part!r} is no key=value of {name}{near(key, settings)}, which {takes}")
        values[key] = nbytes(value, "memory") if key == "memory" else _value(value)
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise Usage(f"--engine {text}: {error}") from error


def nbytes(text: str, option: str = "--memory") -> float:
    """Return the bytes that `2GB`, `500 MiB` or a number says."""
    match = re.fullmatch(r"\s*(\d+\.?\d*(?:e\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if match is None or not float(match[1]):
        raise Usage(f"{option} must be a number of bytes such as 2GB or 500MB, got {text!r}")
    return float(match[1]) * UNITS[match[2] or ""]


def _own_engine(module: str, name: str) -> type[Engine]:
    """Import an engine of the user's, from the current folder or from what is installed."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:
        raise Refusal(f"--engine: importing {module} failed: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(here)
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise Usage(f"--engine: {module} has no engine {name!r}: a class derived from deltaband.engines.Engine")
    return found


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text.capitalize() if text.lower() in ("true", "false") else text)
    except (SyntaxError, ValueError):
        return text
