"""What a row is like, in numbers from which the noise or a density ratio can be learnt."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .layers import hooks
from .network import Network

MAX_FEATURES = 100  # of a row; more are projected at random


def features(network: Network, x: Any) -> np.ndarray:  # (b, k)
    """Return the rows of a table as they are, and of other inputs what the last linear layer is given.

    Positions of a sequence or an image are averaged. A network without linear layers, or whose last one does not have
    the rows in its first dimension, has no features.
    """
    x = network.prepare(x)
    if len(x.tensors) == 1 and x.tensors[0].ndim == 2 and x.tensors[0].is_floating_point():
        return reduced(x.tensors[0]).numpy()
    parts = x.split(network.chunk_rows(x))
    return np.concatenate(
        [reduced(hooks.last_given(network.eval_copy, network.outputs, each)).numpy() for each in parts]
    )


def reduced(values: Tensor) -> Tensor:
    values, k = values.cpu(), values.shape[1]
    if k <= MAX_FEATURES:
        return values if values.dtype == torch.float64 else values.float()
    directions = torch.randn(k, MAX_FEATURES, generator=torch.Generator().manual_seed(k), dtype=torch.float32)
    return values.float() @ directions / k**0.5
