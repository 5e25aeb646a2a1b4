"""The learnt noise v(x): how large residuals are around x, learnt from training rows.

The scale of a calibrated interval is σ² = (1 + b·q_λ)·v^(2γ): q knows where the network is uncertain, v where the data
are noisy. No calibration row takes part in v, so that the conformal argument does not change.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from torch import Tensor

from ..data.inputs import Inputs, as_tensor
from ..fitting.fit import Fit
from ..network.probes import EXACT_OUTPUTS
from ..storage.encoding import storable
from ..validation import describe

ROWS_AT_LEAST = 60  # from which v is learnt; from fewer it is constant
SMALLEST_RESIDUAL = 1e-3  # of the mean: a row that the network has learnt by heart says nothing more
LARGEST_NOISE = 1e100
MANY_ROWS = 5_000  # from which on trees may learn faster
BAGS = 8  # each of half of the rows
BOOSTING = {"max_iter": 40, "max_leaf_nodes": 15, "min_samples_leaf": 8, "max_features": 0.5}
NODE_TYPES = {"feature": np.int32, "threshold": float, "left": np.int32, "right": np.int32, "value": float}


class Noise(Protocol):
    """A function of rows that returns log v; `first` is the number of the first row, for what is said of it."""

    def log(self, x: Inputs, features: np.ndarray, first: int = 0) -> np.ndarray: ...  # (b, k) -> (b,)


@storable
@dataclass(frozen=True, eq=False)
class BoostedNoise:
    """The mean of |y − ŷ| by bagged gradient boosting with gamma loss: exp(baseline + Σ over trees of a leaf)."""

    baseline: float
    feature: np.ndarray  # (trees, nodes) the column that a node compares
    threshold: np.ndarray  # (trees, nodes) rows up to here go left
    left: np.ndarray  # (trees, nodes) where they go; a leaf leads to itself
    right: np.ndarray
    value: np.ndarray  # (trees, nodes)
    depth: int
    n_columns: int
    lowest: float  # log v is cut off at what there was among the training rows
    highest: float

    @classmethod
    def fit(cls, features: np.ndarray, residuals: np.ndarray) -> Self:  # (n, k), (n,)
        """Learn v; columns and |residuals| are those of training rows, in any order."""
        from sklearn.ensemble import HistGradientBoostingRegressor

        order = np.lexsort([*features.T, residuals])  # bags must not depend on the order in which rows came
        features, target = features[order], np.maximum(residuals[order] / residuals.mean(), SMALLEST_RESIDUAL)
        rng, baseline, trees = np.random.default_rng(0), 0.0, []
        rate = 0.05 if len(target) < MANY_ROWS else 0.1
        for bag in range(BAGS):
            rows = rng.permutation(len(target))[: (len(target) + 1) // 2]
            model = HistGradientBoostingRegressor(
                loss="gamma", learning_rate=rate, early_stopping=False, random_state=bag, **BOOSTING
            ).fit(features[rows], target[rows])
            baseline += float(model._baseline_prediction.item()) / BAGS
            trees += [predictor.nodes for (predictor,) in model._predictors]
        fields = {name: np.zeros((len(trees), max(map(len, trees))), kind) for name, kind in NODE_TYPES.items()}
        for t, nodes in enumerate(trees):
            leaf, own, n = nodes["is_leaf"].astype(bool), np.arange(len(nodes)), len(nodes)
            fields["feature"][t, :n] = np.where(leaf, 0, nodes["feature_idx"])
            fields["threshold"][t, :n] = np.where(leaf, 0.0, nodes["num_threshold"])
            fields["left"][t, :n] = np.where(leaf, own, nodes["left"])
            fields["right"][t, :n] = np.where(leaf, own, nodes["right"])
            fields["value"][t, :n] = np.where(leaf, nodes["value"] / BAGS, 0.0)
        depth, limits = max(int(nodes["depth"].max()) for nodes in trees), np.log([target.min(), target.max()])
        return cls(baseline, **fields, depth=depth, n_columns=features.shape[1], lowest=limits[0], highest=limits[1])

    def log(self, x: Inputs, features: np.ndarray, first: int = 0) -> np.ndarray:
        if self.n_columns == 1:  # of rows of several formats only the output was used
            features = np.ascontiguousarray(features[:, -1:])
        elif features.shape[1] != self.n_columns:  # such rows were not among the training rows
            return np.full(len(features), self.baseline)
        roots = np.arange(0, self.value.size, self.value.shape[1])  # where each tree begins in the flat arrays
        row = np.arange(0, features.size, features.shape[1])[:, None]
        at = np.broadcast_to(roots, (len(features), len(roots)))
        for _ in range(self.depth):
            goes_left = features.take(row + self.feature.take(at)) <= self.threshold.take(at)
            at = roots + np.where(goes_left, self.left.take(at), self.right.take(at))
        return np.clip(self.baseline + self.value.take(at).sum(axis=1), self.lowest, self.highest)


@dataclass(frozen=True, eq=False)
class GivenNoise:
    """A user's function of the inputs, or fitted regressor of the features; no file holds it."""

    name: str
    function: Callable[[Any], Any]
    takes_features: bool

    def log(self, x: Inputs, features: np.ndarray, first: int = 0) -> np.ndarray:
        given = features if self.takes_features else x.map(Tensor.clone).as_given()
        v = as_tensor(self.function(given), f"the noise that {self.name} returns").cpu().double().numpy()
        if v.shape not in ((len(x),), (len(x), 1)):
            raise ValueError(f"noise={self.name} must return one number per row, {len(x)}, got shape {v.shape}")
        v = v.reshape(len(x))
        good = (v >= 1 / LARGEST_NOISE) & (v <= LARGEST_NOISE)
        if not good.all():
            row, limits = int(np.argmin(good)), f"from {1 / LARGEST_NOISE:g} to {LARGEST_NOISE:g}"
            found = f"must be positive and finite, {limits}; it is {v[row]:g} in row {first + row}"
            advice = "; take a regressor with a gamma loss or a log link, or neighbours" if self.takes_features else ""
            raise ValueError(f"noise={self.name} {found}{advice}")
        return np.log(v)


