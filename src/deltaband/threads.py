"""Threads of NumPy's and SciPy's BLAS on a machine whose cores are busy with other work.

OpenBLAS lets its threads wait for each other in a loop. Where one of them does not get a core, the others spin until it
does, and a fit may take many times the processor time. So its threads are limited to the cores that are free. Threads
of torch do not show this, and are left alone. `python -m benchmarks.load` measures it.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

LOOKS, SECONDS_BETWEEN = 3, 2e-3  # at what runs on the machine: a core counts as busy if it is so each time
PROC = Path("/proc")


def busy_cores(proc: Path = PROC) -> int:
    """Return how many threads of other processes run, or wait for a core, at this moment; 0 where that is unknown."""
    try:
        running = int((proc / "loadavg").read_text().split()[3].split("/")[0])
        own = sum(_runs(task) for task in (proc / "self" / "task").iterdir())
    except (OSError, ValueError, IndexError):
        return 0
    return max(0, running - own)


def _runs(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    except (OSError, IndexError):  # it has ended meanwhile
        return False


def free_cores() -> int:
    """Return how many cores are not busy with other work, at least 1, looking several times where some are."""
    cores, busy = os.cpu_count() or 1, busy_cores()
    for _ in range(LOOKS - 1):
        if busy == 0:
            break
        time.sleep(SECONDS_BETWEEN)
        busy = min(busy, busy_cores())
    return max(1, cores - busy)


@contextmanager
def on_free_cores() -> Iterator[None]:
    """Limit the threads of BLAS to the cores that are free while a block runs, unless all of them are.

    Of blocks in several threads at once the first sets the limit: it is one for the whole process.
    """
    free = free_cores()
    if free >= (os.cpu_count() or 1):
        yield
        return
    with _libraries().limit(limits=free, user_api="blas"):
        yield


@cache
def _libraries() -> Any:
    import scipy.linalg  # noqa: F401  SciPy brings its own BLAS
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
