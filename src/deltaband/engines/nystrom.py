"""The delta method in the span of some training rows, the landmarks: Nyström.

With the gradients G (m × p) of the landmarks, GGᵀ = U diag(c) Uᵀ and V = GᵀUc^(−1/2), whose columns are orthonormal:

    φ(g) = Vᵀg = c^(−1/2)Uᵀ(Gg),    B = Σᵢ φ(gᵢ)φ(gᵢ)ᵀ = VᵀJᵀJV,    ρ(g) = g·g − φ(g)·φ(g),    R = Σᵢ ρ(gᵢ).

B stands in for JᵀJ; R is the energy of the tail that B does not see. Only inner products are needed, no rows.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from ..errors import not_regular
from ..network.gradient_batch import GradientBatch, add_gram
from ..storage.encoding import storable
from ..validation import check_choice, check_int
from .base import Accumulator, Cost, Engine, Known, register
from .exact import Problem
from .fields import reduced, shared
from .spectral import SpectralCovariance, effective, eigh

RELATIVE_ZERO = 1e-12  # of the largest eigenvalue of GGᵀ: below is rounding, such as between equal landmarks
RELEVANT_ROUNDING = 0.1  # of λ
RELATIVE_ROUNDING = 1e-10  # of ‖g‖² or ‖J‖²_F: where ρ or R is below, it is rounding too
CANDIDATES_PER_LANDMARK = 2  # rows from which landmarks are chosen by leverage
PROBE_ROWS = 200  # rows beside the landmarks, from which the spread of the tail is measured


@register
@dataclass(frozen=True)
class Nystrom(Engine):
    """q, h and p* in the span of `landmarks` training rows: 32·landmarks² bytes, and the landmarks.

    Equals `Exact()` where there are as many landmarks as rows. `PredictionIntervals.fit` reads the data twice.

    Args:
        landmarks: How many rows; where there are fewer, all of them.
        choose: "random" draws them uniformly, "leverage" from twice as many rows by their leverage among these: that
            finds rows of a rare kind and tightens the bounds, but on ordinary data q and p* are no better.
        tail: Whether to "estimate" what lies outside the span, and is measured, or to add "none" of it.
        seed: Seed for drawing the rows.
    """

    size_setting: ClassVar[str | None] = "landmarks"

    landmarks: int = 2000
    _: KW_ONLY
    choose: Literal["random", "leverage"] = "random"
    tail: Literal["estimate", "none"] = "estimate"
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "landmarks", check_int(self.landmarks, "landmarks"))
        check_choice(self.choose, "choose", ("random", "leverage"))
        check_choice(self.tail, "tail", ("estimate", "none"))
        object.__setattr__(self, "seed", check_int(self.seed, "seed", 0))

    @property
    def sample_size(self) -> int:
        candidates = self.landmarks * (CANDIDATES_PER_LANDMARK if self.choose == "leverage" else 1)
        return candidates + PROBE_ROWS if self.tail == "estimate" else candidates

    def cost(self, problem: Problem) -> Cost:
        n = problem.n_rows or self.sample_size
        m = square = min(self.landmarks, n)
        kept = min(self.sample_size, n)
        pairs = float((problem.n_rows or m) * m)
        flops = pairs * problem.product_flops + (problem.n_rows or m) * 3.0 * m**2 + 20.0 * m**3
        if self.choose == "leverage":  # the eigenvectors of all candidates, and a copy of the chosen
            square, kept = min(CANDIDATES_PER_LANDMARK * m, n), kept + m
            flops += 10.0 * (CANDIDATES_PER_LANDMARK * m) ** 3
        return Cost(32.0 * square**2 + kept * problem.factor_bytes, flops, wants_rows=False, pairs=pairs)

    def start(self, known: Known = Known()) -> NystromSums:
        sample = known.sample
        if sample is None or len(sample) == 0:
            raise ValueError("Nystrom needs some of the rows before the first: call start(Known(sample=...))")
        # Probes are not candidates: they stand for all the rows that are not landmarks.
        spare = max(len(sample) - self.landmarks, 0)
        n_probes = min(PROBE_ROWS, spare if self.choose == "random" else spare // 2) if self.tail == "estimate" else 0
        n_candidates = len(sample) - n_probes
        landmarks = self.choose_landmarks(sample.between(0, n_candidates))
        c, U = eigh(np.asfortranarray(landmarks.inner(landmarks)))
        kept = c > RELATIVE_ZERO * c[0]
        basis = Basis(landmarks, U[:, kept] / np.sqrt(c[kept]))
        if n_probes < 2:
            return NystromSums(self, basis=basis)
        g = sample.between(n_candidates, len(sample))
        phi = basis.coordinates(g)
        E = g.inner(g) - phi @ phi.T
        pairs = float(np.square(E).sum() - np.square(E.diagonal()).sum()) / (n_probes * (n_probes - 1))
        return NystromSums(self, basis=basis, pairs=pairs)

    def choose_landmarks(self, candidates: GradientBatch) -> GradientBatch:
        """Return the landmarks out of some rows in random order."""
        m = self.landmarks
        if len(candidates) <= m or self.choose == "random":
            return candidates.between(0, m)
        # λ need not be known, and a sum over fewer rows would want another. The tail beyond m/2 directions as the
        # ridge (Musco & Musco 2017) makes the leverages Σⱼ u²ᵢⱼcⱼ/(cⱼ + ridge) sum up to at most m.
        c, U = eigh(np.asfortranarray(candidates.inner(candidates)))
        half = max(m // 2, 1)
        leverages = np.square(U) @ (c / (c + c[half:].sum() / half + np.finfo(float).tiny))
        # The smallest of exponential variables with these rates are a draw without replacement.
        keys = np.random.default_rng(self.seed).exponential(size=len(c)) / np.maximum(leverages, np.finfo(float).tiny)
        return candidates.take(np.sort(np.argsort(keys)[:m]))

    def resized(self, size: int, share: float = 1.0) -> Nystrom:
        return replace(self, landmarks=max(1, min(math.ceil(share * self.landmarks), size)))

    def resume(self, covariance: NystromCovariance, n_rows: int, n_parameters: int) -> NystromSums:
        gram = np.asfortranarray(np.diag(covariance.eigenvalues))
        return NystromSums(self, basis=covariance.basis, gram=gram, **covariance.accumulated or {})


@storable
@dataclass(frozen=True)
class Basis:
    """V = GᵀT, orthonormal columns in the span of the landmarks."""

    landmarks: GradientBatch
    T: np.ndarray  # (m, r) Uc^(−1/2)

    def coordinates(self, g: GradientBatch) -> np.ndarray:  # φ, (b, r)
        return g.inner(self.landmarks) @ self.T

    def spans(self, other: Basis) -> bool:
        """Return whether the landmarks are the same, in the same order."""
        G, H = self.landmarks, other.landmarks
        if G is H or len(G) != len(H) or G.n_parameters != H.n_parameters or self.T.shape != other.T.shape:
            return G is H
        both = np.stack([G.inner(H).diagonal(), H.squared_norms])
        return bool(np.allclose(both, G.squared_norms, rtol=1e-9, atol=0.0))


@dataclass
class NystromSums(Accumulator):
    """B, and sums over what lies outside the span."""

    engine: Nystrom
    basis: Basis = shared(check=False)
    pairs: float = shared(0.0, check=False)  # the mean of (gᵢ·gⱼ − φᵢ·φⱼ)², i ≠ j
    gram: np.ndarray | None = reduced("sum", upper_triangle=True)  # B
    n_rows: int = reduced("sum", 0)
    energy: float = reduced("sum", 0.0)  # ‖J‖²_F
    unseen: float = reduced("sum", 0.0)  # R = Σ ρ
    unseen_squares: float = reduced("sum", 0.0)  # Σ ρ²
    n_outside: int = reduced("sum", 0)  # how many ρ are not 0

    def update(self, g: GradientBatch) -> None:
        phi = self.basis.coordinates(g)
        self.gram = add_gram(self.gram, phi)
        rho = g.squared_norms - np.square(phi).sum(axis=1)
        self.n_rows += len(g)
        self.energy += float(g.squared_norms.sum())
        self.unseen += float(rho.sum())
        self.unseen_squares += float(np.square(rho).sum())
        self.n_outside += int((rho > RELATIVE_ROUNDING * g.squared_norms).sum())

    def check_mergeable(self, other: NystromSums) -> None:
        if not self.basis.spans(other.basis):
            raise ValueError("sums over different landmarks cannot be merged: start both with the same sample")

    def merge(self, other: NystromSums) -> None:
        self.check_mergeable(other)
        if other.gram is not None and not np.array_equal(self.basis.T, other.basis.T):
            R = self.basis.coordinates(other.basis.landmarks).T @ other.basis.T  # VᵀW, orthogonal: of the same span
            whole = np.triu(other.gram) + np.triu(other.gram, 1).T
            other = replace(other, gram=np.asfortranarray(R @ whole @ R.T))
        super().merge(other)

    def finalise(self, damping: float | None) -> NystromCovariance:
        if self.gram is None:
            raise ValueError("no rows were given")
        basis, n = self.basis, self.n_rows
        (m, r), p = basis.T.shape, basis.landmarks.n_parameters
        if damping == 0.0 and r < p:
            raise not_regular(f"the landmarks span {r} of {p} directions")
        unseen, squares, n_outside = self.unseen, self.unseen_squares, self.n_outside
        rounding = RELATIVE_ROUNDING * self.energy
        if r == p or (unseen <= rounding and (damping is None or rounding <= RELEVANT_ROUNDING * damping)):
            unseen = squares = 0.0
        elif unseen <= rounding:  # rounding hides what is there: a bound is all there is
            unseen, n_outside = rounding, n
        # Rows within the span, the landmarks first of all, are zero in E.
        tail = ResidualSpectrum(unseen, squares, self.pairs * max(n - m, 0) ** 2, n, rank=min(n_outside, p - r))
        added = tail if self.engine.tail == "estimate" and unseen > 0 else None
        seen, numbers = 1 - unseen / self.energy if unseen else 1.0, self.numbers()
        e, Q = eigh(self.gram)
        self.clear()
        rotated = Basis(basis.landmarks, basis.T @ Q)
        return NystromCovariance(damping, e, rotated, tail, seen, added_tail=added, accumulated=numbers)


@dataclass(frozen=True, eq=False)
class NystromCovariance(SpectralCovariance):
    """B = Q diag(e) Qᵀ: the directions VQ with their eigenvalues e, and the tail J⊥ = J(I − VVᵀ)."""

    basis: Basis  # VQ
    tail: ResidualSpectrum
    seen: float  # the part of ‖J‖² in the span

    @property
    def error_bound(self) -> float:
        R = self.tail.energy  # JᵀJ − VBVᵀ = [0 X; Xᵀ J⊥ᵀJ⊥], ‖X‖ ≤ ‖JV‖‖J⊥‖
        return (R + math.sqrt(R * (R + 4 * float(self.eigenvalues.max(initial=0.0))))) / 2

    @property
    def missed_parameters(self) -> float:
        held = float(effective(self.eigenvalues, self.chosen_damping).sum())
        return max(held + self.tail.parameters_at_most(self.chosen_damping) - self.effective_parameters, 0.0)

    def projections(self, g: GradientBatch) -> np.ndarray:
        return self.basis.coordinates(g)

    def describe(self) -> str:
        m, r = self.basis.T.shape
        return f"Nyström, {m:,} landmarks ({r:,} directions, {100 * self.seen:.4g} % of ‖J‖²)"


@storable
@dataclass(frozen=True)
class ResidualSpectrum:
    """What is known of E = J⊥J⊥ᵀ, and from it an estimate of the tail's part in q, h and p*.

    With N = I − JV(B+λ)⁻¹VᵀJᵀ and Y = N^½J⊥, block inversion gives

    I − H = N^½(I − W)N^½,  W = Y(YᵀY+λ)⁻¹Yᵀ,    p* = (n − tr N²) + 2 tr N²W − tr NWNW

    exactly. The estimate takes N for its mean ν = tr N/n where it meets the tail (of the rows' freedom the directions
    use some, the tail gets the rest), and the energy of J⊥ as spread evenly over eigenvalues up to twice their mean.
    """

    energy: float = 0.0  # R = tr E
    squares: float = 0.0  # Σ E²ᵢᵢ
    pairs: float = 0.0  # Σ E²ᵢⱼ over i ≠ j, estimated
    n_rows: int = 1
    rank: int = 0  # at most

    def variance(self, e: np.ndarray, damping: Any) -> Any:
        nu, _, second = self._spread(e, damping, self.pairs)
        return nu / damping * second

    def leverage(self, e: np.ndarray, damping: Any) -> Any:
        return self._spread(e, damping, self.pairs)[1] / damping

    def parameters(self, e: np.ndarray, damping: float) -> float:
        nu, first, second = self._spread(e, damping, self.squares + self.pairs)
        nu2 = 1 - effective(e, damping).sum() / self.n_rows  # tr N²/n
        estimate = float(nu * self.energy / damping * (2 * nu2 * first - nu**2 * second))
        return min(estimate, self.parameters_at_most(damping))

    def parameters_at_most(self, damping: float) -> float:
        """Return by how much p* can exceed that of B, whatever the tail; it is not smaller.

        JVVᵀJᵀ has the eigenvalues of B, JJᵀ = JVVᵀJᵀ + E, and f(e) = 2h − h² is increasing and concave with f(0) = 0:
        tr f(JVVᵀJᵀ) ≤ p* (Weyl) ≤ tr f(JVVᵀJᵀ) + tr f(E) (Rotfel'd), and tr f(E) ≤ rank·f(R/rank) (Jensen).
        """
        return self.rank * float(effective(self.energy / max(self.rank, 1), damping))

    def _spread(self, e: np.ndarray, damping: Any, squares: float) -> tuple[Any, Any, Any]:
        """Return ν and the spread, where `squares` are tr E²; a new row is in no E²ᵢᵢ: for it the pairs alone count."""
        nu = 1 - (e / (e + np.expand_dims(damping, -1))).sum(axis=-1) / self.n_rows
        # tr E²/tr E, the mean eigenvalue over the energy; at most tr E, whatever the estimate says
        mean = min(squares / self.energy, self.energy) if self.energy else 0.0
        return nu, *spread(2 * nu * mean / damping)


def spread(x: Any) -> tuple[Any, Any]:
    """Return the means of 1/(1+t) and of t/(1+t)² over t from 0 to x.

    A tail of energy R, spread evenly over eigenvalues from 0 to xλ (which decay exponentially), has Σh and Σh² of R/λ
    times these; a row with the energy ρ in it gets h and q of ρ/λ times these.
    """
    x = np.maximum(x, 1e-12)  # as good as 0
    first = np.log1p(x) / x
    return first, first - 1 / (1 + x)