def learn(noise: Any, fit: Fit, weighted: bool = False) -> list[Noise] | str:
    """Return v for each output of a fit, or why it is constant.

    Args:
        noise: "auto", "none", a scikit-learn regressor, or a function of the inputs.
        fit: The fit, with the residuals that it has kept.
        weighted: Whether it is the noise of rows of weight 1; else that of rows as they came, whatever their weight.
    """
    if isinstance(noise, str):
        if noise not in ("auto", "none"):
            raise ValueError(f"noise must be 'auto', 'none', a regressor or a function of the inputs, got {noise!r}")
        if noise == "none":
            return ""
    is_regressor = hasattr(noise, "fit") and hasattr(noise, "predict")
    if not isinstance(noise, str) and not is_regressor:
        if not callable(noise):
            raise TypeError(f"noise must be 'auto', 'none', a regressor or a function, got {describe(noise)}")
        return [GivenNoise(getattr(noise, "__name__", repr(noise)), noise, False)] * fit.n_outputs
    if is_regressor and (isinstance(noise, type) or not hasattr(noise, "get_params")):
        what = "one made and not yet fitted, with get_params as scikit-learn's have"
        raise TypeError(f"noise must be a regressor that can be copied, {what}, got {describe(noise)}")
    if len(fit.residuals) == 0:
        why = "the fit kept no residuals (noise='none', little memory, or a file saved without sample=True)"
        if is_regressor:
            raise ValueError(f"noise={type(noise).__name__} has nothing to learn from: {why}; give a function instead")
        return why
    if not is_regressor and fit.n_outputs > EXACT_OUTPUTS:
        return f"it is learnt for up to {EXACT_OUTPUTS} outputs unless you give noise= a regressor"
    if len(fit.residuals) < ROWS_AT_LEAST:
        return f"{len(fit.residuals)} residuals of training rows are too few to learn the noise from"
    columns_of = zip(*([tensor.numpy() for tensor in piece.tensors] for piece in fit.residuals.pieces), strict=True)
    bases, outputs, residuals, roots = next(columns_of), *(np.concatenate(parts) for parts in columns_of)
    residuals = residuals * roots if weighted else residuals
    base = bases[0] if len(bases) == 1 else np.zeros((len(outputs), 0))
    learnt: list[Noise] = []
    for o in range(fit.n_outputs):
        there = roots[:, o] > 0  # elsewhere there was no target
        columns, r = with_output(base, outputs[:, o])[there], residuals[there, o]
        if len(r) < ROWS_AT_LEAST:
            return f"{len(r)} residuals of output {o} are too few to learn the noise from"
        if not r.mean() > 0:
            return "all residuals of training rows are zero"
        if not is_regressor:
            learnt.append(BoostedNoise.fit(columns, r))
            continue
        from sklearn.base import clone

        regressor = clone(noise).fit(columns, np.maximum(r, SMALLEST_RESIDUAL * r.mean()))
        learnt.append(GivenNoise(type(noise).__name__, regressor.predict, True))
    return learnt


def with_output(features: np.ndarray, output: np.ndarray) -> np.ndarray:  # (b, k), (b,) -> (b, k + 1)
    """Return what v is a function of: the features, and the network's output."""
    return np.column_stack([features, output])
