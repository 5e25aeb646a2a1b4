"""A tour of deltaband in a minute: `deltaband demo`, or `make demo`.

First the usual case: a network trained with AdamW and early stopping, and calibrated. Then two that are trained to
their minimum: three engines put intervals around their predictions, and two pictures are saved, each for light and
for dark pages.
"""

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import matplotlib.style
import numpy as np
import scipy.linalg  # noqa: F401 - threadpoolctl limits the libraries that are loaded by now
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_diabetes
from threadpoolctl import threadpool_limits
from torch import nn

from .. import metrics, plots
from ..display import LIGHT
from ..engines import Engine, Exact, ImportantDirections, RobustFrequentDirections
from ..intervals import PredictionIntervals
from .output import format_table

TRAINING_STEPS = 3000
GREY = LIGHT["grey"]  # on white and on black
DARK_PAGE = {"figure.facecolor": "#131416", "axes.facecolor": "#131416", "savefig.facecolor": "#131416"}
METRICS = (metrics.coverage, metrics.mean_width, metrics.width_error_correlation, metrics.interval_score)
HEADER = ("data", "engine", "coverage", "width", "width–error r", "score", "p*", "seconds")  # of the table


def tour(out: Path, steps: int = TRAINING_STEPS) -> None:
    """Print what is found, and save pictures to a folder, which is made.

    Args:
        out: The folder.
        steps: How long each network is trained.
    """
    out.mkdir(parents=True, exist_ok=True)
    pictures, scores = [], []
    with threadpool_limits(1):  # matrices this small gain nothing from a second core, and lose minutes where it is busy
        print(f"The usual case, AdamW, early stopping and a calibration:\n{usual()}\n")
        for make, draw, size in ((gap, _draw_gap, (8, 4.2)), (diabetes, _draw_diabetes, (12, 4.5))):
            problem = make(steps)  # drawn before the engines are timed: torch has warmed up then
            pictures += _save(problem, draw, size, out)
            scores += compare(problem)
    print("Engines compared at 95 %, uncalibrated (width: standard deviations of y; p*: effective parameters):")
    print(format_table([dict(zip(HEADER, score.values(), strict=True)) for score in scores]))
    print(f"\nsaved {', '.join(map(str, pictures))}")


def usual() -> str:
    """Train with AdamW until validation rows are predicted no better, calibrate on rows held out, score others."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (2000, 2))
    y = np.sin(2 * x[:, 0]) + (0.1 + 0.2 * np.abs(x[:, 1])) * rng.standard_normal(len(x))
    train, validation, held_out, new = slice(0, 600), slice(600, 750), slice(750, 1000), slice(1000, 2000)
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)
    model = best = _network(2, 50, nn.Tanh)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lowest = np.inf
    for _ in range(300):
        with torch.no_grad():
            error = nn.functional.mse_loss(model(inputs[validation])[:, 0], targets[validation]).item()
        if error < lowest:
            lowest, best = error, copy.deepcopy(model)
        optimiser.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(model(inputs[train])[:, 0], targets[train]))
        optimiser.step()
    band = PredictionIntervals(best).fit(x[train], y[train], progress=False).calibrate(x[held_out], y[held_out])
    return str(band.evaluate(x[new], y[new], levels=[0.5, 0.9]))


class Problem(NamedTuple):
    """A network, its training rows, and rows that it is not trained on."""

    name: str
    model: nn.Module
    weight_decay: float
    rank: int  # of the sketches
    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    def trained(self, steps: int) -> Self:
        """Train in full batches with a learning rate that decays to zero: the formula assumes a minimum."""
        inputs, targets = torch.from_numpy(self.x), torch.from_numpy(self.y)
        optimiser = torch.optim.Adam(self.model.parameters(), lr=1e-2, weight_decay=self.weight_decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        for _ in range(steps):
            optimiser.zero_grad()
            torch.autograd.backward(nn.functional.mse_loss(self.model(inputs).squeeze(1), targets))
            optimiser.step()
            schedule.step()
        return self

    def fit(self, engine: Engine) -> PredictionIntervals:
        # the loss was the mean of squares, which `weight_decay=` refers to by default
        band = PredictionIntervals(self.model, weight_decay=self.weight_decay, engine=engine)
        return band.fit(self.x, self.y, progress=False)


def gap(steps: int = TRAINING_STEPS) -> Problem:
    """Train smooth units with a small weight decay on a noisy wave without rows in [−1, 1]: there they are free."""
    rng = np.random.default_rng(0)

    def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.uniform(1, 3, n) * rng.choice([-1, 1], n)
        return x[:, None], np.sin(1.6 * x) + 0.15 * rng.standard_normal(n)

    return Problem("gap", _network(1, 20, nn.Tanh), 1e-4, 20, *draw(160), *draw(1000)).trained(steps)


def diabetes(steps: int = TRAINING_STEPS) -> Problem:
    """Train on scikit-learn's diabetes data: 442 patients, ten measurements, the progression a year later."""
    x, y = load_diabetes(return_X_y=True)
    train, test = np.split(np.random.default_rng(0).permutation(len(y)), [331])
    x, y = ((values - values[train].mean(axis=0)) / values[train].std(axis=0) for values in (x, y))
    # With so much noise, a tenth of this decay would leave p* ≈ n: no degrees of freedom to estimate the noise.
    model = _network(10, 50, nn.LeakyReLU)
    return Problem("diabetes", model, 0.1, 100, x[train], y[train], x[test], y[test]).trained(steps)


