"""JᵀJ in its eigenbasis, or in that of a sketch: one projection of g answers q and h for every λ."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from ..network.gradient_batch import GradientBatch, add_gram, coordinates
from ..storage.encoding import storable
from .covariance import By, Covariance, Products


class Spectrum(NamedTuple):
    """Singular values of J, largest first, and the eigenvalue of Σ⁻¹ that belongs to each."""

    singular_values: np.ndarray  #: d, (r,).
    covariance_eigenvalues: np.ndarray  #: d²/(d²+λ)², (r,).


class Tail(Protocol):
    """An estimate of what directions that are not held add to those with the eigenvalues e: q and h of a new row over
    its ρ = g·g − Σ (vⱼ·g)², and a part of p*."""

    def variance(self, e: np.ndarray, damping: Any) -> Any: ...
    def leverage(self, e: np.ndarray, damping: Any) -> Any: ...
    def parameters(self, e: np.ndarray, damping: float) -> float: ...


@dataclass(frozen=True, eq=False)
class SpectralCovariance(Covariance):
    """With orthonormal directions vⱼ and eigenvalues eⱼ of JᵀJ, and one eigenvalue `floor` for all other directions:

    q = Σ (vⱼ·g)² eⱼ/(eⱼ+λ)²,  p* = Σ 2hⱼ − h²ⱼ with hⱼ = eⱼ/(eⱼ+λ),
    h = Σ (vⱼ·g)²/(eⱼ+λ) + (g·g − Σ (vⱼ·g)²)/(floor+λ).

    Where there is an `added_tail` for the other directions, its part is added instead of the floor's.
    """

    eigenvalues: np.ndarray  # (r,) largest first
    floor: float = field(default=0.0, kw_only=True)
    added_tail: Tail | None = field(default=None, kw_only=True)

    @abstractmethod
    def projections(self, g: GradientBatch) -> np.ndarray:  # (b, r)
        """Return vⱼ·g."""

    def squared_projections(self, g: GradientBatch) -> np.ndarray:  # (b, r)
        """Return (vⱼ·g)²."""
        return np.square(self.projections(g))

    def split(self, g: GradientBatch) -> tuple[np.ndarray, np.ndarray]:  # (b, r), (b,)
        """Return (vⱼ·g)² and g·g − Σ (vⱼ·g)²."""
        z2 = self.squared_projections(g)
        return z2, np.maximum(g.squared_norms - z2.sum(axis=1), 0.0)

    def at(self, damping: float) -> Self:
        """Return the same J with another λ."""
        return replace(self, damping=damping)

    @property
    def chosen_damping(self) -> float:
        """λ, or an error where it is not chosen yet."""
        if self.damping is None:
            raise ValueError("λ is not chosen yet")
        return self.damping

    @property
    def inverses(self) -> np.ndarray:  # (r,)
        """1/(eⱼ+λ), the eigenvalues of A⁻¹ along the directions; 0 where that has no inverse."""
        damped = self.eigenvalues + self.chosen_damping
        return np.divide(1.0, damped, out=np.zeros_like(damped), where=damped > 0)

    @property
    def effective_parameters(self) -> float:
        e, damping, tail = self.eigenvalues, self.chosen_damping, self.added_tail
        return float(effective(e, damping).sum()) + (0.0 if tail is None else tail.parameters(e, damping))

    def variance(self, g: GradientBatch) -> np.ndarray:
        return self.variances(g, np.array([self.chosen_damping]))[:, 0]

    def variances(self, g: GradientBatch, dampings: np.ndarray) -> np.ndarray:
        if self.added_tail is None:
            return self.squared_projections(g) @ sigma(self.eigenvalues[:, None], dampings)
        return self._variances(*self.split(g), dampings)

    def _variances(self, z2: np.ndarray, rho: np.ndarray, dampings: np.ndarray) -> np.ndarray:
        q, tail = z2 @ sigma(self.eigenvalues[:, None], dampings), self.added_tail
        if tail is None:
            return q
        return q + np.outer(rho, [tail.variance(self.eigenvalues, damping) for damping in dampings])

    def leverage_and_variances(self, g: GradientBatch, dampings: np.ndarray) -> np.ndarray:
        z2, rho = self.split(g)
        return np.column_stack([self._leverage(z2, rho), self._variances(z2, rho, dampings)])

    def leverage(self, g: GradientBatch) -> np.ndarray:
        return self._leverage(*self.split(g))

    def _leverage(self, z2: np.ndarray, rho: np.ndarray) -> np.ndarray:
        damping = self.chosen_damping
        h = z2 @ (1 / (self.eigenvalues + damping))
        if self.added_tail is not None:
            return h + rho * self.added_tail.leverage(self.eigenvalues, damping)
        return h + rho / (self.floor + damping) if self.floor + damping else h

    def across(self, other: GradientBatch, by: By = "variance") -> Products:
        e, damping, tail = self.eigenvalues, self.chosen_damping, self.added_tail
        if by == "variance":
            weights, rest = sigma(e, damping), 0.0 if tail is None else float(tail.variance(e, damping))
        else:
            unheld = self.floor + damping
            rest = (1 / unheld if unheld else 0.0) if tail is None else float(tail.leverage(e, damping))
            weights = self.inverses
        return products(self.projections, weights, rest if len(e) < other.n_parameters else None, other)

    def spectrum(self) -> Spectrum:
        return Spectrum(np.sqrt(self.eigenvalues), sigma(self.eigenvalues, self.chosen_damping))

    def eigendecomposed(self) -> SpectralCovariance:
        return self


@dataclass(frozen=True, eq=False)
class EigenbasisCovariance(SpectralCovariance):
    """JᵀJ = W diag(e) Wᵀ, vⱼ·g = wⱼ·g; or, with J, K = JJᵀ = U diag(e) Uᵀ, vⱼ·g = wⱼ·(Jg) with wⱼ = uⱼ/√eⱼ."""

    W: np.ndarray  # (p, r), with J (n, r)
    J: GradientBatch | None = None
    error_bound = 0.0

    @classmethod
    def of(cls, M: np.ndarray, damping: float | None, J: GradientBatch | None = None) -> EigenbasisCovariance:
        """Decompose JᵀJ, or K where there is J, given in an upper triangle, in place."""
        e, V = eigh(M)
        r = int((e > len(e) * np.finfo(np.float64).eps * e[0]).sum())  # the rest is rounding
        return cls(damping, e[:r], V[:, :r] if J is None else V[:, :r] / np.sqrt(e[:r]), J)

    def gram(self) -> np.ndarray:
        """Return JᵀJ to the last digits, in the upper triangle."""
        return add_gram(None, np.ascontiguousarray(self.W * np.sqrt(self.eigenvalues)), outer=True)

    def projections(self, g: GradientBatch) -> np.ndarray:
        return coordinates(g, self.J).T @ self.W

    @property
    def own_leverages(self) -> np.ndarray | None:
        if self.J is None:
            return None
        e = self.eigenvalues
        return np.sort(np.einsum("ij,ij,j->i", self.W, self.W, e**2 * self.inverses))

    def basis(self, like: Tensor) -> Tensor:  # (p, r)
        """Return all vⱼ where a tensor is and in its precision, for rows in full; they are kept."""
        if (wanted := (like.device, like.dtype)) not in self._bases:
            W = torch.from_numpy(self.W)
            self._bases[wanted] = (W if self.J is None else self.J.rows().cpu().double().T @ W).to(like)
        return self._bases[wanted]

    @cached_property
    def _bases(self) -> dict[tuple[torch.device, torch.dtype], Tensor]:
        return {}

    def describe(self) -> str:
        return f"exact, in the eigenbasis of {'JᵀJ' if self.J is None else 'JJᵀ'} ({len(self.W):,} × {len(self.W):,})"


@dataclass(frozen=True, eq=False)
class SketchedCovariance(SpectralCovariance):
    """Algorithm 3: eⱼ = d²ⱼ + λ' over the held directions, and the floor λ' for all others; with what the sketch lost.

    Where there are `added`, each held direction gets that instead of λ', and a tail has eigenvalues along the others.
    """

    directions: Tensor  # (r, p), orthonormal
    squared: np.ndarray  # (r,) d²
    name: str
    energy: float  # ‖J‖²_F
    lost: float  # 0 ≤ JᵀJ − BᵀB ≤ lost · I
    full_rank: int  # min(n, p)
    added: np.ndarray | None = None  # (r,)
    added_tail: PowerLawTail | None = field(default=None, kw_only=True)

    @property
    def error_bound(self) -> float:
        if self.added is None:
            return max(self.floor, self.lost - self.floor)
        largest = 0.0 if self.added_tail is None else float(self.added_tail.eigenvalues.max())
        return max(self.lost, float(self.added.max(initial=0.0)), largest)  # what stands in for JᵀJ − BᵀB is ≥ 0 too

    @property
    def missed_parameters(self) -> float:
        """The j-th eigenvalue of JᵀJ lies between d²ⱼ and d²ⱼ + lost, and they sum up to the energy ‖J‖²_F.

        p* sums f(e) = 2h − h², concave with slope at most 2/λ: two upper bounds. With an estimated tail p* may also be
        too large, so there this bounds its error on either side.
        """
        damping, lost = self.chosen_damping, self.lost
        n_unheld = self.full_rank - len(self.squared)
        at_least = float(effective(self.squared, damping).sum())
        at_most = effective(self.squared + lost, damping).sum() + n_unheld * effective(lost, damping)
        if damping > 0:
            at_most = min(at_most, at_least + 2 * max(self.energy - self.squared.sum(), 0.0) / damping)
        found = self.effective_parameters
        return max(float(at_most) - found, 0.0 if self.added is None else found - at_least, 0.0)

    def projections(self, g: GradientBatch) -> np.ndarray:
        found = [rows.to(self.directions) @ self.directions.T for rows in g.row_blocks()]  # never all rows at once
        return torch.cat(found).cpu().double().numpy()

    def split(self, g: GradientBatch) -> tuple[np.ndarray, np.ndarray]:
        coordinates, norms = [], []
        for rows in g.row_blocks():
            rows = rows.to(self.directions)
            z = rows @ self.directions.T
            # As a norm, not as the difference of two: in float32 that would lose all that a small λ shows.
            norms.append(GradientBatch.of(rows - z @ self.directions).squared_norms)
            coordinates.append(z)
        return torch.cat(coordinates).cpu().double().numpy() ** 2, np.concatenate(norms)

    def describe(self) -> str:
        return self.name


@storable
@dataclass(frozen=True)
class PowerLawTail:
    """Of n rows and r held directions, N = n − r; hᵢ = eᵢ/(eᵢ+λ), and 0 until there are N; ρ = g·g − Σ (vⱼ·g)²:

    h = ρ·N/Σe · h̄/(1 − h̄),    q = ρ·N/Σe · Var h/(1 − h̄)²,    p* = Σ 2h − h².

    That is a row left out of N rows with these eigenvalues, on average: with C = (K+λI)⁻¹ it has h = 1/(λCᵢᵢ) − 1 and
    q = (C²)ᵢᵢ/C²ᵢᵢ − 1; the mean of λCᵢᵢ is 1 − h̄, and that of λ²(C²)ᵢᵢ the mean of (1 − h)².
    """

    eigenvalues: np.ndarray  # all above 0
    n_rows: int  # N, at least as many

    def variance(self, e: np.ndarray, damping: float) -> float:
        h, mean, free = self._leverages(damping)
        spread = float(np.square(h - mean).sum()) + (self.n_rows - len(h)) * mean**2  # N·Var h
        return spread / (float(self.eigenvalues.sum()) * free**2) if free > 0 else 0.0

    def leverage(self, e: np.ndarray, damping: float) -> float:
        _, mean, free = self._leverages(damping)
        return self.n_rows * mean / (float(self.eigenvalues.sum()) * free) if free > 0 else 0.0

    def parameters(self, e: np.ndarray, damping: float) -> float:
        return float(effective(self.eigenvalues, damping).sum())

    def _leverages(self, damping: float) -> tuple[np.ndarray, float, float]:
        """Return h without its zeros, h̄, and 1 − h̄, without a difference of nearly equal numbers."""
        N, e = self.n_rows, self.eigenvalues
        h = e / (e + damping)
        return h, float(h.sum()) / N, (float((damping / (e + damping)).sum()) + N - len(e)) / N


def products(
    projections: Callable[[GradientBatch], np.ndarray], weights: np.ndarray, rest: float | None, other: GradientBatch
) -> Products:
    """Return the function of g that returns Σ wⱼ (vⱼ·g)(vⱼ·g') + rest·(g·g' − Σ (vⱼ·g)(vⱼ·g')) for the rows g'.

    Args:
        projections: Returns vⱼ·g of rows, (b, r).
        weights: wⱼ.
        rest: The weight of all other directions; None or 0 where they have none.
        other: The rows g'.
    """
    right = ((weights - (rest or 0.0)) * projections(other)).T

    def of(g: GradientBatch) -> np.ndarray:
        found = projections(g) @ right
        return found + rest * g.inner(other) if rest else found

    return of


def power_law(energy: float, count: int, largest: float, after: int) -> np.ndarray:  # (count,)
    """Continue a spectrum after its `after`-th eigenvalue, which is `largest`:

    eᵢ = largest·(1 + i/after)^(−a),  i = 1, …, count,  with the a ≥ 0 that makes their sum the `energy`;

    all of them equal where the energy exceeds count·largest.
    """
    if count <= 0 or energy <= 0 or largest <= 0:
        return np.zeros(max(count, 0))
    log = np.log1p(np.arange(1, count + 1) / after)
    low, high = 0.0, 0.0 if energy >= count * largest else 1.0
    while high > 0 and largest * np.exp(-high * log).sum() > energy:
        low, high = high, 2 * high
    for _ in range(50 if high else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if largest * np.exp(-middle * log).sum() > energy else (low, middle)
    e = largest * np.exp(-low * log)
    return e * (energy / e.sum())


def effective(e: Any, damping: float) -> Any:
    """Return 2h − h² with h = e/(e+λ): what an eigenvalue e of JᵀJ adds to p*."""
    h = e / (e + damping) if damping > 0 else np.sign(e)
    return 2 * h - h**2


def sigma(e: np.ndarray, damping: Any) -> np.ndarray:
    """Return e/(e+λ)², the eigenvalue of Σ⁻¹; 0 where e is."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(e > 0, e / (e + damping) / (e + damping), 0.0)


def eigh(M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return eigenvalues (m,) of M, largest first, and eigenvectors (m, m); from the upper triangle, and over it."""
    from scipy import linalg

    np.negative(M, out=M)  # LAPACK begins with the smallest
    e, V = linalg.eigh(M, lower=False, driver="evd", overwrite_a=True, check_finite=False)
    return np.maximum(-e, 0.0), V
