"""What a fitted network for regression answers about rows: intervals, variances, and how good they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from .calibration import Calibration, Given
from .data.batches import DEFAULT_BATCH_ROWS, read_targets, with_extras
from .data.row_record import pair_hashes
from .errors import EmptyDataError, said_once, warn
from .estimator import Estimator, by_batches
from .fitting.fit import Fit, Formula, in_units_of_noise
from .fitting.spec import all_outputs
from .fitting.tasks import Regression
from .metrics import SLAB_ROWS_AT_LEAST, Scores, evaluate
from .results import Intervals, Side, check_kind_and_side, concatenated, interval_arrays, like, parse_levels
from .validation import check_choice

if TYPE_CHECKING:  # matplotlib is an extra
    from matplotlib.axes import Axes


EVALUATED_LEVELS = (0.5, 0.8, 0.9, 0.95)


class Predictor(Estimator):
    """What a fitted estimator for regression predicts; `PredictionIntervals` constructs and calibrates it."""

    _task: Regression

    @by_batches
    def predict(
        self,
        x: Any,
        level: float | Sequence[float] = 0.95,
        *,
        kind: Literal["observation", "mean"] = "observation",
        side: Side = "both",
        sample_weight: Any = None,
        groups: Any = None,
        unknown: Literal["error", "pool"] = "error",
        weights: Any = None,
    ) -> Intervals:
        """Return intervals for the rows of `x`.

        Args:
            x: Inputs: NumPy in, NumPy out; tensors in, tensors out. Or a loader of them, alone or in batches (x, y).
            level: The probability of an interval, or several.
            kind: "observation" for a new observation: formula (2) of the paper, or conformal after `calibrate`. "mean"
                for the confidence band of the regression function itself, by the formula with √q instead of √(1 + q),
                under the λ of the fit or, without one, that which `calibrate` chose.
            side: "upper" and "lower" give one bound at the level; the other is infinite.
            sample_weight: Weights of the rows, as in `fit`: their noise variances are s²/w.
            groups: The groups of the rows, after `calibrate(..., groups=)`: labels (n,), or indicators (n, G).
            unknown: What to do with a label that no calibration row had: raise an "error", or "pool" all calibration
                rows for its quantile, which guarantees nothing for such a group.
            weights: The density ratios of the rows, after `calibrate(..., weights=)` with numbers.

        Returns:
            The predictions with their bounds.

        Raises:
            NotFittedError: Before `fit`.
            ValueError: If the formula has no answer, because λ is not known or n − p* ≤ 0: calibrate then.
        """
        levels = parse_levels(level)
        check_kind_and_side(kind, side)
        if not isinstance(unknown, str) or unknown != "error":
            check_choice(unknown, "unknown", ("error", "pool"))
        method, units = self._method(kind), self._task.units
        fits = method.fits if isinstance(method, Formula) else self.fits_
        X = self.spec.known_inputs(fits, x)
        X = X if sample_weight is None else with_extras(X, sample_weight)
        outputs, to, rows = self.spec.compared(fits, method, X)
        if side != "both" and units is not None and units.is_decreasing(outputs):
            side = "lower" if side == "upper" else "upper"
        if isinstance(method, Calibration):
            rows = method.placed(rows, Given(groups, unknown, weights))
        elif groups is not None or weights is not None:
            raise ValueError("groups= and weights= are for intervals that were calibrated with them: see calibrate")
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
            self._in_units(x, self._original(to.mean)),
            self._in_units(x, lower, -np.inf),
            self._in_units(x, upper, np.inf),
            levels[0] if np.ndim(level) == 0 else levels,
            None if rows.far is None else like(x, rows.far, torch.bool),
        )

    @by_batches
    def predict_mean(self, x: Any) -> Any:
        """Return the prediction ŷ alone, of the kind of `x`, with the checks of `predict` and without its gradients.

        Args:
            x: Inputs.

        Returns:
            ŷ in the units of the targets.
        """
        X = self.spec.known_inputs(self.fits_, x)
        return self._in_units(x, self._original(self.spec.evaluate(self.fits_, X)[0]))

    @by_batches
    def predict_mean_and_scale(self, x: Any) -> tuple[Any, Any]:
        """Return ŷ and σ(x), which the width is proportional to: √(1 + q), or calibrated √(1 + b·q)·v^γ.

        With a network that predicts its own variance u² it is u·√(1 + q/u²), likewise. With an affine target transform
        both are in the original units; under any other a width has no scale there, and σ(x) is that of the network.

        After `calibrate` with `tune=True` it is the scale that the calibration rows alone would choose. A conformal
        quantile of your own with this scale should be taken on other rows: on the same ones the guarantee is lost.

        Args:
            x: Inputs.

        Returns:
            The predictions and their scales, of the kind of `x`.
        """
        method = self._calibration or Formula(self._known_damping())
        _, to, rows = self.spec.compared(self.fits_, method, self.spec.known_inputs(self.fits_, x))
        scale, units = method.scale(rows), self._task.units
        scale = scale if units is None else units.to_original_difference(scale)
        return self._in_units(x, self._original(to.mean)), self._in_units(x, scale)

    @by_batches
    def variance(self, x: Any) -> Any:
        """Return q = gᵀ A⁻¹JᵀJA⁻¹ g (`robust`: gᵀA⁻¹MA⁻¹g/s²), the variance of the prediction in units of s².

        It ignores directions that the training data never touched: far outside the data it can stay small. Where the
        fit has no λ, it is that which `calibrate` chose.

        Args:
            x: Inputs.

        Returns:
            q of each row and output, of the kind of `x`.
        """
        fits = self._known_damping()
        found = self.spec.evaluate(fits, x, [fit.variance for fit in fits])[1]
        return self._like(x, np.stack(in_units_of_noise(fits, found), 1))

    @by_batches
    def leverage(self, x: Any) -> Any:
        """Return h = gᵀ A⁻¹ g, how far a row is from what the training data determine; it grows where q may not.

        Where the fit has no λ, it is that which `calibrate` chose.

        Args:
            x: Inputs.

        Returns:
            h of each row and output, of the kind of `x`.
        """
        fits = self._known_damping()
        return self._like(x, np.stack(self.spec.evaluate(fits, x, [fit.covariance.leverage for fit in fits])[1], 1))

    def evaluate(
        self,
        x: Any,
        y: Any = None,
        levels: float | Sequence[float] = EVALUATED_LEVELS,
        *,
        outputs: Sequence[str] | None = None,
        groups: Any = None,
        **options: Any,
    ) -> Scores:
        """Measure how good the intervals are, on rows that the network was neither trained nor calibrated on.

        Args:
            x: Inputs, or a loader of batches (x, y).
            y: The targets of inputs, in the units of `predict`.
            levels: The levels of the intervals.
            outputs: Names of the outputs.
            groups: Groups of the rows, labels (n,) or indicators (n, G), whose coverage is measured one by one. A band
                that was calibrated by groups needs them, as `predict` does.
            options: Other arguments of `predict`: `sample_weight`, `unknown`, `weights`.

        Returns:
            Coverage, also that of the worst slab, mean width, interval score, pinball loss, correlation of width and
            error, RMSE and CRPS; printed, a table.

        Raises:
            EmptyDataError: If a loader gives no rows.
            TypeError: If there are groups or options with a loader, which go with arrays.
        """
        levels, network = list(parse_levels(levels)), self.spec.network()
        features: list[np.ndarray] = []
        if y is not None:
            by_group = self._calibration is not None and self._calibration.is_by_group
            intervals = self.predict(x, levels, **options, **({"groups": groups} if by_group else {}))
            given, rows = self.select_targets(y), self.spec.inputs(x)
            features += [network.features(rows)] if len(rows) >= SLAB_ROWS_AT_LEAST else []
        else:
            if options or groups is not None:
                name = next(iter(options), "groups")
                raise TypeError(f"{name}= goes with arrays: give evaluate(X, y, …), not a loader")
            parts = []
            with said_once():
                for rows, targets, _ in self.spec.read_answers(x).chunks(lambda x: max(len(x), DEFAULT_BATCH_ROWS)):
                    self.spec.look_at(self.fits_, rows)
                    parts.append((self.select_targets(targets), self.predict(rows, levels)))
                    features.append(network.features(rows))
            if not parts:
                raise EmptyDataError("there are no rows to evaluate the intervals on (a generator is read only once)")
            given, intervals = concatenated(parts)
        if outputs is None and not self._is_single:
            outputs = [f"output {o}" for o in self.outputs_]
        same = len({part.shape[1] for part in features}) == 1  # sequences of other lengths may have other features
        about = {"x": np.concatenate(features) if same else None, "groups": groups}
        joint = self._calibration is not None and self._calibration.is_joint
        scores = evaluate(given, intervals, outputs, joint=joint, **about)
        warn(*self.suspicions(given, intervals))
        return scores

    def plot(
        self,
        x: Any,
        y: Any = None,
        *,
        level: float | Sequence[float] = 0.95,
        output: int | None = None,
        data: tuple[Any, Any] | None = None,
        ax: Axes | None = None,
        **given: Any,
    ) -> Axes:
        """Draw the band over an `x` of one feature; for other inputs the intervals sorted by width, which needs `y`.

        Args:
            x: Inputs.
            y: Their targets.
            level: As in `predict`.
            output: The output to show, of several.
            data: Training data `(x, y)` to show.
            ax: The axes to draw on; new ones by default.
            given: `groups`, `unknown` and `weights`, as in `predict`.

        Returns:
            The axes.
        """
        from . import plots

        return plots.fitted(self.predict(x, level, **given), x, y, output=output, data=data, ax=ax)

    def suspicions(self, y: np.ndarray, intervals: Intervals) -> list[str]:
        """Return what suggests that the network was not trained for rows with these targets (n, m).

        Args:
            y: Targets, in the units of `predict`.
            intervals: The intervals of the rows.

        Returns:
            What to warn of, a sentence each.

        Raises:
            ValueError: If the targets have been scaled, and answers are in their original units.
        """
        mean = interval_arrays(intervals, np.float64)[0]
        self._task.check_answers(y, mean)
        return self._task.suspicions(self.fits_, y, mean, "these rows", "original")

    @property
    def noise_std_(self) -> float | np.ndarray:
        """s of each output, in the units of the targets; NaN where n − p* ≤ 0 or λ is not known.

        Where the network predicts its own variance, it is a factor of that.
        """
        noise = self._task.noise_std(self.fits_)
        return float(noise[0]) if self._is_single else noise

    @property
    def outputs_(self) -> tuple[int, ...]:
        """The outputs of the network that there are intervals for."""
        return all_outputs(self.fits_)

    def share_seen_in_training(self, x: Any, y: Any) -> float:
        """Return the share of these rows that were training rows.

        Args:
            x: Inputs.
            y: Their targets, as `fit` takes them or in the original units.

        Returns:
            The share, from 0 to 1.
        """
        X, seen = self.spec.network().prepare(self.spec.inputs(x)), self.fits_[0].seen
        return max(seen.share(pair_hashes(X, targets)) for targets in self.spec.task.possible_targets(y))

    def select_targets(self, y: Any) -> np.ndarray:
        """Return the targets (n, m) of the outputs that there are intervals for.

        Args:
            y: Targets, one column per output of the network or per selected output.

        Returns:
            Their columns, in the order of `outputs_`.
        """
        return self._task.select_targets(self.outputs_, read_targets(y), self.fits_[0].n_returned).numpy()

    @property
    def _is_single(self) -> bool:
        """Whether results are numbers, not rows of them."""
        return self._task.single or self._fits[0].n_returned == 1

    def _original(self, outputs: np.ndarray) -> np.ndarray:
        return outputs if self._task.units is None else self._task.units.to_original(outputs)

    def _like(self, x: Any, values: np.ndarray) -> Any:
        return like(x, values[:, 0] if self._is_single else values, self._fits[0].dtype)

    def _in_units(self, x: Any, values: np.ndarray, toward: float | None = None) -> Any:
        """Return values in the units of the targets, which may take more than float32."""
        return like(x, values[:, 0] if self._is_single else values, self._result_dtype, toward)

    @property
    def _result_dtype(self) -> torch.dtype:
        """The precision of results in the units of the targets."""
        return self._fits[0].dtype if self._task.units is None else torch.float64

    def _known_damping(self) -> tuple[Fit, ...]:
        """Return the fits, under the λ that a calibration chose where they have none; or raise."""
        fits = self.fits_
        if self._calibration is not None and fits[0].covariance.damping is None:
            return self._calibration.with_damping(fits)
        for fit in fits:
            self._covariance(fit)
        return fits

    def _method(self, kind: str) -> Calibration | Formula:
        """Return what intervals follow from: the calibration, or the formula where it has an answer."""
        if self._task.quantiles is not None and (kind == "mean" or self._calibration is None):
            raise ValueError("the formula is for squared losses, not for quantiles: calibrate, and leave out kind=")
        if kind == "observation" and self._calibration is not None:
            return self._calibration
        return Formula(self._known_damping(), noise=kind == "observation").checked()
