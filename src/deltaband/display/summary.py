"""What was fitted, on one screen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import nn

from ..calibration.conformal import AllOutputs, Calibration, ConformalScale, rows_needed
from ..damping import Damping
from ..data.labels import n_classes
from ..fitting.fit import Fit

Line = tuple[str, str]  # a name, which begins with spaces where it belongs to the one above, and a value

SHOWN = 4  # numbers of as many outputs; of more the smallest and the largest


def screen(title: str, lines: Sequence[Line]) -> str:
    return "\n".join([title, *(f"  {name:<22}{value}" for name, value in lines)])


def describe(model: nn.Module, fits: Sequence[Fit], damping: Damping, calibration: Calibration | None) -> list[Line]:
    fit, m = fits[0], sum(each.n_outputs for each in fits)
    n = fit.n_rows
    rows = _first_rows(model, fit)
    if m > 1:
        rows.append(("outputs", f"{m} (m), {'each alone' if len(fits) > 1 else 'one JᵀJ for all'}"))
    rss = np.concatenate([each.losses for each in fits])
    rows += [("training RMSE", _numbers(np.sqrt(rss / n))), *_covariance_rows(fits)]
    if fit.covariance.damping is None:
        hint = "" if calibration else ": predict needs weight_decay, damping or a calibration"
        rows.append(("damping λ", f"not given{hint}"))
    else:
        p_star = np.array([each.effective_parameters for each in fits])
        rows_of_one = n * m / len(fits)
        share = _numbers(100 * p_star / rows_of_one, "{:.0f}")
        rows += [
            ("damping λ", f"{fit.covariance.damping:.4g} ({damping.rule(fit.n_returned)})"),
            ("effective p*", f"{_numbers(p_star, '{:.1f}')} ({share}% of {'n' if m == len(fits) else 'n·m'})"),
            ("degrees of freedom", f"{_numbers(_all(fits, 'degrees_of_freedom'), '{:.1f}')} (n − p*)"),
            ("noise std s", _numbers(_all(fits, "noise_std"))),
        ]
    if calibration is not None:
        rows += _calibration_rows(calibration, fit)
    return rows


def describe_classes(
    model: nn.Module, fits: Sequence[Fit], damping: Damping, accuracies: Sequence[float], predicted: bool
) -> list[Line]:
    fit = fits[0]
    n, own = fit.n_rows, fit.n_returned > 2 and fit.n_outputs == 1
    rows = _first_rows(model, fit)
    classes = tuple(c for each in fits for c in each.outputs)
    some = "the predicted one" if predicted else ", ".join(map(str, classes))
    asked = "" if len(classes) == n_classes(fit.n_returned) and not predicted else f", asked about {some}"
    form = "each against the rest, alone" if own else "one Fisher matrix for all"
    losses = np.array([each.losses.sum() for each in fits]) / n
    p_star = np.array([each.effective_parameters for each in fits])
    others = 1 if own else n_classes(fit.n_returned) - 1  # numbers that one label is about
    share = _numbers(100 * p_star / (n * others), "{:.0f}")
    rows += [
        ("classes", f"{n_classes(fit.n_returned)}{asked}: {form}"),
        ("training accuracy", _numbers(100 * np.array(accuracies), "{:.2f}%")),
        ("cross-entropy", _numbers(losses)),
        *_covariance_rows(fits),
        ("damping λ", f"{fit.covariance.damping:.4g} ({damping.rule()})"),
        ("effective p*", f"{_numbers(p_star, '{:.1f}')} ({share}% of {'n' if others == 1 else f'{others}·n'})"),
    ]
    return rows


def _first_rows(model: nn.Module, fit: Fit) -> list[Line]:
    return [
        ("network", f"{type(model).__name__}, {fit.n_parameters:,} trainable parameters (p)"),
        ("training rows", f"{fit.n_rows:,} (n)"),
    ]


def _covariance_rows(fits: Sequence[Fit]) -> list[Line]:
    fit = fits[0]
    rows = [("gradients", fit.gradient_method), ("covariance", fit.covariance.describe())]
    if fit.error is not None:
        widths = max(each.error.width for each in fits if each.error is not None)
        rows.append(("error of widths", f"{widths:.2%} on average, estimated on {fit.error.n_rows:,} rows"))
    return rows


def _all(fits: Sequence[Fit], name: str) -> np.ndarray:
    return np.concatenate([getattr(fit, name) for fit in fits])


def _numbers(values: np.ndarray, form: str = "{:.4g}") -> str:
    if len(values) <= SHOWN:
        return ", ".join(form.format(value) for value in values)
    return f"{form.format(values.min())} to {form.format(values.max())}"


def _calibration_rows(calibration: Calibration, fit: Fit) -> list[Line]:
    """Lines of `summary()`."""
    conformal = calibration.conformal
    n, outputs = conformal.n_rows, conformal.outputs
    before = "none" if fit.covariance.damping is None else f"{fit.covariance.damping:.4g}"
    rows = [("calibrated on", f"{calibration.n_rows:,} rows: levels up to {n / (n + 1):.5g}")]
    if isinstance(conformal, AllOutputs):
        rows.append(("  outputs", f"all at once: {n:,} rows for the quantile, the others for the scales"))
    b = np.array([output.b for output in outputs])
    rows += [
        ("  damping λ", f"{before} → {_numbers(np.array([output.damping for output in outputs]))}"),
        ("  scale", f"√(1 + b·q), b = {_numbers(b)}" + (" (constant width)" if not b.any() else "")),
    ]
    if not isinstance(conformal, AllOutputs) and n >= rows_needed(0.95):
        quantiles = np.array([_quantile(output) for output in outputs])
        rows.append(("  95 % quantile", f"{_numbers(quantiles, '{:.3f}')} standard deviations (Gaussian: 1.960)"))
    scores = [f"{s:.4g}" for s in (calibration.score_before, calibration.score_after) if not math.isnan(s)]
    if not math.isnan(calibration.score_after):
        rows.append(("  interval score", f"{' → '.join(scores)} (95 %, lower is better)"))
    if not math.isnan(calibration.drift):
        rows.append(("  like training rows", f"p = {calibration.drift:.2g} (leverages, Kolmogorov–Smirnov)"))
    return rows


def _quantile(conformal: ConformalScale) -> float:
    """In standard deviations."""
    largest = conformal.standardised[-1] or 1.0
    deviation = largest * math.sqrt(float(np.mean((conformal.standardised / largest) ** 2)))
    return conformal.quantile(0.95) / deviation if deviation else 0.0
