"""The same intervals' variances from laplace-torch 0.3, their seconds and ours: `python -m benchmarks.laplace`.

Both sides get one trained network and its data: 7 000 rows of Friedman's function in 8 features, a LeakyReLU network
with two layers of 50, p = 3 051, and 1 000 new rows. laplace-torch runs flavour by flavour in processes of its own,
in an environment of its own (`.venv-laplace`, made on first use) with the same torch and as many threads. Both sides
are timed by the same code, the best round counts, from the data to the first prediction: its mean and functional
variance, all in float32; our intervals, with JᵀJ in float64.
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

import numpy as np
import torch
from torch import Tensor

from deltaband import DeltabandWarning, Exact, Intervals, PredictionIntervals

from .laplace_worker import FLAVOURS, Seconds, best_round
from .measure import Neighbours, Report, Result, environment, gflops, limited_to
from .problem import Problem
from .workload import WEIGHT_DECAY, Size, network

HERE = Path(__file__).parent
VENV = HERE.parent / ".venv-laplace"
REQUIREMENTS = HERE / "laplace-requirements.txt"
START = 60.0  # seconds, generous, that a process may take to start and to warm up
SIZE = Size(n=7_000, features=8, new_rows=1_000)
QUICK = Size(n=600, features=8, hidden=16, new_rows=100, repeats=1)


@dataclass(frozen=True)
class Answer:
    seconds: Seconds
    variance: np.ndarray  # gᵀ(JᵀJ + λI)⁻¹g of the new rows, or what stands in for it
    neighbours: float | None

    @property
    def details(self) -> dict[str, float | None]:
        s = self.seconds
        times = {"fit s": s.fit, "first predict s": s.predict, "next predict s": s.again}
        return {**times, "other processes' cores": self.neighbours}


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


def ours(path: Path, repeats: int) -> Answer:
    bands = []

    def fit(problem: Problem) -> Callable[[Tensor], Intervals]:
        band = PredictionIntervals(problem.model, damping=problem.damping, engine=Exact())
        bands.append(band.fit(problem.X, problem.y, progress=False))
        return band.predict

    neighbours = Neighbours()
    seconds, _ = best_round(path, fit, repeats)
    return Answer(seconds, bands[-1].leverage(Problem.load(path).new).double().numpy(), neighbours.cores())


def theirs(path: Path, flavour: str, repeats: int, threads: int, limit: float) -> Answer | None:
    """None where it was stopped: it takes longer than `limit` seconds."""
    answer = path.with_name(f"{flavour}.npz")
    options = ["--repeats", str(repeats), "--threads", str(threads)]
    command = [str(python()), "-m", "benchmarks.laplace_worker", str(path), str(answer), flavour, *options]
    neighbours = Neighbours()
    try:
        child = subprocess.run(
            command, cwd=HERE.parent, env=environment(threads), timeout=START + limit, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return None
    if child.returncode:
        raise RuntimeError(child.stderr)
    with np.load(answer) as file:
        return Answer(Seconds(*file["seconds"].tolist()), file["variance"].astype(float), neighbours.cores())


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


def compare(report: Report, path: Path, repeats: int, threads: int, limit: float) -> None:
    pairs = {}
    for name, flavour in FLAVOURS.items():
        if flavour.exact:  # taken in turn: what else the machine does hits both sides alike
            our = ours(path, repeats)
        their = theirs(path, name, repeats, threads, limit)
        report.add(f"seconds_{name}", threads, seconds(f"laplace-torch, {flavour.label}", their, limit))
        if flavour.exact:
            pairs[name] = our, their
        if their is not None:
            accuracy = difference if flavour.exact else deviation
            report.add(f"{accuracy.__name__}_{name}", threads, accuracy(flavour.label, their.variance, our.variance))
    best = min((our for our, _ in pairs.values()), key=lambda our: our.seconds.total)
    report.add("seconds_deltaband", threads, seconds("deltaband, Exact()", best, limit))
    for name, result in speed(pairs, limit).items():
        report.add(name, threads, result)


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
    return Result(claim, float(ratio.mean()), details={"least": float(ratio.min()), "greatest": float(ratio.max())})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--threads", nargs="+", type=int, default=[os.cpu_count() or 1], help="one run for each (default: all cores)"
    )
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a flavour is stopped")
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing is written unless --out is given")
    parser.add_argument("--out", type=Path, help="folder for laplace.json and laplace.md (default: benchmarks/results)")
    args = parser.parse_args()
    warnings.simplefilter("ignore", DeltabandWarning)
    size = QUICK if args.quick else SIZE
    folder = args.out or (None if args.quick else HERE / "results")
    report = Report(folder, "laplace", "deltaband and laplace-torch 0.3", keep=False)
    python()
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "problem.npz"
        trained(size).save(path)
        for threads in args.threads:
            with limited_to(threads):
                report.gflops[str(threads)] = {t: gflops(getattr(torch, t)) for t in ("float32", "float64")}
                compare(report, path, size.repeats, threads, args.limit)


if __name__ == "__main__":
    main()
