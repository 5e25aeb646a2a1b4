"""`FitSpec`: everything that a fit depends on besides the data."""

import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from ..damping import Damping
from ..data.batches import Batches, read
from ..data.inputs import MANY_ROWS, Inputs, is_loader
from ..data.items import Collate, LabelledItems, OpaqueBatch, rows_of
from ..engines import Engine
from ..errors import warn
from ..machine import free_memory
from ..network.forward import forward
from ..network.last import last_layer
from ..network.model_copy import ModelCopyCache, ParameterChoice, layer_of, select_parameters, unwrap
from ..network.network import Head, Network, plain_autograd
from ..network.precision import Precision
from ..network.probes import EXACT_OUTPUTS, Probes
from ..network.returned import Pick, positive_variances
from ..storage.encoding import describe_setting
from ..transforms import InputTransform
from ..validation import check_bool, check_callable, check_choice, check_int, check_limits
from . import sanity
from .fit import Fit, KnownRows, Method, Reference, RowFunction, check_outputs, evaluate_rows
from .tasks import Task
from .weights import given_weights

CROSSED = "the quantiles of {} of {} rows are in the wrong order: they are sorted; look at the network's training"
NOT_COMPARED = ("memory", "time", "batch", "collate")  # which change no result of the same rows
SMALLEST_HALF_WIDTH = 1e-3  # of quantiles, in root mean squared errors of the training rows


