"""The same intervals' variances from laplace-torch 0.3, their seconds and ours: `python -m benchmarks.laplace`.

Both sides get one trained network and its data, at three sizes: 7 000 rows of Friedman's function in 8 features and a
LeakyReLU network with two layers of 50, p = 3 051, and 1 000 new rows; 2 000 rows, 500 new ones and layers of 256 and
of 1 000, p = 68 353 and 1 011 001. Every form of a posterior runs in a process of its own, those of laplace-torch in an
environment of its own (`.venv-laplace`, made on first use) with the same torch and as many threads. Both sides are
timed by the same code, the best round counts, from the data to the first prediction: its mean and functional variance,
all in float32; our intervals, with JᵀJ in float64. What takes longer than `--limit` is stopped, and what cannot be held
in memory is not tried; the table says so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltaband import DeltabandWarning, Exact, Intervals, PredictionIntervals, RandomProjection
from deltaband.engines import Engine

from .laplace_worker import FLAVOURS, Seconds, best_round
from .measure import Neighbours, Report, Result, environment, gflops, limited_to
from .problem import Problem
from .workload import WEIGHT_DECAY, Size, network

HERE = Path(__file__).parent
VENV = HERE.parent / ".venv-laplace"
REQUIREMENTS = HERE / "laplace-requirements.txt"
START = 60.0  # seconds, generous, that a process may take to start and to warm up
SIZE = Size(n=7_000, features=8, new_rows=1_000)
SIZES = {
    "3k": SIZE,
    "70k": Size(n=2_000, features=8, hidden=256, new_rows=500, repeats=1),
    "1M": Size(n=2_000, features=8, hidden=1_000, new_rows=500, repeats=1),
}
QUICK = Size(n=600, features=8, hidden=16, new_rows=100, repeats=1)
FAITHFUL = 0.05  # standard deviations are off by, on average, at most
LARGEST_MATRIX = 4e9  # bytes of the p × p matrix of a full posterior, in float32
OURS: dict[str, Engine] = {"exact": Exact(), "projection": RandomProjection(1024)}


@dataclass(frozen=True)
class Answer:
    seconds: Seconds
    variance: np.ndarray  # gᵀ(JᵀJ + λI)⁻¹g of the new rows, or what stands in for it
    neighbours: float | None
    megabytes: float | None = None  # at the peak, above the data and the network

    @property
    def details(self) -> dict[str, float | None]:
        s = self.seconds
        times = {"fit s": s.fit, "first predict s": s.predict, "next predict s": s.again}
        return {**times, "MB": self.megabytes, "other processes' cores": self.neighbours}

    def save(self, path: Path) -> None:
        np.savez(path, seconds=self.seconds, variance=self.variance, megabytes=self.megabytes or 0.0)

    @classmethod
    def load(cls, path: Path, neighbours: Neighbours) -> Answer:
        with np.load(path) as file:
            seconds, variance = Seconds(*file["seconds"].tolist()), file["variance"].astype(float)
            return cls(seconds, variance, neighbours.cores(), float(file["megabytes"]))

    def off(self, exact: np.ndarray) -> float:
        """By how much its standard deviations are off, on average."""
        return float(np.abs(np.sqrt(self.variance / exact) - 1).mean())


def trained(size: Size, epochs: int = 40, batch_rows: int = 100) -> Problem:
    torch.manual_seed(0)
    U = torch.rand(size.n + size.new_rows, size.features)
    f = 10 * (torch.pi * U[:, 0] * U[:, 1]).sin() + 20 * (U[:, 2] - 0.5) ** 2 + 10 * U[:, 3] + 5 * U[:, 4]
    X, y = (U - 0.5) * 12**0.5, (f + torch.randn(len(U)) - 14.4) / 5  # near mean 0 and standard deviation 1
    X, new, y = X[: size.n], X[size.n :], y[: size.n]
    model = network(size)
    optimiser = torch.optim.Adam(model.parameters(), weight_decay=WEIGHT_DECAY)
    for _ in range(epochs):
        for batch in torch.randperm(size.n).split(batch_rows):
            optimiser.zero_grad()
            (model(X[batch])[:, 0] - y[batch]).square().mean().backward()
            optimiser.step()
    return Problem(model.eval(), X, y, new, damping=size.n * WEIGHT_DECAY / 2)


def ours(path: Path, repeats: int, engine: Engine = OURS["exact"]) -> Answer:
    bands = []

    def fit(problem: Problem) -> Callable[[Tensor], Intervals]:
        band = PredictionIntervals(problem.model, damping=problem.damping, engine=engine)
        bands[:] = [band.fit(problem.X, problem.y, progress=False)]
        return band.predict

    neighbours = Neighbours()
    seconds, _, megabytes = best_round(path, fit, repeats)
    variance = bands[-1].leverage(Problem.load(path).new).double().numpy()
    return Answer(seconds, variance, neighbours.cores(), megabytes)


def ours_alone(path: Path, name: str, repeats: int, threads: int, limit: float) -> Answer | None:
    """The same in a process of its own."""
    answer = path.with_name(f"deltaband_{name}.npz")
    code = f"ours(Path({str(path)!r}), {repeats}, OURS[{name!r}]).save(Path({str(answer)!r}))"
    command = [sys.executable, "-W", "ignore", "-c", f"from benchmarks.laplace import *; {code}"]
    return _answer(command, answer, threads, limit)


def theirs(path: Path, flavour: str, repeats: int, threads: int, limit: float) -> Answer | None:
    answer = path.with_name(f"{flavour}.npz")
    options = ["--repeats", str(repeats), "--threads", str(threads)]
    command = [str(python()), "-m", "benchmarks.laplace_worker", str(path), str(answer), flavour, *options]
    return _answer(command, answer, threads, limit)


def _answer(command: list[str], answer: Path, threads: int, limit: float) -> Answer | None:
    """None where it was stopped: it takes longer than `limit` seconds."""
    neighbours = Neighbours()
    try:
        child = subprocess.run(
            command, cwd=HERE.parent, env=environment(threads), timeout=START + limit, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return None
    if child.returncode:
        raise RuntimeError(child.stderr)
    return Answer.load(answer, neighbours)


def python() -> Path:
    """The interpreter of laplace-torch's environment, which is made on first use."""
    python, ready = VENV / "bin" / "python", VENV / "ready.txt"
    if not ready.exists() or ready.read_text() != REQUIREMENTS.read_text():
        print(f"making {VENV}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--requirement", REQUIREMENTS], check=True)
        # nothing here uses torchvision, and built for another torch it cannot be imported
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision"], check=True)
        ready.write_text(REQUIREMENTS.read_text())
    return python


