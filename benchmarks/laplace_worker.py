"""One flavour of laplace-torch on a saved problem, timed: the other side of `benchmarks.laplace`, without deltaband.

Its posterior precision is JᵀJ/σ² + prior_precision·I: with σ = 1 and λ as the prior's precision, its functional
variance is gᵀ(JᵀJ + λI)⁻¹g, which deltaband calls the leverage.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .problem import Problem

WARM_UP_ROWS = 200
PATIENCE = 60.0  # seconds after which a measurement is not repeated


class Seconds(NamedTuple):
    fit: float
    predict: float  # the first time, with whatever was put off until then
    again: float

    @property
    def total(self) -> float:
        return self.fit + self.predict


@dataclass(frozen=True)
class Flavour:
    """What `Laplace` is asked for, and the batch size that serves it best on this problem."""

    subset: str
    structure: str
    batch_rows: int
    backend: str | None = None  # None: its default, CurvlinopsGGN

    @property
    def exact(self) -> bool:
        """It is the full posterior of all weights."""
        return (self.subset, self.structure) == ("all", "full")

    @property
    def label(self) -> str:
        weights = "all weights" if self.subset == "all" else "last layer"
        return f"{self.structure}, {weights}, {self.backend or 'CurvlinopsGGN (default)'}"

    def fit(self, problem: Problem) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """The mean and the functional variance of rows, by the fitted posterior."""
        posterior = self.posterior(problem)
        return lambda x: posterior(x, pred_type="glm")

    def posterior(self, problem: Problem) -> Any:
        """The fitted posterior."""
        from laplace import Laplace, curvature
        from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

        backend = {"backend": getattr(curvature, self.backend)} if self.backend else {}
        posterior: Any = Laplace(
            problem.model,
            "regression",
            subset_of_weights=self.subset,
            hessian_structure=self.structure,
            sigma_noise=1.0,
            prior_precision=problem.damping,
            **backend,
        )
        rows = TensorDataset(problem.X, problem.y[:, None])
        batches = BatchSampler(SequentialSampler(rows), self.batch_rows, drop_last=False)
        posterior.fit(DataLoader(rows, sampler=batches, batch_size=None))  # whole batches, not collated row by row
        return posterior


FLAVOURS = {
    "full": Flavour("all", "full", 500),
    "full_backpack": Flavour("all", "full", 2_000, "BackPackGGN"),
    "full_asdl": Flavour("all", "full", 2_000, "AsdlGGN"),
    "kron": Flavour("all", "kron", 2_000),
    "diag": Flavour("all", "diag", 500),
    "last_layer": Flavour("last_layer", "full", 500),
}


def best_round(path: Path, fit: Callable[[Problem], Callable], repeats: int) -> tuple[Seconds, Callable]:
    """The round with the least fit + predict, and what the last fit returned: the function that predicts.

    Each round has a network of its own, and one with few rows goes before.
    """
    few = slice(WARM_UP_ROWS)
    problem = Problem.load(path)
    fit(replace(problem, X=problem.X[few], y=problem.y[few]))(problem.new[few])
    rounds: list[Seconds] = []
    begin = time.perf_counter()
    while len(rounds) < repeats and (not rounds or time.perf_counter() - begin < PATIENCE):
        problem = Problem.load(path)
        times = [time.perf_counter()]
        predict = fit(problem)
        times.append(time.perf_counter())
        for _ in range(2):
            predict(problem.new)
            times.append(time.perf_counter())
        rounds.append(Seconds(*(b - a for a, b in pairwise(times))))
    return min(rounds, key=lambda seconds: seconds.total), predict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problem", type=Path)
    parser.add_argument("answer", type=Path, help="the seconds and the functional variances, as .npz")
    parser.add_argument("flavour", choices=FLAVOURS)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--joint", action="store_true", help="the covariances of all new rows instead, untimed")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    if args.joint:
        problem = Problem.load(args.problem)
        torch.set_default_dtype(problem.X.dtype)
        _, covariance = FLAVOURS[args.flavour].posterior(problem)(problem.new, pred_type="glm", joint=True)
        np.savez(args.answer, covariance=covariance.numpy())
        return
    seconds, predict = best_round(args.problem, FLAVOURS[args.flavour].fit, args.repeats)
    _, variance = predict(Problem.load(args.problem).new)
    np.savez(args.answer, seconds=seconds, variance=variance[:, 0, 0].numpy())


if __name__ == "__main__":
    main()
