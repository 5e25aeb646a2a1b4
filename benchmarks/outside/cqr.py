"""CQR's protocol, on those of its data sets that are at hand: `python -m benchmarks.outside cqr --data DIR`.

As in Romano, Patterson and Candès (2019): random 80 % of the rows for training, half of them held out for the conformal
step, targets in units of their mean absolute value, 90 % intervals, their average length and coverage on the other
20 %. Its data sets here are concrete and bio (called protein here, a random 10 000 rows
of it). The networks are not the paper's: they have two layers of 50 and are stopped early by 15 % of their rows, as in
`python -m experiments noise` (Adam, weight decay 1e-4). The paper's table averages over eleven data sets, so no
published figure belongs to one row here.

- split: constant width around a plain network; calibrate: `calibrate` around the same one;
- CQR: a network for the 5 % and 95 % quantiles, conformalised;
- CQR and q: `PredictionIntervals(quantile network, quantiles=…)`, calibrated.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from deltaband import PredictionIntervals
from deltaband.baselines import QuantileNetwork
from experiments import data
from experiments.noise import KINDS, Kind, Part, Split, pinball, train
from experiments.protocol import standardised

from .methods import some
from .table import Cell, fill, lines, scaled, scores

LEVEL = 0.9
SETTING, WEIGHT_DECAY = "adam 1e-4", 1e-4
QUANTILES = (0.05, 0.5, 0.95)
SPLITS = {"concrete": 10, "protein": 5}
ROWS_AT_MOST = 10_000
KEY = ("data", "split")
NETWORKS = {
    "plain": KINDS["plain"],
    "quantiles": Kind(len(QUANTILES), partial(pinball, quantiles=QUANTILES), 1),
}


def divided(X: np.ndarray, y: np.ndarray, split: int) -> tuple[Split, float]:
    """The rows of a split, and how many mean absolute targets one of its units is."""
    order = np.random.default_rng(split).permutation(len(y))
    training, test = np.split(order, [int(0.8 * len(y))])
    proper, calibration = np.array_split(training, 2)
    held = int(0.15 * len(proper))
    parts = standardised(X, y, proper, proper[held:], proper[:held], calibration, test)[1:]
    return Split(*parts), float(y[proper].std() / np.abs(y[proper]).mean())


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    for name, X, y in data.Available(list(SPLITS), options.data):
        X, y = some(X, y, ROWS_AT_MOST)
        for first in range(0, SPLITS[name], 5):
            part = Part(name, SETTING, "cqr", range(first, first + 5))
            splits = [divided(X, y, split) for split in part.splits]
            trained = cache(partial(_trained, part, tuple(each for each, _ in splits), options))

            def rows(i: int, trained: Any = trained, splits: Any = splits) -> list[dict[str, object]]:
                return rows_of_split({kind: networks[i][0] for kind, networks in trained().items()}, *splits[i])

            for i, split in enumerate(part.splits):
                yield (name, split), partial(rows, i)


def _trained(part: Part, splits: Sequence[Split], options: argparse.Namespace) -> dict[str, list[list[nn.Module]]]:
    return train(part, splits, options.networks, lambda text: None, NETWORKS)


def rows_of_split(networks: dict[str, nn.Module], split: Split, unit: float) -> list[dict[str, object]]:
    held, test = split.calibration, split.test
    band = PredictionIntervals(networks["plain"], weight_decay=WEIGHT_DECAY).fit(*split.training, progress=False)
    both = PredictionIntervals(networks["quantiles"], quantiles=QUANTILES, weight_decay=WEIGHT_DECAY)
    both.fit(*split.training, progress=False)
    found = {
        "split": scaled(held.y - band.predict_mean(held.x), 1.0, band.predict_mean(test.x), 1.0, LEVEL),
        "calibrate, no noise": band.calibrate(*held, noise="none").predict(test.x, LEVEL),
        "calibrate": band.calibrate(*held).predict(test.x, LEVEL),
        "CQR": QuantileNetwork(networks["quantiles"], QUANTILES).calibrate(*held).predict(test.x, LEVEL),
        "CQR and q": both.calibrate(*held).predict(test.x, LEVEL),
    }
    return [
        {"method": name} | {k: v if k == "coverage" else v * unit for k, v in scores(test.y, intervals).items()}
        for name, intervals in found.items()
    ]


def markdown(table: pd.DataFrame) -> str:
    shown = []
    for name, of_set in table.groupby("data", sort=False):
        for method, part in of_set.groupby("method", sort=False):
            shown.append(
                {
                    "data": name,
                    "splits": str(len(part)),
                    "method": method,
                    "average length": f"{part.width.mean():.3f} ± {part.width.sem() if len(part) > 1 else 0:.3f}",
                    "coverage": f"{100 * part.coverage.mean():.2f} %",
                    "interval score": f"{part.score.mean():.3f}",
                }
            )
    return "\n".join(
        [
            "# CQR's protocol, 90 %",
            "",
            "Lengths in units of the mean absolute target, mean and standard error over the splits; the lower, the "
            "better, where the coverage is 90 %. `python -m benchmarks.outside cqr --data DIR`.",
            "",
            *lines(pd.DataFrame(shown)),
            "",
        ]
    )


def main(arguments: Sequence[str]) -> None:
    fill("cqr", __doc__ or "", KEY, cells, markdown, arguments)
