"""A fitted band as one program of tensors: from inputs to the mean and the bounds, with the network inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..calibration import Calibration
from ..calibration.noise import BoostedNoise
from ..data.inputs import Inputs
from ..engines import Covariance
from ..errors import ExportError
from ..fitting.fit import Fit, Formula
from ..fitting.spec import SMALLEST_HALF_WIDTH, FitSpec, all_outputs
from ..fitting.tasks import Regression
from ..network.network import Network
from .bounds import ConformalBounds, FormulaBounds, Rows, Trees
from .covariances import Answers, Coordinates, answers, coordinates, spectral
from .gradients import trace


class OfFit(nn.Module):
    """q under several λ, and h where it is wanted, of the outputs of one fit."""

    sandwich: Tensor | None
    factors: Tensor

    def __init__(self, coordinates: Coordinates, answers: Answers, sandwich: Tensor | None, factors: Tensor) -> None:
        super().__init__()
        self.coordinates, self.answers = coordinates, answers
        self.register_buffer("sandwich", sandwich)
        self.register_buffer("factors", factors)  # (m,) of q

    def forward(self, parts: Sequence[Any], m: int) -> list[Tensor]:  # of each output (b, k)
        z, rest = self.coordinates(parts)
        if self.sandwich is None:
            found = self.answers(z, rest)
        else:
            z = z[:, : self.sandwich.shape[0]]
            found = ((z @ self.sandwich) * z).sum(dim=1, keepdim=True).clamp(min=0.0)
        by_output = found.reshape(m, -1, found.shape[1])
        return [by_output[o] * self.factors[o] for o in range(m)]


class Program(nn.Module):
    """Inputs as the user has them in; mean, lower and upper bounds out, in the units that `predict` answers in."""

    def __init__(
        self, spec: FitSpec, fits: Sequence[Fit], calibration: Calibration | None, method: Any, levels: Any, x: Inputs
    ) -> None:
        super().__init__()
        task = spec.task
        assert isinstance(task, Regression)
        self.levels = tuple(np.atleast_1d(levels).tolist())
        self.one_level, self.names = np.ndim(levels) == 0, x.names
        self.single = task.single or fits[0].n_returned == 1
        self.by_variance, self.by_quantiles = task.variance is not None, task.quantiles is not None
        self.smallest = float(SMALLEST_HALF_WIDTH * np.sqrt(fits[0].losses[0] / fits[0].n_rows))
        outputs = all_outputs(fits)
        self.outputs = list(outputs)
        self._affine(spec, task, len(outputs))
        network, layers = spec.network(), fits[0].layers
        self.input_dtype = network.model_copy.input_dtype
        self.out_dtype = fits[0].dtype if task.units is None else torch.float64
        noise = () if calibration is None or isinstance(calibration.noise, str) else calibration.noise
        if not all(isinstance(each, BoostedNoise) for each in noise):
            raise ExportError(
                "noise= is a function or regressor of your own, which no program holds: calibrate with noise='auto'"
            )
        self.noise = nn.ModuleList([Trees(each) for each in noise if isinstance(each, BoostedNoise)])
        given = spec.inputs(x.as_given())
        self.network = trace(network, layers, task.head(outputs), given, spec._picks[1], bool(noise))
        parts = self.network.shapes
        self.counts = [fit.n_outputs for fit in fits]
        self.fits = nn.ModuleList()
        for i, fit in enumerate(fits):
            covariance: Covariance = fit.covariance
            dampings = np.array([0.0 if covariance.damping is None else covariance.damping])
            sandwich, factors = None, fit.variance_factors
            if isinstance(method, Calibration):
                covariance, dampings, factors = method.covariances[i], method.scales[i].dampings, np.ones(fit.n_outputs)
            elif fit.sandwich is not None:
                sandwich = torch.from_numpy(fit.sandwich.matrix)
            found = spectral(covariance)
            layered = fit.asked_layers is not None
            sizes = _sizes(network, fit)
            self.fits.append(
                OfFit(
                    coordinates(found, parts, sizes, layered),
                    answers(found, dampings, leverage=isinstance(method, Calibration)),
                    sandwich,
                    torch.from_numpy(np.array(factors)),
                )
            )
        self.bounds: nn.Module
        if isinstance(method, Calibration):
            self.bounds = ConformalBounds(method, self.levels)
        else:
            assert isinstance(method, Formula)
            self.bounds = FormulaBounds(method, self.levels)
        self.calibrated = isinstance(method, Calibration)
        self.slack = 2 * torch.finfo(fits[0].dtype).eps
        for module in self.modules():
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:  # a file holds whole tensors
                    module._buffers[name] = _whole(buffer)

    def _affine(self, spec: FitSpec, task: Regression, m: int) -> None:
        transform, units = spec.input_transform, task.units
        if transform is not None and transform.affine is None:
            raise ExportError(
                f"input_transform={transform.name} is a function or scaler that is not affine, which no program holds: "
                "fit without it, and transform inputs before they get into the program"
            )
        if units is not None and units.scaler is not None:
            raise ExportError(
                f"target_transform={units.scaler!r} is not affine, and its inverse is not a tensor operation: "
                "fit without it, and transform what the program returns"
            )
        self.input_map = None if transform is None else transform.affine
        self.output_map = None if units is None else units.affine
        for name, affine in (("input", self.input_map), ("output", self.output_map)):
            numbers = (None, None) if affine is None else (torch.from_numpy(affine.mean), torch.from_numpy(affine.std))
            for part, each in zip(("mean", "std"), numbers, strict=True):
                self.register_buffer(f"{name}_{part}", None if each is None else each.double())

    def forward(self, *x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs, companion, features, parts = self.network(self._prepared(x))
        y = outputs.double()
        mean, centre, unit, scale = self._reference(y, companion.double())
        h, q, first = [], [], 0
        for count, fit in zip(self.counts, self.fits, strict=True):
            some = [_rows(part, first, count, len(self.outputs)) for part in parts]
            for o, found in enumerate(fit(some, count)):
                u2 = scale[:, first + o, None].square()
                h += [found[:, 0]] if self.calibrated else []
                q.append((found[:, 1:] if self.calibrated else found) / u2)
            first += count
        log_v = [trees(features, mean[:, o]) for o, trees in enumerate(self.noise)]
        half = self.bounds(Rows(h, q, unit, log_v))
        if self.calibrated:  # residuals may be tied, and the same output differ by a rounding from batch to batch
            half = half + self.slack * y.abs()[:, :, None]
        lower, upper = centre[:, :, None] - half, centre[:, :, None] + half
        lower, upper = (each[:, :, 0] if self.one_level else each for each in (lower, upper))
        return self._original(mean), self._original(lower), self._original(upper)

    def _prepared(self, x: Sequence[Tensor]) -> list[Tensor]:
        if self.input_map is not None:
            mapped = self.input_map.forward(x[0].double(), self.input_mean, self.input_std)
            return [mapped.to(self.input_dtype or (x[0].dtype if x[0].is_floating_point() else torch.float32))]
        return [each.to(self.input_dtype) if self.input_dtype and each.is_floating_point() else each for each in x]

    def _reference(self, y: Tensor, companion: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the mean, the centre, the noise that is known, and the unit of √q, (b, m) each."""
        one = torch.ones_like(y)
        if self.by_quantiles:
            ordered = torch.cat([companion[:, :1], y, companion[:, 1:]], dim=1).sort(dim=1).values
            lower, middle, upper = ordered[:, :1], ordered[:, 1:2], ordered[:, 2:]
            half = ((upper - lower) / 2).clamp(min=self.smallest)
            return middle, (lower + upper) / 2, half, half
        if self.by_variance:
            std = companion[:, self.outputs].sqrt()
            return y, y, std, std
        return y, y, one, one

    def _original(self, values: Tensor) -> Tensor:  # (b, m) or (b, m, levels)
        if self.output_map is not None:
            shape = (-1, *[1] * (values.ndim - 2))
            numbers = [each.reshape(shape) for each in (self.output_mean, self.output_std)]  # type: ignore[operator]
            values = self.output_map.inverse(values, *numbers)
        values = values.to(self.out_dtype)
        return values[:, 0] if self.single else values


def _rows(part: Any, first: int, count: int, m: int) -> Any:
    """Return the gradients of some of the m outputs, those of an output being together."""
    if count == m:
        return part
    return part.map(lambda rows: rows.unflatten(0, (m, -1))[first : first + count].flatten(0, 1))


def _sizes(network: Network, fit: Fit) -> dict[str, torch.Size]:
    layers = fit.asked_layers
    names = tuple(network.parameters) if layers is None else layers.order
    return {name: network.parameters[name].shape for name in names}


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor in memory of its own, in order."""
    tensor = tensor.detach().cpu()
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)
