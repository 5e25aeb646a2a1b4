"""Intervals from networks that return a mean alone: Monte-Carlo dropout and deep ensembles.

Both give ŷ ± z·√(v + noise_std²), with z the normal quantile of the level, ŷ and v the mean and the population variance
of T stochastic passes or of M networks. Nothing guarantees their coverage.
"""

import math
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ..data.inputs import Inputs, check_finite
from ..errors import NotFittedError
from ..fitting.fit import ADVICE
from ..network.network import Network, plain_autograd
from ..validation import check_int, check_non_negative
from .networks import Baseline, Bounds, check_columns, ensemble_outputs, held_out, members, network_of

# Dropout draws from torch's global generators: only one thread at a time may seed them.
_GENERATORS_LOCK = threading.RLock()


class _Gaussian(Baseline):
    """Intervals ŷ ± z·√(v + noise_std²) from the moments ŷ and v of a subclass."""

    def __init__(self, noise_std: float | None) -> None:
        check_non_negative(noise_std, "noise_std")
        self.noise_std = noise_std
        self._noise_std = None if noise_std is None else float(noise_std)

    @property
    def noise_std_(self) -> float:
        """The standard deviation of the noise, in the units of the target: as given, or as found by `fit`."""
        if self._noise_std is None:
            name = type(self).__name__
            raise NotFittedError(f"the noise is not known: give {name} noise_std=, or call fit(x, y) on held-out rows")
        return self._noise_std

    def _bounds(self, X: Inputs, levels: tuple[float, ...]) -> Bounds:
        from scipy.special import ndtri

        noise_std = self.noise_std_
        mean, variance, dtype = self._moments(X)
        half = np.multiply.outer(np.sqrt(variance + noise_std**2), ndtri((1 + np.array(levels)) / 2))
        return mean, mean[:, None] - half, mean[:, None] + half, dtype

    @abstractmethod
    def _moments(self, X: Inputs) -> tuple[np.ndarray, np.ndarray, torch.dtype]:
        """Return ŷ and v, both (n,) in float64, and the network's precision."""


class MCDropout(_Gaussian):
    """Monte-Carlo dropout (Gal & Ghahramani, 2016): the variance over many passes with dropout enabled.

        ŷ = mean ŷₜ,    v = mean (ŷₜ − ŷ)²,    noise_std² = 1/τ

    Only modules such as nn.Dropout are stochastic; everything else, BatchNorm too, is in eval mode. F.dropout in a
    `forward`, and the dropout inside nn.LSTM or nn.MultiheadAttention, stay off. The model is never changed.

    A call seeds torch's generator and restores it, so the same rows get the same intervals each time. Calls from
    several threads wait for each other; a thread that draws from the global generator meanwhile changes both results.

    Args:
        model: A regression network with one output, trained with dropout modules.
        noise_std: The standard deviation of the noise; without it, call `fit` on held-out rows.
        passes: The number T of stochastic passes.
        seed: Seed for the dropout masks.
    """

    def __init__(self, model: nn.Module, *, noise_std: float | None = None, passes: int = 10000, seed: int = 0) -> None:
        super().__init__(noise_std)
        self.model = model
        self.passes, self.seed = check_int(passes, "passes", 2, 2**63), check_int(seed, "seed", 0, 2**63)
        _dropouts(network_of(model))  # report problems of the model now

    def fit(self, x: Any, y: Any, *, noise_stds: Sequence[float] | None = None) -> Self:
        """Choose the noise_std of highest `log_likelihood` on held-out rows; it replaces the one given.

        Args:
            x, y: Held-out rows: inputs, and targets (n,) or (n, 1).
            noise_stds: The candidates; by default 24 from 1/100 to 2 standard deviations of `y`.

        Returns:
            The object itself.

        Raises:
            ValueError: If there are no rows or several outputs, or all targets are equal and there are no candidates.
        """
        if noise_stds is None:
            scale = float(held_out(x, y)[1].std(correction=0))
            if scale == 0.0:
                raise ValueError("all targets are equal, so the scale of the noise is not known: give noise_stds=")
            noise_stds = np.geomspace(0.01 * scale, 2 * scale, 24).tolist()
        likelihoods = self.log_likelihood(x, y, noise_stds)
        self._noise_std = float(np.atleast_1d(noise_stds)[np.argmax(likelihoods)])
        return self

    def log_likelihood(self, x: Any, y: Any, noise_stds: float | Sequence[float]) -> np.ndarray:  # (noise_stds,)
        """Return Gal's predictive log-likelihood, the mean over rows of log (1/T Σₜ N(y; ŷₜ, noise_std²)).

        To choose a dropout rate, train a network with each and compare their likelihoods.

        Args:
            x, y: Held-out rows: inputs, and targets (n,) or (n, 1).
            noise_stds: One standard deviation of the noise, or several.

        Returns:
            One number per standard deviation.

        Raises:
            ValueError: If there are no rows or several outputs, or a standard deviation is not positive.
        """
        sigma = np.atleast_1d(np.asarray(noise_stds, dtype=np.float64))
        if sigma.ndim != 1 or not sigma.size or not np.all((sigma > 0) & np.isfinite(sigma)):
            raise ValueError(f"noise_stds must be positive finite numbers, got {noise_stds!r}")
        X, targets = held_out(x, y)
        unit = torch.from_numpy(sigma)[:, None, None]
        logs = np.full((len(sigma), len(X)), -np.inf)
        network = network_of(self.model)
        with _seeded(self.seed, network.device):
            for rows, outputs in _passes(network, X, self.passes):
                exponents = ((targets[rows] - outputs) / unit).square_().mul_(-0.5)  # (noise_stds, t, b)
                logs[:, rows] = np.logaddexp(logs[:, rows], torch.logsumexp(exponents, dim=1).numpy())
        constants = math.log(self.passes) + 0.5 * math.log(2 * math.pi)
        return logs.mean(axis=1) - np.log(sigma) - constants

    def _moments(self, X: Inputs) -> tuple[np.ndarray, np.ndarray, torch.dtype]:
        network = network_of(self.model)
        count, mean, squares = np.zeros((3, len(X)))
        with _seeded(self.seed, network.device):
            for rows, outputs in _passes(network, X, self.passes):
                # Chan's merge of two means and sums of squares
                y, t, n = outputs.numpy(), len(outputs), count[rows]
                shift = y.mean(axis=0) - mean[rows]
                squares[rows] += y.var(axis=0) * t + shift**2 * n * t / (n + t)
                mean[rows] += shift * t / (n + t)
                count[rows] += t
        return mean, squares / self.passes, network.dtype


