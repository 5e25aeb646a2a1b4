"""How far the widths of a fit are off because J is of random combinations of outputs instead of all of them.

With δ the error of JᵀJ, a = A⁻¹g and b = Σ⁻¹g = A⁻¹JᵀJA⁻¹g the first order of q's error is aᵀδa − 2aᵀδb. A training row
contributes Σₖ tₖ with tₖ = (a·g̃ₖ)² − 2(a·g̃ₖ)(b·g̃ₖ) to it, whose variance follows from that of its tₖ: the random error.
The second order has a mean: E Â⁻¹ ≈ A⁻¹ + A⁻¹(Σ h̃ₖ g̃ₖg̃ₖᵀ)A⁻¹ with h̃ₖ = g̃ₖᵀA⁻¹g̃ₖ. So h is larger by Σ h̃ₖ(a·g̃ₖ)², and
q = h + λ ∂h/∂λ by Σ 2h̃ₖ(a·g̃ₖ)(b·g̃ₖ) − (2h̃ₖ − q̃ₖ)(a·g̃ₖ)²: the bias. Both are sums over all training rows, estimated
from some of them.
"""

from dataclasses import replace

import numpy as np

from ..data.inputs import Inputs
from ..data.row_record import Sample
from ..network.gradient_batch import GradientBatch
from ..network.network import Head, Network, plain_autograd
from ..network.probes import ProbeError
from .fit import Fit

SAMPLE_ROWS, COMPARED_ROWS, COMPARED_OUTPUTS = 32, 16, 4  # from which the error is estimated, and at which


def probe_error(fit: Fit, network: Network, rows: Sample, noise: bool = True) -> Fit:
    """Add the error of widths by so few combinations, if λ is known; without noise that of √q."""
    covariance, probes = fit.covariance, fit.probes
    if probes is None or covariance.damping is None or len(rows) == 0:
        return fit
    x = max(rows.pieces, key=len)
    own = network.with_layers(fit.asked_layers)
    rng = np.random.default_rng(probes.seed)
    columns = rng.choice(fit.n_outputs, min(COMPARED_OUTPUTS, fit.n_outputs), replace=False).tolist()
    with plain_autograd(network.device):
        used = _gradients(own, x[:SAMPLE_ROWS])
        some_outputs = Network(own.model_copy, own.layers, _columns(own.head, columns))
        asked = _gradients(some_outputs, x[-COMPARED_ROWS:].without_extras())
        h, q = covariance.leverage(used), covariance.variance(used)
        a, b = (covariance.across(used, by)(asked) for by in ("leverage", "variance"))  # (asked, used)
        q_asked = covariance.variance(asked)
    n = len(used) // probes.count  # of each row's first combination, then of the second
    t = (np.square(a) - 2 * a * b).reshape(len(a), probes.count, n)
    per_row = fit.n_rows / n
    # of a single combination the square of tₖ is more than its variance
    spread = t.var(axis=1, ddof=1) if probes.count > 1 else np.square(t).sum(axis=1)
    variance = probes.count * spread.sum(axis=1) * per_row
    bias = (2 * h * a * b - (2 * h - q) * np.square(a)).sum(axis=1) * per_row
    size = 2 * (noise + q_asked)
    of_width = [np.divide(each, size, out=np.zeros_like(size), where=size > 0) for each in (np.sqrt(variance), bias)]
    random, mean = (float(np.sqrt(np.mean(np.square(each)))) for each in of_width)
    return replace(fit, probe_error=ProbeError(random, mean, probes.count))


def _columns(head: Head | None, columns: list[int]) -> Head:
    return lambda y: (y if head is None else head(y))[:, columns]


def _gradients(network: Network, x: Inputs) -> GradientBatch:
    """Return all gradients of some rows: those of the first output or combination, then of the second…"""
    return GradientBatch.concatenate([network.gradients(x, group)[1] for group in network.groups(x)])
