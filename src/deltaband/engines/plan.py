"""`engine="auto"`, and the plan of a fit: what each engine would need, and which one is chosen."""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from timeit import repeat
from typing import Any

import numpy as np

from ..machine import free_memory
from ..storage.encoding import storable
from .base import ENGINES, Engine
from .exact import Exact, Problem
from .nystrom import Nystrom
from .projection import FORMING_FLOPS, RandomProjection

# landmarks or dimensions; more are worth their time only where p* is in the thousands
SMALLEST_AUTO_SIZE, LARGEST_AUTO_SIZE = 32, 4096
# how long a fit that "auto" chooses may take by default: some seconds, or some passes of gradients if that is more
SECONDS_ALLOWED, PASSES_ALLOWED = 60.0, 20.0
SPARE_FOR_FACTORS = 0.75  # of the memory that is left over, where factors are computed again layer by layer
# an assumption: the error of widths is in inverse proportion to the size; that of as many dimensions, relative to that
# of as many landmarks
PROJECTION_ERROR = 0.7


@storable
@dataclass(frozen=True)
class Option:
    """An engine for a problem, and what it would cost."""

    engine: Engine
    problem: Problem

    @property
    def nbytes(self) -> float:
        """What a fit holds at its peak beside the model, the data and the chunk of rows in progress."""
        beside = self.problem.certificate_bytes + self.problem.recomputed * self.problem.recomputed_bytes
        return self.engine.cost(self.problem).nbytes + beside

    @property
    def seconds(self) -> float:
        """The time of a fit, roughly: gradients and inner products as fast as those of the first rows were, and other
        multiplications at the speed of a matrix product."""
        problem, cost = self.problem, self.engine.cost(self.problem)
        n = problem.n_rows or 0
        asked = 0 if cost.knows_leverages else min(n, problem.asked_rows)
        gradients = problem.row_seconds * (n * problem.passes + asked + min(n, self.engine.sample_size))
        work = cost.flops / _flops_per_second()
        if problem.pair_seconds:
            work += cost.pairs * (problem.pair_seconds - problem.product_flops / _flops_per_second())
        if cost.wants_rows:  # which have to be formed
            work += n * problem.n_parameters * FORMING_FLOPS / _flops_per_second()
        return problem.setup_seconds + gradients + work * (1 + asked / max(n, 1))

    def __str__(self) -> str:
        n, p = self.problem.n_rows, self.problem.n_parameters
        if not self.engine.is_exact:
            return repr(self.engine)
        form = "" if n is None else f", primal form ({p:,}²)" if n >= p else f", dual form ({n:,}²)"
        return f"{self.engine!r}{form}{', rows computed again' if self.problem.recomputed else ''}"


@dataclass(frozen=True)
class Plan:
    """What each engine would need, and which one a fit takes; printed, it is a table."""

    problem: Problem  #: The sizes of the fit.
    memory: float  #: Bytes that it may take.
    engine: Engine | None  #: The user's choice; None for "auto".
    chosen: Option | None  #: What a fit takes: its `engine`, `nbytes` and `seconds`; None if nothing fits.
    time: float = math.inf  #: Seconds that "auto" may take.

    @property
    def exact_cost(self) -> str:
        """What the exact method would cost, if "auto" takes another; else nothing."""
        if self.engine is not None or self.chosen is None or self.chosen.engine.is_exact:
            return ""
        exact = _forms(Exact(), self.problem, self.memory)[-1]
        return f"Exact() would take about {_duration(exact.seconds)} and {_size(exact.nbytes)}"

    @cached_property
    def options(self) -> tuple[Option, ...]:
        """All engines that could be taken, each as large as memory allows."""
        problem, memory = self.problem, self.memory
        given = [] if self.engine is None else [self.engine]
        engines = given if any(engine.is_exact for engine in given) else [*given, Exact()]
        options = [option for engine in engines for option in _forms(engine, problem, memory)]
        sized: list[type[Engine]] = [Nystrom, RandomProjection]
        sized += [cls for cls in ENGINES.values() if cls.is_planned and cls not in sized]
        time = self.time if self.engine is None else math.inf
        options += [option for cls in sized for option in _largest(cls, problem, memory / 2, time)]
        return tuple(options) if self.chosen in (None, *options) else (*options, self.chosen)  # type: ignore[arg-type]

    def __str__(self) -> str:
        n, p = self.problem.n_rows, self.problem.n_parameters
        rows = "an unknown number of" if n is None else f"{n:,}"
        width = max(len(str(option)) for option in self.options)
        lines = [f"n = {rows} rows, p = {p:,} parameters, {_size(self.memory)} for the fit"]
        lines.append(f"  {'engine':<{width}}  {'memory':>8}  time, roughly")
        for option in self.options:
            mark, note = "→" if option == self.chosen else " ", "" if option.nbytes <= self.memory else "  too large"
            size, duration = _size(option.nbytes), _duration(option.seconds)
            lines.append(f"{mark} {option!s:<{width}}  {size:>8}  {duration:>6}{note}")
        if self.engine is None and self.chosen is not None:
            exact = f": {self.exact_cost}" if self.exact_cost else ""
            lines.append(f"auto takes {self.chosen.engine!r}, the most accurate within {_duration(self.time)}{exact}")
        return "\n".join(lines)

    __repr__ = __str__


