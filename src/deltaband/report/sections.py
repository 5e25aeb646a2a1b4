"""The sections of a report, from top to bottom."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np

from ..display import spectra
from ..display.markup import Markup, element, together
from ..display.numerals import level_name, number, percent
from ..intervals import PredictionIntervals
from . import charts, tables
from .columns import Column
from .groups import Group, by_value, by_width
from .judged import Coverage, Judged, Judgement

DRAWN, DRAWN_IN_ALL = 2_000, 6_000  # rows of a picture at most, and of the pictures of all outputs
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


def header(title: str, judgement: Judgement) -> Markup:
    coverage = judgement.together or (judgement.outputs[0].coverage if len(judgement.outputs) == 1 else None)
    if coverage is not None:
        whole = " in all outputs at once" if judgement.together is not None else ""
        lead = (
            f"{percent(coverage.share)} of {coverage.n:,} rows lie in their {level_name(coverage.level)} % interval"
            f"{whole}. {SAID[coverage.verdict][2]}{_few_calibration_rows(coverage)}"
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


def _few_calibration_rows(coverage: Coverage) -> str:
    """The guarantee is on average over calibration sets: what there is to do where one set was an unlucky draw."""
    if coverage.verdict == "as asked" or not coverage.calibration_explains:
        return ""
    return f" A calibration on {coverage.calibration_rows:,} rows may be off by as much: more rows would steady it."


def notices(band: PredictionIntervals, judgement: Judgement) -> Markup:
    notes = [element("p", message, class_="notice") for message in band.warnings_]
    if band.warnings_ and band.calibration_ is not None:
        after = "The intervals of this page are calibrated: what is said above about the formula is not about them."
        notes.append(element("p", after, class_="remark"))
    if judgement.trained_on:
        text = f"{percent(judgement.trained_on)} of the rows were training rows: the network does better on those."
        notes.append(element("p", text, class_="notice"))
    infinite = sum(int(np.isinf(judged.width).sum()) for judged in judgement.outputs)
    if infinite:
        notes.append(element("p", f"{infinite:,} intervals are infinite, and are not drawn.", class_="notice"))
    return element("div", *notes, class_="notices") if notes else Markup("")


def overview(judgement: Judgement, shown: Sequence[Judged]) -> Markup:
    """All outputs, of which some have a section of their own; nothing where there is one output."""
    if len(judgement.outputs) == 1:
        return Markup("")
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
    anchors = [_anchor(judged, judgement) if judged in shown else None for judged in judgement.outputs]
    parts.append(tables.outputs(judgement.outputs, anchors))
    if len(shown) < len(judgement.outputs):
        parts.append(_remark(f"Below are the {len(shown)} outputs whose coverage is farthest from the level."))
    return _section("Outputs", together(parts))


def output(
    band: PredictionIntervals, judgement: Judgement, judged: Judged, given: Mapping[str, Column], n_shown: int
) -> Markup:
    """One of so many outputs that are shown in detail."""
    drawn = _drawn(judged, min(DRAWN, DRAWN_IN_ALL // n_shown))
    correlation = judged.correlation
    known = "" if np.isnan(correlation) else f"Correlation of width and error: {number(correlation, 2)}. "
    by_rank, by_error = charts.sorted_by_width(judged, drawn), charts.width_against_error(judged, drawn)
    half = "Dots above the dashed line, half the width, are misses of symmetric intervals. "
    pictures = [
        _figure("Calibration", charts.calibration_curve(judged.curve, judged.coverage), _curve_caption(judgement)),
        _figure("Intervals by width", by_rank.picture, _legend(), _thinned(judged, drawn), _beyond(by_rank.cut)),
        _figure("Width against error", by_error.picture, known, half, _beyond(by_error.cut)),
    ]
    if _each_alone(band):
        pictures.append(_spectrum(band, judgement.outputs.index(judged)))
    groups = [("width", by_width(judged.width)), *((name, by_value(column)) for name, column in given.items())]
    shown = f"The {tables.WIDEST} widest intervals" if len(judged.y) > tables.WIDEST else "Rows by width"
    parts = [
        _cards(judged),
        _worst(judged, groups),
        _grid(
            *pictures,
            *(_figure(f"Coverage by {name}", tables.coverages(judged, of_name, name)) for name, of_name in groups),
        ),
        element("h3", shown),
        tables.widest(judged, given),
        _remark("Rows are counted from 0. A click on a head sorts."),
        _tips(judged, drawn, given),
    ]
    single = len(judgement.outputs) == 1
    return _section("" if single else judged.name, together(parts), _anchor(judged, judgement))


def _worst(judged: Judged, groups: Sequence[tuple[str, Sequence[Group]]]) -> Markup:
    """The groups of rows that are covered less often than asked for."""
    if not judged.promised:
        return Markup("")
    found = sorted(
        (judged.of(group.rows, 1).share, f"{name} {group.name}")
        for name, of_name in groups
        if len(of_name) > 1
        for group in of_name
        if judged.stands_out(group.rows, len(of_name))
    )
    if not found:
        return Markup("")
    named = [f"{name} ({percent(share)})" for share, name in found[:MENTIONED]]
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


def _beyond(cut: bool) -> str:
    return "Dots at the edge lie beyond it." if cut else ""


def _thinned(judged: Judged, drawn: np.ndarray) -> str:
    if len(drawn) == len(judged.y):
        return ""
    shown, missed = int(judged.missed[drawn].sum()), int(judged.missed.sum())
    misses = f"all {missed:,} misses" if shown == missed else f"{shown:,} of {missed:,} misses"
    return f"{len(drawn):,} of {len(judged.y):,} rows are drawn, {misses} among them. "


def _spectrum(band: PredictionIntervals, which: int) -> Markup:
    """The spectrum, or why there is none."""
    name, damping = "Spectrum", band.damping_
    if damping is None:
        return _figure(name, _remark("λ is not known, and without it there is no spectrum of Σ⁻¹ to show."))
    try:
        found = band.spectrum(which)
    except MemoryError as error:
        return _figure(name, _remark(f"Not shown: {error}"))
    drawn = spectra.picture(found, damping, tips=True)
    if drawn is None:
        return _figure(name, _remark("There are no directions to show."))
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


def fit(band: PredictionIntervals) -> Markup:
    """The spectrum that all outputs share."""
    return Markup("") if _each_alone(band) else _section("The fit", _grid(_spectrum(band, 0)), "fit")


def settings(band: PredictionIntervals, others: Sequence[tuple[str, str]]) -> Markup:
    return _section("Settings", tables.settings([*band.summary_lines(), *others]), "settings")


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


def _section(title: str, content: Markup, anchor: str | None = None) -> Markup:
    return element("section", *([element("h2", title)] if title else []), content, id=anchor)


def _grid(*figures: Markup) -> Markup:
    return element("div", *figures, class_="grid")


def _figure(title: str, content: Markup, *caption: str) -> Markup:
    below = [element("p", *caption, class_="caption")] if any(caption) else []
    return element("figure", element("figcaption", title), content, *below)


def _remark(text: str) -> Markup:
    return element("p", text, class_="remark")


def _anchor(judged: Judged, judgement: Judgement) -> str:
    return f"output-{judgement.outputs.index(judged)}"


def _drawn(judged: Judged, most: int) -> np.ndarray:
    """The rows that pictures show: misses first, up to half of them, the others evenly over the widths."""
    order = np.argsort(judged.width, kind="stable")
    order = order[np.isfinite(judged.width[order])]
    if len(order) <= most:
        return np.sort(order)
    missed = charts.evenly(order[judged.missed[order]], most // 2)
    return np.sort(np.concatenate([missed, charts.evenly(order[~judged.missed[order]], most - len(missed))]))


def in_detail(judgement: Judgement) -> list[Judged]:
    """In their order, those with the coverage that is farthest from the level if there are many."""
    farthest = sorted(judgement.outputs, key=lambda each: -abs(each.coverage.share - each.coverage.level))[:DETAILED]
    return [judged for judged in judgement.outputs if any(judged is each for each in farthest)]


def _each_alone(band: PredictionIntervals) -> bool:
    """Whether each output has a spectrum of its own."""
    return np.size(band.effective_parameters_) > 1 or len(band.outputs_) == 1
