import pandas as pd
import pytest

from experiments.errors import Unusable
from experiments.rows import Rows

CELLS = [
    [{"data": name, "split": split, "method": method, "score": score} for method, score in (("a,b", 0.5), ("c", 1 / 3))]
    for name, split in (("yacht", 0), ("yacht", 1), ("yacht", 10))
]
KEYS = [("yacht", 0), ("yacht", 1), ("yacht", 10)]


@pytest.fixture
def rows(tmp_path) -> Rows:
    rows = Rows(tmp_path / "new" / "rows.csv", key=("data", "split"))
    for cell in CELLS:
        rows.append(cell)
    return rows


def test_rows_are_read_as_they_were_appended(rows):
    assert rows.path.read_text().startswith('data,split,method,score\nyacht,0,"a,b",0.5\nyacht,0,c,0.333333\n')
    expected = pd.DataFrame([row for cell in CELLS for row in cell])
    pd.testing.assert_frame_equal(rows.read(), expected.assign(score=[0.5, 0.333333] * 3))
    assert rows.done() == set(KEYS)


def test_a_file_that_is_not_there_holds_nothing(tmp_path):
    rows = Rows(tmp_path / "rows.csv", key=("data", "split"))
    assert rows.done() == set()
    assert rows.read().empty
    assert list(rows.read().columns) == ["data", "split"]
    assert not rows.path.exists()


def test_wherever_a_write_is_cut_the_torn_cell_is_written_again(rows):
    whole = rows.path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]  # of the header and of two rows a cell
    for cut in set(range(len(whole))) - set(ends[1::2]):  # one write is not cut between two of its rows
        rows.path.write_bytes(whole[:cut])
        finished = KEYS[: sum(cut >= end for end in ends[2::2])]
        done, torn = rows.done(), whole[:cut].rsplit(b"\n", 1)[-1]
        if torn and torn.count(b",") < 2:  # its key is torn too: the cell before it may be done again
            assert done in (set(finished), set(finished[:-1]))
        else:
            assert done == set(finished)
        assert {(row.data, row.split) for row in rows.read().itertuples()} == done
        for key, cell in zip(KEYS, CELLS, strict=True):
            if key not in done:
                rows.append(cell)
        assert rows.path.read_bytes() == whole, cut


def test_a_last_row_with_too_few_fields_is_torn(rows):
    whole = rows.path.read_text()
    rows.path.write_text(whole.replace("yacht,10,c,0.333333\n", "yacht,10,c\n"))
    assert rows.done() == set(KEYS[:2])
    rows.append(CELLS[2])
    assert rows.path.read_text() == whole


def test_a_torn_row_elsewhere_is_an_error_that_names_the_line(rows):
    rows.path.write_text(rows.path.read_text().replace("yacht,0,c,0.333333", "yacht,0,c"))
    with pytest.raises(Unusable, match=r"rows\.csv, line 3: 4 fields expected, got 'yacht,0,c'"):
        rows.done()


def test_other_columns_than_those_of_the_file_are_refused(rows):
    whole = rows.path.read_bytes()
    row = {"data": "boston", "split": 0, "method": "a", "width": 1.0}
    with pytest.raises(Unusable, match=r"has the columns data, split, method, score; the row has .*width"):
        rows.append([row])
    with pytest.raises(Unusable, match="has no column setting; its header is 'data,split,method,score'"):
        Rows(rows.path, key=("data", "setting")).done()
    assert rows.path.read_bytes() == whole


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ([{**CELLS[0][0], "split": 5}, {**CELLS[0][0], "split": 6}], "a cell is the rows of one key"),
        ([{**CELLS[0][0], "split": 0.1}], "words and whole numbers"),
        ([{**CELLS[0][0], "split": "5"}], "words and whole numbers"),
        ([], "at least one row"),
    ],
    ids=["two-keys", "fraction", "number-as-word", "empty"],
)
def test_a_cell_that_would_not_be_found_again_is_refused(rows, cell, message):
    whole = rows.path.read_bytes()
    with pytest.raises(ValueError, match=message):
        rows.append(cell)
    assert rows.path.read_bytes() == whole


def test_a_cell_that_another_run_has_written_meanwhile_ends_this_one_and_nothing_is_lost(rows):
    whole = rows.path.read_bytes()
    with pytest.raises(Unusable, match=r"has the cell \('yacht', 0\) already: another run writes to the same file"):
        rows.append(CELLS[0])
    assert rows.path.read_bytes() == whole


@pytest.mark.parametrize("text", ["notes of mine", "dat", "data,spl"])
def test_a_file_of_one_line_without_an_end_is_results_only_if_it_begins_like_them(text, tmp_path):
    rows = Rows(tmp_path / "notes.txt", key=("data", "split"))
    rows.path.write_text(text)
    if text.startswith("dat"):
        rows.append(CELLS[0])
        assert rows.done() == {KEYS[0]}
    else:
        for act in (rows.done, rows.read, lambda: rows.append(CELLS[0])):
            with pytest.raises(Unusable, match="holds something else than results: 'notes of mine'"):
                act()
        assert rows.path.read_text() == text


def test_what_cannot_be_written_is_said_in_a_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(Unusable, match="cannot be written"):
        Rows(tmp_path / "file" / "rows.csv", key=("data", "split")).append(CELLS[0])
