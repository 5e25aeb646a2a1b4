"""Formula (2) of the paper, which intervals follow from without a calibration, and new rows put to it or to one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, Self

import numpy as np

from ..data.inputs import Inputs
from ..errors import warn
from ..results import Side
from .fit import Bounds, Fit, RowFunction, two_bounds
from .spec import FitSpec, Reference

CROSSED = "the quantiles of {} of {} rows are in the wrong order: they are sorted; look at the network's training"


class KnownRows(NamedTuple):
    """What the bounds of rows follow from."""

    q: Sequence[np.ndarray]  # for each output, in units of the square of the noise that is known
    unit: np.ndarray  # (n, m) that noise
    far: np.ndarray | None = None  # (n,) bool, where that is known


class Method(Protocol):
    """What intervals follow from: the formula, or a calibration."""

    @property
    def weighted(self) -> bool: ...  # whether rows may have weights

    @property
    def row_functions(self) -> list[RowFunction]: ...  # for each fit, of gradients: what `known` needs

    def known(self, spec: FitSpec, x: Inputs, to: Reference, found: Sequence[np.ndarray]) -> KnownRows: ...


def compared(spec: FitSpec, fits: Sequence[Fit], method: Method, x: Inputs) -> tuple[np.ndarray, Reference, KnownRows]:
    """Return the outputs of rows, what their targets are compared with, and what their bounds follow from."""
    if x.weight is not None and not method.weighted:
        raise ValueError("the calibration rows had no weights: give calibrate(..., sample_weight=) as well")
    if x.weight is not None and bool((x.weight == 0).any()):
        raise ValueError("a row of weight zero has no interval: leave it out of predict")
    outputs, found = spec.evaluate(fits, x, method.row_functions, weighed=True)
    to = spec.reference(fits, x, outputs)
    if to.crossed:
        warn(CROSSED.format(to.crossed, len(x)))
    return outputs, to, method.known(spec, x, to, found)


def in_units_of_noise(fits: Sequence[Fit], q: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return q of each output, as the fits' own `variance` gives it, in units of s²."""
    factors = np.concatenate([fit.variance_factors for fit in fits])
    return [factor * each for factor, each in zip(factors, q, strict=True)]


@dataclass(frozen=True)
class Formula:
    """ŷ ± t·s·√(u² + q) with u the noise that is known, mostly 1; without noise, of the regression function, t·s·√q."""

    fits: Sequence[Fit]
    noise: bool = True
    weighted: ClassVar[bool] = True

    def checked(self) -> Self:
        """Raise where the formula has no answer."""
        freedom = min(float(fit.degrees_of_freedom.min()) for fit in self.fits)
        if freedom > 0:
            return self
        raise ValueError(
            f"n − p* = {freedom:.3g} leaves no degrees of freedom for the noise: the formula has no answer for this "
            "network. Raise the damping, or calibrate on held-out data"
        )

    @property
    def row_functions(self) -> list[RowFunction]:
        return [fit.variance for fit in self.fits]

    def known(self, spec: FitSpec, x: Inputs, to: Reference, found: Sequence[np.ndarray]) -> KnownRows:
        return KnownRows(in_units_of_noise(self.fits, found), to.unit)

    def scale(self, rows: KnownRows) -> np.ndarray:  # (n, m)
        return rows.unit * np.sqrt(np.stack(rows.q, axis=1) + float(self.noise))

    def bounds(self, rows: KnownRows, levels: Sequence[float], side: Side) -> Bounds:  # (n, m, levels) each
        """Return bounds of y − ŷ."""
        factors = [np.concatenate([fit.half_width(each, side) for fit in self.fits]) for each in levels]  # each (m,)
        return two_bounds(np.stack([self.scale(rows) * each for each in factors], axis=2), side)
