"""The summary of a fit, as text and as HTML for notebooks."""

import math
from collections.abc import Sequence

import numpy as np
from torch import nn

from .calibration import Calibration, EachOutput, LabelCalibration, PooledOutputs, rows_needed
from .display import BLUE, SMALL_HEIGHT, SMALL_STYLE, VERMILLION, Markup, element, spectrum_picture
from .fitting.classes import Classification
from .fitting.fit import Fit
from .fitting.spec import FitSpec
from .fitting.tasks import Regression

Line = tuple[str, str]  # a label, indented where it belongs to the line above, and its text

RELATIVE_ROUNDING = 1e-5  # widths that differ by no more are the same
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


def summary_lines(spec: FitSpec, fits: Sequence[Fit], calibration: Calibration | LabelCalibration | None) -> list[Line]:
    """Return the lines of the summary of fits."""
    if isinstance(spec.task, Classification):
        lines = _classification_lines(spec, spec.task, fits)
        return lines + (calibration.lines() if isinstance(calibration, LabelCalibration) else [])
    assert not isinstance(calibration, LabelCalibration)
    return _regression_lines(spec, spec.task, fits, calibration)


def _regression_lines(
    spec: FitSpec, regression: Regression, fits: Sequence[Fit], calibration: Calibration | None
) -> list[Line]:
    fit, m, quantiles = fits[0], sum(each.n_outputs for each in fits), spec.task.quantiles
    task = [] if m == 1 else [("outputs", _outputs(fits, m))]
    if quantiles is not None:
        task.append(("quantiles", ", ".join(f"{level:g}" for level in quantiles)))
    known = "H²" if quantiles is not None else "1" if spec.task.variance is None else "σ²"
    # what residuals are divided by before they are squared
    unit = "" if spec.task.variance is None else " (in units of the network's own σ)"
    if fit.n_targets is not None:
        task.append(("targets", f"{_list(np.concatenate([each.observed for each in fits]), '{:,.0f}')} of each output"))
    if not math.isclose(fit.total_weight, fit.observed.mean(), rel_tol=1e-9):
        task.append(("sum of weights", f"{fit.total_weight:.6g}"))
        unit = unit or " (of a row of weight 1)"
    freedom, noise = np.concatenate([each.degrees_of_freedom for each in fits]), regression.noise_std(fits)
    rmse = regression.root_squares(fits) / np.sqrt(np.concatenate([each.observed for each in fits]))
    lines = _fit_lines(spec.model, fits, *task, ("training RMSE", _list(rmse) + unit))
    if fit.covariance.damping is None:
        why = spec.damping.unknown
        needs = "weight_decay, damping or a calibration" if quantiles is None and not why else "a calibration"
        hint = "" if calibration else f": predict needs {needs}"
        lines.append(("damping λ", (f"unknown ({why})" if why else "not given") + hint))
    else:
        per_row = m // len(fits)
        lines += [
            *_damping_lines(fits, spec.damping.rule(fit.n_returned), per_row, "n" if per_row == 1 else "n·m"),
            ("degrees of freedom", f"{_list(freedom, '{:.1f}')} (n − p*)"),
            ("noise std s", _list(noise) + unit),
        ]
    return lines if calibration is None else lines + _calibration_lines(calibration, fit, known)


def _outputs(fits: Sequence[Fit], m: int) -> str:
    shape = f", of shape {fits[0].shape}" if len(fits[0].shape) > 1 and m == fits[0].n_returned else ""
    return f"{m:,} (m){shape}, {'each alone' if len(fits) > 1 else 'one JᵀJ for all'}"


def _classification_lines(spec: FitSpec, task: Classification, fits: Sequence[Fit]) -> list[Line]:
    fit, per_label = fits[0], task.rows_per_label(fits[0])
    losses = np.array([each.losses.sum() for each in fits]) / fit.n_rows
    about = [
        ("labels" if task.several else "classes", task.shown(fits)),
        ("training accuracy", _list(100 * np.array(task.accuracies(fits)), "{:.2f}%")),
        ("cross-entropy", _list(losses / (fit.n_outputs if task.several else 1))),
    ]
    unit, m = "n" if per_label == 1 else f"{per_label}·n", fit.n_returned
    return _fit_lines(spec.model, fits, *about) + _damping_lines(fits, spec.damping.rule(m), per_label, unit)


def _fit_lines(model: nn.Module, fits: Sequence[Fit], *task: Line) -> list[Line]:
    """Return lines about the network and the covariance, with those about the task between them."""
    fit = fits[0]
    lines = [
        ("network", f"{type(model).__name__}, {fit.n_parameters:,} trainable parameters (p)"),
        ("training rows", f"{fit.n_rows:,} (n)"),
        *task,
        ("gradients", _gradient_method(fit)),
        ("covariance", ", ".join(each.describe() for each in (fit.covariance, fit.sandwich) if each is not None)),
    ]
    if fit.probes is not None:
        off = "" if fit.probe_error is None else f": widths are off by {fit.probe_error.width:.2%}"
        lines.append(("probes", f"{fit.probes.count} random combinations of each row's outputs{off}"))
    if fit.error is not None:
        widths, largest = (max(getattr(e.error, name) for e in fits if e.error) for name in ("width", "largest"))
        how = f"and {largest:.2%} at most, measured" if fit.error.measured else "estimated"
        comma = " " if fit.error.measured else ", "
        lines.append(("error of widths", f"{widths:.2%} on average{comma}{how} on {fit.error.n_rows:,} rows"))
    elif fit.n_compared and fit.covariance.damping is not None:
        lines.append(("error of widths", "error_report() estimates it: that would have added to the time of the fit"))
    if fit.exact_cost:
        lines.append(("instead of exact", fit.exact_cost))
    return lines


