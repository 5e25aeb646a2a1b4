"""Some of a band's outputs: the same fits and calibration, asked about chosen positions of a row alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .calibration import AllOutputs, Calibration, EachOutput, PooledOutputs
from .data.inputs import as_tensor
from .fitting.fit import Fit
from .fitting.some_outputs import some_outputs
from .fitting.spec import all_outputs


def read_positions(positions: Any, fits: Sequence[Fit]) -> list[int]:
    """Return which of the outputs are meant, by their places among these: from numbers of outputs of the network, or
    from their indices in the shape that it returns, (k, ndim)."""
    outputs, shape = all_outputs(fits), fits[0].shape
    given = as_tensor(np.asarray(positions), "positions").numpy()
    if given.dtype.kind not in "iu" or given.ndim > 2 or given.size == 0:
        raise ValueError(f"positions must be whole numbers, a list of outputs or of their indices, got {positions!r}")
    limits = np.array(shape if given.ndim == 2 else [fits[0].n_returned])
    table = given.reshape(len(given), -1)
    if table.shape[1] != len(limits):
        raise ValueError(f"each position has {table.shape[1]} indices, and the network returns {shape} for a row")
    if len(bad := table[((table < -limits) | (table >= limits)).any(axis=1)]):
        where = f"the network returns {shape or limits[0]} for a row"
        raise ValueError(f"position {bad[0].tolist()} is out of range: {where}")
    flat = np.ravel_multi_index((table % limits).T, limits).tolist()
    if missing := [o for o in flat if o not in outputs]:
        raise ValueError(f"position {missing[0]} is none of the outputs that there are intervals for")
    return [outputs.index(o) for o in flat]


def at(fits: Sequence[Fit], calibration: Calibration | None, where: list[int]) -> tuple[tuple[Fit, ...], Any]:
    """Return fits and calibration of the outputs at these places."""
    chosen = tuple(fits[i] for i in where) if len(fits) > 1 else (some_outputs(fits[0], where),)
    if calibration is None:
        return chosen, None
    of_fits = where if len(fits) > 1 else [0]
    some: dict[str, Any] = {"conformal": _some(calibration.conformal, where)}
    some |= {name: tuple(getattr(calibration, name)[i] for i in of_fits) for name in ("covariances", "scales")}
    some["guard"] = None if calibration.guard is None else _some(calibration.guard, where)
    if not isinstance(calibration.noise, str):
        some["noise"] = tuple(calibration.noise[i] for i in where)
    if len(calibration.far) > 1:
        some["far"] = calibration.far[where]
    return chosen, replace(calibration, **some)


def _some(conformal: EachOutput, where: list[int]) -> EachOutput:
    chosen: dict[str, Any] = {"outputs": tuple(conformal.outputs[i] for i in where)}
    if isinstance(conformal, AllOutputs | PooledOutputs):
        chosen["units"] = conformal.units[where]
    if isinstance(conformal, PooledOutputs):
        chosen["asked"] = conformal.asked[where]
    return replace(conformal, **chosen)
