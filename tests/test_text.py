"""Numbers as text."""

import numpy as np

from deltaband.display import decimals, fixed, number, percent
from deltaband.results import level_name


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
