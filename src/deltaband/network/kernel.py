"""K = JJᵀ layer by layer, where the factors of all rows do not fit into memory.

K is a sum over layers. So rows of which only the inputs are kept are not computed again for each other group of rows:
a pass over all of them takes as many layers as there is memory for, and adds their part of K.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .gradient_batch import MERGED_BYTES, GradientBatch, Recomputed, StoredBlock


def kernel_by_layers(J: GradientBatch) -> np.ndarray:
    """Return K = JJᵀ, in the upper triangle."""
    recomputed = [block for block in J.blocks if isinstance(block, Recomputed)]
    K = np.zeros((len(J), len(J)), order="F")
    for owners, fits in _groups(recomputed, len(J)):
        if fits:
            K = _captured(J, owners).kernel(K)
        else:
            _add_pairs(K, J, owners, recomputed[0].rows_in_memory * _row_bytes(recomputed)[1])
    return K


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