def compare(report: Report, size: str, path: Path, repeats: int, threads: int, limit: float) -> None:
    """All forms of one size. Its full posteriors are taken in turn with ours: what else the machine does hits both."""
    after, p = "" if size == "3k" else f"_{size}", sum(w.numel() for w in Problem.load(path).model.parameters())
    where, matrix = "" if size == "3k" else f", p = {p:,}", 4.0 * p**2

    def add(name: str, result: Result) -> None:
        report.add(f"{name}{after}", threads, result)

    our, pairs, approximate = None, {}, {}
    for name, flavour in FLAVOURS.items():
        label = f"laplace-torch, {flavour.label}{where}"
        if flavour.exact and matrix > LARGEST_MATRIX:
            claim = f"not tried: the p × p matrix of {label}, in float32"
            add(f"not_tried_{name}", Result(claim, matrix / 1e9, unit=" GB", stopped=True))
            continue
        if our is None or flavour.exact:
            our = ours_alone(path, "exact", repeats, threads, limit)
            assert our is not None, "Exact() was stopped: give a larger --limit"
        their = theirs(path, name, repeats, threads, limit)
        add(f"seconds_{name}", seconds(label, their, limit))
        if flavour.exact:
            pairs[name] = our, their
        elif flavour.subset == "all" and their is not None:
            approximate[name] = their
        if their is not None:
            accuracy = difference if flavour.exact else deviation
            add(f"{accuracy.__name__}_{name}", accuracy(f"{flavour.label}{where}", their.variance, our.variance))
    assert our is not None
    best = min((our for our, _ in pairs.values()), key=lambda our: our.seconds.total, default=our)
    add("seconds_deltaband", seconds(f"deltaband, Exact(){where}", best, limit))
    projected = ours_alone(path, "projection", repeats, threads, limit)
    add("seconds_deltaband_projection", seconds(f"deltaband, {OURS['projection']!r}{where}", projected, limit))
    if projected is not None:
        claim = f"deltaband, {OURS['projection']!r}{where}"
        add("deviation_deltaband_projection", deviation(claim, projected.variance, our.variance))
    for name, result in (speed(pairs, limit) if pairs else faithful(approximate, best, where)).items():
        add(name, result)


