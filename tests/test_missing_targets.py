"""Targets that are missing: how good a band is on those that are there, and every way that such rows take."""

import json
import re

import numpy as np
import pytest
import torch

from deltaband import Intervals, PredictionIntervals, metrics, report
from deltaband.fitting.some_outputs import some_outputs
from tests.support.fields import DECAY, SHAPE, holes, rows, trained

UNSURE = ("the network has p", "the network predicts", "n − p", ".*were training rows", "the network explains")
pytestmark = [pytest.mark.filterwarnings(f"ignore:{each}") for each in UNSURE]


@pytest.fixture(scope="module")
def model():
    return trained()


@pytest.fixture(scope="module")
def band(model):
    return PredictionIntervals(model, weight_decay=DECAY, missing="ignore").fit(*rows(60))


def of_output(intervals, o, there):
    """Return the intervals of one output at some rows."""
    mean, lower, upper = (np.asarray(part).reshape(len(there), 24, -1)[there, o] for part in intervals)
    return Intervals(mean[:, 0], lower, upper, intervals.level)


def test_a_band_is_measured_on_the_targets_that_are_there(band):
    x, y = rows(150, 1)
    y = holes(y)
    y[:, 1, 0, 0] = torch.where(torch.isnan(y[:, 0, 0, 0]), torch.nan, y[:, 1, 0, 0].nan_to_num())  # in the same rows
    y[3] = torch.nan  # says nothing
    levels, groups = [0.5, 0.9], np.arange(150) % 3
    scores, intervals = band.evaluate(x, y, levels, groups=groups.tolist()), band.predict(x, levels)
    assert scores.n_rows == 149
    flat, features = y.flatten(1).numpy(), x.numpy()
    for o in range(24):
        there = ~np.isnan(flat[:, o])
        of, some = flat[there, o], of_output(intervals, o, there)
        for name in ("coverage", "interval_score", "pinball_loss", "width_error_correlation"):
            np.testing.assert_allclose(getattr(scores, name)[o], getattr(metrics, name)(of, some), rtol=1e-9)
        width = (some.upper - some.lower).mean(axis=0)
        np.testing.assert_allclose(scores.mean_width[o], width, rtol=1e-9)
        np.testing.assert_allclose(scores.crps[o], metrics.crps(of, some), rtol=1e-9)
        np.testing.assert_allclose(scores.rmse[o], np.sqrt(np.mean((of - some.mean) ** 2)), rtol=1e-9)
        slab = metrics.worst_slab_coverage(of, some, features[there]) if there.sum() >= 100 else [np.nan, np.nan]
        np.testing.assert_allclose(scores.worst_slab_coverage[o], slab)
        for label, found in metrics.coverage_by_group(of, some, groups[there]).items():
            assert found.n_rows <= scores.by_group[label].n_rows
            np.testing.assert_allclose(scores.by_group[label].coverage[o], found.coverage)
            np.testing.assert_allclose(scores.by_group[label].upper[o], found.upper)
    assert "149 rows" in repr(scores)
    whole = band.evaluate(x, rows(150, 1)[1], levels)
    again = metrics.evaluate(rows(150, 1)[1], intervals, missing="ignore", x=features)
    np.testing.assert_array_equal(again.coverage, whole.coverage)  # nothing is missing


def test_loaders_and_masks_are_measured_as_arrays_with_gaps(model, band):
    x, y = rows(120, 1)
    given = holes(y)
    given[5] = torch.nan
    expected = band.evaluate(x, given)
    pieces = [(x[i : i + 40], given[i : i + 40]) for i in (0, 40, 80)]
    masks = [(x, y, {"mask": ~torch.isnan(of)}) for (x, of), y in zip(pieces, y.split(40), strict=True)]
    masked = PredictionIntervals(model, weight_decay=DECAY, batch=lambda batch: batch).fit(
        [(x, y, None) for x, y in [rows(60)]]
    )
    for scores in (band.evaluate(pieces), masked.evaluate(masks)):
        assert scores.n_rows == 119
        np.testing.assert_allclose(scores.coverage, expected.coverage)
        np.testing.assert_allclose(scores.interval_score, expected.interval_score, rtol=1e-7)


