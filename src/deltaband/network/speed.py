"""How fast gradients and their inner products are on this machine, measured on some rows."""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..data.inputs import Inputs
from .gradient_batch import CHUNK_ROWS_AT_LEAST, GradientBatch
from .network import Network

QUICK_SECONDS, TIMES = 0.1, 3  # what takes less is measured so often: the first time takes longer, and others run too
MEASURED_ROWS, MULTIPLIED_ROWS = 512, 32  # at most; products of fewer where gradients take long


def measured_speeds(network: Network, x: Inputs) -> tuple[float, float]:
    """Return the seconds of one row's gradient and of an inner product of two."""
    rows = x[:CHUNK_ROWS_AT_LEAST]
    g, seconds = _timed(lambda: _gradients(network, rows))
    is_quick = seconds < QUICK_SECONDS
    if is_quick:
        rows = x[: max(1, min(network.chunk_rows(x), MEASURED_ROWS))]
        g, seconds = _timed(lambda: _gradients(network, rows))
    some = g if is_quick else g.between(0, MULTIPLIED_ROWS)
    _, products = _timed(lambda: some.inner(some))
    return seconds / len(g), products / len(some) ** 2


def _gradients(network: Network, x: Inputs) -> GradientBatch:
    return network.gradients(x, next(network.groups(x)))[1]


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return what it returns, and the seconds of the fastest time."""
    began, fastest = time.perf_counter(), math.inf
    with np.errstate(all="ignore"):  # rows that are not finite are refused where they are used, by their number
        for _ in range(TIMES):
            start = time.perf_counter()
            found = work()
            end = time.perf_counter()
            fastest = min(fastest, end - start)
            if end - began > QUICK_SECONDS:
                break
    return found, fastest
