"""Markdown and CSV tables from all the results that are there: `python -m experiments report`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from . import (
    calibration_report,
    continued,
    digits,
    energy,
    labelsets,
    logodds,
    misuse,
    noise,
    noise_report,
    optimise,
    paper_report,
    parameters,
    world,
    world_report,
)
from .arguments import RESULTS
from .errors import Unusable
from .rows import write_table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments report", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="DIR",
        help="folder of the results, such as methods.csv, as far as they are there; the tables are written beside them",
    )
    folder = parser.parse_args(arguments).results
    written = [
        calibration_report.write(folder),
        paper_report.write(folder),
        digits.write(folder / "digits.csv"),
        write_table(folder / "energy.csv", energy.KEY, energy.markdown),
        write_table(folder / "continued.csv", continued.KEY, continued.markdown),
        write_table(folder / "parameters.csv", parameters.KEY, parameters.markdown),
        write_table(folder / "labelsets.csv", labelsets.KEY, labelsets.markdown),
        write_table(folder / "logodds.csv", logodds.KEY, logodds.markdown),
        write_table(folder / "noise.csv", noise.KEY, noise_report.markdown),
        write_table(folder / "world.csv", world.KEY, world_report.markdown),
        write_table(folder / "misuse.csv", misuse.KEY, misuse.markdown),
        optimise.write(folder / "optimise.csv"),
    ]
    if not any(written):
        raise Unusable(f"{folder} holds no results: no rows in methods.csv, score.csv, energy.csv … (see --help)")
