"""The pictures of the gallery, for the pages of docs/: `python -m examples.pictures` writes docs/images/."""

from __future__ import annotations

import os
import runpy
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
IMAGES = HERE.parent / "docs" / "images"
PROGRAMS = sorted((HERE / "gallery").glob("*.py"))


def main() -> None:
    plt.switch_backend("Agg")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for program in PROGRAMS:
            runpy.run_path(str(program))
            plt.savefig(IMAGES / f"{program.stem}.png", dpi=80)
            plt.close("all")


if __name__ == "__main__":
    main()
