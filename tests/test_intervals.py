import copy
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tests.reference as reference
from deltaband import (
    DeltabandWarning,
    Exact,
    FrequentDirections,
    ImportantDirections,
    Intervals,
    NotFittedError,
    PredictionIntervals,
    RobustFrequentDirections,
)
from tests.support.networks import in_threads, mlp, regression

ENGINES = [Exact(), ImportantDirections(30), RobustFrequentDirections(30), FrequentDirections(30)]


def fitted(model, data, **settings):
    return PredictionIntervals(model, **({"damping": 1.0} | settings)).fit(*data, progress=False)


@pytest.mark.parametrize("n", [80, 25])  # primal and dual: p = 41
@pytest.mark.parametrize("level", [0.5, 0.8, 0.95])
def test_predict_is_formula_2_of_the_paper(model, n, level):
    X, y = regression(n)
    new = regression(6, seed=9)[0]
    intervals = fitted(model, (X, y)).predict(new, level=level)
    outputs, J = reference.jacobian(model, X)
    predictions, gradients = reference.jacobian(model, new)
    for i in range(6):
        lower, upper = reference.interval(J, y.numpy() - outputs, 1.0, predictions[i], gradients[i], level)
        assert intervals.lower[i].item() == pytest.approx(lower, rel=1e-8)
        assert intervals.upper[i].item() == pytest.approx(upper, rel=1e-8)
        assert intervals.mean[i].item() == pytest.approx(predictions[i], rel=1e-12)


def test_the_numbers_after_fit_are_those_of_the_formulas(model, data):
    X, y = data
    band = fitted(model, data)
    outputs, J = reference.jacobian(model, X)
    p_star = reference.effective_parameters(J, 1.0)
    assert band.effective_parameters_ == pytest.approx(p_star, rel=1e-8)
    assert band.noise_std_ == pytest.approx(np.sqrt(np.sum((y.numpy() - outputs) ** 2) / (80 - p_star)), rel=1e-8)
    assert (band.damping_, band.n_rows_, band.n_parameters_) == (1.0, 80, 41)
    np.testing.assert_allclose(band.variance(X[:5]), [reference.variance(J, 1.0, g) for g in J[:5]], rtol=1e-8)
    np.testing.assert_allclose(band.leverage(X[:5]), [reference.leverage(J, 1.0, g) for g in J[:5]], rtol=1e-8)
    d = np.linalg.svd(J, compute_uv=False)
    np.testing.assert_allclose(band.spectrum().singular_values[:20], d[:20], rtol=1e-5)
    np.testing.assert_allclose(band.spectrum().covariance_eigenvalues[:20], (d**2 / (d**2 + 1) ** 2)[:20], rtol=1e-5)


def test_the_band_of_the_mean_leaves_the_noise_out(model, data):
    band = fitted(model, data)
    x = data[0][:5]
    observation, mean = band.predict(x), band.predict(x, kind="mean")
    q = band.variance(x)
    np.testing.assert_allclose(mean.width / observation.width, (q / (1 + q)).sqrt(), rtol=1e-10)


@pytest.mark.parametrize(
    ("settings", "damping"),
    [
        ({"weight_decay": 1e-2}, 0.4),
        ({"weight_decay": 1e-2, "loss": "mean"}, 0.4),
        ({"weight_decay": 1e-2, "loss": "half_mean"}, 0.8),
        ({"weight_decay": 1e-2, "loss": "sum", "batch_size": 16}, 0.025),
        ({"damping": 7.2}, 7.2),
    ],
)
def test_damping_follows_from_the_loss(model, data, settings, damping):
    band = PredictionIntervals(model, **settings).fit(*data, progress=False)
    assert band.damping_ == pytest.approx(damping)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "batch_size"), [("mean", None), ("half_mean", None), ("sum", 20)])
