"""The blocks of docs/models.md that need Lightning, transformers or PyTorch Geometric, after all others there."""

import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # theirs
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_the_examples_with_other_libraries_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python( integration)?\n(.*?)^```", DOCUMENT.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert sum(bool(needs) for needs, _ in blocks) == 3
    namespace: dict[str, object] = {}
    for _, block in blocks:
        exec(compile(block, DOCUMENT.name, "exec"), namespace)
