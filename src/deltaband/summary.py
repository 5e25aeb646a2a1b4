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
    if fit.error is not None:
        rows.append(("error of widths", f"{fit.error.width:.2%} on average, estimated on {fit.error.n_rows:,} rows"))
    if fit.covariance.damping is None:
        hint = "" if calibration else ": predict needs weight_decay, damping or a calibration"
        rows.append(("damping λ", f"not given{hint}"))
    else:
        rows += [
            ("damping λ", f"{fit.covariance.damping:.4g} ({damping})"),
            ("effective p*", f"{fit.effective_parameters:.1f} ({fit.effective_parameters / fit.n_rows:.0%} of n)"),
            ("degrees of freedom", f"{fit.degrees_of_freedom:.1f} (n − p*)"),
            ("noise std s", f"{fit.noise_std:.4g}"),
        ]
    if calibration is not None:
        rows += _calibration_rows(calibration, fit)
    return "\n".join(["PredictionIntervals", *(f"  {name:<22}{value}" for name, value in rows)])


def _calibration_rows(calibration: Calibration, fit: Fit) -> list[tuple[str, str]]:
    """Lines of `summary()`."""
    conformal = calibration.conformal
    before = "none" if fit.covariance.damping is None else f"{fit.covariance.damping:.4g}"
    rows = [
        ("calibrated on", f"{conformal.n_rows:,} rows: levels up to {conformal.n_rows / (conformal.n_rows + 1):.5g}"),
        ("  damping λ", f"{before} → {conformal.damping:.4g}"),
        ("  scale", f"√(1 + b·q), b = {conformal.b:.4g}" + (" (constant width)" if conformal.b == 0 else "")),
    ]
    if conformal.n_rows >= rows_needed(0.95):
        largest = conformal.standardised[-1] or 1.0
        deviation = largest * math.sqrt(float(np.mean((conformal.standardised / largest) ** 2)))
        quantile = conformal.quantile(0.95) / deviation if deviation else 0.0
        rows.append(("  95 % quantile", f"{quantile:.3f} standard deviations (Gaussian: 1.960)"))
    scores = [f"{s:.4g}" for s in (calibration.score_before, calibration.score_after) if not math.isnan(s)]
    if not math.isnan(calibration.score_after):
        rows.append(("  interval score", f"{' → '.join(scores)} (95 %, lower is better)"))
    if not math.isnan(calibration.drift):
        rows.append(("  like training rows", f"p = {calibration.drift:.2g} (leverages, Kolmogorov–Smirnov)"))
    return rows
