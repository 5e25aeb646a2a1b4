"""`input_transform=` and `targets="original"`: raw data in, the same numbers as scaling them by hand."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.preprocessing import (
    FunctionTransformer,
    MaxAbsScaler,
    MinMaxScaler,
    PowerTransformer,
    QuantileTransformer,
    RobustScaler,
    StandardScaler,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from deltaband import ClassificationIntervals, DeltabandWarning, PredictionIntervals, RandomProjection
from deltaband.report.evaluation import evaluate
from tests.support.networks import mlp, regression, trained, trained_mlp

Z, Y = regression(90)
MEAN, STD = np.array([100.0, -3.0, 0.02]), np.array([20.0, 0.5, 0.001])
RAW = Z.numpy() * STD + MEAN  # float64
Y_MEAN, Y_STD = 50.0, 7.0
SCALERS = [
    StandardScaler(),
    StandardScaler(with_mean=False),
    StandardScaler(with_std=False),
    MinMaxScaler((-1, 2)),
    MaxAbsScaler(),
    RobustScaler(),
    RobustScaler(with_centering=False, unit_variance=True),
    MinMaxScaler(clip=True),
    PowerTransformer(),
    QuantileTransformer(n_quantiles=20, output_distribution="normal"),
]


def answers(band, x, y, new):
    """Everything that a band says of raw or of scaled data."""
    band.fit(x[:50], y[:50], progress=False).calibrate(x[50:], y[50:], noise="none")
    found = [*band.predict(new), *band.predict_mean_and_scale(new), band.predict_mean(new)]
    found += [band.variance(new), band.leverage(new), band.predict(new, side="upper").upper]
    return [np.asarray(each) for each in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scaler", SCALERS, ids=repr)
def test_raw_inputs_are_scaled_as_by_hand_to_the_last_bit(scaler, dtype):
    scaler = clone(scaler).fit(RAW)
    scaled = torch.from_numpy(scaler.transform(RAW)).to(dtype).numpy()
    model = trained(trained_mlp(dtype=dtype), torch.from_numpy(scaled).double(), Y)
    by_hand = answers(PredictionIntervals(model, damping=1.0), scaled, Y, scaled[:7])
    raw = answers(PredictionIntervals(model, damping=1.0, input_transform=scaler), RAW, Y, RAW[:7])
    for mine, theirs in zip(raw, by_hand, strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("transform", [(4.0, 5.0), StandardScaler()], ids=["pair", "scaler"])
def test_a_scale_is_in_the_units_of_its_prediction_where_the_transform_is_affine(transform):
    original = 5 * Y.numpy()[:, None] + 4
    transform = transform if isinstance(transform, tuple) else transform.fit(original)
    unit = 5.0 if isinstance(transform, tuple) else float(transform.scale_[0])
    plain = PredictionIntervals(trained_mlp(), damping=1.0).fit(Z, Y, progress=False)
    band = PredictionIntervals(trained_mlp(), damping=1.0, target_transform=transform).fit(Z, Y, progress=False)
    torch.testing.assert_close(band.predict_mean_and_scale(Z)[1], unit * plain.predict_mean_and_scale(Z)[1])
    ratio = band.predict(Z).width / band.predict_mean_and_scale(Z)[1]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))
    power = PowerTransformer().fit(original)  # a width there has no scale: it is that of the network
    band = PredictionIntervals(trained_mlp(), damping=1.0, target_transform=power).fit(Z, Y, progress=False)
    torch.testing.assert_close(band.predict_mean_and_scale(Z)[1], plain.predict_mean_and_scale(Z)[1])


@pytest.mark.parametrize("kind", ["arrays", "tensors", "float32", "loader", "generator", "frame"])
def test_raw_inputs_may_come_in_any_form(kind):
    by_hand = PredictionIntervals(trained_mlp(), damping=1.0).fit(Z, Y, progress=False).predict(Z[:7].numpy())
    band = PredictionIntervals(trained_mlp(), damping=1.0, input_transform=(MEAN, torch.from_numpy(STD)))
    raw = torch.from_numpy(RAW)
    loader = DataLoader(TensorDataset(raw, Y), batch_size=16)
    data = {
        "arrays": (RAW, Y.numpy()),
        "tensors": (raw, Y),
        "float32": (raw.float(), Y),
        "loader": (loader,),
        "generator": (iter(list(loader)),),
        "frame": (pd.DataFrame(RAW), Y),
    }[kind]
    found = band.fit(*data, progress=False).predict(pd.DataFrame(RAW[:7]) if kind == "frame" else RAW[:7])
    tolerance = 1e-2 if kind == "float32" else 1e-9  # the third feature is 0.02 ± 0.001
    for mine, theirs in zip(found, by_hand, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance)


def test_a_scaled_copy_is_not_made_of_what_users_gave():
    raw, before = RAW.copy(), RAW.copy()

    def in_place(x):
        x -= MEAN
        x /= STD
        return x

    for transform in ((MEAN, STD), in_place):
        band = PredictionIntervals(trained_mlp(), damping=1.0, input_transform=transform).fit(raw, Y, progress=False)
        first, again = band.predict(raw), band.predict(raw)
        np.testing.assert_array_equal(first.lower, again.lower)
        np.testing.assert_array_equal(raw, before)


def test_a_band_keeps_the_numbers_of_a_scaler_that_is_fitted_again():
    scaler = StandardScaler().fit(RAW)
    band = PredictionIntervals(trained_mlp(), damping=1.0, input_transform=scaler).fit(RAW, Y, progress=False)
    before = band.predict(RAW[:5]).lower
    scaler.fit(10 * RAW)
    np.testing.assert_array_equal(band.predict(RAW[:5]).lower, before)


def test_a_function_gets_what_the_user_gives():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = trained_mlp()

        def forward(self, a, b):
            return self.body(torch.cat([a, b], dim=1))

    given = []

    def scale(x):
        given.append(type(x))
        return {"a": (x["a"] - MEAN[:2]) / STD[:2], "b": (x["b"] - MEAN[2:]) / STD[2:]}

    raw = {"a": RAW[:, :2], "b": RAW[:, 2:]}
    scaled = {"a": Z[:, :2].numpy(), "b": Z[:, 2:].numpy()}
    model = Sum()
    band = PredictionIntervals(model, damping=1.0, input_transform=scale).fit(raw, Y, progress=False)
    plain = PredictionIntervals(model, damping=1.0).fit(scaled, Y, progress=False)
    np.testing.assert_allclose(band.predict(raw).lower, plain.predict(scaled).lower, rtol=1e-9)
    assert set(given) == {dict}
    with pytest.raises(TypeError, match=r"a pair or a scaler is for one tensor of inputs, got a: .*; give a function"):
        PredictionIntervals(model, damping=1.0, input_transform=(0.0, 1.0)).fit(raw, Y)

    def columns(frame):
        assert isinstance(frame, pd.DataFrame)
        return (frame[["x", "y", "z"]].to_numpy() - MEAN) / STD

    frame = pd.DataFrame(RAW[:, ::-1], columns=["z", "y", "x"])
    band = PredictionIntervals(trained_mlp(), damping=1.0, input_transform=columns).fit(frame, Y, progress=False)
    by_hand = PredictionIntervals(trained_mlp(), damping=1.0).fit(Z, Y, progress=False).predict(Z.numpy())
    np.testing.assert_allclose(band.predict(frame).upper, by_hand.upper, rtol=1e-9)


def test_images_and_sequences_are_scaled_per_channel_and_per_feature():
    torch.manual_seed(0)
    images = torch.rand(90, 2, 5, 5, dtype=torch.float64)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 1)).double()
    y = images.mean(dim=(1, 2, 3))
    trained(model, (images - 0.5) / 0.25, y)
    mean, std = np.array([0.4, 0.6]), np.array([0.2, 0.3])
    by_hand = PredictionIntervals(model, damping=30.0).fit((images - 0.5) / 0.25, y).predict((images - 0.5) / 0.25)
    one = PredictionIntervals(model, damping=30.0, input_transform=(0.5, 0.25)).fit(images, y).predict(images)
    torch.testing.assert_close(one.lower, by_hand.lower)
    for shape in ((2, 1, 1), (1, 2, 1, 1)):
        pair = mean.reshape(shape), std.reshape(shape)
        scaled = (images - torch.from_numpy(pair[0])) / torch.from_numpy(pair[1])
        by_hand = PredictionIntervals(model, damping=30.0).fit(scaled, y).predict(scaled)
        raw = PredictionIntervals(model, damping=30.0, input_transform=pair).fit(images, y).predict(images)
        torch.testing.assert_close(raw.lower, by_hand.lower)
    with pytest.raises(ValueError, match=r"numbers of shape \(2,\), and a row of the inputs has shape \(2, 5, 5\)"):
        PredictionIntervals(model, damping=30.0, input_transform=(mean, std)).fit(images, y)


def test_a_classifier_takes_raw_inputs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    labels = (Z[:, 0] > 0).long() + (Z[:, 1] > 1).long()
    trained(model, Z, 4 * nn.functional.one_hot(labels).double())
    for classes in (None, "predicted"):
        plain = ClassificationIntervals(model, damping=1.0, classes=classes).fit(Z, labels, progress=False)
        band = ClassificationIntervals(model, damping=1.0, classes=classes, input_transform=(MEAN, STD))
        band.fit(RAW, labels, progress=False)
        for asked in (lambda band, x: band.predict(x).probability.lower, lambda band, x: band.leverage(x)):
            np.testing.assert_allclose(asked(band, RAW), asked(plain, Z.numpy()), rtol=1e-7)
    with pytest.warns(DeltabandWarning, match="were training rows"):
        band.calibrate(RAW, labels)


def test_every_other_method_takes_raw_inputs_too():
    engine = RandomProjection(60, seed=0)
    n = 200
    Z, Y = regression(n)
    raw = Z.numpy() * STD + MEAN
    plain = PredictionIntervals(trained_mlp(), damping=1.0, engine=engine).fit(Z, Y, progress=False)
    band = PredictionIntervals(trained_mlp(), damping=1.0, engine=engine, input_transform=(MEAN, STD))
    assert band.plan(raw, Y).chosen.nbytes == plain.plan(Z, Y).chosen.nbytes
    band.partial_fit(raw[:120], Y[:120]).partial_fit(raw[120:], Y[120:])
    np.testing.assert_allclose(band.noise_std_, plain.noise_std_, rtol=1e-9)
    assert band.share_seen_in_training(raw[:10], Y[:10]) == 1
    assert band.share_seen_in_training(Z[:10], Y[:10]) == 0
    assert band.error_report(raw).width == pytest.approx(plain.error_report(Z).width, rel=1e-6)
    assert evaluate(band, raw[:50], Y[:50], 0.9, None).share_seen_in_training == 1


def test_the_report_finds_training_rows_whatever_units_the_fit_got_its_targets_in():
    original = Y.numpy() * Y_STD + Y_MEAN
    for targets, given in (("original", original), ("scaled", (original - Y_MEAN) / Y_STD)):
        band = PredictionIntervals(trained_mlp(), damping=1.0, target_transform=(Y_MEAN, Y_STD), targets=targets)
        evaluation = evaluate(band.fit(Z, given, progress=False), Z[:50], original[:50], 0.9, None)
        assert evaluation.share_seen_in_training == 1


def test_targets_in_original_units_are_scaled_as_by_hand():
    original = Y.numpy() * Y_STD + Y_MEAN
    scaler = StandardScaler().fit(original[:, None])
    for transform in ((Y_MEAN, Y_STD), scaler, PowerTransformer().fit(original[:, None])):
        scaled = (original - Y_MEAN) / Y_STD if isinstance(transform, tuple) else None
        scaled = transform.transform(original[:, None])[:, 0] if scaled is None else scaled
        by_hand = answers(PredictionIntervals(trained_mlp(), damping=1.0, target_transform=transform), Z, scaled, Z[:7])
        band = PredictionIntervals(trained_mlp(), damping=1.0, target_transform=transform, targets="original")
        for mine, theirs in zip(answers(band, Z, original, Z[:7]), by_hand, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert band.share_seen_in_training(Z[:9], original[:9]) == 1


@pytest.mark.parametrize("outputs", [None, [0, 2], [-1, 0], 1])
def test_original_targets_of_some_outputs_are_scaled_by_the_numbers_of_these(outputs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    scaled = torch.stack([Y, -Y, Y + 1], dim=1).numpy()
    trained(model, Z, torch.from_numpy(scaled))
    mean, std = np.array([1.0, 20.0, -300.0]), np.array([2.0, 3.0, 4.0])
    original, chosen = scaled * std + mean, slice(None) if outputs is None else outputs
    transform = mean[chosen], std[chosen]
    by_hand = PredictionIntervals(model, damping=1.0, outputs=outputs, target_transform=transform).fit(Z, scaled)
    band = PredictionIntervals(model, damping=1.0, outputs=outputs, target_transform=transform, targets="original")
    for given in (original, original[:, chosen]):
        found = band.fit(Z, given).predict(Z)
        for mine, theirs in zip(found, by_hand.predict(Z), strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"input_transform": 3.0}, "a pair .mean, std., a fitted scaler with transform, or a function of the inputs"),
        ({"input_transform": (1.0,)}, "a pair .mean, std."),
        ({"input_transform": (0.0, 0.0)}, "input_transform=.mean, std. needs finite numbers and std > 0"),
        ({"input_transform": ([0.0, np.nan], 1.0)}, "needs finite numbers"),
        ({"input_transform": StandardScaler()}, r"input_transform=StandardScaler\(\) is not fitted"),
        ({"targets": "raw"}, "targets must be 'scaled' or 'original', got 'raw'"),
        ({"targets": "original"}, "targets='original' needs to know what they went through .* target_transform="),
    ],
)
def test_what_is_no_transform_is_refused_at_once(arguments, problem):
    with pytest.raises((TypeError, ValueError), match=problem):
        PredictionIntervals(trained_mlp(), damping=1.0, **arguments)


@pytest.mark.parametrize(
    ("transform", "problem"),
    [
        ((MEAN[:2], STD[:2]), r"numbers of shape \(2,\), and a row of the inputs has shape \(3,\)"),
        (StandardScaler().fit(RAW[:, :2]), r"numbers of shape \(2,\)"),
        (StandardScaler().fit_transform, "for the first row alone, and .* for it among others: .* scaler fitted to"),
        (lambda x: (x - x.mean(axis=0)) / x.std(axis=0), "must not depend on other rows"),
        (lambda x: x[:5], "must return as many rows as it gets: 90, got 5"),
        (lambda x: x @ np.ones((2, 2)), "failed on ndarray of shape .90, 3.: "),
        (PowerTransformer(), "input_transform=PowerTransformer failed .* is not fitted"),
        (lambda x: [["a"]], "inputs must be a tensor or a NumPy array"),
        (lambda x: np.log(-np.abs(x)), "inputs hold NaN in row 0"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_transform_that_does_not_work_on_the_rows_is_refused(transform, problem):
    band = PredictionIntervals(trained_mlp(), damping=1.0, input_transform=transform)
    with pytest.raises((TypeError, ValueError), match=problem):
        band.fit(RAW, Y, progress=False)


def test_columns_in_another_order_than_the_scaler_knows_are_refused():
    frame = pd.DataFrame(RAW, columns=["a", "b", "c"])
    band = PredictionIntervals(trained_mlp(), damping=1.0, input_transform=StandardScaler().fit(frame))
    band.fit(frame, Y, progress=False).predict(RAW)  # without names nobody can tell
    with pytest.raises(
        ValueError, match=r"fitted to the columns \['a', 'b', 'c'\], and the inputs have \['b', 'a', 'c'\]"
    ):
        band.predict(frame[["b", "a", "c"]])


def test_bands_of_other_transforms_are_not_merged():
    one = PredictionIntervals(trained_mlp(), damping=1.0, input_transform=(MEAN, STD)).fit(
        RAW[:50], Y[:50], progress=False
    )
    two = PredictionIntervals(trained_mlp(), damping=1.0, input_transform=(MEAN + 1e-9, STD)).fit(RAW[50:], Y[50:])
    with pytest.raises(ValueError, match="different input_transform cannot be merged"):
        one.merge(two)


def test_a_scaler_that_only_goes_back_cannot_take_original_targets():
    class Back:
        def inverse_transform(self, z):
            return 2 * z

    assert (
        PredictionIntervals(trained_mlp(), damping=1.0, target_transform=Back()).fit(Z, Y, progress=False).n_rows_ == 90
    )
    with pytest.raises(TypeError, match="needs a target_transform with transform"):
        PredictionIntervals(trained_mlp(), damping=1.0, target_transform=Back(), targets="original")
    curved = FunctionTransformer(np.log, np.exp)
    with pytest.raises(ValueError, match=r"target_transform does not take all targets: .* in row \d+ becomes nan"):
        PredictionIntervals(trained_mlp(), damping=1.0, target_transform=curved, targets="original").fit(Z, Y)


@pytest.mark.parametrize(
    "scaler", [MinMaxScaler(clip=True), QuantileTransformer(n_quantiles=40)], ids=["clip", "ranks"]
)
def test_bounds_at_which_a_transform_clips_are_infinite_and_cover(scaler):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(2_000, 3))
    y = X[:, 0] + 2 * rng.standard_t(2, size=len(X))
    training, calibration, new = slice(0, 40), slice(40, 540), slice(540, None)
    z = scaler.fit_transform(y[training, None])[:, 0]
    model = trained(mlp(3), torch.from_numpy(X[training]), torch.from_numpy(z))
    band = PredictionIntervals(model, damping=1.0, target_transform=scaler, targets="original")
    band.fit(X[training], y[training], progress=False).calibrate(X[calibration], y[calibration], noise="none")
    found = band.predict(X[new], level=0.98)
    beyond = y[new] > y[training].max()
    assert beyond.any()
    assert np.isinf(found.upper[beyond]).any()
    assert np.mean(found.contains(y[new])) > 0.965  # 0.98 less three standard errors, of these rows and the calibration
    assert np.isfinite(band.predict(X[new], level=0.5).upper).mean() > 0.5


def test_original_units_are_in_float64_where_float32_would_round_widths_away():
    X, z = regression()
    model = trained_mlp().float()
    plain = PredictionIntervals(model, damping=1.0).fit(X.float(), z, progress=False).predict(X.float())
    dates = PredictionIntervals(model, damping=1.0, target_transform=(2_460_000.5, 0.02))
    found = dates.fit(X.float(), z, progress=False).predict(X.float())
    assert found.mean.dtype == torch.float64
    np.testing.assert_allclose(found.width, 0.02 * plain.width, rtol=1e-4)
    assert dates.variance(X.float()).dtype == torch.float32
