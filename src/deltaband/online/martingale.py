"""A test of exchangeability that may be looked at after every row: conformal p-values, and a martingale that bets.

A row's p-value is the share of the scores so far, its own included, that are larger, ties being broken at random:
p = (#{sᵢ > s} + τ·#{sᵢ = s})/n. If the rows are exchangeable, first ones included, p-values are independent and uniform
(Vovk, Gammerman and Shafer, 2005). A bettor against that starts with 1 and then has, on average, 1: the probability of
ever having 1/ε or more is at most ε (Ville's inequality).
"""

import bisect
import math
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from ..storage.encoding import storable

JUMP = 0.01  # the share of the money that is spread over all bets anew before each row
TWO_SIDED = (-1.0, 0.0, 1.0)  # bets 1 + e·(p − ½): scores that grow or that shrink
ONE_SIDED = (-1.0, 0.0)  # scores that grow


@storable
@dataclass
class SimpleJumper:
    """The money of a bettor who spreads it over bets 1 + e·(p − ½), and moves a little of it before each row."""

    bets: tuple[float, ...] = TWO_SIDED
    shares: np.ndarray | None = None  # of the money, on each bet
    log_money: float = 0.0

    def update(self, p: float) -> float:
        """Take in a p-value, and return the logarithm of the money."""
        bets = np.array(self.bets)
        shares = np.full(len(bets), 1 / len(bets)) if self.shares is None else self.shares
        money = ((1 - JUMP) * shares + JUMP / len(bets)) * (1 + bets * (p - 0.5))
        self.log_money += math.log(money.sum())
        self.shares = money / money.sum()
        return self.log_money

    @property
    def leaning(self) -> float:
        """The bet that most money lies on: below zero, scores have grown."""
        return 0.0 if self.shares is None else self.bets[int(self.shares.argmax())]


@storable
@dataclass
class ConformalMartingale:
    """A stream of scores that is compared with the scores before, the first of which come from calibration rows.

    Half of the money is the jumper's. A share 1/(t·(t+1)) of the other half joins the same bets at row t and is safe
    until then, so that a change is found soon also after a long time in which all bets have lost.

    Scores are rounded to one per cent, so that equal rows have equal scores however they were batched: as a function
    of one row alone that changes nothing about exchangeability.
    """

    scores: np.ndarray  # rounded logarithms, sorted
    jumper: SimpleJumper
    generator: dict[str, Any]  # its state
    log_joined: float = -math.inf  # the money that has joined the bets
    path: np.ndarray = field(default_factory=lambda: np.zeros(0))  # log money after each row
    leanings: np.ndarray = field(default_factory=lambda: np.zeros(0))  # the bet that most of it lies on then

    @classmethod
    def start(cls, scores: np.ndarray, bets: tuple[float, ...], seed: tuple[int, int]) -> Self:
        """Return the state before the first row, given the scores of calibration rows."""
        generator = np.random.default_rng(seed).bit_generator.state
        return cls(np.sort(rounded(scores)), SimpleJumper(bets), dict(generator))

    def update(self, scores: np.ndarray) -> np.ndarray:
        """Take in the scores of rows, one after another, and return the log money after each."""
        past, rng = self.scores.tolist(), np.random.default_rng()
        path: list[float] = []
        leanings: list[float] = []
        rng.bit_generator.state = self.generator
        for score in rounded(scores).tolist():
            larger = len(past) - bisect.bisect_right(past, score)
            equal = len(past) - larger - bisect.bisect_left(past, score)
            before, t = self.jumper.log_money, len(self.path) + len(path) + 1
            after = self.jumper.update((larger + rng.random() * (equal + 1)) / (len(past) + 1))
            self.log_joined = _log_sum(self.log_joined, -math.log(t * (t + 1))) + after - before
            path.append(_log_sum(after, _log_sum(self.log_joined, -math.log(t + 1))) - math.log(2))
            leanings.append(self.jumper.leaning)
            bisect.insort(past, score)
        self.scores, self.generator = np.array(past), dict(rng.bit_generator.state)
        self.path, self.leanings = np.append(self.path, path), np.append(self.leanings, leanings)
        return np.array(path)


def rounded(scores: np.ndarray) -> np.ndarray:
    """Return logarithms of scores to two decimals."""
    return np.round(np.log(np.maximum(scores, 1e-300)), 2)


def _log_sum(a: float, b: float) -> float:
    """Return log(exp(a) + exp(b))."""
    low, high = min(a, b), max(a, b)
    return high + math.log1p(math.exp(low - high))
