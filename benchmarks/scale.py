"""Large networks and many rows: what the exact method and "auto" cost there.

    python -m benchmarks.scale [--only NAME ...]

Each measurement is a process of its own, so that its peak memory is its own too. Results go to `results/scale.json` and
`scale.md` as they come; rows of other names stay. Epochs are those of plain training with Adam, in batches of 128, in
the same process: the time of up to 2,048 rows, in proportion to all of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deltaband import DeltabandWarning, Exact, PredictionIntervals, RandomProjection
from deltaband.network.network import Network

from .measure import Neighbours, Report, Result, environment, gflops, limited_to, race
from .memory import peak_memory, resident_memory
from .networks import ResNet18, SmallGPT
from .problem import perceptron

HERE = Path(__file__).parent
WEIGHT_DECAY = 1e-2
BATCH = 128
EPOCH_ROWS = 2048  # whose training is timed
NEW_ROWS = 1000


@dataclass(frozen=True)
class Case:
    """A perceptron and synthetic data: features that depend on eight factors, a smooth function of them, and noise."""

    n: int
    widths: tuple[int, ...]
    epochs: int = 0  # trained beforehand

    def build(self) -> tuple[nn.Sequential, Tensor, Tensor, Tensor]:
        """The network, X and y, and new rows."""
        generator = torch.Generator().manual_seed(0)
        n, d = self.n + NEW_ROWS, self.widths[0]
        Z = torch.randn(n, 8, generator=generator)
        X = (Z @ torch.randn(8, d, generator=generator) / 8**0.5).tanh() + 0.1 * torch.randn(n, d, generator=generator)
        y = Z.sin().sum(dim=1) + 0.3 * torch.randn(n, generator=generator)
        X, y = (X - X.mean(dim=0)) / X.std(dim=0), (y - y.mean()) / y.std()
        torch.manual_seed(0)
        model = perceptron(*self.widths, 1)
        train(model, X[: self.n], y[: self.n], self.epochs)
        return model.eval(), X[: self.n], y[: self.n], X[self.n :]


MILLION = Case(2_000, (100, 950, 950), epochs=5)
TEN_MILLION = Case(2_000, (100, 3_120, 3_120))
BOTH_LARGE = Case(50_000, (100, 950, 950), epochs=2)
YEAR = Case(463_715, (90, 50, 50))
SUBSET = 8_000  # the largest part of BOTH_LARGE that the exact method is fitted to
BUDGET = 2e9


def train(model: nn.Module, X: Tensor, y: Tensor, epochs: int) -> float:
    """Seconds."""
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=WEIGHT_DECAY)
    start = time.perf_counter()
    for _ in range(epochs):
        for rows in torch.randperm(len(X)).split(BATCH):
            optimiser.zero_grad()
            nn.functional.mse_loss(model(X[rows]).reshape(len(rows)), y[rows]).backward()
            optimiser.step()
    return time.perf_counter() - start


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and the megabytes at the peak above what was there before."""
    warm = perceptron(3, 4, 1)  # whatever is loaded on first use is loaded now
    PredictionIntervals(warm, damping=1.0).fit(torch.randn(50, 3), torch.randn(50)).predict(torch.randn(5, 3))
    gc.collect()
    before, start = resident_memory(), time.perf_counter()
    work()
    return time.perf_counter() - start, peak_memory() - before


# --- what a child process does: numbers in a dictionary


def fit_and_predict(case: Case, covariance: Any, memory: float | None = None) -> dict[str, Any]:
    model, X, y, new = replace(case, epochs=0).build()  # training would leave its own peak behind
    band = PredictionIntervals(model, weight_decay=WEIGHT_DECAY, engine=covariance, memory=memory)
    chosen = band.plan(X, y).chosen
    assert chosen is not None
    seconds, megabytes = measured(lambda: band.fit(X, y, progress=False).predict(new))
    return {
        "p": band.n_parameters_,
        "seconds": seconds,
        "MB": megabytes,
        "predicted MB": chosen.nbytes / 1e6,
        "engine": str(chosen),
        "p*": band.effective_parameters_,
    }


