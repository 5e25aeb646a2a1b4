"""The delta method in the span of some training rows, the landmarks: Nyström.

With the gradients G (m × p) of the landmarks, GGᵀ = U diag(c) Uᵀ and V = GᵀUc^(−1/2), whose columns are orthonormal:

    φ(g) = Vᵀg = c^(−1/2)Uᵀ(Gg),    B = Σᵢ φ(gᵢ)φ(gᵢ)ᵀ = VᵀJᵀJV,    ρ(g) = g·g − φ(g)·φ(g),    R = Σᵢ ρ(gᵢ).

B stands in for JᵀJ; R is the energy of the tail that B does not see. Only inner products are needed, no rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..network.gradient_batch import GradientBatch
from .base import Total
from .problem import Problem
from .residual_spectrum import Tail
from .spectral import SpectralCovariance, sigma

ZERO = 1e-12  # of the largest eigenvalue of GGᵀ; what is below is rounding, such as between equal landmarks
HARMLESS = 0.1  # of λ: rounding that matters
NOTHING = 1e-10  # of ‖g‖² or ‖J‖²_F; where ρ or R is below, it is rounding too
CANDIDATES = 2  # rows looked at for each landmark that is chosen by leverage
PROBES = 200  # rows beside the landmarks, from which the tail's spread is measured


class Nystrom:
    """q, h and p* in the span of `landmarks` training rows: 32·landmarks² bytes, and the landmarks.

    What lies outside the span is measured; `tail="estimate"` adds an estimate of its part, `tail="none"` does not.
    Equals `Exact()` where there are as many landmarks as rows.

    `choose="random"` draws landmarks uniformly, `choose="leverage"` from twice as many rows by their leverage among
    these: that finds rows of a rare kind and tightens the bounds, but on ordinary data q and p* are no better.

    The landmarks must be there before the first row, so `PredictionIntervals.fit` reads the data twice.
    """

    needs_damping = False

    def __init__(
        self,
        landmarks: int = 2000,
        *,
        choose: Literal["random", "leverage"] = "random",
        tail: Literal["estimate", "none"] = "estimate",
        seed: int = 0,
    ) -> None:
        if isinstance(landmarks, bool) or not isinstance(landmarks, int | np.integer) or landmarks < 1:
            raise ValueError(f"landmarks must be a positive whole number, got {landmarks!r}")
        if not isinstance(choose, str) or choose not in ("random", "leverage"):
            raise ValueError(f"choose must be 'random' or 'leverage', got {choose!r}")
        if not isinstance(tail, str) or tail not in ("estimate", "none"):
            raise ValueError(f"tail must be 'estimate' or 'none', got {tail!r}")
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
            raise ValueError(f"seed must be a whole number ≥ 0, got {seed!r}")
        self.landmarks = int(landmarks)
        self.choose: Literal["random", "leverage"] = choose
        self.tail: Literal["estimate", "none"] = tail
        self.seed = int(seed)
        self._basis: Basis | None = None
        self._pairs = 0.0  # the mean of (gᵢ·gⱼ − φᵢ·φⱼ)², i ≠ j
        self._clear()

    def _clear(self) -> None:
        self._gram: np.ndarray | None = None  # B, in the upper triangle
        self._n_rows = 0
        self._energy = 0.0  # ‖J‖²_F
        self._sums = np.zeros(3)  # Σ ρ, Σ ρ², and how many ρ are not 0

    @property
    def sample_size(self) -> int:
        candidates = self.landmarks * (CANDIDATES if self.choose == "leverage" else 1)
        return candidates + PROBES if self.tail == "estimate" else candidates

    def start(
        self, *, n_rows: int | None = None, damping: float | None = None, sample: GradientBatch | None = None
    ) -> Nystrom:
        if sample is None or len(sample) == 0:
            raise ValueError("Nystrom needs some of the rows before the first: call start(sample=...)")
        fresh = Nystrom(self.landmarks, choose=self.choose, tail=self.tail, seed=self.seed)
        # Probes are no candidates: they stand for all the rows that are no landmarks.
        spare = max(len(sample) - self.landmarks, 0)
        n_probes = min(PROBES, spare if self.choose == "random" else spare // 2) if self.tail == "estimate" else 0
        n_candidates = len(sample) - n_probes
        fresh._basis = Basis.of(self._chosen(sample.between(0, n_candidates)))
        if n_probes > 1:
            g = sample.between(n_candidates, len(sample))
            phi = fresh._basis.coordinates(g)
            E = g.inner(g) - phi @ phi.T
            fresh._pairs = float(np.square(E).sum() - np.square(E.diagonal()).sum()) / (n_probes * (n_probes - 1))
        return fresh

    def wants_rows(self, problem: Problem) -> bool:
        return False

    def nbytes(self, problem: Problem) -> float:
        n = problem.n_rows or self.sample_size
        m, sample = min(self.landmarks, n), min(self.sample_size, n)
        if self.choose == "leverage":  # the eigenvectors of all candidates, and a copy of the chosen
            return 32.0 * min(CANDIDATES * m, n) ** 2 + (sample + m) * problem.factor_bytes
        return 32.0 * m**2 + sample * problem.factor_bytes

    def flops(self, problem: Problem) -> float:
        m = min(self.landmarks, problem.n_rows or self.landmarks)
        choice = 10.0 * (CANDIDATES * m) ** 3 if self.choose == "leverage" else 0.0
        return (problem.n_rows or m) * (m * problem.product_flops + 3.0 * m**2) + 20.0 * m**3 + choice

    def limited(self, size: int, share: float = 1.0) -> Nystrom:
        return Nystrom(
            max(1, min(math.ceil(share * self.landmarks), size)), choose=self.choose, tail=self.tail, seed=self.seed
        )

    def update(self, gradients: GradientBatch) -> None:
        from . import gram as cholesky

        phi = self._started.coordinates(gradients)
        if self._gram is None:
            self._gram = cholesky.empty(phi.shape[1])
        if phi.size:
            cholesky.add_gram(self._gram, phi)
        rho = gradients.squared_norms - np.square(phi).sum(axis=1)
        self._n_rows += len(gradients)
        self._energy += float(gradients.squared_norms.sum())
        self._sums += rho.sum(), np.square(rho).sum(), (rho > NOTHING * gradients.squared_norms).sum()

    def beside(self) -> Nystrom:
        beside = Nystrom(self.landmarks, choose=self.choose, tail=self.tail, seed=self.seed)
        beside._basis, beside._pairs = self._started, self._pairs
        return beside

    def resumed(self, covariance: NystromCovariance, n_rows: int, n_parameters: int) -> Nystrom:
        resumed = Nystrom(self.landmarks, choose=self.choose, tail=self.tail, seed=self.seed)
        totals = covariance.totals
        resumed._basis, resumed._pairs = covariance.basis, totals.pairs
        resumed._gram = np.asfortranarray(np.diag(covariance.eigenvalues))
        resumed._n_rows, resumed._energy, resumed._sums = n_rows, totals.energy, totals.sums.copy()
        return resumed

    def merge(self, other: Nystrom) -> None:
        mine, theirs = self._started, other._started
        if not mine.spans(theirs):
            raise ValueError("sums over different landmarks cannot be merged: start both with the same sample")
        if other._gram is not None:
            gram = other._gram if np.array_equal(mine.T, theirs.T) else mine.seen_from(theirs, other._gram)
            self._gram = gram.copy(order="F") if self._gram is None else self._gram + gram
        self._n_rows += other._n_rows
        self._energy += other._energy
        self._sums += other._sums

    def add_up(self, total: Total, n_rows: int, n_parameters: int) -> bool:
        from . import gram as cholesky

        self._gram = cholesky.empty(self._started.T.shape[1]) if self._gram is None else self._gram
        cholesky.add_up(self._gram, total)
        sums = total(np.append(self._sums, self._energy))
        self._sums, self._energy, self._n_rows = sums[:-1], float(sums[-1]), n_rows
        return True

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("_basis", "_pairs", "_gram", "_n_rows", "_energy", "_sums")}

    def from_state(self, state: dict[str, Any]) -> Nystrom:
        made = Nystrom(self.landmarks, choose=self.choose, tail=self.tail, seed=self.seed)
        vars(made).update(state)
        return made

    def finalise(self, damping: float | None) -> NystromCovariance:
        basis = self._started
        if self._gram is None:
            raise ValueError("no rows were given")
        n, (m, r), p = self._n_rows, basis.T.shape, basis.landmarks.n_parameters
        if damping == 0.0 and r < p:
            raise ValueError(
                f"damping 0 needs a regular JᵀJ, but the landmarks span {r} of {p} directions: "
                "give a positive damping or weight_decay"
            )
        unseen, squares, outside = map(float, self._sums)
        rounding = NOTHING * self._energy
        if r == p or (unseen <= rounding and (damping is None or rounding <= HARMLESS * damping)):
            unseen = squares = 0.0
        elif unseen <= rounding:  # it cannot be told from what is there: a bound is all there is
            unseen, outside = rounding, float(n)
        # Rows within the span, the landmarks first of all, are zero in E.
        tail = Tail(unseen, squares, self._pairs * max(n - m, 0) ** 2, n, rank=min(int(outside), p - r))
        seen = 1 - unseen / self._energy if unseen else 1.0
        name = f"Nyström, {m:,} landmarks ({r:,} directions, {100 * seen:.4g} % of ‖J‖²)"
        totals = RowSums(self._energy, self._sums.copy(), self._pairs)
        covariance = NystromCovariance(basis, self._gram, tail, self.tail == "estimate", damping, name, totals)
        self._clear()
        return covariance

    def __repr__(self) -> str:
        defaults = {"choose": "random", "tail": "estimate", "seed": 0}
        changed = [f", {k}={getattr(self, k)!r}" for k, default in defaults.items() if getattr(self, k) != default]
        return f"Nystrom(landmarks={self.landmarks}{''.join(changed)})"

    @property
    def _started(self) -> Basis:
        if self._basis is None:
            raise ValueError("Nystrom needs its landmarks before the first row: call start(sample=...)")
        return self._basis

    def _chosen(self, candidates: GradientBatch) -> GradientBatch:
        m = self.landmarks
        if len(candidates) <= m:
            return candidates
        if self.choose == "random":  # as the sample is
            return candidates.between(0, m)
        from . import gram as cholesky

        # λ need not be known, and a sum over fewer rows would want another. The tail beyond m/2 directions as the
        # ridge (Musco & Musco 2017) makes the leverages Σⱼ u²ᵢⱼcⱼ/(cⱼ + ridge) sum up to at most m.
        c, U = cholesky.eigh(np.asfortranarray(candidates.inner(candidates)))
        half = max(m // 2, 1)
        leverages = np.square(U) @ (c / (c + c[half:].sum() / half + np.finfo(float).tiny))
        # The smallest of exponential variables with these rates are a draw without replacement.
        keys = np.random.default_rng(self.seed).exponential(size=len(c)) / np.maximum(leverages, np.finfo(float).tiny)
        return candidates.take(np.sort(np.argsort(keys)[:m]))


@dataclass(frozen=True)
class RowSums:
    """Over all rows."""

    energy: float  # ‖J‖²_F
    sums: np.ndarray  # Σ ρ, Σ ρ², and how many ρ are not 0
    pairs: float  # the mean of (gᵢ·gⱼ − φᵢ·φⱼ)², i ≠ j


@dataclass(frozen=True)
class Basis:
    """V = GᵀT, orthonormal columns in the span of the landmarks."""

    landmarks: GradientBatch
    T: np.ndarray  # (m, r) Uc^(−1/2)

    @staticmethod
    def of(landmarks: GradientBatch) -> Basis:
        from . import gram as cholesky

        c, U = cholesky.eigh(np.asfortranarray(landmarks.inner(landmarks)))
        kept = c > ZERO * c[0]
        return Basis(landmarks, U[:, kept] / np.sqrt(c[kept]))

    def coordinates(self, g: GradientBatch) -> np.ndarray:  # (b, r)
        return g.inner(self.landmarks) @ self.T

    def spans(self, other: Basis) -> bool:
        """Whether the landmarks are the same, each in its place."""
        G, H = self.landmarks, other.landmarks
        if G is H:
            return True
        if len(G) != len(H) or G.n_parameters != H.n_parameters or self.T.shape != other.T.shape:
            return False
        both = np.stack([G.inner(H).diagonal(), H.squared_norms])
        return bool(np.allclose(both, G.squared_norms, rtol=1e-9, atol=0.0))

    def seen_from(self, other: Basis, gram: np.ndarray) -> np.ndarray:  # (r, r) twice
        """A matrix in coordinates of another basis of the same span, of which the upper triangle counts."""
        R = self.coordinates(other.landmarks).T @ other.T  # VᵀW, orthogonal
        return np.asfortranarray(R @ (np.triu(gram) + np.triu(gram, 1).T) @ R.T)


class NystromCovariance(SpectralCovariance):
    """B = Q diag(e) Qᵀ: the directions VQ with their eigenvalues e, and the tail J⊥ = J(I − VVᵀ).

    The bounds: with w = (B+λ)⁻¹φ, y = g⊥ − J⊥ᵀJVw and N, Y as in tail.py,

        h = φᵀw + yᵀ(YᵀY+λ)⁻¹y,    JA⁻¹g = JVw + N^½Y(YᵀY+λ)⁻¹y,    q = ‖JA⁻¹g‖².

    ‖N‖ ≤ 1 and ‖J⊥‖² ≤ R, and ‖JVw‖² is the q of B; so ‖y‖ ≤ √ρ + √(R‖JVw‖²).
    """

    def __init__(
        self,
        basis: Basis,
        gram: np.ndarray,
        tail: Tail,
        corrected: bool,
        damping: float | None,
        name: str,
        totals: RowSums,
    ) -> None:
        from . import gram as cholesky

        e, Q = cholesky.eigh(gram)
        super().__init__(e, damping, name)
        self.basis = Basis(basis.landmarks, basis.T @ Q)
        self.totals = totals
        self._tail = tail
        self._corrected = corrected and tail.energy > 0
        R = tail.energy  # JᵀJ − VBVᵀ = [0 X; Xᵀ J⊥ᵀJ⊥], ‖X‖ ≤ ‖JV‖‖J⊥‖
        self.error_bound = (R + math.sqrt(R * (R + 4 * float(e.max(initial=0.0))))) / 2

    @property
    def effective_parameters(self) -> float:
        found = super().effective_parameters
        return found + self._tail.parameters(self.eigenvalues, self._chosen) if self._corrected else found

    @property
    def missed_parameters(self) -> float:  # type: ignore[override]
        at_most = super().effective_parameters + self._tail.parameters_at_most(self._chosen)
        return max(at_most - self.effective_parameters, 0.0)

    def variances(self, g: GradientBatch, dampings: np.ndarray) -> np.ndarray:
        z2, rho = self._split(g)
        q = z2 @ sigma(self.eigenvalues[:, None], dampings)
        return q + np.outer(rho, self._tail.variance(self.eigenvalues, dampings)) if self._corrected else q

    def leverage(self, g: GradientBatch) -> np.ndarray:
        z2, rho = self._split(g)
        h = z2 @ (1 / (self.eigenvalues + self._chosen))
        if self._corrected:
            return h + rho * self._tail.leverage(self.eigenvalues, self._chosen)
        return h + rho / self._chosen if self._chosen else h

    def leverage_bound(self, g: GradientBatch) -> np.ndarray:  # (b,)
        """h is at most this, rounding aside."""
        if self._tail.energy == 0.0:
            return self.leverage(g)
        z2, _, y = self._bounded(g)
        h = z2 @ (1 / (self.eigenvalues + self._chosen))
        return np.minimum(h + y**2 / self._chosen, g.squared_norms / self._chosen)

    def variance_bound(self, g: GradientBatch) -> np.ndarray:  # (b,)
        """q is at most this, rounding aside."""
        if self._tail.energy == 0.0:
            return self.variance(g)
        _, q, y = self._bounded(g)
        s2 = min(self._tail.energy, self._chosen)  # ‖Y(YᵀY+λ)⁻¹‖ = max s/(s²+λ) with s² ≤ R
        bound = (np.sqrt(q) + y * math.sqrt(s2) / (s2 + self._chosen)) ** 2
        return np.minimum(bound, g.squared_norms / (4 * self._chosen))

    def _bounded(self, g: GradientBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(vⱼ·g)², the q of B, and what ‖y‖ is at most."""
        z2, rho = self._split(g)
        q = z2 @ sigma(self.eigenvalues, self._chosen)
        return z2, q, np.sqrt(rho) + np.sqrt(self._tail.energy * q)

    def _squared_projections(self, g: GradientBatch) -> np.ndarray:  # (b, r)
        return self.basis.coordinates(g) ** 2

    def _split(self, g: GradientBatch) -> tuple[np.ndarray, np.ndarray]:  # (b, r), (b,)
        """(vⱼ·g)² and ρ."""
        z2 = self._squared_projections(g)
        return z2, np.maximum(g.squared_norms - z2.sum(axis=1), 0.0)
