"""Networks with several labels a row, `loss="bce"`: against dense formulas, and sets of labels."""

import numpy as np
import pytest
import statsmodels.api as sm
import torch
from scipy import special, stats
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import tests.reference as reference
from deltaband import ClassificationIntervals, DeltabandWarning, Exact, Nystrom, RandomProjection
from deltaband import storage as band_storage
from tests.support.classifiers import classifier, fitted

DAMPING = 0.7


def labelled(n=60, n_labels=4, seed=0):
    """Rows (n, 3), of which each has any of the labels, or none."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    slopes = torch.randn(3, n_labels, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    p = (X @ slopes - 0.5).sigmoid()
    return X, (torch.rand(p.shape, generator=generator, dtype=torch.float64) < p).long()


def band_of(model, data, **settings):
    return fitted(model, data, loss="bce", **settings)


@pytest.mark.parametrize("n", [70, 6])  # primal and dual
@pytest.mark.parametrize("per_output", [False, True])
@pytest.mark.parametrize("n_labels", [1, 2, 5])
@pytest.mark.filterwarnings("ignore:the network has p")
def test_all_answers_are_those_of_the_dense_formulas(n_labels, per_output, n):
    model, (X, y), new = classifier(n_labels), labelled(n, n_labels), labelled(4, seed=9)[0]
    band = band_of(model, (X, y), per_output=per_output)
    J, g = (reference.jacobians(model, [(x[None],) for x in rows]) for rows in (X, new))
    z, s = (model(rows).detach().numpy() for rows in (X, new))
    result, shape = band.predict(new, 0.9), (4,) if n_labels == 1 else (4, n_labels)
    assert result.classes == tuple(range(n_labels))
    assert result.log_odds.mean.shape == shape
    q, h = (each(new).reshape(4, n_labels) for each in (band.variance, band.leverage))
    lower, upper = result.log_odds.lower.reshape(s.shape), result.probability.upper.reshape(s.shape)
    p_star = np.atleast_1d(band.effective_parameters_)
    for label in range(n_labels):
        F = reference.label_fisher(J, z, label if per_output else None)
        for i in range(4):
            expected_q, expected_h, expected_p_star = reference.fisher_answers(F, DAMPING, g[i, label])
            half = stats.norm.ppf(0.95) * np.sqrt(expected_q)
            assert q[i, label].item() == pytest.approx(expected_q, rel=1e-7)
            assert h[i, label].item() == pytest.approx(expected_h, rel=1e-7)
            assert p_star[label if per_output else 0] == pytest.approx(expected_p_star, rel=1e-8)
            assert lower[i, label].item() == pytest.approx(s[i, label] - half, rel=1e-8)
            assert upper[i, label].item() == pytest.approx(special.expit(s[i, label] + half), rel=1e-8)


def test_labels_that_share_no_weight_are_logistic_regressions_with_the_standard_errors_of_statsmodels():
    (X, y), new = labelled(300, 3), labelled(10, seed=3)[0]
    model, expected = nn.Linear(3, 3).double(), []
    for label in range(3):
        found = sm.Logit(y[:, label].numpy(), sm.add_constant(X.numpy())).fit(disp=False, tol=1e-12)
        with torch.no_grad():
            model.bias[label] = float(found.params[0])
            model.weight[label] = torch.from_numpy(np.asarray(found.params[1:]))
        rows = sm.add_constant(new.numpy())
        expected.append(np.sqrt(np.einsum("ij,jk,ik->i", rows, found.cov_params(), rows)))
    band = band_of(model, (X, y), damping=0.0)
    np.testing.assert_allclose(band.variance(new).sqrt(), np.stack(expected, axis=1), rtol=1e-6)
    assert band.effective_parameters_ == pytest.approx(12)


def test_the_damping_is_that_of_a_mean_over_rows_and_labels_and_belongs_to_the_minimum():
    X, y = labelled(80, 3)
    model, wd = classifier(3, hidden=2), 0.05
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def loss():
        optimiser.zero_grad()
        value = binary_cross_entropy_with_logits(model(X), y.double())
        value = value + wd / 2 * sum(w.square().sum() for w in model.parameters())
        value.backward()
        return value

    optimiser.step(loss)
    band = band_of(model, (X, y), damping=None, weight_decay=wd)
    assert band.damping_ == pytest.approx(80 * 3 * wd)
    total = binary_cross_entropy_with_logits(model(X), y.double(), reduction="sum")
    for w, gradient in zip(model.parameters(), torch.autograd.grad(total, list(model.parameters())), strict=True):
        torch.testing.assert_close(-gradient, band.damping_ * w, rtol=0, atol=5e-3)
    summary, z, total = band.summary(), model(X).detach(), total.detach()
    assert "n·m·wd" in summary
    assert "3: one Fisher matrix for all" in summary
    assert f"{float(total) / 240:.4g}" in summary
    assert f"{100 * float(((z > 0) == (y == 1)).double().mean()):.2f}%" in summary


@pytest.mark.parametrize("classes", [[3, 0], 2, "predicted", "top2"])
def test_some_labels_and_the_most_likely_ones_have_the_intervals_that_they_have_among_all(classes):
    model, (X, y) = classifier(4), labelled(40)
    every, band = band_of(model, (X, y)), band_of(model, (X, y), classes=classes)
    among, result = every.predict(X), band.predict(X)
    if isinstance(classes, str):
        expected = model(X).topk(1 if classes == "predicted" else 2, dim=1).indices
        assert torch.equal(result.classes.reshape(expected.shape), expected)
    else:
        expected = torch.tensor([classes] if isinstance(classes, int) else classes).expand(40, -1)
    for part in ("lower", "mean", "upper"):
        full = getattr(among.log_odds, part).gather(1, expected)
        torch.testing.assert_close(getattr(result.log_odds, part).reshape(full.shape), full)
    assert band.effective_parameters_ == pytest.approx(every.effective_parameters_)


@pytest.mark.parametrize("engine", [RandomProjection(60), Nystrom(200), "robust-frequent-directions"])
@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
def test_engines_parts_merges_files_and_loaders_give_the_same_intervals(engine, tmp_path):
    model, (X, y), new = classifier(4), labelled(120), labelled(10, seed=5)[0]
    exact = band_of(model, (X, y), engine=Exact())
    whole = band_of(model, (X, y), engine=engine)
    np.testing.assert_allclose(whole.variance(new), exact.variance(new), rtol=0.2)
    settings = {"damping": DAMPING, "loss": "bce", "engine": Exact()}
    parts = ClassificationIntervals(model, **settings).partial_fit(X[:50], y[:50]).partial_fit(X[50:], y[50:])
    merged = ClassificationIntervals(model, **settings).fit(X[:70], y[:70])
    merged.merge(ClassificationIntervals(model, **settings).fit(X[70:], y[70:]))
    loader = ClassificationIntervals(model, **settings).fit(DataLoader(TensorDataset(X, y), batch_size=11))
    whole.save(tmp_path / "whole")
    again = band_storage.load(tmp_path / "whole", model)
    assert torch.equal(again.predict(new).log_odds.lower, whole.predict(new).log_odds.lower)
    for band in (parts, merged, loader):
        torch.testing.assert_close(band.variance(new), exact.variance(new))
        assert [line for line in band.summary().splitlines() if "accuracy" in line or "entropy" in line] == [
            line for line in exact.summary().splitlines() if "accuracy" in line or "entropy" in line
        ]
    with pytest.raises(ValueError, match="differ"):
        exact.merge(ClassificationIntervals(model, damping=DAMPING, engine=Exact()).fit(X, y[:, 0]))


def test_weights_count_as_repeated_rows():
    model, (X, y) = classifier(3), labelled(40, 3)
    w = torch.randint(1, 4, (40,), generator=torch.Generator().manual_seed(0))
    weighted = ClassificationIntervals(model, damping=DAMPING, loss="bce").fit(X, y, sample_weight=w)
    repeated = band_of(model, (X.repeat_interleave(w, 0), y.repeat_interleave(w, 0)))
    torch.testing.assert_close(weighted.variance(X), repeated.variance(X))


@pytest.mark.parametrize("by_class", [False, True])
def test_sets_hold_all_labels_of_a_row_or_each_as_often_as_they_say(by_class):
    torch.manual_seed(0)
    model, (X, y) = classifier(4), labelled(4000, seed=1)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(100):
        optimiser.zero_grad()
        binary_cross_entropy_with_logits(model(X[:300]), y[:300].double()).backward()
        optimiser.step()
    band = band_of(model, (X[:300], y[:300])).calibrate(X[300:1300], y[300:1300], by_class=by_class)
    z, rows = model(X).detach(), np.arange(300, 1300)
    scores = (1 - z.sigmoid()).numpy()
    sets = band.predict_set(X[1300:], [0.8, 0.9])
    assert sets.shape == (2700, 4, 2)
    truth = y[1300:].bool()
    for j, level in enumerate([0.8, 0.9]):
        if by_class:
            share = [float(sets[truth[:, c], c, j].double().mean()) for c in range(4)]
            quantiles = [np.sort(scores[rows][y[rows, c] == 1, c]) for c in range(4)]
            threshold = np.array([s[int(np.ceil((len(s) + 1) * level)) - 1] for s in quantiles])
        else:
            share = [float((sets[:, :, j] | ~truth).all(dim=1).double().mean())]
            largest = np.sort([max([0.0, *(scores[i][y[i].numpy() == 1])]) for i in rows])
            threshold = largest[int(np.ceil(1001 * level)) - 1]
        np.testing.assert_array_equal(sets[:, :, j].numpy(), scores[1300:] <= threshold)
        assert all(level - 0.045 < each < level + 0.045 for each in share), share


def test_a_file_holds_the_calibration_and_sets_may_be_empty(tmp_path):
    model, (X, y) = classifier(4), labelled(300)
    band = band_of(model, (X[:100], y[:100])).calibrate(X[100:200], y[100:200])
    band.save(tmp_path / "band")
    again = band_storage.load(tmp_path / "band", model)
    sets = band.predict_set(X[200:], 0.5)
    assert torch.equal(again.predict_set(X[200:], 0.5), sets)
    none = band_of(model, (X[:100], y[:100])).calibrate(X[100:200], torch.zeros(100, 4)).predict_set(X[200:], 0.5)
    assert not none.any()  # no row has a label
    assert band.predict_set(X[:0]).shape == (0, 4)
    assert "LAC, calibrated on 100 rows" in repr(band)
    band.calibrate(X[100:200], y[100:200], by_class=True)
    assert f"LAC, class by class, calibrated on {int(y[100:200].sum())} labels" in repr(band)
    with pytest.raises(ValueError, match="method must be 'lac', got 'aps'"):
        band.calibrate(X[100:200], y[100:200], method="aps")
    with pytest.warns(DeltabandWarning, match="were training rows"):
        band.calibrate(X[:100], y[:100])


def hot(*labels):
    return torch.zeros(40, 3).index_fill(1, torch.tensor(labels), 1.0)


BAD_LABELS = [
    (hot(0)[:, 0], r"labels must be 0 or 1, \(n, 3\).*got 1 column; for one class per row leave out loss='bce'"),
    (hot(0)[:, :2], r"got 2 columns"),
    (2 * hot(1), r"labels must be 0 or 1.*got 2"),
    (2 * hot(1) - 1, r"got -1: give \(y \+ 1\) / 2"),
    (0.1 + 0.8 * hot(1), r"got 0\.1: of soft labels give whether they are over 0\.5"),
    (torch.where(hot(2) == 1, torch.nan, 0.0), r"targets hold NaN in row"),
    ([["cat"], ["cat", "dog"]] * 20, r"rows of different lengths: sklearn"),
    ([[0, 1], [2]] * 20, r"rows of different lengths: sklearn"),
    (np.array([["cat", "dog", "cow"]] * 40), r"got words"),
    (hot(1)[None], r"same number of rows: 40 inputs, 1 targets"),
]


@pytest.mark.parametrize(("y", "message"), BAD_LABELS)
def test_labels_that_are_no_rows_of_zeros_and_ones_are_refused(y, message):
    X = labelled(40, 3)[0]
    with pytest.raises((ValueError, TypeError), match=message):
        band_of(classifier(3), (X, y))


@pytest.mark.parametrize("change", [lambda y: y.bool(), lambda y: y.bfloat16(), lambda y: y.numpy().astype(np.uint8)])
def test_labels_may_be_of_any_type_and_one_that_no_row_has_is_fine(change):
    X, y = labelled(40, 3)
    y[:, 1] = 0
    expected = band_of(classifier(3), (X, y))
    assert band_of(classifier(3), (X, change(y))).summary() == expected.summary()
    assert torch.isfinite(expected.predict(X).log_odds.upper).all()


def test_networks_that_return_probabilities_or_know_nothing_of_the_labels_are_told():
    X, y = labelled(200, 3)
    with pytest.warns(DeltabandWarning, match="all outputs lie between 0 and 1"):
        band_of(nn.Sequential(classifier(3), nn.Sigmoid()), (X, y))
    model = classifier(3)
    with torch.no_grad():
        model[2].bias += torch.tensor([2.0, -3.0, 3.0])
    with pytest.warns(DeltabandWarning, match="above that of their class frequencies"):
        band_of(model, (X, y))
    with pytest.raises(ValueError, match="loss must be"):
        ClassificationIntervals(model, damping=1.0, loss="focal")


def test_several_labels_given_to_a_classifier_of_one_are_told_what_to_do():
    X, y = labelled(40, 3)
    with pytest.raises(ValueError, match="got 3 columns; for several labels a row give loss='bce'"):
        fitted(classifier(3), (X, y))
