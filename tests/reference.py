"""Naive dense versions, straight from the formulas, in float64: no chunks, no identities, no cleverness."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy import optimize, stats
from torch import nn


def jacobian(model: nn.Module, X: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Outputs (n,) and J (n, p) by plain autograd, one row after the other; the model must be in eval mode."""
    parameters = [w for w in model.parameters() if w.requires_grad]
    outputs, rows = [], []
    for x in X:
        output = model(x[None]).reshape(())
        gradients = torch.autograd.grad(output, parameters, allow_unused=True)
        parts = [torch.zeros_like(w) if g is None else g for w, g in zip(parameters, gradients, strict=True)]
        rows.append(torch.cat([part.reshape(-1) for part in parts]).double().numpy())
        outputs.append(output.item())
    return np.array(outputs), np.array(rows)


def jacobians(model: nn.Module, rows, names: list[str] | None = None, output=lambda y: y) -> np.ndarray:
    """J (n, m, p) by plain autograd, one output of one row after the other, with respect to the trainable parameters or
    to those of the given names. `rows` are the arguments of each call: tuples of tensors, or dictionaries."""
    parameters = [w for n, w in model.named_parameters() if w.requires_grad and (names is None or n in names)]
    J = []
    for row in rows:
        y = output(model(**row) if isinstance(row, dict) else model(*row)).reshape(-1)
        of_row = []
        for value in y:
            gradients = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
            parts = [torch.zeros_like(w) if g is None else g for w, g in zip(parameters, gradients, strict=True)]
            dense = [part.to_dense() if part.is_sparse else part for part in parts]
            of_row.append(torch.cat([part.reshape(-1) for part in dense]).double().numpy())
        J.append(of_row)
    return np.array(J)


