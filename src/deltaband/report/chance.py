"""How far a coverage may be from its level by chance."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

SURE = 0.95  # of what is said about chance


class Range(NamedTuple):
    low: float
    high: float


def likely(covered: int, n: int) -> Range:
    """The coverages that n rows of which so many are covered do not speak against: Clopper and Pearson's interval."""
    from scipy.special import betaincinv

    alpha = (1 - SURE) / 2
    low = betaincinv(covered, n - covered + 1, alpha) if covered > 0 else 0.0
    high = betaincinv(covered + 1, n - covered, 1 - alpha) if covered < n else 1.0
    return Range(float(low), float(high))


def expected(level: float, n: int, calibration_rows: int | None = None, among: int = 1) -> Range:
    """Where the share of n rows that is covered should lie if intervals keep to their level: binomial.

    With a number c of calibration rows it is that over all draws of these: the coverage then is Beta(k, c + 1 − k), k
    being the rank of the score that is the quantile, and the share beta-binomial. `among` several shares, of which one
    is looked for that is off, each has a wider range, and all together are as often within theirs.
    """
    from scipy.stats import betabinom, binom

    if calibration_rows is None:
        law = binom(n, level)
    else:
        k = min(int(np.ceil((calibration_rows + 1) * level - 1e-9)), calibration_rows)
        law = betabinom(n, k, calibration_rows + 1 - k)
    alpha = (1 - SURE) / 2 / among
    return Range(float(law.ppf(alpha)) / n, float(law.ppf(1 - alpha)) / n)
