"""Clocks, the machine, and a table of results that is written row by row."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg  # its BLAS must be loaded before the number of threads is set
import torch
from threadpoolctl import threadpool_limits


@dataclass
class Result:
    """One claim and what was measured; without a target it is for information only."""

    claim: str
    measured: float
    at_most: float | None = None
    at_least: float | None = None
    unit: str = "×"
    stopped: bool = False  # what took too long was stopped: `measured` is a lower bound
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> str:
        if self.at_most is None and self.at_least is None:
            return "–"
        return f"≤ {self.at_most:g}{self.unit}" if self.at_most is not None else f"≥ {self.at_least:g}{self.unit}"

    @property
    def passed(self) -> bool:
        return not (
            (self.at_most is not None and self.measured > self.at_most)
            or (self.at_least is not None and self.measured < self.at_least)
        )

    @property
    def figure(self) -> str:
        return f"{'> ' if self.stopped else ''}{self.measured:.3g}{self.unit}"

    @property
    def cell(self) -> str:
        return self.figure if self.passed else f"**{self.figure}**"


class Report:
    """Results by name and number of threads, in `<name>.json` and `<name>.md` of a folder, or nowhere.

    With `keep` the rows of an earlier run stay unless they are measured anew.
    """

    def __init__(self, folder: Path | None, name: str, title: str, *, keep: bool) -> None:
        self.folder, self.name, self.title = folder, name, title
        self.machine: dict[str, Any] = machine()
        self.gflops: dict[str, dict[str, float]] = {}
        self.results: dict[str, dict[str, Result]] = {}
        if keep and folder is not None and (folder / f"{name}.json").exists():
            old = json.loads((folder / f"{name}.json").read_text())
            self.gflops = old["gflops"]
            self.results = {
                name: {t: Result(**{k: v for k, v in row.items() if k != "passed"}) for t, row in by_threads.items()}
                for name, by_threads in old["results"].items()
            }

    def add(self, name: str, threads: int, result: Result) -> None:
        verdict = "" if result.target == "–" else f" (target {result.target}: {'pass' if result.passed else 'FAIL'})"
        print(f"[{threads} thread{'s'[: threads > 1]}] {name}: {result.figure}{verdict}", flush=True)
        print(f"    {json.dumps(result.details, ensure_ascii=False)}", flush=True)
        self.results.setdefault(name, {})[str(threads)] = result
        self.write()

    def write(self) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        results = {
            name: {t: {**asdict(r), "passed": r.passed} for t, r in by_threads.items()}
            for name, by_threads in self.results.items()
        }
        content = {"machine": self.machine, "gflops": self.gflops, "results": results}
        (self.folder / f"{self.name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        (self.folder / f"{self.name}.md").write_text(self.markdown())

    def markdown(self) -> str:
        threads = sorted({t for by_threads in self.results.values() for t in by_threads}, key=int)
        columns = [f"{t} thread{'s'[: int(t) > 1]}" for t in threads]
        gemm = "; ".join(
            f"{c}: float32 gemm {self.gflops[t]['float32']:.0f} GFLOP/s, float64 {self.gflops[t]['float64']:.0f}"
            for t, c in zip(threads, columns, strict=True)
        )
        facts = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        claims = _table(["claim", "target", *columns, "result"])
        informational = _table(["for information", *columns])
        details = _table(["", "threads", "details"])
        for name, by_threads in self.results.items():
            some = next(iter(by_threads.values()))
            cells = [by_threads[t].cell if t in by_threads else "" for t in threads]
            if some.target == "–":
                informational.append(_line([f"`{name}` {some.claim}", *cells]))
            else:
                passed = all(r.passed for r in by_threads.values())
                claims.append(_line([f"`{name}` {some.claim}", some.target, *cells, "pass" if passed else "**fail**"]))
            for t, r in by_threads.items():
                details.append(_line([f"`{name}`", t, ", ".join(f"{k} {_short(v)}" for k, v in r.details.items())]))
        parts = [[f"Machine: {facts}. {gemm}."], claims, informational, details]
        return f"# {self.title}\n\n" + "\n\n".join("\n".join(part) for part in parts) + "\n"


def race(*runners: Callable[[], object], repeats: int = 3) -> list[float]:
    """The best seconds of each, taken in turn: what else the machine does hits all of them alike.

    Rounds that other processes disturbed do not count, but there are at most twice as many rounds as `repeats`.
    """
    seconds, quiet = [], 0
    while quiet < repeats and len(seconds) < 2 * repeats:
        neighbours = Neighbours()
        seconds.append([_timed(run) for run in runners])
        quiet += (neighbours.cores() or 0.0) < 0.1
    return [min(column) for column in zip(*seconds, strict=True)]


def gflops(dtype: torch.dtype, m: int = 2000) -> float:
    A = torch.randn(m, m, dtype=dtype)
    return 2e-9 * m**3 / race(lambda: A @ A, repeats=7)[0]


@contextmanager
def limited_to(threads: int) -> Iterator[None]:
    """torch and both BLAS libraries (NumPy's and SciPy's) on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with threadpool_limits(threads):
        yield
    torch.set_num_threads(before)


def environment(threads: int) -> dict[str, str]:
    """For a process of its own with so many threads."""
    return os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))


class Neighbours:
    """How many cores' worth of other processes ran meanwhile: the noise in the timings."""

    def __init__(self) -> None:
        self._start = self._now()

    def cores(self) -> float | None:
        now = self._now()
        if now is None or self._start is None:
            return None
        busy, own, wall = (b - a for a, b in zip(self._start, now, strict=True))
        return round(max(busy - own, 0.0) / wall, 2)

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        try:
            user, nice, system, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
        except OSError:
            return None
        children = os.times()
        own = time.process_time() + children.children_user + children.children_system
        return (user + nice + system) / os.sysconf("SC_CLK_TCK"), own, time.perf_counter()


def machine() -> dict[str, Any]:
    versions = {"torch": torch.__version__, "numpy": np.__version__, "scipy": scipy.__version__}
    return {"cores": os.cpu_count(), **versions}


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(header: list[str]) -> list[str]:
    return [_line(header), _line(["---"] * len(header))]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
