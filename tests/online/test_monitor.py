"""`band.monitor`: alarms with a reason and without one, rows with targets and without."""

import copy
import json
import math
import re

import numpy as np
import pytest
import torch

from deltaband import ArtefactError, PredictionIntervals
from deltaband.online import Monitor
from tests.support.networks import mlp, regression

RNG = np.random.default_rng(0)


def rows(n, seed, scale=1.0, noise=0.1):
    rng = np.random.default_rng(seed)
    x = scale * rng.standard_normal((n, 3))
    return x, np.sin(x.sum(axis=1)) + noise * rng.standard_normal(n)


def fitted(n_outputs=1, seed=0, **settings):
    torch.manual_seed(seed)
    model = mlp(seed=seed)
    model[2] = torch.nn.Linear(8, n_outputs, dtype=torch.float64)
    x, y = rows(150, seed)
    x, y = torch.from_numpy(x), torch.from_numpy(y)[:, None].expand(-1, n_outputs)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-2)
    for _ in range(150):
        optimiser.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimiser.step()
    return PredictionIntervals(model, damping=0.1, noise="none", **settings).fit(x, y, progress=False)


@pytest.fixture(scope="module")
def band():
    return fitted().calibrate(*rows(300, 1))


def kinds(alarms):
    return [alarm.kind for alarm in alarms]


def test_rows_like_the_calibration_rows_raise_no_alarm(band):
    monitor = band.monitor(0.9)
    assert monitor.update(*rows(800, 2)) == []
    assert monitor.n_rows == 800
    assert "no alarms (probability 0.01 each for a false alarm, ever)" in monitor.summary()
    (coverage,) = monitor.to_dict()["coverage"]
    found = band.predict(rows(800, 2)[0][-200:], 0.9)
    y = rows(800, 2)[1][-200:]
    assert coverage["covered"] == ((found.lower <= y) & (y <= found.upper)).sum()
    assert coverage["low"] < coverage["share"] < coverage["high"]


def test_larger_errors_are_found_by_the_martingale_and_the_coverage_and_say_what_to_do(band):
    monitor = band.monitor(0.9)
    monitor.update(*rows(200, 2))
    alarms = monitor.update(*rows(400, 3, noise=0.4))
    assert kinds(alarms) == ["exchangeability", "coverage"]
    changed, rare = alarms
    assert 200 < changed.after < 300
    assert changed.statistic >= changed.limit == 100.0
    assert "errors are larger than those of the calibration rows" in changed.message
    assert rare.after == 400
    assert rare.statistic < 0.9 == rare.limit
    assert "of 200 targets lie in their intervals" in rare.message
    assert all("band.calibrate(x, y)" in str(alarm) and "band.online()" in str(alarm) for alarm in alarms)
    assert monitor.update(*rows(200, 4, noise=0.4)) == []  # each kind is raised once
    assert kinds(monitor.alarms) == ["exchangeability", "coverage"]
    assert monitor.summary().count("ALARM") == 2


def test_smaller_errors_are_found_too():
    band = fitted().calibrate(*rows(300, 1, noise=0.5))
    (alarm,) = band.monitor(0.9).update(*rows(400, 2, noise=0.05))
    assert alarm.kind == "exchangeability"
    assert "errors are smaller" in alarm.message


def test_inputs_that_leave_the_training_data_are_found_without_targets(band):
    monitor = band.monitor(0.9)
    assert monitor.update(rows(300, 2)[0]) == []
    (alarm,) = monitor.update(rows(200, 3, scale=3.0)[0])
    assert alarm.kind == "leverage"
    assert 300 < alarm.after < 400
    assert "band.leverage(x)" in alarm.advice
    assert monitor.to_dict()["coverage"][0]["targets"] == 0
    assert band.monitor(0.9).update(rows(500, 4, scale=0.3)[0]) == []  # inputs in the middle of the data are no danger


