"""The pictures of the report. Marks with a tooltip carry its text, or the number of their row."""

from collections.abc import Sequence

import numpy as np

from .. import display
from ..display import Axes, Markup, element, percent
from ..online import Monitor
from .evaluation import CONFIDENCE, Coverage, OutputEvaluation

MIN_ROWS_FOR_OUTLIERS = 100


def calibration_curve(
    curve: Sequence[Coverage],
    asked: Coverage | None,
    labels: tuple[str, str] = ("level asked for", "rows covered"),
    words: tuple[str, str] = ("asked for", "covered"),
) -> Markup:
    """Draw the observed coverage over the level, and the range that chance explains."""
    ticks = [(share, f"{100 * share:.0f} %") for share in (0, 0.2, 0.4, 0.6, 0.8, 1)]
    axes = Axes((0, 1), (0, 1), *labels, ticks=ticks)
    levels = np.array([0.0, *(each.level for each in curve), 1.0])
    low, high = np.array([(0.0, 0.0), *(each.chance_range for each in curve), (1.0, 1.0)]).T

    def tip(each: Coverage) -> str:
        low, high = map(percent, each.chance_range)
        asked_for = f"{100 * each.level:.4g} % {words[0]}: {percent(each.share)} {words[1]}"
        return f"{asked_for}\n{CONFIDENCE:.0%} range by chance: {low} to {high}"

    dots = (axes.dot(each.level, each.share, 6 if each is asked else 3.5, data_tip=tip(each)) for each in curve)
    return axes.picture(
        axes.area(levels, low, high, fill=display.BAND),
        axes.line(axes.x_span, axes.x_span, **display.DASHED),
        axes.line(levels[1:-1], np.array([each.share for each in curve]), stroke=display.BLUE),
        element("g", *dots, fill=display.BLUE),
        describe=f"Calibration curve: {labels[1]} over {labels[0]}",
    )


def sorted_by_width(output: OutputEvaluation, drawn: np.ndarray) -> tuple[Markup, bool]:
    """Draw intervals and targets relative to the prediction, sorted by width; return whether dots are at the edge."""
    order = np.argsort(output.width, kind="stable")
    position = 1 + np.argsort(order)
    mean, lower, upper = output.intervals
    curve = display.evenly_spaced(order[np.isfinite(output.width[order])], display.CURVE_POINTS)
    low, high = (lower - mean)[curve], (upper - mean)[curve]
    error = (output.y - mean)[drawn]
    shown = np.concatenate([low, high, error])
    inliers = without_outliers(shown)
    labels = "rows, from the narrowest interval to the widest", "target − prediction"
    axes = Axes(display.axis_limits(np.array([1.0, len(order)]), margin=0.02), display.axis_limits(inliers), *labels)
    picture = axes.picture(
        axes.area(position[curve], low, high, fill=display.BAND),
        axes.line(axes.x_span, np.zeros(2), stroke=display.BLUE, stroke_width=1),
        *_row_dots(axes, position[drawn], error, drawn, output),
        describe="Targets less predictions and their intervals, sorted by width",
    )
    return picture, len(inliers) < len(shown)


def width_against_error(output: OutputEvaluation, drawn: np.ndarray) -> tuple[Markup, bool]:
    """Draw absolute errors over widths, with a line at half the width, and return whether dots are at the edge."""
    drawn = drawn[np.isfinite(output.width[drawn])]
    error, width = np.abs(output.y - output.intervals.mean)[drawn], output.width[drawn]
    wide, high = without_outliers(width), without_outliers(error)
    constant = len(drawn) > 0 and np.ptp(width) <= 1e-5 * width.max()
    limits = display.axis_limits(wide, margin=0.04, zero=constant), display.axis_limits(high, zero=True)
    axes = Axes(*limits, "width of the interval", "|target − prediction|")
    x = np.clip(axes.x_span, 2 * axes.y.low, 2 * axes.y.high)  # the line ends where the picture does
    picture = axes.picture(
        axes.line(x, x / 2, **display.DASHED),
        *_row_dots(axes, width, error, drawn, output),
        describe="Absolute errors over the width of the interval",
    )
    return picture, min(len(wide), len(high)) < len(drawn)


def martingales(monitor: Monitor) -> Markup:
    """Draw log₁₀ of the martingales of a monitor over the rows, with lines where they raise an alarm."""
    paths = {name: np.append(0.0, path) for name, path in monitor.martingales().items()}
    limits = np.log10(sorted({monitor.error_limit, monitor.leverage_limit}))
    shown, longest = np.concatenate([*paths.values(), limits]), max(map(len, paths.values()))
    labels = "rows with a target, or for the leverage rows", "log₁₀ of the martingale"
    axes = Axes((0.0, max(1.0, longest - 1.0)), display.axis_limits(shown), *labels)
    marks = [axes.line(axes.x_span, np.full(2, limit), **display.DASHED) for limit in limits]
    for name, path in paths.items():
        rows = display.evenly_spaced(np.arange(len(path)), display.CURVE_POINTS)
        stroke = display.VERMILLION if name == "leverage" else display.BLUE
        marks.append(axes.line(rows, path[rows], stroke=stroke))
    return axes.picture(*marks, describe="Martingales over the rows, and where they raise an alarm")


def without_outliers(values: np.ndarray) -> np.ndarray:
    """Return the values without the few that would flatten all others; these are drawn at the edge."""
    finite = values[np.isfinite(values)]
    if len(finite) < MIN_ROWS_FOR_OUTLIERS:
        return finite
    low, high = np.quantile(finite, [0.01, 0.99])
    return finite[(finite >= low - (high - low)) & (finite <= high + (high - low))]


def _row_dots(axes: Axes, x: np.ndarray, y: np.ndarray, drawn: np.ndarray, output: OutputEvaluation) -> list[Markup]:
    """Draw one dot per row, with misses larger and on top."""
    gone, number = output.missed[drawn], output.rows[drawn]
    grey, red = {"fill": display.GREY, "fill_opacity": 0.7}, {"fill": display.VERMILLION, "class_": "missed"}
    return [
        element("g", *(axes.dot(x[k], y[k], radius, data_row=number[k]) for k in np.flatnonzero(which)), **style)
        for which, radius, style in ((~gone, 2, grey), (gone, 3, red))
    ]
