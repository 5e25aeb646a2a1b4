"""The page of the report: the contents of its sections, which the template `page.html` turns into HTML."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..display.palette import style_sheet
from ..display.svg import Markup, evenly_spaced, spectrum_picture
from ..display.text import decimals, fixed, number, percent
from ..intervals import PredictionIntervals
from ..results import level_name
from ..validation import describe
from ..version import __version__
from . import charts
from .evaluation import Evaluation, OutputEvaluation, evaluate
from .groups import Column, Group, group_by_value, group_by_width, read_columns

if TYPE_CHECKING:  # jinja2 is an extra, loaded when a page is rendered
    from jinja2 import Template

MAX_DRAWN_ROWS, MAX_DRAWN_ROWS_IN_ALL = 2_000, 6_000  # in the pictures of one output, and of all outputs
MAX_DETAILED_OUTPUTS = 12  # outputs with their own section
MAX_NAMED_GROUPS = 4  # groups with low coverage that are named above the pictures
MAX_TIP_COLUMNS = 6  # columns in the tooltip of a row
N_WIDEST_ROWS = 25  # in the table of the widest intervals


def page(
    band: PredictionIntervals,
    x: Any,
    y: Any,
    *,
    level: float = 0.95,
    columns: Mapping[str, Any] | None = None,
    names: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    title: str | None = None,
    settings: Mapping[str, str] | None = None,
) -> str:
    """Return an HTML page that shows how good the intervals are for the rows `x`.

    The page contains everything that it needs and loads nothing.

    Args:
        band: Fitted intervals.
        x: Inputs, preferably of rows that the network was neither trained nor calibrated on.
        y: Their targets, in the units of `predict`.
        level: The level of the intervals.
        columns: Values of the rows by name, numbers, dates or text, to break the coverage down by.
        names: Names of the features of an `x` of shape (n, d), which then are columns too.
        outputs: Names of the outputs.
        title: The title of the page.
        settings: Lines to add to the table of settings, by name.

    Returns:
        The page as text.

    Raises:
        ImportError: If jinja2 is not installed.
        NotFittedError: If `band` is not fitted.
        TypeError: If an argument is of the wrong type.
        ValueError: If the arguments do not match each other, or the band has no interval at this level.
    """
    template = _template()
    evaluation = evaluate(band, x, y, level, outputs)
    given = _columns(columns, names, x, evaluation.n_rows)
    detailed, joint = detailed_outputs(evaluation), evaluation.joint_coverage
    one_spectrum_each = len(band.fits_) == len(band.outputs_)
    text = template.render(
        title=str(title or "Prediction intervals"),
        evaluation=evaluation,
        detailed=detailed,
        joint_picture=charts.calibration_curve(evaluation.joint_curve, joint) if joint is not None else None,
        warnings=band.warnings_,
        calibrated=band.calibration_ is not None,
        n_infinite=sum(int(np.isinf(output.width).sum()) for output in evaluation.outputs),
        sections=[_section(band, evaluation, output, given, len(detailed), one_spectrum_each) for output in detailed],
        common_spectrum=None if one_spectrum_each else _spectrum(band, 0),
        settings=[*band.summary_lines(), *_settings(settings)],
    )
    return text.encode("utf-8", "replace").decode("utf-8")  # no file can hold lone surrogates


def write(path: str | Path, band: PredictionIntervals, x: Any, y: Any, **options: Any) -> Path:
    """Write the page to a file.

    Args:
        path: The file; an existing one is replaced.
        band: Fitted intervals.
        x: Inputs.
        y: Their targets.
        **options: The other arguments of `page`.

    Returns:
        The path of the file.

    Raises:
        OSError: If the file cannot be written. Other errors are those of `page`.
    """
    path = Path(path)
    path.write_text(page(band, x, y, **options), encoding="utf-8")
    return path


@cache
def _template() -> Template:
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise ImportError("a report needs jinja2: pip install 'deltaband[report]'") from error

    folder = Path(__file__).parent
    style = style_sheet() + (folder / "page.css").read_text(encoding="utf-8")
    script = (folder / "page.js").read_text(encoding="utf-8")
    environment = Environment(loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    environment.filters |= {"percent": percent, "number": number, "level": level_name, "count": "{:,}".format}
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.globals |= {
        "version": __version__,
        "style": Markup(style),
        "script": Markup(script),
        # Only this style and this script take effect and nothing is fetched, whatever text the page contains.
        "policy": f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'",
    }
    return environment.get_template("page.html")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _settings(settings: Mapping[str, str] | None) -> list[tuple[str, str]]:
    if settings is None:
        return []
    if not hasattr(settings, "items"):
        raise TypeError(f"settings must be a mapping of names to texts, got {describe(settings)}")
    return [(str(name), str(value)) for name, value in settings.items()]


def _columns(given: Mapping[str, Any] | None, names: Sequence[str] | None, x: Any, n: int) -> dict[str, Column]:
    columns = read_columns(given, n)
    if names is None:
        return columns
    features = np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)
    if isinstance(names, str) or features.ndim != 2 or len(names) != features.shape[1]:
        raise ValueError(f"names must be one for each feature of an x of shape (n, d), got {names!r} for {describe(x)}")
    return {**read_columns({name: features[:, k] for k, name in enumerate(names)}, n), **columns}


def detailed_outputs(evaluation: Evaluation) -> list[OutputEvaluation]:
    """Return the outputs that have their own section: those with the coverage farthest from the level, in order."""
    by_deviation = sorted(evaluation.outputs, key=lambda each: -abs(each.coverage.share - each.coverage.level))
    return [each for each in evaluation.outputs if each in by_deviation[:MAX_DETAILED_OUTPUTS]]


def _section(
    band: PredictionIntervals,
    evaluation: Evaluation,
    output: OutputEvaluation,
    columns: Mapping[str, Column],
    n_detailed: int,
    has_spectrum: bool,
) -> dict[str, Any]:
    """Return the contents of the section of one output."""
    index = evaluation.outputs.index(output)
    drawn = drawn_rows(output, min(MAX_DRAWN_ROWS, MAX_DRAWN_ROWS_IN_ALL // n_detailed))
    units = partial(fixed, decimals=decimals(output.width))
    groups = [("width", group_by_width(output.width))]
    groups += [(name, group_by_value(column)) for name, column in columns.items()]
    return {
        "output": output,
        "index": index,
        "units": units,
        "n_below": int((output.y < output.intervals.lower).sum()),
        "n_missed": int(output.missed.sum()),
        "undercovered": _undercovered_groups(output, groups),
        "calibration_curve": charts.calibration_curve(output.curve, output.coverage),
        "by_width": charts.sorted_by_width(output, drawn),
        "by_error": charts.width_against_error(output, drawn),
        "thinning": thinning_remark(output, drawn),
        "spectrum": _spectrum(band, index) if has_spectrum else None,
        "groups": [(name, _group_rows(output, of_column)) for name, of_column in groups],
        "columns": columns,
        "widest": np.argsort(-output.width, kind="stable")[:N_WIDEST_ROWS],
        "tips": _tips(output, drawn, columns, units),
    }


def drawn_rows(output: OutputEvaluation, count: int) -> np.ndarray:
    """Return the rows that pictures show: up to half of them misses, the others evenly spaced over the widths."""
    order = np.argsort(output.width, kind="stable")
    order = order[np.isfinite(output.width[order])]
    if len(order) <= count:
        return np.sort(order)
    missed = evenly_spaced(order[output.missed[order]], count // 2)
    return np.sort(np.concatenate([missed, evenly_spaced(order[~output.missed[order]], count - len(missed))]))


def thinning_remark(output: OutputEvaluation, drawn: np.ndarray) -> str:
    """State how many of the rows are drawn; empty where all are."""
    if len(drawn) == len(output.y):
        return ""
    shown, missed = int(output.missed[drawn].sum()), int(output.missed.sum())
    misses = f"all {missed:,} misses" if shown == missed else f"{shown:,} of {missed:,} misses"
    return f"{len(drawn):,} of {len(output.y):,} rows are drawn, {misses} among them. "


def _undercovered_groups(output: OutputEvaluation, groups: Sequence[tuple[str, Sequence[Group]]]) -> str:
    """Name the groups of rows that are covered less often than asked for; empty where there are none."""
    found = sorted(
        (output.coverage_of(group.rows, 1).share, f"{name} {group.name}")
        for name, of_column in groups
        if output.has_own_level and len(of_column) > 1
        for group in of_column
        if output.is_undercovered(group.rows, len(of_column))
    )
    named = "; ".join(f"{name} ({percent(share)})" for share, name in found[:MAX_NAMED_GROUPS])
    n_more = len(found) - MAX_NAMED_GROUPS
    return named + (f" and {n_more} more groups" if n_more > 0 else "")


def _group_rows(output: OutputEvaluation, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the rows of a table of coverages, one for each group."""
    coverages = [output.coverage_of(group.rows, len(groups)) for group in groups]
    level = output.coverage.level
    low = max(0.0, min(level - 2 * (1 - level), *(each.confidence_interval.low for each in coverages)))
    rows = []
    for group, coverage in zip(groups, coverages, strict=True):
        off = coverage.verdict == "too low" and output.has_own_level
        whisker = charts.coverage_whisker(coverage, low, off)
        mean_width = float(output.width[group.rows].mean())
        row = {"name": group.name, "coverage": coverage, "off": off, "whisker": whisker, "mean_width": mean_width}
        rows.append(row)
    return rows


