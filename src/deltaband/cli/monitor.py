"""The command monitor: a watch on new rows."""

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..intervals import PredictionIntervals
from ..online.monitor import LEAST_FALSE_ALARMS
from ..storage.container import atomic
from . import options
from .models import load_band
from .output import Refusal, Usage, print_result
from .predict import FITTED_WITH
from .tables import check_output, open_table, to_numbers

FALSE_ALARMS = "The probability that a kind of alarm is ever raised without a reason."


def monitor(
    band: options.BandFile,
    data: options.Data,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write what was found as JSON, too.")] = None,
    model: options.SavedModel = None,
    level: Annotated[float, typer.Option(metavar="LEVEL", help="Of the intervals; between 0 and 1.")] = 0.95,
    false_alarms: Annotated[float, typer.Option(metavar="P", help=FALSE_ALARMS)] = 0.01,
    window: Annotated[int, typer.Option(min=1, help="Targets that the rolling coverage is over.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Seed for breaking ties at random.")] = 0,
    features: options.SavedFeatures = None,
    target: options.SavedTargets = None,
    trust: options.Trust = False,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Raise an alarm where new rows are no longer like the calibration rows.

    Rows are taken in the order of the file; the band must be calibrated. Targets may be missing, in some cells or
    altogether: inputs that leave the training data are found without them. Each alarm says what to do; alarms do not
    change the exit code.

    \b
    Examples:
      deltaband monitor price.band --model network:make --data new.csv
      deltaband monitor price.band --model network:make --data new.csv --false-alarms 0.001 --out alarms.json
    """
    options.check_levels([level])
    if not LEAST_FALSE_ALARMS <= false_alarms < 1:
        raise Usage(
            f"--false-alarms must be a probability from {LEAST_FALSE_ALARMS:g} to below 1, got {false_alarms:g}"
        )
    if out is not None:
        check_output(out, force, [".json"], (band, data))
    source = open_table(data)
    loaded = load_band(band, model, trust, features, target, [PredictionIntervals.__name__])
    inputs = source.select(loaded.features, FITTED_WITH)
    known = [name for name in loaded.targets if name in source.names]
    if known and len(known) < len(loaded.targets):
        missing = next(name for name in loaded.targets if name not in known)
        raise Refusal(f"{data} has a column {known[0]!r} but none {missing!r}: give all targets, or none")
    watch = loaded.band.monitor(level, false_alarms=false_alarms, window=window, seed=seed)
    for n, rows in source.batches([*inputs, *known], "watching"):
        x = torch.from_numpy(to_numbers(rows, inputs, data, n, dtype=loaded.dtype)).to(loaded.dtype)
        y = to_numbers(rows, known, data, n, allow_missing=True) if known else None
        with redirect_stdout(sys.stderr):
            watch.update(x, y)
    found = watch.to_dict()
    if out is not None:
        with atomic(out, overwrite=force) as temporary:
            temporary.write_text(json.dumps(found, indent=2, ensure_ascii=False), encoding="utf-8")
    print_result(found, watch.summary(), as_json)
