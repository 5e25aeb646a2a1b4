"""From a stream of scores to thresholds: adaptive conformal inference, conformal PID control, and a rolling window.

A score is |y − ŷ|/σ(x) ≥ 0, and a target is covered if its score is at most the threshold that its prediction had.
The threshold may be infinite; below zero it covers nothing. α = 1 − level, and e is 1 for a miss, else 0.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

from ..calibration import conformal_rank
from ..storage.encoding import storable
from ..validation import check_int, check_positive


class Tracker(Protocol):
    """What follows one stream of scores."""

    def threshold(self) -> float:
        """Return the threshold of the next prediction."""

    def update(self, score: float, missed: bool) -> None:
        """Take in the score of a prediction, and whether it lay above the threshold that the prediction had."""

    def bound(self, n: int, late: int, largest: float) -> float:
        """Return what |share of misses − α| is at most after n scores, whatever these were; NaN if nothing is certain.

        Args:
            n: How many scores there were.
            late: How many scores were not known yet, at most, when a prediction was made.
            largest: The largest score.
        """


def next_scores(scores: np.ndarray, score: float, window: int) -> np.ndarray:
    """Return the last scores, up to `window` of them, with the newest one behind the others."""
    return np.append(scores, score)[-window:]


def quantile(scores: np.ndarray, level: float) -> float:
    """Return the ⌈(n+1)·level⌉-th smallest score: ∞ if there are too few, and −∞ for a level of zero or less."""
    rank = conformal_rank(level, len(scores))
    if rank <= 0:
        return -math.inf
    return math.inf if rank > len(scores) else float(np.partition(scores, rank - 1)[rank - 1])


@storable
@dataclass
class AdaptiveInference:
    """Adaptive conformal inference (Gibbs and Candès, 2021): the level that the quantile is taken at follows misses.

        α_{t+1} = α_t + γ·(α − e_t),    threshold: the conformal quantile of the last scores at 1 − α_t

    |share of misses − α| ≤ (max(α, 1 − α) + γ·(1 + late))/(γ·n) for any scores whatever: a prediction at α_t ≤ 0 is
    infinite and cannot miss, one at α_t ≥ 1 is empty, and misses that are known late move α_t on by γ each.
    """

    alpha: float
    step: float  # γ
    window: int
    scores: np.ndarray  # the last ones
    current: float  # α_t

    @classmethod
    def start(cls, scores: np.ndarray, level: float, step: float = 0.01, window: int | None = None) -> Self:
        """Return the state before the first prediction, given scores of calibration rows in their order."""
        step = check_positive(step, "step")
        window = len(scores) if window is None else check_int(window, "window")
        return cls(1 - level, step, window, scores[-window:], 1 - level)

    def threshold(self) -> float:
        return quantile(self.scores, 1 - self.current)

    def update(self, score: float, missed: bool) -> None:
        self.current += self.step * (self.alpha - missed)
        self.scores = next_scores(self.scores, score, self.window)

    def bound(self, n: int, late: int, largest: float) -> float:
        return (max(self.alpha, 1 - self.alpha) + self.step * (1 + late)) / (self.step * n)


@storable
@dataclass
class QuantileControl:
    """Conformal PID control (Angelopoulos, Candès and Tibshirani, 2023) without a forecast of scores: P and I.

        threshold: q₁ + η·E + K·tan(E·log(t+1)/(C·(t+1))),    E = Σ (e − α) over the t scores so far

    η = step·q₁ and K = gain·q₁, with q₁ the conformal quantile of the calibration rows. The tangent is infinite from
    π/2 on. |share of misses − α| ≤ |E|/n, and E cannot leave the range where all scores, at most b, lie above the
    threshold or all below: |E| ≤ max(q₁, b − q₁)/η + 1 + late; nor, whatever b, that of the tangent.
    """

    alpha: float
    step: float  # in units of q₁, as gain
    gain: float
    saturation: float  # C
    first: float  # q₁
    excess: float = 0.0  # E
    n: int = 0  # t

    @classmethod
    def start(
        cls, scores: np.ndarray, level: float, step: float = 0.1, gain: float = 1.0, saturation: float = 1.0
    ) -> Self:
        step, saturation = check_positive(step, "step"), check_positive(saturation, "saturation")
        gain = check_positive(gain, "gain", zero=True)
        first = min(quantile(scores, level), float(scores.max()))
        # scores that are zero have no unit
        return cls(1 - level, step, gain, saturation, first if first > 0 else float(scores.max()) or 1.0)

    def threshold(self) -> float:
        angle = self.excess * math.log(self.n + 1) / (self.saturation * (self.n + 1))
        if abs(angle) >= math.pi / 2 and self.gain:
            return math.copysign(math.inf, angle)
        return self.first * (1 + self.step * self.excess + (self.gain * math.tan(angle) if self.gain else 0.0))

    def update(self, score: float, missed: bool) -> None:
        self.excess += missed - self.alpha
        self.n += 1

    def bound(self, n: int, late: int, largest: float) -> float:
        steps = max(1.0, largest / self.first - 1) / self.step
        if self.gain:  # (t+1)/log(t+1) falls and then grows: it is largest at t = 1 or at n
            steps = min(steps, math.pi / 2 * self.saturation * max((n + 1) / math.log(n + 1), 2 / math.log(2)))
        return (steps + 1 + late) / n


@storable
@dataclass
class RollingWindow:
    """The conformal quantile of the last scores.

    For scores that are exchangeable within a window the coverage is at least the level; in general it is lower by at
    most the mean distance in total variation between the scores, and the scores with the new one and an older one
    exchanged (Barber, Candès, Ramdas and Tibshirani, 2023). Nothing is certain for all sequences.
    """

    alpha: float
    window: int
    scores: np.ndarray

    @classmethod
    def start(cls, scores: np.ndarray, level: float, window: int | None = None) -> Self:
        window = len(scores) if window is None else check_int(window, "window")
        return cls(1 - level, window, scores[-window:])

    def threshold(self) -> float:
        return quantile(self.scores, 1 - self.alpha)

    def update(self, score: float, missed: bool) -> None:
        self.scores = next_scores(self.scores, score, self.window)

    def bound(self, n: int, late: int, largest: float) -> float:
        return math.nan


TRACKERS: dict[str, Any] = {"aci": AdaptiveInference, "pid": QuantileControl, "window": RollingWindow}
