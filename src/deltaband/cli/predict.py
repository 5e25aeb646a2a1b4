"""Commands that use a band file: predict, evaluate, inspect, report."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import torch
import typer

from .. import metrics, storage
from ..results import Intervals, interval_arrays, level_name
from ..storage.container import atomic
from . import options
from .models import LoadedBand, load_band
from .output import Refusal, check_file, format_fields, format_table, print_result
from .tables import WRITERS, check_output, group_values, open_table, to_numbers

FITTED_WITH = ", which the band was fitted with"  # why a column is needed
PREDICTED = ", which the band predicts, and which is needed here"
METRICS: dict[str, Callable[[np.ndarray, Intervals], Any]] = {
    "coverage": metrics.coverage,
    "mean_width": lambda y, intervals: np.asarray(intervals.width).mean(axis=0),
    "interval_score": metrics.interval_score,
    "width_error_correlation": metrics.width_error_correlation,
}


def predict(
    band: options.BandFile,
    data: options.Data,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The rows of --data with more columns; any format.")],
    model: options.SavedModel = None,
    level: options.Level = None,
    features: options.SavedFeatures = None,
    target: options.SavedTargets = None,
    trust: options.Trust = False,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Add predictions and their bounds to a file.

    The new columns are prediction, and lower_95 and upper_95 for each level; with several targets their names follow:
    prediction_price, lower_95_price. Calibrated intervals have a column far, true for rows far from the training rows.
    Other columns are copied. CSV and Parquet files are read and written in batches; .npz files are held in memory.

    \b
    Examples:
      deltaband predict price.band --model network:make --data new.csv --out new_with_bands.csv
      deltaband predict price.band --model network:make --data new.parquet --level 0.5 --level 0.9 --out bands.parquet
    """
    levels = options.check_levels(level or [0.95])
    check_output(out, force, WRITERS)
    source = open_table(data)
    loaded = load_band(band, model, trust, features, target)
    inputs = source.select(loaded.features, FITTED_WITH)
    suffixes = [""] if len(loaded.targets) == 1 else [f"_{name}" for name in loaded.targets]
    bounds = [f"{side}_{level_name(each)}" for each in levels for side in ("lower", "upper")]
    added = [f"{name}{suffix}" for suffix in suffixes for name in ["prediction", *bounds]]
    added += ["far"] if loaded.band.calibration_ is not None else []
    if taken := next((name for name in added if name in source.names), None):
        raise Refusal(f"{data} has a column {taken!r} already: rename or drop it")
    known_targets = [name for name in loaded.targets if name in source.names]
    convert = data.suffix.lower() == ".csv" != out.suffix.lower()  # text in CSV, numbers elsewhere
    n = 0

    def rows_with_intervals() -> Iterator[pa.RecordBatch]:
        nonlocal n
        for n, rows in source.batches(label="predicting"):
            x = to_numbers(rows, inputs, data, n, dtype=loaded.dtype)
            if convert:
                y = to_numbers(rows, known_targets, data, n, allow_missing=True)
                for name, column in zip([*inputs, *known_targets], np.hstack([x, y]).T, strict=True):
                    rows = rows.set_column(rows.schema.names.index(name), name, pa.array(column.copy()))
            intervals = _predict(loaded, x, levels)
            mean, lower, upper = interval_arrays(intervals)
            sides = np.stack([lower, upper], axis=3).reshape(*mean.shape, -1)
            columns = list(np.concatenate([mean[:, :, None], sides], axis=2).reshape(len(x), -1).T)
            columns += [] if intervals.far is None else [intervals.far.numpy()]
            for name, column in zip(added, columns, strict=True):
                rows = rows.append_column(name, pa.array(column))
            yield rows
            n += len(rows)

    with atomic(out, overwrite=force) as temporary:
        WRITERS[out.suffix.lower()](temporary, rows_with_intervals())
    print_result({"out": out, "rows": n, "columns": added}, f"{n:,} rows with {', '.join(added)} in {out}", as_json)


