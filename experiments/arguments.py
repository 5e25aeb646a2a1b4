"""What a command line may say."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
NETWORKS = Path(__file__).parent / "networks"
SPLITS_HELP = (
    "the first N (default 20); networks are trained for whole groups of up to 20 splits, so that those of a split do "
    "not depend on N"
)


def on_data(
    command: str, about: str, out: str, *, package: str = "experiments", results: Path = RESULTS
) -> argparse.ArgumentParser:
    """For an experiment on the data sets that trains networks."""
    parser = argparse.ArgumentParser(prog=f"python -m {package} {command}", description=about.splitlines()[0])
    parser.add_argument("--data", metavar="DIR", help="folder of the data sets (or DELTABAND_DATA; else OpenML)")
    parser.add_argument("--out", type=file_to_write, default=results / out, metavar="FILE")
    parser.add_argument(
        "--networks", type=folder_to_write, default=NETWORKS, metavar="DIR", help="where trained networks are kept"
    )
    return parser


def positive(text: str) -> int:
    """For argparse: `type=positive`."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"a positive whole number expected, got {text!r}")
    return int(text)


def file_to_write(text: str) -> Path:
    """For argparse: what hours of work will go into must not turn out to be a folder, or not to be writable, then."""
    path = Path(text)
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{path} is not a file")
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written to")
    folder_to_write(str(path.parent))
    return path


def folder_to_write(text: str) -> Path:
    """One that is there or can be made."""
    path = Path(text)
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"{there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"nothing can be written in {there}")
    return path
