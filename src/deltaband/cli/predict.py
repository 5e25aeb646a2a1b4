"""Commands that use a band file: predict, evaluate, inspect, report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import torch
import typer

from .. import metrics
from ..results import Intervals, parse_levels
from ..storage.atomic import atomic
from . import options
from .errors import Refusal, Usage, near
from .loading import Loaded, about, load
from .tables import Table, numbers, open_table, values
from .telling import bar, listing, quiet, table, tell
from .writing import check_output, check_table, written

BandFile = Annotated[Path, typer.Argument(metavar="X.band", help="What `deltaband fit` has written.")]
METRICS: dict[str, Callable[[np.ndarray, Intervals], Any]] = {
    "coverage": metrics.coverage,
    "mean_width": lambda y, intervals: np.asarray(intervals.width).mean(axis=0),
    "interval_score": metrics.interval_score,
    "width_error_correlation": metrics.width_error_correlation,
}


def predict(
    band: BandFile,
    data: options.Data,
    out: Annotated[Path, typer.Option(metavar="FILE", help=".csv, .parquet or .npz: the rows of --data and more.")],
    model: options.SameModel = None,
    level: options.Level = None,
    features: options.SameFeatures = None,
    target: options.SameTargets = None,
    trust: options.Trust = False,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Add predictions and their bounds to a file.

    The columns are prediction, and for each level lower_95 and upper_95; with several targets their names stand behind:
    prediction_price, lower_95_price. Other columns are carried along. Rows are read and written some at a time; only an
    .npz output is held in memory.

    \b
    Examples:
      deltaband predict price.band --model network:make --data new.csv --out new_with_bands.csv
      deltaband predict price.band --model network:make --data new.parquet --level 0.5 --level 0.9 --out bands.parquet
    """
    levels = _levels(level)
    check_table(out, force)
    source = open_table(data)
    loaded = load(band, model, trust, features, target)
    chosen = _columns(source, loaded.features, "features")
    added = _added(loaded.targets, levels)
    if taken := next((name for name in added if name in source.names), None):
        raise Refusal(f"{data} has a column {taken!r} already: rename or drop it")
    carried = [name for name in loaded.targets if name in source.names]  # which may not be known yet
    convert = data.suffix.lower() == ".csv" != out.suffix.lower()  # text in CSV, numbers elsewhere
    n = 0
    with bar("predicting", source.n_rows) as progress, written(out, force) as write:
        for rows in source.batches():
            x = numbers(rows, chosen, data, n, dtype=loaded.dtype)
            intervals = _predict(loaded, x, levels)
            if convert:
                xy = np.hstack([x, numbers(rows, carried, data, n, missing=True)])
                for name, column in zip([*chosen, *carried], xy.T, strict=True):
                    rows = rows.set_column(rows.schema.names.index(name), name, pa.array(column.copy()))
            for name, column in zip(added, _in_order(intervals), strict=True):
                rows = rows.append_column(name, pa.array(np.ascontiguousarray(column)))
            write(rows)
            n += len(rows)
            progress.update(len(rows))
        if n == 0:
            raise Refusal(f"{data} has no rows")
    tell({"out": out, "rows": n, "columns": added}, f"{n:,} rows with {', '.join(added)} in {out}", as_json)


def evaluate(
    band: BandFile,
    data: options.Data,
    model: options.SameModel = None,
    level: options.Level = None,
    features: options.SameFeatures = None,
    target: options.SameTargets = None,
    trust: options.Trust = False,
    as_json: options.Json = False,
) -> None:
    """Tell how good the intervals are, on new rows.

    The rows have known targets and the network was not trained on them. coverage is the share of targets within the
    interval; mean_width and interval_score (lower is better: it fines what misses) are in the target's units;
    width_error_correlation tells whether wide intervals are where errors are large.

    \b
    Examples:
      deltaband evaluate price.band --model network:make --data test.csv
      deltaband evaluate price.band --model network:make --data test.csv --level 0.5 --level 0.9 --json
    """
    levels = _levels(level)
    source = open_table(data)
    loaded = load(band, model, trust, features, target)
    y, intervals = _judged(source, loaded, levels)
    errors = np.sqrt(np.square(y - intervals.mean).mean(axis=0))
    shape = (len(loaded.targets), len(levels))
    scores = {name: np.reshape(metric(y, intervals), shape) for name, metric in METRICS.items()}
    results = [
        {
            "target": name,
            "level": each,
            **{key: float(of[o, j]) for key, of in scores.items()},
            "rmse": float(errors[o]),
        }
        for o, name in enumerate(loaded.targets)
        for j, each in enumerate(levels)
    ]
    text = f"{len(y):,} rows of {data}\n{table(list(results[0]), [list(each.values()) for each in results])}"
    tell({"rows": len(y), "results": results}, text, as_json)


def inspect(band: BandFile, as_json: options.Json = False) -> None:
    """Tell what is in a band file.

    How it was fitted, to what, and which network it needs. Nothing of it is run or imported.

    \b
    Example:
      deltaband inspect price.band
    """
    found = about(band)
    found["notes"] = {key: _unpacked(key, value) for key, value in found["notes"].items()}
    others = {key: value for key, value in found.items() if key not in ("summary", "parameters", "fingerprint")}
    tell(found, f"{found['summary']}\n\n{listing(others)}", as_json)


