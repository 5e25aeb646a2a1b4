"""What regression and classification do differently in a fit: outputs, gradients, losses, targets and warnings.

Both classes have the same members; a fit knows no other difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..data.batches import check_labels, count_classes, refuse_text_labels
from ..errors import FormulaMessage, warn
from ..network.log_odds import joint_fisher, log_odds, own_fisher
from ..network.network import Head
from ..network.returned import VARIANCE_FORMS, Pick, mean_and_variance, middle_and_ends
from ..target_transform import TargetTransform
from ..validation import check_callable, check_choice, check_ints
from .fit import Fit, check_outputs

TOLERABLE_WIDTH_ERROR = 0.05
N_ROWS_TO_JUDGE_UNITS = 8

Outputs = tuple[int, ...]


@dataclass(frozen=True)
class Regression:
    """Squared losses: rows of J are gradients of the outputs themselves."""

    outputs: Outputs | None = None  # None: all
    single: bool = False  # whether one output was asked for by its number
    per_output: bool = False
    units: TargetTransform | None = None
    keeps_residuals: bool = True  # whether a fit keeps some residuals, from which the noise can be learnt
    variance: str | Pick | None = None  # how the network returns a variance of its own, if it does
    quantiles: tuple[float, ...] | None = None  # the levels of a network that returns (lower, middle, upper)
    robust: str | None = None  # the kind of a robust covariance, "HC0" to "HC3"

    n_counts: ClassVar[int] = 0  # how many numbers are counted over the rows
    has_noise: ClassVar[bool] = True  # whether an interval is for an observation, of width √(1 + q), or for a score, √q
    no_gradient_hint: ClassVar[str] = ""  # why else all gradients may be zero

    @classmethod
    def of(
        cls,
        outputs: Any,
        per_output: bool,
        target_transform: Any,
        noise: Any,
        variance: Any,
        quantiles: Any,
        robust: Any,
    ) -> Self:
        """Return the task for the arguments of an estimator, checked."""
        chosen = None
        if outputs is not None:
            chosen = check_ints(outputs, "outputs must be the number of an output or a list of numbers")
        units = None if target_transform is None else TargetTransform.of(target_transform)
        check_choice(noise, "noise", ("auto", "none"))
        if isinstance(variance, str):
            check_choice(variance, "variance", tuple(VARIANCE_FORMS))
        else:
            check_callable(variance, "variance")
        if quantiles is not None:
            quantiles = tuple(float(level) for level in np.atleast_1d(quantiles))
            if len(quantiles) != 3 or not 0 < quantiles[0] < quantiles[1] < quantiles[2] < 1:
                raise ValueError(f"quantiles must be three levels in order, as (0.05, 0.5, 0.95), got {quantiles}")
            if variance is not None:
                raise ValueError("give variance= or quantiles=, not both")
        if robust is not None:
            check_choice(robust, "robust", ("HC0", "HC1", "HC2", "HC3"))
            if quantiles is not None:
                raise ValueError("robust= is for squared losses, not for quantiles: leave it out")
        single, keeps_residuals = isinstance(outputs, int | np.integer), noise == "auto" and quantiles is None
        return cls(chosen, single, per_output, units, keeps_residuals, variance, quantiles, robust)

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

    def check_targets(self, targets: Tensor, n_returned: int) -> None:
        """Raise if targets (n, …) do not fit a network with so many outputs."""
        self.select_targets(self.selected(n_returned), targets, n_returned)

    def check_first_rows(self, y: Tensor, targets: Tensor) -> None:
        """Raise or warn if the network's outputs y (b, M) and the targets of the first rows look wrong."""
        n_returned = y.shape[1]
        chosen = self.selected(n_returned)
        given, outputs = self.select_targets(chosen, targets, n_returned).numpy(), y[:, list(chosen)].numpy()
        if self.units is None:
            return
        self.units.to_original(outputs)  # a transform that cannot take them is found before the work
        scaled = self.units.to_scaled(given)
        if scaled is None or len(given) < N_ROWS_TO_JUDGE_UNITS:
            return
        rss, constant = np.square(given - outputs).sum(), np.square(given - given.mean(axis=0)).sum()
        if rss > constant and np.square(scaled - outputs).sum() < rss / 4:
            warn(
                "the targets look as if they were in the original units: with target_transform, fit and calibrate take "
                "them as the network was trained on"
            )

    def losses(self, outputs: Outputs, y: Tensor, targets: Tensor, n_returned: int) -> tuple[Tensor, np.ndarray]:
        """Return the losses (b, m), y being the values of the head, and sums of what is counted."""
        return self.residuals(outputs, y, targets, n_returned).square(), np.zeros(0)

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
            if fit.covariance.damping is None:
                continue
            nu = float(fit.degrees_of_freedom.min())  # of the output that has fewest
            n, p_star = fit.n_rows, fit.n_rows - nu
            if nu <= 0:
                text = f"n − p* = {nu:.3g} is not positive: the formula has no answer; raise the damping, or calibrate"
                messages.append(FormulaMessage(text))
            elif p_star > n / 2 or nu < 10:
                text = (
                    f"the network has p* = {p_star:.1f} effective parameters for n = {n} rows: the formula is "
                    "unreliable here (often far too wide); calibrate on held-out data, or raise the damping if the "
                    "network was trained with more regularisation"
                )
                messages.append(FormulaMessage(text))
            # more than 5 % of the degrees of freedom shows in s, more than half of p* in q
            messages += _inaccurate(fit, max(min(0.05 * nu, 0.5 * p_star), 0.5), f"{p_star:.1f}, n = {n}")
        return list(dict.fromkeys(messages))

    def options(self) -> dict[str, Any]:
        """Return the arguments that it was constructed from, functions aside."""
        outputs = self.outputs
        options: dict[str, Any] = {"outputs": outputs[0] if outputs is not None and self.single else outputs}
        options["noise"] = "auto" if self.keeps_residuals else "none"
        options |= {"quantiles": self.quantiles, "robust": self.robust} | (
            {"variance": self.variance} if isinstance(self.variance, str) else {}
        )
        if self.units is None or self.units.mean is None:
            return options
        return {**options, "target_transform": (self.units.mean, self.units.std)}

    def noise_std(self, fits: Sequence[Fit]) -> np.ndarray:  # (m,)
        """Return s of each output, in the units of the target where these are known, or of the network's own σ."""
        noise = np.concatenate([fit.noise_std for fit in fits])
        return noise if self.units is None or self.variance is not None else self.units.to_original_difference(noise)

    def about(self, fits: Sequence[Fit]) -> dict[str, Any]:
        """Return what a file tells about fits for this task."""
        return {"noise_std": self.noise_std(fits).tolist()}


