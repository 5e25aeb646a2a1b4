"""What classification does in a fit; `Regression` in `tasks.py` is the same for regression."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..data.batches import read_targets
from ..data.labels import check_labels, count_classes, refuse_text_labels
from ..network.log_odds import joint_fisher, log_odds, own_fisher
from ..network.network import Head
from ..network.returned import Pick
from ..validation import check_ints
from . import sanity
from .fit import N_ROWS_TO_JUDGE, Fit, Outputs, check_outputs


@dataclass(frozen=True)
class Classification:
    """Cross-entropy: rows of J are gradients of log-odds, weighted so that JᵀJ is the Fisher matrix."""

    classes: Outputs | None = None  # None: all
    single: bool = False  # whether one class was asked for by its number
    top: int = 0  # answers are for so many of the most likely classes of each row; 0: for `classes`
    per_output: bool = False

    keeps_residuals: ClassVar[bool] = False
    may_miss: ClassVar[bool] = False
    has_noise: ClassVar[bool] = False
    no_gradient_hint: ClassVar[str] = "; or all probabilities are 0 and 1 to the last digit, and F is zero"
    scaler: ClassVar[Any] = None
    units: ClassVar[None] = None
    variance: ClassVar[None] = None
    quantiles: ClassVar[None] = None
    robust: ClassVar[None] = None
    loss: ClassVar[str] = "cross_entropy"
    methods: ClassVar[tuple[str, ...]] = ("lac", "aps")  # that sets of labels can be calibrated by
    several: ClassVar[bool] = False  # whether a row may have several labels, or none

    @classmethod
    def of(cls, classes: Any, per_output: bool) -> Self:
        """Return the task of an estimator's arguments."""
        if isinstance(classes, str) and (found := re.fullmatch(r"predicted|top([1-9]\d*)", classes)):
            if per_output:
                raise ValueError(f"classes={classes!r} goes with per_output=False: per_output=True fits each class")
            return cls(None, classes == "predicted", int(found[1] or 1))
        numbers = None
        if classes is not None:
            expected = "classes must be the number of a class, a list of numbers, 'predicted', or 'top5' for any number"
            numbers = check_ints(classes, expected)
            if len(set(numbers)) < len(numbers):
                raise ValueError(f"classes={list(numbers)} holds a class more than once")
        return cls(numbers, isinstance(classes, int | np.integer), 0, per_output)

    def picks(self, output: Pick | None) -> tuple[Pick | None, Pick | None]:
        return output, None

    def groups(self, n_returned: int) -> list[Outputs]:
        n_classes, chosen = self.n_labels(n_returned), self.classes
        if chosen is None:
            chosen = (1,) if n_returned < n_classes else tuple(range(n_classes))
        if self.top > n_classes:
            raise ValueError(f"classes='top{self.top}': the network knows {n_classes}")
        if unknown := [c for c in chosen if not 0 <= c < n_classes]:
            known = ", ".join(map(str, range(n_classes))) if n_classes <= 10 else f"0 to {n_classes - 1}"
            raise ValueError(f"classes={list(chosen)}: there is no class {unknown[0]}; the network knows {known}")
        return [(c,) for c in chosen] if self.per_output and not self.is_binary(n_returned) else [chosen]

    def n_labels(self, n_returned: int) -> int:
        return count_classes(n_returned)

    def is_binary(self, n_returned: int) -> bool:
        """Return whether one log-odds says all."""
        return n_returned <= 2

    def log_odds(self, z: Tensor) -> Tensor:
        return log_odds(z)

    def asked(self, outputs: Outputs, n_returned: int) -> Head:
        """Return the log-odds that answers are about; of two classes one number, of class 1."""
        if self.is_binary(n_returned):
            return self.log_odds
        if self.top:
            return lambda z: self.log_odds(z).gather(1, z.topk(self.top, dim=1).indices)
        return lambda z: self.log_odds(z)[:, list(outputs)]

    def head(self, outputs: Outputs) -> Head:
        def own(z: Tensor) -> Tensor:
            return own_fisher(log_odds(z)[:, list(outputs)]) if z.shape[1] > 2 else joint_fisher(z)

        return own if self.per_output else joint_fisher

    def check_one_label(self, what: str) -> None:
        """Raise where a row may have several labels."""
        if self.several:
            advice = "compare predict_set with the labels"
            raise ValueError(f"{what} is for classifiers of one label a row, and loss='bce' is for several: {advice}")

    def check_raw_targets(self, y: Any) -> None:
        refuse_text_labels(y)

    def read_targets(self, y: Any) -> Tensor:
        return read_targets(y)

    def possible_targets(self, y: Any) -> list[Tensor]:
        return [read_targets(y)]

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

    def n_counts(self, n_outputs: int, n_returned: int) -> int:
        return 2 + count_classes(n_returned)

    def check_fits(self, fits: Sequence[Fit]) -> None:
        """Labels have no units."""

    def losses(
        self, outputs: Outputs, y: Tensor, targets: Tensor, n_returned: int, weight: Tensor | None
    ) -> tuple[Tensor, np.ndarray]:
        """Return −log π of each row in the column of its class (for a class alone, of "c or not c"), and how many rows
        are classified correctly, how many scores lie outside [0, 1], and the weight of the rows of each class."""
        truth, s = check_labels(targets, n_returned), y.double()
        outside = int(((s < 0) | (s > 1)).sum())
        if s.shape[1] == 1:
            is_class = truth == (1 if n_returned <= 2 else outputs[0])
            losses = -logsigmoid(torch.where(is_class[:, None], s, -s))
            correct = (s[:, 0] > 0) == is_class
        else:
            losses = torch.zeros_like(s).scatter_(1, truth[:, None], -logsigmoid(s.gather(1, truth[:, None])))
            correct = s.argmax(dim=1) == truth
        w = torch.ones(len(truth), dtype=torch.float64) if weight is None else weight[:, 0].double()
        frequencies = torch.zeros(count_classes(n_returned), dtype=torch.float64).index_add_(0, truth, w)
        counts = np.array([float(correct.sum()), float(outside), *frequencies.tolist()])
        return losses if weight is None else losses * weight, counts

    def entropy(self, fit: Fit) -> float:
        """Return the smallest loss of the training rows that equal scores for all of them can have."""
        frequencies = fit.counts[2:]
        if fit.n_outputs == 1 and fit.n_returned > 2:
            own = frequencies[fit.outputs[0]]
            frequencies = np.array([own, frequencies.sum() - own])
        some = frequencies[frequencies > 0]
        return float(-(some * np.log(some / some.sum())).sum())

    def select_weights(self, outputs: Outputs, weight: Tensor, n_returned: int) -> Tensor:
        raise ValueError(f"sample_weight of a classifier must have shape (n,), got {weight.shape[1]} columns")

    def warnings(self, fits: Sequence[Fit]) -> list[str]:
        messages = []
        for fit in fits:
            loss, entropy = float(fit.losses.sum()), self.entropy(fit)
            if fit.n_rows >= N_ROWS_TO_JUDGE and loss > entropy > 0:
                messages.append(sanity.no_better_than_frequencies(loss / fit.n_rows, entropy / fit.n_rows))
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
            messages += fit.inaccuracies(max(0.1 * p_star, 0.5), f"{p_star:.1f}")
        if (self.several or fits[0].n_returned == 1) and fits[0].counts[1] == 0:
            messages.append(
                "all outputs lie between 0 and 1: they are taken as logits; if they are probabilities, give "
                "output=torch.logit, or take the sigmoid off"
            )
        return list(dict.fromkeys(messages))

    def options(self) -> dict[str, Any]:
        if self.top:
            return {"classes": "predicted" if self.single else f"top{self.top}"}
        return {"classes": self.classes[0] if self.single and self.classes is not None else self.classes}

    def shown(self, fits: Sequence[Fit]) -> str:
        """Return what a summary says of the classes."""
        n_all, chosen = self.n_labels(fits[0].n_returned), [c for fit in fits for c in fit.outputs]
        likely = "the predicted one" if self.single else f"the {self.top} most likely of each row"
        some = likely if self.top else ", ".join(map(str, chosen))
        restriction = f", asked about {some}" if self.top or len(chosen) < n_all else ""
        each = "alone" if self.several else "against the rest, alone"
        own = fits[0].n_outputs == 1 and not self.is_binary(fits[0].n_returned)
        form = f"each {each}" if own else "one Fisher matrix for all"
        return f"{n_all:,}{restriction}: {form}"

    def rows_per_label(self, fit: Fit) -> int:
        """Return how many log-odds the label of a row is about."""
        return max(fit.n_outputs - 1, 1)

    def accuracies(self, fits: Sequence[Fit]) -> list[float]:
        """Return the share of training rows classified correctly, for each fit."""
        return [float(fit.counts[0]) / fit.n_rows for fit in fits]

    def about(self, fits: Sequence[Fit]) -> dict[str, Any]:
        return {"training_accuracy": self.accuracies(fits)}
