"""The units that targets were in before they were scaled for training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .results import to_numpy

GRID = 9  # points of an interval at which the inverse of a target transform is looked at
ROUNDING = 1e-6  # of the values there


@dataclass(frozen=True)
class Units:
    """What turns the network's numbers back: y·std + mean, or a scaler's `inverse_transform`; nothing by default."""

    mean: np.ndarray | None = None  # () or (m,)
    std: np.ndarray | None = None
    scaler: Any = None

    @classmethod
    def of(cls, transform: Any) -> Units:
        if transform is None:
            return cls()
        if hasattr(transform, "inverse_transform"):
            return cls(scaler=transform)
        try:
            mean, std = (np.squeeze(to_numpy(part)) for part in transform)
        except (TypeError, ValueError):
            raise TypeError(
                "target_transform must be a pair (mean, std) or a scaler with inverse_transform, such as "
                f"sklearn.preprocessing.StandardScaler; got {transform!r}"
            ) from None
        if (
            mean.ndim > 1
            or std.ndim > 1
            or not (np.isfinite(mean).all() and np.isfinite(std).all() and (std > 0).all())
        ):
            raise ValueError(f"target_transform=(mean, std) needs finite numbers and std > 0, got ({mean}, {std})")
        return cls(mean, std)

    def original(self, values: np.ndarray) -> np.ndarray:  # (n, m) or (n, m, levels)
        if self.mean is not None and self.std is not None:
            mean, std = (self._columns(part, values) for part in (self.mean, self.std))
            return values * std + mean
        if self.scaler is None or values.size == 0:
            return values
        return np.moveaxis(self._inverse(np.moveaxis(values, 1, -1)), -1, 1)

    def bounds(self, mean: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ends of intervals around the mean (n, m), each (n, m) or (n, m, levels), in the original units."""
        if self.scaler is None or lower.size == 0:
            return self.original(lower), self.original(upper)
        middle = mean if lower.ndim == mean.ndim else mean[:, :, None]
        finite = [np.where(np.isinf(end), middle, end) for end in (lower, upper)]  # one-sided bounds have one end
        first, last = (np.moveaxis(each(*finite), 1, -1) for each in (np.minimum, np.maximum))  # beyond the mean, maybe
        _, falls = along(self._inverse, first, last)
        turned = falls.reshape(-1, *[1] * (lower.ndim - 2))
        low, high = (
            np.where(np.isinf(end), np.where(turned, -end, end), self.original(there))
            for end, there in zip((lower, upper), finite, strict=True)
        )
        return ordered(np.where(turned, high, low), np.where(turned, low, high))

    def scaled(self, values: np.ndarray) -> np.ndarray | None:  # (n, m)
        """What the network was trained on; None for a scaler, which may not take all numbers."""
        if self.mean is not None and self.std is not None:
            return (values - self._columns(self.mean, values)) / self._columns(self.std, values)
        return None

    def length(self, values: np.ndarray) -> np.ndarray:  # (m,)
        """Of a difference of two values."""
        return values if self.std is None else values * self.std

    def _inverse(self, values: np.ndarray) -> np.ndarray:  # (…, m)
        rows = values.reshape(-1, values.shape[-1])
        try:
            with np.errstate(all="ignore"):  # the upper end of an interval may well be exp(1000)
                back = np.asarray(self.scaler.inverse_transform(rows), dtype=np.float64)
            return back.reshape(values.shape)
        except ValueError as error:
            raise ValueError(
                f"target_transform cannot take {rows.shape[1]} outputs a row back: {error}; give one that is fitted, "
                "to the outputs asked about alone"
            ) from error

    def falling(self, values: np.ndarray) -> bool:  # (n, m)
        """Whether a larger number of the network's is a smaller one in the original units, where these values are."""
        if self.scaler is None or len(values) == 0:
            return False
        first, last = values.min(axis=0), values.max(axis=0)
        back, falls = along(self._inverse, first, np.maximum(last, first + 1))
        if falls.any() and (back[-1] > back[0])[~falls].any():
            raise ValueError("target_transform turns the order of some outputs round and not of others: not supported")
        return bool(falls.any())

    @staticmethod
    def _columns(part: np.ndarray, values: np.ndarray) -> np.ndarray:
        if part.ndim == 0:
            return part
        if len(part) != values.shape[1]:
            raise ValueError(f"target_transform has {len(part)} columns, the intervals have {values.shape[1]} outputs")
        return part.reshape(1, -1, *[1] * (values.ndim - 2))


def along(
    inverse: Callable[[np.ndarray], np.ndarray], lower: np.ndarray, upper: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`inverse` at points from lower to upper, both (…, m), as (GRID, …, m), and which of the m outputs it turns round.

    Where it is not monotone, the ends of an interval are no bounds: an error.
    """
    values = inverse(np.linspace(lower, upper, GRID))
    with np.errstate(invalid="ignore"):  # ∞ − ∞
        steps = np.diff(values, axis=0)
    rounding = ROUNDING * np.abs(values, where=np.isfinite(values), out=np.zeros_like(values))[1:]
    every = tuple(range(steps.ndim - 1))
    rises, falls = (steps > rounding).any(axis=every), (steps < -rounding).any(axis=every)  # (m,)
    if (rises & falls).any():
        raise ValueError(
            "the inverse of the target transform is not monotone over the intervals (as that of a square root is not: "
            "it takes −1 to 1), so their ends are no bounds in the units of y; give an inverse that is, such as "
            "lambda z: np.square(np.maximum(z, 0))"
        )
    return values, np.sign(np.nan_to_num(steps)).sum(axis=every) < 0  # a rounding may turn some round, but not most


def ordered(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bounds in their order, which rounding may have turned round; where the inverse has no value there is no bound."""
    low, high = np.where(low > high, high, low), np.where(low > high, low, high)
    return np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)