def test_targets_may_come_later_and_be_missing(band):
    x, y = rows(300, 2)
    at_once, late = band.monitor(0.9), band.monitor(0.9)
    at_once.update(x, y)
    late.update(x)
    late.observe(x, y)
    assert late.to_dict() == at_once.to_dict()
    some, few = band.monitor(0.9), band.monitor(0.9)
    missing = np.where(np.arange(300) % 3 == 0, math.nan, y)
    some.update(x, missing)
    few.update(x)
    few.observe(x[~np.isnan(missing)], y[~np.isnan(missing)])
    assert some.to_dict() == few.to_dict()
    assert some.to_dict()["errors"][0]["n"] == 200


def test_targets_of_rows_that_wait_for_none_are_refused_and_nothing_changes(band, tmp_path):
    x, y = rows(20, 2)
    monitor = band.monitor(0.9)
    monitor.update(x[:10])
    monitor.update(x[10:15], np.where(np.arange(5) == 3, math.nan, y[10:15]))
    monitor.save(tmp_path / "x.monitor")
    before = monitor.to_dict()
    for again, wrong in ((monitor, 12), (Monitor.load(tmp_path / "x.monitor", band), 15)):
        with pytest.raises(ValueError, match="row 1 of x waits for no target: give its inputs to update first"):
            again.observe(x[[3, wrong]], y[[3, wrong]])  # has its target; was never given
        assert again.to_dict() == before
        again.observe(x[[13, 4, 3]], np.array([y[13], math.nan, y[3]]))  # in any order
        assert again.to_dict()["errors"][0]["n"] == 6
        for twice in (3, 13):
            with pytest.raises(ValueError, match="row 0 of x waits for no target"):
                again.observe(x[[twice]], y[[twice]])
        again.observe(x[[4]], y[[4]])
    monitor.update(x[[0, 0]])
    monitor.observe(x[[0, 0, 0]], y[[0, 0, 0]])  # equal rows are counted
    with pytest.raises(ValueError, match="row 0 of x waits for no target"):
        monitor.observe(x[[0]], y[[0]])


def test_rows_in_parts_are_the_same_rows(band):
    x, y = rows(120, 5, noise=0.3)
    whole, parts = band.monitor(0.9, window=50), band.monitor(0.9, window=50)
    whole.update(x, y)
    for start in range(0, 120, 17):
        parts.update(x[start : start + 17], y[start : start + 17])
    assert parts.to_dict() == whole.to_dict()


@pytest.mark.parametrize("missing", [False, True])
def test_alarms_come_in_the_order_of_the_rows_however_these_are_batched(missing):
    """And say whether errors were larger or smaller at that time, whatever came later."""
    band, (x, y) = fitted(2), rows(300, 1)
    band.calibrate(x, np.stack([y, y + 0.1 * RNG.standard_normal(300)], axis=1))
    x, y = rows(600, 2, noise=0.5)
    y[60:] = rows(600, 2, noise=0.02)[1][60:]  # errors that are larger, and then smaller
    y = np.stack([y, y + np.where(np.arange(600) < 300, 0.1, 1.0) * RNG.standard_normal(600)], axis=1)
    x[400:] *= 3
    if missing:
        y[::5, 0] = np.nan
    whole, parts = band.monitor(0.9, window=50), band.monitor(0.9, window=50)
    whole.update(x, y)
    for start in range(600):
        parts.update(x[start : start + 1], y[start : start + 1])
    assert {alarm.kind for alarm in whole.alarms} == {"exchangeability", "leverage", "coverage"}
    assert "errors are larger" in next(a.message for a in whole.alarms if (a.kind, a.output) == ("exchangeability", 0))
    assert whole.alarms[-1].kind == "leverage"
    assert whole.alarms == parts.alarms
    assert whole.summary() == parts.summary()


def test_every_line_of_a_summary_has_its_name_and_then_a_space():
    band, (x, y) = fitted(12), rows(300, 1)
    y = np.stack([y] * 12, axis=1)
    monitor = band.calibrate(x, y).monitor(0.9)
    monitor.update(x, y)
    assert re.search("  coverage of output 11  [0-9]", monitor.summary())
    assert "  errors of output 0     martingale" in monitor.summary()
    assert "  leverage               martingale" in monitor.summary()


