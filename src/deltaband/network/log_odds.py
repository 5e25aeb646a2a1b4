"""The one-vs-rest log-odds of a classifier, and how much each weighs in a Fisher matrix.

    s_c = z_c − log Σ_{k≠c} exp z_k = log π_c/(1 − π_c),    ∇s_c = ∇log π_c/(1 − π_c)

Of two classes one number tells all: s_0 = −s_1. A network with one logit gives s_1 itself.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def log_odds(z: Tensor) -> Tensor:  # (b, M) -> (b, C); of two classes (b, 1), of class 1
    """Finite, and with the right gradient, for logits of any size: no π is taken to its logarithm."""
    if z.shape[1] == 1:
        return z
    if z.shape[1] == 2:
        return z[:, 1:] - z[:, :1]
    top = torch.arange(z.shape[1], device=z.device) == z.argmax(dim=1, keepdim=True)
    others = z.masked_fill(top, -torch.inf)
    second = others.detach().amax(dim=1, keepdim=True)  # large logits would lose their digits in the logarithm of a sum
    others = second + (others - second).logsumexp(dim=1, keepdim=True)
    log_p = z.log_softmax(dim=1)
    # of the largest logit 1 − π may be lost in π; of all others π is at most 1/2
    return torch.where(top, z - others, log_p - torch.log1p(-log_p.masked_fill(top, -torch.inf).exp()))


def largest(z: Tensor) -> Tensor:  # (b, C) -> (b, 1)
    """The log-odds of the class whose logit is the largest."""
    return log_odds(z).gather(1, z.argmax(dim=1, keepdim=True))


def joint_fisher(z: Tensor) -> Tensor:
    """The log-odds with gradients √π_c(1 − π_c)∇s_c = √π_c∇log π_c: their Gram matrix is the Fisher matrix of the
    softmax, Σ_c π_c ∇log π_c ∇log π_cᵀ. Of two classes it takes one row, √(π_0π_1)∇s_1."""
    s = log_odds(z)
    return own_fisher(s) if s.shape[1] == 1 else _weighted(s, (logsigmoid(s) / 2 + logsigmoid(-s)).exp())


def own_fisher(s: Tensor) -> Tensor:
    """Log-odds with gradients √(π_c(1 − π_c))∇s_c: for each class alone, the Fisher matrix of "c or not c"."""
    return _weighted(s, ((logsigmoid(s) + logsigmoid(-s)) / 2).exp())


def _weighted(s: Tensor, weight: Tensor) -> Tensor:
    """The value of s with the gradient of weight·s, the weight a constant."""
    constant = s.detach()
    return constant + weight.detach() * (s - constant)
