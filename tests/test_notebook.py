"""Fits and intervals in a notebook: data frames, short texts, small pictures."""

import sys
from html.parser import HTMLParser

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deltaband import (
    ClassificationIntervals,
    ClassIntervals,
    Exact,
    ImportantDirections,
    Intervals,
    PredictionIntervals,
)
from tests.support.classifiers import classifier
from tests.support.networks import mlp, regression

mpl.use("Agg")
import matplotlib.pyplot as plt


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def around(mean, *half_widths, level=0.95):
    mean = np.asarray(mean, dtype=float)
    if len(half_widths) == 1:
        return Intervals(mean, mean - half_widths[0], mean + half_widths[0], level)
    half = np.array(half_widths)
    return Intervals(mean, mean[..., None] - half, mean[..., None] + half, level)


# --- data frames


def test_a_frame_has_the_prediction_and_its_bounds():
    frame = around([1.0, 2.0], 0.5).to_pandas()
    expected = pd.DataFrame({"prediction": [1.0, 2.0], "lower_95": [0.5, 1.5], "upper_95": [1.5, 2.5]})
    pd.testing.assert_frame_equal(frame, expected)


def test_several_levels_are_a_pair_of_columns_each():
    frame = around([1.0, 2.0], 1.0, 2.0, level=(0.5, 0.999)).to_pandas()
    assert list(frame.columns) == ["prediction", "lower_50", "upper_50", "lower_99.9", "upper_99.9"]
    assert frame["upper_99.9"].tolist() == [3.0, 4.0]
    assert frame["lower_50"].tolist() == [0.0, 1.0]


def test_several_outputs_stand_below_a_name_each():
    mean = np.array([[1.0, 10.0], [2.0, 20.0]])
    frame = around(mean, 1.0).to_pandas()
    assert frame.columns.nlevels == 2
    assert frame.columns.names == ["output", None]
    pd.testing.assert_frame_equal(frame[1], around(mean[:, 1], 1.0).to_pandas(), check_names=False)
    named = around(mean, 1.0, 2.0, level=(0.5, 0.9)).to_pandas(outputs=["load", "torque"])
    assert named["torque", "upper_90"].tolist() == [12.0, 22.0]


def test_the_index_given_is_kept():
    source = pd.DataFrame({"a": [1.0, 2.0]}, index=pd.Index(["x", "y"], name="id"))
    frame = around([1.0, 2.0], 0.5).to_pandas(index=source.index)
    pd.testing.assert_index_equal(frame.index, source.index)
    assert source.join(frame).loc["y", "upper_95"] == 2.5
    with pytest.raises(ValueError, match=r"[Ll]ength|[Ss]hape"):
        around([1.0, 2.0], 0.5).to_pandas(index=[1, 2, 3])


def test_tensors_make_the_frames_that_arrays_do_as_precise_as_they_are():
    arrays = around([1.0, 2.0], 0.5)
    tensors = Intervals(*(torch.tensor(part, dtype=torch.float32, requires_grad=True) for part in arrays), 0.95)
    frame = tensors.to_pandas()
    assert set(frame.dtypes) == {np.dtype("float32")}
    pd.testing.assert_frame_equal(frame, arrays.to_pandas(), check_dtype=False)


def test_without_a_level_bounds_have_no_number_and_no_rows_are_a_frame_too():
    mean = np.array([1.0])
    assert list(Intervals(mean, mean, mean).to_pandas().columns) == ["prediction", "lower", "upper"]
    empty = np.zeros(0)
    assert Intervals(empty, empty, empty, 0.95).to_pandas().shape == (0, 3)
    assert Intervals(empty, np.zeros((0, 2)), np.zeros((0, 2)), (0.5, 0.9)).to_pandas().shape == (0, 5)


def test_names_that_do_not_go_with_the_outputs_are_refused():
    with pytest.raises(ValueError, match="these intervals are of one output"):
        around([1.0], 0.5).to_pandas(outputs=["a"])
    with pytest.raises(ValueError, match="of 2 outputs, but 1 names"):
        around([[1.0, 2.0]], 0.5).to_pandas(outputs=["a"])
    mean = np.zeros(2)
    with pytest.raises(ValueError, match="1 levels do not match bounds of 2 columns"):
        Intervals(mean, np.zeros((2, 2)), np.zeros((2, 2)), 0.5).to_pandas()


def test_classes_have_log_odds_and_probabilities_below_their_number():
    s, p = around([[0.0, 1.0]], 1.0), around([[0.5, 0.7]], 0.1)
    frame = ClassIntervals((0, 2), s, p).to_pandas(index=["row"])
    assert frame.columns.names == ["class", None]
    assert list(frame[2].columns) == [
        "log_odds", "log_odds_lower_95", "log_odds_upper_95",
        "probability", "probability_lower_95", "probability_upper_95",
    ]  # fmt: skip
    assert frame.loc["row", (2, "log_odds_upper_95")] == 2.0
    assert frame.loc["row", (0, "probability_lower_95")] == pytest.approx(0.4)


