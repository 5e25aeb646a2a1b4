"""The summary of a fit, as text and as HTML for notebooks."""

import math
from collections.abc import Sequence

import numpy as np
from torch import nn

from .calibration import AllOutputs, Calibration, rows_needed
from .damping import Damping
from .data.batches import count_classes
from .display import BLUE, SMALL_HEIGHT, SMALL_STYLE, VERMILLION, Markup, element, spectrum_picture
from .fitting.fit import Fit
from .fitting.spec import FitSpec
from .fitting.tasks import Classification

Line = tuple[str, str]  # a label, indented where it belongs to the line above, and its text

MAX_LISTED_OUTPUTS = 4  # with more outputs than this a line shows the smallest and the largest number


def format_summary(title: str, lines: Sequence[Line]) -> str:
    """Put the lines of a summary below its title, with the texts aligned."""
    return "\n".join([title, *(f"  {label:<22}{text}" for label, text in lines)])


def summary_html(title: str, lines: Sequence[Line], fit: Fit) -> Markup:
    """Return the summary as a table above a picture of the spectrum of a fit, where that takes a moment only."""
    rows, left = [], "text-align: left; "
    for label, text in lines:
        indent = "" if label == label.lstrip() else "padding-left: 2em"
        head = element("th", label.strip(), style=left + indent)
        rows.append(element("tr", head, element("td", text, style=left)))
    parts = [element("p", element("b", title)), element("table", element("tbody", *rows))]
    spectrum, damping, picture = fit.quick_spectrum(), fit.covariance.damping, None
    if spectrum is not None and damping is not None:
        picture = spectrum_picture(*spectrum, damping, height=SMALL_HEIGHT)
    if picture is not None:
        blue, red = (element("span", "● ", style=f"color: {colour}") for colour in (BLUE, VERMILLION))
        legend = element("p", blue, "singular values of J, ", red, "eigenvalues of Σ⁻¹")
        parts += [element("div", picture, style=SMALL_STYLE), legend]
    return element("div", *parts)


def summary_lines(spec: FitSpec, fits: Sequence[Fit], calibration: Calibration | None) -> list[Line]:
    """Return the lines of the summary of fits."""
    if isinstance(spec.task, Classification):
        accuracies = spec.task.accuracies(fits)
        return _classification_lines(spec.model, fits, spec.damping, accuracies, spec.task.predicted)
    return _regression_lines(spec, fits, calibration)


def _regression_lines(spec: FitSpec, fits: Sequence[Fit], calibration: Calibration | None) -> list[Line]:
    fit, m, quantiles = fits[0], sum(each.n_outputs for each in fits), spec.task.quantiles
    task = [] if m == 1 else [("outputs", f"{m} (m), {'each alone' if len(fits) > 1 else 'one JᵀJ for all'}")]
    if quantiles is not None:
        task.append(("quantiles", ", ".join(f"{level:g}" for level in quantiles)))
    known = "H²" if quantiles is not None else "1" if spec.task.variance is None else "σ²"
    # what residuals are divided by before they are squared
    unit = "" if spec.task.variance is None else " (in units of the network's own σ)"
    if fit.total_weight != fit.n_rows:
        task.append(("sum of weights", f"{fit.total_weight:.6g}"))
        unit = unit or " (of a row of weight 1)"
    losses, freedom, noise = (
        np.concatenate([getattr(each, name) for each in fits]) for name in ("losses", "degrees_of_freedom", "noise_std")
    )
    lines = _fit_lines(spec.model, fits, *task, ("training RMSE", _list(np.sqrt(losses / fit.n_rows)) + unit))
    if fit.covariance.damping is None:
        needs = "weight_decay, damping or a calibration" if quantiles is None else "a calibration"
        hint = "" if calibration else f": predict needs {needs}"
        lines.append(("damping λ", f"not given{hint}"))
    else:
        per_row = m // len(fits)
        lines += [
            *_damping_lines(fits, spec.damping.rule(fit.n_returned), per_row, "n" if per_row == 1 else "n·m"),
            ("degrees of freedom", f"{_list(freedom, '{:.1f}')} (n − p*)"),
            ("noise std s", _list(noise) + unit),
        ]
    return lines if calibration is None else lines + _calibration_lines(calibration, fit, known)


