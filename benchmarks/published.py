"""The published implementation's way, and the same answers from deltaband: `python -m benchmarks.published`.

`row_by_row` is written from the paper for this comparison: the gradient of one row after the other by `autograd.grad`,
a buffer of 2k rows, and the thin float32 SVD of it whenever it is full (Algorithms 1 to 3). The sizes are those of
three data sets of the paper: training rows, features, and the rank that it gives them; two hidden layers of 50. The
data are synthetic, and their networks trained. Both sides run in turn in one process, to the end of the fit; the
estimate of an engine's own error, which the published way has not, is switched off. Beside them, what a fit costs that
has next to nothing to do.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from scipy.special import stdtrit
from torch import Tensor, nn

from deltaband import DeltabandWarning, Exact, ImportantDirections, PredictionIntervals
from deltaband.engines import Engine
from deltaband.fitting import accuracy

from .measure import Neighbours, Report, Result, gflops, limited_to, race
from .problem import perceptron

HERE = Path(__file__).parent
WEIGHT_DECAY = 1e-2
NEW_ROWS = 100
BATCH, EPOCHS = 128, 20
LEAST_SPEED = {"important_directions": 3.0, "exact": 6.0}
MOST_DIFFERENCE = 0.5  # of mean widths, in %
MOST_OVERHEAD = 50  # milliseconds


@dataclass(frozen=True)
class Size:
    """Training rows and features of a data set, and the rank of the sketch."""

    n: int
    features: int
    rank: int


SIZES = {"wine": Size(1_399, 11, 200), "concrete": Size(830, 8, 500), "protein": Size(6_000, 9, 500)}
QUICK = {"quick": Size(150, 4, 20)}


@dataclass(frozen=True)
class RowByRow:
    """What Algorithm 3 ends in, and the noise."""

    eigenvalues: Tensor  # of Σ⁻¹, (d² + λ')/(d² + λ' + λ)²
    directions: Tensor  # (r, p)
    p_star: float
    noise_std: float
    freedom: float

    def widths(self, model: nn.Module, X: Tensor, level: float = 0.95) -> np.ndarray:
        q = torch.stack([(self.eigenvalues * (self.directions @ gradient(model, x)[1]) ** 2).sum() for x in X])
        t = float(stdtrit(self.freedom, (1 + level) / 2))
        return 2 * t * self.noise_std * np.sqrt(1 + q.double().numpy())


def gradient(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output of one row, and its gradient (p,)."""
    y = model(x[None])[0, 0]
    return y.detach(), torch.cat([g.flatten() for g in torch.autograd.grad(y, list(model.parameters()))])


def row_by_row(model: nn.Module, X: Tensor, y: Tensor, damping: float, k: int) -> RowByRow:
    """Algorithm 3, which calls Algorithm 1 for every row."""
    p = sum(w.numel() for w in model.parameters())
    B, filled, shift, rss = torch.zeros(2 * k, p), 0, 0.0, 0.0
    for x, target in zip(X, y, strict=True):
        output, B[filled] = gradient(model, x)
        filled, rss = filled + 1, rss + float(target - output) ** 2
        if filled < 2 * k:
            continue
        _, d, V = torch.linalg.svd(B, full_matrices=False)
        order = torch.argsort(d**2 / (d**2 + damping) ** 2, descending=True)[:k]
        delta = d[order].min()
        scaled = torch.sqrt(torch.clamp(d[order] ** 2 - delta**2, min=0.0))
        kept = scaled > 0
        filled, shift = int(kept.sum()), shift + float(delta) ** 2 / 2
        B = torch.zeros(2 * k, p)
        B[:filled] = scaled[kept, None] * V[order[kept]]
    _, d, V = torch.linalg.svd(B[:filled], full_matrices=False)
    e = d**2 + shift
    h = e / (e + damping)
    p_star = float((2 * h - h**2).sum())
    freedom = len(X) - p_star
    return RowByRow(e / (e + damping) ** 2, V, p_star, (rss / freedom) ** 0.5, freedom)


