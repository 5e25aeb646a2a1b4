"""A trained network and its data, in a file that another environment can read: needs torch and NumPy alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Problem:
    """λ = `damping` belongs to the network: it is (near) a minimum of Σ (y − ŷ)² + λ‖w‖²."""

    model: nn.Sequential
    X: Tensor  # (n, d)
    y: Tensor  # (n,)
    new: Tensor  # (m, d), to predict
    damping: float

    def save(self, path: Path) -> None:
        data = {"X": self.X, "y": self.y, "new": self.new}
        weights = {f"weights.{name}": w for name, w in self.model.state_dict().items()}
        np.savez(path, damping=self.damping, **{name: t.numpy() for name, t in (data | weights).items()})

    @classmethod
    def load(cls, path: Path) -> Problem:
        with np.load(path) as file:
            arrays = {name: torch.as_tensor(file[name]) for name in file.files}
        weights = {name.removeprefix("weights."): w for name, w in arrays.items() if name.startswith("weights.")}
        matrices = [w for w in weights.values() if w.ndim == 2]
        model = perceptron(matrices[0].shape[1], *(len(w) for w in matrices)).to(matrices[0].dtype)
        model.load_state_dict(weights)
        return cls(model.eval(), arrays["X"], arrays["y"], arrays["new"], float(arrays["damping"]))


def perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.LeakyReLU()]
    return nn.Sequential(*layers[:-1])
