"""A small network from 5 numbers to a field, with rows for it, also with missing targets."""

import torch
from torch import nn

DECAY, SHAPE = 1e-2, (2, 3, 4)


class Field(nn.Module):
    """From 5 numbers to a field of the shape (2, 3, 4)."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 24)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).reshape(-1, *SHAPE)


def rows(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    y = torch.stack([x[:, k % 5].sin() for k in range(24)], dim=1).reshape(n, *SHAPE)
    return x, y + 0.2 * torch.randn(n, *SHAPE, generator=generator, dtype=torch.float64)


def trained():
    torch.manual_seed(0)
    net, (x, y) = Field().double(), rows(60)
    optimiser = torch.optim.Adam(net.parameters(), 2e-2, weight_decay=DECAY)
    for _ in range(200):
        optimiser.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimiser.step()
    return net


def holes(y, share=0.3, seed=5):
    given = y.clone()
    given[torch.rand(y.shape, generator=torch.Generator().manual_seed(seed)) < share] = torch.nan
    return given
