import gzip
import hashlib
import json
import math
import socket
from dataclasses import replace
from http.client import IncompleteRead
from types import SimpleNamespace
from urllib.error import URLError

import numpy as np
import pandas as pd
import pytest
import sklearn.datasets

from experiments import data
from experiments.tests.small_data import catalogue, write

TABLE = np.array([[1.5, -2.0, 10.0], [2.5, 0.0, 20.0], [3.5, 4.0, 30.0], [0.25, 4.0, 40.0]])
X, Y = TABLE[:, :-1], TABLE[:, -1]
TEXT = "a,b,target\n1.5,-2,10\n2.5,0,20\n3.5,4,30\n0.25,4,40\n"
TINY = data.DataSet("tiny", 4, 2, 7, data.checksum(X, Y), "UCI 99")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DELTABAND_DATA", raising=False)
    catalogue(monkeypatch, TINY)
    openml(monkeypatch, URLError("no network in tests"))


def openml(monkeypatch: pytest.MonkeyPatch, answer: object) -> list[dict]:
    """A stand-in for `fetch_openml` that gives this answer; returns the list of what it will be asked."""
    asked = []

    def fetch_openml(**options: object) -> object:
        asked.append(options)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(data, "fetch_openml", fetch_openml)
    return asked


def bunch(features: np.ndarray = X, target: np.ndarray | None = Y) -> SimpleNamespace:
    table = pd.DataFrame(features, columns=list("abcdefgh")[: features.shape[1]])
    return SimpleNamespace(data=table, target=None if target is None else pd.Series(target, name="goal"))


# the catalogue and the folder


def test_the_catalogue_holds_the_papers_eleven_data_sets_smallest_first(monkeypatch):
    monkeypatch.undo()
    expected = "yacht boston energy concrete wine-red ailerons superconduct protein ct sgemm year"
    assert " ".join(data.NAMES) == expected
    entries = [data.CATALOGUE[name] for name in data.NAMES]
    assert [entry.name for entry in entries] == list(data.NAMES)
    assert sorted(entry.rows for entry in entries) == [entry.rows for entry in entries]
    assert {entry.name for entry in entries if entry.checksum is None} == {"ct", "year"}
    ids = [entry.openml for entry in entries if entry.openml is not None]
    assert len(set(ids)) == len(ids) == 10  # all but ct, and no two the same


def test_the_folder_is_the_one_given_else_that_of_the_environment_else_none(tmp_path, monkeypatch):
    given, other = tmp_path / "given", tmp_path / "other"
    given.mkdir()
    other.mkdir()
    assert data.folder(None) is None
    assert data.folder(str(given)) == given
    monkeypatch.setenv("DELTABAND_DATA", str(other))
    assert data.folder(None) == other
    assert data.folder(str(given)) == given


def test_a_folder_that_is_not_there_ends_the_program_with_a_sentence(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=r"^--data: .*nowhere is not a folder$"):
        data.folder(str(tmp_path / "nowhere"))
    monkeypatch.setenv("DELTABAND_DATA", str(write(tmp_path, TEXT)))
    with pytest.raises(SystemExit, match=r"^DELTABAND_DATA: .*tiny\.csv\.gz is not a folder$"):
        data.folder(None)


# files


def test_a_file_gives_its_features_and_its_target(tmp_path):
    write(tmp_path, TEXT)
    features, target = data.load("tiny", tmp_path)
    np.testing.assert_array_equal(features, X)
    np.testing.assert_array_equal(target, Y)
    assert features.dtype == target.dtype == np.float64


