"""`covariance="auto"`: exact where it fits into memory, a sketch where it does not."""

from __future__ import annotations

import os
from pathlib import Path

from .directions import RobustFrequentDirections
from .engine import Engine
from .exact import Exact


def choose_engine(n_rows: int | None, n_parameters: int, itemsize: int) -> Engine:
    """Exact within half of the free memory, otherwise the sketch that is never far off.

    A rank below the effective dimension costs ImportantDirections more than RobustFrequentDirections where it goes
    wrong, since it then lets the largest singular values go.
    """
    budget = free_memory() / 2
    if exact_bytes(n_rows, n_parameters, itemsize) <= budget:
        return Exact()
    return RobustFrequentDirections(memory=budget)


def exact_bytes(n_rows: int | None, n_parameters: int, itemsize: int) -> float:
    """The square matrix, and the rows that `Exact` keeps where n < p or n is not known."""
    n, p = n_rows, n_parameters
    if n is None:
        return 8.0 * p * p + float(itemsize) * p * p
    return 8.0 * p * p if n >= p else 8.0 * n * n + float(itemsize) * n * p


def free_memory() -> float:
    """Bytes that can be had without swapping; a guess of 4 GiB where the system does not tell."""
    try:
        with Path("/proc/meminfo").open() as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return float(line.split()[1]) * 1024
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    except (OSError, ValueError, AttributeError):
        return 4 * 2**30
