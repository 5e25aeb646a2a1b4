"""Bounds as tensor operations: the formula's, and conformal ones, which walk the envelope of the candidate scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..calibration import Calibration
from ..calibration.conformal import AllOutputs, ConformalScale, EachOutput, QuantileScale, is_own_level
from ..calibration.noise import BoostedNoise
from ..calibration.pooled import PooledOutputs
from ..calibration.quantiles import AllRows
from ..errors import ExportError
from ..fitting.fit import Formula


class Rows(NamedTuple):
    """What bounds follow from, as `KnownRows`."""

    h: list[Tensor]  # of each output (b,)
    q: list[Tensor]  # of each output (b, L), in units of the square of the noise that is known
    unit: Tensor  # (b, m) that noise
    log_v: list[Tensor]  # of each output (b,), where noise is learnt


class FormulaBounds(nn.Module):
    """±t·s·√(1 + q), or without noise ±t·s·√q."""

    half_width: Tensor

    def __init__(self, method: Formula, levels: Sequence[float]) -> None:
        super().__init__()
        half = np.stack([np.concatenate([fit.half_width(level) for fit in method.fits]) for level in levels], axis=1)
        self.register_buffer("half_width", torch.from_numpy(half))  # (m, levels)
        self.noise = float(method.noise)

    def forward(self, rows: Rows) -> Tensor:  # (b, m, levels) half widths
        q = torch.cat(rows.q, dim=1)
        return (rows.unit * (q + self.noise).sqrt())[:, :, None] * self.half_width


class ConformalBounds(nn.Module):
    """As `Calibration.bounds`: of rows far from the training rows the wider of those with and without v."""

    far: Tensor

    def __init__(self, calibration: Calibration, levels: tuple[float, ...]) -> None:
        super().__init__()
        if not isinstance(calibration.rule, AllRows):
            raise ExportError(
                "the calibration has a quantile of its own for groups or weights, which rows would have to come with; "
                "a program takes inputs alone: calibrate without groups=, weights= and target="
            )
        if isinstance(calibration.conformal, PooledOutputs):
            raise ExportError("a program has no quantiles for shares of outputs: calibrate with joint=False or True")
        self.joint = calibration.is_joint
        both = [calibration.conformal] + ([] if calibration.guard is None else [calibration.guard])
        self.scales = nn.ModuleList(
            [
                nn.ModuleList([JointBounds(each, levels)] if isinstance(each, AllOutputs) else _lines(each, levels))
                for each in both
            ]
        )
        self.register_buffer("far", torch.from_numpy(calibration.far))

    def forward(self, rows: Rows) -> Tensor:
        found = self._joint(rows) if self.joint else self._each(rows)
        half = found[0]
        if len(found) > 1 and self.far.shape[0]:
            far = (torch.stack(rows.h, dim=1) > self.far).any(dim=1)
            half = torch.where(far[:, None, None], torch.maximum(half, found[1]), half)
        return half * rows.unit[:, :, None]

    def _joint(self, rows: Rows) -> list[Tensor]:
        plain = rows._replace(log_v=[])
        return [
            scales[0](rows if i == 0 else plain)
            for i, scales in enumerate(self.scales)
            if isinstance(scales, nn.ModuleList)
        ]

    def _each(self, rows: Rows) -> list[Tensor]:
        """Walk along all envelopes, with and without v and of all outputs, in one loop."""
        m, lines, units = len(rows.q), [], []
        for i, scales in enumerate(self.scales):
            assert isinstance(scales, nn.ModuleList)
            for o, each in enumerate(scales):
                log_v = rows.log_v[o] if rows.log_v and i == 0 else None
                lines.append(each(rows.q[o], log_v, rows.unit[:, o]))
                units.append(each.unit)
        size = max(a.shape[1] for a, _, _ in lines)
        padded = [_padded(each, size) for each in lines]
        largest = walk(*(torch.cat(tensors) for tensors in zip(*padded, strict=True)))
        by_line = [
            unit * each for unit, each in zip(units, largest.reshape(len(lines), -1, largest.shape[1]), strict=True)
        ]
        return [torch.stack(by_line[start : start + m], dim=1) for start in range(0, len(by_line), m)]


def _lines(conformal: EachOutput, levels: tuple[float, ...]) -> list[nn.Module]:
    return [Lines(each, levels) for each in conformal.outputs]


def _padded(lines: tuple[Tensor, Tensor, Tensor], size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return as many lines, with ones that are never the lowest."""
    a, d, cuts = lines
    more = size - a.shape[1]
    if more == 0:
        return lines
    never = torch.full_like(a[:, :1], torch.inf).expand(-1, more)
    return (
        torch.cat([a, never], dim=1),
        torch.cat([d, never], dim=1),
        torch.cat([cuts, cuts[:, :1].expand(-1, more, -1)], dim=1),
    )


