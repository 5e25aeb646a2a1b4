import dataclasses
import warnings

import numpy as np
import pytest
import statsmodels.api as sm
import torch
from scipy import special, stats
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import tests.reference as reference
from deltaband import (
    ClassificationIntervals,
    Exact,
    ImportantDirections,
    Nystrom,
    RandomProjection,
    RobustFrequentDirections,
)
from deltaband.network.log_odds import log_odds
from tests.support.classifiers import classifier, fitted, labelled, trained


@pytest.mark.parametrize("n", [70, 8])  # primal and dual, for most
@pytest.mark.parametrize("per_output", [False, True])
@pytest.mark.parametrize("n_outputs", [1, 2, 3, 10])
@pytest.mark.filterwarnings("ignore:the network has p")
def test_all_answers_are_those_of_the_dense_formulas(n_outputs, per_output, n):
    n_classes = max(n_outputs, 2)
    model, (X, y), new = classifier(n_outputs), labelled(n, n_classes), labelled(4, seed=9)[0]
    band = fitted(model, (X, y), per_output=per_output, classes=range(n_classes))
    result, q, h = band.predict(new, 0.9), band.variance(new), band.leverage(new)
    own = per_output and n_outputs > 2
    p_star = np.atleast_1d(band.effective_parameters_)
    for c in range(n_classes):
        F = reference.fisher(model, X, c if per_output else None)
        for i in range(4):
            p, _, s, S = reference.class_gradients(model, new[i])
            expected_q, expected_h, expected_p_star = reference.fisher_answers(F, 0.7, S[c])
            half = stats.norm.ppf(0.95) * np.sqrt(expected_q)
            assert q[i, c].item() == pytest.approx(expected_q, rel=1e-7)
            assert h[i, c].item() == pytest.approx(expected_h, rel=1e-7)
            assert p_star[c if own else 0] == pytest.approx(expected_p_star, rel=1e-8)
            assert result.log_odds.mean[i, c].item() == pytest.approx(s[c], rel=1e-10)
            assert result.log_odds.lower[i, c].item() == pytest.approx(s[c] - half, rel=1e-8)
            assert result.probability.mean[i, c].item() == pytest.approx(p[c], rel=1e-10)
            assert result.probability.upper[i, c].item() == pytest.approx(special.expit(s[c] + half), rel=1e-8)
    assert result.classes == tuple(range(n_classes))
    assert len(result) == 4


def test_one_logit_is_two_logits_of_which_the_first_is_zero():
    X, y = labelled(60, 2)
    one = classifier(1)
    two = nn.Sequential(one[0], one[1], nn.Linear(6, 2)).double()
    with torch.no_grad():
        two[2].weight.copy_(torch.cat([torch.zeros_like(one[2].weight), one[2].weight]))
        two[2].bias.copy_(torch.cat([torch.zeros_like(one[2].bias), one[2].bias]))
    two[2].register_forward_hook(lambda module, args, z: torch.stack([0 * z[:, 0], z[:, 1]], dim=1))
    single, both = fitted(one, (X, y)), fitted(two, (X, y))
    result = single.predict(X)
    assert result.classes == (1,)
    assert result.log_odds.mean.shape == result.probability.upper.shape == (60,)
    np.testing.assert_allclose(both.predict(X).log_odds.lower[:, 1], result.log_odds.lower, rtol=1e-9)
    np.testing.assert_allclose(both.predict(X).log_odds.upper[:, 0], -result.log_odds.lower, rtol=1e-9)
    np.testing.assert_allclose(both.leverage(X)[:, 0], single.leverage(X), rtol=1e-9)


