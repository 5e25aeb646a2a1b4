"""The page: what a band's intervals were, on rows with known targets."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..display.markup import Markup, element, together
from ..intervals import PredictionIntervals
from ..validation import describe
from . import sections
from .columns import Column
from .columns import read as read_columns
from .judged import judge


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
    title = title or "Prediction intervals"
    shown = sections.in_detail(judgement)
    body = [
        sections.header(title, judgement),
        sections.notices(band, judgement),
        sections.overview(judgement, shown),
        *(sections.output(band, judgement, judged, given, len(shown)) for judged in shown),
        sections.fit(band),
        sections.settings(band, _texts(settings)),
    ]
    return _document(title, together(body))


def write(path: str | Path, band: PredictionIntervals, x: Any, y: Any, **options: Any) -> Path:
    """The page as a file; the options are those of `page`. Returns where it is."""
    path = Path(path)
    path.write_text(page(band, x, y, **options), encoding="utf-8")
    return path


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


def _texts(settings: Mapping[str, str] | None) -> list[tuple[str, str]]:
    if settings is None:
        return []
    if not hasattr(settings, "items"):
        raise TypeError(f"settings must be a mapping of names to texts, got {describe(settings)}")
    return [(str(name), str(value)) for name, value in settings.items()]


def _columns(given: Mapping[str, Any] | None, names: Sequence[str] | None, x: Any, n: int) -> dict[str, Column]:
    read = read_columns(given, n)
    if names is None:
        return read
    features = np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)
    if isinstance(names, str) or features.ndim != 2 or len(names) != features.shape[1]:
        raise ValueError(f"names must be one for each feature of an x of shape (n, d), got {names!r} for {describe(x)}")
    return {**read_columns({name: features[:, k] for k, name in enumerate(names)}, n), **read}
