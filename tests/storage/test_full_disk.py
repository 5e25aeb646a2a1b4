"""Disks that are full and folders that cannot be written: an OSError says so, and what was there is still there."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.commands import FIT, ROOT, make_folder, start

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="limits and permissions of POSIX")
MADE = """
import os, resource, shutil, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, ".")
from tests.support.networks import mlp, regression
from deltaband import PredictionIntervals

folder = sys.argv[1]
old = PredictionIntervals(mlp(), damping=1.0).fit(*regression(400), progress=False)
new = PredictionIntervals(mlp(hidden=80), damping=1.0).fit(*regression(400), progress=False)  # 1.8 MB
old.save(f"{folder}/x.band")
before = open(f"{folder}/x.band", "rb").read()
"""
TRIED = """
for name, file in {"save": "x.band", "save, new": "y.band"}.items():
    try:
        new.save(f"{folder}/{file}")
    except OSError as error:
        print(name, type(error).__name__, error.errno, error, sep="|")
assert open(f"{folder}/x.band", "rb").read() == before
assert os.listdir(folder) == ["x.band"], os.listdir(folder)
PredictionIntervals.load(f"{folder}/x.band", old.model)
"""


@pytest.fixture
def public():
    """A folder that every user can reach, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


CHECKPOINT = """
import deltaband.fitting.accumulator, deltaband.network.network
deltaband.network.network.CHUNK_ROWS_AT_MOST = deltaband.fitting.accumulator.PRODUCT_ROWS = 100
again = PredictionIntervals(mlp(hidden=80), damping=1.0)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    try:
        again.fit(*regression(400), checkpoint=f"{folder}/fit.ckpt", checkpoint_every=0, progress=False)
        assert abs(again.predict(regression(9)[0]).upper - new.predict(regression(9)[0]).upper).max() < 1e-9
        print("fitted", *(each.message for each in said), sep="|")
    except OSError as error:
        print("refused", type(error).__name__, error, sep="|")
assert os.listdir(folder) == ["x.band"], os.listdir(folder)
"""


def told(code, folder, before=(), tried=TRIED):
    """What each attempt was told, of a process that lives through it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [*before, sys.executable, "-c", MADE + code + tried, str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [line.split("|") for line in done.stdout.splitlines()]


def test_a_write_that_ends_in_the_middle_leaves_the_old_file(tmp_path):
    lines = told("resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))", tmp_path)
    assert [line[0] for line in lines] == ["save", "save, new"]
    for line in lines:
        assert line[1] == "OSError"
        assert ".band could not be written: " in line[3]
        assert "File too large" in line[3]


def test_a_checkpoint_that_cannot_be_written_ends_no_fit(tmp_path):
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))\n"
    (line,) = told(limit, tmp_path, tried=CHECKPOINT)
    assert line[0] == "fitted"
    assert [each for each in line if "was not written at row" in each and "File too large" in each]


def test_a_checkpoint_in_a_folder_that_is_read_only_is_refused_before_the_work(public):
    code = "os.chmod(folder, 0o555)\nif os.getuid() == 0: os.setresuid(65534, 65534, 65534)\n"
    (line,) = told(code, public, tried=CHECKPOINT)
    assert line[:2] == ["refused", "PermissionError"]


def test_a_disk_that_fills_up_leaves_the_old_file(public):
    """In a file system of a megabyte, which only this process sees."""
    inside = ["sh", "-c", 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@"', str(public)]
    apart = ["unshare", "--user", "--map-root-user", "--mount", *inside]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("no file system of one's own for this user here")
    seen = told("", public, apart)
    assert [line[:3] for line in seen] == [["save", "OSError", "28"], ["save, new", "OSError", "28"]]
    assert all("MB are free there" in line[3] for line in seen)  # before anything is written
    blind = "usage = shutil.disk_usage(folder); shutil.disk_usage = lambda path: usage._replace(free=10**9)"
    filled = told(blind, public, apart)
    assert [line[:2] for line in filled] == [["save", "OSError"], ["save, new", "OSError"]]
    assert all("could not be written" in line[3] and "No space left" in line[3] for line in filled)


def test_a_folder_that_is_read_only_is_told_and_left_alone(public):
    # who is root may write anywhere: the process becomes nobody first
    code = "new.save(f'{folder}/y.band'); os.remove(f'{folder}/y.band')\nos.chmod(folder, 0o555)\n"
    lines = told(code + "if os.getuid() == 0: os.setresuid(65534, 65534, 65534)", public)
    assert [line[:2] for line in lines] == [["save", "PermissionError"], ["save, new", "PermissionError"]]
    assert all("no permission to write into" in line[3] for line in lines)


def test_a_command_on_a_full_disk_says_so_in_one_line(tmp_path):
    make_folder(tmp_path)
    limited = (
        "import resource; from deltaband.cli import main; import sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)); sys.exit(main())"
    )
    unmeasured = ["env", "-u", "COVERAGE_PROCESS_START", "-u", "COVERAGE_PROCESS_CONFIG"]  # that would write files, too
    python = [*unmeasured, sys.executable, "-P", "-c", limited]
    (tmp_path / "y.band").write_bytes(b"old")
    before = sorted(path.name for path in tmp_path.iterdir())
    process = start(*FIT, "--damping", "1", "--out", "y.band", "--force", folder=tmp_path, python=python)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (1, "")
    assert err.splitlines()[-1].startswith("deltaband: error: ")
    assert "File too large" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert (tmp_path / "y.band").read_bytes() == b"old"
    assert {path.name for path in tmp_path.iterdir()} - set(before) <= {"__pycache__", "imported"}
