"""What the machine has to spare: cores for the threads of BLAS, and memory.

OpenBLAS lets its threads wait for each other in a loop. Where one of them does not get a core, the others spin until it
does, and a fit may take many times the processor time. So its threads are limited to the cores that are free. Threads
of torch do not show this, and are left alone. `python -m benchmarks.load` measures it.
"""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

LOOKS, SECONDS_BETWEEN = 3, 2e-3  # at what runs on the machine: a core counts as busy if it is so each time
PROC = Path("/proc")
# control groups of the second version and of the first: controller, folder, and what holds limit, use and file cache
CONTROL_GROUPS = (
    ("", "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")),
    ("", "sys/fs/cgroup/unified", ("memory.max", "memory.current", "inactive_file")),
    ("memory", "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
)


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


def free_memory(root: Path = Path("/")) -> float:
    """Return the bytes that are available without swapping, and within the limits of containers and of the process."""
    try:
        free = 1024 * _entry(root / "proc/meminfo", "MemAvailable:")
    except (OSError, StopIteration, ValueError):
        try:
            free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
        except (OSError, ValueError, AttributeError):
            free = 4 * 2**30  # where the system does not say
    return max(min(free, _left_in_containers(root), _left_to_process(root)), 0.0)


def _left_in_containers(root: Path) -> float:
    """Return what the limits of control groups leave, from the process's own up to the outermost that it can see."""
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:  # another system
        return math.inf
    left = [math.inf]
    for _, controllers, name in groups:
        own = Path(name.lstrip("/"))  # which in a container may not exist, where the outermost is its own
        for controller, folder, files in CONTROL_GROUPS:
            if controller in controllers.split(","):
                left += [_left_in_group(root / folder / each, *files) for each in (own, *own.parents)]
    return min(left)


def _left_in_group(folder: Path, limit: str, used: str, cached: str) -> float:
    """Return what the limit of one control group leaves; its file cache can be dropped."""
    try:
        most, taken = (float((folder / name).read_text()) for name in (limit, used))
        return most - taken + _entry(folder / "memory.stat", cached, 0.0)
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return math.inf


def _left_to_process(root: Path) -> float:
    """Return what the process's own limits leave, as `ulimit -v` sets them."""
    try:
        import resource

        limits = ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:"))
        set_ = [(most, name) for which, name in limits if (most := resource.getrlimit(which)[0]) >= 0]
        return min((most - 1024 * _entry(root / "proc/self/status", name) for most, name in set_), default=math.inf)
    except (ImportError, OSError, StopIteration, ValueError):  # another system
        return math.inf


def _entry(path: Path, name: str, *default: float) -> float:
    """Return the number after a name at the beginning of a line."""
    lines = map(str.split, path.read_text().splitlines())
    return next((float(words[1]) for words in lines if words[:1] == [name]), *default)
