"""What the server of test_kills.py imports before it forks: everything, and what the first fit of a process imports."""

import threading
import warnings

import numpy as np
import pyarrow.csv  # noqa: F401
import safetensors.torch  # noqa: F401
import torch
import tqdm

import deltaband.cli.app
import deltaband.cli.fit  # noqa: F401
from deltaband import PredictionIntervals, storage  # noqa: F401

# else one lock for all processes that are forked: who is killed while it holds it would stop all others
tqdm.tqdm.set_lock(threading.RLock())

rng = np.random.default_rng(0)
model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    band = PredictionIntervals(model, damping=1.0).fit(rng.random((50, 2)), rng.random(50), progress=False)
    band.predict(rng.random((2, 2)))
