"""What is known of a fit beforehand: the sizes of a problem, an engine's cost, and how much memory there is."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..network.gradient_batch import GradientBatch
from ..storage.encoding import storable


class Cost(NamedTuple):
    """What an engine takes for a problem."""

    nbytes: float  # at its peak, without the chunk of rows in progress
    flops: float  # without the gradients
    wants_rows: bool = True  # whether it asks for whole rows, or for inner products alone


@dataclass(frozen=True)
class Known:
    """What is known before the first row, as far as it is: it helps an engine, nothing more."""

    n_rows: int | None = None
    damping: float | None = None
    sample: GradientBatch | None = None  # of `Engine.sample_size` rows, fewer where there are fewer


@storable
@dataclass(frozen=True)
class Problem:
    """The sizes that the memory and time of an engine depend on, known before the first row."""

    n_rows: int | None
    n_parameters: int
    itemsize: int  # bytes of a number in a gradient
    factor_bytes: int  # of one row's gradient, layer by layer
    input_bytes: int  # of one row's input
    inner_flops: float = 0.0  # of an inner product of two rows' gradients; 0: as many as there are factors
    row_seconds: float = 0.0  # to compute one row's gradient
    damped: bool = True  # whether λ is known
    reiterable: bool = True  # whether the data can be read twice
    recomputed: bool = False  # whether only the inputs of rows are kept, and their gradients computed again

    @property
    def product_flops(self) -> float:
        """The cost of an inner product of two rows."""
        return self.inner_flops or 2.0 * self.factor_bytes / self.itemsize

    @property
    def recomputed_bytes(self) -> int:
        """What recomputing rows takes: a copy of the weights, and the factors of some rows that meet some others."""
        weights = self.n_parameters * self.itemsize
        return weights + max(min(256 * 2**20, 128 * self.factor_bytes), 4 * self.factor_bytes)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest size up to `most` that fits, where whatever is smaller fits too; 0 if none does."""
    return bisect.bisect_left(range(1, most + 1), True, key=lambda size: not fits(size))


def square_bytes(m: int, damped: bool) -> float:
    """Return the bytes of a square matrix in float64, factorised in place; LAPACK's eigenvectors take three."""
    return 8.0 * m * m * (1 if damped else 3)


def free_memory() -> float:
    """Return the bytes that are available without swapping; 4 GiB where the system does not say."""
    try:
        free = 1024 * _entry(Path("/proc/meminfo"), "MemAvailable:")
    except (OSError, StopIteration, ValueError):
        try:
            free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
        except (OSError, ValueError, AttributeError):
            return 4 * 2**30
    return min(free, _left_in_container())


def _left_in_container(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """Return what a container's limit leaves; its file cache can be dropped."""
    try:
        limit, used = (float((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
        return max(limit - used + _entry(folder / "memory.stat", "inactive_file", 0.0), 0.0)
    except (OSError, ValueError):  # no container, no limit ("max"), or another system
        return float("inf")


def _entry(path: Path, name: str, *default: float) -> float:
    """Return the number after a name at the beginning of a line."""
    lines = map(str.split, path.read_text().splitlines())
    return next((float(words[1]) for words in lines if words[:1] == [name]), *default)
