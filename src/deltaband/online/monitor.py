"""`Monitor`: a watch on new rows, which raises an alarm when they are no longer like the calibration rows."""

import math
from dataclasses import asdict
from operator import itemgetter
from typing import Any, Self

import numpy as np
import torch

from ..calibration import AllOutputs, AllRows, rows_needed
from ..display import number, percent
from ..results import level_name, parse_levels
from ..validation import check_int, check_positive
from .alarm import ADVICE, Alarm
from .coverage import RollingCoverage
from .files import KeptInFile
from .martingale import ONE_SIDED, TWO_SIDED, ConformalMartingale
from .scale import DeltaScale, ScaledRows
from .series import AwaitedTargets

LEAST_FALSE_ALARMS = 1e-300  # its reciprocal, which a martingale has to reach, must be finite
Found = tuple[int, Alarm]  # the row of a call that raises it


class Monitor(KeptInFile):
    """A watch on new rows, with or without targets: are they still exchangeable with the calibration rows?

    Three kinds of alarm, each raised at most once (for each output), and each with a probability of at most
    `false_alarms` while calibration rows and new rows are exchangeable, however often it is looked at:

    - exchangeability: a martingale that bets on errors |y − ŷ|/σ(x) being larger or smaller than before has reached
      m/false_alarms, m being the number of outputs that are calibrated on their own (Ville's inequality);
    - leverage: likewise 1/false_alarms, betting on larger leverages; it needs no targets;
    - coverage: of a block of `window` targets so few lie in their intervals that chance does not explain it, that of
      the calibration rows included. Exact for `calibrate(..., tune=False)` and `joint=True`; else up to the choice of
      the scale, which is made for each row anew.

    `PredictionIntervals.monitor` makes one. After an alarm, mend what is wrong and start a new one.

    Args:
        scale: The scale of a calibrated band.
        level, false_alarms, window, seed: As in `PredictionIntervals.monitor`.
    """

    _kind = "monitor"

    def __init__(self, scale: DeltaScale, level: float, false_alarms: float, window: int, seed: int) -> None:
        if np.ndim(level) != 0:
            raise ValueError(f"a monitor has one level, got {level!r}")
        (self.level,) = parse_levels(level)
        self.false_alarms = check_positive(false_alarms, "false_alarms")
        if not LEAST_FALSE_ALARMS <= self.false_alarms < 1:
            expected = f"a probability from {LEAST_FALSE_ALARMS:g} to below 1"
            raise ValueError(f"false_alarms must be {expected}, got {false_alarms!r}")
        self.window, self.seed = check_int(window, "window"), check_int(seed, "seed", 0)
        if not isinstance(scale.calibration.rule, AllRows):
            advice = "calibrate another band for a monitor, without groups=, target= and weights="
            raise ValueError(f"new rows are compared with all calibration rows, which here count differently: {advice}")
        n = scale.calibration.conformal.n_rows
        if n < rows_needed(self.level):
            raise ValueError(
                f"{n} calibration rows are too few for level {self.level:g}: it takes {rows_needed(level)}"
            )
        self.alarms: list[Alarm] = []
        self._scale = scale
        first = _errors_of_calibration_rows(scale)
        self._errors = [ConformalMartingale.start(each, TWO_SIDED, (seed, s)) for s, each in enumerate(first)]
        leverages = _distance(scale, scale.calibration.leverages)
        self._leverage = ConformalMartingale.start(leverages, ONE_SIDED, (seed, len(first)))
        self._coverage = [RollingCoverage(self.level, window, n) for _ in first]
        self._awaited = AwaitedTargets()

    def update(self, x: Any, y: Any = None) -> list[Alarm]:
        """Take in new rows, in their order.

        Args:
            x: Inputs, each row once; a target that comes later goes to `observe`.
            y: Their targets in the units of `predict`, if they are known; NaN for those that are not.

        Returns:
            The alarms that these rows have raised.
        """
        X = self._scale.inputs(x)
        targets = None if y is None else self._scale.targets(y, len(X))
        rows = self._scale.rows(X)
        judged = None if targets is None else self._judged(rows, targets)  # what may fail comes first
        missing = np.ones((len(X), len(self._errors)), dtype=bool) if judged is None else ~judged[0]
        self._awaited.expect(self._scale.hashes(X), missing)
        n_before, found = len(self._leverage.path), list[Found]()
        if rows.known.leverage is not None:
            path = self._leverage.update(_distance(self._scale, rows.known.leverage))
            message = "inputs are farther from the training rows than those of the calibration rows were"
            for i in _first(path, self.leverage_limit):
                found.append((i, self._reached("leverage", n_before + i, None, path[i], self.leverage_limit, message)))
        if judged is not None:
            found += self._take_targets(*judged)
        return self._raised(found)

    def observe(self, x: Any, y: Any) -> list[Alarm]:
        """Take in the targets of rows that `update` was given without them, in any order.

        Args:
            x: Their inputs.
            y: Their targets; NaN for those that are not known.

        Returns:
            The alarms that these targets have raised.

        Raises:
            ValueError: If `update` was not given a row, or its target is known already, or of outputs that were
                calibrated jointly some have none; then no target has been taken in.
        """
        X = self._scale.inputs(x)
        targets = self._scale.targets(y, len(X))
        missing = np.isnan(targets)
        if self._scale.joint and (some := missing.any(axis=1) & ~missing.all(axis=1)).any():
            advice = "give the targets of a row together"
            raise ValueError(
                f"row {int(some.argmax())} has some targets, and the outputs were calibrated jointly: {advice}"
            )
        judged = self._judged(self._scale.rows(X), targets)
        self._awaited.take(self._scale.hashes(X), judged[0])
        return self._raised(self._take_targets(*judged))

    @property
    def n_rows(self) -> int:
        """The number of rows so far."""
        return len(self._leverage.path)

    @property
    def error_limit(self) -> float:
        """What the martingale of an output's errors has to reach for an alarm."""
        return len(self._errors) / self.false_alarms

    @property
    def leverage_limit(self) -> float:
        """What the martingale of the leverages has to reach for an alarm."""
        return 1 / self.false_alarms

    def martingales(self) -> dict[str, np.ndarray]:
        """Return log₁₀ of each martingale after each row or target, by its name."""
        names = ["errors"] if len(self._errors) == 1 else [f"errors of output {s}" for s in range(len(self._errors))]
        every = dict(zip(names, self._errors, strict=True)) | {"leverage": self._leverage}
        return {name: each.path / math.log(10) for name, each in every.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return everything that `summary` says as plain values, for JSON."""
        errors, coverage = [], []
        for s, (martingale, covered) in enumerate(zip(self._errors, self._coverage, strict=True)):
            output = None if len(self._errors) == 1 else s
            errors.append({"output": output} | _state(martingale, self.error_limit))
            share, (low, high) = covered.rolling, covered.rolling.bounds if covered.n else (0.0, 1.0)
            coverage.append(
                {
                    "output": output,
                    "covered": share.covered,
                    "targets": share.n,
                    "share": share.share if share.n else None,
                }
                | {"low": low, "high": high, "blocks": covered.blocks.tolist()}
            )
        return {
            "rows": self.n_rows,
            "level": self.level,
            "false_alarms": self.false_alarms,
            "window": self.window,
            "alarms": [asdict(alarm) for alarm in self.alarms],
            "errors": errors,
            "leverage": _state(self._leverage, self.leverage_limit),
            "coverage": coverage,
        }

    def summary(self) -> str:
        """Return what was found, as text: the alarms, and the statistics that raise them."""
        found = self.to_dict()
        chance = f"{self.false_alarms:g} each for a false alarm, ever"
        lines = [
            f"Monitor of {_count(found['rows'], 'row')}: {_count(len(self.alarms), 'alarm')} (probability {chance})"
        ]
        lines += [f"  ALARM {alarm}" for alarm in self.alarms]
        named = []
        martingales = [(f"errors{_of(each)}", each) for each in found["errors"]] + [("leverage", found["leverage"])]
        for name, each in martingales:
            text = f"martingale {number(each['martingale'])}, at most {number(each['largest'])} so far"
            named.append((name, f"{text}; alarm at {number(each['limit'])} ({_count(each['n'], 'row')})"))
        for each in found["coverage"]:
            if each["targets"]:
                bounds = f"{percent(each['low'])} to {percent(each['high'])} with 95 % confidence"
                text = f"{percent(each['share'])} of the last {_count(each['targets'], 'target')}, {bounds}"
                named.append((f"coverage{_of(each)}", f"{text}; {level_name(self.level)} % asked for"))
        width = max(20, *(len(name) + 2 for name, _ in named))
        return "\n".join(lines + [f"  {name:<{width}}{text}" for name, text in named])

    def _state(self) -> dict[str, Any]:
        settings = (self.level, self.false_alarms, self.window, self.seed)
        state = {"settings": settings, "alarms": self.alarms, "errors": self._errors, "awaited": self._awaited}
        return state | {"leverage": self._leverage, "coverage": self._coverage}

    @classmethod
    def _from_state(cls, scale: DeltaScale, state: dict[str, Any]) -> Self:
        made = cls(scale, *state["settings"])
        made.alarms, made._errors = state["alarms"], state["errors"]
        made._leverage, made._coverage, made._awaited = state["leverage"], state["coverage"], state["awaited"]
        return made

    def _judged(self, rows: ScaledRows, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return which targets are known, the errors, and which targets are covered, (n, streams) each."""
        known = ~np.isnan(y)
        known = known.all(axis=1, keepdims=True) if self._scale.joint else known
        return known, _errors(self._scale, rows, y), _covered(self._scale, rows, y, self.level)

    def _take_targets(self, known: np.ndarray, scores: np.ndarray, covered: np.ndarray) -> list[Found]:
        m, found = len(self._errors), list[Found]()
        for s in range(m):
            output, which, n = None if m == 1 else s, np.flatnonzero(known[:, s]), self._coverage[s].n
            path = self._errors[s].update(scores[which, s])
            for i in _first(path, self.error_limit):
                grown = self._errors[s].leanings[n + i] < 0
                message = f"errors are {'larger' if grown else 'smaller'} than those of the calibration rows were"
                alarm = self._reached("exchangeability", n + i, output, path[i], self.error_limit, message)
                found.append((int(which[i]), alarm))
            for after, block in self._coverage[s].update(covered[which, s], self.false_alarms / m):
                low, high = block.bounds
                inside = f"{percent(block.share)} of {block.n:,} targets lie in their intervals ({percent(low)} to "
                message = f"{inside}{percent(high)} with 95 % confidence), {level_name(self.level)} % asked for"
                alarm = self._alarm("coverage", after, output, block.share, self.level, message)
                found.append((int(which[after - n - 1]), alarm))
        return found

    def _reached(
        self, kind: Any, before: int, output: int | None, log_money: float, limit: float, message: str
    ) -> Alarm:
        money = math.exp(min(log_money, 700.0))
        text = f"{message} (martingale {number(money)} ≥ {number(limit)})"
        return self._alarm(kind, before + 1, output, money, limit, text)

    def _alarm(self, kind: Any, after: int, output: int | None, statistic: float, limit: float, message: str) -> Alarm:
        text = f"after {after:,} {'rows' if kind == 'leverage' else 'targets'}: {message}"
        return Alarm(kind, after, output, statistic, limit, self.false_alarms, text, ADVICE[kind])

    def _raised(self, found: list[Found]) -> list[Alarm]:
        """Keep alarms of a kind that were not raised before, in the order of the rows that they were raised by."""
        n_before = len(self.alarms)
        for _, alarm in sorted(found, key=itemgetter(0)):
            if not any((each.kind, each.output) == (alarm.kind, alarm.output) for each in self.alarms):
                self.alarms.append(alarm)
        return self.alarms[n_before:]


def _errors_of_calibration_rows(scale: DeltaScale) -> list[np.ndarray]:
    """Return the errors of the calibration rows for each stream, under a scale that their targets have not chosen.

    That is the one that is most likely beforehand; of joint outputs that which other rows have chosen.
    """
    conformal = scale.calibration.conformal
    if isinstance(conformal, AllOutputs):
        return list(scale.first_scores.T)
    return [each.unit * np.abs(each.signed[:, int(each.scales.prior.argmin())]) for each in conformal.outputs]


def _errors(scale: DeltaScale, rows: ScaledRows, y: np.ndarray) -> np.ndarray:  # (n, streams)
    conformal = scale.calibration.conformal
    if isinstance(conformal, AllOutputs):
        return scale.scores(rows.to.centre, rows.scale, y)
    pairs = zip(conformal.outputs, rows.known.q, strict=True)
    sigma = np.sqrt(np.stack([each.scales.squared(q)[:, int(each.scales.prior.argmin())] for each, q in pairs], axis=1))
    return scale.scores(rows.to.centre, rows.known.unit * sigma, y)


def _covered(scale: DeltaScale, rows: ScaledRows, y: np.ndarray, level: float) -> np.ndarray:  # (n, streams) bool
    lower, upper = (each[:, :, 0] for each in scale.calibration.bounds(rows.known, (level,), "both"))
    r = scale.in_network_units(y) - rows.to.centre
    rounding = 2 * torch.finfo(scale.fits[0].dtype).eps * np.abs(rows.to.mean)  # as in `predict`
    inside = (lower - rounding <= r) & (r <= upper + rounding)
    return inside.all(axis=1, keepdims=True) if scale.joint else inside


def _distance(scale: DeltaScale, leverages: np.ndarray) -> np.ndarray:  # (n, m) -> (n,)
    """Return how far rows are from the training rows: their leverage, over that of a row that is far."""
    far = scale.calibration.far
    return np.max(leverages / np.where(far > 0, far, 1.0) if len(far) else leverages, axis=1, initial=0.0)


def _first(path: np.ndarray, limit: float) -> list[int]:
    """Return where log money reaches a limit for the first time, if it does."""
    return np.flatnonzero(path >= math.log(limit))[:1].tolist()


def _state(martingale: ConformalMartingale, limit: float) -> dict[str, Any]:
    path = np.append(0.0, martingale.path)
    now, most = (math.exp(min(float(each), 700.0)) for each in (path[-1], path.max()))
    return {"martingale": now, "largest": most, "limit": limit, "n": len(martingale.path)}


def _of(record: dict[str, Any]) -> str:
    return "" if record["output"] is None else f" of output {record['output']}"


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'s'[: n != 1]}" if n else f"no {what}s"