def test_one_class_and_predicted_classes_are_flat():
    s, p = around([0.0, 1.0], 1.0), around([0.5, 0.7], 0.1)
    assert ClassIntervals((1,), s, p).to_pandas().columns[0] == "log_odds"
    frame = ClassIntervals(np.array([2, 0]), s, p).to_pandas()
    assert frame["class"].tolist() == [2, 0]
    assert list(frame.columns)[:2] == ["class", "log_odds"]


@pytest.mark.parametrize("classes", [None, 1, "predicted"])
def test_what_a_classifier_answers_is_a_frame(classes):
    X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    band = ClassificationIntervals(classifier(3), weight_decay=1e-1, classes=classes)
    band.fit(X, torch.arange(40) % 3, progress=False)
    intervals = band.predict(X[:5], [0.5, 0.9])
    frame = intervals.to_pandas()
    assert len(frame) == 5
    assert "ClassIntervals" in repr(intervals)
    assert len(repr(intervals)) < 3000
    assert "<svg" in intervals._repr_html_()
    assert "ClassificationIntervals" in band._repr_html_()


def test_without_pandas_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install 'deltaband\[pandas\]'"):
        around([1.0], 0.5).to_pandas()


# --- texts and pictures of intervals


class Balanced(HTMLParser):
    """Every element that is opened is closed."""

    def __init__(self, fragment):
        super().__init__()
        self.open, self.words = [], []
        self.feed(fragment)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_many_rows_have_a_short_text():
    intervals = around(np.linspace(0, 1, 100_000), 0.5)
    lines = repr(intervals).splitlines()
    assert lines[0] == "Intervals of 100,000 rows, 95 %"
    assert lines[1].split() == ["row", "prediction", "lower", "95", "upper", "95"]
    assert lines[2].split() == ["0", "0.00", "−0.50", "0.50"]
    assert len(lines) == 8
    assert lines[-1] == "  … 99,995 more"


def test_each_output_is_shown_with_decimals_of_its_own():
    mean = np.array([[1.0, 1000.0], [2.0, 2000.0]])
    half = np.array([0.012, 450.0])
    intervals = Intervals(mean, mean - half, mean + half, 0.9)
    assert repr(intervals).splitlines()[2].split() == ["0", "1.0000", "0.9880", "1.0120", "1,000", "550", "1,450"]


# --- some rows, and targets within


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor, list], ids=["arrays", "tensors", "lists"])
def test_rows_are_taken_by_slices_masks_and_numbers(kind):
    mean = np.arange(5.0)
    intervals = Intervals(kind(mean), kind(mean - 1), kind(mean + 1), 0.9, kind(mean > 3))
    for rows in (slice(1, 3), [1, 2], np.array([1, 2]), mean % 3 > 0.5, torch.tensor(mean % 3 > 0.5), slice(2, 0, -1)):
        some = intervals[rows]
        chosen = np.asarray(rows) if not isinstance(rows, slice) else rows
        assert np.asarray(some.upper).tolist() == (mean + 1)[chosen].tolist()
        assert np.asarray(some.far).tolist() == (mean > 3)[chosen].tolist()
        assert (some.level, type(some.mean)) == (0.9, torch.Tensor if kind is torch.tensor else np.ndarray)
    assert len(intervals[5:]) == len(intervals[[]]) == 0
    with pytest.raises(IndexError):
        intervals[[5]]
    with pytest.raises(TypeError, match=r"intervals\[3:4\] is row 3"):
        intervals[3]
    several = around(np.zeros((4, 2)), 1.0, 2.0, level=(0.5, 0.9))[1:3]
    assert (np.shape(several.mean), np.shape(several.lower), several.far) == ((2, 2), (2, 2, 2), None)


def test_contains_says_which_targets_lie_within_their_bounds():
    intervals = around([0.0, 0.0, 0.0], 1.0, 2.0, level=(0.5, 0.9))
    expected = [[True, True], [False, True], [False, False]]
    for y in ([-1.0, 1.5, 3.0], np.array([[-1.0], [1.5], [3.0]])):
        assert intervals.contains(y).tolist() == expected
    tensors = Intervals(torch.zeros(2, 2), -torch.ones(2, 2), torch.ones(2, 2))
    inside = tensors.contains([[0.0, 2.0], [2.0, 0.0]])
    assert isinstance(inside, torch.Tensor)
    assert inside.tolist() == [[True, False], [False, True]]
    with pytest.raises(ValueError, match=r"shape \(3, 1\).*got \(2, 1\)"):
        intervals.contains([1.0, 2.0])
    with pytest.raises(ValueError, match="NaN in row 1"):
        intervals.contains([1.0, np.nan, 2.0])


# --- pictures


def test_a_notebook_shows_the_first_rows_and_a_picture():
    page = around(np.linspace(0, 1, 1_000), 0.25, 0.5, level=(0.5, 0.95))._repr_html_()
    words = " ".join(Balanced(page).words)
    assert "Intervals of 1,000 rows, 50 %, 95 %" in words
    assert "lower 50" in words
    assert "… 995 more" in words
    assert page.count("<polygon") == 2
    assert len(page) < 40_000