def test_training_with_weight_decay_ends_at_the_minimum_that_damping_stands_for(loss, batch_size):
    """The table of λ, checked by training: at the optimum Jᵀ(y − ŷ) = λw."""
    torch.manual_seed(0)
    X, y = regression(60)
    model = nn.Linear(3, 1, bias=False).double()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.995)
    for _ in range(2500):
        parts = torch.randperm(60).split(batch_size) if batch_size else [torch.arange(60)]
        for rows in parts:
            squares = (model(X[rows])[:, 0] - y[rows]).square()
            value = {"mean": squares.mean(), "half_mean": squares.mean() / 2, "sum": squares.sum()}[loss]
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
        schedule.step()
    damping = PredictionIntervals(model, weight_decay=0.3, loss=loss, batch_size=batch_size).fit(X, y).damping_
    w = model.weight.detach()[0]
    force = X.T @ (y - X @ w)
    np.testing.assert_allclose(force, damping * w, rtol=0.02)


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
def test_loaders_arrays_and_batches_give_the_same_band(model, data, engine):
    X, y = data
    sources = [
        (X, y),
        (X.numpy(), y.numpy()[:, None]),
        (DataLoader(TensorDataset(X, y), batch_size=7),),
        ([(X[:50], y[:50, None]), (X[50:], y[50:, None])],),
        (TensorDataset(X, y),),
        (((X[i : i + 9].numpy(), y[i : i + 9].numpy()) for i in range(0, 80, 9)),),
    ]
    widths = []
    for source in sources:
        band = PredictionIntervals(model, damping=1.0, engine=engine).fit(*source, progress=False)
        widths.append(band.predict(X).width)
        assert band.n_rows_ == 80
    for width in widths[1:]:
        np.testing.assert_allclose(width, widths[0], rtol=1e-9)


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
def test_every_engine_is_near_the_exact_band_at_a_generous_rank(model, data, engine):
    exact = fitted(model, data).predict(data[0]).width
    other = fitted(model, data, engine=engine).predict(data[0]).width
    np.testing.assert_allclose(other, exact, rtol=0.05)


def test_numpy_in_numpy_out_and_tensor_in_tensor_out(data):
    model = mlp(dtype=torch.float32)
    band = fitted(model, data)
    x = data[0][:4]
    for method in (band.variance, band.leverage, lambda x: band.predict(x).lower, lambda x: band.predict(x).mean):
        from_array, from_tensor = method(x.numpy()), method(x)
        assert isinstance(from_array, np.ndarray)
        assert from_array.dtype == np.float32
        assert isinstance(from_tensor, torch.Tensor)
        np.testing.assert_array_equal(from_array, from_tensor)


def test_a_list_of_levels_gives_a_column_each(model, data):
    band = fitted(model, data)
    many = band.predict(data[0][:7], level=[0.5, 0.9, 0.99])
    assert many.lower.shape == many.upper.shape == (7, 3)
    assert many.mean.shape == (7,)
    assert many.level == (0.5, 0.9, 0.99)
    for column, level in enumerate(many.level):
        one = band.predict(data[0][:7], level=level)
        assert torch.equal(many.lower[:, column], one.lower)
        assert torch.equal(many.upper[:, column], one.upper)
        assert one.level == level


def test_intervals_unpack_and_know_their_width_and_length(model, data):
    intervals = fitted(model, data).predict(data[0][:4])
    mean, lower, upper = intervals
    assert torch.equal(intervals.width, upper - lower)
    assert len(intervals) == len(mean) == 4
    assert isinstance(intervals, Intervals)


def test_no_rows_in_no_rows_out(model, data):
    band = fitted(model, data)
    assert band.predict(data[0][:0]).lower.shape == (0,)
    assert band.predict(data[0][:0].numpy(), level=[0.5, 0.9]).lower.shape == (0, 2)
    assert band.variance(data[0][:0]).shape == (0,)


def test_predictions_come_in_chunks_that_do_not_show(model, data, monkeypatch):
    band = fitted(model, data)
    whole = band.predict(data[0])
    monkeypatch.setattr("deltaband.network.network.CHUNK_ROWS_AT_MOST", 7)
    np.testing.assert_allclose(band.predict(data[0]).lower, whole.lower, rtol=1e-12)


