"""The published way and ours agree, and the benchmark measures both."""

import pytest
import torch

from benchmarks.published import QUICK, WEIGHT_DECAY, compared, problem, row_by_row, small
from deltaband import ImportantDirections, PredictionIntervals

pytestmark = pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")


def test_row_by_row_gives_the_intervals_of_important_directions():
    size = QUICK["quick"]
    model, X, y, new = problem(size)
    published = row_by_row(model, X, y, size.n * WEIGHT_DECAY / 2, size.rank)
    band = PredictionIntervals(model, weight_decay=WEIGHT_DECAY, engine=ImportantDirections(size.rank)).fit(X, y)
    width = torch.as_tensor(published.widths(model, new))
    torch.testing.assert_close(width, band.predict(new).width.double(), rtol=1e-4, atol=0.0)
    assert published.p_star == pytest.approx(band.effective_parameters_, rel=1e-4)


def test_both_sides_are_measured():
    found = dict(compared("quick", QUICK["quick"], 1))
    assert {"quick_important_directions", "quick_exact", "quick_widths"} == set(found)
    assert found["quick_widths"].passed
    assert not found["quick_exact"].passed or found["quick_exact"].measured >= 6


def test_a_small_fit_is_measured():
    assert all(result.measured > 0 for _, result in small(1))
