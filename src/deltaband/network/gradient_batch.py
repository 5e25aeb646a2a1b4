"""The gradients of a batch of rows, whole or layer by layer: rows where rows are wanted, inner products where not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..storage.encoding import storable
from .layers.factors import Part, Rows, alike, inner, stacked

# A chunk of rows that fits the processor's cache is two to three times faster to make than one that does not, but
# a handful of rows wastes the matrix products that follow.
CHUNK_BYTES = 8 * 2**20
CHUNK_ROWS_AT_LEAST = 64
MERGED_BYTES = 8 * 2**20  # of blocks that are put together
PRODUCT_ROWS = 1024  # whose inner products are asked for at once


class Block(Protocol):
    """The gradients of some rows, part by part, a part being the parameters of a layer."""

    def __len__(self) -> int: ...

    @property
    def n_parameters(self) -> int: ...

    @property
    def together(self) -> int:
        """With how many rows, those of other blocks included, its parts should be held in memory at once."""
        ...

    def parts(self) -> Sequence[Part]:
        """Each of the same rows."""
        ...


@storable
@dataclass(frozen=True)
class Held:
    """A block that is there."""

    held: Sequence[Part]
    together = 0

    def __len__(self) -> int:
        return len(self.held[0])

    @property
    def n_parameters(self) -> int:
        return sum(part.n_parameters for part in self.held)

    def parts(self) -> Sequence[Part]:
        return self.held


@storable
@dataclass(frozen=True)
class GradientBatch:
    """The gradients of some rows, in blocks.

    An engine that wants the rows asks for `rows()` or `columns(width)`; one that wants only inner products asks for
    `inner(other)`, and no row is formed where a layer does without.
    """

    blocks: tuple[Block, ...]  # of the same parameters each

    @classmethod
    def of(cls, *rows: Tensor) -> GradientBatch:  # each (b_i, p)
        """From blocks of rows."""
        return cls(tuple(Held((Rows(block),)) for block in rows))

    def __len__(self) -> int:
        return sum(map(len, self.blocks))

    @property
    def n_parameters(self) -> int:
        return self.blocks[0].n_parameters

    def row_blocks(self) -> Iterator[Tensor]:  # each (b_i, p)
        for block in self.blocks:
            parts = block.parts()
            yield parts[0].rows() if len(parts) == 1 else torch.cat([part.rows() for part in parts], dim=1)

    def rows(self) -> Tensor:  # (b, p)
        return next(self.row_blocks()) if len(self.blocks) == 1 else torch.cat(list(self.row_blocks()))

    @cached_property
    def squared_norms(self) -> np.ndarray:  # (b,) float64
        return np.concatenate([sum(part.squared_norms() for part in block.parts()) for block in self.blocks])

    def columns(self, width: int) -> Iterator[np.ndarray]:
        """All rows in float64, some columns at a time: (b, ≤ width). Each overwrites the one before.

        Where a layer does without rows, only these columns of them are formed.
        """
        memory = np.empty(len(self) * min(width, self.n_parameters))
        for layer in zip(*(block.parts() for block in self.blocks), strict=True):
            for start in range(0, layer[0].n_parameters, width):
                stop = min(start + width, layer[0].n_parameters)
                columns = memory[: len(self) * (stop - start)].reshape(len(self), stop - start)
                np.concatenate([part.columns(start, stop).cpu().numpy() for part in layer], out=columns)
                yield columns

    def inner(self, other: GradientBatch) -> np.ndarray:
        """Inner products in float64: equals `self.rows() @ other.rows().T`."""  # (b, b')
        if self.has_rows and other.has_rows:
            width = max(1, CHUNK_BYTES // (8 * max(len(self), len(other), 1)))
            products = np.zeros((len(self), len(other)))
            for mine, theirs in zip(self.columns(width), other.columns(width), strict=True):
                products += mine @ theirs.T
            return products
        left = self.merged()
        return np.concatenate([left._inner(block.parts()) for block in other.blocks], axis=1)

    def _inner(self, theirs: Sequence[Part]) -> np.ndarray:
        pairs = (zip(block.parts(), theirs, strict=True) for block in self.blocks)
        return np.concatenate([sum(inner(a, b) for a, b in layers) for layers in pairs])

    @property
    def has_rows(self) -> bool:
        """Whether the rows are there, rather than what they could be formed from."""
        return all(
            isinstance(block, Held) and all(isinstance(part, Rows) for part in block.held) for block in self.blocks
        )

    def merged(self) -> GradientBatch:
        """The same in memory, in fewer and larger blocks, whose products are faster."""
        groups: list[list[Sequence[Part]]] = []
        size = 0
        for block in self.blocks:
            parts = block.parts()
            size += sum(part.nbytes for part in parts)
            if groups and size <= MERGED_BYTES and all(map(alike, groups[-1][0], parts)):
                groups[-1].append(parts)
            else:
                groups.append([parts])
                size = sum(part.nbytes for part in parts)
        return GradientBatch(
            tuple(Held(tuple(stacked(layer) for layer in zip(*group, strict=True))) for group in groups)
        )

    def take(self, index: np.ndarray) -> GradientBatch:
        """The rows of these numbers, in order."""
        chosen, first = [], 0
        for block in self.blocks:
            within = torch.from_numpy(index[(index >= first) & (index < first + len(block))] - first)
            first += len(block)
            if len(within):
                chosen.append(Held(tuple(part.take(within) for part in block.parts())))
        return GradientBatch(tuple(chosen))

    def between(self, start: int, stop: int) -> GradientBatch:
        """The rows from one number to another; none is copied."""
        chosen, first = [], 0
        for block in self.blocks:
            within = slice(max(start - first, 0), max(stop - first, 0))
            if within.start < min(within.stop, len(block)):
                chosen.append(Held(tuple(part.take(within) for part in block.parts())))
            first += len(block)
        return GradientBatch(tuple(chosen))

    def split(self, size: int) -> Iterator[GradientBatch]:
        """The same rows, at most `size` at a time; no row is copied."""
        for block in self.blocks:
            parts = block.parts()
            for start in range(0, max(len(block), 1), size):
                yield GradientBatch((Held(tuple(part.take(slice(start, start + size)) for part in parts)),))

    @staticmethod
    def concatenate(batches: Iterable[GradientBatch]) -> GradientBatch:
        """One batch out of many; no row is copied."""
        return GradientBatch(tuple(block for batch in batches for block in batch.blocks))
