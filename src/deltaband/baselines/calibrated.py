"""Intervals from networks that were trained to know their noise, with a conformal step of their own."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import nn

from ..calibration import conformal_quantiles
from ..data.inputs import Inputs
from ..network.returned import VARIANCE_FORMS, mean_and_variance
from ..results import parse_levels
from ..validation import check_choice
from .networks import Baseline, Bounds, ensemble_outputs, held_out, members, network_of, outputs_of

QUANTILES = (0.025, 0.1, 0.25, 0.5, 0.75, 0.9, 0.975)


class _Calibrated(Baseline):
    """Intervals that split conformal prediction can correct."""

    _scores: np.ndarray | None = None  # of the calibration rows, each column sorted

    def calibrate(self, x: Any, y: Any) -> Self:
        """Calibrate the intervals on held-out rows, so that they cover as often as they say.

        For rows exchangeable with these, and whatever the networks, an interval then covers with probability at least
        its level.

        Args:
            x, y: Held-out rows: inputs, and targets (n,) or (n, 1).

        Returns:
            The object itself.
        """
        X, targets = held_out(x, y)
        self._scores = np.sort(self._conformity(X, targets.numpy()), axis=0)
        return self

    @abstractmethod
    def _conformity(self, X: Inputs, y: np.ndarray) -> np.ndarray:  # (n,) or (n, pairs)
        """Return how large the interval of each row would have to be."""


class MeanVarianceEnsemble(_Calibrated):
    """Networks that return mean and variance (Nix & Weigend, 1994), as one mixture (Lakshminarayanan et al., 2017).

        ŷ = mean μₘ,    σ² = mean σ²ₘ + mean (μₘ − ŷ)²

    The interval is ŷ ± z·σ with z the normal quantile of the level; after `calibrate`, z is the conformal quantile of
    |y − ŷ|/σ. The networks are never changed.

    Args:
        models: Regression networks, each trained on its own with a Gaussian likelihood (torch's GaussianNLLLoss); one
            is enough. They return two columns, or a pair of tensors: the mean, and what `variance` says.
        variance: What the second column is, "variance", "log_variance" or "std".
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        variance: Literal["variance", "log_variance", "std"] = "log_variance",
    ) -> None:
        check_choice(variance, "variance", tuple(VARIANCE_FORMS))
        self.models, self.variance = members(models, at_least=1), variance

    def _conformity(self, X: Inputs, y: np.ndarray) -> np.ndarray:
        mean, std, _ = self._moments(X)
        return np.abs(y - mean) / std

    def _bounds(self, X: Inputs, levels: tuple[float, ...]) -> Bounds:
        from scipy.special import ndtri

        normal = ndtri((1 + np.array(levels)) / 2)
        factors = normal if self._scores is None else conformal_quantiles(self._scores, levels)
        mean, std, dtype = self._moments(X)
        half = np.multiply.outer(std, factors)
        return mean, mean[:, None] - half, mean[:, None] + half, dtype

    def _moments(self, X: Inputs) -> tuple[np.ndarray, np.ndarray, torch.dtype]:
        picks = mean_and_variance(None, self.variance)
        outputs, dtype = ensemble_outputs(self.models, X, 2, lambda y: torch.column_stack([pick(y) for pick in picks]))
        mean, variance = outputs[:, :, 0], outputs[:, :, 1]  # (M, n) each
        if not (variance > 0).all():
            i, row = np.argwhere(variance <= 0)[0]
            what = f"models[{i}]: the variance of row {row} is {variance[i, row]:g}, expected a positive number"
            raise ValueError(f"{what}; is it what variance={self.variance!r} says?")
        return mean.mean(axis=0), np.sqrt(variance.mean(axis=0) + mean.var(axis=0)), dtype


class QuantileNetwork(_Calibrated):
    """A network that returns quantiles, with conformal correction (CQR; Romano et al., 2019).

    The interval of a level is the pair of quantiles nearest to it; after `calibrate`, both are moved outwards by the
    conformal quantile of max(lower − y, y − upper), inwards where it is negative. The prediction is the median.
    Quantiles that cross are sorted. The network is never changed.

    Args:
        model: A network trained with the pinball loss, with a column for each of `levels`.
        levels: The levels of its quantiles, ascending, symmetric about ½, which is in the middle.
    """

    def __init__(self, model: nn.Module, levels: Sequence[float] = QUANTILES) -> None:
        self.levels = parse_levels(levels)
        taus = np.array(self.levels)
        symmetric = np.allclose(taus + taus[::-1], 1.0, rtol=0, atol=1e-9)
        if len(taus) < 3 or len(taus) % 2 == 0 or not symmetric or not (np.diff(taus) > 0).all():
            raise ValueError(f"levels must ascend, symmetric about 0.5 in the middle, as (0.1, 0.5, 0.9); got {levels}")
        self.model = model
        network_of(model)  # report problems of the model now

    def _conformity(self, X: Inputs, y: np.ndarray) -> np.ndarray:  # (n, pairs)
        _, lower, upper, _ = self._quantiles(X)
        return np.maximum(lower - y[:, None], y[:, None] - upper)

    def _bounds(self, X: Inputs, levels: tuple[float, ...]) -> Bounds:
        middle = len(self.levels) // 2
        of_pairs = 1 - 2 * np.array(self.levels[:middle])
        pairs = np.abs(np.subtract.outer(levels, of_pairs)).argmin(axis=1)  # (levels,)
        median, lower, upper, dtype = self._quantiles(X)
        lower, upper = lower[:, pairs], upper[:, pairs]
        if self._scores is not None:
            margin = conformal_quantiles(self._scores, levels)[np.arange(len(levels)), pairs]
            # moved inwards, bounds may pass each other: nothing is left of the interval but its middle
            margin = np.maximum(margin, -(upper - lower) / 2)
            lower, upper = lower - margin, upper + margin
        return median, lower, upper, dtype

    def _quantiles(self, X: Inputs) -> Bounds:
        """Return the median (n,), and the pairs of quantiles around it (n, pairs), the widest first."""
        network, middle = network_of(self.model), len(self.levels) // 2
        outputs = np.sort(outputs_of(network, X, len(self.levels)), axis=1)
        return outputs[:, middle], outputs[:, :middle], outputs[:, :middle:-1], network.dtype
