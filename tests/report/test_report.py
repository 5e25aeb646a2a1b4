"""What a report says: the numbers, the words, and that whatever it is given it stays a page of its own."""

import copy
import datetime
import json
import re
import subprocess
import sys
import warnings
from html import unescape
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.preprocessing import FunctionTransformer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from deltaband import (
    ClassificationIntervals,
    ImportantDirections,
    Intervals,
    NotFittedError,
    PredictionIntervals,
    metrics,
    report,
)
from deltaband.data.groups import read_labels
from deltaband.display import DARK, LIGHT, Markup, number
from deltaband.report import _template, charts, drawn_rows
from deltaband.report.columns import Breakdown, group_by_value, group_by_width, read_column
from deltaband.report.evaluation import CURVE_LEVELS, Coverage, OutputEvaluation, chance_range, evaluate
from tests.support.networks import mlp, regression

HOSTILE = "</script><script>alert(1)</script>\"'&<b>"
TRAIN, HELD, NEW = slice(0, 120), slice(120, 160), slice(160, 400)


@pytest.fixture(scope="module")
def rows():
    return regression(400)


@pytest.fixture(scope="module")
def band(rows):
    X, y = rows
    return PredictionIntervals(mlp(), damping=1.0).fit(X[TRAIN], y[TRAIN], progress=False)


@pytest.fixture(scope="module")
def calibrated(rows):
    X, y = rows
    return PredictionIntervals(mlp()).fit(X[TRAIN], y[TRAIN], progress=False).calibrate(X[HELD], y[HELD])


@pytest.fixture(scope="module")
def several(rows):
    """A band of three outputs, and targets for it."""
    X, y = rows
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    Y = torch.stack([y, 2 * y, X[:, 0]], dim=1)
    return PredictionIntervals(model, damping=1.0).fit(X[TRAIN], Y[TRAIN], progress=False), Y


class Texts(HTMLParser):
    """The words of a page, and its elements."""

    def __init__(self, page):
        super().__init__()
        self.words, self.elements, self._open = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, f"{tag} is not the one that is open"

    def handle_data(self, data):
        if not self._open or self._open[-1] not in ("script", "style"):
            self.words.append(data)


def words(page):
    return " ".join(" ".join(Texts(page).words).split())


# --- the numbers


def test_the_headline_is_what_the_metrics_say(band, rows):
    X, y = rows[0][NEW], rows[1][NEW]
    intervals = band.predict(X, 0.9)
    text = words(report.page(band, X, y, level=0.9))
    share = metrics.coverage(y, intervals)
    assert f"{100 * share:.1f} % of 240 rows lie in their 90 % interval" in text
    assert f"Mean width {float(intervals.width.mean()):.2f}" in text
    assert f"Interval score {metrics.interval_score(y, intervals):.2f}" in text
    assert f"{number(metrics.mean_width(y, intervals), 3)} standard deviations of the target" in text
    assert f"Correlation of width and error: {number(metrics.width_error_correlation(y, intervals), 2)}" in text
    missed = int(((y < intervals.lower) | (y > intervals.upper)).sum())
    assert f"{missed} missed: {int((y < intervals.lower).sum())} below" in text


def test_the_curve_counts_what_predict_covers_at_each_level(band, rows):
    X, y = rows[0][NEW], rows[1][NEW]
    evaluation = evaluate(band, X, y, 0.42, None)
    (output,) = evaluation.outputs
    assert [each.level for each in output.curve] == sorted({*CURVE_LEVELS, 0.42})
    for each in output.curve:
        assert each.share == metrics.coverage(y, band.predict(X, each.level))
    assert output.coverage.level == 0.42
    assert metrics.interval_score(y, output.intervals) == metrics.interval_score(y, band.predict(X, 0.42))


