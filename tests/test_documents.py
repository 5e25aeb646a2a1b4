"""Every Python block of the documents is run, block after block of one document in one namespace."""

import re
from pathlib import Path

import matplotlib
import pandas as pd
import pytest

from experiments import calibration_report

ROOT = Path(__file__).parent.parent
DOCUMENTS = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))] if path.exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_examples_of_a_document_run(document, tmp_path, monkeypatch):
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert blocks or document.name != "README.md"
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, document.name, "exec"), namespace)


def test_the_readme_points_only_to_files_that_exist():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_table_of_calibrated_scores_is_what_the_experiment_found():
    cells = pd.read_csv(calibration_report.RESULTS)
    text = (ROOT / "docs" / "calibration.md").read_text()
    assert "\n".join(calibration_report.scores(cells)) in text
    assert calibration_report.joint_coverage(cells) in text
