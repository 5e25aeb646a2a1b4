"""SIGKILL at random moments: files are there whole, as they were or as they should become, and the next run ends as if
nothing had happened.

A server that has imported everything forks the processes that are killed, so that they begin within milliseconds.
`SOAK_SEED` is the seed of the moments; it is printed.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

import tests.soak.killed as killed
from deltaband import Exact, PredictionIntervals
from tests.support.commands import ROOT, make_folder, rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fork and SIGKILL")
KILLS = 20  # of each operation
LEFT = re.compile(r"\.deltaband-[0-9a-f]{12}")  # a folder that a writer may leave behind that is killed
ASKED = torch.linspace(-1, 1, 40).reshape(20, 2)


class Case(NamedTuple):
    """An operation that writes y.band into a folder."""

    prepare: Callable[[], killed.Operation]
    make: Callable[[Path], None]  # what it needs there
    hidden: int  # of the network that the band is for
    between: frozenset[str] = frozenset()  # files that the next run goes on from, and removes at its end


def arrays(folder: Path) -> None:
    weights(folder, 100)
    np.save(folder / "train.npy", rows(3000, 0)[["a", "b", "y"]].to_numpy(np.float32))


def a_band(folder: Path) -> None:
    """Of eight megabytes."""
    data = rows(1100, 0)
    band = PredictionIntervals(weights(folder, 250), damping=1.0, engine=Exact())
    band.fit(data[["a", "b"]].to_numpy(np.float32), data.y.to_numpy(), progress=False).save(folder / "kept.band")


def weights(folder: Path, hidden: int) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 1))
    torch.save(model.state_dict(), folder / "w.pt")
    return model


def tables(folder: Path) -> None:
    make_folder(folder)
    rows(5000, 0).to_csv(folder / "train.csv", index=False)


CASES = {
    "fit": Case(killed.fit, arrays, 100),
    "fit with checkpoints": Case(killed.checkpoint, arrays, 100, frozenset({"fit.ckpt", "fit.ckpt.previous"})),
    "save": Case(killed.save, a_band, 250),
    "deltaband fit": Case(killed.command, tables, 8),
}


@pytest.fixture(scope="module", autouse=True)
def server():
    with pytest.MonkeyPatch.context() as patch:  # it does not take over sys.path
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, [ROOT, ROOT / "src"])))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.soak.warm"])
        multiprocessing.forkserver.ensure_running()


def run(case: Case, folder: Path, moment: float | None = None) -> tuple[bool, float]:
    """Whether the operation came to its end, and how long it was under way; killed after `moment` seconds of it."""
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=killed.work, args=(case.prepare, folder, there))
    process.start()
    there.close()
    try:
        assert here.recv_bytes() == b"begun"
        begun = time.perf_counter()
        if moment is not None:
            time.sleep(moment)
            process.kill()
        try:
            done = here.recv_bytes() == b"done"
        except EOFError:
            done = False
        return done, time.perf_counter() - begun
    finally:
        process.kill()
        process.join()
        here.close()


def content(folder: Path) -> dict[str, bytes]:
    """All other files, and empty texts for folders."""
    others = (path for path in folder.iterdir() if path.name not in ("y.band", "__pycache__"))
    return {path.name: path.read_bytes() if path.is_file() else b"" for path in others}


def answers(case: Case, folder: Path, monkeypatch) -> tuple[bytes, ...]:
    """What the band in the file predicts, to the last bit."""
    with monkeypatch.context() as within:
        within.chdir(folder)
        band = PredictionIntervals.load("y.band", killed.network(case.hidden))
    return tuple(each.numpy().tobytes() for each in band.predict(ASKED))


@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_kill_at_any_moment_leaves_whole_files(name, tmp_path, monkeypatch):
    case, seed = CASES[name], int(os.environ.get("SOAK_SEED", time.time_ns() % 10**9))
    moments = random.Random(seed)
    case.make(tmp_path)
    run(case, tmp_path)  # imports what is left to import
    new = answers(case, tmp_path, monkeypatch)
    seconds = run(case, tmp_path)[1]
    assert answers(case, tmp_path, monkeypatch) == new

    with monkeypatch.context() as within:
        within.chdir(tmp_path)
        band = PredictionIntervals(killed.network(case.hidden), damping=50.0)
    data = rows(300, 5)
    band.fit(data[["a", "b"]].to_numpy(np.float32), data.y.to_numpy(), progress=False).save(tmp_path / "y.band")
    old = answers(case, tmp_path, monkeypatch)
    assert old != new
    shutil.copy(tmp_path / "y.band", tmp_path / "before.copy")
    files, seen = content(tmp_path), Counter()
    for _ in range(KILLS):
        done, _ = run(case, tmp_path, moments.uniform(0, 1.1) * seconds)
        after, found = content(tmp_path), answers(case, tmp_path, monkeypatch)
        left = after.keys() - files.keys()
        assert found in (old, new)
        assert {file: after[file] for file in files} == files
        left -= case.between
        assert len(left) <= 1
        assert all(LEFT.fullmatch(file) for file in left), left
        seen.update(
            {"within": not done, "after its end": done, "new file": found == new, "temporary file left": bool(left)}
        )
        whole, seconds = run(case, tmp_path)  # with all that was left behind; as fast as the machine is now
        assert whole
        assert answers(case, tmp_path, monkeypatch) == new
        assert content(tmp_path).keys() == files.keys()
        shutil.copy(tmp_path / "before.copy", tmp_path / "y.band")
    print(f"{name}: {KILLS} kills in about {seconds:.2g} s of work, seed {seed}: {dict(seen)}")
    assert seen["within"] >= KILLS // 4
