"""Gradients of weighted sums of a network's outputs: one backward pass each, however many rows they are of."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..data.inputs import Inputs, check_finite
from .gradient_batch import GradientBatch, StoredBlock, shaped
from .layers.factors import DenseRows
from .layers.hooks import gradient
from .network import Network, plain_autograd


def gradients_of_sums(network: Network, x: Inputs, weights: np.ndarray) -> GradientBatch:  # (k, n, m)
    """Return the gradients of Σ wᵢₒ yₒ(xᵢ) over rows and outputs, k rows; summed up in float64 over chunks of rows."""
    names = [name for owner in network.owners for name in owner]
    varied, total, first = [network.model_copy.trainable[name] for name in names], None, 0
    with plain_autograd(network.device):
        for part in network.prepare(x).split(network.chunk_rows(x)):
            y = network.evaluate(part.map(torch.clone)).double()
            w = torch.from_numpy(weights[:, first : first + len(part)]).to(y)
            first += len(part)
            found = torch.stack([gradient((y * each).sum(), varied) for each in w]).cpu().double()
            total = found if total is None else total + found
    assert total is not None
    check_finite(total, "the gradients of weighted sums", 0, "look at the scale of the weights")
    return of_rows(network, total)


def of_rows(network: Network, rows: Tensor) -> GradientBatch:  # (k, p)
    """Return vectors as gradients of this network, in the parts that its layers make of them."""
    sizes = [sum(network.parameters[name].numel() for name in owner) for owner in network.owners]
    parts = [
        shaped(DenseRows(part.contiguous()), [network.parameters[name] for name in owner])
        for owner, part in zip(network.owners, torch.split(rows, sizes, dim=1), strict=True)
    ]
    return GradientBatch((StoredBlock(parts),))
