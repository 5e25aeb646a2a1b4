"""The order in which a loader gives its rows, random or not: to be had a second time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

Order = tuple[Tensor, ...]  # the states of torch's own generator and of those that the loader has


class Ordered:
    """A loader, and where its random numbers were when it was last begun."""

    def __init__(self, source: Iterable[Any], again: Order | None = None) -> None:
        """`again`: the order of the first time that it is read."""
        self._source = source
        self._again = again
        self.order: Order = ()

    def __iter__(self) -> Iterator[Any]:
        generators = _generators(self._source)
        if self._again is not None and len(self._again) == 1 + len(generators):
            torch.set_rng_state(self._again[0])
            for generator, state in zip(generators, self._again[1:], strict=True):
                generator.set_state(state)
        self._again = None
        self.order = (torch.get_rng_state(), *(generator.get_state() for generator in generators))
        if getattr(self._source, "_iterator", None) is not None:  # workers that stay: torch draws them no seed again
            torch.empty((), dtype=torch.int64).random_(generator=self._source.generator)  # type: ignore[attr-defined]
        return iter(self._source)


def _generators(loader: Any) -> list[torch.Generator]:
    """Of a DataLoader: its own, and those of its samplers."""
    found = (getattr(owner, "generator", None) for owner in (loader, *samplers(loader)))
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def samplers(loader: Any) -> Iterator[Any]:
    """Of a DataLoader, with those that they draw from."""
    for name in ("batch_sampler", "sampler"):
        sampler = getattr(loader, name, None)
        while sampler is not None:
            yield sampler
            sampler = getattr(sampler, "sampler", None)