def test_rows_in_chunks_are_evaluated_as_all_at_once(band, rows, monkeypatch):
    X, y = rows[0][NEW], rows[1][NEW]
    whole = evaluate(band, X, y, 0.9, None).outputs[0]
    monkeypatch.setattr("deltaband.report.evaluation.ROWS_PER_CHUNK", 37)
    pieces = evaluate(band, X, y, 0.9, None).outputs[0]
    assert pieces.curve == whole.curve
    for a, b in zip(pieces.intervals, whole.intervals, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_arrays_tensors_and_columns_of_targets_make_the_same_page(band, rows):
    X, y = rows[0][NEW], rows[1][NEW]
    page = report.page(band, X, y)
    assert report.page(band, X.numpy(), y.numpy()) == page
    assert report.page(band, X, y[:, None]) == page
    assert report.page(band, X, y.tolist()) == page


def test_a_loader_makes_the_page_of_its_rows(band, rows, tmp_path):
    X, y = rows[0][NEW], rows[1][NEW]
    loader = DataLoader(TensorDataset(X, y), batch_size=32)
    names = ["a", "b", "acidity"]
    assert report.page(band, loader, names=names) == report.page(band, X, y, names=names)
    written = report.write(tmp_path / "a.html", band, iter(zip(X.split(50), y.split(50), strict=True)))
    assert written.read_text(encoding="utf-8") == report.page(band, X, y)
    with pytest.raises(ValueError, match="data are empty"):
        report.page(band, iter([]))
    with pytest.raises(ValueError, match="same shape: pad them"):
        report.page(band, [(X[:5], y[:5]), (X[5:9, :2], y[5:9])])
    with pytest.raises(TypeError, match="targets are missing"):
        report.page(band, X)
    with pytest.raises(TypeError, match="about fitted PredictionIntervals or ClassificationIntervals, got"):
        report.page(mlp(), loader)


@pytest.mark.parametrize(("covered", "n"), [(0, 10), (10, 10), (95, 100), (1, 3)])
def test_the_confidence_interval_is_that_of_clopper_and_pearson(covered, n):
    from scipy.stats import binomtest

    expected = binomtest(covered, n).proportion_ci(0.95, "exact")
    assert Coverage(0.9, covered, n).confidence_interval == pytest.approx((expected.low, expected.high))


def test_the_chance_range_holds_a_share_as_often_as_it_says():
    rng = np.random.default_rng(0)
    low, high = chance_range(0.9, 200)
    shares = rng.binomial(200, 0.9, 4000) / 200
    assert 0.945 < np.mean((low <= shares) & (shares <= high)) < 0.98


def test_the_chance_range_of_a_calibrated_band_knows_that_its_quantile_is_an_estimate():
    rng = np.random.default_rng(0)
    low, high = chance_range(0.9, 500, calibration_rows=50)
    quantile = np.sort(rng.uniform(size=(2000, 50)), axis=1)[:, 45]  # the ⌈51·0.9⌉-th
    shares = np.mean(rng.uniform(size=(2000, 500)) <= quantile[:, None], axis=1)
    assert 0.93 < np.mean((low <= shares) & (shares <= high)) < 0.97
    narrow = chance_range(0.9, 500)
    assert low < narrow[0]
    assert high > narrow[1]


def test_a_coverage_is_off_only_where_it_matters_and_chance_does_not_explain_it():
    assert Coverage(0.95, 88, 100).verdict == "too low"
    assert Coverage(0.95, 91, 100).verdict == "as asked"  # chance
    assert Coverage(0.95, 947_000, 1_000_000).verdict == "as asked"  # too little to matter
    assert Coverage(0.95, 940_000, 1_000_000).verdict == "too low"
    assert Coverage(0.95, 100, 100).verdict == "too high"
    assert Coverage(0.95, 89, 100).verdict == "too low"
    assert Coverage(0.95, 89, 100, n_groups=10).verdict == "as asked"  # one of ten groups may be like this


def test_a_small_calibration_set_explains_a_deviation_but_does_not_change_the_verdict():
    few = Coverage(0.9, 803, 1000, calibration_rows=40)
    assert few.verdict == "too low"
    assert few.calibration_explains
    for other in (
        Coverage(0.9, 803, 1000, calibration_rows=4000),
        Coverage(0.9, 803, 1000),
        Coverage(0.9, 900, 1000, calibration_rows=40),
    ):
        assert not other.calibration_explains


def test_a_page_says_where_a_small_calibration_set_explains_a_deviation(calibrated, rows):
    X, y = rows[0][NEW], rows[1][NEW]
    explained = set()
    for level in np.arange(0.3, 0.95, 0.05).tolist():
        coverage = evaluate(calibrated, X, y, level, None).outputs[0].coverage
        remark = "A calibration on 40 rows may deviate by as much" in words(report.page(calibrated, X, y, level=level))
        assert remark == coverage.calibration_explains
        explained.add(remark)
    assert explained == {True, False}


def test_rows_far_from_the_training_rows_are_a_group_of_a_calibrated_band(band, calibrated, rows):
    X, y = torch.cat([rows[0][NEW], 30 * rows[0][:7]]), torch.cat([rows[1][NEW], rows[1][:7]])
    far = calibrated.predict(X).far
    assert 7 <= int(far.sum()) < 60
    groups = evaluate(calibrated, X, y, 0.9, None).outputs[0].intervals.far
    np.testing.assert_array_equal(groups, far)
    assert "far from the training rows" in words(report.page(calibrated, X, y))
    assert "far from the training rows" not in words(report.page(band, X, y))


@pytest.mark.filterwarnings("ignore:100% of these rows lie far outside")
def test_rows_that_are_all_far_are_one_group(calibrated, rows):
    X, y = rows
    assert bool(calibrated.predict(X + 20).far.all())
    page = words(report.page(calibrated, X + 20, y, columns={"site": ["north", "south"] * (len(X) // 2)}))
    assert "Coverage by far from the training rows" in page


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.filterwarnings("ignore:.* infinite intervals")
def test_intervals_may_all_be_infinite(rows, positive):
    X, y = rows
    logarithm = FunctionTransformer(np.log, np.exp).fit(np.ones((1, 1)))
    units = {"target_transform": logarithm} if positive else {}
    y = y.exp() if positive else y
    band = PredictionIntervals(mlp(), **units).fit(X[TRAIN], y[TRAIN], progress=False)
    band.calibrate(X[HELD], y[HELD], weights=np.ones(40))
    weights = np.full(len(y), 1e9)
    assert bool(band.predict(X, weights=weights).upper.isinf().all())
    assert "infinite" in words(report.page(band, X, y, weights=weights))


def test_training_rows_among_those_reported_on_are_noticed(band, rows):
    X, y = rows
    assert "were training rows" not in words(report.page(band, X[NEW], y[NEW]))
    assert "33.3 % of the rows were training rows" in words(report.page(band, X[80:200], y[80:200]))


def test_intervals_that_are_too_narrow_are_said_to_be(band, rows):
    X, y = rows[0][NEW], rows[1][NEW]
    assert "the intervals are too narrow" in words(report.page(band, X, y + 3))
    wide = PredictionIntervals(mlp(), damping=1.0).fit(rows[0][TRAIN], 50 * rows[1][TRAIN], progress=False)
    assert "wider than they need to be" in words(report.page(wide, X, y))


# --- groups


def test_where_all_rows_are_covered_too_rarely_only_groups_that_stand_out_are_named(band, rows):
    X, y = rows[0][NEW], rows[1][NEW].clone()
    y[::2] += 5
    page = words(report.page(band, X, y, columns={"site": ["north", "north", "south", "south"] * 60}))
    assert "Fewer rows are covered than asked for" in page
    assert "Covered less often than asked for" not in page


def test_a_column_may_have_the_name_of_something_of_ours(band, rows):
    page = report.page(band, rows[0][NEW], rows[1][NEW], columns={"width": ["a"] * 240, "row": range(240)})
    assert words(page).count("Coverage by width") == 2
    assert "Coverage by row" in words(page)


def test_a_group_that_is_covered_too_rarely_is_named(band, rows):
    X, y = rows[0][NEW], rows[1][NEW].clone()
    shifted = np.arange(240) % 4 == 0
    y[shifted] += 5
    page = words(report.page(band, X, y, columns={"site": np.where(shifted, "north", "south")}))
    assert "Covered less often than asked for, and not by chance: site north (0.0 %)" in page
    assert "band.calibrate(x, y, groups=data['site'])" in page


def days(*numbers):
    return [None if n is None else datetime.date(2024, 1, 1) + datetime.timedelta(days=int(n)) for n in numbers]


SOME = np.where(np.arange(240) % 4 == 0, None, np.arange(240))
COLUMNS = {
    "many numbers": np.random.default_rng(0).standard_normal(240),
    "large numbers": 123_456_789 + np.arange(240),
    "numbers, some missing": np.where(np.arange(240) % 4 == 0, np.nan, np.arange(240.0)),
    "numbers, some missing or infinite": [*[np.nan, np.inf, 1.0] * 10, *range(210)],
    "few numbers": np.arange(240) % 3,
    "few numbers, some missing": [1, None, 2, 3] * 60,
    "numbers of pandas, some missing": pd.array([*SOME[:240]], dtype="Int64"),
    "words": ["a", "b"] * 120,
    "words, some missing": ["a", None] * 120,
    "truths": [True, False] * 120,
    "dates": days(*range(240)),
    "dates, some missing": days(*SOME),
    "few dates": days(*np.arange(240) % 2),
    "dates of pandas": pd.Series(pd.date_range("2024-01-01", periods=240, freq="7h")),
    "dates of pandas, some missing": pd.Series([pd.NaT, *pd.date_range("2024-01-01", periods=239, freq="D")]),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_the_call_that_mends_a_group_runs_and_has_the_groups_of_the_page(band, rows, kind):
    column = read_column(kind, COLUMNS[kind], 240)
    groups = group_by_value(column)
    called = {}
    taken = SimpleNamespace(calibrate=lambda x, y, groups: called.update(codes=read_labels(groups, 240)))
    call = Breakdown(kind, column, groups, f"data[{kind!r}]").call
    exec(call, {"np": np, "band": taken, "data": {kind: COLUMNS[kind]}, "x": None, "y": None})
    codes = [{called["codes"][row] for row in group.rows} for group in groups]
    assert all(len(each) == 1 for each in codes), call
    assert len(set.union(*codes)) == len(groups), call


@pytest.mark.parametrize("of", ["width", "far"])
@pytest.mark.parametrize("by_group", [False, True])
def test_the_call_that_mends_widths_or_far_rows_makes_groups_that_stay_the_same(rows, of, by_group):
    X, y = rows
    x, targets = X[NEW].clone(), y[NEW].clone()
    x[::2] *= 4
    given = {"groups": np.arange(240) % 2 == 1} if by_group else {}
    band = PredictionIntervals(mlp(), damping=1.0, noise="none").fit(X[TRAIN], y[TRAIN], progress=False)
    of_rows = {"groups": np.arange(160) % 2 == 1} if by_group else {}
    band.calibrate(torch.cat([X[HELD]] * 4), torch.cat([y[HELD]] * 4), tune=False, **of_rows)
    found = band.predict(x, 0.9, **given)
    wide = found.far if of == "far" else found.width > np.quantile(found.width, 0.8)
    targets[torch.as_tensor(wide)] += 100
    page = report.page(band, x, targets, level=0.9, **given)
    call = unescape(re.search("each group as often as asked: <code>(.*?)</code>", page)[1])
    assert (".far" in call) == (of == "far")
    names = {"np": np, "copy": copy, "band": band, "x": x, "y": targets, **given}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # half of the rows are unlike the training rows
        exec(call, names)
    names["labels"] = eval(call.split("groups=", 1)[1].removesuffix(")"), names)
    again = band.predict(x, 0.9, groups=names["labels"])
    for label in np.unique(names["labels"]):
        rows_of_it = np.asarray(names["labels"] == label)
        assert again.contains(targets)[rows_of_it].double().mean() >= 0.9


def test_a_band_that_was_calibrated_by_groups_is_reported_with_them(rows):
    X, y = rows
    groups = np.where(X[:, 0] > 0, "right", "left")
    band = PredictionIntervals(mlp(), damping=0.1).fit(X[:100], y[:100], progress=False)
    band.calibrate(X[100:200], y[100:200], groups=groups[100:200])
    with pytest.raises(ValueError, match="give predict"):
        report.page(band, X[200:], y[200:])
    text = words(report.page(band, X[200:], y[200:], groups=groups[200:], columns={"side": groups[200:]}))
    assert "Coverage by side" in text
    assert "Worst slab" in text
    assert "CRPS" in text


# --- the page


def test_a_page_asks_for_nothing_and_is_well_formed(band, rows):
    page = report.page(band, rows[0][NEW], rows[1][NEW], title="Wine")
    texts = Texts(page)
    assert texts._open == []
    for tag, attributes in texts.elements:
        assert not {"src", "srcset", "data", "action"} & set(attributes), tag
        assert attributes.get("href", "data:,") == "data:,"
    assert "url(" not in page
    assert "@import" not in page
    assert page.count("http") == page.count("http-equiv") + page.count('xmlns="http://www.w3.org/2000/svg"')
    policy = next(a["content"] for _, a in texts.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert page.startswith("<!DOCTYPE html>")
    assert "<title>Wine</title>" in page


def test_all_text_is_escaped(several, rows):
    band, Y = several
    page = report.page(
        band,
        rows[0][NEW],
        Y[NEW],
        columns={HOSTILE: [HOSTILE] * 240, "lone \ud800": ["\ud800", *["x"] * 239]},
        outputs=["a", Markup(HOSTILE), "c"],  # also where a template engine would trust it
        title=Markup(HOSTILE),
        settings={HOSTILE: HOSTILE},
    )
    page.encode("utf-8")
    texts = Texts(page)
    scripts = [attributes for tag, attributes in texts.elements if tag == "script"]
    assert [attributes.get("type") for attributes in scripts] == ["application/json"] * 3 + [None]
    assert not any(tag == "b" for tag, _ in texts.elements)
    assert texts.words.count(HOSTILE) > 5


def test_the_tooltip_of_a_row_is_about_that_row(band, rows):
    X, y = rows[0][NEW], rows[1][NEW]
    page = report.page(band, X, y, columns={HOSTILE: [HOSTILE] * 240})
    (text,) = re.findall(r'<script type="application/json" class="tips">(.*?)</script>', page)
    tips = json.loads(text)
    assert tips["names"] == ["prediction", "interval", "target", HOSTILE]
    mean, lower, upper = band.predict(X)
    prediction, interval, target, column = tips["rows"]["17"]
    as_number = [float(part.replace("−", "-")) for part in (prediction, *interval.split(" to "), target)]
    assert as_number == pytest.approx([float(part[17]) for part in (mean, lower, upper, y)], abs=0.006)
    assert column == HOSTILE


def test_a_monitor_has_a_section_with_its_alarms(calibrated, rows):
    X, y = rows
    monitor = calibrated.monitor(0.9, window=20)
    assert 'id="monitor"' not in report.page(calibrated, X[NEW], y[NEW])
    quiet = report.page(calibrated, X[NEW], y[NEW], monitor=monitor)  # before the first row
    assert "No alarm was raised." in words(quiet)
    monitor.update(X[NEW], y[NEW] + 5)
    text = words(shown := report.page(calibrated, X[NEW], y[NEW], monitor=monitor))
    for alarm in monitor.alarms:
        assert " ".join(str(alarm).split()) in text
    assert {alarm.kind for alarm in monitor.alarms} == {"exchangeability", "coverage"}
    assert f"{len(X[NEW])} rows were watched" in text
    assert "with a probability of at most 0.01" in text
    assert "0 % lie in their 90 % interval" in text
    assert "Martingales over the rows" in shown
    with pytest.raises(TypeError, match="monitor must be a Monitor"):
        report.page(calibrated, X[NEW], y[NEW], monitor=True)


def test_settings_are_those_of_the_summary_and_those_given(band, rows):
    page = words(report.page(band, rows[0][NEW], rows[1][NEW], settings={"data": "wine.csv"}))
    for line in band.summary().splitlines()[1:]:
        assert " ".join(line.split()) in page
    assert "data wine.csv" in page


def test_warnings_of_the_fit_are_on_the_page(rows):
    X, y = rows
    band = PredictionIntervals(mlp(hidden=40), damping=1e-6)
    with pytest.warns(match="effective parameters"):
        band.fit(X[TRAIN], y[TRAIN], progress=False)
    (message,) = band.warnings_
    assert "effective parameters" in message
    assert message in words(report.page(band, X[NEW], y[NEW]))
    band.calibrate(X[HELD], y[HELD])
    assert "warnings above about the formula do not apply to them" in words(report.page(band, X[NEW], y[NEW]))


def test_warnings_of_the_calibration_are_on_the_page(rows):
    X, y = rows
    band = PredictionIntervals(mlp(), damping=1.0).fit(X[TRAIN], y[TRAIN], progress=False)
    assert band.warnings_ == ()
    with pytest.warns(match="were training rows"):
        band.calibrate(X[TRAIN], y[TRAIN])
    assert "were training rows" in words(report.page(band, X[NEW], y[NEW]))


def test_the_spectrum_of_an_exact_fit_is_said_to_be_exact(band, rows):
    page = words(report.page(band, rows[0][NEW], rows[1][NEW]))
    assert "Exact: all" in page
    assert "λ = 1.000" in page


def test_the_spectrum_of_a_sketch_states_its_rank(rows):
    X, y = rows
    band = PredictionIntervals(mlp(), damping=1.0, engine=ImportantDirections(20))
    band.fit(X[TRAIN], y[TRAIN], progress=False)
    kept = len(band.spectrum().singular_values)
    assert f"{kept} directions are kept (the rank)" in words(report.page(band, X[NEW], y[NEW]))


def test_a_page_can_do_without_the_spectrum(band, rows, monkeypatch):
    def fail(self, output=0):
        raise MemoryError("eigenvectors take 1 TB")

    monkeypatch.setattr(PredictionIntervals, "spectrum", fail)
    assert "Not shown: eigenvectors take 1 TB" in words(report.page(band, rows[0][NEW], rows[1][NEW]))


def test_a_calibrated_band_without_damping_has_a_page(calibrated, rows):
    page = words(report.page(calibrated, rows[0][NEW], rows[1][NEW], level=0.9))
    assert "λ is not known" in page
    assert "Levels that need more calibration rows: 98 %, 99 %" in page


def test_a_level_out_of_reach_is_refused(calibrated, rows):
    with pytest.raises(ValueError, match=r"40 calibration rows are too few for level 0\.99"):
        report.page(calibrated, rows[0][NEW], rows[1][NEW], level=0.99)


def test_equal_widths_and_equal_targets_have_a_page(rows):
    X, y = rows
    band = PredictionIntervals(mlp()).fit(X[TRAIN], y[TRAIN], progress=False)
    band.calibrate(X[HELD], y[HELD])
    page = words(report.page(band, X[NEW][:1].expand(30, 3), np.ones(30), level=0.9))
    assert "all targets are equal" in page
    assert "all " in page


def test_infinite_intervals_have_a_page(band, monkeypatch):
    n = 200
    y = np.linspace(0, 1, n)
    upper = np.where(np.arange(n) % 10 == 0, np.inf, y + 1)
    coverage = Coverage(0.95, n, n)
    output = OutputEvaluation("prediction", y, Intervals(y, y - 1, upper, 0.95), coverage, (coverage,))
    drawn = drawn_rows(output, 1000)
    assert len(drawn) == 180
    for draw in (charts.sorted_by_width, charts.width_against_error):
        picture, _ = draw(output, drawn)
        assert "nan" not in picture
        assert "inf" not in picture
    assert {group.name: len(group.rows) for group in group_by_width(output.width)}["∞"] == 20
    everything = OutputEvaluation(
        "prediction", y, Intervals(y, np.full(n, -np.inf), upper, 0.95), coverage, (coverage,)
    )
    assert len(drawn_rows(everything, 1000)) == 0
    charts.sorted_by_width(everything, np.zeros(0, dtype=int))
    charts.width_against_error(everything, np.zeros(0, dtype=int))

    def predict(self, x, level=0.95):
        bounds = [np.repeat(bound[:, None], len(level), axis=1) for bound in (y - 1, upper)]
        return Intervals(y, *bounds, tuple(level))

    monkeypatch.setattr(PredictionIntervals, "predict", predict)
    text = words(report.page(band, np.zeros((n, 3)), y))
    assert "20 intervals are infinite, and are not drawn." in text
    assert "Mean width ∞" in text


@pytest.mark.parametrize("n", [1, 2, 7])
def test_few_rows_have_a_page(band, rows, n):
    page = report.page(band, rows[0][NEW][:n], rows[1][NEW][:n])
    assert f"of {n} rows lie" in words(page)
    assert "nan" not in re.sub(r"<style>.*?</style>|<script>.*?</script>", "", page, flags=re.DOTALL)


def test_several_outputs_have_a_section_each(several, rows):
    band, Y = several
    page = report.page(band, rows[0][NEW], Y[NEW], outputs=["load", "torque", "heat"])
    text = words(page)
    for o, name in enumerate(["load", "torque", "heat"]):
        assert f'<section id="output-{o}"><h2>{name}</h2>' in page
        share = metrics.coverage(Y[NEW][:, o], Intervals(*(part[:, o] for part in band.predict(rows[0][NEW])), 0.95))
        assert f"{name} {100 * share:.1f} %" in text
    assert page.count("eigenvalues of Σ⁻¹. ") == 1  # one spectrum for all


def test_outputs_of_fits_of_their_own_have_spectra_of_their_own(rows):
    X, y = rows
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    Y = torch.stack([y, 2 * y], dim=1)
    band = PredictionIntervals(model, damping=1.0, per_output=True).fit(X[TRAIN], Y[TRAIN], progress=False)
    assert report.page(band, X[NEW], Y[NEW]).count("eigenvalues of Σ⁻¹. ") == 2


def test_chosen_outputs_take_targets_of_all_or_of_those(rows, several):
    X, Y = rows[0], several[1]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    band = PredictionIntervals(model, damping=1.0, outputs=[2, 0]).fit(X[TRAIN], Y[TRAIN], progress=False)
    assert band.outputs_ == (2, 0)
    page = report.page(band, X[NEW], Y[NEW])
    assert report.page(band, X[NEW], Y[NEW][:, [2, 0]]) == page
    assert "output 2" in words(page)


def test_a_level_for_all_outputs_at_once_is_evaluated_so(several, rows):
    _, Y = several
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    X = rows[0]
    band = PredictionIntervals(model, damping=1.0).fit(X[TRAIN], Y[TRAIN], progress=False)
    band.calibrate(X[120:240], Y[120:240], joint=True)
    _, lower, upper = band.predict(X[240:], 0.9)
    together_ = float(((lower <= Y[240:]) & (Y[240:] <= upper)).all(dim=1).double().mean())
    page = words(report.page(band, X[240:], Y[240:], level=0.9))
    assert f"{100 * together_:.1f} % of 160 rows lie in their 90 % interval in all outputs at once" in page


def test_outputs_may_have_the_same_name(several, rows):
    band, Y = several
    page = report.page(band, rows[0][NEW], Y[NEW], outputs=["a", "a", "a"])
    assert [f'href="#output-{o}"' in page for o in range(3)] == [True] * 3


def test_many_outputs_are_in_a_table_and_some_have_sections(monkeypatch, several, rows):
    monkeypatch.setattr(report, "MAX_DETAILED_OUTPUTS", 2)
    band, Y = several
    page = report.page(band, rows[0][NEW], Y[NEW])
    assert page.count('<section id="output-') == 2
    assert all(f"output {o}" in words(page) for o in range(3))
    assert "Below are the 2 outputs whose coverage is farthest from the level" in words(page)


# --- many rows


def many(n):
    rng = np.random.default_rng(0)
    mean, half = rng.normal(size=n), rng.uniform(1, 2, size=n)
    y = mean + rng.normal(size=n)
    covered = int((np.abs(y - mean) <= half).sum())
    coverage = Coverage(0.8, covered, n)
    return OutputEvaluation("prediction", y, Intervals(mean, mean - half, mean + half, 0.8), coverage, (coverage,))


@pytest.mark.parametrize("n", [100, 5_000])
def test_the_rows_drawn_are_few_and_misses_among_them(n):
    output = many(n)
    drawn = drawn_rows(output, 2_000)
    assert len(drawn) == min(n, 2_000) == len(np.unique(drawn))
    shown = int(output.missed[drawn].sum())
    assert shown == min(int(output.missed.sum()), 1_000)
    widest = output.width.argmax()
    assert widest in drawn or output.missed[widest]


def test_a_million_rows_make_a_page_of_less_than_a_megabyte(monkeypatch, band, rows):
    n = 1_000_000
    output = many(n)

    def predict(self, x, level=0.95):
        half = np.stack([output.width / 2] * len(level), axis=1)[: len(x)]
        mean = output.intervals.mean[: len(x)]
        return Intervals(mean, mean[:, None] - half, mean[:, None] + half, tuple(level))

    monkeypatch.setattr(PredictionIntervals, "predict", predict)
    monkeypatch.setattr("deltaband.report.evaluation.ROWS_PER_CHUNK", n)
    page = report.page(band, np.zeros((n, 3)), output.y, columns={"a": np.arange(n), "b": ["x"] * n})
    assert len(page.encode()) < 1_000_000
    missed = int(output.missed.sum())
    assert f"2,000 of 1,000,000 rows are drawn, 1,000 of {missed:,} misses among them. " in words(page)


def test_a_page_says_how_many_rows_and_misses_are_drawn(band, rows, monkeypatch):
    X, y = rows[0][NEW], rows[1][NEW]
    assert "rows are drawn" not in report.page(band, X, y)
    monkeypatch.setattr(report, "MAX_DRAWN_ROWS", 100)
    n_missed = int(evaluate(band, X, y, 0.95, None).outputs[0].missed.sum())
    assert 0 < n_missed < 50
    assert f"missed. 100 of 240 rows are drawn, all {n_missed} misses among them. " in words(report.page(band, X, y))


# --- what is refused


def test_what_cannot_be_reported_on_is_refused(band, rows):
    X, y = rows[0][NEW], rows[1][NEW]
    with pytest.raises(NotFittedError, match="not fitted yet"):
        report.page(PredictionIntervals(mlp(), damping=1.0), X, y)
    with pytest.raises(TypeError, match="about fitted PredictionIntervals or ClassificationIntervals, got Sequential"):
        report.page(mlp(), X, y)
    with pytest.raises(NotFittedError, match="not fitted yet"):
        report.page(ClassificationIntervals(mlp(), weight_decay=1.0), X, y)
    with pytest.raises(ValueError, match="240 inputs, 239 targets"):
        report.page(band, X, y[:-1])
    with pytest.raises(ValueError, match="at least one row"):
        report.page(band, X[:0], y[:0])
    with pytest.raises(ValueError, match="one level"):
        report.page(band, X, y, level=[0.5, 0.9])
    with pytest.raises(ValueError, match="between 0 and 1"):
        report.page(band, X, y, level=95)
    broken = y.clone()
    broken[3] = np.nan
    with pytest.raises(ValueError, match="targets hold NaN in row 3"):
        report.page(band, X, broken)
    with pytest.raises(ValueError, match="column 'a' must have a value for each of the 240 rows"):
        report.page(band, X, y, columns={"a": [1, 2]})
    with pytest.raises(TypeError, match="column 'a' must be a sequence"):
        report.page(band, X, y, columns={"a": "x" * 240})
    with pytest.raises(TypeError, match="columns must be a mapping"):
        report.page(band, X, y, columns=["a"])
    with pytest.raises(TypeError, match="settings must be a mapping"):
        report.page(band, X, y, settings="a")
    with pytest.raises(ValueError, match="names must be one for each feature"):
        report.page(band, X, y, names=["a", "b"])
    with pytest.raises(ValueError, match="1 outputs, but 2 names"):
        report.page(band, X, y, outputs=["a", "b"])


def test_a_formula_without_an_answer_is_an_error_that_says_what_to_do(rows):
    X, y = rows
    band = PredictionIntervals(nn.Linear(3, 1).double(), damping=0.0)
    with pytest.warns(match="not positive"):
        band.fit(X[:4], y[:4], progress=False)
    with pytest.raises(ValueError, match="calibrate on held-out data"):
        report.page(band, X[NEW], y[NEW])
    unknown = PredictionIntervals(mlp()).fit(X[TRAIN], y[TRAIN], progress=False)
    with pytest.raises(ValueError, match="λ is not known"):
        report.page(unknown, X[NEW], y[NEW])


def test_names_of_features_are_columns(band, rows):
    page = words(
        report.page(band, rows[0][NEW], rows[1][NEW], names=["a", "b", "acidity"], columns={"site": ["x"] * 240})
    )
    assert "Coverage by acidity" in page
    assert "Coverage by site" in page


def test_a_page_can_be_written_to_a_file(band, rows, tmp_path):
    path = report.write(tmp_path / "page.html", band, rows[0][NEW], rows[1][NEW], title="Wein für alle")
    assert path.read_text(encoding="utf-8") == report.page(band, rows[0][NEW], rows[1][NEW], title="Wein für alle")


def test_a_report_needs_neither_matplotlib_nor_pandas():
    code = """
import sys
sys.modules["matplotlib"] = sys.modules["pandas"] = None
import torch
from deltaband import PredictionIntervals, report
X = torch.randn(60, 2)
y = X.sum(dim=1) + 0.1 * torch.randn(60)
band = PredictionIntervals(torch.nn.Linear(2, 1), damping=1.0).fit(X[:40], y[:40], progress=False)
assert "<html" in report.page(band, X[40:], y[40:], columns={"a": X[40:, 0]})
assert "<svg" in band.predict(X)._repr_html_()
assert "<svg" in band._repr_html_()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_jinja2_the_error_says_what_to_install(band, rows, monkeypatch):
    _template.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"pip install 'deltaband\[report\]'"):
        report.page(band, rows[0][NEW], rows[1][NEW])


def test_pages_notebooks_and_figures_have_one_palette(band, rows):
    page = report.page(band, rows[0][NEW], rows[1][NEW])
    for mode in (LIGHT, DARK):
        for name, value in mode.items():
            assert page.count(f"--{name}: {value};") == 1
    for name in ("blue", "vermillion"):
        assert f"var(--{name}, {LIGHT[name]})" in band._repr_html_()


def test_a_few_far_away_do_not_flatten_all_others():
    values = np.concatenate([np.linspace(0, 1, 1000), [1e6]])
    assert charts.without_outliers(values).max() == 1.0
    assert charts.without_outliers(np.linspace(0, 1, 1000)).max() == 1.0
    assert charts.without_outliers(np.array([0.0, 1.0, 100.0])).max() == 100.0


def test_a_band_from_a_file_has_the_same_page(rows, tmp_path):
    X, y = rows
    model = mlp()
    band = PredictionIntervals(model, damping=1.0).fit(X[TRAIN], y[TRAIN], progress=False).calibrate(X[HELD], y[HELD])
    band.save(tmp_path / "a.band")
    loaded = PredictionIntervals.load(tmp_path / "a.band", model)
    assert report.page(loaded, X[100:], y[100:], level=0.9) == report.page(band, X[100:], y[100:], level=0.9)
    assert loaded._repr_html_() == band._repr_html_()