def test_a_fit_leaves_the_model_in_train_mode_with_its_statistics_and_gradients(data):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double().train()
    model[1].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    band = fitted(model, data)
    band.predict(data[0])
    assert model.training
    assert model[1].weight.requires_grad is False
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(w.grad is None for w in model.parameters())
    assert torch.equal(band.predict(data[0]).mean, copy.deepcopy(model).eval()(data[0])[:, 0].detach())


def test_eight_threads_predict_what_one_does(data):
    model = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1)).double().train()
    band = fitted(model, data)
    inputs = [regression(20, seed=i)[0] for i in range(8)]
    expected = [band.predict(x) for x in inputs]
    wrong = []

    def work(i):
        for _ in range(40):
            now = band.predict(inputs[i])
            if not (torch.equal(now.mean, expected[i].mean) and torch.equal(now.lower, expected[i].lower)):
                wrong.append(i)

    in_threads(work)
    assert wrong == []


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
@pytest.mark.parametrize("engine", ENGINES, ids=repr)
def test_the_callers_context_does_not_matter(data, engine, context):
    model = mlp(dtype=torch.float32)
    X, y = data[0].float(), data[1].float()
    outside = fitted(model, (X, y), engine=engine)
    with context():
        inside = fitted(model, (X, y), engine=engine)
        assert torch.equal(inside.predict(X).lower, outside.predict(X).lower)
        assert torch.equal(inside.leverage(X), outside.leverage(X))
    assert torch.equal(inside.variance(X), outside.variance(X))


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
def test_a_model_that_has_changed_its_shape_or_precision_since_fit_is_noticed(data, engine):
    model = mlp(dtype=torch.float32)
    band = fitted(model, data, engine=engine)
    model.double()
    with pytest.warns(DeltabandWarning, match="weights have changed"):
        band.predict(data[0])
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="17 trainable parameters now and had 41 at fit"):
        band.predict(data[0])


def test_a_network_that_counts_its_calls_has_not_changed():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.layer(x)

    X, y = torch.randn(60, 3), torch.randn(60)
    model = Counting()
    band = PredictionIntervals(model, damping=1.0).fit(X, y)  # without a warning, all of it
    band.calibrate(X + 1e-3, y, tune=False).predict(X)
    assert model.calls == 0


def test_a_cache_that_a_call_of_the_model_fills_is_no_change():
    class Placed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.register_buffer("places", torch.zeros(0), persistent=False)

        def forward(self, x):
            if len(self.places) < x.shape[1]:
                self.places = torch.arange(x.shape[1]) / 10
            return self.layer(x + self.places)

    X, y = torch.randn(60, 3), torch.randn(60)
    model = Placed()
    band = PredictionIntervals(model, damping=1.0).fit(X, y)
    model(X)
    before = band.predict(X).mean  # a warning would be an error
    assert torch.equal(band.calibrate(X + 1e-3, y, tune=False).predict(X).mean, before)


def test_changed_weights_are_noticed_and_named(model, data):
    band = fitted(model, data)
    with torch.no_grad():
        model[0].bias += 0.1
    with pytest.warns(DeltabandWarning, match=r"weights have changed since fit \(first: '0\.bias'\)"):
        band.predict(data[0])


def test_a_failed_fit_changes_nothing(model, data):
    band = fitted(model, data)
    before = band.predict(data[0])
    bad = data[0].clone()
    bad[70, 1] = float("nan")
    with pytest.raises(ValueError, match="inputs hold NaN in row 70"):
        band.fit([(bad[:40], data[1][:40]), (bad[40:], data[1][40:])])
    assert torch.equal(band.predict(data[0]).lower, before.lower)
    assert band.n_rows_ == 80


def test_the_engine_a_user_passes_can_be_used_again(model, data):
    engine = ImportantDirections(20)
    first = fitted(model, data, engine=engine).predict(data[0]).width
    second = fitted(model, data, engine=engine).predict(data[0]).width
    assert torch.equal(first, second)


def test_summary_fits_a_screen_and_says_what_matters(model, data):
    text = fitted(model, data, damping=None, weight_decay=1e-2).summary()
    assert len(text.splitlines()) < 20
    for part in ("41 trainable parameters", "80 (n)", "exact, primal", "n·wd/2, weight decay 0.01", "noise std"):
        assert part in text
    assert "not fitted" in repr(PredictionIntervals(model))
    assert repr(fitted(model, data)) == fitted(model, data).summary()


