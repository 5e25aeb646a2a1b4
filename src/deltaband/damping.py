"""The damping λ of the delta method, given directly or derived from the weight decay of the training."""

from dataclasses import dataclass
from typing import Any

from .validation import check_int, check_non_negative

# The factor of n·weight_decay, for coupled weight decay. The optimiser adds wd·w to the gradient of the loss, so the
# objective is loss + wd/2·‖w‖²; λ is what stands before ‖w‖² once the loss is scaled to the sum of squares.
WEIGHT_DECAY_FACTORS = {
    "mean": 1 / 2,
    "half_mean": 1.0,
    "sum": 1 / 2,
    "weighted_mean": 1 / 2,
    "gaussian_nll": 1.0,
    "cross_entropy": 1.0,
    "bce": 1.0,
}
LOSSES_PER_ROW = ("sum", "cross_entropy")  # the others are means over all outputs of all rows
SMALLEST_VALUE, LARGEST_VALUE = 1e-100, 1e100  # their squares are still finite and positive
LARGEST_RELATIVE_DAMPING = 1e12  # λ over the sum of the eigenvalues of JᵀJ, beyond which these vanish in float64
TYPICAL_RELATIVE_DAMPING = 1e-4  # λ over the largest eigenvalue of JᵀJ, where nothing is known


@dataclass(frozen=True)
class Damping:
    """The damping λ: a number, a rule that derives it from the number of rows, or unknown.

    Args:
        damping: λ itself.
        weight_decay: The weight decay of the training, from which λ follows.
        loss: The loss of the training: "mean", "half_mean" or "sum" of squared errors (times the rows' weights, if they
            have some), "weighted_mean", which is divided by the sum of the weights, "gaussian_nll", "cross_entropy" or
            "bce".
        batch_size: The batch size of the training, for `loss="sum"` only.
        unknown: Why λ is not known, where it was to follow from an optimiser.

    Example:
        >>> Damping(weight_decay=0.01).at(1000)
        5.0
    """

    damping: float | None = None
    weight_decay: float | None = None
    loss: str = "mean"
    batch_size: int | None = None
    unknown: str = ""  # why it is unknown, where an optimiser was given

    def __post_init__(self) -> None:
        if self.weight_decay is not None and self.damping is not None:
            raise ValueError("give weight_decay or damping, not both: damping = λ is what weight_decay is turned into")
        if self.loss not in list(WEIGHT_DECAY_FACTORS):
            known = ", ".join(map(repr, WEIGHT_DECAY_FACTORS))
            raise ValueError(f"loss must be one of {known} (the first four of squared errors), got {self.loss!r}")
        if (self.loss == "sum") != (self.batch_size is not None):
            rule = "λ = n·weight_decay/(2·batch_size)"
            raise ValueError(f"loss='sum' needs batch_size=, and batch_size goes with loss='sum' alone: {rule}")
        if self.batch_size is not None:
            check_int(self.batch_size, "batch_size")
        for name, value in (("weight_decay", self.weight_decay), ("damping", self.damping)):
            check_non_negative(value, name)
            if value and not SMALLEST_VALUE <= float(value) <= LARGEST_VALUE:
                raise ValueError(f"{name} must be 0 or from {SMALLEST_VALUE:g} to {LARGEST_VALUE:g}, got {value!r}")

    @property
    def is_known(self) -> bool:
        return self.damping is not None or self.weight_decay is not None

    def loss_options(self) -> dict[str, Any]:
        """Return the arguments that say what was minimised; a classifier of one label per row has none."""
        sized = {} if self.loss == "bce" else {"batch_size": self.batch_size}
        return {} if self.loss == "cross_entropy" else {"loss": self.loss, **sized}

    def at(
        self, n_rows: int | None, n_outputs: int = 1, total_weight: float | None = None, n_targets: float | None = None
    ) -> float | None:
        """Return λ for a number of training rows, of outputs of the network, and a sum of weights; None if unknown.

        A mean is over the targets that there are, `n_targets` of each output on average.
        """
        if self.damping is not None:
            return float(self.damping)
        rows = n_rows if n_targets is None or self.loss == "sum" else n_targets
        rows = total_weight if self.loss == "weighted_mean" else rows
        if self.weight_decay is None or rows is None:
            return None
        terms = rows if self.loss in LOSSES_PER_ROW else rows * n_outputs
        return terms * float(self.weight_decay) * WEIGHT_DECAY_FACTORS[self.loss] / (self.batch_size or 1)

    def resolved(self, damping: float | None, energy: float) -> float | None:
        """Return λ, or raise where the eigenvalues of JᵀJ, which sum up to the energy, are nothing beside it."""
        if damping is not None and damping > LARGEST_RELATIVE_DAMPING * energy:
            given = "damping" if self.damping is not None else "weight_decay"
            raise ValueError(
                f"damping λ = {damping:.3g} is so large against JᵀJ, whose eigenvalues sum up to {energy:.3g}, that "
                f"all variances would be zero: give a smaller {given}"
            )
        return damping

    def missing(self, name: str, calibrated: bool) -> ValueError:
        """Return the error of an estimator with this name that needs λ where it is not known."""
        advice = "or calibrate on held-out data for prediction intervals without it"
        if calibrated:
            advice = "a calibration replaces it in predictions alone"
        why = f" ({self.unknown})" if self.unknown else ""
        given = f"give {name} the optimiser's weight_decay= or damping=, and fit again"
        return ValueError(f"λ is not known{why}: {given}; {advice}")

    def __str__(self) -> str:
        return self.rule()

    def rule(self, n_outputs: int = 1) -> str:
        """Return the rule that λ follows, as a short text for a summary."""
        if self.damping is not None:
            return "given"
        if self.weight_decay is None:
            return "not given"
        n = "n" if n_outputs == 1 else "n·m"
        rules = {"mean": f"{n}·wd/2", "sum": f"n·wd/(2·{self.batch_size})", "weighted_mean": "Σw·wd/2"}
        rule = rules.get(self.loss, "n·wd" if self.loss in LOSSES_PER_ROW else f"{n}·wd")
        return f"{rule}, weight decay {self.weight_decay:g}"
