"""The memory of this process, without anything that another environment might not have."""

from pathlib import Path


def resident_memory() -> float:
    """Megabytes of this process."""
    return _status("VmRSS")


def peak_memory() -> float:
    """The most megabytes of this process so far. Linux' ru_maxrss would count what its parent held at its start."""
    return _status("VmHWM")


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024