def test_the_progress_bar_shows_only_when_asked_and_only_on_long_fits(model, data, monkeypatch):
    import tqdm.auto

    asked = []

    class Recorded(tqdm.auto.tqdm):
        def __init__(self, **options):
            asked.append((options["disable"], options["total"], options["delay"] > 0))
            super().__init__(**options)

    monkeypatch.setattr(tqdm.auto, "tqdm", Recorded)
    for terminal, progress in [(True, True), (True, False), (False, True)]:  # a pipe or a log file gets no bar
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        PredictionIntervals(model, damping=1.0).fit(*data, progress=progress)
    assert asked == [(False, 80, True), (True, 80, True), (True, 80, True)]
    Recorded.__module__ = "tqdm.notebook"  # a notebook shows it, though it is not a terminal
    PredictionIntervals(model, damping=1.0).fit(*data)
    assert asked[3] == (False, 80, True)


# --- no λ, λ while streaming


def test_without_damping_fit_works_and_predict_says_what_is_missing(model, data):
    band = PredictionIntervals(model).fit(*data)
    assert band.damping_ is None
    assert np.isnan(band.noise_std_)
    assert np.isnan(band.effective_parameters_)
    assert "not given" in band.summary()
    for ask in (band.predict, band.variance, band.leverage):
        with pytest.raises(ValueError, match=r"weight_decay= or damping=.*calibrate"):
            ask(data[0])
    with pytest.raises(ValueError, match="λ is not known"):
        band.spectrum()


def test_a_stream_without_a_length_needs_n_rows_only_where_damping_is_needed_while_streaming(model, data):
    def stream():
        return iter([data])

    expected = fitted(model, data, damping=None, weight_decay=1e-2).predict(data[0]).lower
    band = PredictionIntervals(model, weight_decay=1e-2).fit(stream())
    np.testing.assert_allclose(band.predict(data[0]).lower, expected, rtol=1e-9)
    band = PredictionIntervals(model, weight_decay=1e-2, engine=ImportantDirections(40))
    with pytest.raises(ValueError, match="n_rows="):
        band.fit(stream())
    assert band.fit(stream(), n_rows=80).damping_ == pytest.approx(0.4)
    with pytest.raises(ValueError, match="79 rows were announced but 80 came: give n_rows=80"):
        band.fit(stream(), n_rows=79)
    PredictionIntervals(model, damping=1.0, engine=ImportantDirections(40)).fit(stream())
    with pytest.raises(ValueError, match="needs λ from the first row on: give weight_decay or damping"):
        PredictionIntervals(model, engine=ImportantDirections(40)).fit(*data)


def test_a_loader_that_announces_the_wrong_length_is_caught(model, data):
    class Short:
        def __len__(self):
            return 60

        def __iter__(self):
            return iter(range(50))

    loader = DataLoader(TensorDataset(*data), batch_size=10, sampler=Short())
    for engine in (Exact(), ImportantDirections(40)):
        band = PredictionIntervals(model, weight_decay=1e-2, engine=engine)
        with pytest.raises(ValueError, match="60 rows were announced but 50 came"):
            band.fit(loader)
        assert band.fit(loader, n_rows=50).damping_ == pytest.approx(0.25)


# --- warnings


def test_many_effective_parameters_are_warned_about(model):
    X, y = regression(45)
    with pytest.warns(DeltabandWarning, match="the formula is unreliable here.*calibrate"):
        PredictionIntervals(model, damping=1e-4).fit(X, y)


def test_less_than_one_degree_of_freedom_is_told_apart(model):
    X, y = regression(20)
    with pytest.warns(DeltabandWarning, match="is below 1: its widths mean nothing"):
        band = PredictionIntervals(model, damping=1e-4).fit(X, y)
    assert 19 < band.effective_parameters_ < 20


def test_few_degrees_of_freedom_are_warned_about(model):
    X, y = regression(10)
    with pytest.warns(DeltabandWarning, match="the formula is unreliable here"):
        band = PredictionIntervals(model, damping=30.0).fit(X, y)
    assert band.effective_parameters_ < 5


