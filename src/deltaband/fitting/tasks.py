"""What regression does in a fit: outputs, gradients, losses, targets and warnings.

`Classification` has the same members; a fit knows no other difference.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from ..data.batches import read_targets
from ..data.row_record import Moments, rank_correlation
from ..errors import FormulaMessage
from ..network.network import Head
from ..network.returned import VARIANCE_FORMS, Pick, mean_and_variance, middle_and_ends
from ..transforms import TargetTransform
from ..validation import check_callable, check_choice, check_ints
from . import sanity
from .classes import Classification
from .fit import N_ROWS_TO_JUDGE, Fit, Outputs

KEPT_CORRELATION = 0.25  # of predictions with targets, that is left of it on rows like the training rows


@dataclass(frozen=True)
class Regression:
    """Squared losses: rows of J are gradients of the outputs themselves."""

    outputs: Outputs | None = None  # None: all
    single: bool = False  # whether one output was asked for by its number
    per_output: bool = False
    units: TargetTransform | None = None
    targets: str = "scaled"  # what fit and calibrate get: as the network was trained on, or in "original" units
    keeps_residuals: bool = True  # whether a fit keeps some residuals, from which the noise can be learnt
    variance: str | Pick | None = None  # how the network returns a variance of its own, if it does
    quantiles: tuple[float, ...] | None = None  # the levels of a network that returns (lower, middle, upper)
    robust: str | None = None  # the kind of a robust covariance, "HC0" to "HC3"
    missing: str | None = None  # "ignore": targets that are NaN are none

    has_noise: ClassVar[bool] = True  # whether an interval is for an observation, of width √(1 + q), or for a score, √q
    no_gradient_hint: ClassVar[str] = ""  # why else all gradients may be zero

    @classmethod
    def of(
        cls,
        outputs: Any,
        per_output: bool,
        target_transform: Any,
        targets: Any,
        noise: Any,
        variance: Any,
        quantiles: Any,
        robust: Any,
        missing: Any,
    ) -> Self:
        """Return the task for the arguments of an estimator, checked."""
        chosen = None
        if outputs is not None:
            chosen = check_ints(outputs, "outputs must be the number of an output or a list of numbers")
        units = None if target_transform is None else TargetTransform.of(target_transform)
        check_choice(targets, "targets", ("scaled", "original"))
        if targets == "original" and units is None:
            raise ValueError(
                "targets='original' needs to know what they went through before training: target_transform="
            )
        if (
            targets == "original"
            and units is not None
            and units.affine is None
            and not hasattr(units.scaler, "transform")
        ):
            raise TypeError(f"targets='original' needs a target_transform with transform; got {target_transform!r}")
        check_choice(noise, "noise", ("auto", "none"))
        if isinstance(variance, str):
            check_choice(variance, "variance", tuple(VARIANCE_FORMS))
        else:
            check_callable(variance, "variance")
        if quantiles is not None:
            given, quantiles = quantiles, ()
            with suppress(TypeError, ValueError):
                quantiles = tuple(float(level) for level in np.atleast_1d(given))
            if len(quantiles) != 3 or not 0 < quantiles[0] < quantiles[1] < quantiles[2] < 1:
                got = quantiles or repr(given)
                raise ValueError(f"quantiles must be three levels in order, as (0.05, 0.5, 0.95), got {got}")
            if variance is not None:
                raise ValueError("give variance= or quantiles=, not both")
        if robust is not None:
            check_choice(robust, "robust", ("HC0", "HC1", "HC2", "HC3"))
            if quantiles is not None:
                raise ValueError("robust= is for squared losses, not for quantiles: leave it out")
        if missing is not None:
            check_choice(missing, "missing", ("ignore",))
        single, keeps_residuals = isinstance(outputs, int | np.integer), noise == "auto" and quantiles is None
        return cls(chosen, single, per_output, units, targets, keeps_residuals, variance, quantiles, robust, missing)

    @property
    def may_miss(self) -> bool:
        """Whether NaN among targets means that there is none."""
        return self.missing is not None

    @property
    def scaler(self) -> Any:
        """The scaler that targets went through before training, if there is one."""
        return None if self.units is None else self.units.scaler

    def picks(self, output: Pick | None) -> tuple[Pick | None, Pick | None]:
        """Return the functions that pick the prediction, and what comes with it, from what the model returns."""
        if self.variance is not None:
            return mean_and_variance(output, self.variance)
        return (output, None) if self.quantiles is None else middle_and_ends(output)

    def selected(self, n_returned: int) -> Outputs:
        """Return the outputs that there are intervals for."""
        chosen = self.outputs if self.outputs is not None else tuple(range(n_returned))
        if max(chosen) >= n_returned or min(chosen) < -n_returned:
            raise ValueError(f"outputs={list(chosen)}, but the network has {n_returned}: 0 to {n_returned - 1}")
        chosen = tuple(o % n_returned for o in chosen)
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"outputs={list(chosen)} holds an output more than once")
        return chosen

    def groups(self, n_returned: int) -> list[Outputs]:
        """Return the outputs of the network that each fit is for."""
        chosen = self.selected(n_returned)
        return [(o,) for o in chosen] if self.per_output else [chosen]

    def head(self, outputs: Outputs) -> Head:
        """Return the function of the network's outputs whose gradients are the rows of J."""
        columns = list(outputs)
        return lambda y: y if columns == list(range(y.shape[1])) else y[:, columns]

    def check_raw_targets(self, y: Any) -> None:
        """Raise if targets are of a kind that no conversion helps."""

    def read_targets(self, y: Any) -> Tensor:  # (n,) or (n, k) -> (n, k) float64
        """Return targets as the network was trained on."""
        given = read_targets(y)
        return given if self.units is None or self.targets == "scaled" else self._to_scaled(self.units, given)

    def possible_targets(self, y: Any) -> list[Tensor]:
        """Return what targets are in the units of training: if given in these, and if given in original units."""
        found = [read_targets(y)]
        with suppress(ValueError):  # they may be none that the transform takes
            found += [] if self.units is None else [self._to_scaled(self.units, found[0])]
        return [each.masked_fill(each.isnan(), 0.0) for each in found]  # as rows of a fit have them

    def _to_scaled(self, units: TargetTransform, given: Tensor) -> Tensor:
        columns, k = self.outputs or tuple(range(given.shape[1])), given.shape[1]
        chosen = list(range(k)) if len(columns) == k else [o % k for o in columns if -k <= o < k]
        values = given.numpy().copy()
        scaled = units.to_scaled(values[:, chosen])
        bad = np.isfinite(values[:, chosen]) & ~np.isfinite(scaled)
        if bad.any():
            row, column = map(int, np.argwhere(bad)[0])
            made = f"{values[row, chosen[column]]:g} in row {row} becomes {scaled[row, column]}"
            raise ValueError(f"target_transform does not take all targets: {made}")
        values[:, chosen] = scaled
        return torch.from_numpy(values)

    def check_targets(self, targets: Tensor, n_returned: int) -> None:
        """Raise if targets (n, …) do not fit a network with this number of outputs."""
        self.select_targets(self.selected(n_returned), targets, n_returned)

    def check_first_rows(self, y: Tensor, targets: Tensor) -> None:
        """Raise or warn if the network's outputs y (b, M) and the targets of the first rows look wrong."""
        n_returned = y.shape[1]
        chosen = self.selected(n_returned)
        given, outputs = self.select_targets(chosen, targets, n_returned).numpy(), y[:, list(chosen)].numpy()
        if self.units is None:
            return
        self.units.to_original(outputs)  # a transform that cannot take them is found before the work
        self.check_units(given, outputs, "fit")

    def n_counts(self, n_outputs: int, n_returned: int) -> int:
        """Return how many numbers are counted over the rows."""
        return (9 + self._is_curved) * n_outputs

    def losses(
        self, outputs: Outputs, y: Tensor, targets: Tensor, n_returned: int, weight: Tensor | None
    ) -> tuple[Tensor, np.ndarray]:
        """Return the losses (b, m), y being the values of the head, and sums of what is counted.

        These are `Moments`, and where the targets' transform is curved the squares of residuals in original units.
        """
        losses = self.residuals(outputs, y, targets, n_returned).square()
        chosen = self.selected(n_returned)
        columns, given = [chosen.index(o) for o in outputs], self.select_targets(chosen, targets, n_returned).numpy()
        other, f = self.in_other_units(given), y.double().numpy()
        moments = Moments.of(given[:, columns], f, None if other is None else other[:, columns], weight)
        counts = moments.sums.ravel()
        if self._is_curved and self.units is not None:
            predicted = given.copy()
            predicted[:, columns] = f
            squares = np.square(self.units.to_original(given) - self.units.to_original(predicted))[:, columns]
            squares = squares if weight is None else squares * weight.numpy()
            counts = np.concatenate([counts, squares.sum(axis=0)])
        return losses if weight is None else losses * weight, counts

    @property
    def _is_curved(self) -> bool:
        """Whether a difference of targets is not in proportion to one in their original units."""
        return self.scaler is not None and self.variance is None

    def in_other_units(self, given: np.ndarray) -> np.ndarray | None:
        """Return what targets (n, m) would be if they had been given in the other units; None if there are none."""
        if self.units is None:
            return None
        try:
            return self.units.to_scaled(given) if self.targets == "scaled" else self.units.to_original(given)
        except ValueError:  # they are none that the transform takes
            return None

    def moments(self, fit: Fit) -> Moments:
        """Return the moments of a fit's training rows."""
        return Moments(fit.counts[: 9 * fit.n_outputs].reshape(9, -1))

    def check_units(self, y: np.ndarray, f: np.ndarray, call: str) -> None:
        """Raise if targets (n, m) fit outputs clearly better in the other units."""
        if self.units is not None and len(y) >= N_ROWS_TO_JUDGE:
            self._check_units(Moments.of(y, f, self.in_other_units(y)), call)

    def check_answers(self, y: np.ndarray, mean: np.ndarray) -> None:
        """Raise if targets (n, m), which should be in original units as predictions are, have been scaled."""
        if self.units is not None and len(y) >= N_ROWS_TO_JUDGE:
            y = np.where(there := ~np.isnan(y), y, mean)
            if Moments.of(y, mean, self.units.to_original(y), there).fit_other_units():
                raise ValueError(sanity.other_units("original", "these rows"))

    def _check_units(self, moments: Moments, call: str) -> None:
        if moments.fit_other_units():
            raise ValueError(sanity.other_units(self.targets, call))

    def suspicions(self, fits: Sequence[Fit], y: np.ndarray, f: np.ndarray, rows: str, units: str) -> list[str]:
        """Return what makes targets and outputs (n, m) of rows outside of the training unlike those of the fits.

        Rows that are like the training rows may be predicted badly, by a network that has learnt these by heart, but
        not half of them worse than by a standard deviation of the training targets, not with errors that a line
        through the predictions would take away, and not so that predictions and targets have nothing to do with each
        other. `units` are those of y and f; a target that is NaN is none. With gaps errors are those of all outputs.
        """
        if (there := ~np.isnan(y)).sum(axis=0).min() < N_ROWS_TO_JUDGE:
            return []
        moments, training = Moments.of(y, f, None, there), list(map(self.moments, fits))
        if (bad := (moments.explained < 0) & (moments.correlated > 0.5)).any():
            return [sanity.misfit(moments, bad, rows)]
        std = np.concatenate([each.std for each in training])
        if units == "original" and self.units is not None:
            if self.units.affine is None:
                return []
            std = self.units.to_original_difference(std)
        explained = np.concatenate([each.explained for each in training])
        learnt = np.sqrt(np.where(explained > 0.5, explained, 0.0))  # of the others little can be said
        if (bad := (moments.explained < 0) & (rank_correlation(y, f) < KEPT_CORRELATION * learnt)).any():
            return [sanity.unrelated(explained[bad][0], moments.explained[bad][0], rows)]
        median = np.nanmedian(np.abs(y - f) / np.where(std > 0, std, np.inf), axis=0 if there.all() else None)
        return [sanity.far_off(median, rows)] if (median > 1).any() else []

    def check_fits(self, fits: Sequence[Fit]) -> None:
        """Raise if the targets of fits were in other units."""
        for fit in fits:
            if fit.n_rows >= N_ROWS_TO_JUDGE:
                self._check_units(self.moments(fit), "fit")

    @property
    def least_explained(self) -> float:
        """R² that outputs have at least which are no worse than a constant: a median is up to one s from the mean."""
        return 0.0 if self.quantiles is None else -1.0

    def residuals(self, outputs: Outputs, y: Tensor, targets: Tensor, n_returned: int) -> Tensor:  # (b, m)
        """Return targets − y, y being the values of the head."""
        return self.select_targets(outputs, targets, n_returned) - y.double()

    def select_targets(self, outputs: Outputs, targets: Tensor, n_returned: int) -> Tensor:  # (n, len(outputs))
        """Return the targets of these outputs; targets have a column for each output, or for each selected one."""
        chosen = self.selected(n_returned)
        if targets.shape[1] == n_returned:
            return targets[:, list(outputs)]
        if targets.shape[1] == len(chosen):
            return targets[:, [chosen.index(o) for o in outputs]]
        raise ValueError(
            f"the network returns {n_returned} outputs per row, and the targets have {targets.shape[1]} columns: give "
            "one column per output, or outputs=[...] for those that have one; for a network that returns its own "
            "variance give variance=, and quantiles= for one that returns quantiles"
        )

    def select_weights(self, outputs: Outputs, weight: Tensor, n_returned: int) -> Tensor:  # (n, len(outputs))
        """Return the weights of these outputs, of which each row has several."""
        if weight.shape[1] not in (n_returned, len(self.selected(n_returned))):
            raise ValueError(f"sample_weight has {weight.shape[1]} columns, and the network {n_returned} outputs")
        return self.select_targets(outputs, weight, n_returned)

    def warnings(self, fits: Sequence[Fit]) -> list[str]:
        """Return where the formula, the engine or the network should not be trusted."""
        messages: list[str] = []
        for fit in fits:
            moments = self.moments(fit)
            if fit.n_rows >= N_ROWS_TO_JUDGE and (bad := moments.misfits(self.least_explained)).any():
                messages.append(sanity.misfit(moments, bad, "its training rows"))
            if fit.covariance.damping is None:
                continue
            nu = float(fit.degrees_of_freedom.min())  # of the output that has fewest
            p_star = (n := int(fit.observed[fit.degrees_of_freedom.argmin()])) - nu
            if nu <= 0:
                text = f"n − p* = {nu:.3g} is not positive: the formula has no answer; raise the damping, or calibrate"
                messages.append(FormulaMessage(text))
            elif p_star > n / 2 or nu < 10:
                how = "often far too wide" if nu >= 1 else "n − p* is below 1: its widths mean nothing"
                text = (
                    f"the network has p* = {p_star:.1f} effective parameters for n = {n} rows: the formula is "
                    f"unreliable here ({how}); calibrate on held-out data, or raise the damping if the "
                    "network was trained with more regularisation"
                )
                messages.append(FormulaMessage(text))
            # more than 5 % of the degrees of freedom shows in s, more than half of p* in q
            messages += fit.inaccuracies(max(min(0.05 * nu, 0.5 * p_star), 0.5), f"{p_star:.1f}, n = {n}")
        return list(dict.fromkeys(messages))

    def options(self) -> dict[str, Any]:
        """Return the arguments that it was constructed from, functions aside."""
        outputs = self.outputs
        options: dict[str, Any] = {"outputs": outputs[0] if outputs is not None and self.single else outputs}
        options["noise"] = "auto" if self.keeps_residuals else "none"
        options |= {"quantiles": self.quantiles, "robust": self.robust, "missing": self.missing} | (
            {"variance": self.variance} if isinstance(self.variance, str) else {}
        )
        options |= {"targets": self.targets}
        return options if self.units is None else options | {"target_transform": self.units.affine}

    def noise_std(self, fits: Sequence[Fit]) -> np.ndarray:  # (m,)
        """Return s = √(RSS/(n − p*)) of each output, in the units of `root_squares`; NaN where n − p* ≤ 0."""
        freedom = np.concatenate([fit.degrees_of_freedom for fit in fits])
        return self.root_squares(fits) / np.sqrt(np.where(freedom > 0, freedom, np.nan))

    def root_squares(self, fits: Sequence[Fit]) -> np.ndarray:  # (m,)
        """Return √RSS of each output, in the original units of the targets, or of the network's own σ."""
        if self._is_curved:
            return np.sqrt(np.concatenate([fit.counts[9 * fit.n_outputs :] for fit in fits]))
        roots = np.sqrt(np.concatenate([fit.losses for fit in fits]))
        return roots if self.units is None or self.variance is not None else self.units.to_original_difference(roots)

    def about(self, fits: Sequence[Fit]) -> dict[str, Any]:
        """Return what a file says about fits for this task."""
        return {"noise_std": self.noise_std(fits).tolist()}


Task = Regression | Classification
