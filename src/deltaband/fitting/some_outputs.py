"""Some of a fit's outputs: what a fit holds for each output, for these alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .fit import Fit

PER_OUTPUT = ("losses", "shares", "far", "n_targets")  # fields of a fit, (m,)


def some_outputs(fit: Fit, where: Sequence[int]) -> Fit:
    """Return the fit for the outputs at these places; p* stays that of all."""
    where = list(where)
    own: dict[str, Any] = {name: each[where] for name in PER_OUTPUT if np.size(each := getattr(fit, name)) > 1}
    if fit.leverages.shape[1] > 1:
        own["leverages"] = fit.leverages[:, where]
    counts = fit.counts.reshape(-1, fit.n_outputs)[:, where].ravel()
    return replace(fit, outputs=tuple(fit.outputs[i] for i in where), counts=counts, **own)
