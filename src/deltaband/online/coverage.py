"""The coverage of the last targets, with exact bounds, and a test of it that may be repeated."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..calibration import conformal_rank
from ..storage.encoding import storable

CONFIDENCE = 0.95  # of the bounds of one window


class Share(NamedTuple):
    """How many of n targets lay in their intervals, and the bounds of Clopper and Pearson for the probability."""

    covered: int
    n: int

    @property
    def share(self) -> float:
        return self.covered / self.n

    @property
    def bounds(self) -> tuple[float, float]:
        from scipy.special import betaincinv

        tail, k, n = (1 - CONFIDENCE) / 2, self.covered, self.n
        low = 0.0 if k == 0 else float(betaincinv(k, n - k + 1, tail))
        return low, 1.0 if k == n else float(betaincinv(k + 1, n - k, 1 - tail))


@storable
@dataclass
class RollingCoverage:
    """Which of the last targets lay in their intervals, and how many did in each block of `window` targets.

    If the rows are exchangeable with n calibration rows, and the quantile is the r-th smallest of n scores, the number
    of covered targets in a block is beta-binomial with r and n + 1 − r. Block k is compared with it at ε/(k·(k+1)):
    these sum up to ε, so that the probability of an alarm in any block is at most ε.
    """

    level: float
    window: int
    n_calibration: int
    last: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))  # up to `window` targets
    blocks: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # covered targets of each
    n: int = 0

    @property
    def rolling(self) -> Share:
        return Share(int(self.last.sum()), len(self.last))

    def update(self, covered: np.ndarray, false_alarms: float) -> list[tuple[int, Share]]:
        """Take in which targets were covered; return the blocks that were too rarely so, after the targets so far."""
        found = []
        for inside in covered.tolist():
            self.n += 1
            self.last = np.append(self.last, inside)[-self.window :]
            if self.n % self.window == 0:
                block, k = self.rolling, len(self.blocks) + 1
                self.blocks = np.append(self.blocks, block.covered)
                if self.p_value(block) <= false_alarms / (k * (k + 1)):
                    found.append((self.n, block))
        return found

    def p_value(self, block: Share) -> float:
        """Return the probability that so few targets of a block are covered, or fewer."""
        from scipy.stats import betabinom

        rank = conformal_rank(self.level, self.n_calibration)
        return float(betabinom.cdf(block.covered, block.n, rank, self.n_calibration + 1 - rank))