def problem(size: Size) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A trained network, its rows X and y, and new rows."""
    generator, n, d = torch.Generator().manual_seed(0), size.n + NEW_ROWS, size.features
    X = torch.randn(n, d, generator=generator)
    y = X[:, :3].sin().sum(dim=1) + X[:, 0] * X[:, 1] + 0.3 * torch.randn(n, generator=generator)
    y = (y - y.mean()) / y.std()
    torch.manual_seed(0)
    model = perceptron(d, 50, 50, 1)
    optimiser = torch.optim.Adam(model.parameters(), weight_decay=WEIGHT_DECAY)
    for _ in range(EPOCHS):
        for rows in torch.randperm(size.n, generator=generator).split(BATCH):
            optimiser.zero_grad()
            nn.functional.mse_loss(model(X[rows])[:, 0], y[rows]).backward()
            optimiser.step()
    return model.eval(), X[: size.n], y[: size.n], X[size.n :]


def compared(name: str, size: Size, repeats: int) -> Iterator[tuple[str, Result]]:
    """How many times as fast each engine is as the published way, and how far the widths are apart."""
    model, X, y, new = problem(size)
    damping = size.n * WEIGHT_DECAY / 2
    published: list[RowByRow] = []
    bands = {
        "important_directions": PredictionIntervals(
            model, weight_decay=WEIGHT_DECAY, engine=ImportantDirections(size.rank)
        ),
        "exact": PredictionIntervals(model, weight_decay=WEIGHT_DECAY, engine=Exact()),
    }

    def plain() -> None:
        published[:] = [row_by_row(model, X, y, damping, size.rank)]

    with patch.object(accuracy, "affordable_rows", lambda engine, *_: 0):
        fits = [lambda band=band: band.fit(X, y, progress=False) for band in bands.values()]
        theirs, *ours = race(plain, *fits, repeats=repeats)
    widths = published[0].widths(model, new)
    for (kind, band), seconds in zip(bands.items(), ours, strict=True):
        mine = band.predict(new).width.double().numpy()
        engine: Engine | str = band.engine
        details: dict[str, Any] = {"published s": theirs, "deltaband s": seconds, "p": band.n_parameters_}
        details |= {"p*": band.effective_parameters_, "published p*": published[0].p_star}
        details |= {"width / published width": float(mine.mean() / widths.mean())}
        claim = f"{name} (n = {size.n:,}, rank {size.rank}): the published way / {engine!r}"
        yield f"{name}_{kind}", Result(claim, theirs / seconds, at_least=LEAST_SPEED[kind], details=details)
        if kind == "important_directions":
            off = 100 * abs(float(mine.mean() / widths.mean()) - 1)
            claim = f"{name}: mean widths of Important Directions are off those of the published way by"
            yield f"{name}_widths", Result(claim, off, at_most=MOST_DIFFERENCE, unit=" %")


def small(repeats: int) -> Iterator[tuple[str, Result]]:
    """A fit to 200 rows with about a thousand parameters, in processor time: nearly all of it is overhead."""
    X, y = torch.randn(200, 8), torch.randn(200)
    model = perceptron(8, 25, 25, 1)
    for engine, name in ((None, "small_auto"), (ImportantDirections(50), "small_important_directions")):
        band = PredictionIntervals(model, weight_decay=WEIGHT_DECAY, engine=engine or "auto")
        seconds: list[tuple[float, float]] = []
        with patch.object(accuracy, "affordable_rows", lambda engine, *_: 0):
            for _ in range(repeats):
                wall, own = time.perf_counter(), time.process_time()
                band.fit(X, y, progress=False)
                seconds.append((time.perf_counter() - wall, time.process_time() - own))
        own, wall = (1000 * min(column) for column in list(zip(*seconds, strict=True))[::-1])
        claim = f"a whole fit to 200 rows, p = {band.n_parameters_}, {engine or 'auto'!s}: processor time"
        details = {"wall ms": wall, "first ms": 1000 * seconds[0][0]}
        yield name, Result(claim, own, at_most=MOST_OVERHEAD, unit=" ms", details=details)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SIZES, default=list(SIZES), metavar="NAME")
    parser.add_argument("--threads", nargs="+", type=int, default=list(range(1, 1 + min(2, os.cpu_count() or 1))))
    parser.add_argument("--quick", action="store_true", help="a small size; nothing is written unless --out is given")
    parser.add_argument("--out", type=Path, help="folder for published.json and .md (default: benchmarks/results)")
    args = parser.parse_args()
    warnings.simplefilter("ignore", DeltabandWarning)
    folder = args.out or (None if args.quick else HERE / "results")
    report = Report(folder, "published", "The published implementation's way", keep=True)
    list(compared("warm", QUICK["quick"], 1))  # whatever is loaded on first use is loaded now
    for threads in args.threads:
        with limited_to(threads):
            report.gflops[str(threads)] = {t: gflops(getattr(torch, t)) for t in ("float32", "float64")}
            for part, result in small(5 if args.quick else 30):
                report.add(part, threads, result)
            for name, size in (QUICK if args.quick else {name: SIZES[name] for name in args.only}).items():
                neighbours = Neighbours()
                for part, result in compared(name, size, 1 if args.quick else 3):
                    result.details["other processes' cores"] = neighbours.cores()
                    report.add(part, threads, result)


if __name__ == "__main__":
    main()
