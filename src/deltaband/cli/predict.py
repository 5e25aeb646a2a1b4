"""Commands that use a band file: predict, evaluate, inspect, report."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import torch
import typer

from .. import metrics, storage
from ..results import Intervals, check_kind_and_side, interval_arrays, level_name
from ..storage.container import atomic
from . import classify, options
from .groups import column
from .groups import given as given_groups
from .models import LoadedBand, load_band
from .output import Refusal, check_file, format_fields, format_table, print_result
from .tables import WRITERS, check_output, group_values, open_table, suffix, to_numbers

FITTED_WITH = ", which the band was fitted with"  # why a column is needed
SLAB_ROWS_AT_MOST = 100_000  # of which features are kept in memory
PREDICTED = ", which the band predicts, and which is needed here"


def predict(
    band: options.BandFile,
    data: options.Data,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The rows of --data with more columns; any format.")],
    model: options.SavedModel = None,
    level: options.Level = None,
    kind: options.Kind = "observation",
    side: options.SideText = "both",
    sample_weight: options.SavedSampleWeight = None,
    groups: options.SavedGroups = None,
    unknown: options.Unknown = "error",
    features: options.SavedFeatures = None,
    target: options.SavedTargets = None,
    trust: options.Trust = False,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Add predictions and their bounds to a file.

    The new columns are prediction, and lower_95 and upper_95 for each level, or one of them with --side; with several
    targets their names follow: prediction_price, lower_95_price. Calibrated intervals have a column far, true for rows
    far from the training rows. Other columns are copied. Give rows as they were for fit, unscaled if
    it scaled them. CSV and Parquet files are read and written in batches; .npz files are held in memory.

    \b
    Examples:
      deltaband predict price.band --model network:make --data new.csv --out new_with_bands.csv
      deltaband predict price.band --model network:make --data new.parquet --level 0.5 --level 0.9 --out bands.parquet
      deltaband predict price.band --model network:make --data new.csv.gz --side upper --level 0.99 --out limits.csv
    """
    levels = options.check_levels(level or [0.95])
    options.checked(check_kind_and_side, kind, side)
    check_output(out, force, WRITERS)
    source = open_table(data)
    loaded = load_band(band, model, trust, features, target)
    others = {"--kind": kind != "observation", "--side": side != "both", "--unknown": unknown != "error"}
    of_labels = classify.is_for_labels(loaded, others | {"--sample-weight": sample_weight, "--groups": groups})
    inputs = source.select(loaded.features, FITTED_WITH)
    weights = source.select([sample_weight] if sample_weight else [])
    by_group = None if kind == "mean" or of_labels else column(loaded, groups, source, unknown)
    endings = [""] if len(loaded.targets) == 1 else [f"_{name}" for name in loaded.targets]
    sides = [each for each in ("lower", "upper") if side in (each, "both")]
    bounds = [f"{each}_{level_name(level)}" for level in levels for each in sides]
    added = [f"{name}{ending}" for ending in endings for name in ["prediction", *bounds]]
    added += ["far"] if loaded.band.calibration_ is not None and kind == "observation" else []
    if of_labels:
        added = classify.added_columns(loaded.band, levels)
    if taken := next((name for name in added if name in source.names), None):
        raise Refusal(f"{data} has a column {taken!r} already: rename or drop it")
    known_targets = [name for name in loaded.targets if name in source.names]
    convert = suffix(data).startswith(".csv") and not suffix(out).startswith(".csv")  # text in CSV, numbers elsewhere
    n = 0

    def of_rows(rows: pa.RecordBatch, x: np.ndarray) -> list[Any]:
        if of_labels:
            with redirect_stdout(sys.stderr):
                return classify.answers(loaded.band, torch.from_numpy(x).to(loaded.dtype), levels)
        given = _weights(to_numbers(rows, weights, data, n), sample_weight, data, n)
        others = {} if by_group is None else given_groups(rows, by_group, unknown, loaded, data, n)
        intervals = _predict(loaded, x, levels, given, kind=kind, side=side, **others)
        mean, lower, upper = interval_arrays(intervals)
        ends = np.stack([{"lower": lower, "upper": upper}[each] for each in sides], axis=3)
        numbers = np.concatenate([mean[:, :, None], ends.reshape(*mean.shape, -1)], axis=2)
        columns = list(numbers.reshape(len(x), -1).T)
        return columns + ([] if intervals.far is None else [intervals.far.numpy()])

    def rows_with_intervals() -> Iterator[pa.RecordBatch]:
        nonlocal n
        for n, rows in source.batches(label="predicting"):
            x = to_numbers(rows, inputs, data, n, dtype=loaded.dtype)
            if convert:
                y = to_numbers(rows, known_targets, data, n, allow_missing=True)
                for name, column in zip([*inputs, *known_targets], np.hstack([x, y]).T, strict=True):
                    rows = rows.set_column(rows.schema.names.index(name), name, pa.array(column.copy()))
            columns = of_rows(rows, x)
            for name, column in zip(added, columns, strict=True):
                rows = rows.append_column(name, pa.array(column))
            yield rows
            n += len(rows)

    with atomic(out, overwrite=force) as temporary:
        WRITERS[suffix(out)](temporary, rows_with_intervals())
    print_result({"out": out, "rows": n, "columns": added}, f"{n:,} rows with {', '.join(added)} in {out}", as_json)


