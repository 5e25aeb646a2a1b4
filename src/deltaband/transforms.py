"""What inputs and targets go through before the network: affine maps, which files hold, scalers, and functions."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from .data.inputs import NUMBERS_CHECKED_AT_ONCE, Inputs
from .results import to_numpy
from .storage.encoding import storable
from .validation import describe

GRID_POINTS = 9  # of an interval, at which the inverse of a transform is evaluated
RELATIVE_ROUNDING = 1e-6  # of the values there
RELATIVE_STEP = 1e-3  # beyond a bound, in widths of its interval
SAME_ROW_TOLERANCE = 1e-4  # relative, between a row that a function gets alone and among others
# scikit-learn's scalers that are affine: the attributes of mean and std, and the settings that say whether these count
AFFINE_SCALERS = {
    "StandardScaler": ("mean_", "scale_", "with_mean", "with_std"),
    "RobustScaler": ("center_", "scale_", "with_centering", "with_scaling"),
    "MaxAbsScaler": ("", "scale_", "", ""),
    "MinMaxScaler": ("min_", "scale_", "", ""),
}


@storable
@dataclass(frozen=True, eq=False)
class Affine:
    """The map z = (v − mean)/std of each column, or z = v·std + mean, and its inverse."""

    mean: np.ndarray  # any shape that broadcasts to a row
    std: np.ndarray
    multiplies: bool = False  # which of the two it is: their last digits differ
    columns: tuple[str, ...] | None = None  # names, where the scaler has been fitted to some

    @classmethod
    def of(cls, transform: Any, name: str) -> Self | None:
        """Return the map of a pair (mean, std), or of one of the `AFFINE_SCALERS`; None for anything else."""
        if isinstance(transform, cls):
            return transform
        kind = type(transform)
        if kind.__name__ in AFFINE_SCALERS and kind.__module__.startswith("sklearn.preprocessing."):
            return cls._of_scaler(transform, name)
        if callable(transform) or any(hasattr(transform, each) for each in ("transform", "inverse_transform")):
            return None
        try:
            mean, std = (to_numpy(part) for part in transform)
        except (TypeError, ValueError):
            return None
        if not (np.isfinite(mean).all() and (std > 0).all() and np.isfinite(std).all()):
            raise ValueError(f"{name}=(mean, std) needs finite numbers and std > 0, got ({mean}, {std})")
        return cls(mean.copy(), std.copy())

    @classmethod
    def _of_scaler(cls, scaler: Any, name: str) -> Self | None:
        if not hasattr(scaler, "n_features_in_"):
            raise ValueError(f"{name}={scaler!r} is not fitted: give the one that the training rows were scaled with")
        if getattr(scaler, "clip", False):
            return None
        *attributes, with_mean, with_std = AFFINE_SCALERS[type(scaler).__name__]
        used = (getattr(scaler, with_mean, True), getattr(scaler, with_std, True))
        mean, std = (
            to_numpy(getattr(scaler, attribute)) if attribute and counts else np.full(scaler.n_features_in_, neutral)
            for attribute, counts, neutral in zip(attributes, used, (0.0, 1.0), strict=True)
        )
        columns = getattr(scaler, "feature_names_in_", None)
        names = None if columns is None else tuple(map(str, columns))
        return cls(mean.copy(), std.copy(), type(scaler).__name__ == "MinMaxScaler", names)

    def forward(self, values: Any, mean: Any, std: Any) -> Any:
        """Return z of values, given the numbers of this map in the kind and shape of the values."""
        return values * std + mean if self.multiplies else (values - mean) / std

    def inverse(self, values: Any, mean: Any, std: Any) -> Any:
        return (values - mean) / std if self.multiplies else values * std + mean

    @property
    def unit(self) -> np.ndarray:
        """What a difference of 1 in z is in v."""
        return 1 / self.std if self.multiplies else self.std


@dataclass(frozen=True, eq=False)
class InputTransform:
    """What raw inputs go through: an affine map of a single tensor, or a function of what the user gives."""

    affine: Affine | None = None
    function: Callable[[Any], Any] | None = None
    name: str = "(mean, std)"

    @classmethod
    def of(cls, transform: Any) -> Self | None:
        """Return the transform for the argument `input_transform`: None, a pair, a scaler, or a function."""
        if transform is None:
            return None
        if (affine := Affine.of(transform, "input_transform")) is not None:
            return cls(affine)
        function = getattr(transform, "transform", transform)
        if not callable(function):
            expected = "a pair (mean, std), a fitted scaler with transform, or a function of the inputs"
            raise TypeError(f"input_transform must be {expected}; got {transform!r}")
        return cls(None, function, getattr(transform, "__name__", type(transform).__name__))

    def __call__(self, x: Any, dtype: torch.dtype | None) -> Inputs:
        """Return the inputs that the network gets for raw ones.

        An affine map is computed in float64, and rounded once: to `dtype`, or to the inputs' own where that is None.
        """
        if self.affine is not None:
            return self._mapped(x, self.affine, dtype)
        found = self._evaluated(x)
        if (n := _count(x)) != len(found):
            raise ValueError(f"input_transform={self.name} must return as many rows as it gets: {n}, got {len(found)}")
        if n > 1 and not _same(alone := self._evaluated(_each(x, lambda part: part[:1])), found[:1]):
            was, now = ([round(v, 4) for v in each.tensors[0][0].flatten()[:3].tolist()] for each in (alone, found))
            raise ValueError(
                f"input_transform={self.name} returns {was} for the first row alone, and {now} for it among others: it "
                "must not depend on other rows; give mean and std of the training rows, or a scaler fitted to these"
            )
        return found

    def _evaluated(self, x: Any) -> Inputs:
        assert self.function is not None
        try:
            with torch.no_grad():
                found = self.function(_each(x, _copied))
        except Exception as error:
            raise ValueError(f"input_transform={self.name} failed on {describe(x)}: {error}") from error
        return Inputs.of(found)

    def _mapped(self, x: Any, affine: Affine, dtype: torch.dtype | None) -> Inputs:
        named = getattr(x, "columns", None)
        if affine.columns is not None and named is not None and affine.columns != tuple(map(str, named)):
            got, expected = list(map(str, named)), list(affine.columns)
            raise ValueError(f"input_transform was fitted to the columns {expected}, and the inputs have {got}")
        X = Inputs.of(x)
        if not X.single:
            several = "a pair or a scaler is for one tensor of inputs"
            raise TypeError(f"input_transform: {several}, got {X}; give a function of all of them")
        raw = X.tensors[0]
        numbers = [_broadcast(part, raw.shape[1:]).to(raw.device) for part in (affine.mean, affine.std)]
        if dtype is None:
            dtype = raw.dtype if raw.is_floating_point() else torch.get_default_dtype()
        mapped = torch.empty(raw.shape, dtype=dtype, device=raw.device)
        step = max(1, NUMBERS_CHECKED_AT_ONCE // max(1, raw[:1].numel()))
        for start in range(0, len(raw), step):
            mapped[start : start + step] = affine.forward(raw[start : start + step].double(), *numbers)
        return Inputs((mapped,))


@dataclass(frozen=True, eq=False)
class TargetTransform:
    """The map between outputs and original units: an affine one, a scaler's, or the identity."""

    affine: Affine | None = None  # of numbers () or (m,)
    scaler: Any = None

    @classmethod
    def of(cls, transform: Any) -> Self:
        """Return the transform for the argument `target_transform`: None, a pair (mean, std) or a scaler."""
        affine = Affine.of(transform, "target_transform")
        if affine is not None:
            mean, std = np.squeeze(affine.mean), np.squeeze(affine.std)
            if max(mean.ndim, std.ndim) > 1:
                raise ValueError(f"target_transform=(mean, std) needs one of each per output, got {mean.shape}")
            return cls(replace(affine, mean=mean, std=std))
        if transform is None or hasattr(transform, "inverse_transform"):
            return cls(scaler=transform)
        expected = "a pair (mean, std) or a scaler with inverse_transform, such as scikit-learn's StandardScaler"
        raise TypeError(f"target_transform must be {expected}; got {transform!r}")

    def to_original(self, values: np.ndarray) -> np.ndarray:  # (n, m) or (n, m, levels), as returned by the network
        if self.affine is not None:
            return self.affine.inverse(values, *self._numbers(self.affine, values))
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
        low, high = np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)
        step = RELATIVE_STEP * np.where(np.isfinite(high - low) & (high > low), high - low, 1.0)
        return np.where(self._clips(low, -step), -np.inf, low), np.where(self._clips(high, step), np.inf, high)

    def _clips(self, bounds: np.ndarray, step: np.ndarray) -> np.ndarray:  # (n, m) or (n, m, levels)
        """Return beyond which bounds all targets are one to the transform: an interval up to there has them all."""
        known = np.isfinite(bounds)
        if not hasattr(self.scaler, "transform") or not known.any():
            return np.zeros(bounds.shape, dtype=bool)
        rows = [np.moveaxis(np.where(known, each, 0.0), 1, -1) for each in (bounds, bounds + step)]
        try:
            here, beyond = (self.to_scaled(each.reshape(-1, bounds.shape[1])) for each in rows)
        except ValueError:  # bounds may be beyond what it takes
            return np.zeros(bounds.shape, dtype=bool)
        return known & np.moveaxis((here == beyond).reshape(rows[0].shape), -1, 1)

    def to_scaled(self, values: np.ndarray) -> np.ndarray:  # (n, m)
        """Return targets in original units as the network was trained on."""
        if self.affine is not None:
            return self.affine.forward(values, *self._numbers(self.affine, values))
        if self.scaler is None or values.size == 0:
            return values
        try:
            with np.errstate(all="ignore"):  # what is not finite is reported with its row
                return np.asarray(self.scaler.transform(values), dtype=np.float64).reshape(values.shape)
        except Exception as error:
            problem = f"target_transform cannot transform rows of {values.shape[1]} targets: {error}"
            raise ValueError(f"{problem}; give one that is fitted to just the requested outputs") from error

    def to_original_difference(self, values: np.ndarray) -> np.ndarray:  # (m,)
        """Return differences of two values, such as standard deviations, in the original units."""
        return values if self.affine is None else values * self.affine.unit

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

    def _numbers(self, affine: Affine, values: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the mean and the std in shapes that broadcast to the values (n, m, …)."""
        for number in (affine.mean, affine.std):
            part = np.atleast_1d(number)
            if len(part) not in (1, m := values.shape[1]):
                raise ValueError(f"target_transform has {len(part)} columns, the intervals have {m} outputs")
            yield part.reshape(-1, *[1] * (values.ndim - 2))


def _broadcast(part: np.ndarray, row: torch.Size) -> Tensor:
    """Return numbers of a pair or scaler in a shape that broadcasts to rows of this shape."""
    wanted = part.shape
    while len(wanted) > len(row) and wanted[0] == 1:  # means with keepdims
        wanted = wanted[1:]
    try:
        fits = len(wanted) <= len(row) and np.broadcast_shapes(wanted, tuple(row)) == tuple(row)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"input_transform has numbers of shape {part.shape}, and a row of the inputs has shape {tuple(row)}: give "
            "one for each feature, in their order"
        )
    return torch.from_numpy(part.reshape(wanted))


def _parts(x: Any) -> list[Any] | None:
    """Return the inputs in a mapping, or in a list or tuple of arrays; None for a single one."""
    if isinstance(x, Mapping):
        return list(x.values())
    return list(x) if isinstance(x, tuple | list) and all(hasattr(part, "__array__") for part in x) else None


def _count(x: Any) -> int:
    parts = _parts(x)
    return len(parts[0] if parts else x)


def _each(x: Any, change: Callable[[Any], Any]) -> Any:
    """Return what a user gives as inputs with every part of it changed."""
    if isinstance(x, Mapping):
        return {name: change(part) for name, part in x.items()}
    return change(x) if _parts(x) is None else tuple(map(change, x))


def _copied(part: Any) -> Any:
    """Return inputs in memory of their own: a function may work in place."""
    return part.detach().clone() if isinstance(part, Tensor) else part.copy() if hasattr(part, "copy") else part


def _same(one: Inputs, two: Inputs) -> bool:
    """Return whether rows are equal up to rounding; rows of other shapes, as padded ones, are not compared."""
    if one.row_format != two.row_format:
        return True
    for a, b in zip(one.tensors, two.tensors, strict=True):
        scale = float(b.nan_to_num().abs().max()) if b.numel() else 0.0
        if not torch.allclose(a.double(), b.double(), SAME_ROW_TOLERANCE, SAME_ROW_TOLERANCE * scale, equal_nan=True):
            return False
    return True
