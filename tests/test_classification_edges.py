"""Classifiers at the edge: logits of any size, labels of every kind, wrong calls."""

import numpy as np
import pytest
import torch
from torch import nn

from deltaband import ClassificationIntervals, DeltabandWarning, NotFittedError, PredictionIntervals
from deltaband.network.log_odds import joint_fisher, log_odds
from tests.support.classifiers import classifier, fitted, labelled


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e3, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_odds_and_their_gradients_are_finite_and_right_however_large_the_logits(scale, dtype):
    z = scale * torch.randn(200, 5, dtype=dtype, generator=torch.Generator().manual_seed(0))
    z[0] = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]) * scale  # ties
    exact = z.double()
    others = torch.stack([exact[:, [k for k in range(5) if k != c]].logsumexp(dim=1) for c in range(5)], dim=1)
    s = log_odds(z.requires_grad_())
    torch.testing.assert_close(s.double(), exact - others, rtol=1e-5, atol=1e-6 * scale)
    for c in range(5):
        (gradient,) = torch.autograd.grad(s[:, c].sum(), z, retain_graph=True)
        expected = -(exact - others[:, [c]]).exp()
        expected[:, c] = 1.0
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-6)


def test_the_fisher_matrix_of_saturated_logits_keeps_the_small_probabilities():
    z = torch.tensor([[20.0, 0.0, -3.0]], dtype=torch.float32, requires_grad=True)
    values = joint_fisher(z)
    torch.testing.assert_close(values, log_odds(z))
    rows = torch.stack([torch.autograd.grad(values[0, c], z, retain_graph=True)[0][0] for c in range(3)]).double()
    p = z.detach().double().softmax(dim=1)[0]
    torch.testing.assert_close(rows.T @ rows, torch.diag(p) - torch.outer(p, p), rtol=1e-4, atol=0)


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_a_saturated_network_has_finite_intervals(scale):
    model = classifier(4, torch.float32)
    with torch.no_grad():
        model[2].weight.mul_(scale)
    result = fitted(model, labelled(60, 4)).predict(labelled(10, seed=1)[0].float(), 0.99)
    for intervals in (result.log_odds, result.probability):
        assert all(bool(torch.isfinite(part).all()) for part in intervals)
        assert bool((intervals.lower <= intervals.mean).all() & (intervals.mean <= intervals.upper).all())
    assert bool((result.probability.lower >= 0).all() & (result.probability.upper <= 1).all())


def test_a_network_that_is_sure_of_all_training_rows_has_no_intervals_and_an_almost_sure_one_warns():
    model, data = classifier(3), labelled(30, 3)
    with torch.no_grad():
        model[2].bias[0] = 20.0
    with pytest.warns(DeltabandWarning, match=r"the network is so sure of them .* look at leverage"):
        fitted(model, data)
    with torch.no_grad():
        model[2].bias[0] = 1e5
    with pytest.raises(ValueError, match="or all probabilities are 0 and 1 to the last digit"):
        fitted(model, data)


def test_log_probabilities_are_logits_and_probabilities_are_refused():
    logits, data = classifier(3), labelled(30, 3)
    band = fitted(nn.Sequential(logits, nn.LogSoftmax(dim=1)), data)
    torch.testing.assert_close(band.variance(data[0]), fitted(logits, data).variance(data[0]))
    probabilities = nn.Sequential(logits, nn.Softmax(dim=1))
    torch.testing.assert_close(
        fitted(probabilities, data, output=torch.log).variance(data[0]), band.variance(data[0]), rtol=1e-6, atol=1e-9
    )
    with pytest.raises(ValueError, match=r"returns probabilities .* output=torch.log"):
        fitted(probabilities, data)
    with pytest.warns(DeltabandWarning, match="all outputs lie between 0 and 1"):
        fitted(nn.Sequential(classifier(1), nn.Sigmoid()), labelled(30, 2))


