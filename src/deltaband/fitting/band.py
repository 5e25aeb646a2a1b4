"""What intervals of every kind have in common: a network, its options, and fits to its training rows."""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from ..damping import Damping
from ..data import batches as reading
from ..data.batches import Batches
from ..data.inputs import Inputs
from ..display.summary import Line
from ..engines import Covariance, Engine, Plan, Spectrum
from ..engines.memory import free_memory
from ..engines.spectral import SpectralCovariance
from ..errors import NotFittedError, warn
from ..network.cache import NetworkCache
from ..network.gradient_batch import GradientBatch
from ..network.network import Head, Network
from ..network.parameter_selection import ParameterChoice
from ..storage import encoding
from . import accuracy as error
from . import start as fitting
from .accumulator import Accumulation
from .accuracy import ErrorReport
from .checkpoint import Checkpoint
from .evaluate import ask, check_outputs
from .fit import Fit

QUICK = 1_000  # eigenvalues of a matrix of this size take a moment

Question = Callable[[GradientBatch], np.ndarray]


class Band:
    """A network, which of its parameters count, and the covariances fitted to its training rows: one for all outputs,
    or with `per_output=True` one for each."""

    _noise = True  # whether an interval is for an observation, of width √(1 + q), or for a score, √q
    _held: tuple[str, ...] = ("_fits",)  # what fits and calibrations leave behind

    def __init__(
        self,
        model: nn.Module,
        damping: Damping,
        engine: Engine | Literal["auto"],
        memory: float | None,
        parameters: ParameterChoice,
        output: Callable[[Any], Tensor] | None,
        batch: Callable[[Any], tuple[Any, Any]] | None,
        per_output: bool,
    ) -> None:
        known = engine == "auto" if isinstance(engine, str) else hasattr(engine, "finalise")
        if isinstance(engine, type) or not known:
            raise TypeError(f"engine must be 'auto' or an engine such as Exact(), got {engine!r}")
        if memory is not None and (isinstance(memory, bool) or not isinstance(memory, Real) or not 0 < memory < np.inf):
            raise ValueError(f"memory must be a positive number of bytes, got {memory!r}")
        for name, value in (("output", output), ("batch", batch)):
            if value is not None and not callable(value):
                raise TypeError(f"{name} must be a function, got {value!r}")
        if not isinstance(per_output, bool):
            raise ValueError(f"per_output must be True or False, got {per_output!r}")
        self.model = model
        self.engine = engine
        self.memory = memory
        self._damping = damping
        self._parameters = parameters
        self._output = output
        self._pairs = batch
        self._per_output = per_output
        self._fits: tuple[Fit, ...] = ()
        self._networks = NetworkCache()
        self._network()  # whatever is wrong with the model is said now

    def plan(self, data: Any, y: Any = None, *, n_rows: int | None = None) -> Plan:
        """What `fit` with the same arguments would do: the memory and time of each engine, and the choice.

        Only the first rows are looked at. With `per_output=True` it is the plan of one output's fit.
        """
        batches = self._read(data, y, n_rows)
        if not batches.twice:
            raise ValueError("a plan looks at the first batch, which an iterator or generator gives only once")
        with torch.random.fork_rng(devices=[]):  # a DataLoader draws from it
            groups, batches = self._look(batches)
            network = self._network(self._fitted_head(groups[0]))
            return fitting.planned(
                network, batches, self._engine, self._damping, self._memory_each(len(groups)), batches.n_rows
            )[0]

    def error_report(self, x: Any = None, sample: int | None = None) -> ErrorReport:
        """How far the widths are from those of `Exact()`, estimated: for the rows `x`, or for some training rows.

        The engine and the exact method are both fitted to up to `sample` of the training rows that `fit` has kept, at
        most 4,096, and compared. `fit` does it by itself, and warns where the widths are off by more than 5 %.
        """
        fits, least = self._fitted(), error.FEWEST_ROWS
        if sample is not None and (
            isinstance(sample, bool) or not isinstance(sample, int | np.integer) or sample < least
        ):
            raise ValueError(f"sample must be a whole number ≥ {least}, got {sample!r}")
        X = None
        if x is not None:
            X = Inputs.of(x)
            X.check_finite()
            if len(X) == 0:
                raise ValueError("x has no rows: give some, or none at all for an estimate over training rows")
            self._network().validate(X)
        reports = [self._error_report(fit, X, sample) for fit in fits]
        return max(reports, key=lambda report: report.width)

    def _error_report(self, fit: Fit, X: Inputs | None, sample: int | None) -> ErrorReport:
        if fit.covariance.error_bound == 0.0:
            return ErrorReport(0.0, 0.0, 0.0, 0, repr(fit.engine))
        self._covariance(fit)
        if not min(fit.n_compared, len(fit.sample)):
            raise ValueError(
                f"an estimate needs {error.FEWEST_ROWS} training rows, and memory for the exact method on them; a band "
                "from a file has none unless it was saved with save(..., sample=True)"
            )
        network = self._network(self._fitted_head(fit.outputs))
        self._check_weights(network, fit)
        return error.report(network, fit, X, sample or error.MOST_ROWS, self._noise)

    def save(self, path: str | Path, *, weights: bool = False, sample: bool = False) -> None:
        """Write the fitted band to one safetensors file, which `load` reads. A crash leaves the old file as it was.

        It holds a digest of the model's weights; with `weights=True` the weights themselves. What it holds of the
        training data depends on the engine (docs/artefacts.md says what): `sample=True` adds up to 4,096 rows, which
        `error_report` needs.
        """
        from ..storage import band_file as storage

        storage.save(self, path, weights=weights, sample=sample)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: nn.Module,
        *,
        strict: bool = True,
        output: Callable[[Any], Tensor] | None = None,
        batch: Callable[[Any], tuple[Any, Any]] | None = None,
        target_transform: Any = None,
    ) -> Self:
        """The band that was saved, for the model that it was fitted to: it predicts the same, bit for bit.

        Other weights are an error that names the first of them, with `strict=False` a warning. Functions are in no
        file: `output`, `batch` and a scaler as `target_transform` have to be given again. No code in the file is run.
        """
        from ..storage import band_file as storage

        band = storage.load(path, model, strict=strict, output=output, batch=batch, target_transform=target_transform)
        if not isinstance(band, cls):
            raise TypeError(f"{path} holds {type(band).__name__}: load it with {type(band).__name__}.load")
        return band

    def spectrum(self, output: int = 0) -> Spectrum:
        """The singular values of J that the engine recovered, and the matching eigenvalues of Σ⁻¹.

        With `per_output=True` each output has its own.
        """
        fits = self._fitted()
        if isinstance(output, bool) or not isinstance(output, int | np.integer) or not 0 <= output < len(fits):
            raise ValueError(f"output must be a whole number from 0 to {len(fits) - 1}, got {output!r}")
        return self._covariance(fits[output]).spectrum()

    @property
    def damping_(self) -> float | None:
        """λ; None where neither weight_decay nor damping was given."""
        return self._fitted()[0].covariance.damping

    @property
    def effective_parameters_(self) -> float | np.ndarray:
        """p*, with `per_output=True` of each output; NaN where λ is not known."""
        return _one(np.array([fit.effective_parameters for fit in self._fitted()]))

    @property
    def error_bound_(self) -> float | np.ndarray:
        """‖JᵀJ − what stands in for it‖₂ is at most this; 0 for `Exact`, NaN for `RandomProjection`: not certified."""
        return _one(np.array([fit.covariance.error_bound for fit in self._fitted()]))

    @property
    def n_rows_(self) -> int:
        """Training rows seen by `fit`."""
        return self._fitted()[0].n_rows

    @property
    def n_parameters_(self) -> int:
        """Trainable parameters of the network, of those that were chosen."""
        return self._fitted()[0].n_parameters

    def _repr_html_(self) -> str:
        """For notebooks: what was fitted, and its spectrum where that is quickly had."""
        from ..display import notebook
        from ..display.markup import element

        try:
            damping = self._fitted()[0].covariance.damping
        except NotFittedError:
            return element("p", repr(self))
        return notebook.summary(type(self).__name__, self._described(), self._quick_spectrum(), damping)

    # --- for those who are bands

    def _described(self) -> list[Line]:
        """The lines of the summary."""
        raise NotImplementedError

    def _quick_spectrum(self) -> Spectrum | None:
        fit = self._fits[0]
        known = isinstance(fit.covariance, SpectralCovariance)
        if fit.covariance.damping is None or not (known or min(fit.n_rows * fit.n_outputs, fit.n_parameters) <= QUICK):
            return None
        try:
            return fit.covariance.spectrum()
        except (ArithmeticError, MemoryError, np.linalg.LinAlgError, ValueError):  # showing a band must not fail
            return None

    def _options(self) -> dict[str, Any]:
        """What it was constructed with, functions aside."""
        parameters = self._parameters
        if not isinstance(parameters, str):  # patterns or a function chose these
            parameters = sorted(map(glob.escape, self._network().parameters))
        return {
            "damping": self._damping.damping,
            "weight_decay": self._damping.weight_decay,
            "engine": self.engine,
            "memory": self.memory,
            "parameters": parameters,
            "per_output": self._per_output,
        }

    def _functions(self) -> dict[str, str]:
        """What it was constructed with that no file can hold."""
        given = {"output": self._output, "batch": self._pairs}
        return {name: encoding.text(each) for name, each in given.items() if each is not None}

    def _answers_like(self, x: Inputs, was: Tensor) -> bool:
        """Whether the network returns for these rows what was returned before: not all of it is weights."""
        now = self._answers(x)
        return now.shape == was.shape and torch.allclose(now, was, rtol=1e-3, atol=1e-4, equal_nan=True)

    def _answers(self, x: Inputs) -> Tensor:
        return self._network().outputs(x).cpu().double()

    def _given(self) -> dict[str, str]:
        """All that it was constructed with and that matters for what a fit amounts to, in words."""
        given = {"kind": type(self).__name__, **self._options(), **self._functions()}
        return {name: encoding.text(value) for name, value in given.items() if name != "memory"}

    def _about(self) -> dict[str, Any]:
        """What else there is to tell about it, for those who look into a file."""
        raise NotImplementedError

    def summary(self) -> str:
        """What was fitted, on one screen."""
        raise NotImplementedError

    @property
    def _engine(self) -> Engine | None:
        return None if isinstance(self.engine, str) else self.engine

    def _network(self, head: Head | None = None, fit: Fit | None = None) -> Network:
        """For this thread and this call; what is kept needs a copy."""
        layers = None if fit is None else fit.asked_layers
        return self._networks.network(self.model, layers, parameters=self._parameters, output=self._output, head=head)

    def _read(self, data: Any, y: Any = None, n_rows: int | None = None) -> Batches:
        return reading.read(data, y, n_rows, self._pairs)

    def _groups(self, n_returned: int) -> list[tuple[int, ...]]:
        """Which of the network's outputs each fit is to."""
        raise NotImplementedError

    def _fitted_head(self, outputs: tuple[int, ...]) -> Head:
        """The function of these outputs whose gradients make J."""
        raise NotImplementedError

    def _check_targets(self, y: Tensor, targets: Tensor) -> None:
        """Say what is wrong with the targets of the first rows, whose network returns y (b, M)."""
        raise NotImplementedError

    def _squares(self, outputs: tuple[int, ...], y: Tensor, targets: Tensor, n_returned: int) -> Tensor:
        """Squared residuals (b, m), y being the values of the fitted head."""
        raise NotImplementedError

    def _look(self, batches: Batches) -> tuple[list[tuple[int, ...]], Batches]:
        """What each fit will be to, and the data as if nothing had been read."""
        x, y, batches = batches.peek()
        network = self._network()
        outputs = network.outputs(x).cpu().double()
        self._check_targets(outputs, y)
        groups = self._groups(network.validate(x).n_returned)
        if len(groups) > 1 and not batches.twice:
            raise ValueError(
                "per_output=True reads the data once for each output, which an iterator or generator does not allow: "
                "give arrays X and y, a DataLoader, or a list of batches"
            )
        return groups, batches

    def _memory_each(self, n_fits: int) -> float | None:
        if n_fits == 1:
            return self.memory
        total = self.memory if self.memory is not None else free_memory() * (0.5 if self._engine is None else 1.0)
        return total / n_fits

    def _fit_to(
        self,
        batches: Batches,
        progress: bool,
        squares: Callable[..., Tensor] | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> tuple[Fit, ...]:
        """A fit for each of `_groups`. `squares` stands in for `_squares`, for who wants to see more than a sum."""
        found = None
        if checkpoint is not None:
            found = checkpoint.read()
            batches = checkpoint.ordered(batches, found)
        if self._engine is not None:
            fitting.check(self._engine, batches, self._damping, batches.n_rows)
        groups, batches = self._look(batches)
        if checkpoint is not None:
            batches = checkpoint.look(batches, found)
        memory = self._memory_each(len(groups))
        fits = [] if found is None else list(found.done)
        for outputs in groups[len(fits) :]:
            network = self._network(self._fitted_head(outputs)).copy()
            seen = keep = None
            if found is not None and checkpoint is not None:
                rows, found, seen = Accumulation.from_state(found.rows, network, self._engine), None, checkpoint.seen
            else:
                rows, batches = fitting.begun(
                    network, batches, self._engine, self._damping, memory, progress, batches.n_rows
                )
            if checkpoint is not None:
                keep = partial(checkpoint.keep, fits, outputs)
            rows.take(batches, partial(squares or self._squares, outputs), progress, seen, keep)
            if checkpoint is not None:
                checkpoint.check_all_seen()
            fits.append(replace(rows.finish(self._damping, self._noise), outputs=outputs))
        return tuple(fits)

    def _fitted(self) -> tuple[Fit, ...]:
        if not self._fits:
            name = type(self).__name__
            raise NotFittedError(f"this {name} is not fitted yet: call fit(loader) or fit(X, y) first")
        return self._fits

    def _ask(
        self, x: Any, heads: Sequence[Head | None], questions: Sequence[Question] | None = None
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Outputs (n, m) in float64, and for each of them the answers, (n, …), of the fit that it belongs to; no
        gradients where there are no questions."""
        X = Inputs.of(x)
        X.check_finite()
        columns, answers = [], []
        for i, (fit, head) in enumerate(zip(self._fitted(), heads, strict=True)):
            network = self._network(head, fit)
            if i == 0:
                self._warn_of_changes(network, fit)
            if len(X) == 0:
                columns.append(np.zeros((0, fit.n_outputs)))
                answers += [np.zeros(0)] * fit.n_outputs
            elif questions is None:
                outputs = network.outputs(X)
                check_outputs(outputs)
                columns.append(outputs.cpu().double().numpy())
            else:
                outputs_, answer = ask(network, X, questions[i], fit.rows_at_once)
                columns.append(outputs_)
                answers += [answer[:, o] for o in range(answer.shape[1])]
        return np.concatenate(columns, axis=1), answers

    def _covariance(self, fit: Fit) -> Covariance:
        if fit.covariance.damping is None:
            raise ValueError(
                f"λ is not known: give {type(self).__name__} the optimiser's weight_decay= or damping=, and fit again"
            )
        return fit.covariance

    def _warn_of_changes(self, network: Network, fit: Fit) -> None:
        if changed := self._changed_weights(network, fit):
            warn(
                f"the model's weights have changed since fit (first: {changed!r}): predictions come from the new "
                "weights, the width of the intervals from the old ones; call fit again"
            )

    def _check_weights(self, network: Network, fit: Fit) -> None:
        if changed := self._changed_weights(network, fit):
            raise ValueError(f"the model's weights have changed since fit (first: {changed!r}): call fit again first")

    def _changed_weights(self, network: Network, fit: Fit) -> str | None:
        """The first parameter that is not as it was at fit."""
        if network.n_parameters != fit.n_parameters:
            raise ValueError(
                f"the model has {network.n_parameters:,} trainable parameters now and had {fit.n_parameters:,} at fit: "
                "call fit again"
            )
        now = network.fingerprint
        if now == fit.fingerprint:
            return None
        return next((name for name in {**fit.fingerprint, **now} if now.get(name) != fit.fingerprint.get(name)), None)


def _one(values: np.ndarray) -> float | np.ndarray:
    return float(values[0]) if len(values) == 1 else values
