"""All that a fit has found out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from ..calibration.conformal import PRIOR_RELATIVE_DAMPING, Side
from ..data.row_record import Sample, SeenRows
from ..engines import Covariance, Engine
from ..network.layers.hooks import Layers
from ..storage.encoding import storable
from .accuracy import TOLERABLE, ErrorReport


@storable
@dataclass(frozen=True)
class Fit:
    """All that a fit has found out. Set in one piece, so a fit that fails changes nothing."""

    covariance: Covariance  # without a λ if none was given
    engine: Engine  # the settings it was made with
    rss: np.ndarray  # (m,) residual sum of squares of each output
    n_rows: int
    n_parameters: int
    dtype: torch.dtype
    fingerprint: dict[str, str]
    layers: Layers
    by_rows: bool  # whether the covariance asks for rows, not for inner products
    seen: SeenRows
    outputs: tuple[int, ...] = (0,)  # of the network, that it is to
    n_returned: int = 1  # how many outputs the network has, those not asked about included
    shares: np.ndarray = field(default_factory=lambda: np.ones(1))  # (m,) of p* that each output has
    leverages: np.ndarray = field(default_factory=lambda: np.zeros((0, 1)))  # (rows, m) of training rows; if exact
    sample: Sample = field(default_factory=Sample)  # inputs of training rows, in random order
    n_compared: int = 0  # how many of them a comparison with the exact method may take; 0 where exact
    error: ErrorReport | None = None  # where λ is known and there are enough rows; none where exact
    rows_at_once: int = 0  # to be asked together, where that saves work

    @property
    def asked_layers(self) -> Layers | None:
        """What gradients must come by that the covariance is asked with."""
        return None if self.by_rows else self.layers

    @property
    def way(self) -> str:
        """How gradients come about."""
        if self.by_rows:
            return "whole rows, by torch.func"
        covered, rest = len(self.layers.batch_dims), len(self.layers.rest)
        ways = [f"{covered} layer{'s'[: covered > 1]} by hooks"] if covered else []
        if rest:
            way = "torch.func" if self.layers.vmap else "a plain loop over the rows"
            ways.append(f"{rest} parameter{'s'[: rest > 1]} by {way}")
        return ", ".join(ways)

    @property
    def effective_parameters(self) -> float:
        return math.nan if self.covariance.damping is None else self.covariance.effective_parameters

    @property
    def reference(self) -> Covariance:
        """The covariance that leverages are compared under: at the λ of the fit, or at a common one if it has none."""
        if self.covariance.damping is not None:
            return self.covariance
        spectral = self.covariance.eigendecomposed()
        return spectral.at(PRIOR_RELATIVE_DAMPING * float(spectral.eigenvalues.max(initial=0.0)))

    @property
    def n_outputs(self) -> int:
        return len(self.rss)

    @property
    def degrees_of_freedom(self) -> np.ndarray:  # (m,)
        return self.n_rows - self.effective_parameters * self.shares

    @property
    def noise_std(self) -> np.ndarray:  # (m,)
        nu = self.degrees_of_freedom
        return np.sqrt(self.rss / np.where(nu > 0, nu, np.nan))

    def student(self, level: float, side: Side = "both") -> np.ndarray:  # (m,)
        """t · s: an interval's half width over its spread √(1 + q)."""
        from scipy.special import stdtrit

        return stdtrit(self.degrees_of_freedom, (1 + level) / 2 if side == "both" else level) * self.noise_std

    def warnings(self) -> list[str]:
        """Where the formula, or the sketch, should not be trusted."""
        if self.covariance.damping is None:
            return []
        nu = float(self.degrees_of_freedom.min())  # of the output that has fewest
        n, p_star = self.n_rows, self.n_rows - nu
        missed = self.covariance.missed_parameters
        messages = []
        if nu <= 0:
            messages.append(
                f"n − p* = {nu:.3g} is not positive: the formula has no answer; raise the damping, or calibrate"
            )
        elif p_star > n / 2 or nu < 10:
            messages.append(
                f"the network has p* = {p_star:.1f} effective parameters for n = {n} rows: the formula is unreliable "
                "here (often far too wide); calibrate on held-out data, or raise the damping if the network was "
                "trained with more regularisation"
            )
        if self.error is not None:
            if self.error.width > TOLERABLE:
                messages.append(
                    f"{self.engine!r} is not accurate enough here: {self.error}; raise its rank, dim or landmarks, or "
                    "use Exact() if memory allows"
                )
        # A bound is all there is. More than 5 % of the degrees of freedom shows in s, more than half of p* in q.
        elif missed > max(min(0.05 * nu, 0.5 * p_star), 0.5):
            messages.append(
                f"the sketch may miss up to {missed:.0f} effective parameters (it found {p_star:.1f}, n = {n}): "
                "raise its rank, dim or landmarks, or use Exact() if memory allows"
            )
        return messages
