"""Processes of which one goes wrong, each in its own way; the others say what they hear of it."""

import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import deltaband.network.network
from deltaband import PredictionIntervals
from tests.support.networks import mlp, regression
from tests.support.process_groups import answers

deltaband.network.network.CHUNK_ROWS_AT_MOST = 16
X, Y = regression(300)


def rows(case, rank):
    """It is the second process that goes wrong."""
    for i in range(0, 100, 10):
        if rank == 1 and i == 70:
            if case == "raises":
                raise OSError("the disk is gone")
            if case == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if case == "hangs":
                time.sleep(3600)
        x = X[100 * rank + i : 100 * rank + i + 10].clone()
        if case == "nan" and rank == 1 and i == 70:
            x[0, 1] = float("nan")
        yield x, Y[100 * rank + i : 100 * rank + i + 10]


def main(rank, size, folder, case):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size, timeout=timedelta(seconds=8)
    )
    model = mlp()
    if case == "weights" and rank == 1:
        with torch.no_grad():
            model[2].bias += 1e-6
    options = {"function": {"output": lambda y: y}, "robust": {"robust": "HC1"}}.get(case, {})
    band = PredictionIntervals(model, weight_decay=1e-3 if case == "options" and rank else 1e-2, **options)
    band.fit(X[:50], Y[:50], progress=False)
    before = answers(band)
    data = rows(case, rank)
    if case == "sampler":
        pairs = TensorDataset(X, Y)
        data = DataLoader(pairs, 16, sampler=DistributedSampler(pairs, 3 if rank else 2, rank))
    if case == "seeds":
        pairs = TensorDataset(X, Y)
        data = DataLoader(pairs, 16, sampler=DistributedSampler(pairs, size, rank, seed=rank))
    if case == "nothing":
        data = []
    if case == "function" and rank == 1:
        band = PredictionIntervals(model, weight_decay=1e-2, output=lambda y: 2 * y).fit(X[:50], Y[:50], progress=False)
        before = answers(band)
    given, n_rows = (data,), None if case in ("sampler", "seeds", "nothing", "arrays", "repeats") else 100
    if case == "arrays":
        x = X.clone()
        x[70] = float("nan") if rank == 1 else 0.0
        given = (x, Y)
    if case == "repeats":
        warnings.simplefilter("error")
        given = (X[100 * rank : 100 * rank + 120], Y[100 * rank : 100 * rank + 120])
    start = time.monotonic()
    try:
        band.fit(*given, n_rows=n_rows, distributed=True, progress=False)
        print("no error")
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
    print(f"after {time.monotonic() - start:.1f} s")
    same = all((answers(band)[key] == before[key]).all() for key in before if key != "7")
    print(f"as it was: {same and model.training and not any(m._forward_hooks for m in model.modules())}", flush=True)
    os._exit(0)  # a group that has lost one of its processes may wait for it


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