def _network(n_features: int, width: int, activation: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    hidden = [nn.Linear(n_features, width), activation(), nn.Linear(width, width), activation()]
    return nn.Sequential(*hidden, nn.Linear(width, 1)).double()


def compare(problem: Problem) -> list[dict[str, Any]]:
    scores = []
    for engine in (Exact(), ImportantDirections(problem.rank), RobustFrequentDirections(problem.rank)):
        start = time.perf_counter()
        band = problem.fit(engine)
        intervals = band.predict(problem.x_test)
        last = {"effective_parameters": band.effective_parameters_, "seconds": time.perf_counter() - start}
        measured = {metric.__name__: metric(problem.y_test, intervals) for metric in METRICS}
        scores.append({"data": problem.name, "engine": repr(engine), **measured, **last})
    return scores


def _save(
    problem: Problem, draw: Callable[[Problem, Any], None], size: tuple[float, float], folder: Path
) -> list[Path]:
    """Save the picture of a problem for light and for dark pages."""
    paths = [folder / f"{problem.name}.png", folder / f"{problem.name}-dark.png"]
    styles: tuple[list[str | dict[str, str]], ...] = ([], ["dark_background", DARK_PAGE])
    for path, style in zip(paths, styles, strict=True):
        with matplotlib.style.context(style):
            figure = Figure(figsize=size, layout="constrained")
            draw(problem, figure)
            figure.savefig(path, dpi=160)
    return paths


def _draw_gap(problem: Problem, figure: Any) -> None:
    grid = np.linspace(-3.5, 3.5, 401)
    intervals = problem.fit(Exact()).predict(grid[:, None], level=[0.5, 0.95])
    ax = figure.add_subplot(xlabel="x", ylabel="y")
    plots.band(grid, intervals, data=(problem.x, problem.y), truth=(grid, np.sin(1.6 * grid)), ax=ax)
    ax.annotate("", (-1, -2.1), (1, -2.1), arrowprops={"arrowstyle": "<->", "color": GREY})
    ax.text(0, -2.17, "no data here", ha="center", va="top", color=GREY)
    ax.set_ylim(-2.5, 2.1)


def _draw_diabetes(problem: Problem, figure: Any) -> None:
    exact, sketch = problem.fit(Exact()), problem.fit(ImportantDirections(problem.rank))
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    plots.sorted_by_width(problem.y_test, exact.predict(problem.x_test), ax=left)
    plots.spectra(sketch.spectrum(), exact.spectrum(), ax=right).set_title(f"ImportantDirections, rank {problem.rank}")
