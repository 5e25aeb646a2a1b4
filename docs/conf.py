"""The documentation site: `make docs` builds it into site/, without a network.

The source is the whole repository, so that a page may link to, and show, the committed results as they are: a link
works here as it does where the Markdown is read as it stands.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

project = "deltaband"
author = "The deltaband developers"
copyright = author
release = metadata.version("deltaband")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "benchmarks/results/*.md",
    "experiments/results/*.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
exclude_patterns = [".*", "build", "dist", "site", "src", "tests", "demo-output", "experiments/networks", "docs/_*"]
templates_path = ["_templates"]

myst_heading_anchors = 3
highlight_language = "text"
default_role = "literal"  # `like this` in a docstring is code

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
# what annotations name that no page of ours describes
nitpick_ignore_regex = [
    ("py:.*", r"(collections|matplotlib|np|numpy|nn|pandas|pathlib|sklearn|torch|typing)\..*"),
    ("py:.*", r"deltaband\.(band|covariance\.(choose|engine|problem))\..*"),
]
OTHERS = "Any Axes BaseEstimator Callable Choice DataFrame Engine Module RegressorMixin Score Self Sequence Side Tensor"
nitpick_ignore = [("py:class", name) for name in OTHERS.split()]

html_theme = "furo"
html_title = f"deltaband {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_additional_pages = {"index": "redirect.html"}  # the pages are in docs/
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}


def formulas_as_they_stand(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """What is indented in a docstring is a formula: shown as it is written, not as a quotation."""
    shown: list[str] = []
    for line in lines:
        formula = line.startswith("    ")
        if formula and not shown[-1] and not (len(shown) > 1 and shown[-2].startswith("    ")):
            shown += ["::", ""]
        shown.append(line if formula or "`" in line else line.replace("|", "\\|"))
    lines[:] = shown


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", formulas_as_they_stand)
