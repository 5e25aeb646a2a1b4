"""The source tree is built as CONTRIBUTING.md says: parts, directions, lazy imports, sizes.

The sources are parsed, not imported, so that imports inside functions count as well. Imports under `TYPE_CHECKING`
follow the directions of the table too, but are not part of cycles, as they never run. `test_packaging.py` checks in a
fresh process what `import deltaband` loads; here every module that is to blame is listed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "deltaband"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"

MAX_FILE_LINES = 350
MAX_TOTAL_LINES = 25_690
LOADED_AT_ONCE = {"numpy", "torch"}  # by `import deltaband`, besides the standard library

SLOW = "slow to import, and not every program needs it"
OPTIONAL = "an optional dependency, needed by this function alone"
ONE_FEATURE = "only files need it, and `import deltaband` loads torch and numpy alone"
PROGRESS = "only progress bars need it, and `import deltaband` loads torch and numpy alone"

# (module, what it imports inside a function): why. A leading dot marks a module of deltaband.
LAZY: dict[tuple[str, str], str] = {
    ("baselines.calibrated", "scipy"): SLOW,
    ("baselines.gaussian", "scipy"): SLOW,
    ("calibration.quality", "scipy"): SLOW,
    ("calibration.noise", "sklearn"): SLOW,
    ("calibration.shift", "sklearn"): SLOW,
    ("classification", "scipy"): SLOW,
    ("cli", ".cli.app"): "needs typer; without it `deltaband` says which extra to install",
    ("cli.demo", ".cli.tour"): "draws with matplotlib, an extra",
    ("cli.weights", "safetensors"): ONE_FEATURE,
    ("cli.predict", ".report"): "only `deltaband report` needs it; the other commands start faster without",
    ("data.batches", "tqdm"): PROGRESS,
    ("distributions", "scipy"): SLOW,
    ("engines.directions", "scipy"): SLOW,
    ("machine", "resource"): "not every system has it",
    ("engines.exact", "scipy"): SLOW,
    ("engines.spectral", "scipy"): SLOW,
    ("export", "onnxscript"): OPTIONAL,
    ("export.bounds", "torch"): "its control flow is slow to import, and only a program needs it",
    ("export.gradients", "torch"): "its tracing is slow to import, and only a program needs it",
    ("fitting.accuracy", "scipy"): SLOW,
    ("fitting.fit", "scipy"): SLOW,
    ("joint", "scipy"): SLOW,
    ("network.gradient_batch", "scipy"): SLOW,
    ("intervals", ".export"): "only a program needs it",
    ("evaluator", ".plots"): "drawing needs matplotlib, an extra",
    ("online.coverage", "scipy"): SLOW,
    ("metrics.conditional", "scipy"): SLOW,
    ("plots", "matplotlib"): OPTIONAL,
    ("report.evaluation", "scipy"): SLOW,
    ("report", "jinja2"): "only pages need it, and a message says how to install it",
    ("results", "pandas"): OPTIONAL,
    ("storage.container", "safetensors"): ONE_FEATURE,
    ("machine", "scipy"): SLOW,
    ("machine", "threadpoolctl"): "only a busy machine needs it",
}


# --- the sources


class Import(NamedTuple):
    """One imported module. `target` is a path such as "engines/base.py", or None for a module of another package."""

    source: str
    line: int
    name: str  # ".engines.base" or "scipy"
    target: str | None
    lazy: bool  # inside a function
    typing: bool  # under TYPE_CHECKING

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target or self.name}"


@dataclass
class Tree:
    """The Python files of a package, by their path below its folder."""

    folder: Path

    def __post_init__(self) -> None:
        self.texts = {
            path.relative_to(self.folder).as_posix(): path.read_text() for path in sorted(self.folder.rglob("*.py"))
        }
        found = (each for source, text in self.texts.items() for each in self._imports(source, text))
        self.imports = list(dict.fromkeys(found))  # three names of one module are one import

    def graph(self, lazy: bool = True) -> dict[str, set[str]]:
        """Return what each file imports from the package at run time."""
        graph: dict[str, set[str]] = {source: set() for source in self.texts}
        for each in self.imports:
            if each.target and each.target != each.source and not each.typing and (lazy or not each.lazy):
                graph[each.source].add(each.target)
        return graph

    def _imports(self, source: str, text: str) -> Iterator[Import]:
        for node, lazy, typing in _statements(ast.parse(text), lazy=False, typing=False):
            for name in self._names(node, source):
                target = self._file(name)
                module = name.partition(".")[0] if target is None else "." + _dotted(target)
                yield Import(source, node.lineno, module, target, lazy, typing)

    def _names(self, node: ast.AST, source: str) -> Iterator[str]:
        """Absolute names; those of the package begin with a dot instead of its name."""
        match node:
            case ast.Import(names=names):
                yield from (self._without_own_name(alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = self._from_here(source, level, module or "") if level else self._without_own_name(module or "")
                yield from (f"{base.rstrip('.')}.{alias.name}" for alias in names) if base.startswith(".") else (base,)
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                if ast.unparse(function) in ("importlib.import_module", "import_module", "__import__"):
                    dots = len(name) - len(name.lstrip("."))
                    yield self._from_here(source, dots, name[dots:]) if dots else self._without_own_name(name)

    def _without_own_name(self, name: str) -> str:
        own = self.folder.name
        return "." + name[len(own) + 1 :] if name == own or name.startswith(own + ".") else name

    def _from_here(self, source: str, level: int, module: str) -> str:
        parents = source.split("/")[:-1]  # of __init__.py, too, the package that one dot means
        return "." + ".".join([*parents[: len(parents) - level + 1], *filter(None, [module])])

    def _file(self, name: str) -> str | None:
        """Return the file of a module, or of the module that defines the name."""
        if not name.startswith("."):
            return None
        parts = [part for part in name.split(".") if part]
        for length in (len(parts), len(parts) - 1):
            for path in ("/".join(parts[:length]) + ".py", "/".join([*parts[:length], "__init__.py"])):
                if length >= 0 and path in self.texts:
                    return path
        raise AssertionError(f"there is no module {name}")


def _statements(node: ast.AST, lazy: bool, typing: bool) -> Iterator[tuple[ast.stmt | ast.expr, bool, bool]]:
    """Every statement and call below a node; whether it is inside a function, and whether only type checkers see it."""
    for child in ast.iter_child_nodes(node):
        inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(child, ast.stmt | ast.Call):
            yield child, inside, typing
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for statement in child.body:
                yield statement, inside, True
                yield from _statements(statement, inside, True)
            for statement in child.orelse:
                yield statement, inside, typing
                yield from _statements(statement, inside, typing)
        else:
            yield from _statements(child, inside, typing)


def _dotted(path: str) -> str:
    """Return the module of a file: cli/__init__.py is "cli", cli/app.py is "cli.app"."""
    return path.removesuffix(".py").removesuffix("__init__").rstrip("/").replace("/", ".")


@cache
def tree() -> Tree:
    return Tree(PACKAGE)


# --- the layout table


@dataclass(frozen=True)
class Row:
    """A row of the layout table: files and folders (these end in /), and what they may import."""

    parts: tuple[str, ...]
    subject: str
    imports: str


def _within(path: str, part: str) -> bool:
    return path == part or (part.endswith("/") and path.startswith(part))


def _quoted(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", text))


class Layout:
    """The rows under the heading "Layout", in the order of dependencies: nothing imports from a row below its own."""

    def __init__(self, document: str) -> None:
        section = document.partition("\n## Layout\n")[2].partition("\n## ")[0]
        table = section.partition("\n|---|---|---|\n")[2]  # without its head
        cells = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", table, flags=re.MULTILINE)
        self.rows = [Row(_quoted(parts), subject, imports) for parts, subject, imports in cells]
        assert self.rows, "CONTRIBUTING.md has no layout table: | part | subject | imports | under ## Layout"

    def number(self, path: str) -> int | None:
        """Return the row of a file: the one that names it, or else the one that names its folder."""
        parts = [
            (len(part), number) for number, row in enumerate(self.rows) for part in row.parts if _within(path, part)
        ]
        return max(parts)[1] if parts else None

    def objection(self, source: str, target: str) -> str:
        """Return why a file may not import another, or nothing."""
        mine, other = self.number(source), self.number(target)
        if mine is None or other is None or mine == other:  # another test reports what is in no row
            return ""
        if other > mine:
            return "which is further down in the table"
        cell = self.rows[mine].imports
        named = any(_within(target, part) for part in _quoted(cell))
        return "" if named != cell.startswith("everything above") else f"but may import {cell}"


@cache
def layout() -> Layout:
    return Layout(CONTRIBUTING.read_text())


def listed(violations: list[str]) -> str:
    return f"{len(violations)} found:\n  " + "\n  ".join(violations)


# --- the rules


def test_imports_follow_the_direction_of_the_layout_table():
    inside = [each for each in tree().imports if each.target]
    wrong = [f"{each}, {why}" for each in inside if (why := layout().objection(each.source, each.target))]
    assert not wrong, listed(wrong)


def test_no_module_imports_itself_through_others():
    cycles = [" → ".join(cycle) + _size(component) for component, cycle in _cycles(tree().graph())]
    assert not cycles, listed(cycles)


def _size(component: set[str]) -> str:
    return f"   (one of the cycles of {len(component)} modules: {', '.join(sorted(component))})"


def test_every_import_inside_a_function_is_listed_with_a_reason():
    found = {(_dotted(each.source), each.name): each for each in tree().imports if each.lazy and not each.typing}
    wrong = [f"{found[key]} inside a function: {key} is not in LAZY" for key in sorted(found.keys() - LAZY.keys())]
    wrong += [f"LAZY lists {key}, which no function imports" for key in sorted(LAZY.keys() - found.keys())]
    wrong += [f"LAZY gives no reason for {key}" for key, reason in LAZY.items() if not reason]
    assert not wrong, listed(wrong)


def test_every_file_is_in_the_layout_table():
    files = [path for path in sorted(PACKAGE.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    paths = [path.relative_to(PACKAGE).as_posix() for path in files]
    wrong = [f"{path} is in no row" for path in paths if layout().number(path) is None]
    parts = [part for row in layout().rows for part in row.parts]
    wrong += [f"{part} is in two rows" for part in sorted(set(parts)) if parts.count(part) > 1]
    assert not wrong, listed(wrong)


def test_every_name_in_the_layout_table_is_a_file():
    wrong = []
    for row in layout().rows:
        wrong += [f"{part} does not exist" for part in row.parts if not _is_there(PACKAGE / part, part)]
        wrong += [
            f"{name} is not in {', '.join(row.parts)}"
            for name in _quoted(row.subject)
            if name.endswith(".py") and not any((PACKAGE / part / name).is_file() for part in row.parts)
        ]
        wrong += [f"{part} does not exist" for part in _quoted(row.imports) if not _is_there(PACKAGE / part, part)]
    assert not wrong, listed(wrong)


def test_every_path_that_contributing_names_exists():
    quoted = _quoted(re.sub(r"^```.*?^```$", "", CONTRIBUTING.read_text(), flags=re.MULTILINE | re.DOTALL))
    paths = [name for name in quoted if re.fullmatch(r"[\w.-]+(/[\w.-]+)*(/|/[\w-]+\.\w+)", name)]
    wrong = [name for name in paths if not any(_is_there(base / name, name) for base in (ROOT, PACKAGE))]
    assert not wrong, listed(wrong)


def _is_there(path: Path, name: str) -> bool:
    return path.is_dir() if name.endswith("/") else path.is_file()


def test_no_file_is_too_long():
    lengths = {source: text.count("\n") for source, text in tree().texts.items()}
    wrong = [f"{source}: {lines} lines" for source, lines in lengths.items() if lines > MAX_FILE_LINES]
    assert not wrong, f"more than {MAX_FILE_LINES} lines, {listed(wrong)}"


def test_the_package_stays_small():
    lines = sum(text.count("\n") for text in tree().texts.values())
    assert lines <= MAX_TOTAL_LINES, f"the package has {lines:,} lines, {lines - MAX_TOTAL_LINES:,} more than allowed"


def test_what_import_deltaband_loads_imports_torch_and_numpy_alone():
    loaded = _loaded(tree(), "__init__.py")
    allowed = sys.stdlib_module_names | LOADED_AT_ONCE
    wrong = [
        str(each)
        for each in tree().imports
        if each.source in loaded and not (each.target or each.lazy or each.typing or each.name in allowed)
    ]
    assert not wrong, listed(wrong)


def _loaded(sources: Tree, start: str) -> set[str]:
    """The files that run when one is imported: what it imports, and the packages that these are in."""
    graph, loaded, waiting = sources.graph(lazy=False), set(), [start]
    while waiting:
        path = waiting.pop()
        if path not in loaded:
            loaded.add(path)
            packages = [f"{parent}/__init__.py" for parent in Path(path).parents if parent != Path()]
            waiting += [*graph[path], *(str(each) for each in packages if each in graph)]
    return loaded


def _cycles(graph: Mapping[str, set[str]]) -> Iterator[tuple[set[str], list[str]]]:
    """Each strongly connected component of two nodes or more, with a shortest cycle in it."""
    reached = {node: set(_paths_from(graph, node)) for node in graph}
    left = set(graph)
    for node in sorted(graph):
        component = {other for other in reached[node] if node in reached[other]} & left
        if node in component:
            left -= component
            yield component, min((_paths_from(graph, each)[each] for each in sorted(component)), key=len)


def _paths_from(graph: Mapping[str, set[str]], start: str) -> dict[str, list[str]]:
    """A shortest path from a node to each that can be reached over at least one edge."""
    paths: dict[str, list[str]] = {}
    waiting = [[start]]
    for path in waiting:
        for node in sorted(graph[path[-1]]):
            if node not in paths:
                paths[node] = [*path, node]
                waiting.append(paths[node])
    return paths


# --- the tools of the rules, tried on a small tree


def test_every_kind_of_import_is_found(tmp_path):
    folder = tmp_path / "deltaband"
    (folder / "inner").mkdir(parents=True)
    files = {
        "__init__.py": "from .top import f",
        "top.py": "import os, numpy.linalg\nfrom .inner import low\ndef f():\n    import scipy.special\n",
        "inner/__init__.py": "",
        "inner/low.py": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from ..top import f
else:
    from . import CONSTANT
class C:
    def m(self):
        if self:
            import deltaband.top
        return importlib.import_module("..top", __package__)
""",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    sources = Tree(folder)
    assert [tuple(each) for each in sources.imports] == [
        ("__init__.py", 1, ".top", "top.py", False, False),
        ("inner/low.py", 2, "typing", None, False, False),
        ("inner/low.py", 4, ".top", "top.py", False, True),
        ("inner/low.py", 6, ".inner", "inner/__init__.py", False, False),
        ("inner/low.py", 10, ".top", "top.py", True, False),
        ("inner/low.py", 11, ".top", "top.py", True, False),
        ("top.py", 1, "os", None, False, False),
        ("top.py", 1, "numpy", None, False, False),
        ("top.py", 2, ".inner.low", "inner/low.py", False, False),
        ("top.py", 4, "scipy", None, True, False),
    ]
    ((component, cycle),) = _cycles(sources.graph())
    assert component == {"top.py", "inner/low.py"}
    assert cycle == ["inner/low.py", "top.py", "inner/low.py"]
    assert list(_cycles(sources.graph(lazy=False))) == []
    assert _loaded(sources, "__init__.py") == set(files)
    assert _loaded(sources, "inner/low.py") == {"inner/low.py", "inner/__init__.py"}


