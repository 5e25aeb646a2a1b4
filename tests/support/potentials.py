"""A small interatomic potential: energies of four atoms, and forces, the gradients of these, in one forward pass."""

import torch
from torch import Tensor, nn

CORNERS = 1.2 * torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], dtype=torch.float64)
PAIRS = torch.triu_indices(4, 4, 1)


def distances(positions: Tensor) -> Tensor:  # (b, 4, 3) -> (b, 6)
    return (positions[:, PAIRS[0]] - positions[:, PAIRS[1]]).norm(dim=2)


class Potential(nn.Module):
    """A sum over pairs of atoms of what a network makes of their distance; the last layer is linear."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.register_buffer("centres", torch.linspace(0.5, 2.5, 8))
        self.pair = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.last = nn.Linear(width, 1, bias=False)

    def features(self, positions: Tensor) -> Tensor:  # (b, width), of which the energy is a linear function
        return self.pair(torch.exp(-4 * (distances(positions)[:, :, None] - self.centres) ** 2)).sum(dim=1)

    def forward(self, positions: Tensor) -> dict[str, Tensor]:
        with torch.enable_grad():  # whatever the context
            moved = positions if positions.requires_grad else positions.detach().requires_grad_()
            energy = self.last(self.features(moved))[:, 0]
            (slope,) = torch.autograd.grad(energy.sum(), moved, create_graph=True)
        return {"energy": energy, "forces": -slope}


def structures(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return positions (n, 4, 3), energies of Morse's potential (n,) and forces (n, 12), in float64."""
    generator = torch.Generator().manual_seed(seed)
    positions = CORNERS + 0.15 * torch.randn(n, 4, 3, generator=generator, dtype=torch.float64)
    positions.requires_grad_()
    energy = (1 - torch.exp(-1.5 * (distances(positions) - 1.2))).square().sum(dim=1)
    (slope,) = torch.autograd.grad(energy.sum(), positions)
    return positions.detach(), energy.detach(), -slope.reshape(n, -1)
