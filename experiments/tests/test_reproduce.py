"""The paper's evaluation on small data made here."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from deltaband import Exact, PredictionIntervals
from experiments import reproduce
from experiments.protocol import standardised
from experiments.tests.small_data import options

ROOT = Path(__file__).parents[2]


def run(folder, out="methods.csv", networks="networks", *more):
    reproduce.main([*options(folder, out, networks), "--splits", "2", *more])
    return pd.read_csv(folder / out)


def comparable(path):
    """All but the seconds, in an order that does not depend on who finished first."""
    return pd.read_csv(path).drop(columns="seconds").sort_values(["data", "method", "split"]).reset_index(drop=True)


def test_every_method_gives_a_row_for_every_split_the_same_from_run_to_run(folder):
    rows = run(folder)
    assert len(rows) == 2 * 2 * len(reproduce.METHODS)
    assert not rows.duplicated(["data", "split", "method"]).any()
    assert rows.p_cov.between(0, 1).all()
    assert (rows.w_sd > 0).all()
    assert rows[rows.method == "without dropout"].r.isna().all()
    chosen = rows[rows.method == "without dropout"]
    assert set(chosen.setting) <= {f"rate=0.0 noise_std={s}" for s in reproduce.NOISE_STDS}
    widths = chosen.setting.str.extract(r"noise_std=(.*)")[0].astype(float) * 2 * 1.959964
    np.testing.assert_allclose(chosen.w_sd, widths, rtol=1e-5)
    run(folder, "again.csv", "other networks")
    pd.testing.assert_frame_equal(comparable(folder / "again.csv"), comparable(folder / "methods.csv"))


def test_the_row_of_the_exact_method_is_what_a_user_would_get(folder, first):
    rows = run(folder, "methods.csv", "networks", "--datasets", "first", "--methods", "exact")
    train, test = standardised(first.X, first.y, first.training[1], first.test[1])
    band = PredictionIntervals(first.members(1)[1].networks[0], damping=108 * 1e-2 / 2, engine=Exact()).fit(*train)
    intervals = band.predict(test.x)
    row = rows[rows.split == 1].iloc[0]
    assert row.w_sd == pytest.approx(intervals.width.mean(), rel=1e-5)
    assert row.p_cov == pytest.approx(((intervals.lower <= test.y) & (test.y <= intervals.upper)).mean())
    assert row.effective_parameters == pytest.approx(band.effective_parameters_, rel=1e-5)


def test_a_run_computes_only_what_is_asked_for_and_not_there(folder, monkeypatch):
    asked = []
    methods = {
        name: lambda protocol, i, name=name, method=method: asked.append(name) or method(protocol, i)
        for name, method in reproduce.METHODS.items()
    }
    monkeypatch.setattr(reproduce, "METHODS", methods)
    run(folder, "methods.csv", "networks", "--datasets", "second", "second", "--methods", "exact", "exact")
    assert asked == ["exact"] * 2
    rows = run(folder, "methods.csv", "networks", "--methods", "exact", "ensemble")
    assert asked[2:] == ["exact", "exact", "ensemble", "ensemble", "ensemble", "ensemble"]
    assert len(rows) == 8


def test_missing_and_malformed_data_are_reported_and_the_rest_goes_on(folder, capsys):
    (folder / "first.csv.gz").unlink()
    rows = run(folder, "methods.csv", "networks", "--methods", "exact")
    assert set(rows.data) == {"second"}
    assert "missing: first: there is no" in capsys.readouterr().err
    (folder / "first.csv.gz").write_bytes(b"nonsense")
    with pytest.raises(SystemExit) as caught:
        run(folder, "methods.csv", "networks", "--methods", "exact", "directions")
    assert caught.value.code == 1
    assert set(pd.read_csv(folder / "methods.csv").method) == {"exact", "directions"}
    assert "malformed: first" in capsys.readouterr().err


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = [{root!r}]
import pytest
from experiments.tests import small_data
small_data.small(pytest.MonkeyPatch(), Path(sys.argv[1]))
if __name__ == "__main__":
    small_data.reproduce.main(["--data", sys.argv[1], *sys.argv[2:]])
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_where_an_undisturbed_one_does(tmp_path):
    """In processes that share data sets: networks are trained for two splits at a time, and there are three."""
    methods = ["exact", "calibrated", "ensemble", "dropout"]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(ROOT)))

    def start(out):
        command = [sys.executable, str(script), str(tmp_path), "--workers", "2", "--splits", "3", "--methods", *methods]
        command += ["--out", str(tmp_path / out), "--networks", str(tmp_path / f"networks of {out}")]
        return subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)

    path, deadline = tmp_path / "cut.csv", time.monotonic() + 240
    with start("whole.csv") as whole, start("cut.csv") as cut:
        while cut.poll() is None and not (path.exists() and path.read_bytes().count(b"\n") >= 6):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(cut.pid, signal.SIGKILL)
        assert whole.wait(300) == 0, whole.stderr.read().decode()
    done = path.read_bytes()
    assert done.count(b"\n") < 1 + 2 * 3 * len(methods)
    with start("cut.csv") as again:
        assert again.wait(300) == 0, again.stderr.read().decode()
    assert path.read_bytes().startswith(done[: done.rindex(b"\n") + 1])
    pd.testing.assert_frame_equal(comparable(path), comparable(tmp_path / "whole.csv"))
    assert len(comparable(path)) == 2 * 3 * len(methods)


DYING = """
import os, signal, time
from experiments import reproduce

def method(protocol, i):
    if protocol.name == "first":
        os.kill(os.getpid(), signal.SIGKILL)
    for second in range(200):  # as a long training does
        protocol.report(str(second))
        time.sleep(0.5)

reproduce.METHODS["exact"] = method
"""


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_run_although_others_are_busy(tmp_path):
    script = tmp_path / "script.py"
    text = SCRIPT.format(root=str(ROOT))
    script.write_text(text.replace("if __name__", DYING + "\nif __name__"))
    command = [sys.executable, str(script), str(tmp_path), "--workers", "2", "--splits", "1", "--methods", "exact"]
    command += ["--out", str(tmp_path / "out.csv"), "--networks", str(tmp_path / "networks")]
    ended = subprocess.run(command, stderr=subprocess.PIPE, timeout=80, text=True)  # the other one takes 100 s
    assert ended.returncode == 1
    assert "the process of first ended with exit code -9, and the run with it" in ended.stderr


def test_the_rows_of_a_split_do_not_depend_on_how_many_splits_are_asked_for(folder):
    some = ("--datasets", "first", "--methods", "exact", "ensemble", "dropout")
    run(folder, "methods.csv", "networks", *some, "--splits", "3")
    for splits in ("1", "2", "3"):
        run(folder, "grown.csv", "other networks", *some, "--splits", splits)
    assert len(comparable(folder / "grown.csv")) == 9
    pd.testing.assert_frame_equal(comparable(folder / "grown.csv"), comparable(folder / "methods.csv"))
