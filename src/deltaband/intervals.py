"""`PredictionIntervals`: fit to a trained network and its training data, then ask for intervals."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, cast

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from .calibration import Joint, calibrate, check_mode, rule_for
from .data.inputs import Inputs
from .data.items import Collate
from .engines import Engine, parse_engine
from .errors import warn
from .fitting.compressed import compressed
from .fitting.fit import Fit, Formula
from .fitting.optimiser import damping_rule
from .fitting.spec import FitSpec
from .fitting.tasks import Regression
from .forecaster import Forecaster
from .network.model_copy import ParameterChoice
from .network.precision import Precision
from .online import DeltaScale, Monitor, Online
from .results import parse_levels
from .storage.encoding import storable
from .transforms import InputTransform
from .validation import check_int, check_positive


@storable
class PredictionIntervals(Forecaster):
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
        optimizer: The optimiser that trained the model, instead of `weight_decay`, which is read from it. Of several
            decays, as where biases have none, it is that of most parameters, with a warning. Decoupled decay (AdamW)
            and none at all have no λ: calibrate then. `loss` and `batch_size` are needed all the same.
        damping: λ itself, instead of `weight_decay`.
        loss: What was minimised: "mean", "half_mean", "sum", "weighted_mean" or "gaussian_nll".
        batch_size: The batch size of the training, for `loss="sum"`.
        engine: "auto", or one of `Exact()`, `Nystrom(landmarks)`, `RandomProjection(dim)`,
            `ImportantDirections(rank)`, `RobustFrequentDirections(rank)`, `FrequentDirections(rank)`, or the name of
            one, as "exact" or "random-projection". "auto" is exact where that fits into `memory`, and the best
            approximation where it does not; `plan(loader)` shows which.
        memory: Bytes that a fit may take, by default half of what is free; one that would need more is refused.
        time: Seconds that a fit with `engine="auto"` may take, roughly: the most accurate engine within them is chosen,
            or the fastest. By default 60, or 20 passes of gradients over the rows if those take longer.
        outputs: The outputs to give intervals for, a number or a list of numbers; all by default.
        per_output: Whether each output is fitted alone, which is wider, instead of all together.
        parameters: Which trainable parameters take part: "all", "last", names such as ["head.*"], or a function of
            name and parameter.
        output: A function that picks the prediction from what the model returns.
        batch: A function that turns a batch of the loader into inputs and targets. Inputs are a tensor, a tuple or a
            dictionary of tensors, or of any other kind an `OpaqueBatch`.
        collate: A function that turns a list of items, objects of any type such as graphs, into the network's inputs
            and targets, or (inputs, None). All methods then take a list or a `Dataset` of items instead of inputs.
        precision: "float32" for a model with weights in bfloat16 or half precision, or with `torch.autocast` in its
            `forward`: the copy that gradients and predictions come from is in float32, all of it.
        input_transform: What raw inputs go through before the network gets them: a pair (mean, std) of numbers or of
            arrays with one for each feature, a fitted scaler, or a function of the inputs. Every method then takes raw
            inputs. Pairs and scikit-learn's affine scalers are saved with the band, functions are not.
        target_transform: What targets went through before training: a pair (mean, std), or a scaler with
            `inverse_transform`. `predict` answers in the original units.
        targets: What `fit` and `calibrate` get: targets as the network was trained on ("scaled"), or "original" ones.
        noise: Whether `fit` keeps some residuals ("auto"), at most 20,000, so that `calibrate` can learn the noise.
        variance: For a network that predicts the variance of its noise, as one trained with `GaussianNLLLoss`: what it
            returns after the mean, "variance", "log_variance" or "std", in a tuple or in columns; or a function that
            picks the variance from what the model returns, beside `output`. The loss is "gaussian_nll" by default.
        quantiles: For a network trained for quantiles with pinball loss: the levels of the three it returns, such as
            (0.05, 0.5, 0.95). `calibrate` it before `predict`.
        robust: "HC0", "HC1", "HC2" or "HC3": the variance of predictions follows from each row's own residual instead
            of one s² for all, for noise that differs, or is correlated within `fit(..., clusters=)`. λ must be known.
        probes: How many random combinations stand in for the outputs of a training row, of which an image has
            thousands; by default each of up to 64, and of more what makes widths off by about 1 % (see `summary()`).
        missing: "ignore": targets that are NaN are none, each output has its own n, and rows without any are left out.
            Without it NaN is refused; a `batch` function may return {"mask": …} third in any case.

    Example:
        >>> band = PredictionIntervals(model, weight_decay=1e-2).fit(X, y)  # doctest: +SKIP
        >>> mean, lower, upper = band.predict(X_new, level=0.9)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        weight_decay: float | None = None,
        optimizer: Optimizer | None = None,
        damping: float | None = None,
        loss: Literal["mean", "half_mean", "sum", "weighted_mean", "gaussian_nll"] | None = None,
        batch_size: int | None = None,
        engine: Engine | str = "auto",
        memory: float | None = None,
        time: float | None = None,
        outputs: int | Sequence[int] | None = None,
        per_output: bool = False,
        parameters: ParameterChoice = "all",
        output: Callable[[Any], Tensor] | None = None,
        batch: Callable[[Any], tuple[Any, Any]] | None = None,
        collate: Collate | None = None,
        precision: Precision = None,
        input_transform: Any = None,
        target_transform: Any = None,
        targets: Literal["scaled", "original"] = "scaled",
        noise: Literal["auto", "none"] = "auto",
        variance: Literal["variance", "log_variance", "std"] | Callable[[Any], Tensor] | None = None,
        quantiles: Sequence[float] | None = None,
        robust: Literal["HC0", "HC1", "HC2", "HC3"] | None = None,
        probes: int | None = None,
        missing: Literal["ignore"] | None = None,
    ) -> None:
        loss_of_training = loss or ("mean" if variance is None else "gaussian_nll")
        about = (target_transform, targets, noise, variance, quantiles, robust, missing)
        rule = damping_rule(model, parameters, optimizer, damping, weight_decay, loss_of_training, batch_size)
        if loss in ("cross_entropy", "bce"):
            raise ValueError("PredictionIntervals is for squared losses: a classifier needs ClassificationIntervals")
        self._task = Regression.of(outputs, per_output, *about)
        transform = InputTransform.of(input_transform)
        settings = (parse_engine(engine), memory, time, parameters, output, batch, transform, probes)
        super().__init__(FitSpec(model, self._task, rule, *settings, collate, precision))

    def calibrate(
        self,
        data: Any,
        y: Any = None,
        *,
        tune: bool = True,
        joint: Joint = False,
        noise: Any = "auto",
        sample_weight: Any = None,
        groups: Any = None,
        target: Any = None,
        weights: Any = None,
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
            joint: False takes each output alone. Else a third of the rows, drawn with `seed`, serves the choice of the
                scale, the others the quantile. True: all outputs of a row are covered at once at the level. "share": on
                average this share of them at least; "horizon": the same for each index of their first axis, with its
                quantile. "scale": each output, whose λ and b are chosen by all.
            noise: "auto" learns how large the noise is from row to row: σ² = (1 + b·q_λ)·v^(2γ), where v(x) is learnt
                from residuals of training rows, by gradient boosting (scikit-learn), and γ is chosen with λ and b. Rows
                far from the training rows get the wider of the intervals with v and without. "none" takes it as the
                same everywhere. Or v itself, as a scikit-learn regressor of positive numbers that is fitted to
                |residuals|, or as a function of the inputs; these are not saved.
            sample_weight: Weights of the rows, if their noise variances are to count as s²/w here, too; `predict` then
                takes them as well.
            groups: Labels (n,), words or numbers: rows of each group are covered with probability at least the level,
                given their group. `predict` then takes the labels of its rows. Groups too small for a level share
                their quantile, which `summary()` and a warning say. Or indicators (n, G) of groups that may overlap.
            target: Inputs of rows like those to be predicted, without targets, if their distribution differs from that
                of the calibration rows and y given x does not. Calibration rows are weighed by a density ratio that is
                estimated from the features of rows and their leverages: the guarantee is as good as the estimate.
            weights: The density ratio itself, up to a factor: a function of the inputs, or numbers (n,), and `predict`
                then takes those of its rows. For the true ratio the guarantee is exact. Unlike `sample_weight` it is
                not about noise.
            seed: Seed for drawing these rows; else for the folds of the interval score that `summary()` shows.

        Returns:
            The calibrated estimator itself.

        Raises:
            ValueError: If the data, or the promises asked for, do not fit together.
        """
        fits, spec, select = self.fits_, self.spec, self._task.select_targets
        check_int(seed, "seed", 0)
        spec.forget()

        def targets(given: Tensor) -> np.ndarray:
            return select(self.outputs_, given, fits[0].n_returned).numpy()

        batches = spec.read(data, y, sample_weight=sample_weight)
        asked = {"groups": groups, "weights": weights, "target": target}
        check_mode(joint, asked)
        rule = rule_for(spec, fits, data, is_loader=y is None, kept=batches.kept, **asked)
        calibration = calibrate(spec, fits, batches, targets, tune=tune, joint=joint, noise=noise, seed=seed, rule=rule)
        warn(*calibration.warnings())  # which may be errors: then nothing has changed
        self._calibration = calibration
        return self

    def export(
        self,
        path: str | Path,
        levels: float | Sequence[float] = 0.95,
        *,
        format: Literal["pt2", "onnx"] | None = None,
        kind: Literal["observation", "mean"] = "observation",
        x: Any = None,
        tolerance: float | None = None,
    ) -> None:
        """Write one program that maps inputs to mean, lower and upper bounds, and runs without deltaband.

        It holds network, covariance and calibration as tensors, takes any number of rows, and returns what `predict`
        does to 1e-5, which is tried before the file is kept. That of an exact fit holds its p × p or n × n numbers.

        Args:
            path: The file; a name that ends with .onnx is of that format.
            levels: The level of the intervals, or several: one column each, in the last dimension.
            format: "pt2" for `torch.export.load`, or "onnx", which needs the extra `onnx`.
            kind: As in `predict`.
            x: Some rows of inputs, whose shapes and types the program takes; those of the training rows by default.
            tolerance: Of an exact band write `compress(tolerance, x)` instead: widths are off by so much at most.

        Raises:
            ExportError: If the network, a transform or the calibration cannot be written as tensors; it says why.
            ValueError: If the formula has no answer, or there are too few calibration rows for a level.
        """
        from .export import export

        if tolerance is not None:
            return self.compress(tolerance, x).export(path, levels, format=format, kind=kind, x=x)
        chosen, method = parse_levels(levels), self._method(kind)
        given = chosen[0] if np.ndim(levels) == 0 else chosen
        fits = method.fits if isinstance(method, Formula) else self.fits_
        return export(path, format, self.spec, fits, method, given, partial(self.predict, level=given, kind=kind), x)

    def compress(self, tolerance: float = 0.01, x: Any = None, *, seed: int = 0) -> Self:
        """Return a band of the same fit whose predictions cost the same however many rows it was fitted to.

        An exact fit compares each new row with all training rows, or solves with a p × p matrix. This one has their
        random projection, as `RandomProjection`, in the fewest dimensions for which no width that is measured is off
        by more than the tolerance; `summary()` says by how much they are. Files, `partial_fit` and `merge` work.

        A calibration stays, with the scale of each row from the projection: its intervals are those of the exact band,
        their widths off by as much as was measured. The guarantee of `calibrate` is exact for the scale that the scores
        were computed with, so for the last digit of it calibrate the new band, on the same rows.

        Args:
            tolerance: The largest |width/exact − 1| on any row that is measured.
            x: The rows to measure on, like those to be predicted; by default up to 512 training rows, near which
                widths are easier to get right.
            seed: Seed for the projection.

        Returns:
            The new band; this one stays as it is.

        Raises:
            ValueError: If the fit is not exact, or so many dimensions would be needed that exact is as good.
        """
        check_positive(tolerance, "tolerance")
        check_int(seed, "seed", 0)
        self._method("observation")

        def with_fits(fits: Sequence[Fit]) -> PredictionIntervals:
            band = copy.copy(self)
            band._fits, band._partial, calibration = tuple(fits), (), self._calibration
            if calibration is not None and fits is not self._fits:
                pairs = zip(fits, calibration.covariances, strict=True)
                new = tuple(fit.covariance.eigendecomposed().at(cast(float, old.damping)) for fit, old in pairs)
                band._calibration = replace(calibration, covariances=new)
            return band

        def widths(fits: Sequence[Fit], X: Inputs) -> np.ndarray:
            method = with_fits(fits)._method("observation")
            scale = method.scale(self.spec.compared(fits, method, X)[2])
            if isinstance(method, Formula):
                scale = scale * np.concatenate([fit.half_width(0.95) for fit in method.fits])
            return scale

        X = None if x is None else self.spec.known_inputs(self.fits_, x)
        fits = compressed(self.spec, self.fits_, X, tolerance, seed, widths)
        band = with_fits(fits)
        band.spec = replace(self.spec, engine=fits[0].engine)
        return cast(Self, band)

    def online(self, level: float = 0.95, method: Literal["aci", "pid", "window"] = "aci", **settings: Any) -> Online:
        """Return intervals for rows in time, whose widths adapt to the misses of earlier ones; `calibrate` first.

        Their long-run coverage is right on any series, where that of `predict` is for rows that are exchangeable with
        the calibration rows. It starts from the scores |y − ŷ|/σ(x) of the calibration rows.

        Args:
            level: The share of targets that are to be covered in the long run.
            method: "aci" takes the quantile of the last scores at a level that follows misses (adaptive conformal
                inference). "pid" moves the threshold itself (conformal PID control, its P and I parts). "window" takes
                the quantile of the last scores at the level, which promises nothing where these change quickly.
            settings: Of "aci" `step` (0.01), by how much a miss moves the level, and `window`, how many scores count,
                by default as many as there are calibration rows. Of "pid" `step` (0.1), by how much a miss moves the
                threshold, as a share of the first one, `gain` (1), that of the integral, and `saturation` (1): an
                excess of misses of π/2·saturation·(t+1)/log(t+1) makes it infinite. Of "window" `window`.

        Returns:
            An object with `predict(x)` and `observe(x, y)`.

        Raises:
            ValueError: If the band is not calibrated.
        """
        return Online(DeltaScale.of(self), level, method, settings)

    def monitor(self, level: float = 0.95, *, false_alarms: float = 0.01, window: int = 200, seed: int = 0) -> Monitor:
        """Return a watch on new rows: are they, inputs and errors, still like the calibration rows?

        Args:
            level: The level of the intervals whose coverage is watched.
            false_alarms: The probability that a kind of alarm is ever raised while new rows are exchangeable with the
                calibration rows.
            window: How many targets the rolling coverage is over.
            seed: Seed for breaking ties at random.

        Returns:
            An object with `update(x, y)`, which returns alarms, and `summary()`.

        Raises:
            ValueError: If the band is not calibrated.
        """
        return Monitor(DeltaScale.of(self), level, false_alarms, window, seed)
