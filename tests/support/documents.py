"""Markdown documents as the tests see them: fenced blocks, links, headings, and commands."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Block(NamedTuple):
    """A fenced block: "```python integration" has the language python and the tag integration."""

    language: str  # {name} for a directive of the site
    tag: str
    text: str
    line: int  # that the text begins on, counted from 1


def blocks(document: Path) -> list[Block]:
    found, fence, start, info = [], "", 0, ""
    lines = document.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        mark = re.match(r"(`{3,}|~{3,}|:{3,})(.*)", line)
        if not fence and mark:
            fence, start, info = mark.group(1), number + 1, mark.group(2).strip()
        elif fence and line.strip() == fence:
            language, _, tag = info.partition(" ")
            text = "".join(f"{each}\n" for each in lines[start - 1 : number - 1])
            found.append(Block(language, tag, text, start))
            fence = ""
    assert not fence, f"{document.name}: a block begins on line {start - 1} and does not end"
    return found


def prose(document: Path) -> str:
    """The text without its fenced blocks."""
    lines = document.read_text().splitlines()
    for block in blocks(document):
        for i in range(block.line - 2, block.line + block.text.count("\n")):
            lines[i] = ""
    return "\n".join(lines)


def links(document: Path) -> Iterator[tuple[str, str]]:
    """Path and anchor of every link and picture that leads into the repository."""
    for target in re.findall(r"\]\(\s*([^)\s]+)\s*\)", prose(document)):
        if "://" not in target and not target.startswith("mailto:"):
            path, _, anchor = target.partition("#")
            yield path, anchor


def anchors(document: Path) -> set[str]:
    """Of the headings, as code-hosting sites and the documentation site make them."""
    headings = re.findall(r"^#{1,6} (.*)$", prose(document), flags=re.MULTILINE)
    plain = (re.sub(r"[`*\\]|\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


# --- commands: of each program that a document calls, what must hold for it to work


def commands(block: Block) -> list[list[str]]:
    """The words of each command of a bash or console block; of a console block those after a $."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line[1:] for line in lines if line.startswith("$")]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def inline_commands(document: Path) -> list[list[str]]:
    """Those in the running text: `make test`, `python -m benchmarks.scale`, `pip install '.[plots]'`."""
    quoted = re.findall(r"`((?:make|python -m|pip install|deltaband) [^`]+)`", prose(document))
    return [shlex.split(text.replace("\n", " ")) for text in quoted]


def check_command(words: list[str]) -> None:
    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S*", word)]  # settings before the program
    program = words[0].rpartition("/")[2]
    if program not in PROGRAMS:
        raise AssertionError(f"the tests do not know how to check {' '.join(words)!r}: add {program!r} to PROGRAMS")
    PROGRAMS[program](words[1:])


def _python(words: list[str]) -> None:
    if words[0].endswith(".py"):  # a file that the document shows
        return
    assert words[0] == "-m", f"python {' '.join(words)}: only modules are expected"
    module = words[1]
    places = [Path("src") / module.replace(".", "/"), Path(module.replace(".", "/"))]
    files = [ROOT / place.with_suffix(".py") for place in places] + [ROOT / place / "__main__.py" for place in places]
    assert any(file.exists() for file in files), f"there is no module {module}"
    if module == "experiments" and len(words) > 2:
        from experiments.__main__ import COMMANDS

        assert words[2] in COMMANDS, f"python -m experiments has no command {words[2]}"


def _make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for word in words:
        assert word in targets, f"make has no target {word}"


def _pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert words[0] == "install"
    for word in words[1:]:
        if found := re.fullmatch(r"(?:\.|deltaband)\[([\w,-]+)\]", word):
            assert set(found.group(1).split(",")) <= extras.keys(), f"{word}: there is no such extra"


def _deltaband(words: list[str]) -> None:
    import typer

    from deltaband.cli.app import app

    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    if words[0] in ("--help", "--version"):
        return
    assert words[0] in known, f"deltaband has no command {words[0]}"
    options = {option for each in known[words[0]].params for option in each.opts} | {"--help", "--debug"}
    for word in words[1:]:
        assert not word.startswith("--") or word in options, f"deltaband {words[0]} has no option {word}"


def _anything(words: list[str]) -> None:
    """A program that is not ours."""


# The place for what documents call: by the name of the program, a check that takes the words after it.
PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "python": _python,
    "make": _make,
    "pip": _pip,
    "deltaband": _deltaband,
    "torchrun": _anything,
    "pre-commit": _anything,
    "git": _anything,
    "cd": _anything,
}


# --- what a block prints


def same_output(shown: str, printed: str, tolerance: float) -> bool:
    """The same words in the same order, numbers within a tolerance: networks train a little differently elsewhere."""
    number = r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?"
    if re.sub(number, "#", " ".join(shown.split())) != re.sub(number, "#", " ".join(printed.split())):
        return False
    pairs = zip(*(re.findall(number, text) for text in (shown, printed)), strict=True)
    values = [(float(a.replace(",", "")), float(b.replace(",", ""))) for a, b in pairs]
    return all(abs(a - b) <= tolerance * max(abs(a), abs(b)) + 1e-12 for a, b in values)
