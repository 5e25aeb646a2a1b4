"""Scores of labels, their probabilities and sets, against a naive count."""

import numpy as np
import pandas as pd
import pytest
import torch

from deltaband import metrics
from tests.test_label_sets import draw, fitted


@pytest.fixture
def some():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(3), 40)
    return rng.integers(0, 2, 40), p, p[:, :, None] > np.array([0.3, 0.1])  # no row of label 2


def test_scores_are_those_of_a_naive_count(some):
    y, p, sets = some
    found = metrics.evaluate_labels(y, p, sets, [0.5, 0.8])
    n, right = 40, [p[i].argmax() == y[i] for i in range(40)]
    assert found.accuracy == pytest.approx(np.mean(right))
    assert found.log_loss == pytest.approx(-np.mean([np.log(p[i, y[i]]) for i in range(n)]))
    order, error = sorted(range(n), key=lambda i: p[i].max()), 0.0
    for k, each in enumerate(found.bins):
        part = order[10 * k : 10 * k + 10]
        assert each == (10, pytest.approx(np.mean([p[i].max() for i in part])), sum(right[i] for i in part))
        error += 10 / n * abs(np.mean([p[i].max() for i in part]) - np.mean([right[i] for i in part]))
    assert found.calibration_error == pytest.approx(error)
    for j in range(2):
        assert found.coverage[j] == pytest.approx(np.mean([sets[i, y[i], j] for i in range(n)]))
        assert found.mean_size[j] == pytest.approx(np.mean([sets[i, :, j].sum() for i in range(n)]))
        for c in range(2):
            mine = [i for i in range(n) if y[i] == c]
            assert found.class_rows[c] == len(mine)
            assert found.class_accuracy[c] == pytest.approx(np.mean([right[i] for i in mine]))
            assert found.class_coverage[c, j] == pytest.approx(np.mean([sets[i, c, j] for i in mine]))
            assert found.class_size[c, j] == pytest.approx(np.mean([sets[i, :, j].sum() for i in mine]))
    assert np.isnan(found.class_coverage[2]).all()


def test_printed_it_is_two_tables_and_rows_are_a_data_frame(some):
    found = metrics.evaluate_labels(*some, [0.5, 0.8])
    assert "Scores on 40 rows\n" in repr(found)
    assert "By true label" in repr(found)
    assert found._repr_html_().count("<table>") == 2
    assert list(pd.DataFrame(found.rows()).level) == [0.5, 0.8]
    assert "coverage" not in repr(metrics.evaluate_labels(some[0], some[1]))


def test_a_classifier_evaluates_its_sets_on_arrays_and_loaders():
    X, y = draw(120, 4, seed=2)
    band = fitted().calibrate(*draw(100, 4, seed=1))
    found = band.evaluate(X, y, [0.5, 0.9])
    expected = metrics.evaluate_labels(y, band.predict_proba(X), band.predict_set(X, [0.5, 0.9]), [0.5, 0.9])
    assert found.rows()[0] == pytest.approx(expected.rows()[0])
    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(y))
    assert band.evaluate(torch.utils.data.DataLoader(data, 50), levels=[0.5, 0.9]).rows()[1] == pytest.approx(
        expected.rows()[1]
    )
    assert fitted().evaluate(X, y).levels == ()
    np.testing.assert_allclose(
        band.predict_proba(X), torch.softmax(band.model(torch.from_numpy(X)), 1).detach(), rtol=1e-5
    )
    assert band.predict_proba(X[:0]).shape == (0, 4)
    assert fitted(1).predict_proba(torch.zeros(3, 1)).shape == (3, 2)


def test_what_does_not_fit_together_is_refused(some):
    y, p, sets = some
    with pytest.raises(ValueError, match=r"expected probabilities \(n, C\) of n labels, n > 0, got \(40, 3\) of 39"):
        metrics.evaluate_labels(y[:-1], p)
    with pytest.raises(ValueError, match="n > 0"):
        metrics.evaluate_labels(y[:0], p[:0])
    with pytest.raises(ValueError, match="sets of 2 levels do not match 1 levels"):
        metrics.evaluate_labels(y, p, sets, 0.5)
    with pytest.raises(ValueError, match="whole numbers from 0 to 2"):
        metrics.evaluate_labels(y + 2, p)
    band = fitted()
    with pytest.raises(ValueError, match="n > 0"):
        band.evaluate(*draw(0, 4, seed=0))
    with pytest.raises(ValueError, match=r"[Nn]aN|finite"):
        band.predict_proba(np.full((2, 4), np.nan, np.float32))
