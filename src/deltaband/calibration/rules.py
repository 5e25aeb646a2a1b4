"""Which rows a calibration makes a promise to: the rule that follows from what `calibrate` was given."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..data.groups import read_labels
from ..fitting.fit import Fit
from ..fitting.spec import FitSpec
from .groups import ByGroup
from .overlap import Overlapping
from .quantiles import AllRows, QuantileRule
from .shift import weighted


def rule_for(
    spec: FitSpec,
    fits: Sequence[Fit],
    x: Any,
    *,
    is_loader: bool,
    groups: Any,
    weights: Any,
    target: Any,
    kept: np.ndarray | None,
) -> QuantileRule:
    """Return the rule for calibration rows x, of which those with the numbers `kept` take part."""
    given = [name for name, each in (("groups", groups), ("weights", weights), ("target", target)) if each is not None]
    if not given:
        return AllRows()
    if is_loader:
        raise TypeError(f"{given[0]}= goes with arrays: give calibrate(X, y, {given[0]}=...), not a loader")
    if groups is not None and len(given) > 1:
        raise ValueError(f"groups= and {given[1]}= are different promises: calibrate for one of them at a time")
    rows = spec.inputs(x)
    rule: QuantileRule
    if groups is None:
        rule = weighted(spec, fits, rows, weights, target)
    elif np.ndim(groups) == 2:
        rule = Overlapping.of(groups, len(rows))
    else:
        rule = ByGroup.of(read_labels(groups, len(rows)))
    return rule if kept is None or len(kept) == len(rows) else rule.take(kept)
