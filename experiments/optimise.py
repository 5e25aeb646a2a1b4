"""Bayesian optimisation with a network's linearised posterior, against a Gaussian process at equal budget.

    python -m experiments optimise

Branin (2 inputs) and Hartmann (6 inputs) are minimised without noise, by BoTorch: both methods begin with the same
points of a Sobol sequence and take the maximum of the log expected improvement, one point after the other. The process
is `SingleTaskGP` with its hyperparameters fitted in every step. The network is one layer of 1,000 sines in
random directions. In every step the scale of each input, the mean and the noise are those of the
largest evidence of its linearisation (in the last layer, that is), under the priors that BoTorch has for the process,
and the last layer is the minimum of Σ (y − ŷ)² + λ‖w‖² for the λ that follows; `DeltaModel` makes the posterior. What
was chosen after a look at such runs: that scales and mean follow the points. Networks without found worse minima.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.distributions import LogNormal, MultivariateNormal

from deltaband import DeltabandWarning, Exact, PredictionIntervals

from .arguments import RESULTS, file_to_write, positive
from .rows import Rows, write_table

KEY = ("function", "method", "seed")
SEEDS = 10
HIDDEN, LEAST_NOISE = 1000, 1e-4
METHODS = ("process", "network")
RESTARTS, RAW_SAMPLES, ACQUISITION_STEPS = 4, 128, 50


class Problem(NamedTuple):
    name: str
    dim: int
    first: int  # points of the Sobol sequence
    more: int  # points that a method chooses

    @property
    def function(self) -> Any:
        from botorch.test_functions import Branin, Hartmann

        return Branin() if self.name == "branin" else Hartmann(self.dim)

    def points(self, seed: int) -> Tensor:
        """The first points, in the unit cube."""
        return torch.quasirandom.SobolEngine(self.dim, scramble=True, seed=seed).draw(self.first).double()

    def regret(self, X: Tensor) -> Tensor:
        """How far above the minimum points of the unit cube are."""
        lower, upper = self.function.bounds.double()
        return self.function(lower + (upper - lower) * X, noise=False) - self.function.optimal_value


PROBLEMS = {each.name: each for each in (Problem("branin", 2, 5, 15), Problem("hartmann", 6, 12, 20))}


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


class NetworkModel:
    """Trains one layer of sines for all points so far; directions and phases stay, the scales of inputs do not."""

    def __init__(self, dim: int, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.directions = torch.randn(HIDDEN, dim, generator=rng)
        self.phases = 2 * math.pi * torch.rand(HIDDEN, generator=rng)
        self.network = nn.Sequential(nn.Linear(dim, HIDDEN), Sine(), nn.Linear(HIDDEN, 1))
        self.priors = LogNormal(math.sqrt(2) + math.log(dim) / 2, math.sqrt(3)), LogNormal(-4.0, 1.0)
        length, noise = (each.mode.log().item() for each in self.priors)
        self.likely = np.array([length] * dim + [noise, 0.0])  # logarithms of input scales and noise; the mean

    def features(self, X: Tensor, lengths: Tensor) -> Tensor:  # (n, d) -> (n, hidden)
        return torch.sin(X / lengths @ self.directions.T + self.phases)

    def loss(self, found: np.ndarray, X: Tensor, z: Tensor) -> tuple[float, np.ndarray]:
        """Return minus the logarithm of the evidence times the prior, and its gradient."""
        given = torch.from_numpy(found).requires_grad_()
        lengths, noise, mean = given[:-2].exp(), given[-2].exp(), given[-1]
        F = self.features(X, lengths)
        K = 2 / HIDDEN * F @ F.T + (noise + LEAST_NOISE) * torch.eye(len(z))
        value = -MultivariateNormal(mean.expand(len(z)), K).log_prob(z)
        value = value - self.priors[0].log_prob(lengths).sum() - self.priors[1].log_prob(noise)
        value.backward()
        assert given.grad is not None
        return value.item(), given.grad.numpy()

    def __call__(self, X: Tensor, y: Tensor) -> Any:
        from deltaband.botorch import DeltaModel

        mean, std = float(y.mean()), float(y.std())
        z = (y - mean) / std
        found = torch.from_numpy(minimize(self.loss, self.likely, (X, z), jac=True, method="L-BFGS-B").x)
        lengths, noise = found[:-2].exp(), float(found[-2].exp()) + LEAST_NOISE
        damping = noise * HIDDEN / 2  # so that weights of the last layer have the variance 2/hidden
        first, _, last = self.network
        with torch.no_grad():
            first.weight.copy_(self.directions / lengths)
            first.bias.copy_(self.phases)
            F = self.features(X, lengths)
            last.bias.fill_(found[-1])
            last.weight.copy_(F.T @ torch.linalg.solve(F @ F.T + damping * torch.eye(len(z)), z - found[-1]))
        band = PredictionIntervals(
            self.network, damping=damping, engine=Exact(), parameters=["2.weight"], target_transform=(mean, std)
        ).fit(X, z, progress=False)
        return DeltaModel(band, noise_std=std * math.sqrt(noise))


def process(X: Tensor, y: Tensor) -> Any:
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.models.transforms import Standardize
    from gpytorch.mlls import ExactMarginalLogLikelihood

    model = SingleTaskGP(X, y[:, None], outcome_transform=Standardize(1))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def optimise(problem: Problem, method: str, seed: int, more: int) -> list[dict[str, object]]:
    """A row for each number of evaluations, with the smallest regret so far."""
    from botorch.acquisition import LogExpectedImprovement
    from botorch.optim import optimize_acqf

    make: Callable[[Tensor, Tensor], Any] = process if method == "process" else NetworkModel(problem.dim, seed)
    torch.manual_seed(seed)
    X, start = problem.points(seed), time.perf_counter()
    for _ in range(more):
        y = -problem.regret(X)
        acquisition = LogExpectedImprovement(make(X, y), best_f=y.max())
        x, _ = optimize_acqf(
            acquisition,
            torch.stack([torch.zeros(problem.dim), torch.ones(problem.dim)]),
            q=1,
            num_restarts=RESTARTS,
            raw_samples=RAW_SAMPLES,
            options={"maxiter": ACQUISITION_STEPS},
        )
        X = torch.cat([X, x.detach()])
    best, seconds = problem.regret(X).cummin(dim=0).values.tolist(), time.perf_counter() - start
    key = {"function": problem.name, "method": method, "seed": seed}
    shown = range(problem.first, len(X) + 1)
    return [key | {"evaluations": n, "regret": best[n - 1], "seconds": seconds} for n in shown]


def final(table: pd.DataFrame) -> pd.DataFrame:
    """The last regret of each seed: mean, its standard error, median, and seconds, by function and method."""
    last = table.sort_values("evaluations").groupby(list(KEY), as_index=False).last()
    by = last.groupby(["function", "method"])
    found = by.regret.agg(["mean", "sem", "median", "count"])
    return found.assign(evaluations=by.evaluations.max(), seconds=by.seconds.mean()).reset_index()


def markdown(table: pd.DataFrame) -> str:
    lines = [
        "# Bayesian optimisation: a network's posterior against a Gaussian process",
        "",
        "`python -m experiments optimise`, with `--functions` and `--seeds` for less. Simple regret, the smallest",
        "value found minus the minimum: mean over seeds, its standard error, and the median. Both begin with the same",
        "points. Seconds are of a whole run, and depend on what else the machine did.",
        "",
        "| function | evaluations | method | seeds | mean regret | standard error | median | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in final(table).itertuples():
        numbers = f"{row.count} | {row.mean:.3g} | {row.sem:.2g} | {row.median:.3g} | {row.seconds:.0f}"
        lines.append(f"| {row.function} | {row.evaluations} | {row.method} | {numbers} |")
    return "\n".join([*lines, "", "![Regret by evaluations](optimise.png)", ""])


def draw(table: pd.DataFrame, path: Path) -> None:
    """The mean regret by evaluations, with its standard error."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(table.function))
    figure = Figure(figsize=(4.5 * len(names), 3.5), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for method in METHODS:
            part = table[(table.function == name) & (table.method == method)]
            if part.empty:
                continue
            curve = part.groupby("evaluations").regret.agg(["mean", "sem"])
            (line,) = axes.plot(curve.index, curve["mean"], label=method)
            low, high = curve["mean"] - curve["sem"], curve["mean"] + curve["sem"]
            axes.fill_between(curve.index, low.clip(lower=curve["mean"] / 10), high, color=line.get_color(), alpha=0.2)
        axes.set(title=name, xlabel="evaluations", ylabel="regret", yscale="log")
        axes.legend()
    figure.savefig(path, dpi=120)


def write(results: Path) -> bool:
    """The table and the picture beside the results, where there are any."""
    written = write_table(results, KEY, markdown)
    if written:
        draw(Rows(results, KEY).read(), results.with_suffix(".png"))
    return written


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments optimise", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=positive, default=SEEDS, metavar="N")
    parser.add_argument("--points", type=positive, metavar="N", help="chosen points (default: 15 and 20)")
    parser.add_argument("--functions", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--out", type=file_to_write, default=RESULTS / "optimise.csv", metavar="FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the matrices are small
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore", DeltabandWarning)
    rows = Rows(options.out, KEY)
    for seed in range(options.seeds):
        for problem in (PROBLEMS[name] for name in options.functions):
            for method in options.methods:
                if (problem.name, method, seed) not in rows.done():
                    rows.append(optimise(problem, method, seed, options.points or problem.more))
                    print(f"{problem.name}, {method}, seed {seed}", flush=True)
    write(options.out)
