"""`ClassificationIntervals`: for a trained classifier, intervals of each class's log-odds and probability."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from .damping import Damping
from .data import batches as reading
from .data import labels
from .data.labels import Tally
from .display.summary import Line, describe_classes, screen
from .engines import Engine
from .errors import NoGradientError, warn
from .fitting.accuracy import TOLERABLE
from .fitting.band import Band, Question
from .fitting.evaluate import check_outputs
from .fitting.fit import Fit
from .network.log_odds import joint_fisher, largest, log_odds, own_fisher
from .network.network import Head
from .network.parameter_selection import ParameterChoice
from .results import ClassIntervals, Intervals, like, parse_levels
from .validation import whole_numbers


class ClassificationIntervals(Band):
    """Confidence intervals of what a trained classifier says, class by class, by the delta method.

        s_c ± z(α/2) · √q,    q = gᵀ A⁻¹ F A⁻¹ g,    A = F + λI

    `s_c = z_c − log Σ_{k≠c} exp z_k`, the log-odds of class c against all others, is a function of the network's logits
    `z` and through them of its parameters; `g` is its gradient. `F = Σᵢ Σ_c π_c ∇log π_c ∇log π_cᵀ` is the softmax's
    Fisher matrix at the training rows. The sigmoid of the bounds are those of the probability π_c.

    It is a confidence band of the score: how far s_c would move if the network were trained on other labels drawn for
    the same rows. There is no noise term, and it is no set of labels that holds the true one. The formula assumes
    that the network was trained to (near) a minimum of `Σ −log π_y + λ/2 ‖w‖²`: with the mean cross-entropy and an
    optimiser's `weight_decay` λ = n·wd; else give `damping=λ`.

    The network returns logits (n, C), or one logit a row, (n,) or (n, 1), which is the log-odds of class 1 against
    class 0. Log-probabilities do as well; of probabilities `output=torch.log` makes them (`torch.logit` of a single
    one). Labels are whole numbers from 0 to C − 1.

    `classes` restricts the answers, and the gradients that they take, to one class or some, or to the one "predicted"
    for each row. By default all are answered for, (n, C); of a network with one logit class 1 is, (n,), as is any class
    alone.

    `per_output=True` takes each class alone, the Fisher matrix of its one-vs-rest probability instead of F: the paper's
    suggestion. It does not know what the other classes teach about the shared weights, and is wider. For two classes
    both are the same.

    `engine`, `memory`, `parameters`, `output` and `batch` are as in `PredictionIntervals`.
    """

    _noise = False
    _held = ("_fits", "_accuracies")

    def __init__(
        self,
        model: nn.Module,
        *,
        weight_decay: float | None = None,
        damping: float | None = None,
        classes: int | Sequence[int] | Literal["predicted"] | None = None,
        per_output: bool = False,
        engine: Engine | Literal["auto"] = "auto",
        memory: float | None = None,
        parameters: ParameterChoice = "all",
        output: Callable[[Any], Tensor] | None = None,
        batch: Callable[[Any], tuple[Any, Any]] | None = None,
    ) -> None:
        rule = Damping(damping, weight_decay, loss="cross_entropy")
        if not rule.given:
            raise ValueError(
                "give ClassificationIntervals the optimiser's weight_decay=, or damping=λ: the formula needs it"
            )
        self._predicted = isinstance(classes, str) and classes == "predicted"
        if self._predicted and per_output:
            raise ValueError("classes='predicted' goes with per_output=False: per_output=True is a fit for each class")
        self._classes = None if self._predicted else _class_numbers(classes)
        self._one_class = isinstance(classes, int | np.integer) or self._predicted
        self._accuracies: tuple[float, ...] = ()
        super().__init__(model, rule, engine, memory, parameters, output, batch, per_output)

    def fit(
        self, data: Any, y: Any = None, *, n_rows: int | None = None, progress: bool = True
    ) -> ClassificationIntervals:
        """One pass over the training data: `fit(loader)` with batches `(x, labels)`, or `fit(X, labels)`.

        The labels tell `summary()` how well the network does; the Fisher matrix needs the inputs alone.
        `per_output=True` makes a pass for each class. `n_rows` is as in `PredictionIntervals.fit`.
        """
        if y is not None:  # a long pass must not end in an error that a look at the labels would have given
            labels.refuse_names(y)
            x, _, _ = self._read(data, y, n_rows).peek()
            network = self._network()
            labels.checked(reading.targets(y), network.validate(x).n_returned)
        tally = Tally()
        try:
            fits = self._fit_to(self._read(data, y, n_rows), progress, tally)
        except NoGradientError as error:
            raise NoGradientError(
                f"{error}; or all probabilities are 0 and 1 to the last digit, and F is zero"
            ) from None
        for message in dict.fromkeys(_warnings(fits, tally)):
            warn(message)
        self._accuracies = tuple(tally.accuracy(fit.outputs, fit.n_rows) for fit in fits)
        self._fits = fits
        return self

    def predict(self, x: Any, level: float | Sequence[float] = 0.95) -> ClassIntervals:
        """Intervals for the rows of `x`: NumPy in, NumPy out; tensor in, tensor out."""
        from scipy.special import expit, ndtri

        levels = parse_levels(level)
        s, q, classes = self._asked(x, "variance")
        half = np.sqrt(q)[:, :, None] * ndtri((1 + np.array(levels)) / 2)  # (n, classes, levels)
        lower, upper = s[:, :, None] - half, s[:, :, None] + half
        if np.ndim(level) == 0:
            lower, upper = lower[:, :, 0], upper[:, :, 0]

        def intervals(of: Callable[[np.ndarray], np.ndarray]) -> Intervals:
            return Intervals(
                self._like(x, of(s)),
                self._like(x, of(lower), -np.inf),
                self._like(x, of(upper), np.inf),
                levels[0] if np.ndim(level) == 0 else levels,
            )

        return ClassIntervals(classes, intervals(lambda s: s), intervals(expit))

    def variance(self, x: Any) -> Any:
        """q = gᵀ A⁻¹FA⁻¹ g of each class, the variance of its log-odds.

        It ignores directions that the training data never touched: far outside the data it can stay small.
        """
        return self._like(x, self._asked(x, "variance")[1])

    def leverage(self, x: Any) -> Any:
        """h = gᵀ A⁻¹ g of each class, how far its log-odds are from what the training data determine; it grows where
        `variance` may not."""
        return self._like(x, self._asked(x, "leverage")[1])

    def summary(self) -> str:
        """What was fitted, on one screen."""
        return screen("ClassificationIntervals", self._described())

    def __repr__(self) -> str:
        if self._fits:
            return self.summary()
        name = type(self.model).__name__
        return f"ClassificationIntervals({name}, λ {self._damping}, {self.engine!r}), not fitted"

    def _described(self) -> list[Line]:
        return describe_classes(self.model, self._fitted(), self._damping, self._accuracies, self._predicted)

    # --- what of the network's outputs is asked about

    def _options(self) -> dict[str, Any]:
        classes: Any = "predicted" if self._predicted else self._classes
        if self._one_class and self._classes is not None:
            classes = self._classes[0]
        return {**super()._options(), "classes": classes}

    def _about(self) -> dict[str, Any]:
        return {"training_accuracy": list(self._accuracies)}

    def _check_targets(self, y: Tensor, targets: Tensor) -> None:
        check_outputs(y)
        if y.shape[1] > 1 and bool((y >= 0).all() & ((y.sum(dim=1) - 1).abs() < 1e-4).all()):
            raise ValueError(
                "the network returns probabilities (rows of numbers ≥ 0 that sum to 1), and logits are needed: give "
                "output=torch.log, or take the softmax off"
            )
        labels.checked(targets, y.shape[1])

    def _groups(self, n_returned: int) -> list[tuple[int, ...]]:
        n_classes = labels.n_classes(n_returned)
        chosen = self._classes
        if chosen is None:
            chosen = (1,) if n_returned == 1 else tuple(range(n_classes))
        if unknown := [c for c in chosen if not 0 <= c < n_classes]:
            known = ", ".join(map(str, range(n_classes))) if n_classes <= 10 else f"0 to {n_classes - 1}"
            raise ValueError(f"classes={list(chosen)}: there is no class {unknown[0]}; the network knows {known}")
        return [(c,) for c in chosen] if self._per_output and n_returned > 2 else [chosen]

    def _fitted_head(self, outputs: tuple[int, ...]) -> Head:
        def own(z: Tensor) -> Tensor:
            return own_fisher(log_odds(z)[:, list(outputs)]) if z.shape[1] > 2 else joint_fisher(z)

        return own if self._per_output else joint_fisher

    def _asked(self, x: Any, what: Literal["variance", "leverage"]) -> tuple[np.ndarray, np.ndarray, Any]:
        """Log-odds (n, classes), q or h of each, and the classes."""
        fits = self._fitted()
        questions: list[Question] = [getattr(self._covariance(fit), what) for fit in fits]
        binary = fits[0].n_returned <= 2
        heads = [log_odds if binary else largest if self._predicted else _columns(fit.outputs) for fit in fits]
        s, answers = self._ask(x, heads, questions)
        classes: Any = tuple(c for fit in fits for c in fit.outputs)
        if len(s) == 0:
            s = np.zeros((0, 1 if self._predicted else len(classes)))
            return s, s, like(x, np.zeros(0, dtype=np.int64), torch.int64) if self._predicted else classes
        found = np.stack(answers, axis=1)
        if self._predicted:
            likely = s[:, 0] > 0 if binary else self._network().outputs(x).argmax(dim=1).cpu().numpy()
            return np.abs(s) if binary else s, found, like(x, likely.astype(np.int64), torch.int64)
        if binary:  # asked about once
            s = s * [1.0 if c == 1 else -1.0 for c in classes]
            found = np.repeat(found, len(classes), axis=1)
        return s, found, classes

    def _like(self, x: Any, values: np.ndarray, toward: float | None = None) -> Any:
        fit = self._fits[0]
        single = self._one_class or (self._classes is None and fit.n_returned == 1)
        return like(x, values[:, 0] if single else values, fit.dtype, toward)


def _columns(classes: tuple[int, ...]) -> Head:
    return lambda z: log_odds(z)[:, list(classes)]


def _warnings(fits: Sequence[Fit], tally: Tally) -> list[str]:
    """Where the formula, the sketch or the network's outputs should not be trusted."""
    messages = []
    for fit in fits:
        n, p_star = fit.n_rows, fit.effective_parameters
        if p_star > n / 2:
            messages.append(
                f"the network has p* = {p_star:.1f} effective parameters for n = {n} rows: the formula, which is about "
                "many rows a parameter, is unreliable here; raise the damping if the network was trained with more "
                "regularisation"
            )
        elif p_star < 1:
            messages.append(
                f"the training rows determine no more than p* = {p_star:.2g} parameters, as the network is so sure of "
                "them or λ so large: narrow intervals then come from the weight decay, not from the data; look at "
                "leverage(x)"
            )
        missed = fit.covariance.missed_parameters
        if fit.error is not None:
            if fit.error.width > TOLERABLE:
                messages.append(
                    f"{fit.engine!r} is not accurate enough here: {fit.error}; raise its rank, dim or landmarks, or "
                    "use Exact() if memory allows"
                )
        elif missed > max(0.1 * p_star, 0.5):
            messages.append(
                f"the sketch may miss up to {missed:.0f} effective parameters (it found {p_star:.1f}): raise its rank, "
                "dim or landmarks, or use Exact() if memory allows"
            )
    if fits[0].n_returned == 1 and tally.lowest >= 0 and tally.highest <= 1:
        messages.append(
            "all outputs lie between 0 and 1: they are taken as logits; if they are probabilities, give "
            "output=torch.logit, or take the sigmoid off"
        )
    return messages


def _class_numbers(classes: Any) -> tuple[int, ...] | None:
    if classes is None:
        return None
    chosen = whole_numbers(classes, "classes must be the number of a class, a list of numbers or 'predicted'")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"classes={list(chosen)} holds a class more than once")
    return chosen
