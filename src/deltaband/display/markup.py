"""HTML and SVG as text. What is not markup already is escaped where it becomes part of an element."""

from __future__ import annotations

import html
from collections.abc import Iterable

EMPTY = {"circle", "line", "link", "meta", "path", "polygon", "polyline", "rect"}  # elements that hold nothing


class Markup(str):
    """Text that is markup already, made by `element` and `together`."""

    __slots__ = ()


def element(name: str, *children: str, **attributes: object) -> Markup:
    """`<name key="value">children</name>`.

    `class_` is the attribute class, `data_row` is data-row; one that is None is left out, one that is True has no
    value.
    """
    written = [name]
    for key, value in attributes.items():
        if value is None:
            continue
        key = key.rstrip("_").replace("_", "-")
        written.append(key if value is True else f'{key}="{escaped(str(value))}"')
    opening = " ".join(written)
    return Markup(f"<{opening}/>" if name in EMPTY else f"<{opening}>{together(children)}</{name}>")


def together(parts: Iterable[str]) -> Markup:
    return Markup("".join(part if isinstance(part, Markup) else escaped(part) for part in parts))


def escaped(text: str) -> Markup:
    """Nothing in it is markup any more; half characters, which no file can hold, are question marks."""
    return Markup(html.escape(text.encode("utf-8", "replace").decode("utf-8")))
