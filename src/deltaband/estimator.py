"""What `PredictionIntervals` and `ClassificationIntervals` have in common: a `FitSpec`, and fits to training rows."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from .calibration import Calibration
from .data.items import Collate
from .display import element
from .engines import Covariance, Engine, Plan, Spectrum
from .error_report import ErrorReport
from .errors import NotFittedError, warn
from .fitting import accuracy, driver, parts
from .fitting.accumulator import FitAccumulator
from .fitting.checkpoint import CHECKPOINT_SECONDS
from .fitting.distributed import ProcessGroup
from .fitting.fit import Fit
from .fitting.loaders import of_batches
from .fitting.record import check_shapes, record_of, restored
from .fitting.spec import FitSpec
from .interrupts import uninterrupted
from .storage import Stored, StoredBand
from .summary import format_summary, summary_html, summary_lines
from .validation import check_int

M = TypeVar("M", bound=Callable[..., Any])

PARTIAL_FIT_LOCK = threading.RLock()  # several threads may ask for the result of a partial fit


def by_batches(method: M) -> M:
    """Let a method that takes the rows `x` take a loader, too: the results of its batches are concatenated."""

    @wraps(method)
    def of_all(self: "Estimator", x: Any, *args: Any, **options: Any) -> Any:
        ask = partial(method, self)
        return (partial(of_batches, self.spec, ask) if self.spec.takes_loader(x) else ask)(x, *args, **options)

    return cast(M, of_all)


class Estimator(Stored):
    """A trained network and the covariances fitted to its training rows: one, or with `per_output=True` one each."""

    def __init__(self, spec: FitSpec) -> None:
        self.spec = spec
        self._fits: tuple[Fit, ...] = ()
        self._partial: tuple[FitAccumulator, ...] = ()  # rows taken in and not finished yet
        self._calibration: Calibration | None = None

    # --- fitting

    def fit(
        self,
        data: Any,
        y: Any = None,
        *,
        sample_weight: Any = None,
        clusters: Any = None,
        n_rows: int | None = None,
        progress: bool = True,
        checkpoint: str | Path | None = None,
        checkpoint_every: float = CHECKPOINT_SECONDS,
        distributed: bool = False,
        collate: Collate | None = None,
    ) -> Self:
        """Fit to the training data in one pass; `Nystrom` and `per_output=True` need data that can be read again.

        Args:
            data: A loader of batches `(x, y)`, or the inputs `X` with their targets `y`.
            y: The targets of `X`; labels for a classifier.
            sample_weight: The weights of the rows of `X` in the training loss, (n,), or (n, m) for m outputs: a row of
                weight w has the noise variance s²/w. Rows of weight zero are left out. Batches of a loader have them as
                what the `batch` function returns third, or that has both: {"sample_weight": …, "clusters": …}.
            clusters: For `robust=`, labels (n,) of the rows of `X`: errors are correlated among rows of the same label.
            n_rows: How many rows a loader without a length gives, for an engine that needs λ from the first row on.
            progress: Whether to show a progress bar, on terminals and in notebooks.
            checkpoint: A file for the state of the fit. Whatever ends it, the same call resumes from there, over the
                same data, also in a DataLoader's random order. It is deleted once the fit is finished.
            checkpoint_every: Seconds between two checkpoints.
            distributed: Whether all processes of `torch.distributed` fit together, each to its share of the rows, to
                the same band. Rows that a `DistributedSampler` repeats count once; checkpoints are numbered.
            collate: As in the constructor, for `data` that are items, and for all items from then on.

        Returns:
            The fitted estimator itself.

        Raises:
            ValueError: If the data, the network or the options do not fit together.
            MemoryError: If the fit would need more than `memory`; the message shows what would fit.
            ArtefactError: If the checkpoint belongs to another fit.
            DistributedFitError: If another process has failed.
        """
        self.spec.forget()
        spec = self.spec if collate is None else replace(self.spec, collate=collate)
        read = partial(spec.read, data, y, n_rows, sample_weight=sample_weight, clusters=clusters)
        group = ProcessGroup() if distributed else driver.OneProcess()
        spec, fits, kept = driver.fit(spec, read, progress, checkpoint, checkpoint_every, group)
        spec.task.check_fits(fits)
        if messages := spec.task.warnings(fits):
            warn(*messages)  # which may be errors: then nothing has changed
        self.spec, self._fits, self._partial, self._calibration = spec, fits, (), None
        if kept is not None:
            kept.remove()
        return self

    def partial_fit(
        self, data: Any, y: Any = None, *, sample_weight: Any = None, n_rows: int | None = None, progress: bool = False
    ) -> Self:
        """Take in some of the training rows, after those of `fit`, `load` or earlier calls: all parts are one fit.

        The fit is completed when a result is requested. New rows end a calibration, with a warning.

        Args:
            data, y, sample_weight: As in `fit`.
            n_rows: How many rows there will be in all, if known: it helps `engine="auto"` to choose.
            progress: Whether to show a progress bar.

        Returns:
            The estimator itself.
        """
        self.spec.forget()
        with PARTIAL_FIT_LOCK:
            so_far = self._partial or (parts.from_fits(self.spec, self._fits) if self._fits else ())
            batches = self.spec.read(data, y, sample_weight=sample_weight)
            new = parts.partial_fit(self.spec, so_far, batches, n_rows, progress)
            self._take_in(so_far, new)
            self.spec = new[0].spec
        return self

    def merge(self, other: Self) -> Self:
        """Add the training rows of another estimator, fitted elsewhere with the same options to the same network.

        Args:
            other: A fitted estimator of the same class.

        Returns:
            The estimator itself.

        Raises:
            ValueError: If options, weights or engines differ.
            TypeError: If it is of another class.
        """
        if type(other) is not type(self):
            raise TypeError(f"merge takes another {type(self).__name__}, got {type(other).__name__}")
        self.spec.forget()
        other.spec.forget()
        parts.check_mergeable((self.spec, self.fits_), (other.spec, other.fits_))
        mine, theirs = parts.from_fits(self.spec, self.fits_), parts.from_fits(other.spec, other.fits_)
        if mine[0].record.shares_rows(theirs[0].record.hashes()):
            warn("most of these rows have been fitted to already, and count twice now: merge bands of other rows")
        with PARTIAL_FIT_LOCK:
            self._take_in(mine, theirs)
        return self

    def _take_in(self, so_far: Sequence[FitAccumulator], new: tuple[FitAccumulator, ...]) -> None:
        for mine, theirs in zip(so_far, new, strict=bool(so_far)):
            mine.check_mergeable(theirs)
        if self._calibration is not None:  # the warning may be an error: then nothing has changed
            warn("new training rows end the calibration, which was for the band without them: calibrate again")
        with uninterrupted():
            for mine, theirs in zip(so_far, new, strict=bool(so_far)):
                mine.merge(theirs)
            self._partial, self._calibration = tuple(so_far) or new, None

    def plan(self, data: Any, y: Any = None, *, n_rows: int | None = None) -> Plan:
        """Show what `fit` would do, reading only the first rows: memory and time of each engine, and the choice.

        Args:
            data, y, n_rows: As in `fit`.

        Returns:
            The plan; printed, a table.

        Raises:
            ValueError: If the data can be read only once.
        """
        batches = self.spec.read(data, y, n_rows)
        if not batches.reiterable:
            raise ValueError(
                "a plan reads the first batch, which an iterator or generator gives only once: give arrays X and y, a "
                "DataLoader, or a list of batches"
            )
        with torch.random.fork_rng(devices=[]):  # a DataLoader draws from it
            return driver.plan(self.spec, batches)

    # --- results

    @property
    def fits_(self) -> tuple[Fit, ...]:
        """The fits: one, or with `per_output=True` one per output; a `NotFittedError` before there is one."""
        with PARTIAL_FIT_LOCK:
            if self._partial:
                self.spec.forget()
                if self.spec.network().fingerprint != self._partial[0].start.weights:
                    raise ValueError("the model's weights have changed before the fit was completed: restore them")
                try:
                    fits = parts.completed(self._partial)
                    self.spec.task.check_fits(fits)
                except Exception:  # the rows are gone: better no band than one without them
                    self._fits, self._partial = (), ()
                    raise
                self._fits, self._partial = fits, ()
                warn(*self.spec.task.warnings(fits))
        if not self._fits:
            name = type(self).__name__
            raise NotFittedError(f"this {name} is not fitted yet: call fit(loader) or fit(X, y) first")
        return self._fits

    @property
    def calibration_(self) -> Calibration | None:
        """What `calibrate` found; None before it."""
        return self._calibration

    @property
    def warnings_(self) -> tuple[str, ...]:
        """The messages of the warnings that `fit` and `calibrate` have issued."""
        messages = self.spec.task.warnings(self.fits_)
        return tuple(dict.fromkeys(messages + ([] if self._calibration is None else self._calibration.warnings())))

    @property
    def model(self) -> nn.Module:
        return self.spec.model

    @property
    def engine(self) -> Engine | str:
        return self.spec.engine or "auto"

    @property
    def damping_(self) -> float | None:
        """λ; None where neither weight_decay nor damping was given."""
        return self.fits_[0].covariance.damping

    @property
    def effective_parameters_(self) -> float | np.ndarray:
        """p*, with `per_output=True` of each output; NaN where λ is not known."""
        return _one(np.array([fit.effective_parameters for fit in self.fits_]))

    @property
    def error_bound_(self) -> float | np.ndarray:
        """An upper bound of ‖JᵀJ − its approximation‖₂; 0 for `Exact`, NaN where nothing is certified."""
        return _one(np.array([fit.covariance.error_bound for fit in self.fits_]))

    @property
    def n_rows_(self) -> int:
        """The number of training rows."""
        return self.fits_[0].n_rows

    @property
    def n_parameters_(self) -> int:
        """The number of trainable parameters of the network that were selected."""
        return self.fits_[0].n_parameters

    def spectrum(self, output: int = 0) -> Spectrum:
        """Return the singular values of J that the engine found, and the matching eigenvalues of Σ⁻¹.

        Args:
            output: With `per_output=True` the number of the fit.

        Returns:
            Singular values and eigenvalues, largest first.
        """
        fits = self.fits_
        check_int(output, "output", 0, len(fits))
        return self._covariance(fits[output]).spectrum()

    def error_report(self, x: Any = None, sample: int | None = None) -> ErrorReport:
        """Return an estimate of how far the widths are from those of `Exact()`, on training rows that `fit` has kept.

        Args:
            x: Rows whose widths are compared; some training rows by default.
            sample: How many training rows to fit to, at most 4,096.

        Returns:
            The estimate, of the worst fit where there are several.

        Raises:
            ValueError: If λ is not known, or too few training rows are left, as in a file saved without `sample=True`.
        """
        fits = self.fits_
        for fit in fits:
            if not fit.covariance.is_exact:
                self._covariance(fit)
        return accuracy.worst_report(self.spec, fits, x, sample)

    def _covariance(self, fit: Fit) -> Covariance:
        if fit.covariance.damping is None:
            raise self.spec.damping.missing(type(self).__name__, self._calibration is not None)
        return fit.covariance

    def summary(self) -> str:
        """Return what was fitted, as text, and estimate an approximation's error if `fit` had no time for it."""
        self._fits = accuracy.compared(self.spec, self.fits_)
        return format_summary(type(self).__name__, self.summary_lines())

    def summary_lines(self) -> list[tuple[str, str]]:
        """Return the lines of the summary as pairs of a label and a text."""
        return summary_lines(self.spec, self.fits_, self._calibration)

    def __repr__(self) -> str:
        if self._fits or self._partial:
            return format_summary(type(self).__name__, self.summary_lines())
        return f"{type(self).__name__}({type(self.model).__name__}, λ {self.spec.damping}, {self.engine!r}), not fitted"

    def _repr_html_(self) -> str:
        """Show in a notebook what was fitted, and its spectrum where that takes a moment only."""
        if not (self._fits or self._partial):
            return element("p", repr(self))
        return summary_html(type(self).__name__, self.summary_lines(), self.fits_[0])

    def to_record(self, *, weights: bool = False, sample: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return everything that a file holds of this estimator, tensors and texts, for `deltaband.storage` to write.

        Args:
            weights, sample: As in `save`.

        Returns:
            The tensors and the texts, by their names in the file.
        """
        about = {"kind": type(self).__name__, "summary": repr(self)}
        return record_of(self.spec, self.fits_, self._calibration, about, weights=weights, sample=sample)

    @classmethod
    def from_stored(cls, stored: StoredBand, model: nn.Module, strict: bool, functions: Mapping[str, Any]) -> Self:
        """Return the estimator of a file, for `deltaband.storage.load`.

        Args:
            stored: The content of the file.
            model, strict, functions: As in `load`.

        Returns:
            The estimator, fitted and calibrated as it was when it was saved.
        """
        check_shapes(stored, model)
        band: Self = cast(Any, cls)(model, **{**stored.options, **functions})
        band._fits, band._calibration = restored(stored, band.spec, strict)
        return band


def _one(values: np.ndarray) -> float | np.ndarray:
    return float(values[0]) if len(values) == 1 else values
