"""Fits and intervals in a notebook or a terminal: a few numbers and a small picture, without a style sheet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..engines import Spectrum
from ..results import Intervals, level_name, to_numpy
from . import svg
from .svg import Axes, Markup, element, join
from .text import Line, decimals, fixed

TABLE_ROWS = 5
MAX_TABLE_OUTPUTS = 3  # of more outputs a table shows the first alone
WIDTH, HEIGHT = 440, 190  # pixels of a picture


def intervals_text(intervals: Intervals) -> str:
    """Return the number of intervals and the first of them as text."""
    title, header, rows, n_more = _table(intervals)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join([title, *(f"  {line}" for line in lines), *([f"  … {n_more:,} more"] if n_more else [])])


def intervals_html(intervals: Intervals) -> str:
    """Return the first intervals as a table below a picture of all of them."""
    title, header, rows, n_more = _table(intervals)
    head = element("tr", *(element("th", name) for name in header))
    body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    table = element("table", element("thead", head), element("tbody", *body))
    below = [element("p", f"… {n_more:,} more")] if n_more else []
    return element("div", element("p", element("b", title)), _ribbon(intervals), table, *below)


def summary_html(title: str, lines: Sequence[Line], spectrum: Spectrum | None, damping: float | None) -> str:
    """Return the summary of a fit as a table above a picture of its spectrum."""
    left, indented = "text-align: left; ", "padding-left: 2em"
    rows = [
        element(
            "tr",
            element("th", label.strip(), style=left + (indented if label != label.lstrip() else "")),
            element("td", text, style=left),
        )
        for label, text in lines
    ]
    table = element("table", element("tbody", *rows))
    return element("div", element("p", element("b", title)), table, _spectrum(spectrum, damping))


def _table(intervals: Intervals) -> tuple[str, list[str], list[list[str]], int]:
    """Return a title, the header, the first rows, and the number of rows that are left."""
    mean, lower, upper = _arrays(intervals)  # (n, m), (n, m, levels)
    n, m, n_levels = lower.shape
    levels = [] if intervals.level is None else [level_name(level) for level in np.atleast_1d(intervals.level)]
    suffixes = [f" {name}" for name in levels] or [""]
    if len(suffixes) != n_levels:
        suffixes = [f" {j}" for j in range(n_levels)]
    title = f"Intervals of {n:,} row{'s'[: n != 1]}" + (f", {m} outputs" if m > 1 else "")
    title = ", ".join([title, *(f"{name} %" for name in levels)])
    outputs = [0] if m > MAX_TABLE_OUTPUTS else range(m)
    header = ["row"]
    for o in outputs:
        prefix = f"{o}: " if m > 1 else ""
        header += [f"{prefix}prediction", *(f"{prefix}{end}{name}" for name in suffixes for end in ("lower", "upper"))]
    places = decimals((upper - lower)[np.isfinite(upper - lower)], 3)
    bounds = np.stack([lower, upper], axis=3).reshape(n, m, 2 * n_levels)
    values = np.concatenate([mean[:, :, None], bounds], axis=2)
    rows = [
        [str(row), *(fixed(float(value), places) for value in values[row, outputs].ravel())]
        for row in range(min(n, TABLE_ROWS))
    ]
    return title, header, rows, n - len(rows)


def _ribbon(intervals: Intervals) -> Markup:
    """Draw the predictions of the first output in ascending order, within their intervals."""
    mean, lower, upper = (part[:, 0] for part in _arrays(intervals))  # (n,), (n, levels)
    finite = np.flatnonzero(np.isfinite(mean) & np.isfinite(lower).all(axis=1) & np.isfinite(upper).all(axis=1))
    if len(finite) < 2:
        return Markup("")
    order = finite[np.argsort(mean[finite], kind="stable")]
    shown = svg.evenly_spaced(order, svg.CURVE_POINTS)
    mean, lower, upper = mean[shown], lower[shown], upper[shown]
    position = np.linspace(1, len(order), len(shown))
    axes = Axes(
        (1.0, float(len(order))),
        svg.axis_limits(np.concatenate([lower.ravel(), upper.ravel(), mean])),
        "rows, sorted by prediction",
        "prediction and interval",
        width=WIDTH,
        height=HEIGHT,
    )
    widest_first = np.argsort(-(upper - lower).mean(axis=0), kind="stable")
    areas = [axes.area(position, lower[:, j], upper[:, j], fill=svg.BAND) for j in widest_first]
    line = axes.line(position, mean, stroke=svg.BLUE)
    return _sized(axes.picture(*areas, line, describe="Predictions within their intervals"))


def _spectrum(spectrum: Spectrum | None, damping: float | None) -> Markup:
    if spectrum is None or damping is None:
        return Markup("")
    picture = svg.spectrum_picture(spectrum, damping, width=WIDTH, height=HEIGHT)
    if picture is None:
        return Markup("")
    legend = [("● ", svg.BLUE), ("singular values of J, ", None), ("● ", svg.VERMILLION), ("eigenvalues of Σ⁻¹", None)]
    words = (element("span", text, style=None if colour is None else f"color: {colour}") for text, colour in legend)
    return join([_sized(picture), element("p", *words)])


def _sized(picture: Markup) -> Markup:
    return element("div", picture, style=f"max-width: {WIDTH}px")


def _arrays(intervals: Intervals) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean (n, m) and the bounds (n, m, levels) in float64."""
    mean, lower, upper = (np.atleast_1d(to_numpy(part)) for part in intervals)
    n = len(mean)
    if n == 0:
        none = np.zeros((0, 1, 1 if intervals.level is None else np.size(intervals.level)))
        return none[:, :, 0], none, none
    mean = mean.reshape(n, -1)
    return mean, lower.reshape(*mean.shape, -1), upper.reshape(*mean.shape, -1)
