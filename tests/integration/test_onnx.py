"""A band as an ONNX file, run by onnxruntime."""

from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from deltaband import PredictionIntervals, RandomProjection

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of the exporter


def rows(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 3, generator=generator)
    return X, X[:, :1].sin() + (0.1 + 0.2 * X[:, 1:2].abs()) * torch.randn(n, 1, generator=generator)


def test_onnxruntime_answers_as_predict_with_learnt_noise_for_any_number_of_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    band = PredictionIntervals(model, engine=RandomProjection(40)).fit(*rows(200, 0), progress=False)
    band.calibrate(*rows(80, 2))
    assert not isinstance(band.calibration_.noise, str)
    band.export(tmp_path / "band.onnx", levels=[0.8, 0.9])
    session = onnxruntime.InferenceSession(str(tmp_path / "band.onnx"))
    assert [each.name for each in session.get_inputs()] == ["x"]
    assert [each.name for each in session.get_outputs()] == ["mean", "lower", "upper"]
    for n in (1, 30):
        x = 2 * rows(n, 1)[0]
        expected = band.predict(x, [0.8, 0.9])
        mean, lower, upper = map(torch.from_numpy, session.run(None, {"x": x.numpy()}))
        width = expected.upper - expected.lower
        torch.testing.assert_close(mean, expected.mean, rtol=1e-5, atol=1e-6)
        assert float(((lower - expected.lower).abs() / width).max()) < 1e-5
        assert float(((upper - expected.upper).abs() / width).max()) < 1e-5
