"""Tables in files: what is read is what was written, some rows at a time, and bad cells are named."""

import io
import tempfile
import zipfile
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from deltaband import Exact, ImportantDirections, Nystrom, RandomProjection
from deltaband.cli import tables
from deltaband.cli.options import engine, nbytes
from deltaband.cli.output import Refusal
from deltaband.cli.tables import (
    StoredRows,
    group_values,
    open_table,
    store_rows,
    to_numbers,
)
from deltaband.engines import registered_engines

FRAME = pd.DataFrame({"a": np.arange(25) / 7, "file": np.arange(25), "text": [f'"{i}", and\nmore' for i in range(25)]})


@pytest.fixture(params=[".csv", ".parquet", ".npz"])
def path(request, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "CSV_BLOCK_BYTES", 200)  # so that there are several
    monkeypatch.setattr(tables, "BATCH_ROWS", 10)
    path = tmp_path / f"table{request.param}"
    tables.WRITERS[path.suffix](path, pa.Table.from_pandas(FRAME).to_batches(max_chunksize=7))
    return path


def test_a_table_is_read_as_it_was_written(path):
    table = open_table(path)
    assert table.names == list(FRAME)
    assert table.n_rows in (25, None if path.suffix == ".csv" else 25)
    for _ in range(2):  # again from the first row
        batches = list(table.batches())
        assert len(batches) > 1
        read = pa.Table.from_batches(batch for _, batch in batches)
        assert read.column("text").to_pylist() == FRAME.text.to_list()
        n_before = 0
        for first, batch in batches:
            assert first == n_before
            expected = FRAME[["file", "a"]].to_numpy()[first : first + len(batch)]
            np.testing.assert_array_equal(to_numbers(batch, ["file", "a"], path, first), expected)
            n_before += len(batch)
        assert n_before == 25
    assert next(table.batches(["text", "a"]))[1].schema.names == ["text", "a"]


@pytest.mark.parametrize("bytes_in_memory", [2**20, 100], ids=["memory", "file"])
def test_stored_rows_can_be_iterated_again_and_in_parts(path, bytes_in_memory, monkeypatch):
    batches = open_table(path).numbers(["a", "file"], torch.float32, "reading")
    monkeypatch.setattr(tables, "BATCH_ROWS", 4)
    with tempfile.SpooledTemporaryFile(bytes_in_memory) as file:
        assert store_rows(file, batches) == 25
        check_stored(StoredRows(file, 1, 1, torch.float32, np.ones(25, dtype=bool)))


def check_stored(rows):
    selected = np.random.default_rng(5).random(25) < 0.3
    held_out, others = (replace(rows, selected=part) for part in (selected, ~selected))
    assert (held_out.n_rows, others.n_rows) == (selected.sum(), 25 - selected.sum())
    for _ in range(2):  # again from the first row
        np.testing.assert_array_equal(np.concatenate([y[:, 0] for _, y in held_out]), np.flatnonzero(selected))
        np.testing.assert_array_equal(np.concatenate([y[:, 0] for _, y in others]), np.flatnonzero(~selected))
        x = torch.cat([x for x, _ in rows])
        assert x.dtype == torch.float32
        np.testing.assert_array_equal(x[:, 0], FRAME.a.to_numpy(np.float32))
    for pair, other in zip(rows, rows, strict=True):  # two iterations at once
        np.testing.assert_array_equal(pair[1], other[1])
    scaled = replace(rows, scale=(np.array([3.0]), np.array([2.0])))
    np.testing.assert_array_equal(np.concatenate([y for _, y in scaled])[:, 0], (np.arange(25) - 3) / 2)


def test_rows_that_cannot_be_stored_are_refused():
    class Full:
        def write(self, content):
            raise OSError(28, "No space left on device")

    with pytest.raises(Refusal, match=r"could not be stored in .* \(see TMPDIR\): .*No space left"):
        store_rows(Full(), [np.zeros((2, 2))])


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["1", "", "y"], r"holds text \('y'\) in row 13"),
        (["1", "2", "x y"], r"column 'c' holds text \('x y'\) in row 13; numbers are expected"),
        (["1", " ", "2"], r"holds a missing value \(' '\) in row 12; remove or impute"),
        (["1", "NA", "2"], r"holds a missing value \('NA'\) in row 12"),
        (["1", "", ""], r"holds a missing value \(an empty cell\) in row 12"),
        (["inf", "2", "2"], "holds an infinite value in row 11"),
        ([1.0, None, 2.0], "holds a missing value in row 12"),
        ([[1], [2], [3]], "holds values of type list<.*> in row 11; numbers are expected"),
        (pd.to_datetime(["2020-01-01"] * 3), "holds values of type timestamp"),
    ],
)
def test_bad_cells_are_named_by_row_and_column(cells, message, tmp_path):
    with pytest.raises(Refusal, match=message):
        to_numbers(pa.record_batch({"c": pa.array(cells)}), ["c"], tmp_path, n_before=10)


@pytest.mark.parametrize(
    ("dtype", "cell", "message"),
    [
        (torch.float32, "-1e39", r"holds a value \(-1e\+39\) that is too large for the network's float32 in row 11"),
        (torch.float16, "1e5", r"holds a value \(100000\) that is too large for the network's float16 in row 11"),
        (torch.float32, "1e400", "holds an infinite value in row 11"),
    ],
)
def test_a_number_that_the_network_cannot_hold_is_told_as_it_stands_in_the_file(dtype, cell, message, tmp_path):
    rows = pa.record_batch({"c": [cell, "1"]})
    with pytest.raises(Refusal, match=message):
        to_numbers(rows, ["c"], tmp_path, n_before=10, dtype=dtype)
    if cell != "1e400":
        assert to_numbers(rows, ["c"], tmp_path)[0, 0] == float(cell)


