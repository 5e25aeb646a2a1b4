"""What is known of training rows to judge others by: moments of targets and predictions, and ranges of inputs."""

import math
import warnings

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from torch import nn

from deltaband import ClassificationIntervals, DeltabandWarning, PredictionIntervals
from deltaband.data.inputs import Inputs, Ranges
from deltaband.data.row_record import Moments, rank_correlation
from deltaband.errors import InputsMessage, MisfitWarning, said_once, warn
from tests.support.networks import regression, trained, trained_mlp

X, Y = regression(120)
NEW = regression(40, seed=1)[0]


def fitted(**options):
    return PredictionIntervals(trained_mlp(), damping=1.0, **options).fit(X, Y, progress=False)


# --- moments


@pytest.mark.parametrize("shift", [0.0, 1e3])
def test_moments_are_those_of_the_definition(shift):
    rng = np.random.default_rng(0)
    y, w = rng.normal(size=(50, 2)) + shift, rng.uniform(0.5, 2, (50, 1))
    f = 0.5 * y + 0.2 * rng.normal(size=y.shape) + 0.5 * shift
    z = 3 * y - 1
    parts = [Moments.of(y[rows], f[rows], z[rows], w[rows]) for rows in (slice(0, 20), slice(20, 50))]
    found = Moments(parts[0].sums + parts[1].sums)
    tolerance = {"rtol": 1e-9 * max(1.0, shift), "atol": 1e-9 * max(1.0, shift)}
    for o in range(2):
        weights = w[:, 0]
        mean = np.average(y[:, o], weights=weights)
        variance = np.average((y[:, o] - mean) ** 2, weights=weights)
        rss = np.average((y[:, o] - f[:, o]) ** 2, weights=weights)
        slope, intercept = np.polyfit(f[:, o], y[:, o], 1, w=np.sqrt(weights))
        line = np.average((y[:, o] - slope * f[:, o] - intercept) ** 2, weights=weights)
        np.testing.assert_allclose(found.explained[o], 1 - rss / variance, **tolerance)
        np.testing.assert_allclose(found.correlated[o], 1 - line / variance, **tolerance)
        np.testing.assert_allclose(found.std[o], np.sqrt(variance), **tolerance)
        np.testing.assert_allclose(found.line[0][o], slope, **tolerance)


def test_the_rank_correlation_is_at_most_the_bound_of_fisher():
    rng = np.random.default_rng(0)
    f = rng.normal(size=(50, 3))
    y = np.column_stack([f[:, 0] + 1e6 * (np.arange(50) == 3), rng.standard_cauchy(50), -f[:, 2]])
    expected = [np.tanh(np.arctanh(stats.spearmanr(y[:, o], f[:, o]).statistic) + 1.96 / 47**0.5) for o in (0, 1)]
    np.testing.assert_allclose(rank_correlation(y, f), [*expected, -1.0], rtol=1e-9)


def test_rows_whose_targets_have_nothing_to_do_with_their_predictions_are_noticed_and_overfitted_ones_are_not():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(200, 1))
    y = (2 * x + 0.5 * rng.normal(size=x.shape))[:, 0]
    line = nn.Linear(1, 1).double()
    with torch.no_grad():
        line.weight.fill_(2.0), line.bias.fill_(0.0)
    band = PredictionIntervals(line, damping=1.0).fit(x, y, progress=False)
    noisy = y + 8 * rng.normal(size=y.shape)  # R² < 0, as of a network that has learnt its training rows by heart
    assert Moments.of(noisy[:, None] / 8, line(torch.from_numpy(x)).detach().numpy(), None).explained < 0
    band.evaluate(x, noisy / 8)
    with pytest.warns(MisfitWarning, match="of these rows nothing .* in the order of their rows"):
        band.evaluate(x, rng.permutation(y))


@pytest.mark.parametrize("shift", [1e6, 1e8, 1e10])
def test_rounding_of_large_targets_is_no_misfit(shift):
    rng = np.random.default_rng(0)
    f = rng.normal(size=(500, 1)) + shift
    assert not Moments.of(f + 0.1 * rng.normal(size=f.shape), f, None).misfits().any()
    assert Moments.of(f, f - shift, None).misfits().all()


