"""K = JJᵀ, from rows in memory, or layer by layer where the factors of all rows do not fit.

K is a sum over layers. So rows of which only the inputs are kept are not computed again for each other group of rows:
a pass over all of them takes as many layers as there is memory for, and adds their part of K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .gradient_batch import CHUNK_BYTES, MERGED_BYTES, GradientBatch, Recomputed, StoredBlock, add_gram
from .layers.factors import DenseRows, Part

PassDone = Callable[[int, int], None]  # the number of a pass, from 1 on, and that of all of them


def kernel(J: GradientBatch, pass_done: PassDone | None = None) -> np.ndarray:
    """Return K = JJᵀ, in the upper triangle."""
    K = np.zeros((len(J), len(J)), order="F")
    recomputed = [block for block in J.blocks if isinstance(block, Recomputed)]
    if not recomputed:
        return _added(K, J)
    groups = list(_groups(recomputed, len(J)))
    for i, (owners, fits) in enumerate(groups, start=1):
        if fits:
            K = _added(K, _captured(J, owners))
        else:
            _add_pairs(K, J, owners, recomputed[0].rows_in_memory * _row_bytes(recomputed)[1])
        if pass_done is not None:
            pass_done(i, len(groups))
    return K


def _added(K: np.ndarray, J: GradientBatch) -> np.ndarray:
    """Return K + JJᵀ, in the memory of K, for rows in memory."""
    stored = [block.parts() for block in J.blocks]
    whole = [i for i, parts in enumerate(zip(*stored, strict=True)) if all(map(_in_main_memory, parts))]
    if whole:  # half of the products is enough, and each number is converted once
        dense = GradientBatch(tuple(StoredBlock([parts[i] for i in whole]) for parts in stored))
        for columns in dense.columns(width=max(1, CHUNK_BYTES // (8 * len(J)))):
            K = add_gram(K, columns, outer=True)
    if len(whole) == len(stored[0]):
        return K
    blocks = [
        GradientBatch((StoredBlock([part for i, part in enumerate(parts) if i not in whole]),)) for parts in stored
    ]
    ends = np.cumsum([0, *map(len, blocks)])
    for last, mine in enumerate(blocks):
        for i in range(last + 1):
            K[ends[i] : ends[i + 1], ends[last] : ends[last + 1]] += blocks[i].inner(mine)
    return K


def _in_main_memory(part: Part) -> bool:
    return isinstance(part, DenseRows) and part.values.device.type == "cpu"


def _captured(J: GradientBatch, owners: frozenset[int]) -> GradientBatch:
    """Return some parts of all rows, in memory, put together into blocks whose products are faster."""
    found: list[StoredBlock] = []
    waiting: list[StoredBlock] = []
    for block in J.blocks:
        waiting.append(StoredBlock(block.parts(owners)))
        if sum(part.nbytes for each in waiting for part in each.stored) >= MERGED_BYTES or block is J.blocks[-1]:
            found += [StoredBlock(each.parts()) for each in GradientBatch(tuple(waiting)).merged().blocks]
            waiting = []
    return GradientBatch(tuple(found))


def _row_bytes(blocks: list[Recomputed]) -> tuple[list[float], float]:
    """Return the size of each part of a row, and of all of them, of the largest inputs."""
    largest = max(blocks, key=lambda block: block.x.nbytes / len(block.x))
    parts = Recomputed(largest.network, largest.x[:2], largest.group, largest.rows_in_memory).parts()
    sizes = [part.nbytes / len(part) for part in parts]
    return sizes, sum(sizes)


def _groups(blocks: list[Recomputed], n_rows: int) -> Iterator[tuple[frozenset[int], bool]]:
    """Yield parts of the rows by their numbers, as many at a time as fit into memory for all rows, and whether they do:
    one alone may not."""
    sizes, all_of_a_row = _row_bytes(blocks)
    room = blocks[0].rows_in_memory * all_of_a_row
    group: list[int] = []
    for i in range(len(sizes)):
        if group and n_rows * sum(sizes[j] for j in [*group, i]) > room:
            yield frozenset(group), n_rows * sum(sizes[j] for j in group) <= room
            group = []
        group.append(i)
    yield frozenset(group), n_rows * sum(sizes[j] for j in group) <= room


def _add_pairs(K: np.ndarray, J: GradientBatch, owners: frozenset[int], room: float) -> None:
    """Add the part of K that belongs to one layer, some rows in memory at a time, which meet all those before them."""
    ends = np.cumsum([0, *map(len, J.blocks)])
    mine: list[StoredBlock] = []
    first = used = 0
    for last, block in enumerate(J.blocks):
        mine.append(StoredBlock(block.parts(owners)))
        used += sum(part.nbytes for part in mine[-1].stored)
        if used < room / 2 and last < len(J.blocks) - 1:  # merging them takes as much again
            continue
        rows = GradientBatch(tuple(mine)).merged()
        for i in range(last + 1):
            theirs = mine[i - first] if i >= first else StoredBlock(J.blocks[i].parts(owners))
            K[ends[i] : ends[i + 1], ends[first] : ends[last + 1]] += GradientBatch((theirs,)).inner(rows)
        first, used, mine = last + 1, 0, []