def report(
    band: BandFile,
    data: options.Data,
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="The page to write.")],
    by: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Look at coverage by this column too; may be repeated.")
    ] = None,
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="What the page is called.")] = None,
    model: options.SameModel = None,
    level: Annotated[float, typer.Option(metavar="LEVEL", help="Between 0 and 1.")] = 0.95,
    features: options.SameFeatures = None,
    target: options.SameTargets = None,
    trust: options.Trust = False,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Write a page on how far to trust the intervals.

    It is one HTML file, from rows that the network was not trained on. They are held in memory.

    \b
    Example:
      deltaband report price.band --model network:make --data test.csv --by region --out report.html
    """
    _levels([level])
    check_output(out, force, ".html", (band, data))
    source = open_table(data)
    columns = source.select(by or [])
    loaded = load(band, model, trust, features, target)
    chosen = _columns(source, loaded.features, "features")
    targets = _columns(source, loaded.targets, "targets")
    parts = list(source.batches(list(dict.fromkeys([*chosen, *targets, *columns]))))
    if not sum(map(len, parts)):
        raise Refusal(f"{data} has no rows")
    rows = pa.Table.from_batches(parts).combine_chunks().to_batches()[0]
    x = torch.from_numpy(numbers(rows, chosen, data, dtype=loaded.dtype)).to(loaded.dtype)
    y = numbers(rows, targets, data)
    groups = {name: values(rows.column(name)) for name in columns}
    settings = {"band": band.name, "data": data.name, "model": str(model), "level": f"{level:g}"}
    from ..report import page

    with quiet():
        html = page(
            loaded.band,
            x,
            y,
            level=level,
            columns=groups or None,
            outputs=loaded.targets,
            title=title,
            settings=settings,
        )
    with atomic(out, overwrite=force) as temporary:
        temporary.write_text(html, encoding="utf-8")
    tell({"out": out, "rows": len(y), "by": columns}, f"{len(y):,} rows in {out}", as_json)


def _levels(given: Sequence[float] | None) -> tuple[float, ...]:
    try:
        levels = parse_levels(given or [0.95])
    except ValueError:
        raise Usage(f"--level must be between 0 and 1 (0.95 for 95 %), got {_listed_levels(given or [])}") from None
    if len({_percent(each) for each in levels}) < len(levels):
        raise Usage(f"--level: some of {_listed_levels(levels)} are the same")
    return levels


def _listed_levels(levels: Sequence[float]) -> str:
    return ", ".join(f"{each:g}" for each in levels)


def _percent(level: float) -> str:
    return f"{100 * level:.10g}"


def _columns(source: Table, names: Sequence[str], what: str) -> list[str]:
    """The same names, all of which the file has."""
    for name in names:
        if name not in source.names:
            why = "the band was fitted with" if what == "features" else "is what the band predicts, and is needed here"
            hint = near(name, source.names)
            raise Refusal(f"{source.path} has no column {name!r}{hint}, which {why}; it has {', '.join(source.names)}")
    return list(names)


def _added(targets: Sequence[str], levels: Sequence[float]) -> list[str]:
    bounds = [f"{side}_{_percent(level)}" for level in levels for side in ("lower", "upper")]
    ends = [""] if len(targets) == 1 else [f"_{name}" for name in targets]
    return [f"{name}{end}" for end in ends for name in ["prediction", *bounds]]


def _predict(loaded: Loaded, x: np.ndarray, levels: Sequence[float]) -> Intervals:
    """Arrays: the mean (b, m), the bounds (b, m, levels)."""
    with quiet():
        found = loaded.band.predict(torch.from_numpy(x).to(loaded.dtype), level=list(levels))
    m = len(loaded.targets)
    lower, upper = (bound.numpy().reshape(len(x), m, -1) for bound in (found.lower, found.upper))
    return Intervals(found.mean.numpy().reshape(len(x), m), lower, upper, tuple(levels))


def _in_order(intervals: Intervals) -> Iterator[np.ndarray]:
    """Columns in the order of `_added`."""
    for o in range(intervals.mean.shape[1]):
        yield intervals.mean[:, o]
        for j in range(intervals.lower.shape[2]):
            yield intervals.lower[:, o, j]
            yield intervals.upper[:, o, j]


def _judged(source: Table, loaded: Loaded, levels: Sequence[float]) -> tuple[np.ndarray, Intervals]:
    """Targets (n, m) and intervals; of the rows nothing else is kept."""
    chosen = _columns(source, loaded.features, "features")
    targets = _columns(source, loaded.targets, "targets")
    ys, parts, n = [], [], 0
    with bar("evaluating", source.n_rows) as progress:
        for rows in source.batches([*chosen, *targets]):
            xy = numbers(rows, [*chosen, *targets], source.path, n, dtype=loaded.dtype)
            ys.append(xy[:, len(chosen) :])
            parts.append(_predict(loaded, xy[:, : len(chosen)], levels))
            n += len(rows)
            progress.update(len(rows))
    if n == 0:
        raise Refusal(f"{source.path} has no rows")
    mean, lower, upper = (np.concatenate(part) for part in zip(*parts, strict=True))
    return np.concatenate(ys), Intervals(mean, lower, upper, tuple(levels))


def _unpacked(key: str, value: str) -> Any:
    return json.loads(value) if key in ("features", "targets") else value
