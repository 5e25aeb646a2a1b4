"""What every engine is, and what it ends in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self

import numpy as np

from ..network.gradient_batch import GradientBatch
from .problem import Problem
from .spectral import SpectralCovariance, Spectrum

Total = Callable[[np.ndarray], np.ndarray]  # an array -> its sum over several processes


class Covariance(Protocol):
    """The parameter covariance of the delta method, Σ⁻¹ = A⁻¹JᵀJA⁻¹ with A = JᵀJ + λI. A value: nothing changes it."""

    @property
    def damping(self) -> float | None:
        """λ; None where it is not chosen yet."""
        ...

    @property
    def effective_parameters(self) -> float:
        """p* = tr(2H − H²), H = J A⁻¹ Jᵀ."""
        ...

    @property
    def missed_parameters(self) -> float:
        """An upper bound of the part of p* that an approximation has left out (an estimate of one for a random
        projection); 0 where it is exact."""
        ...

    @property
    def error_bound(self) -> float:
        """‖JᵀJ − what stands in for it‖₂ is at most this, rounding aside; 0 where it is exact, NaN where nothing is
        certified."""
        ...

    @property
    def in_reach(self) -> bool:
        """Whether an approximation of this size can answer for this λ at all."""
        ...

    def variance(self, g: GradientBatch) -> np.ndarray:  # (b,)
        """q = gᵀ Σ⁻¹ g."""
        ...

    def leverage(self, g: GradientBatch) -> np.ndarray:  # (b,)
        """h = gᵀ A⁻¹ g."""
        ...

    def spectrum(self) -> Spectrum: ...

    def diagonalised(self) -> SpectralCovariance:
        """The same J as a covariance that answers for every λ."""
        ...

    def describe(self) -> str:
        """One line for `summary()`."""
        ...


class Engine(Protocol):
    """A streaming accumulator of gradients. What the user constructs holds only settings: `start` makes the rest."""

    @property
    def needs_damping(self) -> bool:
        """Whether λ must be known before the first row."""
        ...

    @property
    def sample_size(self) -> int:
        """How many training rows, drawn at random, it wants to see before the first; 0 for most."""
        ...

    @property
    def seed(self) -> int:
        """Of that sample."""
        ...

    def start(
        self, *, n_rows: int | None = None, damping: float | None = None, sample: GradientBatch | None = None
    ) -> Self:
        """A fresh accumulator with the same settings. What is known beforehand helps it, nothing more; an engine with
        a `sample_size` gets its sample (fewer rows where there are fewer)."""
        ...

    def wants_rows(self, problem: Problem) -> bool:
        """Whether it will ask for rows, or for inner products alone."""
        ...

    def nbytes(self, problem: Problem) -> float:
        """What a fit holds at its peak, without the chunk of rows under way."""
        ...

    def flops(self, problem: Problem) -> float:
        """What a fit costs, roughly, without the rows' gradients."""
        ...

    def limited(self, size: int, share: float = 1.0) -> Self:
        """The same settings with this share of the directions, and no more than so many: an engine for a sample of the
        rows."""
        ...

    def update(self, gradients: GradientBatch) -> None: ...

    def beside(self) -> Self:
        """An empty accumulator that can be merged into this one."""
        ...

    def resumed(self, covariance: Any, n_rows: int, n_parameters: int) -> Self:
        """An accumulator that has seen the n rows of J that ended in this covariance: to the last digits the one that
        was finalised."""
        ...

    def merge(self, other: Self) -> None:
        """Take in the rows that another accumulator of the same settings has seen."""
        ...

    def add_up(self, total: Total, n_rows: int, n_parameters: int) -> bool:
        """Take in, where what it holds is a sum, all n rows that accumulators in several processes have seen: `total`
        adds an array up over all of them. False where it is not, and they have to be merged one by one."""
        ...

    def state(self) -> dict[str, Any]:
        """What it has taken in, as values that a file can hold."""
        ...

    def from_state(self, state: dict[str, Any]) -> Self:
        """An accumulator of the same settings that goes on from there."""
        ...

    def finalise(self, damping: float | None) -> Covariance:
        """End in a covariance, diagonalised where λ is None. The accumulator hands its memory over and is empty."""
        ...
