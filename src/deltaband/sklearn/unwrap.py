"""The network inside a scikit-learn estimator as a torch module, its λ, and the steps around it for X and y."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sklearn import get_config
from sklearn.base import is_classifier
from sklearn.compose import TransformedTargetRegressor
from sklearn.frozen import FrozenEstimator
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import Pipeline
from sklearn.utils import check_array
from sklearn.utils.validation import has_fit_parameter
from torch import Tensor, nn

from ..fitting.optimiser import COUPLED_OPTIMISERS
from ..transforms import GRID_POINTS, RELATIVE_ROUNDING, TargetTransform

SUPPORTED = (
    "IntervalRegressor takes an MLPRegressor or a skorch regressor: alone, as the last step of a Pipeline, in a "
    "TransformedTargetRegressor or in a FrozenEstimator"
)


class Exponential(nn.Module):
    """The output activation of `loss="poisson"`."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


ACTIVATIONS = {"identity": nn.Identity, "logistic": nn.Sigmoid, "tanh": nn.Tanh, "relu": nn.ReLU, "exp": Exponential}


@dataclass(frozen=True)
class WrappedNetwork:
    """A network with the estimators around it; both tuples outermost first."""

    network: Any  # an MLPRegressor or a skorch regressor
    steps: tuple[Any, ...] = ()  # the pipelines without their last step
    targets: tuple[Any, ...] = ()  # transformers of y; empty where not fitted
    frozen: bool = False

    def inputs(self, X: Any) -> np.ndarray:
        for step in self.steps:
            X = step.transform(X)
        if isinstance(self.network, MLPRegressor):
            return check_array(X, dtype=np.float64, input_name="X")
        return check_array(X, dtype=None, ensure_2d=False, allow_nd=True, input_name="X")  # images, indices

    def to_network(self, y: np.ndarray) -> np.ndarray:  # (n,) or (n, m) -> (n, m)
        values = y.astype(np.float64).reshape(len(y), -1)
        for transformer in self.targets:
            values = np.asarray(transformer.transform(values), dtype=np.float64).reshape(values.shape)
        return values

    def inverse_transform(self, z: np.ndarray) -> np.ndarray:  # (n, m)
        values = z.astype(np.float64)
        for transformer in reversed(self.targets):
            values = np.asarray(transformer.inverse_transform(values), dtype=np.float64).reshape(z.shape)
        return values

    @property
    def units(self) -> TargetTransform:
        """The map from the network's outputs to the units of y."""
        return TargetTransform(scaler=self if self.targets else None)

    def std(self, z: np.ndarray, std: np.ndarray) -> np.ndarray | None:  # (n, m), (n, m) -> (n, m)
        """Return standard deviations of the network's output in the units of y; None if the transform is not affine."""
        if not self.targets:
            return std.astype(np.float64)
        low, high = (z - std).min(axis=0), (z + std).max(axis=0)  # (m,)
        low, high = np.where(high > low, low, low - 1), np.where(high > low, high, low + 1)
        values = self.units.to_original(np.linspace(low, high, GRID_POINTS))
        line = np.linspace(values[0], values[-1], GRID_POINTS)
        if not (np.abs(values - line) <= RELATIVE_ROUNDING * (np.abs(line) + np.abs(values[-1] - values[0]))).all():
            return None
        return std.astype(np.float64) * np.abs((values[-1] - values[0]) / (high - low))

    def module(self) -> nn.Module:
        """Return the network in torch: a copy of an MLPRegressor, or skorch's own module."""
        return mlp_to_torch(self.network) if isinstance(self.network, MLPRegressor) else self.network.module_

    def check_shape(self, inputs: np.ndarray, y: np.ndarray) -> None:
        """Raise if skorch was trained on targets of another shape than its outputs, which torch broadcasts."""
        if self.frozen or isinstance(self.network, MLPRegressor):
            return
        outputs = self.network.predict(inputs[:1])
        if outputs.ndim != y.ndim:
            shapes = f"outputs of shape {('n', *outputs.shape[1:])} were trained on y of shape {('n', *y.shape[1:])}"
            raise ValueError(f"{shapes}, each against every other: give y.reshape({'-1, 1' if y.ndim == 1 else '-1'})")

    def damping(self, n_rows: int, n_outputs: int) -> float | None:
        """Return λ where it follows from the training; for skorch from a squared loss and one coupled weight decay."""
        if isinstance(self.network, MLPRegressor):
            return mlp_damping(self.network, n_rows)
        criterion, optimizer = (getattr(self.network, name, None) for name in ("criterion_", "optimizer_"))
        if type(criterion) is not nn.MSELoss or not isinstance(optimizer, COUPLED_OPTIMISERS):
            return None
        decays = {float(group["weight_decay"]) for group in optimizer.param_groups} - {0.0}
        if len(decays) != 1 or any(group.get("decoupled_weight_decay") for group in optimizer.param_groups):
            return None
        # the rows and batches of the last epoch, since skorch holds some rows out by default
        batches = self.network.history[-1]["batches"] if len(self.network.history) else []
        sizes = [batch["train_batch_size"] for batch in batches if "train_batch_size" in batch]
        factor = {"mean": (sum(sizes) or n_rows) * n_outputs, "sum": len(sizes)}.get(criterion.reduction)
        return factor * decays.pop() / 2 if factor else None


