"""What the source archive and the wheel in a folder hold: `python tests/packaging/contents.py FOLDER`."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent.parent
WANTED = {  # beside the package, for whoever wants to test or to build from the source archive
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "PKG-INFO",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
    "docs/conf.py",
    "docs/images/gap.png",
    "experiments/__main__.py",
    "tests/conftest.py",
    "tests/packaging/smoke.py",
}
FOLDERS = {"benchmarks", "docs", "experiments", "src", "tests"}
JUNK = {"__pycache__", "_build", "build", "networks", "site", "dist", ".git", ".venv", "demo-output"}
LARGEST = 3e6  # bytes: with data or trained networks in it, it would be far more


def check(folder: Path) -> None:
    (archive,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    source = ROOT / "src"
    files = [path for kind in ("py", "css", "html", "js") for path in (source / "deltaband").rglob(f"*.{kind}")]
    package = {path.relative_to(source).as_posix() for path in files}
    package.add("deltaband/py.typed")

    with zipfile.ZipFile(wheel) as file:
        inside = {name for name in file.namelist() if not PurePosixPath(name).parts[0].endswith(".dist-info")}
        licence = [name for name in file.namelist() if name.endswith("/licenses/LICENSE")]
    missing, more = package - inside, {name for name in inside - package if not name.startswith("deltaband/")}
    assert not missing, f"the wheel lacks {sorted(missing)}"
    assert not more, f"the wheel holds {sorted(more)}"
    assert licence, "the wheel lacks the licence"

    with tarfile.open(archive) as file:
        paths = [PurePosixPath(*PurePosixPath(name).parts[1:]) for name in file.getnames()]
    names = {path.as_posix() for path in paths}
    missing = (WANTED | {f"src/{name}" for name in package}) - names
    assert not missing, f"the source archive lacks {sorted(missing)}"
    junk = sorted(path.as_posix() for path in paths if JUNK & set(path.parts) or path.suffix in (".pyc", ".gz", ".pt"))
    assert not junk, f"the source archive holds {junk}"
    beside = {path.parts[0] for path in paths if len(path.parts) > 1} - FOLDERS
    assert not beside, f"the source archive holds the folders {sorted(beside)}"
    assert archive.stat().st_size < LARGEST, f"the source archive has {archive.stat().st_size:,} bytes"

    for path, count in ((wheel, len(inside)), (archive, len(names))):
        print(f"{path.name}: {count} files, {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    check(Path(sys.argv[1]))
