"""`PredictionIntervals`: fit to a trained network and its training data, then ask for intervals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from .calibration.calibrate import calibrated
from .calibration.conformal import Calibration, Side
from .damping import Damping
from .display.summary import Line, describe, screen
from .engines import Covariance, Engine
from .errors import warn
from .fitting import partial as growth
from .fitting.band import Band, Question
from .fitting.checkpoint import EVERY, Checkpoint
from .fitting.fit import Fit
from .network.network import Head
from .network.parameter_selection import ParameterChoice
from .results import Intervals, like, parse_levels
from .target_transform import Units
from .validation import whole_numbers

if TYPE_CHECKING:  # matplotlib is an extra
    from matplotlib.axes import Axes

FINISHING = threading.RLock()  # several threads may ask a band that has rows to take in


class PredictionIntervals(Band):
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

    or is given as `damping`. Only squared losses are covered. A mean over several outputs has n·m in the place of n.

    A network with m outputs gets an interval for each. JᵀJ sums over the outputs, as the training loss did: weights
    that they share have learnt from all of them. `per_output=True` takes each output alone, which is wider. `outputs`
    restricts all of it to some of them.

    `engine` computes the covariance: "auto", or one of `Exact()`, `Nystrom(landmarks)`, `RandomProjection(dim)`,
    `ImportantDirections(rank)`, `RobustFrequentDirections(rank)`, `FrequentDirections(rank)`. "auto" is exact where
    that fits into `memory` bytes (by default half of what is free) and the best approximation where it does not;
    `plan(loader)` shows what it will be. A fit that would need more than `memory` is refused before it starts.

    `parameters` restricts the gradients to some of the trainable parameters: "last", names such as ["head.*"], or a
    function of name and parameter. `output` picks the prediction from what the model returns, `batch` inputs and
    targets from what a loader gives. Inputs may be several, in a tuple, or have names, in a dictionary.

    `target_transform=(mean, std)`, or a scaler with `inverse_transform`, is what the targets went through before
    training: `fit` and `calibrate` take them as the network was trained on, `predict` answers in the original units.

    The model itself is never changed, nor switched to eval mode: all work happens on a private eval-mode copy.
    `predict` can be called from several threads.
    """

    _held = ("_fits", "_calibration")

    def __init__(
        self,
        model: nn.Module,
        *,
        weight_decay: float | None = None,
        damping: float | None = None,
        loss: Literal["mean", "half_mean", "sum"] = "mean",
        batch_size: int | None = None,
        engine: Engine | Literal["auto"] = "auto",
        memory: float | None = None,
        outputs: int | Sequence[int] | None = None,
        per_output: bool = False,
        parameters: ParameterChoice = "all",
        output: Callable[[Any], Tensor] | None = None,
        batch: Callable[[Any], tuple[Any, Any]] | None = None,
        target_transform: Any = None,
    ) -> None:
        rule = Damping(damping, weight_decay, loss, batch_size)
        if loss == "cross_entropy":  # type: ignore[comparison-overlap]
            raise ValueError("PredictionIntervals is for squared losses: a classifier needs ClassificationIntervals")
        refusal = "outputs must be the number of an output or a list of numbers"
        self._outputs = None if outputs is None else whole_numbers(outputs, refusal)
        self._one_output = isinstance(outputs, int | np.integer)
        self._units = Units.of(target_transform)
        self._calibration: Calibration | None = None
        self._growing: tuple[growth.Growing, ...] = ()
        super().__init__(model, rule, engine, memory, parameters, output, batch, per_output)

    def fit(
        self,
        data: Any,
        y: Any = None,
        *,
        n_rows: int | None = None,
        progress: bool = True,
        checkpoint: str | Path | None = None,
        checkpoint_every: float = EVERY,
        distributed: bool = False,
    ) -> PredictionIntervals:
        """One pass over the training data: `fit(loader)` with batches `(x, y)`, or `fit(X, y)`.

        An engine that wants a sample of the rows first (`Nystrom`) needs data that can be read twice, and so does
        `per_output=True`. `n_rows` is needed only for a loader without a length, and only where λ follows from
        `weight_decay` while an engine needs it from the first row on (`ImportantDirections`).

        With `checkpoint` what was taken in is written to that file about every `checkpoint_every` seconds. Whatever
        ends the fit, the same call goes on from there, over the same data in the same order: a DataLoader's random
        order is had again, and rows that are other ones are an error. The file is there until the fit is finished.

        With `distributed=True` all processes of `torch.distributed` call `fit` together, each with its share of the
        rows, and end with the same band, of all rows. Rows that a `DistributedSampler` gives twice count once. Each
        process has a checkpoint of its own, whose name ends in its number: fit.0.ckpt.
        """
        if distributed:
            from .fitting import distributed as processes

            fits, kept = processes.fits(
                self, partial(self._read, data, y, n_rows), progress, checkpoint, checkpoint_every
            )
        else:
            batches = self._read(data, y, n_rows)
            kept = None if checkpoint is None else Checkpoint(self, checkpoint, checkpoint_every, batches)
            fits = self._fit_to(batches, progress, checkpoint=kept)
        # which may be errors: then nothing has changed
        _warn(list(dict.fromkeys(message for fit in fits for message in fit.warnings())))
        self._fits, self._growing, self._calibration = fits, (), None
        if kept is not None:
            kept.remove()
        return self

    def partial_fit(
        self, data: Any, y: Any = None, *, n_rows: int | None = None, progress: bool = False
    ) -> PredictionIntervals:
        """Take in some of the training rows, after those that are there already: of `fit`, of `load`, or of
        `partial_fit` itself. All parts together are one fit; what they amount to is worked out when it is asked for.

        `n_rows` is how many rows there will be in all, if that is known: with the first part it helps `"auto"` to
        choose, and `ImportantDirections` needs it where λ follows from `weight_decay`. `Nystrom` draws its landmarks
        from the first part. A calibration ends with new rows, with a warning.
        """
        with FINISHING:
            growing = self._growing or (growth.resumed(self, self._fits) if self._fits else ())
            self._take_in(growing, growth.taken_in(self, growing, data, y, n_rows, progress))
        return self

    def merge(self, other: PredictionIntervals) -> PredictionIntervals:
        """Add the training rows of another band, fitted elsewhere with the same options to the same network."""
        growth.check_alike(self, other)
        mine, theirs = (growth.resumed(band, band._fitted()) for band in (self, other))
        if mine[0].rows.shares_rows(theirs[0].rows.hashes):
            _warn(["most of these rows have been fitted to already, and count twice now: merge bands of other rows"])
        with FINISHING:
            self._take_in(mine, theirs)
        return self

    def _take_in(self, growing: tuple[growth.Growing, ...], new: tuple[growth.Growing, ...]) -> None:
        if growing:
            growth.check(growing, new)
        if self._calibration is not None:  # which may be an error: then nothing has changed
            _warn(["new training rows end the calibration, which was for the band without them: calibrate again"])
        self._growing = growth.merged(growing, new) if growing else new
        self._calibration = None

    def _fitted(self) -> tuple[Fit, ...]:
        with FINISHING:
            if self._growing:
                try:
                    fits = tuple(
                        replace(rows.finish(self._damping, self._noise), outputs=outputs)
                        for rows, outputs in self._growing
                    )
                except BaseException:  # the rows are gone: better no band than the one without them
                    self._fits, self._growing = (), ()
                    raise
                self._fits, self._growing = fits, ()
                _warn(list(dict.fromkeys(message for fit in fits for message in fit.warnings())))
        return super()._fitted()

    def calibrate(
        self, data: Any, y: Any = None, *, tune: bool = True, joint: bool = False, seed: int = 0
    ) -> PredictionIntervals:
        """Make the intervals honest with held-out rows: `calibrate(x, y)`, or `calibrate(loader)`.

        Afterwards `predict` is conformal: for rows exchangeable with the calibration rows (and not used in training)
        an interval covers with probability at least its level, whatever the network and however it was trained; on
        average over calibration sets, not for each x. Forecasts and drifting data are not exchangeable.

        The width is proportional to σ(x) = √(1 + b·q_λ(x)). With `tune=True` λ and b are chosen, from a grid that
        includes the constant width b = 0, for each prediction anew by a likelihood in which its own unknown residual
        takes part: that keeps the guarantee exact although every calibration row serves both the choice and the
        quantile. With `tune=False` λ is that of the fit and b = 1; the coverage then is at most 1/(n+1) above its
        level.

        Each output is calibrated on its own. With `joint=True` all outputs of a row are covered at once at the level; a
        third of the rows, drawn with `seed`, then serves the choice and the others the quantile. Else `seed` only draws
        the folds for the interval score that `summary()` shows.
        """
        fits = self._fitted()
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
            raise ValueError(f"seed must be a whole number ≥ 0, got {seed!r}")
        networks = [self._network(self._fitted_head(fit.outputs), fit) for fit in fits]
        self._check_weights(networks[0], fits[0])
        chosen = tuple(o for fit in fits for o in fit.outputs)
        n_returned = fits[0].n_returned

        def residuals(outputs: np.ndarray, targets: Tensor) -> np.ndarray:
            return self._columns(chosen, targets, n_returned).numpy() - outputs

        batches = self._read(data, y)
        calibration = calibrated(fits, networks, batches, residuals, tune=tune, joint=joint, seed=seed)
        _warn(calibration.warnings())
        self._calibration = calibration
        return self

    def predict(
        self,
        x: Any,
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
        fits, calibration = self._fitted(), self._calibration if kind == "observation" else None
        questions = [self._formula(fit).variance for fit in fits] if calibration is None else calibration.questions
        outputs, q = self._asked(x, questions)
        if side != "both" and self._units.falling(outputs):
            side = "lower" if side == "upper" else "upper"
        if calibration is not None:
            if len(outputs):
                lower, upper = calibration.conformal.bounds(q, levels, side)
                # residuals may be tied, and the same output differ by a rounding from batch to batch
                slack = 2 * torch.finfo(fits[0].dtype).eps * np.abs(outputs)[:, :, None]
                lower, upper = lower - slack, upper + slack
            else:
                lower = upper = np.zeros((*outputs.shape, len(levels)))
        else:
            variance = np.stack(q, axis=1)  # (n, m)
            spread = np.sqrt(variance + 1.0 if kind == "observation" else variance)
            student = [np.concatenate([fit.student(each, side) for fit in fits]) for each in levels]  # each (m,)
            half = np.stack([spread * each for each in student], axis=2)  # (n, m, levels)
            infinite = np.full_like(half, np.inf)
            lower, upper = -infinite if side == "upper" else -half, infinite if side == "lower" else half
        lower, upper = outputs[:, :, None] + lower, outputs[:, :, None] + upper
        if np.ndim(level) == 0:
            lower, upper = lower[:, :, 0], upper[:, :, 0]
        lower, upper = self._units.bounds(outputs, lower, upper)
        return Intervals(
            self._like(x, self._units.original(outputs)),
            self._like(x, lower, -np.inf),
            self._like(x, upper, np.inf),
            levels[0] if np.ndim(level) == 0 else levels,
        )

    def predict_mean(self, x: Any) -> Any:
        """ŷ alone, with the checks of `predict` and without its gradients."""
        self._fitted()
        return self._like(x, self._units.original(self._asked(x)[0]))

    def predict_mean_and_scale(self, x: Any) -> tuple[Any, Any]:
        """ŷ and σ(x), which the width of an interval is proportional to: √(1 + q), or √(1 + b·q) after `calibrate`.

        After `calibrate` with `tune=True` it is the scale that the calibration rows alone would choose. Who takes a
        conformal quantile of their own with it should do so on other rows: on the same ones the guarantee is lost.
        """
        fits, calibration = self._fitted(), self._calibration
        if calibration is None:
            outputs, q = self._asked(x, [self._covariance(fit).variance for fit in fits])
            scale = np.sqrt(1 + np.stack(q, axis=1))
        else:
            outputs, q = self._asked(x, calibration.questions)
            scale = calibration.conformal.scale(q) if len(outputs) else outputs
        return self._like(x, self._units.original(outputs)), self._like(x, scale)

    def variance(self, x: Any) -> Any:
        """q = gᵀ A⁻¹JᵀJA⁻¹ g, the variance of the prediction in units of the noise variance s².

        It ignores directions that the training data never touched: far outside the data it can stay small.
        """
        _, q = self._asked(x, [self._covariance(fit).variance for fit in self._fitted()])
        return self._like(x, np.stack(q, axis=1))

    def leverage(self, x: Any) -> Any:
        """h = gᵀ A⁻¹ g, how far a row is from what the training data determine; it grows where `variance` may not."""
        _, h = self._asked(x, [self._covariance(fit).leverage for fit in self._fitted()])
        return self._like(x, np.stack(h, axis=1))

    def plot(
        self,
        x: Any,
        y: Any = None,
        *,
        level: float | Sequence[float] = 0.95,
        output: int | None = None,
        data: tuple[Any, Any] | None = None,
        ax: Axes | None = None,
    ) -> Axes:
        """The band over an `x` of one feature, with its targets `y` and training `data=(x, y)` where given; for other
        inputs the intervals sorted by width, which takes `y`. `output` is the one to show, of several."""
        from . import plots

        return plots.fitted(self.predict(x, level), x, y, output=output, data=data, ax=ax)

    @property
    def noise_std_(self) -> float | np.ndarray:
        """s of each output, in the units of the target; NaN where n − p* ≤ 0 or λ is not known.

        With a scaler as `target_transform` it is in the units of the network.
        """
        noise = self._units.length(np.concatenate([fit.noise_std for fit in self._fitted()]))
        return float(noise[0]) if self._is_single else noise

    @property
    def outputs_(self) -> tuple[int, ...]:
        """Which of the network's outputs there are intervals for."""
        return tuple(o for fit in self._fitted() for o in fit.outputs)

    @property
    def warnings_(self) -> tuple[str, ...]:
        """What `fit` and `calibrate` have warned of."""
        said = [message for fit in self._fitted() for message in fit.warnings()]
        return tuple(dict.fromkeys(said + (self._calibration.warnings() if self._calibration is not None else [])))

    def summary(self) -> str:
        """What was fitted, on one screen."""
        return screen("PredictionIntervals", self._described())

    def __repr__(self) -> str:
        if self._fits or self._growing:
            return self.summary()
        return f"PredictionIntervals({type(self.model).__name__}, λ {self._damping}, {self.engine!r}), not fitted"

    def _described(self) -> list[Line]:
        return describe(self.model, self._fitted(), self._damping, self._calibration)

    # --- what a file holds

    def _options(self) -> dict[str, Any]:
        outputs = self._outputs
        affine = self._units.mean is not None
        return {
            **super()._options(),
            "loss": self._damping.loss,
            "batch_size": self._damping.batch_size,
            "outputs": outputs[0] if outputs is not None and self._one_output else outputs,
            **({"target_transform": (self._units.mean, self._units.std)} if affine else {}),
        }

    def _functions(self) -> dict[str, str]:
        scaler = self._units.scaler
        return super()._functions() | ({} if scaler is None else {"target_transform": type(scaler).__name__})

    def _about(self) -> dict[str, Any]:
        calibration = self._calibration
        return {
            "noise_std": np.atleast_1d(self.noise_std_).tolist(),
            "calibration_rows": None if calibration is None else calibration.n_rows,
        }

    # --- what of the network's outputs is asked about

    def _groups(self, n_returned: int) -> list[tuple[int, ...]]:
        chosen = self._outputs if self._outputs is not None else tuple(range(n_returned))
        if max(chosen) >= n_returned or min(chosen) < -n_returned:
            raise ValueError(f"outputs={list(chosen)}, but the network has {n_returned}: 0 to {n_returned - 1}")
        chosen = tuple(o % n_returned for o in chosen)
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"outputs={list(chosen)} holds an output more than once")
        return [(o,) for o in chosen] if self._per_output else [chosen]

    def _fitted_head(self, outputs: tuple[int, ...]) -> Head:
        columns = list(outputs)
        return lambda y: y if columns == list(range(y.shape[1])) else y[:, columns]

    def _check_targets(self, y: Tensor, targets: Tensor) -> None:
        n_returned = y.shape[1]
        chosen = tuple(o for group in self._groups(n_returned) for o in group)
        given, outputs = self._columns(chosen, targets, n_returned).numpy(), y[:, list(chosen)].numpy()
        self._units.original(outputs)  # a transform that cannot take them is found before the work
        scaled = self._units.scaled(given)
        if scaled is None or len(given) < 8:
            return
        rss, constant = np.square(given - outputs).sum(), np.square(given - given.mean(axis=0)).sum()
        if rss > constant and np.square(scaled - outputs).sum() < rss / 4:
            warn(
                "the targets look as if they were in the original units: with target_transform, fit and calibrate take "
                "them as the network was trained on"
            )

    def _squares(self, outputs: tuple[int, ...], y: Tensor, targets: Tensor, n_returned: int) -> Tensor:
        return (self._columns(outputs, targets, n_returned) - y.double()).square()

    def _columns(self, outputs: tuple[int, ...], targets: Tensor, n_returned: int) -> Tensor:
        """The targets of these outputs: of as many columns as the network returns, or of those chosen alone."""
        chosen = tuple(o for group in self._groups(n_returned) for o in group)
        if targets.shape[1] == n_returned:
            return targets[:, list(outputs)]
        if targets.shape[1] == len(chosen):
            return targets[:, [chosen.index(o) for o in outputs]]
        raise ValueError(
            f"the network returns {n_returned} outputs a row, and the targets have {targets.shape[1]} columns: give a "
            "column for each, or outputs=[...] for those that have one; an output that is its own variance is not "
            "covered"
        )

    @property
    def _is_single(self) -> bool:
        """Whether results are numbers, not rows of them."""
        return self._one_output or self._fits[0].n_returned == 1

    def _asked(self, x: Any, questions: Sequence[Question] | None = None) -> tuple[np.ndarray, list[np.ndarray]]:
        return self._ask(x, [self._fitted_head(fit.outputs) for fit in self._fits], questions)

    def _like(self, x: Any, values: np.ndarray, toward: float | None = None) -> Any:
        return like(x, values[:, 0] if self._is_single else values, self._fits[0].dtype, toward)

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

    def _formula(self, fit: Fit) -> Covariance:
        """The covariance, where formula (2) has an answer."""
        covariance = self._covariance(fit)
        freedom = float(fit.degrees_of_freedom.min())
        if not freedom > 0:
            raise ValueError(
                f"n − p* = {freedom:.3g} leaves no degrees of freedom for the noise: the formula has no "
                "answer for this network. Raise the damping, or calibrate on held-out data"
            )
        return covariance


def _warn(messages: list[str]) -> None:
    for message in messages:
        warn(message)