class Squared(nn.Module):
    """σ² of rows under candidate scales."""

    index: Tensor
    b: Tensor
    gamma: Tensor | None

    def __init__(self, conformal: ConformalScale, only: int | None = None) -> None:
        super().__init__()
        scales, chosen = conformal.scales, slice(None) if only is None else slice(only, only + 1)
        self.register_buffer("index", torch.from_numpy(scales.damping_index[chosen].astype(np.int64)))
        self.register_buffer("b", torch.from_numpy(np.array(scales.b[chosen], dtype=np.float64)))
        self.register_buffer("gamma", None if scales.gamma is None else torch.from_numpy(scales.gamma[chosen]))

    def forward(self, q: Tensor, log_v: Tensor | None) -> Tensor:  # (b, L), (b,) -> (b, C)
        squared = 1.0 + self.b * q[:, self.index]
        if self.gamma is None or log_v is None:
            return squared
        return squared * torch.exp(2 * self.gamma * log_v[:, None])


class JointBounds(nn.Module):
    """One quantile of the largest score of a row, times the scale of each output."""

    factors: Tensor

    def __init__(self, conformal: AllOutputs, levels: tuple[float, ...]) -> None:
        super().__init__()
        scores = np.sort(np.abs(conformal.signed).max(axis=1))
        quantiles = conformal.rule.quantiles(scores, np.zeros((1, 0)), levels)[0]
        self.register_buffer("factors", torch.from_numpy(conformal.units[:, None] * quantiles))  # (m, levels)
        self.squared = nn.ModuleList([Squared(each, each.best) for each in conformal.outputs])

    def forward(self, rows: Rows) -> Tensor:
        log_v: list[Tensor | None] = list(rows.log_v) or [None] * len(rows.q)
        squared = [each(q, v) for each, q, v in zip(self.squared, rows.q, log_v, strict=True)]
        return torch.cat(squared, dim=1).sqrt()[:, :, None] * self.factors


