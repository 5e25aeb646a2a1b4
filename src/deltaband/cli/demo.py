"""The command demo."""

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from .output import Refusal


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the pictures go; made if need be.")] = Path(
        "demo-output"
    ),
) -> None:
    """Train three small networks, put intervals around their predictions, save pictures: a tour in a minute.

    \b
    Example:
      deltaband demo --out pictures
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise Refusal("pictures need matplotlib: pip install 'deltaband[all]'")
    from .tour import tour

    tour(out)
