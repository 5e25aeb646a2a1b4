"""The paper's evaluation on small data made here."""

import gzip
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from deltaband import Exact, PredictionIntervals
from experiments import data, energy, figure, paper_report, protocol, reproduce, score
from experiments.protocol import Protocol, divide, standardised

ROOT = Path(__file__).parent.parent


def small(folder, names=("first", "second"), n=120):
    """Writes small data sets and puts them into the catalogue; the epochs of training are cut to a few."""
    rng = np.random.default_rng(0)
    entries = {}
    for name in names:
        X = rng.standard_normal((n, 2)).round(3)
        y = (X.sum(axis=1) + 0.3 * rng.standard_normal(n)).round(3)
        table = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "target": y})
        partial = folder / f"{name}.{os.getpid()}"  # others may be reading the file
        partial.write_bytes(gzip.compress(table.to_csv(index=False).encode()))
        partial.replace(folder / f"{name}.csv.gz")
        entries[name] = data.DataSet(name, n, 2, None, data.checksum(X, y), "nowhere")
    return {
        (data, "CATALOGUE"): entries,
        (data, "NAMES"): tuple(entries),
        (protocol, "PATIENCE"): 3,
        (protocol, "EPOCHS_AT_LEAST"): 5,
        (protocol, "DROPOUT_EPOCHS"): 4,
        (reproduce, "PASSES"): 50,
        (reproduce, "PASSES_OF_THE_SEARCH"): 20,
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv("DELTABAND_DATA", raising=False)
    for (module, name), value in small(tmp_path).items():
        monkeypatch.setattr(module, name, value)
    return tmp_path


def silent(text):
    pass


def run(folder, out="methods.csv", networks="networks", *more):
    reproduce.main(
        [
            *("--data", str(folder), "--splits", "2", "--out", str(folder / out)),
            *("--networks", str(folder / networks), *more),
        ]
    )
    return pd.read_csv(folder / out)


def comparable(path):
    """All but the seconds, in an order that does not depend on who finished first."""
    return pd.read_csv(path).drop(columns="seconds").sort_values(["data", "method", "split"]).reset_index(drop=True)


# --- the protocol


@pytest.fixture
def first(folder):
    X, y = data.load("first", folder)
    return Protocol("first", X, y, range(2), folder / "networks", silent)


def test_the_parts_of_a_split_share_no_row_and_have_the_paper_s_sizes(first):
    for i in range(2):
        rest, held, test = first.rest[i], first.held[i], first.test[i]
        assert [len(rest), len(held), len(test)] == [87, 21, 12]
        assert sorted([*rest, *held, *test]) == list(range(120))
        assert sorted(first.training[i]) == sorted([*rest, *held])
    assert set(first.test[0]) != set(first.test[1])


def test_a_data_set_is_split_alike_whatever_splits_are_asked_for(folder):
    X, y = data.load("first", folder)
    alone = Protocol("first", X, y, [1], folder, silent)
    np.testing.assert_array_equal(alone.test[0], Protocol("first", X, y, range(3), folder, silent).test[1])


def test_rows_are_standardised_by_the_first_part_alone():
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.normal(5, 3, 50), np.full(50, 7.0)])
    y = rng.normal(-2, 4, 50)
    order = rng.permutation(50)
    ours, other = standardised(X, y, *divide(order, 0.2))
    assert [len(ours.y), len(other.y)] == [40, 10]
    np.testing.assert_allclose(ours.x.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(ours.x.std(axis=0), [1, 0], atol=1e-6)  # a constant column stays one
    np.testing.assert_allclose([ours.y.mean(), ours.y.std()], [0, 1], atol=1e-6)
    expected = (X[order[40:], 0] - X[order[:40], 0].mean()) / X[order[:40], 0].std()
    np.testing.assert_allclose(other.x[:, 0], expected, rtol=1e-5)


def weights(networks):
    return [w.detach() for network in networks for w in network.parameters()]


def test_the_network_of_calibrated_intervals_has_seen_nothing_of_the_held_out_rows(folder, first):
    y = first.y.copy()
    y[first.held[0]] += 100 * np.arange(21)
    # one split: rounding depends on which networks are trained together
    mine, other = (Protocol("first", first.X, t, [0], folder / n, silent) for t, n in ((first.y, "a"), (y, "b")))
    assert all(map(torch.equal, weights(mine.without_held()[0].networks), weights(other.without_held()[0].networks)))
    assert not torch.equal(weights(mine.members(1)[0].networks)[0], weights(other.members(1)[0].networks)[0])


def test_members_differ_and_the_first_is_the_network_of_the_other_methods(first):
    members = first.members(5)[1].networks
    assert len(members) == 5
    assert len({round(w[0].sum().item(), 6) for w in (weights([member]) for member in members)}) == 5
    assert torch.equal(weights([members[0]])[0], weights(first.members(1)[1].networks)[0])


def test_networks_are_kept_and_trained_again_only_under_other_conditions(folder, first, monkeypatch):
    before = weights(first.members(1)[0].networks)
    monkeypatch.setattr(protocol, "train", None)  # would fail
    monkeypatch.setattr(protocol, "search", None)
    again = Protocol("first", first.X, first.y, range(2), first.folder, silent)
    assert all(map(torch.equal, weights(again.members(1)[0].networks), before))
    for name in ("PATIENCE", "EPOCHS_AT_LEAST"):
        with monkeypatch.context() as patch:
            patch.setattr(protocol, name, 17)
            with pytest.raises(TypeError):
                Protocol("first", first.X, first.y, range(2), first.folder, silent).members(1)
    with pytest.raises(TypeError):
        Protocol("first", first.X, first.y + 1, range(2), first.folder, silent).members(1)


@pytest.mark.parametrize("damage", [b"", b"\x08\x00\x00\x00\x00\x00\x00\x00{}", b"nonsense" * 10])
def test_a_damaged_file_of_networks_is_made_again(first, damage):
    before = weights(first.members(1)[0].networks)
    files = sorted(first.folder.iterdir())
    assert [path.suffix for path in files] == [".safetensors"] * 2
    for path in files:
        path.write_bytes(damage)
    again = Protocol("first", first.X, first.y, range(2), first.folder, silent)
    assert all(map(torch.equal, weights(again.members(1)[0].networks), before))


# --- the run


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
    band = PredictionIntervals(first.members(1)[1].networks[0], damping=108 * 1e-2 / 2, covariance=Exact()).fit(*train)
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
    run(folder, "methods.csv", "networks", "--datasets", "second", "--methods", "exact")
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
sys.path[:0] = [{root!r}, {tests!r}]
import test_experiments_reproduce as here
for (module, name), value in here.small(Path(sys.argv[1])).items():
    setattr(module, name, value)
if __name__ == "__main__":
    here.reproduce.main(["--data", sys.argv[1], "--splits", "2", *sys.argv[2:]])
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_where_an_undisturbed_one_does(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(ROOT), tests=str(ROOT / "tests")))

    def start(out):
        command = [sys.executable, str(script), str(tmp_path), "--workers", "2"]
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
    assert done.count(b"\n") < 1 + 2 * 2 * len(reproduce.METHODS)
    with start("cut.csv") as again:
        assert again.wait(300) == 0, again.stderr.read().decode()
    assert path.read_bytes().startswith(done[: done.rindex(b"\n") + 1])
    pd.testing.assert_frame_equal(comparable(path), comparable(tmp_path / "whole.csv"))


