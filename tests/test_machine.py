"""What a machine has to spare: cores, to which BLAS is limited while a call needs many; and memory."""

import os
import subprocess
import sys
import time

import pytest
import torch
from threadpoolctl import threadpool_info

from deltaband import Exact, PredictionIntervals, machine
from tests.support.networks import in_threads, mlp, regression


def blas_threads() -> set[int]:
    import scipy.linalg  # noqa: F401

    return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}


@pytest.fixture
def four_threads(monkeypatch):
    """Libraries that may use four threads, on a machine of four cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    before = blas_threads()
    machine._libraries().limit(limits=4, user_api="blas")
    yield
    machine._libraries().limit(limits=max(before), user_api="blas")


@pytest.mark.parametrize(("busy", "allowed"), [(0, 4), (1, 3), (3, 1), (9, 1)])
def test_blas_gets_the_cores_that_are_free_and_has_all_afterwards(busy, allowed, four_threads, monkeypatch):
    monkeypatch.setattr(machine, "busy_cores", lambda: busy)
    with machine.on_free_cores():
        assert blas_threads() == {allowed}
    assert blas_threads() == {4}


def test_a_core_that_is_busy_for_a_moment_counts_as_free(four_threads, monkeypatch):
    seen = iter([3, 1, 2])
    monkeypatch.setattr(machine, "busy_cores", lambda: next(seen))
    assert machine.free_cores() == 3


def test_an_idle_machine_is_looked_at_once(four_threads, monkeypatch):
    seen = iter([0])
    monkeypatch.setattr(machine, "busy_cores", lambda: next(seen))
    assert machine.free_cores() == 4


def test_calls_in_several_threads_at_once_leave_no_limit(four_threads, monkeypatch):
    monkeypatch.setattr(machine, "busy_cores", lambda: 9)

    def work(i):
        for _ in range(5):
            with machine.on_free_cores():
                time.sleep(1e-3 * (i % 3))

    in_threads(work)
    assert blas_threads() == {4}


def test_an_error_lifts_the_limit(four_threads, monkeypatch):
    monkeypatch.setattr(machine, "busy_cores", lambda: 9)
    with pytest.raises(KeyError), machine.on_free_cores():
        raise KeyError
    assert blas_threads() == {4}


def test_fit_calibrate_and_predict_of_many_rows_run_on_free_cores(four_threads, monkeypatch):
    monkeypatch.setattr(machine, "busy_cores", lambda: 9)
    X, y = regression(300)
    seen = []

    class Watching(torch.nn.Sequential):
        def forward(self, x):
            seen.append(blas_threads())
            return super().forward(x)

    band = PredictionIntervals(Watching(*mlp()), weight_decay=1e-2, engine=Exact())
    for call in (
        lambda: band.fit(X, y, progress=False),
        lambda: band.partial_fit(X[:50] + 1, y[:50]),
        lambda: band.calibrate(X + 0.1, y),
        lambda: band.predict(X),
    ):
        seen.clear()
        call()
        assert {1} in seen
        assert blas_threads() == {4}
    seen.clear()
    band.predict(X[:1])
    assert seen == [{4}] * len(seen)


def test_other_processes_are_counted_and_threads_of_this_one_are_not(tmp_path):
    (tmp_path / "loadavg").write_text("0.52 0.58 0.59 4/467 12345\n")
    for number, state in {11: "R", 12: "S", 13: "R"}.items():
        task = tmp_path / "self" / "task" / str(number)
        task.mkdir(parents=True)
        (task / "stat").write_text(f"{number} (a name) with (brackets)) {state} 1 2 3\n")
    assert machine.busy_cores(tmp_path) == 2


@pytest.mark.parametrize("content", [None, "", "nothing that counts"])
def test_where_the_system_does_not_say_all_cores_are_free(content, tmp_path):
    if content is not None:
        (tmp_path / "loadavg").write_text(content)
    assert machine.busy_cores(tmp_path) == 0


@pytest.mark.skipif(not machine.PROC.joinpath("loadavg").exists(), reason="the system has no /proc")
def test_a_busy_process_is_seen():
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.3)
        assert max(machine.busy_cores() for _ in range(50)) >= 1
    finally:
        busy.kill()
        busy.wait()


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
NEWER = {"limit": "memory.max", "used": "memory.current", "cache": "inactive_file"}
OLDER = {"limit": "memory.limit_in_bytes", "used": "memory.usage_in_bytes", "cache": "total_inactive_file"}


def system(root, own, *groups):
    """A system with 1 GB available, the groups of a process, and (folder, names, limit, used, cache) of each."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 4000000 kB\nMemAvailable: 1000000 kB\n")
    (root / "proc/self/cgroup").write_text(own)
    for folder, names, limit, used, cache in groups:
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / names["limit"]).write_text(f"{limit}\n")
        (root / folder / names["used"]).write_text(f"{used}\n")
        (root / folder / "memory.stat").write_text(f"anon 5\n{names['cache']} {cache}\n")
    return root


@pytest.mark.parametrize(
    ("own", "groups", "free"),
    [
        ("0::/\n", [], 1.024e9),
        ("0::/\n", [(V2, NEWER, 1000, 700, 200)], 500),
        ("0::/\n", [(V2, NEWER, "max", 700, 200)], 1.024e9),
        ("0::/\n", [(V2, NEWER, 1000, 1300, 0)], 0),
        ("0::/a/b\n", [(f"{V2}/a/b", NEWER, 3000, 700, 0), (f"{V2}/a", NEWER, 2000, 1900, 0)], 100),
        ("0::/a/b\n", [(f"{V2}/a/b", NEWER, 3000, 700, 0), (f"{V2}/a", NEWER, "max", 1900, 0)], 2300),
        ("0::/docker/x\n", [(V2, NEWER, 1000, 700, 0)], 300),  # whose group is the root that it sees
        ("5:cpu,memory:/a\n1:name=systemd:/\n", [(f"{V1}/a", OLDER, 1000, 600, 50)], 450),
        ("5:memory:/docker/x\n0::/\n", [(V1, OLDER, 1000, 600, 50)], 450),
        ("5:memory:/\n0::/\n", [(V1, OLDER, 9223372036854771712, 600, 50)], 1.024e9),
        ("5:memory:/\n0::/a\n", [(f"{V2}/unified/a", NEWER, 1000, 600, 0)], 400),
        ("5:cpu:/a\n", [(f"{V1}/a", OLDER, 1000, 600, 50)], 1.024e9),  # a group that it is not in
    ],
)
def test_the_limits_of_containers_count(tmp_path, own, groups, free):
    assert machine.free_memory(system(tmp_path, own, *groups)) == free


def test_free_memory_is_that_of_this_machine():
    assert 0 < machine.free_memory() < 1e15
