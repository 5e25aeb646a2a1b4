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


def trained(model: nn.Module, x: Any, y: torch.Tensor, ridge: float = 1e-2) -> nn.Module:
    """The model, its last linear layer fitted to the rows by least squares: it explains some of them, as networks do.

    Least squares of all parameters of that layer, in float64 and in a single step.
    """
    layer = [each for each in model.modules() if isinstance(each, nn.Linear)][-1]
    given: list[torch.Tensor] = []
    mode, dtype = model.training, layer.weight.dtype
    handle = layer.register_forward_hook(lambda module, args, output: given.append(args[0].detach()))
    with torch.no_grad():
        model.eval().double()
        model(*x) if isinstance(x, tuple) else model(x)
        handle.remove()
        H, Y = given[-1].reshape(len(y), -1), y.double().reshape(len(y), -1)
        H = torch.cat([H, torch.ones(len(H), 1, dtype=torch.float64)], dim=1)
        W = torch.linalg.solve(H.T @ H + ridge * torch.eye(H.shape[1], dtype=torch.float64), H.T @ Y)
        layer.weight.copy_(W[:-1].T)
        layer.bias.copy_(W[-1])
        model.to(dtype).train(mode)
    return model


def mlp(n_inputs: int = 3, hidden: int = 8, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(n_inputs, hidden), nn.Tanh(), nn.Linear(hidden, 1)).to(dtype)


def trained_mlp(n_inputs: int = 3, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A network for the rows of `regression`."""
    return trained(mlp(n_inputs, dtype=dtype), *regression(80, n_inputs))


def dropout_mlp(p: float = 0.3, dtype: torch.dtype = torch.float64, inplace: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Dropout(p, inplace), nn.Linear(3, 8), nn.Tanh(), nn.Dropout(p), nn.Linear(8, 1)).to(dtype)


def probed(network: Network, x: Any) -> Network:
    """The network with gradients layer by layer, as these rows show them."""
    return network.with_layers(network.probe(x).layers)


class Tied(nn.Module):
    """A table that is the weight of a layer as well."""

    def __init__(self, n_words: int = 9, width: int = 5, n_outputs: int = 1):
        super().__init__()
        self.table, self.back = nn.Embedding(n_words, width), nn.Linear(width, n_words, bias=False)
        self.head = nn.Linear(n_words, n_outputs)
        self.back.weight = self.table.weight

    def forward(self, x):
        return self.head(torch.tanh(self.back(self.table(x))).mean(dim=1))


class ByFunction(nn.Module):
    """A weight that is used without its layer, too, and one that belongs to none."""

    def __init__(self, n_inputs: int = 3, width: int = 5):
        super().__init__()
        self.layer, self.head = nn.Linear(n_inputs, width), nn.Linear(width, 1)
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x):
        past_the_layer = nn.functional.linear(x, self.layer.weight)
        return self.head(past_the_layer * self.scale) + self.layer(x).mean(dim=1, keepdim=True)


class Sequence(nn.Module):
    """Layers of every sort of part, each used at two positions: rows, outer products of one and of two, a table."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.wide, self.last = nn.Embedding(50, 20), nn.Linear(20, 24), nn.Linear(24, 1)
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, x):
        return self.last(self.scale * self.wide(self.embedding(x)).tanh().mean(dim=1))[:, 0]


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