def test_no_degrees_of_freedom_is_a_warning_at_fit_and_an_error_at_predict():
    model = nn.Linear(3, 1).double()
    X, y = regression(4)
    with pytest.warns(DeltabandWarning, match="n − p\\* = .* is not positive"):
        band = PredictionIntervals(model, damping=0.0).fit(X, y)
    assert np.isnan(band.noise_std_)
    assert torch.isfinite(band.variance(X)).all()
    with pytest.raises(ValueError, match=r"Raise the damping, or calibrate"):
        band.predict(X)


def test_a_rank_that_is_too_small_is_warned_about():
    X, y = regression(300)
    with pytest.warns(DeltabandWarning, match="not accurate enough"):
        band = PredictionIntervals(mlp(hidden=30), damping=0.5, engine=RobustFrequentDirections(1)).fit(X, y)
    assert band.error_bound_ > 0
    assert fitted(mlp(hidden=30), (X, y)).error_bound_ == 0


# --- bad input


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"damping": -1.0}, ValueError, "damping must be a finite number"),
        ({"damping": float("nan")}, ValueError, "damping must be a finite number"),
        ({"damping": float("inf")}, ValueError, "damping must be a finite number"),
        ({"damping": "much"}, TypeError, "damping must be a number"),
        ({"weight_decay": -1e-2}, ValueError, "weight_decay must be a finite number"),
        ({"weight_decay": 1e-2, "damping": 1.0}, ValueError, "not both"),
        ({"weight_decay": 1e-2, "loss": "mae"}, ValueError, "squared errors"),
        ({"weight_decay": 1e-2, "loss": "sum"}, ValueError, "loss='sum' needs batch_size="),
        ({"weight_decay": 1e-2, "batch_size": 5}, ValueError, "batch_size goes with"),
        ({"weight_decay": 1e-2, "loss": "sum", "batch_size": 0}, ValueError, "batch_size must be a positive"),
        ({"engine": "exakt"}, ValueError, "engine must be one of 'auto', 'exact'"),
        ({"engine": Exact}, TypeError, "engine must be 'auto', a name"),
        ({"engine": None}, TypeError, "engine must be 'auto', a name"),
        ({"engine": {}}, TypeError, "engine must be 'auto', a name"),
        ({"weight_decay": "0.001"}, TypeError, "weight_decay must be a number"),
        ({"weight_decay": 1e-2, "loss": ["mean"]}, ValueError, "squared errors"),
        (
            {"weight_decay": 1e-2, "loss": "sum", "batch_size": float("inf")},
            ValueError,
            "batch_size must be a positive",
        ),
    ],
)
def test_bad_settings_are_refused_at_once(model, settings, error, message):
    with pytest.raises(error, match=message):
        PredictionIntervals(model, **settings)


def test_bad_models_are_refused_at_once():
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        PredictionIntervals("model", damping=1.0)
    with pytest.raises(ValueError, match="no trainable parameters"):
        PredictionIntervals(nn.Linear(2, 1).requires_grad_(False), damping=1.0)


@pytest.mark.parametrize("level", [0.0, 1.0, -0.1, 95, float("nan"), [], [0.5, 1.5], True])
def test_a_level_outside_zero_and_one_is_refused(model, data, level):
    band = fitted(model, data)
    with pytest.raises(ValueError, match="level must be between 0 and 1"):
        band.predict(data[0], level=level)


def test_a_level_that_is_no_number_is_refused(model, data):
    with pytest.raises(TypeError, match="level must be a number"):
        fitted(model, data).predict(data[0], level="high")
    with pytest.raises(ValueError, match="kind must be"):
        fitted(model, data).predict(data[0], kind="median")


def test_everything_but_fit_wants_a_fit_first(model, data):
    band = PredictionIntervals(model, damping=1.0)
    for ask in (band.predict, band.variance, band.leverage):
        with pytest.raises(NotFittedError, match="call fit"):
            ask(data[0])
    for ask in (band.spectrum, band.summary):
        with pytest.raises(NotFittedError, match="call fit"):
            ask()
    assert not hasattr(band, "noise_std_")


