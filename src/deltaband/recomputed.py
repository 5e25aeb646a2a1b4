"""Gradients that are computed again whenever they are asked for: of the rows only the inputs are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from .capture import Layers
from .gradients import Network
from .layers import Part


@dataclass(frozen=True)
class Recomputed:
    """A block of rows, of which the inputs are there."""

    model: nn.Module  # with weights of its own, that nobody trains
    layers: Layers
    x: Tensor
    n_parameters: int
    together: int

    def __len__(self) -> int:
        return len(self.x)

    def parts(self) -> Sequence[Part]:
        # a network of its own each time: several threads may ask
        _, gradients = Network(self.model, self.layers).gradients(self.x)
        return gradients.blocks[0].parts()
