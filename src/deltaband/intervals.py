"""`PredictionIntervals`: fit to a trained network and its training data, then ask for intervals."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from . import data as reading
from . import error, fitting
from .asking import ask, check_outputs
from .batch import GradientBatch
from .calibration import (
    Calibration,
    ConformalScale,
    Scales,
    Side,
    cross_calibrated_score,
    drift,
    scale_variances,
)
from .covariance import Covariance, Engine, Plan, Spectrum
from .damping import Damping
from .error import ErrorReport
from .fitted import Fit
from .gradients import Network
from .metrics import interval_scores
from .result import Intervals, like, parse_levels
from .summary import describe
from .trace import pair_hashes
from .warning import DeltabandWarning

Array = TypeVar("Array", np.ndarray, Tensor)


class NotFittedError(ValueError, AttributeError):
    """Something was asked that only a fitted band can answer."""


class PredictionIntervals:
    """Prediction intervals for a trained regression network by the delta method.

        ŷ ± t_{n−p*}(α/2) · s · √(1 + q),    q = gᵀ A⁻¹ JᵀJ A⁻¹ g,    A = JᵀJ + λI

    `g` is the gradient of the network's output with respect to its trainable parameters, the rows of `J` are the
    gradients at the training rows, `s² = RSS/(n − p*)`. The formula assumes that the network was trained to (near) a
    minimum of `Σ (y − ŷ)² + λ‖w‖²`; λ follows from the optimiser's `weight_decay` and the loss it was given:

    ============  =======================================  =============
    loss          what was minimised, b the batch size      λ
    ============  =======================================  =============
    "mean"        mean of squares over the batch            n·wd/2
    "half_mean"   half of that                              n·wd
    "sum"         sum of squares over the batch             n·wd/(2b)
    ============  =======================================  =============

    or is given as `damping`. Only squared losses are covered.

    `covariance` is the engine: "auto", or one of `Exact()`, `Nystrom(landmarks)`, `RandomProjection(dim)`,
    `ImportantDirections(rank)`, `RobustFrequentDirections(rank)`, `FrequentDirections(rank)`. "auto" is exact where
    that fits into `memory` bytes (by default half of what is free) and the best approximation where it does not;
    `plan(loader)` shows what it will be. A fit that would need more than `memory` is refused before it starts.

    The model itself is never changed, nor switched to eval mode: all work happens on a private eval-mode twin.
    `predict` can be called from several threads.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        weight_decay: float | None = None,
        damping: float | None = None,
        loss: Literal["mean", "half_mean", "sum"] = "mean",
        batch_size: int | None = None,
        covariance: Engine | Literal["auto"] = "auto",
        memory: float | None = None,
    ) -> None:
        known = covariance == "auto" if isinstance(covariance, str) else hasattr(covariance, "finalise")
        if isinstance(covariance, type) or not known:
            raise TypeError(f"covariance must be 'auto' or an engine such as Exact(), got {covariance!r}")
        if memory is not None and (isinstance(memory, bool) or not isinstance(memory, Real) or not 0 < memory < np.inf):
            raise ValueError(f"memory must be a positive number of bytes, got {memory!r}")
        Network(model)  # whatever is wrong with the model is said now
        self.model = model
        self._damping = Damping(damping, weight_decay, loss, batch_size)
        self.covariance = covariance
        self.memory = memory
        self._fit: Fit | None = None
        self._calibration: Calibration | None = None

    def fit(self, data: Any, y: Any = None, *, n_rows: int | None = None, progress: bool = True) -> PredictionIntervals:
        """One pass over the training data: `fit(loader)` with batches `(x, y)`, or `fit(X, y)`.

        An engine that wants a sample of the rows first (`Nystrom`) needs data that can be read twice.
        `n_rows` is needed only for a loader without a length, and only where λ follows from `weight_decay` while an
        engine needs it from the first row on (`ImportantDirections`).
        """
        batches = reading.read(data, y, n_rows)
        fit = fitting.fit(self.model, batches, self._engine, self._damping, self.memory, progress)
        _warn(fit.warnings())  # which may be errors: then nothing has changed
        self._fit, self._calibration = fit, None
        return self

    def plan(self, data: Any, y: Any = None, *, n_rows: int | None = None) -> Plan:
        """What `fit` with the same arguments would do: the memory and time of each engine, and the choice.

        Only the first rows are looked at.
        """
        batches = reading.read(data, y, n_rows)
        if not batches.twice:
            raise ValueError("a plan looks at the first batch, which an iterator or generator gives only once")
        with torch.random.fork_rng(devices=[]):  # a DataLoader draws from it
            return fitting.planned(Network(self.model), batches, self._engine, self._damping, self.memory)[0]

    def error_report(self, x: Any = None, sample: int | None = None) -> ErrorReport:
        """How far the widths are from those of `Exact()`, estimated: for the rows `x`, or for some training rows.

        The engine and the exact method are both fitted to up to `sample` of the training rows that `fit` has kept, at
        most 4,096, and compared. `fit` does it by itself, and warns where the widths are off by more than 5 %.
        """
        fit = self._fitted()
        least = error.FEWEST_ROWS
        if sample is not None and (
            isinstance(sample, bool) or not isinstance(sample, int | np.integer) or sample < least
        ):
            raise ValueError(f"sample must be a whole number ≥ {least}, got {sample!r}")
        network = Network(self.model)
        if x is not None:
            x = reading.inputs(x)
            reading.check_finite(x, "inputs")
            if len(x) == 0:
                raise ValueError("x has no rows: give some, or none at all for an estimate over training rows")
            network.check(x)
        if fit.covariance.error_bound == 0.0:
            return ErrorReport(0.0, 0.0, 0.0, 0, repr(fit.engine))
        self._covariance(fit)
        if fit.sample is None:
            raise ValueError(f"an estimate needs {least} training rows, and memory for the exact method on them")
        self._check_weights(network, fit)
        return error.report(self.model, fit, x, sample or error.MOST_ROWS)

    def calibrate(self, data: Any, y: Any = None, *, tune: bool = True, seed: int = 0) -> PredictionIntervals:
        """Make the intervals honest with held-out rows: `calibrate(x, y)`, or `calibrate(loader)`.

        Afterwards `predict` is conformal: for rows exchangeable with the calibration rows (and not used in training)
        an interval covers with probability at least its level, whatever the network and however it was trained; on
        average over calibration sets, not for each x. Forecasts and drifting data are not exchangeable.

        The width is proportional to σ(x) = √(1 + b·q_λ(x)). With `tune=True` λ and b are chosen, from a grid that
        includes the constant width b = 0, for each prediction anew by a likelihood in which its own unknown residual
        takes part: that keeps the guarantee exact although every calibration row serves both the choice and the
        quantile. With `tune=False` λ is that of the fit and b = 1; the coverage then is at most 1/(n+1) above its
        level. `seed` only draws the folds for the interval score that `summary()` shows.
        """
        fit = self._fitted()
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
            raise ValueError(f"seed must be a whole number ≥ 0, got {seed!r}")
        batches = reading.read(data, y)
        network = Network(self.model, fit.asked_layers)
        self._check_weights(network, fit)
        covariance, scales = self._scales(fit, tune)

        def questions(g: GradientBatch) -> np.ndarray:  # (b, 2 + scales)
            formula = np.full(len(g), np.nan) if fit.covariance.damping is None else fit.covariance.variance(g)
            return np.column_stack([formula, fit.reference.leverage(g), scale_variances(covariance, g, scales)])

        parts = []
        for x, targets, first in batches.chunks(lambda x: max(network.check(x), fit.rows_at_once)):
            outputs, answers = ask(network, x, questions, fit.rows_at_once, first)
            parts.append((targets.numpy() - outputs, answers, pair_hashes(network.prepare(x), targets)))
        if not parts:
            raise ValueError("the calibration data are empty (a generator can be read only once)")
        r, answers, hashes = (np.concatenate(part) for part in zip(*parts, strict=True))
        formula, h, q = answers[:, 0], answers[:, 1], answers[:, 2:]
        half = fit.student(0.95) * np.sqrt(1 + formula) if fit.degrees_of_freedom > 0 else np.full(len(r), np.nan)
        calibration = Calibration(
            covariance,
            ConformalScale(r, q, scales),
            score_before=float(interval_scores(r, -half, half, 0.95).mean()),
            score_after=cross_calibrated_score(r, q, scales, seed),
            drift=drift(fit.leverages, h),
            seen=fit.seen.share(hashes),
            repeated=fit.seen.repeated,
        )
        _warn(calibration.warnings())
        self._calibration = calibration
        return self

    def predict(
        self,
        x: Array,
        level: float | Sequence[float] = 0.95,
        *,
        kind: Literal["observation", "mean"] = "observation",
        side: Side = "both",
    ) -> Intervals:
        """Intervals for the rows of `x`: NumPy in, NumPy out; tensor in, tensor out.

        `kind="observation"` is for a new observation: formula (2) of the paper, or conformal after `calibrate`.
        `kind="mean"` is the confidence band of the regression function itself, √q in place of √(1 + q), by the formula
        always. `side="upper"` and `side="lower"` give one bound at the level, the other is infinite.
        """
        levels = parse_levels(level)
        if kind not in ("observation", "mean"):
            raise ValueError(f"kind must be 'observation' or 'mean', got {kind!r}")
        if not isinstance(side, str) or side not in ("both", "lower", "upper"):
            raise ValueError(f"side must be 'both', 'lower' or 'upper', got {side!r}")
        fit, calibration = self._fitted(), self._calibration
        if kind == "observation" and calibration is not None:
            outputs, q = self._ask(x, fit, calibration.variances)
            lower, upper = calibration.conformal.bounds(q, levels, side)
            # residuals may be tied, and the same output differ by a rounding from batch to batch
            slack = 2 * torch.finfo(fit.dtype).eps * np.abs(outputs)[:, None]
            lower, upper = lower - slack, upper + slack
        else:
            outputs, q = self._ask(x, fit, self._formula(fit).variance)
            spread = np.sqrt(q + 1.0 if kind == "observation" else q)
            half = np.stack([fit.student(level, side) * spread for level in levels], axis=1)
            infinite = np.full_like(half, np.inf)
            lower, upper = -infinite if side == "upper" else -half, infinite if side == "lower" else half
        lower, upper = outputs[:, None] + lower, outputs[:, None] + upper
        if np.ndim(level) == 0:
            lower, upper = lower[:, 0], upper[:, 0]
        mean = like(x, outputs, fit.dtype)
        lower, upper = like(x, lower, fit.dtype, -np.inf), like(x, upper, fit.dtype, np.inf)
        return Intervals(mean, lower, upper, levels[0] if np.ndim(level) == 0 else levels)

    def prediction(self, x: Array) -> Array:
        """ŷ alone, with the checks of `predict` and without its gradients."""
        fit = self._fitted()
        return like(x, self._ask(x, fit)[0], fit.dtype)

    def prediction_and_scale(self, x: Array) -> tuple[Array, Array]:
        """ŷ and σ(x), which the width of an interval is proportional to: √(1 + q), or √(1 + b·q) after `calibrate`.

        After `calibrate` with `tune=True` it is the scale that the calibration rows alone would choose. Who takes a
        conformal quantile of their own with it should do so on other rows: on the same ones the guarantee is lost.
        """
        fit, calibration = self._fitted(), self._calibration
        if calibration is None:
            outputs, q = self._ask(x, fit, self._covariance(fit).variance)
            scale = np.sqrt(1 + q)
        else:
            outputs, q = self._ask(x, fit, calibration.variances)
            scale = calibration.conformal.scale(q)
        return like(x, outputs, fit.dtype), like(x, scale, fit.dtype)

    def variance(self, x: Array) -> Array:
        """q = gᵀ A⁻¹JᵀJA⁻¹ g, the variance of the prediction in units of the noise variance s².

        It ignores directions that the training data never touched: far outside the data it can stay small.
        """
        fit = self._fitted()
        return like(x, self._ask(x, fit, self._covariance(fit).variance)[1], fit.dtype)

    def leverage(self, x: Array) -> Array:
        """h = gᵀ A⁻¹ g, how far a row is from what the training data determine; it grows where `variance` may not."""
        fit = self._fitted()
        return like(x, self._ask(x, fit, self._covariance(fit).leverage)[1], fit.dtype)

    def spectrum(self) -> Spectrum:
        """The singular values of J that the engine recovered, and the matching eigenvalues of Σ⁻¹."""
        return self._covariance(self._fitted()).spectrum()

    @property
    def damping_(self) -> float | None:
        """λ; None where neither weight_decay nor damping was given."""
        return self._fitted().covariance.damping

    @property
    def noise_std_(self) -> float:
        """s, in the units of the target; NaN where n − p* ≤ 0 or λ is not known."""
        return self._fitted().noise_std

    @property
    def effective_parameters_(self) -> float:
        """p*; NaN where λ is not known."""
        return self._fitted().effective_parameters

    @property
    def error_bound_(self) -> float:
        """‖JᵀJ − what stands in for it‖₂ is at most this; 0 for `Exact`, NaN for `RandomProjection`: not certified."""
        return self._fitted().covariance.error_bound

    @property
    def n_rows_(self) -> int:
        """Training rows seen by `fit`."""
        return self._fitted().n_rows

    @property
    def n_parameters_(self) -> int:
        """Trainable parameters of the network."""
        return self._fitted().n_parameters

    def summary(self) -> str:
        """What was fitted, on one screen."""
        return describe(self.model, self._fitted(), self._damping, self._calibration)

    def __repr__(self) -> str:
        if self._fit is not None:
            return self.summary()
        return f"PredictionIntervals({type(self.model).__name__}, λ {self._damping}, {self.covariance!r}), not fitted"

    @property
    def _engine(self) -> Engine | None:
        return None if isinstance(self.covariance, str) else self.covariance

    def _ask(
        self, x: Any, fit: Fit, question: Callable[[GradientBatch], np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Outputs (n,) in float64 and the answer for each row of `x`; no gradients where there is no question."""
        network = Network(self.model, fit.asked_layers)
        if changed := self._changed_weights(network, fit):
            warnings.warn(
                f"the model's weights have changed since fit (first: {changed!r}): predictions come from the new "
                "weights, the width of the intervals from the old ones; call fit again",
                DeltabandWarning,
                stacklevel=3,
            )
        X = reading.inputs(x)
        reading.check_finite(X, "inputs")
        if len(X) == 0:
            return np.zeros(0), np.zeros(0)
        if question is not None:
            return ask(network, X, question, fit.rows_at_once)
        network.check(X)
        outputs = network.outputs(X)
        check_outputs(outputs)
        return outputs.cpu().double().numpy(), np.zeros(0)

    def _scales(self, fit: Fit, tune: bool) -> tuple[Covariance, Scales]:
        if tune:
            spectral = fit.covariance.diagonalised()
            return spectral, Scales.grid(spectral.eigenvalues, fit.n_rows)
        if fit.covariance.damping is None:
            raise ValueError("tune=False takes λ from the fit, which has none: give weight_decay or damping, or tune")
        return fit.covariance, Scales.single(fit.covariance.damping)

    def _formula(self, fit: Fit) -> Covariance:
        """The covariance, where formula (2) has an answer."""
        covariance = self._covariance(fit)
        if not fit.degrees_of_freedom > 0:
            raise ValueError(
                f"n − p* = {fit.degrees_of_freedom:.3g} leaves no degrees of freedom for the noise: the formula has no "
                "answer for this network. Raise the damping, or calibrate on held-out data"
            )
        return covariance

    def _fitted(self) -> Fit:
        if self._fit is None:
            raise NotFittedError("this PredictionIntervals is not fitted yet: call fit(loader) or fit(X, y) first")
        return self._fit

    def _covariance(self, fit: Fit) -> Covariance:
        if fit.covariance.damping is None:
            raise ValueError(
                "λ is not known: give PredictionIntervals the optimiser's weight_decay= or damping=, and fit again; "
                + (
                    "a calibration stands in for it only in the intervals of new observations"
                    if self._calibration is not None
                    else "or calibrate on held-out data for prediction intervals without it"
                )
            )
        return fit.covariance

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
        now = network.fingerprint()
        return next((name for name in {**fit.fingerprint, **now} if now.get(name) != fit.fingerprint.get(name)), None)


def _warn(messages: list[str]) -> None:
    for message in messages:
        warnings.warn(message, DeltabandWarning, stacklevel=3)