class Lines(nn.Module):
    """What the scale of a row is chosen by: a + d·t of each candidate, t = r², and the largest r at its quantiles."""

    quantiles: Tensor
    excess: Tensor
    sum_squares: Tensor
    log_weight: Tensor

    def __init__(self, conformal: ConformalScale, levels: tuple[float, ...]) -> None:
        super().__init__()
        scores = np.sort(np.abs(conformal.signed), axis=0)  # (n, C)
        place = np.zeros((1, 0))
        quantiles = np.stack([conformal.rule.quantiles(each, place, levels)[0] for each in scores.T])  # (C, levels)
        excess = np.zeros_like(quantiles)
        if isinstance(conformal, QuantileScale):
            own = conformal.own_levels["both"]
            columns = [i for i, level in enumerate(levels) if is_own_level(level, own)]
            for c in range(len(quantiles)) if columns else ():
                sorted_excess = np.sort(conformal.excess("both", c))
                excess[c, columns] = conformal.rule.quantiles(sorted_excess, place, (own,))[0, 0] / conformal.unit
                quantiles[c, columns] = 1 / conformal.unit
        self.squared = Squared(conformal)
        constants = {"quantiles": quantiles, "excess": excess}
        constants |= {"sum_squares": conformal.sum_squares, "log_weight": conformal.log_weight}
        for name, values in constants.items():
            self.register_buffer(name, torch.from_numpy(np.ascontiguousarray(values)))
        self.unit, self.n = conformal.unit, len(conformal.signed)

    def forward(self, q: Tensor, log_v: Tensor | None, half: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        squared = self.squared(q, log_v)
        weight = torch.exp((self.log_weight + squared.log()) / (self.n + 1))
        quantiles = self.quantiles[None] + self.excess[None] / half[:, None, None]
        return self.sum_squares * weight, weight / squared, squared.sqrt()[:, :, None] * quantiles


def walk(a: Tensor, d: Tensor, cuts: Tensor) -> Tensor:  # (n, C) twice, (n, C, levels) -> (n, levels)
    """Return the largest r whose scale, the lowest of the lines a + d·t at t = r², has r at most at its cut.

    As `ConformalScale.bounds`, for all rows at once until the last has come to the end of its envelope.
    """
    from torch._higher_order_ops.while_loop import while_loop

    start = torch.zeros_like(a[:, 0])
    largest = torch.full_like(cuts[:, 0], -torch.inf)

    def going(chosen: Tensor, start: Tensor, largest: Tensor) -> Tensor:
        return torch.isfinite(start).any()

    def step(chosen: Tensor, start: Tensor, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        at = chosen[:, None]
        height, slope = a.gather(1, at), d.gather(1, at)
        flatter = d < slope
        crossing = torch.where(flatter, (a - height) / torch.where(flatter, slope - d, 1.0), torch.inf)
        nearest, following = crossing.min(dim=1)
        end = torch.maximum(nearest, start)
        lower, upper = start.sqrt()[:, None], end.sqrt()[:, None]
        cut = cuts.gather(1, at[:, :, None].expand(-1, -1, cuts.shape[2]))[:, 0]
        above = torch.where(cut >= lower, torch.minimum(upper, cut), -torch.inf)
        below = torch.where((cut < lower) & (cut >= -upper), torch.minimum(-lower, cut), -torch.inf)
        found = torch.maximum(largest, torch.maximum(above, below))
        largest = torch.where(torch.isfinite(start)[:, None], found, largest)
        return torch.where(torch.isfinite(end), following, chosen), end, largest

    found: tuple[Tensor, Tensor, Tensor] = while_loop(going, step, (a.argmin(dim=1), start, largest))  # type: ignore[no-untyped-call]
    return found[2].clamp(min=0.0)


class Trees(nn.Module):
    """log v of learnt noise: the sum of a leaf of each tree."""

    value: Tensor

    def __init__(self, noise: BoostedNoise) -> None:
        super().__init__()
        for name in ("feature", "threshold", "left", "right", "value"):
            values = torch.from_numpy(getattr(noise, name))
            self.register_buffer(name, values if values.is_floating_point() else values.long())
        self.baseline, self.depth, self.n_columns = float(noise.baseline), noise.depth, noise.n_columns
        self.limits = float(noise.lowest), float(noise.highest)

    def forward(self, features: Tensor, output: Tensor) -> Tensor:  # (b, k), (b,) float64 -> (b,)
        columns = torch.cat([features.double(), output[:, None]], dim=1)
        if self.n_columns == 1:
            columns = columns[:, -1:]
        elif columns.shape[1] != self.n_columns:
            return torch.full_like(output, self.baseline)
        n_trees, n_nodes = self.value.shape
        first = torch.arange(0, n_trees * n_nodes, n_nodes, device=columns.device)
        feature, threshold, left, right, value = (
            getattr(self, name).flatten() for name in ("feature", "threshold", "left", "right", "value")
        )
        at = first.expand(columns.shape[0], -1)
        for _ in range(self.depth):
            goes_left = columns.gather(1, feature[at]) <= threshold[at]
            at = first + torch.where(goes_left, left[at], right[at])
        return (self.baseline + value[at].sum(dim=1)).clamp(*self.limits)
