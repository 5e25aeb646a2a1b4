"""`error_report`: what an approximation costs, estimated without the exact fit."""

import warnings

import numpy as np
import pytest
import torch

from deltaband import (
    DeltabandWarning,
    Exact,
    FrequentDirections,
    ImportantDirections,
    Nystrom,
    PredictionIntervals,
    RandomProjection,
    RobustFrequentDirections,
)
from deltaband.data.inputs import Inputs
from deltaband.data.row_record import Sample
from deltaband.engines import Problem
from deltaband.fitting import accuracy
from tests.support.networks import mlp, regression

ENGINES = [Nystrom(12), RandomProjection(60), RobustFrequentDirections(5), ImportantDirections(20)]


def trained(X, y, hidden=30):
    model = mlp(X.shape[1], hidden)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-3)
    for _ in range(150):
        optimiser.zero_grad()
        ((model(X)[:, 0] - y) ** 2).mean().backward()
        optimiser.step()
    return model


@pytest.fixture(scope="module")
def setting():
    X, y = regression(700, 5)
    return trained(X[:600], y[:600]), X[:600], y[:600], X[600:]


def truth(model, X, y, new, engine):
    widths = [
        PredictionIntervals(model, weight_decay=1e-3, engine=e).fit(X, y).predict(new).width for e in (engine, Exact())
    ]
    return float((widths[0] / widths[1] - 1).abs().mean())


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
def test_the_estimate_is_near_the_error_of_the_whole_fit(setting, engine):
    model, X, y, new = setting
    band = PredictionIntervals(model, weight_decay=1e-3, engine=engine).fit(X, y)
    real = truth(model, X, y, new, engine)
    for report in (band.error_report(new), band.error_report(new, sample=300), band.error_report()):
        assert real / 3 - 0.003 < report.width < 3 * real + 0.003
        assert report.width <= report.largest


@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
def test_on_all_rows_the_estimate_is_the_error_itself(setting):
    model, X, y, new = setting
    engine = RobustFrequentDirections(5, tail="none")
    band = PredictionIntervals(model, weight_decay=1e-3, engine=engine).fit(X, y)
    in_order = Sample((Inputs.of(X),), (np.arange(len(X)),))  # which a sketch depends on
    object.__setattr__(band._fits[0], "sample", in_order)
    assert band.error_report(new).width == pytest.approx(truth(model, X, y, new, engine), rel=1e-6)


def test_an_exact_fit_has_nothing_to_estimate(setting):
    model, X, y, new = setting
    for engine in (Exact(), Nystrom(600), RandomProjection(10**6)):
        report = PredictionIntervals(model, weight_decay=1e-3, engine=engine).fit(X, y).error_report(new)
        assert (report.width, report.largest, report.n_rows) == (0.0, 0.0, 0)
        assert "exact" in str(report)


def test_a_fit_warns_where_widths_are_off_and_not_where_they_are_not(setting):
    model, X, y, _ = setting
    with pytest.warns(DeltabandWarning, match=r"not accurate enough here: widths are off by \d"):
        PredictionIntervals(model, damping=0.01, engine=ImportantDirections(4, compress=True)).fit(X, y)
    band = PredictionIntervals(model, weight_decay=1e-3, engine=Nystrom(100)).fit(X, y)
    assert band._fits[0].error.width < 0.05
    assert "error of widths" in band.summary()


@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
@pytest.mark.parametrize(
    "engine", [FrequentDirections(1), ImportantDirections(1, compress=True), Nystrom(1, tail="none")]
)
def test_an_engine_that_has_lost_nearly_everything_is_found_out(setting, engine):
    model, X, y, new = setting
    real = PredictionIntervals(model, damping=0.05).fit(X, y).predict(new).width
    band = PredictionIntervals(model, damping=0.05, engine=engine).fit(X, y)
    error = float((band.predict(new).width / real - 1).abs().mean())
    assert error > 0.05
    assert error / 2 < band.error_report(new).width < 2 * error
    assert band._fits[0].error.width > 0.05


def test_more_directions_make_a_smaller_error(setting):
    model, X, y, new = setting
    reports = []
    for landmarks in (10, 40, 120):
        band = PredictionIntervals(model, weight_decay=1e-3, engine=Nystrom(landmarks))
        reports.append(band.fit(X, y).error_report(new).width)
    assert reports[0] > reports[1] > reports[2]


@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
def test_an_engine_larger_than_the_sample_is_judged_by_a_smaller_one(setting):
    model, X, y, new = setting
    band = PredictionIntervals(model, weight_decay=1e-3, engine=Nystrom(150)).fit(X, y)
    report = band.error_report(new, sample=100)
    assert report.engine == "Nystrom(landmarks=50)"
    assert report.n_rows == 100
    assert report.width > band.error_report(new).width
    sketch = PredictionIntervals(model, weight_decay=1e-3, engine=RobustFrequentDirections("auto")).fit(X, y)
    assert "rank=25" in sketch.error_report(new, sample=100).engine or sketch.error_bound_ == 0


@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
def test_whole_inputs_of_any_kind_and_one_row(setting):
    model, X, y, new = setting
    band = PredictionIntervals(model, weight_decay=1e-3, engine=Nystrom(20)).fit(X, y)
    assert band.error_report(new.numpy()).width == band.error_report(new).width
    assert np.isfinite(band.error_report(new[:1]).width)