def test_targets_that_do_not_vary_and_outputs_that_do_not_are_judged_without_a_fuss():
    y, zeros = np.linspace(0, 1, 20)[:, None], np.zeros((20, 1))
    assert Moments.of(y, zeros, None).misfits().all()  # R² is that of a constant, and below 0
    assert not Moments.of(y, np.full_like(y, 0.5), None).misfits().any()
    assert not Moments.of(zeros, zeros, None).misfits().any()
    assert Moments.of(zeros + 5, zeros, None).misfits().all()
    assert not Moments.of(zeros + 5, zeros + 5, None).misfits().any()
    assert not Moments.of(zeros + 5, 5 + 0.01 * y, None).misfits().any()  # nobody hits a constant exactly
    assert not Moments.of(y, y, np.full_like(y, np.nan)).fit_other_units()


def test_fewer_rows_than_eight_are_not_judged():
    model = trained_mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeltabandWarning)
        warnings.simplefilter("error", MisfitWarning)
        PredictionIntervals(model, damping=100.0).fit(X[:7], 100 * Y[:7], progress=False)
        with pytest.raises(MisfitWarning):
            PredictionIntervals(model, damping=100.0).fit(X[:8], 100 * Y[:8], progress=False)


def test_a_warning_that_is_an_error_leaves_the_band_as_it_was():
    band = fitted()
    before = band.predict(NEW)
    with pytest.raises(MisfitWarning, match="targets or inputs seem to be in other units"):
        band.fit(X, 100 * Y + 50, progress=False)
    with pytest.raises(MisfitWarning):
        band.calibrate(NEW, 100 * regression(40, seed=1)[1] + 50)
    assert band.calibration_ is None
    assert torch.equal(band.predict(NEW).lower, before.lower)


def test_what_was_warned_of_is_remembered_and_saved(tmp_path):
    with pytest.warns(MisfitWarning):
        band = PredictionIntervals(trained_mlp(), damping=1.0).fit(X, Y + 50, progress=False)
    assert len(band.warnings_) == 1
    with pytest.warns(MisfitWarning):
        band.calibrate(NEW, regression(40, seed=1)[1] + 500)
    assert len(band.warnings_) == 2
    band.save(tmp_path / "x.band")
    assert PredictionIntervals.load(tmp_path / "x.band", band.model).warnings_ == band.warnings_


@pytest.mark.parametrize("per_output", [False, True])
def test_one_of_several_outputs_is_named(per_output):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    targets = torch.stack([Y, -Y, Y + 1], dim=1)
    trained(model, X, targets)
    targets[:, 1] += 30
    name = "" if per_output else r" \(output 1 of 3\)"
    with pytest.warns(MisfitWarning, match=rf"R² = .*{name}"):
        PredictionIntervals(model, damping=1.0, per_output=per_output).fit(X, targets, progress=False)


def test_units_are_judged_over_all_rows_where_the_first_tell_nothing():
    order = np.argsort(Y.numpy())
    x, y = X[order], Y[order]
    y = torch.cat([y[:1].expand(10), y[10:]])  # the first ten are all alike
    band = PredictionIntervals(trained_mlp(), damping=1.0, target_transform=(50.0, 9.0))
    with pytest.raises(ValueError, match="the targets of fit are in the original units"):
        band.fit(x, 9 * y + 50, progress=False)
    band = PredictionIntervals(trained_mlp(), damping=1.0, target_transform=(50.0, 9.0))
    band.partial_fit(x[:60], 9 * y[:60] + 50)
    with pytest.raises(ValueError, match="the targets of fit are in the original units"):
        band.partial_fit(x[60:], 9 * y[60:] + 50).summary()