@pytest.mark.parametrize(
    ("text", "expected", "got"),
    [
        (TEXT.split("\n", 1)[1], "last column is 'target'", "'10'"),
        (TEXT.replace("a,b,target", "target,a,b"), "last column is 'target'", "'b'"),
        (TEXT.replace("3.5", "many"), "numbers in column 'a'", "'many'"),
        (TEXT.replace("3.5", ""), "numbers in column 'a'", "nan in row 2"),
        (TEXT.replace("20\n", "inf\n"), "numbers in column 'target'", "inf in row 1"),
        (TEXT.replace(",20\n", "\n"), "numbers in column 'target'", "nan in row 1"),
        (TEXT.replace("0.25,4,40\n", ""), "4 rows and 2 features", "3 rows and 2 features"),
        ("a,b,target\n", "4 rows and 2 features", "0 rows and 2 features"),
        (TEXT.replace(",", ",5,").replace("a,5,b,5,", "a,c,b,e,"), "4 rows and 2 features", "4 rows and 4 features"),
        (TEXT.replace("\n", ",5\n").replace("target,5", "target"), "rows of 3 fields", "more"),
        (TEXT.replace("2.5,0,20\n", "2.5,0,20,5\n"), "a gzipped CSV file", "ParserError"),
        (TEXT.replace("3.5", "3.25"), "content with checksum 0e0419612af73f9c", "[0-9a-f]{16}$"),
        ("", "a gzipped CSV file", "EmptyDataError"),
        (b"a,b,target\n\xff\xfe", "a gzipped CSV file", "UnicodeDecodeError"),
    ],
    ids=(
        *("no-header", "target-first", "word", "missing", "infinite", "short-row", "rows", "no-rows"),
        *("features", "surplus", "one-surplus", "content", "empty", "bytes"),
    ),
)
def test_a_malformed_file_says_what_was_expected_and_what_came(tmp_path, text, expected, got):
    write(tmp_path, text)
    with pytest.raises(data.Malformed, match=rf"^tiny \(.*tiny\.csv\.gz\): expected .*{expected}.*, got .*{got}"):
        data.load("tiny", tmp_path)


@pytest.mark.parametrize(
    ("damage", "got"),
    [
        (lambda whole: whole[:-12], "EOFError"),
        (lambda whole: b"", "EmptyDataError"),
        (lambda whole: gzip.decompress(whole), "BadGzipFile"),
        (lambda whole: whole[:20] + bytes([whole[20] ^ 255]) + whole[21:], "error"),
    ],
    ids=["truncated", "empty", "not-gzipped", "bit-rot"],
)
def test_a_damaged_archive_is_malformed(tmp_path, damage, got):
    path = write(tmp_path, TEXT)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(data.Malformed, match=rf"^tiny \(.*\): expected a gzipped CSV file, got .*{got}"):
        data.load("tiny", tmp_path)


def test_without_a_checksum_the_shape_is_still_verified(tmp_path, monkeypatch):
    catalogue(monkeypatch, replace(TINY, checksum=None))
    write(tmp_path, TEXT.replace("3.5", "3.25"))
    assert data.load("tiny", tmp_path)[0][2, 0] == 3.25
    write(tmp_path, TEXT + "5,5,5\n")
    with pytest.raises(data.Malformed, match="4 rows and 2 features, got 5 rows and 2 features"):
        data.load("tiny", tmp_path)


# the checksum


def test_the_checksum_is_the_one_the_catalogue_was_made_with():
    assert data.checksum(X, Y) == "0e0419612af73f9c"


def test_the_checksum_ignores_the_order_of_the_rows():
    rng = np.random.default_rng(0)
    table = rng.integers(0, 3, (200, 4)) * 0.1  # many rows more than once
    other = rng.permutation(table)
    assert data.checksum(other[:, :-1], other[:, -1]) == data.checksum(table[:, :-1], table[:, -1])


def test_the_checksum_ignores_how_numbers_are_written(tmp_path):
    write(tmp_path, "x,y,target\r\n2.50e0,-0.0,2e1\r\n1.500,-2.000,10.0\r\n+3.5,4,30.\r\n.25,4.0,4E+1\r\n")
    features, _ = data.load("tiny", tmp_path)
    np.testing.assert_array_equal(features, X[[1, 0, 2, 3]])


@pytest.mark.parametrize("noise", [1e-15, -1e-15, 1e-12])
def test_the_checksum_ignores_the_last_digits(noise):
    # short decimals, thirds, fractions of two, zeros, and a largest value that is a power of two
    column = np.concatenate([np.arange(-999, 1000) / 1000, np.arange(300) / 300, np.arange(1024) / 1024, [1.0, 0.0]])
    table = np.column_stack([column, column[::-1] * 3, column**2])
    other = table + noise * np.abs(table).max(axis=0)
    assert (other != table).any(axis=0).all()
    assert data.checksum(other[:, :-1], other[:, -1]) == data.checksum(table[:, :-1], table[:, -1])


