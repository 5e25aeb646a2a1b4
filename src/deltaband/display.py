"""Numbers as readers expect them, and HTML and SVG: pictures with axes, for the report and for notebooks."""

import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import ArrayLike

MINUS, INFINITY = "−", "∞"
# The colours of every picture, also of matplotlib figures. Blue and vermillion are from the palette of Okabe and Ito,
# which colour-blind readers can distinguish; `band` is blue with an opacity of 20 %.
LIGHT = {"blue": "#0072b2", "vermillion": "#d55e00", "grey": "#8a8f94", "band": "#0072b233"}
DARK = {"blue": "#56b4e9", "vermillion": "#ff8c42", "grey": "#8d959d", "band": "#56b4e93d"}
BLUE, VERMILLION, GREY, BAND = (f"var(--{name}, {LIGHT[name]})" for name in ("blue", "vermillion", "grey", "band"))
WIDTH = 440  # pixels of a picture
SMALL_HEIGHT, SMALL_STYLE = 190, f"max-width: {WIDTH}px"  # of pictures in notebooks, and of the elements around them
DASHED = {"stroke": GREY, "stroke_width": 1.5, "stroke_dasharray": "4 3"}
FONT_SIZE = 12  # pixels
DIGIT_WIDTH = 6.6  # pixels, approximately, at FONT_SIZE
CURVE_POINTS = 200  # the most points of a curve that readers can distinguish
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
VOID_ELEMENTS = {"circle", "line", "polygon", "polyline"}  # elements without content
MIN_RELATIVE_SINGULAR_VALUE = 1e-6  # of the largest; smaller singular values are mostly rounding error


def number(value: float, digits: int = 4) -> str:
    """Format with this many significant digits: 0.01235, 12.35, 12,346; very large and very small as 1.235e+12."""
    exponent = math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0
    if not -4 <= exponent < 9:
        return f"{value:.{digits - 1}e}".replace("-", MINUS)
    return fixed(value, max(digits - 1 - exponent, 0))


def fixed(value: float, decimals: int | None) -> str:
    """Format with this many decimals, for numbers in one column of a table; with None as `number` does."""
    if decimals is None:
        return number(value)
    if not math.isfinite(value):
        return "–" if math.isnan(value) else INFINITY if value > 0 else MINUS + INFINITY
    text = f"{value:,.{decimals}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text.replace("-", MINUS)


def decimals(values: np.ndarray) -> int | None:
    """Return how many decimals show a typical value with three digits; None where `fixed` is unsuitable."""
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
    if len(sizes) == 0:
        return 2
    exponent = math.floor(math.log10(float(np.median(sizes))))
    return max(2 - exponent, 0) if -5 <= exponent < 9 and sizes.max() < 1e12 else None


def percent(share: float) -> str:
    """Format a share as 95.0 %; 100 % and 0 % appear only where the share is exactly 1 or 0."""
    text = f"{100 * share:.1f} %"
    return {"0.0 %": "< 0.1 %", "100.0 %": "> 99.9 %"}.get(text, text) if 0 < share < 1 else text


class Markup(str):
    """Text that is markup already. `element` and Jinja2 leave it as it is and escape all other text."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


def element(name: str, *children: str, **attributes: object) -> Markup:
    """Return `<name key="value">children</name>`, escaped; class_ stands for class, data_row for data-row."""
    given = (f'{key.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items())
    opening = " ".join([name, *given])
    if name in VOID_ELEMENTS:
        return Markup(f"<{opening}/>")
    content = "".join(child if isinstance(child, Markup) else escape(child) for child in children)
    return Markup(f"<{opening}>{content}</{name}>")


def escape(text: str) -> Markup:
    """Escape text for HTML; lone surrogates, which no file can hold, become question marks."""
    return Markup(html.escape(text.encode("utf-8", "replace").decode("utf-8")))


def text_table(title: str, cells: Sequence[Sequence[str]], below: Sequence[str] = ()) -> str:
    """Return a header and rows of texts as aligned columns, indented below a title."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in cells]
    return "\n  ".join([title, *lines, *below])