def test_a_classifier_is_compared_with_the_frequencies_of_weighted_classes():
    labels = (X[:, 0] > 0.8).long()
    torch.manual_seed(0)
    model = trained(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double(), X, 6.0 * labels - 3)
    weights = 1 + 4.0 * labels
    with warnings.catch_warnings():
        warnings.simplefilter("error", MisfitWarning)
        band = ClassificationIntervals(model, damping=1.0).fit(X, labels, sample_weight=weights, progress=False)
    share = float((weights * labels).sum() / weights.sum())
    entropy = -(share * np.log(share) + (1 - share) * np.log(1 - share)) * float(weights.sum())
    assert band.spec.task.entropy(band.fits_[0]) == pytest.approx(entropy)
    with pytest.warns(MisfitWarning, match="above that of their class frequencies"):
        ClassificationIntervals(model, damping=1.0).fit(X, 1 - labels, progress=False)


# --- ranges


def test_ranges_are_those_of_all_rows_whatever_way_these_come(tmp_path):
    expected = X.min(dim=0).values.numpy(), X.max(dim=0).values.numpy()
    band = PredictionIntervals(trained_mlp(), damping=1.0)
    parts = band.partial_fit(X[:50], Y[:50]).partial_fit(X[50:], Y[50:])
    merged = PredictionIntervals(trained_mlp(), damping=1.0).fit(X[:70], Y[:70], progress=False)
    merged.merge(PredictionIntervals(trained_mlp(), damping=1.0).fit(X[70:], Y[70:], progress=False))
    fitted().save(tmp_path / "x.band")
    loaded = PredictionIntervals.load(tmp_path / "x.band", trained_mlp())
    going_on = fitted().partial_fit(X[:5] / 2, Y[:5])
    for each in (fitted(), parts, merged, loaded, going_on):
        ranges = each.fits_[0].ranges
        np.testing.assert_array_equal(ranges.lowest[0], expected[0])
        np.testing.assert_array_equal(ranges.highest[0], expected[1])


def test_inputs_of_every_form_have_ranges_and_whole_numbers_have_none():
    table, words = torch.tensor([[0.0, 2.0], [1.0, 4.0]]), torch.tensor([[1, 2], [3, 4]])
    images = torch.arange(16.0).reshape(2, 2, 2, 2)
    found = Ranges.of(Inputs.of({"a": table, "b": words, "c": images}))
    assert found.lowest[1] is None
    assert found.lowest[2].shape == ()
    x = Inputs.of({"a": torch.tensor([[0.5, 2.0], [3.0, 3.0]]), "b": words + 100, "c": images})
    np.testing.assert_allclose(found.excess(x), [0.0, 2.0])
    assert found.farthest(x) == "feature 0 of input 'a' is 3 in a row, and was from 0 to 1"
    wider = found.merged(Ranges.of(Inputs.of({"a": torch.zeros(2, 5), "b": words, "c": -images})))
    assert wider.lowest[0].shape == ()  # tables of different widths
    assert float(wider.lowest[2]) == -15
    assert Ranges().merged(found) is found
    assert found.merged(Ranges()) is found
    assert not found.merged(Ranges.of(Inputs.of(table))).excess(Inputs.of(100 * table)).any()
    assert found.excess(Inputs.of({"a": table[:0], "b": words[:0], "c": images[:0]})).shape == (0,)


def test_a_feature_that_was_constant_is_not_judged():
    ranges = Ranges.of(Inputs.of(torch.tensor([[0.0, 1.0], [0.0, 2.0]])))
    np.testing.assert_array_equal(ranges.excess(Inputs.of(torch.tensor([[7.0, 1.5]]))), [0.0])


@pytest.mark.parametrize("name", ["predict", "predict_mean", "predict_mean_and_scale"])
def test_answers_about_strange_rows_come_with_a_warning_and_those_about_far_rows_without(name):
    band = fitted()
    ask = getattr(band, name)
    with pytest.warns(MisfitWarning, match=r"of these rows lie far outside of the training rows \(feature \d is"):
        ask(100 * NEW)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MisfitWarning)
        ask(NEW)
        ask(2 * NEW)
        ask(torch.cat([NEW, 100 * NEW[:20]]))
        band.leverage(100 * NEW)  # which is there to look at such rows
        band.variance(100 * NEW)


def test_of_a_loader_it_is_said_once():
    loader = [(100 * NEW[i : i + 10] * (i + 1), Y[:10]) for i in range(0, 40, 10)]
    with pytest.warns(MisfitWarning) as caught:
        fitted().predict(loader)
    assert len(caught) == 1
    with pytest.warns(MisfitWarning) as caught:
        fitted().evaluate(loader)
    assert sum("outside" in str(each.message) for each in caught) == 1


