"""`engine="auto"`, and the plan of a fit: what each engine would need, and which one is chosen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ..storage.encoding import storable
from .base import Engine, registered_engines
from .cost import Problem, free_memory, largest
from .exact import Exact
from .nystrom import Nystrom
from .projection import RandomProjection

LARGEST_AUTO_SIZE = 4096  # landmarks or dimensions; more are worth their time only where p* is in the thousands
SMALLEST_AUTO_SIZE = 32
LONGEST_EXACT_SECONDS = 3600.0  # after which an approximation is preferred to the exact method
# how much longer a projection may take than landmarks: this many times, and some seconds
SLOWDOWN_ALLOWED, SLOWDOWN_ALLOWED_SECONDS = 3.0, 600.0


@storable
@dataclass(frozen=True)
class Option:
    """An engine for a problem, and what it would cost."""

    engine: Engine
    problem: Problem

    @property
    def nbytes(self) -> float:
        """What a fit holds at its peak beside the model, the data and the chunk of rows in progress."""
        recomputed = self.problem.recomputed_bytes if self.problem.recomputed else 0
        return self.engine.cost(self.problem).nbytes + recomputed

    @property
    def seconds(self) -> float:
        """The time of a fit, roughly: the gradients, and the multiplications at the speed of a matrix product."""
        n = self.problem.n_rows or 0
        gradients = n * self.problem.row_seconds
        if self.problem.recomputed:  # each group of rows meets all the rows before it
            gradients *= 1 + n * self.problem.factor_bytes / self.problem.recomputed_bytes
        return self.engine.cost(self.problem).flops / _flops_per_second() + gradients

    def __str__(self) -> str:
        n, p = self.problem.n_rows, self.problem.n_parameters
        if not self.engine.is_exact:
            return repr(self.engine)
        form = "" if n is None else f", primal form ({p:,}²)" if n >= p else f", dual form ({n:,}²)"
        return f"{self.engine!r}{form}{', rows computed again' if self.problem.recomputed else ''}"


@dataclass(frozen=True)
class Plan:
    """What each engine would need, and which one a fit takes; printed, it is a table."""

    problem: Problem
    memory: float  # bytes
    options: tuple[Option, ...]
    chosen: Option | None

    def __str__(self) -> str:
        n, p = self.problem.n_rows, self.problem.n_parameters
        rows = "an unknown number of" if n is None else f"{n:,}"
        table = [(str(o), _readable(o.nbytes), _duration(o.seconds)) for o in self.options]
        width = max(len(name) for name, _, _ in table)
        lines = [f"n = {rows} rows, p = {p:,} parameters, {_readable(self.memory)} for the fit"]
        lines.append(f"  {'engine':<{width}}  {'memory':>8}  time, roughly")
        for option, (name, size, duration) in zip(self.options, table, strict=True):
            note = "" if option.nbytes <= self.memory else "  too large"
            lines.append(f"{'→' if option is self.chosen else ' '} {name:<{width}}  {size:>8}  {duration:>6}{note}")
        return "\n".join(lines)

    __repr__ = __str__


def plan_fit(problem: Problem, engine: Engine | None = None, memory: float | None = None) -> Plan:
    """Return the plan for an engine of the user's choice, or for the best that fits into `memory` bytes.

    By default that is half of what is free, or all of it where the user chose the engine. An approximation is made for
    half of it: the other half is for its comparison with the exact method.
    """
    budget = memory if memory is not None else free_memory() * (0.5 if engine is None else 1.0)
    exact = list(_exact(engine if engine is not None and engine.is_exact else Exact(), problem, budget))
    preferred = {cls: list(_largest(cls, problem, budget / 2)) for cls in (Nystrom, RandomProjection)}
    others = [cls for cls in registered_engines().values() if cls.is_planned and cls not in preferred]
    options = [*exact, *(option for found in preferred.values() for option in found)]
    options += [option for cls in others for option in _largest(cls, problem, budget / 2)]
    if engine is None:
        wanted = [option for option in exact if option.seconds <= LONGEST_EXACT_SECONDS]
        wanted += _preferred(preferred[RandomProjection], preferred[Nystrom])
    elif engine.is_exact:
        wanted = exact
    else:
        wanted = [Option(engine, problem)]
        options = [*wanted, *options]
    chosen = next((option for option in wanted if option.nbytes <= budget), None)
    return Plan(problem, budget, tuple(options), chosen)


def _preferred(projection: list[Option], nystrom: list[Option]) -> list[Option]:
    """At equal memory a projection is the more accurate one (`python -m benchmarks.accuracy`), but it has to form every
    gradient, which takes longer the larger the network."""
    slow = any(a.seconds > SLOWDOWN_ALLOWED * b.seconds + SLOWDOWN_ALLOWED_SECONDS for a in projection for b in nystrom)
    return [*nystrom, *projection] if slow else [*projection, *nystrom]


def _exact(engine: Engine, problem: Problem, budget: float) -> Iterator[Option]:
    option = Option(engine, problem)
    yield option
    again = Option(engine, replace(problem, recomputed=True))
    if option.nbytes > budget and again.nbytes < option.nbytes and problem.n_rows is not None:
        yield again


def _largest(cls: type[Engine], problem: Problem, budget: float) -> Iterator[Option]:
    """Yield the engine of the largest size that fits, if one does and can be used."""
    if cls.size_setting is None or (cls.needs_damping and not (problem.damped and problem.n_rows is not None)):
        return
    most = min(LARGEST_AUTO_SIZE, problem.n_rows or LARGEST_AUTO_SIZE, problem.n_parameters)
    size = largest(lambda size: _sized(cls, size).cost(problem).nbytes <= budget, most)
    if size >= SMALLEST_AUTO_SIZE and (problem.reiterable or not _sized(cls, size).sample_size):
        yield Option(_sized(cls, size), problem)


def _sized(cls: type[Engine], size: int) -> Engine:
    return cls(**{str(cls.size_setting): size})


@lru_cache(maxsize=1)
def _flops_per_second() -> float:
    A = np.ones((512, 512))
    A @ A  # starts the threads
    start = time.perf_counter()
    for _ in range(4):
        A @ A
    return 4 * 2 * len(A) ** 3 / (time.perf_counter() - start)


def _readable(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes / 1e3:.3g} kB"


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 1):.0f} s"
