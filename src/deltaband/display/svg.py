"""Axes and marks as SVG.

Colours are CSS variables with a value to fall back on, and ink is the colour of the text around: a page can have a
dark mode, and a notebook needs no style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .markup import Markup, element
from .numerals import MINUS, fixed, power_of_ten

BLUE, VERMILLION = "var(--blue, #0072B2)", "var(--vermillion, #D55E00)"  # of Okabe and Ito, as in plots
GREY, BAND = "var(--grey, #8A8F94)", "var(--band, #0072B240)"
LETTER = 6.6  # about the width of a digit of the axes, at the size of FONT
FONT = 12


@dataclass(frozen=True)
class Scale:
    """Numbers from low to high to places on the picture from start to end."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, values: np.ndarray | float) -> np.ndarray:
        """Numbers outside of the limits are put at the edge."""
        inside = np.clip(np.asarray(values, dtype=np.float64), self.low, self.high)
        low, high = self.low, self.high
        if self.log:
            inside, low, high = np.log10(inside), math.log10(low), math.log10(high)
        return self.start + (inside - low) / (high - low) * (self.end - self.start)

    def ticks(self, about: int) -> list[tuple[float, str]]:
        """Round numbers within the limits, and how they are written."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            every = max(1, math.ceil((last - first + 1) / about))
            return [(10.0**k, power_of_ten(k)) for k in range(first, last + 1, every)]
        step = _round_step((self.high - self.low) / about)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [k * step for k in range(first, last + 1)]
        largest = max(map(abs, values), default=0.0)
        if largest >= 1e7 or (0 < largest < 1e-4):
            return [(value, f"{value:.3g}".replace("-", MINUS)) for value in values]
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        if abs(step * 10**decimals - round(step * 10**decimals)) > 1e-9:
            decimals += 1  # 2.5
        return [(value, fixed(value, decimals)) for value in values]


def limits(values: np.ndarray, *, room: float = 0.05, zero: bool = False) -> tuple[float, float]:
    """Where an axis begins and ends that shows these numbers; with zero it begins there."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if zero:
        low = min(low, 0.0)
    span = high - low
    if span <= 1e-9 * max(abs(low), abs(high)):
        span = abs(high) or 1.0
    return (low if zero and low == 0.0 else low - room * span), high + room * span


@dataclass(frozen=True)
class Axes:
    """A picture with two axes. Marks are placed by `x` and `y`, and `picture` puts all of it together."""

    x: Scale
    y: Scale
    x_label: str
    y_label: str
    width: int
    height: int
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]

    @classmethod
    def over(
        cls,
        x: tuple[float, float],
        y: tuple[float, float],
        x_label: str = "",
        y_label: str = "",
        *,
        width: int = 440,
        height: int = 300,
        log: bool = False,
        x_ticks: Sequence[tuple[float, str]] | None = None,
        y_ticks: Sequence[tuple[float, str]] | None = None,
    ) -> Axes:
        top, bottom = (28 if y_label else 8), height - (40 if x_label else 22)
        vertical = Scale(*y, bottom, top, log)
        on_y = tuple(y_ticks if y_ticks is not None else vertical.ticks(max(3, height // 50)))
        left = 10 + LETTER * max((len(text) for _, text in on_y), default=0)
        horizontal = Scale(*x, left, width - 20, log)
        on_x = tuple(x_ticks if x_ticks is not None else horizontal.ticks(max(2, width // 90)))
        return cls(horizontal, vertical, x_label, y_label, width, height, on_x, on_y)

    def picture(self, *marks: str, describe: str, class_: str | None = None) -> Markup:
        left, right, bottom = self.x.start, self.x.end, self.y.start
        grid, words = [], []
        for value, text in self.y_ticks:
            y = place(self.y(value))
            grid.append(element("line", x1=place(left), x2=place(right), y1=y, y2=y))
            words.append(element("text", text, x=place(left - 6), y=y, dy="0.35em", text_anchor="end"))
        for value, text in self.x_ticks:
            x = place(self.x(value))
            grid.append(element("line", x1=x, x2=x, y1=place(bottom), y2=place(bottom + 4)))
            words.append(element("text", text, x=x, y=place(bottom + 17), text_anchor="middle"))
        if self.x_label:
            at = {"x": place((left + right) / 2), "y": self.height - 6, "text_anchor": "middle"}
            words.append(element("text", self.x_label, **at))
        if self.y_label:  # on top of its axis, where it can be read without turning the head
            words.append(element("text", self.y_label, x=2, y=12))
        return element(
            "svg",
            element("g", *grid, stroke="currentColor", stroke_opacity=0.16),
            *marks,
            element("g", *words, fill="currentColor", fill_opacity=0.75, font_size=FONT),
            viewBox=f"0 0 {self.width} {self.height}",
            role="img",
            aria_label=describe,
            class_=class_,
            xmlns="http://www.w3.org/2000/svg",
        )

    @property
    def x_span(self) -> np.ndarray:
        return np.array([self.x.low, self.x.high])

    def line(self, x: np.ndarray, y: np.ndarray, **attributes: object) -> Markup:
        given = {"fill": "none", "stroke_width": 2, "stroke_linejoin": "round", **attributes}
        return element("polyline", points=_points(self.x(x), self.y(y)), **given)

    def area(self, x: np.ndarray, low: np.ndarray, high: np.ndarray, **attributes: object) -> Markup:
        """What lies between two curves."""
        across, up = np.concatenate([x, x[::-1]]), np.concatenate([high, low[::-1]])
        return element("polygon", points=_points(self.x(across), self.y(up)), **attributes)

    def text(self, x: float, y: float, text: str, **attributes: object) -> Markup:
        return element("text", text, x=place(self.x(x)), y=place(self.y(y)), font_size=FONT, **attributes)


def place(value: np.ndarray | float) -> str:
    """A tenth of a pixel is enough, and short."""
    return f"{float(value):.1f}".removesuffix(".0")


def _points(x: np.ndarray, y: np.ndarray) -> str:
    return " ".join(f"{place(a)},{place(b)}" for a, b in zip(x, y, strict=True))


def _round_step(step: float) -> float:
    """The next 1, 2, 2.5 or 5 times a power of ten."""
    size = 10.0 ** math.floor(math.log10(step))
    return next(size * nice for nice in (1, 2, 2.5, 5, 10) if step <= size * nice * (1 + 1e-9))
