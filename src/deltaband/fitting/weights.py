"""What the rows of a fit count, their weights and zero for targets that are missing, and what is added up over them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..data.inputs import Inputs
from ..storage.encoding import storable
from .tasks import Regression, Task


def given_weights(task: Task, x: Inputs, outputs: tuple[int, ...], n_returned: int) -> Tensor | None:
    """Return the weights (b, 1) or (b, len(outputs)) of rows for some outputs; None where there are none."""
    weight = x.weight
    if weight is not None and weight.shape[1] > 1:
        weight = task.select_weights(outputs, weight, n_returned)
    there = targets_there(task, x, outputs, n_returned)
    return weight if there is None else there if weight is None else weight * there


def targets_there(task: Task, x: Inputs, outputs: tuple[int, ...], n_returned: int) -> Tensor | None:
    """Return which targets of some outputs are there, (b, len(outputs)) of 1 and 0, where rows know it."""
    there = x.extras.get("observed")
    if there is None or not isinstance(task, Regression):
        return None
    return task.select_targets(outputs, there, n_returned)


@storable
class Sums(NamedTuple):
    """What is added up over the rows besides the engine's part."""

    n_rows: int
    losses: np.ndarray  # (m,)
    counts: np.ndarray  # of what the task counts
    energy: float  # of the gradients: their squared norms
    weight: float  # of the rows, as the user gave it
    missing: np.ndarray  # (m,) how many targets were
