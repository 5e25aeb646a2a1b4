"""`ClassificationIntervals`: for a trained classifier, intervals of each class's log-odds and probability."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .calibration import LabelCalibration
from .calibration.labels import probabilities
from .data.batches import read
from .data.inputs import Inputs
from .data.items import Collate
from .engines import Engine, parse_engine
from .errors import warn
from .estimator import Estimator, by_batches
from .fitting.classes import Classification
from .fitting.fit import check_outputs
from .fitting.optimiser import damping_rule
from .fitting.several_labels import SeveralLabels
from .fitting.spec import FitSpec
from .metrics import LabelScores, evaluate_labels
from .network.model_copy import ParameterChoice
from .network.precision import Precision
from .results import ClassIntervals, Intervals, like, parse_levels
from .storage.encoding import storable
from .transforms import InputTransform
from .validation import check_bool, check_choice, check_int

TASKS = {task.loss: task for task in (Classification, SeveralLabels)}

EVALUATED_LEVELS = (0.8, 0.9, 0.95)


@storable
class ClassificationIntervals(Estimator):
    """Confidence intervals of what a trained classifier says, class by class, by the delta method.

        s_c ± z(α/2) · √q,    q = gᵀ A⁻¹ F A⁻¹ g,    A = F + λI

    `s_c = z_c − log Σ_{k≠c} exp z_k`, the log-odds of class c against all others, is a function of the network's logits
    `z` and through them of its parameters; `g` is its gradient. `F = Σᵢ Σ_c π_c ∇log π_c ∇log π_cᵀ` is the softmax's
    Fisher matrix at the training rows. The sigmoid of the bounds gives those of the probability π_c.

    It is a confidence band of the score: how far s_c would move if the network were trained on other labels drawn for
    the same rows. There is no noise term, and it is not a set of labels that holds the true one: for that `calibrate`
    on held-out rows, and call `predict_set`. The formula assumes that the network was trained to (near) a minimum of `Σ
    −log π_y + λ/2 ‖w‖²`: with the mean cross-entropy and an optimiser's `weight_decay` λ = n·wd; else give `damping=λ`.

    The network returns logits (n, C), or one logit per row, (n,) or (n, 1), which is the log-odds of class 1 against
    class 0. Log-probabilities do as well; `output=torch.log` makes them from probabilities (`torch.logit` from a
    single one). Labels are whole numbers from 0 to C − 1.

    With `loss="bce"` each of L outputs is the logit of a label that a row has or not, whatever other labels it has:
    labels are (n, L), 0 or 1, `s_l = z_l`, and `F = Σᵢ Σ_l π_l(1 − π_l) ∇z_l ∇z_lᵀ`. The mean over rows and labels, as
    `BCEWithLogitsLoss` takes it, gives λ = n·L·wd. Read labels for classes below.

    Args:
        model: The trained classifier.
        weight_decay: The coupled weight decay of the optimiser.
        optimizer: The optimiser that trained the model, instead of `weight_decay`; its decay must be coupled.
        damping: λ itself, instead of `weight_decay`.
        loss: "cross_entropy", or "bce" for networks with several labels a row.
        classes: Restricts the answers, and the gradients that they take, to one class or some, or for each row to the
            one "predicted", or as "top5" to that many of the most likely. By default all classes, (n, C); for a network
            with one logit class 1, (n,), as for any class alone.
        per_output: Whether each class is taken alone, with the Fisher matrix of its one-vs-rest probability instead of
            F: the paper's suggestion. It ignores what the other classes teach about the shared weights, and is wider.
            For two classes both are the same.
        engine, memory, time, parameters, output, batch, collate, input_transform, probes, precision: As in
            `PredictionIntervals`.
    """

    _calibration: LabelCalibration | None  # type: ignore[assignment]

    def __init__(
        self,
        model: nn.Module,
        *,
        weight_decay: float | None = None,
        optimizer: Optimizer | None = None,
        damping: float | None = None,
        loss: Literal["cross_entropy", "bce"] = "cross_entropy",
        classes: int | Sequence[int] | str | None = None,
        per_output: bool = False,
        engine: Engine | str = "auto",
        memory: float | None = None,
        time: float | None = None,
        parameters: ParameterChoice = "all",
        output: Callable[[Any], Tensor] | None = None,
        batch: Callable[[Any], tuple[Any, Any]] | None = None,
        input_transform: Any = None,
        probes: int | None = None,
        collate: Collate | None = None,
        precision: Precision = None,
    ) -> None:
        check_choice(loss, "loss", tuple(TASKS))
        rule = damping_rule(model, parameters, optimizer, damping, weight_decay, loss)
        if not rule.is_known:
            why = f"{rule.unknown}; " if rule.unknown else ""
            raise ValueError(
                f"{why}give ClassificationIntervals the optimiser's weight_decay=, or damping=λ: the formula needs it "
                "(calibrate, predict_set and evaluate do not: for these alone damping=1.0 is as good as any)"
            )
        self._task = TASKS[loss].of(classes, per_output)
        transform = InputTransform.of(input_transform)
        settings = (parse_engine(engine), memory, time, parameters, output, batch, transform, probes)
        super().__init__(FitSpec(model, self._task, rule, *settings, collate, precision))

    @by_batches
    def predict(self, x: Any, level: float | Sequence[float] = 0.95) -> ClassIntervals:
        """Return intervals of log-odds and probabilities for the rows of `x`.

        Args:
            x: Inputs: NumPy in, NumPy out; tensors in, tensors out. Or a loader of them, alone or in batches (x, y).
            level: The probability of an interval, or several.

        Returns:
            The classes, and the intervals of their log-odds and probabilities.
        """
        from scipy.special import expit, ndtri

        levels = parse_levels(level)
        s, q, classes = self._evaluate(x, "variance")
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

    def calibrate(
        self,
        data: Any,
        y: Any = None,
        *,
        method: Literal["lac", "aps"] = "lac",
        by_class: bool = False,
        seed: int = 0,
    ) -> Self:
        """Calibrate sets of labels on held-out rows, so that they hold the true label as often as they say.

        Afterwards `predict_set` gives each row the labels whose score is at most a quantile of the calibration rows'
        scores: for rows exchangeable with them, which the network was not trained on, the true label is among these
        with probability at least the level, whatever the network. `predict` stays what it is.

        Args:
            data: A loader of batches `(x, y)`, or the inputs with their labels `y`.
            y: The labels.
            method: "lac", whose sets are the smallest on average, or "aps", which adds labels from the most likely one
                on until their probabilities suffice, with seeded randomisation: larger sets, more even over easy and
                hard rows.
            by_class: Whether the level holds given the true class, for every class; each then needs enough rows. With
                `loss="bce"` a set holds a label of the row with that probability; else it holds all of them together.
            seed: Seed for the randomisation of "aps".

        Returns:
            The calibrated estimator itself.

        Raises:
            ValueError: If a label is not one of the network's, or the data hold no rows.
        """
        check_choice(method, "method", self._task.methods)
        check_bool(by_class, "by_class")
        check_int(seed, "seed", 0)
        fits = self.fits_
        self.spec.forget()
        calibration = LabelCalibration.fit(self.spec, fits, self.spec.read(data, y), method, by_class, seed)
        warn(*calibration.warnings())  # which may be errors: then nothing has changed
        self._calibration = calibration
        return self

    @by_batches
    def predict_set(self, x: Any, level: float | Sequence[float] = 0.95, *, allow_empty: bool = False) -> Any:
        """Return for each row the set of labels that holds the true one with probability at least the level.

        Args:
            x: Inputs, or a loader of them.
            level: The probability, or several.
            allow_empty: Whether a set may be empty, where no label conforms; otherwise it holds the most likely one.
                With `loss="bce"` it may in any case, as a row may have no label.

        Returns:
            Whether each label is in the set, (n, C), or with several levels (n, C, levels), of the kind of `x`.

        Raises:
            ValueError: If the classifier is not calibrated, or the calibration rows are too few for the level.
        """
        levels = parse_levels(level)
        check_bool(allow_empty, "allow_empty")
        fits, calibration = self.fits_, self._calibration
        if calibration is None:
            raise ValueError("sets of labels follow from held-out rows: call calibrate(x, y) first")
        X = self.spec.known_inputs(fits, x)
        if len(X):
            members = calibration.sets(self._logits(X), levels, allow_empty or self._task.several)
        else:
            members = np.zeros((0, calibration.n_classes, len(levels)), dtype=bool)
        return like(x, members[:, :, 0] if np.ndim(level) == 0 else members, torch.bool)

    @by_batches
    def predict_proba(self, x: Any) -> Any:
        """Return the network's probability of every label, whichever `classes` there are intervals for.

        Args:
            x: Inputs, or a loader of them.

        Returns:
            The probabilities (n, C), of the kind of `x`; of a softmax two columns for a network with one logit.
        """
        fits, task = self.fits_, self._task
        X = self.spec.known_inputs(fits, x)
        p = np.zeros((0, task.n_labels(fits[0].n_returned)))
        return like(x, probabilities(self._logits(X), task.several) if len(X) else p, fits[0].dtype)

    def evaluate(self, x: Any, y: Any = None, levels: float | Sequence[float] = EVALUATED_LEVELS) -> LabelScores:
        """Measure how good labels, their probabilities and sets are, on rows that served neither fit nor calibration.

        Args:
            x: Inputs, or a loader of batches (x, y).
            y: The labels of inputs.
            levels: The levels of the sets, which there are after `calibrate`.

        Returns:
            Accuracy, log loss, a reliability diagram, and coverage and size of sets, in all and by label.

        Raises:
            ValueError: If there are no rows, or a label is none of the network's.
        """
        self._task.check_one_label("evaluate")
        if y is None:
            inputs, y = read(x, unpack=self.spec.batch).whole()
            x = inputs.as_given()
        asked = list(parse_levels(levels))
        sets = None if self._calibration is None else self.predict_set(x, asked)
        X = self.spec.known_inputs(self.fits_, x)
        p = probabilities(self._logits(X)) if len(X) else np.zeros((0, 2))
        return evaluate_labels(y, p, sets, asked)

    def _logits(self, X: Inputs) -> Tensor:
        X.check_finite()
        network = self.spec.network()
        self.spec.warn_of_changed_weights(network, self._fits[0])
        z = network.outputs(X)
        check_outputs(z)
        return z

    @property
    def classes_(self) -> tuple[int, ...] | None:
        """The classes that there are intervals for; None where these are chosen for each row."""
        return None if self._task.top else tuple(c for fit in self.fits_ for c in fit.outputs)

    @property
    def calibration_(self) -> LabelCalibration | None:  # type: ignore[override]
        """What `calibrate` found; None before it."""
        return self._calibration

    @by_batches
    def variance(self, x: Any) -> Any:
        """Return q = gᵀ A⁻¹FA⁻¹ g of each class, the variance of its log-odds.

        It ignores directions that the training data never touched: far outside the data it can stay small.

        Args:
            x: Inputs.

        Returns:
            q of each row and class, of the kind of `x`.
        """
        return self._like(x, self._evaluate(x, "variance")[1])

    @by_batches
    def leverage(self, x: Any) -> Any:
        """Return h = gᵀ A⁻¹ g of each class: how far its log-odds are from what the training data determine.

        Args:
            x: Inputs.

        Returns:
            h of each row and class, of the kind of `x`; it grows where the variance may not.
        """
        return self._like(x, self._evaluate(x, "leverage")[1])

    def _evaluate(self, x: Any, what: Literal["variance", "leverage"]) -> tuple[np.ndarray, np.ndarray, Any]:
        """Return log-odds (n, classes), q or h of each, and the classes."""
        fits, task, n_returned = self.fits_, self._task, self.fits_[0].n_returned
        functions = [getattr(self._covariance(fit), what) for fit in fits]
        X = self.spec.known_inputs(fits, x) if what == "variance" else self.spec.inputs(x)
        s, values = self.spec.evaluate(fits, X, functions, heads=[task.asked(fit.outputs, n_returned) for fit in fits])
        classes: Any = self.classes_
        if len(s) == 0:
            s = np.zeros((0, task.top or len(classes)))
            return s, s, self._numbered(x, s) if task.top else classes
        found = np.stack(values, axis=1)
        if task.is_binary(n_returned):  # evaluated once
            s, found = np.concatenate([-s, s], axis=1), np.repeat(found, 2, axis=1)
            chosen = np.argsort(-s, axis=1, kind="stable")[:, : task.top] if task.top else np.array([classes])
            s, found = (np.take_along_axis(each, chosen, axis=1) for each in (s, found))
        elif task.top:
            chosen = self.spec.network().outputs(X).topk(task.top, dim=1).indices.cpu().numpy()
        return s, found, self._numbered(x, chosen) if task.top else classes

    def _numbered(self, x: Any, classes: np.ndarray) -> Any:
        return like(x, (classes[:, 0] if self._task.single else classes).astype(np.int64), torch.int64)

    def _like(self, x: Any, values: np.ndarray, toward: float | None = None) -> Any:
        fit, task = self._fits[0], self._task
        single = task.single or (task.classes is None and not task.top and fit.n_returned == 1)
        return like(x, values[:, 0] if single else values, fit.dtype, toward)
