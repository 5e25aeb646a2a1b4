"""`--engine name[:key=value,…]` or `--engine module:Class[:key=value,…]`, and `--memory`."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from typing import Any, Literal

from ..engines import Engine, registered_engines
from .errors import Refusal, Usage, near
from .models import current_folder_first

UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def engine(text: str) -> Engine | Literal["auto"]:
    """Return the engine of `auto`, `nystrom`, `nystrom:landmarks=200,seed=1` or, of the user, `module:Class:rank=3`."""
    if text == "auto":
        return "auto"
    name, _, rest = text.partition(":")
    engines = registered_engines()
    cls = engines.get(name)
    if cls is None and rest and "=" not in rest.partition(":")[0]:
        attribute, _, rest = rest.partition(":")
        cls, name = _own_engine(name, attribute), f"{name}:{attribute}"
    if cls is None:
        known = sorted(engines, key=lambda each: (not engines[each].__module__.startswith("deltaband."), each))
        raise Usage(f"--engine: there is no {name!r}{near(name, known)}; there are auto, {', '.join(known)}")
    defaults = {each.name: each.default for each in dataclasses.fields(cls) if not callable(each.default)}
    settings = list(defaults)  # those that text can give
    takes = f"takes {', '.join(settings)}" if settings else "has no settings"
    values: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in settings:
            raise Usage(f"--engine: {part!r} is no key=value of {name}{near(key, settings)}, which {takes}")
        try:
            number = value.capitalize() if value.lower() in ("true", "false") else value
            values[key] = nbytes(value, "memory") if key == "memory" else ast.literal_eval(number)
        except (SyntaxError, ValueError):  # a word
            if type(defaults[key]) in (int, float):
                raise Usage(f"--engine: {part!r} is not a number, as {key} of {name} is") from None
            values[key] = value
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
    try:
        with current_folder_first():
            found = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:
        raise Refusal(f"--engine: importing {module} failed: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise Usage(f"--engine: {module} has no engine {name!r}: a class derived from deltaband.engines.Engine")
    if found not in registered_engines().values():
        raise Usage(f"--engine: {module}:{name} is not registered: decorate it with @register")
    return found