def test_missing_cells_are_nan_where_they_may_be(tmp_path):
    rows = pa.record_batch({"c": ["1", " ", "NA"]})
    np.testing.assert_array_equal(to_numbers(rows, ["c"], tmp_path, allow_missing=True), [[1], [np.nan], [np.nan]])
    with pytest.raises(Refusal, match="an infinite value"):
        to_numbers(pa.record_batch({"c": [np.inf]}), ["c"], tmp_path, allow_missing=True)


def test_the_first_bad_row_counts_whichever_column_it_is_in(tmp_path):
    rows = pa.record_batch({"a": ["1", "1", "x"], "b": ["1", "y", "1"]})
    with pytest.raises(Refusal, match=r"column 'b' holds text .* in row 2"):
        to_numbers(rows, ["a", "b"], tmp_path)


def test_text_becomes_numbers_where_all_of_it_can():
    assert group_values(pa.array(["1", " ", "NA", "2.5"])) == [1.0, None, None, 2.5]
    assert group_values(pa.array(["1", "", "two"])) == ["1", None, "two"]
    assert group_values(pa.array([1, None])) == [1, None]


def test_numbers_of_every_kind_are_numbers(tmp_path):
    from decimal import Decimal

    columns = {
        "text": pa.array([" 1", "2e0 "]),
        "whole": pa.array([1, 2], pa.int8()),
        "truth": pa.array([True, False]),
        "exact": pa.array([Decimal("1.5"), Decimal("2.5")]),
        "coded": pa.array(["1", "2"]).dictionary_encode(),
    }
    found = to_numbers(pa.record_batch(columns), list(columns), tmp_path)
    np.testing.assert_array_equal(found, [[1, 1, 1, 1.5, 1], [2, 2, 0, 2.5, 2]])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.txt", b"a", "the suffix must be one of .csv, .parquet, .npz"),
        ("t.csv", b"\n\n", "is empty"),
        ("t.csv", b"a,b,a\n1,2,3\n", "more than one column 'a'"),
        ("t.csv", b"a,b\n1,2\n1,2,3\n", "Expected 2 columns, got 3"),
        ("t.csv", b"a,b\n1,\xff\n", "is not in UTF-8 .byte 6.: save it as UTF-8"),
        ("t.parquet", b"a,b\n", "could not be read"),
        ("t.npz", b"a,b\n", "could not be read"),
    ],
)
def test_files_that_are_no_tables_are_refused(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refusal, match=message):
        list(open_table(tmp_path / name).batches())


def test_arrays_that_are_no_columns_are_refused(tmp_path):
    path = tmp_path / "t.npz"
    for arrays, message in (
        ({"X": np.zeros((3, 2)), "y": np.zeros(4)}, "the same number of rows: X 3, y 4"),
        ({"X": np.zeros((3, 2, 2))}, "one or two dimensions"),
    ):
        np.savez(path, **arrays)
        with pytest.raises(Refusal, match=message):
            open_table(path)
    np.savez(path, X=np.zeros(2), note=np.array([{}, {}]))
    assert len(list(open_table(path).batches(["X"]))) == 1
    with pytest.raises(Refusal, match="array 'note' could not be read: Object arrays cannot be loaded"):
        list(open_table(path).batches())
    with zipfile.ZipFile(path, "w") as archive:
        content = io.BytesIO()
        np.lib.format.write_array(content, np.zeros(100))
        archive.writestr("X.npy", content.getvalue()[:-8])
    with pytest.raises(Refusal, match="array 'X' could not be read"):
        list(open_table(path).batches())


def test_arrays_are_the_same_in_either_order_and_of_any_kind(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "BATCH_ROWS", 4)
    X = np.arange(22.0).reshape(11, 2)
    for arrays in (
        {"X": X, "y": X[:, 0]},
        {"X": np.asfortranarray(X), "y": X[::1, 0]},
        {"X": X.astype(">f4"), "y": X[:, 0].astype(np.int16)},
    ):
        np.savez_compressed(tmp_path / "t.npz", **arrays)
        table = open_table(tmp_path / "t.npz")
        assert table.names == ["X0", "X1", "y"]
        assert (table.select(["X"]), table.select(["X1,y"])) == (["X0", "X1"], ["X1", "y"])
        read = [to_numbers(rows, ["y", "X0", "X1"], tmp_path) for _, rows in table.batches()]
        assert [len(each) for each in read] == [4, 4, 3]
        np.testing.assert_array_equal(np.concatenate(read), np.column_stack([X[:, 0], X]))


def test_engines_are_written_as_their_constructors_say():
    assert engine("auto") == "auto"
    assert isinstance(engine("exact"), Exact)
    assert repr(engine("important-directions:rank=200,tail=estimate,compress=true,memory=2MB")) == repr(
        ImportantDirections(200, tail="estimate", compress=True, memory=2e6)
    )
    assert repr(engine("nystrom:landmarks=30,choose=leverage,seed=2")) == repr(Nystrom(30, choose="leverage", seed=2))
    assert repr(engine("random-projection:dim=64")) == repr(RandomProjection(64))
    assert all(isinstance(engine(name), made) for name, made in registered_engines().items())
    assert (nbytes("2GB"), nbytes("1.5 MiB"), nbytes("1e6")) == (2e9, 1.5 * 2**20, 1e6)