def test_a_logistic_regression_has_the_standard_errors_of_statsmodels():
    rng = np.random.default_rng(0)
    X, new = rng.standard_normal((200, 3)), 3 * rng.standard_normal((20, 3))
    y = (rng.random(200) < special.expit(X @ [1.0, -0.5, 0.0] + 0.3)).astype(int)
    logit = sm.Logit(y, sm.add_constant(X)).fit(disp=False, tol=1e-12)
    model = nn.Linear(3, 1).double()
    with torch.no_grad():
        model.bias[:] = float(logit.params[0])
        model.weight[:] = torch.from_numpy(logit.params[1:])
    band = fitted(model, (X, y), damping=0.0)
    rows = sm.add_constant(new)
    error = np.sqrt(np.einsum("ij,jk,ik->i", rows, logit.cov_params(), rows))
    np.testing.assert_allclose(np.sqrt(band.variance(new)), error, rtol=1e-6)
    np.testing.assert_allclose(band.variance(new), band.leverage(new), rtol=1e-9)
    frame = logit.get_prediction(rows, which="linear").summary_frame(alpha=0.1)
    np.testing.assert_allclose(band.predict(new, 0.9).log_odds.lower, frame["ci_lower"], rtol=1e-6)
    assert band.effective_parameters_ == pytest.approx(4)
    assert f"cross-entropy         {-logit.llf / 200:.4g}" in band.summary()
    assert f"training accuracy     {100 * np.mean((logit.predict() > 0.5) == y):.2f}%" in band.summary()


def test_a_multinomial_regression_has_the_standard_errors_of_statsmodels():
    rng = np.random.default_rng(1)
    X, new = rng.standard_normal((400, 2)), 2 * rng.standard_normal((10, 2))
    p = special.softmax(X @ rng.standard_normal((2, 4)), axis=1)
    y = np.array([rng.choice(4, p=row) for row in p])
    found = sm.MNLogit(y, sm.add_constant(X)).fit(disp=False, method="newton", tol=1e-12, maxiter=100)
    model = nn.Linear(2, 4).double()
    weights = np.concatenate([np.zeros((3, 1)), np.asarray(found.params)], axis=1)  # of class 0 they are zero
    with torch.no_grad():
        model.bias[:] = torch.from_numpy(weights[0])
        model.weight[:] = torch.from_numpy(weights[1:].T)
    # all logits may be shifted together, so that λ must not be 0
    q = fitted(model, (X, y), damping=1e-7).variance(new)
    rows = sm.add_constant(new)
    covariance = found.cov_params()  # (9, 9), class by class
    for i, row in enumerate(rows):
        pi = special.softmax(row @ weights)
        for c in range(4):
            slope = np.array([-pi[k] / (1 - pi[c]) if k != c else 1.0 for k in range(4)])[1:]  # ∂s_c/∂z_k, k ≥ 1
            g = np.kron(slope, row)
            assert np.sqrt(q[i, c]) == pytest.approx(np.sqrt(g @ covariance @ g), rel=1e-5)


@pytest.mark.slow
def test_the_scores_of_refitted_networks_scatter_as_much_as_the_intervals_say():
    X, new, start = 2 * labelled(400)[0], labelled(8, seed=5)[0], classifier(3, hidden=2, seed=4)
    with torch.no_grad():
        for w in start.parameters():
            w.mul_(2)
    p = start(X).softmax(dim=1).detach()
    generator = torch.Generator().manual_seed(0)
    scores, variances, own = [], [], []
    for _ in range(40):
        y = torch.multinomial(p, 1, generator=generator)[:, 0]
        model = trained(X, y, 3, 3e-3, start.state_dict())
        scores.append(log_odds(model(new)).detach().numpy())
        settings = {"damping": None, "weight_decay": 3e-3}
        variances.append(fitted(model, (X, y), **settings).variance(new).numpy())
        own.append(fitted(model, (X, y), **settings, per_output=True).variance(new).numpy())
    deviation = np.std(scores, axis=0, ddof=1)
    ratio = np.sqrt(np.mean(variances, axis=0)) / deviation
    assert 0.85 < np.median(ratio) < 1.15, ratio
    assert (np.mean(own, axis=0) > np.mean(variances, axis=0)).all()