def test_what_cannot_be_estimated_says_why(setting):
    model, X, y, new = setting
    band = PredictionIntervals(model, engine=Nystrom(30)).fit(X, y)
    with pytest.raises(ValueError, match="λ is not known"):
        band.error_report(new)
    few = PredictionIntervals(model, damping=10.0, engine=Nystrom(30)).fit(X[:60], y[:60])
    with pytest.raises(ValueError, match="needs 64 training rows"):
        few.error_report(new)
    band = PredictionIntervals(model, weight_decay=1e-3, engine=Nystrom(100)).fit(X, y)
    for sample in (0, 63, 2.5, True, "all"):
        with pytest.raises(ValueError, match="sample must be a whole number"):
            band.error_report(new, sample=sample)
    with pytest.raises(ValueError, match="no rows"):
        band.error_report(new[:0])
    with pytest.raises(ValueError, match="NaN"):
        band.error_report(new * torch.nan)
    with pytest.raises(ValueError, match="not fitted"):
        PredictionIntervals(model, weight_decay=1e-3).error_report(new)


def test_changed_weights_are_refused(setting):
    _, X, y, new = setting
    model = mlp(5, 30)
    band = PredictionIntervals(model, damping=5.0, engine=Nystrom(100)).fit(X, y)
    with torch.no_grad():
        model[0].weight += 1.0
    with pytest.raises(ValueError, match="weights have changed"):
        band.error_report(new)


@pytest.mark.parametrize(
    ("factor_bytes", "input_bytes", "rows"), [(100, 100, 4096), (2**20, 100, 1016), (100, 2**16, 1024), (2**26, 8, 0)]
)
def test_a_sample_is_as_large_as_its_gradients_and_inputs_allow(factor_bytes, input_bytes, rows):
    found = accuracy.affordable_rows(Nystrom(10), Problem(10**6, 10**6, 4, factor_bytes, input_bytes), memory=1e12)
    assert found == pytest.approx(rows, rel=0.01)
    small = Problem(10**6, 10**6, 4, 100, 100)
    assert accuracy.affordable_rows(Nystrom(10), small, memory=16.4e6) == pytest.approx(1000, rel=0.05)
    assert accuracy.affordable_rows(Nystrom(600), small, memory=16.4e6) == 0  # 11.6 MB, and half as much once more


def test_a_projection_that_lambda_is_out_of_reach_of_is_found_out_however_small_the_sample(setting):
    model, X, y, new = setting
    with pytest.warns(DeltabandWarning, match=r"out of reach of RandomProjection\(dim=8\)"):
        band = PredictionIntervals(model, damping=0.01, engine=RandomProjection(8)).fit(X, y)
    exact = PredictionIntervals(model, damping=0.01, engine=Exact()).fit(X, y)
    assert band.effective_parameters_ < 0.5 * exact.effective_parameters_
    assert band.error_report(new).width == np.inf
    assert "unknown amount" in str(band.error_report(new))


@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
@pytest.mark.parametrize("sample", [64, 150, 300])
def test_a_small_sample_does_not_make_an_engine_look_better_than_it_is(setting, sample):
    model, X, y, new = setting
    engine = RobustFrequentDirections(8, tail="none")
    band = PredictionIntervals(model, weight_decay=1e-3, engine=engine).fit(X, y)
    assert band.error_report(new, sample=sample).width > 0.7 * truth(model, X, y, new, engine)


@pytest.mark.parametrize("engine", [RobustFrequentDirections(4), ImportantDirections(4), Nystrom(100), Nystrom(500)])
def test_directions_that_rounding_hides_are_not_called_exact(engine):
    torch.manual_seed(0)
    X = torch.randn(500, 3)
    X[:, 0] *= 1e7
    y = X[:, 0] * 1e-7 + X[:, 1] + 0.1 * torch.randn(500)
    model = torch.nn.Linear(3, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeltabandWarning)
        band = PredictionIntervals(model, damping=1.0, engine=engine).fit(X, y)
    q = PredictionIntervals(model, damping=1.0, engine=Exact()).fit(X, y).variance(X[:50])
    assert not torch.allclose(band.variance(X[:50]), q, rtol=0.5)
    assert band.error_bound_ > 1.0
    assert band.error_report().width > 0.002


class Pooled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(40, 8), torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.table(x)).sum(dim=1))


@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
def test_rows_of_every_shape_are_in_the_sample():
    torch.manual_seed(0)
    short, long = torch.randint(0, 20, (100, 1)), torch.randint(20, 40, (500, 12))
    batches = [(short[i : i + 50], torch.randn(50)) for i in range(0, 100, 50)]
    batches += [(long[i : i + 50], torch.randn(50)) for i in range(0, 500, 50)]
    band = PredictionIntervals(Pooled(), damping=1.0, engine=ImportantDirections(10)).fit(batches)
    assert {len(piece) for piece in band._fits[0].sample.pieces} == {100, 500}
    exact = PredictionIntervals(band.model, damping=1.0, engine=Exact()).fit(batches)
    real = float((band.predict(long).width / exact.predict(long).width - 1).abs().mean())
    assert real > 0.02
    assert real / 3 < band.error_report(long[:100]).width < 3 * real


def test_squares_that_are_too_large_for_numbers_are_refused(setting):
    model, X, y, _ = setting
    with pytest.raises(ValueError, match="scale the targets"):
        PredictionIntervals(model, damping=1.0).fit(X, 1e160 * y.double())
