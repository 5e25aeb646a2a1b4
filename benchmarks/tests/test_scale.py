import pytest
import torch

from benchmarks import scale
from benchmarks.networks import ResNet18, SmallGPT


@pytest.mark.parametrize(
    ("network", "n_parameters", "x"),
    [(ResNet18, 11_177_025, torch.randn(2, 3, 64, 64)), (SmallGPT, 1_219_201, torch.randint(100, (2, 128)))],
)
def test_large_networks_have_the_size_that_they_say_and_one_output_per_row(network, n_parameters, x):
    model = network().eval()
    assert sum(w.numel() for w in model.parameters()) == n_parameters
    with torch.no_grad():
        assert model(x).shape == (2,)
        torch.testing.assert_close(model(x[1:]), model(x)[1:], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
def test_a_fit_is_counted_in_epochs_and_a_prediction_in_passes(monkeypatch):
    monkeypatch.setitem(scale.LARGE, "million", scale.Large(scale.Case(300, (10, 20, 20)).build, 12))
    monkeypatch.setattr(scale, "EPOCH_ROWS", 100)
    monkeypatch.setattr(scale, "DIM", 64)
    monkeypatch.setattr(scale, "child", lambda code: eval(code, vars(scale)))
    (name, fit), (_, predict) = scale.projection("million")
    assert name == "projection_million"
    assert fit.details["n"] == 300
    assert fit.details["p"] == 10 * 20 + 20 + 20 * 20 + 20 + 20 + 1
    assert fit.measured == fit.details["fit s"] / fit.details["epoch s"] > 0
    assert predict.measured > 0
