"""The report on a classifier: sets of labels, reliability, and what is refused."""

import re

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from deltaband import ClassificationIntervals, DeltabandWarning, report
from deltaband.report.labels import evaluate, section
from tests.test_label_sets import Affine, draw, fitted


@pytest.fixture(scope="module")
def band():
    return fitted().calibrate(*draw(300, 4, seed=1))


def words(html):
    return " ".join(re.sub(r"<[^>]*>", " ", re.sub(r"(?s)<(style|script|svg).*?</\1>", "", html)).split())


def test_it_shows_coverage_reliability_and_groups_by_label_and_column(band):
    X, y = draw(400, 4, seed=2)
    html = report.page(band, X, y, level=0.8, columns={"site": ["north", "south"] * 200}, settings={"data": "a.csv"})
    text, sets = words(html), band.predict_set(X, 0.8)
    share, size = sets[np.arange(400), y].mean(), sets.sum(axis=1).mean()
    assert f"The sets of {100 * share:.1f} % of 400 rows hold the true label; 80 % were asked for." in text
    assert f"Mean size {size:.3g}"[:13] in text
    for name in ("Reliability", "Coverage by true label", "by predicted label", "by size of the set", "by site"):
        assert name in text
    assert "network Affine" in text
    rows = y == 2
    assert f"2 {rows.sum()} {100 * sets[rows, 2].mean():.1f} % {sets[rows].sum(axis=1).mean():.2f}" in text
    assert html.count("<svg") > 3


def test_its_numbers_are_those_of_a_naive_count(band):
    X, y = draw(200, 4, seed=3)
    found, p = evaluate(band, X, y, 0.9), band.predict_proba(X)
    assert [each.level for each in found.curve][-2:] == [0.98, 0.99]
    for each in found.curve:
        assert each.covered == sum(
            bool(row[label]) for row, label in zip(band.predict_set(X, each.level), y, strict=True)
        )
    order = np.argsort(p.max(axis=1), kind="stable")
    for part, dot in zip(np.array_split(order, 10), found.reliability, strict=True):
        assert dot.level == pytest.approx(np.mean([p[i].max() for i in part]))
        assert dot.covered == sum(p[i].argmax() == y[i] for i in part)
    row, lower, upper = section(band, found, X, {})["doubtful"][0]
    likely, of_all = p[row].argmax(), band.predict(X, 0.9).probability
    assert row == p.max(axis=1).argmin()
    assert (lower, upper) == pytest.approx((of_all.lower[row, likely], of_all.upper[row, likely]), rel=1e-6)


def test_labels_that_are_covered_too_rarely_are_named_with_what_mends_them():
    X, y = draw(1800, 4, seed=4)
    model = Affine(4)
    with torch.no_grad():
        model.layer.bias[3] = -4.0  # which hardly ever says 3
    band = ClassificationIntervals(model, damping=5.0).fit(X[:300], y[:300], progress=False)
    band.calibrate(X[300:700], y[300:700])
    text = words(report.page(band, X[700:], y[700:], level=0.8))
    assert "Covered less often than asked for, and not by chance, given the true label: " in text
    assert "band.calibrate(x, y, by_class=True)" in text


@pytest.mark.parametrize("classes", [None, [1], "predicted"])
@pytest.mark.parametrize("n_classes", [1, 4])
def test_bands_without_sets_have_a_page_of_probabilities(n_classes, classes):
    X, y = draw(200, n_classes, seed=0)
    band = ClassificationIntervals(Affine(n_classes), damping=5.0, classes=classes).fit(X, y, progress=False)
    new, labels = draw(60, n_classes, seed=5)
    text = words(report.page(band, DataLoader(TensorDataset(torch.from_numpy(new), torch.from_numpy(labels)), 16)))
    assert "There are no sets of labels" in text
    assert "Accuracy by true label" in text
    assert "Coverage of sets" not in text
    found = evaluate(band, new, labels, 0.95)
    bounds = [each[1:] for each in section(band, found, new, {})["doubtful"]]
    likely = found.probabilities.max(axis=1)
    if classes != [1] or n_classes == 1:
        for (row, *_), (lower, upper) in zip(section(band, found, new, {})["doubtful"], bounds, strict=True):
            assert lower - 1e-5 <= likely[row] <= upper + 1e-5
    else:
        assert np.isnan(bounds).any()  # of labels that there are no intervals for


def test_what_is_no_label_is_refused(band):
    X, y = draw(50, 4, seed=2)
    with pytest.raises(ValueError, match="labels must be whole numbers from 0 to 3, one per row, got 4"):
        report.page(band, X, y + 4)
    with pytest.raises(ValueError, match="50 inputs, 49 labels"):
        report.page(band, X, y[:-1])
    with pytest.raises(ValueError, match="at least one row"):
        report.page(band, X[:0], y[:0])
    with pytest.raises(ValueError, match="about one level"):
        report.page(band, X, y, level=[0.8, 0.9])
    with pytest.raises(TypeError, match="groups= is for PredictionIntervals"):
        report.page(band, X, y, groups=y)
    with pytest.raises(ValueError, match=r"too few for level 0\.9999"):
        report.page(band, X, y, level=0.9999)


def test_the_band_of_rows_with_several_labels_is_refused():
    X, y = draw(50, 4, seed=2)
    marks = np.eye(4)[y]
    several = ClassificationIntervals(Affine(4), damping=1.0, loss="bce").fit(X, marks, progress=False)
    with pytest.raises(ValueError, match="a report is for classifiers of one label a row, and loss='bce' is for sev"):
        report.page(several, X, marks)


def test_warnings_of_the_fit_are_on_the_page():
    X, y = draw(300, 4, seed=0)
    with pytest.warns(DeltabandWarning, match="were training rows"):
        band = fitted().calibrate(X, y)
    assert len(report.page(band, X, y)) > 10_000
