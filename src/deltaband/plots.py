"""Pictures of intervals. Every function draws on `ax`, or on a figure of its own, and returns the Axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .engines import Spectrum
from .metrics import coverage
from .results import Intervals, to_numpy
from .validation import check_index

if TYPE_CHECKING:  # matplotlib is an extra, loaded when there is something to draw
    from matplotlib.axes import Axes

# From the palette of Okabe and Ito, which the colour-blind can tell apart.
BLUE, VERMILLION = "#0072B2", "#D55E00"
INK, GREY = "#222222", "#8A8F94"
ROUNDING = 1e-6  # a singular value below this part of the largest is mostly rounding error
LIGHTEST, DARKEST = 0.2, 0.55  # how much of the colour is in the widest and in the narrowest of nested bands


def band(
    x: Any,  # (n,) or (n, 1), in any order
    intervals: Intervals,
    *,
    data: tuple[Any, Any] | None = None,
    targets: Any = None,
    truth: tuple[Any, Any] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """The prediction and its interval over one input; several levels are nested, from light to dark.

    `data=(x, y)` are the training points, `targets` those of `x`, `truth=(x, y)` is a curve to compare with.
    """
    inputs, mean = _column(x, "x"), _column(intervals.mean, "mean")
    if len(inputs) != len(mean):
        raise ValueError(f"x and intervals must have as many rows: {len(inputs)} inputs, {len(mean)} intervals")
    order = np.argsort(inputs, kind="stable")
    lower, upper = (to_numpy(bound).reshape(len(mean), -1)[order] for bound in (intervals.lower, intervals.upper))
    names = _names(intervals, lower.shape[1])
    outside_in = np.argsort(-(upper - lower).mean(axis=0), kind="stable")
    shades = np.linspace(LIGHTEST, DARKEST, len(names)) if len(names) > 1 else [LIGHTEST]

    ax = _axes(ax)
    for j, shade in zip(outside_in, shades, strict=True):
        ax.fill_between(
            inputs[order], lower[:, j], upper[:, j], color=_tint(BLUE, shade), linewidth=0, label=f"{names[j]} interval"
        )
    if truth is not None:
        ax.plot(*_curve(*truth), color=INK, linewidth=1.5, linestyle=(0, (4, 2)), label="truth")
    ax.plot(inputs[order], mean[order], color=BLUE, linewidth=2, label="prediction")
    if data is not None:
        data_x, data_y = (_column(part, "data") for part in data)
        ax.scatter(data_x, data_y, s=16, color=INK, alpha=0.75, linewidths=0, zorder=3, label="training data")
    if targets is not None:
        y = _column(targets, "targets")
        if len(y) != len(inputs):
            raise ValueError(f"x and targets must have as many rows: {len(inputs)} inputs, {len(y)} targets")
        ax.scatter(inputs, y, s=16, color=VERMILLION, alpha=0.75, linewidths=0, zorder=3, label="targets")
    ax.margins(x=0)
    ax.legend(frameon=False)
    return ax


def fitted(
    intervals: Intervals,
    x: Any,
    y: Any = None,
    *,
    output: int | None = None,
    data: tuple[Any, Any] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """`band` where `x` is one feature; else, where there are targets, `sorted_by_width`. Of several outputs one is
    chosen."""
    m = 1 if np.ndim(intervals.mean) == 1 else np.shape(intervals.mean)[1]
    if output is None and m > 1:
        raise ValueError(f"a picture shows one output, and there are {m}: choose one with output=0 to {m - 1}")
    if output is not None:
        check_index(output, "output", m)
        if y is not None and np.ndim(y) == 2 and np.shape(y)[1] == m:
            y = y[:, output]
        if data is not None and np.ndim(data[1]) == 2 and np.shape(data[1])[1] == m:
            data = (data[0], data[1][:, output])
    if np.ndim(intervals.mean) == 2:
        mean, lower, upper = (part[:, output or 0] for part in intervals)
        intervals = Intervals(mean, lower, upper, intervals.level)
    shape = getattr(x, "shape", ())
    if len(shape) in (1, 2) and shape[1:] in ((), (1,)):
        return band(x, intervals, data=data, targets=y, ax=ax)
    if y is None:
        raise ValueError(
            "a picture over the input needs an x of one feature, (n,) or (n, 1)"
            + (f", got {tuple(shape)}" if shape else "")
            + "; give the targets y for a picture of the intervals sorted by width"
        )
    if data is not None:
        raise ValueError("data goes with a picture over an input of one feature: leave it out")
    return sorted_by_width(y, intervals, ax=ax)


def sorted_by_width(y: Any, intervals: Intervals, *, ax: Axes | None = None) -> Axes:
    """Intervals and targets, less the prediction, from the narrowest interval to the widest."""
    share = coverage(y, intervals)
    if isinstance(share, np.ndarray):
        raise ValueError("sorted_by_width draws one level: call predict with a single level")
    targets, mean, lower, upper = (_column(part, "y") for part in (y, *intervals))
    order = np.argsort(upper - lower, kind="stable")
    targets, mean, lower, upper = targets[order], mean[order], lower[order], upper[order]
    position = np.arange(1, len(targets) + 1)
    covered = (lower <= targets) & (targets <= upper)
    (name,) = _names(intervals, 1)

    ax = _axes(ax)
    ax.fill_between(
        position,
        lower - mean,
        upper - mean,
        step="mid",
        color=_tint(BLUE, LIGHTEST),
        linewidth=0,
        label=f"{name} interval",
    )
    ax.axhline(0, color=BLUE, linewidth=1)
    for rows, colour, size, what in ((covered, GREY, 18, "covered"), (~covered, VERMILLION, 34, "missed")):
        label = f"{what}: {rows.sum()}"
        ax.scatter(position[rows], (targets - mean)[rows], s=size, color=colour, linewidths=0, zorder=3, label=label)
    nominal = f" (nominal {name})" if intervals.level is not None else ""
    ax.set_title(f"{covered.sum()} of {len(targets)} covered: {100 * share:.1f} %{nominal}")
    ax.set_xlabel("rows, sorted by the width of their interval")
    ax.set_ylabel("target − prediction")
    ax.margins(x=0.01, y=0.15)  # the legend goes above the points
    ax.legend(frameon=False, ncols=3, loc="upper left")
    return ax


def spectra(approximate: Spectrum, exact: Spectrum | None = None, *, ax: Axes | None = None) -> Axes:
    """Figure 1 of the paper: singular values of J and eigenvalues of Σ⁻¹, exact dotted, approximate solid.

    A sketch may leave out the largest singular values: its lines begin at the index of the exact singular value that
    is nearest to its first.
    """
    if len(approximate.singular_values) == 0:
        raise ValueError("the spectrum is empty: the sketch holds no directions")
    curves = [(approximate, 1, "-", "")]
    if exact is not None:
        first = 1 + int(np.abs(exact.singular_values - approximate.singular_values[0]).argmin())
        curves = [(exact, 1, ":", ", exact"), (approximate, first, "-", ", approximate")]

    ax = _axes(ax)
    for spectrum, start, style, suffix in curves:
        d, eigenvalues = spectrum
        shown = d > ROUNDING * d[0]
        index = np.arange(start, start + len(d))[shown]
        for values, colour, name in (
            (d, BLUE, "singular values of J"),
            (eigenvalues, VERMILLION, "eigenvalues of Σ⁻¹"),
        ):
            ax.plot(index, values[shown], color=colour, linestyle=style, linewidth=2, label=name + suffix)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("index")
    ax.legend(frameon=False)
    return ax


def _axes(ax: Axes | None) -> Axes:
    if ax is None:
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError("pictures need matplotlib: pip install 'deltaband[plots]'") from error
        _, ax = plt.subplots(figsize=(7, 4), layout="constrained")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _names(intervals: Intervals, count: int) -> list[str]:
    """Levels as text: "95 %"."""
    levels = np.atleast_1d(np.asarray(intervals.level, dtype=object))
    if len(levels) != count:
        raise ValueError(f"{len(levels)} levels do not go with bounds of {count} columns")
    return ["prediction" if level is None else f"{100 * level:g} %" for level in levels]


def _curve(x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    x, y = _column(x, "truth"), _column(y, "truth")
    if len(x) != len(y):
        raise ValueError(f"truth must be as many x as y, got {len(x)} and {len(y)}")
    order = np.argsort(x, kind="stable")
    return x[order], y[order]


def _column(values: Any, name: str) -> np.ndarray:  # (n,) or (n, 1) -> (n,)
    array = to_numpy(values)
    if array.ndim == 0 or array.size == 0 or array.size != len(array):
        raise ValueError(f"{name} must have shape (n,) or (n, 1) with at least one row, got {array.shape}")
    return array.reshape(-1)


def _tint(colour: str, strength: float) -> tuple[float, float, float]:
    """The colour mixed with white. Transparent bands would darken each other, and let grid lines shine through."""
    red, green, blue = (1 - strength * (1 - int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5))
    return red, green, blue
