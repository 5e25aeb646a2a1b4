"""Processes that fit together: each runs this file, with its rank, how many there are, and a folder.

All cases are run in one group, as starting processes takes longer than they do; each leaves its answers in a file.
"""

import sys
import warnings
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, TensorDataset

from deltaband import (
    ClassificationIntervals,
    Exact,
    FrequentDirections,
    ImportantDirections,
    Nystrom,
    PredictionIntervals,
    RandomProjection,
    RobustFrequentDirections,
)
from tests.support.networks import mlp, regression

N = 200
X, Y = regression(N)
NEW = regression(20, seed=3)[0]
WEIGHTS = 0.5 + torch.arange(N, dtype=torch.float64) % 7
ENGINES = {
    "auto": "auto",
    "exact": Exact(),
    "projection": RandomProjection(20),
    "nystrom": Nystrom(30),
    "leverage": Nystrom(30, choose="leverage", tail="none"),
    "important": ImportantDirections(15),
    "important to the letter": ImportantDirections(15, compress=True),
    "robust": RobustFrequentDirections("auto"),
    "frequent": FrequentDirections(15),
}
SHARDS = {"even": (0, 66, 133, N), "uneven": (0, 150, 151, N), "empty": (0, 0, 120, N), "one": (0, 0, 0, N)}


def made(engine="auto", hidden=8, **options):
    options = options or {"weight_decay": 1e-2}
    return PredictionIntervals(mlp(hidden=hidden), engine=engine, **options)


def outputs(engine="auto", **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    return PredictionIntervals(model, weight_decay=1e-2, engine=engine, **options)


def classes(engine="auto", **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return ClassificationIntervals(model, weight_decay=1e-2, engine=engine, **options)


def answers(band):
    if isinstance(band, ClassificationIntervals):
        sums = [np.concatenate([fit.losses, fit.counts]) for fit in band.fits_]
        found = (*band.predict(NEW).log_odds, band.leverage(NEW), band.effective_parameters_, band.n_rows_, *sums)
        return {str(i): np.asarray(each) for i, each in enumerate(found)}
    numbers = (band.effective_parameters_, band.noise_std_, band.error_bound_, band.n_rows_, band.damping_)
    residuals = [np.sort(piece.tensors[2].numpy(), axis=0) for fit in band.fits_ for piece in fit.residuals.pieces]
    weight = [fit.total_weight for fit in band.fits_]
    found = (*band.predict(NEW, [0.5, 0.9]), band.variance(NEW), band.leverage(NEW), *numbers, residuals, weight)
    return {str(i): np.asarray(each) for i, each in enumerate(found)}


class Rows(IterableDataset):
    """Rows without a length."""

    def __init__(self, x, y):
        self.rows = list(zip(x, y, strict=True))

    def __iter__(self):
        return iter(self.rows)


def shard(name, rank, y=Y):
    start, stop = SHARDS[name][rank : rank + 2]
    return X[start:stop], y[start:stop]


def cases(rank, size):
    """Name, a band, and the arguments of its fit."""
    for hidden in (8, 80):
        for name, engine in ENGINES.items():
            for shards in SHARDS if hidden == 8 else ("even", "empty"):
                yield f"{name}, {hidden}, {shards}", made(engine, hidden), shard(shards, rank)
    for n in (N, N - 1, 2):  # which does not divide by 3, as N - 2 does
        for shuffle in (False, True):
            data = TensorDataset(X[:n], Y[:n])
            for drop in (False, True) if n > 2 else (False,):
                sampler = DistributedSampler(data, size, rank, shuffle=shuffle, drop_last=drop)
                yield f"sampler, {n}, {shuffle}, {drop}", made(damping=1.0), (DataLoader(data, 16, sampler=sampler),)
    data = TensorDataset(X[:199], Y[:199])
    for drop in (False, True):
        batches = BatchSampler(DistributedSampler(data, size, rank), 16, drop)
        yield f"batches, {drop}", made(damping=1.0), (DataLoader(data, batch_sampler=batches),)
        yield f"batches as samples, {drop}", made(damping=1.0), (DataLoader(data, None, sampler=batches),)
    for name in ("exact", "projection", "robust"):
        rows = DataLoader(Rows(*shard("uneven", rank)), batch_size=16)
        yield f"{name}, without a length", made(ENGINES[name], damping=1.0), (rows,)
    y = torch.stack([Y, Y**2], dim=1)
    for per_output in (False, True):
        for name in ("auto", "nystrom", "important"):
            yield (
                f"{name}, outputs, {per_output}",
                outputs(ENGINES[name], per_output=per_output),
                shard("uneven", rank, y),
            )
    for per_output in (False, True):
        for name in ("auto", "projection", "nystrom", "important"):
            for shards in ("uneven", "empty"):
                band = classes(ENGINES[name], per_output=per_output)
                yield f"{name}, classes, {per_output}, {shards}", band, shard(shards, rank, torch.arange(N) % 3)
    for name in ("auto", "projection", "nystrom"):
        rows = TensorDataset(*shard("uneven", rank), shard("uneven", rank, WEIGHTS)[1])
        band = made(ENGINES[name], damping=1.0, batch=tuple)
        yield f"{name}, weighted", band, (DataLoader(rows, batch_size=16),)
    yield "recomputed", made(Exact(), 300, damping=1.0, memory=1_100_000), shard("even", rank)
    yield "the same rows", made(damping=1.0), (X, Y)


def main(rank, size, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    for name, band, arguments in cases(rank, size):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            band.fit(*arguments, distributed=True, progress=False)
        found = answers(band) | {"said": np.array([str(each.message) for each in said], dtype=str)}
        np.savez(folder / f"{name}.{rank}.npz", **found)
    dist.barrier()  # gloo's threads may abort a process whose peers have left before it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
