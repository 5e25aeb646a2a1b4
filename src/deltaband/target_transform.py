"""The transform that targets went through before training, and the way back to their original units."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from .results import to_numpy

GRID_POINTS = 9  # of an interval, at which the inverse of a transform is evaluated
RELATIVE_ROUNDING = 1e-6  # of the values there


@dataclass(frozen=True, eq=False)
class TargetTransform:
    """The map from outputs to original units: y·std + mean, a scaler's `inverse_transform`, or the identity."""

    mean: np.ndarray | None = None  # () or (m,)
    std: np.ndarray | None = None
    scaler: Any = None

    @classmethod
    def of(cls, transform: Any) -> Self:
        """Return the transform for the argument `target_transform`: None, a pair (mean, std) or a scaler."""
        if transform is None or hasattr(transform, "inverse_transform"):
            return cls(scaler=transform)
        try:
            mean, std = (np.squeeze(to_numpy(part)) for part in transform)
        except (TypeError, ValueError):
            expected = "a pair (mean, std) or a scaler with inverse_transform, such as scikit-learn's StandardScaler"
            raise TypeError(f"target_transform must be {expected}; got {transform!r}") from None
        if max(mean.ndim, std.ndim) > 1 or not (np.isfinite(mean).all() and (std > 0).all() and np.isfinite(std).all()):
            raise ValueError(f"target_transform=(mean, std) needs finite numbers and std > 0, got ({mean}, {std})")
        return cls(mean, std)

    def to_original(self, values: np.ndarray) -> np.ndarray:  # (n, m) or (n, m, levels), as returned by the network
        if self.mean is not None:
            mean, std = self._moments(values)
            return values * std + mean
        if self.scaler is None or values.size == 0:
            return values
        return np.moveaxis(self._inverse(np.moveaxis(values, 1, -1)), -1, 1)

    def to_original_bounds(
        self, mean: np.ndarray, lower: np.ndarray, upper: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends of intervals around the mean (n, m), each (n, m) or (n, m, levels), in the original units."""
        if self.scaler is None or lower.size == 0:
            return self.to_original(lower), self.to_original(upper)
        middle = mean if lower.ndim == mean.ndim else mean[:, :, None]
        finite = [np.where(np.isinf(end), middle, end) for end in (lower, upper)]  # one-sided bounds have one end
        first, last = (np.moveaxis(each(*finite), 1, -1) for each in (np.minimum, np.maximum))
        _, decreasing = self._evaluate(first, last)
        swap = decreasing.reshape(-1, *[1] * (lower.ndim - 2))
        low, high = (np.where(swap, -end, end) for end in (lower, upper))  # what is infinite stays so
        low, high = (np.where(np.isinf(e), e, self.to_original(f)) for e, f in zip((low, high), finite, strict=True))
        low, high = np.where(swap, high, low), np.where(swap, low, high)
        low, high = np.where(low > high, high, low), np.where(low > high, low, high)  # rounding may have reversed them
        return np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)

    def to_scaled(self, values: np.ndarray) -> np.ndarray | None:  # (n, m)
        """Return targets in the units of training; None for a scaler, which may not accept all numbers."""
        if self.mean is None:
            return None
        mean, std = self._moments(values)
        return (values - mean) / std

    def to_original_difference(self, values: np.ndarray) -> np.ndarray:  # (m,)
        """Return differences of two values, such as standard deviations, in the original units."""
        return values if self.std is None else values * self.std

    def is_decreasing(self, values: np.ndarray) -> bool:  # (n, m)
        """Return whether larger outputs are smaller numbers in the original units, in the range of these values."""
        if self.scaler is None or len(values) == 0:
            return False
        first, last = values.min(axis=0), values.max(axis=0)
        original, decreasing = self._evaluate(first, np.maximum(last, first + 1))
        if decreasing.any() and (original[-1] > original[0])[~decreasing].any():
            raise ValueError("target_transform reverses the order of some outputs and not of others: not supported")
        return bool(decreasing.any())

    def _evaluate(self, lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the inverse on a grid from lower to upper, (GRID_POINTS, …, m), and where it decreases, (m,)."""
        values = self._inverse(np.linspace(lower, upper, GRID_POINTS))
        with np.errstate(invalid="ignore"):  # ∞ − ∞
            steps = np.diff(values, axis=0)
        rounding = RELATIVE_ROUNDING * np.abs(values, where=np.isfinite(values), out=np.zeros_like(values))[1:]
        axes = tuple(range(steps.ndim - 1))
        rises, falls = (steps > rounding).any(axis=axes), (steps < -rounding).any(axis=axes)  # (m,)
        if (rises & falls).any():
            raise ValueError(
                "the inverse of the target transform is not monotone over the intervals, so their ends are not bounds "
                "in the units of y; give a monotone one: of a square root, for instance, lambda z: "
                "np.square(np.maximum(z, 0))"
            )
        return values, np.sign(np.nan_to_num(steps)).sum(axis=axes) < 0  # rounding may reverse some steps, but not most

    def _inverse(self, values: np.ndarray) -> np.ndarray:  # (…, m)
        rows = values.reshape(-1, values.shape[-1])
        try:
            with np.errstate(all="ignore"):  # the upper end of an interval may well be exp(1000)
                return np.asarray(self.scaler.inverse_transform(rows), dtype=np.float64).reshape(values.shape)
        except ValueError as error:
            problem = f"target_transform cannot invert rows of {rows.shape[1]} outputs: {error}"
            raise ValueError(f"{problem}; give one that is fitted to just the requested outputs") from error

    def _moments(self, values: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the mean and the std in shapes that broadcast to the values (n, m, …)."""
        for moment in (self.mean, self.std):
            part = np.atleast_1d(np.asarray(moment))
            if len(part) not in (1, m := values.shape[1]):
                raise ValueError(f"target_transform has {len(part)} columns, the intervals have {m} outputs")
            yield part.reshape(-1, *[1] * (values.ndim - 2))
