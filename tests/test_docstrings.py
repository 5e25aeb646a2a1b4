"""Every public callable of docs/api/ says what its arguments are, what it returns and what it raises itself."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

API = Path(__file__).parent.parent / "docs" / "api"
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: ([\w.]+)\n((?:   :.*\n)*)", flags=re.MULTILINE)
NO_ARGUMENTS = ("self", "cls")


def resolved(name: str) -> Any:
    """Return the object of a dotted name."""
    module, _, attribute = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module), attribute)


def documented() -> Iterator[tuple[str, Any, bool]]:
    """Yield the names on the pages, what they are, and whether the members of a class are shown."""
    for page in sorted(API.glob("*.md")):
        for kind, name, options in DIRECTIVE.findall(page.read_text()):
            value, listed = resolved(name), re.search(r":members:(.*)", options)
            if kind == "module":
                assert listed, f"{page.name} lists no members of {name}"
                yield from ((f"{name}.{each}", getattr(value, each), True) for each in _words(listed[1]))
                continue
            yield name, value, bool(listed)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def callables() -> dict[str, Callable[..., Any]]:
    """Return the functions, classes and methods that the pages show, exceptions aside."""
    found: dict[str, Callable[..., Any]] = {}
    for name, value, with_members in documented():
        if inspect.isclass(value) and issubclass(value, Exception):
            continue
        found[name] = value
        if inspect.isclass(value) and with_members:
            for attribute in dir(value):
                member = inspect.getattr_static(value, attribute)
                member = member.__func__ if isinstance(member, classmethod | staticmethod) else member
                ours = inspect.isfunction(member) and member.__module__.startswith("deltaband")
                if ours and not attribute.startswith("_"):
                    found[f"{name}.{attribute}"] = getattr(value, attribute)
    return found


CALLABLES = callables()


def fields_with_comments(cls: type) -> set[str]:
    """Return the attributes that a comment `#:` explains, in the class or above."""
    found: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("deltaband"):
            found |= set(re.findall(r"^ {4}(\w+)\b.*#:", inspect.getsource(base), flags=re.MULTILINE))
    return found


def arguments_without_words(name: str) -> list[str]:
    value = CALLABLES[name]
    text = inspect.getdoc(value) or ""
    section = re.search(r"^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^    ([\w*]+(?:, [\w*]+)*):", section[1] if section else "", flags=re.MULTILINE)
    known = {each.lstrip("*") for head in heads for each in head.split(", ")}
    if inspect.isclass(value):
        known |= fields_with_comments(value)
        if inspect.isabstract(value) or getattr(value, "_is_protocol", False):
            return []
    parameters = [each for each in inspect.signature(value).parameters if each not in NO_ARGUMENTS and each[0] != "_"]
    return [each for each in parameters if each not in known]


@pytest.mark.parametrize("name", CALLABLES)
def test_every_argument_is_described(name):
    assert not arguments_without_words(name), f"{name}: Args: does not describe {arguments_without_words(name)}"


@pytest.mark.parametrize("name", [name for name, value in CALLABLES.items() if not inspect.isclass(value)])
def test_what_is_returned_and_raised_is_said(name):
    function = inspect.unwrap(CALLABLES[name])
    text = inspect.getdoc(CALLABLES[name]) or ""
    assert text, f"{name} has no docstring"
    returns = inspect.signature(function).return_annotation not in (None, "None")
    has_sections = "Args:" in text or "Raises:" in text
    says_it_first = not has_sections and re.search(r"\b[Rr]eturn\b", text.partition("\n")[0])
    assert not returns or "Returns:" in text or says_it_first, f"{name} returns what?"
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    raised = [node for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    assert not raised or "Raises:" in text, f"{name} raises, and does not say so"


def test_an_argument_without_words_is_found(monkeypatch):
    def undocumented(x: int, y: int = 0) -> int:
        """Return x.

        Args:
            x: A number.
        """
        return x

    monkeypatch.setitem(CALLABLES, "undocumented", undocumented)
    assert arguments_without_words("undocumented") == ["y"]
