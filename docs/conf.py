"""The documentation site: `make docs` builds it into site/, without a network.

The source is the whole repository, so that a page may link to, and show, the committed results as they are: a link
works here as it does where the Markdown is read as it stands.
"""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

project = "deltaband"
author = "The deltaband developers"
copyright = author
release = metadata.version("deltaband")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "docs/gallery/*.rst",  # made from examples/gallery
    "benchmarks/results/*.md",
    "benchmarks/outside/results/*.md",
    "experiments/results/*.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "CODE_OF_CONDUCT.md",
    "SECURITY.md",
]
exclude_patterns = [".*", "build", "dist", "site", "src", "tests", "demo-output", "experiments/networks", "docs/_*"]
templates_path = ["_templates"]

myst_heading_anchors = 3
highlight_language = "text"
default_role = "literal"  # `like this` in a docstring is code

napoleon_numpy_docstring = False  # Google style: Args, Returns, Raises, Example
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"  # beside each argument, with its meaning
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
# what annotations name that no page of ours describes
nitpick_ignore_regex = [
    ("py:.*", r"(collections|matplotlib|np|numpy|nn|pandas|pathlib|sklearn|torch|typing)\..*"),
    (
        "py:.*",
        r"deltaband\.(calibration|data|display|distributions|engines|fitting|joint|metrics\.labels|network|online|storage)\..*",
    ),
]
OTHERS = """Any Axes BaseEstimator Callable Collate DataFrame Engine Module Optimizer ParameterChoice Precision
RegressorMixin Score Self Sequence Side SpectralCovariance Spectrum Tensor XY"""
nitpick_ignore = [("py:class", name) for name in OTHERS.split()]

sphinx_gallery_conf = {
    "examples_dirs": "examples/gallery",
    "gallery_dirs": "docs/gallery",
    "filename_pattern": r"\.py$",  # all of them run
    "abort_on_example_error": True,
    "within_subsection_order": "FileNameSortKey",
    "reset_modules": ("matplotlib",),
    "show_signature": False,
    "write_computation_times": False,
    "min_reported_time": 1000,
}

html_theme = "furo"
html_title = f"deltaband {release}"
html_static_path = ["_static"]
html_logo = html_favicon = "_static/logo.svg"
copybutton_exclude = ".linenos, .gp, .go"  # of a console block the commands alone
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_additional_pages = {"index": "redirect.html"}  # the pages are in docs/
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}


SECTION = re.compile(r"(Args|Attributes|Examples?|Notes?|Raises|Returns|Warns|Yields):$")
BAR_OR_CODE = re.compile(r"(`[^`]*`)|\|")  # |x| is not a substitution


def mark_literal_blocks(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Mark formulas and examples, before napoleon reads the sections.

    What is indented in the text of a docstring is a formula: shown as it is written, not as a quotation. What is
    indented under `Example:` is Python.
    """
    # an empty comment, or napoleon would take the words before a colon for the type of the attribute
    marked = ["..", ""] if what in ("attribute", "property") else []
    section, block = "", ""  # the block is "formula", "code" or "doctest" while its lines last
    for line in lines:
        if line and not line.startswith("    "):
            found = SECTION.match(line)
            section, block = found.group(1) if found else "", ""
        elif line and not block and not section and not marked[-1]:
            block = "formula"
            marked += ["::", ""]
        elif line and not block and section.startswith("Example"):
            block = "doctest" if line.lstrip().startswith(">>>") else "code"
            marked += ["    .. code-block:: python", ""] if block == "code" else []
        if block == "code":
            line = f"    {line}"
        marked.append(line if block else BAR_OR_CODE.sub(lambda found: found.group(1) or "\\|", line))
    lines[:] = marked


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", mark_literal_blocks, priority=400)  # napoleon has 500
