"""`band.online`: predictions and their targets, one after another, late, for several horizons and several series."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaband import ArtefactError, DeltabandWarning, PredictionIntervals
from deltaband.online import Online
from deltaband.online.trackers import TRACKERS
from tests.support.networks import mlp, regression

X, Y = (each.numpy() for each in regression(400))
METHODS = ["aci", "pid", "window"]


def calibrated(n_outputs=1, joint=False, **settings):
    model, y = mlp(), Y
    if n_outputs > 1:
        torch.manual_seed(1)
        model[2] = torch.nn.Linear(8, n_outputs, dtype=torch.float64)
        y = np.stack([np.roll(Y, -k) for k in range(n_outputs)], axis=1)
    band = PredictionIntervals(model, damping=0.1, noise="none", **settings).fit(X[:100], y[:100], progress=False)
    return band.calibrate(X[100:200], y[100:200], joint=joint), y


def first_scores(band):
    mean, scale = band.predict_mean_and_scale(X[100:200])
    return np.abs(Y[100:200] - mean) / scale


def assert_same(one, two):
    for mine, other in zip(one.records(), two.records(), strict=True):
        assert mine == pytest.approx(other, nan_ok=True)


@pytest.fixture(scope="module")
def band():
    return calibrated()[0]


@pytest.fixture(scope="module")
def two():
    return calibrated(2)


@pytest.mark.parametrize("method", METHODS)
def test_the_first_interval_is_the_quantile_of_the_calibration_rows_on_the_delta_scale(band, method):
    found = band.online(0.9, method).predict(X[200:205])
    mean, scale = band.predict_mean_and_scale(X[200:205])
    of_rows, of_scales = band.predict_mean_and_scale(X[100:200])
    scores = np.sort(np.abs(Y[100:200] - of_rows) / of_scales)
    threshold = scores[math.ceil(101 * 0.9) - 1]
    np.testing.assert_allclose(found.mean, mean)
    np.testing.assert_allclose(found.upper - mean, threshold * scale, rtol=1e-9)
    np.testing.assert_allclose(mean - found.lower, threshold * scale, rtol=1e-9)
    assert found.level == 0.9


@pytest.mark.parametrize("method", METHODS)
def test_row_by_row_is_what_replay_does_at_once(band, method):
    slow, fast = band.online(0.8, method), band.online(0.8, method)
    found = fast.replay(X[200:300], Y[200:300])
    for i in range(100):
        row = slice(200 + i, 201 + i)
        one = slow.predict(X[row])
        np.testing.assert_allclose([one.lower[0], one.upper[0]], [found.lower[i], found.upper[i]], rtol=1e-9)
        slow.observe(X[row], Y[row])
    (mine,), (other,) = slow.records(), fast.records()
    assert mine == pytest.approx(other, nan_ok=True)
    inside = (found.lower <= Y[200:300]) & (Y[200:300] <= found.upper)
    assert mine["coverage"] == pytest.approx(inside.mean())
    assert mine["observed"] == 100


def test_adaptive_inference_by_hand(band):
    online, step = band.online(0.9, "aci", step=0.05), 0.05
    found = online.replay(X[200:400], Y[200:400])
    mean, scale = band.predict_mean_and_scale(X[100:400])
    scores = np.abs(Y[100:400] - mean) / scale
    alpha = 0.1
    for t in range(100, 300):
        last = np.sort(scores[t - 100 : t])
        rank = math.ceil(101 * (1 - alpha) - 1e-9)
        threshold = 0.0 if rank < 1 else last[rank - 1] if rank <= 100 else math.inf
        assert found.upper[t - 100] - found.mean[t - 100] == pytest.approx(threshold * scale[t], rel=1e-9)
        alpha += step * (0.1 - (scores[t] > threshold))


def test_late_targets_change_later_predictions_alone(band):
    online, far = band.online(0.9, step=0.2), Y[200:220] + 100
    at_once = online.predict(X[200:220])
    again = online.predict(X[220:225])
    half = (at_once.upper - at_once.lower) / band.predict_mean_and_scale(X[200:220])[1]
    np.testing.assert_allclose(half, half[0])
    later = (again.upper - again.lower) / band.predict_mean_and_scale(X[220:225])[1]
    np.testing.assert_allclose(later, half[0])
    online.observe(X[200:220], far)
    with pytest.warns(DeltabandWarning, match="infinite"):
        latest = online.predict(X[225:226])
    assert np.isinf(latest.upper).all()
    (record,) = online.records()
    assert (record["observed"], record["waiting"], record["coverage"], record["infinite"]) == (20, 6, 0.0, 1)
    assert record["bound"] == pytest.approx((0.9 + 0.2 * 25) / (0.2 * 20))  # of 24 others before it


def test_replay_with_a_delay_is_predict_and_a_late_observe(band):
    delayed, by_hand, late = band.online(0.8), band.online(0.8), 3
    found = delayed.replay(X[200:240], Y[200:240], delay=late)
    for i in range(40):
        one = by_hand.predict(X[200 + i : 201 + i])
        assert one.upper[0] == pytest.approx(found.upper[i], rel=1e-9)
        if i >= late:
            row = slice(200 + i - late, 201 + i - late)
            by_hand.observe(X[row], Y[row])
    assert delayed.records()[0]["waiting"] == late
    assert_same(delayed, by_hand)
    with pytest.raises(ValueError, match="wait for their targets: observe these first"):
        delayed.replay(X[240:250], Y[240:250])
    delayed.observe(X[237:240], Y[237:240])
    assert delayed.records()[0]["waiting"] == 0


def test_targets_out_of_order_twice_or_without_a_prediction_are_refused_and_nothing_changes(band):
    online = band.online(0.9)
    online.predict(X[200:205])
    before = repr(online)
    with pytest.raises(ValueError, match=r"row 0 of x is out of order: predictions before it wait"):
        online.observe(X[201:202], Y[201:202])
    with pytest.raises(ValueError, match=r"row 1 of x is out of order"):
        online.observe(X[[200, 202]], Y[[200, 202]])
    with pytest.raises(ValueError, match=r"row 0 of x waits for no target: predict it first, and observe it once"):
        online.observe(X[300:301], Y[300:301])
    assert repr(online) == before
    online.observe(X[200:202], Y[200:202])
    before = repr(online)
    with pytest.raises(ValueError, match=r"row 0 of x waits for no target"):
        online.observe(X[200:201], Y[200:201])
    with pytest.raises(ValueError, match=r"row 3 of x waits for no target"):
        online.observe(X[202:206], Y[202:206])
    assert repr(online) == before
    with pytest.raises(ValueError, match="waits for no target"):
        band.online(0.9).observe(X[200:201], Y[200:201])


def test_a_target_that_never_comes_is_nan(band):
    online, without = band.online(0.9), band.online(0.9)
    online.predict(X[200:203])
    online.observe(X[200:203], [Y[200], math.nan, Y[202]])
    (record,) = online.records()
    assert (record["observed"], record["waiting"]) == (2, 0)
    without.replay(X[[200, 202]], Y[[200, 202]])
    assert record["threshold"] == without.records()[0]["threshold"]


@settings(max_examples=40, deadline=None)
@given(
    moves=st.lists(
        st.tuples(st.booleans(), st.sampled_from(["a", "b"]), st.integers(1, 4), st.booleans()), min_size=3, max_size=15
    ),
    method=st.sampled_from(METHODS),
)
def test_any_order_of_calls_gives_the_thresholds_of_each_series_on_its_own(band, moves, method):
    step = {} if method == "window" else {"step": 0.05}
    online = band.online(0.7, method, **step)
    naive = {label: TRACKERS[method].start(first_scores(band), 0.7, **step) for label in "ab"}
    waiting, position = {"a": [], "b": []}, 200
    for predicts, label, count, is_known in moves:
        if predicts:
            rows = list(range(position, position + count))
            position += count
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeltabandWarning)
                found = online.predict(X[rows], series=label)
            scale, threshold = band.predict_mean_and_scale(X[rows])[1], naive[label].threshold()
            np.testing.assert_allclose(found.upper - found.mean, max(threshold, 0.0) * scale, rtol=1e-9, atol=1e-12)
            waiting[label] += [(row, threshold) for row in rows]
        else:
            taken, waiting[label] = waiting[label][:count], waiting[label][count:]
            rows = [row for row, _ in taken]
            online.observe(X[rows], Y[rows] if is_known else np.full(len(rows), math.nan), series=label)
            mean, scale = band.predict_mean_and_scale(X[rows])
            for score, (_, threshold) in zip(np.abs(Y[rows] - mean) / scale, taken, strict=True):
                if is_known:
                    naive[label].update(float(score), float(score) > threshold)
    assert {each["series"]: each["waiting"] for each in online.records()} == {
        each["series"]: len(waiting[each["series"]]) for each in online.records()
    }


def test_too_few_calibration_rows_for_the_level_are_infinite_intervals_until_there_are_more():
    band = PredictionIntervals(mlp(), damping=0.1, noise="none").fit(X[:100], Y[:100], progress=False)
    online = band.calibrate(X[100:110], Y[100:110]).online(0.9, "window", window=50)
    assert np.isfinite(online.predict(X[200:201]).upper).all()  # 9 would do
    online = band.online(0.95, "window", window=50)
    with pytest.warns(DeltabandWarning, match="infinite"):
        found = online.replay(X[200:215], Y[200:215])
    assert np.isinf(found.upper).tolist() == [True] * 9 + [False] * 6  # it takes 19


def test_several_horizons_are_several_outputs_whose_targets_come_one_after_the_other(two):
    band, y = two
    online = band.online(0.8, "pid")
    for i in range(200, 240):
        row = slice(i, i + 1)
        online.predict(X[row])
        online.observe(X[row], y[row, 0], output=0)
        if i > 200:
            online.observe(X[i - 1 : i], y[i - 1 : i, 1], output=1)
    first, second = online.records()
    assert (first["observed"], first["waiting"], second["observed"], second["waiting"]) == (40, 0, 39, 1)
    at_once = band.online(0.8, "pid")
    at_once.replay(X[200:240], y[200:240], delay=[0, 1])
    assert_same(at_once, online)
    assert first["threshold"] != second["threshold"]
    online.observe(X[239:240], y[239:240])  # what is left of it
    assert [each["observed"] for each in online.records()] == [40, 40]
    with pytest.raises(ValueError, match="waits for no target"):
        online.observe(X[239:240], y[239:240, 1], output=1)
    with pytest.raises(ValueError, match="output must be a whole number from 0 to 1"):
        online.observe(X[239:240], y[239:240, 1], output=2)
    with pytest.raises(ValueError, match="one target per row, got 2 columns"):
        online.observe(X[239:240], y[239:240], output=1)


def test_outputs_in_another_order_have_their_own_targets():
    band, _ = calibrated(2, outputs=[1, 0])
    online = band.online(0.9)
    found = online.predict(X[200:201])
    online.observe(X[200:201], found.mean[:, 0] + 1000, output=0)
    assert [each["observed"] for each in online.records()] == [1, 0]
    online.observe(X[200:201], found.mean[:, 1], output=1)
    assert [each["coverage"] for each in online.records()] == [0.0, 1.0]


def test_joint_outputs_have_one_threshold_and_miss_together():
    band, y = calibrated(2, joint=True)
    online = band.online(0.8)
    found = online.replay(X[200:350], y[200:350])
    (record,) = online.records()
    inside = ((found.lower <= y[200:350]) & (y[200:350] <= found.upper)).all(axis=1)
    assert record["coverage"] == pytest.approx(inside.mean())
    assert record["output"] is None
    with pytest.raises(ValueError, match="jointly"):
        online.observe(X[200:201], y[200:201, 0], output=0)


def test_every_series_has_its_own_state(band):
    together, alone = band.online(0.8), band.online(0.8)
    labels = np.array(["a", "b"] * 50)
    y = Y[200:300] + 5 * (labels == "b")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeltabandWarning)
        together.replay(X[200:300], y, series=labels)
        alone.replay(X[200:300][labels == "b"], y[labels == "b"], series="b")
    a, b = together.records()
    assert (a["series"], b["series"]) == ("a", "b")
    assert b == pytest.approx(alone.records()[0])
    assert a["threshold"] < b["threshold"]
    together.predict(X[300:302], series=["a", 7])
    assert [each["series"] for each in together.records()] == ["a", "b", 7]
    with pytest.raises(ValueError, match=r"row 0 of x of series 'b' waits for no target"):
        together.observe(X[300:301], Y[300:301], series="b")
    with pytest.raises(TypeError, match=r"words or whole numbers, got 1\.5 in row 0"):
        together.predict(X[300:301], series=[1.5])
    with pytest.raises(ValueError, match="one for each of the 2 rows, got 3"):
        together.predict(X[300:302], series=["a", "b", "a"])


@pytest.mark.parametrize("method", METHODS)
def test_a_saved_state_goes_on_bit_for_bit_also_with_a_band_from_a_file(band, method, tmp_path):
    online = band.online(0.9, method, **({"step": 0.02} if method != "window" else {"window": 30}))
    online.replay(X[200:250], Y[200:250], series=["a", 3] * 25)
    online.predict(X[250:253], series="a")
    online.save(tmp_path / "x.online")
    band.save(tmp_path / "x.band")
    again = Online.load(tmp_path / "x.online", PredictionIntervals.load(tmp_path / "x.band", band.model))
    assert again.summary() == online.summary()
    for each in (online, again):
        each.observe(X[250:253], Y[250:253], series="a")
    for label in ("a", 3, "new"):
        mine = online.replay(X[260:300], Y[260:300], series=label)
        theirs = again.replay(X[260:300], Y[260:300], series=label)
        assert mine.lower.tobytes() == theirs.lower.tobytes()
    assert online.records() == again.records()


def test_a_file_of_another_band_or_of_something_else_is_refused(band, tmp_path):
    band.online(0.9).save(tmp_path / "x.online")
    other = PredictionIntervals(band.model, damping=0.1).fit(X[:100], Y[:100], progress=False)
    with pytest.raises(ArtefactError, match="another calibration"):
        Online.load(tmp_path / "x.online", other.calibrate(X[150:300], Y[150:300]))
    band.save(tmp_path / "x.band")
    with pytest.raises(ArtefactError, match="not a state of online intervals of deltaband"):
        Online.load(tmp_path / "x.band", band)
    content = (tmp_path / "x.online").read_bytes()
    (tmp_path / "x.online").write_bytes(content[:-3])
    with pytest.raises(ArtefactError):
        Online.load(tmp_path / "x.online", band)
    with pytest.raises(TypeError, match="expected calibrated PredictionIntervals, got NoneType"):
        Online.load(tmp_path / "x.online", None)


def test_infinite_intervals_are_said_once_and_counted(band):
    online = band.online(0.9, step=0.5)
    online.predict(X[200:201])
    online.observe(X[200:201], Y[200:201] + 100)
    with pytest.warns(DeltabandWarning, match="interval is infinite: only that keeps the long-run coverage"):
        found = online.predict(X[201:202])
    assert np.isinf([found.lower, found.upper]).all()
    online.observe(X[201:202], Y[201:202])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        online.predict(X[202:203])  # α is 0.1 − 0.45 + 0.05 now
    assert "2 infinite" in online.summary()
    fresh = band.online(0.9, step=0.5)
    fresh.replay(X[200:201], Y[200:201] + 100)
    before = fresh.summary()
    with pytest.raises(DeltabandWarning):  # as warnings are errors here
        fresh.predict(X[201:202])
    assert fresh.summary() == before  # a warning that is an error leaves nothing behind


def test_targets_are_in_the_units_of_predict():
    model = mlp()
    data = {"progress": False}
    plain = PredictionIntervals(model, damping=0.1, noise="none").fit(X[:100], Y[:100], **data)
    scaled = PredictionIntervals(model, damping=0.1, noise="none", target_transform=(50.0, 4.0))
    scaled.fit(X[:100], Y[:100], **data)
    one, two = (each.calibrate(X[100:200], Y[100:200]).online(0.8) for each in (plain, scaled))
    mine, theirs = one.replay(X[200:300], Y[200:300]), two.replay(X[200:300], 50 + 4 * Y[200:300])
    np.testing.assert_allclose(theirs.upper, 50 + 4 * mine.upper, rtol=1e-9)
    assert_same(one, two)


def test_tensors_in_tensors_out(band):
    found = band.online(0.9).predict(torch.from_numpy(X[200:203]))
    assert isinstance(found.upper, torch.Tensor)
    assert found.upper.shape == (3,)
    online = band.online(0.9)
    online.predict(torch.from_numpy(X[200:203]))
    online.observe(X[200:203], torch.from_numpy(Y[200:203]))
    assert online.records()[0]["observed"] == 3


def test_no_rows_are_no_work(band):
    online = band.online(0.9)
    assert len(online.predict(X[:0])) == 0
    online.observe(X[:0], Y[:0])
    assert len(online.replay(X[:0], Y[:0])) == 0


def test_a_calibration_afterwards_does_not_change_what_runs(band):
    own = calibrated()[0]
    online, reference = own.online(0.9), band.online(0.9)
    own.calibrate(X[300:330], Y[300:330])
    np.testing.assert_array_equal(online.predict(X[200:210]).upper, reference.predict(X[200:210]).upper)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"method": "lstm"}, ValueError, "method must be 'aci', 'pid' or 'window', got 'lstm'"),
        ({"level": 1.5}, ValueError, "level must be between 0 and 1"),
        ({"level": [0.5, 0.9]}, ValueError, "one level"),
        ({"method": "window", "step": 0.1}, TypeError, "method='window' takes window, not step"),
        ({"gain": 1.0}, TypeError, "method='aci' takes step, window, not gain"),
        ({"step": -1.0}, ValueError, "step must be a finite number > 0"),
    ],
)
def test_wrong_arguments_are_refused(band, arguments, error, message):
    with pytest.raises(error, match=message):
        band.online(**arguments)


def test_a_band_must_be_calibrated_and_targets_must_be_numbers(band):
    fitted = PredictionIntervals(mlp(), damping=0.1).fit(X[:100], Y[:100], progress=False)
    with pytest.raises(ValueError, match=r"call calibrate\(x, y\) first"):
        fitted.online(0.9)
    online = band.online(0.9)
    online.predict(X[200:202])
    with pytest.raises(ValueError, match="infinite value in row 1"):
        online.observe(X[200:202], [0.0, math.inf])
    with pytest.raises(ValueError, match="2 inputs, 3 targets"):
        online.observe(X[200:202], Y[200:203])
    assert online.records()[0]["waiting"] == 2


def test_on_a_real_band_the_long_run_coverage_is_right_where_that_of_the_calibration_is_not(band):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1500, 3))
    y = np.sin(x.sum(axis=1)) + 0.1 * rng.standard_normal(1500) + 2 * np.sin(np.arange(1500) / 100)
    plain = band.predict(x, 0.9)
    assert ((plain.lower <= y) & (y <= plain.upper)).mean() < 0.85
    for method in ("aci", "pid"):
        online = band.online(0.9, method)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeltabandWarning)
            online.replay(x, y)
        (record,) = online.records()
        assert abs(record["coverage"] - 0.9) <= min(record["bound"], 0.03)
    assert "guaranteed: 90 % ±" in online.summary()
    assert "<pre>" in online._repr_html_()
