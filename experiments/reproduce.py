"""The paper's evaluation: every method on every split of every data set, one row each in a CSV.

    python -m experiments reproduce --data DIR

A run that was interrupted goes on where it stopped. All widths and scores are in units of the standard deviation of
the training targets.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import nn
from tqdm import tqdm

from deltaband import DeltabandWarning, Exact, ImportantDirections, Intervals, PredictionIntervals, metrics
from deltaband.baselines import DeepEnsemble, MCDropout
from deltaband.engines import Engine

from . import data
from .arguments import SPLITS_HELP, on_data, positive
from .errors import Unusable
from .processes import WORKERS_HELP, in_processes
from .progress import SECONDS, beside
from .protocol import DROPOUT_EPOCHS, DROPOUT_RATES, MEMBERS, Protocol, Samples, Trained, groups, standardised
from .rows import Key, Rows
from .training import Report, Stack

LEVEL = 0.95
RANKS = {"wine-red": 200, "boston": 300, "year": 1000}  # and 500 for the others
NOISE_STDS = (0.5, 0.25, 0.1)
PASSES, PASSES_OF_THE_SEARCH = 10_000, 200
KEY = ("data", "split", "method")  # of a row of results


class Answer(NamedTuple):
    """One method on one split."""

    intervals: Intervals
    test: Samples
    epochs: int
    seconds: float  # without the training
    setting: str
    effective_parameters: float = np.nan


def exact(protocol: Protocol, i: int) -> Answer:
    return formula(protocol, i, Exact())


def directions(protocol: Protocol, i: int) -> Answer:
    """Important Directions to the letter: Algorithm 3 ends with all the rows held then, up to 2k − 1."""
    return formula(protocol, i, sketch(protocol.name))


def compressed(protocol: Protocol, i: int) -> Answer:
    """Important Directions shrunk once more to k at the end, as the authors' code does."""
    return formula(protocol, i, sketch(protocol.name, compress=True))


def sketch(name: str, compress: bool = False) -> ImportantDirections:
    return ImportantDirections(RANKS.get(name, 500), compress=compress)


def exact_on_a_part(protocol: Protocol, i: int, trained: Trained | None = None) -> Answer:
    """As the authors' code does: the network has seen the whole training part, J, s and λ are those of 80 % of it."""
    _, part = standardised(protocol.X, protocol.y, protocol.training[i], protocol.rest[i])
    return formula(protocol, i, Exact(), part, trained)


def formula(
    protocol: Protocol,
    i: int,
    engine: Engine,
    rows: Samples | None = None,
    trained: Trained | None = None,
    n: int | None = None,
) -> Answer:
    """The delta method with λ = n·wd/2, on the training part or on other rows, for the network that was trained on the
    former from scratch or for another one."""
    train, test = protocol.training_and_test(i)
    train = rows or train
    trained = trained or protocol.members(1)[i]
    damping = (n or len(train.y)) * protocol.recipe.weight_decay / 2
    start = time.perf_counter()
    band = PredictionIntervals(trained.networks[0], damping=damping, engine=engine)
    intervals = band.fit(*train, progress=False).predict(test.x, LEVEL)
    seconds = time.perf_counter() - start
    return Answer(intervals, test, trained.epochs, seconds, repr(engine), band.effective_parameters_)


def calibrated(protocol: Protocol, i: int) -> Answer:
    """Exact, then calibrated on a fifth of the training part; the network has only seen the other rows."""
    rest, held, test = standardised(protocol.X, protocol.y, protocol.rest[i], protocol.held[i], protocol.test[i])
    trained = protocol.without_held()[i]
    start = time.perf_counter()
    band = PredictionIntervals(trained.networks[0], weight_decay=protocol.recipe.weight_decay, engine=Exact())
    intervals = band.fit(*rest, progress=False).calibrate(*held, noise="none").predict(test.x, LEVEL)
    seconds = time.perf_counter() - start
    # in the unit of the other methods, the standard deviation of the whole training part's targets
    unit = protocol.y[protocol.rest[i]].std() / protocol.y[protocol.training[i]].std()
    intervals = Intervals(*(unit * part for part in intervals), LEVEL)
    test = Samples(test.x, unit * test.y)
    return Answer(intervals, test, trained.epochs, seconds, "Exact()", band.effective_parameters_)


def ensemble(protocol: Protocol, i: int) -> Answer:
    """The noise is the validation error of the network that was stopped early, in its own units: as the authors do."""
    _, test = protocol.training_and_test(i)
    trained = protocol.members(MEMBERS)[i]
    start = time.perf_counter()
    intervals = DeepEnsemble(trained.networks, noise_std=trained.validation_error**0.5).predict(test.x, LEVEL)
    return Answer(intervals, test, trained.epochs, time.perf_counter() - start, f"{MEMBERS} members")


def dropout(protocol: Protocol, i: int, rates: tuple[float, ...] = DROPOUT_RATES) -> Answer:
    """Rate and noise by the likelihood of the validation rows."""
    _, test = protocol.training_and_test(i)
    chosen = best_dropout(protocol, rates)
    rate, noise_std = chosen[i]
    network = protocol.dropout_final(tuple(rate for rate, _ in chosen))[i]
    start = time.perf_counter()
    if rate:
        intervals = MCDropout(network, noise_std=noise_std, passes=PASSES).predict(test.x, LEVEL)
    else:
        mean, half = outputs(network, test.x), stats.norm.ppf((1 + LEVEL) / 2) * noise_std
        intervals = Intervals(mean, mean - half, mean + half, LEVEL)
    seconds = time.perf_counter() - start
    return Answer(intervals, test, DROPOUT_EPOCHS, seconds, f"rate={rate} noise_std={noise_std}")


