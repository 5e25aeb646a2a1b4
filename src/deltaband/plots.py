"""Figures of intervals, drawn with matplotlib on the given Axes or on those of a new figure.

Colours follow the background of the Axes: `plt.style.use("dark_background")` gives figures for dark pages.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .display import DARK, LIGHT, resolved_spectrum
from .engines import Spectrum
from .metrics import coverage
from .results import Intervals, level_names, to_numpy
from .validation import check_int

if TYPE_CHECKING:  # matplotlib is an extra, loaded when a figure is drawn
    from matplotlib.axes import Axes

XY = tuple[Any, Any] | None

MIN_TINT, MAX_TINT = 0.2, 0.55  # the share of blue in the widest and in the narrowest of nested intervals


def band(
    x: Any, intervals: Intervals, *, data: XY = None, targets: Any = None, truth: XY = None, ax: Axes | None = None
) -> Axes:
    """Draw the prediction and its interval over one input; several levels are nested, from light to dark.

    Args:
        x: The inputs, of shape (n,) or (n, 1), in any order.
        intervals: The intervals of `x`, of one output.
        data: Training points `(x, y)` to add.
        targets: The targets of `x`, to add.
        truth: A curve `(x, y)` to compare with.
        ax: Axes to draw on; by default those of a new figure.

    Returns:
        The Axes.
    """
    inputs, mean = _columns(x=x, intervals=intervals.mean)
    order = np.argsort(inputs, kind="stable")
    lower, upper = (to_numpy(bound).reshape(len(mean), -1)[order] for bound in (intervals.lower, intervals.upper))
    names = _interval_names(intervals, lower.shape[1])
    widest_first = np.argsort(-(upper - lower).mean(axis=0), kind="stable")

    ax, colours = _axes(ax)
    for j, tint in zip(widest_first, np.linspace(MIN_TINT, MAX_TINT, len(names)), strict=True):
        colour = colours.tint(tint)
        ax.fill_between(inputs[order], lower[:, j], upper[:, j], color=colour, linewidth=0, label=names[j])
    if truth is not None:
        curve_x, curve_y = _columns(truth_x=truth[0], truth_y=truth[1])
        along = np.argsort(curve_x, kind="stable")
        ax.plot(curve_x[along], curve_y[along], color=colours.ink, linewidth=1.5, linestyle=(0, (4, 2)), label="truth")
    ax.plot(inputs[order], mean[order], color=colours.blue, linewidth=2, label="prediction")
    points: dict[str, Any] = {"s": 16, "alpha": 0.75, "linewidths": 0, "zorder": 3}
    if data is not None:
        ax.scatter(*_columns(data_x=data[0], data_y=data[1]), color=colours.ink, label="training data", **points)
    if targets is not None:
        ax.scatter(*_columns(x=x, targets=targets), color=colours.vermillion, label="targets", **points)
    ax.margins(x=0)
    ax.legend(frameon=False)
    return ax


def fitted(
    intervals: Intervals, x: Any, y: Any = None, *, output: int | None = None, data: XY = None, ax: Axes | None = None
) -> Axes:
    """Draw `band` where `x` is one feature, and `sorted_by_width` for other inputs.

    Args:
        intervals: The intervals of `x`.
        x: The inputs.
        y: The targets of `x`; required where `x` is not one feature.
        output: Which output to draw; required where there are several.
        data: Training points `(x, y)` to add to `band`.
        ax: As in `band`.

    Returns:
        The Axes.

    Raises:
        ValueError: If the arguments do not say what to draw.
    """
    m = math.prod(np.shape(intervals.mean)[1:])
    if output is None and m > 1:
        raise ValueError(f"a figure shows one output, and there are {m}: choose one with output=0 to {m - 1}")
    if output is not None:
        check_int(output, "output", 0, m)
        y = _of_output(y, output, m)
        data = None if data is None else (data[0], _of_output(data[1], output, m))
    if np.ndim(intervals.mean) > 1:
        axes = np.ndim(intervals.mean)
        flat = (to_numpy(part).reshape(len(part), m, *np.shape(part)[axes:]) for part in intervals)
        mean, lower, upper = (part[:, output or 0] for part in flat)
        intervals = Intervals(mean, lower, upper, intervals.level)
    shape = getattr(x, "shape", ())
    if len(shape) in (1, 2) and shape[1:] in ((), (1,)):
        return band(x, intervals, data=data, targets=y, ax=ax)
    if y is None:
        got = f", got {tuple(shape)}" if shape else ""
        advice = "give the targets y for a figure of the intervals sorted by width"
        raise ValueError(f"a figure over the input needs an x of one feature, (n,) or (n, 1){got}; {advice}")
    if data is not None:
        raise ValueError("data can only be drawn over an input of one feature: leave it out")
    return sorted_by_width(y, intervals, ax=ax)


def sorted_by_width(y: Any, intervals: Intervals, *, ax: Axes | None = None) -> Axes:
    """Draw intervals and targets relative to the prediction, from the narrowest interval to the widest.

    Args:
        y: The targets, of shape (n,) or (n, 1).
        intervals: The intervals of the same rows, of one output and one level.
        ax: As in `band`.

    Returns:
        The Axes; their title states the coverage.

    Raises:
        ValueError: If there are several levels.
    """
    share = coverage(y, intervals)
    if isinstance(share, np.ndarray):
        raise ValueError("sorted_by_width draws one level: call predict with a single level")
    targets, mean, lower, upper = _columns(y=y, prediction=intervals.mean, lower=intervals.lower, upper=intervals.upper)
    order = np.argsort(upper - lower, kind="stable")
    error, low, high = (part[order] for part in (targets - mean, lower - mean, upper - mean))
    covered = ((lower <= targets) & (targets <= upper))[order]
    position = np.arange(1, len(error) + 1)
    (name,) = _interval_names(intervals, 1)

    ax, colours = _axes(ax)
    ax.fill_between(position, low, high, step="mid", color=colours.tint(MIN_TINT), linewidth=0, label=name)
    ax.axhline(0, color=colours.blue, linewidth=1)
    for rows, colour, size, outcome in (
        (covered, colours.grey, 18, "covered"),
        (~covered, colours.vermillion, 34, "missed"),
    ):
        label = f"{outcome}: {rows.sum()}"
        ax.scatter(position[rows], error[rows], s=size, color=colour, linewidths=0, zorder=3, label=label)
    nominal = f" (nominal {name.removesuffix(' interval')})" if intervals.level is not None else ""
    ax.set_title(f"{covered.sum()} of {len(error)} covered: {100 * share:.1f} %{nominal}")
    ax.set(xlabel="rows, sorted by the width of their interval", ylabel="target − prediction")
    ax.margins(x=0.01, y=0.15)  # leaves room for the legend above the points
    ax.legend(frameon=False, ncols=3, loc="upper left")
    return ax


def spectra(approximate: Spectrum, exact: Spectrum | None = None, *, ax: Axes | None = None) -> Axes:
    """Draw singular values of J and eigenvalues of Σ⁻¹, exact dotted, approximate solid: Figure 1 of the paper.

    A sketch may leave out the largest singular values: its lines begin at the exact one nearest to its first.

    Args:
        approximate: The spectrum of a fit, from its method `spectrum`.
        exact: The spectrum of the exact engine, to compare with.
        ax: As in `band`.

    Returns:
        The Axes.

    Raises:
        ValueError: If the spectrum is empty.
    """
    if len(approximate.singular_values) == 0:
        raise ValueError("the spectrum is empty: the sketch holds no directions")
    curves = [(approximate, 1, "-", "")]
    if exact is not None:
        first = 1 + int(np.abs(exact.singular_values - approximate.singular_values[0]).argmin())
        curves = [(exact, 1, ":", ", exact"), (approximate, first, "-", ", approximate")]

    ax, colours = _axes(ax)
    for spectrum, start, style, suffix in curves:
        d, eigenvalues = resolved_spectrum(*spectrum)
        index = np.arange(start, start + len(d))
        ax.plot(index, d, color=colours.blue, linestyle=style, linewidth=2, label=f"singular values of J{suffix}")
        ax.plot(
            index,
            eigenvalues,
            color=colours.vermillion,
            linestyle=style,
            linewidth=2,
            label=f"eigenvalues of Σ⁻¹{suffix}",
        )
    ax.set(xscale="log", yscale="log", xlabel="index")
    ax.legend(frameon=False)
    return ax


class _Colours(NamedTuple):
    """The colours that can be read on a background."""

    blue: str
    vermillion: str
    grey: str
    ink: str
    background: np.ndarray

    def tint(self, strength: float) -> tuple[float, ...]:
        """Mix blue with the background. Transparent bands would add up, and let grid lines shine through."""
        blue = (int(self.blue[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return tuple(b + strength * (c - b) for b, c in zip(self.background, blue, strict=True))


def _axes(ax: Axes | None) -> tuple[Axes, _Colours]:
    if ax is None:
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError("figures need matplotlib: pip install 'deltaband[plots]'") from error
        _, ax = plt.subplots(figsize=(7, 4), layout="constrained")
    ax.spines[["top", "right"]].set_visible(False)
    facecolors = [np.array(each.get_facecolor()) for each in (ax, ax.figure)]  # red, green, blue, opacity
    background = next((colour[:3] for colour in facecolors if colour[3] > 0), np.ones(3))
    palette, ink = (DARK, "#e6e6e6") if background.mean() < 0.5 else (LIGHT, "#222222")
    return ax, _Colours(palette["blue"], palette["vermillion"], palette["grey"], ink, background)


def _of_output(values: Any, output: int, m: int) -> Any:  # (n, m) -> (n,)
    same = values is not None and np.ndim(values) > 1 and math.prod(np.shape(values)[1:]) == m
    return to_numpy(values).reshape(-1, m)[:, output] if same else values


def _interval_names(intervals: Intervals, n_levels: int) -> list[str]:
    return [f"{'prediction' if name is None else f'{name} %'} interval" for name in level_names(intervals, n_levels)]


def _columns(**given: Any) -> list[np.ndarray]:
    """Return the values, each of shape (n,) or (n, 1), as arrays (n,)."""
    arrays = {name: to_numpy(values) for name, values in given.items()}
    for name, array in arrays.items():
        if array.ndim == 0 or array.size == 0 or array.size != len(array):
            raise ValueError(f"{name} must have shape (n,) or (n, 1) with at least one row, got {array.shape}")
    lengths = [len(array) for array in arrays.values()]
    if len(set(lengths)) > 1:
        raise ValueError(f"{' and '.join(given)} must have as many rows, got {' and '.join(map(str, lengths))}")
    return [array.reshape(-1) for array in arrays.values()]
