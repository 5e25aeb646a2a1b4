"""A band as one program: it answers as `predict` does, for any number of rows, without deltaband."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from deltaband import (
    Exact,
    ExportError,
    ImportantDirections,
    Nystrom,
    PredictionIntervals,
    RandomProjection,
)
from deltaband.engines import Engine

LEVELS = [0.8, 0.9]


def perceptron(n_inputs: int = 3, m: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(n_inputs, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, m))


def rows(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 3, generator=generator)
    return X, X[:, :1].sin() + (0.1 + 0.2 * X[:, 1:2].abs()) * torch.randn(n, 1, generator=generator)


def check(band: PredictionIntervals, path: Path, *inputs: Tensor, level: float | list[float] = 0.95) -> None:
    """Compare a program with `predict`, on these rows together and on the first of them alone."""
    program = torch.export.load(path).module()
    for n in (1, len(inputs[0])):
        x = tuple(each[:n] for each in inputs)
        expected, got = band.predict(x[0] if len(x) == 1 else x, level), program(*x)
        width = expected.upper - expected.lower
        for mine, theirs in zip(got, expected, strict=True):
            assert mine.shape == theirs.shape
            assert mine.dtype == theirs.dtype
        for mine, theirs in zip(got[1:], (expected.lower, expected.upper), strict=True):
            assert torch.isfinite(theirs).all()
            assert float(((mine - theirs).abs() / width).max()) < 1e-5
        torch.testing.assert_close(got[0], expected.mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("engine", "n"),
    [
        (Exact(), 200),
        (Exact(), 60),
        (ImportantDirections(20), 200),
        (Nystrom(30), 200),
        (RandomProjection(80), 60),
        (RandomProjection(7), 60),  # fewer than the layers are wide
    ],
    ids=str,
)
def test_the_program_of_every_engine_answers_as_predict(engine: Engine, n: int, tmp_path: Path) -> None:
    X, y = rows(n)
    band = PredictionIntervals(perceptron(), damping=1.0, engine=engine).fit(X, y, progress=False)
    band.export(tmp_path / "band.pt2", levels=LEVELS)
    check(band, tmp_path / "band.pt2", 2 * rows(40, seed=1)[0], level=LEVELS)


@pytest.mark.parametrize("engine", [RandomProjection(40)], ids=str)
def test_a_calibration_with_learnt_noise_and_its_guard_are_in_the_program(engine: Engine, tmp_path: Path) -> None:
    X, y = rows(200)
    band = PredictionIntervals(perceptron(), engine=engine).fit(X, y, progress=False)
    band.calibrate(*rows(80, seed=2))
    assert not isinstance(band.calibration_.noise, str)
    x = 2 * rows(60, seed=1)[0]
    assert 0 < int(band.predict(x).far.sum()) < len(x)
    band.export(tmp_path / "band.pt2", levels=LEVELS)
    check(band, tmp_path / "band.pt2", x, level=LEVELS)


@pytest.mark.parametrize("calibrated", [False, True])
def test_an_exact_band_is_written_by_compression_within_the_tolerance(calibrated: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 200), nn.Tanh(), nn.Linear(200, 1))
    new = rows(80, seed=9)[0]
    band = PredictionIntervals(model, damping=30.0, engine=Exact()).fit(*rows(300), progress=False)
    if calibrated:
        band.calibrate(*rows(150, seed=1))
    band.export(tmp_path / "small.pt2", tolerance=0.02, x=new)
    band.export(tmp_path / "whole.pt2", x=new)
    program, exact = torch.export.load(tmp_path / "small.pt2").module(), band.predict(new)
    mean, lower, upper = program(new)
    torch.testing.assert_close(mean, exact.mean, rtol=1e-5, atol=1e-6)
    off = ((upper - lower) / exact.width - 1).abs()
    assert 1e-7 < float(off.max()) < (0.02 if not calibrated else 0.03)  # calibrated: of σ, and the rows' choice of it
    with pytest.raises(ValueError, match="would take too many dimensions"):
        band.export(tmp_path / "no.pt2", tolerance=1e-9)
    other = PredictionIntervals(model, damping=30.0, engine=Nystrom(30)).fit(*rows(60), progress=False)
    with pytest.raises(ValueError, match="compress is for exact fits"):
        other.export(tmp_path / "no.pt2", tolerance=0.1)
    assert not (tmp_path / "no.pt2").exists()


def test_several_outputs_in_original_units_calibrated_together(tmp_path: Path) -> None:
    X, y = rows(150)
    transforms = {"input_transform": ([1.0, 0.0, -1.0], [2.0, 1.0, 0.5]), "target_transform": ([3.0, -2.0], [5.0, 0.1])}
    band = PredictionIntervals(perceptron(m=2), damping=1.0, per_output=True, **transforms)
    band.fit(X, torch.cat([y, y.square()], dim=1), progress=False)
    Xc, yc = rows(60, seed=2)
    band.calibrate(Xc, torch.cat([yc, yc.square()], dim=1), joint=True)
    band.export(tmp_path / "band.pt2", levels=0.9)
    check(band, tmp_path / "band.pt2", rows(20, seed=1)[0], level=0.9)


class OwnVariance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(m=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x)
        return y[:, :1], nn.functional.softplus(y[:, 1:]) + 0.1


def test_a_network_that_returns_its_own_variance(tmp_path: Path) -> None:
    band = PredictionIntervals(OwnVariance(), damping=1.0, variance="variance").fit(*rows(150), progress=False)
    band.export(tmp_path / "band.pt2", levels=LEVELS)
    check(band, tmp_path / "band.pt2", rows(20, seed=1)[0], level=LEVELS)


def test_a_network_that_returns_quantiles_at_its_own_level_and_at_another(tmp_path: Path) -> None:
    model = perceptron(m=3)
    with torch.no_grad():
        model[-1].bias.copy_(torch.tensor([-2.0, 0.0, 2.0]))
    band = PredictionIntervals(model, quantiles=(0.05, 0.5, 0.95)).fit(*rows(150), progress=False)
    band.calibrate(*rows(60, seed=2))
    band.export(tmp_path / "band.pt2", levels=LEVELS)
    check(band, tmp_path / "band.pt2", rows(20, seed=1)[0], level=LEVELS)


def test_robust_covariances(tmp_path: Path) -> None:
    band = PredictionIntervals(perceptron(), damping=1.0, robust="HC1").fit(*rows(150), progress=False)
    band.export(tmp_path / "band.pt2", levels=LEVELS)
    check(band, tmp_path / "band.pt2", rows(20, seed=1)[0], level=LEVELS)


# --- networks


class Words(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.table, self.recurrent, self.head = nn.Embedding(7, 4), kind(4, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(self.table(x))[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.first(x)).mean(dim=1))


class Twofold(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(4, 3), nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 1))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return self.head(torch.cat([x, self.table(kind)], dim=1))


def network(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    if name == "convolutions":
        layers = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(27, 1)
        return nn.Sequential(*layers), (torch.randn(50, 1, 5, 5),)
    if name == "attention":
        return Attention(), (torch.randn(50, 5, 2),)
    if name == "two inputs":
        return Twofold(), (torch.randn(50, 2), torch.randint(0, 4, (50,)))
    kind = {"lstm": nn.LSTM, "gru": nn.GRU}[name]
    return Words(kind), (torch.randint(0, 7, (50, 4)),)


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("convolutions", RandomProjection(30)),
        ("attention", RandomProjection(30)),
        ("two inputs", RandomProjection(30)),
        ("lstm", Nystrom(20)),
    ],
    ids=str,
)
def test_networks_of_known_layers_can_be_written(name: str, engine: Engine, tmp_path: Path) -> None:
    model, x = network(name)
    band = PredictionIntervals(model, damping=500.0, engine=engine)
    given = x[0] if len(x) == 1 else x
    band.fit(given, torch.randn(50, generator=torch.Generator().manual_seed(0)), progress=False)
    band.export(tmp_path / "band.pt2")
    check(band, tmp_path / "band.pt2", *(each[:20] for each in x))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if float(x.abs().max()) < 100 else self.body(x / 2)


def test_a_network_that_looks_at_values_is_refused_with_what_to_change(tmp_path: Path) -> None:
    band = PredictionIntervals(Branching(), damping=1.0).fit(*rows(50), progress=False)
    with pytest.raises(ExportError, match=r"(?s)could not be written as a graph.*must not depend on the values"):
        band.export(tmp_path / "band.pt2")
    assert not list(tmp_path.iterdir())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.factor = perceptron(), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x * self.factor)


def test_parameters_that_no_layer_has(tmp_path: Path) -> None:
    band = PredictionIntervals(Scaled(), damping=5.0).fit(*rows(150), progress=False)
    band.export(tmp_path / "band.pt2")
    check(band, tmp_path / "band.pt2", rows(20, seed=1)[0])


# --- refusals


@pytest.fixture(scope="module")
def fitted() -> PredictionIntervals:
    return PredictionIntervals(perceptron(), damping=1.0).fit(*rows(50), progress=False)


def test_a_program_runs_in_a_process_without_deltaband(fitted: PredictionIntervals, tmp_path: Path) -> None:
    fitted.export(tmp_path / "band.pt2", levels=LEVELS)
    x = rows(5, seed=1)[0]
    torch.save(x, tmp_path / "x.pt")
    code = """
