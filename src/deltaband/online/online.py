"""`Online`: intervals for rows in time, whose width adapts to the misses of earlier ones."""

import math
from collections.abc import Sequence
from copy import deepcopy
from inspect import signature
from typing import Any, Self

import numpy as np

from ..display import number, percent
from ..errors import warn
from ..results import Intervals, level_name, parse_levels
from ..validation import check_choice, check_int, is_whole_number
from .files import KeptInFile
from .scale import DeltaScale, ScaledRows
from .series import SeriesState, StreamState, WaitingRow
from .trackers import TRACKERS

Label = str | int  # of a series

INFINITE = (
    "the method needs a threshold above the largest of its scores, so the interval is infinite: only that keeps the "
    "long-run coverage; it becomes finite again after targets that are covered (said once; summary() counts them)"
)


class Online(KeptInFile):
    """Intervals for rows in time: `predict`, and `observe` once the targets are known.

    An interval is ŷ ± threshold·σ(x), with σ the scale of the calibrated band. The threshold adapts to the misses
    of earlier predictions, so that the share of misses approaches 1 − level on any series, also one that drifts or is
    chosen by an adversary; `summary()` says how far from it that share can be. Each output has its own threshold
    (several horizons are several outputs), and so has each series. Outputs that were calibrated jointly have one.

    `PredictionIntervals.online` makes one. It is for one thread at a time.

    Args:
        scale: The scale of a calibrated band.
        level, method, settings: As in `PredictionIntervals.online`.
    """

    _kind = "state of online intervals"

    def __init__(self, scale: DeltaScale, level: float, method: str, settings: dict[str, Any]) -> None:
        check_choice(method, "method", tuple(TRACKERS))
        if np.ndim(level) != 0:
            raise ValueError(f"online intervals have one level, got {level!r}")
        (self.level,) = parse_levels(level)
        takes = [name for name in signature(TRACKERS[method].start).parameters if name not in ("scores", "level")]
        if unknown := [name for name in settings if name not in takes]:
            raise TypeError(f"method={method!r} takes {', '.join(takes)}, not {unknown[0]}")
        self.method, self.settings = method, settings
        self._scale, self._series = scale, dict[Label, SeriesState]()
        self._first = scale.first_scores
        self._started()  # settings that are wrong are reported now

    def predict(self, x: Any, *, series: Any = None) -> Intervals:
        """Return intervals for the rows of `x`, which then wait for their targets.

        All rows of one call have the same threshold, as none of their targets is known yet.

        Args:
            x: Inputs, as in `PredictionIntervals.predict`.
            series: The series that rows belong to: a label for all of them, or one for each. Labels are words or whole
                numbers; a new one starts a series.

        Returns:
            The intervals, infinite where only that keeps the long-run coverage.
        """
        X = self._scale.inputs(x)
        labels, rows, hashes = self._labels(series, len(X)), self._scale.rows(X), self._scale.hashes(X)
        after = self._of(labels)
        thresholds = {label: state.thresholds for label, state in after.items()}
        intervals = self._intervals(x, rows, [thresholds[label] for label in labels])
        for i, label in enumerate(labels):
            after[label].predicted(hashes[i], rows.to.centre[i], rows.scale[i], thresholds[label])
        self._series |= after
        return intervals

    def observe(self, x: Any, y: Any, *, series: Any = None, output: int | None = None) -> None:
        """Take in the targets of rows that were predicted, in the order of the predictions.

        Args:
            x: The inputs of these rows, as they were given to `predict`.
            y: Their targets in the units of `predict`, NaN where one will never be known.
            series: As in `predict`.
            output: The number of the output that `y` has the targets of, among those that the band is for; by default
                it has those of all outputs that are still waiting. Targets of a longer horizon come later.

        Raises:
            ValueError: If a row was not predicted, was observed already, or others of its series come first; then no
                target has been taken in.
        """
        X = self._scale.inputs(x)
        streams = self._streams(output)
        targets = self._scale.targets(y, len(X), output)
        labels, hashes = self._labels(series, len(X)), self._scale.hashes(X)
        queues = {label: self._series[label].first_waiting(streams) for label in labels if label in self._series}
        rows = []
        for i, (label, hash_) in enumerate(zip(labels, hashes, strict=True)):
            row = next(queues[label], None) if label in queues else None
            if row is None or row.hash != hash_:
                raise ValueError(self._complaint(i, label, hash_, streams, row))
            rows.append(row)
        if not rows:
            return
        centre, scale = np.stack([row.centre for row in rows]), np.stack([row.scale for row in rows])
        scores = self._scale.scores(centre, scale, targets)
        for i, (label, row) in enumerate(zip(labels, rows, strict=True)):
            for stream in streams:
                if row.waits[stream]:
                    self._series[label].observed(row, stream, float(scores[i, stream]))
        for label in dict.fromkeys(labels):
            self._series[label].tidy()

    def replay(self, x: Any, y: Any, *, series: Any = None, delay: int | Sequence[int] = 0) -> Intervals:
        """Return what `predict` and `observe` give for rows one after another, much faster than row by row.

        Args:
            x, y, series: As in `predict` and `observe`.
            delay: After how many further rows of its series a target is known, 0 if before the next prediction; one
                number, or one per output. Rows whose targets are not known at the end wait for them.

        Returns:
            The intervals.

        Raises:
            ValueError: If earlier predictions wait for their targets, or `delay` does not fit the outputs.
        """
        X = self._scale.inputs(x)
        n_streams = self._scale.n_streams
        given = delay if isinstance(delay, Sequence) else [delay] * n_streams
        if len(given) != n_streams:
            raise ValueError(f"delay must be one number or {n_streams}, got {delay!r}")
        delays = [check_int(each, "delay", 0) for each in given]
        labels, rows, targets = self._labels(series, len(X)), self._scale.rows(X), self._scale.targets(y, len(X))
        after = deepcopy(self._of(labels))
        if waiting := [label for label, state in after.items() if state.waiting]:
            raise ValueError(f"predictions of series {waiting[0]!r} wait for their targets: observe these first")
        scores, hashes = self._scale.scores(rows.to.centre, rows.scale, targets), self._scale.hashes(X)
        came: dict[Label, list[int]] = {label: [] for label in after}
        found = []
        for i, label in enumerate(labels):
            state, order = after[label], came[label]
            found.append(state.thresholds)
            state.predicted(hashes[i], rows.to.centre[i], rows.scale[i], found[-1])
            order.append(i)
            for stream, late in enumerate(delays):
                if late < len(order):
                    row = next(state.first_waiting([stream]))
                    state.observed(row, stream, float(scores[order[-1 - late], stream]))
            state.tidy()
        intervals = self._intervals(x, rows, found)
        self._series |= after
        return intervals

    def records(self) -> list[dict[str, Any]]:
        """Return a dictionary for each series and output: how many rows, misses and infinite intervals, and the bound.

        `bound` is what |share of misses − (1 − level)| is at most, whatever the series; NaN for `method="window"`.
        """
        found = []
        for label, state in self._series.items():
            for s, stream in enumerate(state.streams):
                share = stream.n_missed / stream.n_observed if stream.n_observed else math.nan
                found.append(
                    {
                        "series": label,
                        "output": None if self._scale.joint else s,
                        "observed": stream.n_observed,
                        "waiting": stream.n_waiting,
                        "coverage": 1 - share,
                        "bound": stream.bound,
                        "infinite": stream.n_infinite,
                        "threshold": stream.tracker.threshold(),
                    }
                )
        return found

    def summary(self) -> str:
        """Return, as text, the coverage so far and the threshold of each series."""
        settings = "".join(f", {name}={value}" for name, value in self.settings.items())
        lines = [f"Online intervals at {level_name(self.level)} %, method={self.method!r}{settings}"]
        for each in self.records():
            of = [f"series {each['series']}"] if each["series"] != "" else []
            of += [f"output {each['output']}"] if self._scale.n_streams > 1 else []
            about = f"{each['observed']:,} observed, {each['waiting']:,} waiting"
            if each["observed"]:
                about += f", {percent(each['coverage'])} covered"
            if not math.isnan(each["bound"]):
                about += f" (guaranteed: {level_name(self.level)} % ± {percent(min(each['bound'], 1.0))})"
            if each["infinite"]:
                about += f", {each['infinite']:,} infinite"
            lines.append(
                "  " + ": ".join([", ".join(of) or "all rows", f"{about}, ± {number(each['threshold'])}·σ now"])
            )
        return "\n".join(lines)

    def _state(self) -> dict[str, Any]:
        return {"level": self.level, "method": self.method, "settings": self.settings, "series": self._series}

    @classmethod
    def _from_state(cls, scale: DeltaScale, state: dict[str, Any]) -> Self:
        made = cls(scale, state["level"], state["method"], state["settings"])
        made._series = state["series"]
        return made

    def _started(self) -> SeriesState:
        start = TRACKERS[self.method].start
        return SeriesState([StreamState(start(each, self.level, **self.settings)) for each in self._first.T])

    def _of(self, labels: Sequence[Label]) -> dict[Label, SeriesState]:
        return {label: self._series.get(label) or self._started() for label in dict.fromkeys(labels)}

    def _intervals(self, x: Any, rows: ScaledRows, thresholds: list[np.ndarray]) -> Intervals:
        t = np.array(thresholds).reshape(len(rows), self._scale.n_streams)
        half = np.maximum(t, 0.0) * rows.scale
        intervals = self._scale.intervals(x, rows, -half, half, self.level)
        if np.isposinf(t).any() and not any(s.n_infinite for each in self._series.values() for s in each.streams):
            warn(INFINITE)  # which may be an error: then nothing has changed
        return intervals

    def _labels(self, series: Any, n: int) -> list[Label]:
        one = series is None or isinstance(series, str) or is_whole_number(series)
        given = [series] * n if one else list(np.asarray(series, dtype=object).reshape(-1))
        if len(given) != n:
            raise ValueError(f"series must be one label, or one for each of the {n} rows, got {len(given)}")
        labels = ["" if each is None and series is None else each for each in given]
        for i, label in enumerate(labels):
            if not isinstance(label, str) and not is_whole_number(label):
                raise TypeError(f"labels of series must be words or whole numbers, got {label!r} in row {i}")
        return [str(label) if isinstance(label, str) else int(label) for label in labels]

    def _streams(self, output: int | None) -> list[int]:
        if output is None:
            return list(range(self._scale.n_streams))
        if self._scale.joint:
            raise ValueError("the outputs were calibrated jointly: observe the targets of a row together")
        return [check_int(output, "output", 0, self._scale.n_streams)]

    def _complaint(self, i: int, label: Label, hash_: int, streams: Sequence[int], row: WaitingRow | None) -> str:
        of = "" if label == "" else f" of series {label!r}"
        waiting = self._series[label].first_waiting(streams) if label in self._series else iter(())
        if any(each.hash == hash_ for each in waiting):
            advice = "give targets in the order of the predictions, NaN for those that will never be known"
            return f"row {i} of x{of} is out of order: predictions before it wait for their targets; {advice}"
        return f"row {i} of x{of} waits for no target: predict it first, and observe it once"