def against_training(case: Case, covariance: Any, memory: float | None, epochs: int) -> dict[str, Any]:
    """The same network in one process: seconds of training, and of a fit and predictions."""
    model, X, y, new = case.build()
    training = train(model, X, y, epochs)
    band = PredictionIntervals(model.eval(), weight_decay=WEIGHT_DECAY, engine=covariance, memory=memory)
    start = time.perf_counter()
    band.fit(X, y, progress=False)
    fitted = time.perf_counter()
    band.predict(new)
    end = time.perf_counter()
    error = band.error_report()
    return {
        "training s": training,
        "fit s": fitted - start,
        "predict s": end - fitted,
        "p*": band.effective_parameters_,
        "estimated error": error.width,
        "engine": repr(band._fits[0].engine),
    }


def against_exact(case: Case, memory: float | None, engine: Any = None) -> dict[str, Any]:
    """An engine, or the one that "auto" takes for all rows, and the exact method, both fitted to a part of them."""
    model, X, y, new = case.build()
    chosen = (
        PredictionIntervals(model, weight_decay=WEIGHT_DECAY, engine=engine or "auto", memory=memory).plan(X, y).chosen
    )
    assert chosen is not None
    widths, p_star = [], []
    for engine in (chosen.engine, Exact()):
        band = PredictionIntervals(model, weight_decay=WEIGHT_DECAY, engine=engine)
        band.fit(X[:SUBSET], y[:SUBSET], progress=False)
        widths.append(band.predict(new).width.double().numpy())
        p_star.append(band.effective_parameters_)
    error = np.abs(widths[0] / widths[1] - 1)
    return {
        "engine": repr(chosen.engine),
        "mean": float(error.mean()),
        "largest": float(error.max()),
        "p*": p_star[0],
        "exact p*": p_star[1],
        "rows": SUBSET,
    }


def in_epochs(kind: str, engine: Any = None, memory: float | None = None, asked: bool = True) -> dict[str, Any]:
    """A fit, predictions and plain passes over the new rows in turn if `asked`, and an epoch of training."""
    model, X, y, new = LARGE[kind].build()
    engine = engine or RandomProjection(DIM)
    band = PredictionIntervals(model.eval(), weight_decay=WEIGHT_DECAY, engine=engine, memory=memory)
    fit, megabytes = measured(lambda: band.fit(X, y, progress=False))
    if asked:
        band.predict(new)  # what is computed for the first rows only is computed now
    weights = list(model.parameters())

    def passes() -> None:
        for x in new.split(BATCH):
            torch.autograd.grad(model(x).sum(), weights)

    runs = (lambda: band.predict(new), passes) if asked else ()
    spent = race(*runs, repeats=1 if fit > ONCE_FROM else 3) if runs else []
    report = band.error_report(sample=64) if isinstance(engine, Exact) else band.error_report()
    some = slice(min(len(X), EPOCH_ROWS))
    train(model, X[:BATCH], y[:BATCH], 1)
    epoch = train(model, X[some], y[some], 1) * len(X) / len(X[some])
    return {
        "n": len(X),
        "p": band.n_parameters_,
        "engine": repr(band.fits_[0].engine),
        "fit s": fit,
        "epoch s": epoch,
        "MB": megabytes,
        **dict(zip(("predict s", "forward and backward s"), spent, strict=False)),
        "new rows": len(new),
        "p*": band.effective_parameters_,
        "estimated error": report.width,
    }


def _synthetic(model: nn.Module, X: Tensor) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    y, n = torch.randn(len(X)), len(X) - NEW_PASSES
    return model, X[:n], y[:n], X[n:]


def _resnet() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return _synthetic(ResNet18(), torch.randn(2_000 + NEW_PASSES, 3, 64, 64))


def _gpt() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return _synthetic(SmallGPT(), torch.randint(100, (1_000 + NEW_PASSES, 128)))


@dataclass(frozen=True)
class Large:
    """A network with its data, and how many epochs of its training a projected fit may take."""

    build: Callable[[], tuple[nn.Module, Tensor, Tensor, Tensor]]
    most_epochs: float


ONCE_FROM = 120.0  # seconds of a fit, after which predictions are timed once
DIM = 2048
NEW_PASSES = 256
LARGE: dict[str, Large] = {
    "million": Large(replace(BOTH_LARGE, epochs=0).build, 12),
    "ten_million": Large(Case(50_000, (100, 3_120, 3_120)).build, 12),
    "hundred_million": Large(Case(2_000, (100, 9_950, 9_950)).build, 8),
    "resnet": Large(_resnet, 10),
    "gpt": Large(_gpt, 12),
}
EXACT_MEMORY = 4e9  # of the exact fit of the ResNet-18
MOST_EXACT_EPOCHS = 40


