"""`Scales`: candidates for the scale σ(x) of an interval, of which a calibration chooses."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from ..damping import TYPICAL_RELATIVE_DAMPING
from ..storage.encoding import storable

RELATIVE_DAMPINGS = 10.0 ** np.arange(-8, 2)  # λ in units of the largest eigenvalue of JᵀJ
VARIANCE_SHARES = np.array([0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 0.999])  # of σ² that is b·q at the average training row
NOISE_POWERS = np.array([0.0, 0.25, 0.5, 0.75, 1.0])  # γ


@storable
@dataclass(frozen=True, eq=False)
class Scales:
    """Candidates c for σ² = (1 + b·q_λ)·v^(2γ), each with its own λ, b and γ.

    `q` in what follows is (rows, L), the variance under each λ; where the noise is learnt, log v is in a last column.
    """

    dampings: np.ndarray  # (L,) the different λ
    damping_index: np.ndarray  # (C,) the λ of each candidate, as an index into `dampings`
    b: np.ndarray  # (C,)
    prior: np.ndarray  # (C,) −log of the prior weight
    gamma: np.ndarray | None = None  # (C,) where the noise is learnt

    @classmethod
    def single(cls, damping: float, b: float = 1.0) -> Self:
        return cls(np.array([damping]), np.array([0]), np.array([b]), np.array([0.0]))

    def with_noise(self) -> Self:
        """Return each candidate with each γ; the prior is centred on ½."""
        gamma = np.repeat(NOISE_POWERS, len(self.b))
        index, b, prior = (np.tile(each, len(NOISE_POWERS)) for each in (self.damping_index, self.b, self.prior))
        return type(self)(self.dampings, index, b, prior + 0.5 * ((gamma - 0.5) / 0.5) ** 2, gamma)

    def only(self, candidate: int) -> Self:
        """Return a single candidate."""
        names = ("damping_index", "b", "prior", "gamma")
        some = {name: each[[candidate]] for name in names if (each := getattr(self, name)) is not None}
        return replace(self, **some)

    @classmethod
    def grid(cls, eigenvalues: np.ndarray, n_rows: int) -> Self:
        """Return plausible λ and b for a network whose JᵀJ, over n rows, has these eigenvalues, largest first.

        The prior is centred on the typical damping, ± a decade, and on as much variance as noise, ± a factor e.
        """
        if len(eigenvalues) == 0:  # a sketch that holds nothing: only the constant width is left
            return cls.single(1.0, b=0.0)
        e = eigenvalues[:, None]
        dampings = RELATIVE_DAMPINGS * eigenvalues[0]
        average = np.square(e / (e + dampings)).sum(axis=0) / n_rows  # of q over the training rows
        odds = VARIANCE_SHARES / (1 - VARIANCE_SHARES)
        index, share = np.divmod(np.arange(len(dampings) * len(odds)), len(odds))
        decades = np.log10(RELATIVE_DAMPINGS / TYPICAL_RELATIVE_DAMPING)
        prior = 0.5 * decades[index] ** 2 + 0.5 * np.log(odds[share]) ** 2
        constant = 0.5 * np.log(odds[0]) ** 2  # as likely as the smallest share
        b = odds[share] / average[index]
        return cls(dampings, np.append(index, 0), np.append(b, 0.0), np.append(prior, constant))

    def squared(self, q: np.ndarray) -> np.ndarray:  # -> σ², (rows, C)
        squared = 1.0 + self.b * q[:, self.damping_index]
        return squared if self.gamma is None else squared * np.exp(2 * self.gamma * q[:, -1:])
