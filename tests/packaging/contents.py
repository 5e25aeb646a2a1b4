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
    "benchmarks/hops.py",
    "experiments/__main__.py",
    "tests/conftest.py",
    "tests/test_architecture.py",
    "tests/packaging/smoke.py",
}
FOLDERS = {"benchmarks", "docs", "examples", "experiments", "src", "tests"}
KINDS = {".py", ".css", ".js", ".html", ".typed"}  # the code, and what the report's page is made of
JUNK = {"__pycache__", "_build", "build", "networks", "site", "dist", ".git", ".venv", "demo-output"}
LARGEST = 4e6  # bytes: with data or trained networks in it, it would be far more


def check(folder: Path) -> None:
    (archive,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    source = ROOT / "src"
    files = [path for path in (source / "deltaband").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    package = {path.relative_to(source).as_posix() for path in files}
    kinds = {path.suffix for path in files}
    assert kinds <= KINDS, f"the package holds files that end in {sorted(kinds - KINDS)}"
    assert "deltaband/py.typed" in package

    with zipfile.ZipFile(wheel) as file:
        inside = {name for name in file.namelist() if not PurePosixPath(name).parts[0].endswith(".dist-info")}
        licence = [name for name in file.namelist() if name.endswith("/licenses/LICENSE")]
    missing, more = package - inside, inside - package
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