@pytest.mark.parametrize(
    "change",
    [
        lambda table: np.where(table == 2.5, 2.5001, table),
        lambda table: table[:, [1, 0, 2]],
        lambda table: table[:, [0, 2, 1]],
        lambda table: table * [2, 1, 1],
        lambda table: table * [1, 1, -1],
        lambda table: table[[0, 1, 2, 2]],
        lambda table: np.column_stack([table[:, :-1], table[::-1, -1]]),
        lambda table: table[:3],
    ],
    ids=["a-value", "columns", "target", "unit", "sign", "a-row-twice", "targets-of-others", "a-row-less"],
)
def test_the_checksum_sees_other_content(change):
    other = change(TABLE)
    assert data.checksum(other[:, :-1], other[:, -1]) != data.checksum(X, Y)


# OpenML


def test_the_folder_comes_before_openml(tmp_path, monkeypatch):
    asked = openml(monkeypatch, bunch(X[::-1], Y[::-1]))
    features, target = data.load("tiny", tmp_path)  # an empty folder
    np.testing.assert_array_equal(features, X[::-1])
    np.testing.assert_array_equal(target, Y[::-1])
    assert features.dtype == target.dtype == np.float64
    assert [(options["data_id"], options["target_column"]) for options in asked] == [(7, "default-target")]
    data.load("tiny", None)
    assert len(asked) == 2
    write(tmp_path, TEXT)
    np.testing.assert_array_equal(data.load("tiny", tmp_path)[0], X)
    assert len(asked) == 2


def test_a_malformed_file_is_not_replaced_by_openmls_copy(tmp_path, monkeypatch):
    asked = openml(monkeypatch, bunch())
    write(tmp_path, "")
    with pytest.raises(data.Malformed):
        data.load("tiny", tmp_path)
    assert asked == []


def test_the_target_is_the_mean_of_its_columns_and_dropped_columns_go(monkeypatch):
    catalogue(monkeypatch, replace(TINY, targets=("run1", "run2"), dropped=("other", "hidden")))
    answer = bunch()
    answer.data.insert(1, "other", 5.0)  # `hidden` is one that OpenML itself leaves out
    answer.target = pd.DataFrame({"run1": Y - 1, "run2": Y + 1})
    asked = openml(monkeypatch, answer)
    features, target = data.load("tiny", None)
    np.testing.assert_array_equal(features, X)
    np.testing.assert_array_equal(target, Y)
    assert asked[0]["target_column"] == ["run1", "run2"]


def test_openmls_categories_and_integers_are_numbers(monkeypatch):
    answer = bunch()
    answer.data = pd.DataFrame({"a": pd.Categorical([str(x) for x in X[:, 0]]), "b": pd.array(X[:, 1], "Int64")})
    answer.target = pd.Series(pd.Categorical(Y.astype(int)))
    openml(monkeypatch, answer)
    features, target = data.load("tiny", None)
    np.testing.assert_array_equal(features, X)
    np.testing.assert_array_equal(target, Y)


