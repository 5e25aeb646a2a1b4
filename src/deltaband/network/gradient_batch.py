"""The gradients of a batch of rows, as full rows or layer by layer: rows on demand, inner products without them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..data.inputs import Inputs
from ..storage.encoding import storable
from .layers.factors import DenseRows, Part, alike, exact, inner, stacked
from .layers.projection import Projection

if TYPE_CHECKING:
    from .network import Network

# A chunk of rows that fits the processor's cache is two to three times faster to compute than one that does not, but
# a handful of rows wastes the matrix products that follow.
CHUNK_BYTES = 8 * 2**20
CHUNK_ROWS_AT_LEAST = 64
MERGED_BYTES = 8 * 2**20  # size up to which blocks are merged
LARGEST_OF_FACTORS = 1e60  # sums of fourth powers of what is smaller are far from the largest number
PRODUCT_ROWS = 1024  # rows whose inner products are computed at once
WAITING_BYTES = 2**25  # of gradients that wait for others
FORMED_BYTES = 8  # of a number in rows that are formed, at most
FLOAT64_BYTES = 2**27  # size up to which rows that many others are compared with are kept in float64 as well


def shaped(part: Part, weights: Sequence[Tensor]) -> Part:
    """Return rows in full with the shapes of their weights, which the factors of a layer have in any case."""
    if not isinstance(part, DenseRows):
        return part
    return DenseRows(part.values, tuple((len(w), w[0].numel()) if w.ndim > 1 else (w.numel(), 1) for w in weights))


@storable
@dataclass(frozen=True)
class StoredBlock:
    """The gradients of some rows, part by part, a part being the parameters of a layer."""

    stored: Sequence[Part]

    def __len__(self) -> int:
        return len(self.stored[0])

    @property
    def n_parameters(self) -> int:
        return sum(part.n_parameters for part in self.stored)

    def parts(self, owners: Container[int] | None = None) -> Sequence[Part]:
        return self.stored if owners is None else [part for i, part in enumerate(self.stored) if i in owners]


@storable
@dataclass(frozen=True)
class Recomputed:
    """The same, of which only the inputs are kept: the parts are computed again whenever they are asked for."""

    network: Network  # with weights of its own, that nobody trains
    x: Inputs
    group: slice  # of the outputs
    rows_in_memory: int  # how many, with those of other blocks, may have all of their parts there at once

    def __len__(self) -> int:
        return len(self.x) * (self.group.stop - self.group.start)

    @property
    def n_parameters(self) -> int:
        return self.network.n_parameters

    def parts(self, owners: Container[int] | None = None) -> Sequence[Part]:
        """Compute the parts again, all of them or those with these numbers."""
        network = self.network.copy()  # one of its own each time: several threads may ask
        if owners is not None and network.layers is not None:
            network = network.with_layers(network.layers.only(owners))
        _, gradients = network.gradients(self.x, self.group)
        return [stacked(parts) for parts in zip(*(block.parts() for block in gradients.blocks), strict=True)]


@storable
@dataclass(frozen=True)
class GradientBatch:
    """The gradients of some rows, in blocks: `inner` and `projected` form no row for layers that have factors."""

    blocks: tuple[StoredBlock | Recomputed, ...]  # each for the same parameters

    @classmethod
    def of(cls, *rows: Tensor) -> GradientBatch:  # each (b_i, p)
        return cls(tuple(StoredBlock((DenseRows(block),)) for block in rows))

    def __len__(self) -> int:
        return sum(map(len, self.blocks))

    @property
    def n_parameters(self) -> int:
        return self.blocks[0].n_parameters

    def row_blocks(self) -> Iterator[Tensor]:  # each (b_i, p)
        """Yield the rows; those that are formed from factors, few enough at a time for the processor's cache."""
        for block in self.blocks:
            parts = block.parts()
            if len(parts) == 1 and isinstance(parts[0], DenseRows):
                yield parts[0].values
                continue
            step = max(CHUNK_ROWS_AT_LEAST, CHUNK_BYTES // (FORMED_BYTES * max(block.n_parameters, 1)))
            for start in range(0, len(block), step):
                some = slice(start, start + step)
                yield torch.cat([part.take(some).rows() for part in parts], dim=1)

    def rows(self) -> Tensor:  # (b, p)
        found = list(self.row_blocks())
        return found[0] if len(found) == 1 else torch.cat(found)

    @property
    def nbytes(self) -> int:
        """The memory of what is stored."""
        stored = (block.stored for block in self.blocks if isinstance(block, StoredBlock))
        return sum(part.nbytes for parts in stored for part in parts)

    @property
    def surely_finite(self) -> bool:
        """Whether a quick look shows that all squared norms are finite, which they may be where it does not."""
        stored = [part for block in self.blocks if isinstance(block, StoredBlock) for part in block.stored]
        tensors = [t for part in stored for t in part._tensors.values() if t.is_floating_point() and t.numel()]
        extremes = [extreme for tensor in tensors for extreme in torch.aminmax(tensor)]
        return bool(extremes) and bool((torch.stack(extremes).abs() < LARGEST_OF_FACTORS).all())

    @cached_property
    def squared_norms(self) -> np.ndarray:  # (b,) float64
        norms = [torch.stack([part.squared_norms() for part in block.parts()]).sum(dim=0) for block in self.blocks]
        return torch.cat(norms).cpu().numpy()

    def columns(self, width: int) -> Iterator[np.ndarray]:
        """Yield all rows in float64, some columns at a time: (b, ≤ width). Each overwrites the one before."""
        memory = np.empty(len(self) * min(width, self.n_parameters))
        for layer in zip(*(block.parts() for block in self.blocks), strict=True):
            for start in range(0, layer[0].n_parameters, width):
                stop = min(start + width, layer[0].n_parameters)
                columns = memory[: len(self) * (stop - start)].reshape(len(self), stop - start)
                np.concatenate([part.columns(start, stop).cpu().numpy() for part in layer], out=columns)
                yield columns

    @property
    def is_in_memory(self) -> bool:
        """Whether no row has to be computed again from its inputs."""
        return not any(isinstance(block, Recomputed) for block in self.blocks)

    def kernel(self, K: np.ndarray | None = None) -> np.ndarray:  # (b, b)
        """Return JJᵀ, in the upper triangle, for rows in memory; added to K, in its memory, if one is given."""
        K = np.zeros((len(self), len(self)), order="F") if K is None else K
        stored = [block.parts() for block in self.blocks]
        whole = [i for i, parts in enumerate(zip(*stored, strict=True)) if all(map(_in_main_memory, parts))]
        if whole:  # half of the products is enough, and each number is converted once
            dense = GradientBatch(tuple(StoredBlock([parts[i] for i in whole]) for parts in stored))
            for columns in dense.columns(width=max(1, CHUNK_BYTES // (8 * max(len(self), 1)))):
                K = add_gram(K, columns, outer=True)
        if not stored or len(whole) == len(stored[0]):
            return K
        others = [[part for i, part in enumerate(parts) if i not in whole] for parts in stored]
        blocks = [GradientBatch((StoredBlock(parts),)) for parts in others]
        ends = np.cumsum([0, *map(len, blocks)])
        for last, mine in enumerate(blocks):
            for i in range(last + 1):
                K[ends[i] : ends[i + 1], ends[last] : ends[last + 1]] += blocks[i].inner(mine)
        return K

    def inner(self, other: GradientBatch) -> np.ndarray:
        """Return inner products in float64, which equal `self.rows() @ other.rows().T`."""  # (b, b')
        if self.rows_on_cpu and other.rows_on_cpu:
            width = max(1, CHUNK_BYTES // (8 * max(len(self), len(other), 1)))
            products = np.zeros((len(self), len(other)))
            for mine, theirs in zip(self.columns(width), other.columns(width), strict=True):
                products += mine @ theirs.T
            return products
        left = [block.parts() for block in self.merged().blocks]
        right = (block.parts() for block in other.blocks)  # one at a time
        columns = [torch.cat([_total(map(inner, mine, theirs)) for mine in left]) for theirs in right]
        return torch.cat(columns, dim=1).cpu().numpy()  # once, and of the products alone

    def projected(self, S: Projection) -> GradientBatch:
        """Return gSᵀ, from layer factors where that is faster."""  # (b, p) -> (b, r)
        return GradientBatch.of(*(S(block.parts()) for block in self.blocks))

    @property
    def has_rows(self) -> bool:
        """Whether full rows are in memory, rather than factors that they can be formed from."""
        stored = [block.stored if isinstance(block, StoredBlock) else (None,) for block in self.blocks]
        return all(isinstance(part, DenseRows) for parts in stored for part in parts)

    @property
    def rows_on_cpu(self) -> bool:
        """Whether full rows are in main memory, where BLAS multiplies them."""
        tensors = (t for block in self.blocks for part in block.parts() for t in part._tensors.values())
        return self.has_rows and all(tensor.device.type == "cpu" for tensor in tensors)

    def merged(self) -> GradientBatch:
        """Return the same rows in memory, in fewer and larger blocks, whose products are faster."""
        groups: list[list[Sequence[Part]]] = []
        size = 0
        for block in self.blocks:
            parts = block.parts()
            n_bytes = sum(part.nbytes for part in parts)
            size += n_bytes
            if groups and size <= MERGED_BYTES and all(map(alike, groups[-1][0], parts)):
                groups[-1].append(parts)
            else:
                groups.append([parts])
                size = n_bytes
        return GradientBatch(tuple(StoredBlock(tuple(map(stacked, zip(*group, strict=True)))) for group in groups))

    @cached_property
    def in_float64(self) -> GradientBatch:
        """Return the same rows for many inner products: in float64 and in one block, where these take little memory."""
        stored = [block.stored for block in self.blocks if isinstance(block, StoredBlock)]
        n_bytes = sum(part.float64_bytes for parts in stored for part in parts)
        if len(stored) < len(self.blocks) or n_bytes > FLOAT64_BYTES:
            return self
        if not all(alike(*pair) for parts in stored for pair in zip(stored[0], parts, strict=True)):
            return self
        return GradientBatch((StoredBlock([stacked(parts).map(exact) for parts in zip(*stored, strict=True)]),))

    def take(self, index: np.ndarray) -> GradientBatch:
        """Return the rows with these numbers, in order."""
        return self._select(lambda first, stop: torch.from_numpy(index[(index >= first) & (index < stop)] - first))

    def shuffled(self, seed: int) -> GradientBatch:
        """Return the rows in random order, in memory."""
        order = np.random.default_rng(seed).permutation(len(self))
        return GradientBatch.concatenate([self.take(order[i : i + 1]) for i in range(len(order))]).merged()

    def between(self, start: int, stop: int) -> GradientBatch:
        """Return the rows from number `start` to before `stop`; none is copied."""
        return self._select(lambda first, end: slice(max(start - first, 0), max(min(stop, end) - first, 0)))

    def _select(self, within: Callable[[int, int], Tensor | slice]) -> GradientBatch:
        """Return the rows that `within` gives for each block, from the numbers of its first row and of the next's."""
        chosen, first = [], 0
        for block in self.blocks:
            index = within(first, first + len(block))
            first += len(block)
            if (index.start < index.stop) if isinstance(index, slice) else len(index):
                chosen.append(StoredBlock(tuple(part.take(index) for part in block.parts())))
        return GradientBatch(tuple(chosen))

    def scaled(self, factors: Tensor) -> GradientBatch:  # (b,)
        """Return each row times its factor."""
        blocks = zip(self.blocks, torch.split(factors, [len(block) for block in self.blocks]), strict=True)
        return GradientBatch(tuple(StoredBlock([part.scaled(f) for part in block.parts()]) for block, f in blocks))

    def split(self, size: int) -> Iterator[GradientBatch]:
        """Yield the same rows, at most `size` at a time; no row is copied."""
        for block in self.blocks:
            parts = block.parts()
            if len(block) <= size:
                yield GradientBatch((StoredBlock(parts),))
                continue
            for start in range(0, len(block), size):
                yield GradientBatch((StoredBlock(tuple(part.take(slice(start, start + size)) for part in parts)),))

    @staticmethod
    def concatenate(batches: Iterable[GradientBatch]) -> GradientBatch:
        """Return one batch of the blocks of many; no row is copied."""
        return GradientBatch(tuple(block for batch in batches for block in batch.blocks))


def _total(products: Iterable[Tensor]) -> Tensor:
    """Return the sum, in the memory of the first."""
    return functools.reduce(Tensor.add_, products)


@dataclass(frozen=True)
class KeptInputs:
    """Keeps of each row the input alone; its gradient is computed again when it is needed."""

    network: Network  # with weights of its own
    rows_in_memory: int

    def __call__(self, x: Inputs, group: slice) -> GradientBatch:
        return GradientBatch((Recomputed(self.network, self.network.prepare(x), group, self.rows_in_memory),))


def coordinates(g: GradientBatch, J: GradientBatch | None) -> np.ndarray:  # (p, b) or (n, b)
    """Return the rows themselves, or their inner products with those of J, in float64."""
    return (g.rows().cpu().double().numpy() if J is None else g.inner(J.in_float64)).T


def _in_main_memory(part: Part) -> bool:
    return isinstance(part, DenseRows) and part.values.device.type == "cpu"


def add_gram(M: np.ndarray | None, X: np.ndarray, outer: bool = False) -> np.ndarray:
    """Return M + XᵀX for X (b, m), or M + XXᵀ if `outer` for X (m, c): upper triangles, in the memory of M."""
    from scipy.linalg import blas

    if M is None:
        m = X.shape[0 if outer else 1]
        M = np.zeros((m, m), order="F")  # the order LAPACK works on in place
    if X.size:
        check_in_place(blas.dsyrk(1.0, X.T, beta=1.0, c=M, trans=int(outer), lower=0, overwrite_c=1), M)
    return M


def check_in_place(result: np.ndarray, matrix: np.ndarray) -> None:
    """SciPy copies silently where an array is not in the order LAPACK wants; here that would lose the result."""
    assert np.shares_memory(result, matrix), "LAPACK worked on a copy"


class RowBuffer:
    """Gradients on their way to a function that is faster for many rows at once, as long as they take little memory."""

    def __init__(self, hand_over: Callable[[GradientBatch], None], rows_at_once: int) -> None:
        self._hand_over, self._rows_at_once = hand_over, rows_at_once
        self._waiting: list[GradientBatch] = []

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    def add(self, gradients: GradientBatch) -> None:
        self._waiting.append(gradients)
        if len(self) >= self._rows_at_once or sum(each.nbytes for each in self._waiting) >= WAITING_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._hand_over(GradientBatch.concatenate(waiting))
