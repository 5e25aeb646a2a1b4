"""What can be known of a fit before its first row, and what memory there is for it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Problem:
    """The sizes that an engine's memory and time depend on."""

    n_rows: int | None
    n_parameters: int
    itemsize: int  # bytes of a number in a gradient
    factor_bytes: int  # of one row's gradient, layer by layer
    input_bytes: int  # of one row's input
    damped: bool = True  # whether λ is known
    twice: bool = True  # whether the data can be read twice
    recomputed: bool = False  # whether of a row that must be remembered only its input is

    @property
    def kept_bytes(self) -> int:
        """What an engine that keeps rows keeps of each."""
        return self.input_bytes if self.recomputed else self.factor_bytes

    @property
    def inner_flops(self) -> float:
        """Of one inner product of two gradients."""
        return 2.0 * self.factor_bytes / self.itemsize

    @property
    def gradient_flops(self) -> float:
        """Of one row's gradient: at least a product each way for every parameter."""
        return 6.0 * self.n_parameters

    @property
    def recomputed_bytes(self) -> int:
        """What it takes to compute rows again: the factors of some, and of some others that they meet."""
        return max(min(256 * 2**20, 128 * self.factor_bytes), 4 * self.factor_bytes)

    def with_inputs_only(self) -> Problem:
        return replace(self, recomputed=True)


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