def against_dense(kind: str) -> dict[str, Any]:
    """The dual form from layer factors, and the formula on dense float64 rows."""
    torch.manual_seed(0)
    model, X = NETWORKS[kind]()
    y = torch.randn(len(X))
    n = len(X) - min(50, len(X) // 4)
    band, projected = (
        PredictionIntervals(model, damping=DAMPING, engine=engine).fit(X[:n], y[:n], progress=False)
        for engine in (Exact(), RandomProjection(DIM))
    )
    q, h = (answer(X[n:]).double().numpy() for answer in (band.variance, band.leverage))
    widths = np.sqrt(1 + projected.variance(X[n:]).double().numpy())
    G = np.concatenate([rows.double().numpy() for rows in _rows(model, X)])
    J, g = G[:n], G[n:]
    K = J @ J.T
    A = np.linalg.inv(K + DAMPING * np.eye(n))
    k = J @ g.T
    c = A @ k
    truth = {"q": (c**2).sum(axis=0), "h": ((g**2).sum(axis=1) - (k * c).sum(axis=0)) / DAMPING}
    p_star = float(n - ((DAMPING * A) ** 2).sum())
    errors = {"q": float(np.abs(q / truth["q"] - 1).max()), "h": float(np.abs(h / truth["h"] - 1).max())}
    errors["p*"] = abs(band.effective_parameters_ / p_star - 1)
    errors["projected widths"] = float(np.abs(widths / np.sqrt(1 + truth["q"]) - 1).mean())
    return {"p": band.n_parameters_, "n": n, **errors}


DAMPING = 1.0
MOST_PROJECTED = 1.0  # percent; q itself is noisy by about √(2/dim), 3 %


def _rows(model: nn.Module, X: Tensor) -> Iterator[Tensor]:
    network = Network(model.double())
    for x in X.split(64):
        yield network.gradients(x.double() if x.is_floating_point() else x)[1].rows()


def _mlp() -> tuple[nn.Module, Tensor]:
    return perceptron(20, 100, 100, 1), torch.randn(450, 20)


def _convolutional() -> tuple[nn.Module, Tensor]:
    layers = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU())
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 5 * 5, 1)).eval(), torch.randn(350, 3, 12, 12)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(x)).mean(dim=1))[:, 0]


def _transformer() -> tuple[nn.Module, Tensor]:
    return Transformer().eval(), torch.randint(100, (350, 12))


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "MLP": _mlp,
    "convolutional network": _convolutional,
    "transformer": _transformer,
    "ResNet-18": lambda: (ResNet18().eval(), torch.randn(32, 3, 64, 64)),
    "GPT": lambda: (SmallGPT().eval(), torch.randint(100, (64, 128))),
}


# --- the claims


def dense() -> Iterator[tuple[str, Result]]:
    for kind in NETWORKS:
        found = child(f"against_dense({kind!r})")
        worst = max(found["q"], found["h"], found["p*"])
        claim = f"exact dual form from layer factors against dense float64 rows: largest relative error, {kind}"
        name = f"dense_{kind.split()[0]}"
        yield name, Result(claim, worst, at_most=1e-5, unit="", details=found)
        claim = f"RandomProjection({DIM}) of the same rows against the dense ones: mean error of √(1 + q), {kind}"
        yield f"{name}_projected", Result(claim, 100 * found["projected widths"], at_most=MOST_PROJECTED, unit=" %")


def million() -> Iterator[tuple[str, Result]]:
    timed = child("against_training(MILLION, Exact(), None, 30)")
    seconds = timed["fit s"] + timed["predict s"]
    claim = f"p = 1,000,351, n = 2,000: exact fit and {NEW_ROWS:,} predictions / 30 epochs of training"
    yield "million_time", Result(claim, seconds / timed["training s"], at_most=1, details=timed)
    found = child("fit_and_predict(MILLION, Exact())")
    claim = "the same: memory above the model and the data"
    yield "million_memory", Result(claim, found["MB"], at_most=1500, unit=" MB", details=found)


def ten_million() -> Iterator[tuple[str, Result]]:
    found = child("fit_and_predict(TEN_MILLION, Exact())")
    claim = f"p = {found['p']:,}, n = 2,000, exact: memory above the model and the data"
    yield "ten_million_memory", Result(claim, found["MB"], at_most=4000, unit=" MB", details=found)


