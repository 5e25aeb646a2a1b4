"""The same data give the same numbers: in another process bit for bit, in other batches or threads to rounding."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from deltaband import (
    Exact,
    FrequentDirections,
    ImportantDirections,
    Nystrom,
    PredictionIntervals,
    RandomProjection,
    RobustFrequentDirections,
)
from tests.support.commands import ROOT
from tests.support.networks import mlp, regression

pytestmark = pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
X, Y = regression(600)
ASKED = regression(40, seed=7)[0]
# By how much, of its width, a bound may move where rows are taken in other chunks, or by more threads.
TOLERANCES = {
    Exact(): 1e-11,
    Nystrom(60): 1e-9,
    RandomProjection(30): 1e-11,
    ImportantDirections(20): 1e-10,
    RobustFrequentDirections(20): 1e-10,
    FrequentDirections(41): 1e-10,
}
PROCESS = """
import json, sys
import torch
torch.set_num_threads(int(sys.argv[1]))
sys.path.insert(0, ".")
from tests.fitting import test_determinism
print(json.dumps(test_determinism.everything()))
"""


def band(engine, size=50, hidden=8, dtype=torch.float64, calibrate=False):
    x, y = X.to(dtype), Y.to(dtype)
    made = PredictionIntervals(mlp(hidden=hidden, dtype=dtype), weight_decay=1e-2, engine=engine)
    made.fit([(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)], progress=False)
    return made.calibrate(*(each.to(dtype) for each in regression(60, seed=5))) if calibrate else made


def bounds(made):
    return np.stack([each.double().numpy() for each in made.predict(ASKED.to(next(made.model.parameters()).dtype))])


def apart(one, other):
    """The largest difference of bounds, in widths."""
    return float((np.abs(one - other) / (other[2] - other[1])).max())


def everything():
    """The bounds of every engine, for networks with fewer and with more parameters than rows, as hexadecimal text."""
    found = {}
    for engine in TOLERANCES:
        for hidden, calibrate in ((8, False), (8, True), (150, False)):
            made = band(engine, hidden=hidden, calibrate=calibrate)
            found[f"{engine!r} {hidden} {calibrate}"] = bounds(made).tobytes().hex()
    return found


@pytest.fixture(scope="module")
def processes():
    """What two processes with one thread and one with two find."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, threads],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads},
            stdout=subprocess.PIPE,
            text=True,
        )
        for threads in ("1", "1", "2")
    ]
    outputs = [process.communicate(timeout=600)[0] for process in started]
    return [json.loads(output) for output in outputs]


def test_two_processes_find_the_same_bit_for_bit(processes):
    assert len(processes[0]) == 3 * len(TOLERANCES)
    assert processes[0] == processes[1]


@pytest.mark.parametrize("engine", TOLERANCES, ids=repr)
def test_one_thread_and_two_agree(processes, engine):
    for name, found in processes[0].items():
        if name.startswith(repr(engine)):
            one, two = (np.frombuffer(bytes.fromhex(each)).reshape(3, -1) for each in (found, processes[2][name]))
            assert apart(two, one) <= TOLERANCES[engine], name


@pytest.mark.parametrize("engine", TOLERANCES, ids=repr)
@pytest.mark.parametrize("hidden", [8, 150])  # n > p, n < p
def test_batches_of_other_sizes_are_the_same_bit_for_bit(engine, hidden):
    expected = bounds(band(engine, hidden=hidden)).tobytes()
    for size in (7, 600):  # small ones are put together
        assert bounds(band(engine, size, hidden)).tobytes() == expected


@pytest.mark.parametrize("engine", TOLERANCES, ids=repr)
@pytest.mark.parametrize("hidden", [8, 150])
def test_chunks_of_other_sizes_agree(engine, hidden, monkeypatch):
    expected = bounds(band(engine, hidden=hidden))
    for rows in (7, 64):
        monkeypatch.setattr("deltaband.network.network.CHUNK_ROWS_AT_MOST", rows)
        found = bounds(band(engine, hidden=hidden))
        assert apart(found, expected) <= TOLERANCES[engine]


@pytest.mark.parametrize("engine", [Exact(), RandomProjection(30)], ids=repr)
@pytest.mark.parametrize("calibrate", [False, True])
def test_chunks_of_other_sizes_agree_in_single_precision_and_when_calibrated(engine, calibrate, monkeypatch):
    expected = bounds(band(engine, dtype=torch.float32, calibrate=calibrate))
    for rows in (7, 64):
        monkeypatch.setattr("deltaband.network.network.CHUNK_ROWS_AT_MOST", rows)
        assert apart(bounds(band(engine, dtype=torch.float32, calibrate=calibrate)), expected) <= 1e-5


@pytest.mark.parametrize("engine", TOLERANCES, ids=repr)
def test_the_same_band_asked_twice_and_row_by_row(engine):
    made = band(engine)
    whole = bounds(made)
    assert bounds(made).tobytes() == whole.tobytes()
    rows = [np.stack([np.asarray(each) for each in made.predict(ASKED[i : i + 1])]) for i in range(len(ASKED))]
    assert apart(np.concatenate(rows, axis=1), whole) <= 1e-9


def test_the_generators_of_the_user_are_left_alone():
    for engine in TOLERANCES:
        torch.manual_seed(3)
        np.random.seed(3)  # noqa: NPY002
        before = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
        model = PredictionIntervals(mlp(), weight_decay=1e-2, engine=engine)
        torch.random.set_rng_state(before[0])
        model.fit(X, Y, progress=False).predict(ASKED)
        assert torch.equal(torch.random.get_rng_state(), before[0])
        assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002
