"""`FitAccumulator`: the training rows that a fit has taken in so far, as an engine's accumulator and sums beside it."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.batches import EMPTY_DATA_MESSAGE, Batches
from ..data.inputs import Inputs
from ..data.row_record import RowRecord, RowSample, Sample, pair_hashes
from ..engines import Accumulator, Covariance, Engine, Option, Problem
from ..engines.fields import Total
from ..errors import ArtefactError, EmptyDataError, NoGradientError
from ..machine import on_free_cores
from ..network.gradient_batch import CHUNK_ROWS_AT_LEAST, MERGED_BYTES, PRODUCT_ROWS, KeptInputs, RowBuffer
from ..network.layers.hooks import DEPENDS_ON_NOTHING, Layers
from ..network.network import MAX_FEATURES, Network, plain_autograd
from ..network.probes import Probes
from ..storage.encoding import storable
from . import accuracy
from .fit import Fit, Outputs, checked_gradients, with_leverages
from .probed import probe_error
from .spec import FitSpec
from .tasks import Regression
from .weights import Sums, given_weights, targets_there

PRODUCT_BYTES = 32 * 2**20  # of inner products with all training rows, for the rows evaluated at once
LEVERAGE_ROWS = 512  # training rows whose leverages new rows are compared with
RESIDUAL_ROWS, RESIDUAL_BYTES = 20_000, 2**25  # kept at most, to learn the noise from

Skipped = Callable[[int, np.ndarray], None]  # the number of the first row, and the rows' hashes
Checkpoint = Callable[["FitAccumulator"], None]


@storable
@dataclass(frozen=True)
class Start:
    """What a fit starts with: its outputs, the plan's choice, the form of gradients, and the model's weights."""

    outputs: Outputs
    option: Option
    memory: float
    layers: Layers
    by_rows: bool  # whether the engine asks for whole rows
    n_outputs: int
    n_returned: int
    weights: dict[str, str]  # their fingerprint
    exact_cost: str = ""  # what the exact method would cost, where another was chosen
    shape: tuple[int, ...] = ()  # of what the network returns for a row
    probes: Probes | None = None

    @property
    def gradients_per_row(self) -> int:
        """How many rows of J there are for each training row."""
        return self.n_outputs if self.probes is None else self.probes.count

    def network(self, spec: FitSpec) -> Network:
        """Return the network that gives what the engine asks for."""
        network = spec.network(spec.task.head(self.outputs))
        return network.with_layers(None if self.by_rows else self.layers).with_probes(self.probes)


class FitAccumulator:
    """Rows in, a `Fit` out: `take` any number of times, `merge` what others have taken, then `finish`."""

    def __init__(self, spec: FitSpec, start: Start, engine: Accumulator, seed: int = 0) -> None:
        """Begin with an engine's accumulator that has been started for the plan's choice."""
        self.spec, self.start, self.engine = spec, start, engine
        self.network = network = start.network(spec).copy()
        option, m, per_row = start.option, start.n_outputs, start.gradients_per_row
        problem = option.problem
        self._inputs: KeptInputs | None = None
        if problem.recomputed:
            rows_in_memory = max(1, int(problem.room // problem.factor_bytes))
            self._inputs = KeptInputs(network.copy(own_weights=True), rows_in_memory)
        # rows are taken as they come; inner products are faster for many at once
        self._rows_at_once = 0
        if self._inputs is not None:
            self._rows_at_once = max(1, self._inputs.rows_in_memory // 2)  # new rows meet those computed again
        elif not option.engine.cost(problem).wants_rows and network.layers is not None:
            self._rows_at_once = min(PRODUCT_ROWS, max(CHUNK_ROWS_AT_LEAST, MERGED_BYTES // problem.factor_bytes))
        self._n_compared = 0
        if not option.engine.is_exact:
            self._n_compared = accuracy.affordable_rows(option.engine, problem, start.memory) // per_row
        self._n_leverages = max(1, min(LEVERAGE_ROWS, accuracy.SAMPLE_INPUT_BYTES // (per_row * problem.input_bytes)))
        self.record = RowRecord(RowSample(max(self._n_leverages, self._n_compared), seed))
        room = min(RESIDUAL_BYTES, start.memory - option.nbytes) if spec.task.keeps_residuals else 0
        affordable = min(RESIDUAL_ROWS, int(room // (4 * MAX_FEATURES + 24 * m)))
        self._residuals = RowSample(affordable, seed) if affordable > 0 else None
        self._sums = Sums(0, np.zeros(m), np.zeros(spec.task.n_counts(m, start.n_returned)), 0.0, 0.0, np.zeros(m))
        self._before: Fit | None = None  # the fit that is continued
        self._completed: tuple[Covariance, Engine] | None = None  # what the engine has ended in, and its settings
        self._seconds = 0.0  # that this process has spent on rows

    @property
    def n_rows(self) -> int:
        return self._sums.n_rows

    @property
    def _observed(self) -> np.ndarray:  # (m,)
        return self.n_rows - self._sums.missing

    def new_like(self) -> FitAccumulator:
        """Return an empty accumulator that can be merged into this one, if the model's weights are still the same."""
        now = self.spec.network().fingerprint
        return FitAccumulator(self.spec, replace(self.start, weights=now), self.engine.new_like(), seed=self.n_rows)

    @classmethod
    def of_fit(cls, spec: FitSpec, fit: Fit, memory: float) -> FitAccumulator:
        """Return the accumulator that ends in this fit; the fit stays as it is."""
        engine, n, p = spec.engine or fit.engine, fit.n_rows * fit.gradients_per_row, fit.n_parameters
        input_bytes = max((x.nbytes // len(x) for x in fit.sample.pieces), default=1)
        problem = Problem(n, p, fit.dtype.itemsize, fit.layers.factor_bytes, input_bytes, fit.layers.inner_flops)
        form = (fit.layers, fit.by_rows, fit.n_outputs, fit.n_returned, fit.fingerprint)
        start = Start(fit.outputs, Option(engine, problem), memory, *form, shape=fit.shape, probes=fit.probes)
        made = cls(spec, start, engine.resume(fit.covariance, n, p))
        made.record = RowRecord.from_seen(fit.seen, fit.ranges, fit.sample, max(made._n_leverages, made._n_compared))
        if made._residuals is not None:
            made._residuals.resume(fit.residuals, fit.n_rows)
        made._before = fit
        missing = fit.n_rows - fit.observed
        made._sums = Sums(fit.n_rows, fit.losses, fit.counts, math.inf, fit.total_weight, missing)
        return made

    def state(self, engine: bool = True) -> dict[str, Any]:
        """Return what it has taken in as values that a file can hold; with the engine's part or without."""
        return {
            "start": self.start,
            "engine": self.engine.state() if engine else None,
            "record": self.record.state(),
            "residuals": None if self._residuals is None else self._residuals.state(),
            "sums": self._sums,
        }

    @classmethod
    def from_state(cls, spec: FitSpec, state: dict[str, Any], seed: int | None = None) -> FitAccumulator:
        """Return the accumulator of a state. With a seed it keeps another sample than others of that state."""
        start = state["start"]
        if spec.engine is not None:  # a file does not hold functions of the user's engine
            start = replace(start, option=replace(start.option, engine=spec.engine))
        made = cls(spec, start, start.option.engine.from_state(state["engine"]), seed or 0)
        made.restore(state, keep_record=seed is not None)
        return made

    def restore(self, state: dict[str, Any], keep_record: bool = False) -> None:
        """Replace the sums by those of a state; the engine's only if the state has them."""
        if state["engine"] is not None:
            self.engine = self.start.option.engine.from_state(state["engine"])
        self.record = self.record if keep_record else RowRecord.from_state(state["record"])
        self._residuals = None if state["residuals"] is None else RowSample.from_state(state["residuals"])
        self._sums = state["sums"]

    def check_mergeable(self, other: FitAccumulator) -> None:
        """Raise unless the rows of the other can be taken in as well."""
        if other.start.weights != self.start.weights:
            raise ValueError("the model's weights are not the same for all parts of the rows: fit again from the start")
        self.check_size(self.n_rows + other.n_rows)

    def check_size(self, n_rows: int) -> None:
        """Raise unless this number of rows fits into memory."""
        engine, memory = self.start.option.engine, self.start.memory
        problem = replace(self.start.option.problem, n_rows=n_rows * self.start.gradients_per_row)
        if (needed := engine.cost(problem).nbytes) > memory:
            raise MemoryError(
                f"{engine!r} would hold {needed / 1e9:.3g} GB with these rows, and has {memory / 1e9:.3g} GB: start "
                "anew with an engine that does not grow with the rows, as RandomProjection(), or give more memory"
            )

    def merge(self, other: FitAccumulator) -> None:
        """Take in the rows that another accumulator has taken in."""
        if self._completed is not None:
            rows, columns = self.n_rows * self.start.gradients_per_row, self.network.n_parameters
            self.engine = self.engine.engine.resume(self._completed[0], rows, columns)
            self._completed = None
        self.engine.merge(other.engine)
        self._seconds += other._seconds
        self.merge_state(other.state(engine=False))

    def merge_state(self, state: dict[str, Any]) -> None:
        """Take in the rows of a state; the engine's only if the state has them."""
        if state["engine"] is not None:
            self.engine.merge(self.start.option.engine.from_state(state["engine"]))
        self.record.merge(RowRecord.from_state(state["record"]))
        if self._residuals is not None and state["residuals"] is not None:
            self._residuals.merge(RowSample.from_state(state["residuals"]))
        self._sums = Sums(*map(operator.add, self._sums, state["sums"]))

    def all_reduce(self, total: Total, n_rows: int) -> bool:
        """Add up the engine's part over several processes, if it is a sum; return whether it is."""
        return self.engine.all_reduce(total, n_rows * self.start.gradients_per_row, self.network.n_parameters)

    def kept_network(self, *about: Any) -> Network:
        """Return the network that gradients are computed again with."""
        return self._inputs.network  # type: ignore[union-attr]

    def take(
        self, batches: Batches, progress: bool, skipped: Skipped | None = None, checkpoint: Checkpoint | None = None
    ) -> None:
        """Take in every row of the batches; those taken in before, if they come again, go to `skipped` instead.

        `checkpoint` is called whenever the state is complete.
        """
        began = time.perf_counter()
        network, before, weighted, met = self.network, 0 if skipped is not None else self.n_rows, False, 0.0
        buffer = RowBuffer(lambda g: self.engine.update(g.merged() if g.is_in_memory else g), self._rows_at_once)
        with plain_autograd(network.device), batches.progress_bar("deltaband", progress) as shown:

            def skip(x: Inputs, y: Tensor, first: int) -> None:
                nonlocal weighted, met
                assert skipped is not None
                weighted, met = weighted or bool(x.extras), met + self._given_weight(x)
                skipped(first, pair_hashes(network.prepare(x), y))
                shown.update(len(x))

            chunks = batches.chunks(network.chunk_rows, self.n_rows - before, skip)
            for chunk, (x, targets, first) in enumerate(chunks):
                if chunk == 0 and skipped is not None and not math.isclose(met, self._sums.weight, rel_tol=1e-9):
                    taken = f"the rows taken in before had weights that sum up to {self._sums.weight:.6g}"
                    raise ArtefactError(
                        f"{taken}, now {met:.6g}: give the same weights, or delete the file to start over"
                    )
                weighted, given, missing = weighted or bool(x.extras), self._given_weight(x), self._missing(x)
                x = self.spec.weigh(x, self.start.outputs, self.start.n_returned, first)
                outputs, energy = [], 0.0
                for group, (part, g) in zip(network.groups(x), checked_gradients(network, x, first), strict=True):
                    outputs.append(part.cpu())
                    buffer.add(g if self._inputs is None else self._inputs(x, group))
                    energy += float(g.squared_norms.sum())
                self.record.update(network.prepare(x), targets)
                y, start = torch.cat(outputs, dim=1), self.start
                losses, counts = self.spec.task.losses(start.outputs, y, targets, start.n_returned, x.weight)
                new = Sums(len(x), losses.sum(dim=0).numpy(), counts, energy, given, missing)
                self._sums = Sums(*map(operator.add, self._sums, new))
                self._keep_residuals(x, y, targets)
                shown.update(len(x))
                if checkpoint is not None and (len(buffer) == 0 or self._inputs is not None):
                    buffer.flush()
                    checkpoint(self)
            buffer.flush()
        self._seconds += time.perf_counter() - began
        if not np.isfinite(self._sums.losses).all():
            raise ValueError("the squares of the residuals are too large for numbers: scale the targets")
        came = self.n_rows - before
        # rows of weight zero, and those without any target, are left out
        if batches.n_rows is not None and came != batches.n_rows and (came > batches.n_rows or not weighted):
            raise ValueError(f"{batches.n_rows} rows were announced but {came} came: give n_rows={came}")

    def _given_weight(self, x: Inputs) -> float:
        """Return the sum of the weights that the user gave these rows, their mean over the outputs."""
        start = self.start
        w = given_weights(self.spec.task, x, start.outputs, start.n_returned) if x.extras else None
        return float(len(x) if w is None else w.mean(dim=1).sum())

    def _missing(self, x: Inputs) -> np.ndarray:  # (m,)
        start = self.start
        there = targets_there(self.spec.task, x, start.outputs, start.n_returned) if x.extras else None
        return np.zeros(start.n_outputs) if there is None else (1 - there).sum(dim=0).numpy()

    def _keep_residuals(self, x: Inputs, y: Tensor, targets: Tensor) -> None:
        start, task = self.start, self.spec.task
        if self._residuals is None or not isinstance(task, Regression):
            return
        r = task.residuals(start.outputs, y, targets, start.n_returned).abs()
        given = x.extras.get("given", torch.ones(len(x), 1)).double()
        if task.variance is not None and x.weight is not None:  # in units of the network's own noise
            r = r * (x.weight / given).sqrt()
        roots = given.sqrt().expand_as(r)

        def kept(few: np.ndarray) -> Inputs:
            found = torch.from_numpy(self.network.features(x[few]))
            return Inputs((found, y[few].double(), r[few], roots[few]), single=False)

        self._residuals.update(x, kept)

    @on_free_cores()
    def prepare(self) -> None:
        """Compute what `complete` needs that takes long, and loses nothing if it is interrupted."""
        if self._completed is None:
            with plain_autograd(self.network.device):
                self.engine.prepare()

    def complete(self) -> tuple[Covariance, Engine]:
        """Return the covariance of the rows taken in, and the engine's settings; an interrupt would lose the rows."""
        if self._completed is not None:
            return self._completed
        start, n_rows, damping = self.start, self.n_rows, self.spec.damping
        if n_rows == 0:
            raise EmptyDataError(EMPTY_DATA_MESSAGE)
        if self._sums.energy == 0.0:
            raise NoGradientError(DEPENDS_ON_NOTHING + self.spec.task.no_gradient_hint)
        if (never := n_rows - self._sums.missing == 0).any():
            raise ValueError(f"output {start.outputs[never.argmax()]} has no target in any row: leave it out, outputs=")
        settings = self.engine.sized_engine(2 * n_rows * start.gradients_per_row)
        known = damping.at(n_rows, start.n_returned, self._sums.weight, self._observed.mean())
        chosen = damping.resolved(known, self._sums.energy)
        with plain_autograd(self.network.device):
            self._completed = self.engine.finish(chosen), settings
        return self._completed

    def finish(self) -> Fit:
        """Return the fit to the rows taken in; the engine is empty afterwards, and resumes if there are more rows."""
        began = time.perf_counter()
        (covariance, settings), start, n_rows = self.complete(), self.start, self.n_rows
        network, per_row = self.network, start.gradients_per_row
        exact, rows, met = covariance.is_exact, self.record.sample.rows(), len(getattr(covariance, "J", None) or [0])
        n_compared, before = 0 if exact else min(len(rows), self._n_compared), self._before
        fit = Fit(
            covariance,
            settings,
            self._sums.losses,
            self._sums.counts,
            n_rows,
            network.n_parameters,
            network.dtype,
            start.weights,
            start.layers,
            start.by_rows,
            self.record.seen(),
            self.record.ranges,
            outputs=start.outputs,
            n_returned=start.n_returned,
            shape=start.shape,
            probes=start.probes,
            probe_error=None if self._before is None else self._before.probe_error,
            total_weight=self._sums.weight,
            n_targets=self._observed if self._sums.missing.any() else None,
            exact_cost=start.exact_cost,
            uncertified=tuple(sorted(network.model_copy.uncertified)),
            sample=rows,
            format=next((x.without_rows() for x in rows.pieces), before.format if before else None),
            residuals=Sample() if self._residuals is None else self._residuals.rows(),
            n_compared=n_compared if n_compared * per_row >= accuracy.SAMPLE_ROWS_AT_LEAST else 0,
            rows_at_once=min(self._rows_at_once, max(CHUNK_ROWS_AT_LEAST, PRODUCT_BYTES // (8 * met))),
        )
        if len(rows) == 0 and before is not None:  # of a band from a file
            fit = replace(fit, shares=before.shares, far=before.far)
        else:
            few = rows.between(0, self._n_leverages)
            fit = with_leverages(fit, network, few, exact)
            fit = fit if fit.probes is None else probe_error(fit, network, few, self.spec.task.has_noise)
        took, noise = self._seconds + time.perf_counter() - began, self.spec.task.has_noise
        return accuracy.with_error(network, fit, start.option, took, noise) if fit.n_compared else fit