def test_messages_of_a_block_are_said_once_each():
    def say() -> None:
        with said_once():
            for i in range(3):
                warn("a", "b", InputsMessage(f"c {i}"))

    with pytest.warns(DeltabandWarning) as caught:
        say()
    assert [str(each.message) for each in caught] == ["a", "b", "c 0"]
    with pytest.warns(DeltabandWarning) as caught:
        warn("a", "a")
    assert len(caught) == 2


def test_rows_scaled_twice_are_recognised_where_the_scaling_is_known():
    mean, std = np.array([0.2, 0.3, -0.4]), np.array([50.0, 60.0, 70.0])
    raw = X.numpy() * std + mean
    band = PredictionIntervals(trained_mlp(), damping=1.0, input_transform=(mean, std)).fit(raw, Y, progress=False)
    with pytest.warns(MisfitWarning, match="these rows look as if they had been scaled already"):
        band.predict(NEW.numpy())
    with warnings.catch_warnings():
        warnings.simplefilter("error", MisfitWarning)
        band.predict(NEW.numpy() * std + mean)
        band.predict(raw[:1] + 0.01 * std * np.random.default_rng(0).normal(size=(50, 3)))


# --- what is shown


@pytest.mark.parametrize("scaler", [False, True])
def test_what_is_shown_is_in_original_units(scaler):
    mean, std = 50.0, 9.0
    transform = StandardScaler() if scaler else (mean, std)
    if scaler:
        transform.fit(np.array([[mean - std], [mean + std]]))
    held, held_y = regression(80, seed=2)
    plain = fitted().calibrate(held, held_y)
    band = fitted(target_transform=transform).calibrate(held, held_y)
    assert band.noise_std_ == pytest.approx(std * plain.noise_std_)
    for name in ("score_before", "score_after"):
        assert getattr(band.calibration_, name) == pytest.approx(std * getattr(plain.calibration_, name))
    lines, of_plain = dict(band.summary_lines()), dict(plain.summary_lines())
    for label in ("training RMSE", "noise std s"):
        assert float(lines[label]) == pytest.approx(std * float(of_plain[label]), rel=1e-3)


def test_of_a_curved_transform_residuals_are_those_in_original_units():
    curved = FunctionTransformer(np.log, np.exp)
    band = fitted(target_transform=curved)
    with torch.no_grad():
        residuals = (Y.exp() - trained_mlp()(X)[:, 0].exp()).numpy()
    freedom = band.n_rows_ - band.effective_parameters_
    assert band.noise_std_ == pytest.approx(np.sqrt((residuals**2).sum() / freedom))
    assert float(dict(band.summary_lines())["training RMSE"]) == pytest.approx(np.sqrt((residuals**2).mean()), rel=1e-3)
    held, held_y = regression(80, seed=2)
    band.calibrate(held, held_y)
    lower, upper = (np.asarray(end) for end in list(fitted(target_transform=curved).predict(held))[1:])
    y = np.exp(held_y.numpy())
    score = upper - lower + 40 * (np.maximum(lower - y, 0) + np.maximum(y - upper, 0))
    assert band.calibration_.score_before == pytest.approx(score.mean(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_excess_of_rows_is_the_formula_number_by_number(dtype):
    generator = torch.Generator().manual_seed(0)
    known, x = (torch.randn(n, 5, generator=generator, dtype=dtype) for n in (30, 40))
    known[:, 3] = 1.0  # constant: no width
    x[0, 0], x[1, 1], x[2] = math.nan, math.inf, 100.0
    expected = np.zeros(len(x))
    for i, row in enumerate(x.double().tolist()):
        for j, value in enumerate(row):
            low, high = float(known[:, j].min()), float(known[:, j].max())
            if high > low and math.isfinite(value):
                expected[i] = max(expected[i], (low - value) / (high - low), (value - high) / (high - low))
    found = Ranges.of(Inputs.of(known)).excess(Inputs.of(x))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert (expected > 0).any()
    assert (expected == 0).any()