def test_jointly_a_row_is_covered_by_the_targets_that_are_there(band, model):
    x, y = rows(120, 1)
    given, joint = holes(y), PredictionIntervals(model, weight_decay=DECAY, missing="ignore").fit(*rows(60))
    joint.calibrate(*rows(120, 2), joint=True, noise="none")
    given[7] = torch.nan
    inside = joint.predict(x, 0.8).contains(y).flatten(1) | torch.isnan(given).flatten(1)
    share = inside.all(dim=1)[torch.arange(120) != 7].double().mean()
    assert float(joint.evaluate(x, given, [0.8]).joint_coverage[0]) == pytest.approx(float(share))


def test_one_output_of_which_some_targets_are_missing(model):
    x, y = rows(60)
    band = PredictionIntervals(model, weight_decay=DECAY, missing="ignore", outputs=3).fit(x, y)
    held, of_held = rows(50, 1)
    one = of_held.flatten(1)[:, 3:4].clone()
    one[::3] = torch.nan
    there = ~torch.isnan(one[:, 0])
    scores, expected = band.evaluate(held, one), band.evaluate(held[there], one[there])
    assert repr(scores) == repr(expected)
    assert scores.rmse == pytest.approx(expected.rmse)
    assert band.score(held, one) == pytest.approx(band.score(held[there], one[there]))
    with pytest.raises(ValueError, match="output 0 has no target among these rows"):
        band.evaluate(held[::3], one[::3])
    with pytest.raises(ValueError, match="output 0 has no target among these rows"):
        band.score(held[::3], one[::3])


def test_without_the_option_gaps_are_refused(model):
    (x, y), band = rows(60), PredictionIntervals(model, weight_decay=DECAY).fit(*rows(60))
    given = holes(y)
    for call in (
        lambda: band.evaluate(x, given),
        lambda: band.evaluate([(x, given)]),
        lambda: band.score(x, given),
        lambda: report.page(band, x, given),
        lambda: metrics.evaluate(given, band.predict(x, [0.9])),
    ):
        with pytest.raises(ValueError, match=r"targets (hold NaN|must be finite)"):
            call()
    with pytest.raises(ValueError, match="missing must be"):
        metrics.evaluate(given, band.predict(x, [0.9]), missing="drop")
    infinite = torch.where(torch.isnan(given), torch.inf, given)
    with pytest.raises(ValueError, match="infinite"):
        metrics.evaluate(infinite, band.predict(x, [0.9]), missing="ignore")


@pytest.mark.parametrize("calibrated", [False, True])
def test_the_score_of_distributions_is_a_mean_over_the_targets_that_are_there(model, calibrated):
    (x, y), held = rows(60, 1), rows(60, 2)
    given, band = holes(y), PredictionIntervals(model, weight_decay=DECAY, missing="ignore").fit(*rows(60))
    if calibrated:
        band.calibrate(*held, noise="none")
    of_rows, there = (
        np.asarray(band.predict_distribution(x).crps(y)).reshape(60, 24),
        ~np.isnan(given.flatten(1).numpy()),
    )
    expected = [of_rows[there[:, o], o].mean() for o in range(24)]
    np.testing.assert_allclose(band.score(x, given).ravel(), expected, rtol=1e-7)


def test_what_is_suspicious_is_so_about_the_targets_that_are_there(band):
    x, y = rows(80, 1)
    far = y + 2.5
    for given in (far, holes(far, 0.8)):
        with pytest.warns(UserWarning, match="these rows (are more than|worse than their mean)"):
            band.evaluate(x, given)
    with pytest.warns(UserWarning, match="the calibration rows (are more than|worse than their mean)"):
        PredictionIntervals(band.spec.model, weight_decay=DECAY, missing="ignore").fit(*rows(60)).calibrate(
            x, holes(far, 0.8), noise="none"
        )
    assert band.suspicions(holes(y, 0.8).flatten(1).numpy(), band.predict(x)) == []
    assert band.share_seen_in_training(*rows(60)) == 1.0


