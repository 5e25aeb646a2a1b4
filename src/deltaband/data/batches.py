"""Data as a stream of checked chunks of inputs and targets, whatever the user brought."""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ..errors import EmptyDataError, warn
from ..validation import check_int, describe
from .extras import observed, with_extras, with_rows, without_mask
from .inputs import Inputs, as_tensor, check_finite
from .items import LabelledItems

EMPTY_DATA_MESSAGE = "the training data are empty (a generator can be read only once): give at least one row"
FEWEST_FIRST_ROWS = 8  # rows that `peek` reads at least, where there are as many
SHUFFLING_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
DEFAULT_BATCH_ROWS = 1024  # rows per batch of data that come without batches of their own

MISSING_ADVICE = "remove or impute such rows, or give missing='ignore' for targets that are NaN"

Unpack = Callable[[Any], tuple[Any, ...]]  # a batch of any layout -> inputs, targets, and maybe extras
ReadInputs = Callable[[Any], Inputs]
ReadTargets = Callable[[Any], Tensor]
OnSkipped = Callable[[Inputs, Tensor, int], None]  # inputs, targets, index of the first row


class FirstRows(NamedTuple):
    """The first inputs of the data, with their targets: at least eight rows, if there are as many of one format."""

    x: Inputs
    y: Tensor  # (n, m)


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches `(x, y)` with `y` in float64, and the number of their rows where it is known beforehand."""

    source: Iterable[Any]
    n_rows: int | None
    unpack: Unpack | None = None  # makes (x, y) of a batch that is something else
    max_rows: int | None = None  # rows after these are left out
    is_checked: bool = False  # whether all values are known to be finite
    first: FirstRows | None = None  # what `peek` has read
    targets: Tensor | None = None  # of all rows, where they are arrays
    read_inputs: ReadInputs = Inputs.of
    read_targets: ReadTargets | None = None  # None: as they are
    may_miss: bool = False  # whether NaN among targets means that there is none
    row_shape: tuple[int, ...] | None = None  # of the targets of a row; None: that of the first
    kept: np.ndarray | None = None  # the numbers of the rows that are not left out, where they are arrays

    @property
    def reiterable(self) -> bool:
        return not isinstance(self.source, Iterator)

    def peek(self) -> tuple[FirstRows, Self]:
        """Return the first rows, and the batches as if none had been read; these remember the first rows."""
        if self.first is not None:
            return self.first, self
        taken: list[_Copied] = []
        rest = iter(self.source)

        def recorded() -> Iterator[_Copied]:
            for batch in rest:
                taken.append(self._copied(batch, sum(len(each.x) for each in taken)))
                yield taken[-1]

        chunks = replace(self, source=recorded()).chunks(lambda x: max(len(x), FEWEST_FIRST_ROWS))
        chunk = next(chunks, None)
        if chunk is None:
            raise EmptyDataError(EMPTY_DATA_MESSAGE)
        started, first = itertools.chain(taken, rest), FirstRows(*chunk[:2])
        source = _StartedSource(started, self.source) if self.reiterable else started
        return first, replace(self, source=source, first=first)

    def progress_bar(self, description: str, shown: bool) -> Any:
        """Return a bar that appears on terminals and in notebooks, if the work takes more than two seconds."""
        from tqdm.auto import tqdm

        in_notebook = any(each.__module__ == "tqdm.notebook" for each in tqdm.__mro__)
        disable = not (shown and (in_notebook or sys.stderr.isatty()))  # pipes and log files are for what is said
        return tqdm(total=self.n_rows, desc=description, unit=" rows", delay=2, leave=False, disable=disable)

    def whole(self) -> tuple[Inputs, Tensor]:
        """Return all rows at once, which must be of one format."""
        pairs = [(x, y) for x, y, _ in self.chunks(len)]
        if not pairs:
            raise EmptyDataError("the data are empty (a generator can be read only once): give at least one row")
        if len({x.row_format for x, _ in pairs}) > 1:
            raise ValueError("all rows are taken at once here, and must have the same shape: pad them")
        return _join(pairs)

    def chunks(
        self, rows_at_once: Callable[[Inputs], int], n_skipped: int = 0, on_skipped: OnSkipped | None = None
    ) -> Iterator[tuple[Inputs, Tensor, int]]:
        """Yield `(x, y, index of the first row)`, with `rows_at_once(first batch)` rows of one format.

        The first `n_skipped` rows go to `on_skipped` instead, batch by batch.
        """
        done = rows = 0
        for _, pairs in itertools.groupby(self._checked(), key=lambda pair: pair[0].row_format):
            pending, waiting = [], 0
            for x, y in pairs:
                rows = rows or rows_at_once(x)
                if on_skipped is not None and done < n_skipped:
                    few = min(n_skipped - done, len(x))
                    on_skipped(x[:few], y[:few], done)
                    done, x, y = done + few, x[few:], y[few:]
                    if len(x) == 0:
                        continue
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
                done += waiting

    def _checked(self) -> Iterator[tuple[Inputs, Tensor]]:
        """Yield the batches that have rows, up to `max_rows` rows, or raise with what is wrong."""
        done, expected = 0, None
        for number, batch in enumerate(self.source):
            x, y, shape = self._copied(batch, done)
            if (len(shape) > 1 and differ(self.row_shape, shape)) or differ(expected, shape):
                of_network = expected is None or not differ(expected, shape)
                other = f"the network returns {self.row_shape}" if of_network else f"batch 0 has {expected}"
                where = f"of batch {number}, which begins with row {done}"
                raise ValueError(f"the targets {where}, have shape {shape} for each row, and {other}")
            expected = expected or shape
            if self.max_rows is not None:
                x, y = x[: self.max_rows - done], y[: self.max_rows - done]
            if not self.is_checked:
                x.check_finite(done)
                check_finite(y, "targets", done, MISSING_ADVICE)
            done += len(x)
            x, y = with_rows(x, y) if x.extras else (x, y)
            if len(x):
                yield x, y
            if done == self.max_rows:
                return

    def _copied(self, batch: Any, first_row: int) -> _Copied:
        """Return the inputs and targets of a batch in memory of our own: a loader may use its own again."""
        if isinstance(batch, _Copied):
            return batch
        given = batch if self.unpack is None else self.unpack(batch)
        if not isinstance(given, tuple | list) or len(given) not in ((2,) if self.unpack is None else (2, 3)):
            advice = "give arrays as X and y, or a batch= function that turns a batch into inputs and targets"
            raise TypeError(f"each batch must be a pair (x, y), got {describe(given)}; {advice}")
        x, y = self.read_inputs(given[0]), (self.read_targets or read_targets)(given[1])
        check_lengths(x, y)
        shape = tuple(np.shape(given[1])[1:])
        if self.is_checked:  # arrays, which nobody overwrites in between
            return _Copied(x, y, shape)
        masked = False
        if len(given) == 3:
            extras = dict(given[2]) if isinstance(given[2], Mapping) else {"sample_weight": given[2]}
            y, masked = without_mask(extras, y, shape, first_row)
            x = with_extras(x, **extras, first_row=first_row)
        x, y = observed(x, y) if masked or self.may_miss else (x, y)
        return _Copied(x.copied(), y.clone(), shape)


class _Copied(NamedTuple):
    """A batch that has been read."""

    x: Inputs
    y: Tensor
    shape: tuple[int, ...]  # of the targets of a row, as they were given


@dataclass
class _StartedSource:
    """Data whose first pass continues where `peek` stopped, so that a loader starts its workers once."""

    started: Iterator[Any] | None
    source: Iterable[Any]

    def __iter__(self) -> Iterator[Any]:
        started, self.started = self.started, None
        return iter(self.source) if started is None else started


def read(
    data: Any,
    y: Any = None,
    n_rows: int | None = None,
    unpack: Unpack | None = None,
    inputs: ReadInputs = Inputs.of,
    targets: ReadTargets | None = None,
    may_miss: bool = False,
    **extras: Any,
) -> Batches:
    """Return the batches of a loader of `(x, y)`, or of what `unpack` turns into that; or of inputs X and targets y.

    `extras` are those of `with_extras`, for arrays; batches of a loader have them as what `unpack` returns third.
    """
    if n_rows is not None:
        check_int(n_rows, "n_rows")
    if y is None and (name := next((name for name, each in extras.items() if each is not None), None)):
        advice = "let a batch= function return (x, y, sample_weight), or (x, y, {'sample_weight': …, 'clusters': …})"
        raise TypeError(f"{name}= goes with arrays X and y; for a loader {advice}")
    if y is not None:
        if isinstance(data, DataLoader | Dataset):
            raise TypeError("a loader or Dataset already holds its targets: give it alone, without y")
        # a long fit must not end in an error that a look at the arrays would have given
        shape = tuple(np.shape(y)[1:])
        X, y = read_arrays(data, y, inputs, targets, may_miss)
        if n_rows not in (None, len(X)):
            raise ValueError(f"n_rows={n_rows} was given, but the data hold {len(X)} rows")
        X = with_extras(X, **extras)
        X, y = observed(X, y) if may_miss else (X, y)
        numbered, y = with_rows(X.with_extras(number=torch.arange(len(X), device="cpu")[:, None]), y)
        kept = numbered.extras.pop("number")[:, 0].numpy()
        if len(X) and len(kept) == 0:
            raise ValueError("all rows have weight zero, or no target: give at least one a weight and a target")
        parts = (each.reshape(-1, *shape) for each in y.split(DEFAULT_BATCH_ROWS))
        source = list(zip(numbered.split(DEFAULT_BATCH_ROWS), parts, strict=True))
        return Batches(source, len(kept), is_checked=True, targets=y, kept=kept)
    if isinstance(data, Tensor | np.ndarray | Mapping) or hasattr(data, "__array__"):
        raise TypeError("targets are missing: give X and y, or a loader of (x, y) batches")
    if isinstance(data, LabelledItems):
        if n_rows not in (None, data.n_items):
            raise ValueError(f"n_rows={n_rows} was given, but there are {data.n_items} items")
        return Batches(data, data.n_items, tuple, read_inputs=inputs, read_targets=targets, may_miss=may_miss)
    data = _loader(data)
    n_rows = n_rows or _count_rows(data, unpack)
    return Batches(data, n_rows, unpack, read_inputs=inputs, read_targets=targets, may_miss=may_miss)


def _loader(data: Any) -> Iterable[Any]:
    if isinstance(data, IterableDataset):
        raise TypeError("an IterableDataset must be wrapped: DataLoader(dataset, batch_size=...)")
    if isinstance(data, Dataset):
        if not hasattr(data, "__len__"):
            raise TypeError("a Dataset must have a length: define __len__, or pass a loader of (x, y) batches")
        return DataLoader(data, batch_size=DEFAULT_BATCH_ROWS)
    if not isinstance(data, Iterable):
        raise TypeError(f"expected a loader of (x, y) batches, or X and y; got {describe(data)}")
    return data


def read_inputs(data: Any, unpack: Unpack | None = None) -> Iterator[tuple[Any, Any]]:
    """Yield the inputs of each batch of a loader as they come, and their weights or None; targets are not needed."""
    if isinstance(data, DataLoader) and isinstance(data.sampler, SHUFFLING_SAMPLERS):
        warn("this loader shuffles its rows, so that nobody knows which result is whose: give one with shuffle=False")
    for batch in _loader(data):
        given = batch if unpack is None else unpack(batch)
        if unpack is None and not isinstance(batch, tuple | list):
            given = (batch,)
        if not isinstance(given, tuple | list) or len(given) not in ((1, 2) if unpack is None else (2, 3)):
            advice = "give a batch= function that turns a batch into inputs and targets"
            raise TypeError(f"each batch must be inputs, alone or in a pair (x, y), got {describe(given)}; {advice}")
        weight = given[2] if len(given) == 3 else None
        yield given[0], weight.get("sample_weight") if isinstance(weight, Mapping) else weight


def read_arrays(
    x: Any, y: Any, inputs: ReadInputs = Inputs.of, targets: ReadTargets | None = None, may_miss: bool = False
) -> tuple[Inputs, Tensor]:
    """Return inputs and targets (n, m) that are known to be finite and of the same length."""
    X, Y = inputs(x), (targets or read_targets)(y)
    check_lengths(X, Y)
    X.check_finite()
    check_finite(Y.nan_to_num(0.0, torch.inf, -torch.inf) if may_miss else Y, "targets", 0, MISSING_ADVICE)
    return X, Y


def _count_rows(data: Iterable[Any], unpack: Unpack | None) -> int | None:
    if isinstance(data, DataLoader) and data.batch_size is not None and not isinstance(data.dataset, IterableDataset):
        n = operator.length_hint(data.sampler, -1)
        n -= n % data.batch_size if data.drop_last else 0
        return n if n >= 0 else None
    if isinstance(data, list) and unpack is None:  # other batches will be refused when their turn comes
        return sum(operator.length_hint(each[1]) for each in data if isinstance(each, tuple | list) and len(each) == 2)
    return None


def read_targets(y: Any, what: str = "targets") -> Tensor:  # (n,), (n, m) or (n, *shape) -> (n, m) float64
    tensor = as_tensor(np.asarray(y) if isinstance(y, list) else y, what)
    if 0 in tensor.shape[1:]:
        raise ValueError(f"{what} must have shape (n,), or (n, m) for m outputs, got {tuple(tensor.shape)}")
    return tensor.reshape(len(tensor), math.prod(tensor.shape[1:])).cpu().double()


def check_lengths(x: Inputs, y: Tensor) -> None:
    if len(x) != len(y):
        raise ValueError(f"inputs and targets must have the same number of rows: {len(x)} inputs, {len(y)} targets")


def differ(expected: tuple[int, ...] | None, shape: tuple[int, ...]) -> bool:
    """Return whether targets have another shape than they should, dimensions of 1 aside; None is any."""
    one, other = (tuple(size for size in each if size != 1) for each in (expected or (), shape))
    return expected is not None and one != other


def _join(pairs: list[tuple[Inputs, Tensor]]) -> tuple[Inputs, Tensor]:
    return Inputs.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
