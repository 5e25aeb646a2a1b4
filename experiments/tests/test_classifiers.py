"""The experiments on classifiers, and the figures that the documents quote of them."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from experiments import digits, labelsets, logodds
from experiments.__main__ import main
from experiments.arguments import RESULTS

PAGE = Path(__file__).parents[2] / "docs" / "classification.md"


def test_the_area_is_that_of_scikit_learn():
    rng = np.random.default_rng(0)
    good, bad = rng.integers(0, 5, 30).astype(np.float32), rng.integers(1, 6, 20).astype(np.float32)
    truth = np.repeat([0, 1], [30, 20])
    assert digits.auroc(good, bad) == pytest.approx(roc_auc_score(truth, np.concatenate([good, bad])))


def test_a_run_on_digits_is_the_same_again_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    for name, value in (("HIDDEN", 2), ("EPOCHS", 2), ("WEIGHT_DECAYS", (1e-2, 1e-3))):
        monkeypatch.setattr(digits, name, value)
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    main(["digits", "--seeds", "2", "--out", str(first)])
    main(["digits", "--seeds", "1", "--out", str(second)])
    one, two = pd.read_csv(first), pd.read_csv(second)
    pd.testing.assert_frame_equal(one[one.seed == 0].reset_index(drop=True), two)
    assert len(one) == 2 * 2 * len(digits.SCORES)
    before = first.read_bytes()
    main(["digits", "--seeds", "2", "--out", str(first)])
    assert first.read_bytes() == before
    assert first.with_suffix(".png").exists()
    assert "| 0.001 | entropy |" in first.with_suffix(".md").read_text()


def test_a_simulation_of_log_odds_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(logodds, "SETTINGS", {"regression": logodds.Setting(60, 0, 1e-2)})
    main(["logodds", "--repetitions", "3", "--out", str(tmp_path / "out.csv")])
    assert "3 networks each" in (tmp_path / "out.md").read_text()


def test_sets_that_may_be_empty_are_those_of_mapie(tmp_path, monkeypatch):
    for name, value in (("HIDDEN", 3), ("EPOCHS", 5)):
        monkeypatch.setattr(digits, name, value)
    monkeypatch.setattr(labelsets, "TRAINED", (300,))
    main(["labelsets", "--seeds", "1", "--out", str(tmp_path / "out.csv")])
    table = pd.read_csv(tmp_path / "out.csv")
    assert len(table) == 2 * len(labelsets.LEVELS) * len(labelsets.KINDS)
    of = {kind: part.reset_index(drop=True) for kind, part in table[table.method == "lac"].groupby("sets")}
    columns = ["level", "coverage", "size"]
    pd.testing.assert_frame_equal(of["empty"][columns], of["mapie"][columns])
    assert (of["band"]["size"] >= of["empty"]["size"]).all()
    assert "| 300 | 95% | LAC | MAPIE |" in (tmp_path / "out.md").read_text()


@pytest.mark.parametrize("study", [digits, labelsets, logodds])
def test_the_tables_are_those_of_the_results(study):
    path = RESULTS / f"{study.__name__.rpartition('.')[2]}.csv"
    assert path.with_suffix(".md").read_text() == study.markdown(pd.read_csv(path))


@pytest.mark.parametrize(("study", "columns"), [(digits, 6), (labelsets, 7), (logodds, 8)])
def test_the_page_on_classification_quotes_what_the_experiments_found(study, columns):
    found = (RESULTS / f"{study.__name__.rpartition('.')[2]}.md").read_text().splitlines()
    quoted = [line for line in PAGE.read_text().splitlines() if line.startswith("|") and line.count("|") == columns + 1]
    assert len(quoted) > 4
    assert set(quoted) <= set(found)
