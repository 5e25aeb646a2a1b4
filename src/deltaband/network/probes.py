"""Random combinations of a row's outputs, whose gradients stand in for those of the outputs where these are many.

With signs uₖ, independent over k and rows, and cₖ = uₖ/√r

    g̃ₖ = Σⱼ cₖⱼ gⱼ,    E Σₖ g̃ₖg̃ₖᵀ = Σⱼ gⱼgⱼᵀ,

so that r backward passes give an unbiased estimate of a row's part of JᵀJ, instead of one for each output. The signs
follow from the seed and the numbers of the row: whichever batch, part or process a row comes in, they are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..data.inputs import Inputs
from ..data.row_record import row_hashes
from ..storage.encoding import storable

EXACT_OUTPUTS = 64  # up to so many outputs of a row all have gradients of their own, unless a fit is told otherwise
FEWEST_PROBES, MOST_PROBES = 8, 128  # where nobody says how many
PROBE_ERROR = 0.01  # of widths
COMBINATION = "combination"  # the extra of rows that holds cₖ, (b, r, m)


@storable
@dataclass(frozen=True)
class Probes:
    """How many combinations of each row's outputs there are, and the seed that their signs follow from."""

    count: int
    seed: int = 0

    def combinations(self, x: Inputs, n_outputs: int, like: Tensor) -> Tensor:  # (b, r, m)
        """Return cₖ of these rows, with the roots of their weights as factors where they have any."""
        numbers = np.stack([row_hashes(tensor) for tensor in x.hashed])
        found = np.empty((len(x), self.count, n_outputs), dtype=np.int8)
        size = self.count * n_outputs
        for row, key in zip(found, numbers.T.tolist(), strict=True):
            raw = np.random.default_rng([self.seed, *key]).bytes(-(-size // 8))
            row[:] = np.unpackbits(np.frombuffer(raw, dtype=np.uint8), count=size).reshape(row.shape)
        signs = torch.from_numpy(found).to(like).mul_(2).sub_(1).div_(math.sqrt(self.count))
        if x.weight is None:
            return signs
        return signs * x.weight.to(like).expand(-1, n_outputs).sqrt()[:, None]


@storable
@dataclass(frozen=True)
class ProbeError:
    """What combinations instead of all outputs do to widths: the mean over rows of relative errors."""

    random: float  # of the signs that were drawn, in proportion to 1/√r
    bias: float  # of so few of them, in proportion to 1/r
    count: int  # r

    @property
    def width(self) -> float:
        """The error with r combinations."""
        return math.hypot(self.random, self.bias)

    def needed(self, width: float) -> int:
        """Return how many combinations an error of this size takes, about."""
        a, b = self.bias**2, self.random**2
        # a f² + b f = width², f being the factor on 1/r
        f = 2 * width**2 / (b + math.sqrt(b**2 + 4 * a * width**2)) if a + b > 0 else math.inf
        return max(1, math.ceil(self.count / f)) if f > 0 else self.count

    def advice(self, width: float, n_outputs: int) -> str:
        """Say how many combinations an error of this size takes, where there are fewer."""
        many = min(self.needed(width), n_outputs)
        enough = f"about probes={many:,}" if many < n_outputs else f"all {n_outputs:,} outputs (probes={n_outputs})"
        return (
            f"{self.count} random combinations of the {n_outputs:,} outputs of a row make widths off by "
            f"{self.width:.1%}: for {width:.0%} it takes {enough}"
        )


def probes_for(n_outputs: int, n_rows: int | None, n_parameters: int, asked: int | None = None) -> Probes | None:
    """Return the combinations that a fit takes, as many as are asked for; None where all outputs are to be taken.

    By themselves so many that widths √(1 + q) are off by 1 % if all p parameters are effective: with Σq = p* over n
    rows of m outputs, q is p*/(nm) on average, and its relative error p*/(nr).
    """
    if asked is not None:
        return None if asked >= n_outputs else Probes(asked)
    if n_outputs <= EXACT_OUTPUTS:
        return None
    if n_rows is None:
        return Probes(FEWEST_PROBES)
    p_star = min(n_parameters, n_rows * n_outputs)
    wanted = math.ceil(p_star**2 / (2 * PROBE_ERROR * n_rows**2 * n_outputs))
    count = min(max(wanted, FEWEST_PROBES), MOST_PROBES)
    return None if count >= n_outputs else Probes(count)
