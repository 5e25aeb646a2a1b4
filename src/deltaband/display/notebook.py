"""Fits and intervals in a notebook or a terminal: a few numbers and a small picture, without a style sheet."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import svg
from .svg import Axes, Markup, element
from .text import decimals, fixed

Line = tuple[str, str]  # of a summary: a label, indented where it belongs to the line above, and its text

MAX_TABLE_ROWS = 5
MAX_TABLE_OUTPUTS = 3  # of more outputs a table shows the first alone
PICTURE_HEIGHT, SIZE = 190, f"max-width: {svg.WIDTH}px"


@dataclass(frozen=True)
class IntervalTable:
    """The first of n intervals as a table, as text or with a picture of all of them."""

    mean: np.ndarray  # (n, m)
    lower: np.ndarray  # (n, m, levels)
    upper: np.ndarray  # (n, m, levels)
    levels: Sequence[str]  # percentages without a sign; empty if unknown

    def text(self) -> str:
        cells = self._cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in cells]
        return "\n  ".join([self._title(), *lines, *self._n_more()])

    def html(self) -> Markup:
        header, *rows = self._cells()
        head = element("tr", *(element("th", name) for name in header))
        body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
        table = element("table", element("thead", head), element("tbody", *body))
        below = [element("p", text) for text in self._n_more()]
        return element("div", element("p", element("b", self._title())), self._picture(), table, *below)

    def _title(self) -> str:
        n, m = self.mean.shape
        title = f"Intervals of {n:,} row{'s'[: n != 1]}" + (f", {m} outputs" if m > 1 else "")
        return ", ".join([title, *(f"{level} %" for level in self.levels)])

    def _n_more(self) -> list[str]:
        n_more = len(self.mean) - MAX_TABLE_ROWS
        return [f"… {n_more:,} more"] if n_more > 0 else []

    def _cells(self) -> list[list[str]]:
        n, m, n_levels = self.lower.shape
        names = [f" {name}" for name in self.levels] or [""]
        if len(names) != n_levels:
            names = [f" {j}" for j in range(n_levels)]
        outputs = [0] if m > MAX_TABLE_OUTPUTS else range(m)
        columns = ["prediction", *(end + name for name in names for end in ("lower", "upper"))]
        header = ["row", *((f"{o}: " if m > 1 else "") + column for o in outputs for column in columns)]
        width = self.upper - self.lower
        places = decimals(width[np.isfinite(width)])
        bounds = np.stack([self.lower, self.upper], axis=3).reshape(n, m, 2 * n_levels)
        values = np.concatenate([self.mean[:, :, None], bounds], axis=2)[:MAX_TABLE_ROWS, outputs]
        rows = [[str(k), *(fixed(float(value), places) for value in row.flat)] for k, row in enumerate(values)]
        return [header, *rows]

    def _picture(self) -> Markup:
        """Draw the predictions of the first output in ascending order, within their intervals."""
        values = np.column_stack([self.mean[:, 0], self.lower[:, 0], self.upper[:, 0]])
        finite = values[np.isfinite(values).all(axis=1)]
        if len(finite) < 2:
            return Markup("")
        order = np.argsort(finite[:, 0], kind="stable")
        shown = finite[svg.evenly_spaced(order, svg.CURVE_POINTS)]
        mean, (lower, upper) = shown[:, 0], np.split(shown[:, 1:].T, 2)  # (n,), (levels, n)
        position = np.linspace(1, len(order), len(shown))
        labels = "rows, sorted by prediction", "prediction and interval"
        axes = Axes((1.0, float(len(order))), svg.axis_limits(shown), *labels, height=PICTURE_HEIGHT)
        widest_first = np.argsort(-(upper - lower).mean(axis=1), kind="stable")
        areas = [axes.area(position, lower[j], upper[j], fill=svg.BAND) for j in widest_first]
        line = axes.line(position, mean, stroke=svg.BLUE)
        return element("div", axes.picture(*areas, line, describe="Predictions within their intervals"), style=SIZE)


def summary_html(
    title: str, lines: Sequence[Line], spectrum: tuple[np.ndarray, np.ndarray] | None, damping: float | None
) -> Markup:
    """Return the summary of a fit as a table above a picture of its spectrum, if there is one."""
    rows, left = [], "text-align: left; "
    for label, text in lines:
        indent = "" if label == label.lstrip() else "padding-left: 2em"
        head = element("th", label.strip(), style=left + indent)
        rows.append(element("tr", head, element("td", text, style=left)))
    parts = [element("p", element("b", title)), element("table", element("tbody", *rows))]
    picture = None
    if spectrum is not None and damping is not None:
        picture = svg.spectrum_picture(*spectrum, damping, height=PICTURE_HEIGHT)
    if picture is not None:
        blue, red = (element("span", "● ", style=f"color: {colour}") for colour in (svg.BLUE, svg.VERMILLION))
        legend = element("p", blue, "singular values of J, ", red, "eigenvalues of Σ⁻¹")
        parts += [element("div", picture, style=SIZE), legend]
    return element("div", *parts)