@dataclass(frozen=True)
class Classification:
    """Cross-entropy: rows of J are gradients of log-odds, weighted so that JᵀJ is the Fisher matrix."""

    classes: Outputs | None = None  # None: all
    single: bool = False  # whether one class was asked for by its number
    predicted: bool = False  # whether answers are for the class predicted for each row
    per_output: bool = False

    n_counts: ClassVar[int] = 2
    keeps_residuals: ClassVar[bool] = False
    has_noise: ClassVar[bool] = False
    no_gradient_hint: ClassVar[str] = "; or all probabilities are 0 and 1 to the last digit, and F is zero"
    scaler: ClassVar[Any] = None
    variance: ClassVar[None] = None
    quantiles: ClassVar[None] = None
    robust: ClassVar[None] = None

    def picks(self, output: Pick | None) -> tuple[Pick | None, Pick | None]:
        return output, None

    def groups(self, n_returned: int) -> list[Outputs]:
        n_classes, chosen = count_classes(n_returned), self.classes
        if chosen is None:
            chosen = (1,) if n_returned == 1 else tuple(range(n_classes))
        if unknown := [c for c in chosen if not 0 <= c < n_classes]:
            known = ", ".join(map(str, range(n_classes))) if n_classes <= 10 else f"0 to {n_classes - 1}"
            raise ValueError(f"classes={list(chosen)}: there is no class {unknown[0]}; the network knows {known}")
        return [(c,) for c in chosen] if self.per_output and n_returned > 2 else [chosen]

    def head(self, outputs: Outputs) -> Head:
        def own(z: Tensor) -> Tensor:
            return own_fisher(log_odds(z)[:, list(outputs)]) if z.shape[1] > 2 else joint_fisher(z)

        return own if self.per_output else joint_fisher

    def check_raw_targets(self, y: Any) -> None:
        refuse_text_labels(y)

    def check_targets(self, targets: Tensor, n_returned: int) -> None:
        check_labels(targets, n_returned)

    def check_first_rows(self, y: Tensor, targets: Tensor) -> None:
        check_outputs(y)
        if y.shape[1] > 1 and bool((y >= 0).all() & ((y.sum(dim=1) - 1).abs() < 1e-4).all()):
            raise ValueError(
                "the network returns probabilities (rows of numbers ≥ 0 that sum to 1), and logits are needed: give "
                "output=torch.log, or take the softmax off"
            )
        check_labels(targets, y.shape[1])

    def losses(self, outputs: Outputs, y: Tensor, targets: Tensor, n_returned: int) -> tuple[Tensor, np.ndarray]:
        """Return −log π of each row in the column of its class (for a class alone, of "c or not c"), and how many rows
        are classified correctly and how many scores lie outside [0, 1]."""
        truth, s = check_labels(targets, n_returned), y.double()
        outside = int(((s < 0) | (s > 1)).sum())
        if s.shape[1] == 1:
            is_class = truth == (1 if n_returned <= 2 else outputs[0])
            losses = -logsigmoid(torch.where(is_class[:, None], s, -s))
            correct = (s[:, 0] > 0) == is_class
        else:
            losses = torch.zeros_like(s).scatter_(1, truth[:, None], -logsigmoid(s.gather(1, truth[:, None])))
            correct = s.argmax(dim=1) == truth
        return losses, np.array([float(correct.sum()), float(outside)])

    def select_weights(self, outputs: Outputs, weight: Tensor, n_returned: int) -> Tensor:
        raise ValueError(f"sample_weight of a classifier must have shape (n,), got {weight.shape[1]} columns")

    def warnings(self, fits: Sequence[Fit]) -> list[str]:
        messages = []
        for fit in fits:
            n, p_star = fit.n_rows, fit.effective_parameters
            if p_star > n / 2:
                messages.append(
                    f"the network has p* = {p_star:.1f} effective parameters for n = {n} rows: the formula, which is "
                    "for many rows per parameter, is unreliable here; raise the damping if the network was trained "
                    "with more regularisation"
                )
            elif p_star < 1:
                messages.append(
                    f"the training rows determine no more than p* = {p_star:.2g} parameters, as the network is so sure "
                    "of them or λ so large: narrow intervals then come from the weight decay, not from the data; look "
                    "at leverage(x)"
                )
            messages += _inaccurate(fit, max(0.1 * p_star, 0.5), f"{p_star:.1f}")
        if fits[0].n_returned == 1 and fits[0].counts[1] == 0:
            messages.append(
                "all outputs lie between 0 and 1: they are taken as logits; if they are probabilities, give "
                "output=torch.logit, or take the sigmoid off"
            )
        return list(dict.fromkeys(messages))

    def options(self) -> dict[str, Any]:
        if self.predicted:
            return {"classes": "predicted"}
        return {"classes": self.classes[0] if self.single and self.classes is not None else self.classes}

    def accuracies(self, fits: Sequence[Fit]) -> list[float]:
        """Return the share of training rows classified correctly, for each fit."""
        return [float(fit.counts[0]) / fit.n_rows for fit in fits]

    def about(self, fits: Sequence[Fit]) -> dict[str, Any]:
        return {"training_accuracy": self.accuracies(fits)}


Task = Regression | Classification


def _inaccurate(fit: Fit, tolerable_missed: float, found: str) -> list[str]:
    """Return a warning if the engine's error is too large: its estimate, or its bound where there is no estimate."""
    missed = fit.covariance.missed_parameters
    advice = "raise its rank, dim or landmarks, or use Exact() if memory allows"
    if fit.error is not None:
        bad = fit.error.width > TOLERABLE_WIDTH_ERROR
        return [f"{fit.engine!r} is not accurate enough here: {fit.error}; {advice}"] if bad else []
    if missed <= tolerable_missed:
        return []
    return [f"the sketch may miss up to {missed:.0f} effective parameters (it found {found}): {advice}"]
