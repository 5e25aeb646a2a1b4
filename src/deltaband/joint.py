"""What predictions have in common: covariances, weighted sums and samples, from the gradients of both rows.

Errors of predictions and observations, o being an output, g its gradient, u the noise that is known (mostly 1):

    Cov(f(x), f(x')) = a_o v(x)^γ · gᵀ Σ⁻¹ g' · a_o' v(x')^γ,    Var(y | f) = (s_o u v(x)^γ)².

By the formula a = s = √(RSS/(n − p*)) and v = 1. After `calibrate` λ, b and γ are those that all outputs of a fit
choose together on the calibration rows, s is the root mean square of |r|/σ there, and a = s·√b.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .calibration import Calibration
from .calibration.scales import Scales
from .data.inputs import Inputs, as_tensor
from .engines import SpectralCovariance
from .engines.covariance import By, Products
from .fitting.fit import Fit, Formula, checked_gradients
from .fitting.spec import FitSpec, all_outputs
from .machine import free_memory
from .network.combined import gradients_of_sums
from .network.gradient_batch import GradientBatch
from .network.network import plain_autograd
from .results import Side

GRADIENT_BYTES = 2**27  # of rows whose products with all others are computed at once
MEMORY_SHARE = 0.5  # of what is free, that a matrix of covariances may take


@dataclass(frozen=True)
class Errors:
    """The scales of the errors of some fits, one number for each output."""

    spec: FitSpec
    fits: tuple[Fit, ...]  # whose λ is known
    method: Calibration | Formula  # what single rows are asked by
    amplitude: np.ndarray  # (m,) a
    noise: np.ndarray  # (m,) s
    gamma: np.ndarray  # (m,)
    freedom: np.ndarray  # (m,) of the distribution of (y − ŷ)/scale; ∞ where that is taken as normal

    @classmethod
    def of_formula(cls, spec: FitSpec, fits: tuple[Fit, ...], by: By) -> Errors:
        """Return them as the formula says; `fits` have a λ."""
        method, s = Formula(fits).checked(), np.concatenate([fit.noise_std for fit in fits])
        robust = [fit.sandwich is not None and by == "variance" for fit in fits for _ in fit.losses]
        freedom = np.concatenate([fit.t_freedom for fit in fits])
        return cls(spec, fits, method, np.where(robust, 1.0, s), s, np.zeros(len(s)), freedom)

    @classmethod
    def of_calibration(cls, spec: FitSpec, fits: tuple[Fit, ...], calibration: Calibration) -> Errors:
        """Return them as the calibration rows say."""
        outputs, found, a, s, gamma = list(calibration.conformal.outputs), [], [], [], []
        for fit, covariance in zip(fits, calibration.covariances, strict=True):
            mine, outputs = outputs[: fit.n_outputs], outputs[fit.n_outputs :]
            scales: Scales = mine[0].scales
            losses = np.sum([output.losses for output in mine], axis=0)
            varying = np.where(scales.b > 0, losses, np.inf) if scales.b.any() else losses
            best = int(varying.argmin())
            damping = float(scales.dampings[scales.damping_index[best]])
            covariance = covariance if covariance.damping == damping else covariance.eigendecomposed().at(damping)
            found.append(replace(fit, covariance=covariance, sandwich=None))
            s += [output.root_mean_square(best) for output in mine]
            a += [np.sqrt(scales.b[best])] * len(mine)
            gamma += [0.0 if scales.gamma is None else float(scales.gamma[best])] * len(mine)
        noise = np.array(s)
        about = (np.array(a) * noise, noise, np.array(gamma), np.full(len(noise), np.inf))
        return cls(spec, tuple(found), calibration, *about)

    def t(self, weights: np.ndarray, levels: Sequence[float], side: Side) -> np.ndarray:  # (k, n, m) -> (k, levels)
        """Return quantiles for sums: of the output that has fewest degrees of freedom, of those that take part."""
        from scipy.special import ndtri, stdtrit

        freedom = np.where((weights != 0).any(axis=1), self.freedom, np.inf).min(axis=1)[:, None]
        p = (1 + np.array(levels)) / 2 if side == "both" else np.array(levels)
        return np.where(np.isinf(freedom), ndtri(p), stdtrit(np.where(np.isinf(freedom), 1.0, freedom), p))

    def rows(self, X: Inputs) -> Rows:
        """Return what the errors of rows follow from besides their gradients; X may have weights."""
        fits = self.method.fits if isinstance(self.method, Formula) else self.fits
        _, to, known = self.spec.compared(fits, self.method, X)
        factor = np.ones_like(to.mean)
        if self.gamma.any() and len(to.mean):
            factor = np.exp(self.gamma * np.stack([each[:, -1] for each in known.q], axis=1))
        return Rows(X.without_extras(), to.mean, factor * self.amplitude, np.square(factor * self.noise * to.unit))

    def covariance(self, one: Rows, two: Rows, by: By) -> np.ndarray:  # (n, m, n', m)
        """Return the covariances of predictions; those of outputs that are fitted alone have none."""
        shape = (*one.mean.shape, *two.mean.shape)
        if (needed := 8 * np.prod(shape, dtype=float)) > MEMORY_SHARE * (free := free_memory()):
            what = f"the covariances of {shape[0]:,} and {shape[2]:,} rows take {needed / 1e9:.3g} GB"
            advice = "ask for fewer rows, or for the sums you need: predict_linear(x, weights)"
            raise MemoryError(f"{what}, and {free / 1e9:.3g} GB are free: {advice}")
        C, every = np.zeros(shape), all_outputs(self.fits)
        for fit in self.fits:
            o = np.array([every.index(each) for each in fit.outputs])
            first = 0
            for gradients, b in _pieces(self.spec, fit, two.x):
                of = across(fit, gradients, by)
                values = self.spec.evaluate([fit], one.x, [of])[1] if len(one.x) else []
                for mine, value in zip(o, values, strict=False):  # (n, outputs · b), all rows of an output first
                    C[:, mine, first : first + b, o] = value.reshape(len(value), len(o), b).transpose(1, 0, 2)
                first += b
        return one.factor[:, :, None, None] * C * two.factor

    def of_sums(self, rows: Rows, weights: np.ndarray, by: By = "variance") -> np.ndarray:  # (k, n, m) -> (k,)
        """Return the variances of Σ wᵢₒ fₒ(xᵢ), without those of the single predictions."""
        found, every = np.zeros(len(weights)), all_outputs(self.fits)
        if len(rows.x) == 0:
            return found
        for fit in self.fits:
            o = [every.index(each) for each in fit.outputs]
            network = self.spec.fitted_network(fit)
            at_once = max(1, GRADIENT_BYTES // (16 * fit.n_parameters))
            for k in range(0, len(weights), at_once):
                w = (weights[k : k + at_once] * rows.factor)[:, :, o]
                g = gradients_of_sums(network, rows.x, w)
                found[k : k + at_once] += fit.variance(g) if by == "variance" else fit.covariance.leverage(g)
        return found


@dataclass(frozen=True)
class Rows:
    """Rows whose errors are asked for."""

    x: Inputs
    mean: np.ndarray  # (n, m) in the units of the network
    factor: np.ndarray  # (n, m) what products of gradients are multiplied by
    noise: np.ndarray  # (n, m) variances


def parse_weights(weights: Any, n: int, m: int, single: bool) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return weights of sums as (k, n, m), checked, and the shape of these sums."""
    w = as_tensor(np.asarray(weights) if isinstance(weights, list) else weights, "weights").cpu().double().numpy()
    expected = f"({n},) for a sum over the rows, or (k, {n}) for k of them" + ("" if single else f", or (k, {n}, {m})")
    if w.ndim not in (1, 2, 3) or w.shape[-1 if w.ndim < 3 else 1] != n or (w.ndim == 3 and w.shape[2] != m):
        raise ValueError(f"weights must have shape {expected}; got {w.shape}")
    if not np.isfinite(w).all():
        raise ValueError(f"weights must be finite; got {w[~np.isfinite(w)][0]}")
    if w.ndim == 3:
        return w, (len(w),)
    w = np.atleast_2d(w)
    each = np.einsum("ki,op->koip", w, np.eye(m)).reshape(len(w) * m, n, m)  # a sum for every output
    return each, (len(w),) if single else (len(w), m)