def evaluate(
    band: options.BandFile,
    data: options.Data,
    model: options.SavedModel = None,
    level: options.Level = None,
    sample_weight: options.SavedSampleWeight = None,
    groups: options.SavedGroups = None,
    unknown: options.Unknown = "error",
    features: options.SavedFeatures = None,
    target: options.SavedTargets = None,
    trust: options.Trust = False,
    as_json: options.Json = False,
) -> None:
    """Measure how good the intervals are, on new rows.

    The rows have known targets, and the network was not trained on them. coverage is the share of targets within the
    interval; mean_width and interval_score (lower is better: misses are penalised) are in the target's units;
    width_error_correlation shows whether wide intervals are where errors are large. worst_slab_coverage is the coverage
    between the two parallel planes where it is lowest, of at least 100 rows; pinball_loss and crps are lower for better
    bounds. A band calibrated by groups is measured group by group as well.

    \b
    Examples:
      deltaband evaluate price.band --model network:make --data test.csv
      deltaband evaluate price.band --model network:make --data test.csv --level 0.5 --level 0.9 --json
    """
    levels = options.check_levels(level or [0.95])
    source = open_table(data)
    loaded = load_band(band, model, trust, features, target)
    columns = source.select(loaded.features, FITTED_WITH) + source.select(loaded.targets, PREDICTED)
    given = {"--sample-weight": sample_weight, "--groups": groups, "--unknown": unknown != "error"}
    if classify.is_for_labels(loaded, given):
        with redirect_stdout(sys.stderr):
            of_labels = classify.evaluate(loaded, source, columns, levels, data)
        print_result(*of_labels, as_json)
        return
    columns += source.select([sample_weight] if sample_weight else [])
    by_group = column(loaded, groups, source, unknown)
    k, m = len(loaded.features), len(loaded.targets)
    kept: list[np.ndarray] = []
    found: list[str] = []
    named: dict[str, Any] = {}
    parts = []  # of more rows than a slab is searched for among nothing else is kept
    needed = list(dict.fromkeys([*columns, *([by_group] if by_group else [])]))
    for n, rows in source.batches(needed, "evaluating"):
        x, y, weight = np.split(to_numbers(rows, columns, data, n, dtype=loaded.dtype), [k, k + m], axis=1)
        if by_group is not None:
            named = given_groups(rows, by_group, unknown, loaded, data, n)
            found += named["groups"]
        intervals = _predict(loaded, x, levels, _weights(weight, sample_weight, data, n), **named)
        parts.append((y, *interval_arrays(intervals)))
        kept += [x] if n + len(x) <= SLAB_ROWS_AT_MOST else []
    y, mean, lower, upper = (np.concatenate(part) for part in zip(*parts, strict=True))
    joint = (calibration := loaded.band.calibration_) is not None and calibration.is_joint
    about_rows: dict[str, Any] = {
        "x": np.concatenate(kept) if sum(map(len, kept)) == len(y) else None,
        "groups": found or None,
    }
    scores = metrics.evaluate(y, Intervals(mean, lower, upper, levels), loaded.targets, joint=joint, **about_rows)
    results = [{"target": row.pop("output")} | row for row in scores.rows()]
    about: dict[str, Any] = {"rows": len(y), "results": results}
    text = f"{len(y):,} rows of {data}\n{format_table(results)}"
    if scores.by_group is not None:
        about["groups"] = scores.group_rows()
        text += f"\n{format_table(about['groups'])}"
    print_result(about, text, as_json)


