"""Which directions should a sketch keep? Widths of four rank-k approximations against the exact ones.

    python -m experiments score --data DIR

For the first split's network of each data set: the two sketches, compressed to k directions (Important Directions keeps
those of largest d²/(d²+λ)², Robust Frequent Directions those of largest d), and what they would be without sketching:
the k true singular vectors of J with the largest d ("truncation"), and with the largest score ("top by score").
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy import linalg, stats
from torch import nn
from tqdm import tqdm

from deltaband import DeltabandWarning, ImportantDirections, PredictionIntervals, RobustFrequentDirections
from deltaband.engines.directions import importance, magnitude
from deltaband.network.network import Network

from . import data
from .arguments import on_data
from .errors import Unusable
from .progress import SECONDS, beside
from .protocol import Protocol, Samples, groups
from .reproduce import LEVEL
from .rows import Rows

RANKS = (50, 100, 200, 300, 500, 1000)
METHODS = ("directions", "robust", "truncation", "top by score")
ROWS_AT_ONCE = 2048
KEY = ("data",)  # of the rows of results


class Spectral(NamedTuple):
    """J of the training rows by its singular values, and the test rows' gradients in its right singular vectors."""

    d: np.ndarray  # (p,)
    squared_projections: np.ndarray  # (n_test, p)
    damping: float
    rss: float
    n: int

    def widths(self, kept: np.ndarray) -> np.ndarray:  # (n_test,)
        """The formula with only the kept directions; `kept` indexes `d`."""
        e = self.d[kept] ** 2
        h = e / (e + self.damping)
        freedom = self.n - (2 * h - h**2).sum()
        q = self.squared_projections[:, kept] @ (e / (e + self.damping) ** 2)
        return 2 * stats.t.ppf((1 + LEVEL) / 2, freedom) * np.sqrt(self.rss / freedom * (1 + q))


def gradients(network: nn.Module, x: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:  # (b,), (b, p)
    differentiable = Network(network)
    for part in torch.from_numpy(x).split(ROWS_AT_ONCE):
        outputs, batch = differentiable.gradients(part)
        yield outputs[:, 0].double().numpy(), batch.rows().double().numpy()


def diagonalise(network: nn.Module, train: Samples, test: Samples, weight_decay: float) -> Spectral:
    gram, predictions = 0.0, []
    for outputs, J in gradients(network, train.x):
        gram = gram + J.T @ J
        predictions.append(outputs)
    rss = float(((train.y - np.concatenate(predictions)) ** 2).sum())
    e, V = linalg.eigh(gram, overwrite_a=True, check_finite=False)
    d, V = np.sqrt(np.maximum(e[::-1], 0.0)), V[:, ::-1]
    projections = np.concatenate([(G @ V) ** 2 for _, G in gradients(network, test.x)])
    n = len(train.y)
    return Spectral(d, projections, n * weight_decay / 2, rss, n)


def study(name: str, protocol: Protocol) -> Iterator[dict[str, object]]:
    train, test = protocol.training_and_test(0)
    network = protocol.members(1)[0].networks[0]
    spectral = diagonalise(network, train, test, protocol.recipe.weight_decay)
    exact = spectral.widths(np.arange(len(spectral.d)))
    for rank in RANKS:
        for method in METHODS:
            if method in ("directions", "robust"):
                sketch = ImportantDirections if method == "directions" else RobustFrequentDirections
                engine = sketch(rank, compress=True, tail="none")
                band = PredictionIntervals(network, weight_decay=protocol.recipe.weight_decay, engine=engine)
                widths = band.fit(*train, progress=False).predict(test.x, LEVEL).width
            else:
                score = (magnitude if method == "truncation" else importance)(spectral.d, spectral.damping)
                widths = spectral.widths(np.argsort(-score, kind="stable")[:rank])
            ratio = widths / exact
            yield {
                "data": name,
                "rank": rank,
                "method": method,
                "parameters": len(spectral.d),
                "n_training": spectral.n,
                "width_error": float(np.abs(ratio - 1).mean()),
                "bias": float(ratio.mean() - 1),
                "overlap": _overlap(spectral, rank),
            }


def _overlap(spectral: Spectral, rank: int) -> float:
    """The share of the k directions of largest score that are among the k of largest d."""
    by_score = np.argsort(-importance(spectral.d, spectral.damping), kind="stable")[:rank]
    return float((by_score < rank).mean())


def plot(table: pd.DataFrame, path: Path) -> None:
    from matplotlib.figure import Figure

    names = [name for name in data.NAMES if name in set(table.data)]
    figure = Figure(figsize=(11, 3.1 * -(-len(names) // 3)), layout="constrained")
    axes = figure.subplots(-(-len(names) // 3), 3, squeeze=False, sharex=True)
    for ax, name in zip(axes.flat, names, strict=False):
        part = table[table.data == name]
        for method, style in zip(METHODS, ("o-", "s-", "o--", "s--"), strict=True):
            line = part[part.method == method]
            ax.loglog(line["rank"], np.maximum(100 * line.width_error, 1e-3), style, label=method, markersize=4)
        ax.set_title(f"{name}, n = {part.n_training.iloc[0]:,}, p = {part.parameters.iloc[0]:,}", fontsize=9)
        ax.set_ylim(1e-3, 200)
    for ax in axes.flat[len(names) :]:
        ax.remove()
    axes[0, 0].legend(fontsize=8)
    figure.supxlabel("rank")
    figure.supylabel("mean error of the width against exact, %")
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = on_data("score", __doc__, "score.csv")
    parser.add_argument("--datasets", nargs="+", default=data.NAMES, choices=data.NAMES, metavar="NAME")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", DeltabandWarning)  # of a rank too small: that is what is studied
    rows = Rows(options.out, KEY)
    folder = data.folder(options.data)
    available = data.Available([name for name in options.datasets if (name,) not in rows.done()], folder)
    with tqdm(available, unit="data set", mininterval=SECONDS) as bar:
        say = beside(bar)
        for name, X, y in bar:
            protocol = Protocol(name, X, y, next(groups(len(y), 1)), options.networks, say)
            rows.append(list(study(name, protocol)))
    table = rows.read()
    if table.empty:
        raise Unusable(f"nothing to draw: none of the data sets can be used, and {options.out} has no rows")
    plot(table, options.out.with_suffix(".png"))
    if available.malformed:
        raise SystemExit(1)
