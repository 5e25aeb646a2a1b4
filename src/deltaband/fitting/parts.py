"""A fit in parts: rows taken in one part after another, or fitted elsewhere and merged."""

from collections.abc import Sequence
from typing import Any

from ..data.batches import Batches
from ..engines import Engine
from ..interrupts import uninterrupted
from ..machine import free_memory, on_free_cores
from . import robust
from .accumulator import FitAccumulator
from .driver import OneProcess, check_engine, inspect_first_rows, started
from .fit import Fit
from .spec import FitSpec, first_difference


@on_free_cores()
def partial_fit(
    spec: FitSpec, so_far: Sequence[FitAccumulator], batches: Batches, n_rows: int | None, progress: bool
) -> tuple[FitAccumulator, ...]:
    """Return accumulators of these rows alone, which can be merged into those so far."""
    robust.refuse_parts(spec, "partial_fit")
    spec, groups, batches = inspect_first_rows(spec, batches)
    if not so_far:
        check_engine(spec, batches, n_rows)
    memory, new = spec.memory_per_fit(len(groups)), []
    for i, outputs in enumerate(groups):
        if so_far:
            rows = so_far[i].new_like()
        else:
            rows, batches = started(spec, outputs, batches, 0, n_rows, memory, progress, OneProcess())
        rows.take(batches, progress)
        new.append(rows)
    return tuple(new)


def completed(parts: Sequence[FitAccumulator]) -> tuple[Fit, ...]:
    """Return the fits to the rows of accumulators; interrupted, these still have them, and may be asked again."""
    for rows in parts:
        rows.prepare()
        with uninterrupted():
            rows.complete()
    return tuple(rows.finish() for rows in parts)


def from_fits(spec: FitSpec, fits: Sequence[Fit]) -> tuple[FitAccumulator, ...]:
    """Return the accumulators that end in these fits, to take in more rows."""
    memory = spec.memory_per_fit(len(fits)) or free_memory()
    for fit in fits:
        spec.check_weights(spec.network(), fit)
    return tuple(FitAccumulator.of_fit(spec, fit, memory) for fit in fits)


def check_mergeable(one: tuple[FitSpec, Sequence[Fit]], two: tuple[FitSpec, Sequence[Fit]]) -> None:
    """Raise unless the rows of two estimators' fits can be added up."""
    (spec, fits), (other_spec, other_fits) = one, two
    robust.refuse_parts(spec, "merge")
    mine, theirs = spec.configuration(), other_spec.configuration()
    if name := first_difference(mine, theirs):
        raise ValueError(f"bands of different {name} cannot be merged: {mine.get(name)} and {theirs.get(name)}")
    first, other = fits[0], other_fits[0]
    x = next((piece[:8] for fit in (first, other) for piece in fit.sample.pieces), None)
    same_weights = first.fingerprint == other.fingerprint
    if same_weights and x is not None and not spec.still_returns(x, other_spec.model_outputs(x)):
        raise ValueError("the networks of these bands have the same weights, but do not return the same: not merged")
    order = tuple(spec.network().parameters)
    for fit, other in zip(fits, other_fits, strict=True):
        if _settings_but_size(fit.engine) != _settings_but_size(other.engine):
            raise ValueError(f"bands of different engines cannot be merged: {fit.engine!r}, {other.engine!r}")
        if len({order if each.by_rows else each.layers.order for each in (fit, other)}) > 1:
            raise ValueError(
                "the bands have the parameters in different orders, as one has more rows than the network has "
                "parameters and the other fewer: fit both with partial_fit, and n_rows= the number of all rows"
            )


def _settings_but_size(engine: Engine) -> Any:
    """Return an engine's settings without its size, which the number of rows limits."""
    small = engine.resized(1)
    return type(engine), {name: value for name, value in vars(small).items() if name != "memory"}
