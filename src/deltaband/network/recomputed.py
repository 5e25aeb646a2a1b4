"""Gradients that are computed again whenever they are asked for: of the rows only the inputs are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..data.inputs import Inputs
from ..storage.encoding import storable
from .layers.factors import Part, stacked
from .network import Network


@storable
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


def network_hook(outputs: tuple[int, ...]) -> Mapping[type, Callable[[Any], Any]]:
    """Return the hook by which an `Encoder` writes a network that computes the rows of these outputs again."""
    return {Network: lambda network: (outputs, network.layers)}


def network_maker(make: Callable[[tuple[int, ...], Any], Network]) -> Mapping[str, Callable[[Any], Any]]:
    """Return the hook by which a `Decoder` restores such a network: `make(outputs, layers)`."""
    return {Network.__name__: lambda about: make(*about)}