def without_dropout(protocol: Protocol, i: int) -> Answer:
    """MC-dropout with networks that have no dropout layer, as in the authors' code: the width is constant."""
    return dropout(protocol, i, rates=(0.0,))


@lru_cache(maxsize=2)
def best_dropout(protocol: Protocol, rates: tuple[float, ...]) -> list[tuple[float, float]]:
    """For each split the rate and the noise."""
    chosen = []
    for i, networks in enumerate(protocol.dropout_grid(rates)):
        _, held = standardised(protocol.X, protocol.y, protocol.rest[i], protocol.held[i])
        grid = np.array([likelihoods(network, rate, held) for network, rate in zip(networks, rates, strict=True)])
        row, column = np.unravel_index(grid.argmax(), grid.shape)
        chosen.append((rates[row], NOISE_STDS[column]))
    return chosen


def likelihoods(network: nn.Module, rate: float, held: Samples) -> np.ndarray:  # (NOISE_STDS,)
    """Mean log-likelihood of the rows for each noise."""
    if rate:
        return MCDropout(network, passes=PASSES_OF_THE_SEARCH).log_likelihood(*held, NOISE_STDS)
    return stats.norm.logpdf((held.y - outputs(network, held.x))[:, None], scale=NOISE_STDS).mean(axis=0)


@torch.no_grad()
def outputs(network: nn.Module, x: np.ndarray) -> np.ndarray:
    return network(torch.from_numpy(x))[:, 0].numpy()


METHODS: dict[str, Callable[[Protocol, int], Answer]] = {
    "exact": exact,
    "exact on 80 %": exact_on_a_part,
    "directions": directions,
    "compressed": compressed,
    "calibrated": calibrated,
    "ensemble": ensemble,
    "without dropout": without_dropout,
    "dropout": dropout,
}


def row(protocol: Protocol, i: int, method: str, answer: Answer) -> dict[str, object]:
    intervals, y = answer.intervals, answer.test.y.astype(np.float64)
    return {
        "data": protocol.name,
        "split": protocol.splits[i],
        "method": method,
        "n_training": len(protocol.training[i]),
        "n_test": len(y),
        "p_cov": metrics.coverage(y, intervals),
        "r": metrics.width_error_correlation(y, intervals),
        "w_sd": float(np.mean(intervals.width)),
        "score": metrics.interval_score(y, intervals),
        "rmse": float(np.sqrt(np.mean((y - intervals.mean) ** 2))),
        "effective_parameters": answer.effective_parameters,
        "epochs": answer.epochs,
        "setting": answer.setting,
        "seconds": answer.seconds,
    }


class Part(NamedTuple):
    """Splits of a data set whose networks are trained together: what a process does at a time."""

    name: str
    splits: range
    cost: float  # in no unit


def keys(name: str, splits: Iterable[int], options: argparse.Namespace) -> list[tuple[str, int, str]]:
    """Of the rows that are asked for."""
    methods = dict.fromkeys(options.methods)
    return [(name, split, method) for method in methods for split in splits if split < options.splits]


def parts(name: str, options: argparse.Namespace) -> Iterator[Part]:
    """Of a data set, which is read here too: whatever is wrong with it is said before anything is trained."""
    X, y = data.load(name, options.data)
    p = sum(tensor.numel() for tensor in Stack.initial(X.shape[1], [0]).parameters)
    for splits in groups(len(y), options.splits):
        yield Part(name, splits, len(splits) * len(y) * p**2)


def rows_of(part: Part, options: argparse.Namespace, done: set[Key], report: Report) -> Iterator[dict[str, object]]:
    """Those that are not there yet."""
    warnings.simplefilter("ignore", DeltabandWarning)
    X, y = data.load(part.name, options.data)
    protocol = Protocol(part.name, X, y, part.splits, options.networks, report)
    for name, split, method in keys(part.name, part.splits, options):
        if (name, split, method) not in done:
            report(f"{name}, {method}: split {split}")
            i = part.splits.index(split)
            yield row(protocol, i, method, METHODS[method](protocol, i))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = on_data("reproduce", __doc__, "methods.csv")
    parser.add_argument("--datasets", nargs="+", default=data.NAMES, choices=data.NAMES, metavar="NAME")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="NAME")
    parser.add_argument("--splits", type=positive, default=20, metavar="N", help=SPLITS_HELP)
    parser.add_argument("--workers", type=positive, default=1, metavar="N", help=WORKERS_HELP)
    options = parser.parse_args(arguments)
    options.data = data.folder(options.data)
    rows = Rows(options.out, KEY)
    done = rows.done()
    wanted, todo, malformed = set(), [], False
    for name in dict.fromkeys(options.datasets):
        asked = set(keys(name, range(options.splits), options))
        if asked - done:
            try:
                todo += [part for part in parts(name, options) if set(keys(name, part.splits, options)) - done]
            except Unusable as error:
                print(f"{type(error).__name__.lower()}: {error}", file=sys.stderr)
                malformed |= isinstance(error, data.Malformed)
                continue
        wanted |= asked
    if not wanted:
        raise Unusable("none of these data sets can be used")
    with tqdm(total=len(wanted), initial=len(wanted & done), unit="row", mininterval=SECONDS) as bar:
        say = beside(bar)
        if options.workers > 1:
            todo.sort(key=lambda part: -part.cost)  # what takes longest is first, as who is last works alone
        for cells in in_processes(todo, partial(rows_of, options=options, done=done), options.workers, say):
            rows.append([cells])
            bar.update()
    if malformed:
        raise SystemExit(1)