def inspect(band: options.BandFile, as_json: options.Json = False) -> None:
    """Show what is in a band file.

    How it was fitted, to what, and which network it needs. Nothing in it is run or imported.

    \b
    Example:
      deltaband inspect price.band
    """
    about = storage.inspect(check_file(band))
    notes = about["notes"]
    notes |= {key: json.loads(notes[key]) for key in ("features", "targets", "scaling") if key in notes}
    others = {key: value for key, value in about.items() if key not in ("summary", "parameters", "fingerprint")}
    if "scaling" in notes:
        lines = {name: f"mean {each['mean']:.5g}, std {each['std']:.5g}" for name, each in notes["scaling"].items()}
        others["notes"] = notes | {"scaling": lines}
    print_result(about, f"{about['summary']}\n\n{format_fields(others)}", as_json)


def report(
    band: options.BandFile,
    data: options.Data,
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="The page to write.")],
    by: options.By = None,
    groups: options.SavedGroups = None,
    unknown: options.Unknown = "error",
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="Title of the page.")] = None,
    watch: Annotated[bool, typer.Option("--monitor", help="Add what `deltaband monitor` finds in these rows.")] = False,
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
    shown = source.select(by or [])
    loaded = load_band(band, model, trust, features, target)
    given = {"--groups": groups, "--unknown": unknown != "error", "--monitor": watch}
    of_labels = classify.is_for_labels(loaded, given)
    by_group = None if of_labels else column(loaded, groups, source, unknown)
    needed = source.select(loaded.features, FITTED_WITH) + source.select(loaded.targets, PREDICTED)
    parts = [
        rows for _, rows in source.batches(list(dict.fromkeys([*needed, *shown, *([by_group] if by_group else [])])))
    ]
    rows = pa.Table.from_batches(parts).combine_chunks().to_batches()[0]
    x = torch.from_numpy(to_numbers(rows, loaded.features, data, dtype=loaded.dtype)).to(loaded.dtype)
    y = to_numbers(rows, loaded.targets, data)
    columns = {name: group_values(rows.column(name)) for name in shown} or None
    others: dict[str, Any] = {}
    if by_group is not None:
        others = given_groups(rows, by_group, unknown, loaded, data)
        columns = {by_group: others["groups"]} | (columns or {})
    settings = {"band": band.name, "data": data.name, "model": str(model), "level": f"{level:g}"}
    monitor = loaded.band.monitor(level) if watch else None
    with redirect_stdout(sys.stderr):
        if monitor is not None:
            monitor.update(x, y)
        html = page(
            loaded.band,
            x,
            y,
            level=level,
            columns=columns,
            outputs=None if of_labels else loaded.targets,
            title=title,
            settings=settings,
            monitor=monitor,
            **others,
        )
    with atomic(out, overwrite=force) as temporary:
        temporary.write_text(html, encoding="utf-8")
    print_result({"out": out, "rows": len(y), "by": shown}, f"{len(y):,} rows in {out}", as_json)


def _weights(values: np.ndarray, name: str | None, path: Path, n_before: int) -> np.ndarray | None:
    """Return the weights of rows that are to be predicted, if there are any, all positive."""
    if name is None:
        return None
    if (bad := values[:, 0] <= 0).any():
        row = int(bad.argmax())
        where = f"column {name!r} holds the weight {values[row, 0]:g} in row {n_before + row + 1}"
        raise Refusal(f"{path}: {where}; only a row with a positive weight has an interval")
    return values


def _predict(
    loaded: LoadedBand, x: np.ndarray, levels: Sequence[float], weight: np.ndarray | None = None, **others: Any
) -> Intervals:
    if weight is not None:
        others["sample_weight"] = weight[:, 0]
        calibration = loaded.band.calibration_ if others.get("kind") != "mean" else None
        if calibration is not None and not calibration.weighted:
            advice = "fit with --weighted-calibration, or leave --sample-weight out"
            raise Refusal(f"the band was calibrated without weights: {advice}")
    with redirect_stdout(sys.stderr):
        return loaded.band.predict(torch.from_numpy(x).to(loaded.dtype), level=list(levels), **others)
