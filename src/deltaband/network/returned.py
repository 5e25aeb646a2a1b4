"""What a model returns besides its prediction: variances of its own, or quantiles around it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..validation import describe

Pick = Callable[[Any], Tensor]
# what a model may return as its variance, and how that is turned into it
VARIANCE_FORMS: Mapping[str, Pick] = {"variance": torch.Tensor.clone, "log_variance": torch.exp, "std": torch.square}


def part(returned: Any, index: int, of: int, what: str, advice: str = "") -> Tensor:
    """Return one of several parts: of a tuple, or of the columns of a tensor, which are split into as many."""
    if isinstance(returned, Tensor):
        rows = returned.reshape(returned.shape[0], -1)
        if rows.shape[1] % of == 0:
            return rows[:, index * (rows.shape[1] // of) : (index + 1) * (rows.shape[1] // of)]
    elif isinstance(returned, tuple | list) and len(returned) == of and all(isinstance(r, Tensor) for r in returned):
        return returned[index]
    found = f"got {describe(returned)}{advice}"
    raise ValueError(f"the model must return {what} as a tuple or as columns of one tensor, {found}")


def mean_and_variance(output: Pick | None, variance: str | Pick) -> tuple[Pick, Pick]:
    """Return the functions that pick the mean and the variance from what a model returns."""
    if not isinstance(variance, str):
        if output is None:
            raise ValueError(
                "variance= as a function picks the variance alone: give output=, which picks the mean, too"
            )
        return output, partial(_given_variance, variance)
    if output is not None:
        raise ValueError(f"variance={variance!r} is for models that return both; with output= give a function as well")
    what = f"a mean and a {variance.replace('_', '-')}"
    pick = partial(part, of=2, what=what, advice="; pick them by two functions, output= and variance=")

    def noise(returned: Any) -> Tensor:
        return _for_each_mean(VARIANCE_FORMS[variance](pick(returned, 1)), pick(returned, 0))

    return partial(pick, index=0), noise


def _given_variance(pick: Pick, returned: Any) -> Tensor:
    """Return what a user's function picks, if that is a tensor."""
    found = pick(returned)
    if not isinstance(found, Tensor):
        raise TypeError(f"variance= must pick one tensor from what the model returns, got {describe(found)}")
    return found


def _for_each_mean(variance: Tensor, mean: Tensor) -> Tensor:
    """Return variances in the shape of the means: those that `GaussianNLLLoss` takes, or one number for all."""
    if variance.numel() == mean.numel():
        return variance.reshape(mean.shape)
    if variance.shape == mean.shape[:-1]:  # of several outputs
        variance = variance[..., None]
    if variance.numel() == 1 or (variance.ndim == mean.ndim and variance.shape[-1] in (1, mean.shape[-1])):
        return variance.expand(mean.shape)
    shapes = f"variances of shape {tuple(variance.shape)} for means of shape {tuple(mean.shape)}"
    raise ValueError(f"the model returns {shapes}: give one for each mean, one per row, or one for all")


def positive_variances(found: np.ndarray, n_returned: int, first: int = 0) -> np.ndarray:  # (b, 1 or m) -> (b, m)
    """Return the variances that a model returns beside as many predictions; raise unless they are positive."""
    if found.shape[1] not in (1, n_returned):
        raise ValueError(
            f"the model returns {found.shape[1]} variances and {n_returned} predictions per row: give as many, or 1"
        )
    bad = ~((found > 0) & np.isfinite(found)).all(axis=1)
    if bad.any():
        row = int(bad.argmax())
        advice = "look at how the model makes it positive (softplus, exp), and say which form it returns: variance="
        raise ValueError(f"the variance that the model returns is {found[row].min()} in row {first + row}; {advice}")
    return np.broadcast_to(found, (len(found), n_returned))


def middle_and_ends(output: Pick | None) -> tuple[Pick, Pick]:
    """Return the functions that pick the middle of three quantiles, and the outer ones, (b, 2)."""
    what = "three quantiles (lower, middle, upper)"

    def quantile(returned: Any, index: int) -> Tensor:
        picked = part(
            returned if output is None else output(returned), index, 3, what, "; pick them by a function, output="
        )
        if picked[0].numel() != 1:
            raise ValueError(f"the model must return {what} per row, got {3 * picked[0].numel()} numbers")
        return picked.reshape(picked.shape[0], 1)

    def ends(returned: Any) -> Tensor:
        return torch.cat([quantile(returned, 0), quantile(returned, 2)], dim=1)

    return partial(quantile, index=1), ends
