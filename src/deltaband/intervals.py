"""`PredictionIntervals`: fit to a trained network and its training data, then ask for intervals."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from . import data as reading
from .covariance import Covariance, Engine, Spectrum, choose_engine
from .damping import Damping
from .gradients import GradientBatch, Network, plain_autograd
from .result import Intervals, like, parse_levels
from .warning import DeltabandWarning

Array = TypeVar("Array", np.ndarray, Tensor)


class NotFittedError(ValueError, AttributeError):
    """Something was asked that only a fitted band can answer."""


@dataclass(frozen=True)
class _Fit:
    """All that a fit has found out. Set in one piece, so a fit that fails changes nothing."""

    covariance: Covariance  # without a λ if none was given
    rss: float
    n_rows: int
    n_parameters: int
    dtype: torch.dtype
    fingerprint: dict[str, str]

    @property
    def effective_parameters(self) -> float:
        return math.nan if self.covariance.damping is None else self.covariance.effective_parameters

    @property
    def degrees_of_freedom(self) -> float:
        return self.n_rows - self.effective_parameters

    @property
    def noise_std(self) -> float:
        nu = self.degrees_of_freedom
        return math.sqrt(self.rss / nu) if nu > 0 else math.nan


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

    `covariance` is the engine: "auto" (exact where it fits into memory), or one of `Exact()`,
    `ImportantDirections(rank)`, `RobustFrequentDirections(rank)`, `FrequentDirections(rank)`.

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
    ) -> None:
        known = covariance == "auto" if isinstance(covariance, str) else hasattr(covariance, "finalise")
        if isinstance(covariance, type) or not known:
            raise TypeError(f"covariance must be 'auto' or an engine such as Exact(), got {covariance!r}")
        Network(model)  # whatever is wrong with the model is said now
        self.model = model
        self._damping = Damping(damping, weight_decay, loss, batch_size)
        self.covariance = covariance
        self._fit: _Fit | None = None

    def fit(self, data: Any, y: Any = None, *, n_rows: int | None = None, progress: bool = True) -> PredictionIntervals:
        """One pass over the training data: `fit(loader)` with batches `(x, y)`, or `fit(X, y)`.

        `n_rows` is needed only for a loader without a length, and only where λ follows from `weight_decay` while an
        engine needs it from the first row on (`ImportantDirections`).
        """
        network = Network(self.model)
        batches = reading.read(data, y, n_rows)
        engine = self._engine(batches.n_rows, network)
        fingerprint = network.fingerprint()
        rss, count, energy = 0.0, 0, 0.0

        from tqdm.auto import tqdm

        # the bar stays away where the work is done within two seconds
        bar = tqdm(total=batches.n_rows, desc="deltaband", unit=" rows", delay=2, leave=False, disable=not progress)
        with plain_autograd(network.device), bar:
            for x, targets, first in batches.chunks(network.check):
                outputs, gradients = _checked_gradients(network, x, first)
                engine.update(gradients)
                rss += float((targets - outputs.cpu().double()).square().sum())
                energy += float(gradients.squared_norms.sum())
                count += len(x)
                bar.update(len(x))

        if count == 0:
            raise ValueError("the training data are empty (a generator can be read only once): give at least one row")
        if energy == 0.0:
            raise ValueError("the network's output does not depend on any trainable parameter: all gradients are zero")
        if batches.n_rows is not None and count != batches.n_rows:
            raise ValueError(f"{batches.n_rows} rows were announced but {count} came: give n_rows={count}")
        covariance = engine.finalise(self._damping.at(count))
        self._fit = _Fit(covariance, rss, count, network.n_parameters, network.dtype, fingerprint)
        self._warn(self._fit)
        return self

    def predict(
        self,
        x: Array,
        level: float | Sequence[float] = 0.95,
        *,
        kind: Literal["observation", "mean"] = "observation",
    ) -> Intervals:
        """Intervals for the rows of `x`: NumPy in, NumPy out; tensor in, tensor out.

        `kind="observation"` is formula (2) of the paper, for a new observation; `kind="mean"` is the confidence band
        of the regression function itself, √q in place of √(1 + q).
        """
        levels = parse_levels(level)
        if kind not in ("observation", "mean"):
            raise ValueError(f"kind must be 'observation' or 'mean', got {kind!r}")
        fit = self._fitted()
        covariance = self._covariance(fit)
        nu = fit.degrees_of_freedom
        if not nu > 0:
            raise ValueError(
                f"n − p* = {nu:.3g} leaves no degrees of freedom for the noise: the formula has no answer for this "
                "network. Raise the damping, or calibrate on held-out data"
            )
        from scipy.special import stdtrit

        outputs, q = self._ask(x, fit, covariance.variance)
        spread = fit.noise_std * np.sqrt(q + 1.0 if kind == "observation" else q)
        half = spread[:, None] * stdtrit(nu, (1 + np.asarray(levels)) / 2)  # (n, levels)
        if np.ndim(level) == 0:
            half = half[:, 0]
            lower, upper = outputs - half, outputs + half
        else:
            lower, upper = outputs[:, None] - half, outputs[:, None] + half
        mean, lower, upper = (like(x, part, fit.dtype) for part in (outputs, lower, upper))
        return Intervals(mean, lower, upper, levels[0] if np.ndim(level) == 0 else levels)

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
        """‖JᵀJ − what a sketch holds of it‖₂ is at most this; 0 for `Exact`."""
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
        fit = self._fitted()
        rows = [
            ("network", f"{type(self.model).__name__}, {fit.n_parameters:,} trainable parameters (p)"),
            ("training rows", f"{fit.n_rows:,} (n)"),
            ("training RMSE", f"{math.sqrt(fit.rss / fit.n_rows):.4g}"),
        ]
        rows.append(("covariance", fit.covariance.describe()))
        if fit.covariance.damping is None:
            rows.append(("damping λ", "not given: predict needs weight_decay or damping"))
        else:
            rows += [
                ("damping λ", f"{fit.covariance.damping:.4g} ({self._damping})"),
                ("effective p*", f"{fit.effective_parameters:.1f} ({fit.effective_parameters / fit.n_rows:.0%} of n)"),
                ("degrees of freedom", f"{fit.degrees_of_freedom:.1f} (n − p*)"),
                ("noise std s", f"{fit.noise_std:.4g}"),
            ]
        return "\n".join(["PredictionIntervals", *(f"  {name:<20}{value}" for name, value in rows)])

    def __repr__(self) -> str:
        if self._fit is not None:
            return self.summary()
        return f"PredictionIntervals({type(self.model).__name__}, λ {self._damping}, {self.covariance!r}), not fitted"

    def _engine(self, n_rows: int | None, network: Network) -> Engine:
        """A fresh accumulator."""
        damping = self._damping.at(n_rows)
        engine = self.covariance
        if isinstance(engine, str):
            engine = choose_engine(n_rows, network.n_parameters, network.dtype.itemsize)
        if engine.needs_damping and damping is None:
            raise ValueError(
                f"{type(engine).__name__} needs λ from the first row on: "
                + (
                    "give weight_decay or damping, or use Exact or RobustFrequentDirections"
                    if self._damping.weight_decay is None
                    else "λ follows from the number of rows, which this loader does not tell; give fit(..., n_rows=...)"
                )
            )
        return engine.start(n_rows=n_rows, damping=damping)

    def _ask(self, x: Any, fit: _Fit, question: Callable[[GradientBatch], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Outputs and the covariance's answer for each row of `x`, both (n,) in float64."""
        network = Network(self.model)
        self._compare_weights(network, fit)
        X = reading.inputs(x)
        reading.check_finite(X, "inputs")
        if len(X) == 0:
            return np.zeros(0), np.zeros(0)
        answers = []
        with plain_autograd(network.device):
            rows = network.check(X)
            for first in range(0, len(X), rows):
                outputs, gradients = _checked_gradients(network, X[first : first + rows], first)
                answers.append((outputs.cpu().double().numpy(), question(gradients)))
        return np.concatenate([a for a, _ in answers]), np.concatenate([b for _, b in answers])

    def _fitted(self) -> _Fit:
        if self._fit is None:
            raise NotFittedError("this PredictionIntervals is not fitted yet: call fit(loader) or fit(X, y) first")
        return self._fit

    def _covariance(self, fit: _Fit) -> Covariance:
        if fit.covariance.damping is None:
            raise ValueError(
                "λ is not known: give PredictionIntervals the optimiser's weight_decay= or damping=, and fit again, "
                "or calibrate on held-out data"
            )
        return fit.covariance

    def _compare_weights(self, network: Network, fit: _Fit) -> None:
        if network.n_parameters != fit.n_parameters:
            raise ValueError(
                f"the model has {network.n_parameters:,} trainable parameters now and had {fit.n_parameters:,} at fit: "
                "call fit again"
            )
        now = network.fingerprint()
        if now == fit.fingerprint:
            return
        changed = next(name for name in {**fit.fingerprint, **now} if now.get(name) != fit.fingerprint.get(name))
        warnings.warn(
            f"the model's weights have changed since fit (first: {changed!r}): predictions come from the new weights, "
            "the width of the intervals from the old ones; call fit again",
            DeltabandWarning,
            stacklevel=4,
        )

    def _warn(self, fit: _Fit) -> None:
        if fit.covariance.damping is None:
            return
        n, nu, p_star = fit.n_rows, fit.degrees_of_freedom, fit.effective_parameters
        missed = fit.covariance.missed_parameters
        messages = []
        if nu <= 0:
            messages.append(
                f"n − p* = {nu:.3g} is not positive: the formula has no answer; raise the damping, or calibrate"
            )
        elif p_star > n / 2 or nu < 10:
            messages.append(
                f"the network has p* = {p_star:.1f} effective parameters for n = {n} rows: the formula is unreliable "
                "here (often far too wide); calibrate on held-out data, or raise the damping if the network was "
                "trained with more regularisation"
            )
        # More than 5 % of the degrees of freedom shows in s, more than half of p* in q.
        if missed > min(0.05 * max(nu, 0.0), 0.5 * p_star):
            messages.append(
                f"the sketch may miss up to {missed:.0f} effective parameters (it found {p_star:.1f}, n = {n}): "
                "raise the rank, or use Exact() if memory allows"
            )
        for message in messages:
            warnings.warn(message, DeltabandWarning, stacklevel=3)


def _checked_gradients(network: Network, x: Tensor, first: int) -> tuple[Tensor, GradientBatch]:
    outputs, gradients = network.gradients(x)
    advice = "look at the scale of that row, and for NaN among the weights"
    reading.check_finite(outputs, "the network's outputs", first, advice)
    reading.check_finite(torch.from_numpy(gradients.squared_norms), "the network's gradients", first, advice)
    return outputs, gradients
