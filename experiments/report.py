"""Markdown and CSV tables from all the results that are there: `python -m experiments report`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import calibration_report, energy, paper_report


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(prog="python -m experiments report", description=__doc__).parse_args(arguments)
    calibration_report.write()
    paper_report.write()
    energy.write()
