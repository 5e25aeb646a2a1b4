"""The one-vs-rest log-odds of a classifier, and their weights in a Fisher matrix.

    s_c = z_c − log Σ_{k≠c} exp z_k = log π_c/(1 − π_c),    ∇s_c = ∇log π_c/(1 − π_c)

For two classes one number suffices: s_0 = −s_1. A network with one logit returns s_1 itself.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def log_odds(z: Tensor) -> Tensor:  # (b, M) -> (b, C); for two classes (b, 1), that of class 1
    """Return the log-odds of logits, finite and with exact gradients whatever their size: no log π is taken of a π."""
    if z.shape[1] == 1:
        return z
    if z.shape[1] == 2:
        return z[:, 1:] - z[:, :1]
    top = torch.arange(z.shape[1], device=z.device) == z.argmax(dim=1, keepdim=True)
    others = z.masked_fill(top, -torch.inf)
    second = others.detach().amax(dim=1, keepdim=True)  # large logits would lose digits in the logarithm of a sum
    others = second + (others - second).logsumexp(dim=1, keepdim=True)
    log_p = z.log_softmax(dim=1)
    # for the largest logit 1 − π may vanish beside π; for all others π is at most 1/2
    return torch.where(top, z - others, log_p - torch.log1p(-log_p.masked_fill(top, -torch.inf).exp()))


def joint_fisher(z: Tensor) -> Tensor:
    """Return the log-odds with gradients √π_c(1 − π_c)∇s_c = √π_c∇log π_c; for two classes one row, √(π_0π_1)∇s_1.

    Their Gram matrix is the Fisher matrix of the softmax, Σ_c π_c ∇log π_c ∇log π_cᵀ.
    """
    s = log_odds(z)
    return own_fisher(s) if s.shape[1] == 1 else _weighted(s, (logsigmoid(s) / 2 + logsigmoid(-s)).exp())


def own_fisher(s: Tensor) -> Tensor:
    """Return log-odds with gradients √(π_c(1 − π_c))∇s_c: for each class alone, the Fisher matrix of "c or not c"."""
    return _weighted(s, ((logsigmoid(s) + logsigmoid(-s)) / 2).exp())


def _weighted(s: Tensor, weight: Tensor) -> Tensor:
    """Return the value of s with the gradient of weight·s, the weight being constant."""
    return s.detach() + weight.detach() * (s - s.detach())