def html_table(cells: Sequence[Sequence[str]]) -> Markup:
    """Return a header and rows of texts as an HTML table."""
    header, *rows = cells
    head = element("tr", *(element("th", name) for name in header))
    body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    return element("table", element("thead", head), element("tbody", *body))


@dataclass(frozen=True)
class Scale:
    """A map from the numbers `low` to `high` to the pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, values: ArrayLike) -> np.ndarray:
        """Return the pixels of these numbers; numbers outside the limits are put at the edge."""
        limits = np.array([self.low, self.high])
        inside = np.clip(np.asarray(values, dtype=np.float64), *limits)
        if self.log:
            inside, limits = np.log10(inside), np.log10(limits)
        return self.start + (inside - limits[0]) / (limits[1] - limits[0]) * (self.end - self.start)

    def ticks(self, count: int) -> list[tuple[float, str]]:
        """Return about this many round numbers within the limits, each with its text."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            exponents = range(first, last + 1, max(1, math.ceil((last - first + 1) / count)))
            return [(10.0**k, {0: "1", 1: "10"}.get(k, "10" + str(k).translate(SUPERSCRIPTS))) for k in exponents]
        rough = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * nice for nice in (1, 2, 2.5, 5, 10) if rough <= power * nice * (1 + 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [k * step for k in range(first, last + 1)]
        largest = max(map(abs, values), default=0.0)
        if largest >= 1e7 or (0 < largest < 1e-4):
            return [(value, f"{value:.3g}".replace("-", MINUS)) for value in values]
        places = next(k for k in itertools.count() if math.isclose(round(step, k), step))
        return [(value, fixed(value, places)) for value in values]


def axis_limits(values: np.ndarray, *, margin: float = 0.05, zero: bool = False) -> tuple[float, float]:
    """Return the limits of an axis that shows these numbers, with a margin; with `zero` the axis begins at 0."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if zero:
        low = min(low, 0.0)
    span, size = high - low, max(abs(low), abs(high))
    if span <= 1e-9 * size or size < 1e-300:  # equal up to rounding, or too small to add a margin to
        span = 1.0 if size < 1e-300 else abs(high)
    return (low if zero and low == 0.0 else low - margin * span), high + margin * span


@dataclass
class Axes:
    """A picture with two axes. `x` and `y` place its marks, and `picture` puts everything together."""

    x_limits: tuple[float, float]
    y_limits: tuple[float, float]
    x_label: str
    y_label: str  # above its axis, where it is horizontal
    _: KW_ONLY
    height: int = 300
    log: bool = False
    ticks: Sequence[tuple[float, str]] | None = None  # of both axes; by default round numbers

    def __post_init__(self) -> None:
        self.x_span = np.array(self.x_limits)
        self.y = Scale(*self.y_limits, self.height - 40, 28, self.log)
        self.y_ticks = self.y.ticks(max(3, self.height // 50)) if self.ticks is None else self.ticks
        left = 10 + DIGIT_WIDTH * max((len(text) for _, text in self.y_ticks), default=0)
        self.x = Scale(*self.x_limits, left, WIDTH - 20, self.log)
        self.x_ticks = self.x.ticks(max(2, WIDTH // 90)) if self.ticks is None else self.ticks

    def picture(self, *marks: str, describe: str) -> Markup:
        """Return the SVG element of the axes and these marks; `describe` is for readers who cannot see it."""
        left, right, bottom = self.x.start, self.x.end, self.y.start
        grid, words = [], []
        for value, text in self.y_ticks:
            y = pixel(self.y(value))
            grid.append(element("line", x1=pixel(left), x2=pixel(right), y1=y, y2=y))
            words.append(element("text", text, x=pixel(left - 6), y=y, dy="0.35em", text_anchor="end"))
        for value, text in self.x_ticks:
            x = pixel(self.x(value))
            grid.append(element("line", x1=x, x2=x, y1=pixel(bottom), y2=pixel(bottom + 4)))
            words.append(element("text", text, x=x, y=pixel(bottom + 17), text_anchor="middle"))
        middle = pixel((left + right) / 2)
        words.append(element("text", self.x_label, x=middle, y=self.height - 6, text_anchor="middle"))
        words.append(element("text", self.y_label, x=2, y=12))
        ink = {"fill": "currentColor", "fill_opacity": 0.75, "font_size": FONT_SIZE}
        lines = element("g", *grid, stroke="currentColor", stroke_opacity=0.16)
        about = {"role": "img", "aria_label": describe, "xmlns": "http://www.w3.org/2000/svg"}
        box = f"0 0 {WIDTH} {self.height}"
        return element("svg", lines, *marks, element("g", *words, **ink), viewBox=box, **about)

    def line(self, x: np.ndarray, y: np.ndarray, **attributes: object) -> Markup:
        attributes = {"fill": "none", "stroke_width": 2, "stroke_linejoin": "round", **attributes}
        return element("polyline", points=self._points(x, y), **attributes)

    def area(self, x: np.ndarray, low: np.ndarray, high: np.ndarray, **attributes: object) -> Markup:
        outline = self._points(np.concatenate([x, x[::-1]]), np.concatenate([high, low[::-1]]))
        return element("polygon", points=outline, **attributes)

    def dot(self, x: float, y: float, radius: float, **attributes: object) -> Markup:
        return element("circle", cx=pixel(self.x(x)), cy=pixel(self.y(y)), r=radius, **attributes)

    def _points(self, x: np.ndarray, y: np.ndarray) -> str:
        return " ".join(f"{pixel(a)},{pixel(b)}" for a, b in zip(self.x(x), self.y(y), strict=True))


def spectrum_picture(
    d: np.ndarray, eigenvalues: np.ndarray, damping: float, *, tips: bool = False, height: int = 300
) -> Markup | None:
    """Draw singular values d of J and eigenvalues of Σ⁻¹, with a line at √λ; None where there is nothing to draw."""
    d, eigenvalues = resolved_spectrum(d, eigenvalues)
    if len(d) == 0:
        return None
    root = math.sqrt(damping)
    shown = np.concatenate([d, eigenvalues[eigenvalues > 0], [root] if root > 0 else []])
    y_limits = float(shown.min()) / 1.3, float(shown.max()) * 1.3
    axes = Axes((1.0, max(2.0, len(d))), y_limits, "index", "value", log=True, height=height)
    marks = []
    if root > 0:
        place = {"x": pixel(axes.x.start), "y": pixel(axes.y(root)), "dx": 4, "dy": -5}
        label = element("text", "√λ", font_size=FONT_SIZE, fill="currentColor", **place)
        marks += [axes.line(axes.x_span, np.full(2, root), **DASHED), label]
    kept = np.unique(np.geomspace(1, len(d), CURVE_POINTS).round().astype(np.int64)) - 1
    marks += [axes.line(kept + 1, values[kept], stroke=hue) for values, hue in ((eigenvalues, VERMILLION), (d, BLUE))]
    if tips:  # for the script of the report
        text = "number {:,}\nsingular value of J: {}\neigenvalue of Σ⁻¹: {}"
        tip = {k: text.format(k + 1, number(d[k]), number(eigenvalues[k])) for k in kept}
        dots = (axes.dot(k + 1, d[k], 3.5, data_tip=tip[k]) for k in kept)
        marks.append(element("g", *dots, fill=BLUE, fill_opacity=0))
    return axes.picture(*marks, describe="Singular values of J and eigenvalues of Σ⁻¹")


def resolved_spectrum(d: np.ndarray, eigenvalues: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    kept = d > MIN_RELATIVE_SINGULAR_VALUE * d[:1].sum()
    return d[kept], eigenvalues[kept]


def evenly_spaced(values: np.ndarray, count: int) -> np.ndarray:
    """Return at most this many of the values, evenly spaced, the first and the last among them."""
    return values[np.linspace(0, len(values) - 1, min(len(values), count)).round().astype(np.int64)]


def pixel(value: np.ndarray | float) -> str:
    """Format a coordinate with a precision of a tenth of a pixel, which keeps pages small."""
    return f"{float(value):.1f}".removesuffix(".0")