# --- the score and the figure


def test_all_directions_together_are_exact(folder, first):
    train, test = first.training_and_test(0)
    network = first.members(1)[0].networks[0]
    spectral = score.diagonalise(network, train, test, 1e-2)
    exact = PredictionIntervals(network, weight_decay=1e-2, covariance=Exact()).fit(*train).predict(test.x)
    np.testing.assert_allclose(spectral.widths(np.arange(len(spectral.d))), exact.width, rtol=1e-5)


def test_the_study_of_the_score_covers_every_sketch_and_rank(folder, monkeypatch):
    monkeypatch.setattr(score, "RANKS", (2, 5, 200))
    arguments = ["--data", str(folder), "--out", str(folder / "score.csv"), "--networks", str(folder / "networks")]
    score.main(arguments)
    table = pd.read_csv(folder / "score.csv")
    assert len(table) == 2 * 3 * len(score.METHODS)
    assert (table[table["rank"] == 200].width_error < 1e-4).all()  # more directions than rows: nothing is left out
    assert (table[table["rank"] == 2].width_error > 1e-4).all()
    assert (folder / "score.png").stat().st_size > 10_000
    score.main(arguments)  # nothing is left to do
    assert len(pd.read_csv(folder / "score.csv")) == len(table)
    paper_report.write(folder)
    assert "| first | 2,751 | 108 | 2 |" in (folder / "score.md").read_text()