def test_scikit_learn_finds_in_its_cache_what_is_asked_for(tmp_path, monkeypatch):
    """The real `fetch_openml`, on a cache as it leaves it: with categories, an ignored target and an ignored column."""

    def no_network(*_: object) -> None:
        raise OSError("no network in tests")

    def keep(path: str, content: str) -> None:
        path = tmp_path / "openml" / "openml.org" / f"{path}.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(content.encode()))

    columns = [("a", "nominal"), ("b", "nominal"), ("run1", "numeric"), ("run2", "numeric"), ("other", "numeric")]
    arff = "@relation tiny\n" + "".join(f"@attribute {name} {kind}\n" for name, kind in columns)
    arff += "@data\n" + "".join(f"{a},'{b:.0f}',{target - 1},{target + 1},5\n" for a, b, target in TABLE)
    description = {
        **{"id": "7", "name": "tiny", "version": "1", "status": "active", "format": "ARFF", "description": ""},
        **{"file_id": "7", "url": "https://www.openml.org/data/v1/download/7", "processing_date": ""},
        "md5_checksum": hashlib.md5(arff.encode()).hexdigest(),
    }
    features = [
        {
            **{"index": str(i), "name": name, "data_type": kind, "is_row_identifier": "false"},
            **{"is_target": str(name == "run1").lower(), "is_ignore": str(name in ("run2", "other")).lower()},
            **{"number_of_missing_values": "0"},
        }
        for i, (name, kind) in enumerate(columns)
    ]
    keep("api/v1/json/data/7", json.dumps({"data_set_description": description}))
    keep("api/v1/json/data/features/7", json.dumps({"data_features": {"feature": features}}))
    keep("api/v1/json/data/qualities/7", json.dumps({"data_qualities": {"quality": []}}))
    keep("data/v1/download/7", arff)
    monkeypatch.setenv("SCIKIT_LEARN_DATA", str(tmp_path))
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(data, "fetch_openml", sklearn.datasets.fetch_openml)
    catalogue(monkeypatch, replace(TINY, targets=("run1", "run2"), dropped=("other",)))
    loaded, target = data.load("tiny", None)
    np.testing.assert_array_equal(loaded, X)
    np.testing.assert_array_equal(target, Y)
    catalogue(monkeypatch, replace(TINY, targets=("run3",)))
    with pytest.raises(data.Malformed, match="run3"):
        data.load("tiny", None)


@pytest.mark.parametrize(
    "error",
    [URLError("Name or service\n not known"), TimeoutError("timed out"), OSError("disk full"), IncompleteRead(b"")],
    ids=lambda error: type(error).__name__,
)
def test_what_can_be_had_nowhere_is_missing(tmp_path, monkeypatch, error):
    openml(monkeypatch, error)
    for folder, looked in ((tmp_path, r"there is no .*tiny\.csv\.gz"), (None, r"no folder given \(--data DIR or .*\)")):
        with pytest.raises(data.Missing, match=rf"^tiny: {looked}, and OpenML 7 could not be reached") as caught:
            data.load("tiny", folder)
        assert type(error).__name__ in str(caught.value)
        assert "UCI 99" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_without_an_openml_copy_the_message_says_where_to_get_it(tmp_path, monkeypatch):
    catalogue(monkeypatch, replace(TINY, openml=None))
    asked = openml(monkeypatch, bunch())
    with pytest.raises(data.Missing, match=r"tiny\.csv\.gz, and OpenML has no usable copy .* get it from UCI 99$"):
        data.load("tiny", tmp_path)
    assert asked == []


@pytest.mark.parametrize(
    ("answer", "expected", "got"),
    [
        (bunch(X[:3], Y[:3]), "4 rows and 2 features", "3 rows and 2 features"),
        (bunch(TABLE), "4 rows and 2 features", "4 rows and 3 features"),
        (bunch(X, Y[::-1]), f"content with checksum {TINY.checksum}", "[0-9a-f]{16}$"),
        (bunch(X, Y * [1, 1, math.nan, 1]), "numbers in column 'goal'", "nan in row 2"),
        (bunch(X, np.array(list("aabb"))), "numbers in column 'goal'", "'a'"),
        (bunch(X, None), "a table with a target", "one without"),
        (KeyError("Could not find target_column='goal'"), "a table with a target", "KeyError.*'goal'"),
    ],
    ids=["rows", "features", "content", "missing", "classes", "no-target", "other-target"],
)
def test_another_table_at_openml_is_malformed(monkeypatch, answer, expected, got):
    openml(monkeypatch, answer)
    with pytest.raises(data.Malformed, match=rf"^tiny \(OpenML 7\): expected {expected}.*, got .*{got}"):
        data.load("tiny", None)


def test_what_is_missing_or_malformed_is_reported_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    names = ["first", "absent", "broken", "last"]
    catalogue(monkeypatch, *(replace(TINY, name=name) for name in names))
    for name, text in (("first", TEXT), ("broken", TEXT + "1,2,3\n"), ("last", TEXT)):
        write(tmp_path, text, name)
    available = data.Available(names, tmp_path)
    assert [name for name, features, _ in available if features.shape == (4, 2)] == ["first", "last"]
    assert available.malformed == ["broken"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ")[:2] for line in lines] == [["missing:", "absent:"], ["malformed:", "broken"]]
