"""Gradients that are computed again whenever they are asked for: of the rows only the inputs are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..data.inputs import Inputs
from .layers.factors import Part, stacked
from .network import Network


@dataclass(frozen=True)
class Recomputed:
    """A block of rows, of which the inputs are there."""

    network: Network  # with weights of its own, that nobody trains
    x: Inputs
    group: slice  # of the outputs
    rows_in_memory: int

    def __len__(self) -> int:
        return len(self.x) * (self.group.stop - self.group.start)

    @property
    def n_parameters(self) -> int:
        return self.network.n_parameters

    def parts(self) -> Sequence[Part]:
        # a network of its own each time: several threads may ask
        _, gradients = self.network.copy().gradients(self.x, self.group)
        outputs = [block.parts() for block in gradients.blocks]
        return [stacked(parts) for parts in zip(*outputs, strict=True)]
