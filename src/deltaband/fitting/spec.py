"""`FitSpec`: everything that a fit depends on besides the data."""

import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..damping import Damping
from ..data.batches import Batches, read
from ..data.inputs import Inputs
from ..engines import Engine, free_memory
from ..errors import warn
from ..network.model_copy import ModelCopyCache, ParameterChoice
from ..network.network import Head, Network
from ..storage.encoding import describe_setting
from ..validation import check_bool, check_callable, check_memory
from .fit import Fit, RowFunction, check_outputs, evaluate_rows
from .tasks import Task


def parse_engine(engine: Any) -> Engine | None:
    """Return the engine, or None for "auto"."""
    if isinstance(engine, str) and engine == "auto":
        return None
    if not isinstance(engine, Engine):
        raise TypeError(f"engine must be 'auto' or an engine such as Exact(), got {engine!r}")
    return engine


def first_difference(one: Mapping[str, Any], two: Mapping[str, Any]) -> str | None:
    """Return the first name that two mappings do not give the same value; None if there is none."""
    if one == two:
        return None
    return next((name for name in {**one, **two} if one.get(name) != two.get(name)), None)


@dataclass(frozen=True)
class FitSpec:
    """A model, its task, λ, and how to compute: what checkpoints, processes and files compare and store."""

    model: nn.Module
    task: Task
    damping: Damping
    engine: Engine | None = None  # None: the best that fits into memory
    memory: float | None = None  # bytes
    parameters: ParameterChoice = "all"
    output: Callable[[Any], Tensor] | None = None
    batch: Callable[[Any], tuple[Any, Any]] | None = None
    networks: ModelCopyCache = field(default_factory=ModelCopyCache, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_memory(self.memory)
        check_callable(self.output, "output")
        check_callable(self.batch, "batch")
        check_bool(self.task.per_output, "per_output")
        self.network()  # whatever is wrong with the model is reported now

    def network(self, head: Head | None = None, fit: Fit | None = None) -> Network:
        """Return the network with this head and the layers that a fit's covariance asks for; to keep it, copy it."""
        layers = None if fit is None else fit.asked_layers
        return Network(self.networks.get(self.model, self.parameters, self.output), layers, head=head)

    def fitted_network(self, fit: Fit) -> Network:
        """Return the network whose gradients made J of this fit."""
        return self.network(self.task.head(fit.outputs), fit)

    def stored_network(self, outputs: tuple[int, ...], layers: Any) -> Network:
        """Return a network with weights of its own, for gradients that are computed again from kept inputs."""
        return self.network(self.task.head(outputs)).with_layers(layers).copy(own_weights=True)

    def read(self, data: Any, y: Any = None, n_rows: int | None = None) -> Batches:
        """Return the user's data as batches."""
        if y is not None:
            self.task.check_raw_targets(y)
        return read(data, y, n_rows, self.batch)

    def memory_per_fit(self, n_fits: int) -> float | None:
        """Return the bytes that each of several fits may take; None: as much as the plan allows a single one."""
        if n_fits == 1:
            return self.memory
        total = self.memory if self.memory is not None else free_memory() * (0.5 if self.engine is None else 1.0)
        return total / n_fits

    def model_outputs(self, x: Inputs) -> Tensor:  # (b, M) float64
        """Return what the model returns for these rows."""
        return self.network().outputs(x).cpu().double()

    def still_returns(self, x: Inputs, before: Tensor) -> bool:
        """Return whether the model returns for these rows what it returned before: not all of it is weights."""
        now = self.model_outputs(x)
        return now.shape == before.shape and torch.allclose(now, before, rtol=1e-3, atol=1e-4, equal_nan=True)

    def evaluate(
        self, fits: Sequence[Fit], x: Any, heads: Sequence[Head | None], functions: Sequence[RowFunction] | None = None
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return outputs (n, m) in float64, and for each of them the value (n, …) of its fit's function."""
        X = Inputs.of(x)
        X.check_finite()
        columns, values = [], []
        for i, (fit, head) in enumerate(zip(fits, heads, strict=True)):
            network = self.network(head, fit)
            if i == 0:
                self.warn_of_changed_weights(network, fit)
            if len(X) == 0:
                columns.append(np.zeros((0, fit.n_outputs)))
                values += [np.zeros(0)] * fit.n_outputs
            elif functions is None:
                outputs = network.outputs(X)
                check_outputs(outputs)
                columns.append(outputs.cpu().double().numpy())
            else:
                found, value = evaluate_rows(network, X, functions[i], fit.rows_at_once)
                columns.append(found)
                values += [value[:, o] for o in range(value.shape[1])]
        return np.concatenate(columns, axis=1), values

    def changed_weight(self, network: Network, fit: Fit) -> str | None:
        """Return the name of the first parameter that is not what it was at the fit; None if there is none."""
        if network.n_parameters != fit.n_parameters:
            raise ValueError(
                f"the model has {network.n_parameters:,} trainable parameters now and had {fit.n_parameters:,} at fit: "
                "call fit again"
            )
        return first_difference(fit.fingerprint, network.fingerprint)

    def check_weights(self, network: Network, fit: Fit) -> None:
        """Raise if the model's weights have changed since the fit."""
        if changed := self.changed_weight(network, fit):
            raise ValueError(f"the model's weights have changed since fit (first: {changed!r}): call fit again first")

    def warn_of_changed_weights(self, network: Network, fit: Fit) -> None:
        """Warn if the model's weights have changed since the fit."""
        if changed := self.changed_weight(network, fit):
            warn(
                f"the model's weights have changed since fit (first: {changed!r}): predictions come from the new "
                "weights, the width of the intervals from the old ones; call fit again"
            )

    def options(self) -> dict[str, Any]:
        """Return the arguments that the estimator was constructed with, functions aside."""
        parameters = self.parameters
        if not isinstance(parameters, str):  # patterns or a function chose these
            parameters = sorted(map(glob.escape, self.network().parameters))
        return {
            "damping": self.damping.damping,
            "weight_decay": self.damping.weight_decay,
            "engine": "auto" if self.engine is None else self.engine,
            "memory": self.memory,
            "parameters": parameters,
            "per_output": self.task.per_output,
            **self.damping.loss_options(),
            **self.task.options(),
        }

    def functions(self) -> dict[str, str]:
        """Return names of the functions that it was constructed with, which no file can hold."""
        given = {"output": self.output, "batch": self.batch}
        names = {name: describe_setting(each) for name, each in given.items() if each is not None}
        scaler = self.task.scaler
        return names if scaler is None else names | {"target_transform": type(scaler).__name__}

    def configuration(self) -> dict[str, str]:
        """Return all that matters for the result of a fit as texts: equal where fits can be resumed or merged."""
        given = {"kind": type(self.task).__name__, **self.options(), **self.functions()}
        return {name: describe_setting(value) for name, value in given.items() if name != "memory"}
