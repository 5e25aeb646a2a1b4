"""Interval score against cost: `python -m benchmarks.outside cost --data DIR`, a table and a figure.

Costs are measured here, on concrete, in units of the training of the one plain network: the training of the networks
that a method needs besides, or the way from the trained network to the intervals of the test rows. They are seconds of
one processor. Scores are relative to a constant width around the plain network, 95 %: those of
`experiments/results/noise.csv` (nine data sets, three ways of training, ten splits). What is not there has its score in
the table `methods` relative to `all weights`, which is `calibrate, no noise` here.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from experiments import data
from experiments.calibration import SETTINGS
from experiments.noise import KEY as NOISE_KEY
from experiments.noise import KINDS, NOISE_RESULTS, Part, Split, divided, train
from experiments.rows import Rows
from experiments.world_methods import Held, mapie_boosted

from .methods import KEY as METHODS_KEY
from .methods import Methods, relative
from .table import RESULTS, Cell, fill, lines

DATASETS, SETTING = ("concrete",), "adam 1e-4"
KEY = ("data", "method")
# the methods of noise.csv, the networks that they are trained with, and what they are called in the figure
TRAINED = {"plain": "", "mean-variance": "mean-variance", "ensemble": "5 mean-variance", "quantiles": "CQR"}
OURS = {"last layer": "last layer", "q alone": "calibrate, no noise", "learnt": "calibrate"}
POST_HOC = {"boosted": "MAPIE boosted", **OURS, "SCP-GN": "SCP-GN"}
OF_METHODS = {"q alone": "all weights", "learnt": "all weights + noise"}


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    for name, X, y in data.Available(DATASETS, options.data):
        trained(name, "plain", divided(X[:100], y[:100], "random", 0))  # what a first training costs besides
        split = divided(X, y, "random", 0)
        for method in TRAINED:
            yield (name, method), partial(training, name, method, split)
        yield (name, "post hoc"), partial(post_hoc, name, split)


def trained(name: str, method: str, split: Split) -> list[torch.nn.Module]:
    kind = "mean-variance" if method == "ensemble" else method
    members = KINDS[kind].members if method == "ensemble" else 1
    part = Part(name, SETTING, "cost", range(1))
    with tempfile.TemporaryDirectory() as folder:
        kinds = {kind: KINDS[kind]._replace(members=members)}
        return train(part, [split], Path(folder), lambda text: None, kinds)[kind][0]


def training(name: str, method: str, split: Split) -> list[dict[str, object]]:
    start = time.process_time()
    trained(name, method, split)
    return [{"step": method, "seconds": time.process_time() - start}]


def post_hoc(name: str, split: Split) -> list[dict[str, object]]:
    (network,), decay = trained(name, "plain", split), SETTINGS[SETTING][1]
    of_methods = {row["method"]: row["seconds"] for row in Methods(network, decay, split, 0).rows()}
    held = Held.of(network, decay, [split.training, split.held, split.calibration, split.test], 0)
    start = time.process_time()
    mapie_boosted(held)
    seconds = {"boosted": time.process_time() - start}
    seconds |= {method: of_methods[OF_METHODS.get(method, method)] for method in POST_HOC if method != "boosted"}
    return [{"step": method, "seconds": spent} for method, spent in seconds.items()]


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Cost and score of each method."""
    seconds = table.pivot_table(index="data", columns="step", values="seconds")
    cost = np.exp(np.log(seconds.div(seconds["plain"], axis=0)).mean())
    noise = Rows(NOISE_RESULTS, NOISE_KEY).read()
    noise = noise[(noise.test == "random") & (noise.calibration == "all rows")]
    log = np.log(noise.pivot_table(index=["data", "setting", "split"], columns="method", values="score_95"))
    scores = np.exp(log.sub(log["constant"], axis=0).groupby("data").mean().mean())
    others = relative(Rows(RESULTS / "methods.csv", METHODS_KEY).read(), "all weights")
    others = scores["q alone"] * np.exp(others.groupby("data").mean().mean())
    shown = [
        {"method": label, "needs": needs, "cost": cost[step], "score": scores.get(step, others.get(step))}
        for needs, steps in (("other networks", TRAINED), ("the network", POST_HOC))
        for step, label in steps.items()
        if label
    ]
    return pd.DataFrame(shown)


def markdown(table: pd.DataFrame) -> str:
    found = summary(table)
    return "\n".join(
        [
            "# Interval score against cost",
            "",
            "Cost: 1 is the training of the plain network. Score: relative to a constant width around it, 95 %, lower "
            "is better; five networks are trained together. `python -m benchmarks.outside cost --data DIR`, after "
            "`methods`.",
            "",
            *lines(found),
            "",
        ]
    )


def plot(found: pd.DataFrame, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    ax = figure.subplots()
    for needs, marker in (("the network", "o"), ("other networks", "s")):
        part = found[found.needs == needs]
        ax.semilogx(part.cost, part.score, marker, markersize=9, label=f"needs {needs}")
    for i, row in enumerate(found.sort_values("score").itertuples()):
        bold = "bold" if row.method.startswith("calibrate") else "normal"
        ax.annotate(row.method, (row.cost, row.score), (9, 14 * (i % 2) - 10), textcoords="offset points", weight=bold)
    ax.axhline(1, color="grey", linewidth=1, linestyle=":")
    ax.annotate(
        "constant width",
        (1, 1),
        (0, 4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        color="grey",
        ha="right",
    )
    ticks = [tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5) if found.cost.min() / 2 < tick]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    ax.set_xticks([], minor=True)
    ax.set_xlim(found.cost.min() / 2, found.cost.max() * 3)
    ax.set_xlabel("cost besides the trained network; 1 is its own training")
    ax.set_ylabel("interval score at 95 %, relative to constant width")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str]) -> None:
    out = fill("cost", __doc__ or "", KEY, cells, markdown, arguments)
    plot(summary(Rows(out, KEY).read()), out.with_suffix(".png"))