def across(fit: Fit, other: GradientBatch, by: By) -> Products:
    """Return the function of rows that returns their products with others; with themselves these are q, or h."""
    if fit.sandwich is None or by == "leverage":
        return fit.covariance.across(other, by)
    assert isinstance(fit.covariance, SpectralCovariance)
    return fit.sandwich.across(fit.covariance, other)


def draws(mean: np.ndarray, covariance: np.ndarray, n: int, seed: int) -> np.ndarray:  # (d,), (d, d) -> (n, d)
    """Draw from a normal distribution whose covariance may be singular."""
    from scipy import linalg

    e, V = linalg.eigh((covariance + covariance.T) / 2)
    z = np.random.default_rng(seed).standard_normal((n, len(mean)))
    return mean + (z * np.sqrt(np.maximum(e, 0.0))) @ V.T


def _pieces(spec: FitSpec, fit: Fit, x: Inputs) -> Iterator[tuple[GradientBatch, int]]:
    """Yield the gradients of rows, some at a time, all rows of an output first, and how many rows they are of."""
    if len(x) == 0:
        return
    network = spec.fitted_network(fit).copy()  # `spec` is asked about other rows meanwhile
    row_bytes = fit.n_outputs * (fit.n_parameters * 8 if fit.by_rows else fit.layers.factor_bytes)
    size, first = max(1, min(network.chunk_rows(x), GRADIENT_BYTES // max(row_bytes, 1))), 0
    for part in x.split(size):
        with plain_autograd(network.device):
            batches = [gradients for _, gradients in checked_gradients(network, part, first)]
        first += len(part)
        yield GradientBatch.concatenate(batches), len(part)
