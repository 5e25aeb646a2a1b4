"""What the baselines share: `predict`, the outputs of their networks, and the held-out rows that they are given."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.batches import read_arrays
from ..data.inputs import Inputs, check_finite
from ..fitting.fit import ADVICE
from ..network.model_copy import ModelCopy, Pick, eval_copy, unwrap
from ..network.network import Network
from ..results import Intervals, like, parse_levels

Bounds = tuple[np.ndarray, np.ndarray, np.ndarray, torch.dtype]  # mean (n,), lower and upper (n, levels), precision


class Baseline(ABC):
    """Another method for intervals."""

    def predict(self, x: Any, level: float | Sequence[float] = 0.95) -> Intervals:
        """Return intervals for new observations at the rows of `x`; after `calibrate`, conformal ones.

        Args:
            x: The inputs, arrays or tensors; results are of the same kind.
            level: One level, or several for one column each.

        Returns:
            `Intervals`, which unpack as mean, lower, upper.

        Raises:
            NotFittedError: If the noise is not known.
            ValueError: If there are too few calibration rows for a level.
        """
        levels = parse_levels(level)
        X = Inputs.of(x)
        X.check_finite()
        mean, lower, upper, dtype = self._bounds(X, levels)
        if np.ndim(level) == 0:
            lower, upper = lower[:, 0], upper[:, 0]
        bounds = like(x, lower, dtype, -np.inf), like(x, upper, dtype, np.inf)
        return Intervals(like(x, mean, dtype), *bounds, levels[0] if np.ndim(level) == 0 else levels)

    @abstractmethod
    def _bounds(self, X: Inputs, levels: tuple[float, ...]) -> Bounds:
        """Return predictions, lower and upper bounds, and the network's precision."""


def network_of(model: nn.Module, output: Pick = None) -> Network:
    """Return the model as a function; of a frozen one a copy is thawed, since no gradients are taken here."""
    model = unwrap(model)
    if not any(w.requires_grad for w in model.parameters()):
        model = eval_copy(model)
        for w in model.parameters():
            w.requires_grad_(w.is_floating_point())
    return Network(ModelCopy(model, output=output))


def members(models: Sequence[nn.Module], at_least: int) -> list[nn.Module]:
    """Return the networks of an ensemble as a list; raise unless they can be used and there are enough."""
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
        raise TypeError("models must be a list of networks, got one network")
    found = list(models)
    if len(found) < at_least:
        networks = "network" if at_least == 1 else "networks"
        raise ValueError(f"an ensemble needs at least {at_least} {networks}, got {len(found)}")
    if len({id(model) for model in found}) < len(found):
        raise ValueError("the same network is in models more than once: each member must be trained on its own")
    ensemble_outputs(found, Inputs.of(torch.empty(0)))  # report problems of a model now
    return found


def ensemble_outputs(
    models: Sequence[nn.Module], X: Inputs, columns: int = 1, output: Pick = None
) -> tuple[np.ndarray, torch.dtype]:  # (M, n, columns) float64
    """Return the outputs of all networks, and the highest of their precisions."""
    outputs, dtype = np.zeros((len(models), len(X), columns)), torch.float32
    for i, model in enumerate(models):
        try:
            network = network_of(model, output)
            dtype = torch.promote_types(dtype, network.dtype)
            outputs[i] = outputs_of(network, X, columns)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"models[{i}]: {error}") from error
    return outputs, dtype


def outputs_of(network: Network, X: Inputs, columns: int) -> np.ndarray:  # (n, columns) float64
    """Return the outputs of a network; raise unless they have this many columns."""
    if len(X) == 0:
        return np.zeros((0, columns))
    y = network.outputs(X).cpu().double()
    check_columns(network, X, columns)
    check_finite(y, "the network's outputs", advice=ADVICE)
    return y.numpy()


def check_columns(network: Network, X: Inputs, columns: int) -> None:
    if (n_outputs := network.validate(X)) != columns:
        expected = "one" if columns == 1 else str(columns)
        raise ValueError(f"the network returns {n_outputs} outputs a row, expected {expected}")


def held_out(x: Any, y: Any) -> tuple[Inputs, Tensor]:  # (n,) targets
    X, targets = read_arrays(x, y)
    if targets.shape[1] != 1:
        raise ValueError(f"targets must have shape (n,) or (n, 1), got {tuple(targets.shape)}")
    if len(X) == 0:
        raise ValueError("the held-out data are empty: give at least one row")
    return X, targets[:, 0]
