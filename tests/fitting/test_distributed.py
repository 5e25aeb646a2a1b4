"""Several processes end with one band, that of all rows; or all of them with an error."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import tests.reference as reference
from deltaband import Exact, PredictionIntervals
from tests.support import process_groups
from tests.support.documents import ROOT, blocks
from tests.support.process_groups import NEW, WEIGHTS, N, X, Y

SUPPORT = Path(__file__).parents[1] / "support"
SIZE = 3
VARIANCE, LEVERAGE, EFFECTIVE, NOISE, BOUND, ROWS = "3", "4", "5", "6", "7", "8"  # places among the answers
ONE = {name: (band, arguments) for name, band, arguments in process_groups.cases(0, 1)}
SUMS = ("auto", "exact", "projection")
pytestmark = pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT.parents[1]), *sys.path]), "OMP_NUM_THREADS": "1"}


def together(program, folder, *arguments, size=2, waited=None, timeout=240):
    """Each of `size` processes gets its rank, the size and the folder; what those that are `waited` for say, and their
    return codes. Those that are left are killed."""
    said = [(folder / f"said.{rank}").open("w+") for rank in range(size)]
    team = [
        subprocess.Popen(
            [sys.executable, str(SUPPORT / program), str(rank), str(size), str(folder), *arguments],
            env=environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        for rank, file in enumerate(said)
    ]
    waited, end = range(size) if waited is None else waited, time.monotonic() + timeout
    try:
        codes = [team[rank].wait(end - time.monotonic()) for rank in waited]
    finally:
        for process, file in zip(team, said, strict=True):
            process.kill()
            process.wait()
            file.close()
    return [(folder / f"said.{rank}").read_text() for rank in waited], codes


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The answers of each process in each case."""
    folder = tmp_path_factory.mktemp("team")
    said, codes = together("process_groups.py", folder, size=SIZE)
    assert codes == [0] * SIZE, "\n".join(said)
    return {name: [np.load(folder / f"{name}.{rank}.npz") for rank in range(SIZE)] for name in ONE}


def whole(name):
    """The fit of one process to all rows."""
    band, _ = ONE[name]
    targets = torch.stack([Y, Y**2], dim=1) if "outputs" in name else torch.arange(N) % 3 if "classes" in name else Y
    if "weighted" in name:
        return process_groups.made(band.engine, damping=1.0).fit(X, Y, sample_weight=WEIGHTS, progress=False)
    return band.fit(X, targets, progress=False)


@pytest.mark.parametrize("name", ONE)
def test_every_process_ends_with_the_same_band(name, found):
    first, *others = found[name]
    for other in others:
        for key in set(first) - {"said"}:
            np.testing.assert_array_equal(other[key], first[key])


CLASSES = [name for name in ONE if "classes" in name]


@pytest.mark.parametrize("name", CLASSES)
def test_a_classifier_is_that_of_all_rows(name, found):
    mine, one = found[name][0], process_groups.answers(whole(name))
    np.testing.assert_array_equal(mine["0"], one["0"])  # log-odds
    exact = name.startswith(SUMS)
    for key in one if exact else list(one)[5:]:  # from there on: rows, losses and counts, which no engine approximates
        np.testing.assert_allclose(mine[key], one[key], rtol=1e-9, err_msg=key)


OTHERS = ("sampler", "batches", "the same rows")


@pytest.mark.parametrize("name", [name for name in ONE if not name.startswith(OTHERS) and name not in CLASSES])
def test_it_is_the_band_of_all_rows(name, found):
    mine, one = found[name][0], process_groups.answers(whole(name))
    assert mine[ROWS] == N
    np.testing.assert_array_equal(mine["0"], one["0"])  # predictions
    if name.startswith(SUMS) or name == "recomputed":
        for key in set(one) - {BOUND, NOISE, "1", "2"} if "outputs" in name else one:
            np.testing.assert_allclose(mine[key], one[key], rtol=1e-9, err_msg=key)
        np.testing.assert_allclose(mine[NOISE], one[NOISE], rtol=1e-3)  # shared among outputs by a sample of the rows
    elif name.endswith(", one"):  # all rows in one process, in the same order
        for key in set(one) if not name.startswith(("nystrom", "leverage")) else ():
            np.testing.assert_allclose(mine[key], one[key], rtol=1e-12, err_msg=key)


def exact(hidden):
    return process_groups.made(Exact(), hidden).fit(X, Y, progress=False)


@pytest.mark.parametrize("name", [name for name in ONE if name.startswith(("nystrom, 8,", "leverage, 8,"))])
def test_landmarks_are_drawn_from_the_rows_of_all(name, found):
    # 30 of 41 directions; landmarks of one process alone would do as well for even shards, but not for one of a row
    np.testing.assert_allclose(found[name][0][VARIANCE], exact(8).variance(NEW), rtol=0.25)


@pytest.mark.parametrize("name", [n for n in ONE if n.startswith(("robust, 8", "frequent, 8"))])
def test_sketches_are_as_good_as_their_bound(name, found):
    hidden = int(name.split(", ")[1])
    band = exact(hidden)
    _, J = reference.jacobian(band.model, X)
    largest = np.linalg.norm(J, 2) ** 2
    bound = float(found[name][0][BOUND])
    assert 0 <= bound < 0.1 * largest
    p_star = float(found[name][0][EFFECTIVE])
    assert p_star <= band.effective_parameters_ * 1.5


SKETCHES = [n for n in ONE if n.startswith(("robust, ", "frequent, "))]