def answers(J: np.ndarray, damping: float, g: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """q (n, m), h (n, m) and p* of several outputs, whose rows J (N, m, p) go into one matrix."""
    J = J.reshape(-1, J.shape[2])
    inverse = np.linalg.inv(J.T @ J + damping * np.eye(J.shape[1]))
    q = np.einsum("nmi,ij,nmj->nm", g, inverse @ (J.T @ J) @ inverse, g)
    return q, np.einsum("nmi,ij,nmj->nm", g, inverse, g), effective_parameters(J, damping)


def variance(J: np.ndarray, damping: float, g: np.ndarray) -> float:
    inverse = np.linalg.inv(J.T @ J + damping * np.eye(J.shape[1]))
    return g @ inverse @ J.T @ J @ inverse @ g


def leverage(J: np.ndarray, damping: float, g: np.ndarray) -> float:
    return g @ np.linalg.inv(J.T @ J + damping * np.eye(J.shape[1])) @ g


def between(J: np.ndarray, damping: float, g: np.ndarray, other: np.ndarray) -> dict[str, np.ndarray]:
    """gᵀA⁻¹JᵀJA⁻¹g' and gᵀA⁻¹g' of rows g and g'."""
    inverse = np.linalg.inv(J.T @ J + damping * np.eye(J.shape[1]))
    return {"variance": g @ inverse @ J.T @ J @ inverse @ other.T, "leverage": g @ inverse @ other.T}


def effective_parameters(J: np.ndarray, damping: float) -> float:
    H = J @ np.linalg.inv(J.T @ J + damping * np.eye(J.shape[1])) @ J.T
    return np.trace(2 * H - H @ H)


def sandwich(J: np.ndarray, residuals: np.ndarray, damping: float, g: np.ndarray, kind: str, clusters=None) -> float:
    """gᵀA⁻¹MA⁻¹g with J (n, m, p) and residuals (n, m): HC0 to HC3, each row a cluster where none are given."""
    n, m, p = J.shape
    rows = J.reshape(n * m, p)
    inverse = np.linalg.inv(rows.T @ rows + damping * np.eye(p))
    clusters = list(range(n)) if clusters is None else list(clusters)
    labels, M = set(clusters), np.zeros((p, p))
    for label in labels:
        s = np.zeros(p)
        for i in range(n):
            for o in range(m if clusters[i] == label else 0):
                h = J[i, o] @ inverse @ J[i, o]
                s += residuals[i, o] * {"HC2": (1 - h) ** -0.5, "HC3": 1 / (1 - h)}.get(kind, 1.0) * J[i, o]
        M += np.outer(s, s)
    if kind == "HC1":
        M *= n * m / (n * m - effective_parameters(rows, damping))
        if len(labels) < n:
            M *= len(labels) / (len(labels) - 1) * (n * m - 1) / (n * m)
    return g @ inverse @ M @ inverse @ g


def interval(
    J: np.ndarray, residuals: np.ndarray, damping: float, prediction: float, g: np.ndarray, level: float
) -> tuple[float, float]:
    """Formula (2) of the paper."""
    nu = len(J) - effective_parameters(J, damping)
    s = np.sqrt(np.sum(residuals**2) / nu)
    half = stats.t.ppf((1 + level) / 2, nu) * s * np.sqrt(1 + variance(J, damping, g))
    return prediction - half, prediction + half


class Directions:
    """Algorithms 1 to 3, a row at a time, with the full SVD of the whole buffer."""

    def __init__(self, rank: int, damping: float, score, robust: bool = True, compress: bool = False) -> None:
        self.k, self.damping, self.score, self.robust, self.compress = rank, damping, score, robust, compress
        self.held: list[np.ndarray] = []  # the rows of B that are not zero
        self.shift = 0.0  # λ'

    def add(self, row: np.ndarray) -> None:
        self.held.append(row)
        if len(self.held) == 2 * self.k:
            self.shrink()

    def svd(self) -> tuple[np.ndarray, np.ndarray]:
        _, d, V = np.linalg.svd(np.array(self.held), full_matrices=True)
        nonzero = d > 1e-6 * d[0]
        return d[nonzero], V[: len(d)][nonzero]

    def shrink(self) -> None:
        d, V = self.svd()
        if len(d) < self.k:
            self.held = [d[j] * V[j] for j in range(len(d))]
            return
        best = sorted(range(len(d)), key=lambda j: -self.score(d, self.damping)[j])[: self.k]
        delta = min(d[j] for j in best)
        self.shift += delta**2 / 2
        self.held = [np.sqrt(d[j] ** 2 - delta**2) * V[j] for j in best if d[j] > delta]

    def finish(self) -> tuple[np.ndarray, np.ndarray, float]:
        """d (r,), V (r, p) and λ' (0 for plain Frequent Directions)."""
        if self.compress:
            self.shrink()
        d, V = self.svd()
        return d, V, self.shift if self.robust else 0.0


def directions_variance(d: np.ndarray, V: np.ndarray, shift: float, damping: float, g: np.ndarray) -> float:
    return sum((V[j] @ g) ** 2 * (d[j] ** 2 + shift) / (d[j] ** 2 + shift + damping) ** 2 for j in range(len(d)))


def directions_leverage(d: np.ndarray, V: np.ndarray, shift: float, damping: float, g: np.ndarray) -> float:
    A = (V.T * d**2) @ V + (shift + damping) * np.eye(V.shape[1])
    return g @ np.linalg.inv(A) @ g


def directions_effective_parameters(d: np.ndarray, shift: float, damping: float) -> float:
    h = [(d[j] ** 2 + shift) / (d[j] ** 2 + shift + damping) for j in range(len(d))]
    return sum(2 * x - x * x for x in h)


SPECTRA = ("decaying", "step", "flat", "deficient")


def spectrum(name: str, r: int) -> np.ndarray:
    """Prescribed singular values, largest first."""
    if name == "decaying":
        return 10.0 ** np.linspace(1, -3, r)
    if name == "step":
        return np.where(np.arange(r) < max(1, r // 4), 10.0, 0.1)
    if name == "flat":
        return np.full(r, 2.0) * (1 + 1e-3 * np.arange(r)[::-1])
    return np.where(np.arange(r) < max(1, r // 2), np.linspace(5.0, 1.0, r), 0.0)


def matrix(name: str, n: int, p: int, seed: int = 0) -> np.ndarray:
    """An n × p matrix with a prescribed spectrum and random singular vectors."""
    rng = np.random.default_rng(seed)
    r = min(n, p)
    U = np.linalg.qr(rng.standard_normal((n, r)))[0]
    V = np.linalg.qr(rng.standard_normal((p, r)))[0]
    return (U * spectrum(name, r)) @ V.T


def probes(J: np.ndarray, seed: int = 1) -> np.ndarray:
    """Gradients to ask about: rows of J, random ones, ones almost in the null space of J, and each top direction."""
    rng = np.random.default_rng(seed)
    n, p = J.shape
    V = np.linalg.svd(J, full_matrices=True)[2]
    near_null = V[-2:] + 1e-4 * rng.standard_normal((2, p))
    return np.concatenate([J[: min(n, 4)], rng.standard_normal((4, p)), V[:1], near_null, V[-1:]])


def conformal_residuals(
    residuals: np.ndarray,  # (n,) of the calibration rows
    squared: np.ndarray,  # (n, C) σ² of the calibration rows under each candidate
    prior: np.ndarray,  # (C,) −log weight of each candidate
    new: np.ndarray,  # (C,) σ² of the new row
    level: float,
    tried: np.ndarray,  # residuals that the new row might have
    signed: bool = False,
    accepts: Callable[[np.ndarray, float], bool] | None = None,  # n + 1 scores and the level; by rank by default
) -> list[float]:
    """Those of `tried` that full conformal prediction accepts, the candidate chosen on all n + 1 rows each time."""
    n = len(residuals)
    accepted = []
    for r in tried:
        all_r = np.append(residuals, r)
        likelihood = []
        for c in range(len(new)):
            s2 = np.append(squared[:, c], new[c])
            likelihood.append((n + 1) * np.log(np.sum(all_r**2 / s2)) + np.sum(np.log(s2)) + 2 * prior[c])
        best = int(np.argmin(likelihood))
        scores = all_r / np.sqrt(np.append(squared[:, best], new[best]))
        scores = scores if signed else np.abs(scores)
        if (accepts or accepted_by_rank)(scores, level):
            accepted.append(r)
    return accepted


def accepted_by_rank(scores: np.ndarray, level: float) -> bool:
    return bool(np.sum(scores[:-1] < scores[-1]) + 1 <= np.ceil(len(scores) * level - 1e-9))


def accepted_by_weight(weights: np.ndarray, scores: np.ndarray, level: float) -> bool:  # (n + 1,) each
    """Whether the last score is at most the quantile of all, each with its share of the weights."""
    below = sum(w for w, s in zip(weights, scores, strict=True) if s < scores[-1])
    return bool(below < level * weights.sum() * (1 - 1e-12))


def accepted_by_regression(indicators: np.ndarray, scores: np.ndarray, level: float) -> bool:  # (n + 1, G)
    """Whether the last score is at most its fitted quantile, the regression on all n + 1 rows being a linear program.

    The program is the dual one; the last row lies above its fit if its multiplier has to be as large as it may.
    """
    tie = np.append(np.zeros(len(scores) - 1), 1e-9)  # of several solutions the one with the smallest multiplier
    bounds = [(level - 1, level)] * len(scores)
    found = optimize.linprog(tie - scores, A_eq=indicators.T, b_eq=np.zeros(indicators.shape[1]), bounds=bounds)
    assert found.status == 0
    return bool(found.x[-1] < level - 1e-7)


def regression_quantile(indicators: np.ndarray, scores: np.ndarray, new: np.ndarray, level: float) -> float:
    """The largest score of a new row that its fitted quantile reaches, from one linear program; ∞ if all do."""
    bounds, options = [(level - 1, level)] * len(scores), {"primal_feasibility_tolerance": 1e-9}
    pull = -(level - 1e-6) * new
    found = optimize.linprog(-scores, A_eq=indicators.T, b_eq=pull, bounds=bounds, options=options)
    assert found.status in (0, 2)
    return np.inf if found.status == 2 else -float(found.eqlin.marginals @ new)


def dropout_passes(model: nn.Module, X: torch.Tensor, passes: int, seed: int) -> np.ndarray:
    """Outputs (T, n) of one forward after the other; the model's dropout must be on, all else in eval mode."""
    with torch.no_grad(), torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return np.array([model(X).reshape(-1).double().numpy() for _ in range(passes)])


def dropout_log_likelihood(outputs: np.ndarray, y: np.ndarray, noise_std: float) -> float:
    """The log of the mean density over passes, averaged over rows; `outputs` is (T, n)."""
    T, n = outputs.shape
    logs = []
    for i in range(n):
        density = sum(np.exp(-((y[i] - outputs[t, i]) ** 2) / (2 * noise_std**2)) for t in range(T)) / T
        logs.append(np.log(density / np.sqrt(2 * np.pi * noise_std**2)))
    return sum(logs) / n


def gaussian_intervals(outputs: np.ndarray, noise_std: float, level: float) -> tuple[np.ndarray, np.ndarray]:
    """Bounds from the outputs (T, n) of T passes, or of T networks: their mean and population variance, and noise."""
    mean = sum(outputs) / len(outputs)
    variance = sum((row - mean) ** 2 for row in outputs) / len(outputs)
    return stats.norm.interval(level, mean, np.sqrt(variance + noise_std**2))


def mixture(members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of mixtures of Gaussians with (mean, variance) each, (M, n, 2), by their moments."""
    first = sum(mean for mean, _ in members.transpose(0, 2, 1)) / len(members)
    second = sum(variance + mean**2 for mean, variance in members.transpose(0, 2, 1)) / len(members)
    return first, np.sqrt(second - first**2)


def accepted(scores: np.ndarray, score: float, level: float) -> bool:
    """Whether split conformal prediction accepts a row: fewer than ⌈(n+1)·level⌉ of the n scores are below its own."""
    return int(sum(other < score for other in scores)) < math.ceil(round((len(scores) + 1) * level, 9))


def projection(dim: int, shapes, seed: int) -> np.ndarray:
    """S (dim, p) of RandomProjection for weights of these shapes, entry by entry, from the words of the generators one
    after the other. A number of parameters stands for one vector."""
    shapes = [(shapes,)] if isinstance(shapes, int) else shapes
    sizes = [(shape[0], math.prod(shape[1:])) if len(shape) else (1, 1) for shape in shapes]
    S, first = np.zeros((dim, sum(o * a for o, a in sizes))), 0
    for o, a in sizes:
        counts = (4, 0) if a == 1 else (0, 4) if o == 1 else (2, 2)
        hashed = [[], []]
        for axis, size in enumerate((o, a)):
            generator = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(first, axis)))
            count = min(counts[axis], dim)
            for _ in range(size):
                entries = []
                for k in range(count):
                    word = int(generator.random_raw())
                    low, high = dim * k // count, dim * (k + 1) // count
                    entries.append((low + (word % 2**31) * (high - low) // 2**31, -1 if word >= 2**63 else 1))
                hashed[axis].append(entries or [(0, 1)])
        for i in range(o):
            for j in range(a):
                pairs = [(x, y) for x in hashed[0][i] for y in hashed[1][j]]
                for (place, sign), (place_, sign_) in pairs:
                    S[(place + place_) % dim, first + i * a + j] += sign * sign_ / np.sqrt(len(pairs))
        first += o * a
    return S


def equivalent(J: np.ndarray, damping: float) -> tuple[float, float]:
    """μ and λ/(μκ'), κ' = ∂κ/∂μ, where κ(μ) = μ/(1 − tr H(μ)/r) is the damping λ; J (n, r) is projected. Where even
    the smallest μ has a larger κ, that μ."""
    r = J.shape[1]

    def one_minus_h(mu: float) -> np.ndarray:  # on all r directions
        return mu * np.linalg.inv(J.T @ J + mu * np.eye(r))

    def excess(log_mu: float) -> float:
        return np.exp(log_mu) * r / np.trace(one_minus_h(np.exp(log_mu))) - damping

    smallest = np.log(1e-9 * damping)
    mu = np.exp(smallest if excess(smallest) > 0 else optimize.brentq(excess, smallest, np.log(damping), xtol=1e-13))
    M = one_minus_h(mu)
    return mu, np.trace(M) / np.trace(M @ M)


def projected_variance(J: np.ndarray, damping: float, g: np.ndarray) -> float:
    """q = h + λ ∂h/∂λ, by the chain rule from h = gᵀ(JᵀJ + μI)⁻¹g; J and g are projected."""
    mu, slope = equivalent(J, damping)
    u = np.linalg.inv(J.T @ J + mu * np.eye(J.shape[1])) @ g
    return max(g @ u - slope * mu * (u @ u), 0.0)


def projected_leverage(J: np.ndarray, damping: float, g: np.ndarray) -> float:
    return leverage(J, equivalent(J, damping)[0], g)


def projected_effective_parameters(J: np.ndarray, damping: float, full_rank: int) -> float:
    """2 tr H − tr H² with tr H² = tr H + λ ∂(tr H)/∂λ."""
    mu, slope = equivalent(J, damping)
    M = mu * np.linalg.inv(J.T @ J + mu * np.eye(J.shape[1]))
    trace = J.shape[1] - np.trace(M)
    return min(trace - slope * (np.trace(M @ M) - np.trace(M)), full_rank)


def projected(J: np.ndarray, landmarks: np.ndarray) -> np.ndarray:
    """J in the span of the landmarks, by a full SVD of these: what Nyström puts instead of J."""
    _, d, V = np.linalg.svd(landmarks, full_matrices=False)
    V = V[d > 1e-6 * d[0]]
    return J @ V.T @ V


def tail(J: np.ndarray, inside: np.ndarray, damping: float, outsiders: np.ndarray, n_outsiders: int):
    """(q/ρ, h/ρ, Δp*) of the tail J − inside, its energy spread evenly over a million eigenvalues between 0 and twice
    their mean. `outsiders` are the parts outside of some of the `n_outsiders` rows that are no landmarks."""
    n, outside = len(J), J - inside
    N = np.eye(n) - inside @ np.linalg.inv(inside.T @ inside + damping * np.eye(J.shape[1])) @ inside.T
    nu, nu2 = np.trace(N) / n, np.trace(N @ N) / n
    R = np.sum(outside**2)
    k = len(outsiders)
    pairs = [(outsiders[i] @ outsiders[j]) ** 2 for i in range(k) for j in range(k) if i != j]
    pairs = n_outsiders**2 * np.mean(pairs) if pairs else 0.0
    squares = sum((row @ row) ** 2 for row in outside)

    def eigenvalues(mean: float) -> np.ndarray:
        return nu * 2 * min(mean, R) * (np.arange(10**6) + 0.5) / 10**6

    e = eigenvalues(pairs / R)
    q, h = nu * np.mean(e / (e + damping) ** 2), np.mean(1 / (e + damping))
    e = eigenvalues((pairs + squares) / R)
    W, W2 = nu * R * np.mean(1 / (e + damping)), nu * R * np.mean(e / (e + damping) ** 2)
    return q, h, 2 * nu2 * W - nu**2 * W2


def power_law(energy: float, count: int, largest: float, after: int) -> np.ndarray:
    """largest·(1 + i/after)^(−a), i = 1, …, count, with the a ≥ 0 that makes their sum `energy`; else all equal."""
    if energy >= count * largest:
        return np.full(count, energy / count)
    a = optimize.brentq(lambda a: sum(largest * (1 + i / after) ** -a for i in range(1, count + 1)) - energy, 0, 1e6)
    return np.array([largest * (1 + i / after) ** -a for i in range(1, count + 1)])


class SpreadDirections(Directions):
    """Directions with tail="estimate": a diary of what each shrink lets go."""

    def __init__(self, rank: int, damping: float, score, compress: bool = False) -> None:
        super().__init__(rank, damping, score, compress=compress)
        self.energy = 0.0
        self.deltas: list[float] = []  # δ² of each shrink
        self.above: list[list[float]] = []  # the d² > δ² that each shrink lets go

    def add(self, row: np.ndarray) -> None:
        self.energy += row @ row
        super().add(row)

    def shrink(self) -> None:
        d, _ = self.svd()
        before = self.shift
        super().shrink()
        if self.shift > before:
            best = sorted(range(len(d)), key=lambda j: -self.score(d, self.damping)[j])[: self.k]
            self.deltas.append(min(d[j] for j in best) ** 2)
            self.above.append([d[j] ** 2 for j in range(len(d)) if j not in best and d[j] ** 2 > self.deltas[-1]])

    def eigenvalues(self, d: np.ndarray, full: int) -> tuple[np.ndarray, np.ndarray]:
        """Of JᵀJ along the held directions, and along the others."""
        if not self.deltas:
            return d**2, np.zeros(0)
        r, k = len(d), min(self.k, len(d))
        missed = self.energy - sum(d**2)
        n_above, above, back = max(map(len, self.above)), sum(map(sum, self.above)), sum(self.deltas)
        large = np.full(n_above, above / max(n_above, 1))
        room = min(n_above, full - r)  # for so many of them among the unheld directions
        count, energy = full - k - room, missed - above - k * back
        middle = (max(self.deltas) + sum(self.deltas)) / 2
        rest = power_law(energy, count, middle, max(k, 1)) if count and energy > 1e-9 * missed else np.zeros(count)
        held = d**2 + np.concatenate([np.full(k, back), rest[: r - k]])
        held[: n_above - room] += large[room:]
        tail = np.concatenate([large[:room], rest[r - k :]])
        return held, tail[tail > 0]


def left_out(e: np.ndarray, n_rows: int, damping: float) -> tuple[float, float]:
    """(q/ρ, h/ρ) of a row left out of `n_rows` rows with the eigenvalues e, where all rows are alike."""
    one_minus_h = np.concatenate([damping / (e + damping), np.ones(n_rows - len(e))])
    rho, free = sum(e) / n_rows, np.mean(one_minus_h)
    return (np.mean(one_minus_h**2) / free**2 - 1) / rho, (1 / free - 1) / rho


def class_gradients(model: nn.Module, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of one row x: π (C,), ∂z/∂w (C, p), the log-odds s (C,) of each class against the rest, and ∂s/∂w (C, p). One
    logit is the second of two, the first being 0."""
    parameters = [w for w in model.parameters() if w.requires_grad]
    z = model(x[None]).reshape(-1)
    if len(z) == 1:
        z = torch.cat([0 * z, z])
    s = [z[c] - torch.logsumexp(torch.cat([z[:c], z[c + 1 :]]), dim=0) for c in range(len(z))]

    def rows(values) -> np.ndarray:
        gradients = [torch.autograd.grad(value, parameters, retain_graph=True) for value in values]
        return np.array([torch.cat([part.reshape(-1) for part in each]).double().numpy() for each in gradients])

    return z.softmax(dim=0).detach().double().numpy(), rows(z), np.array([value.item() for value in s]), rows(s)


def fisher(model: nn.Module, X: torch.Tensor, of_class: int | None = None) -> np.ndarray:
    """Σᵢ Jᵢᵀ(diag π − ππᵀ)Jᵢ, or of one class against the rest Σᵢ π_c(1 − π_c)∇s_c∇s_cᵀ."""
    total = 0.0
    for x in X:
        p, J, _, S = class_gradients(model, x)
        if of_class is None:
            total = total + J.T @ (np.diag(p) - np.outer(p, p)) @ J
        else:
            total = total + p[of_class] * (1 - p[of_class]) * np.outer(S[of_class], S[of_class])
    return total


def fisher_answers(F: np.ndarray, damping: float, g: np.ndarray) -> tuple[float, float, float]:
    """q, h and p*."""
    inverse = np.linalg.inv(F + damping * np.eye(len(F)))
    H = inverse @ F
    return g @ inverse @ F @ inverse @ g, g @ inverse @ g, np.trace(2 * H - H @ H)


def label_fisher(J: np.ndarray, z: np.ndarray, of_label: int | None = None) -> np.ndarray:
    """Of logits z (n, L) with gradients J (n, L, p): Σᵢ Σ_l π_l(1 − π_l) ∇z_l ∇z_lᵀ, or of one label alone."""
    total = np.zeros((J.shape[2], J.shape[2]))
    for i in range(len(z)):
        for label in range(z.shape[1]) if of_label is None else [of_label]:
            p = 1 / (1 + np.exp(-z[i, label]))
            total += p * (1 - p) * np.outer(J[i, label], J[i, label])
    return total
