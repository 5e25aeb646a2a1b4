"""The units that targets were in before they were scaled for training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .result import to_numpy


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
        by_level = np.moveaxis(values.reshape(*values.shape[:2], -1), 2, 0)  # (levels, n, m)
        back = [self._inverse(each) for each in by_level]
        return np.stack(back, axis=2).reshape(values.shape)

    def scaled(self, values: np.ndarray) -> np.ndarray | None:  # (n, m)
        """What the network was trained on; None for a scaler, which may not take all numbers."""
        if self.mean is not None and self.std is not None:
            return (values - self._columns(self.mean, values)) / self._columns(self.std, values)
        return None

    def length(self, values: np.ndarray) -> np.ndarray:  # (m,)
        """Of a difference of two values."""
        return values if self.std is None else values * self.std

    def _inverse(self, values: np.ndarray) -> np.ndarray:  # (n, m)
        infinite = np.isinf(values)  # the other side of a one-sided bound
        back = np.asarray(self.scaler.inverse_transform(np.where(infinite, 0.0, values)), dtype=np.float64)
        return np.where(infinite, -values if self.falling(values.shape[1]) else values, back.reshape(values.shape))

    def falling(self, n_outputs: int) -> bool:
        """Whether a larger number of the network's is a smaller one in the original units."""
        if self.scaler is None:
            return False
        steps = np.stack([np.zeros(n_outputs), np.ones(n_outputs)])
        rise = np.diff(np.asarray(self.scaler.inverse_transform(steps)).reshape(2, n_outputs), axis=0)
        if (rise < 0).any() and (rise > 0).any():
            raise ValueError("target_transform turns the order of some outputs round and not of others: not supported")
        return bool((rise < 0).any())

    @staticmethod
    def _columns(part: np.ndarray, values: np.ndarray) -> np.ndarray:
        if part.ndim == 0:
            return part
        if len(part) != values.shape[1]:
            raise ValueError(f"target_transform has {len(part)} columns, the intervals have {values.shape[1]} outputs")
        return part.reshape(1, -1, *[1] * (values.ndim - 2))
