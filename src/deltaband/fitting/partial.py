"""Fits that go on: rows that come in parts, and bands that are added up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from ..engines.cost import free_memory
from . import start as fitting
from .accumulator import Accumulation
from .band import Band
from .fit import Fit


class Growing(NamedTuple):
    """A fit that is not finished."""

    rows: Accumulation
    outputs: tuple[int, ...]  # of the network


def taken_in(
    band: Band, growing: Sequence[Growing], data: Any, y: Any, in_all: int | None, progress: bool
) -> tuple[Growing, ...]:
    """These rows, to be merged with those so far."""
    batches = band._read(data, y)
    groups, batches = band._look(batches)
    if band._engine is not None and not growing:
        fitting.check(band._engine, batches, band._damping, in_all)
    new = []
    for i, outputs in enumerate(groups):
        network = band._network(band._fitted_head(outputs))
        if growing:
            rows = growing[i].rows.beside(network)
        else:
            memory = band._memory_each(len(groups))
            rows, batches = fitting.begun(network, batches, band._engine, band._damping, memory, progress, in_all)
        rows.take(batches, partial(band._squares, outputs), progress)
        new.append(Growing(rows, outputs))
    return tuple(new)


def check(growing: Sequence[Growing], others: Sequence[Growing]) -> None:
    """Whether they can be merged."""
    for mine, theirs in zip(growing, others, strict=True):
        mine.rows.check(theirs.rows)


def merged(growing: Sequence[Growing], others: Sequence[Growing]) -> tuple[Growing, ...]:
    """The first of them is changed: all that can go wrong has been checked."""
    for mine, theirs in zip(growing, others, strict=True):
        mine.rows.merge(theirs.rows)
    return tuple(growing)


def resumed(band: Band, fits: Sequence[Fit]) -> tuple[Growing, ...]:
    """Fits as they were before they were finished."""
    memory = band._memory_each(len(fits)) or free_memory()
    made = []
    for fit in fits:
        network = band._network(band._fitted_head(fit.outputs), fit)
        band._check_weights(network, fit)
        made.append(Growing(Accumulation.of(fit, network, band._engine or fit.engine, memory), fit.outputs))
    return tuple(made)


def check_alike(band: Band, other: Any) -> None:
    """Whether the sums of two bands can be added up."""
    if type(other) is not type(band):
        raise TypeError(f"merge takes another {type(band).__name__}, got {type(other).__name__}")
    mine, theirs = band._given(), other._given()
    for name in {**mine, **theirs}:
        if mine.get(name) != theirs.get(name):
            raise ValueError(f"bands of different {name} cannot be merged: {mine.get(name)} and {theirs.get(name)}")
    fits = (band._fitted()[0], other._fitted()[0])
    rows = next((x for fit in fits for x in fit.sample.pieces), None)
    same_weights = fits[0].fingerprint == fits[1].fingerprint
    if same_weights and rows is not None and not band._answers_like(rows[:8], other._answers(rows[:8])):
        raise ValueError("the networks of these bands have the same weights, but do not return the same: not merged")
    for fits in zip(band._fitted(), other._fitted(), strict=True):
        if _settings(fits[0]) != _settings(fits[1]):
            raise ValueError(f"bands of different engines cannot be merged: {fits[0].engine!r}, {fits[1].engine!r}")
        columns = [tuple(band._network().parameters) if fit.by_rows else fit.layers.order for fit in fits]
        if columns[0] != columns[1]:
            raise ValueError(
                "the bands have the parameters in different orders, as one has more rows than the network has "
                "parameters and the other fewer: fit both with partial_fit, and n_rows= the number of all rows"
            )


def _settings(fit: Fit) -> Any:
    """Return the engine's settings without its size, which is limited by the number of rows."""
    engine = fit.engine.resized(1)
    return type(engine), {name: value for name, value in vars(engine).items() if name != "memory"}
