"""The network and data that the benchmarks run on, and the plain ways that the library is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from deltaband import PredictionIntervals
from deltaband.engines import Engine, importance
from deltaband.engines.directions import RELATIVE_ZERO
from deltaband.network.network import Network

from .problem import perceptron

WEIGHT_DECAY = 1e-2


@dataclass(frozen=True)
class Size:
    n: int = 41_157
    features: int = 9
    hidden: int = 50
    rank: int = 500
    new_rows: int = 10_000  # to predict
    shrink_rows: int = 10_000  # through the shrinks alone; their cost is linear in the rows
    plain_rows: int = 4_006  # the plain way, with seven shrinks
    stream_rows: tuple[int, int] = (10_000, 40_000)
    repeats: int = 3


QUICK = Size(3_000, 9, 16, 50, 1_000, 1_000, 406, (1_000, 4_000), 1)


class Workload:
    """The network, its data, and its bare row gradients."""

    def __init__(self, size: Size) -> None:
        torch.manual_seed(0)
        self.size = size
        self.model = network(size)
        self.X = torch.randn(size.n, size.features)
        with torch.no_grad():
            self.y = self.model(self.X)[:, 0] + torch.randn(size.n)
        self.damping = size.n * WEIGHT_DECAY / 2
        self.chunk_rows = Network(self.model).chunk_rows(self.X)
        self.parameters = {name: w.detach() for name, w in self.model.named_parameters()}
        self.p = sum(w.numel() for w in self.parameters.values())

    def fit(self, engine: Engine) -> PredictionIntervals:
        band = PredictionIntervals(self.model, weight_decay=WEIGHT_DECAY, engine=engine)
        return band.fit(self.X, self.y, progress=False)

    def gradients(self, rows: int) -> Iterator[Tensor]:
        """The bare row gradients of the first rows, in chunks as large as the library's."""
        for x in self.X[:rows].split(self.chunk_rows):
            by_name, _ = self._row_gradients(self.parameters, x)
            yield torch.cat([g.reshape(len(x), -1) for g in by_name.values()], dim=1)

    def with_gradients(self, rows: int, kernel: Callable[[Tensor], object]) -> Callable[[], None]:
        def run() -> None:
            for J in self.gradients(rows):
                kernel(J)

        return run

    @cached_property
    def _row_gradients(self) -> Callable:
        def output(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
            return functional_call(self.model, parameters, (row.unsqueeze(0),)).reshape(())

        return vmap(grad_and_value(output), in_dims=(None, 0))


class ThinSketch:
    """Algorithm 1 as one would write it down: the thin SVD of each full buffer, in float32."""

    def __init__(self, rank: int, damping: float, p: int) -> None:
        self.k, self.damping, self.shift = rank, damping, 0.0
        self.buffer, self.filled = torch.zeros(2 * rank, p), 0

    def update(self, rows: Tensor) -> None:
        while len(rows):
            fits = min(len(rows), len(self.buffer) - self.filled)
            self.buffer[self.filled : self.filled + fits] = rows[:fits]
            self.filled, rows = self.filled + fits, rows[fits:]
            if self.filled == len(self.buffer):
                self._shrink()

    def effective_parameters(self) -> float:
        e = torch.linalg.svdvals(self.buffer[: self.filled]).double() ** 2 + self.shift
        h = e / (e + self.damping)
        return float((2 * h - h**2).sum())

    def _shrink(self) -> None:
        _, d, V = torch.linalg.svd(self.buffer, full_matrices=False)
        r = int((d > RELATIVE_ZERO * d[0]).sum())
        if r < self.k:
            scaled = d[:r, None] * V[:r]
        else:
            kept = torch.as_tensor(importance(d[:r].double().numpy(), self.damping)).topk(self.k).indices
            delta = d[kept].min()
            self.shift += float(delta) ** 2 / 2
            kept = kept[d[kept] > delta]
            scaled = (d[kept] ** 2 - delta**2).sqrt()[:, None] * V[kept]
        self.filled = len(scaled)
        self.buffer[: self.filled] = scaled
        self.buffer[self.filled :] = 0


def network(size: Size) -> nn.Sequential:
    return perceptron(size.features, size.hidden, size.hidden, 1)
