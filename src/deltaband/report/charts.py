"""The pictures of a report. Marks that can be pointed at carry what is to be said, or the number of their row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..display.markup import Markup, element, together
from ..display.numerals import level_name, percent
from ..display.svg import BAND, BLUE, GREY, VERMILLION, Axes, limits, place
from .chance import SURE, Range
from .judged import Coverage, Judged

CROWD = 200  # places of a curve that the eye can tell apart


class Dots(NamedTuple):
    """A picture of rows, and whether some lie beyond its axes."""

    picture: Markup
    cut: bool


def calibration_curve(curve: Sequence[Coverage], asked: Coverage) -> Markup:
    """Observed coverage over the level, and where it should lie."""
    whole = [(share, f"{share:.0%}".replace("%", " %")) for share in (0, 0.2, 0.4, 0.6, 0.8, 1)]
    axes = Axes.over((0, 1), (0, 1), "level asked for", "rows covered", x_ticks=whole, y_ticks=whole)
    levels = np.array([0.0, *(each.level for each in curve), 1.0])
    low = np.array([0.0, *(each.expected.low for each in curve), 1.0])
    high = np.array([0.0, *(each.expected.high for each in curve), 1.0])
    shares = np.array([each.share for each in curve])
    dots = [
        element(
            "circle",
            cx=place(axes.x(each.level)),
            cy=place(axes.y(each.share)),
            r=6 if each is asked else 3.5,
            data_tip=f"{level_name(each.level)} % asked for: {percent(each.share)} covered\n"
            f"{SURE:.0%} range by chance: {percent(each.expected.low)} to {percent(each.expected.high)}",
        )
        for each in curve
    ]
    return axes.picture(
        axes.area(levels, low, high, fill=BAND),
        axes.line(np.array([0.0, 1.0]), np.array([0.0, 1.0]), stroke=GREY, stroke_width=1.5, stroke_dasharray="4 3"),
        axes.line(levels[1:-1], shares, stroke=BLUE),
        element("g", *dots, fill=BLUE),
        describe="Calibration curve: share of rows covered over the level asked for",
    )


def sorted_by_width(judged: Judged, drawn: np.ndarray) -> Dots:
    """Intervals less the prediction from the narrowest to the widest, targets within them, misses marked."""
    place_of = np.empty(len(judged.y), dtype=np.int64)
    order = np.argsort(judged.width, kind="stable")
    place_of[order] = np.arange(1, len(order) + 1)
    mean, lower, upper = judged.intervals
    finite = order[np.isfinite(judged.width[order])]
    curve = evenly(finite, CROWD)
    error = judged.y - mean
    bounds = np.concatenate([(lower - mean)[curve], (upper - mean)[curve], error[drawn]])
    bulk = within_the_bulk(bounds)
    axes = Axes.over(
        limits(np.array([1.0, len(order)]), room=0.02),
        limits(bulk),
        "rows, from the narrowest interval to the widest",
        "target − prediction",
    )
    picture = axes.picture(
        axes.area(place_of[curve], (lower - mean)[curve], (upper - mean)[curve], fill=BAND),
        axes.line(axes.x_span, np.zeros(2), stroke=BLUE, stroke_width=1),
        _rows(axes, place_of[drawn], error[drawn], drawn, judged.missed),
        describe="Targets less predictions and their intervals, sorted by width",
    )
    return Dots(picture, len(bulk) < len(bounds))


def width_against_error(judged: Judged, drawn: np.ndarray) -> Dots:
    """What lies above the line is missed, where intervals are symmetric."""
    error, width = np.abs(judged.y - judged.intervals.mean), judged.width
    drawn = drawn[np.isfinite(width[drawn])]
    wide, high = within_the_bulk(width[drawn]), within_the_bulk(error[drawn])
    constant = len(drawn) > 0 and np.ptp(width[drawn]) <= 1e-5 * width[drawn].max()
    axes = Axes.over(
        limits(wide, room=0.04, zero=constant),
        limits(high, zero=True),
        "width of the interval",
        "|target − prediction|",
    )
    across = np.clip(axes.x_span, 2 * axes.y.low, 2 * axes.y.high)  # the line ends where the picture does
    picture = axes.picture(
        axes.line(across, across / 2, stroke=GREY, stroke_width=1.5, stroke_dasharray="4 3"),
        _rows(axes, width[drawn], error[drawn], drawn, judged.missed),
        describe="Absolute errors over the width of the interval",
    )
    return Dots(picture, min(len(wide), len(high)) < len(drawn))


def whisker(share: float, likely: Range, level: float, low: float, off: bool) -> Markup:
    """One coverage with its uncertainty, beside the level, on a line from `low` to 1."""
    width, height = 110, 18

    def at(value: float) -> str:
        return place(6 + (max(value, low) - low) / (1 - low) * (width - 12))

    colour = VERMILLION if off else BLUE
    middle = height / 2
    return element(
        "svg",
        element("line", x1=at(level), x2=at(level), y1=0, y2=height, stroke=GREY, stroke_dasharray="3 2"),
        element(
            "line",
            x1=at(likely.low),
            x2=at(likely.high),
            y1=middle,
            y2=middle,
            stroke=colour,
            stroke_width=2,
            stroke_opacity=0.55,
        ),
        element("circle", cx=at(share), cy=middle, r=4, fill=colour),
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        aria_hidden="true",
    )


def evenly(rows: np.ndarray, most: int) -> np.ndarray:
    """So many of them, the first and the last included."""
    if len(rows) <= most:
        return rows
    return rows[np.linspace(0, len(rows) - 1, most).round().astype(np.int64)]


def within_the_bulk(values: np.ndarray) -> np.ndarray:
    """Without the few that would leave no room for all others; these are drawn at the edge."""
    finite = values[np.isfinite(values)]
    if len(finite) < 100:
        return finite
    low, high = np.quantile(finite, [0.01, 0.99])
    room = high - low
    return finite[(finite >= low - room) & (finite <= high + room)]


def _rows(axes: Axes, x: np.ndarray, y: np.ndarray, drawn: np.ndarray, missed: np.ndarray) -> Markup:
    """A dot a row, misses larger and on top."""
    across, up = axes.x(x), axes.y(y)

    def dots(which: np.ndarray, radius: float, **attributes: object) -> Markup:
        found = np.flatnonzero(which)
        circles = (element("circle", cx=place(across[k]), cy=place(up[k]), r=radius, data_row=drawn[k]) for k in found)
        return element("g", together(circles), **attributes)

    gone = missed[drawn]
    return together([dots(~gone, 2, fill=GREY, fill_opacity=0.7), dots(gone, 3, fill=VERMILLION, class_="missed")])
