"""Print the oldest versions that pyproject.toml allows, one requirement a line: `python -m tests.packaging.floors`.

An environment of these is where the floors are seen to be right: see CONTRIBUTING.md. torch is the pinned one, as
older ones come for other processors only through an index of their own.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
USERS_EXTRAS = ("cli", "plots", "pandas", "report")  # what tests, experiments and documents need beside is not promised


def floors() -> dict[str, str]:
    """Return the oldest version of each package that users' installations depend on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(each for extra in USERS_EXTRAS for each in extras[extra])]
    found = (re.fullmatch(r"([\w-]+)>=([\d.]+)", each) for each in wanted if not each.startswith("deltaband"))
    return {match.group(1): match.group(2) for match in found if match}


def main() -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    for name, version in floors().items():
        print(f"{name}=={pinned['torch'] if name == 'torch' else version}")


if __name__ == "__main__":
    main()