def test_a_report_is_about_the_targets_that_are_there(model):
    x, y = rows(60)
    band = PredictionIntervals(model, weight_decay=DECAY, missing="ignore", outputs=[0, 13]).fit(x, holes(y))
    held, of_held = rows(50, 1)
    given = holes(of_held)
    given[0] = torch.nan
    flat = given.flatten(1)[:, [0, 13]]
    there, column = ~torch.isnan(flat).numpy(), np.arange(50) % 2
    found = report.page(band, held, flat, columns={"parity": column})
    inside = band.predict(held, 0.95).contains(torch.nan_to_num(flat)).numpy() & there
    for o in range(2):
        n = int(there[:, o].sum())
        assert f"{100 * inside[:, o].sum() / n:.1f}" in found
        tips = [json.loads(each) for each in re.findall(r'<script[^>]*class="tips"[^>]*>(.*?)</script>', found, re.S)][
            o
        ]
        assert sorted(map(int, tips["rows"])) == np.flatnonzero(there[:, o]).tolist()
        assert all(int(values[-1]) == int(row) % 2 for row, values in tips["rows"].items())
    assert report.page(band, [(held, flat)]).count("<h2>output") == 2
    from deltaband.report.evaluation import evaluate

    numbers = evaluate(band, held, flat, 0.95, None)
    scores = metrics.evaluate(flat, band.predict(held, [0.95]), missing="ignore")
    for o, each in enumerate(numbers.outputs):
        assert each.coverage.n == there[:, o].sum()
        assert each.coverage.share == pytest.approx(scores.coverage[o, 0])
        levels = [at.level for at in each.curve]
        of, some = flat[there[:, o], o].numpy(), band.predict(held, levels)[there[:, o]]
        alone = Intervals(some.mean[:, o], some.lower[:, o], some.upper[:, o], some.level)
        assert each.crps == pytest.approx(metrics.crps(of, alone))
    seen = report.evaluation.evaluate(band, x, holes(y), 0.9, None)
    assert seen.share_seen_in_training > 0.9


def test_positions_are_measured_as_columns_of_the_whole(band):
    x, y = rows(120, 1)
    whole, some = band.evaluate(x, y), band.evaluate(x, y, positions=[(1, 2, 3), (0, 0, 1)])
    assert some.outputs == ("output 23", "output 1")
    np.testing.assert_allclose(some.coverage, whole.coverage[[23, 1]])
    np.testing.assert_allclose(some.crps, whole.crps[[23, 1]], rtol=1e-9)
    assert band.noise_std_.shape == SHAPE


def test_too_few_targets_for_a_scale_are_refused(model):
    (x, y), (held, of_held) = rows(60), rows(5, 1)
    band = PredictionIntervals(model, weight_decay=DECAY, missing="ignore").fit(x, holes(y))
    for joint in (True, "share"):
        with pytest.raises(ValueError, match=r"output \d+ has no target among the 1 rows that choose the scale"):
            band.calibrate(held, holes(of_held, 0.5), joint=joint, noise="none")


def test_a_fit_of_some_outputs_knows_how_many_targets_these_have(model):
    (x, y), where = rows(60), [20, 3]
    given = holes(y)
    fit = PredictionIntervals(model, weight_decay=DECAY, missing="ignore").fit(x, given).fits_[0]
    some, there = some_outputs(fit, where), (~torch.isnan(given.flatten(1))).sum(dim=0).numpy()[where]
    np.testing.assert_array_equal(some.observed, there)
    np.testing.assert_array_equal(some.counts[:2], there)  # the first of the moments of each output
    np.testing.assert_array_equal(some.noise_std, fit.noise_std[where])
    assert some.outputs == (20, 3)


def test_tables_and_pictures_of_fields_have_all_outputs(band):
    import matplotlib.pyplot as plt

    x, y = rows(20, 1)
    found = band.predict(x, 0.9)
    frame = found.to_pandas()
    assert frame.shape == (20, 24 * 3)
    np.testing.assert_array_equal(frame[23]["lower_90"], found.lower.flatten(1)[:, 23])
    ax = band.plot(x, y, output=23, level=0.9)
    assert ax.has_data()
    plt.close(ax.figure)
    with pytest.raises(ValueError, match="there are 24: choose one"):
        band.plot(x, y)
