"""Columns of every kind, and rows in groups by their values."""

import datetime

import numpy as np
import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from deltaband.report.columns import Column, group_by_value, group_by_width, read_column


def read(values):
    return read_column("a", values, len(values))


def counts(groups):
    return {group.name: len(group.rows) for group in groups}


def test_numbers_are_broken_down_into_five_parts_of_as_many_rows():
    groups = group_by_value(Column(np.arange(100.0)))
    assert counts(groups) == {"0 to 19": 20, "20 to 39": 20, "40 to 59": 20, "60 to 79": 20, "80 to 99": 20}


def test_few_different_numbers_and_texts_are_broken_down_by_value():
    assert counts(group_by_value(Column(np.array([2.0, 1.0, 2.0])))) == {"1": 1, "2": 2}
    assert counts(group_by_value(read(["x", "y", "x", None]))) == {"x": 2, "missing": 1, "y": 1}
    assert counts(group_by_value(read([True, False, True, True]))) == {"True": 3, "False": 1}


def test_of_many_texts_the_rare_ones_share_a_group():
    column = read(["often"] * 5 + [str(k) for k in range(30)])
    groups = group_by_value(column)
    assert len(groups) == 10
    assert groups[0].name == "often"
    assert groups[-1].name == "22 others"
    assert len(groups[-1].rows) == 22


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=60)
    | st.lists(st.none() | st.text(max_size=3), min_size=1, max_size=60)
    | st.lists(st.integers(-(10**20), 10**20), min_size=1, max_size=60)
)
def test_each_row_is_in_one_group(values):
    groups = group_by_value(read(values))
    assert sorted(row for group in groups for row in group.rows) == list(range(len(values)))
    assert all(len(group.rows) for group in groups)


@given(st.lists(st.floats(0, 1e6) | st.just(np.inf), min_size=1, max_size=60))
def test_each_row_is_in_one_group_of_widths(values):
    groups = group_by_width(np.array(values))
    assert sorted(row for group in groups for row in group.rows) == list(range(len(values)))


def test_equal_widths_are_one_group():
    assert counts(group_by_width(np.full(30, 2.0) + 1e-7 * np.arange(30))) == {"all 2.000": 30}


def test_columns_may_come_from_pandas_and_hold_dates_and_gaps():
    frame = pd.DataFrame(
        {
            "when": pd.date_range("2024-01-01", periods=20),
            "text": pd.array(["a", None] * 10, dtype="string"),
            "whole": pd.array([1, None] * 10, dtype="Int64"),
            "kind": pd.Categorical(["x", "y"] * 10),
        }
    )
    columns = {name: read(values) for name, values in frame.items()}
    assert group_by_value(columns["when"])[0].name == "2024-01-01 to 2024-01-04"
    assert counts(group_by_value(columns["text"])) == {"a": 10, "missing": 10}
    assert counts(group_by_value(columns["whole"])) == {"1": 10, "missing": 10}
    assert counts(group_by_value(columns["kind"])) == {"x": 10, "y": 10}
    days = [datetime.date(2024, 1, 1) + datetime.timedelta(days=k) for k in range(20)]
    assert group_by_value(read(days))[0].name == "2024-01-01 to 2024-01-04"
    moments = [datetime.datetime(2024, 1, 1, 12, k, tzinfo=datetime.UTC) for k in range(2)]
    assert counts(group_by_value(read(moments))) == {
        "2024-01-01 12:00:00+00:00": 1,
        "2024-01-01 12:01:00+00:00": 1,
    }


def test_widths_that_hardly_differ_have_names_that_do():
    names = [group.name for group in group_by_width(np.linspace(1.0001, 1.0009, 50))]
    assert len(set(names)) == 5
