"""Many outputs with one scale: λ and b are chosen by all of them together, and quantiles are for blocks of outputs.

For a row, L(τ) is the share of a block's targets with |r|/(u·σ(x)) > τ, of those that are there. It falls with τ and is
at most 1, so that for exchangeable rows the smallest τ with

    Σᵢ Lᵢ(τ) ≤ (n + 1)(1 − level) − 1

has E L(τ) ≤ 1 − level for a new row (conformal risk control: Angelopoulos et al. 2024): the share of its targets within
their bounds is at least the level on average. In a block of one output that is the conformal quantile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np

from ..fitting.fit import Bounds
from ..results import Side, two_bounds
from ..storage.encoding import storable
from ..validation import check_choice
from .conformal import ConformalScale, EachOutput, alone, of_side, thirds
from .quantiles import ALL_ROWS, AllRows, rows_needed
from .scales import Scales

Joint = bool | Literal["share", "horizon", "scale"]


@storable
@dataclass(frozen=True, eq=False)
class PooledOutputs(EachOutput):
    """A third of the rows chooses λ, b, γ and the unit u of each output; the others give a quantile for each block."""

    units: np.ndarray  # (m,)
    signed: np.ndarray  # (n, m) scores r/(u·σ) of the other rows; NaN where there is no target
    block: np.ndarray  # (m,) the number of each output's
    asked: np.ndarray  # the numbers of the outputs that there are bounds for

    @classmethod
    def fit(
        cls, residuals: np.ndarray, q: Sequence[np.ndarray], scales: Sequence[Scales], seed: int, block: np.ndarray
    ) -> Self:
        """Return the scores of calibration rows with residuals (n, m) and m times variances under each λ, (n, L)."""
        choosing, rest = thirds(len(residuals), seed)
        r, v = residuals[choosing], [each[choosing] for each in q]
        pairs = zip(r.T, v, scales, strict=True)
        losses = sum(alone(each[:, None], [of], [scale]).outputs[0].losses for each, of, scale in pairs)
        every = np.arange(len(block))
        chosen = alone(r, v, [each.only(int(np.argmin(losses))) for each in scales])
        u = _units(chosen.outputs)
        return cls(chosen.outputs, u, residuals[rest] / (chosen.scale([v[rest] for v in q]) * u), block, every)

    @property
    def promise(self) -> str:
        """What a level is about, for the summary."""
        blocks = len(np.unique(self.block))
        share = "the share of a row's" if blocks == 1 else f"in each of {blocks:,} blocks, the share of a row's"
        return share if blocks < len(self.block) else "each its own quantile, with one scale for all"

    @property
    def n_rows(self) -> int:
        """The rows of the smallest block, of those with a target in it."""
        return min(self._rows(number) for number in np.unique(self.block))

    @property
    def rule(self) -> AllRows:
        return ALL_ROWS

    def _rows(self, number: int) -> int:
        return int((~np.isnan(self.signed[:, self.block == number])).any(axis=1).sum())

    def bounds(
        self, q: Sequence[np.ndarray], levels: tuple[float, ...], side: Side, place: np.ndarray | None = None
    ) -> Bounds:  # (rows, m, levels) each
        thresholds = np.stack([self._thresholds(side, level) for level in levels], axis=1)  # (m, levels)
        return two_bounds((self.scale(q) * self.units)[:, :, None] * thresholds, side)

    def _thresholds(self, side: Side, level: float) -> np.ndarray:  # (m,)
        if (side, level) not in self._known:
            found = np.empty(len(self.block))
            for number in np.unique(self.block):
                columns = self.block == number
                found[columns] = share_quantile(of_side(self.signed[:, columns], side), level)
            self._known[side, level] = found
        return self._known[side, level][self.asked]

    @cached_property
    def _known(self) -> dict[tuple[Side, float], np.ndarray]:
        return {}


def share_quantile(scores: np.ndarray, level: float) -> float:  # (n, k), NaN where there is no target
    """Return the smallest τ with Σ of the rows' shares above it ≤ (n + 1)(1 − level) − 1; raise if there is none."""
    there = ~np.isnan(scores)
    scores, there = scores[there.any(axis=1)], there[there.any(axis=1)]
    n, weight = len(scores), there / np.maximum(there.sum(axis=1, keepdims=True), 1)
    order = np.argsort(scores[there], kind="stable")
    within = np.cumsum(weight[there][order])  # Σ of shares up to each score
    if (n + 1) * level > n + 1e-9:
        problem = f"{n} calibration rows are too few for level {level:g}: it takes at least {rows_needed(level)}"
        raise ValueError(f"{problem} besides the third that chooses the scale; calibrate on more rows")
    at = int(np.searchsorted(within, (n + 1) * level - 1e-9))
    return float(scores[there][order][min(at, len(order) - 1)])


def _units(outputs: Sequence[ConformalScale]) -> np.ndarray:  # (m,)
    """Return root mean squares of scores, drawn to that of all outputs as far as chance would make them differ."""
    squares = np.square([output.root_mean_square(0) for output in outputs])
    n = float(np.mean([len(output.signed) for output in outputs]))
    mean, spread = squares.mean(), squares.var()
    own = max(0.0, 1 - 2 * mean**2 / n / spread) if spread > 0 else 0.0  # 2σ⁴/n is the variance of a mean of squares
    return np.sqrt(mean + own * (squares - mean)) if mean > 0 else np.ones(len(squares))


def check_mode(joint: Any, given: Mapping[str, Any]) -> None:
    """Raise unless `joint` is one of its values, and goes with what else was given for the quantile."""
    if isinstance(joint, bool):
        return
    check_choice(joint, "joint", ("share", "horizon", "scale"))
    if name := next((name for name, each in given.items() if each is not None), None):
        raise ValueError(f"{name}= goes with joint=True or False: the share of joint={joint!r} is that of all rows")


def blocks(joint: str, shape: tuple[int, ...], m: int) -> np.ndarray:  # (m,)
    """Return the block of each of m outputs: all in one, by the first axis of their shape, or each its own."""
    if joint == "horizon":
        if shape and math.prod(shape) != m:
            raise ValueError(
                f"joint='horizon' is by the first axis of what the network returns, {shape}: leave out outputs="
            )
        return np.repeat(np.arange(shape[0] if shape else m), m // (shape[0] if shape else m))
    return np.zeros(m, dtype=int) if joint == "share" else np.arange(m)
