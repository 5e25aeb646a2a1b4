"""The public names with their parameters: `python -m tests.support.public_names` writes the list of a release.

A name counts as public if it is in `deltaband.__all__`, or a public name that one of the public modules defines, or a
public member of one of these classes.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

RECORDED = Path(__file__).parent / "public_names.txt"
MODULES = ("deltaband", "deltaband.baselines", "deltaband.metrics", "deltaband.plots", "deltaband.report")
MODULES += ("deltaband.sklearn", "deltaband.storage", "deltaband.errors")


def current() -> dict[str, tuple[str, ...]]:
    """Return the parameters of every public name; of what cannot be called, none."""
    found = {}
    for module in map(importlib.import_module, MODULES):
        for name, value in _public(module):
            found[f"{module.__name__}.{name}"] = _parameters(value)
            if inspect.isclass(value):
                for member in dir(value):
                    if not member.startswith("_") and _is_ours(inspect.getattr_static(value, member), value, member):
                        full = f"{module.__name__}.{name}.{member}"
                        found[full] = _parameters(getattr(value, member))
    return found


def recorded() -> dict[str, tuple[str, ...]]:
    """Return what the last release promised."""
    lines = (line.rstrip(")").partition("(") for line in RECORDED.read_text().splitlines())
    return {name: tuple(filter(None, parameters.split(", "))) for name, _, parameters in lines}


def gone() -> list[str]:
    """Return what was promised and is there no longer, or is called otherwise."""
    now, problems = current(), []
    for name, parameters in recorded().items():
        if name not in now:
            problems.append(f"{name} is gone")
        elif missing := [each for each in parameters if each not in now[name]]:
            problems.append(f"{name} no longer takes {', '.join(missing)}")
        elif now[name] and [each for each in now[name] if each in parameters] != list(parameters):
            problems.append(f"the parameters of {name} have another order")
    return problems


def _public(module: ModuleType) -> Iterator[tuple[str, object]]:
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    for name in names:
        value = getattr(module, name)
        if f"{getattr(value, '__module__', '')}.".startswith(f"{module.__name__}."):  # not what it imports from others
            yield name, value


def _is_ours(member: object, cls: type, name: str) -> bool:
    owner = next(each for each in cls.__mro__ if name in vars(each))
    return owner.__module__.startswith("deltaband")


def _parameters(value: object) -> tuple[str, ...]:
    if not callable(value):
        return ()
    try:
        return tuple(name for name in inspect.signature(value).parameters if name not in ("self", "args", "kwargs"))
    except (TypeError, ValueError):
        return ()


if __name__ == "__main__":
    RECORDED.write_text("".join(f"{name}({', '.join(given)})\n" for name, given in sorted(current().items())))
