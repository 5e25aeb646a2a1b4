"""All outputs of a row at once: their gradients along directions, by forward-mode products.

A pass forward along a direction t gives t·gⱼ for every output j. Along the r rows of a projection S these are the
coordinates Sgⱼ that its covariance asks for, and along all p parameters the gradients themselves: r or p passes for a
row instead of one backward for each of m outputs, which images have thousands of.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.func import jvp, vmap

from ..data.inputs import Inputs
from . import checks
from .combined import of_rows
from .gradient_batch import GradientBatch
from .layers import hooks
from .layers.projection import Projection
from .network import Network, plain_autograd

COORDINATE_BYTES, TANGENT_BYTES = 2**27, 2**26  # of rows computed at once; of directions, and of passes along them
COORDINATE_SHARE, TANGENT_SHARE = 1 / 4, 1 / 8  # of the memory that there is, at most, for these
TRIED_DIRECTIONS = 4


def forward(network: Network, S: Projection | None, n_outputs: int, memory: float) -> Network:
    """Return a network that takes the directions of S, or all parameters, if they are fewer than a row's outputs."""
    n_directions = network.n_parameters if S is None else S.dim
    return network if n_outputs <= n_directions else ForwardNetwork(network, S, memory)


class ForwardNetwork(Network):
    """A network of many outputs whose gradients come by forward mode: projected by S, or whole where there is none.

    Whether that is right is tried for each kind of inputs, against a backward pass; where not, they come by these. One
    row and one direction at a time take what they take; more are passed at once as far as `memory` allows.
    """

    def __init__(self, network: Network, S: Projection | None, memory: float) -> None:
        super().__init__(network.model_copy, network.layers, network.head)
        self.S: Final = S
        self._for_rows: Final = int(min(COORDINATE_BYTES, COORDINATE_SHARE * memory))
        self._for_directions: Final = int(min(TANGENT_BYTES, TANGENT_SHARE * memory))
        self._is_forward = True  # for the inputs that were asked about last

    def gradients(self, x: Inputs, group: slice = slice(None)) -> tuple[Tensor, GradientBatch]:
        """Compute outputs and gradients as ever; those of a projection are already projected."""
        if not self._works(x):
            return super().gradients(x, group)
        m, few = self.validate(x), self.prepare(x)
        with plain_autograd(self.device), torch.no_grad():
            together = self._fresh(few)
            if len(few) > 1:
                checks.check_batch(self._fresh, few, together, None, self.model_copy.rng)
            found = torch.cat([self._along(few, block, group) for block in self._directions(self._at_once(few))])
        rows = found.permute(2, 1, 0).reshape(-1, len(found))  # all rows of the first output, then of the second
        g = of_rows(self, rows) if self.S is None else GradientBatch.of(rows)
        if x.weight is not None:
            g = g.scaled(x.weight.expand(-1, m)[:, group].T.reshape(-1).sqrt())
        return together[:, group], g

    def chunk_rows(self, x: Inputs) -> int:
        """Return how many rows are computed at once."""
        if not self._works(x):
            return super().chunk_rows(x)
        row_bytes = self._coordinate_bytes * self.validate(x) + self._accepted(Inputs.of(x)).pass_bytes
        return max(1, self._for_rows // row_bytes)

    def _outputs_at_once(self, n_outputs: int) -> int:
        most = self._for_rows // self._coordinate_bytes
        return max(1, min(n_outputs, most)) if self._is_forward else super()._outputs_at_once(n_outputs)

    def groups(self, x: Inputs) -> Iterator[slice]:
        """Yield the outputs, as many at a time as have coordinates that fit into memory."""
        self._works(x)
        return super().groups(x)

    @property
    def _names(self) -> list[str]:
        """The parameters in the order of the gradients' columns."""
        return [name for owner in self.owners for name in owner]

    @property
    def _coordinate_bytes(self) -> int:
        return self.dtype.itemsize * (self.n_parameters if self.S is None else self.S.dim)

    def _at_once(self, x: Inputs) -> int:
        """Return along how many directions to pass at once."""
        per_direction = len(x) * self._accepted(x).pass_bytes + self.n_parameters * self.dtype.itemsize
        return max(1, self._for_directions // per_direction)

    def _along(self, x: Inputs, directions: Tensor, group: slice = slice(None)) -> Tensor:  # (c, p) -> (c, b, m)
        names = self._names
        sizes = [self.parameters[name].numel() for name in names]
        shapes = [(len(directions), *self.parameters[name].shape) for name in names]
        parts = (part.reshape(shape) for part, shape in zip(torch.split(directions, sizes, dim=1), shapes, strict=True))
        varied = {name: self.parameters[name] for name in names}

        def outputs(parameters: dict[str, Tensor]) -> Tensor:
            return self._fresh(x, self.parameters | parameters)[:, group]

        with hooks.math_attention():
            return vmap(lambda t: jvp(outputs, (varied,), (t,))[1])(dict(zip(names, parts, strict=True))).detach()

    def _directions(self, size: int) -> Iterator[Tensor]:  # each (≤ size, p)
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        if self.S is not None:
            weights = [self.parameters[name] for name in self._names]
            yield from self.S.row_blocks(weights, size, like)
            return
        for start in range(0, self.n_parameters, size):
            block = like.new_zeros(min(size, self.n_parameters - start), self.n_parameters)
            block[:, start : start + size].fill_diagonal_(1)
            yield block

    def _works(self, x: Inputs) -> bool:
        known = self.model_copy.by_forward
        key = Inputs.of(x).without_extras().row_format, self.S
        if key not in known:
            known[key] = self._is_right(Inputs.of(x)[:1].without_extras())
        self._is_forward = known[key]
        return self._is_forward

    def _is_right(self, x: Inputs) -> bool:
        """Return whether products along some sums of the directions are those of a gradient by a backward pass."""
        m, rng = self.validate(x), np.random.default_rng(0)
        o = int(rng.integers(m))
        which = slice(o, o + 1)
        try:
            with warnings.catch_warnings(), plain_autograd(self.device):
                warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when it loads its rules
                _, g = Network(self.model_copy, self.layers, self.head).gradients(x, which)
                expected = (g if self.S is None else g.projected(self.S)).rows()[0]  # (r,)
                signs = torch.from_numpy(rng.choice([-1.0, 1.0], (TRIED_DIRECTIONS, len(expected)))).to(expected)
                sums, first = expected.new_zeros(TRIED_DIRECTIONS, self.n_parameters), 0
                for block in self._directions(self._at_once(x)):
                    sums += signs[:, first : first + len(block)] @ block
                    first += len(block)
                with torch.no_grad():
                    found = self._along(self.prepare(x), sums, which)[:, 0, 0]
        except (RuntimeError, NotImplementedError, TypeError, ValueError):  # no rule for forward mode, or for vmap
            return False
        expected = signs @ expected
        return torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
