"""The command export."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from ..export import FORMATS
from ..intervals import PredictionIntervals
from . import options
from .models import load_band
from .output import Usage, print_result
from .predict import FITTED_WITH
from .tables import check_output, open_table

TOLERANCE = "Write an exact band by compression: widths of the rows of --data are off by this share at most, as 0.01."
DATA = f"With --tolerance: rows like those to be predicted. {options.FORMATS}"


def export(
    band: options.BandFile,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The program: .pt2 for torch.export, or .onnx.")],
    model: options.SavedModel = None,
    level: options.Level = None,
    kind: options.Kind = "observation",
    tolerance: Annotated[float | None, typer.Option(metavar="SHARE", help=TOLERANCE)] = None,
    data: Annotated[Path | None, typer.Option(metavar="FILE", help=DATA)] = None,
    features: options.SavedFeatures = None,
    target: options.SavedTargets = None,
    trust: options.Trust = False,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Write a band as one program that runs without deltaband and without the code of the model.

    It takes rows of the columns that the band was fitted to and returns mean, lower and upper bounds, one column per
    level.

    \b
    Examples:
      deltaband export price.band --model network:make --level 0.8 --level 0.95 --out price.pt2
      deltaband export price.band --model network:make --tolerance 0.01 --data new.csv --out price.onnx
    """
    levels = options.check_levels(level or [0.95])
    if (tolerance is None) != (data is None):
        raise Usage("--tolerance and --data need each other: widths are compared on its rows")
    source = None if data is None else open_table(data)
    check_output(out, force, FORMATS.values(), (band,))
    loaded = load_band(band, model, trust, features, target, [PredictionIntervals.__name__])
    x = None
    if source is not None:
        rows = source.numbers(source.select(loaded.features, FITTED_WITH), loaded.dtype, "reading")
        x = torch.from_numpy(np.concatenate(list(rows))).to(loaded.dtype)
    with redirect_stdout(sys.stderr):
        loaded.band.export(out, levels, kind=kind, x=x, tolerance=tolerance)
    print_result({"out": out, "levels": levels, "inputs": loaded.features}, f"a program in {out}", as_json)
