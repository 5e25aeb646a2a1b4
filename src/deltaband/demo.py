"""A tour of deltaband in a minute: `deltaband demo`, or `python -m deltaband.demo [--out DIR]`.

Two networks are trained, three engines put intervals around their predictions, and two pictures are saved.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from . import metrics, plots
from .engines import Engine, Exact, ImportantDirections, RobustFrequentDirections
from .intervals import PredictionIntervals

STEPS = 3000
ROW = "{:<10} {:<34} {:>6} {:>6} {:>6} {:>8} {:>6} {:>8}"
METRICS = (metrics.coverage, metrics.mean_width, metrics.width_error_correlation, metrics.interval_score)
HEADER = ("data", "engine", "p_cov", "w_sd", "r", "score", "p*", "seconds")


class Line(NamedTuple):
    """How an engine does on a problem."""

    data: str
    engine: str
    coverage: float
    width: float
    width_error_correlation: float
    interval_score: float
    effective_parameters: float
    seconds: float

    def __str__(self) -> str:
        scores = [f"{score:.3f}" for score in self[2:6]]
        return ROW.format(self.data, self.engine, *scores, f"{self.effective_parameters:.1f}", f"{self.seconds:.2f}")


class Problem(NamedTuple):
    """A trained network, what it was trained on, and rows it has not seen."""

    name: str
    model: nn.Module
    weight_decay: float
    rank: int  # of the sketches
    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    def fit(self, engine: Engine) -> PredictionIntervals:
        # the mean of squares with Adam's weight_decay is what `weight_decay=` stands for
        band = PredictionIntervals(self.model, weight_decay=self.weight_decay, engine=engine)
        return band.fit(self.x, self.y, progress=False)


def wave(x: np.ndarray) -> np.ndarray:
    return np.sin(1.6 * x)


def gap(steps: int = STEPS) -> Problem:
    """A noisy wave, seen on both sides of a gap: between −1 and 1 there are no rows at all.

    Smooth units and a small weight decay leave the network free in the gap, and the band says so.
    """
    rng = np.random.default_rng(0)

    def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.uniform(1, 3, n) * rng.choice([-1, 1], n)
        return x[:, None], wave(x) + 0.15 * rng.standard_normal(n)

    x, y = draw(160)
    model = _train(nn.Tanh, (1, 20, 20, 1), x, y, weight_decay=1e-4, steps=steps)
    return Problem("gap", model, 1e-4, 20, x, y, *draw(1000))


def diabetes(steps: int = STEPS) -> Problem:
    """scikit-learn's diabetes data: 442 patients, ten measurements, the progression a year later."""
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    train, test = order[:331], order[331:]
    x = (x - x[train].mean(axis=0)) / x[train].std(axis=0)
    y = (y - y[train].mean()) / y[train].std()
    # With so much noise, a tenth of this decay would leave p* ≈ n: nothing to estimate the noise from.
    model = _train(nn.LeakyReLU, (10, 50, 50, 1), x[train], y[train], weight_decay=0.1, steps=steps)
    return Problem("diabetes", model, 0.1, 100, x[train], y[train], x[test], y[test])


def compare(problem: Problem) -> Iterator[Line]:
    """A line for each engine, judged on the rows that training has not seen."""
    for engine in (Exact(), ImportantDirections(problem.rank), RobustFrequentDirections(problem.rank)):
        start = time.perf_counter()
        band = problem.fit(engine)
        intervals = band.predict(problem.x_test)
        seconds = time.perf_counter() - start
        coverage, width, r, score = (float(metric(problem.y_test, intervals)) for metric in METRICS)
        p_star = float(band.effective_parameters_)
        yield Line(problem.name, repr(engine), coverage, width, r, score, p_star, seconds)


def draw_gap(problem: Problem, path: Path) -> None:
    from matplotlib.figure import Figure

    grid = np.linspace(-3.5, 3.5, 401)
    intervals = problem.fit(Exact()).predict(grid[:, None], level=[0.5, 0.95])
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    ax = figure.add_subplot(xlabel="x", ylabel="y")
    plots.band(grid, intervals, data=(problem.x, problem.y), truth=(grid, wave(grid)), ax=ax)
    ax.annotate("", (-1, -2.1), (1, -2.1), arrowprops={"arrowstyle": "<->", "color": plots.GREY})
    ax.text(0, -2.17, "no data here", ha="center", va="top", color=plots.GREY)
    ax.set_ylim(-2.5, 2.1)
    figure.savefig(path, dpi=160)


def draw_diabetes(problem: Problem, path: Path) -> None:
    from matplotlib.figure import Figure

    exact, sketch = problem.fit(Exact()), problem.fit(ImportantDirections(problem.rank))
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    plots.sorted_by_width(problem.y_test, exact.predict(problem.x_test), ax=left)
    plots.spectra(sketch.spectrum(), exact.spectrum(), ax=right).set_title(f"ImportantDirections, rank {problem.rank}")
    figure.savefig(path, dpi=160)


def missing() -> str | None:
    """What has to be installed for it."""
    names = [name for name in ("matplotlib", "sklearn") if importlib.util.find_spec(name) is None]
    return f"no {' and no '.join(names)}: pip install 'deltaband[plots,sklearn]'" if names else None


def pictures(out: Path) -> list[Path]:
    return [out / "gap.png", out / "diabetes.png"]


def run(out: Path, steps: int = STEPS) -> Iterator[Line]:
    """The lines of the table as they come, and the pictures into the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    with _one_thread():
        for make, draw, path in zip((gap, diabetes), (draw_gap, draw_diabetes), pictures(out), strict=True):
            problem = make(steps)
            # The picture comes first, so that no engine's seconds are those of torch warming up.
            draw(problem, path)
            yield from compare(problem)


def show(out: Path, steps: int = STEPS) -> None:
    print(ROW.format(*HEADER))
    for line in run(out, steps):
        print(line, flush=True)
    print(f"\nsaved {' and '.join(map(str, pictures(out)))}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m deltaband.demo", description="A tour of deltaband in a minute.")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), metavar="DIR", help="where the pictures go")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of each network (%(default)s)")
    options = parser.parse_args(arguments)
    if problem := missing():
        parser.error(problem)
    show(options.out, options.steps)


def _one_thread() -> AbstractContextManager[object]:
    """Matrices this small gain nothing from a second core, and lose minutes where it is busy with something else."""
    # scikit-learn brings threadpoolctl, which limits what is loaded by now: hence SciPy.
    import scipy.linalg  # noqa: F401
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1)


def _train(
    activation: type[nn.Module], sizes: tuple[int, ...], x: np.ndarray, y: np.ndarray, weight_decay: float, steps: int
) -> nn.Module:
    """Full batches, float64, and a learning rate that decays to zero: the formula is about a minimum."""
    torch.manual_seed(0)
    layers = itertools.chain.from_iterable((nn.Linear(a, b), activation()) for a, b in itertools.pairwise(sizes))
    model = nn.Sequential(*layers)[:-1].double()
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        loss = nn.functional.mse_loss(model(inputs).squeeze(1), targets)
        torch.autograd.backward(loss)
        optimiser.step()
        schedule.step()
    return model


if __name__ == "__main__":
    main()
