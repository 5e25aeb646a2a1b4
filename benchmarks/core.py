"""What the core promises about time and memory, measured: `python -m benchmarks.core`.

Each promise is a ratio to the bare kernels that no implementation can do without, or to the plain way of doing it;
both sides run in turn in one process. The data are as large as `protein` of the paper: 41 157 rows, 9 features, a
LeakyReLU network with two layers of 50, p = 3 101; the weights are random, which costs neither more nor less.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from deltaband import (
    DeltabandWarning,
    Exact,
    FrequentDirections,
    ImportantDirections,
    PredictionIntervals,
    RobustFrequentDirections,
)
from deltaband.engines import Engine, Known
from deltaband.network.gradient_batch import GradientBatch

from .measure import Neighbours, Report, Result, environment, gflops, limited_to, race
from .memory import peak_memory
from .workload import QUICK, WEIGHT_DECAY, Size, ThinSketch, Workload, network

HERE = Path(__file__).parent


def exact_fit(work: Workload) -> dict[str, Result]:
    def bare_gemm(J: Tensor) -> Tensor:
        J64 = J.double()
        return J64.T @ J64

    n = work.size.n
    fit, gradients, both = race(
        lambda: work.fit(Exact()),
        lambda: sum(len(J) for J in work.gradients(n)),
        work.with_gradients(n, bare_gemm),
        repeats=work.size.repeats,
    )
    seconds = {"fit s": fit, "gradients s": gradients, "gradients and full gemm s": both}
    half = gradients + (both - gradients) / 2
    return {
        "exact_fit": Result(
            "exact fit / (bare row gradients + full float64 gemm)", fit / both, at_most=2, details=seconds
        ),
        "exact_fit_half": Result("exact fit / (bare row gradients + half of that gemm, as in dsyrk)", fit / half),
    }


def directions_shrink(work: Workload) -> dict[str, Result]:
    size = work.size
    chunks = [GradientBatch.of(J) for J in work.gradients(size.shrink_rows)]
    done = []

    def library() -> None:
        sketch = ImportantDirections(size.rank).start(Known(size.n, work.damping))
        for chunk in chunks:
            sketch.update(chunk)
        done.append(sketch)

    def thin() -> None:
        sketch = ThinSketch(size.rank, work.damping, work.p)
        for chunk in chunks:
            sketch.update(chunk.rows())
        done.append(sketch)

    ours, plain = race(library, thin, repeats=size.repeats + 2)
    p_star = done[-2].finalise(work.damping).effective_parameters
    if abs(p_star - done[-1].effective_parameters()) > 1e-3 * p_star:
        raise AssertionError("the two sketches differ")
    claim = f"sketch by thin SVD / ImportantDirections({size.rank}), given rows ({size.shrink_rows:,} of them)"
    details = {"thin SVD s": plain, "library s": ours, "p* of both": p_star}
    return {"directions_shrink": Result(claim, plain / ours, at_least=3, details=details)}


def directions_end_to_end(work: Workload) -> dict[str, Result]:
    size = work.size
    parameters = list(work.model.parameters())

    def plain() -> None:
        sketch = ThinSketch(size.rank, work.damping, work.p)
        for x in work.X[: size.plain_rows]:
            gradient = torch.autograd.grad(work.model(x[None]).squeeze(), parameters)
            sketch.update(torch.cat([g.reshape(-1) for g in gradient])[None])

    fit, slow = race(lambda: work.fit(ImportantDirections(size.rank)), plain, repeats=size.repeats)
    ours, theirs = 1e3 * fit / size.n, 1e3 * slow / size.plain_rows
    claim = (
        f"a row of autograd.grad and thin SVD (over {size.plain_rows:,} rows, 7 shrinks) / a row of fit with "
        f"ImportantDirections({size.rank})"
    )
    return {
        "directions_end_to_end": Result(
            claim, theirs / ours, at_least=8, details={"fit s": fit, "fit ms/row": ours, "plain ms/row": theirs}
        )
    }


def predict(work: Workload) -> dict[str, Result]:
    size = work.size
    bands = {"exact": work.fit(Exact()), "directions": work.fit(ImportantDirections(size.rank))}
    held = len(bands["directions"].spectrum().singular_values)
    inverse = torch.randn(work.p, work.p, dtype=torch.float64)
    V = torch.randn(held, work.p)
    projections = {"exact": lambda J: J.double() @ inverse, "directions": lambda J: J @ V.T}
    sort = {"exact": "exact", "directions": f"ImportantDirections({size.rank})"}
    results = {}
    for name, band in bands.items():
        x = work.X[: size.new_rows]
        ours, gradients, bare = race(
            lambda band=band, x=x: band.predict(x),
            lambda: sum(len(J) for J in work.gradients(size.new_rows)),
            work.with_gradients(size.new_rows, projections[name]),
            repeats=2 * size.repeats + 1,
        )
        results[f"predict_{name}"] = Result(
            f"{sort[name]} predict / (bare row gradients + bare projection), {size.new_rows:,} rows",
            ours / bare,
            at_most=2,
            details={"predict s": ours, "gradients s": gradients, "gradients and projection s": bare}
            | ({"held directions": held} if name == "directions" else {}),
        )
    return results


def memory(work: Workload) -> dict[str, Result]:
    few, many = work.size.stream_rows
    baseline = peak_of_child(work.size, "None", 0)
    results = {}
    for name, engine in {"exact": "Exact()", "directions": f"ImportantDirections({work.size.rank})"}.items():
        small, large = (peak_of_child(work.size, engine, n) for n in (few, many))
        results[f"memory_{name}"] = Result(
            f"peak memory of a streamed fit with {engine}, n = {many:,} / n = {few:,}",
            large / small,
            at_most=1.1,
            details={f"peak MB at {few}": small, f"at {many}": large, "above an idle process": large - baseline},
        )
    return results


def peak_of_child(size: Size, engine: str, n: int) -> float:
    """Peak resident megabytes of a process of its own."""
    code = f"from benchmarks.core import *; print(peak({size!r}, {engine}, {n}))"
    env = environment(torch.get_num_threads())
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=HERE.parent, env=env, capture_output=True, text=True
    )
    if child.returncode:
        raise RuntimeError(child.stderr)
    return float(child.stdout)


def peak(size: Size, engine: Engine | None, n: int) -> float:
    """Fit on data that are made while they are read, if there is an engine. In megabytes."""
    torch.manual_seed(0)
    model = network(size)

    def stream() -> Iterable[tuple[Tensor, Tensor]]:
        for first in range(0, n, 1000):
            rows = min(1000, n - first)
            yield torch.randn(rows, size.features), torch.randn(rows)

    if engine is not None:
        PredictionIntervals(model, weight_decay=WEIGHT_DECAY, engine=engine).fit(stream(), n_rows=n, progress=False)
    return peak_memory()


def fits(work: Workload) -> dict[str, Result]:
    k = work.size.rank
    engines = [Exact(), ImportantDirections(k), RobustFrequentDirections(k), FrequentDirections(k)]
    seconds = race(*(lambda engine=engine: work.fit(engine) for engine in engines), repeats=work.size.repeats)
    return {
        f"fit_{type(engine).__name__}": Result(
            f"seconds to fit {engine!r}", s, unit=" s", details={"rows/s": work.size.n / s}
        )
        for engine, s in zip(engines, seconds, strict=True)
    }


BENCHMARKS = {f.__name__: f for f in (exact_fit, directions_shrink, directions_end_to_end, predict, memory, fits)}


def main() -> None:
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), metavar="NAME")
    parser.add_argument(
        "--threads", nargs="+", type=int, default=[cores], help="one run for each of these numbers (default: all cores)"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing is written unless --out is given")
    parser.add_argument("--out", type=Path, help="folder for core.json and core.md (default: benchmarks/results)")
    args = parser.parse_args()
    warnings.simplefilter("ignore", DeltabandWarning)
    folder = args.out or (None if args.quick else HERE / "results")
    report = Report(folder, "core", "Benchmarks of the core", keep=True)  # `--only` renews some rows, not the others
    for engine in (Exact(), ImportantDirections(10)):  # whatever is loaded on first use is loaded now
        Workload(QUICK).fit(engine).predict(torch.zeros(1, QUICK.features))
    work = Workload(QUICK if args.quick else Size())
    for threads in args.threads:
        with limited_to(threads):
            report.gflops[str(threads)] = {t: gflops(getattr(torch, t)) for t in ("float32", "float64")}
            for name in args.only:
                neighbours = Neighbours()
                for part, result in BENCHMARKS[name](work).items():
                    result.details["other processes' cores"] = neighbours.cores()
                    report.add(part, threads, result)


if __name__ == "__main__":
    main()
