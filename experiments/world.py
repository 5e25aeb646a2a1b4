"""Promises to groups, under shift and in time, against other packages': `python -m experiments world --data DIR`.

For each data set and split one network of two layers of 50 is trained by AdamW and stopped early by 15 % of its
training rows, as it was at its best, after 3 000 steps of 512 rows or 60 epochs without a better one. All methods give
90 % intervals around it. Of data sets of more than 2 000 rows a random 2 000 take part, the same in all splits, in the
order of the file. The studies:

- feature, prediction: 45 % of the rows train the network, 25 % calibrate, 30 % are new. Groups are quintiles of the
  feature whose rank correlation with the target is largest, and of the prediction, both with the bounds of the training
  rows;
- tilted: the same, but a new row is kept with probability 1/(1 + exp(−3·(z − ½))), z being its standardised component
  along the first principal one: that is the density ratio, up to a factor;
- beyond: the fifth of the rows that is highest along that component is new, the others train and calibrate, 9 : 5;
- order: the first 45 % of the rows, as they stand in the file, train, the next 25 % calibrate, the others come one
  after another, at most 1 000. In no file a column says when a row was measured: what its order gives is a series that
  changes in ways nobody chose. Four series that come with statsmodels are in time: changes of CO2 by week, sea surface
  temperatures off Peru by month, growth of manufacturers' turnover by month, sunspots by year, each forecast from the
  twelve values before.

There are five splits of studies with random ones, three of data sets of more than 1 100 rows; three of beyond, and one
of order, where they would differ in the network alone.

Methods, with r the residual: constant is split conformal with |r|. crepes has it by group (Mondrian), normalised by the
residuals of the 25 nearest training rows, by group and normalised, and online, where each new row joins the calibration
rows. MAPIE has residuals learnt by gradient boosting on a quarter of the calibration rows; for series, adaptive
conformal inference (ACI) and EnbPI, which for a network that is not trained again is a rolling window. Ours are
`calibrate(x, y)` (plain), `groups=` of the study (grouped), or a matrix of the quintiles of both studies (overlapping),
`target=` the new inputs (weighted) or `weights=` the ratio (true ratio); `online` with aci, pid and window on top of
plain. Settings are the defaults; MAPIE, which has none for the step of ACI, takes ours.

Columns, in standard deviations of the training targets: coverage, of all new rows and of five parts of them (the
quintiles of the study, fifths along the component, or fifths of the series); interval score and mean width, for which
infinite bounds count as the range of the training targets, widened by as much on either side; the share of infinite
intervals. The rows of a cell are appended to the CSV as it finishes; a run that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import nn
from tqdm import tqdm

from . import data
from .arguments import on_data, positive
from .errors import Unusable
from .processes import WORKERS_HELP, in_processes
from .progress import SECONDS, beside
from .protocol import Samples, load, save, standardised
from .rows import Key, Rows
from .training import Recipe, Report, Stack, search
from .training import Rows as Learnt
from .world_methods import LEVEL, Bounds, Held, methods

KEY = ("data", "study", "split")  # of the rows of results
STUDIES = {"random": ("feature", "prediction", "tilted"), "beyond": ("beyond",), "order": ("order",)}  # by division
SERIES = ("co2", "elnino", "elec_equip", "sunspots")
LAGS = 12
ROWS_AT_MOST, IN_ORDER_AT_MOST = 2_000, 1_000
SPLITS = {"random": 5, "beyond": 3, "order": 1}
SPLITS_OF_MANY, MANY_ROWS = 3, 1_100
PARTS = 5  # of the new rows of a study
STEPS, PATIENCE = 3_000, 60
RECIPE = Recipe(weight_decay=1e-2)
SPLITS_HELP = "at most N (default 5); the networks of a data set's splits are trained together and depend on it"


class Divided(NamedTuple):
    """The numbers of the rows of a split."""

    training: np.ndarray
    held: np.ndarray  # for early stopping
    calibration: np.ndarray
    new: np.ndarray


class Part(NamedTuple):
    """The splits of a data set whose networks are trained together: what a process does at a time."""

    name: str
    division: str
    splits: int

    def __str__(self) -> str:
        return f"{self.name} {self.division}"

    def cells(self) -> list[Key]:
        return [(self.name, study, split) for split in range(self.splits) for study in STUDIES[self.division]]


def read(name: str, folder: Any) -> tuple[np.ndarray, np.ndarray]:  # (n, d), (n,)
    """A series, or a data set, or the rows of a large one that take part."""
    if name in SERIES:
        values = series(name)
        windows = np.lib.stride_tricks.sliding_window_view(values, LAGS)
        return windows[:-1].copy(), values[LAGS:]
    X, y = data.load(name, folder)
    if len(y) <= ROWS_AT_MOST:
        return X, y
    kept = np.sort(np.random.default_rng(0).permutation(len(y))[:ROWS_AT_MOST])
    return X[kept], y[kept]


def series(name: str) -> np.ndarray:
    """A series of statsmodels: changes of what grows, values of what does not."""
    table = import_module(f"statsmodels.datasets.{name}").load().data
    if name == "co2":
        return table["co2"].interpolate().diff().dropna().to_numpy(np.float64)
    if name == "elec_equip":
        return np.diff(np.log(table.iloc[:, 0].to_numpy(np.float64)))
    if name == "elnino":
        return table.drop(columns="YEAR").to_numpy(np.float64).reshape(-1)
    return table["SUNACTIVITY"].to_numpy(np.float64)


def along(X: np.ndarray) -> np.ndarray:  # (n, d) -> (n,)
    """The first principal component of standardised columns, standardised; its largest weight is positive."""
    spread = X.std(axis=0)
    units = (X - X.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    component = np.linalg.eigh(units.T @ units)[1][:, -1]
    z = units @ (component * np.sign(component[np.abs(component).argmax()]))
    return (z - z.mean()) / (z.std() or 1.0)


def ratio(z: np.ndarray) -> np.ndarray:
    """The probability that a new row is kept: the density ratio of tilted rows, up to a factor."""
    return 1 / (1 + np.exp(-3 * (z - 0.5)))


def divided(X: np.ndarray, division: str, split: int) -> Divided:
    """The rows of a split; those of "tilted" are new rows of "random"."""
    n, rng = len(X), np.random.default_rng(split)
    if division == "order":
        first, last, stop = int(0.45 * n), int(0.7 * n), int(0.7 * n) + IN_ORDER_AT_MOST
        learnt, calibration, new = rng.permutation(first), np.arange(first, last), np.arange(last, min(stop, n))
    elif division == "beyond":
        order = np.argsort(along(X), kind="stable")
        rest, new = rng.permutation(order[: int(0.8 * n)]), order[int(0.8 * n) :]
        learnt, calibration = np.split(rest, [int(9 / 14 * len(rest))])
    else:
        learnt, calibration, new = np.split(rng.permutation(n), [int(0.45 * n), int(0.7 * n)])
    held = int(0.15 * len(learnt))
    return Divided(learnt[held:], learnt[:held], calibration, new)


def train(part: Part, splits: Sequence[list[Samples]], folder: Any, report: Report) -> list[nn.Module]:
    """The networks of all splits, trained at once, unless they were before."""
    rows, held = (
        Learnt(*(torch.from_numpy(np.stack(c)) for c in zip(*(s[i] for s in splits), strict=True))) for i in (0, 1)
    )
    epochs = max(1, STEPS // -(-rows.x.shape[1] // RECIPE.batch))
    path = folder / f"world-{part}.safetensors".replace(" ", "-")
    conditions = json.dumps(
        [list(map(float, (rows.x.sum(), rows.y.sum()))), list(rows.x.shape), RECIPE, epochs, PATIENCE]
    )
    kept = load(path, conditions)
    if kept is None:
        seeds = [
            int(np.random.SeedSequence([s, *part.division.encode()]).generate_state(1)[0]) for s in range(len(splits))
        ]
        stack, *_ = search(
            Stack.initial(rows.x.shape[2], seeds),
            rows,
            held,
            list(range(len(splits))),
            seeds,
            RECIPE,
            PATIENCE,
            lambda text: report(f"{part}: {text}"),
            decoupled=True,
            epochs_at_most=epochs,
            best_of_all=True,
        )
        kept = stack, {}
        save(path, kept, conditions)
    return [kept[0].network(i) for i in range(len(splits))]


def quintiles(training: np.ndarray, *values: np.ndarray) -> list[np.ndarray]:
    """The number of the fifth of the training values that each value lies in."""
    cuts = np.unique(np.quantile(training, np.arange(1, PARTS) / PARTS))
    return [np.searchsorted(cuts, each, side="left") for each in values]


def feature(training: Samples) -> int:
    """The column whose rank correlation with the target is largest; one that is constant has none."""
    correlations = [abs(spearmanr(x, training.y)[0]) if np.ptp(x) > 0 else 0.0 for x in training.x.T]
    return int(np.argmax(correlations))


def cell(part: Part, study: str, split: int, held: Held, rows: Divided, X: np.ndarray) -> list[dict[str, object]]:
    """All methods of a study on one split."""
    z = along(X)
    if study == "tilted":
        kept = np.random.default_rng([split, 1]).random(len(rows.new)) < ratio(z[rows.new])
        held, rows = held.of_new(kept), rows._replace(new=rows.new[kept])
        held = held._replace(weights=(ratio(z[rows.calibration]), ratio(z[rows.new])))
    quintile_of = {"feature": _by_feature(held), "prediction": quintiles(held.outputs[0], *held.outputs[1:])}
    if study in quintile_of:
        held = held._replace(groups=quintile_of[study], overlapping=_indicators(list(quintile_of.values())))
        place = quintile_of[study][1]
    else:
        position = np.arange(len(rows.new)) if study == "order" else np.argsort(np.argsort(z[rows.new], kind="stable"))
        place = position * PARTS // max(1, len(rows.new))
    return [
        {"data": part.name, "study": study, "split": split, "method": name}
        | {"n_training": len(held.training.y), "n_calibration": len(held.calibration.y), "n_new": len(held.new.y)}
        | measured(held, place, bounds())
        for name, bounds in methods(study, held).items()
    ]


def measured(held: Held, place: np.ndarray, bounds: Bounds) -> dict[str, float]:
    lower, upper = bounds
    y = held.new.y.astype(np.float64)
    inside = (lower <= y) & (y <= upper)
    infinite = np.isinf(lower) | np.isinf(upper)
    lowest, highest = float(held.training.y.min()), float(held.training.y.max())
    low = np.where(np.isneginf(lower), 2 * lowest - highest, lower)
    high = np.where(np.isposinf(upper), 2 * highest - lowest, upper)
    missed = np.where(inside, 0.0, np.maximum(np.maximum(low - y, y - high), 0.0))
    of_parts = [inside[place == k].mean() if (place == k).any() else np.nan for k in range(PARTS)]
    found = {"coverage": inside.mean()} | {f"part_{k + 1}": share for k, share in enumerate(of_parts)}
    found |= {"score": np.mean(high - low + 2 / (1 - LEVEL) * missed), "width": np.mean(high - low)}
    return {name: float(value) for name, value in (found | {"infinite": infinite.mean()}).items()}


def _by_feature(held: Held) -> list[np.ndarray]:
    column = feature(held.training)
    return quintiles(held.training.x[:, column], held.calibration.x[:, column], held.new.x[:, column])


def _indicators(partitions: Sequence[list[np.ndarray]]) -> list[np.ndarray]:
    return [np.column_stack([each[i][:, None] == np.arange(PARTS) for each in partitions]) for i in (0, 1)]


def parts(options: argparse.Namespace) -> list[Part]:
    """By study, the smallest data sets first."""
    names = sorted(set(options.datasets), key=[*SERIES, *data.NAMES].index)
    divisions = [division for division in STUDIES if set(STUDIES[division]) & set(options.studies)]
    asked = [(name, division) for division in divisions for name in names if name not in SERIES or division == "order"]
    return [Part(name, division, min(options.splits, _splits(name, division))) for name, division in asked]


def _splits(name: str, division: str) -> int:
    few = name in SERIES or data.CATALOGUE[name].rows <= MANY_ROWS
    return SPLITS[division] if few else min(SPLITS[division], SPLITS_OF_MANY)


def rows_of(
    part: Part, report: Report, options: argparse.Namespace, done: set[Key]
) -> Iterator[list[dict[str, object]]]:
    """The cells that are not there yet."""
    warnings.simplefilter("ignore")  # of what cannot be promised: the share of infinite intervals says so
    X, y = read(part.name, options.data)
    splits = [divided(X, part.division, split) for split in range(part.splits)]
    units = [standardised(X, y, *rows) for rows in splits]
    networks = train(part, units, options.networks, report)
    for name, study, split in part.cells():
        if study in options.studies and (name, study, split) not in done:
            report(f"{part}: {study}, split {split}")
            held = Held.of(networks[split], RECIPE.weight_decay, units[split], split)
            yield cell(part, study, split, held, splits[split], X)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = on_data("world", __doc__, "world.csv")
    names = [*data.NAMES, *SERIES]
    studies = [study for each in STUDIES.values() for study in each]
    parser.add_argument("--datasets", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--studies", nargs="+", default=studies, choices=studies, metavar="NAME")
    parser.add_argument("--splits", type=positive, default=max(SPLITS.values()), metavar="N", help=SPLITS_HELP)
    parser.add_argument("--workers", type=positive, default=1, metavar="N", help=WORKERS_HELP)
    options = parser.parse_args(arguments)
    options.data = data.folder(options.data)
    rows = Rows(options.out, KEY)
    done = rows.done()
    sets = data.Available([name for name in options.datasets if name not in SERIES], options.data)
    usable = {*SERIES, *(name for name, *_ in sets)}
    asked = [part for part in parts(options) if part.name in usable]
    if not asked:
        raise Unusable("none of these data sets can be used")
    wanted = {key for part in asked for key in part.cells() if key[1] in options.studies}
    todo = [part for part in asked if set(part.cells()) & wanted - done]
    with tqdm(total=len(wanted), initial=len(wanted & done), unit="cell", mininterval=SECONDS) as bar:
        computed = partial(rows_of, options=options, done=done)
        for found in in_processes(todo, computed, options.workers, beside(bar)):
            rows.append(found)
            bar.update()
    if sets.malformed:
        raise SystemExit(1)
