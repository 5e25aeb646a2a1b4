"""Numbers as readers expect them."""

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
