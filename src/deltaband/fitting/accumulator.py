"""The training rows that a fit has taken in so far: an engine under way, and the sums beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..damping import Damping
from ..data.batches import EMPTY, Batches
from ..data.inputs import Inputs
from ..data.row_record import RowTrace, Sample, pair_hashes, share_by_chance
from ..engines import Engine, Exact, Option, Problem
from ..engines.base import Total
from ..errors import EmptyDataError, NoGradientError
from ..network.gradient_batch import CHUNK_ROWS_AT_LEAST, MERGED_BYTES, PRODUCT_ROWS, GradientBatch, StoredBlock
from ..network.layers.hooks import DEPENDS_ON_NOTHING, Layers
from ..network.model_copy import plain_autograd
from ..network.network import Network, OutputShape
from ..network.recomputed import Recomputed
from . import accuracy as error
from .evaluate import ask_sample, checked_gradients
from .fit import Fit

PRODUCT_BYTES = 32 * 2**20  # of inner products with all training rows, in one question
REPEATS = 0.01  # of the rows: more equal ones, and more than there are anyway, are no accident
LEVERAGES = 512  # training rows whose leverages new rows are compared with

Squares = Callable[[Tensor, Tensor, int], Tensor]  # outputs (b, m), targets, outputs returned -> squares (b, m)


class Accumulation:
    """Rows in, a `Fit` out: `take` any number of times, `merge` what others have taken, then `finish`."""

    def __init__(
        self,
        network: Network,
        layers: Layers,
        engine: Engine,
        option: Option,
        memory: float,
        weights: dict[str, str],  # their fingerprint
        seed: int = 0,
    ) -> None:
        """`engine` has been started, for the option that a plan chose; the network gives what it asks for, layer by
        layer or not."""
        self.network = network
        self.layers = layers
        self.engine = engine
        self.weights = weights
        self._option, self._memory = option, memory
        problem, m = option.problem, network.n_outputs
        self._remember = _Inputs(network, problem, memory - option.nbytes) if problem.recomputed else None
        # rows are taken as they come; inner products are faster for many at once
        self._rows_at_once = 0
        if self._remember is not None:
            self._rows_at_once = self._remember.rows_in_memory
        elif network.layers is not None:
            self._rows_at_once = min(PRODUCT_ROWS, max(1, MERGED_BYTES // problem.factor_bytes))
        self._n_compared = 0
        if not isinstance(engine, Exact):
            self._n_compared = error.affordable(option.engine, problem, memory) // m
        self._n_leverages = max(1, min(LEVERAGES, error.INPUT_BYTES // (m * problem.input_bytes)))
        self._trace = RowTrace(max(self._n_leverages, self._n_compared), seed)
        self._rss = np.zeros(m)
        self._energy = 0.0
        self.count = 0

    def beside(self, network: Network) -> Accumulation:
        """An empty one that can be merged into this one, if the network is still the same."""
        weights = network.fingerprint
        network = network.with_layers(self.network.layers, self.network.shape)
        engine = self.engine.beside()
        return Accumulation(network, self.layers, engine, self._option, self._memory, weights, seed=self.count)

    @classmethod
    def of(cls, fit: Fit, network: Network, engine: Engine, memory: float) -> Accumulation:
        """The rows that were fitted to. The fit stays as it is."""
        m = fit.n_outputs
        network = network.with_layers(network.layers, OutputShape(m, fit.n_returned))
        n, p, itemsize = fit.n_rows * m, fit.n_parameters, network.dtype.itemsize
        sample = fit.sample
        input_bytes = max((x.nbytes // len(x) for x in sample.pieces), default=1)
        problem = Problem(n, p, itemsize, fit.layers.factor_bytes, input_bytes, fit.layers.inner_flops)
        resumed = engine.resumed(fit.covariance, n, p)
        made = cls(network, fit.layers, resumed, Option(engine, problem), memory, fit.fingerprint)
        made._trace = RowTrace.resumed(fit.seen, sample, max(made._n_leverages, made._n_compared))
        made._rss, made._energy, made.count = fit.rss.copy(), math.inf, fit.n_rows
        return made

    def state(self, engine: bool = True) -> dict[str, Any]:
        """What it has taken in, and for what, as values that a file can hold; with the engine's part or without."""
        return {
            "option": self._option,
            "memory": self._memory,
            "weights": self.weights,
            "layers": self.layers,
            "by_rows": self.network.layers is None,
            "n_outputs": self.network.n_outputs,
            "n_returned": self.network.n_returned,
            "engine": self.engine.state() if engine else None,
            "trace": self._trace.state(),
            "rss": self._rss,
            "energy": self._energy,
            "count": self.count,
        }

    @classmethod
    def from_state(
        cls, state: dict[str, Any], network: Network, engine: Engine | None, seed: int | None = None
    ) -> Accumulation:
        """What was under way, for a network of the same weights and the engine that the user has given, if any: no file
        holds its functions. With a seed it keeps other rows in mind than others that begin in the same state."""
        option, layers = state["option"], state["layers"]
        option = option if engine is None else replace(option, engine=engine)
        shape = OutputShape(state["n_outputs"], state["n_returned"])
        network = network.with_layers(None if state["by_rows"] else layers, shape)
        made = cls(network, layers, option.engine, option, state["memory"], state["weights"], seed or 0)
        fresh = made._trace
        made.resume(state)
        if seed is not None:
            made._trace = fresh
        return made

    def resume(self, state: dict[str, Any]) -> None:
        """Have taken in what the state says; the engine as it is where that has no part for it."""
        if state["engine"] is not None:
            self.engine = self._option.engine.from_state(state["engine"])
        self._trace = RowTrace.from_state(state["trace"])
        self._rss, self._energy, self.count = state["rss"], state["energy"], state["count"]

    def check(self, other: Accumulation) -> None:
        """Whether the rows of the other can be taken in as well."""
        if other.weights != self.weights:
            raise ValueError("the model's weights are not the same for all parts of the rows: fit again from the start")
        self.check_size(self.count + other.count)

    def check_size(self, n_rows: int) -> None:
        """Whether so many rows can be taken in."""
        problem = replace(self._option.problem, n_rows=n_rows * self.network.n_outputs)
        if (needed := self._option.engine.nbytes(problem)) > self._memory:
            raise MemoryError(
                f"{self._option.engine!r} would hold {needed / 1e9:.3g} GB with these rows, and has "
                f"{self._memory / 1e9:.3g} GB: begin again with an engine that does not grow with the rows, such as "
                "RandomProjection(), or give more memory="
            )

    def merge(self, other: Accumulation) -> None:
        """Take in the rows that another one has taken in."""
        self.engine.merge(other.engine)
        self._merge(other._trace, other._rss, other._energy, other.count)

    def merge_state(self, state: dict[str, Any]) -> None:
        """Take in the rows of another one, of which the state is there."""
        if state["engine"] is not None:
            self.engine.merge(self._option.engine.from_state(state["engine"]))
        self._merge(RowTrace.from_state(state["trace"]), state["rss"], state["energy"], state["count"])

    def _merge(self, trace: RowTrace, rss: np.ndarray, energy: float, count: int) -> None:
        self._trace.merge(trace)
        self._rss = self._rss + rss
        self._energy += energy
        self.count += count

    def add_up(self, total: Total, n_rows: int) -> bool:
        """Take in, as far as the engine is concerned, the rows of several processes, if that is a sum."""
        m, p = self.network.n_outputs, self.network.n_parameters
        return self.engine.add_up(total, n_rows * m, p)

    @property
    def hashes(self) -> np.ndarray:  # (n,)
        return self._trace.hashes()

    def shares_rows(self, hashes: np.ndarray) -> bool:
        """Whether more of these rows have been taken in than there are equal rows anyway."""
        if len(hashes) == 0 or self.count == 0:
            return False
        seen = self._trace.seen()
        return seen.share(hashes) > max(share_by_chance(seen.repeated, len(hashes)), REPEATS)

    def network_of(self, outputs: tuple[int, ...], layers: Any) -> Network:
        """The network that rows are computed again with."""
        assert self._remember is not None
        return self._remember.network

    def take(
        self,
        batches: Batches,
        squares: Squares,
        progress: bool,
        seen: Callable[[int, np.ndarray], None] | None = None,
        keep: Callable[[Accumulation], None] | None = None,
    ) -> None:
        """Every row goes to the engine and the trace; but those that an accumulation from a state has taken in before
        go, with the number of the first and their hashes, to `seen`. `keep` is called whenever the state is whole."""
        waiting: list[GradientBatch] = []
        network, before = self.network, 0 if seen is not None else self.count
        with plain_autograd(network.device), bar("deltaband", batches, progress) as shown:

            def skip(x: Inputs, y: Tensor, first: int) -> None:
                assert seen is not None
                seen(first, pair_hashes(network.prepare(x), y))
                shown.update(len(x))

            chunks = batches.chunks(network.chunk_rows, self.count - before, skip)
            for chunk, (x, targets, first) in enumerate(chunks):
                if chunk & (chunk - 1) == 0:  # the first, the second, the third, the fifth, the ninth …
                    network.verify(x)
                outputs = []
                for group, (part, g) in zip(network.groups(x), checked_gradients(network, x, first), strict=True):
                    outputs.append(part.cpu())
                    waiting.append(g if self._remember is None else self._remember(x, group))
                    if sum(map(len, waiting)) >= self._rows_at_once:
                        self.engine.update(_together(waiting))
                        waiting = []
                    self._energy += float(g.squared_norms.sum())
                self._trace.update(network.prepare(x), targets)
                self._rss += squares(torch.cat(outputs, dim=1), targets, network.n_returned).sum(dim=0).numpy()
                self.count += len(x)
                shown.update(len(x))
                if keep is not None and (not waiting or self._remember is not None):
                    if waiting:
                        self.engine.update(_together(waiting))
                        waiting = []
                    keep(self)
            if waiting:
                self.engine.update(_together(waiting))
        if not np.isfinite(self._rss).all():
            raise ValueError("the squares of the residuals are too large for numbers: scale the targets")
        if batches.n_rows is not None and self.count - before != batches.n_rows:
            came = self.count - before
            raise ValueError(f"{batches.n_rows} rows were announced but {came} came: give n_rows={came}")

    def finish(self, damping: Damping, noise: bool = True) -> Fit:
        """What the rows amount to; the engine is empty afterwards. `noise`: whether widths are those of observations,
        √(1 + q), or in proportion to √q."""
        network, m, count = self.network, self.network.n_outputs, self.count
        if count == 0:
            raise EmptyDataError(EMPTY)
        if self._energy == 0.0:
            raise NoGradientError(DEPENDS_ON_NOTHING)
        settings = self.engine.limited(2 * count * m)
        with plain_autograd(network.device):
            covariance = self.engine.finalise(damping.at(count, network.n_returned))
        found = Fit(
            covariance,
            settings,
            self._rss,
            count,
            network.n_parameters,
            network.dtype,
            self.weights,
            self.layers,
            network.layers is None,
            self._trace.seen(),
            n_returned=network.n_returned,
            rows_at_once=min(self._rows_at_once, max(CHUNK_ROWS_AT_LEAST, PRODUCT_BYTES // (8 * count * m))),
        )
        rows = self._trace.sample()
        exact = covariance.error_bound == 0.0
        n_compared = 0 if exact else min(len(rows), self._n_compared)
        found = replace(found, sample=rows, n_compared=n_compared if n_compared * m >= error.FEWEST_ROWS else 0)
        if exact or (m > 1 and covariance.damping is not None):
            found = _with_leverages(found, network, rows.between(0, self._n_leverages), exact)
        if not found.n_compared or covariance.damping is None:
            return found
        return replace(found, error=error.report(network, found, noise=noise))


def _with_leverages(found: Fit, network: Network, rows: Sample, exact: bool) -> Fit:
    """What some of the training rows have: how p* is shared among the outputs, and h itself where it is exact."""
    covariance = found.reference

    def question(g: GradientBatch) -> np.ndarray:
        return np.stack([covariance.leverage(g), covariance.variance(g)], axis=1)

    if network.n_outputs == 1:
        return replace(found, leverages=ask_sample(network, rows, covariance.leverage, found.rows_at_once))
    answers = ask_sample(network, rows, question, found.rows_at_once)  # (rows, m, 2)
    h, q = answers[:, :, 0], answers[:, :, 1]
    own = np.maximum(2 * h - q, 0.0).sum(axis=0)  # of the diagonal of 2H − H²
    shares = own / own.sum() if own.sum() > 0 else np.full(len(own), 1 / len(own))
    return replace(found, shares=shares, leverages=h if exact else found.leverages)


def _together(batches: list[GradientBatch]) -> GradientBatch:
    batch = GradientBatch.concatenate(batches)
    return batch.merged() if all(isinstance(block, StoredBlock) for block in batch.blocks) else batch


def bar(description: str, batches: Batches, progress: bool) -> Any:
    """It stays away where the work is done within two seconds."""
    from tqdm.auto import tqdm

    return tqdm(total=batches.n_rows, desc=description, unit=" rows", delay=2, leave=False, disable=not progress)


class _Inputs:
    """Of each row the input alone, in the place of its gradient."""

    def __init__(self, network: Network, problem: Problem, spare: float) -> None:
        self.network = network.copy(own_weights=True)
        # half is for the rows that meet them
        weights = problem.n_parameters * problem.itemsize
        self.rows_in_memory = int((problem.recomputed_bytes - weights + spare / 2) // (2 * problem.factor_bytes))

    def __call__(self, x: Inputs, group: slice) -> GradientBatch:
        return GradientBatch((Recomputed(self.network, self.network.prepare(x), group, self.rows_in_memory),))
