"""Rows whose inputs are distributed otherwise than those of the calibration rows: quantiles weighted by the ratio.

If the distribution of the inputs changes and that of y given x does not, the new row is each of the n + 1 rows of the
bag with a probability proportional to its density ratio w(x) = dP_new/dP_calibration (Tibshirani et al., 2019), and the
choice of the scale, which is a function of the bag, changes nothing in that. The new row has the weight w(x) at +∞.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from torch import Tensor

from ..data.inputs import Inputs, as_tensor, check_finite
from ..fitting.fit import Fit
from ..fitting.spec import FitSpec
from ..network.network import Network
from ..storage.encoding import storable
from .quantiles import DEFAULT_LEVEL, Given, rows_needed

ROWS_AT_LEAST = 20  # of either kind, from which a ratio is estimated
INVERSE_PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of the logistic regression, of which cross-validation chooses
FOLDS = 5
SMALLEST_LEVERAGE = 1e-30
LARGEST_WEIGHT = 1e100


class Ratio(Protocol):
    """A function of rows that is proportional to the density ratio."""

    @property
    def text(self) -> str: ...  # what it is, for the summary

    def weights(self, x: Inputs, columns: np.ndarray) -> np.ndarray: ...  # (b, k) -> (b,)


@storable
@dataclass(frozen=True, eq=False)
class DensityRatio:
    """exp(β·z), z being standardised columns: the odds of logistic regression between calibration and target rows.

    Ratios are cut off at the smallest and the largest that there was among these rows.
    """

    centre: np.ndarray  # (k,)
    spread: np.ndarray  # (k,)
    coefficients: np.ndarray  # (k,)
    offset: float  # of the logarithm: calibration rows have weight 1 on average
    lowest: float  # of β·z
    highest: float
    n_target: int
    infinite: int  # how many of the target rows have no finite interval at the default level

    @classmethod
    def fit(cls, calibration: np.ndarray, target: np.ndarray) -> Self:  # (n, k), (rows, k)
        """Learn the ratio from the columns of calibration and target rows."""
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import StratifiedKFold, cross_val_score

        columns = np.concatenate([calibration, target])
        is_target = np.arange(len(columns)) >= len(calibration)
        centre, spread = columns.mean(axis=0), columns.std(axis=0)
        spread = np.where(spread > 0, spread, 1.0)
        z = (columns - centre) / spread
        models = [LogisticRegression(C=each, max_iter=10_000) for each in INVERSE_PENALTIES]
        folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
        scores = [cross_val_score(each, z, is_target, scoring="neg_log_loss", cv=folds).mean() for each in models]
        coefficients = models[int(np.argmax(scores))].fit(z, is_target).coef_[0]
        logs = z @ coefficients
        offset = float(logs.max() + np.log(np.mean(np.exp(logs[~is_target] - logs.max()))))
        ratio = cls(centre, spread, coefficients, offset, float(logs.min()), float(logs.max()), len(target), 0)
        share = ratio.of(target) / (ratio.of(calibration).sum() + ratio.of(target))
        return replace(ratio, infinite=int((share > 1 - DEFAULT_LEVEL).sum()))

    @property
    def text(self) -> str:
        at = f"{100 * DEFAULT_LEVEL:g} %"
        some = f", {self.infinite:,} of which have infinite intervals at {at}" if self.infinite else ""
        return f"estimated, so that calibration rows stand for {self.n_target:,} target rows{some}"

    def of(self, columns: np.ndarray) -> np.ndarray:
        logs = (columns - self.centre) / self.spread @ self.coefficients
        return np.exp(np.minimum(np.clip(logs, self.lowest, self.highest) - self.offset, np.log(LARGEST_WEIGHT)))

    def weights(self, x: Inputs, columns: np.ndarray) -> np.ndarray:
        return self.of(columns)


@dataclass(frozen=True, eq=False)
class GivenRatio:
    """A user's function of the inputs; no file holds it."""

    name: str
    function: Callable[[Any], Any]

    @property
    def text(self) -> str:
        return f"by {self.name}, a function of the inputs"

    def weights(self, x: Inputs, columns: np.ndarray) -> np.ndarray:
        returned = as_tensor(self.function(x.map(Tensor.clone).as_given()), f"the weights that {self.name} returns")
        return read_weights(returned, len(x))


