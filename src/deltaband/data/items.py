"""Rows that are not slices of tensors: items that a collate function makes batches of, and batches that stay whole."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType, ModuleType
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..errors import ChangedShapeError
from ..validation import describe
from .inputs import Inputs, bound

Collate = Callable[[list[Any]], Any]  # items -> (inputs, targets), or with weights (inputs, targets, sample_weight)
Change = Callable[[Tensor], Tensor]

READ_AT_ONCE = 256  # items
PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


@dataclass(frozen=True)
class OpaqueBatch:
    """A batch of any type that a network takes as it is, such as a batch of graphs, and how many items it holds.

    A `batch=` function returns it with targets, one per item: `(OpaqueBatch(graphs, n_items), y)`. It cannot be sliced:
    some of its items are computed with all of them, and rows that a fit keeps keep their whole batch. Where there is a
    collate function, `collate=` takes less memory, and items can be tried alone.

    Args:
        inputs: What the network is called with: a tuple as its arguments, a dictionary by name, anything else as one.
        n_items: The number of items that the network returns outputs for.
    """

    inputs: Any
    n_items: int


@dataclass(frozen=True, eq=False)
class Objects(Inputs):
    """Rows of which the network alone knows what they are; tensors in them are changed when it is called."""

    mixed_by: ClassVar[str] = "a collate function that changes items, or their order"
    unstorable: ClassVar[str] = "no file holds rows that are items: leave out sample=True, checkpoint= or distributed="

    tensors: tuple[Tensor, ...] = ()
    changes: tuple[Change, ...] = ()

    def map(self, change: Change) -> Self:
        return replace(self, changes=(*self.changes, change))

    def __getitem__(self, index: Any) -> Self:
        numbers = np.arange(len(self))[index if not isinstance(index, Tensor) else index.numpy()]
        return self._some(numbers).with_extras(**{name: extra[index] for name, extra in self.extras.items()})

    def _some(self, numbers: np.ndarray) -> Self:
        raise NotImplementedError

    @classmethod
    def _of_all(cls, parts: Sequence[Any]) -> Any:
        raise NotImplementedError

    @classmethod
    def cat(cls, parts: Sequence[Any]) -> Any:
        extras = {name: torch.cat([part.extras[name] for part in parts]) for name in parts[0].extras}
        return parts[0] if len(parts) == 1 else parts[0]._of_all(parts).with_extras(**extras)

    def check_storable(self) -> None:
        raise TypeError(self.unstorable)

    def without_rows(self) -> None:
        return None

    def check_finite(self, first_row: int = 0) -> None:
        """Look at nothing: which of the numbers in an item the network takes shows in its outputs."""


@dataclass(frozen=True, eq=False)
class Items(Objects):
    """Objects of any type, of which `collate` makes a batch: the network's inputs, and targets."""

    items: tuple[Any, ...] = ()
    collate: Collate | None = None
    _made: dict[str, Any] = field(default_factory=dict, repr=False)  # the batch, once it has been asked for

    @classmethod
    def of_items(cls, items: Any, collate: Collate) -> Self:
        """Return all items of a list or a Dataset."""
        return cls(items=tuple(_each(items)), collate=collate)

    def __len__(self) -> int:
        return len(self.items)

    def _some(self, numbers: np.ndarray) -> Self:
        return replace(self, items=tuple(self.items[i] for i in numbers), _made={})

    @classmethod
    def _of_all(cls, parts: Sequence[Any]) -> Any:
        return replace(parts[0], items=tuple(item for part in parts for item in part.items), _made={})

    @property
    def batch(self) -> tuple[Any, ...]:
        """What the collate function makes of these items: inputs, targets and perhaps weights."""
        if "batch" not in self._made:
            assert self.collate is not None
            made = self.collate(list(self.items))
            if not isinstance(made, tuple | list) or len(made) not in (2, 3):
                raise TypeError(
                    f"collate must return a pair (inputs, targets), or (inputs, None) for items without targets; got "
                    f"{describe(made)}"
                )
            self._made["batch"] = tuple(made)
        return self._made["batch"]

    def copied(self) -> Self:
        return self

    @property
    def labelled(self) -> tuple[Any, ...]:
        """These items with their targets, and weights if there are some, as a batch of a loader."""
        _, targets, *weights = self.batch
        if targets is None:
            raise ValueError("targets are missing: collate must return (inputs, targets), and gave None as targets")
        if not hasattr(targets, "__array__"):
            raise TypeError(
                "targets are in the wrong place: collate must return (inputs, targets), targets being a tensor or an "
                f"array with one row per item; got {describe(targets)}"
            )
        if np.ndim(targets) == 0 or len(targets) != len(self):
            shape = tuple(np.shape(targets))
            raise ValueError(f"collate must return one target per item: shape {shape} for {len(self)} items")
        return (self, targets, *weights)

    def arguments(self, forward: Callable[..., Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return bound(changed(self.batch[0], self.changes), forward)

    def evaluated(self, call: Callable[..., Any], forward: Callable[..., Any]) -> Any:
        y = super().evaluated(call, forward)
        if isinstance(y, Tensor) and (len(y) if y.ndim else 1) != len(self):
            raise ValueError(
                f"the network returns shape {tuple(y.shape)} for a batch that collate made of {len(self)} items: "
                f"expected ({len(self)},) or ({len(self)}, m), something for each item"
            )
        return y

    def as_given(self) -> Any:
        return list(self.items)

    @property
    def row_format(self) -> tuple[Any, ...]:
        return ("items", id(self.collate), *sorted((name, e.shape[1:]) for name, e in self.extras.items()))

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for item in self.items for leaf in leaves(item) if isinstance(leaf, Tensor | np.ndarray))

    @property
    def hashed(self) -> tuple[Tensor, ...]:
        return (torch.stack([_digest(item) for item in self.items]),) if self.items else ()

    def __str__(self) -> str:
        kind = type(self.items[0]).__name__ if self.items else "any type"
        return f"{len(self) or 'n'} items of type {kind}"


@dataclass(frozen=True, eq=False)
class BatchItems(Objects):
    """Some of the items of opaque batches, which are computed with all of them."""

    batches: tuple[OpaqueBatch, ...] = ()
    places: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))  # (n, 2) batch and item

    @classmethod
    def of_batch(cls, batch: OpaqueBatch) -> Self:
        if not isinstance(batch.n_items, int | np.integer) or isinstance(batch.n_items, bool) or batch.n_items < 0:
            raise ValueError(f"n_items must be how many items the batch holds, got {batch.n_items!r}")
        numbers = np.arange(int(batch.n_items))
        return cls(batches=(batch,), places=np.stack([np.zeros_like(numbers), numbers], axis=1))

    def __len__(self) -> int:
        return len(self.places)

    def _some(self, numbers: np.ndarray) -> Self:
        used, of_used = np.unique(self.places[numbers, 0], return_inverse=True)
        places = np.stack([of_used, self.places[numbers, 1]], axis=1)
        return replace(self, batches=tuple(self.batches[k] for k in used), places=places)

    @classmethod
    def _of_all(cls, parts: Sequence[Any]) -> Any:
        number = {id(batch): batch for part in parts for batch in part.batches}
        order = {key: k for k, key in enumerate(number)}
        places = [
            np.stack([np.array([order[id(each)] for each in part.batches], dtype=int)[k], i], axis=1)
            for part in parts
            for k, i in (part.places.T,)
        ]
        return replace(parts[0], batches=tuple(number.values()), places=np.concatenate(places))

    def copied(self) -> Self:
        return replace(self, batches=tuple(OpaqueBatch(changed(b.inputs, ()), b.n_items) for b in self.batches))

    def evaluated(self, call: Callable[..., Any], forward: Callable[..., Any]) -> Any:
        """Evaluate the batches whole, and return what is for these items."""
        found = []
        for batch in self.batches:
            args, kwargs = bound(changed(batch.inputs, self.changes), forward)
            y = call(*args, **kwargs)
            if isinstance(y, Tensor) and (y.ndim == 0 or len(y) != batch.n_items):
                raise ValueError(
                    f"the network returns shape {tuple(y.shape)} for an OpaqueBatch that should hold {batch.n_items} "
                    "items: n_items must be the number of items that it returns outputs for"
                )
            found.append(y)
        if not all(isinstance(y, Tensor) for y in found):
            return found[0]  # which will be refused
        if len(shapes := {tuple(y.shape[1:]) for y in found}) > 1:
            raise ChangedShapeError(f"the network returns shapes {sorted(shapes)} for the items of different batches")
        firsts = np.cumsum([0, *(batch.n_items for batch in self.batches)])
        rows = torch.from_numpy(firsts[self.places[:, 0]] + self.places[:, 1])
        together = torch.cat(found)
        whole = len(rows) == len(together) and bool((rows == torch.arange(len(rows))).all())
        return together if whole else together[rows.to(together.device)]

    def as_given(self) -> Any:
        return self

    @property
    def row_format(self) -> tuple[Any, ...]:
        return ("opaque", *sorted((name, extra.shape[1:]) for name, extra in self.extras.items()))

    @property
    def nbytes(self) -> int:
        found = (leaf for batch in self.batches for leaf in leaves(batch.inputs))
        return sum(leaf.nbytes for leaf in found if isinstance(leaf, Tensor | np.ndarray))

    @property
    def hashed(self) -> tuple[Tensor, ...]:
        digests = torch.stack([_digest(batch.inputs) for batch in self.batches])
        return digests[torch.from_numpy(self.places[:, 0])], torch.from_numpy(self.places[:, 1].copy())

    def __str__(self) -> str:
        return f"{len(self) or 'n'} items of opaque batches"