def test_the_same_row_alone_and_among_others_is_no_change():
    """Leverages and errors of equal rows may differ by roundings, which must not look like a trend."""
    x = np.repeat([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], 60, axis=0).astype(np.float32)
    y = np.tile(np.float32([0.1, -0.1, 0.3, 0.0]), 30)
    model = mlp(dtype=torch.float32)
    rng = np.random.default_rng(0)
    band = PredictionIntervals(model, damping=0.1, noise="none")
    band.fit(
        rng.standard_normal((50, 3)).astype(np.float32), rng.standard_normal(50).astype(np.float32), progress=False
    )
    order = rng.permutation(120)
    with pytest.warns(UserWarning, match="do not look like the training rows.*shuffle before you split"):
        band.calibrate(x[order], y[order])
    monitor = band.monitor(0.8, false_alarms=0.05)
    for i in rng.permutation(120):
        monitor.update(x[i : i + 1], y[i : i + 1])
    assert monitor.alarms == []


@pytest.mark.parametrize("joint", [False, True])
def test_exchangeable_rows_through_a_tuned_band_raise_alarms_at_most_as_often_as_stated(joint):
    """The scale is chosen by the calibration rows; the statistics must not be."""
    band, false_alarms, streams = fitted(2 if joint else 1), 0.2, 60
    found = dict.fromkeys(("exchangeability", "leverage", "coverage"), 0)
    for seed in range(streams):
        x, y = rows(240, 100 + seed)
        y = np.stack([y, y], axis=1) if joint else y
        monitor = band.calibrate(x[:60], y[:60], joint=joint).monitor(0.8, false_alarms=false_alarms, window=60)
        monitor.update(x[60:], y[60:])
        for alarm in monitor.alarms:
            found[alarm.kind] += 1
    assert all(count / streams <= false_alarms for count in found.values()), found


def test_each_output_has_its_own_alarm_at_a_share_of_the_probability():
    band, (x, y) = fitted(2), rows(300, 1)
    band.calibrate(x, np.stack([y, y], axis=1))
    monitor = band.monitor(0.9)
    x, y = rows(400, 2)
    z = rows(400, 3)[1] - np.sin(rows(400, 3)[0].sum(axis=1)) + np.sin(x.sum(axis=1))
    alarms = monitor.update(x, np.stack([y, z + RNG.normal(0, 0.5, 400)], axis=1))
    assert {(alarm.kind, alarm.output) for alarm in alarms} == {("exchangeability", 1), ("coverage", 1)}
    assert alarms[0].limit == 200.0
    assert "exchangeability, output 1: " in monitor.summary()
    assert set(monitor.martingales()) == {"errors of output 0", "errors of output 1", "leverage"}


def test_targets_of_joint_outputs_come_together():
    band, (x, y) = fitted(2), rows(300, 1)
    band.calibrate(x, np.stack([y, y], axis=1), joint=True)
    monitor, (x, y) = band.monitor(0.9), rows(3, 2)
    both = np.stack([y, y], axis=1)
    first = np.where([True, False], both, np.nan)
    monitor.update(x, first)  # which waits for the others
    with pytest.raises(ValueError, match="row 1 has some targets, and the outputs were calibrated jointly: give"):
        monitor.observe(x[[0, 2, 1]], np.where([[True, True], [False, True], [False, False]], both, np.nan))
    assert monitor.to_dict()["coverage"][0]["targets"] == 0
    monitor.observe(x, both)
    assert monitor.to_dict()["coverage"][0]["targets"] == 3


def test_what_is_found_is_plain_data(band):
    monitor = band.monitor(0.9)
    monitor.update(*rows(400, 3, noise=2.0))
    found = json.loads(json.dumps(monitor.to_dict(), allow_nan=False))
    assert found["rows"] == 400
    assert found["alarms"][0]["kind"] == "exchangeability"
    assert found["alarms"][0]["false_alarms"] == 0.01
    assert found["errors"][0]["martingale"] > 1e6
    assert len(monitor.martingales()["errors"]) == 400
    assert "ALARM" in monitor._repr_html_()
    json.dumps(band.monitor(0.9).to_dict(), allow_nan=False)


