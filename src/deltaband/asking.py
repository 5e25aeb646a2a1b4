"""Questions put to a covariance: rows in, their gradients, an answer for each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .batch import GradientBatch
from .data import check_finite
from .gradients import Network, plain_autograd

ADVICE = "look at the scale of that row, and for NaN among the weights"


def ask(
    network: Network,
    X: Tensor,
    question: Callable[[GradientBatch], np.ndarray],
    rows_at_once: int = 0,
    first: int = 0,  # the number of the first row in the data
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs (n,) in float64 and the answer for each row, asked in chunks of at least `rows_at_once` rows."""
    outputs, answers = [], []
    with plain_autograd(network.device):
        rows = network.check(X)
        step = max(1, rows_at_once // rows) * rows
        for start in range(0, len(X), step):
            chunk = X[start : start + step]
            parts = [
                checked_gradients(network, chunk[i : i + rows], first + start + i) for i in range(0, len(chunk), rows)
            ]
            outputs += [part.cpu().double().numpy() for part, _ in parts]
            answers.append(question(GradientBatch.concatenate(gradients for _, gradients in parts)))
    return np.concatenate(outputs), np.concatenate(answers)


def checked_gradients(network: Network, x: Tensor, first: int) -> tuple[Tensor, GradientBatch]:
    """Outputs and gradients, all finite; `first` is the number of the first row in the data."""
    outputs, gradients = network.gradients(x)
    check_outputs(outputs, first)
    check_finite(torch.from_numpy(gradients.squared_norms), "the network's gradients", first, ADVICE)
    return outputs, gradients


def check_outputs(outputs: Tensor, first: int = 0) -> None:
    check_finite(outputs, "the network's outputs", first, ADVICE)