BAD_LABELS = [
    (3, lambda y: y - 1, r"whole numbers from 0 to 2, one per row, got -1: the network has 3 outputs"),
    (3, lambda y: y + 1, r"got 3: the network has 3 outputs; if your labels start at 1, give y - 1"),
    (3, lambda y: y + 0.5, r"whole numbers from 0 to 2, one per row, got \d\.5"),
    (3, lambda y: nn.functional.one_hot(y, 3), r"got 3 columns; for one-hot rows give y.argmax\(axis=1\)"),
    (3, lambda y: torch.full((40, 3), 1 / 3), r"got 3 columns; for one-hot rows give y.argmax"),
    (3, lambda y: torch.where(y == 2, torch.nan, y), r"targets hold NaN in row"),
    (3, lambda y: np.array(["cat", "dog", "cow"])[y], r"got words .* np.unique"),
    (3, lambda y: ["cat"] * len(y), r"got words .* np.unique"),
    (1, lambda y: y, r"whole numbers from 0 to 1, one per row, got 2: one output is the logit of class 1"),
    (1, lambda y: (y > 0) * 2 - 1, r"got -1: one output is the logit of class 1; give \(y \+ 1\) / 2"),
]


@pytest.mark.parametrize(("n_outputs", "change", "message"), BAD_LABELS)
def test_labels_that_are_no_classes_are_refused_in_arrays_and_in_loaders(n_outputs, change, message):
    X, y = labelled(40, 3)
    y[-1], bad = 2, change(y)
    with pytest.raises((ValueError, TypeError), match=message):
        fitted(classifier(n_outputs), (X, bad))
    if isinstance(bad, torch.Tensor):
        with pytest.raises(ValueError, match=message):
            fitted(classifier(n_outputs), ([(X[:20], bad[:20]), (X[20:], bad[20:])],))


@pytest.mark.parametrize("change", [lambda y: y.bool(), lambda y: y.float(), lambda y: y.numpy().astype(np.uint8)])
def test_labels_may_be_whole_floats_booleans_and_small_integers(change):
    X, y = labelled(40, 2)
    assert fitted(classifier(1), (X, change(y))).summary() == fitted(classifier(1), (X, y)).summary()


def test_fewer_rows_than_classes_and_a_class_never_seen_are_fine():
    X, _ = labelled(4)
    with pytest.warns(DeltabandWarning, match="effective parameters for n = 4 rows"):
        band = fitted(classifier(10), (X, torch.zeros(4)), damping=1e-3)
    assert bool(torch.isfinite(band.predict(X).log_odds.upper).all())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"classes": [0, 3]}, r"there is no class 3; the network knows 0, 1, 2"),
        ({"classes": -1}, r"there is no class -1; the network knows 0, 1, 2"),
        ({"classes": [1, 1]}, r"holds a class more than once"),
        ({"classes": [True]}, r"classes must be the number of a class, a list"),
        ({"classes": "cat"}, r"classes must be the number of a class, a list"),
        ({"classes": []}, r"classes must be the number of a class, a list"),
        ({"classes": "predicted", "per_output": True}, r"classes='predicted' goes with per_output=False"),
        ({"classes": "top2", "per_output": True}, r"classes='top2' goes with per_output=False"),
        ({"classes": "top4"}, r"classes='top4': the network knows 3"),
        ({"classes": "top0"}, r"classes must be the number of a class, a list"),
        ({"per_output": "both"}, r"per_output must be True or False"),
        ({"damping": None}, r"weight_decay=, or damping=λ"),
        ({"damping": -1.0}, r"damping must be a finite number ≥ 0"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        fitted(classifier(3), labelled(30, 3), **settings)


def test_wrong_calls_and_numbers_are_refused():
    X, y = labelled(30, 3)
    with pytest.raises(NotFittedError, match="this ClassificationIntervals is not fitted yet"):
        ClassificationIntervals(classifier(3), damping=1.0).predict(X)
    with pytest.raises(TypeError, match="targets are missing"):
        fitted(classifier(3), (X,))
    model = classifier(3)
    band = fitted(model, (X, y))
    with pytest.raises(ValueError, match="level must be between 0 and 1"):
        band.predict(X, 95)
    with torch.no_grad():
        model[2].bias.add_(1.0)
    with pytest.warns(DeltabandWarning, match="weights have changed since fit"):
        band.predict(X)
    with torch.no_grad():
        model[2].bias[0] = torch.nan
    with pytest.raises(ValueError, match="outputs hold NaN"):
        fitted(model, (X, y))
    with pytest.raises(ValueError, match="ClassificationIntervals"):
        PredictionIntervals(model, weight_decay=1.0, loss="cross_entropy")


def test_a_fit_that_fails_changes_nothing():
    X, y = labelled(30, 3)
    band = fitted(classifier(3), (X, y))
    before = band.summary()
    with pytest.raises(ValueError):
        band.fit(X, y + 5)
    assert band.summary() == before == repr(band)
    assert "not fitted" in repr(ClassificationIntervals(classifier(3), weight_decay=1e-2))
