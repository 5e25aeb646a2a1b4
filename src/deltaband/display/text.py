"""Numbers as readers expect them."""

from __future__ import annotations

import math

import numpy as np

MINUS, INFINITY = "−", "∞"


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


def decimals(values: np.ndarray, digits: int = 3) -> int | None:
    """Return how many decimals show a typical value with this many digits; None where `fixed` is unsuitable."""
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
    if len(sizes) == 0:
        return digits - 1
    exponent = math.floor(math.log10(float(np.median(sizes))))
    return max(digits - 1 - exponent, 0) if -5 <= exponent < 9 and sizes.max() < 1e12 else None


def percent(share: float, digits: int = 1) -> str:
    """Format a share as 95.0 %; 100 % and 0 % appear only where the share is exactly 1 or 0."""
    text = f"{100 * share:.{digits}f}"
    if 0 < share < 1 and float(text) in (0.0, 100.0):
        edge = 10.0**-digits
        return f"< {edge:g} %" if share < 0.5 else f"> {100 - edge:.{digits}f} %"
    return f"{text} %"
