"""`engine="auto"`, and the plan of a fit: what each engine would need, and which one it will be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .base import Engine
from .directions import ImportantDirections, RobustFrequentDirections
from .exact import Exact
from .memory import free_memory, largest
from .nystrom import Nystrom
from .problem import Problem
from .projection import RandomProjection

LARGEST = 4096  # landmarks or dimensions that "auto" takes; more are worth their time only where p* is in the thousands
SMALLEST = 32
PATIENCE = 3600.0  # seconds after which an approximation is preferred to the exact method
SLOWER, SOME_TIME = 3.0, 600.0  # what a projection may take: times the time of landmarks, and some seconds


@dataclass(frozen=True)
class Option:
    """An engine for a problem."""

    engine: Engine
    problem: Problem

    @property
    def nbytes(self) -> float:
        """What a fit holds at its peak beside the model, the data and the chunk of rows under way."""
        return self.engine.nbytes(self.problem) + (self.problem.recomputed_bytes if self.problem.recomputed else 0)

    @property
    def seconds(self) -> float:
        """Roughly: the gradients, and the multiplications at the speed of a matrix product."""
        n = self.problem.n_rows or 0
        gradients = n * self.problem.row_seconds
        if self.problem.recomputed:  # each group of rows meets all the rows before it
            gradients *= 1 + n * self.problem.factor_bytes / self.problem.recomputed_bytes
        return self.engine.flops(self.problem) / _flops_per_second() + gradients

    def __str__(self) -> str:
        n, p = self.problem.n_rows, self.problem.n_parameters
        if not isinstance(self.engine, Exact):
            return repr(self.engine)
        form = "" if n is None else f", primal form ({p:,}²)" if n >= p else f", dual form ({n:,}²)"
        return f"Exact(){form}{', rows computed again' if self.problem.recomputed else ''}"


@dataclass(frozen=True)
class Plan:
    """What each engine would need, and which one a fit will take; printed, it is a table."""

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
    """For an engine of the user's choice, or for the best that fits into `memory` bytes.

    By default that is half of what is free, or all of it where the engine is not ours to choose. An approximation is
    made for half of it: the other half is for its comparison with the exact method.
    """
    budget = memory if memory is not None else free_memory() * (0.5 if engine is None else 1.0)
    exact = list(_exact(problem, budget))
    nystrom = list(_largest(Nystrom, problem, budget / 2)) if problem.twice else []
    projection = list(_largest(RandomProjection, problem, budget / 2))
    sketches = [*_largest(RobustFrequentDirections, problem, budget / 2)]
    if problem.damped and problem.n_rows is not None:
        sketches += _largest(ImportantDirections, problem, budget / 2)
    options = [*exact, *nystrom, *projection, *sketches]
    if engine is None:
        wanted = [*(option for option in exact if option.seconds <= PATIENCE), *_preferred(projection, nystrom)]
    elif isinstance(engine, Exact):
        wanted = exact
    else:
        wanted = [Option(engine, problem)]
        options = [*wanted, *options]
    chosen = next((option for option in wanted if option.nbytes <= budget), None)
    return Plan(problem, budget, tuple(options), chosen)


def _preferred(projection: list[Option], nystrom: list[Option]) -> list[Option]:
    """At equal memory a projection is the more accurate one (`python -m benchmarks.accuracy`), but it has to form every
    gradient, which takes longer the larger the network."""
    slow = any(a.seconds > SLOWER * b.seconds + SOME_TIME for a in projection for b in nystrom)
    return [*nystrom, *projection] if slow else [*projection, *nystrom]


def _exact(problem: Problem, budget: float) -> Iterator[Option]:
    option = Option(Exact(), problem)
    yield option
    again = Option(Exact(), problem.with_inputs_only())
    if option.nbytes > budget and again.nbytes < option.nbytes and problem.n_rows is not None:
        yield again


def _largest(make: Callable[[int], Engine], problem: Problem, budget: float) -> Iterator[Option]:
    """The engine of the largest size that fits, if any does and there are that many directions."""
    most = min(LARGEST, problem.n_rows or LARGEST, problem.n_parameters)
    size = largest(lambda size: make(size).nbytes(problem) <= budget, most)
    if size >= SMALLEST:
        yield Option(make(size), problem)


@lru_cache(maxsize=1)
def _flops_per_second() -> float:
    A = np.ones((512, 512))
    A @ A  # the threads start
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
