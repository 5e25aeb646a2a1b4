"""What was fitted, on one screen."""

from __future__ import annotations

import math

import numpy as np
from torch import nn

from .calibration import Calibration, rows_needed
from .damping import Damping
from .fitted import Fit


def describe(model: nn.Module, fit: Fit, damping: Damping, calibration: Calibration | None) -> str:
    rows = [
        ("network", f"{type(model).__name__}, {fit.n_parameters:,} trainable parameters (p)"),
        ("training rows", f"{fit.n_rows:,} (n)"),
        ("training RMSE", f"{math.sqrt(fit.rss / fit.n_rows):.4g}"),
    ]
    rows.append(("covariance", fit.covariance.describe()))
    if fit.covariance.damping is None:
        rows.append(("damping λ", "not given: predict needs weight_decay, damping or a calibration"))
    else:
        rows += [
            ("damping λ", f"{fit.covariance.damping:.4g} ({damping})"),
            ("effective p*", f"{fit.effective_parameters:.1f} ({fit.effective_parameters / fit.n_rows:.0%} of n)"),
            ("degrees of freedom", f"{fit.degrees_of_freedom:.1f} (n − p*)"),
            ("noise std s", f"{fit.noise_std:.4g}"),
        ]
    if calibration is not None:
        rows += _calibration_rows(calibration, fit)
    return "\n".join(["PredictionIntervals", *(f"  {name:<20}{value}" for name, value in rows)])


def _calibration_rows(calibration: Calibration, fit: Fit) -> list[tuple[str, str]]:
    """Lines of `summary()`."""
    conformal = calibration.conformal
    before = "none" if fit.covariance.damping is None else f"{fit.covariance.damping:.4g}"
    rows = [
        ("calibrated on", f"{conformal.n_rows:,} rows"),
        ("  damping λ", f"{before} → {conformal.damping:.4g}"),
        ("  scale", f"√(1 + b·q), b = {conformal.b:.4g}" + (" (constant width)" if conformal.b == 0 else "")),
    ]
    if conformal.n_rows >= rows_needed(0.95):
        unit = math.sqrt(float(np.mean(conformal.standardised**2)))
        rows.append(
            ("  95 % quantile", f"{conformal.quantile(0.95) / unit:.3f} standard deviations (Gaussian: 1.960)"),
        )
    return [
        *rows,
        ("  interval score", f"{calibration.score_before:.4g} → {calibration.score_after:.4g} (95 %, lower is better)"),
        ("  like training rows", f"p = {calibration.drift:.2g} (leverages, Kolmogorov–Smirnov)"),
    ]
