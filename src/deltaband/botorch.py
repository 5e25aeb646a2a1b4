"""Bayesian optimisation: a band as a BoTorch `Model`. Needs `pip install 'deltaband[botorch]'`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import jacrev, vmap

from .data.inputs import Inputs
from .engines.covariance import By
from .fitting.spec import all_outputs
from .intervals import PredictionIntervals
from .joint import across
from .network.combined import of_rows
from .network.network import Network
from .validation import check_positive

try:
    from botorch.models.model import Model
    from botorch.posteriors import GPyTorchPosterior
    from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
except ImportError as error:
    raise ImportError("deltaband.botorch needs BoTorch: pip install 'deltaband[botorch]'") from error

LARGEST_P = 5_000  # parameters, whose covariance matrix takes 200 MB


class DeltaModel(Model):
    """The predictions of a band as the posterior of a BoTorch `Model`: normal, and differentiable with respect to X.

        f(X) ~ N(ŷ(X), s²·G A⁻¹ Gᵀ),    G = ∂ŷ/∂w at X,

    which is linearised Laplace: the posterior of a Gaussian process whose kernel is that of the network's gradients.
    The numbers are those of `band.covariance(X, by=...)`, in the original units of the targets, for every engine. The
    network is copied: a band that is fitted anew needs a new model.

    Args:
        band: A fitted band of a network with at most 5,000 parameters that take part, whose inputs are one tensor.
        by: "leverage" takes A⁻¹, which grows where there are no data: what an optimiser should explore. "variance"
            takes Σ⁻¹ = A⁻¹JᵀJA⁻¹ instead, which knows nothing of directions that the data never touched.
        noise_std: s in the original units instead of that of the band, which few rows say little about.

    Example:
        >>> model = DeltaModel(band)  # doctest: +SKIP
        >>> LogExpectedImprovement(model, best_f=y.max())  # doctest: +SKIP
    """

    def __init__(self, band: PredictionIntervals, *, by: By = "leverage", noise_std: float | None = None) -> None:
        super().__init__()
        errors = band.errors(by)
        if errors.gamma.any():
            raise ValueError("learnt noise has no gradient with respect to x: calibrate(..., noise='none')")
        if band.spec.task.variance is not None:
            raise ValueError(
                "the network predicts the variance of its noise, variance=, which DeltaModel does not know"
            )
        transform = band.spec.input_transform
        if transform is not None and transform.affine is None:
            raise ValueError("input_transform is a function: give DeltaModel a band of the inputs after it")
        self._affine = None if transform is None else transform.affine
        self._outputs = all_outputs(errors.fits)
        shift, unit = band.units_of_differences()
        amplitude, noise = errors.amplitude * unit, errors.noise * np.abs(unit)
        if noise_std is not None:
            if band.calibration_ is not None or any(fit.sandwich is not None for fit in errors.fits):
                raise ValueError("noise_std= is for the formula: the scale of this band is calibrated, or robust")
            noise = np.full_like(noise, check_positive(noise_std, "noise_std"))
            amplitude = noise * np.sign(unit)
        self._shift, self._unit, self._amplitude, self._noise = map(torch.from_numpy, (shift, unit, amplitude, noise))
        self._parts: list[tuple[Network, list[int], Tensor]] = []
        for fit in errors.fits:
            if (p := fit.n_parameters) > LARGEST_P:
                what = f"DeltaModel takes networks with up to {LARGEST_P:,} parameters, this one has {p:,}"
                raise ValueError(
                    f"{what}: fit the band to some of them, as parameters='last', or use a smaller network"
                )
            network = band.spec.fitted_network(fit).copy(own_weights=True)
            axes = of_rows(network, torch.eye(p, dtype=torch.float64))
            matrix = torch.from_numpy(across(fit, axes, by)(axes))
            self._parts.append((network, [self._outputs.index(o) for o in fit.outputs], (matrix + matrix.T) / 2))

    @property
    def num_outputs(self) -> int:
        """How many outputs there are intervals for."""
        return len(self._outputs)

    @property
    def batch_shape(self) -> torch.Size:
        """It is one model, not a batch of them."""
        return torch.Size([])

    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool = False,
        posterior_transform: Any = None,
    ) -> Any:
        """Return the joint posterior at the q points of each batch.

        Args:
            X: Points, (*batch, q, d).
            output_indices: The outputs to return, by their places; all by default.
            observation_noise: Whether it is that of observations, with their noise.
            posterior_transform: As in BoTorch.

        Returns:
            A `GPyTorchPosterior`.

        Raises:
            ValueError: If X is not a batch of points.
        """
        if X.ndim < 2 or not X.is_floating_point():
            raise ValueError(f"X must be numbers of shape (*batch, q, d), got {X.dtype} of {tuple(X.shape)}")
        *batch, q, _ = X.shape
        chosen = list(range(self.num_outputs)) if output_indices is None else output_indices
        points = X.reshape(-1, X.shape[-1])
        mean = torch.zeros(len(points), self.num_outputs, dtype=torch.float64)
        matrix = torch.zeros(*batch, q * len(chosen), q * len(chosen), dtype=torch.float64)
        for network, places, S in self._parts:
            y, G = self._outputs_and_gradients(network, points)
            mean = mean.index_copy(1, torch.tensor(places), y)
            # outputs of other fits have no covariance with these
            rows = torch.zeros(len(points), self.num_outputs, S.shape[0], dtype=torch.float64)
            rows = rows.index_copy(1, torch.tensor(places), G)
            g = (rows * self._amplitude[:, None])[:, chosen].reshape(*batch, q * len(chosen), -1)
            matrix = matrix + g @ S @ g.mT
        mean = (mean * self._unit + self._shift)[:, chosen].reshape(*batch, q, len(chosen))
        if observation_noise:
            matrix = matrix + torch.diag(self._noise.square()[chosen].repeat(q))
        several = len(chosen) > 1
        distribution = (
            MultitaskMultivariateNormal(mean, matrix) if several else MultivariateNormal(mean[..., 0], matrix)
        )
        posterior = GPyTorchPosterior(distribution)
        return posterior if posterior_transform is None else posterior_transform(posterior)

    def _outputs_and_gradients(self, network: Network, points: Tensor) -> tuple[Tensor, Tensor]:  # (b, m), (b, m, p)
        """Return them as functions of the points, in float64."""
        if self._affine is not None:
            mean, std = (torch.from_numpy(each) for each in (self._affine.mean, self._affine.std))
            points = self._affine.forward(points.double(), mean, std)
        points = points.to(network.device, network.model_copy.input_dtype or network.dtype)

        def outputs(parameters: dict[str, Tensor], point: Tensor) -> tuple[Tensor, Tensor]:
            y = network.evaluate(Inputs((point[None],)), parameters)[0]
            return y, y

        try:
            by_name, y = vmap(jacrev(outputs, has_aux=True), in_dims=(None, 0))(network.parameters, points)
        except RuntimeError as error:
            raise TypeError(f"torch.func could not differentiate this network: {error}") from error
        G = torch.cat([g.reshape(*g.shape[:2], -1) for g in by_name.values()], dim=2)
        return y.cpu().double(), G.cpu().double()
