"""Other scales, and the last layer, after the same conformal step: `python -m benchmarks.outside methods --data DIR`.

One network of two layers of 50 for each data set, way of training and split, as in `python -m experiments noise`, of
data sets with more rows a random 3 000. Every method gets this network, its training rows and the same held-out rows,
and gives 95 % intervals |residual|/scale ≤ quantile. The scales:

- constant: 1;
- leverage of inputs, of features: √(1 + hᵢ) by the hat matrix of the inputs or of the last layer's features, as in
  leverage-weighted conformal prediction (arXiv 2602.12693);
- rectified: a 95 % quantile of |residual| given x, by gradient boosting on half of the held-out rows, the quantile on
  the other half, as in rectified conformal prediction (RCP, arXiv 2502.16336);
- LLPR: √h of the last layer alone, as in arXiv 2403.02251;
- SCP-GN: √(1 + h) of all weights, λ that of the training, as in ACP-GN's split variant;
- last layer, all weights: `band.calibrate(x, y, noise="none")`, with `parameters="last"` and without;
- last layer + noise, all weights + noise: `band.calibrate(x, y)`.

Seconds, of one processor, are from the trained network to the intervals of the test rows, the pass over the training
rows included.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.ensemble import GradientBoostingRegressor
from torch import nn

from deltaband import Intervals, PredictionIntervals
from experiments import data
from experiments.calibration import SETTINGS
from experiments.noise import KINDS, Part, Split, divided, train

from .table import Cell, fill, lines, scaled, scores

LEVEL = 0.95
SPLITS = 3
ROWS_AT_MOST = 3_000
TRAINED = ("adam 1e-4", "adamw 1e-2")
KEY = ("data", "setting", "split")


class Methods:
    """All methods around one network."""

    def __init__(self, network: nn.Sequential, weight_decay: float, split: Split, seed: int) -> None:
        self.network, self.weight_decay, self.split, self.seed = network, weight_decay, split, seed
        self.seconds = 0.0  # of passes over the training rows that were made before the clock
        self.fitted = cache(self._fitted)
        with torch.no_grad():
            outputs = [network(torch.from_numpy(part.x))[:, 0].numpy() for part in (split.calibration, split.test)]
        self.residuals, self.mean = split.calibration.y - outputs[0], outputs[1]

    def _fitted(self, parameters: str) -> tuple[PredictionIntervals, float]:
        start = time.process_time()
        band = PredictionIntervals(self.network, weight_decay=self.weight_decay, parameters=parameters)
        band.fit(*self.split.training, progress=False)
        return band, time.process_time() - start

    def band(self, parameters: str) -> PredictionIntervals:
        band, self.seconds = self.fitted(parameters)
        return band

    def by_scales(self, held: np.ndarray | float, new: np.ndarray | float) -> Intervals:
        return scaled(self.residuals, held, self.mean, new, LEVEL)

    def constant(self) -> Intervals:
        return self.by_scales(1.0, 1.0)

    def hat_matrix(self, features: nn.Module) -> Intervals:
        parts = (self.split.training, self.split.calibration, self.split.test)
        with torch.no_grad():
            F, *others = (features(torch.from_numpy(part.x)).double().numpy() for part in parts)
        F, *others = (np.column_stack([np.ones(len(each)), each]) for each in (F, *others))
        inverse = np.linalg.pinv(F.T @ F, rcond=1e-10, hermitian=True)
        return self.by_scales(*(np.sqrt(1 + np.einsum("ij,jk,ik->i", each, inverse, each)) for each in others))

    def leverage(self, parameters: str, noise: float) -> Intervals:
        band = self.band(parameters)
        h = [np.asarray(band.leverage(part.x), dtype=float) for part in (self.split.calibration, self.split.test)]
        return self.by_scales(*(np.sqrt(noise + each) for each in h))

    def rectified(self) -> Intervals:
        held, half = self.split.calibration, len(self.residuals) // 2
        boosting = GradientBoostingRegressor(loss="quantile", alpha=LEVEL, random_state=self.seed)
        boosting.fit(held.x[:half], np.abs(self.residuals[:half]))
        least = 1e-3 * np.abs(self.residuals).mean()
        scales = [np.maximum(boosting.predict(x), least) for x in (held.x[half:], self.split.test.x)]
        return scaled(self.residuals[half:], scales[0], self.mean, scales[1], LEVEL)

    def calibrated(self, parameters: str, noise: str) -> Intervals:
        band = self.band(parameters).calibrate(*self.split.calibration, noise=noise)
        return band.predict(self.split.test.x, LEVEL)

    def rows(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        for name, method in {
            "constant": self.constant,
            "leverage of inputs": partial(self.hat_matrix, nn.Identity()),
            "leverage of features": partial(self.hat_matrix, self.network[:-1]),
            "rectified": self.rectified,
            "LLPR": partial(self.leverage, "last", 0.0),
            "SCP-GN": partial(self.leverage, "all", 1.0),
            "last layer": partial(self.calibrated, "last", "none"),
            "all weights": partial(self.calibrated, "all", "none"),
            "last layer + noise": partial(self.calibrated, "last", "auto"),
            "all weights + noise": partial(self.calibrated, "all", "auto"),
        }.items():
            for parameters in ("last", "all"):
                self.fitted(parameters)
            self.seconds = 0.0
            start = time.process_time()
            intervals = method()
            seconds = time.process_time() - start + self.seconds
            found.append({"method": name} | scores(self.split.test.y, intervals) | {"seconds": seconds})
        return found


def some(X: np.ndarray, y: np.ndarray, at_most: int = ROWS_AT_MOST) -> tuple[np.ndarray, np.ndarray]:
    rows = np.random.default_rng(0).permutation(len(y))[:at_most]
    return X[rows], y[rows]


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    sets = [(name, *some(X, y)) for name, X, y in data.Available(data.NAMES, options.data)]
    for setting in TRAINED:
        weight_decay = SETTINGS[setting][1]
        for name, X, y in sets:
            part = Part(name, setting, "outside", range(SPLITS))
            splits = [divided(X, y, "random", split) for split in part.splits]
            networks = cache(partial(plain_networks, part, tuple(splits), options))

            def rows(i: int, networks: Any = networks, splits: Any = splits, decay: float = weight_decay) -> Any:
                return Methods(networks()[i], decay, splits[i], i).rows()

            for split in part.splits:
                yield (name, setting, split), partial(rows, split)


def plain_networks(part: Part, splits: Sequence[Split], options: argparse.Namespace) -> list[nn.Sequential]:
    kinds = {"plain": KINDS["plain"]}
    return [each[0] for each in train(part, splits, options.networks, lambda text: None, kinds)["plain"]]


def relative(table: pd.DataFrame, to: str) -> pd.DataFrame:
    """log of the interval score relative to that of a method on the same split: a column a method."""
    log = np.log(table.pivot_table(index=list(KEY), columns="method", values="score"))
    return log.sub(log[to], axis=0)


def markdown(table: pd.DataFrame) -> str:
    names = list(table.method.unique())
    sets = [name for name in data.NAMES if name in set(table.data)]
    logs = relative(table, "constant")[names]
    by_set = np.exp(logs.groupby("data").mean().loc[sets])
    overall = np.exp(logs.groupby(["setting", "data"]).mean().groupby("setting").mean()).T.loc[names]
    sizes = logs.reset_index().groupby("setting").data.nunique()
    overall = overall.rename(columns={name: f"{name}, {size} data sets" for name, size in sizes.items()})
    overall["all"] = np.exp(logs.groupby("data").mean().mean())
    overall["lower on"] = [f"{(by_set[name] < 1).sum()} of {len(sets)}" for name in names]
    overall["coverage"] = [f"{100 * table[table.method == name].coverage.mean():.1f} %" for name in names]
    overall.insert(0, "scale", names)
    each = by_set.T.reset_index().rename(columns={"method": "scale"})
    counts = table.groupby("data").split.nunique()
    return "\n".join(
        [
            "# Other scales, and the last layer, after the same conformal step",
            "",
            "Interval score at 95 % relative to constant width around the same network, geometric means over data sets "
            f"and {counts.min()} splits; lower is better. `python -m benchmarks.outside methods --data DIR`.",
            "",
            *lines(overall),
            "",
            "## By data set",
            "",
            *lines(each),
            "",
            "## Is the last layer enough?",
            "",
            *answer(table, sets),
            "",
        ]
    )


def answer(table: pd.DataFrame, sets: list[str]) -> list[str]:
    """All weights against the last layer alone, in words and by data set."""
    logs = relative(table, "last layer")
    pairs = {"q alone": logs["all weights"], "noise": logs["all weights + noise"] - logs["last layer + noise"]}
    rows, words = {"data": sets}, {}
    for name, log in pairs.items():
        by_set = log.groupby("data").agg(["mean", "sem"]).loc[sets]
        ratio = np.exp(by_set["mean"])
        error = ratio * by_set["sem"].fillna(0)
        rows[f"all weights / last layer, {name}"] = [f"{a:.3f} ± {b:.3f}" for a, b in zip(ratio, error, strict=True)]
        clear = (ratio + 2 * error < 1).sum(), (ratio - 2 * error > 1).sum()
        words[name] = (
            f"{np.exp(by_set['mean'].mean()):.3f} of the score of the last layer alone, lower on "
            f"{(ratio < 1).sum()} of {len(sets)} data sets (by more than two standard errors on {clear[0]}, higher by "
            f"as much on {clear[1]})"
        )
    seconds = table.pivot_table(index=list(KEY), columns="method", values="seconds")
    times = np.exp(np.log(seconds["all weights"] / seconds["last layer"]).mean())
    return [
        f"With all weights the interval score is {words['q alone']}; where the noise is learnt too, {words['noise']}. "
        f"All weights took {times:.1f} times as long.",
        "",
        *lines(pd.DataFrame(rows)),
    ]


def main(arguments: Sequence[str]) -> None:
    fill("methods", __doc__ or "", KEY, cells, markdown, arguments)