@storable
@dataclass(frozen=True, eq=False)
class Weighted:
    """The quantile of scores weighted by w: P(covered) ≥ level for rows with the density ratio w to calibration rows.

    That is exact for the true ratio, which may have any constant factor, and for no other: with a ratio that was
    estimated, coverage is as near to the level as the estimate is to the ratio.
    """

    weight: np.ndarray  # (n,) of the calibration rows
    ratio: Ratio | None  # None where `predict` is given the weights of its rows

    why_infinite: ClassVar = "calibration rows like them have too little weight for the level to be promised"

    @property
    def effective_rows(self) -> float:
        """The effective sample size, (Σw)²/Σw²."""
        scaled = self.weight / (
            self.weight.max() or 1.0
        )  # squares must not overflow; some of the rows may all have zero
        return float(scaled.sum() ** 2 / (np.square(scaled).sum() or 1.0))

    @property
    def lines(self) -> list[tuple[str, str]]:
        text = "given" if self.ratio is None else self.ratio.text
        return [
            ("  weights", f"{text}: from {self.weight.min():.3g} to {self.weight.max():.3g}"),
            ("  effective rows", f"{self.effective_rows:.1f} of {len(self.weight):,}, (Σw)²/Σw²"),
        ]

    @property
    def warnings(self) -> list[str]:
        if self.effective_rows >= rows_needed(DEFAULT_LEVEL):
            return []
        what = f"the weights leave an effective sample size of {self.effective_rows:.1f} of {len(self.weight):,} rows"
        advice = "intervals will be unsteady, and infinite for some rows; calibrate on more rows like the new ones"
        return [f"{what}, and {DEFAULT_LEVEL:.0%} intervals take {rows_needed(DEFAULT_LEVEL)}: {advice}"]

    def notices(self, place: np.ndarray, levels: tuple[float, ...]) -> list[str]:
        return []

    def places_of_inputs(self, network: Network, x: Inputs, h: np.ndarray) -> np.ndarray | None:  # (rows, 1)
        if self.ratio is None:
            return None
        prepared = network.prepare(x)
        used = columns(network, x, h) if isinstance(self.ratio, DensityRatio) else np.zeros((len(x), 0))
        return self.ratio.weights(prepared, used)[:, None]

    def places(self, n_rows: int, given: Given) -> np.ndarray | None:  # (rows, 1)
        given.refuse("groups", "the calibration is by weights, not by groups: leave out groups=")
        if self.ratio is not None:
            given.refuse("weights", "those of new rows follow from their inputs here: leave out weights=")
            return None
        if given.weights is None:
            raise ValueError("the calibration rows had weights: give predict(..., weights=) those of its rows as well")
        return read_weights(given.weights, n_rows)[:, None]

    def own_places(self, n_rows: int) -> None:
        return None  # the intervals are for other rows

    def arrange(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the scores in ascending order, and +∞, with the sums of their weights."""
        order = np.argsort(scores, kind="stable")
        return np.append(scores[order], np.inf), np.cumsum(self.weight[order])

    def quantiles(
        self, arranged: tuple[np.ndarray, np.ndarray], place: np.ndarray, levels: tuple[float, ...]
    ) -> np.ndarray:
        scores, sums = arranged
        total = sums[-1] + place  # (rows, 1)
        wanted = (np.array(levels) - 1e-9 / len(scores)) * total  # as ranks of equal weights are rounded
        return scores[np.searchsorted(sums, wanted, side="left")]

    def take(self, rows: np.ndarray) -> Self:
        return replace(self, weight=self.weight[rows])


def read_weights(weights: Any, n_rows: int) -> np.ndarray:  # (n,)
    """Return weights that are finite and not negative, or raise."""
    w = as_tensor(np.asarray(weights) if isinstance(weights, list) else weights, "weights").cpu().double().numpy()
    if w.shape not in ((n_rows,), (n_rows, 1)):
        raise ValueError(f"weights must be one number per row: {n_rows} rows, weights of shape {w.shape}")
    w = w.reshape(n_rows)
    good = (w >= 0) & (w <= LARGEST_WEIGHT)
    if not good.all():
        row = int(np.argmin(good))
        expected = f"density ratios, from 0 to {LARGEST_WEIGHT:g}"
        raise ValueError(f"weights must be {expected}; it is {w[row]:g} in row {row}")
    return w


def weighted(spec: FitSpec, fits: Sequence[Fit], x: Inputs, weights: Any, target: Any) -> Weighted:
    """Return the rule for calibration rows x: by weights, by a function of the inputs, or for target rows."""
    if weights is not None and target is not None:
        raise ValueError("weights= are density ratios, which target= is for estimating: give one of them")
    ratio: Ratio | None = None
    if target is not None:
        of_rows, of_target = (_columns_of(spec, fits, each) for each in (x, _read_target(spec, target, x)))
        ratio, w = (found := DensityRatio.fit(of_rows, of_target)), found.of(of_rows)
    elif callable(weights):
        ratio = GivenRatio(getattr(weights, "__name__", repr(weights)), weights)
        w = ratio.weights(spec.network().prepare(x), np.zeros((len(x), 0)))
    else:
        w = read_weights(weights, len(x))
    if not w.any():
        raise ValueError("all weights are zero: no calibration row is like the new rows, and nothing can be promised")
    return Weighted(w, ratio)


def columns(network: Network, x: Inputs, h: np.ndarray) -> np.ndarray:  # (b, m) -> (b, k + 1)
    """Return what a ratio is a function of: the features of rows, and the mean logarithm of their leverages."""
    return np.column_stack([network.features(x), np.log(np.maximum(h, SMALLEST_LEVERAGE)).mean(axis=1)])


def _columns_of(spec: FitSpec, fits: Sequence[Fit], x: Inputs) -> np.ndarray:
    functions = [fit.reference.leverage for fit in fits]
    h = np.stack(spec.evaluate(fits, x, functions, weighed=True)[1], axis=1)
    return columns(spec.network(), x, h)


def _read_target(spec: FitSpec, target: Any, x: Inputs) -> Inputs:
    try:
        rows = spec.inputs(target)
    except TypeError as error:
        raise TypeError(f"target must be inputs as `predict` takes them: {error}") from None
    formats = [(each.names, [part.shape[1:] for part in each.tensors]) for each in (rows, x)]
    if formats[0] != formats[1]:
        raise ValueError(f"target must have rows like the calibration rows: {x}; it has {rows}")
    if min(len(rows), len(x)) < ROWS_AT_LEAST:
        advice = f"it takes {ROWS_AT_LEAST} of either; give more, or the density ratio itself as weights="
        what = f"{len(rows)} target rows and {len(x)} calibration rows are too few to estimate their density ratio"
        raise ValueError(f"{what}: {advice}")
    for label, tensor in enumerate(rows.tensors):
        check_finite(tensor, "target rows" if rows.single else f"target rows ({label})")
    return rows