class DeepEnsemble(_Gaussian):
    """Deep ensemble (Lakshminarayanan et al., 2017): the variance over networks with different initial weights.

        ŷ = mean ŷₘ,    v = mean (ŷₘ − ŷ)²

    The networks are never changed, and `predict` can be called from several threads.

    Args:
        models: At least two regression networks with one output, each trained on its own.
        noise_std: The standard deviation of the noise; without it, call `fit` on held-out rows.
    """

    def __init__(self, models: Sequence[nn.Module], *, noise_std: float | None = None) -> None:
        super().__init__(noise_std)
        self.models = members(models, at_least=2)

    def fit(self, x: Any, y: Any) -> Self:
        """Set noise_std² to the mean squared error of single networks on held-out rows; it replaces the one given.

        Without held-out rows, give as `noise_std` the validation error of a network that was trained on a part of them.

        Args:
            x, y: Held-out rows: inputs, and targets (n,) or (n, 1).

        Returns:
            The object itself.
        """
        X, targets = held_out(x, y)
        outputs, _ = ensemble_outputs(self.models, X)
        self._noise_std = float(np.sqrt(np.mean((outputs[:, :, 0] - targets.numpy()) ** 2)))
        return self

    def _moments(self, X: Inputs) -> tuple[np.ndarray, np.ndarray, torch.dtype]:
        outputs, dtype = ensemble_outputs(self.models, X)
        return outputs.mean(axis=0)[:, 0], outputs.var(axis=0)[:, 0], dtype


def _dropouts(network: Network) -> list[_DropoutNd]:
    modules = [module for module in network.eval_copy.modules() if isinstance(module, _DropoutNd) and module.p > 0]
    if not modules:
        why = "the model has no dropout module (such as nn.Dropout) with p > 0, so nothing in it is stochastic"
        raise ValueError(f"{why}: MCDropout is for networks trained with dropout")
    return modules


def _passes(network: Network, X: Inputs, passes: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows with their outputs in some of the passes, (t, b) float64: the rows go t times into one forward."""
    dropouts = _dropouts(network)
    if len(X) == 0:
        return
    at_once = network.chunk_rows(X)  # before the dropout is on; so many rows stay in the cache, and in memory
    check_columns(network, X, 1)
    reached: list[bool] = []
    for module in dropouts:
        module.train()
        # nn.TransformerEncoderLayer takes a shortcut past its dropout in eval mode, unless there are hooks
        module.register_forward_hook(lambda module, args, output: None if reached else reached.append(True))
    for first in range(0, len(X), at_once):
        rows = slice(first, first + at_once)
        x = network.prepare(X[rows])
        repeats = max(1, at_once // len(x))
        for done in range(0, passes, repeats):
            t = min(repeats, passes - done)
            repeated = x.map(lambda part: torch.cat([part] * t))  # noqa: B023 - called at once
            y = network.evaluate(repeated).reshape(t, len(x))
            if not reached:
                raise ValueError("the model has dropout modules, but its forward does not pass through any of them")
            check_finite(y.T, "the network's outputs", first, ADVICE)
            yield rows, y.cpu().double()


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Disable gradients and draw random numbers from `seed`; restore the global generators afterwards."""
    cuda = [device] if device.type == "cuda" else []
    with _GENERATORS_LOCK, plain_autograd(device), torch.no_grad(), torch.random.fork_rng(cuda):
        # not torch.manual_seed, which reaches the generators of all devices
        torch.default_generator.manual_seed(seed)
        for where in cuda:
            torch.cuda.default_generators[where.index].manual_seed(seed)
        yield
