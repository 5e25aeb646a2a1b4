"""What a method of an estimator gives for the rows of a loader, batch by batch."""

import inspect
from collections.abc import Callable
from typing import Any

from ..data.batches import read_inputs
from ..errors import EmptyDataError, said_once
from ..results import concatenated
from .spec import FitSpec


def of_batches(spec: FitSpec, ask: Callable[..., Any], loader: Any, *args: Any, **options: Any) -> Any:
    """Return what a function of inputs gives for the batches of a loader, concatenated."""
    if options.get("sample_weight") is not None:
        raise TypeError("sample_weight= goes with arrays; for a loader let batch= return (x, y, sample_weight)")
    if name := next((name for name in ("groups", "weights") if options.get(name) is not None), None):
        raise TypeError(f"{name}= goes with arrays: give the inputs of all rows as one, not a loader")
    takes_weights = "sample_weight" in inspect.signature(ask).parameters
    parts = []
    with said_once():
        for x, weight in read_inputs(loader, spec.batch):
            weights = {"sample_weight": weight} if takes_weights and weight is not None else {}
            parts.append(ask(x, *args, **options | weights))
    if not parts:
        raise EmptyDataError("the loader has given no batch (a generator can be read only once)")
    return concatenated(parts)
