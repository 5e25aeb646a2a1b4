"""Which scales a calibration chooses from, and what it asks of rows for that."""

import numpy as np

from ..engines import Covariance
from ..fitting.fit import Fit
from ..network.gradient_batch import GradientBatch
from .scales import Scales


def candidates_of(fit: Fit, tune: bool) -> tuple[Covariance, Scales]:
    """Return the candidate scales of a fit, and the covariance that answers for their λ."""
    if tune:
        spectral = fit.covariance.eigendecomposed()
        spectral = spectral if fit.reference.damping is None else spectral.at(fit.reference.damping)
        return spectral, Scales.grid(spectral.eigenvalues, fit.n_rows * fit.n_outputs)
    if fit.covariance.damping is None:
        raise ValueError("tune=False takes λ from the fit, which has none: give weight_decay or damping, or tune")
    return fit.covariance, Scales.single(fit.covariance.damping)


def share_unit(fit: Fit, quantiles: bool, weighted: bool) -> float:
    """Return what makes b·q a multiple of what it is added to: a square of the target, or noise of weight 1."""
    if quantiles:
        return float(fit.losses[0]) / fit.n_rows
    return 1.0 if weighted else fit.total_weight / fit.n_rows


def answers_to(fit: Fit, covariance: Covariance, scales: Scales, g: GradientBatch) -> np.ndarray:  # (b, 2 + L)
    """Return q by the formula, the leverage, and q under every λ of the scales."""
    formula = np.full(len(g), np.nan) if fit.covariance.damping is None else fit.variance(g)
    return np.column_stack([formula, fit.reference.leverage(g), covariance.variances(g, scales.dampings)])