def rows_of(x: Any, collate: Collate | None) -> Inputs:
    """Return an opaque batch, or the items that a collate function takes, as rows."""
    if isinstance(x, OpaqueBatch):
        return BatchItems.of_batch(x)
    assert collate is not None
    return Items.of_items(x, collate)


class LabelledItems:
    """A list or a Dataset of items as batches with the targets that `collate` gives them."""

    def __init__(self, items: Any, collate: Collate) -> None:
        if isinstance(items, Iterator):
            raise TypeError("items come as a list or a Dataset, which can be read again: give list(items)")
        self._items, self._collate = items, collate
        self.n_items: int = sum(1 for _ in _each(items)) if not hasattr(items, "__len__") else len(items)
        if self.n_items == 0:
            raise ValueError("there are no items: give at least one")

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        each = _each(self._items)
        while some := list(itertools.islice(each, READ_AT_ONCE)):
            yield Items.of_items(some, self._collate).labelled


def _each(items: Any) -> Iterator[Any]:
    if isinstance(items, DataLoader):
        raise TypeError("collate= takes items one by one: give the list or the Dataset instead of a DataLoader")
    if isinstance(items, Tensor | np.ndarray | Mapping | str | OpaqueBatch):
        raise TypeError(f"collate= is for a list or a Dataset of items, got {describe(items)}")
    if hasattr(items, "__getitem__") and hasattr(items, "__len__"):
        return (items[i] for i in range(len(items)))
    if not isinstance(items, Iterable):
        raise TypeError(f"items must be a list or a Dataset, got {describe(items)}; for a single one give [item]")
    return iter(items)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the tensors, arrays and plain values in an object, each once and always in the same order."""
    waiting, seen = [value], set()
    while waiting:
        each = waiting.pop()
        if isinstance(each, PLAIN):
            yield each
            continue
        if id(each) in seen or isinstance(each, type | FunctionType | ModuleType):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor | np.ndarray):
            yield each
        elif isinstance(each, Mapping):
            waiting += reversed([part for pair in each.items() for part in pair])
        elif isinstance(each, list | tuple):
            waiting += reversed(each)
        elif hasattr(each, "__dict__"):
            waiting += reversed([part for pair in vars(each).items() for part in pair])
        elif hasattr(each, "__slots__"):
            waiting += reversed([getattr(each, name, None) for name in each.__slots__])


def changed(value: Any, changes: Sequence[Change]) -> Any:
    """Return a deep copy of an object in which all changes have been made to each tensor."""
    copies: dict[int, Any] = {}
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            new = leaf.detach()
            for change in changes:
                new = change(new)
            copies[id(leaf)] = new if changes else new.clone()
    return copy.deepcopy(value, copies)


def _digest(value: Any) -> Tensor:  # (2,) int64
    digest = hashlib.blake2b(digest_size=16)
    for leaf in leaves(value):
        array = leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf
        if isinstance(leaf, Tensor | np.ndarray):
            digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
            array = array.contiguous().flatten().view(torch.uint8).numpy() if isinstance(leaf, Tensor) else array
            digest.update(np.ascontiguousarray(array).tobytes())
        else:
            digest.update(repr(leaf).encode() + b";")
    return torch.from_numpy(np.frombuffer(digest.digest(), dtype=np.int64).copy())
