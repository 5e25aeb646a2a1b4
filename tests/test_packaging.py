"""What `import deltaband` costs, and what the metadata say."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import deltaband

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def loaded(statement: str) -> set[str]:
    """The packages of a fresh process after the statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_deltaband_loads_torch_and_numpy_and_nothing_else():
    more = loaded("import deltaband") - loaded("import numpy, torch")
    assert more - sys.stdlib_module_names == {"deltaband"}


def test_the_version_is_the_same_everywhere():
    assert PROJECT["version"] == deltaband.__version__ == version("deltaband")


def test_every_extra_with_versions_of_its_own_is_pinned_where_the_tests_need_it():
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    extras = PROJECT["optional-dependencies"]
    used = [*PROJECT["dependencies"], *(name for extra in extras for name in extras[extra] if extra != "cli")]
    names = {re.match(r"[\w-]+", requirement).group().lower() for requirement in used} - {"deltaband"}
    assert names <= pinned