def test_the_figure_shows_what_the_sketch_keeps(folder, monkeypatch):
    monkeypatch.setattr(figure, "NAME", "first")
    monkeypatch.setattr(figure, "RANK", 5)
    out = folder / "spectra.csv"
    figure.main(["--data", str(folder), "--out", str(out), "--networks", str(folder / "networks")])
    table = pd.read_csv(out)
    assert table.method.value_counts()["compressed"] <= 5
    assert out.with_suffix(".png").stat().st_size > 10_000


# --- the tables


def test_the_energy_target_is_coded_in_three_orders(folder, monkeypatch):
    y = np.array([10.2, 9.8, 2.4, 10.4, 31.0])
    assert energy.codes(y, "numbers").tolist() == [1, 1, 0, 1, 2]  # 2, 10, 31
    assert energy.codes(y, "words").tolist() == [0, 0, 1, 0, 2]  # "10", "2", "31"
    assert energy.codes(y, "appearance").tolist() == [0, 0, 1, 0, 2]
    assert energy.codes(y[::-1], "appearance").tolist() == [0, 1, 2, 1, 1]
    for (module, name), value in small(folder, names=("energy",)).items():
        monkeypatch.setattr(module, name, value)
    out = folder / "energy.csv"
    arguments = ["--data", str(folder), "--splits", "2", "--out", str(out), "--networks", str(folder / "networks")]
    energy.main(arguments)
    first = out.read_bytes()
    assert pd.read_csv(out).groupby("order").size().to_dict() == {"numbers": 2, "words": 2, "appearance": 2}
    assert "| the paper | 20 | 0.959 |" in out.with_suffix(".md").read_text()
    energy.main(arguments)  # nothing is left to do
    assert out.read_bytes() == first


def test_tables_put_the_paper_s_values_beside_ours_and_the_best_in_bold(tmp_path):
    def row(method, split, p_cov, r, w_sd, score):
        numbers = {"p_cov": p_cov, "r": r, "w_sd": w_sd, "score": score}
        rest = {"effective_parameters": 10.0, "seconds": 1.0, "setting": "x"}
        return {"data": "wine-red", "split": split, "method": method, **numbers, **rest}

    pd.DataFrame(
        [
            row("directions", 0, 0.94, 0.10, 3.0, 4.0),
            row("directions", 1, 0.96, 0.20, 3.2, 5.0),
            row("compressed", 0, 0.90, 0.30, 3.7, 4.2),
            row("compressed", 1, 0.90, 0.30, 3.7, 4.2),
            row("without dropout", 0, 0.80, np.nan, 1.96, 6.0),
        ]
    ).to_csv(tmp_path / "methods.csv", index=False)
    paper_report.write(tmp_path)
    text = (tmp_path / "tables.md").read_text()
    assert "| wine-red | directions | 0.950 (0.946) | 0.150 (0.144) | 3.100 (3.08) | 10 | 1.0 (1) |" in text
    for line in (
        "| wine-red | 2 | – | **0.950 ± 0.010** (0.946) | 0.900 ± 0.000 (0.946) | – | – | 0.800 ± nan (0.801) | – |",
        "| wine-red | 2 | – | 0.150 ± 0.050 (0.144) | **0.300 ± 0.000** (0.144) | – | – | – | – |",
        "| wine-red | 2 | – | 4.500 ± 0.500 | **4.200 ± 0.000** | – | – | 6.000 ± nan | – |",
        "| wine-red | directions | +0.004 | 1.006 | yes |",
        "| wine-red | compressed | -0.046 | 1.201 | no |",
        "| all | directions | | | 1 of 1 |",
    ):
        assert line in text, line
    assert "| year | not run: data not at hand |" in text
    table = pd.read_csv(tmp_path / "tables.csv")
    assert table[table.method == "directions"].w_sd_paper.item() == pytest.approx(3.082)
