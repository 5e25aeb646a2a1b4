"""What is in the pictures: the shapes, the order of the points, the words."""

import sys

import matplotlib as mpl
import numpy as np
import pytest
import torch

from deltaband import Exact, ImportantDirections, Intervals, PredictionIntervals, plots
from deltaband.display import LIGHT
from deltaband.engines import Spectrum

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import to_hex


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


@pytest.fixture
def x():
    return np.array([2.0, 0.0, 3.0, 1.0])


def around_twice(x, *half_widths):
    """Intervals around 2x, as wide at every row."""
    mean = 2 * x
    if len(half_widths) == 1:
        return Intervals(mean, mean - half_widths[0], mean + half_widths[0], 0.95)
    half = np.array(half_widths)
    levels = {0.5: 0.5, 1.0: 0.8, 2.0: 0.95}
    return Intervals(mean, mean[:, None] - half, mean[:, None] + half, tuple(levels[h] for h in half_widths))


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def corners(collection):
    """The vertices of a filled band, as a set."""
    return {tuple(vertex) for vertex in collection.get_paths()[0].vertices.tolist()}


def test_a_band_goes_from_left_to_right_whatever_the_order_of_x(x):
    ax = plots.band(x, around_twice(x, 1.0))
    (mean,) = ax.lines
    assert mean.get_xdata().tolist() == [0, 1, 2, 3]
    assert mean.get_ydata().tolist() == [0, 2, 4, 6]
    (filled,) = ax.collections
    assert {(v, 2 * v - 1) for v in range(4)} | {(v, 2 * v + 1) for v in range(4)} <= corners(filled)
    assert legend(ax) == ["95 % interval", "prediction"]


def test_arrays_columns_and_tensors_draw_the_same(x):
    intervals = around_twice(x, 1.0)
    tensors = Intervals(*(torch.tensor(part, requires_grad=True) for part in intervals), 0.95)
    expected = corners(plots.band(x, intervals).collections[0])
    for given in (x[:, None], torch.tensor(x), torch.tensor(x)[:, None]):
        assert corners(plots.band(given, tensors).collections[0]) == expected


@pytest.mark.parametrize("half_widths", [(0.5, 1.0, 2.0), (2.0, 0.5, 1.0)])
def test_nested_bands_go_from_wide_and_light_to_narrow_and_dark(x, half_widths):
    ax = plots.band(x, around_twice(x, *half_widths))
    assert legend(ax) == ["95 % interval", "80 % interval", "50 % interval", "prediction"]
    heights = [np.ptp([v for u, v in corners(filled) if u == 0.0]) for filled in ax.collections]
    assert heights == [4, 2, 1]
    brightness = [filled.get_facecolor()[0, :3].sum() for filled in ax.collections]
    assert brightness == sorted(brightness, reverse=True)
    assert len(set(brightness)) == 3


def test_training_points_and_the_truth_are_drawn_where_given(x):
    data = (np.array([[0.5], [1.5]]), torch.tensor([1.0, 2.0]))
    ax = plots.band(x, around_twice(x, 1.0), data=data, truth=(x, x**2))
    assert legend(ax) == ["95 % interval", "truth", "prediction", "training data"]
    assert ax.collections[1].get_offsets().tolist() == [[0.5, 1.0], [1.5, 2.0]]
    truth = ax.lines[0]
    assert truth.get_xdata().tolist() == [0, 1, 2, 3]
    assert truth.get_ydata().tolist() == [0, 1, 4, 9]
    assert truth.is_dashed()


def test_a_band_without_a_level_is_still_drawn(x):
    intervals = around_twice(x, 1.0)
    assert legend(plots.band(x, Intervals(*intervals))) == ["prediction interval", "prediction"]


def test_a_band_has_one_input(x):
    with pytest.raises(ValueError, match=r"x must have shape \(n,\) or \(n, 1\) with at least one row, got \(4, 2\)"):
        plots.band(np.stack([x, x], axis=1), around_twice(x, 1.0))
    with pytest.raises(ValueError, match="x and intervals must have as many rows, got 3 and 4"):
        plots.band(x[:3], around_twice(x, 1.0))


def test_levels_must_go_with_the_columns(x):
    mean, lower, upper = around_twice(x, 0.5, 1.0)
    with pytest.raises(ValueError, match="1 levels do not match bounds of 2 columns"):
        plots.band(x, Intervals(mean, lower, upper, 0.95))


@pytest.fixture
def evaluated():
    """Five intervals, widest first; the second and the last target are missed."""
    mean = np.array([10.0, 20.0, 30.0, 40.0, 50.0])
    half = np.array([5.0, 4.0, 3.0, 2.0, 1.0])
    y = mean + np.array([5.0, -4.5, 1.0, 0.0, 2.0])
    return y, Intervals(mean, mean - half, mean + half, 0.9)


def test_sorted_by_width_counts_what_is_covered_and_what_is_missed(evaluated):
    ax = plots.sorted_by_width(*evaluated)
    assert ax.get_title() == "3 of 5 covered: 60.0 % (nominal 90 %)"
    assert legend(ax) == ["90 % interval", "covered: 3", "missed: 2"]


def test_sorted_by_width_goes_from_narrow_to_wide_around_the_prediction(evaluated):
    filled, covered, missed = plots.sorted_by_width(*evaluated).collections
    assert missed.get_offsets().tolist() == [[1, 2.0], [4, -4.5]]
    assert covered.get_offsets().tolist() == [[2, 0.0], [3, 1.0], [5, 5.0]]
    assert {(1, -1), (1, 1), (5, -5), (5, 5)} <= corners(filled)


