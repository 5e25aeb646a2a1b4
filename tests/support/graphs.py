"""Graphs like small molecules, of different sizes, and networks for them in plain torch."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

FEATURES = 4


@dataclass
class Molecule:
    atoms: Tensor  # (k, FEATURES)
    bonds: Tensor  # (2, e)
    energy: Tensor  # (1,)


def molecules(n: int, seed: int = 0, dtype: torch.dtype = torch.float32, m: int = 1) -> list[Molecule]:
    """Return rings with some bonds across, whose energies depend on neighbours."""
    generator, made = torch.Generator().manual_seed(seed), []
    for _ in range(n):
        k = int(torch.randint(3, 9, (1,), generator=generator))
        atoms = torch.randn(k, FEATURES, generator=generator, dtype=dtype)
        ring = torch.stack([torch.arange(k), torch.arange(k).roll(-1)])
        across = torch.randint(k, (2, int(torch.randint(3, (1,), generator=generator))), generator=generator)
        bonds = torch.cat([ring, ring.flip(0), across], dim=1)
        energy = (atoms[bonds[0], :1] * atoms[bonds[1], 1:2]).sum(dim=0) / 2 + atoms[:, :1].tanh().sum(dim=0)
        noise = torch.randn(m, generator=generator, dtype=dtype)
        made.append(Molecule(atoms, bonds, energy * torch.arange(1, m + 1) + 0.1 * noise))
    return made


def collate(some: list[Molecule]) -> tuple[dict[str, object], Tensor]:
    """Return one large graph, which says of each atom whose it is, and the energies."""
    sizes = torch.tensor([len(each.atoms) for each in some])
    firsts = sizes.cumsum(0) - sizes
    graph = {
        "atoms": torch.cat([each.atoms for each in some]),
        "bonds": torch.cat([each.bonds + first for each, first in zip(some, firsts, strict=True)], dim=1),
        "owner": torch.repeat_interleave(torch.arange(len(some)), sizes),
        "n": len(some),
    }
    return graph, torch.stack([each.energy for each in some])


class MessagePassing(nn.Module):
    """Messages along bonds by `index_add`, and the sum over the atoms of each graph."""

    def __init__(self, width: int = 8, outputs: int = 1, own: bool = False) -> None:
        super().__init__()
        self.atom, self.message = nn.Linear(FEATURES, width), nn.Linear(2 * width, width)
        self.norm, self.kind = nn.LayerNorm(width), nn.Embedding(3, width)
        self.out = nn.Linear(width, outputs)
        self.scale = nn.Parameter(torch.ones(width)) if own else None

    def forward(self, graph: dict[str, Tensor]) -> Tensor:
        start, end = graph["bonds"]
        degree = torch.zeros_like(graph["owner"]).index_add(0, end, torch.ones_like(end)).clamp(max=2)
        h = torch.tanh(self.atom(graph["atoms"]) + self.kind(degree))
        h = self.norm(h.index_add(0, end, torch.tanh(self.message(torch.cat([h[start], h[end]], dim=1)))))
        h = h if self.scale is None else h * self.scale
        return self.out(h.new_zeros(graph["n"], h.shape[1]).index_add(0, graph["owner"], h))
