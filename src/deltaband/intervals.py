"""`PredictionIntervals`: fit to a trained network and its training data, then ask for intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from .calibration import Calibration, calibrate
from .damping import Damping
from .data.batches import read_targets, with_extras
from .data.inputs import Inputs
from .data.row_record import pair_hashes
from .engines import Engine
from .errors import warn
from .estimator import Estimator
from .fitting.fit import Fit, Formula, in_units_of_noise
from .fitting.spec import FitSpec, all_outputs, parse_engine
from .fitting.tasks import Regression
from .network.model_copy import ParameterChoice
from .results import Intervals, Side, check_kind_and_side, like, parse_levels
from .storage.encoding import storable
from .validation import check_int

if TYPE_CHECKING:  # matplotlib is an extra
    from matplotlib.axes import Axes


@storable
class PredictionIntervals(Estimator):
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

    or is given as `damping`. Squares may be weighted (`fit(..., sample_weight=)`): "weighted_mean" is a sum divided by
    that of the weights, Σw·wd/2. "gaussian_nll" is n·wd. A mean over m outputs has n·m instead of n.

    A network with m outputs gets an interval for each. JᵀJ sums over the outputs, as the training loss did: weights
    that they share have learnt from all of them. The model itself is never changed, nor switched to eval mode: all
    work happens on a private copy in eval mode that shares its weights. `predict` can be called from several threads.

    Args:
        model: The trained network.
        weight_decay: The coupled weight decay of the optimiser.
        damping: λ itself, instead of `weight_decay`.
        loss: What was minimised: "mean", "half_mean", "sum", "weighted_mean" or "gaussian_nll".
        batch_size: The batch size of the training, for `loss="sum"`.
        engine: "auto", or one of `Exact()`, `Nystrom(landmarks)`, `RandomProjection(dim)`,
            `ImportantDirections(rank)`, `RobustFrequentDirections(rank)`, `FrequentDirections(rank)`. "auto" is exact
            where that fits into `memory`, and the best approximation where it does not; `plan(loader)` shows which.
        memory: Bytes that a fit may take, by default half of what is free; one that would need more is refused.
        outputs: The outputs to give intervals for, a number or a list of numbers; all by default.
        per_output: Whether each output is fitted alone, which is wider, instead of all together.
        parameters: Which trainable parameters take part: "all", "last", names such as ["head.*"], or a function of
            name and parameter.
        output: A function that picks the prediction from what the model returns.
        batch: A function that turns a batch of the loader into inputs (also a tuple, or a dictionary) and targets.
        target_transform: What targets went through before training: a pair (mean, std), or a scaler with
            `inverse_transform`. `fit` and `calibrate` take targets as the network was trained on, `predict` answers
            in the original units.
        noise: Whether `fit` keeps some residuals ("auto"), at most 20,000, so that `calibrate` can learn the noise.
        variance: For a network that predicts the variance of its noise, as one trained with `GaussianNLLLoss`: what it
            returns after the mean, "variance", "log_variance" or "std", in a tuple or in columns; or a function that
            picks the variance from what the model returns, beside `output`. The loss is "gaussian_nll" by default.
        quantiles: For a network trained for quantiles with pinball loss: the levels of the three it returns, such as
            (0.05, 0.5, 0.95). `calibrate` it before `predict`.
        robust: "HC0", "HC1", "HC2" or "HC3": the variance of predictions follows from each row's own residual instead
            of one s² for all, for noise that differs, or is correlated within `fit(..., clusters=)`. λ must be known.

    Example:
        >>> band = PredictionIntervals(model, weight_decay=1e-2).fit(X, y)  # doctest: +SKIP
        >>> mean, lower, upper = band.predict(X_new, level=0.9)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        weight_decay: float | None = None,
        damping: float | None = None,
        loss: Literal["mean", "half_mean", "sum", "weighted_mean", "gaussian_nll"] | None = None,
        batch_size: int | None = None,
        engine: Engine | Literal["auto"] = "auto",
        memory: float | None = None,
        outputs: int | Sequence[int] | None = None,
        per_output: bool = False,
        parameters: ParameterChoice = "all",
        output: Callable[[Any], Tensor] | None = None,
        batch: Callable[[Any], tuple[Any, Any]] | None = None,
        target_transform: Any = None,
        noise: Literal["auto", "none"] = "auto",
        variance: Literal["variance", "log_variance", "std"] | Callable[[Any], Tensor] | None = None,
        quantiles: Sequence[float] | None = None,
        robust: Literal["HC0", "HC1", "HC2", "HC3"] | None = None,
    ) -> None:
        rule = Damping(damping, weight_decay, loss or ("mean" if variance is None else "gaussian_nll"), batch_size)
        if loss == "cross_entropy":  # type: ignore[comparison-overlap]
            raise ValueError("PredictionIntervals is for squared losses: a classifier needs ClassificationIntervals")
        self._task = Regression.of(outputs, per_output, target_transform, noise, variance, quantiles, robust)
        super().__init__(FitSpec(model, self._task, rule, parse_engine(engine), memory, parameters, output, batch))

    def calibrate(
        self,
        data: Any,
        y: Any = None,
        *,
        tune: bool = True,
        joint: bool = False,
        noise: Any = "auto",
        sample_weight: Any = None,
        seed: int = 0,
    ) -> Self:
        """Calibrate the intervals on held-out rows, so that they cover as often as they say.

        Afterwards `predict` is conformal: for rows exchangeable with the calibration rows (and not used in training)
        an interval covers with probability at least its level, whatever the network and however it was trained; on
        average over calibration sets, not for each x. Forecasts and drifting data are not exchangeable.

        The width is proportional to σ(x) = √(1 + b·q_λ(x)). λ and b are chosen, from a grid that includes the constant
        width b = 0, for each prediction anew by a likelihood in which its own unknown residual takes part: that keeps
        the guarantee exact although every calibration row serves both the choice and the quantile.

        Args:
            data: A loader of batches `(x, y)`, or the inputs with their targets `y`.
            y: The targets.
            tune: Whether λ and b are chosen. If not, λ is that of the fit, b = 1 and no noise is learnt; the coverage
                is then at most 1/(n+1) above its level.
            joint: Whether all outputs of a row are covered at once at the level, instead of each on its own. A third of
                the rows, drawn with `seed`, then serves the choice, and the others the quantile.
            noise: "auto" learns how large the noise is from row to row: σ² = (1 + b·q_λ)·v^(2γ), where v(x) is learnt
                from residuals of training rows, by gradient boosting (scikit-learn), and γ is chosen with λ and b. Rows
                far from the training rows get the wider of the intervals with v and without. "none" takes it as the
                same everywhere. Or v itself, as a scikit-learn regressor of positive numbers that is fitted to
                |residuals|, or as a function of the inputs; these are in no file.
            sample_weight: Weights of the rows, if their noise variances are to count as s²/w here, too; `predict` then
                takes them as well.
            seed: Seed for drawing these rows; else for the folds of the interval score that `summary()` shows.

        Returns:
            The calibrated estimator itself.
        """
        fits, spec = self.fits_, self.spec
        check_int(seed, "seed", 0)
        spec.forget()

        def targets(given: Tensor) -> np.ndarray:
            return self._task.select_targets(self.outputs_, given, fits[0].n_returned).numpy()

        batches = spec.read(data, y, sample_weight=sample_weight)
        calibration = calibrate(spec, fits, batches, targets, tune=tune, joint=joint, noise=noise, seed=seed)
        warn(*calibration.warnings())  # which may be errors: then nothing has changed
        self._calibration = calibration
        return self

    def predict(
        self,
        x: Any,
        level: float | Sequence[float] = 0.95,
        *,
        kind: Literal["observation", "mean"] = "observation",
        side: Side = "both",
        sample_weight: Any = None,
    ) -> Intervals:
        """Return intervals for the rows of `x`.

        Args:
            x: Inputs: NumPy in, NumPy out; tensors in, tensors out.
            level: The probability of an interval, or several.
            kind: "observation" for a new observation: formula (2) of the paper, or conformal after `calibrate`. "mean"
                for the confidence band of the regression function itself, by the formula with √q instead of √(1 + q).
            side: "upper" and "lower" give one bound at the level; the other is infinite.
            sample_weight: Weights of the rows, as in `fit`: their noise variances are s²/w.

        Returns:
            The predictions with their bounds.

        Raises:
            NotFittedError: Before `fit`.
            ValueError: If the formula has no answer, because λ is not known or n − p* ≤ 0: calibrate then.
        """
        levels = parse_levels(level)
        check_kind_and_side(kind, side)
        fits, units = self.fits_, self._task.units
        method = self._method(kind)
        X = Inputs.of(x) if sample_weight is None else with_extras(Inputs.of(x), sample_weight)
        outputs, to, rows = self.spec.compared(fits, method, X)
        if side != "both" and units is not None and units.is_decreasing(outputs):
            side = "lower" if side == "upper" else "upper"
        lower, upper = method.bounds(rows, levels, side)
        if isinstance(method, Calibration):
            # residuals may be tied, and the same output differ by a rounding from batch to batch
            slack = 2 * torch.finfo(fits[0].dtype).eps * np.abs(outputs)[:, :, None]
            lower, upper = lower - slack, upper + slack
        lower, upper = to.centre[:, :, None] + lower, to.centre[:, :, None] + upper
        if np.ndim(level) == 0:
            lower, upper = lower[:, :, 0], upper[:, :, 0]
        if units is not None:
            lower, upper = units.to_original_bounds(to.mean, lower, upper)
        return Intervals(
            self._like(x, self._original(to.mean)),
            self._like(x, lower, -np.inf),
            self._like(x, upper, np.inf),
            levels[0] if np.ndim(level) == 0 else levels,
            None if rows.far is None else like(x, rows.far, torch.bool),
        )

    def predict_mean(self, x: Any) -> Any:
        """Return the prediction ŷ alone, of the kind of `x`, with the checks of `predict` and without its gradients.

        Args:
            x: Inputs.
        """
        return self._like(x, self._original(self.spec.evaluate(self.fits_, x)[0]))

    def predict_mean_and_scale(self, x: Any) -> tuple[Any, Any]:
        """Return ŷ and σ(x), which the width is proportional to: √(1 + q), or calibrated √(1 + b·q)·v^γ.

        With a network that predicts its own variance u² it is u·√(1 + q/u²), likewise.

        After `calibrate` with `tune=True` it is the scale that the calibration rows alone would choose. A conformal
        quantile of your own with this scale should be taken on other rows: on the same ones the guarantee is lost.

        Args:
            x: Inputs.

        Returns:
            The predictions and their scales, of the kind of `x`.
        """
        method = self._calibration or Formula(self._known_damping())
        _, to, rows = self.spec.compared(self.fits_, method, Inputs.of(x))
        return self._like(x, self._original(to.mean)), self._like(x, method.scale(rows))

    def variance(self, x: Any) -> Any:
        """Return q = gᵀ A⁻¹JᵀJA⁻¹ g (`robust`: gᵀA⁻¹MA⁻¹g/s²), the variance of the prediction in units of s².

        It ignores directions that the training data never touched: far outside the data it can stay small.

        Args:
            x: Inputs; q of each row and output is of their kind.
        """
        fits = self._known_damping()
        found = self.spec.evaluate(fits, x, [fit.variance for fit in fits])[1]
        return self._like(x, np.stack(in_units_of_noise(fits, found), 1))

    def leverage(self, x: Any) -> Any:
        """Return h = gᵀ A⁻¹ g, how far a row is from what the training data determine; it grows where q may not.

        Args:
            x: Inputs; h of each row and output is of their kind.
        """
        functions = [self._covariance(fit).leverage for fit in self.fits_]
        return self._like(x, np.stack(self.spec.evaluate(self.fits_, x, functions)[1], 1))

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
        """Draw the band over an `x` of one feature; for other inputs the intervals sorted by width, which needs `y`.

        Args:
            x: Inputs.
            y: Their targets.
            level: As in `predict`.
            output: The output to show, of several.
            data: Training data `(x, y)` to show.
            ax: The axes to draw on; new ones by default.

        Returns:
            The axes.
        """
        from . import plots

        return plots.fitted(self.predict(x, level), x, y, output=output, data=data, ax=ax)

    @property
    def noise_std_(self) -> float | np.ndarray:
        """s of each output; NaN where n − p* ≤ 0 or λ is not known. With a scaler it is in the units of the network."""
        noise = self._task.noise_std(self.fits_)
        return float(noise[0]) if self._is_single else noise

    @property
    def outputs_(self) -> tuple[int, ...]:
        """The outputs of the network that there are intervals for."""
        return all_outputs(self.fits_)

    def select_targets(self, y: Any) -> np.ndarray:
        """Return the targets (n, m) of the outputs that there are intervals for.

        Args:
            y: Targets, one column per output of the network or per selected output.
        """
        return self._task.select_targets(self.outputs_, read_targets(y), self.fits_[0].n_returned).numpy()

    def share_seen_in_training(self, x: Any, y: Any) -> float:
        """Return the share of these rows that were training rows.

        Args:
            x: Inputs.
            y: Their targets.
        """
        hashes = pair_hashes(self.spec.network().prepare(Inputs.of(x)), read_targets(y))
        return self.fits_[0].seen.share(hashes)

    @property
    def _is_single(self) -> bool:
        """Whether results are numbers, not rows of them."""
        return self._task.single or self._fits[0].n_returned == 1

    def _original(self, outputs: np.ndarray) -> np.ndarray:
        return outputs if self._task.units is None else self._task.units.to_original(outputs)

    def _like(self, x: Any, values: np.ndarray, toward: float | None = None) -> Any:
        return like(x, values[:, 0] if self._is_single else values, self._fits[0].dtype, toward)

    def _known_damping(self) -> tuple[Fit, ...]:
        """Return the fits, if they have a λ."""
        for fit in self.fits_:
            self._covariance(fit)
        return self.fits_

    def _method(self, kind: str) -> Calibration | Formula:
        """Return what intervals follow from: the calibration, or the formula where it has an answer."""
        if self._task.quantiles is not None and (kind == "mean" or self._calibration is None):
            raise ValueError("the formula is for squared losses, not for quantiles: calibrate, and leave out kind=")
        if kind == "observation" and self._calibration is not None:
            return self._calibration
        return Formula(self._known_damping(), noise=kind == "observation").checked()
