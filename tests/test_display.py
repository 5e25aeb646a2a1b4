"""Numbers as text, elements with all text escaped, axes and their ticks."""

from html.parser import HTMLParser

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from deltaband.display import Axes, Markup, Scale, axis_limits, decimals, element, escape, fixed, number, percent
from deltaband.results import level_name


@given(st.text())
def test_what_is_escaped_comes_back_as_it_was(text):
    assert not {"<", ">", '"', "'"} & set(escape(text))

    class Read(HTMLParser):
        found = ""

        def handle_data(self, data):
            self.found += data

    reader = Read()
    reader.feed(element("p", text))
    reader.close()
    assert reader.found == text


def test_markup_is_not_escaped_twice():
    assert element("p", "a < b", element("b", "&")) == "<p>a &lt; b<b>&amp;</b></p>"
    assert element("p", "<", Markup("<br>")) == "<p>&lt;<br></p>"
    assert element("circle", cx=1, data_tip='"', class_="a") == '<circle cx="1" data-tip="&quot;" class="a"/>'


@given(
    st.floats(-1e12, 1e12).filter(lambda v: v == 0 or abs(v) > 1e-9),
    st.floats(1e-6, 1e9),
    st.integers(2, 9),
)
def test_ticks_are_few_round_and_within_the_axis(low, span, about):
    high = low + span * max(1.0, abs(low) * 1e-6)
    ticks = Scale(low, high, 0, 100).ticks(about)
    room = 1e-6 * (high - low)
    assert all(low - room <= value <= high + room for value, _ in ticks)
    assert len(ticks) <= about + 1


def test_ticks_are_the_round_numbers_one_expects():
    assert [text for _, text in Scale(-1.3, 4.8, 0, 100).ticks(5)] == ["0", "2", "4"]
    assert [text for _, text in Scale(0, 12, 0, 100).ticks(5)] == ["0.0", "2.5", "5.0", "7.5", "10.0"]
    assert [text for _, text in Scale(0, 1, 0, 100).ticks(5)] == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    assert [text for _, text in Scale(0, 5000, 0, 100).ticks(5)] == ["0", "1,000", "2,000", "3,000", "4,000", "5,000"]
    assert [text for _, text in Scale(0.02, 500, 0, 100, log=True).ticks(9)] == ["10⁻¹", "1", "10", "10²"]


def test_a_scale_puts_what_is_outside_at_its_edge():
    scale = Scale(0, 10, 100, 0)
    assert scale(np.array([-5, 0, 5, 10, 99])).tolist() == [100, 100, 50, 0, 0]


@given(st.lists(st.floats(-1e9, 1e9), max_size=20))
@example([5e-324])
def test_limits_hold_all_numbers_and_are_an_interval(values):
    low, high = axis_limits(np.array(values))
    assert low < high
    assert all(low <= value <= high for value in values)
    start, _ = axis_limits(np.array(values), zero=True)
    assert start <= 0


def test_an_axis_of_equal_numbers_can_be_drawn():
    axes = Axes(axis_limits(np.array([3.0, 3.0])), axis_limits(np.zeros(2)), "x", "y")
    assert np.isfinite(axes.x(3.0))
    assert np.isfinite(axes.y(0.0))


def test_numbers_are_written_as_people_read_them():
    assert [number(v) for v in (0, 1.23456, -12345.6, 0.0012345, 1e-9, -2e12, np.inf, -np.inf, np.nan)] == [
        "0.000", "1.235", "−12,346", "0.001234", "1.000e−09", "−2.000e+12", "∞", "−∞", "–",
    ]  # fmt: skip
    assert [fixed(v, 2) for v in (-0.001, -1.005, 1234.5)] == ["0.00", "−1.00", "1,234.50"]
    assert [percent(v) for v in (0.0, 0.0001, 0.95, 0.9999, 1.0)] == [
        "0.0 %",
        "< 0.1 %",
        "95.0 %",
        "> 99.9 %",
        "100.0 %",
    ]
    assert [level_name(v) for v in (0.95, 0.999, 0.6827, 0.1 + 0.2)] == ["95", "99.9", "68.27", "30"]
    assert [decimals(np.array(v)) for v in ([1.5, 2.5], [0.01], [1234.0], [0.0], [1e-9])] == [2, 4, 0, 2, None]
