"""A ResNet-18 and a small GPT with one output, as large networks to fit."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class BasicBlock(nn.Module):
    """Two convolutions and what goes past them."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(out), nn.BatchNorm2d(out)])
        self.past: nn.Module = nn.Identity()
        if stride > 1:
            self.past = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.past(x))


class ResNet18(nn.Module):
    """He et al. 2016, with one output: 11,177,025 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        sizes = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        sizes += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
        self.blocks = nn.Sequential(*(BasicBlock(*size) for size in sizes))
        self.last = nn.Linear(512, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(x), 3, 2, padding=1)
        return self.last(self.blocks(x).mean(dim=(2, 3)))[:, 0]


class Decoder(nn.Module):
    """A layer of a GPT: causal attention and a perceptron, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # (b, t, width)
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, 2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.mlp(self.norms[1](x))


class SmallGPT(nn.Module):
    """Six layers of width 128 over sequences of 128 tokens, read off at the last one: 1.2 million parameters."""

    def __init__(self, tokens: int = 100, length: int = 128, width: int = 128, heads: int = 4, layers: int = 6) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Decoder(width, heads) for _ in range(layers)))
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:  # (b, t)
        h = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        return self.last(self.norm(self.layers(h))[:, -1])[:, 0]
