"""Tables in files: what is read is what was written, some rows at a time, and bad cells are named."""

import gzip
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
from deltaband.cli import rows, tables
from deltaband.cli.options import as_typed, engine, nbytes
from deltaband.cli.output import Refusal
from deltaband.cli.rows import Columns, store
from deltaband.cli.tables import group_values, open_table, to_numbers
from deltaband.engines import registered_engines
from deltaband.fitting import sanity

NUMBERS = np.arange(25)
TEXTS = [f'"{i}", and\nmore' for i in range(25)]
FRAME = pd.DataFrame({"a": NUMBERS / 7, "file": NUMBERS, "w": NUMBERS / 2, "text": TEXTS})


@pytest.fixture(params=[".csv", ".csv.gz", ".parquet", ".npz"])
def path(request, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "CSV_BLOCK_BYTES", 200)  # so that there are several
    monkeypatch.setattr(tables, "BATCH_ROWS", 10)
    path = tmp_path / f"table{request.param}"
    tables.WRITERS[request.param](path, pa.Table.from_pandas(FRAME).to_batches(max_chunksize=7))
    return path


def test_a_table_is_read_as_it_was_written(path):
    table = open_table(path)
    assert table.names == list(FRAME)
    assert table.n_rows == (None if ".csv" in path.suffixes else 25)
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
    columns = Columns(["a"], ["file"], weight="w", clusters="text")
    batches = columns.read(open_table(path), torch.float32)
    monkeypatch.setattr(rows, "BATCH_ROWS", 4)
    with tempfile.SpooledTemporaryFile(bytes_in_memory) as file:
        check_stored(store(file, columns, batches, torch.float32))


def check_stored(rows):
    assert rows.n_rows == 25
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
    extras = [each for _, _, each in replace(held_out, extras=["sample_weight", "clusters"])]
    np.testing.assert_array_equal(np.concatenate([each["sample_weight"] for each in extras]), FRAME.w[selected])
    clusters = np.concatenate([each["clusters"] for each in extras])
    assert len(set(clusters)) == selected.sum()  # each text is one of its own
    assert clusters.dtype == np.int64


def test_rows_that_cannot_be_stored_are_refused():
    class Full:
        def write(self, content):
            raise OSError(28, "No space left on device")

    with pytest.raises(Refusal, match=r"could not be stored in .* \(see TMPDIR\): .*No space left"):
        store(Full(), Columns(["a"], ["b"]), [np.zeros((2, 2))], torch.float32)


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
        ("t.txt", b"a", "the suffix must be one of .csv, .csv.gz, .parquet, .npz"),
        ("t.csv", b"\n\n", "is empty"),
        ("t.csv", b"a,b,a\n1,2,3\n", "more than one column 'a'"),
        ("t.csv", b"a,b\n1,2\n1,2,3\n", "Expected 2 columns, got 3"),
        ("t.csv", b"a,b\n1,\xff\n", "is not in UTF-8 .byte 6.: save it as UTF-8"),
        ("t.parquet", b"a,b\n", "could not be read"),
        ("t.npz", b"a,b\n", "could not be read"),
        ("t.csv.gz", b"a,b\n", "could not be read: Not a gzipped file"),
        ("t.csv.gz", gzip.compress(b"a,b\n" + b"1,2\n" * 9999, mtime=0)[:60], "could not be read"),
        ("t.csv.gz", gzip.compress(b"a,b\n1,\xff\n", mtime=0), "UTF-8|utf-8|UTF8"),
        ("t.csv", b"a;b\n1;2\n", "columns seem to be separated by ';'; commas are expected"),
        ("t.csv", b'"a\n",b,"a\n"\n1,2,3\n', "more than one column"),
    ],
)
def test_files_that_are_no_tables_are_refused(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refusal, match=message):
        list(open_table(tmp_path / name).batches())


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("\ufeffa,b\n1,2\n", ["a", "b"]),  # as spreadsheets save it
        ('\ufeff"a","b"\r\n"1","2"\r\n', ["a", "b"]),
        ('"a, or ""so""","b\nb"\n1,2\n', ['a, or "so"', "b\nb"]),
        ("\n\na,b\n1,2", ["a", "b"]),
        (" a,b \n1, 2\n", [" a", "b "]),
    ],
    ids=["bom", "bom and quotes", "quotes", "empty lines", "spaces"],
)
def test_headers_are_read_as_spreadsheets_write_them(name, text, columns, tmp_path):
    content = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    table = open_table(tmp_path / name)
    assert table.names == columns
    ((_, batch),) = table.batches()
    np.testing.assert_array_equal(to_numbers(batch, columns, tmp_path), [[1, 2]])


