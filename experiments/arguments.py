"""What a command line may say."""

from __future__ import annotations

import argparse

SPLITS_HELP = (
    "the first N (default 20); networks are trained for whole groups of up to 20 splits, so that those of a split do "
    "not depend on N"
)


def positive(text: str) -> int:
    """For argparse: `type=positive`."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"a positive whole number expected, got {text!r}")
    return int(text)
