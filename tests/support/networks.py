"""Small networks and data for all tests."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from deltaband.network.gradient_batch import GradientBatch
from deltaband.network.network import Network


def batch(rows: np.ndarray, dtype: torch.dtype = torch.float64) -> GradientBatch:
    return GradientBatch.of(torch.from_numpy(np.ascontiguousarray(rows)).to(dtype))


def mlp(n_inputs: int = 3, hidden: int = 8, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(n_inputs, hidden), nn.Tanh(), nn.Linear(hidden, 1)).to(dtype)


def dropout_mlp(p: float = 0.3, dtype: torch.dtype = torch.float64, inplace: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Dropout(p, inplace), nn.Linear(3, 8), nn.Tanh(), nn.Dropout(p), nn.Linear(8, 1)).to(dtype)


def probed(network: Network, x: Any) -> Network:
    """The network with gradients layer by layer, as these rows show them."""
    return network.with_layers(network.probe(x).layers)


class Cube(nn.Module):
    """Overflows."""

    def forward(self, x):
        return x**3


def regression(n: int = 80, n_inputs: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, n_inputs, generator=generator, dtype=torch.float64)
    return X, X.sum(dim=1).sin() + 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)


def in_threads(work: Callable[[int], None], count: int = 8) -> None:
    """`work(i)` for each i at the same time."""
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
