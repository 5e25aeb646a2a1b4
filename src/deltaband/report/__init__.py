"""A report on the quality of prediction intervals, as one HTML file that needs nothing else: `page.html`, filled in."""

import base64
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import display, metrics
from ..classification import ClassificationIntervals
from ..data.batches import read
from ..data.extras import with_gaps
from ..data.inputs import Inputs
from ..display import DARK, LIGHT, decimals, evenly_spaced, fixed, number
from ..engines import Spectrum
from ..intervals import PredictionIntervals
from ..online import Monitor
from ..results import level_name
from ..validation import describe
from ..version import __version__
from . import charts, labels
from .columns import (
    Breakdown,
    Column,
    group_by_distance,
    group_by_value,
    group_by_width,
    named_items,
    read_column,
)
from .evaluation import OutputEvaluation, check_band, evaluate

MAX_DRAWN_ROWS, MAX_DRAWN_ROWS_IN_ALL = 2_000, 6_000  # in the pictures of one output, and of all outputs
MAX_DETAILED_OUTPUTS = 12  # outputs with their own section
MAX_TIP_COLUMNS = 6  # columns in the tooltip of a row
N_WIDEST_ROWS = 25  # in the table of the widest intervals


def page(
    band: PredictionIntervals | ClassificationIntervals,
    x: Any,
    y: Any = None,
    *,
    level: float = 0.95,
    columns: Mapping[str, Any] | None = None,
    names: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    title: str | None = None,
    settings: Mapping[str, str] | None = None,
    monitor: Monitor | None = None,
    **given: Any,
) -> str:
    """Return an HTML page, which loads nothing, that shows how good the intervals are for the rows `x`.

    Args:
        band: Fitted intervals; a classifier's page is about labels, their probabilities and sets.
        x: Inputs, preferably of rows that the network was neither trained nor calibrated on; or a loader of (x, y).
        y: The targets of inputs, in the units of `predict`; NaN where there is none, if the band has missing="ignore".
        level: The level of the intervals.
        columns: Values of the rows by name, numbers, dates or text, to break the coverage down by.
        names: Names of the features of an `x` of shape (n, d), which then are columns too.
        outputs: Names of the outputs.
        title: The title of the page.
        settings: Lines to add to the table of settings, by name.
        monitor: A `band.monitor()` that has taken in rows, these or others: the page has a section about it.
        given: `groups`, `unknown` and `weights` of these rows, as `predict` takes them.

    Returns:
        The page as text.

    Raises:
        ValueError: If the arguments do not match each other, or the band has no interval at this level.
    """
    template = _template("labels.html" if isinstance(band, ClassificationIntervals) else "page.html")
    if not isinstance(monitor, Monitor | None):
        raise TypeError(f"monitor must be a Monitor, as band.monitor() gives it, got {describe(monitor)}")
    masked = False
    if y is None:
        if not isinstance(band, ClassificationIntervals):
            check_band(band)
        inputs, y = read(x, unpack=band.spec.batch, may_miss=band.spec.task.may_miss).whole()
        x, y, masked = inputs.as_given(), with_gaps(inputs, y), "observed" in inputs.extras
    if isinstance(band, ClassificationIntervals):
        if monitor is not None or outputs is not None or given:
            name = next(iter(given), "outputs" if monitor is None else "monitor")
            raise TypeError(f"{name}= is for PredictionIntervals: the labels of a classifier have none")
        of_labels = labels.evaluate(band, x, y, level)
        table = _columns(columns, names, x, of_labels.coverage.n)
        about = {"found": of_labels, "shown": labels.section(band, of_labels, x, table)}
        about |= {"units": partial(number, digits=3)}
        return _rendered(template, band, title or "Sets of labels", settings, {**about, "one_spectrum_each": False})
    evaluation = evaluate(band, x, y, level, outputs, given, masked)
    passed = [f", {name}={each!r}" if isinstance(each, str) else f", {name}={name}" for name, each in given.items()]
    now = f"old.predict(x, {evaluation.outputs[0].coverage.level!r}{''.join(passed)})"
    shown = _columns(columns, names, x, evaluation.n_rows)
    by_deviation = sorted(evaluation.outputs, key=lambda each: -abs(each.coverage.share - each.coverage.level))
    detailed = [each for each in evaluation.outputs if each in by_deviation[:MAX_DETAILED_OUTPUTS]]
    n_drawn = min(MAX_DRAWN_ROWS, MAX_DRAWN_ROWS_IN_ALL // len(detailed))
    found = {
        "evaluation": evaluation,
        "columns": shown,
        "detailed": detailed,
        "n_infinite": sum(int(np.isinf(output.width).sum()) for output in evaluation.outputs),
        "sections": [
            _section(output, shown, n_drawn, now, "" if len(evaluation.outputs) == 1 else f"[:, {o}]")
            for o, output in enumerate(evaluation.outputs)
            if output in detailed
        ],
        "one_spectrum_each": len(band.fits_) == len(evaluation.outputs),
        "monitor": monitor,
    }
    return _rendered(template, band, title or "Prediction intervals", settings, found)


def _columns(columns: Mapping[str, Any] | None, names: Sequence[str] | None, x: Any, n: int) -> dict[str, Column]:
    """Return the columns of n rows to break coverage down by, named features among them."""
    given = named_items(columns, "columns")
    if names is not None:
        inputs = Inputs.of(x)
        features = inputs.tensors[0].cpu().numpy() if inputs.single else np.zeros(0)
        if isinstance(names, str) or features.ndim != 2 or len(names) != features.shape[1]:
            raise ValueError(f"names must be one for each feature, x of shape (n, d), got {names!r} and {inputs}")
        given = dict(zip(map(str, names), features.T, strict=True)) | given
    return {name: read_column(name, values, n) for name, values in given.items()}


def _rendered(template: Any, band: Any, title: str, settings: Mapping[str, str] | None, found: dict[str, Any]) -> str:
    added = named_items(settings, "settings")
    text: str = template.render(
        title=str(title),
        band=band,
        spectrum=partial(_spectrum, band),
        settings=[*band.summary_lines(), *((name, str(text)) for name, text in added.items())],
        **{"monitor": None, **found},
    )
    return text.encode("utf-8", "replace").decode("utf-8")  # no file can hold lone surrogates


def write(
    path: str | Path, band: PredictionIntervals | ClassificationIntervals, x: Any, y: Any = None, **options: Any
) -> Path:
    """Write the page to a file, which is replaced if it exists.

    Args:
        path: The file.
        band, x, y, options: As in `page`.

    Returns:
        The path of the file.
    """
    path = Path(path)
    path.write_text(page(band, x, y, **options), encoding="utf-8")
    return path


@cache
def _template(name: str) -> Any:  # jinja2.Template
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise ImportError("a report needs jinja2: pip install 'deltaband[report]'") from error

    folder = Path(__file__).parent
    light, dark = (" ".join(f"--{name}: {value};" for name, value in mode.items()) for mode in (LIGHT, DARK))
    variables = f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    style = variables + (folder / "page.css").read_text(encoding="utf-8")
    script = (folder / "page.js").read_text(encoding="utf-8")
    environment = Environment(loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    environment.filters |= {"percent": display.percent, "number": number, "pixel": display.pixel}
    environment.filters |= {"level": level_name, "count": "{:,}".format}
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.globals |= {
        "charts": charts,
        "metrics": metrics,
        "Scale": display.Scale,
        "spectrum_picture": partial(display.spectrum_picture, tips=True),
        "version": __version__,
        "style": display.Markup(style),
        "script": display.Markup(script),
        # Only this style and this script take effect and nothing is fetched, whatever text the page contains.
        "policy": f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'",
    }
    return environment.get_template(name)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _section(
    output: OutputEvaluation, columns: Mapping[str, Column], n_drawn: int, now: str, of_output: str
) -> dict[str, Any]:
    """Return what the page says about an output; `now` is the call for its intervals, `of_output` picks its part."""
    columns = {name: each.of(output.rows) for name, each in columns.items()}
    by_width = group_by_width(output.width)
    breakdowns = [Breakdown("width", Column(output.width), by_width, f"{now}.width{of_output}", of_band=True)]
    if output.intervals.far.any():
        far = Column(output.intervals.far.astype(np.float64))
        by_distance = group_by_distance(output.intervals.far)
        breakdowns.append(Breakdown("far from the training rows", far, by_distance, f"{now}.far", of_band=True))
    breakdowns += [Breakdown(name, each, group_by_value(each), f"data[{name!r}]") for name, each in columns.items()]
    undercovered = sorted(
        (output.coverage_of(group.rows, 1).share, f"{each.name} {group.name}", i)
        for i, each in enumerate(breakdowns)
        if output.has_own_level and len(each.groups) > 1
        for group in each.groups
        if output.is_undercovered(group.rows, len(each.groups))
    )
    units = partial(fixed, decimals=decimals(output.width))
    drawn = drawn_rows(output, n_drawn)
    in_tips = dict(itertools.islice(columns.items(), MAX_TIP_COLUMNS))
    tips = {}
    for row in drawn.tolist():
        mean, lower, upper, target = (units(part[row]) for part in (*output.intervals, output.y))
        tips[int(output.rows[row])] = [
            mean,
            f"{lower} to {upper}",
            target,
            *(each.format(each.values[row]) for each in in_tips.values()),
        ]
    return {
        "output": output,
        "columns": columns,
        "drawn": drawn,
        "units": units,
        "undercovered": undercovered,
        "mending": breakdowns[undercovered[0][2]].call if undercovered else "",
        "breakdowns": breakdowns,
        "widest": np.argsort(-output.width, kind="stable")[:N_WIDEST_ROWS],
        "tips": {"names": ["prediction", "interval", "target", *in_tips], "rows": tips},  # for the script
    }


def drawn_rows(output: OutputEvaluation, count: int) -> np.ndarray:
    """Return the rows that pictures show: up to half of them misses, the others evenly spaced over the widths."""
    order = np.argsort(output.width, kind="stable")
    order = order[np.isfinite(output.width[order])]
    if len(order) <= count:
        return np.sort(order)
    missed = evenly_spaced(order[output.missed[order]], count // 2)
    return np.sort(np.concatenate([missed, evenly_spaced(order[~output.missed[order]], count - len(missed))]))


def _spectrum(band: PredictionIntervals | ClassificationIntervals, index: int) -> Spectrum | str:
    """Return the spectrum of one fit, or why there is none."""
    if band.damping_ is None:
        return "λ is not known, and the spectrum of Σ⁻¹ depends on it."
    try:
        return band.spectrum(index)
    except MemoryError as error:
        return f"Not shown: {error}"
