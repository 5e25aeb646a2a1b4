"""What a fitted network for regression answers about rows: intervals and variances."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np
import torch

from .calibration import Calibration, Given
from .data.batches import read_targets
from .data.extras import with_extras
from .estimator import Estimator, by_batches
from .fitting.fit import Fit, Formula, in_units_of_noise
from .fitting.spec import all_outputs
from .fitting.tasks import Regression
from .positions import at, read_positions
from .results import Intervals, Side, check_kind_and_side, like, parse_levels
from .validation import check_choice


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
        positions: Any = None,
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
            positions: Some outputs instead of all: their numbers, or their indices in the shape of what the network
                returns for a row, such as [(0, 31, 31), (0, 5, 7)]. Results are of shape (n, k).

        Returns:
            The predictions with their bounds.

        Raises:
            NotFittedError: Before `fit`.
            ValueError: If the formula has no answer, because λ is not known or n − p* ≤ 0: calibrate then.
        """
        if positions is not None:
            own = {"groups": groups, "unknown": unknown, "weights": weights, "sample_weight": sample_weight}
            return self._at(positions).predict(x, level, kind=kind, side=side, **own)
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
    def variance(self, x: Any, *, positions: Any = None) -> Any:
        """Return q = gᵀ A⁻¹JᵀJA⁻¹ g (`robust`: gᵀA⁻¹MA⁻¹g/s²), the variance of the prediction in units of s².

        It ignores directions that the training data never touched: far outside the data it can stay small. Where the
        fit has no λ, it is that which `calibrate` chose.

        Args:
            x: Inputs.
            positions: As in `predict`.

        Returns:
            q of each row and output, of the kind of `x`.
        """
        if positions is not None:
            return self._at(positions).variance(x)
        fits = self._known_damping()
        found = self.spec.evaluate(fits, x, [fit.variance for fit in fits])[1]
        return self._like(x, np.stack(in_units_of_noise(fits, found), 1))

    @by_batches
    def leverage(self, x: Any, *, positions: Any = None) -> Any:
        """Return h = gᵀ A⁻¹ g, how far a row is from what the training data determine; it grows where q may not.

        Where the fit has no λ, it is that which `calibrate` chose.

        Args:
            x: Inputs.
            positions: As in `predict`.

        Returns:
            h of each row and output, of the kind of `x`.
        """
        if positions is not None:
            return self._at(positions).leverage(x)
        fits = self._known_damping()
        return self._like(x, np.stack(self.spec.evaluate(fits, x, [fit.covariance.leverage for fit in fits])[1], 1))

    @property
    def noise_std_(self) -> float | np.ndarray:
        """s of each output, in the units of the targets; NaN where n − p* ≤ 0 or λ is not known.

        Where the network predicts its own variance, it is a factor of that.
        """
        noise = self._task.noise_std(self.fits_)
        return float(noise[0]) if self._is_single else self.shaped(noise, 0)

    @property
    def outputs_(self) -> tuple[int, ...]:
        """The outputs of the network that there are intervals for."""
        return all_outputs(self.fits_)

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

    def _at(self, positions: Any) -> Self:
        """Return the same band for some of its outputs."""
        band, fits = copy.copy(self), self.fits_
        band._fits, band._calibration = at(fits, self._calibration, read_positions(positions, fits))
        band._partial = ()
        return band

    def shaped(self, values: np.ndarray, *axes: int) -> np.ndarray:
        """Return values whose axes of m outputs have the shape of what the network returns for a row.

        Args:
            values: Numbers, as one axis or several of which have m of them.
            axes: The numbers of these axes, in ascending order.

        Returns:
            The same numbers; those of a single output have no axis for it.
        """
        m, known = len(self.outputs_), self._fits[0]
        whole = len(known.shape) > 1 and self.outputs_ == tuple(range(known.n_returned))
        of_row = () if self._is_single else known.shape if whole else (m,)
        for axis in reversed(axes):
            values = values.reshape(*values.shape[:axis], *of_row, *values.shape[axis + 1 :])
        return values

    def _original(self, outputs: np.ndarray) -> np.ndarray:
        return outputs if self._task.units is None else self._task.units.to_original(outputs)

    def _like(self, x: Any, values: np.ndarray) -> Any:
        return like(x, self.shaped(values, 1), self._fits[0].dtype)

    def _in_units(self, x: Any, values: np.ndarray, toward: float | None = None) -> Any:
        """Return values in the units of the targets, which may take more than float32."""
        return like(x, self.shaped(values, 1), self._result_dtype, toward)

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
