"""What a command line may say."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """For argparse: `type=positive`."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"a positive whole number expected, got {text!r}")
    return int(text)