@pytest.mark.parametrize("source", [lambda: (torch.zeros(0, 3), torch.zeros(0)), lambda: ([],), lambda: (iter([]),)])
def test_empty_data_are_refused(model, source):
    with pytest.raises(ValueError, match="empty"):
        PredictionIntervals(model, damping=1.0).fit(*source())


def test_bad_rows_at_predict_are_named(model, data):
    band = fitted(model, data)
    x = data[0].clone()
    x[3, 0] = float("inf")
    with pytest.raises(ValueError, match="inputs hold an infinite value in row 3"):
        band.predict(x)
    with pytest.raises(ValueError, match=r"could not be evaluated on a batch of shape \(2, 2\)"):
        band.predict(data[0][:, :2])
    with pytest.raises(TypeError, match="inputs must be a tensor or a NumPy array"):
        band.predict([[1.0, 2.0, 3.0]])


class Logarithm(nn.Module):
    """Finite for positive inputs only; its gradient is infinite where its output is zero."""

    def __init__(self, function):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.function = function

    def forward(self, x):
        return self.function(self.w * x[:, 0])


def test_bad_outputs_and_gradients_are_named():
    X = torch.tensor([[1.0], [4.0], [0.0]], dtype=torch.float64)
    y = torch.ones(3)
    with pytest.raises(ValueError, match="outputs hold an infinite value in row 2"):
        PredictionIntervals(Logarithm(torch.log), damping=1.0).fit(X, y)
    with pytest.raises(ValueError, match="gradients hold NaN in row 2"):
        PredictionIntervals(Logarithm(torch.sqrt), damping=1.0).fit(X, y)


def test_an_output_that_depends_on_no_parameter_is_refused(data):
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, x):
            return x[:, 0]

    with pytest.raises(ValueError, match="does not depend on any trainable parameter"):
        PredictionIntervals(Constant(), damping=1.0).fit(*data)


def test_integer_targets_are_converted(model, data):
    whole = (data[1] * 10).round()
    a = fitted(model, (data[0], whole.long())).predict(data[0]).lower
    b = fitted(model, (data[0], whole)).predict(data[0]).lower
    assert torch.equal(a, b)


def test_a_model_that_fails_in_the_middle_of_a_fit_comes_back_as_it_was(data):
    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1).double()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls > 2:
                raise RuntimeError("boom")
            return self.layer(x)

    model = Fragile().train()
    sizes = [torch.zeros(5, 3), torch.zeros(5, 3, 1)]
    with pytest.raises(ValueError, match="boom"):
        PredictionIntervals(model, damping=1.0).fit([(x, torch.zeros(5)) for x in sizes])
    assert model.training
    assert model.calls == 0


# --- imports


def test_importing_deltaband_loads_torch_and_numpy_and_nothing_else_heavy():
    import subprocess

    heavy = "scipy", "sklearn", "pandas", "matplotlib", "safetensors", "typer", "statsmodels"
    code = f"import sys, deltaband; print([name for name in {heavy!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(20, 60),
    log_damping=st.floats(-1, 3),
    levels=st.lists(st.floats(0.01, 0.999), min_size=2, max_size=4),
    seed=st.integers(0, 1000),
    engine=st.sampled_from([Exact(), ImportantDirections(10), RobustFrequentDirections(10)]),
)
@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
def test_bands_hold_the_mean_and_widen_with_the_level(n, log_damping, levels, seed, engine):
    X, y = regression(n, seed=seed)
    band = PredictionIntervals(mlp(seed=seed), damping=10.0**log_damping, engine=engine).fit(X, y, progress=False)
    levels = sorted(levels)
    x = regression(10, seed=seed + 1)[0] * 3
    for kind in ("observation", "mean"):
        mean, lower, upper = band.predict(x, level=levels, kind=kind)
        assert (lower <= mean[:, None]).all()
        assert (upper >= mean[:, None]).all()
        assert (torch.diff(upper - lower, dim=1) >= 0).all()
    assert (band.variance(x) >= 0).all()
    assert (band.leverage(x) >= band.variance(x) * (1 - 1e-6)).all()