def test_a_wide_table_is_read_and_its_names_are_not_all_told(tmp_path):
    names = [f"x{i}" for i in range(5000)]
    (tmp_path / "wide.csv").write_text(",".join(names) + "\n" + (",".join(["1"] * 5000) + "\n") * 3)
    table = open_table(tmp_path / "wide.csv")
    assert Columns.of(table, ["x7"], None).features == names[:7] + names[8:]
    with pytest.raises(Refusal, match=r"no column 'y'; it has x0, x1, .* and 4988 more") as error:
        table.select(["y"])
    assert len(str(error.value)) < 200


def test_columns_are_features_unless_an_option_names_them(tmp_path):
    (tmp_path / "t.csv").write_text("id,a,b,w,g,y\n1,2,3,4,north,6\n")
    table = open_table(tmp_path / "t.csv")
    assert Columns.of(table, ["y"], None, ["id"], "w", "g") == Columns(["a", "b"], ["y"], "w", "g")
    assert Columns.of(table, ["y"], ["b,a,id"], ["id"]).features == ["b", "a"]
    for arguments, message in (
        ((["y"], None, ["ID"]), "has no column 'ID' .did you mean 'id'"),
        ((["y"], None, ["y"]), "column 'y' cannot be for --target and --exclude at once"),
        ((["y"], None, [], "y"), "cannot be for --target and --sample-weight at once"),
        ((["y"], ["a,w"], [], "w"), "column 'w' cannot be both a feature and for --sample-weight"),
        ((["y"], ["a"], ["a"]), "no columns for features"),
    ):
        with pytest.raises(Refusal, match=message):
            Columns.of(table, *arguments)


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.parquet", "named.parquet"])
def test_the_index_of_a_data_frame_is_no_feature_unless_it_is_named(name, tmp_path, capsys):
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0], "y": [5.0, 6.0]}, index=[7, 9])
    if name == "named.parquet":
        frame.index.name = "id"
    frame.to_parquet(tmp_path / name) if name.endswith("t") else frame.to_csv(tmp_path / name)
    table = open_table(tmp_path / name)
    (index,) = table.index
    assert Columns.of(table, ["y"], None).features == ["a", "b"]
    assert f"column {index!r} is the index of a data frame, and not a feature" in capsys.readouterr().err
    assert Columns.of(table, ["y"], [index, "b"]).features == [index, "b"]
    assert Columns.of(table, [index], None, ["y"]) == Columns(["a", "b"], [index])
    assert capsys.readouterr().err == ""
    columns = Columns.of(table, ["y"], [index, "a"])
    np.testing.assert_array_equal(next(columns.read(table, torch.float32)), [[7, 1, 5], [9, 2, 6]])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("1,2,3,-4,north", "column 'w' holds a negative weight in row 2"),
        ("1,2,3,4,", "column 'g' holds no label in row 2; give each row one"),
        (
            "1,x,3,4,north",
            r"column 'b' holds text \('x'\) in row 2; numbers are expected; --exclude leaves columns out",
        ),
    ],
)
def test_weights_and_labels_are_checked(rows, message, tmp_path):
    (tmp_path / "t.csv").write_text(f"a,b,y,w,g\n1,2,3,4,south\n{rows}\n")
    table = open_table(tmp_path / "t.csv")
    with pytest.raises(Refusal, match=message):
        list(Columns.of(table, ["y"], None, [], "w", "g").read(table, torch.float32))


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


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("give the optimiser's weight_decay=, or damping=", "give the optimiser's --weight-decay, or --damping"),
        ("robust='HC1' needs λ", "--robust HC1 needs λ"),
        ("say which form it returns: variance=", "say which form it returns: --variance"),
        ("input_transform=scale failed", "--standardise or --scaling scale failed"),
        (
            sanity.CAUSES,
            "are its weights loaded, and the inputs scaled as in training (--standardise or --scaling), and the "
            "targets in the units of training (--standardise, --scaling or --target-mean)?",
        ),
        (
            sanity.other_units("original", "fit"),
            "the targets of fit have been scaled already, and tables hold them in their original units",
        ),
        ("raise the damping, or look at variance(x); the loss was 3", None),  # words, not arguments
        ("'variance', 'log_variance' or 'std', loss 'weighted_mean', noise_std", None),
    ],
)
def test_messages_of_the_library_name_options_as_they_are_typed(message, typed):
    assert as_typed(message) == (typed or message)


def test_messages_about_options_alone_name_them_without_an_equals_sign_too():
    assert (
        as_typed("give weight_decay or damping, not both", words=True) == "give --weight-decay or --damping, not both"
    )
    assert as_typed("noise must be 'auto' or 'none'", words=True) == "--noise must be 'auto' or 'none'"
    assert as_typed("batch_size goes with loss='sum'", words=True) == "--batch-size goes with --loss sum"
