"""laplace-torch's posteriors after the same conformal step: `python -m benchmarks.outside laplace --data DIR`.

Time and memory at three sizes are `python -m benchmarks.laplace`'s table; here is what the variances are worth. One
network a data set and split (Adam, weight decay 1e-2, where λ = n·wd/2 is right); each posterior gets this λ, in
laplace-torch's environment, and its functional variance v(x) of the held-out and the test rows makes 95 %
intervals |residual|/√(1 + v) ≤ quantile. Ours beside it: the same step with `leverage`, and `calibrate`. Seconds are of
the posterior's fit and its first prediction, one thread.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from benchmarks import laplace
from benchmarks.laplace_worker import FLAVOURS
from benchmarks.problem import Problem
from deltaband import PredictionIntervals
from experiments import data
from experiments.noise import Part, Split, divided

from .methods import plain_networks
from .table import Cell, fill, lines, scaled, scores

LEVEL = 0.95
SETTING, WEIGHT_DECAY = "adam 1e-2", 1e-2
DATASETS, SPLITS = ("boston", "concrete"), 2
POSTERIORS = ("full_backpack", "kron", "diag", "last_layer", "ella", "valla")
LIMIT = 300.0  # seconds
KEY = ("data", "split", "method")


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    for name, X, y in data.Available(DATASETS, options.data):
        part = Part(name, SETTING, "outside", range(SPLITS))
        splits = [divided(X, y, "random", split) for split in part.splits]
        networks = cache(partial(plain_networks, part, tuple(splits), options))
        for i in part.splits:
            for method in ("leverage", "calibrate", *POSTERIORS):

                def rows(method: str = method, i: int = i, networks: Any = networks, splits: Any = splits) -> Any:
                    return [measured(method, networks()[i], splits[i])]

                yield (name, i, method), rows


def measured(method: str, network: nn.Sequential, split: Split) -> dict[str, object]:
    held, test = split.calibration, split.test
    with torch.no_grad():
        outputs = [network(torch.from_numpy(part.x))[:, 0].numpy() for part in (held, test)]
    start = time.perf_counter()
    if method in POSTERIORS:
        variance, seconds = posterior(method, network, split)
    else:
        band = PredictionIntervals(network, weight_decay=WEIGHT_DECAY).fit(*split.training, progress=False)
        variance = [] if method == "calibrate" else [np.asarray(band.leverage(part.x)) for part in (held, test)]
        seconds = time.perf_counter() - start
    if method == "calibrate":
        intervals = band.calibrate(*held).predict(test.x, LEVEL)
        seconds = time.perf_counter() - start
    else:
        scales = [np.sqrt(1 + np.maximum(each, 0.0)) for each in variance]
        intervals = scaled(held.y - outputs[0], scales[0], outputs[1], scales[1], LEVEL)
    return scores(test.y, intervals) | {"seconds": seconds}


def posterior(method: str, network: nn.Sequential, split: Split) -> tuple[list[np.ndarray], float]:
    """The functional variances of held-out and test rows, from the environment of laplace-torch."""
    X, y = (torch.from_numpy(each) for each in split.training)
    new = torch.from_numpy(np.concatenate([split.calibration.x, split.test.x]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problem.npz"
        Problem(network, X, y, new, damping=len(y) * WEIGHT_DECAY / 2).save(path)
        answer = laplace.theirs(path, method, repeats=1, threads=1, limit=LIMIT)
    if answer is None:
        raise RuntimeError(f"{method} took longer than {LIMIT:g} s")
    both = np.split(answer.variance, [len(split.calibration.y)])
    return both, answer.seconds.total


def label(method: str) -> str:
    if method in POSTERIORS:
        return f"laplace-torch: {FLAVOURS[method].label}"
    return {"leverage": "deltaband: `leverage`", "calibrate": "deltaband: `calibrate`"}[method]


def markdown(table: pd.DataFrame) -> str:
    log = np.log(table.pivot_table(index=["data", "split"], columns="method", values="score"))
    relative = np.exp(log.sub(log["leverage"], axis=0).groupby("data").mean())
    shown = []
    for method, part in table.groupby("method", sort=False):
        sets = {name: f"{relative.loc[name, method]:.3f}" for name in DATASETS if name in relative.index}
        shown.append(
            {"posterior": label(method)}
            | sets
            | {
                "all": f"{np.exp(np.log(relative[method]).mean()):.3f}",
                "coverage": f"{100 * part.coverage.mean():.1f} %",
                "seconds": f"{part.seconds.mean():.2f}",
            }
        )
    return "\n".join(
        [
            "# laplace-torch's posteriors after the same conformal step, 95 %",
            "",
            "Interval score relative to the exact leverage, geometric mean over splits; lower is better. "
            "`python -m benchmarks.outside laplace --data DIR`.",
            "",
            *lines(pd.DataFrame(shown)),
            "",
        ]
    )


def main(arguments: Sequence[str]) -> None:
    fill("laplace", __doc__ or "", KEY, cells, markdown, arguments)
