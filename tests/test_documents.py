"""What the documents say is tried: Python blocks run, commands exist, links lead somewhere, the reference is complete.

Every fenced block has a language. `python` is run, block after block of one document in one namespace; with the tag
`integration` only by `make test-integration`, with the tag `torchrun` by test_distributed.py. `text printed` is what
the Python block before it prints, numbers within some per cent. `bash` and `console` are commands, checked as
`documents.PROGRAMS` says. `text` is anything else. `text printed roughly` is for numbers that rounding on another
processor changes by much more, as trees grown on few residuals split elsewhere.
"""

import inspect
import io
import re
from contextlib import redirect_stdout

import matplotlib.pyplot as plt
import pandas as pd
import pytest

import deltaband
import deltaband.sklearn
from deltaband import baselines, metrics, plots
from experiments import calibration_report, noise, noise_report
from tests.support.documents import (
    ROOT,
    anchors,
    blocks,
    check_command,
    commands,
    inline_commands,
    links,
    same_output,
)

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md"))]
WITH_PYTHON = [document for document in DOCUMENTS if any(block.language == "python" for block in blocks(document))]
TOLERANCES = {"printed": 0.05, "printed roughly": 0.4}
LANGUAGES = {"python", "text", "bash", "console", "{toctree}", "{include}", "{eval-rst}"}


def name(document):
    return document.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("document", WITH_PYTHON, ids=name)
def test_the_examples_of_a_document_run(document, tmp_path, monkeypatch):
    plt.switch_backend("Agg")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    printed = io.StringIO()
    for block in blocks(document):
        if block.language == "python" and not block.tag:
            printed = io.StringIO()
            code = compile("\n" * (block.line - 1) + block.text, str(document), "exec")
            with redirect_stdout(printed):
                exec(code, namespace)
        elif block.language == "text" and block.tag in TOLERANCES:
            agrees = same_output(block.text, printed.getvalue(), TOLERANCES[block.tag])
            assert agrees, f"line {block.line}: printed\n{printed.getvalue()}"
    plt.close("all")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_block_of_a_document_says_what_it_is(document):
    for block in blocks(document):
        assert block.language in LANGUAGES, f"line {block.line}: a block of {block.language or 'no language'}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_the_commands_of_a_document_exist(document):
    for block in blocks(document):
        if block.language in ("bash", "console"):
            for words in commands(block):
                check_command(words)
    for words in inline_commands(document):
        check_command(words)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_the_links_of_a_document_lead_somewhere(document):
    for path, anchor in links(document):
        target = document.parent / path if path else document
        assert target.exists(), f"links to {path}"
        if anchor:
            assert anchor in anchors(target), f"links to {path}#{anchor}"


def test_what_the_tests_of_documents_are_made_of(tmp_path):
    document = tmp_path / "a.md"
    document.write_text(
        "# A title: `code`, and more\n\nsee [b](b.md#c) and\n[d](https://d)\n\n```bash\nmake test  # [x](y)\n```\n"
    )
    assert blocks(document) == [("bash", "", "make test  # [x](y)\n", 7)]
    assert list(links(document)) == [("b.md", "c")]
    assert anchors(document) == {"a-title-code-and-more"}
    assert commands(blocks(document)[0]) == [["make", "test"]]
    for wrong in (
        "make tea",
        "python -m benchmarks.tea",
        "python -m experiments tea",
        "pip install '.[tea]'",
        "tea",
        "deltaband fit --tea",
    ):
        with pytest.raises(AssertionError):
            check_command(wrong.replace("'", "").split())
    assert same_output("p = 1,000 (100 %)", "p  = 1,020 (98 %)\n", 0.05)
    assert not same_output("p = 1,000", "p = 1,100", 0.05)
    assert not same_output("q = 1", "p = 1", 0.05)


def test_the_reference_has_every_public_name():
    reference = "".join(page.read_text() for page in sorted(ROOT.glob("docs/api/*.md")))
    described = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)$", reference, flags=re.MULTILINE))
    for module, members in re.findall(r"automodule:: ([\w.]+)\n   :members: (.*)$", reference, flags=re.MULTILINE):
        described |= {f"{module}.{member}" for member in members.split(", ")}
    public = {f"deltaband.{each}" for each in deltaband.__all__}
    public |= {f"deltaband.sklearn.{each}" for each in deltaband.sklearn.__all__}
    for module in (metrics, plots, baselines):
        public |= {
            f"{module.__name__}.{each}"
            for each, value in vars(module).items()
            if not each.startswith("_") and str(getattr(value, "__module__", "")).startswith(module.__name__)
        }
    assert public <= described
    for each in described:
        module, _, attribute = each.rpartition(".")
        if module != "deltaband" or attribute not in ("metrics", "plots", "baselines"):
            assert inspect.getdoc(getattr(__import__(module, fromlist=[attribute]), attribute)), f"{each} says nothing"


def test_the_table_of_calibrated_scores_is_what_the_experiment_found():
    cells = pd.read_csv(calibration_report.RESULTS)
    text = (ROOT / "docs" / "calibration.md").read_text()
    assert "\n".join(calibration_report.scores(cells)) in text
    assert calibration_report.joint_coverage(cells) in text


def test_the_tables_of_learnt_noise_are_what_the_experiment_found():
    cells = pd.read_csv(noise.NOISE_RESULTS)
    assert "\n".join(noise_report.overview(cells)) in (ROOT / "docs" / "calibration.md").read_text()
    assert "\n".join(noise_report.each_data_set(cells)) in (ROOT / "docs" / "comparisons.md").read_text()
    assert noise_report.which(cells) in (ROOT / "README.md").read_text()


def test_the_readme_can_be_read_in_a_few_minutes():
    assert len((ROOT / "README.md").read_text().split()) <= 700