def _classification_lines(
    model: nn.Module, fits: Sequence[Fit], damping: Damping, accuracies: Sequence[float], predicted: bool
) -> list[Line]:
    fit, n_all = fits[0], count_classes(fits[0].n_returned)
    one_against_rest = fit.n_returned > 2 and fit.n_outputs == 1
    classes = [c for each in fits for c in each.outputs]
    some = "the predicted one" if predicted else ", ".join(map(str, classes))
    restriction = "" if len(classes) == n_all and not predicted else f", asked about {some}"
    form = "each against the rest, alone" if one_against_rest else "one Fisher matrix for all"
    per_label = 1 if one_against_rest else n_all - 1  # how many log-odds one label is about
    task = [
        ("classes", f"{n_all}{restriction}: {form}"),
        ("training accuracy", _list(100 * np.array(accuracies), "{:.2f}%")),
        ("cross-entropy", _list(np.array([each.losses.sum() for each in fits]) / fit.n_rows)),
    ]
    unit = "n" if per_label == 1 else f"{per_label}·n"
    return _fit_lines(model, fits, *task) + _damping_lines(fits, damping.rule(), per_label, unit)


def _fit_lines(model: nn.Module, fits: Sequence[Fit], *task: Line) -> list[Line]:
    """Return lines about the network and the covariance, with those about the task between them."""
    fit = fits[0]
    lines = [
        ("network", f"{type(model).__name__}, {fit.n_parameters:,} trainable parameters (p)"),
        ("training rows", f"{fit.n_rows:,} (n)"),
        *task,
        ("gradients", fit.gradient_method),
        ("covariance", ", ".join(each.describe() for each in (fit.covariance, fit.sandwich) if each is not None)),
    ]
    if fit.error is not None:
        widths = max(each.error.width for each in fits if each.error is not None)
        lines.append(("error of widths", f"{widths:.2%} on average, estimated on {fit.error.n_rows:,} rows"))
    return lines


def _damping_lines(fits: Sequence[Fit], rule: str, per_row: int, unit: str) -> list[Line]:
    p_star = np.array([fit.effective_parameters for fit in fits])
    share = _list(100 * p_star / (fits[0].n_rows * per_row), "{:.0f}")
    return [
        ("damping λ", f"{fits[0].covariance.damping:.4g} ({rule})"),
        ("effective p*", f"{_list(p_star, '{:.1f}')} ({share}% of {unit})"),
    ]


def _calibration_lines(calibration: Calibration, fit: Fit, known: str) -> list[Line]:
    conformal = calibration.conformal
    n, outputs, joint = conformal.n_rows, conformal.outputs, isinstance(conformal, AllOutputs)
    before = "none" if fit.covariance.damping is None else f"{fit.covariance.damping:.4g}"
    lines = [("calibrated on", f"{calibration.n_rows:,} rows: levels up to {n / (n + 1):.5g}")]
    if joint:
        lines.append(("  outputs", f"all at once: {n:,} rows for the quantile, the others for the scales"))
    b, gamma = (np.array([getattr(output, name) for output in outputs]) for name in ("b", "gamma"))
    constant = " (constant width)" if known == "1" and not (b.any() or gamma.any()) else ""
    lines += [
        ("  damping λ", f"{before} → {_list(np.array([output.damping for output in outputs]))}"),
        ("  scale", f"√({known} + b·q), b = {_list(b)}{constant}"),
    ]
    if not isinstance(calibration.noise, str):
        lines.append(("  noise", f"learnt: σ is proportional to v^γ, γ = {_list(gamma)}"))
    elif calibration.noise:
        lines.append(("  noise", f"the same everywhere: {calibration.noise}"))
    if not joint and n >= rows_needed(0.95):
        deviations = [math.hypot(*output.standardised) / math.sqrt(n) for output in outputs]
        quantiles = [output.quantile(0.95) / s if s else 0.0 for output, s in zip(outputs, deviations, strict=True)]
        shown = _list(np.array(quantiles), "{:.3f}")
        lines.append(("  95 % quantile", f"{shown} standard deviations (Gaussian: 1.960)"))
    scores = [f"{s:.4g}" for s in (calibration.score_before, calibration.score_after) if not math.isnan(s)]
    if not math.isnan(calibration.score_after):
        lines.append(("  interval score", f"{' → '.join(scores)} (95 %, lower is better)"))
    if not math.isnan(calibration.drift_p_value):
        lines.append(("  like training rows", f"p = {calibration.drift_p_value:.2g} (leverages, Kolmogorov–Smirnov)"))
    return lines


def _list(values: np.ndarray, form: str = "{:.4g}") -> str:
    shown = values if len(values) <= MAX_LISTED_OUTPUTS else [values.min(), values.max()]
    return (", " if len(shown) == len(values) else " to ").join(map(form.format, shown))