def all_outputs(fits: Sequence[Fit]) -> tuple[int, ...]:
    """Return the outputs of the network that several fits are for."""
    return tuple(o for fit in fits for o in fit.outputs)


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
    time: float | None = None  # seconds, for "auto"
    parameters: ParameterChoice = "all"
    output: Callable[[Any], Tensor] | None = None
    batch: Callable[[Any], tuple[Any, Any]] | None = None
    input_transform: InputTransform | None = None
    probes: int | None = None  # combinations of each row's outputs; None: as many as are needed, where they help
    collate: Collate | None = None
    precision: Precision = None
    networks: ModelCopyCache = field(default_factory=ModelCopyCache, repr=False, compare=False)
    companions: ModelCopyCache = field(default_factory=ModelCopyCache, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_limits(self.memory, self.time)
        for name in ("output", "batch", "collate"):
            check_callable(getattr(self, name), name)
        if self.precision is not None:
            check_choice(self.precision, "precision", ("float32",))
        check_bool(self.task.per_output, "per_output")
        if self.probes is not None:
            check_int(self.probes, "probes")
        self.network()  # whatever is wrong with the model is reported now

    @cached_property
    def _picks(self) -> tuple[Pick | None, Pick | None]:
        return self.task.picks(self.output)

    def forget(self) -> None:
        """Compare the model with its copies again at the next call, weight by weight."""
        self.networks.forget()
        self.companions.forget()

    def network(self, head: Head | None = None, fit: Fit | None = None) -> Network:
        """Return the network with this head and the layers that a fit's covariance asks for; to keep it, copy it."""
        layers = None if fit is None else fit.asked_layers
        known = self.networks.get(self.model, self.parameters, self._picks[0], self.precision)
        network = Network(known, layers, head=head)
        if fit is None or fit.n_outputs <= EXACT_OUTPUTS:
            return network
        memory = free_memory() if self.memory is None else self.memory
        return forward(network, getattr(fit.covariance, "S", None), fit.n_outputs, memory)

    @property
    def takes_last_layer(self) -> bool:
        return isinstance(self.parameters, str) and self.parameters == "last"

    def settled(self, x: Inputs) -> Self:
        """Return the same with names instead of parameters="last", if the prediction depends last on another layer.

        Only rows show that: a network with two heads may have registered that of its variance last.
        """
        if not self.takes_last_layer:
            return self
        network = self.network()
        network.validate(x)  # whatever is wrong with the rows is reported
        with plain_autograd(network.device):
            layer, model = last_layer(network.model_copy, x), unwrap(self.model)
        parameters = model.named_parameters(remove_duplicate=False)  # one that is tied may be of another layer, too
        names = [glob.escape(name) for name, w in parameters if w.requires_grad and layer_of(name) == layer]
        if not names or select_parameters(model, names) == frozenset(network.parameters):
            return self
        return replace(self, parameters=names)

    def companion(self, x: Inputs) -> np.ndarray:  # (b, k) float64
        """Return what the model returns with its predictions: their variances, or the quantiles around them."""
        network = Network(self.companions.get(self.model, self.parameters, self._picks[1], self.precision))
        return network.outputs(x).cpu().double().numpy()

    def noise_variances(self, x: Inputs, outputs: Sequence[int], n_returned: int, first: int = 0) -> np.ndarray:
        """Return the variances (b, len(outputs)) that the network predicts, all positive; `first` is the first row."""
        found = self.companion(x) if len(x) else np.ones((0, n_returned))
        return positive_variances(found, n_returned, first)[:, list(outputs)]

    def weigh(self, x: Inputs, outputs: tuple[int, ...], n_returned: int, first: int = 0) -> Inputs:
        """Return training rows with the weights that gradients and residuals of some outputs have in a fit, w/σ²(x)."""
        weight = given_weights(self.task, x, outputs, n_returned) if x.extras else None
        if weight is not None:
            x = x.with_extras(weight=weight, given=weight)
        if self.task.variance is not None:
            precision = torch.from_numpy(1 / self.noise_variances(x, outputs, n_returned, first))
            x = x.with_extras(weight=precision if weight is None else precision * weight)
        return x

    def reference(self, fits: Sequence[Fit], x: Inputs, outputs: np.ndarray, first: int = 0) -> Reference:
        """Return what targets are compared with, given outputs (b, m): predictions, and the noise that is known."""
        if self.task.quantiles is not None and x.weight is not None:
            raise ValueError(
                "quantiles say how large the noise of a row is themselves: give sample_weight= to fit alone"
            )
        if self.task.quantiles is not None and len(x):
            given = np.column_stack([outputs, self.companion(x)])[:, [1, 0, 2]]
            check_outputs(torch.from_numpy(given), first)
            ordered = np.sort(given, axis=1)
            lower, middle, upper = ordered.T[:, :, None]
            # a width of zero would be no unit
            smallest = SMALLEST_HALF_WIDTH * np.sqrt(fits[0].losses / fits[0].n_rows)
            half, crossed = np.maximum((upper - lower) / 2, smallest), int((given != ordered).any(axis=1).sum())
            return Reference(middle, (lower + upper) / 2, half, crossed)
        unit = np.ones_like(outputs)
        if self.task.variance is not None or x.weight is not None:
            for fit in fits:
                weight = self.weigh(x, fit.outputs, fit.n_returned, first).weight
                columns = [o for o, each in enumerate(all_outputs(fits)) if each in fit.outputs]
                unit[:, columns] = 1.0 if weight is None else 1 / np.sqrt(weight.numpy())
        return Reference(outputs, outputs, unit)

    def fitted_network(self, fit: Fit) -> Network:
        """Return the network whose gradients made J of this fit."""
        return self.network(self.task.head(fit.outputs), fit)

    def stored_network(self, outputs: tuple[int, ...], layers: Any, probes: Probes | None = None) -> Network:
        """Return a network with weights of its own, for gradients that are computed again from kept inputs."""
        network = self.network(self.task.head(outputs)).with_layers(layers).with_probes(probes)
        return network.copy(own_weights=True)

    def inputs(self, x: Any) -> Inputs:
        """Return a user's inputs as the network takes them; `Inputs` are that already."""
        if not isinstance(x, Inputs) and (self.collate is not None or isinstance(x, OpaqueBatch)):
            return rows_of(x, self.collate)
        if self.input_transform is None or isinstance(x, Inputs):
            return Inputs.of(x)
        return self.input_transform(x, self.network().model_copy.input_dtype)

    def known_inputs(self, fits: Sequence[Fit], x: Any) -> Inputs:
        """Return a user's inputs as the network takes them, and look at them; `Inputs` have been looked at."""
        X = self.inputs(x)
        if not isinstance(x, Inputs):
            affine = self.input_transform is not None and self.input_transform.affine is not None
            self.look_at(fits, X, Inputs.of(x) if affine else None)
        return X

    def look_at(self, fits: Sequence[Fit], X: Inputs, raw: Inputs | None = None) -> None:
        """Warn if inputs do not look like those of the fits; `raw` are they before an affine transform."""
        if fits[0].n_rows >= MANY_ROWS and (problem := fits[0].ranges.problem(X, raw)):
            warn(sanity.inputs(*problem, "these rows"))

    def read(self, data: Any, y: Any = None, n_rows: int | None = None, **extras: Any) -> Batches:
        """Return the user's data as batches; `extras` are weights and clusters of the rows of arrays."""
        if y is not None:
            self.task.check_raw_targets(y)
        elif self.collate is not None:
            data = LabelledItems(data, self.collate)
        return read(data, y, n_rows, self.batch, self.inputs, self.task.read_targets, self.task.may_miss, **extras)

    def takes_loader(self, x: Any) -> bool:
        """Return whether rows come in batches: of a loader, not as the items that `collate` takes."""
        return self.collate is None and is_loader(x)

    def read_answers(self, loader: Any) -> Batches:
        """Return the user's data as batches, with targets as they are, in the units of `predict`."""
        loader = loader if self.collate is None else LabelledItems(loader, self.collate)
        return read(loader, None, None, self.batch, self.inputs, may_miss=self.task.may_miss)

    def memory_per_fit(self, n_fits: int) -> float | None:
        """Return the bytes that each of several fits may take; None: as much as the plan allows a single one."""
        own = self.network().model_copy.own_bytes  # which are no longer free
        memory = None if self.memory is None else max(self.memory - own, 0.0)
        if n_fits == 1:
            return memory
        total = memory if memory is not None else free_memory() * (0.5 if self.engine is None else 1.0)
        return total / n_fits

    def model_outputs(self, x: Inputs) -> Tensor:  # (b, M) float64
        """Return what the model returns for these rows."""
        return self.network().outputs(x).cpu().double()

    def still_returns(self, x: Inputs, before: Tensor) -> bool:
        """Return whether the model returns for these rows what it returned before: not all of it is weights."""
        now = self.model_outputs(x)
        return now.shape == before.shape and torch.allclose(now, before, rtol=1e-3, atol=1e-4, equal_nan=True)

    def evaluate(
        self,
        fits: Sequence[Fit],
        x: Any,
        functions: Sequence[RowFunction] | None = None,
        *,
        heads: Sequence[Head] | None = None,  # those of the task by default
        weighed: bool = False,  # as training rows are, so that values are in units of the noise that is known
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return outputs (n, m) in float64, and for each of them the value (n, …) of its fit's function."""
        X = self.inputs(x)
        X.check_finite()
        try:
            return self._evaluate(fits, X, functions, heads, weighed)
        except ValueError as error:
            known = fits[0].format
            if known is None or not X.looks_like_a_row_of(known):
                raise
            shapes = f"inputs have {X}, and the training rows were of {known}"
            raise ValueError(f"{shapes}: for a single row give x[None], a batch of one row") from error

    def _evaluate(
        self,
        fits: Sequence[Fit],
        X: Inputs,
        functions: Sequence[RowFunction] | None,
        heads: Sequence[Head] | None,
        weighed: bool,
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        columns, values = [], []
        every = tuple(range(fits[0].n_returned))
        for i, fit in enumerate(fits):
            head = None if fit.outputs == every else self.task.head(fit.outputs)
            network = self.network(head if heads is None else heads[i], fit)
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
                rows = self.weigh(X, fit.outputs, fit.n_returned) if weighed else X
                found, value = evaluate_rows(network, rows, functions[i], fit.rows_at_once)
                columns.append(found)
                values += [value[:, o] for o in range(value.shape[1])]
        return np.concatenate(columns, axis=1), values

    def compared(self, fits: Sequence[Fit], method: Method, x: Inputs) -> tuple[np.ndarray, Reference, KnownRows]:
        """Return the outputs of rows, what their targets are compared with, and what their bounds follow from."""
        if x.weight is not None and not method.weighted and self.task.quantiles is None:
            raise ValueError("the calibration rows had no weights: give calibrate(..., sample_weight=) as well")
        if x.weight is not None and ("observed" in x.extras or bool((x.weight == 0).any())):
            raise ValueError("a row of weight zero has no interval: leave it out of predict")
        outputs, found = self.evaluate(fits, x, method.row_functions, weighed=True)
        to = self.reference(fits, x, outputs)
        if to.crossed:
            warn(CROSSED.format(to.crossed, len(x)))
        if x.weight is not None and x.weight.shape[1] > 1:
            x = x.with_extras(weight=self.task.select_weights(all_outputs(fits), x.weight, fits[0].n_returned))
        return outputs, to, method.known(self.network, x, to, found)

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
            **{name: getattr(self, name) for name in ("memory", "time", "probes", "precision")},
            "parameters": parameters,
            "per_output": self.task.per_output,
            "input_transform": None if self.input_transform is None else self.input_transform.affine,
            **self.damping.loss_options(),
            **self.task.options(),
        }

    def functions(self) -> dict[str, str]:
        """Return names of the functions that it was constructed with, which no file can hold."""
        given = {name: getattr(self, name) for name in ("output", "batch", "collate")} | {
            "variance": self.task.variance
        }
        names = {name: describe_setting(each) for name, each in given.items() if callable(each)}
        if self.task.scaler is not None:
            names["target_transform"] = type(self.task.scaler).__name__
        if self.input_transform is not None and self.input_transform.affine is None:
            names["input_transform"] = self.input_transform.name
        return names

    def configuration(self) -> dict[str, str]:
        """Return all that matters for the result of a fit as texts: equal where fits can be resumed or merged."""
        given = {"kind": type(self.task).__name__, **self.options(), **self.functions()}
        return {name: describe_setting(v) for name, v in given.items() if name not in NOT_COMPARED}
