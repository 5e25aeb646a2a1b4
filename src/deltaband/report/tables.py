"""The tables of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..display.markup import Markup, element
from ..display.numerals import decimals, fixed, number, percent
from .charts import whisker
from .columns import Column
from .groups import Group
from .judged import Judged

WIDEST = 25  # rows of the table of the widest intervals


class Units:
    """Numbers in the units of one output's targets, all with as many decimals."""

    def __init__(self, judged: Judged) -> None:
        self._decimals = decimals(judged.width)

    def __call__(self, value: float) -> str:
        return number(value) if self._decimals is None else fixed(value, self._decimals)


def coverages(judged: Judged, groups: Sequence[Group], what: str) -> Markup:
    """A line for each group of rows: how many, how often covered, how wide."""
    units = Units(judged)
    found = [judged.of(group.rows, len(groups)) for group in groups]
    level = judged.coverage.level
    low = max(0.0, min(level - 2 * (1 - level), *(each.likely.low for each in found)))
    lines = []
    for group, each in zip(groups, found, strict=True):
        off = each.verdict == "too low" and judged.promised
        share = percent(each.share)
        lines.append(
            element(
                "tr",
                element("th", element("span", group.name), scope="row", title=group.name),
                element("td", f"{each.n:,}", class_="number"),
                element(
                    "td", share, class_="number off" if off else "number", title="fewer than asked" if off else None
                ),
                element("td", whisker(each.share, each.likely, level, low, off), class_="picture"),
                element("td", units(float(judged.width[group.rows].mean())), class_="number"),
            )
        )
    heads = ((what, None), ("rows", "number"), ("covered", "number"), ("", None), ("mean width", "number"))
    head = element("tr", *(element("th", name, class_=kind, scope="col") for name, kind in heads))
    return _scrolled(element("table", element("thead", head), element("tbody", *lines), class_="coverages"))


def widest(judged: Judged, columns: Mapping[str, Column]) -> Markup:
    """The rows with the widest intervals; a click on a head sorts by it."""
    units = Units(judged)
    mean, lower, upper = judged.intervals
    lines = []
    for row in np.argsort(-judged.width, kind="stable")[:WIDEST]:
        below, above = judged.y[row] < lower[row], judged.y[row] > upper[row]
        outcome = "missed, below" if below else "missed, above" if above else "covered"
        numbers = (mean[row], lower[row], upper[row], judged.width[row], judged.y[row])
        cells = [
            _number_cell(f"{row:,}", int(row)),
            *(_number_cell(units(float(value)), float(value)) for value in numbers),
            element("td", outcome, class_="off" if below or above else None),
            *(_cell(column, row) for column in columns.values()),
        ]
        lines.append(element("tr", *cells))
    heads = [(name, True) for name in ("row", "prediction", "lower", "upper", "width", "target")] + [("", False)]
    heads[-1] = ("outcome", False)
    heads += [(name, not column.is_text) for name, column in columns.items()]
    head = element("tr", *(_sortable(name, right, name == "width") for name, right in heads))
    return _scrolled(element("table", element("thead", head), element("tbody", *lines), class_="sortable"))


def settings(lines: Sequence[tuple[str, str]]) -> Markup:
    rows = (
        element("tr", element("th", name.strip(), scope="row", class_="inner" if name != name.lstrip() else None),
                element("td", value))
        for name, value in lines
    )  # fmt: skip
    return element("table", element("tbody", *rows), class_="settings")


def outputs(judged: Sequence[Judged], anchors: Sequence[str | None]) -> Markup:
    """A line for each output; those that have a section of their own are links."""
    lines = []
    for each, anchor in zip(judged, anchors, strict=True):
        low, high = each.coverage.likely
        name = each.name if anchor is None else element("a", each.name, href=f"#{anchor}")
        off = each.promised and each.coverage.verdict != "as asked"
        shown = f"{percent(low)} – {percent(high)}"
        width = float(each.width.mean())
        relative = each.relative_width
        lines.append(
            element(
                "tr",
                element("th", name, scope="row", data_value=each.name),
                _number_cell(percent(each.coverage.share), each.coverage.share, "off" if off else None),
                _number_cell(shown, low),
                element("td", each.coverage.verdict if each.promised else "–", class_="off" if off else None),
                _number_cell(number(width), width),
                _number_cell("–" if relative is None else number(relative, 3), relative),
                _number_cell(number(each.score), each.score),
            )
        )
    heads = (
        ("output", False), ("covered", True), ("95 % confidence", True), ("verdict", False), ("mean width", True),
        ("width / std", True), ("interval score", True),
    )  # fmt: skip
    head = element("tr", *(_sortable(name, right) for name, right in heads))
    return _scrolled(element("table", element("thead", head), element("tbody", *lines), class_="sortable"))


def _cell(column: Column, row: int) -> Markup:
    value = column.values[row]
    text = column.shown(value)
    if column.is_text:
        return element("td", text, class_="text", title=text, data_value=None if value is not None else "")
    return _number_cell(text, float(value))


def _number_cell(text: str, value: float | None, class_: str | None = None) -> Markup:
    """What it is sorted by stands beside what is shown; of what is missing nothing does."""
    there = value is not None and not math.isnan(value)
    return element("td", text, class_=f"number {class_ or ''}".strip(), data_value=value if there else "")


def _sortable(name: str, right: bool, descending: bool = False) -> Markup:
    button = element("button", name, type="button")
    sort = "descending" if descending else None
    return element("th", button, class_="number" if right else None, scope="col", aria_sort=sort)


def _scrolled(table: Markup) -> Markup:
    """A table that is wider than the page moves in a frame of its own, and the page stays."""
    return element("div", table, class_="scrolled", tabindex=0)