def both_large() -> Iterator[tuple[str, Result]]:
    found = child("in_epochs('million', 'auto', BUDGET)")
    claim = f'p = 1,000,351, n = 50,000, "auto" with memory={BUDGET:.0e}: memory above the model and the data'
    yield "both_large_memory", Result(claim, found["MB"], at_most=BUDGET / 1e6, unit=" MB", details=found)
    yield "both_large_time", Result("its fit / one epoch of training", found["fit s"] / found["epoch s"])
    found = child("against_exact(BOTH_LARGE, BUDGET)")
    claim = f"its engine against exact, both fitted to {SUBSET:,} of the rows: mean error of the widths"
    yield "both_large_error", Result(claim, 100 * found["mean"], at_most=5, unit=" %", details=found)


def exact_resnet() -> Iterator[tuple[str, Result]]:
    found = child("in_epochs('resnet', Exact(), EXACT_MEMORY, asked=False)")
    claim = f"ResNet-18, 64 × 64, n = {found['n']:,}, exact with memory={EXACT_MEMORY:.0e}: fit / one epoch of training"
    ratio = found["fit s"] / found["epoch s"]
    yield "exact_resnet", Result(claim, ratio, at_most=MOST_EXACT_EPOCHS, details=found)
    memory = Result("the same: memory of the fit", found["MB"], at_most=EXACT_MEMORY / 1e6, unit=" MB")
    yield "exact_resnet_memory", memory


def projection_error() -> Iterator[tuple[str, Result]]:
    found = child("against_exact(BOTH_LARGE, None, RandomProjection(DIM))")
    claim = f"p = 1,000,351, RandomProjection({DIM}) against exact, both on {SUBSET:,} rows: mean error of the widths"
    yield "projection_error", Result(claim, 100 * found["mean"], at_most=0.1, unit=" %", details=found)


def projection(kind: str) -> Iterator[tuple[str, Result]]:
    found, name = child(f"in_epochs({kind!r})"), f"projection_{kind}"
    what = f"RandomProjection({DIM}), p = {found['p']:,}, n = {found['n']:,}"
    claim = f"{what} ({kind}): fit / one epoch of training"
    yield name, Result(claim, found["fit s"] / found["epoch s"], at_most=LARGE[kind].most_epochs, details=found)
    ratio = found["predict s"] / found["forward and backward s"]
    yield f"{name}_predict", Result("the same: predictions / forward and backward", ratio, at_most=3)
    if kind == "hundred_million":
        yield f"{name}_memory", Result("the same: memory of the fit", found["MB"], at_most=6000, unit=" MB")


def year() -> Iterator[tuple[str, Result]]:
    found = child("fit_and_predict(YEAR, Exact())")
    claim = f"n = {YEAR.n:,}, p = {found['p']:,}, exact primal form: fit and {NEW_ROWS:,} predictions"
    yield "year_time", Result(claim, found["seconds"], at_most=900, unit=" s", details=found)
    yield "year_memory", Result(f"{claim}: memory", found["MB"], at_most=2500, unit=" MB")


def child(code: str) -> dict[str, Any]:
    """What a process of its own finds."""
    run = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            f"import deltaband; from benchmarks.scale import *; print(json.dumps({code}))",
        ],
        cwd=HERE.parent,
        env=environment(torch.get_num_threads()),
        capture_output=True,
        text=True,
    )
    if run.returncode:
        raise RuntimeError(run.stderr)
    return json.loads(run.stdout)


CLAIMS: dict[str, Callable[[], Iterator[tuple[str, Result]]]] = {
    **{f.__name__: f for f in (dense, million, ten_million, both_large, year, projection_error, exact_resnet)},
    **{f"projection_{kind}": partial(projection, kind) for kind in LARGE},
}


def main() -> None:
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CLAIMS, default=list(CLAIMS), metavar="NAME")
    parser.add_argument("--threads", type=int, default=cores)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    warnings.simplefilter("ignore", DeltabandWarning)
    report = Report(args.out, "scale", "Large networks and many rows", keep=True)  # `--only` renews some rows
    with limited_to(args.threads):
        report.gflops[str(args.threads)] = {t: gflops(getattr(torch, t)) for t in ("float32", "float64")}
        for name in args.only:
            neighbours = Neighbours()
            for part, result in CLAIMS[name]():
                result.details["other processes' cores"] = neighbours.cores()
                report.add(part, args.threads, result)


if __name__ == "__main__":
    main()
