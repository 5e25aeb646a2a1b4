"""Classifiers of many classes: random combinations for the Fisher matrix, answers for the most likely classes."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from deltaband import ClassificationIntervals, DeltabandWarning, Exact
from tests.support.classifiers import classifier, fitted, labelled

DAMPING = 20.0


@pytest.mark.parametrize(("n_outputs", "k"), [(1, 2), (2, 1), (2, 2), (6, 1), (6, 3)])
def test_the_most_likely_classes_have_the_intervals_that_they_have_among_all(n_outputs, k):
    model, (X, y) = classifier(n_outputs), labelled(80, 2)
    every = fitted(model, (X, y), classes=range(max(n_outputs, 2))).predict(X, [0.5, 0.9])
    band = fitted(model, (X, y), classes=f"top{k}")
    result, likely = band.predict(X, [0.5, 0.9]), every.probability.mean.topk(k, dim=1).indices
    assert torch.equal(result.classes, likely)
    assert result.log_odds.lower.shape == (80, k, 2)
    rows = torch.arange(80)[:, None]
    torch.testing.assert_close(result.log_odds.lower, every.log_odds.lower[rows, likely])
    torch.testing.assert_close(result.probability.upper, every.probability.upper[rows, likely])
    assert band.leverage(X.numpy()).shape == (80, k)
    frame = band.predict(X[:4]).to_pandas()
    assert list(frame[0]["class"]) == likely[:4, 0].tolist()
    empty = band.predict(X[:0], 0.9)
    assert (tuple(empty.classes.shape), tuple(empty.log_odds.lower.shape)) == ((0, k), (0, k))
    assert f"the {k} most likely classes of each row" in repr(result)
    assert f"asked about the {k} most likely of each row" in band.summary()


def test_files_keep_that_answers_are_for_the_most_likely_classes(tmp_path):
    model, data = classifier(6), labelled(200, 6)
    band = fitted(model, data, classes="top3")
    band.save(tmp_path / "band")
    again = ClassificationIntervals.load(tmp_path / "band", model)
    assert torch.equal(again.predict(data[0]).log_odds.upper, band.predict(data[0]).log_odds.upper)


def many(n, n_classes=150, d=6):
    """Rows, and a linear network that is unsure among many classes."""
    torch.manual_seed(0)
    X, model = torch.randn(n, d, dtype=torch.float64), nn.Linear(d, n_classes).double()
    with torch.no_grad():
        model.weight.mul_(3)
    return model, X, torch.distributions.Categorical(logits=model(X)).sample()


def dense(model, X, new):
    """q of the two most likely classes of new rows, from the p × p Fisher matrix of a linear network."""
    with torch.no_grad():
        p, rows = model(X).softmax(dim=1), torch.cat([X, torch.ones(len(X), 1).to(X)], dim=1)
        F = -torch.einsum("na,nb,ni,nj->aibj", p, p, rows, rows)
        F.diagonal(dim1=0, dim2=2).add_(torch.einsum("na,ni,nj->ija", p, rows, rows))
        F = F.reshape(model.out_features * rows.shape[1], -1)
        A = torch.linalg.inv(F + DAMPING * torch.eye(len(F)).to(F))
    found = []
    for x in new:
        z = model(x)
        for c in z.topk(2).indices:
            s = z[c] - torch.logsumexp(torch.cat([z[:c], z[c + 1 :]]), dim=0)
            gw, gb = torch.autograd.grad(s, [model.weight, model.bias], retain_graph=True)
            g = torch.cat([gw, gb[:, None]], dim=1).reshape(-1)
            found.append(g @ A @ F @ A @ g)
    return torch.stack(found).reshape(-1, 2)


def test_all_classes_give_the_dense_answers_and_combinations_of_them_are_within_the_reported_error():
    model, X, y = many(600)
    new = X[:15]
    expected = dense(model, X, new)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeltabandWarning)  # of few rows per parameter
        settings = {"damping": DAMPING, "classes": "top2", "engine": Exact()}
        full = ClassificationIntervals(model, **settings, probes=150).fit(X, y)
        bands = {r: ClassificationIntervals(model, **settings, probes=r).fit(X, y) for r in (8, 32)}
    np.testing.assert_allclose(full.variance(new), expected, rtol=1e-6)
    for r, band in bands.items():
        reported = band.fits_[0].probe_error.width
        found = float((band.variance(new) / expected).sqrt().sub(1).square().mean().sqrt())
        assert found < 1.5 * reported, (r, found, reported)
        assert reported < 4 * found, (r, found, reported)
        assert band.fits_[0].gradients_per_row == r
    errors = [band.fits_[0].probe_error.width for band in bands.values()]
    assert errors[1] < 0.7 * errors[0]
    with pytest.warns(DeltabandWarning, match="8 random combinations of the 150 outputs"):
        ClassificationIntervals(model, **settings, probes=8).fit(X, y)


def test_only_as_many_gradients_are_formed_as_there_are_combinations_and_answers(monkeypatch):
    model, X, y = many(100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeltabandWarning)
        band = ClassificationIntervals(model, damping=DAMPING, classes="predicted", probes=8).fit(X, y)
    counted, covariance = [], type(band.fits_[0].covariance)
    variance = covariance.variance
    monkeypatch.setattr(covariance, "variance", lambda self, g: counted.append(len(g)) or variance(self, g))
    band.predict(X[:7])
    assert sum(counted) == 7
    assert band.fits_[0].gradients_per_row == 8
