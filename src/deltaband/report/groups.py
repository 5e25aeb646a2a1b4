"""Rows in groups, by the value that they have in a column."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..display.numerals import INFINITY, number
from .columns import MISSING, Column

FEW = 8  # different numbers that are shown one by one
MOST = 10  # groups of one column; the rarest categories share the last
PARTS = 5  # of a column of many different numbers


@dataclass(frozen=True)
class Group:
    name: str
    rows: np.ndarray  # (k,) indices


def by_value(column: Column) -> list[Group]:
    """Numbers in parts of as many rows, from small to large; text, and few different numbers, value by value."""
    if column.is_text:
        return _categories(column)
    values = column.values
    infinite, missing = np.isinf(values), np.isnan(values)
    finite = np.flatnonzero(~infinite & ~missing)
    found = values[finite]
    different = np.unique(found)
    if len(different) <= FEW:
        groups = [Group(column.shown(value), finite[found == value]) for value in different]
    else:
        last = [-(-k * len(found) // PARTS) - 1 for k in range(1, PARTS)]  # of each part, if none are tied
        edges = np.unique(np.sort(found)[last])
        part = np.searchsorted(edges, found, side="left")
        groups = [
            Group(f"{column.shown(of_part.min())} to {column.shown(of_part.max())}", finite[part == k])
            for k in range(len(edges) + 1)
            if len(of_part := found[part == k])
        ]
    others = [(INFINITY, infinite), (MISSING, missing)]
    return groups + [Group(name, np.flatnonzero(rows)) for name, rows in others if rows.any()]


def by_width(width: np.ndarray) -> list[Group]:
    """Five parts of as many rows, from narrow to wide; one group where all are as wide, up to rounding."""
    finite = width[np.isfinite(width)]
    if len(finite) == len(width) and np.ptp(width) <= 1e-5 * np.abs(width).max():
        return [Group(f"all {number(float(width.mean()))}", np.arange(len(width)))]
    if len(finite) < len(width):
        return by_value(Column(width))
    parts = [rows for rows in np.array_split(np.argsort(width, kind="stable"), PARTS) if len(rows)]
    edges = [(float(width[rows].min()), float(width[rows].max())) for rows in parts]
    digits = next((k for k in (3, 4, 5) if len({number(low, k) for low, _ in edges}) == len(edges)), 6)
    return [
        Group(f"{number(low, digits)} to {number(high, digits)}", rows)
        for (low, high), rows in zip(edges, parts, strict=True)
    ]


def _categories(column: Column) -> list[Group]:
    names = [MISSING if value is None else value for value in column.values]
    different, which, count = np.unique(np.array(names, dtype=str), return_inverse=True, return_counts=True)
    order = np.argsort(-count, kind="stable")
    shown = order if len(order) <= MOST else order[: MOST - 1]
    groups = [Group(str(different[k]), np.flatnonzero(which == k)) for k in shown]
    if len(shown) < len(order):
        rest = np.flatnonzero(~np.isin(which, shown))
        groups.append(Group(f"{len(order) - len(shown):,} others", rest))
    return groups
