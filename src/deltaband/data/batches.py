"""Training data as a stream of checked chunks of inputs and targets, whatever the user brought."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..errors import EmptyDataError
from ..validation import check_finite, described, from_numpy
from .inputs import Inputs

EMPTY = "the training data are empty (a generator can be read only once): give at least one row"
LOOKED = 8  # rows that are looked at before a pass
BATCH_ROWS = 1024  # for data that come without batches of their own


Skip = Callable[[Inputs, Tensor, int], None]  # inputs, targets, index of the first row
Pairs = Callable[[Any], tuple[Any, Any]]  # a batch of any layout -> inputs, targets


@dataclass(frozen=True)
class Batches:
    """Batches of `(x, y)` with `y` in float64, and how many rows they hold where that is known beforehand."""

    source: Iterable[Any]
    n_rows: int | None
    pairs: Pairs | None = None  # what makes (x, y) of a batch that is something else
    limit: int | None = None  # rows, of which those that come after are left out
    targets: Tensor | None = None  # of all rows, where they are arrays

    @property
    def twice(self) -> bool:
        """Whether they can be read more than once."""
        return not isinstance(self.source, Iterator)

    def peek(self) -> tuple[Inputs, Tensor, Batches]:
        """Some of the first inputs and targets, and the batches as if none had been read."""
        taken: list[Any] = []
        rest = iter(self.source)

        def recorded() -> Iterator[Any]:
            for batch in rest:
                taken.append(batch)
                yield batch

        looked: list[tuple[Inputs, Tensor]] = []
        for x, y in replace(self, source=recorded())._checked():
            if looked and x.kind != looked[0][0].kind:
                break
            looked.append((x, y))
            if sum(len(x) for x, _ in looked) >= LOOKED:
                break
        if not looked:
            raise EmptyDataError(EMPTY)
        begun = itertools.chain(taken, rest)
        source = begun if not self.twice else _Begun(begun, self.source)
        return *_join(looked), replace(self, source=source)

    def chunks(
        self, rows_at_once: Callable[[Inputs], int], n_skipped: int = 0, skip: Skip | None = None
    ) -> Iterator[tuple[Inputs, Tensor, int]]:
        """`(x, y, index of the first row)`, as many rows at a time as `rows_at_once` says, looking at the first batch.

        Small batches are put together, large ones are cut; batches whose rows differ in shape are not mixed. The first
        `n_skipped` rows go to `skip` instead, batch by batch.
        """
        done = waiting = rows = 0
        pending: list[tuple[Inputs, Tensor]] = []
        for x, y in self._checked():
            rows = rows or rows_at_once(x)
            if skip is not None and done < n_skipped:
                few = min(n_skipped - done, len(x))
                skip(x[:few], y[:few], done)
                done, x, y = done + few, x[few:], y[few:]
                if len(x) == 0:
                    continue
            if pending and x.kind != pending[0][0].kind:
                yield *_join(pending), done
                done, waiting, pending = done + waiting, 0, []
            pending.append((x, y))
            waiting += len(x)
            if waiting >= rows:
                x, y = _join(pending)
                whole = waiting - waiting % rows
                for start in range(0, whole, rows):
                    yield x[start : start + rows], y[start : start + rows], done + start
                done, waiting = done + whole, waiting - whole
                pending = [(x[whole:], y[whole:])] if waiting else []
        if pending:
            yield *_join(pending), done

    def _checked(self) -> Iterator[tuple[Inputs, Tensor]]:
        done, n_columns = 0, None
        for batch in self.source:
            pair = batch if self.pairs is None else self.pairs(batch)
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise TypeError(
                    f"each batch must be a pair (x, y), got {described(pair)}; give arrays as X and y, or "
                    "a batch= function that turns a batch into inputs and targets"
                )
            x, y = Inputs.of(pair[0]), targets(pair[1])
            check_pair(x, y)
            if self.limit is not None:
                x, y = x[: self.limit - done], y[: self.limit - done]
            n_columns = y.shape[1] if n_columns is None else n_columns
            if y.shape[1] != n_columns:
                raise ValueError(f"targets have {n_columns} columns at first and {y.shape[1]} from row {done} on")
            if len(x):
                x.check_finite(done)
                check_finite(y, "targets", done)
                yield x, y
            done += len(x)
            if done == self.limit:
                return


class _Begun:
    """Data whose first batches have been looked at: a loader that starts processes starts them once for the pass."""

    def __init__(self, begun: Iterator[Any], source: Iterable[Any]) -> None:
        self._begun: Iterator[Any] | None = begun
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        begun, self._begun = self._begun, None
        return iter(self._source) if begun is None else begun


def read(data: Any, y: Any = None, n_rows: int | None = None, pairs: Pairs | None = None) -> Batches:
    """`data` is a loader of `(x, y)` batches, or of what `pairs` makes such ones of; or the inputs X with their
    targets y."""
    if n_rows is not None and (isinstance(n_rows, bool) or not isinstance(n_rows, int | np.integer) or n_rows < 1):
        raise ValueError(f"n_rows must be a positive whole number, got {n_rows!r}")
    if y is not None:
        if isinstance(data, DataLoader | Dataset):
            raise TypeError("a loader or Dataset already holds its targets: give it alone, without y")
        X, y = Inputs.of(data), targets(y)
        check_pair(X, y)
        # A long fit must not end in an error that a look at the arrays would have given.
        X.check_finite()
        check_finite(y, "targets")
        source = [(X[i : i + BATCH_ROWS], y[i : i + BATCH_ROWS]) for i in range(0, len(X), BATCH_ROWS)]
        if n_rows is not None and n_rows != len(X):
            raise ValueError(f"n_rows={n_rows} was given, but the data hold {len(X)} rows")
        return Batches(source, len(X), targets=y)
    if isinstance(data, Tensor | np.ndarray | Mapping) or hasattr(data, "__array__"):
        raise TypeError("targets are missing: give X and y, or a loader of (x, y) batches")
    if isinstance(data, IterableDataset):
        raise TypeError("an IterableDataset must be wrapped: DataLoader(dataset, batch_size=...)")
    if isinstance(data, Dataset):
        if not hasattr(data, "__len__"):
            raise TypeError("a Dataset must have a length: define __len__, or pass a loader of (x, y) batches")
        data = DataLoader(data, batch_size=BATCH_ROWS)
    if isinstance(data, DataLoader):
        return Batches(data, n_rows or _loader_rows(data), pairs)
    if isinstance(data, list) and pairs is None:
        return Batches(data, n_rows or sum(_length(batch) for batch in data))
    if not isinstance(data, Iterable):
        raise TypeError(f"expected a loader of (x, y) batches, or X and y; got {described(data)}")
    return Batches(data, n_rows, pairs)


def targets(y: Any) -> Tensor:  # (n, m) float64
    """Targets of shape (n,) or (n, m), a column for each output; whole numbers are converted."""
    if isinstance(y, Tensor):
        tensor = y.detach()
    elif isinstance(y, np.ndarray | list) or hasattr(y, "__array__"):
        tensor = from_numpy(np.asanyarray(y), "targets")
    else:
        raise TypeError(f"targets must be a tensor or a NumPy array, got {described(y)}")
    if tensor.is_complex():
        raise TypeError("targets must be real, got complex numbers")
    if tensor.ndim == 1:
        tensor = tensor[:, None]
    if tensor.ndim != 2 or tensor.shape[1] == 0:
        raise ValueError(f"targets must have shape (n,), or (n, m) for m outputs, got {tuple(tensor.shape)}")
    return tensor.cpu().double()


def check_pair(x: Inputs, y: Tensor) -> None:
    if len(x) != len(y):
        raise ValueError(f"inputs and targets must have as many rows: {len(x)} inputs, {len(y)} targets")


def _loader_rows(loader: DataLoader[Any]) -> int | None:
    """How many rows a DataLoader will give, or None where it cannot be known."""
    if loader.batch_size is None or isinstance(loader.dataset, IterableDataset):
        return None
    try:
        return len(loader) * loader.batch_size if loader.drop_last else len(loader.sampler)  # type: ignore[arg-type]
    except TypeError:
        return None


def _length(batch: Any) -> int:
    """Rows of one batch; 0 for what will be refused when its turn comes."""
    y = batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None
    try:
        return len(y)  # type: ignore[arg-type]
    except TypeError:
        return 0


def _join(pairs: list[tuple[Inputs, Tensor]]) -> tuple[Inputs, Tensor]:
    if len(pairs) == 1:
        return pairs[0]
    return Inputs.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
