"""How much memory there is, and what square matrices take of it."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable
from pathlib import Path


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest size up to `most` that fits, where whatever is smaller fits too; 0 if none does."""
    return bisect.bisect_left(range(1, most + 1), True, key=lambda size: not fits(size))


def square_bytes(m: int, damped: bool) -> float:
    """A square matrix in float64, factorised in place; LAPACK's eigenvectors take three."""
    return 8.0 * m * m * (1 if damped else 3)


def free_memory() -> float:
    """Bytes that can be had without swapping; a guess of 4 GiB where the system does not tell."""
    try:
        with Path("/proc/meminfo").open() as lines:
            free = next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        try:
            free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
        except (OSError, ValueError, AttributeError):
            return 4 * 2**30
    return min(free, _left_in_container())


def _left_in_container(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """What a container's limit leaves; what it holds of files can be let go."""
    try:
        limit, used = ((folder / f"memory.{name}").read_text() for name in ("max", "current"))
        with (folder / "memory.stat").open() as lines:
            files = next((float(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0.0)
        return max(float(limit) - float(used) + files, 0.0)
    except (OSError, ValueError):  # no container, no limit ("max"), or another system
        return float("inf")