import sys
sys.modules["deltaband"] = None  # an import would fail
import torch
mean, lower, upper = torch.export.load("band.pt2").module()(torch.load("x.pt"))
torch.save(upper, "upper.pt")
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, check=True, timeout=300)
    torch.testing.assert_close(torch.load(tmp_path / "upper.pt"), fitted.predict(x, LEVELS).upper, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"input_transform": torch.tanh}, "input_transform=tanh is a function"),
        ({"target_transform": "log"}, "is not affine"),
    ],
)
def test_transforms_that_are_not_affine_are_refused(options: dict, match: str, tmp_path: Path) -> None:
    if options.get("target_transform") == "log":
        from sklearn.preprocessing import FunctionTransformer

        options = {"target_transform": FunctionTransformer(lambda v: v, lambda v: v)}
    X, y = rows(50)
    band = PredictionIntervals(perceptron(), damping=1.0, **options).fit(X, y, progress=False)
    with pytest.raises(ExportError, match=match):
        band.export(tmp_path / "band.pt2")


def test_calibrations_that_need_more_than_inputs_are_refused(tmp_path: Path) -> None:
    X, y = rows(60, seed=2)
    band = PredictionIntervals(perceptron(), damping=1.0).fit(*rows(100), progress=False)
    band.calibrate(X, y, groups=(X[:, 0] > 0).numpy())
    with pytest.raises(ExportError, match="a program takes inputs alone"):
        band.export(tmp_path / "band.pt2", levels=0.8)
    band.calibrate(X, y, noise=lambda x: 1 + x[:, 0].abs())
    with pytest.raises(ExportError, match="noise= is a function"):
        band.export(tmp_path / "band.pt2", levels=0.8)
    band.calibrate(X, y)
    with pytest.raises(ValueError, match=r"too few for level 0\.999"):
        band.export(tmp_path / "band.pt2", levels=0.999)


def test_wrong_arguments_are_refused(fitted: PredictionIntervals, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends with .pt2 or .onnx"):
        fitted.export(tmp_path / "band")
    with pytest.raises(ValueError, match="format must be"):
        fitted.export(tmp_path / "band", format="torchscript")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="level"):
        fitted.export(tmp_path / "band.pt2", levels=1.5)
    with pytest.raises(FileNotFoundError):
        fitted.export(tmp_path / "nowhere" / "band.pt2")
    with pytest.raises(ValueError, match="at least one row"):
        fitted.export(tmp_path / "band.pt2", x=torch.zeros(0, 3))
    assert not list(tmp_path.iterdir())


def test_changed_weights_are_refused(tmp_path: Path) -> None:
    model = perceptron()
    band = PredictionIntervals(model, damping=1.0).fit(*rows(50), progress=False)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with pytest.raises(ValueError, match="weights have changed"):
        band.export(tmp_path / "band.pt2")
