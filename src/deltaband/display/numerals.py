"""Numbers as people read them."""

from __future__ import annotations

import math

import numpy as np

MINUS, INFINITY = "−", "∞"
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float, digits: int = 4) -> str:
    """With so many digits that count: 0.01235, 12.35, 12,346; very large and very small ones as 1.235e+12."""
    if not math.isfinite(value):
        return _not_finite(value)
    size = math.floor(math.log10(abs(value))) if value else 0
    if not -4 <= size < 9:
        return f"{value:.{digits - 1}e}".replace("-", MINUS)
    return fixed(value, max(digits - 1 - size, 0))


def fixed(value: float, decimals: int) -> str:
    """With so many decimals, for numbers that stand below each other."""
    if not math.isfinite(value):
        return _not_finite(value)
    text = f"{value:,.{decimals}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text.replace("-", MINUS)


def decimals(values: np.ndarray, digits: int = 3) -> int | None:
    """How many decimals show the typical of these numbers with so many digits; None where `fixed` is not for them."""
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
    if len(sizes) == 0:
        return digits - 1
    typical = math.floor(math.log10(float(np.median(sizes))))
    return max(digits - 1 - typical, 0) if -5 <= typical < 9 and sizes.max() < 1e12 else None


def percent(share: float, digits: int = 1) -> str:
    """A share as 95.0 %; 100 % and 0 % only where it is all or nothing."""
    text = f"{100 * share:.{digits}f}"
    if 0 < share < 1 and float(text) in (0.0, 100.0):
        edge = 10.0**-digits
        return f"< {edge:g} %" if share < 0.5 else f"> {100 - edge:.{digits}f} %"
    return f"{text} %"


def level_name(level: float) -> str:
    """A level as it was asked for: 95, 99.9, 68.27."""
    return f"{100 * level:.10g}"


def power_of_ten(exponent: int) -> str:
    return {0: "1", 1: "10"}.get(exponent, "10" + str(exponent).translate(SUPERSCRIPT))


def _not_finite(value: float) -> str:
    return "–" if math.isnan(value) else INFINITY if value > 0 else MINUS + INFINITY
