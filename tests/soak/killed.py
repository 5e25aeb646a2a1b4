"""What is killed by test_kills.py, as a process of its own does it: first what it needs, then the operation itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import deltaband.network.network
from deltaband import Exact, ImportantDirections, PredictionIntervals
from deltaband.cli import main

Operation = Callable[[], object]


def network(hidden: int) -> torch.nn.Sequential:
    """The one whose weights are in the current folder."""
    model = torch.nn.Sequential(torch.nn.Linear(2, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 1))
    model.load_state_dict(torch.load("w.pt", weights_only=True))
    return model


def fit() -> Operation:
    model, table = network(100), np.load("train.npy", mmap_mode="r")
    rows = torch.tensor(table)
    loader = DataLoader(TensorDataset(rows[:, :2], rows[:, 2]), batch_size=200)
    band = PredictionIntervals(model, damping=1.0, engine=Exact())
    return lambda: band.fit(loader, progress=False).save("y.band")


def checkpoint() -> Operation:
    """Some forty checkpoints, and a band."""
    deltaband.network.network.CHUNK_ROWS_AT_MOST = 75
    rows = torch.tensor(np.load("train.npy", mmap_mode="r"))
    loader = DataLoader(TensorDataset(rows[:, :2], rows[:, 2]), batch_size=200, shuffle=True)
    band = PredictionIntervals(network(100), damping=1.0, engine=ImportantDirections(50))
    torch.manual_seed(0)
    return lambda: band.fit(loader, checkpoint="fit.ckpt", checkpoint_every=0, progress=False).save("y.band")


def save() -> Operation:
    band = PredictionIntervals.load("kept.band", network(250))
    return lambda: band.save("y.band")


def command() -> Operation:
    named = ["--train", "train.csv", "--target", "y", "--features", "a,b", "--weight-decay", "1e-3"]
    arguments = ["fit", "network:make", "--weights", "w.pt", *named, "--out", "y.band", "--force"]
    return lambda: main(arguments)


def work(prepare: Callable[[], Operation], folder: Path, tell: Connection) -> None:
    """Tells when the operation begins and when it is over."""
    os.chdir(folder)
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    operation = prepare()
    tell.send_bytes(b"begun")
    operation()
    tell.send_bytes(b"done")