def faithful(approximate: dict[str, Answer], our: Answer, where: str) -> dict[str, Result]:
    """How much longer than we, who are exact, the fastest takes of those whose standard deviations are about right, and
    of all of them."""
    exact, results = our.variance, {}
    right = {name: each for name, each in approximate.items() if each.off(exact) <= FAITHFUL}
    results["faithful"] = Result(
        f"how many of its forms for all weights have standard deviations within {FAITHFUL:.0%} of exact{where}",
        len(right),
        unit=f" of {len(approximate)}",
        details={name: each.off(exact) for name, each in approximate.items()},
    )
    for word, some, target in (("fastest_faithful", right, 1), ("fastest_of_any", approximate, None)):
        if some:
            name = min(some, key=lambda name: some[name].seconds.total)
            claim = f"its {word.replace('_', ' ')} form / deltaband, Exact(), fit and first predict"
            details: dict[str, Any] = {"theirs s": some[name].seconds.total, "ours s": our.seconds.total}
            details["off"] = some[name].off(exact)
            ratio = details["theirs s"] / details["ours s"]
            results[f"speed_{word}"] = Result(
                f"{claim}: {FLAVOURS[name].label}{where}", ratio, at_least=target, details=details
            )
    return results


def speed(pairs: dict[str, tuple[Answer, Answer | None]], limit: float) -> dict[str, Result]:
    """How much longer its full posterior takes than ours beside it; longer than `limit` where it was stopped."""
    totals = {name: their.seconds.total if their else limit for name, (_, their) in pairs.items()}
    fastest = min(totals, key=totals.__getitem__)
    results = {}
    for word, name, target in (("default", "full", 10), ("fastest", fastest, 1)):
        our, their = pairs[name]
        results[f"speed_{word}"] = Result(
            f"its {word} full posterior / deltaband, fit and first predict: {FLAVOURS[name].label}",
            totals[name] / our.seconds.total,
            at_least=target,
            stopped=their is None,
            details={"theirs s": totals[name], "ours s": our.seconds.total},
        )
    return results


def seconds(whose: str, answer: Answer | None, limit: float) -> Result:
    claim = f"seconds to fit and to predict for the first time, {whose}"
    if answer is None:
        return Result(claim, limit, unit=" s", stopped=True)
    return Result(claim, answer.seconds.total, unit=" s", details=answer.details)


def difference(label: str, variance: np.ndarray, exact: np.ndarray) -> Result:
    off = np.abs(variance / exact - 1)
    claim = f"largest relative difference of its functional variance to band.leverage(x), {label}"
    return Result(claim, float(off.max()), at_most=1e-4, unit="", details={"mean": float(off.mean())})


def deviation(label: str, variance: np.ndarray, exact: np.ndarray) -> Result:
    ratio = np.sqrt(variance / exact)
    claim = f"its standard deviation / that of the full posterior, mean over the new rows, {label}"
    details = {
        "least": float(ratio.min()),
        "greatest": float(ratio.max()),
        "off on average": float(abs(ratio - 1).mean()),
    }
    return Result(claim, float(ratio.mean()), details=details)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--threads", nargs="+", type=int, default=[os.cpu_count() or 1], help="one run for each (default: all cores)"
    )
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a flavour is stopped")
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES), help="numbers of parameters")
    parser.add_argument("--quick", action="store_true", help="a small size; nothing is written unless --out is given")
    parser.add_argument("--out", type=Path, help="folder for laplace.json and laplace.md (default: benchmarks/results)")
    args = parser.parse_args()
    warnings.simplefilter("ignore", DeltabandWarning)
    folder = args.out or (None if args.quick else HERE / "results")
    report = Report(folder, "laplace", "deltaband and laplace-torch 0.3", keep=True)  # `--size` renews some rows
    python()
    for name, size in ({"3k": QUICK} if args.quick else {name: SIZES[name] for name in args.size}).items():
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "problem.npz"
            trained(size).save(path)
            for threads in args.threads:
                with limited_to(threads):
                    report.gflops[str(threads)] = {t: gflops(getattr(torch, t)) for t in ("float32", "float64")}
                    compare(report, name, path, size.repeats, threads, args.limit)


if __name__ == "__main__":
    main()
