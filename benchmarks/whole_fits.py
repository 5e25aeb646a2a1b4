"""Whole fits of networks whose rows are no slices of tensors, in low precision, of forces, and of many classes.

`python -m benchmarks.families` runs them beside an epoch of training over the same rows, in batches of 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from deltaband import ClassificationIntervals, OpaqueBatch, PredictionIntervals

from .measure import Result, race
from .problem import perceptron

BATCH = 64
ATOM_FEATURES, SMALLEST, LARGEST = 11, 9, 29  # atoms of a molecule


class Molecules(nn.Module):
    """Messages along the bonds, three times, and the sum over the atoms of each graph."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.atom, self.out = nn.Linear(ATOM_FEATURES, width), nn.Linear(width, 1)
        self.messages = nn.ModuleList([nn.Linear(2 * width, width) for _ in range(3)])

    def forward(self, atoms: Tensor, bonds: Tensor, owner: Tensor, n: int) -> Tensor:
        h, (start, end) = torch.relu(self.atom(atoms)), bonds
        for message in self.messages:
            h = h.index_add(0, end, torch.relu(message(torch.cat([h[start], h[end]], dim=1))))
        return self.out(h.new_zeros(n, h.shape[1]).index_add(0, owner, h))


def molecules(n: int) -> list[dict[str, Tensor]]:
    """Return trees with some rings, as molecules are; the energy is a sum over the bonds, with noise."""
    made = []
    for k in torch.randint(SMALLEST, LARGEST + 1, (n,)).tolist():
        atoms = torch.randn(k, ATOM_FEATURES)
        parents = (torch.rand(k - 1) * torch.arange(1, k)).long()
        across = torch.randint(k, (2, k // 6))
        bonds = torch.cat([torch.stack([parents, torch.arange(1, k)]), across], dim=1)
        bonds = torch.cat([bonds, bonds.flip(0)], dim=1)
        energy = (atoms[bonds[0], 0] * atoms[bonds[1], 1]).sum() / k
        made.append({"atoms": atoms, "bonds": bonds, "y": energy + 0.1 * torch.randn(1)})
    return made


def together(some: list[dict[str, Tensor]]) -> tuple[tuple[Any, ...], Tensor]:
    sizes = torch.tensor([len(each["atoms"]) for each in some])
    firsts = sizes.cumsum(0) - sizes
    bonds = torch.cat([each["bonds"] + first for each, first in zip(some, firsts, strict=True)], dim=1)
    graph = (torch.cat([each["atoms"] for each in some]), bonds, torch.arange(len(some)).repeat_interleave(sizes))
    return (*graph, len(some)), torch.stack([each["y"] for each in some])


class Potential(nn.Module):
    """An energy by the distances of four atoms, and the forces that are its gradient."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.last = nn.Linear(width, 1, bias=False)
        self.register_buffer("centres", torch.linspace(0.5, 2.5, 16))

    def forward(self, positions: Tensor) -> dict[str, Tensor]:
        one, other = torch.triu_indices(4, 4, 1)
        with torch.enable_grad():
            moved = positions if positions.requires_grad else positions.detach().requires_grad_()
            near = (moved[:, one] - moved[:, other]).norm(dim=2)[:, :, None] - self.centres
            energy = self.last(self.pair(torch.exp(-8 * near.square())).sum(dim=1))[:, 0]
            slope = torch.autograd.grad(energy.sum(), moved, create_graph=True)[0]
        return {"energy": energy, "forces": -slope}


class Adapted(nn.Module):
    """LoRA: a frozen layer in bfloat16, and a product of two small matrices beside it."""

    def __init__(self, before: int, after: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(before, after).bfloat16().requires_grad_(False)
        self.down, self.up = nn.Linear(before, rank, bias=False), nn.Linear(rank, after, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.to(self.base.weight.dtype)).to(x.dtype) + self.up(self.down(x))


@dataclass(frozen=True)
class WholeFit:
    """A network, batches to train it on, and what `fit` takes."""

    model: Callable[[], nn.Module]
    data: Callable[[int], Any]  # what `fit` is called with: items, a list of batches, or (X, y)
    batches: Callable[[Any], Iterable[tuple[Any, Any]]]  # of such data, the inputs as a tuple
    loss: Callable[[Any, Any], Tensor] = F.mse_loss
    settings: dict[str, Any] = field(default_factory=dict)
    estimator: type = PredictionIntervals
    at_most: float | None = None


def _of_items(items: list[Any]) -> Iterable[tuple[Any, Any]]:
    return (together(items[i : i + BATCH]) for i in range(0, len(items), BATCH))


def _of_arrays(data: tuple[Tensor, Tensor], dtype: torch.dtype | None = None) -> Iterable[tuple[Any, Any]]:
    return (((x.to(dtype or x.dtype),), y) for x, y in zip(*(each.split(BATCH) for each in data), strict=True))


def _numbers(n: int) -> tuple[Tensor, Tensor]:
    X = torch.randn(n, 20)
    return X, X.sin().sum(dim=1, keepdim=True) + 0.1 * torch.randn(n, 1)


def _structures(n: int) -> tuple[Tensor, Tensor]:
    corners = 1.2 * torch.cat([torch.zeros(1, 3), torch.eye(3)])
    return corners + 0.15 * torch.randn(n, 4, 3), torch.randn(n)


def _energies_and_forces(out: dict[str, Tensor], energy: Tensor) -> Tensor:
    return F.mse_loss(out["energy"], energy) + out["forces"].square().mean()


def _labels(n: int, n_features: int, n_labels: int, several: bool) -> tuple[Tensor, Tensor]:
    X = torch.randn(n, n_features) / torch.arange(1, n_features + 1).sqrt()
    z = 2 * X @ torch.randn(n_features, n_labels)
    return X, torch.bernoulli((z - 2).sigmoid()) if several else torch.distributions.Categorical(logits=z).sample()


WHOLE_FITS = {
    "graphs": WholeFit(Molecules, molecules, _of_items, settings={"collate": together}, at_most=10.0),
    "graphs_in_opaque_batches": WholeFit(
        Molecules,
        lambda n: list(_of_items(molecules(n))),
        iter,
        settings={"batch": lambda batch: (OpaqueBatch(batch[0], len(batch[1])), batch[1])},
        at_most=10.0,
    ),
    "energies_last_layer": WholeFit(
        Potential,
        _structures,
        _of_arrays,
        _energies_and_forces,
        {"parameters": "last", "output": lambda out: out["energy"]},
    ),
    "bfloat16": WholeFit(
        lambda: perceptron(20, 100, 100, 1).bfloat16(),
        _numbers,
        partial(_of_arrays, dtype=torch.bfloat16),
        lambda out, y: F.mse_loss(out.float(), y),
        {"precision": "float32"},
    ),
    "adapters": WholeFit(
        lambda: nn.Sequential(Adapted(20, 256), nn.ReLU(), Adapted(256, 256), nn.ReLU(), Adapted(256, 1)),
        _numbers,
        _of_arrays,
        settings={"precision": "float32"},
    ),
    "classes_1000": WholeFit(
        lambda: nn.Linear(512, 1000),
        partial(_labels, n_features=512, n_labels=1000, several=False),
        _of_arrays,
        F.cross_entropy,
        {"classes": "top5", "probes": 8},
        ClassificationIntervals,
    ),
    "labels_200": WholeFit(
        lambda: perceptron(64, 128, 200),
        partial(_labels, n_features=64, n_labels=200, several=True),
        _of_arrays,
        F.binary_cross_entropy_with_logits,
        {"loss": "bce", "classes": "top5", "probes": 8},
        ClassificationIntervals,
    ),
}


def measured(case: WholeFit, n: int, repeats: int) -> Result:
    """Return how long a fit takes, beside an epoch of training."""
    torch.manual_seed(0)
    model, data = case.model(), case.data(n)
    band = case.estimator(model, weight_decay=0.1, **case.settings)
    given = data if isinstance(data, tuple) else (data,)

    def epoch() -> None:
        for inputs, y in case.batches(data):
            model.zero_grad()
            case.loss(model(*inputs), y).backward()

    ours, training = race(lambda: band.fit(*given, progress=False), epoch, repeats=repeats)
    fit, plan = band.fits_[0], band.plan(*given)
    details: dict[str, Any] = {
        "p": fit.n_parameters,
        "n": fit.n_rows,
        "way": dict(band.summary_lines())["gradients"],
        "engine": fit.covariance.describe(),
        "fit s": ours,
        "epoch s": training,
        "planned MB": 0.0 if plan.chosen is None else plan.chosen.nbytes / 1e6,
    }
    if fit.probe_error is not None:
        details |= {"probes": fit.probe_error.count, "widths off by": fit.probe_error.width}
    return Result("a whole fit / one epoch of training", ours / training, at_most=case.at_most, details=details)
