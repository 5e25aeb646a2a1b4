"""What a fitted band answers about rows: from loaders, with scores, and with words for what it cannot take."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from deltaband import ClassificationIntervals, DeltabandWarning, Exact, PredictionIntervals, metrics, report
from tests.support.classifiers import classifier, labelled
from tests.support.networks import mlp, regression

NEW, TARGETS = regression(45, seed=3)


@pytest.fixture(scope="module")
def band():
    return PredictionIntervals(mlp(), damping=1.0).fit(*regression(), progress=False)


def pairs(size=20):
    return [(NEW[i : i + size], TARGETS[i : i + size]) for i in range(0, len(NEW), size)]


LOADERS = {
    "DataLoader": lambda: DataLoader(TensorDataset(NEW, TARGETS), batch_size=20),
    "DataLoader of inputs": lambda: DataLoader(TensorDataset(NEW), batch_size=20),
    "Dataset": lambda: TensorDataset(NEW, TARGETS),
    "list of pairs": pairs,
    "generator of pairs": lambda: iter(pairs()),
    "generator of inputs": lambda: (x for x, _ in pairs()),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_gets_what_its_rows_get_at_once(band, kind):
    found, at_once = band.predict(LOADERS[kind](), level=[0.5, 0.9]), band.predict(NEW, level=[0.5, 0.9])
    assert isinstance(found.lower, torch.Tensor)
    assert found.level == (0.5, 0.9)
    for one, other in zip(found, at_once, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    for ask in (band.predict_mean, band.variance, band.leverage):
        torch.testing.assert_close(ask(LOADERS[kind]()), ask(NEW), rtol=1e-6, atol=1e-6)
    mean, scale = band.predict_mean_and_scale(LOADERS[kind]())
    torch.testing.assert_close(scale, band.predict_mean_and_scale(NEW)[1], rtol=1e-6, atol=1e-6)
    assert mean.shape == (45,)


def test_batches_are_of_the_kind_and_layout_that_the_user_has():
    X, y = regression()
    band = PredictionIntervals(mlp(), damping=1.0, batch=lambda b: (b["x"], b["y"], b["w"]))
    band.fit([{"x": X, "y": y, "w": torch.full((80,), 2.0)}], progress=False)
    batches = [{"x": x.numpy(), "y": None, "w": np.full(len(x), 2.0)} for x, _ in pairs()]
    found = band.predict(batches)
    assert isinstance(found.lower, np.ndarray)
    np.testing.assert_allclose(found.lower, band.predict(NEW.numpy(), sample_weight=np.full(45, 2.0)).lower, rtol=1e-6)
    np.testing.assert_allclose(band.variance(batches), band.variance(NEW.numpy()), rtol=1e-6)


def test_calibrated_loaders_say_which_rows_are_far():
    X, y = regression(160)
    band = PredictionIntervals(mlp(), damping=1.0).fit(X[:80], y[:80], progress=False).calibrate(X[80:], y[80:])
    rows = torch.cat([NEW, 100 + NEW])
    found = band.predict(iter(rows.split(30)))
    assert torch.equal(found.far, band.predict(rows).far)
    assert found.far[45:].all()


@pytest.mark.parametrize("classes", [None, "predicted"])
def test_classifiers_take_loaders(classes):
    band = ClassificationIntervals(classifier(3), damping=0.7, classes=classes).fit(*labelled(), progress=False)
    found, at_once = band.predict(iter(NEW.split(20))), band.predict(NEW)
    torch.testing.assert_close(found.probability.lower, at_once.probability.lower, rtol=1e-6, atol=1e-6)
    assert np.array_equal(np.asarray(found.classes), np.asarray(at_once.classes))
    assert band.leverage(iter(NEW.split(20))).shape == band.leverage(NEW).shape


def test_what_a_loader_cannot_be_is_said(band):
    with pytest.raises(TypeError, match=r"inputs, alone or in a pair.*tuple of 3.*batch= function"):
        band.predict([(NEW, TARGETS, TARGETS)])
    with pytest.raises(ValueError, match="no batch"):
        band.predict(iter([]))
    for name in ("sample_weight", "groups", "weights"):
        with pytest.raises(TypeError, match=rf"{name}= goes with arrays"):
            band.predict(pairs(), **{name: TARGETS})
        with pytest.raises(TypeError, match=rf"{name}= goes with arrays"):
            band.evaluate(pairs(), **{name: TARGETS})
    with pytest.warns(DeltabandWarning, match="shuffle=False"):
        band.predict(DataLoader(TensorDataset(NEW, TARGETS), batch_size=20, shuffle=True))
    with pytest.raises(TypeError, match="tensor or a NumPy array"):  # a table as nested lists is no loader
        band.predict(NEW.tolist())


@pytest.mark.parametrize("row", [NEW[0], NEW[0].numpy()], ids=["tensor", "array"])
def test_a_single_row_is_refused_with_what_to_write(band, row, tmp_path):
    band.save(tmp_path / "a.band")
    for each in (band, PredictionIntervals.load(tmp_path / "a.band", band.model)):
        for ask in (each.predict, each.predict_mean, each.variance):
            with pytest.raises(ValueError, match=r"shape \(3,\).*shape \(n, 3\).*x\[None\]"):
                ask(row)
    assert len(band.predict(row[None])) == 1
    with pytest.raises(ValueError, match=r"single number; for one row give X\[:1\]"):
        band.predict(row[0])


def test_an_engine_may_be_given_by_the_name_it_has_on_the_command_line(band):
    named = PredictionIntervals(mlp(), damping=1.0, engine="exact").fit(*regression(), progress=False)
    assert named.engine == Exact()
    assert torch.equal(named.predict(NEW).lower, band.predict(NEW).lower)
    assert ClassificationIntervals(classifier(3), damping=1.0, engine="random-projection").engine.dim > 0
    with pytest.raises(ValueError, match=r"'auto', 'exact',.*'nystrom'.*Nystrom\(landmarks=500\), got 'nystroem'"):
        PredictionIntervals(mlp(), engine="nystroem")


def test_evaluate_is_the_metrics_of_predict(band):
    scores = band.evaluate(NEW, TARGETS, levels=(0.5, 0.9))
    found = band.predict(NEW, (0.5, 0.9))
    np.testing.assert_allclose(scores.coverage, metrics.coverage(TARGETS, found))
    np.testing.assert_allclose(scores.interval_score, metrics.interval_score(TARGETS, found))
    np.testing.assert_allclose(scores.width_error_correlation, metrics.width_error_correlation(TARGETS, found))
    np.testing.assert_allclose(scores.mean_width, found.width.mean(dim=0))
    assert scores.rmse == pytest.approx(float((TARGETS - found.mean).square().mean().sqrt()))
    assert (scores.n_rows, scores.levels) == (45, (0.5, 0.9))
    by_loader = band.evaluate(DataLoader(TensorDataset(NEW, TARGETS), batch_size=7, shuffle=True), levels=(0.5, 0.9))
    np.testing.assert_allclose(by_loader.interval_score, scores.interval_score, rtol=1e-6)
    assert len(band.evaluate(NEW, TARGETS).levels) == 4


def test_evaluate_gives_predict_what_belongs_to_the_rows(band):
    weight = torch.linspace(0.5, 2.0, 45)
    scores = band.evaluate(NEW, TARGETS, 0.9, sample_weight=weight)
    expected = metrics.interval_score(TARGETS, band.predict(NEW, 0.9, sample_weight=weight))
    assert scores.interval_score == pytest.approx([expected])
    X, y = regression(200, seed=4)
    grouped = PredictionIntervals(mlp(), damping=1.0).fit(*regression(), progress=False)
    grouped.calibrate(X, y, groups=(X[:, 0] > 0).numpy().astype(int))
    labels = (NEW[:, 0] > 0).numpy().astype(int)
    expected = metrics.coverage(TARGETS, grouped.predict(NEW, 0.9, groups=labels))
    assert grouped.evaluate(NEW, TARGETS, 0.9, groups=labels).coverage == pytest.approx([expected])


def test_scores_are_shown_as_a_table_and_given_as_a_frame(band):
    scores = band.evaluate(NEW, TARGETS, levels=0.9)
    lines = repr(scores).splitlines()
    assert lines[0] == "Scores on 45 rows"
    assert lines[1].split("  ")[1:3] == ["level", "coverage"]
    assert lines[2].split()[:2] == ["90", "%"]
    assert "<table>" in scores._repr_html_()
    frame = scores.to_pandas()
    assert frame.loc[0, "interval_score"] == scores.interval_score[0]
    assert list(frame.columns)[:3] == ["output", "level", "coverage"]


def test_scores_of_outputs_that_are_covered_at_once_say_so():
    X, _ = regression(200)
    Y = torch.stack([X.sum(dim=1), X[:, 0]], dim=1) + 0.1 * torch.randn(200, 2, dtype=torch.float64)
    torch.manual_seed(0)
    band = PredictionIntervals(nn.Linear(3, 2).double(), damping=1.0).fit(X[:80], Y[:80], progress=False)
    assert band.evaluate(X[:80], Y[:80]).joint_coverage is None
    band.calibrate(X[80:140], Y[80:140], joint=True)
    scores = band.evaluate(X[140:], Y[140:], 0.9, outputs=["load", "torque"])
    found = band.predict(X[140:], 0.9).contains(Y[140:])
    assert scores.joint_coverage == pytest.approx([float(found.all(dim=1).double().mean())])
    assert scores.coverage.shape == (2, 1)
    assert [row["output"] for row in scores.rows()] == ["load", "torque", "all at once"]
    assert repr(scores).splitlines()[-1].split()[:5] == ["all", "at", "once", "90", "%"]


def test_evaluate_says_what_is_missing(band):
    with pytest.raises(TypeError, match="targets are missing"):
        band.evaluate(NEW)
    with pytest.raises(ValueError, match="same number of rows: 44 targets, 45 intervals"):
        band.evaluate(NEW, TARGETS[:-1])
    with pytest.raises(ValueError, match="no rows to evaluate"):
        band.evaluate(iter([]))
    with pytest.raises(ValueError, match="1 outputs, but 2 names"):
        band.evaluate(NEW, TARGETS, outputs=["a", "b"])


def test_evaluate_and_reports_take_raw_rows_and_targets_in_the_units_of_predict(tmp_path):
    X, y = regression(160)
    options = {"input_transform": (5.0, 2.0), "target_transform": (10.0, 3.0), "targets": "original"}
    raw, original = 2 * X + 5, 3 * y + 10
    band = PredictionIntervals(mlp(), damping=1.0, **options).fit(raw[:80], original[:80], progress=False)
    plain = PredictionIntervals(mlp(), damping=1.0).fit(X[:80], y[:80], progress=False)
    loader = DataLoader(TensorDataset(raw[80:], original[80:]), batch_size=30)
    for scores in (band.evaluate(raw[80:], original[80:]), band.evaluate(loader)):
        np.testing.assert_allclose(scores.interval_score, 3 * plain.evaluate(X[80:], y[80:]).interval_score, rtol=1e-6)
    names = ["a", "b", "c"]
    page = report.page(band, loader, names=names)
    assert page == report.page(band, raw[80:], original[80:], names=names)
