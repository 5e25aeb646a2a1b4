"""Distributions of new observations, one per row and output: Student's t by the formula, steps by calibration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .data.batches import read_targets
from .results import to_numpy

MAX_STEPS = 1_000  # levels of a distribution that is made of intervals
LEVEL_ROUNDING = 1e-9  # of levels times rows, as that of conformal ranks


@dataclass(frozen=True, eq=False, repr=False)
class Distribution(ABC):
    """Predictive distributions, one per row and output. Methods return NumPy arrays in float64.

    Args:
        mean: The predictions, (n,), or (n, m) for m outputs.
    """

    mean: np.ndarray

    def __len__(self) -> int:
        return len(self.mean)

    def __repr__(self) -> str:
        m = f", {self.mean.shape[1]} outputs" if self.mean.ndim > 1 else ""
        return f"{type(self).__name__} of {len(self):,} row{'s'[: len(self) != 1]}{m}"

    def quantile(self, p: float | Sequence[float]) -> np.ndarray:
        """Return quantiles.

        Args:
            p: The probability below, between 0 and 1, or several.

        Returns:
            An array of the shape of `mean`; for several p with one more axis.

        Raises:
            ValueError: If p is not between 0 and 1, or a calibration on so few rows has no such quantile.
        """
        probabilities = parse_probabilities(p)
        found = self._quantile(np.array(probabilities)).reshape(*self.mean.shape, len(probabilities))
        return found[..., 0] if np.ndim(p) == 0 else found

    def cdf(self, y: Any) -> np.ndarray:
        """Return the probabilities of observations up to y.

        Args:
            y: One number for all rows; or numbers of the shape of `mean`; or several per row, with one more axis, whose
                first dimensions may be 1.

        Returns:
            Probabilities of the shape of `mean`; for several y per row with one more axis.

        Raises:
            ValueError: If the shape is another, or y is NaN.
        """
        values = to_numpy(y)
        if np.isnan(values).any():
            raise ValueError("y must be numbers, got NaN")
        shape = self.mean.shape
        several = values.ndim == len(shape) + 1
        if not several and values.ndim and values.shape != shape:
            expected = f"a number, {shape}, or {shape} and one more axis"
            raise ValueError(f"y must have the shape of the predictions: expected {expected}, got {values.shape}")
        if not several:
            values = np.broadcast_to(values, shape)[..., None]
        try:
            values = np.broadcast_to(values, (*shape, values.shape[-1]))
        except ValueError:
            raise ValueError(f"y of shape {values.shape} does not match predictions of shape {shape}") from None
        found = self._cdf(values.reshape(len(self), -1, values.shape[-1])).reshape(values.shape)
        return found if several else found[..., 0]

    def crps(self, y: Any) -> np.ndarray:
        """Return the continuous ranked probability score ∫ (F(z) − 1{y ≤ z})² dz of each row and output.

        Args:
            y: The targets, one per row and output.

        Returns:
            Scores of the shape of `mean`, in the units of y; lower is better.

        Raises:
            ValueError: If there are not as many targets.
        """
        targets = read_targets(y).numpy()
        if targets.size != self.mean.size or len(targets) != len(self):
            raise ValueError(f"expected targets of shape {self.mean.shape}, one per prediction, got {targets.shape}")
        if not np.isfinite(targets).all():
            raise ValueError("targets must be finite")
        return self._crps(targets).reshape(self.mean.shape)

    @property
    def _means(self) -> np.ndarray:  # (n, m)
        return self.mean.reshape(len(self), int(np.prod(self.mean.shape[1:])))

    @abstractmethod
    def _quantile(self, p: np.ndarray) -> np.ndarray: ...  # (k,) -> (n, m, k)

    @abstractmethod
    def _cdf(self, y: np.ndarray) -> np.ndarray: ...  # (n, m, k) likewise

    @abstractmethod
    def _crps(self, y: np.ndarray) -> np.ndarray: ...  # (n, m) likewise


@dataclass(frozen=True, eq=False, repr=False)
class StudentT(Distribution):
    """ŷ + scale·t, t having Student's distribution.

    Args:
        mean: The predictions, (n,), or (n, m) for m outputs.
        scale: s·√(1 + q), of the shape of `mean`.
        freedom: The degrees of freedom n − p*, (m,).
    """

    scale: np.ndarray
    freedom: np.ndarray

    @property
    def _scales(self) -> np.ndarray:  # (n, m)
        return self.scale.reshape(self._means.shape)

    def _quantile(self, p: np.ndarray) -> np.ndarray:
        from scipy.special import stdtrit

        return self._means[:, :, None] + self._scales[:, :, None] * stdtrit(self.freedom[:, None], p)

    def _standardised(self, y: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            z = (y - self._means[:, :, None]) / self._scales[:, :, None]
        return np.where(np.isnan(z), 0.0, z)  # y = ŷ without any spread

    def _cdf(self, y: np.ndarray) -> np.ndarray:
        from scipy.special import stdtr

        z = self._standardised(y)
        return np.where(np.isinf(z), (z > 0).astype(float), stdtr(self.freedom[:, None], z))

    def _crps(self, y: np.ndarray) -> np.ndarray:
        """scale·(z(2F(z) − 1) + 2f(z)(ν + z²)/(ν − 1) − 2√ν/(ν − 1)·B(½, ν − ½)/B(½, ν/2)²), and ∞ where ν ≤ 1."""
        from scipy.special import betaln, stdtr

        nu, z = np.where(self.freedom > 1, self.freedom, np.nan), self._standardised(y[:, :, None])[:, :, 0]
        z = np.where(np.isinf(z), 0.0, z)
        log_density = -betaln(0.5, nu / 2) - np.log(nu) / 2 - (nu + 1) / 2 * np.log1p(z**2 / nu)
        constant = 2 * np.sqrt(nu) / (nu - 1) * np.exp(betaln(0.5, nu - 0.5) - 2 * betaln(0.5, nu / 2))
        standard = z * (2 * stdtr(nu, z) - 1) + 2 * np.exp(log_density) * (nu + z**2) / (nu - 1) - constant
        scores = np.where(self._scales > 0, self._scales * standard, np.abs(y - self._means))
        return np.where(np.isnan(scores), np.inf, scores)


@dataclass(frozen=True, eq=False, repr=False)
class Steps(Distribution):
    """A distribution with steps at the bounds of intervals of many levels.

    With symmetric steps, n·c of a level L_k each, P(Y ≤ upper_k) = (1 + L_k)/2 and P(Y < lower_k) = (1 − L_k)/2: the
    interval of level L_k is the pair of quantiles (1 − L_k)/2 and (1 + L_k)/2, and the prediction that of 1/2. Below ½
    the quantile of p is the largest y with P(Y < y) ≤ p, above it the smallest with P(Y ≤ y) ≥ p: a pair of them holds
    at least its level. What is beyond the largest level has no place; the CRPS shares it out among the steps.

    Args:
        mean: The predictions, (n,), or (n, m) for m outputs.
        values: Where the steps are, in ascending order, (n, K) or (n, m, K).
        cumulative: P(Y ≤ value) at each, (K,).
        below: P(Y < the first).
        symmetric: Whether they are pairs of bounds.
        n_rows: The calibration rows that they follow from; None where they follow from a formula.
    """

    values: np.ndarray
    cumulative: np.ndarray
    below: float
    symmetric: bool
    n_rows: int | None = None

    @classmethod
    def of_bounds(
        cls, levels: np.ndarray, mean: np.ndarray, lower: np.ndarray | None, upper: np.ndarray, n_rows: int | None
    ) -> Steps:
        """Return the distribution of intervals.

        Args:
            levels: Their levels, ascending, (K,).
            mean: The predictions, (n,), or (n, m) for m outputs.
            lower: Lower bounds, of the shape of `mean` and K; None for a distribution of upper bounds alone.
            upper: Upper bounds.
            n_rows: The calibration rows that they follow from.

        Returns:
            The distribution, whose steps are the bounds.
        """
        upper = np.maximum.accumulate(upper, axis=-1)
        if lower is None:
            return cls(mean, upper, levels, 0.0, False, n_rows)
        lower = np.minimum.accumulate(lower, axis=-1)[..., ::-1]
        before = np.concatenate([[0.0], levels[:-1]])
        cumulative = np.concatenate([(1 - before[::-1]) / 2, (1 + levels) / 2])
        return cls(mean, np.concatenate([lower, upper], axis=-1), cumulative, float(1 - levels[-1]) / 2, True, n_rows)

    @property
    def _steps(self) -> np.ndarray:  # (n, m, K)
        return self.values.reshape(*self._means.shape, len(self.cumulative))

    def _quantile(self, p: np.ndarray) -> np.ndarray:
        rounding = LEVEL_ROUNDING / len(self.cumulative)
        before, found = np.concatenate([[self.below], self.cumulative[:-1]]), []
        for each in p:
            if self.symmetric and each == 0.5:
                found.append(self._means)
                continue
            lower = self.symmetric and each < 0.5
            if lower:
                k = int(np.searchsorted(before, each + rounding, side="right")) - 1
            else:
                k = int(np.searchsorted(self.cumulative, each - rounding, side="left"))
            if not 0 <= k < len(self.cumulative):
                least, most = (self.below if self.symmetric else 0.0), float(self.cumulative[-1])
                rows = "a grid of levels has" if self.n_rows is None else f"{self.n_rows:,} calibration rows have"
                advice = "ask for one between, or calibrate on more rows"
                raise ValueError(f"{rows} no quantile {each:g}: from {least:.4g} to {most:.4g}; {advice}")
            found.append(self._steps[:, :, k])
        return np.stack(found, axis=2)

    def _cdf(self, y: np.ndarray) -> np.ndarray:
        steps = np.concatenate([[self.below], self.cumulative])
        counts = np.empty(y.shape, dtype=np.intp)
        for row, column in np.ndindex(*y.shape[:2]):
            counts[row, column] = np.searchsorted(self._steps[row, column], y[row, column], side="right")
        return steps[counts]

    def _crps(self, y: np.ndarray) -> np.ndarray:
        v = self._steps
        w = np.broadcast_to(np.diff(self.cumulative, prepend=self.below), v.shape)
        w = np.where(np.isfinite(v), w, 0.0)
        v, total = np.where(np.isfinite(v), v, 0.0), w.sum(axis=2, keepdims=True)
        with np.errstate(invalid="ignore"):
            w = w / total
        spread = (w * v * (2 * np.cumsum(w, axis=2) - w - 1)).sum(axis=2)  # half of the mean |Y − Y'|
        scores = (w * np.abs(v - y[:, :, None])).sum(axis=2) - spread
        return np.where(np.isnan(scores), np.inf, scores)  # no finite step at all


def levels_of_steps(n_rows: int | None) -> np.ndarray:  # (K,)
    """Return the levels that n calibration rows tell apart, k/(n + 1), or 1,000 of them."""
    n = MAX_STEPS if n_rows is None else n_rows
    return np.unique(np.linspace(1, n, min(n, MAX_STEPS)).round()) / (n + 1)


def levels_of(probabilities: Sequence[float]) -> list[float]:
    """Return the levels of the intervals whose ends are quantiles; that of ½ is the prediction, and has none."""
    return [abs(2 * each - 1) for each in probabilities if each != 0.5]


def ends_of(
    probabilities: Sequence[float], middle: np.ndarray, lower: np.ndarray, upper: np.ndarray
) -> np.ndarray:  # (n, m), (n, m, levels) twice -> (n, m, k)
    """Return the quantiles that are ends of intervals of `levels_of` these probabilities, in their order."""
    columns, found = iter(range(lower.shape[2])), []
    for each in probabilities:
        found.append(middle if each == 0.5 else (lower if each < 0.5 else upper)[:, :, next(columns)])
    return np.stack(found, axis=2)


def parse_probabilities(p: float | Sequence[float], name: str = "p") -> tuple[float, ...]:
    """Return one or several probabilities as a tuple; raise TypeError or ValueError if they are not between 0 and 1."""
    try:
        values = np.atleast_1d(np.asarray(p, dtype=float))
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number or a list of numbers between 0 and 1, got {p!r}") from None
    if values.ndim != 1 or not len(values) or not ((values > 0) & (values < 1)).all():
        raise ValueError(f"{name} must be between 0 and 1, exclusive (0.9 for the 90 % quantile), got {p!r}")
    return tuple(values.tolist())
