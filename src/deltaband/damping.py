"""λ, the damping of the delta method, from what the optimiser was told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

# The factor of n·weight_decay, for coupled weight decay. The optimiser adds wd·w to the gradient of the loss, so the
# objective is loss + wd/2·‖w‖²; λ is what stands before ‖w‖² once the loss is scaled to the sum of squares.
FACTORS = {"mean": 1 / 2, "half_mean": 1.0, "sum": 1 / 2, "cross_entropy": 1.0}
HUGE = 1e100  # the square of which is still a number
BY_ROW = ("sum", "cross_entropy")  # the others are means over all outputs of all rows


@dataclass(frozen=True)
class Damping:
    """λ as a number, or as a rule that turns the number of rows into one; or neither."""

    damping: float | None = None
    weight_decay: float | None = None
    loss: str = "mean"
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.weight_decay is not None and self.damping is not None:
            raise ValueError("give weight_decay or damping, not both: damping = λ is what weight_decay is turned into")
        if not isinstance(self.loss, str) or self.loss not in FACTORS:
            raise ValueError(
                f"loss must be 'mean', 'half_mean' or 'sum' (of squared errors), got {self.loss!r}; other losses are "
                "not covered by the formula"
            )
        if self.loss == "sum" and self.batch_size is None:
            raise ValueError("loss='sum' needs batch_size=, that of the training: λ = n·weight_decay/(2·batch_size)")
        if self.loss != "sum" and self.batch_size is not None:
            raise ValueError("batch_size goes with loss='sum', where λ = n·weight_decay/(2·batch_size), and only there")
        size = self.batch_size
        if size is not None and (isinstance(size, bool) or not (isinstance(size, Integral) and size >= 1)):
            raise ValueError(f"batch_size must be a positive whole number, got {size!r}")
        for name in ("weight_decay", "damping"):
            value = getattr(self, name)
            check_non_negative(value, name)
            if value and not 1 / HUGE <= float(value) <= HUGE:  # no number of float32
                raise ValueError(f"{name} must be 0 or between {1 / HUGE:g} and {HUGE:g}, got {value!r}")

    @property
    def given(self) -> bool:
        """Whether λ will be known."""
        return self.damping is not None or self.weight_decay is not None

    def loss_options(self) -> dict[str, Any]:
        """Return the arguments that say what was minimised; a classifier has none."""
        return {} if self.loss == "cross_entropy" else {"loss": self.loss, "batch_size": self.batch_size}

    def at(self, n_rows: int | None, n_outputs: int = 1) -> float | None:
        """λ for n rows of m outputs; None where it is not known."""
        if self.damping is not None:
            return float(self.damping)
        if self.weight_decay is None or n_rows is None:
            return None
        terms = n_rows if self.loss in BY_ROW else n_rows * n_outputs
        return terms * float(self.weight_decay) * FACTORS[self.loss] / (self.batch_size or 1)

    def __str__(self) -> str:
        return self.rule()

    def rule(self, n_outputs: int = 1) -> str:
        """How λ came about."""
        if self.damping is not None:
            return "given"
        if self.weight_decay is None:
            return "not given"
        n = "n" if n_outputs == 1 else "n·m"
        rules = {"mean": f"{n}·wd/2", "half_mean": f"{n}·wd", "sum": f"n·wd/(2·{self.batch_size})"}
        return f"{rules.get(self.loss, 'n·wd')}, weight decay {self.weight_decay:g}"


def check_non_negative(value: Any, name: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (math.isfinite(value) and float(value) >= 0):
        raise ValueError(f"{name} must be a finite number ≥ 0, got {value!r}")
