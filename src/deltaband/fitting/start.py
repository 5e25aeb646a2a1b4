"""What a `FitAccumulator` begins with, and what it adds up besides the engine's part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..engines import Option
from ..network.layers.hooks import Layers
from ..network.network import Network
from ..network.probes import Probes
from ..storage.encoding import storable
from .fit import Outputs
from .spec import FitSpec


@storable
@dataclass(frozen=True)
class Start:
    """What a fit starts with: its outputs, the plan's choice, the form of gradients, and the model's weights."""

    outputs: Outputs
    option: Option
    memory: float
    layers: Layers
    by_rows: bool  # whether the engine asks for whole rows
    n_outputs: int
    n_returned: int
    weights: dict[str, str]  # their fingerprint
    exact_cost: str = ""  # what the exact method would cost, where another was chosen
    shape: tuple[int, ...] = ()  # of what the network returns for a row
    probes: Probes | None = None

    @property
    def gradients_per_row(self) -> int:
        """How many rows of J there are for each training row."""
        return self.n_outputs if self.probes is None else self.probes.count

    def network(self, spec: FitSpec) -> Network:
        """Return the network that gives what the engine asks for."""
        network = spec.network(spec.task.head(self.outputs))
        return network.with_layers(None if self.by_rows else self.layers).with_probes(self.probes)


@storable
class Sums(NamedTuple):
    """What is added up over the rows besides the engine's part."""

    n_rows: int
    losses: np.ndarray  # (m,)
    counts: np.ndarray  # of what the task counts
    energy: float  # of the gradients: their squared norms
    weight: float  # of the rows, as the user gave it

    def plus(self, other: Sums) -> Sums:
        rows, losses, counts, energy, weight = other
        sums = (self.n_rows + rows, self.losses + losses, self.counts + counts, self.energy + energy)
        return Sums(*sums, self.weight + weight)
