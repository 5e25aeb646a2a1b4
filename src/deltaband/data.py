"""Training data as a stream of checked `(x, y)` chunks, whatever the user brought."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

BATCH_ROWS = 1024  # for data that come without batches of their own


@dataclass(frozen=True)
class Batches:
    """Batches of `(x, y)` with `y` in float64, and how many rows they hold where that is known beforehand."""

    source: Iterable[Any]
    n_rows: int | None

    def chunks(self, rows: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        """`(x, y, index of the first row)`, `rows` rows at a time.

        Small batches are put together, large ones are cut; batches whose rows differ in shape are not mixed.
        """
        done = 0
        pending: list[tuple[Tensor, Tensor]] = []
        for x, y in self._checked():
            if pending and (x.shape[1:], x.dtype) != (pending[0][0].shape[1:], pending[0][0].dtype):
                yield *_join(pending), done
                done += _count(pending)
                pending = []
            pending.append((x, y))
            if _count(pending) >= rows:
                x, y = _join(pending)
                whole = len(x) - len(x) % rows
                for start in range(0, whole, rows):
                    yield x[start : start + rows], y[start : start + rows], done + start
                done += whole
                pending = [(x[whole:], y[whole:])] if whole < len(x) else []
        if pending:
            yield *_join(pending), done

    def _checked(self) -> Iterator[tuple[Tensor, Tensor]]:
        done = 0
        for batch in self.source:
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise TypeError(
                    f"each batch must be a pair (x, y), got {_describe(batch)}; "
                    "for arrays call fit(X, y), for other layouts map your loader to pairs"
                )
            x, y = inputs(batch[0]), targets(batch[1])
            check_pair(x, y)
            if len(x):
                check_finite(x, "inputs", done)
                check_finite(y, "targets", done)
                yield x, y
            done += len(x)


def read(data: Any, y: Any = None, n_rows: int | None = None) -> Batches:
    """`data` is a loader of `(x, y)` batches, or the inputs X with their targets y."""
    if n_rows is not None and (isinstance(n_rows, bool) or not isinstance(n_rows, int | np.integer) or n_rows < 1):
        raise ValueError(f"n_rows must be a positive whole number, got {n_rows!r}")
    if y is not None:
        if isinstance(data, DataLoader | Dataset):
            raise TypeError("a loader or Dataset already holds its targets: call fit(loader) without y")
        X, y = inputs(data), targets(y)
        check_pair(X, y)
        # A long fit must not end in an error that a look at the arrays would have given.
        check_finite(X, "inputs")
        check_finite(y, "targets")
        source = [(X[i : i + BATCH_ROWS], y[i : i + BATCH_ROWS]) for i in range(0, len(X), BATCH_ROWS)]
        return Batches(source, _agreed(n_rows, len(X)))
    if isinstance(data, Tensor | np.ndarray) or hasattr(data, "__array__"):
        raise TypeError("targets are missing: call fit(X, y), or fit(loader) with a loader of (x, y) batches")
    if isinstance(data, IterableDataset):
        raise TypeError("an IterableDataset must be wrapped: fit(DataLoader(dataset, batch_size=...))")
    if isinstance(data, Dataset):
        data = DataLoader(data, batch_size=BATCH_ROWS)
    if isinstance(data, DataLoader):
        return Batches(data, _agreed(n_rows, _loader_rows(data)))
    if isinstance(data, list):
        known = sum(len(b[0]) for b in data if isinstance(b, tuple | list) and len(b) == 2 and hasattr(b[0], "__len__"))
        return Batches(data, _agreed(n_rows, known))
    if not isinstance(data, Iterable):
        raise TypeError(f"expected a loader of (x, y) batches, or X and y; got {_describe(data)}")
    return Batches(data, n_rows)


def inputs(x: Any) -> Tensor:
    """Inputs as a tensor: a NumPy array is shared, not copied, where torch can."""
    if isinstance(x, Tensor):
        tensor = x.detach()
    elif isinstance(x, np.ndarray) or hasattr(x, "__array__"):
        tensor = _from_numpy(np.asarray(x), "inputs")
    else:
        raise TypeError(f"inputs must be a tensor or a NumPy array, got {_describe(x)}")
    if tensor.ndim == 0:
        raise ValueError("inputs must have one row per example, got a single number")
    if tensor.is_complex():
        raise TypeError("inputs must be real, got complex numbers")
    return tensor


def targets(y: Any) -> Tensor:  # (n,) float64
    """Targets of shape (n,) or (n, 1); whole numbers are converted."""
    if isinstance(y, Tensor):
        tensor = y.detach()
    elif isinstance(y, np.ndarray | list) or hasattr(y, "__array__"):
        tensor = _from_numpy(np.asarray(y), "targets")
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


def check_finite(values: Tensor, what: str, first_row: int = 0) -> None:
    """Raise if a row holds NaN or inf, and name the first."""
    if not values.is_floating_point() or bool(torch.isfinite(values).all()):
        return
    bad = ~torch.isfinite(values.reshape(len(values), -1)).all(dim=1)
    row = int(bad.nonzero()[0])
    kind = "NaN" if bool(torch.isnan(values[row]).any()) else "an infinite value"
    raise ValueError(f"{what} hold {kind} in row {first_row + row}; remove or impute such rows")


def _from_numpy(array: np.ndarray, what: str) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{what} must be numbers, got an array of dtype {array.dtype}")
    if array.dtype == np.longdouble and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    if not array.dtype.isnative or any(stride < 0 for stride in array.strides) or not array.flags.writeable:
        array = np.array(array, dtype=array.dtype.newbyteorder("="))
    return torch.from_numpy(array)


def _loader_rows(loader: DataLoader[Any]) -> int | None:
    """How many rows a DataLoader will give, or None where it cannot be known."""
    if loader.batch_size is None or isinstance(loader.dataset, IterableDataset):
        return None
    try:
        return len(loader) * loader.batch_size if loader.drop_last else len(loader.sampler)  # type: ignore[arg-type]
    except TypeError:
        return None


def _agreed(given: int | None, known: int | None) -> int | None:
    if given is not None and known is not None and given != known:
        raise ValueError(f"n_rows={given} was given, but the data hold {known} rows")
    return known if given is None else given


def _join(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(pairs) == 1:
        return pairs[0]
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def _count(pairs: list[tuple[Tensor, Tensor]]) -> int:
    return sum(len(y) for _, y in pairs)


def _describe(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    shape = getattr(value, "shape", None)
    return type(value).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")
