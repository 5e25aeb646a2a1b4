"""The benchmark of plans measures twenty fits, and judges those that are long enough."""

import pytest

from benchmarks.plan import _perceptron, cases, is_within, markdown, measured
from deltaband import Exact


def test_there_are_twenty_fits():
    assert len({(name, repr(engine)) for name, _, engine in cases()}) == 20


@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
def test_a_plan_and_a_fit_are_measured():
    found = measured(lambda: _perceptron(60, 3, 5), Exact())
    assert found["planned s"] > 0
    assert found["took s"] > 0


@pytest.mark.parametrize(("planned", "verdict"), [(1.0, True), (2.1, False), (0.49, False)])
def test_a_plan_may_be_off_by_a_factor_of_two(planned, verdict):
    found = {"planned s": planned, "took s": 1.0, "other processes' cores": 0.0}
    assert is_within(found) is verdict
    assert ("**no**" in markdown({"machine": {"cores": 2}, "fits": {"some": found}})) is not verdict
    assert is_within(found | {"planned s": 0.01, "took s": 0.1}) is None