def _tips(
    output: OutputEvaluation, drawn: np.ndarray, columns: Mapping[str, Column], units: Callable[[float], str]
) -> dict[str, Any]:
    """Return the tooltip of each row that is drawn, for the script."""
    mean, lower, upper = output.intervals
    shown = dict(list(columns.items())[:MAX_TIP_COLUMNS])
    rows = {
        int(row): [
            units(mean[row]),
            f"{units(lower[row])} to {units(upper[row])}",
            units(output.y[row]),
            *(column.format(column.values[row]) for column in shown.values()),
        ]
        for row in drawn
    }
    return {"names": ["prediction", "interval", "target", *shown], "rows": rows}


def _spectrum(band: PredictionIntervals, index: int) -> tuple[Markup | None, str]:
    """Return the picture of the spectrum and its caption, or None and why there is no picture."""
    damping = band.damping_
    if damping is None:
        return None, "λ is not known, and the spectrum of Σ⁻¹ depends on it."
    try:
        spectrum = band.spectrum(index)
    except MemoryError as error:
        return None, f"Not shown: {error}"
    picture = spectrum_picture(*spectrum, damping, tips=True)
    if picture is None:
        return None, "There are no directions to show."
    exact = float(np.atleast_1d(band.error_bound_)[index]) == 0
    p_star = float(np.atleast_1d(band.effective_parameters_)[index])
    kept = len(spectrum.singular_values)
    rank = f"Exact: all {kept:,} directions are kept." if exact else f"{kept:,} directions are kept (the rank)."
    damped = "directions below √λ are mostly damped away"
    return picture, f"{rank} λ = {number(damping)}, p* = {number(p_star)}; {damped}."
