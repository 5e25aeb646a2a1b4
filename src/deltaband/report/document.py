"""The page: what a band's intervals were, on rows with known targets."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import spectra
from ..arrays import described
from ..intervals import PredictionIntervals
from ..markup import Markup, element, together
from ..numerals import level_name, number, percent
from . import charts, columns, tables
from .columns import Column
from .groups import Group, by_value, by_width
from .judged import Coverage, Judged, Judgement, judge

DRAWN = 2_000  # rows of a picture at most, less where there are several outputs
DETAILED = 12  # outputs with a section of their own
MENTIONED = 4  # groups of rows that are covered too rarely
TIPS = 6  # columns that are told of a row which is pointed at

SAID = {
    "as asked": ("good", "✓ as asked", "That is what was asked for, up to chance."),
    "too low": (
        "bad",
        "▼ too low",
        "Fewer rows are covered than asked for, and chance does not explain it: the intervals are too narrow for "
        "these rows.",
    ),
    "too high": (
        "wide",
        "▲ more than asked",
        "More rows are covered than asked for, and chance does not explain it: the intervals are wider than they need "
        "to be.",
    ),
}


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
    """One HTML page, with all that belongs to it inside, on how good the intervals are for the rows `x`.

    `y` are their targets, in the units that `predict` answers in. The rows should be ones that the network was neither
    trained nor calibrated on. `columns` are values of the rows by name, numbers, dates or text, by which the coverage
    is broken down; `names` names the features of an `x` (n, d), which are then taken as columns too, and `outputs` the
    outputs of the band. `settings` are lines to add to what was fitted, by name.
    """
    judgement = judge(band, x, y, level, outputs)
    given = _columns(columns, names, x, judgement.n_rows)
    detailed = _detailed(judgement)
    sections = [
        _header(title or "Prediction intervals", judgement),
        _notices(band, judgement),
        *([_overview(judgement, detailed)] if len(judgement.outputs) > 1 else []),
        *(_output(judged, given, band, judgement, detailed) for judged in detailed),
        *([] if _each_alone(band) else [_section("The fit", _grid(_spectrum(band, 0)), "fit")]),
        _section("Settings", tables.settings([*_described(band), *_texts(settings)]), "settings"),
    ]
    return _document(title or "Prediction intervals", together(sections))


def write(path: str | Path, band: PredictionIntervals, x: Any, y: Any, **options: Any) -> Path:
    """The page as a file; the options are those of `page`. Returns where it is."""
    path = Path(path)
    path.write_text(page(band, x, y, **options), encoding="utf-8")
    return path


# --- the parts, from top to bottom


def _header(title: str, judgement: Judgement) -> Markup:
    coverage = judgement.together or (judgement.outputs[0].coverage if len(judgement.outputs) == 1 else None)
    if coverage is not None:
        whole = " in all outputs at once" if judgement.together is not None else ""
        lead = (
            f"{percent(coverage.share)} of {coverage.n:,} rows lie in their {level_name(coverage.level)} % interval"
            f"{whole}. {SAID[coverage.verdict][2]}"
        )
    else:
        off = [judged.name for judged in judgement.outputs if judged.coverage.verdict == "too low"]
        level = level_name(judgement.outputs[0].coverage.level)
        lead = f"{len(judgement.outputs)} outputs, {judgement.n_rows:,} rows, {level} % intervals. " + (
            f"Covered less often than asked for: {', '.join(off[:5])}{' and others' if len(off) > 5 else ''}."
            if off
            else "None is covered less often than asked for, up to chance."
        )
    return element("header", element("h1", title), element("p", lead, class_="lead"))


def _notices(band: PredictionIntervals, judgement: Judgement) -> Markup:
    notes = [element("p", message, class_="notice") for message in band.warnings_]
    if band.warnings_ and band._calibration is not None:
        after = "The intervals of this page are calibrated: what is said above about the formula is not about them."
        notes.append(element("p", after, class_="remark"))
    infinite = sum(int(np.isinf(judged.width).sum()) for judged in judgement.outputs)
    if infinite:
        notes.append(element("p", f"{infinite:,} intervals are infinite, and are not drawn.", class_="notice"))
    return element("div", *notes, class_="notices") if notes else Markup("")


def _overview(judgement: Judgement, detailed: Sequence[Judged]) -> Markup:
    parts: list[Markup] = []
    if judgement.together is not None:
        parts.append(element("div", _coverage_card(judgement.together, "All outputs at once"), class_="cards"))
        parts.append(
            _grid(_figure(
                "Calibration of all outputs at once",
                charts.calibration_curve(judgement.together_curve, judgement.together),
                _curve_caption(judgement),
            ))
        )  # fmt: skip
        parts.append(_remark("The level is for all outputs of a row at once, so each alone is covered more often."))
    parts.append(tables.outputs(judgement.outputs, {judged.name: _anchor(judged, judgement) for judged in detailed}))
    if len(detailed) < len(judgement.outputs):
        parts.append(_remark(f"Below are the {len(detailed)} outputs whose coverage is farthest from the level."))
    return _section("Outputs", together(parts))


def _output(
    judged: Judged,
    given: Mapping[str, Column],
    band: PredictionIntervals,
    judgement: Judgement,
    detailed: Sequence[Judged],
) -> Markup:
    drawn = _drawn(judged, DRAWN // len(detailed))
    correlation = judged.correlation
    known = "" if np.isnan(correlation) else f"Correlation of width and error: {number(correlation, 2)}. "
    pictures = [
        _figure("Calibration", charts.calibration_curve(judged.curve, judged.coverage), _curve_caption(judgement)),
        _figure(
            "Intervals by width", charts.sorted_by_width(judged, drawn), together([_legend(), _thinned(judged, drawn)])
        ),
        _figure(
            "Width against error",
            charts.width_against_error(judged, drawn),
            together([known, "Dots above the dashed line, half the width, are misses of symmetric intervals."]),
        ),
    ]
    if _each_alone(band):
        pictures.append(_spectrum(band, judgement.outputs.index(judged)))
    groups = {"width": by_width(judged.width), **{name: by_value(column) for name, column in given.items()}}
    shown = f"The {tables.WIDEST} widest intervals" if len(judged.y) > tables.WIDEST else "Rows by width"
    parts = [
        _cards(judged),
        _worst(judged, groups),
        _grid(*pictures),
        _grid(*(_figure(f"Coverage by {name}", tables.coverages(judged, groups[name], name), "") for name in groups)),
        element("h3", shown),
        tables.widest(judged, given),
        _remark("Rows are counted from 0. A click on a head sorts."),
        _tips(judged, drawn, given),
    ]
    single = len(judgement.outputs) == 1
    return _section("" if single else judged.name, together(parts), _anchor(judged, judgement))


def _worst(judged: Judged, groups: Mapping[str, Sequence[Group]]) -> Markup:
    """The groups of rows that are covered less often than asked for."""
    if not judged.promised:
        return Markup("")
    found = [
        (coverage.share, f"{name} {group.name} ({percent(coverage.share)})")
        for name, of_name in groups.items()
        if len(of_name) > 1
        for group in of_name
        if (coverage := judged.of(group.rows, len(of_name))).verdict == "too low"
    ]
    if not found:
        return Markup("")
    named = [text for _, text in sorted(found)[:MENTIONED]]
    more = f" and {len(found) - MENTIONED} more groups" if len(found) > MENTIONED else ""
    text = f"Covered less often than asked for, and not by chance: {'; '.join(named)}{more}."
    return element("p", text, class_="notice")


def _cards(judged: Judged) -> Markup:
    units, width, n = tables.Units(judged), judged.width, len(judged.y)
    below = int((judged.y < judged.intervals.lower).sum())
    missed = int(judged.missed.sum())
    relative = judged.relative_width
    of_std = "all targets are equal" if relative is None else f"{number(relative, 3)} standard deviations of the target"
    return element(
        "div",
        _coverage_card(judged.coverage, "Coverage", judged.promised),
        _card("Mean width", units(float(width.mean())), of_std),
        _card("Interval score", units(judged.score), "mean width plus a fine for misses; lower is better"),
        _card("Rows", f"{n:,}", f"{missed:,} missed: {below:,} below, {missed - below:,} above"),
        class_="cards",
    )


def _coverage_card(coverage: Coverage, name: str, promised: bool = True) -> Markup:
    low, high = coverage.likely
    state, badge, _ = SAID[coverage.verdict] if promised else ("", "", "")
    detail = f"{level_name(coverage.level)} % asked for; the true share is likely {percent(low)} to {percent(high)}"
    return _card(name, percent(coverage.share), detail, state, badge)


def _card(name: str, value: str, detail: str, state: str = "", badge: str = "") -> Markup:
    return element(
        "div",
        element("p", name, *([element("span", badge, class_="badge")] if badge else []), class_="name"),
        element("p", value, class_="value"),
        element("p", detail, class_="detail"),
        class_=f"card {state}".strip(),
    )


def _curve_caption(judgement: Judgement) -> str:
    caption = "Shaded: where 95 % of such curves lie at each level if intervals keep to it. "
    if judgement.out_of_reach:
        levels = ", ".join(f"{level_name(level)} %" for level in judgement.out_of_reach)
        caption += f"Not served with so few calibration rows: {levels}."
    return caption


def _legend() -> Markup:
    return together(
        [element("span", "● ", class_="grey"), "covered, ", element("span", "● ", class_="missed"), "missed. "]
    )


def _thinned(judged: Judged, drawn: np.ndarray) -> str:
    if len(drawn) == len(judged.y):
        return ""
    shown, missed = int(judged.missed[drawn].sum()), int(judged.missed.sum())
    misses = f"all {missed:,} misses" if shown == missed else f"{shown:,} of {missed:,} misses"
    return f"{len(drawn):,} of {len(judged.y):,} rows are drawn, {misses} among them."


def _spectrum(band: PredictionIntervals, which: int) -> Markup:
    """The spectrum, or why there is none."""
    name, damping = "Spectrum", band.damping_
    if damping is None:
        return _figure(name, _remark("λ is not known, and without it there is no spectrum of Σ⁻¹ to show."), "")
    try:
        found = band.spectrum(which)
    except MemoryError as error:
        return _figure(name, _remark(f"Not shown: {error}"), "")
    drawn = spectra.picture(found, damping, tips=True)
    if drawn is None:
        return _figure(name, _remark("There are no directions to show."), "")
    exact = float(np.atleast_1d(band.error_bound_)[which]) == 0
    p_star = float(np.atleast_1d(band.effective_parameters_)[which])
    kept = len(found.singular_values)
    rank = f"Exact: all {kept:,} directions are kept." if exact else f"{kept:,} directions are kept (the rank)."
    caption = together(
        [
            element("span", "● ", class_="blue"), "singular values of J, ",
            element("span", "● ", class_="missed"), "eigenvalues of Σ⁻¹. ",
            f"{rank} λ = {number(damping)}, p* = {number(p_star)}; directions below √λ are mostly damped away.",
        ]
    )  # fmt: skip
    return _figure(name, drawn, caption)


def _tips(judged: Judged, drawn: np.ndarray, given: Mapping[str, Column]) -> Markup:
    """What is said of a row that is pointed at, for the script."""
    units = tables.Units(judged)
    mean, lower, upper = judged.intervals
    told = list(given.items())[:TIPS]
    rows = {
        int(row): [
            units(float(mean[row])),
            f"{units(float(lower[row]))} to {units(float(upper[row]))}",
            units(float(judged.y[row])),
            *(column.shown(column.values[row]) for _, column in told),
        ]
        for row in drawn
    }
    tips = {"names": ["prediction", "interval", "target", *(name for name, _ in told)], "rows": rows}
    text = json.dumps(tips, separators=(",", ":")).replace("<", "\\u003c")  # ASCII, and no end of the element in it
    return element("script", Markup(text), type="application/json", class_="tips")


# --- what they are made of


def _section(title: str, content: Markup, anchor: str | None = None) -> Markup:
    return element("section", *([element("h2", title)] if title else []), content, id=anchor)


def _grid(*figures: Markup) -> Markup:
    return element("div", *figures, class_="grid")


def _figure(title: str, content: Markup, caption: str) -> Markup:
    below = [element("p", caption, class_="caption")] if caption else []
    return element("figure", element("figcaption", title), content, *below)


def _remark(text: str) -> Markup:
    return element("p", text, class_="remark")


def _anchor(judged: Judged, judgement: Judgement) -> str:
    return f"output-{judgement.outputs.index(judged)}"


def _document(title: str, body: Markup) -> str:
    from .. import __version__

    style, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    # Nothing runs or styles but what is written here, and nothing is fetched, whatever text the page was given.
    policy = f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name_="generator", content=f"deltaband {__version__}"),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", Markup(style)),
    )
    footer = element("footer", f"deltaband {__version__}")
    tip = element("div", id="tip", role="status", hidden=True)
    content = element("body", element("main", body), footer, tip, element("script", Markup(script)))
    return f"<!DOCTYPE html>\n{element('html', head, content, lang='en')}\n"


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _drawn(judged: Judged, most: int) -> np.ndarray:
    """The rows that pictures show: misses first, up to half of them, the others evenly over the widths."""
    order = np.argsort(judged.width, kind="stable")
    order = order[np.isfinite(judged.width[order])]
    if len(order) <= most:
        return np.sort(order)
    missed = charts.evenly(order[judged.missed[order]], most // 2)
    return np.sort(np.concatenate([missed, charts.evenly(order[~judged.missed[order]], most - len(missed))]))


def _detailed(judgement: Judgement) -> list[Judged]:
    """In their order, those with the coverage that is farthest from the level if there are many."""
    farthest = sorted(judgement.outputs, key=lambda each: -abs(each.coverage.share - each.coverage.level))[:DETAILED]
    return [judged for judged in judgement.outputs if any(judged is each for each in farthest)]


def _each_alone(band: PredictionIntervals) -> bool:
    """Whether each output has a spectrum of its own."""
    return np.size(band.effective_parameters_) > 1 or len(band.outputs_) == 1


def _described(band: PredictionIntervals) -> list[tuple[str, str]]:
    return band._described()


def _texts(settings: Mapping[str, str] | None) -> list[tuple[str, str]]:
    if settings is None:
        return []
    if not hasattr(settings, "items"):
        raise TypeError(f"settings must be a mapping of names to texts, got {described(settings)}")
    return [(str(name), str(value)) for name, value in settings.items()]


def _columns(given: Mapping[str, Any] | None, names: Sequence[str] | None, x: Any, n: int) -> dict[str, Column]:
    read = columns.read(given, n)
    if names is None:
        return read
    features = np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)
    if isinstance(names, str) or features.ndim != 2 or len(names) != features.shape[1]:
        raise ValueError(
            f"names must be one for each feature of an x of shape (n, d), got {names!r} for {described(x)}"
        )
    return {**columns.read({name: features[:, k] for k, name in enumerate(names)}, n), **read}
