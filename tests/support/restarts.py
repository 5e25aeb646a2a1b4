"""A job for torchrun: a fit with a checkpoint, of which one process is killed the first time."""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import deltaband.fitting.accumulator
import deltaband.network.network
from deltaband.data.row_record import RowRecord
from tests.support.networks import regression
from tests.support.process_groups import ENGINES, answers, made

deltaband.network.network.CHUNK_ROWS_AT_MOST = 16
deltaband.fitting.accumulator.PRODUCT_ROWS = 32
folder, engine, when = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
X, Y = regression(400)


class Rows(TensorDataset):
    """Kills its process, once, at the 150th row of the last time that it is read."""

    given = 0

    def __getitem__(self, i):
        Rows.given += 1
        fatal = 150 + (200 if engine == "nystrom" else 0)
        if when == "once" and dist.get_rank() == 1 and Rows.given == fatal and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = Rows(X, Y)
    band = made(ENGINES[engine])
    taken, update = [], RowRecord.update
    RowRecord.update = lambda self, x, y: taken.append(len(x)) or update(self, x, y)
    loader = DataLoader(rows, 10, sampler=DistributedSampler(rows, shuffle=True, seed=3))
    band.fit(loader, checkpoint=folder / "fit.ckpt", checkpoint_every=0, distributed=True, progress=False)
    rank = dist.get_rank()
    np.save(folder / f"taken.{rank}.npy", sum(taken))
    np.savez(folder / f"answers.{rank}.npz", **answers(band))
    dist.destroy_process_group()


main()
