"""The command export."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from ..export import FORMATS
from ..intervals import PredictionIntervals
from . import options
from .models import load_band
from .output import print_result
from .tables import check_output

TOLERANCE = (
    "Write an exact band by compression: widths are off by this share at most, as 0.01, where they were measured."
)


def export(
    band: options.BandFile,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The program: .pt2 for torch.export, or .onnx.")],
    model: options.SavedModel = None,
    level: options.Level = None,
    kind: options.Kind = "observation",
    tolerance: Annotated[float | None, typer.Option(metavar="SHARE", help=TOLERANCE)] = None,
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
    Example:
      deltaband export price.band --model network:make --level 0.8 --level 0.95 --out price.pt2
    """
    levels = options.check_levels(level or [0.95])
    check_output(out, force, FORMATS.values(), (band,))
    loaded = load_band(band, model, trust, features, target, [PredictionIntervals.__name__])
    with redirect_stdout(sys.stderr):
        loaded.band.export(out, levels, kind=kind, tolerance=tolerance)
    print_result({"out": out, "levels": levels, "inputs": loaded.features}, f"a program in {out}", as_json)