def test_misses_stand_out(evaluated):
    _, covered, missed = plots.sorted_by_width(*evaluated).collections
    assert to_hex(missed.get_facecolor()[0]) == LIGHT["vermillion"]
    assert np.ptp(covered.get_facecolor()[0, :3]) < 0.1  # a grey
    assert missed.get_sizes()[0] > covered.get_sizes()[0]


def test_sorted_by_width_takes_tensors_and_columns(evaluated):
    y, intervals = evaluated
    tensors = Intervals(*(torch.from_numpy(part) for part in intervals), 0.9)
    ax = plots.sorted_by_width(torch.from_numpy(y)[:, None], tensors)
    assert legend(ax) == ["90 % interval", "covered: 3", "missed: 2"]


def test_sorted_by_width_draws_one_level(evaluated):
    y, (mean, lower, upper) = evaluated
    several = Intervals(mean, np.stack([lower, lower], 1), np.stack([upper, upper], 1), (0.5, 0.9))
    with pytest.raises(ValueError, match="one level"):
        plots.sorted_by_width(y, several)


def test_without_a_level_nothing_is_nominal(evaluated):
    y, intervals = evaluated
    assert plots.sorted_by_width(y, Intervals(*intervals)).get_title() == "3 of 5 covered: 60.0 %"


def spectrum(*d, damping=1.0):
    d = np.array(d)
    return Spectrum(d, d**2 / (d**2 + damping) ** 2)


def test_one_spectrum_is_two_solid_lines_on_log_axes():
    ax = plots.spectra(spectrum(4.0, 2.0, 1.0))
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    values, eigenvalues = ax.lines
    assert values.get_xdata().tolist() == eigenvalues.get_xdata().tolist() == [1, 2, 3]
    assert values.get_ydata().tolist() == [4, 2, 1]
    assert eigenvalues.get_ydata() == pytest.approx([16 / 17**2, 4 / 25, 1 / 4])
    assert legend(ax) == ["singular values of J", "eigenvalues of Σ⁻¹"]


def test_the_exact_spectrum_is_dotted_and_the_approximation_begins_where_it_belongs():
    ax = plots.spectra(spectrum(3.9, 2.1), exact=spectrum(16.0, 8.0, 4.0, 2.0, 1.0))
    assert [line.get_linestyle() for line in ax.lines] == [":", ":", "-", "-"]
    assert ax.lines[0].get_xdata().tolist() == [1, 2, 3, 4, 5]
    assert ax.lines[2].get_xdata().tolist() == [3, 4]
    assert ax.lines[3].get_xdata().tolist() == [3, 4]
    assert ax.lines[2].get_ydata().tolist() == [3.9, 2.1]
    assert legend(ax)[0] == "singular values of J, exact"
    assert legend(ax)[-1] == "eigenvalues of Σ⁻¹, approximate"


def test_singular_values_that_are_rounding_errors_are_not_drawn():
    ax = plots.spectra(spectrum(4.0, 1.0, 1e-8, 0.0))
    assert [len(line.get_xdata()) for line in ax.lines] == [2, 2]


def test_the_spectra_of_a_fitted_band_can_be_drawn(model, data):
    exact, sketch = (
        PredictionIntervals(model, damping=1.0, engine=engine).fit(*data, progress=False).spectrum()
        for engine in (Exact(), ImportantDirections(30))
    )
    ax = plots.spectra(sketch, exact)
    assert len(ax.lines[2].get_xdata()) == (sketch.singular_values > 1e-6 * sketch.singular_values[0]).sum()


def test_pictures_are_drawn_on_the_axes_given(x, evaluated):
    _, axes = plt.subplots(1, 3)
    assert plots.band(x, around_twice(x, 1.0), ax=axes[0]) is axes[0]
    assert plots.sorted_by_width(*evaluated, ax=axes[1]) is axes[1]
    assert plots.spectra(spectrum(2.0, 1.0), ax=axes[2]) is axes[2]
    assert len(plt.get_fignums()) == 1


def test_each_picture_without_axes_has_a_figure_of_its_own(x):
    first, second = plots.band(x, around_twice(x, 1.0)), plots.band(x, around_twice(x, 1.0))
    assert first.figure is not second.figure


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, x, evaluated):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    for draw in (
        lambda: plots.band(x, around_twice(x, 1.0)),
        lambda: plots.sorted_by_width(*evaluated),
        lambda: plots.spectra(spectrum(2.0, 1.0)),
    ):
        with pytest.raises(ImportError, match=r"pip install 'deltaband\[plots\]'"):
            draw()


def test_colours_follow_the_background():
    intervals = Intervals(np.zeros(3), -np.ones(3), np.ones(3), 0.9)
    colours = {}
    for name, facecolor in (("light", "white"), ("dark", "black"), ("transparent", "none")):
        figure = plt.figure(facecolor=facecolor)
        ax = plots.band(np.arange(3.0), intervals, data=([0.0], [0.0]), ax=figure.add_subplot(facecolor=facecolor))
        colours[name] = [each.get_facecolor()[0, :3].mean() for each in ax.collections]
    assert colours["light"] == colours["transparent"]
    assert colours["light"][1] < 0.2 < colours["light"][0]
    assert colours["dark"][0] < 0.5 < colours["dark"][1]
