"""Is this commit the release that a tag names? `python -m tests.packaging.release v0.1.0` before it is published."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from deltaband.version import __version__

ROOT = Path(__file__).parent.parent.parent


def problems(tag: str, version: str = __version__, root: Path = ROOT) -> list[str]:
    """Return what keeps this tree from being the release of a tag."""
    found = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag}, and src/deltaband/version.py says {version}")
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        found.append(f"{version} is not the version of a release")
    changes = (root / "CHANGELOG.md").read_text()
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changes, flags=re.MULTILINE):
        found.append(f"CHANGELOG.md has no section [{version}] with a date")
    citation = (root / "CITATION.cff").read_text()
    if f"\nversion: {version}\n" not in citation:
        found.append(f"CITATION.cff does not say version: {version}")
    return found


def main(tag: str) -> int:
    found = problems(tag)
    print("\n".join(found) or f"{tag} is this commit", file=sys.stderr if found else sys.stdout)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
