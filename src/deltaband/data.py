"""Training data as a stream of checked `(x, y)` chunks, whatever the user brought."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

EMPTY = "the training data are empty (a generator can be read only once): give at least one row"
LOOKED = 8  # rows that are looked at before a pass
FINITE_NUMBERS = 2**20  # looked at at once
BATCH_ROWS = 1024  # for data that come without batches of their own


@dataclass(frozen=True)
class Batches:
    """Batches of `(x, y)` with `y` in float64, and how many rows they hold where that is known beforehand."""

    source: Iterable[Any]
    n_rows: int | None

    @property
    def twice(self) -> bool:
        """Whether they can be read more than once."""
        return not isinstance(self.source, Iterator)

    def peek(self) -> tuple[Tensor, Batches]:
        """Some of the first inputs, and the batches as if none had been read."""
        taken: list[Any] = []
        rest = iter(self.source)

        def recorded() -> Iterator[Any]:
            for batch in rest:
                taken.append(batch)
                yield batch

        looked: list[Tensor] = []
        for x, _ in Batches(recorded(), None)._checked():
            if looked and (x.shape[1:], x.dtype) != (looked[0].shape[1:], looked[0].dtype):
                break
            looked.append(x)
            if sum(map(len, looked)) >= LOOKED:
                break
        if not looked:
            raise ValueError(EMPTY)
        begun = itertools.chain(taken, rest)
        return torch.cat(looked), Batches(begun if not self.twice else _Begun(begun, self.source), self.n_rows)

    def chunks(self, rows_at_once: Callable[[Tensor], int]) -> Iterator[tuple[Tensor, Tensor, int]]:
        """`(x, y, index of the first row)`, as many rows at a time as `rows_at_once` says, looking at the first batch.

        Small batches are put together, large ones are cut; batches whose rows differ in shape are not mixed.
        """
        done = waiting = rows = 0
        pending: list[tuple[Tensor, Tensor]] = []
        for x, y in self._checked():
            rows = rows or rows_at_once(x)
            if pending and (x.shape[1:], x.dtype) != (pending[0][0].shape[1:], pending[0][0].dtype):
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

    def _checked(self) -> Iterator[tuple[Tensor, Tensor]]:
        done = 0
        for batch in self.source:
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise TypeError(
                    f"each batch must be a pair (x, y), got {_describe(batch)}; "
                    "give arrays as X and y, and map a loader of another layout to pairs"
                )
            x, y = inputs(batch[0]), targets(batch[1])
            check_pair(x, y)
            if len(x):
                check_finite(x, "inputs", done)
                check_finite(y, "targets", done)
                yield x, y
            done += len(x)


class _Begun:
    """Data whose first batches have been looked at: a loader that starts processes starts them once for the pass."""

    def __init__(self, begun: Iterator[Any], source: Iterable[Any]) -> None:
        self._begun: Iterator[Any] | None = begun
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        begun, self._begun = self._begun, None
        return iter(self._source) if begun is None else begun


def read(data: Any, y: Any = None, n_rows: int | None = None) -> Batches:
    """`data` is a loader of `(x, y)` batches, or the inputs X with their targets y."""
    if n_rows is not None and (isinstance(n_rows, bool) or not isinstance(n_rows, int | np.integer) or n_rows < 1):
        raise ValueError(f"n_rows must be a positive whole number, got {n_rows!r}")
    if y is not None:
        if isinstance(data, DataLoader | Dataset):
            raise TypeError("a loader or Dataset already holds its targets: give it alone, without y")
        X, y = inputs(data), targets(y)
        check_pair(X, y)
        # A long fit must not end in an error that a look at the arrays would have given.
        check_finite(X, "inputs")
        check_finite(y, "targets")
        source = [(X[i : i + BATCH_ROWS], y[i : i + BATCH_ROWS]) for i in range(0, len(X), BATCH_ROWS)]
        if n_rows is not None and n_rows != len(X):
            raise ValueError(f"n_rows={n_rows} was given, but the data hold {len(X)} rows")
        return Batches(source, len(X))
    if isinstance(data, Tensor | np.ndarray) or hasattr(data, "__array__"):
        raise TypeError("targets are missing: give X and y, or a loader of (x, y) batches")
    if isinstance(data, IterableDataset):
        raise TypeError("an IterableDataset must be wrapped: DataLoader(dataset, batch_size=...)")
    if isinstance(data, Dataset):
        if not hasattr(data, "__len__"):
            raise TypeError("a Dataset must have a length: define __len__, or pass a loader of (x, y) batches")
        data = DataLoader(data, batch_size=BATCH_ROWS)
    if isinstance(data, DataLoader):
        return Batches(data, n_rows or _loader_rows(data))
    if isinstance(data, list):
        return Batches(data, n_rows or sum(_length(batch) for batch in data))
    if not isinstance(data, Iterable):
        raise TypeError(f"expected a loader of (x, y) batches, or X and y; got {_describe(data)}")
    return Batches(data, n_rows)


def inputs(x: Any) -> Tensor:
    """Inputs as a tensor: a NumPy array is shared, not copied, where torch can."""
    if isinstance(x, Tensor):
        tensor = x.detach()
    elif isinstance(x, np.ndarray) or hasattr(x, "__array__"):
        tensor = _from_numpy(np.asanyarray(x), "inputs")
    else:
        raise TypeError(f"inputs must be a tensor or a NumPy array, got {_describe(x)}")
    if tensor.ndim == 0:
        raise ValueError("inputs must have one row per example, got a single number")
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise TypeError(f"inputs must be an ordinary tensor, got {tensor.layout} on {tensor.device}")
    if tensor.is_complex():
        raise TypeError("inputs must be real, got complex numbers")
    return tensor


def targets(y: Any) -> Tensor:  # (n,) float64
    """Targets of shape (n,) or (n, 1); whole numbers are converted."""
    if isinstance(y, Tensor):
        tensor = y.detach()
    elif isinstance(y, np.ndarray | list) or hasattr(y, "__array__"):
        tensor = _from_numpy(np.asanyarray(y), "targets")
    else:
        raise TypeError(f"targets must be a tensor or a NumPy array, got {_describe(y)}")
    if tensor.is_complex():
        raise TypeError("targets must be real, got complex numbers")
    if tensor.ndim == 2 and tensor.shape[1] == 1:
        tensor = tensor[:, 0]
    if tensor.ndim != 1:
        raise ValueError(f"targets must have shape (n,) or (n, 1), got {tuple(tensor.shape)}")
    return tensor.cpu().double()


def check_pair(x: Tensor, y: Tensor) -> None:
    if len(x) != len(y):
        raise ValueError(f"inputs and targets must have as many rows: {len(x)} inputs, {len(y)} targets")


def check_finite(values: Tensor, what: str, first_row: int = 0, advice: str = "remove or impute such rows") -> None:
    """Raise if a row holds NaN or inf, and name the first."""
    if not values.is_floating_point():
        return
    step = max(
        1, FINITE_NUMBERS // max(1, values[:1].numel())
    )  # what is asked of all at once takes as much memory again
    for start in range(0, len(values), step):
        part = values[start : start + step]
        if bool(torch.isfinite(part).all()):
            continue
        bad = ~torch.isfinite(part.reshape(len(part), -1)).all(dim=1)
        row = int(bad.nonzero()[0])
        kind = "NaN" if bool(torch.isnan(part[row]).any()) else "an infinite value"
        raise ValueError(f"{what} hold {kind} in row {first_row + start + row}; {advice}")


def _from_numpy(array: np.ndarray, what: str) -> Tensor:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{what} must not be masked: remove the masked rows first")
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{what} must be numbers, got an array of dtype {array.dtype}; try .astype(float)")
    if array.dtype == np.longdouble and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    if not array.dtype.isnative or any(stride < 0 for stride in array.strides) or not array.flags.writeable:
        array = np.array(array, dtype=array.dtype.newbyteorder("="))
    return torch.from_numpy(np.asarray(array))


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
    x = batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else None
    shape: tuple[int, ...] = getattr(x, "shape", ())
    return int(shape[0]) if shape else 0


def _join(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(pairs) == 1:
        return pairs[0]
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def _describe(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    shape = getattr(value, "shape", None)
    return type(value).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")
