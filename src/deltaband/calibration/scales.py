"""Candidates for the scale σ(x) = √(1 + b·q_λ(x)) of the residuals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..damping import TYPICAL_RELATIVE_DAMPING
from ..storage.encoding import storable

RELATIVE_DAMPINGS = 10.0 ** np.arange(-8, 2)  # λ in units of the largest eigenvalue of JᵀJ
VARIANCE_SHARES = np.array([0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 0.999])  # of σ² that is b·q at the average training row


@storable
@dataclass(frozen=True, eq=False)
class Scales:
    """Candidates c for σ² = 1 + b·q_λ, each with its own λ and b."""

    dampings: np.ndarray  # (L,) the different λ
    damping_index: np.ndarray  # (C,) the λ of each candidate, as an index into `dampings`
    b: np.ndarray  # (C,)
    prior: np.ndarray  # (C,) −log of the prior weight

    @classmethod
    def single(cls, damping: float) -> Scales:
        """Return one candidate, b = 1 with the given λ: nothing to choose."""
        return cls(np.array([damping]), np.array([0]), np.array([1.0]), np.array([0.0]))

    @classmethod
    def grid(cls, eigenvalues: np.ndarray, n_rows: int) -> Scales:
        """Return plausible λ and b for a network whose JᵀJ, over n rows, has these eigenvalues, largest first.

        The prior is centred on the typical damping, give or take a decade, and on as much variance as noise, give or
        take a factor e. A few dozen rows leave it at that; some hundred overrule it.
        """
        if len(eigenvalues) == 0:  # a sketch that holds nothing: only the constant width is left
            return cls(np.array([1.0]), np.array([0]), np.array([0.0]), np.array([0.0]))
        e = eigenvalues[:, None]
        dampings = RELATIVE_DAMPINGS * eigenvalues[0]
        average = np.square(e / (e + dampings)).sum(axis=0) / n_rows  # of q over the training rows
        odds = VARIANCE_SHARES / (1 - VARIANCE_SHARES)
        index, share = np.divmod(np.arange(len(dampings) * len(odds)), len(odds))
        decades = np.log10(RELATIVE_DAMPINGS / TYPICAL_RELATIVE_DAMPING)
        prior = 0.5 * decades[index] ** 2 + 0.5 * np.log(odds[share]) ** 2
        constant = 0.5 * np.log(odds[0]) ** 2  # as likely as the smallest share
        return cls(
            dampings, np.append(index, 0), np.append(odds[share] / average[index], 0.0), np.append(prior, constant)
        )

    def squared(self, q: np.ndarray) -> np.ndarray:  # (rows, L) -> (rows, C)
        """Return σ² of each row under each candidate."""
        return 1.0 + self.b * q[:, self.damping_index]
