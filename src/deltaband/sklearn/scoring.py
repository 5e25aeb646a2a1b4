"""How good intervals are, as a number that scikit-learn's model selection takes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import _check_sample_weight

from ..data.batches import read_targets
from ..data.inputs import check_finite
from ..metrics import interval_scores
from ..results import interval_arrays, parse_levels


@dataclass(frozen=True)
class IntervalScorer:
    """A scorer for `cross_val_score` and searches: minus the interval score, so that greater is better.

    Winkler's interval score is the width plus 2/α times what a target is beyond its bounds, α = 1 − level, on average
    over rows and outputs. It is right only where the level is, and rewards narrow intervals.

    Args:
        level: The level of the intervals; by default that of the regressor.
    """

    level: float | None = None

    def __post_init__(self) -> None:
        if self.level is not None and len(parse_levels(self.level)) > 1:
            raise ValueError(f"the interval score is of one level, got {self.level!r}")

    def __call__(self, estimator: Any, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return minus the interval score of a fitted estimator on rows that it has not seen.

        Args:
            estimator: An `IntervalRegressor`, a `BandRegressor`, or any other with such a `predict_interval`.
            X: The rows.
            y: Their targets, (n,) or (n, m).
            sample_weight: Weights of the rows in the mean.

        Raises:
            TypeError: If the estimator has no `predict_interval`.
        """
        if not hasattr(estimator, "predict_interval"):
            raise TypeError(
                f"the interval score needs an estimator with predict_interval, got {type(estimator).__name__}"
            )
        found = estimator.predict_interval(X) if self.level is None else estimator.predict_interval(X, self.level)
        _, lower, upper = interval_arrays(found, np.float64)  # (n, m, 1)
        targets = read_targets(np.asarray(y)).numpy()
        if targets.shape != lower.shape[:2] or lower.shape[2] != 1:
            raise ValueError(f"expected one interval per target: bounds {lower.shape}, targets {targets.shape}")
        check_finite(torch.from_numpy(targets), "targets")
        weight = None if sample_weight is None else _check_sample_weight(sample_weight, X, ensure_non_negative=True)
        scores = interval_scores(targets[:, :, None], lower, upper, np.asarray(found.level)).mean(axis=(1, 2))
        return -float(np.average(scores, weights=weight))