def test_the_damping_is_n_times_the_weight_decay_and_belongs_to_the_minimum():
    X, y = labelled(80, 3)
    model = trained(X, y, 3, 0.05, classifier(3, hidden=2).state_dict())
    band = fitted(model, (X, y), damping=None, weight_decay=0.05)
    assert band.damping_ == pytest.approx(4.0)
    gradients = torch.autograd.grad(cross_entropy(model(X), y, reduction="sum"), list(model.parameters()))
    for w, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(-gradient, 4.0 * w, rtol=0, atol=1e-3)


def test_only_the_chosen_classes_are_answered_for_from_the_same_fisher_matrix():
    model, data = classifier(5), labelled(40, 5)
    every, some, one = (fitted(model, data, classes=c) for c in (None, [3, 0], 3))
    x = data[0][:6]
    assert some.predict(x).classes == (3, 0)
    torch.testing.assert_close(some.predict(x).log_odds.lower, every.predict(x).log_odds.lower[:, [3, 0]])
    torch.testing.assert_close(some.leverage(x), every.leverage(x)[:, [3, 0]])
    torch.testing.assert_close(one.predict(x).probability.upper, every.predict(x).probability.upper[:, 3])
    assert one.effective_parameters_ == pytest.approx(every.effective_parameters_, rel=1e-12)
    assert "5, asked about 3, 0: one Fisher matrix for all" in some.summary()
    assert f"({every.effective_parameters_ / (4 * 40):.0%} of 4·n)" in every.summary()


@pytest.mark.parametrize("n_outputs", [1, 2, 4])
def test_the_predicted_class_alone_has_the_interval_that_it_has_among_all(n_outputs):
    model, (X, y) = classifier(n_outputs), labelled(30, 2)
    n_classes = max(n_outputs, 2)
    every, band = fitted(model, (X, y), classes=range(n_classes)), fitted(model, (X, y), classes="predicted")
    result, among = band.predict(X, [0.5, 0.9]), every.predict(X, [0.5, 0.9])
    predicted = among.probability.mean.argmax(dim=1)
    assert torch.equal(result.classes, predicted)
    rows = torch.arange(30)
    torch.testing.assert_close(result.log_odds.lower, among.log_odds.lower[rows, predicted])
    torch.testing.assert_close(result.probability.upper, among.probability.upper[rows, predicted])
    torch.testing.assert_close(band.leverage(X), every.leverage(X)[rows, predicted])
    assert isinstance(band.predict(X.numpy()).classes, np.ndarray)
    empty = band.predict(X[:0], [0.5, 0.9])
    assert (empty.classes.shape, empty.log_odds.lower.shape) == ((0,), (0, 2))
    assert "asked about the predicted one" in band.summary()


def test_no_gradient_is_computed_of_a_class_that_is_not_asked_about(monkeypatch):
    model, data = classifier(5), labelled(40, 5)
    band = fitted(model, data, classes=[2])
    rows = []
    original = type(band._fits[0].covariance).variance
    monkeypatch.setattr(
        type(band._fits[0].covariance), "variance", lambda self, g: rows.append(len(g)) or original(self, g)
    )
    band.predict(data[0][:6])
    assert sum(rows) == 6


