"""Robust covariances: after a fit, a second pass over its rows weighs their gradients by their residuals."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..data.batches import Batches
from ..data.inputs import Inputs
from ..engines.sandwich import LARGEST_LEVERAGE, Sandwich
from ..machine import free_memory
from ..network.gradient_batch import GradientBatch, add_gram
from ..network.network import Network
from .fit import Fit, evaluate_rows
from .spec import FitSpec
from .tasks import Regression

PROJECTION_BYTES = 2**26  # of the projections of the rows evaluated together

ONE_PASS = "a robust covariance needs the residuals of all rows, in a second pass over them, and so a single fit"


def refuse_parts(spec: FitSpec, what: str) -> None:
    """Raise if a fit of rows in several places is to have a robust covariance."""
    if spec.task.robust is not None:
        raise ValueError(f"{what} does not go with robust={spec.task.robust!r}: {ONE_PASS}(loader) or fit(X, y)")


def check_repeatable(spec: FitSpec, batches: Batches) -> None:
    """Raise unless a robust covariance can be computed from these data, before any of them is read."""
    if not spec.damping.is_known:
        raise ValueError(f"robust={spec.task.robust!r} needs λ: give the optimiser's weight_decay=, or damping=")
    if not batches.reiterable:
        raise ValueError(
            f"robust={spec.task.robust!r} reads the data twice, which an iterator or generator does not allow: give "
            "arrays X and y, a DataLoader, or a list of batches"
        )


def check_clusters(spec: FitSpec) -> None:
    """Raise if a fit has no use for clusters."""
    if spec.task.robust in ("HC0", "HC1"):
        return
    if spec.task.robust is None:
        raise ValueError('clusters are for robust covariances: give PredictionIntervals(..., robust="HC1") as well')
    raise ValueError(f'{spec.task.robust} is not defined for clusters: give robust="HC1", or "HC0" without correction')


def with_sandwich(spec: FitSpec, fit: Fit, network: Network, batches: Batches, progress: Any) -> Fit:
    """Return the fit with the robust covariance that its task asks for, from another pass over its rows.

    `network` gives the gradients that the fit's covariance asks for; `progress` is a bar.
    """
    task, kind, m = spec.task, spec.task.robust, fit.n_outputs
    assert isinstance(task, Regression)
    assert kind is not None
    covariance, leverage = fit.covariance.eigendecomposed(), fit.covariance.leverage
    r, needs_leverage = len(covariance.eigenvalues), kind in ("HC2", "HC3")

    def evaluated(g: GradientBatch) -> np.ndarray:  # (b, r) or (b, r + 1)
        z = covariance.projections(g)
        return np.column_stack([z, leverage(g)]) if needs_leverage else z

    def rows_at_once(x: Inputs) -> int:
        return max(1, min(network.chunk_rows(x), PROJECTION_BYTES // (8 * m * r)), fit.rows_at_once // m)

    clusters, gram, n_rows = ClusterSums(r, spec.memory), np.zeros((r, r), order="F"), 0
    for x, targets, first in batches.chunks(rows_at_once):
        weighed = spec.weigh(x, fit.outputs, fit.n_returned, first)
        y, values = evaluate_rows(network, weighed, evaluated, fit.rows_at_once, first)  # (b, m), (b, m, r or r + 1)
        e = task.residuals(fit.outputs, torch.from_numpy(y), targets, fit.n_returned).numpy()
        e = e if weighed.weight is None else e * np.sqrt(weighed.weight.numpy())
        if needs_leverage:
            _check_leverages(values[:, :, r], first, kind)
            e = e * Sandwich.adjusted(kind, values[:, :, r])
        # errors of one row's outputs are correlated
        sums = np.einsum("bm,bmr->br", e, values[:, :, :r])
        cluster = x.extras.get("cluster")
        if (cluster is None) != (len(clusters) == 0) and n_rows:
            raise ValueError(f"some rows have clusters and some have none (row {first}): give all rows one")
        if cluster is None:
            gram = add_gram(gram, sums)
        else:
            clusters.add(cluster[:, 0].numpy(), sums)
        n_rows += len(x)
        progress.update(len(x))
    if n_rows != fit.n_rows:
        raise ValueError(f"the data gave {fit.n_rows} rows at first and {n_rows} when they were read again")
    if len(clusters) == 1:
        raise ValueError("all rows are in one cluster, whose residuals sum up to about nothing: give at least two")
    if len(clusters):
        gram = add_gram(gram, clusters.sums)
    sandwich = Sandwich.of(kind, covariance, gram, int(fit.observed.sum()), len(clusters) or None)
    return replace(fit, covariance=covariance, sandwich=sandwich)


class ClusterSums:
    """The sums of rows of r numbers over the rows of each cluster, in whatever order they come."""

    def __init__(self, r: int, memory: float | None) -> None:
        self._numbers: dict[int, int] = {}  # of clusters, by their labels
        self._sums = np.zeros((0, r))
        self._memory = memory

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def sums(self) -> np.ndarray:  # (G, r)
        return self._sums[: len(self)]

    def add(self, labels: np.ndarray, rows: np.ndarray) -> None:  # (b,), (b, r)
        order = np.argsort(labels, kind="stable")
        found, starts = np.unique(labels[order], return_index=True)
        at = [self._numbers.setdefault(label, len(self)) for label in found.tolist()]
        if len(self) > len(self._sums):
            self._grow(max(len(self), 2 * len(self._sums)))
        self._sums[at] += np.add.reduceat(rows[order], starts, axis=0)

    def _grow(self, size: int) -> None:
        r, room = self._sums.shape[1], free_memory() if self._memory is None else self._memory
        if (needed := 8.0 * size * r) > room:
            raise MemoryError(
                f"{size:,} clusters of {r:,} numbers each take {needed / 1e9:.3g} GB, and {room / 1e9:.3g} GB are "
                "allowed: give an engine of a smaller rank or dim, larger clusters, or more memory"
            )
        self._sums = np.concatenate([self._sums, np.zeros((size - len(self._sums), r))])


def _check_leverages(h: np.ndarray, first: int, kind: str) -> None:  # (b, m)
    bad = (h > LARGEST_LEVERAGE).any(axis=1)
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(
            f"{kind} divides residuals by 1 − h, and row {first + row} has the leverage h = {h[row].max():.6g}: the "
            'network follows its target whatever that is; raise the damping, or give robust="HC1"'
        )