def evaluate(
    band: options.BandFile,
    data: options.Data,
    model: options.SavedModel = None,
    level: options.Level = None,
    features: options.SavedFeatures = None,
    target: options.SavedTargets = None,
    trust: options.Trust = False,
    as_json: options.Json = False,
) -> None:
    """Measure how good the intervals are, on new rows.

    The rows have known targets, and the network was not trained on them. coverage is the share of targets within the
    interval; mean_width and interval_score (lower is better: misses are penalised) are in the target's units;
    width_error_correlation shows whether wide intervals are where errors are large.

    \b
    Examples:
      deltaband evaluate price.band --model network:make --data test.csv
      deltaband evaluate price.band --model network:make --data test.csv --level 0.5 --level 0.9 --json
    """
    levels = options.check_levels(level or [0.95])
    source = open_table(data)
    loaded = load_band(band, model, trust, features, target)
    columns = source.select(loaded.features, FITTED_WITH) + source.select(loaded.targets, PREDICTED)
    k = len(loaded.features)
    parts = []  # of the rows nothing else is kept
    for values in source.numbers(columns, loaded.dtype, "evaluating"):
        parts.append((values[:, k:], *interval_arrays(_predict(loaded, values[:, :k], levels))))
    y, mean, lower, upper = (np.concatenate(part) for part in zip(*parts, strict=True))
    intervals = Intervals(mean, lower, upper, levels)
    scores = {name: np.reshape(metric(y, intervals), (-1, len(levels))) for name, metric in METRICS.items()}
    scores["rmse"] = np.sqrt(np.square(y - intervals.mean).mean(axis=0))[:, None].repeat(len(levels), axis=1)
    results = [
        {"target": name, "level": each} | {key: float(score[o, j]) for key, score in scores.items()}
        for o, name in enumerate(loaded.targets)
        for j, each in enumerate(levels)
    ]
    text = f"{len(y):,} rows of {data}\n{format_table(results)}"
    print_result({"rows": len(y), "results": results}, text, as_json)


def inspect(band: options.BandFile, as_json: options.Json = False) -> None:
    """Show what is in a band file.

    How it was fitted, to what, and which network it needs. Nothing in it is run or imported.

    \b
    Example:
      deltaband inspect price.band
    """
    about = storage.inspect(check_file(band))
    notes = about["notes"]
    notes |= {key: json.loads(notes[key]) for key in ("features", "targets") if key in notes}
    others = {key: value for key, value in about.items() if key not in ("summary", "parameters", "fingerprint")}
    print_result(about, f"{about['summary']}\n\n{format_fields(others)}", as_json)


def report(
    band: options.BandFile,
    data: options.Data,
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="The page to write.")],
    by: options.By = None,
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="Title of the page.")] = None,
    model: options.SavedModel = None,
    level: Annotated[float, typer.Option(metavar="LEVEL", help="Between 0 and 1.")] = 0.95,
    features: options.SavedFeatures = None,
    target: options.SavedTargets = None,
    trust: options.Trust = False,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Write a page on how far to trust the intervals.

    It is one HTML file, made from rows that the network was not trained on. They are held in memory.

    \b
    Example:
      deltaband report price.band --model network:make --data test.csv --by region --out report.html
    """
    from ..report import page

    options.check_levels([level])
    check_output(out, force, [".html"], (band, data))
    source = open_table(data)
    groups = source.select(by or [])
    loaded = load_band(band, model, trust, features, target)
    needed = source.select(loaded.features, FITTED_WITH) + source.select(loaded.targets, PREDICTED)
    parts = [rows for _, rows in source.batches(list(dict.fromkeys([*needed, *groups])))]
    rows = pa.Table.from_batches(parts).combine_chunks().to_batches()[0]
    x = torch.from_numpy(to_numbers(rows, loaded.features, data, dtype=loaded.dtype)).to(loaded.dtype)
    y = to_numbers(rows, loaded.targets, data)
    columns = {name: group_values(rows.column(name)) for name in groups} or None
    settings = {"band": band.name, "data": data.name, "model": str(model), "level": f"{level:g}"}
    with redirect_stdout(sys.stderr):
        html = page(
            loaded.band, x, y, level=level, columns=columns, outputs=loaded.targets, title=title, settings=settings
        )
    with atomic(out, overwrite=force) as temporary:
        temporary.write_text(html, encoding="utf-8")
    print_result({"out": out, "rows": len(y), "by": groups}, f"{len(y):,} rows in {out}", as_json)


def _predict(loaded: LoadedBand, x: np.ndarray, levels: Sequence[float]) -> Intervals:
    with redirect_stdout(sys.stderr):
        return loaded.band.predict(torch.from_numpy(x).to(loaded.dtype), level=list(levels))
