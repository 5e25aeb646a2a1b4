"""Checks of arguments: one helper per kind, each raising an error that says what was expected and what came."""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np


def is_whole_number(value: Any) -> bool:
    """Return whether a value is an integer of Python or NumPy; True and False are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_int(value: Any, name: str, least: int = 1, end: int | None = None) -> int:
    """Return a whole number of at least `least` and below `end` as an int."""
    if not is_whole_number(value) or value < least or (end is not None and value >= end):
        expected = "a positive whole number" if least == 1 else f"a whole number ≥ {least}"
        if end is not None:
            expected = f"a whole number from {least} to {end - 1}"
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    return int(value)


def check_ints(values: Any, expected: str) -> tuple[int, ...]:
    """Return one whole number or several as a tuple; `expected` begins the error message."""
    numbers = tuple(values) if np.iterable(values) else (values,)
    if not numbers or not all(map(is_whole_number, numbers)):
        raise ValueError(f"{expected}, got {values!r}")
    return tuple(map(int, numbers))


def check_non_negative(value: Any, name: str) -> None:
    """Raise unless a value is None or a finite number of at least 0."""
    if value is not None and not _is_number(value):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if value is not None and not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} must be a finite number ≥ 0, got {value!r}")


def check_positive(value: Any, name: str, *, zero: bool = False) -> float:
    """Return a finite number above 0, or with `zero` of at least 0, as a float."""
    if not _is_number(value) or not (0 < float(value) < math.inf or (zero and value == 0)):
        raise ValueError(f"{name} must be a finite number {'≥' if zero else '>'} 0, got {value!r}")
    return float(value)


def check_share(value: Any, name: str, *, one: bool = False) -> float:
    """Return a number above 0 and below 1, or with `one` of at most 1, as a float."""
    if not _is_number(value) or not (0 < float(value) < 1 or (one and value == 1)):
        raise ValueError(f"{name} must be a number above 0 and {'of at most' if one else 'below'} 1, got {value!r}")
    return float(value)


def check_seconds(value: Any, name: str) -> float:
    if not _is_number(value) or not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} must be a number of seconds ≥ 0, got {value!r}")
    return float(value)


def check_memory(value: Any) -> None:
    if value is not None and not (_is_number(value) and 0 < float(value) < math.inf):
        raise ValueError(f"memory must be a positive number of bytes, got {value!r}")


def check_limits(memory: Any, time: Any) -> None:
    check_memory(memory)
    if time is not None and not (_is_number(time) and float(time) > 0):
        raise ValueError(f"time must be a positive number of seconds, got {time!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def check_bool(value: Any, name: str) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_choice(value: Any, name: str, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        *most, last = map(repr, choices)
        known = f"{', '.join(most)} or {last}" if most else last
        raise ValueError(f"{name} must be {known}, got {value!r}")


def check_callable(value: Any, name: str) -> None:
    """Raise unless a value is None or can be called."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a function, got {value!r}")


def describe(value: object) -> str:
    """Return the type of a value, with its length or shape, for an error message."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__ + (f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else "")
