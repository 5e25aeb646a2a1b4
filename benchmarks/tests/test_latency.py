"""The benchmark of latency runs, its bare work is the library's, and its table has a column for each label."""

import numpy as np
import pytest
import torch

from benchmarks.latency import (
    QUICK_CASES,
    SERVED,
    WIDTHS,
    Bare,
    Case,
    export_table,
    exported,
    families_table,
    fitted,
    markdown,
    measured,
    served,
)
from benchmarks.problem import perceptron

pytestmark = pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")


@pytest.mark.parametrize("case", QUICK_CASES, ids=lambda case: case.form)
def test_a_case_is_measured(case):
    results = measured(case, 0.0)
    assert list(results) == [f"tiny, {case.form}, 1 row", f"tiny, {case.form}, 3 rows"]
    assert all(result["predict ms"] > 0 for result in results.values())


@pytest.mark.parametrize("form", ["primal", "dual"])
def test_the_bare_work_gives_the_variances_of_the_library(form):
    torch.manual_seed(0)
    model, X = perceptron(*WIDTHS["tiny"]), torch.randn(1000 if form == "primal" else 60, 10)
    band = fitted(model, Case("tiny", form, len(X)), X, torch.randn(len(X)))
    for x in (X[:1], X[:5]):
        expected = band.variance(x).numpy()
        np.testing.assert_allclose(getattr(Bare(model, X), form)(X)(x), expected, rtol=1e-3, atol=1e-6)


def test_the_table_has_columns_for_both_labels():
    result = {
        "predict ms": 2.0,
        "forward and backward ms": 0.5,
        "bare gradients and solve ms": 1.0,
        "other processes' cores": 0.1,
    }
    runs = {"after": {"10M, dual, 1 row": {**result, "predict ms": 1.2}}, "before": {"10M, dual, 1 row": result}}
    table = markdown({"machine": {"cores": 2}, "runs": runs})
    assert (
        "| 10M, dual, 1 row | 0.5 ms | 2 ms | 1 ms | 1 ms | 2.00 × | 1.2 ms | 1 ms | 0.2 ms | 1.20 × | ≤ 1.3 ×: pass |"
        in table
    )


@pytest.mark.parametrize("family", SERVED)
def test_a_family_of_networks_is_served_by_every_engine(family):
    found = served(family, 20, 60, 0.0)
    assert {"forward", "forward and backward", "Exact()", "RandomProjection(256)", "Nystrom(256)"} <= set(found)
    assert all(rows_per_second > 0 for rows_per_second in found.values())


def test_a_projection_that_takes_too_many_passes_is_bold():
    found = {"forward and backward": 900.0, "Exact()": 100.0, "RandomProjection(256)": 100.0}
    table = families_table(
        {"MLP": found, "LSTM": found | {"RandomProjection(256)": 300.0}, "other": {**found, "x": 9.0}}
    )
    assert "| Exact() | 100 (9.0 passes) | 100 (9.0 passes) | 100 (9.0 passes) |" in table
    assert "| RandomProjection(256) | **100 (9.0 passes)** | 300 (3.0 passes) | **100 (9.0 passes)** |" in table
    assert "| x | – | – | 9 (100.0 passes) |" in table


def test_the_program_of_a_projection_is_timed_beside_a_forward_pass():
    found = exported("tiny", 50, 0.0)
    assert list(found) == ["tiny, 1 row", "tiny, 256 rows"]
    assert all(found[name]["program"] > found[name]["forward"] > 0 for name in found)
    times = {"forward": 1.0, "program": 4.0, "predict": 6.0}
    assert "| tiny, 256 rows | 1 ms | 4 ms | 4.00 × | 6 ms | ≤ 3 ×: **fail** |" in export_table(
        {"tiny, 256 rows": times}
    )
