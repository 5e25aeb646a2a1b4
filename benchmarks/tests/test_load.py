"""The benchmark of busy machines runs, and its table says what is too slow."""

import pytest

from benchmarks.load import markdown, measured
from deltaband import Exact

pytestmark = pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")


def test_a_fit_is_measured_alone_and_beside_busy_processes():
    found = measured((60, 3, Exact()), rounds=1)
    assert all(found[key]["wall s"] > 0 for key in ("alone", "busy", "busy, no limit"))


@pytest.mark.parametrize(("busy", "verdict"), [(0.4, "pass"), (0.41, "**fail**")])
def test_the_table_compares_with_the_fit_alone(busy, verdict):
    times = {"alone": 0.1, "busy": busy, "busy, no limit": 3.0}
    found = {name: {"wall s": wall, "processor s": wall} for name, wall in times.items()}
    table = markdown({"machine": {"cores": 2}, "fits": {"wine": found | {"other processes' cores": 0.0}}})
    assert table.rstrip().endswith(f"{verdict} |")
