"""A calibrated band as rows in time need it: what targets are compared with, scores |y − ŷ|/σ(x), and intervals."""

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch

from ..calibration import AllOutputs, Calibration, PooledOutputs
from ..data.batches import read_targets
from ..data.inputs import Inputs
from ..data.row_record import pair_hashes
from ..fitting.fit import Fit, KnownRows, Reference
from ..fitting.spec import FitSpec, all_outputs
from ..fitting.tasks import Regression
from ..results import Intervals, like


class Band(Protocol):
    """What is needed of `PredictionIntervals`."""

    spec: FitSpec

    @property
    def fits_(self) -> tuple[Fit, ...]: ...

    @property
    def calibration_(self) -> Calibration | None: ...


class ScaledRows(NamedTuple):
    """Rows without their targets."""

    to: Reference
    known: KnownRows
    scale: np.ndarray  # (n, m) what residuals are divided by

    def __len__(self) -> int:
        return len(self.scale)


@dataclass(frozen=True, eq=False)
class DeltaScale:
    """The scale of a calibrated band. There is a score for each output, or one for all where these are joint."""

    spec: FitSpec
    task: Regression
    fits: tuple[Fit, ...]
    calibration: Calibration

    @classmethod
    def of(cls, band: Band) -> Self:
        """Return the scale of a band, or raise if it has none."""
        if not isinstance(getattr(getattr(band, "spec", None), "task", None), Regression):
            raise TypeError(f"expected calibrated PredictionIntervals, got {type(band).__name__}")
        fits = band.fits_
        if band.calibration_ is None:
            raise ValueError("scores of held-out rows are needed to start from: call calibrate(x, y) first")
        if isinstance(band.calibration_.conformal, PooledOutputs) or band.calibration_.misses:
            raise ValueError(
                "rows in time are followed output by output, or all at once: calibrate with joint=False or True, and "
                "on rows without missing targets"
            )
        return cls(band.spec, band.spec.task, fits, band.calibration_)  # type: ignore[arg-type]

    @property
    def joint(self) -> bool:
        return isinstance(self.calibration.conformal, AllOutputs)

    @property
    def n_outputs(self) -> int:
        return len(all_outputs(self.fits))

    @property
    def n_streams(self) -> int:
        return 1 if self.joint else self.n_outputs

    @property
    def digest(self) -> str:
        """What the scale and the first scores follow from, for files to name it."""
        found = hashlib.blake2b(repr(self.fits[0].fingerprint).encode(), digest_size=16)
        found.update(np.ascontiguousarray(self.first_scores).tobytes())
        return found.hexdigest()

    @property
    def first_scores(self) -> np.ndarray:  # (calibration rows, streams), in their order
        conformal = self.calibration.conformal
        if isinstance(conformal, AllOutputs):  # of the rows that have not chosen the scales
            return np.abs(conformal.signed).max(axis=1, keepdims=True)
        return np.stack([each.unit * np.abs(each.signed[:, each.best]) for each in conformal.outputs], axis=1)

    def inputs(self, x: Any) -> Inputs:
        return self.spec.inputs(x)

    def hashes(self, x: Inputs) -> list[int]:
        """Return a hash of each row, the same however rows are batched."""
        return pair_hashes(self.spec.network().prepare(x), torch.zeros(len(x), 1)).tolist() if len(x) else []

    def rows(self, x: Inputs) -> ScaledRows:
        """Evaluate the band on rows."""
        _, to, known = self.spec.compared(self.fits, self.calibration, x)
        return ScaledRows(to, known, self.calibration.scale(known) * self._units)

    def targets(self, y: Any, n: int, output: int | None = None) -> np.ndarray:  # (n, m)
        """Return targets in the units of `predict`, NaN where they are missing; `y` may be those of one output."""
        given = read_targets(y)
        if len(given) != n:
            raise ValueError(f"inputs and targets must have the same number of rows: {n} inputs, {len(given)} targets")
        if bool(given.isinf().any()):
            raise ValueError(f"targets hold an infinite value in row {int(given.isinf().any(dim=1).nonzero()[0])}")
        if output is None:
            return self.task.select_targets(all_outputs(self.fits), given, self.fits[0].n_returned).numpy()
        if given.shape[1] != 1:
            raise ValueError(f"one output has one target per row, got {given.shape[1]} columns")
        found = np.full((n, self.n_outputs), np.nan)
        found[:, output] = given[:, 0]
        return found

    def scores(self, centre: np.ndarray, scale: np.ndarray, y: np.ndarray) -> np.ndarray:  # (n, streams)
        """Return the scores of targets (n, m) in the units of `predict`; NaN where one is missing."""
        return self._by_stream(np.abs(self.in_network_units(y) - centre) / scale)

    def in_network_units(self, y: np.ndarray) -> np.ndarray:  # (n, m)
        return y if self.task.units is None else self.task.units.to_scaled(y)

    def intervals(self, x: Any, rows: ScaledRows, lower: np.ndarray, upper: np.ndarray, level: float) -> Intervals:
        """Return intervals in the units and the kind that `predict` gives; bounds (n, m) are of y − centre."""
        units, single = self.task.units, self.task.single or self.fits[0].n_returned == 1
        mean, lower, upper = rows.to.mean, rows.to.centre + lower, rows.to.centre + upper
        if units is not None:
            mean, (lower, upper) = units.to_original(mean), units.to_original_bounds(mean, lower, upper)

        def given(values: np.ndarray, toward: float | None = None) -> Any:
            dtype = self.fits[0].dtype if units is None else torch.float64
            return like(x, values[:, 0] if single else values, dtype, toward)

        far = None if rows.known.far is None else like(x, rows.known.far, torch.bool)
        return Intervals(given(mean), given(lower, -np.inf), given(upper, np.inf), level, far)

    @property
    def _units(self) -> np.ndarray | float:
        conformal = self.calibration.conformal
        return conformal.units if isinstance(conformal, AllOutputs) else 1.0

    def _by_stream(self, scores: np.ndarray) -> np.ndarray:  # (n, m) -> (n, streams)
        return scores.max(axis=1, keepdims=True) if self.joint else scores
