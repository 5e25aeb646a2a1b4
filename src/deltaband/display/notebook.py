"""What a notebook shows: a few numbers and a small picture, of fragments that need no style sheet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..engines import Spectrum
from ..results import Intervals, to_numpy
from . import spectra
from .markup import Markup, element, together
from .numerals import decimals, fixed, level_name, number
from .summary import Line
from .svg import BAND, BLUE, VERMILLION, Axes, limits

HEAD = 5  # rows of a table
CROWD = 240  # places of a curve
WIDTH, HEIGHT = 440, 190


def text(intervals: Intervals) -> str:
    """How many there are, and the first of them."""
    title, heads, lines, more = _table(intervals)
    cells = [heads, *lines]
    widths = [max(len(row[k]) for row in cells) for k in range(len(heads))]
    rows = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([title, *(f"  {row}" for row in rows), *([f"  … {more:,} more"] if more else [])])


def html(intervals: Intervals) -> str:
    title, heads, lines, more = _table(intervals)
    head = element("tr", *(element("th", name) for name in heads))
    rows = [element("tr", *(element("td", cell) for cell in line)) for line in lines]
    below = [element("p", f"… {more:,} more")] if more else []
    table = element("table", element("thead", head), element("tbody", *rows))
    return element("div", element("p", element("b", title)), _ribbon(intervals), table, *below)


def summary(title: str, lines: Sequence[Line], spectrum: Spectrum | None, damping: float | None) -> str:
    left = "text-align: left; "
    rows = [
        element(
            "tr",
            element("th", name.strip(), style=left + ("padding-left: 2em" if name != name.lstrip() else "")),
            element("td", value, style=left),
        )
        for name, value in lines
    ]
    table = element("table", element("tbody", *rows))
    return element("div", element("p", element("b", title)), table, _spectrum(spectrum, damping))


def _table(intervals: Intervals) -> tuple[str, list[str], list[list[str]], int]:
    """What they are, names, the first rows, and how many are left."""
    mean, lower, upper = _columns(intervals)  # (n, m), (n, m, levels)
    n, m, n_levels = lower.shape
    levels = [None] if intervals.level is None else [*np.atleast_1d(intervals.level)]
    names = [f" {level_name(level)}" if level is not None else "" for level in levels]
    if len(names) != n_levels:
        names = [f" {j}" for j in range(n_levels)]
    asked = ", ".join(f"{level_name(level)} %" for level in levels if level is not None)
    title = f"Intervals of {n:,} row{'s'[: n != 1]}" + (f", {m} outputs" if m > 1 else "")
    title += f", {asked}" if asked else ""
    outputs = [0] if m > 3 else range(m)  # of many the first stands for all
    heads = ["row"]
    for o in outputs:
        prefix = f"{o}: " if m > 1 else ""
        heads += [f"{prefix}prediction", *(f"{prefix}{end}{name}" for name in names for end in ("lower", "upper"))]
    places = decimals((upper - lower)[np.isfinite(upper - lower)], 3)
    lines = []
    for row in range(min(n, HEAD)):
        values = [
            value
            for o in outputs
            for value in (mean[row, o], *np.stack([lower[row, o], upper[row, o]], axis=1).reshape(-1))
        ]
        lines.append([str(row), *(number(v) if places is None else fixed(v, places) for v in map(float, values))])
    return title, heads, lines, n - len(lines)


def _ribbon(intervals: Intervals) -> Markup:
    """Predictions from the smallest to the largest, in their intervals; of the first output."""
    mean, lower, upper = (part[:, 0] for part in _columns(intervals))  # (n,), (n, levels)
    finite = np.flatnonzero(np.isfinite(mean) & np.isfinite(lower).all(axis=1) & np.isfinite(upper).all(axis=1))
    if len(finite) < 2:
        return Markup("")
    order = finite[np.argsort(mean[finite], kind="stable")]
    shown = order[np.linspace(0, len(order) - 1, min(len(order), CROWD)).round().astype(np.int64)]
    position = np.linspace(1, len(order), len(shown))
    bounds = np.concatenate([lower[shown].ravel(), upper[shown].ravel(), mean[shown]])
    axes = Axes.over(
        (1.0, float(len(order))),
        limits(bounds),
        "rows, by their prediction",
        "prediction and interval",
        width=WIDTH,
        height=HEIGHT,
    )
    outside_in = np.argsort(-(upper - lower)[shown].mean(axis=0), kind="stable")
    areas = [axes.area(position, lower[shown, j], upper[shown, j], fill=BAND) for j in outside_in]
    line = axes.line(position, mean[shown], stroke=BLUE)
    return _sized(axes.picture(*areas, line, describe="Predictions in their intervals"))


def _spectrum(found: Spectrum | None, damping: float | None) -> Markup:
    drawn = None if found is None or damping is None else spectra.picture(found, damping, width=WIDTH, height=HEIGHT)
    if drawn is None:
        return Markup("")
    legend = [("● ", BLUE), ("singular values of J, ", None), ("● ", VERMILLION), ("eigenvalues of Σ⁻¹", None)]
    words = (element("span", text, style=None if colour is None else f"color: {colour}") for text, colour in legend)
    return together([_sized(drawn), element("p", *words)])


def _sized(picture: Markup) -> Markup:
    return element("div", picture, style=f"max-width: {WIDTH}px")


def _columns(intervals: Intervals) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(n, m), (n, m, levels) and (n, m, levels)."""
    mean, lower, upper = (np.atleast_1d(to_numpy(part)) for part in intervals)
    n = len(mean)
    mean = mean.reshape(n, -1) if n else np.zeros((0, 1))
    m = mean.shape[1]
    if n == 0:
        levels = 1 if intervals.level is None else np.size(intervals.level)
        return mean, np.zeros((0, m, levels)), np.zeros((0, m, levels))
    return mean, lower.reshape(n, m, -1), upper.reshape(n, m, -1)