def _gradient_method(fit: Fit) -> str:
    if fit.by_rows:
        return "whole rows, by torch.func" + (", in some batches by a plain loop" if fit.uncertified else "")
    covered, rest = len(fit.layers.batch_dims), len(fit.layers.rest)
    ways = [f"{covered} layer{'s'[: covered > 1]} by hooks"] if covered else []
    if fit.uncertified:
        ways.append(f"{len(fit.uncertified)} of these parameters in some batches by a plain loop over the rows")
    if rest:
        way = "torch.func" if fit.layers.vmap else "a plain loop over the rows"
        ways.append(f"{rest} parameter{'s'[: rest > 1]} by {way}")
    return ", ".join(ways)


def _damping_lines(fits: Sequence[Fit], rule: str, per_row: int, unit: str) -> list[Line]:
    p_star = np.array([fit.effective_parameters for fit in fits])
    share = _list(100 * p_star / (fits[0].n_rows * per_row), "{:.0f}")
    return [
        ("damping λ", f"{fits[0].covariance.damping:.4g} ({rule})"),
        ("effective p*", f"{_list(p_star, '{:.1f}')} ({share}% of {unit})"),
    ]


def _calibration_lines(calibration: Calibration, fit: Fit, known: str) -> list[Line]:
    """Return first what the intervals are like, then how they came about."""
    conformal = calibration.conformal
    n, outputs, joint = conformal.n_rows, conformal.outputs, calibration.is_joint
    lines = [("calibrated on", f"{calibration.n_rows:,} rows: levels up to {n / (n + 1):.5g}")]
    if joint or isinstance(conformal, PooledOutputs):
        what = conformal.promise if isinstance(conformal, PooledOutputs) else "all at once"
        lines.append(("  outputs", f"{what}: {n:,} rows for the quantile, the others for the scales"))
    lines += calibration.rule.lines
    if not np.isnan(calibration.widths).any():
        share = f"the model's own uncertainty makes up {_list(100 * calibration.own_share, '{:.0f} %')} of them"
        lines.append(("  95 % widths", f"{_range(calibration.widths)}; {share} on average"))
    if type(conformal) is EachOutput and n >= rows_needed(0.95):
        deviations = [math.sqrt(np.mean(np.square(output.standardised))) for output in outputs]
        quantiles = [output.quantile(0.95) / s if s else 0.0 for output, s in zip(outputs, deviations, strict=True)]
        shown = _list(np.array(quantiles), "{:.2f}")
        lines.append(("  95 % quantile", f"{shown} standard deviations (Gaussian 1.96)"))
    before, after = calibration.score_before, calibration.score_after
    if not math.isnan(after):
        scores = " → ".join(f"{score:.4g}" for score in (before, after) if not math.isnan(score))
        worse = f": {100 * (after / before - 1):.1f} % worse than the formula" if after > before > 0 else ""
        lines.append(("  interval score", f"{scores} (95 %, lower is better){worse}"))
    if not math.isnan(calibration.drift_p_value):
        lines.append(("  like training rows", f"p = {calibration.drift_p_value:.2g} (leverages, Kolmogorov–Smirnov)"))
    chosen, of_fit = _list(np.array([output.damping for output in outputs])), fit.covariance.damping
    used = f"chosen: {chosen}, also for variance, leverage and kind='mean'"
    b, gamma = (np.array([getattr(output, name) for output in outputs]) for name in ("b", "gamma"))
    lines += [
        ("  damping λ", used if of_fit is None else f"{of_fit:.4g} → {chosen}"),
        ("  scale", f"√({known} + b·q), b = {_list(b)}"),
    ]
    if not isinstance(calibration.noise, str):
        lines.append(("  noise", f"learnt: σ is proportional to v^γ, γ = {_list(gamma)}"))
    elif calibration.noise:
        lines.append(("  noise", f"the same everywhere: {calibration.noise}"))
    return lines


def _range(widths: np.ndarray) -> str:  # (m, 2)
    """Say between which numbers widths vary, for each output or, of many, for all."""
    shown = widths if len(widths) <= MAX_LISTED_OUTPUTS else np.array([[widths[:, 0].min(), widths[:, 1].max()]])
    if (shown[:, 1] <= shown[:, 0] * (1 + RELATIVE_ROUNDING)).all():
        return f"are {_list(shown[:, 1])} for all rows"
    return "vary from " + ", ".join(f"{low:.4g} to {high:.4g}" for low, high in shown)


def _list(values: np.ndarray, form: str = "{:.4g}") -> str:
    shown = values if len(values) <= MAX_LISTED_OUTPUTS else [values.min(), values.max()]
    return (", " if len(shown) == len(values) else " to ").join(map(form.format, shown))
