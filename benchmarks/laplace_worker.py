"""One flavour of laplace-torch on a saved problem, timed: the other side of `benchmarks.laplace`, without deltaband.

Its posterior precision is JᵀJ/σ² + prior_precision·I: with σ = 1 and λ as the prior's precision, its functional
variance is gᵀ(JᵀJ + λI)⁻¹g, which deltaband calls the leverage.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .memory import peak_memory, resident_memory
from .problem import Problem

WARM_UP_ROWS = 200
PATIENCE = 60.0  # seconds after which a measurement is not repeated
PREDICTED_NUMBERS = 10**8  # of the gradients of rows that are predicted at once: it forms them


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
    name: str = ""  # of a method in function space
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """It is the full posterior of all weights."""
        return (self.subset, self.structure) == ("all", "full")

    @property
    def label(self) -> str:
        if self.name:
            return self.name
        weights = "all weights" if self.subset == "all" else "last layer"
        return f"{self.structure}, {weights}, {self.backend or 'CurvlinopsGGN (default)'}"

    def fit(self, problem: Problem) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """The mean and the functional variance of rows, by the fitted posterior."""
        posterior = self.posterior(problem)
        at_once = max(1, PREDICTED_NUMBERS // sum(w.numel() for w in problem.model.parameters()))

        def predict(x: Tensor) -> tuple[Tensor, Tensor]:
            kind = "gp" if self.structure == "gp" else "glm"
            found = [posterior(rows, pred_type=kind) for rows in x.split(at_once)]
            mean, variance = (torch.cat(each).detach() for each in zip(*found, strict=True))
            return mean, variance

        return predict

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
            **self.options,
        )
        rows = TensorDataset(problem.X, problem.y[:, None])
        if self.name:  # it looks rows up itself
            posterior.fit(DataLoader(rows, batch_size=self.batch_rows))
            return posterior
        batches = BatchSampler(SequentialSampler(rows), self.batch_rows, drop_last=False)
        posterior.fit(DataLoader(rows, sampler=batches, batch_size=None))  # whole batches, not collated row by row
        return posterior


NYSTROM = {"functional_approximation": "nystrom", "subsample_size": 200, "n_eigenvalues": 100}
VARIATIONAL = {"functional_approximation": "variational", "inducing_locations": "random", "num_inducing": 100}
FLAVOURS = {
    "full": Flavour("all", "full", 500),
    "full_backpack": Flavour("all", "full", 2_000, "BackPackGGN"),
    "full_asdl": Flavour("all", "full", 2_000, "AsdlGGN"),
    "kron": Flavour("all", "kron", 2_000),
    "ella": Flavour("all", "gp", 100, name="ELLA (100 directions of 200 rows)", options=NYSTROM),
    "valla": Flavour("all", "gp", 100, name="VaLLA (100 inducing rows, 100 steps)", options=VARIATIONAL),
    "diag": Flavour("all", "diag", 500),
    "last_layer": Flavour("last_layer", "full", 500),
}


def best_round(
    path: Path, fit: Callable[[Problem], Callable], repeats: int, *, warm: bool = True
) -> tuple[Seconds, Callable, float]:
    """The round with the least fit + predict, what the last fit returned, which predicts, and the peak of the memory
    in megabytes above what was there before.

    Each round has a network of its own, and one with few rows goes before.
    """
    few = slice(WARM_UP_ROWS)
    problem = Problem.load(path)
    before = resident_memory()
    if warm:
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
    return min(rounds, key=lambda seconds: seconds.total), predict, peak_memory() - before


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
    import laplace.curvature  # noqa: F401  before anything is timed

    if args.joint:
        problem = Problem.load(args.problem)
        torch.set_default_dtype(problem.X.dtype)
        _, covariance = FLAVOURS[args.flavour].posterior(problem)(problem.new, pred_type="glm", joint=True)
        np.savez(args.answer, covariance=covariance.numpy())
        return
    flavour = FLAVOURS[args.flavour]
    seconds, predict, megabytes = best_round(
        args.problem, flavour.fit, args.repeats, warm=args.flavour != "valla"
    )  # takes as many steps for few rows
    _, variance = predict(Problem.load(args.problem).new)
    np.savez(args.answer, seconds=seconds, variance=variance.reshape(len(variance)).numpy(), megabytes=megabytes)


if __name__ == "__main__":
    main()