@given(
    n=st.integers(0, 8),
    m=st.integers(0, 5),
    n_levels=st.integers(0, 3),
    values=st.sampled_from([0.0, 1.0, 1e-12, 1e300, np.inf, np.nan]),
)
def test_intervals_of_every_shape_can_be_shown(n, m, n_levels, values):
    shape = (n, m) if m else (n,)
    levels = tuple(np.linspace(0.1, 0.9, n_levels)) if n_levels else 0.5
    bounds = (*shape, n_levels) if n_levels else shape
    intervals = Intervals(np.zeros(shape), np.full(bounds, -values), np.full(bounds, values), levels)
    assert f"Intervals of {n} row" in repr(intervals)
    Balanced(intervals._repr_html_())


def test_lists_and_intervals_without_a_level_can_be_shown():
    intervals = Intervals([1.0, 2.0], [0.0, 1.0], [2.0, 3.0])
    assert repr(intervals).startswith("Intervals of 2 rows\n")
    assert "<svg" in intervals._repr_html_()


# --- bands


@pytest.mark.parametrize(
    "options",
    [
        {"damping": 1.0},
        {"damping": 1.0, "engine": Exact()},
        {"damping": 1.0, "engine": ImportantDirections(20)},
        {},
    ],
    ids=str,
)
def test_a_fitted_band_shows_its_summary_and_its_spectrum_where_it_has_one(model, data, options):
    band = PredictionIntervals(model, **options).fit(*data, progress=False)
    page = band._repr_html_()
    words = " ".join(" ".join(Balanced(page).words).split())
    for line in band.summary().splitlines():
        assert " ".join(line.split()) in words
    assert ("<svg" in page) == ("damping" in options)
    band.calibrate(*regression(60, seed=1))
    assert "calibrated on" in band._repr_html_()


def test_a_band_that_is_not_fitted_shows_one_line(model):
    page = PredictionIntervals(model, damping=1.0)._repr_html_()
    assert "not fitted" in page
    Balanced(page)


def test_a_picture_of_a_band_is_not_worth_a_long_time(model, data, monkeypatch):
    band = PredictionIntervals(model, damping=1.0, engine=Exact()).fit(*data, progress=False)
    monkeypatch.setattr("deltaband.fitting.fit.QUICK_SPECTRUM_SIZE", 10)
    assert "<svg" not in band._repr_html_()


def test_showing_a_band_does_not_fail_where_its_spectrum_does(model, data, monkeypatch):
    band = PredictionIntervals(model, damping=1.0, engine=Exact()).fit(*data, progress=False)

    def fail(self):
        raise MemoryError

    monkeypatch.setattr(type(band._fits[0].covariance), "spectrum", fail)
    assert "effective p*" in band._repr_html_()


def test_a_name_that_looks_like_markup_is_text(data):
    class Wrapped(nn.Sequential):
        pass

    Wrapped.__name__ = "<script>alert(1)</script>"
    model = Wrapped(*mlp())
    band = PredictionIntervals(model, damping=1.0)
    assert "<script" not in band._repr_html_()
    assert "<script" not in band.fit(*data, progress=False)._repr_html_()


# --- plot


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


@pytest.fixture
def curve():
    X, y = regression(60, n_inputs=1)
    return PredictionIntervals(mlp(1), damping=1.0).fit(X, y, progress=False), X, y


def test_one_feature_is_plotted_as_a_band_over_it(curve):
    band, X, y = curve
    assert legend(band.plot(X)) == ["95 % interval", "prediction"]
    assert legend(band.plot(X[:, :1].numpy(), level=[0.5, 0.9])) == ["90 % interval", "50 % interval", "prediction"]
    ax = band.plot(X, y, data=(X, y))
    assert legend(ax) == ["95 % interval", "prediction", "training data", "targets"]
    assert band.plot(X, ax=ax) is ax


def test_targets_must_go_with_the_rows(curve):
    band, X, y = curve
    with pytest.raises(ValueError, match="x and targets must have as many rows, got 60 and 59"):
        band.plot(X, y[1:])


def test_several_features_are_plotted_sorted_by_width(model, data):
    X, y = data
    band = PredictionIntervals(model, damping=1.0).fit(X, y, progress=False)
    assert "covered" in band.plot(X, y).get_title()
    with pytest.raises(ValueError, match=r"an x of one feature, \(n,\) or \(n, 1\), got \(80, 3\); give the targets y"):
        band.plot(X)
    with pytest.raises(ValueError, match="data can only be drawn over an input of one feature"):
        band.plot(X, y, data=(X, y))


def test_of_several_outputs_one_is_plotted(data):
    X, y = data
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    Y = torch.stack([y, 5 * y], dim=1)
    band = PredictionIntervals(model, damping=1.0).fit(X, Y, progress=False)
    with pytest.raises(ValueError, match="there are 2: choose one with output=0 to 1"):
        band.plot(X, Y)
    for wrong in (2, -1, True, "a"):
        with pytest.raises(ValueError, match="output must be a whole number from 0 to 1"):
            band.plot(X, Y, output=wrong)
    assert band.plot(X, Y, output=1).get_title() == band.plot(X, Y[:, 1], output=1).get_title()