def find_network(estimator: Any, fitted: bool = False) -> WrappedNetwork:
    """Return the network inside `estimator`; a TypeError if there is none that is supported."""
    if isinstance(estimator, FrozenEstimator):
        return replace(find_network(estimator.estimator, fitted), frozen=True)
    if isinstance(estimator, Pipeline):
        inner = find_network(estimator.steps[-1][1], fitted)
        return replace(inner, steps=(estimator[:-1], *inner.steps)) if len(estimator.steps) > 1 else inner
    if isinstance(estimator, TransformedTargetRegressor):
        inner = find_network(estimator.regressor_ if fitted else estimator.regressor, fitted)
        return replace(inner, targets=(estimator.transformer_, *inner.targets)) if fitted else inner
    if hasattr(estimator, "__sklearn_tags__") and is_classifier(estimator):
        raise TypeError(f"{SUPPORTED}; {type(estimator).__name__} is a classifier")
    is_skorch = all(hasattr(estimator, name) for name in ("module", "criterion", "optimizer"))
    if not isinstance(estimator, MLPRegressor) and not is_skorch:
        got = repr(estimator) if isinstance(estimator, str | type | None) else type(estimator).__name__
        raise TypeError(f"{SUPPORTED}; got {got}")
    return WrappedNetwork(estimator)


def weight_arguments(estimator: Any, sample_weight: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return the arguments of `estimator.fit` by which its network is trained with weights; none for a frozen one."""
    network = find_network(estimator)
    if sample_weight is None or network.frozen:
        return {}
    if not has_fit_parameter(network.network, "sample_weight"):
        why = f"{type(network.network).__name__}.fit takes no sample_weight"
        advice = "train it with weights of your own and give it in a FrozenEstimator, with the same weights"
        raise ValueError(f"{why}: {advice}")
    path, inner = "", estimator
    while inner is not network.network:
        if isinstance(inner, Pipeline):
            path, inner = f"{path}{inner.steps[-1][0]}__", inner.steps[-1][1]
        else:
            inner = inner.regressor
    routed = get_config()["enable_metadata_routing"]  # by requests of the network instead of by names
    return {"sample_weight" if routed else f"{path}sample_weight": sample_weight}


def mlp_to_torch(estimator: Any) -> nn.Sequential:
    """Return a module with the weights of a fitted `MLPRegressor`, in float64: (b, features) -> (b, outputs)."""
    modules: list[nn.Module] = []
    for W, bias in zip(estimator.coefs_, estimator.intercepts_, strict=True):  # (fan_in, fan_out), (fan_out,)
        # on "meta" a new layer has no weights: it draws no random numbers from the user's generator
        layer = nn.Linear(W.shape[0], W.shape[1], device="meta")
        layer.weight = nn.Parameter(torch.tensor(W.T, dtype=torch.float64))
        layer.bias = nn.Parameter(torch.tensor(bias, dtype=torch.float64))
        modules += [layer, ACTIVATIONS[estimator.activation]()]
    return nn.Sequential(*modules[:-1], ACTIVATIONS[estimator.out_activation_]()).eval()


def mlp_damping(estimator: Any, n_rows: int) -> float | None:
    """Return λ of SSE + λ‖W‖² for a fit to `n_rows` rows; None without a penalty of squared errors.

    Each batch B is one step along the gradient of (½·SSE_B + ½·alpha·‖W‖²)/|B|, SSE_B over all outputs. So λ is

        alpha                      with lbfgs, whose only batch is all rows
        alpha·n·mean of 1/|B|      with sgd and adam: alpha·n/b where the batch size b divides n

    with n the rows trained on, without those that early stopping holds out. Biases are not penalised. With several
    outputs lbfgs gets the mean of their losses but the gradient of their sum, and stops at a minimum of neither: no λ.
    """
    if estimator.alpha == 0 or getattr(estimator, "loss", "squared_error") != "squared_error":
        return None
    if estimator.solver == "lbfgs":
        return float(estimator.alpha) if getattr(estimator, "n_outputs_", 1) == 1 else None
    held_out = math.ceil(estimator.validation_fraction * n_rows) if estimator.early_stopping else 0
    n = max(1, n_rows - held_out)
    b = min(200 if estimator.batch_size == "auto" else estimator.batch_size, n)
    sizes = np.diff([*range(0, n, b), n]).tolist()
    return float(estimator.alpha) * n * sum(1 / size for size in sizes) / len(sizes)
