"""The spectrum of a fit as SVG, for reports and notebooks."""

from __future__ import annotations

import math

import numpy as np

from ..engines import Spectrum
from ..plots import ROUNDING
from .markup import Markup, element
from .numerals import number
from .svg import BLUE, GREY, VERMILLION, Axes, place

CROWD = 200  # places of a curve that the eye can tell apart


def picture(
    found: Spectrum, damping: float, *, tips: bool = False, width: int = 440, height: int = 300
) -> Markup | None:
    """Singular values of J and eigenvalues of Σ⁻¹; √λ, below which damping takes over, is marked.

    None where there is nothing to draw. With tips the places of the curve tell what they are.
    """
    d, eigenvalues = found
    if len(d) == 0 or not d[0] > 0:
        return None
    shown = d > ROUNDING * d[0]
    d, eigenvalues = d[shown], eigenvalues[shown]
    root = math.sqrt(damping)
    drawn = np.concatenate([d, eigenvalues[eigenvalues > 0], [root] if root > 0 else []])
    low, high = float(drawn.min()) / 1.3, float(drawn.max()) * 1.3
    kept = np.unique(np.geomspace(1, len(d), CROWD).round().astype(np.int64)) - 1
    index = kept + 1
    axes = Axes.over(
        (1.0, max(2.0, float(len(d)))), (low, high), "index", "value", log=True, width=width, height=height
    )
    damped = [
        axes.line(axes.x_span, np.full(2, root), stroke=GREY, stroke_width=1.5, stroke_dasharray="4 3"),
        axes.text(axes.x.low, root, "√λ", dx=4, dy=-5, fill="currentColor"),
    ]
    told = [f"singular value of J: {number(d[k])}\neigenvalue of Σ⁻¹: {number(eigenvalues[k])}" for k in kept]
    dots = [
        element("circle", cx=place(axes.x(k + 1)), cy=place(axes.y(d[k])), r=3.5, data_tip=f"number {k + 1:,}\n{text}")
        for k, text in zip(kept, told, strict=True)
    ]
    return axes.picture(
        *(damped if root > 0 else []),
        axes.line(index, eigenvalues[kept], stroke=VERMILLION),
        axes.line(index, d[kept], stroke=BLUE),
        *([element("g", *dots, fill=BLUE, fill_opacity=0)] if tips else []),
        describe="Singular values of J and eigenvalues of Σ⁻¹",
    )