def registered_engines() -> dict[str, type[Engine]]:
    """Return all engines by their names on the command line."""
    return dict(ENGINES)


def parse_engine(engine: Any) -> Engine | None:
    """Return the engine, or that of a name, with its default settings; None for "auto"."""
    if isinstance(engine, str):
        if engine == "auto":
            return None
        if engine not in (known := registered_engines()):
            names = ", ".join(map(repr, ("auto", *known)))
            raise ValueError(f"engine must be one of {names}, or one such as Nystrom(landmarks=500), got {engine!r}")
        return known[engine]()
    if not isinstance(engine, Engine):
        raise TypeError(f"engine must be 'auto', a name as 'exact' or an engine such as Exact(), got {engine!r}")
    return engine


def plan_fit(
    problem: Problem, engine: Engine | None = None, memory: float | None = None, time: float | None = None
) -> Plan:
    """Return the plan for an engine of the user's choice, or for the most accurate within `memory` bytes and a time.

    By default the memory is half of what is free, or all of it where the user chose the engine. An approximation gets
    half of it: the other half is for its comparison with the exact method. Where nothing is as fast as the time asks
    for, the fastest is taken. An engine of the user's choice is never refused for its time.
    """
    budget = memory if memory is not None else free_memory() * (0.5 if engine is None else 1.0)
    passes = PASSES_ALLOWED * (problem.n_rows or 0) * problem.row_seconds
    limit = time if time is not None else max(SECONDS_ALLOWED, passes)
    options = [option for option in _forms(engine or Exact(), problem, budget) if option.nbytes <= budget]
    if engine is None and not any(option.seconds <= limit for option in options):
        within = [each for cls in (RandomProjection, Nystrom) for each in _largest(cls, problem, budget / 2, limit)]
        options += [each for cls in (RandomProjection, Nystrom) for each in _largest(cls, problem, budget / 2)]
        options = sorted(within, key=_expected_error) or sorted(options, key=lambda option: option.seconds)
    return Plan(problem, budget, engine, chosen=next(iter(options), None), time=limit)


def _expected_error(option: Option) -> float:
    """Return in what proportion the error of the widths is expected to be."""
    size = getattr(option.engine, str(option.engine.size_setting))
    return float(PROJECTION_ERROR if isinstance(option.engine, RandomProjection) else 1.0) / size


def _forms(engine: Engine, problem: Problem, budget: float) -> list[Option]:
    """Return the engine, and with rows computed again where it is exact, does not fit otherwise and that helps."""
    option, again = Option(engine, problem), Option(engine, replace(problem, recomputed=True))
    weights, spare = problem.n_parameters * problem.itemsize, max(budget - again.nbytes, 0.0)
    room = again.problem.recomputed_bytes - weights + SPARE_FOR_FACTORS * spare
    again = Option(engine, replace(again.problem, room=room))
    helps = engine.is_exact and problem.n_rows is not None and again.nbytes < option.nbytes
    return [option, again] if helps and option.nbytes > budget else [option]


def _largest(cls: type[Engine], problem: Problem, budget: float, time: float = math.inf) -> list[Option]:
    """Return the engine of the largest size that fits into memory and time, if one does and can be used."""
    if cls.size_setting is None or (cls.needs_damping and not (problem.damped and problem.n_rows is not None)):
        return []

    def sized(size: int) -> Option:
        return Option(cls(**{str(cls.size_setting): size}), problem)

    most = min(LARGEST_AUTO_SIZE, problem.n_rows or LARGEST_AUTO_SIZE, problem.n_parameters)
    size = largest(lambda size: sized(size).nbytes <= budget and sized(size).seconds <= time, most)
    usable = size >= SMALLEST_AUTO_SIZE and (problem.reiterable or not sized(size).engine.sample_size)
    return [sized(size)] if usable else []


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest size up to `most` that fits, where whatever is smaller fits too; 0 if none does."""
    return bisect.bisect_left(range(1, most + 1), True, key=lambda size: not fits(size))


@cache
def _flops_per_second() -> float:
    A = np.ones((512, 512))
    A @ A  # starts the threads
    return 2 * len(A) ** 3 / min(repeat(lambda: A @ A, number=1, repeat=8))  # the fastest: others run, too


def _size(nbytes: float) -> str:
    unit, size = next((each for each in (("GB", 1e9), ("MB", 1e6)) if nbytes >= each[1]), ("kB", 1e3))
    return f"{nbytes / size:.3g} {unit}"


def _duration(seconds: float) -> str:
    unit, size = next((each for each in (("h", 3600), ("min", 60)) if seconds >= 2 * each[1]), ("s", 1))
    return f"{max(seconds / size, 1):.0f} {unit}"