@pytest.mark.parametrize("name", SKETCHES)
def test_what_stands_in_for_the_gram_matrix_is_within_its_bound(name, found):
    """‖JᵀJ − M‖ ≤ ε means that A with M lies between A ± εI, and each leverage between those that they give."""
    model = ONE[name][0].model
    J, gradients = (reference.jacobian(model, rows)[1] for rows in (X, NEW))
    mine, bound, damping = found[name][0][LEVERAGE], float(found[name][0][BOUND]), float(found[name][0]["9"])
    assert bound >= 0
    for g, h in zip(gradients, mine, strict=True):
        assert h >= reference.leverage(J, damping + bound, g) * (1 - 1e-9)
        if bound < damping:
            assert h <= reference.leverage(J, damping - bound, g) * (1 + 1e-9)


@pytest.mark.parametrize("name", [name for name in ONE if name.startswith("sampler")])
def test_rows_that_a_sampler_gives_twice_count_once(name, found):
    _, n, _, drop = name.split(", ")
    n = int(n) - (int(n) % SIZE if drop == "True" else 0)
    assert int(found[name][0][ROWS]) == n
    if drop == "False":
        one = process_groups.made(damping=1.0).fit(X[:n], Y[:n], progress=False)
        np.testing.assert_allclose(found[name][0][VARIANCE], one.variance(NEW), rtol=1e-9)


@pytest.mark.parametrize("name", [name for name in ONE if name.startswith("batches")])
def test_a_sampler_within_a_sampler(name, found):
    # 67, 66 and 66 rows in batches of 16: whole ones alone are four in each process
    assert int(found[name][0][ROWS]) == (3 * 64 if name.endswith("True") else 199)


def test_rows_that_every_process_has_read_are_told(found):
    assert int(found["the same rows"][0][ROWS]) == SIZE * N
    assert any("count twice" in message for message in found["the same rows"][0]["said"])
    for name in set(ONE) - {"the same rows"}:
        assert not any("count twice" in message for said in found[name] for message in said["said"])


# --- what goes wrong


@pytest.mark.parametrize(
    ("case", "of_it", "of_others"),
    [
        (
            "raises",
            "OSError: the disk is gone",
            "DistributedFitError: process 1 of 2 has failed.*OSError: the disk is gone",
        ),
        ("nan", "ValueError: inputs hold NaN in row 70", "DistributedFitError: process 1 of 2 has failed.*row 70"),
        (
            "weights",
            "ValueError: processes 0 and 1 have different weights of 2.bias",
            "have different weights of 2.bias",
        ),
        ("options", "ValueError: processes 0 and 1 have different weight_decay", "different weight_decay"),
        ("robust", "ValueError: distributed=True does not go with robust='HC1'", "does not go with robust='HC1'"),
        ("sampler", "ValueError: the DistributedSampler is for process 1 of 3", "DistributedFitError: process 1 of 2"),
        ("seeds", "ValueError: processes 0 and 1 have different DistributedSamplers, in their seed", "in their seed"),
        (
            "function",
            "ValueError: the network of process 1 does not return",
            "DistributedFitError: process 1 of 2 has failed",
        ),
        ("arrays", "ValueError: inputs hold NaN in row 70", "DistributedFitError: process 1 of 2 has failed.*row 70"),
        ("repeats", "DeltabandWarning: process 1 has read rows", "DeltabandWarning: process 1 has read rows"),
        ("nothing", "EmptyDataError: the training data are empty", "EmptyDataError: the training data are empty"),
    ],
)
def test_an_error_in_one_process_is_one_in_all(case, of_it, of_others, tmp_path):
    said, codes = together("failures.py", tmp_path, case)
    assert codes == [0, 0], said
    assert re.search(of_it, said[1]), said[1]
    assert re.search(of_others, said[0]), said[0]
    assert all("as it was: True" in each for each in said)


@pytest.mark.parametrize("case", ["dies", "hangs"])
def test_a_process_that_dies_or_hangs_is_no_hang_of_the_others(case, tmp_path):
    said, codes = together("failures.py", tmp_path, case, size=3, waited=(0, 2))
    waited = [float(re.search(r"after ([\d.]+) s", each).group(1)) for each in said]
    assert max(waited) < 8 + 12  # the group's timeout, and the rows before
    assert all("DistributedFitError" in each and "as it was: True" in each for each in said), said
    assert codes == [0, 0]


def test_processes_that_were_never_brought_together_are_told_how():
    with pytest.raises(RuntimeError, match="start them with torchrun"):
        PredictionIntervals(process_groups.mlp(), damping=1.0).fit(X, Y, distributed=True)


# --- with checkpoints


def launched(program, *arguments, restarts=0, folder=None):
    """A program under torchrun, in two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    return subprocess.run(
        [*command, f"--max-restarts={restarts}", str(program), *map(str, arguments)],
        # else torch 2.13 lets restarted processes find the addresses of those that have died
        env=environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_the_program_of_the_documents_runs(tmp_path):
    (program,) = (block for block in blocks(ROOT / "docs/streaming.md") if block.tag == "torchrun")
    (tmp_path / "fit.py").write_text(program.text)
    done = launched("fit.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"fit.py", "model.band"}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["important"])
def test_a_job_that_is_killed_restarts_where_it_was(tmp_path, engine):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    done = launched(SUPPORT / "restarts.py", whole, engine, "never")
    assert done.returncode == 0, done.stderr
    done = launched(SUPPORT / "restarts.py", killed, engine, "once", restarts=1)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        mine, theirs = (np.load(folder / f"answers.{rank}.npz") for folder in (killed, whole))
        for key in theirs:
            np.testing.assert_array_equal(mine[key], theirs[key])
        assert np.load(whole / f"taken.{rank}.npy") == 200
    assert np.load(killed / "taken.1.npy") == 200 - 128  # which it had taken in when it was killed at the 150th
    assert not list(killed.glob("*.ckpt*"))
    assert (killed / "killed").exists()
