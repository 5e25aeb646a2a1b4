"""How many files of the package a call passes through."""

import pytest

from benchmarks.hops import CONTRIBUTING, OPERATIONS, Hops, count, measure, table, write
from deltaband import Intervals, metrics

LIMITED = [name for name, operation in OPERATIONS.items() if operation.most_files is not None]


@pytest.mark.parametrize("name", LIMITED)
def test_a_call_passes_through_few_files(name):
    hops = measure(OPERATIONS[name])
    most = OPERATIONS[name].most_files
    assert len(hops.files) <= most, f"{len(hops.files)} files, at most {most} are allowed: {', '.join(hops.files)}"


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in LIMITED])
def test_a_call_without_a_limit_is_counted(name):
    assert measure(OPERATIONS[name]).functions > 0


def test_files_and_functions_of_the_package_are_counted_once():
    intervals = Intervals([1.0, 2.0], [0.0, 1.0], [2.0, 3.0], 0.9)
    once = count(lambda: metrics.coverage([1.0, 2.0], intervals))
    twice = count(lambda: [metrics.coverage([1.0, 2.0], intervals) for _ in range(2)])
    assert once == twice
    assert "metrics/intervals.py" in once.files
    assert once.functions >= len(once.files)
    assert count(lambda: sorted([2, 1])) == Hops((), 0)


def test_the_table_replaces_the_one_in_a_document(tmp_path):
    document = tmp_path / "a.md"
    document.write_text("before\n<!-- hops -->\nold\n<!-- /hops -->\nafter\n")
    for _ in range(2):
        write(table({LIMITED[0]: Hops(("a.py", "b.py"), 17)}), document)
    text = document.read_text()
    assert text.startswith("before\n<!-- hops -->\n\n| call |")
    assert text.endswith(" | 17 |\n\n<!-- /hops -->\nafter\n")
    assert "| 2 |" in text
    assert "old" not in text
    document.write_text("no markers")
    with pytest.raises(ValueError, match="0 times"):
        write("", document)


def test_contributing_has_the_table_of_every_call():
    text = CONTRIBUTING.read_text()
    assert [name for name in OPERATIONS if f"| {name} |" not in text] == []