def test_numpy_in_numpy_out_several_levels_and_no_rows():
    model, (X, y) = classifier(3, torch.float32), labelled(40, 3)
    band = fitted(model, (X.numpy(), y.numpy()))
    result = band.predict(X[:5].numpy(), [0.5, 0.9])
    assert result.log_odds.lower.shape == result.probability.upper.shape == (5, 3, 2)
    assert result.log_odds.mean.shape == band.variance(X[:5]).shape == (5, 3)
    assert isinstance(result.probability.lower, np.ndarray)
    assert result.probability.lower.dtype == np.float32
    assert result.log_odds.level == (0.5, 0.9)
    assert isinstance(band.predict(X[:5]).log_odds.mean, torch.Tensor)
    np.testing.assert_allclose(result.probability.mean.sum(axis=1), 1.0, rtol=1e-6)
    np.testing.assert_array_equal(result.log_odds.lower[:, :, 1], band.predict(X[:5].numpy(), 0.9).log_odds.lower)
    empty = band.predict(X[:0].numpy(), [0.5, 0.9])
    assert (empty.log_odds.mean.shape, empty.probability.lower.shape) == ((0, 3), (0, 3, 2))
    assert fitted(model, (X, y), classes=[1]).leverage(X[:0]).shape == (0, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.classes = ()


@pytest.mark.parametrize("per_output", [False, True])
def test_loaders_arrays_and_batches_give_the_same_intervals(per_output):
    model, (X, y) = classifier(3), labelled(50, 3)
    sources = [
        (X, y),
        (X.numpy(), y.double().numpy()[:, None]),
        (DataLoader(TensorDataset(X, y), batch_size=7, shuffle=True),),
        ([(X[:30], y[:30]), (X[30:], y[30:])],),
        *([((((X[i : i + 9], y[i : i + 9]) for i in range(0, 50, 9))),)] if not per_output else []),
    ]
    bands = [fitted(model, source, per_output=per_output) for source in sources]
    for band in bands[1:]:
        torch.testing.assert_close(band.predict(X).log_odds.lower, bands[0].predict(X).log_odds.lower)
        assert band.n_rows_ == 50
        for line in ("training accuracy", "cross-entropy"):
            shown = [next(row for row in b.summary().splitlines() if line in row) for b in (band, bands[0])]
            assert shown[0] == shown[1]


ENGINES = [ImportantDirections(40), RobustFrequentDirections(40), Nystrom(100), RandomProjection(45)]


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
@pytest.mark.parametrize("per_output", [False, True])
def test_every_engine_is_near_the_exact_intervals_at_a_generous_size(per_output, engine):
    model, data = classifier(3), labelled(80, 3)
    exact = fitted(model, data, per_output=per_output, engine=Exact()).predict(data[0]).log_odds.width
    other = fitted(model, data, per_output=per_output, engine=engine).predict(data[0]).log_odds.width
    np.testing.assert_allclose(other, exact, rtol=0.1)


@pytest.mark.parametrize("per_output", [False, True])
@pytest.mark.parametrize("rank", [5, 20])
def test_an_error_report_is_about_widths_without_noise(rank, per_output):
    model, data, new = classifier(3, hidden=40), labelled(500, 3), labelled(100, seed=1)[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        band = fitted(model, data, per_output=per_output, engine=RobustFrequentDirections(rank))
    exact = fitted(model, data, per_output=per_output, engine=Exact())
    true = (band.predict(new).log_odds.width / exact.predict(new).log_odds.width - 1).abs().mean(dim=0)
    true = float(true.mean() if not per_output else true.max())  # of the class that is worst
    report = band.error_report(new)
    assert report.width == pytest.approx(true, rel=0.3)
    estimated = max(fit.error.width for fit in band._fits)
    assert any("is not accurate enough here" in str(warning.message) for warning in caught) == (estimated > 0.05)
    assert "error of widths" in band.summary()
    assert exact.error_report(new).width == 0.0


def test_parameters_output_batch_and_plan_are_those_of_every_band():
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = classifier(4), nn.Linear(4, 3).double()

        def forward(self, x):
            return {"logits": self.head(self.body(x))}

    torch.manual_seed(1)
    model, (X, y) = Returns(), labelled(40, 3)
    band = ClassificationIntervals(
        model,
        damping=1.0,
        parameters="last",
        output=lambda out: out["logits"],
        batch=lambda batch: (batch["x"], batch["label"]),
    )
    assert "Exact" in str(band.plan([{"x": X, "label": y}]))
    band.fit([{"x": X, "label": y}], progress=False)
    plain = fitted(model.head, (model.body(X).detach(), y), damping=1.0)
    assert band.n_parameters_ == 15
    torch.testing.assert_close(band.variance(X), plain.variance(model.body(X).detach()))
