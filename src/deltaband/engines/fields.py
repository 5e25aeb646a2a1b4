"""How the fields of an accumulator combine, declared once: merging, files and adding up over processes follow."""

import copy
from collections.abc import Callable
from dataclasses import Field, field
from typing import Any, Literal

import numpy as np
from torch import Tensor

Total = Callable[[np.ndarray], np.ndarray]  # an array -> its sum over several processes

LARGEST_NDIM = 4  # of an array in an accumulator that processes add up
BLOCK_COLUMNS = 256  # of a matrix that processes add up piece by piece


def reduced(how: Literal["sum", "max"], default: Any = None, *, upper_triangle: bool = False) -> Any:
    """Declare a field of an accumulator that merging adds up, or takes the larger of: numbers, or arrays and None.

    Args:
        how: "sum" or "max".
        default: The value before the first row.
        upper_triangle: Whether only the upper triangle of a square matrix counts, so that only that is sent to others.

    Returns:
        What stands behind `=` in the class: a dataclass field.
    """
    return field(default=default, metadata={"combine": how, "upper_triangle": upper_triangle})


def shared(default: Any = None, *, check: bool = True) -> Any:
    """Declare a field that all parts of the rows have in common.

    Args:
        default: The value before the first row.
        check: Whether merging refuses where it differs.

    Returns:
        The dataclass field.
    """
    return field(default=default, metadata={"combine": "shared", "check": check})


def concatenated() -> Any:
    """Declare a list that merging appends to.

    Returns:
        The dataclass field.
    """
    return field(default_factory=list, metadata={"combine": "concatenate"})


def private(default: Any = None) -> Any:
    """Declare a field that is saved, and that merging leaves to an overridden `merge`.

    Args:
        default: The value before the first row.

    Returns:
        The dataclass field.
    """
    return field(default=default, metadata={"combine": "private"})


def merged(declared: Field[Any], mine: Any, theirs: Any) -> Any:
    """Return what a field of two accumulators becomes; an array of the first is used again."""
    if mine is None or theirs is None:
        return copied(theirs) if mine is None else mine
    if declared.metadata["combine"] == "max":
        return np.maximum(mine, theirs) if isinstance(mine, np.ndarray) else max(mine, theirs)
    mine += theirs  # an array in place: it may be most of the memory
    return mine


def copied(value: Any) -> Any:
    """Copy arrays, also inside lists and dictionaries; rows are never changed and stay shared."""
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, list):
        return [copied(each) for each in value]
    return copy.deepcopy(value) if isinstance(value, np.ndarray | Tensor) else value


def summed(declared: Field[Any], value: Any, total: Total) -> Any:
    """Return the sum of a field over all processes: a number, or an array, which those without rows have not."""
    if isinstance(declared.default, int | float):
        return type(declared.default)(total(np.array([value], dtype=np.float64))[0])
    array, upper_triangle = value, declared.metadata["upper_triangle"]
    shape = () if array is None else array.shape
    about = [array is not None, len(shape), *shape, *[0] * (LARGEST_NDIM - len(shape))]
    count, *sizes = map(int, total(np.array(about, dtype=np.float64)))
    if count == 0:
        return None
    if array is None:
        ndim, *sizes = (size // count for size in sizes)
        array = np.zeros(sizes[:ndim], order="F" if upper_triangle else "C")
    if not upper_triangle:
        return total(array)
    for i in range(0, len(array), BLOCK_COLUMNS):  # half of the matrix is not sent
        j = min(i + BLOCK_COLUMNS, len(array))
        array[:j, i:j] = total(array[:j, i:j])
    return array