def test_the_layout_table_says_what_may_be_imported():
    text = "# A\n\n## Layout\n\n| part | subject | imports |\n|---|---|---|\n"
    rows = ["`a.py`, `b/`", "`c/`", "`d.py`", "`e/`", "`f.py`, `b/last.py`"]
    cells = ["nothing", "everything above", "`b/x.py`, `c/`", "everything above except `c/`", "everything above"]
    table = Layout(
        text + "".join(f"| {part} | s | {cell} |\n" for part, cell in zip(rows, cells, strict=True)) + "\n## B"
    )
    allowed = [
        "a.py b/x.py",
        "c/x.py a.py",
        "d.py b/x.py",
        "d.py c/y/z.py",
        "e/x.py a.py",
        "e/x.py d.py",
        "f.py c/x.py",
    ]
    refused = [
        "a.py c/x.py",
        "d.py a.py",
        "d.py b/y.py",
        "d.py e/x.py",
        "e/x.py c/x.py",
        "c/x.py f.py",
        "c/x.py b/last.py",
    ]
    assert [pair for pair in allowed if table.objection(*pair.split())] == []
    assert [pair for pair in refused if not table.objection(*pair.split())] == []
    assert table.number("g.py") is None


def test_what_contributing_says_is_somewhere_is_there():
    text = CONTRIBUTING.read_text().partition("## Where to find what")[2].partition("<!-- hops -->")[0]
    found = re.findall(r"`([A-Za-z_.]+)` in `([\w/]+\.py)`", text)
    assert len(found) > 15
    for name, file in found:
        source = (ROOT / "src" / "deltaband" / file).read_text()
        for part in name.split("."):
            assert re.search(rf"^ *(?:def|class) {part}\b|^{part}\b", source, flags=re.MULTILINE), f"{file}: no {part}"