def test_a_saved_monitor_goes_on_as_if_nothing_had_happened(band, tmp_path):
    monitor = band.monitor(0.9, seed=3, window=70)
    monitor.update(*rows(200, 2, noise=0.2))
    monitor.save(tmp_path / "x.monitor")
    again = Monitor.load(tmp_path / "x.monitor", band)
    for each in (monitor, again):
        each.update(*rows(150, 3, noise=0.2))
    assert again.to_dict() == monitor.to_dict()
    np.testing.assert_array_equal(again.martingales()["errors"], monitor.martingales()["errors"])
    with pytest.raises(ArtefactError, match="another calibration"):
        Monitor.load(tmp_path / "x.monitor", fitted().calibrate(*rows(300, 9)))
    band.online(0.9).save(tmp_path / "x.online")
    with pytest.raises(ArtefactError, match="not a monitor of deltaband"):
        Monitor.load(tmp_path / "x.online", band)


class Quantiles(torch.nn.Module):
    """Three quantiles in their order."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()

    def forward(self, x):
        middle, below, over = self.layers(x).unbind(dim=1)
        softplus = torch.nn.functional.softplus
        return torch.stack([middle - softplus(below), middle, middle + softplus(over)], dim=1)


def test_networks_that_predict_quantiles_are_watched_as_well():
    torch.manual_seed(0)
    x, y = regression(300)
    model = Quantiles()
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-2)
    levels = torch.tensor([0.1, 0.5, 0.9])
    for _ in range(200):
        optimiser.zero_grad()
        r = y[:150, None] - model(x[:150])
        torch.maximum(levels * r, (levels - 1) * r).mean().backward()
        optimiser.step()
    band = PredictionIntervals(model, quantiles=(0.1, 0.5, 0.9)).fit(x[:150], y[:150], progress=False)
    band.calibrate(x[150:], y[150:])
    more, targets = regression(300, seed=5)
    assert band.monitor(0.8).update(more, targets) == []
    assert "exchangeability" in kinds(band.monitor(0.8).update(more, targets + 1.0))
    found = band.online(0.8).replay(more, targets)
    assert ((found.lower <= targets) & (targets <= found.upper)).double().mean() == pytest.approx(0.8, abs=0.06)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": 1.2}, "level must be between 0 and 1"),
        ({"level": 0.999}, "300 calibration rows are too few for level 0.999: it takes 999"),
        ({"level": [0.5, 0.9]}, "a monitor has one level"),
        ({"false_alarms": 0.0}, "false_alarms must be a finite number > 0"),
        ({"false_alarms": 1.0}, "false_alarms must be a probability from 1e-300 to below 1"),
        ({"false_alarms": 1e-310}, "false_alarms must be a probability from 1e-300 to below 1"),
        ({"window": 0}, "window must be a positive whole number"),
        ({"seed": -1}, "seed must be a whole number ≥ 0"),
    ],
)
def test_wrong_arguments_are_refused(band, arguments, message):
    with pytest.raises(ValueError, match=message):
        band.monitor(**arguments)


def test_a_calibration_by_groups_is_for_online_intervals_but_not_for_a_monitor():
    x, y = rows(300, 1)
    band = fitted().calibrate(x, y, groups=np.arange(300) % 2)
    with pytest.raises(ValueError, match="calibrate another band for a monitor, without groups=, target= and weights="):
        band.monitor()
    assert copy.copy(band).calibrate(x, y).monitor().update(*rows(100, 2)) == []
    assert band.calibration_.is_by_group  # still
    found = band.online(0.9).replay(*rows(100, 2))
    assert found.contains(rows(100, 2)[1]).mean() == pytest.approx(0.9, abs=0.07)


def test_a_band_must_be_calibrated_and_a_row_that_is_wrong_changes_nothing(band):
    with pytest.raises(ValueError, match=r"call calibrate\(x, y\) first"):
        fitted().monitor()
    monitor, (x, y) = band.monitor(0.9), rows(10, 2)
    with pytest.raises(ValueError, match="10 inputs, 9 targets"):
        monitor.update(x, y[:9])
    with pytest.raises(ValueError, match="infinite value in row 3"):
        monitor.update(x, np.where(np.arange(10) == 3, math.inf, y))
    x[4, 1] = math.nan
    with pytest.raises(ValueError, match="NaN in row 4"):
        monitor.update(x, y)
    assert monitor.n_rows == 0
    assert monitor.update(x[:0], y[:0]) == []
