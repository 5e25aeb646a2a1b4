"""scikit-learn's `MLPRegressor` as a torch module, and the λ that follows from its training."""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


class Exponential(nn.Module):
    """The output activation of `loss="poisson"`."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


ACTIVATIONS = {"identity": nn.Identity, "logistic": nn.Sigmoid, "tanh": nn.Tanh, "relu": nn.ReLU, "exp": Exponential}


def to_torch(estimator: Any) -> nn.Sequential:
    """Return a module with the weights of a fitted `MLPRegressor`, in float64: (b, features) -> (b, outputs)."""
    modules: list[nn.Module] = []
    for W, bias in zip(estimator.coefs_, estimator.intercepts_, strict=True):  # (fan_in, fan_out), (fan_out,)
        # on "meta" a new layer has no weights: it draws no random numbers from the user's generator
        layer = nn.Linear(W.shape[0], W.shape[1], device="meta")
        layer.weight = nn.Parameter(torch.tensor(W.T, dtype=torch.float64))
        layer.bias = nn.Parameter(torch.tensor(bias, dtype=torch.float64))
        modules += [layer, ACTIVATIONS[estimator.activation]()]
    return nn.Sequential(*modules[:-1], ACTIVATIONS[estimator.out_activation_]()).eval()


def damping(estimator: Any, n_rows: int) -> float | None:
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
    n = n_rows
    if estimator.early_stopping:
        n = max(1, n - math.ceil(estimator.validation_fraction * n))
    b = min(200 if estimator.batch_size == "auto" else estimator.batch_size, n)
    sizes = [stop - start for start, stop in pairwise([*range(0, n, b), n])]
    return float(estimator.alpha) * n * sum(1 / size for size in sizes) / len(sizes)
