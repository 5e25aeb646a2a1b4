"""How good the intervals of a fitted network are, on rows with targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .data.batches import DEFAULT_BATCH_ROWS
from .data.extras import with_gaps
from .data.row_record import pair_hashes
from .errors import EmptyDataError, said_once, warn
from .metrics import SLAB_ROWS_AT_LEAST, Scores, evaluate
from .predictor import Predictor
from .results import Intervals, concatenated, interval_arrays, parse_levels

if TYPE_CHECKING:  # matplotlib is an extra
    from matplotlib.axes import Axes

EVALUATED_LEVELS = (0.5, 0.8, 0.9, 0.95)


class Evaluator(Predictor):
    """A predictor that measures and draws its intervals for rows with targets."""

    def evaluate(
        self,
        x: Any,
        y: Any = None,
        levels: float | Sequence[float] = EVALUATED_LEVELS,
        *,
        outputs: Sequence[str] | None = None,
        groups: Any = None,
        **options: Any,
    ) -> Scores:
        """Measure how good the intervals are, on rows that the network was neither trained nor calibrated on.

        Args:
            x: Inputs, or a loader of batches (x, y).
            y: The targets of inputs, in the units of `predict`.
            levels: The levels of the intervals.
            outputs: Names of the outputs.
            groups: Groups of the rows, labels (n,) or indicators (n, G), whose coverage is measured one by one. A band
                that was calibrated by groups needs them, as `predict` does.
            options: Other arguments of `predict`: `sample_weight`, `unknown`, `weights`, `positions`.

        Returns:
            Coverage, also that of the worst slab, mean width, interval score, pinball loss, correlation of width and
            error, RMSE and CRPS; printed, a table.

        Raises:
            EmptyDataError: If a loader gives no rows.
            ValueError: If targets are NaN, unless `missing="ignore"`: each output is then measured on those it has.
            TypeError: If there are groups or options with a loader, which go with arrays.
        """
        if (positions := options.pop("positions", None)) is not None:
            return self._at(positions).evaluate(x, y, levels, outputs=outputs, groups=groups, **options)
        levels, network = list(parse_levels(levels)), self.spec.network()
        features: list[np.ndarray] = []
        masked = False
        if y is not None:
            by_group = self._calibration is not None and self._calibration.is_by_group
            intervals = self.predict(x, levels, **options, **({"groups": groups} if by_group else {}))
            given, rows = self.select_targets(y), self.spec.inputs(x)
            features += [network.features(rows)] if len(rows) >= SLAB_ROWS_AT_LEAST else []
        else:
            if options or groups is not None:
                name = next(iter(options), "groups")
                raise TypeError(f"{name}= goes with arrays: give evaluate(X, y, …), not a loader")
            parts = []
            with said_once():
                for rows, targets, _ in self.spec.read_answers(x).chunks(lambda x: max(len(x), DEFAULT_BATCH_ROWS)):
                    self.spec.look_at(self.fits_, rows)
                    masked = masked or "observed" in rows.extras
                    parts.append((self.select_targets(with_gaps(rows, targets)), self.predict(rows, levels)))
                    features.append(network.features(rows))
            if not parts:
                raise EmptyDataError("there are no rows to evaluate the intervals on (a generator is read only once)")
            given, intervals = concatenated(parts)
        if outputs is None and not self._is_single:
            outputs = [f"output {o}" for o in self.outputs_]
        same = len({part.shape[1] for part in features}) == 1  # sequences of other lengths may have other features
        about = {"x": np.concatenate(features) if same else None, "groups": groups}
        about |= {"missing": "ignore" if masked or self._task.may_miss else None}
        joint = self._calibration is not None and self._calibration.is_joint
        scores = evaluate(given, intervals, outputs, joint=joint, **about)
        warn(*self.suspicions(given, intervals))
        return scores

    def plot(
        self,
        x: Any,
        y: Any = None,
        *,
        level: float | Sequence[float] = 0.95,
        output: int | None = None,
        data: tuple[Any, Any] | None = None,
        ax: Axes | None = None,
        **given: Any,
    ) -> Axes:
        """Draw the band over an `x` of one feature; for other inputs the intervals sorted by width, which needs `y`.

        Args:
            x: Inputs.
            y: Their targets.
            level: As in `predict`.
            output: The output to show, of several.
            data: Training data `(x, y)` to show.
            ax: The axes to draw on; new ones by default.
            given: `groups`, `unknown` and `weights`, as in `predict`.

        Returns:
            The axes.
        """
        from . import plots

        return plots.fitted(self.predict(x, level, **given), x, y, output=output, data=data, ax=ax)

    def suspicions(self, y: np.ndarray, intervals: Intervals) -> list[str]:
        """Return what suggests that the network was not trained for rows with these targets (n, m).

        Args:
            y: Targets, in the units of `predict`, NaN where there is none.
            intervals: The intervals of the rows.

        Returns:
            What to warn of, a sentence each.

        Raises:
            ValueError: If the targets have been scaled, and answers are in their original units.
        """
        mean = interval_arrays(intervals, np.float64)[0]
        self._task.check_answers(y, mean)
        return self._task.suspicions(self.fits_, y, mean, "these rows", "original")

    def share_seen_in_training(self, x: Any, y: Any) -> float:
        """Return the share of these rows that were training rows.

        Args:
            x: Inputs.
            y: Their targets, as `fit` takes them or in the original units.

        Returns:
            The share, from 0 to 1.
        """
        X, seen = self.spec.network().prepare(self.spec.inputs(x)), self.fits_[0].seen
        return max(seen.share(pair_hashes(X, targets)) for targets in self.spec.task.possible_targets(y))
