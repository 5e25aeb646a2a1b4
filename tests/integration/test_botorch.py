"""A band as a BoTorch model, with the real package."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from deltaband import (
    Exact,
    ImportantDirections,
    Nystrom,
    PredictionIntervals,
    RandomProjection,
    RobustFrequentDirections,
)
from tests.support.networks import regression, trained, trained_mlp

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, in GPyTorch
    from botorch.acquisition import LogExpectedImprovement, UpperConfidenceBound, qLogExpectedImprovement
    from botorch.acquisition.objective import ScalarizedPosteriorTransform
    from botorch.generation import MaxPosteriorSampling
    from botorch.optim import optimize_acqf
    from botorch.posteriors import GPyTorchPosterior

    from deltaband.botorch import DeltaModel

pytestmark = [
    pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
X, Y = regression(80)
NEW = regression(5, seed=5)[0]
BOUNDS = torch.tensor([[-2.0] * 3, [2.0] * 3], dtype=torch.float64)


def made(model=None, **options):
    return PredictionIntervals(model or trained_mlp(), damping=0.5, **options).fit(X, Y, progress=False)


def two_outputs(**options):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    Y2 = torch.stack([Y, X[:, 0] - Y / 2], dim=1)
    return PredictionIntervals(trained(model, X, Y2), damping=0.5, **options).fit(X, Y2, progress=False)


@pytest.mark.parametrize(
    "engine", [Exact(), Nystrom(12), RandomProjection(25), RobustFrequentDirections(8), ImportantDirections(8)]
)
@pytest.mark.parametrize("by", ["variance", "leverage"])
def test_the_posterior_is_that_of_the_band(engine, by):
    band = made(engine=engine, target_transform=(5.0, 3.0))
    posterior = DeltaModel(band, by=by).posterior(NEW)
    assert isinstance(posterior, GPyTorchPosterior)
    np.testing.assert_allclose(posterior.mean.detach()[:, 0], band.predict_mean(NEW), rtol=1e-9)
    C = band.covariance(NEW, by=by).numpy()
    np.testing.assert_allclose(
        posterior.distribution.covariance_matrix.detach(), C, rtol=1e-6, atol=1e-9 * np.abs(C).max()
    )


def test_batches_are_posteriors_of_their_own():
    band = made()
    model, x = DeltaModel(band), regression(24, seed=6)[0].reshape(2, 4, 3, 3)
    posterior = model.posterior(x)
    assert posterior.mean.shape == (2, 4, 3, 1)
    assert model.batch_shape == torch.Size([])
    expected = band.covariance(x[1, 2], by="leverage")
    np.testing.assert_allclose(posterior.distribution.covariance_matrix.detach()[1, 2], expected, rtol=1e-6)


def test_the_noise_of_observations_is_added():
    band = made(target_transform=(5.0, 3.0))
    model = DeltaModel(band)
    plain, noisy = (model.posterior(NEW, observation_noise=noise).variance.detach() for noise in (False, True))
    np.testing.assert_allclose(noisy - plain, band.noise_std_**2, rtol=1e-6)


@pytest.mark.parametrize("per_output", [False, True])
def test_outputs_have_the_covariance_of_the_band(per_output):
    band = two_outputs(per_output=per_output)
    model = DeltaModel(band)
    posterior = model.posterior(NEW)
    assert model.num_outputs == 2
    assert posterior.mean.shape == (5, 2)
    expected = band.covariance(NEW, by="leverage").reshape(10, 10)
    matrix = posterior.distribution.covariance_matrix.detach()
    np.testing.assert_allclose(matrix, expected, rtol=1e-6, atol=1e-9 * float(expected.abs().max()))
    second = model.posterior(NEW, output_indices=[1])
    np.testing.assert_allclose(second.variance.detach()[:, 0], posterior.variance.detach()[:, 1], rtol=1e-9)
    transform = ScalarizedPosteriorTransform(torch.tensor([1.0, -1.0], dtype=torch.float64))
    difference = model.posterior(NEW, posterior_transform=transform)
    weights = np.zeros((5, 5, 2))
    weights[np.arange(5), np.arange(5)] = [1, -1]
    W = weights.reshape(5, 10)
    np.testing.assert_allclose(difference.variance.detach()[:, 0], np.diag(W @ expected.numpy() @ W.T), rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"input_transform": (np.ones(3), np.full(3, 2.0))}])
def test_mean_and_covariance_have_the_gradient_with_respect_to_x(options):
    model = DeltaModel(made(**options))

    def answers(x):
        posterior = model.posterior(x)
        return posterior.mean, posterior.distribution.covariance_matrix

    assert torch.autograd.gradcheck(answers, (NEW[:3].clone().requires_grad_(),))


def test_a_network_in_float32_takes_points_in_float64():
    band = PredictionIntervals(trained_mlp(dtype=torch.float32), damping=0.5)
    band.fit(X.float(), Y.float(), progress=False)
    x = NEW.clone().requires_grad_()
    posterior = DeltaModel(band).posterior(x[:, None])
    posterior.variance.sum().backward()
    assert posterior.mean.dtype == torch.float64
    assert torch.isfinite(x.grad).all()
    assert x.grad.any()
    np.testing.assert_allclose(posterior.mean.detach()[:, 0, 0], band.predict_mean(NEW), rtol=1e-5)


@pytest.mark.parametrize("batch", [1, 3])
def test_acquisition_functions_are_optimised(batch):
    model = DeltaModel(made())
    torch.manual_seed(0)
    acquisition = LogExpectedImprovement(model, Y.max()) if batch == 1 else qLogExpectedImprovement(model, Y.max())
    x, value = optimize_acqf(acquisition, BOUNDS, q=batch, num_restarts=2, raw_samples=32)
    assert x.shape == (batch, 3)
    random = BOUNDS[0] + 4 * torch.rand(500, batch, 3, dtype=torch.float64)
    assert value >= acquisition(random).max() - 1e-6


def test_the_confidence_bound_is_that_of_the_band():
    band = made()
    found = UpperConfidenceBound(DeltaModel(band), beta=4.0)(NEW[:, None]).detach()
    expected = band.predict_mean(NEW) + 2 * band.covariance(NEW, by="leverage").diagonal().sqrt()
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_thompson_sampling_draws_from_the_points():
    torch.manual_seed(0)
    points = regression(40, seed=8)[0]
    chosen = MaxPosteriorSampling(DeltaModel(made()), replacement=True)(points, num_samples=20)
    assert chosen.shape == (20, 3)
    assert all((points == each).all(dim=1).any() for each in chosen)


def test_calibrated_bands_have_the_calibrated_scale():
    band = made().calibrate(*regression(100, seed=9), noise="none")
    variance = DeltaModel(band).posterior(NEW[:, None]).variance.detach()[:, 0, 0]
    np.testing.assert_allclose(variance, band.covariance(NEW, by="leverage").diagonal(), rtol=1e-6)


def test_s_may_be_given():
    band = made(target_transform=(5.0, 3.0))
    variance = DeltaModel(band, noise_std=0.25).posterior(NEW).variance.detach()[:, 0]
    np.testing.assert_allclose(variance, 0.0625 * band.leverage(NEW), rtol=1e-6)


def test_the_model_is_a_snapshot_and_the_network_stays_as_it_is():
    network = trained_mlp()
    band = made(network)
    model = DeltaModel(band)
    before, weights = model.posterior(NEW).mean.detach(), [w.detach().clone() for w in network.parameters()]
    assert all(torch.equal(*pair) for pair in zip(weights, network.parameters(), strict=True))
    with torch.no_grad():
        next(network.parameters()).add_(1)
    np.testing.assert_array_equal(model.posterior(NEW).mean.detach(), before)


def test_what_it_cannot_take_is_refused(monkeypatch):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = trained_mlp()

        def forward(self, x):
            return torch.cat([self.mean(x), 0.1 + x[:, :1] ** 2], dim=1)

    with pytest.raises(ValueError, match="predicts the variance of its noise"):
        DeltaModel(made(Two(), variance="variance"))
    with pytest.raises(ValueError, match="input_transform is a function"):
        DeltaModel(made(input_transform=lambda x: x * 1.0))
    with pytest.raises(ValueError, match="by must be"):
        DeltaModel(made(), by="mean")
    with pytest.raises(ValueError, match="noise_std must be a finite number > 0"):
        DeltaModel(made(), noise_std=-1.0)
    with pytest.raises(ValueError, match="noise_std= is for the formula"):
        DeltaModel(made().calibrate(*regression(100, seed=9), noise="none"), noise_std=1.0)
    model = DeltaModel(made())
    for x in (NEW[0], torch.zeros(2, 3, dtype=torch.int64)):
        with pytest.raises(ValueError, match="X must be numbers of shape"):
            model.posterior(x)
    monkeypatch.setattr("deltaband.botorch.LARGEST_P", 40)
    with pytest.raises(ValueError, match=r"up to 40 parameters, this one has 41: .* parameters='last'"):
        DeltaModel(made())
