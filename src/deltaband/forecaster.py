"""What is asked of rows beyond intervals: distributions, and what predictions have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from .calibration.overlap import Overlapping
from .data.batches import DEFAULT_BATCH_ROWS
from .data.extras import check_some, with_extras
from .distributions import Distribution, Steps, StudentT, ends_of, levels_of, levels_of_steps, parse_probabilities
from .engines.covariance import By
from .errors import said_once, silenced
from .evaluator import Evaluator
from .fitting.fit import Formula
from .joint import Errors, Rows, draws, parse_weights
from .results import Intervals, Side, check_kind_and_side, interval_arrays, like, parse_levels, to_numpy, two_bounds
from .validation import check_bool, check_choice, check_int

SMALLEST_LEVEL = 1e-9  # of an interval that holds the prediction, and little else


class Forecaster(Evaluator):
    """An evaluator that is asked for whole distributions, and about several rows together."""

    # --- distributions

    def quantile(self, x: Any, p: float | Sequence[float], *, symmetric: bool = True, **given: Any) -> Any:
        """Return quantiles of new observations, which are exactly the bounds of `predict`.

        Args:
            x: Inputs, as in `predict`.
            p: The probability below, between 0 and 1, or several.
            symmetric: The quantiles (1 ± level)/2 are the ends of the interval of this level, and that of ½ is the
                prediction. If not, the quantile of p is the upper bound of level p, which after `calibrate` an
                observation is below with probability p at least; by the formula both are the same.
            given: `sample_weight`, `groups`, `unknown` and `weights`, as in `predict`.

        Returns:
            Of the kind of `x`, (n,), or (n, m) for m outputs; for several p with one more axis.

        Raises:
            ValueError: If p is not between 0 and 1, or there are too few calibration rows for it.
        """
        probabilities = parse_probabilities(p)
        check_bool(symmetric, "symmetric")
        self._check_distribution()
        if not symmetric:
            upper = self.predict(x, probabilities, side="upper", **given).upper
            return upper[..., 0] if np.ndim(p) == 0 else upper
        intervals = self.predict(x, [*levels_of(probabilities), SMALLEST_LEVEL], **given)
        mean, lower, upper = interval_arrays(intervals)
        middle = mean if self._task.quantiles is None else np.clip(mean, lower[:, :, -1], upper[:, :, -1])
        found = ends_of(probabilities, middle, lower, upper)
        values = found[:, :, 0] if np.ndim(p) == 0 else found
        return like(intervals.mean, self.shaped(values, 1), self._result_dtype)

    def predict_distribution(self, x: Any, *, symmetric: bool = True, **given: Any) -> Distribution:
        """Return the distributions of new observations.

        By the formula it is ŷ + s·√(1 + q)·t with t of Student's distribution. After `calibrate` it has steps at the
        bounds of `predict` of every level that n calibration rows tell apart, k/(n + 1), or 1,000 of them: pairs of its
        quantiles are the intervals. A curved `target_transform` without `calibrate` leads to such steps, too.

        Args:
            x: Inputs, no loader.
            symmetric, given: As in `quantile`.

        Returns:
            A value with `quantile(p)`, `cdf(y)` and `crps(y)`.

        Raises:
            ValueError: If intervals have no answer; for calibrations with `joint=True` and for overlapping groups.
        """
        check_bool(symmetric, "symmetric")
        self._check_distribution()
        if self.spec.takes_loader(x):
            raise TypeError("a distribution is of rows that are given at once: give inputs, not a loader")
        calibration, units = self._calibration, self._task.units
        if calibration is not None and isinstance(calibration.rule, Overlapping):
            problem = "in groups that overlap each level of each row takes an optimisation of its own"
            raise ValueError(f"{problem}: ask for the quantiles that you need, quantile(x, p, groups=...)")
        if calibration is None and (units is None or units.affine is not None):
            return self._student(x, **given)
        n_rows = None if calibration is None else calibration.conformal.n_rows
        levels = levels_of_steps(n_rows)
        X = self.spec.known_inputs(self.fits_, x)
        self.spec.evaluate(self.fits_, X)  # whatever there is to say of these rows is said
        with silenced():  # about the highest of these levels
            intervals = self.predict(X, levels.tolist(), side="both" if symmetric else "upper", **given)
        mean, lower, upper = (to_numpy(part) for part in intervals)
        if symmetric and self._task.quantiles is not None:
            mean = np.clip(mean, lower[..., 0], upper[..., 0])
        return Steps.of_bounds(levels, mean, lower if symmetric else None, upper, n_rows)

    def cdf(self, x: Any, y: Any, *, symmetric: bool = True, **given: Any) -> Any:
        """Return the probabilities that new observations are at most y.

        Args:
            x: Inputs, no loader.
            y: One number for all rows, or one per row and output; or several, with one more axis.
            symmetric, given: As in `quantile`.

        Returns:
            Of the kind of `x`, (n,), or (n, m) for m outputs; for several y per row with one more axis.

        Raises:
            ValueError: As from `predict_distribution`, or if y has another shape.
        """
        distributions = list(self._distributions(x, symmetric, given))
        values, n = to_numpy(y), sum(map(len, distributions))
        each_row = values.ndim > 0 and len(values) == n
        if values.ndim and not each_row and not (len(values) == 1 and values.ndim > 1):
            raise ValueError(f"y must have one number per row, {n} of them, got shape {values.shape}")
        parts, first = [], 0
        for part in distributions:
            parts.append(part.cdf(values[first : first + len(part)] if each_row else values))
            first += len(part)
        return like(x, np.concatenate(parts), self._fits[0].dtype)

    def score(self, x: Any, y: Any, *, symmetric: bool = True, **given: Any) -> float | np.ndarray:
        """Return the mean CRPS of the distributions on rows that the network has not seen; lower is better.

        Args:
            x: Inputs, no loader.
            y: Their targets, in the units of `predict`; with `missing="ignore"` NaN where there is none.
            symmetric, given: As in `quantile`.

        Returns:
            The score in the units of y, or (m,) for m outputs.

        Raises:
            ValueError: If there are not as many targets as rows, or none.
            TypeError: If `x` is a loader.
        """
        targets, first, sums = self.select_targets(y), 0, np.zeros(len(self.outputs_))
        there = ~(np.isnan(targets) & self._task.may_miss)
        for part in self._distributions(x, symmetric, given):
            here = slice(first, first + len(part))
            scores = part.crps(np.where(there, targets, 0.0)[here]).reshape(len(part), -1)
            sums += scores.sum(axis=0, where=there[here])
            first += len(part)
        if first != len(targets) or first == 0:
            raise ValueError(f"there must be one target per row, and a row: {first} rows, {len(targets)} targets")
        check_some(there)
        mean = sums / there.sum(axis=0)
        return float(mean[0]) if self._is_single else self.shaped(mean, 0)

    def _distributions(self, x: Any, symmetric: bool, given: dict[str, Any]) -> Iterator[Distribution]:
        """Yield those of some rows at a time: steps take memory."""
        if self.spec.takes_loader(x):
            raise TypeError("give inputs, not a loader")
        X, first, unknown = self.spec.known_inputs(self.fits_, x), 0, given.get("unknown", "error")
        of_rows = {name: np.asarray(each) for name, each in given.items() if name != "unknown" and each is not None}
        for name, each in of_rows.items():
            if each.ndim == 0 or len(each) != len(X):
                raise ValueError(f"{name} must have one per row: {len(X)} rows, {name} of shape {each.shape}")
        for part in X.split(DEFAULT_BATCH_ROWS):
            some = {name: each[first : first + len(part)] for name, each in of_rows.items()}
            yield self.predict_distribution(part, symmetric=symmetric, unknown=unknown, **some)
            first += len(part)

    def _student(
        self, x: Any, sample_weight: Any = None, groups: Any = None, unknown: Any = "error", weights: Any = None
    ) -> StudentT:
        method = self._method("observation")
        assert isinstance(method, Formula)
        if groups is not None or weights is not None:
            raise ValueError("groups= and weights= are for intervals that were calibrated with them: see calibrate")
        X = self.spec.known_inputs(method.fits, x)
        X = X if sample_weight is None else with_extras(X, sample_weight)
        _, to, rows = self.spec.compared(method.fits, method, X)
        shift, unit = self.units_of_differences()
        s, freedom = (
            np.concatenate([getattr(fit, name) for fit in method.fits]) for name in ("noise_std", "t_freedom")
        )
        mean, scale = to.mean * unit + shift, method.scale(rows) * s * np.abs(unit)
        return StudentT(self.shaped(mean, 1), self.shaped(scale, 1), freedom)

    def _check_distribution(self) -> None:
        self._method("observation")
        if self._calibration is not None and self._calibration.is_joint:
            raise ValueError("joint=True calibrated all outputs of a row at once, and a distribution is of one output")

    # --- several rows together

    def covariance(self, x: Any, x2: Any = None, *, by: By = "variance") -> Any:
        """Return the covariances of the predictions at the rows of `x` and `x2`, in squares of the targets' units.

        By the formula s²·gᵀ Σ⁻¹ g', Σ⁻¹ = A⁻¹JᵀJA⁻¹: on the diagonal the square of half the width of
        `predict(x, kind="mean")` over t. After `calibrate` σ̂²·b·gᵀ Σ⁻¹ g'·(v(x)·v(x'))^γ on the calibrated scale: λ, b
        and γ are those that the calibration rows choose, of all with b > 0, and σ̂² is the mean of their r²/σ².

        Args:
            x: Inputs, n rows.
            x2: Other inputs, n' rows; by default the same.
            by: "variance" for Σ⁻¹: how predictions vary with the noise of the training targets. "leverage" for A⁻¹
                instead, the posterior covariance of linearised Laplace: also what the data leave open.

        Returns:
            Of the kind of `x`, (n, n'); for m outputs (n, m, n', m), whose `reshape(n * m, -1)` is a matrix. Outputs
            with `per_output=True` have no covariance.

        Raises:
            ValueError: If the formula has no answer, or the target transform is not affine.
            MemoryError: If it would take more than half of the memory that is free.
        """
        errors = self.errors(by)
        unit = self.units_of_differences()[1]
        with said_once():
            one = self._rows(errors, x)
            other = one if x2 is None else self._rows(errors, x2)
            C = errors.covariance(one, other, by) * unit[:, None, None] * unit
        if x2 is None:
            C = (C + C.transpose(2, 3, 0, 1)) / 2
        return like(x, self.shaped(C, 1, 3), self._result_dtype)

    def sample(self, x: Any, n: int = 1, seed: int = 0, *, by: By = "variance") -> Any:
        """Draw functions from the normal distribution with the predictions as mean and `covariance(x)`.

        All rows of a call are of the same functions; a call for other rows draws others, also with the same seed. They
        hold no noise of observations.

        Args:
            x: Inputs.
            n: How many functions.
            seed: Seed for the draws.
            by: As in `covariance`; "leverage" for Thompson sampling.

        Returns:
            Of the kind of `x`, (n, rows), or (n, rows, m) for m outputs, in the original units of the targets.
        """
        n, seed = check_int(n, "n"), check_int(seed, "seed", 0)
        errors = self.errors(by)
        with said_once():
            rows = self._rows(errors, x)
            C = errors.covariance(rows, rows, by).reshape(rows.mean.size, rows.mean.size)
        shape = rows.mean.shape
        found = draws(rows.mean.ravel(), C, n, seed).reshape(n, *shape)
        original = self._original(found.transpose(1, 2, 0)).transpose(2, 0, 1)
        return like(x, self.shaped(original, 2), self._result_dtype)

    def predict_linear(
        self,
        x: Any,
        weights: Any,
        level: float | Sequence[float] = 0.95,
        *,
        kind: Literal["observation", "mean"] = "observation",
        side: Side = "both",
        sample_weight: Any = None,
    ) -> Intervals:
        """Return intervals of weighted sums over rows: the total of a month, the difference of two treatments.

        Σ wᵢŷᵢ ± t·√(wᵀCw + Σ wᵢ²·Var(noise)) with C = `covariance(x)`, and t of n − p* degrees of freedom. It takes a
        gradient of the sum, no matrix, and as many rows as you like. For a single row it is `predict`. After
        `calibrate` the scales of C and of the noise are those of the calibration rows and t is of the normal
        distribution: a sum of many errors is nearly normal, but nothing is guaranteed as it is for single rows.

        Args:
            x: Inputs, n rows.
            weights: (n,) for one sum, or (k, n) for k of them; over rows and outputs (k, n, m).
            level, side: As in `predict`.
            kind: "observation" for sums of new observations, whose noise is independent. "mean" without noise.
            sample_weight: As in `predict`.

        Returns:
            Intervals of k sums, or one; for m outputs (k, m), unless weights are of outputs, too.

        Raises:
            ValueError: If the weights do not fit to the rows, or as from `covariance`.
        """
        levels = parse_levels(level)
        check_kind_and_side(kind, side)
        errors = self.errors()
        shift, unit = self.units_of_differences()
        rows = self._rows(errors, x, sample_weight)
        n, m = rows.mean.shape
        w, shape = parse_weights(weights, n, m, self._is_single)
        mean = np.einsum("kio,io->k", w, rows.mean * unit + shift)
        variance = errors.of_sums(rows, w * unit)
        if kind == "observation":
            variance = variance + np.einsum("kio,io->k", np.square(w * unit), rows.noise)
        scale, t = np.sqrt(np.maximum(variance, 0.0)), errors.t(w, levels, side)  # (k,), (k, levels)
        lower, upper = (mean[:, None] + end for end in two_bounds(scale[:, None] * t, side))
        several = shape if np.ndim(level) == 0 else (*shape, len(levels))
        dtype = self._result_dtype
        return Intervals(
            like(x, mean.reshape(shape), dtype),
            like(x, lower.reshape(several), dtype, -np.inf),
            like(x, upper.reshape(several), dtype, np.inf),
            levels[0] if np.ndim(level) == 0 else levels,
        )

    def errors(self, by: By = "variance") -> Errors:
        """Return the scales of the errors of predictions and observations, for `DeltaModel`.

        Args:
            by: As in `covariance`.

        Returns:
            The scales, of the calibration where there is one, else of the formula.

        Raises:
            ValueError: If the formula has no answer, and for a network that predicts quantiles.
        """
        check_choice(by, "by", ("variance", "leverage"))
        if self._task.quantiles is not None:
            raise ValueError("a network trained for quantiles has no covariance: the formula is for squared losses")
        fits = self.fits_
        if self._calibration is not None:
            return Errors.of_calibration(self.spec, fits, self._calibration)
        return Errors.of_formula(self.spec, self._known_damping(), by)

    def units_of_differences(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the original units of the targets as an affine map of the outputs: shift and factor, (m,) each.

        Returns:
            Shift and factor of each output.

        Raises:
            ValueError: If the target transform is not affine.
        """
        m, units = len(self.outputs_), self._task.units
        if units is None:
            return np.zeros(m), np.ones(m)
        if units.affine is None:
            raise ValueError(
                "covariances and sums have no meaning in the original units of a target transform that is not affine: "
                "leave target_transform out, or take sample(x), whose draws are transformed"
            )
        zero, one = units.to_original(np.zeros((1, m))), units.to_original(np.ones((1, m)))
        return zero[0], (one - zero)[0]

    def _rows(self, errors: Errors, x: Any, sample_weight: Any = None) -> Rows:
        if self.spec.takes_loader(x):
            raise TypeError("all rows are needed at once: give inputs, not a loader")
        X = self.spec.known_inputs(errors.fits, x)
        return errors.rows(X if sample_weight is None else with_extras(X, sample_weight))
