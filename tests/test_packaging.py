"""What `import deltaband` costs, and what the metadata say."""

import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import deltaband
from tests.packaging import floors, release
from tests.support import public_names
from tests.support.documents import check_command

ROOT = Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]


def loaded(statement: str) -> set[str]:
    """The packages of a fresh process after the statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_deltaband_loads_torch_and_numpy_and_nothing_else():
    more = loaded("import deltaband") - loaded("import numpy, torch")
    assert more - sys.stdlib_module_names == {"deltaband"}


def test_the_version_comes_from_one_place():
    assert "version" in PROJECT["dynamic"]
    assert deltaband.__version__ == version("deltaband")


def test_every_extra_with_versions_of_its_own_is_pinned_where_the_tests_need_it():
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    extras = PROJECT["optional-dependencies"]
    used = [*PROJECT["dependencies"], *(name for extra in extras for name in extras[extra])]
    names = {re.match(r"[\w-]+", requirement).group().lower() for requirement in used} - {"deltaband"}
    assert names <= pinned


def test_links_and_pictures_of_the_package_index_lead_into_the_repository():
    text = (
        "![a picture\nof two lines](docs/a.png) [b](docs/b.md#c) [d](https://d.org) [e](#f)\n"
        '<source srcset="docs/dark.png"> [](LICENSE)'
    )
    for each in SETTINGS["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    source = PROJECT["urls"]["Source"]
    files = f"{source.replace('github.com', 'raw.githubusercontent.com')}/main"
    assert text == (
        f"![a picture\nof two lines]({files}/docs/a.png) "
        f"[b]({source}/blob/main/docs/b.md#c) [d](https://d.org) [e](#f)\n"
        f'<source srcset="{files}/docs/dark.png"> []({source}/blob/main/LICENSE)'
    )


def test_a_release_is_what_its_tag_names(tmp_path):
    (tmp_path / "CHANGELOG.md").write_text("## [1.2.3] - 2030-01-02\n")
    (tmp_path / "CITATION.cff").write_text("title: x\nversion: 1.2.3\ntype: y\n")
    assert release.problems("v1.2.3", "1.2.3", tmp_path) == []
    assert len(release.problems("v1.2.4", "1.2.3", tmp_path)) == 1
    assert len(release.problems("v1.2.3.dev0", "1.2.3.dev0", tmp_path)) == 3


def test_only_a_tag_that_is_wrong_stops_a_release(monkeypatch, capsys):
    monkeypatch.setattr(release, "problems", lambda tag: [] if tag == "v1.2.3" else ["another version"])
    assert release.main("v1.2.3") == 0
    assert release.main("v1.2.4") == 1
    assert capsys.readouterr().err == "another version\n"


def test_the_floors_are_those_of_the_project():
    assert floors.floors()["torch"] in next(each for each in PROJECT["dependencies"] if each.startswith("torch"))
    assert {re.match(r"[\w-]+", each).group() for each in PROJECT["dependencies"]} <= floors.floors().keys()


# --- workflows


WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
STEPS = [
    (f"{name}, {job}", step, WORKFLOWS[name]["jobs"][job])
    for name in WORKFLOWS
    for job in WORKFLOWS[name]["jobs"]
    for step in WORKFLOWS[name]["jobs"][job]["steps"]
]


@pytest.mark.parametrize(("where", "step", "job"), [each for each in STEPS if "run" in each[1]])
def test_the_commands_of_a_workflow_exist(where, step, job):
    variants = job.get("strategy", {}).get("matrix", {}).get("include", [{}])
    for variant in variants:
        command = step["run"]
        for key, value in variant.items():
            command = command.replace(f"${{{{ matrix.{key} }}}}", value)
        assert "${{" not in command, f"{where}: {command}"
        for part in command.split("|"):
            words = [each for each in shlex.split(part) if each != "xargs"]
            match words:
                case ["bash", script]:
                    assert (ROOT / script).exists(), f"{where}: there is no {script}"
                case [program, "-m", "pip" | "pytest" | "twine", *options] if program.endswith("python"):
                    assert all(not option.endswith(".txt") or (ROOT / option).exists() for option in options)
                    for extra in re.findall(r"\[([\w,]+)\]", part):
                        assert set(extra.split(",")) <= PROJECT["optional-dependencies"].keys(), f"{where}: {part}"
                case _:
                    check_command(words)


def test_the_tested_pythons_are_those_that_the_package_takes():
    pythons = WORKFLOWS["test.yml"]["jobs"]["pythons"]["strategy"]["matrix"]["python"]
    assert pythons[0] == PROJECT["requires-python"].removeprefix(">=")


# --- public names


def test_no_public_name_and_no_parameter_is_gone_since_the_list_was_made():
    assert public_names.gone() == []


def test_a_public_name_that_goes_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(public_names, "RECORDED", tmp_path / "names.txt")
    (tmp_path / "names.txt").write_text(
        "deltaband.Exact()\ndeltaband.Gone(x)\n"
        "deltaband.Intervals(mean, middle)\ndeltaband.metrics.coverage(intervals, y)\n"
    )
    assert public_names.gone() == [
        "deltaband.Gone is gone",
        "deltaband.Intervals no longer takes middle",
        "the parameters of deltaband.metrics.coverage have another order",
    ]
