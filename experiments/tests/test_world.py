"""The experiment on groups, shift and time."""

import warnings

import numpy as np
import pandas as pd
import pytest

from deltaband.calibration import conformal_quantiles
from experiments import data, world, world_methods, world_report
from experiments.__main__ import main
from experiments.protocol import Samples
from experiments.rows import Rows
from experiments.tests.small_data import catalogue, made, options
from experiments.training import Stack

METHODS = {"feature": 8, "prediction": 8, "tilted": 6, "beyond": 5, "order": 9}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two small data sets, one of which is too large, and few steps."""
    monkeypatch.delenv("DELTABAND_DATA", raising=False)
    catalogue(monkeypatch, *made(tmp_path, n=330))
    for name, value in (("STEPS", 20), ("ROWS_AT_MOST", 300), ("IN_ORDER_AT_MOST", 40)):
        monkeypatch.setattr(world, name, value)
    return tmp_path


def run(folder, out="world.csv", *more):
    main(["world", *options(folder, out), *more])
    return pd.read_csv(folder / out)


def held_of(folder, division="random", split=0):
    X, y = world.read("first", folder)
    rows = world.divided(X, division, split)
    parts = world.standardised(X, y, *rows)
    network = Stack.initial(2, [0]).network(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return world_methods.Held.of(network, 1e-2, parts, 0), rows, X


def test_every_method_has_a_row_in_every_cell_and_a_report_follows(folder):
    table = run(folder, "world.csv", "--datasets", "first", "sunspots", "--splits", "1")
    cells = table.groupby(list(world.KEY)).method.nunique()
    assert {study: set(cells.xs(study, level="study")) for study in METHODS} == {s: {n} for s, n in METHODS.items()}
    assert len(cells) == 5 + 1
    shares = table[["coverage", "infinite", *world_report.COLUMNS]].to_numpy()
    assert ((shares >= 0) & (shares <= 1)).all()
    assert (table.score >= table.width - 1e-6).all()
    assert (table.coverage - table[world_report.COLUMNS].mean(axis=1)).abs().max() < 0.1
    assert set(table[table.study == "order"].n_new) == {40}

    main(["report", "--results", str(folder)])
    text = (folder / "world.md").read_text()
    assert text.count("\n## ") == 5
    assert text.count("\n| first | 1 | ") == 5
    assert "nan" not in text


def test_an_interrupted_run_goes_on_where_it_stopped_and_trains_no_network_twice(folder, monkeypatch):
    asked = ("--datasets", "first", "--studies", "beyond", "--splits", "2")
    run(folder, "whole.csv", *asked)
    whole, cell, computed = (folder / "whole.csv").read_bytes(), world.cell, []

    def counted(part, study, split, *rest):
        if computed:
            raise KeyboardInterrupt
        computed.append((part.name, study, split))
        return cell(part, study, split, *rest)

    monkeypatch.setattr(world, "cell", counted)
    monkeypatch.setattr(world, "search", lambda *arguments, **named: pytest.fail("trained again"))
    with pytest.raises(SystemExit) as caught:
        run(folder, "parts.csv", *asked)
    assert caught.value.code == 130
    monkeypatch.setattr(world, "cell", cell)
    assert Rows(folder / "parts.csv", world.KEY).done() == set(computed)
    run(folder, "parts.csv", *asked)
    assert (folder / "parts.csv").read_bytes() == whole


@pytest.mark.parametrize("division", world.STUDIES)
def test_rows_are_divided_without_overlap(division):
    X = np.random.default_rng(0).standard_normal((300, 3)) @ np.diag([1.0, 2.0, 3.0])
    X[:, 1] += X[:, 0]
    parts = world.divided(X, division, 3)
    rows = np.concatenate(parts)
    assert np.array_equal(np.sort(rows), np.arange(300))
    if division == "order":
        assert max(parts.training.max(), parts.held.max()) == 134
        assert np.array_equal(np.concatenate(parts[2:]), np.arange(135, 300))
    if division == "beyond":
        units = (X - X.mean(axis=0)) / X.std(axis=0)
        component = np.linalg.svd(units)[2][0]
        z = units @ component * np.sign(component[np.abs(component).argmax()])
        assert set(parts.new) == set(np.argsort(z)[240:])


def test_tilted_rows_have_the_ratio_that_is_said(folder):
    z = np.random.default_rng(0).standard_normal(200_000)
    kept = z[np.random.default_rng(1).random(len(z)) < world.ratio(z)]
    w = world.ratio(z)
    for moment in (1, 2):  # expectations under the ratio are those of the rows that were kept
        assert np.mean(kept**moment) == pytest.approx(np.sum(w * z**moment) / w.sum(), abs=0.01)


def test_quintiles_are_those_of_the_training_rows():
    training = np.arange(100.0)
    (found,) = world.quintiles(training, np.array([-5.0, 19.0, 20.0, 50.0, 99.0, 1e9]))
    assert found.tolist() == [0, 0, 1, 2, 4, 4]
    (few,) = world.quintiles(np.array([0.0, 0.0, 0.0, 1.0]), np.array([0.0, 1.0]))
    assert len(set(few.tolist())) == 2


def test_infinite_bounds_count_as_three_times_the_training_range(folder):
    held = held_of(folder)[0]
    held = held._replace(new=Samples(held.new.x[:3], np.array([0.0, 9.0, 0.5], dtype=np.float32)))
    lowest, highest = float(held.training.y.min()), float(held.training.y.max())
    bounds = np.array([-np.inf, 1.0, 0.0]), np.array([np.inf, 2.0, 0.25])
    found = world.measured(held, np.array([0, 0, 4]), bounds)
    assert found["infinite"] == pytest.approx(1 / 3)
    assert found["coverage"] == pytest.approx(1 / 3)
    assert (found["part_1"], found["part_5"]) == (0.5, 0.0)
    widths = [3 * (highest - lowest), 1.0, 0.25]
    assert found["width"] == pytest.approx(np.mean(widths))
    assert found["score"] == pytest.approx(np.mean([widths[0], 1.0 + 20 * 7.0, 0.25 + 20 * 0.25]))


@pytest.mark.parametrize("name", world.SERIES)
def test_series_are_whole_and_each_target_follows_its_inputs(name):
    X, y = world.read(name, None)
    assert np.isfinite(X).all()
    assert X.shape == (len(y), world.LAGS)
    np.testing.assert_array_equal(X[1:, -1], y[:-1])


# --- methods


def test_mondrian_intervals_of_crepes_are_split_conformal_in_each_group(folder):
    held = held_of(folder)[0]
    groups = [(part.x[:, 0] > 0).astype(int) for part in (held.calibration, held.new)]
    lower, upper = world_methods.crepes(held._replace(groups=groups), by_group=True)
    r = np.abs(held.calibration.y - held.outputs[1])
    for g in (0, 1):
        (half,) = conformal_quantiles(np.sort(r[groups[0] == g]), (0.9,))
        np.testing.assert_allclose(upper[groups[1] == g] - held.outputs[2][groups[1] == g], half, rtol=1e-5)
        np.testing.assert_allclose(held.outputs[2][groups[1] == g] - lower[groups[1] == g], half, rtol=1e-5)


def test_series_of_mapie_go_on_where_it_raises_an_error(folder):
    held = held_of(folder, "order")[0]
    far = held.new.y + 100.0 * np.arange(1, len(held.new.y) + 1)  # each is a miss of all that was seen
    held = held._replace(new=Samples(held.new.x, far.astype(np.float32)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MAPIE tells at each step that it has changed
        lower, upper = world_methods.mapie_series(held, "aci")
    infinite = np.isinf(upper)
    assert infinite.any()
    assert not infinite.all()
    covered = (lower <= far) & (far <= upper)
    np.testing.assert_array_equal(covered, infinite)
    assert not infinite[int(infinite.argmax()) :].all()  # rows that are covered lower the level again


def test_intervals_are_those_of_the_calibrations_that_they_are_called_by(folder):
    held, rows, X = held_of(folder)
    z = world.along(X)
    ratios = world.ratio(z[rows.calibration]), world.ratio(z[rows.new])
    held = held._replace(weights=ratios)
    lower, upper = world_methods.calibrated(held, "weights")
    held.band.calibrate(*held.calibration, weights=ratios[0])
    expected = held.band.predict(held.new.x, 0.9, weights=ratios[1])
    np.testing.assert_array_equal(lower, expected.lower.astype(np.float64))
    np.testing.assert_array_equal(upper, expected.upper.astype(np.float64))
    assert set(world_methods.methods("tilted", held)) - set(world_methods.methods("beyond", held_of(folder)[0])) == {
        "true ratio"
    }


def test_large_data_sets_and_series_in_order_have_fewer_splits(monkeypatch):
    many = data.DataSet("many", 1_101, 2, None, None, "nowhere")
    catalogue(monkeypatch, data.DataSet("few", 1_100, 2, None, None, "nowhere"), many)
    asked = world.argparse.Namespace(datasets=["many", "few", "co2"], studies=["tilted", "beyond", "order"], splits=4)
    parts = [
        *(("few", "random", 4), ("many", "random", 3)),
        *(("few", "beyond", 3), ("many", "beyond", 3)),
        *(("co2", "order", 1), ("few", "order", 1), ("many", "order", 1)),
    ]
    assert [tuple(part) for part in world.parts(asked)] == parts


def test_data_that_cannot_be_had_are_left_out(folder, capsys):
    (folder / "first.csv.gz").unlink()
    table = run(folder, "some.csv", "--datasets", "first", "second", "--studies", "beyond", "--splits", "1")
    assert set(table.data) == {"second"}
    assert "missing: first" in capsys.readouterr().err
    assert data.NAMES == ("first", "second")
