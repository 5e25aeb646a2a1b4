import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from deltaband.data import batches as batches_module
from deltaband.data import inputs
from deltaband.data.batches import read, read_targets
from deltaband.data.inputs import Inputs

X = torch.arange(30.0).reshape(10, 3)
Y = torch.arange(10.0)


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y, strict=True)


class Unsized(Dataset):
    def __getitem__(self, i):
        return X[i], Y[i]


def collect(batches, rows=4):
    chunks = list(batches.chunks(lambda x: rows))
    x, y = torch.cat([x.tensors[0] for x, _, _ in chunks]), torch.cat([y[:, 0] for _, y, _ in chunks])
    return x, y, [len(x) for x, _, _ in chunks]


@pytest.mark.parametrize("batch_size", [1, 3, 4, 7, 100])
@pytest.mark.parametrize("rows", [1, 4, 10, 50])
def test_chunks_hold_every_row_once_and_in_order_whatever_the_batches(batch_size, rows):
    source = [(X[i : i + batch_size], Y[i : i + batch_size]) for i in range(0, 10, batch_size)]
    x, y, sizes = collect(read(source), rows)
    assert torch.equal(x, X)
    assert torch.equal(y, Y.double())
    assert all(size == rows for size in sizes[:-1])
    assert sizes[-1] <= rows
    firsts = [first for _, _, first in read(source).chunks(lambda x: rows)]
    assert firsts == list(range(0, 10, rows))


def test_rows_of_different_shape_are_not_mixed():
    source = [(torch.zeros(2, 3), torch.zeros(2)), (torch.zeros(3, 5), torch.zeros(3)), (torch.zeros(1, 5), [0.0])]
    assert [tuple(x.tensors[0].shape) for x, _, _ in read(source).chunks(lambda x: 10)] == [(2, 3), (4, 5)]


def test_empty_batches_are_passed_over():
    source = [(X[:0], Y[:0]), (X, Y), (X[:0], Y[:0])]
    assert collect(read(source))[2] == [4, 4, 2]


@pytest.mark.parametrize(
    ("loader", "n"),
    [
        (DataLoader(TensorDataset(X, Y), batch_size=4), 10),
        (DataLoader(TensorDataset(X, Y), batch_size=4, drop_last=True), 8),
        (DataLoader(TensorDataset(X, Y), batch_size=4, sampler=RandomSampler(range(10), num_samples=6)), 6),
        (DataLoader(TensorDataset(X, Y), batch_sampler=BatchSampler(range(10), 4, False)), None),
        (DataLoader(Stream(), batch_size=4), None),
        (TensorDataset(X, Y), 10),
        ([(X, Y), (X, Y)], 20),
        (iter([(X, Y)]), None),
    ],
)
def test_the_number_of_rows_is_known_where_it_can_be(loader, n):
    batches = read(loader)
    assert batches.n_rows == n
    if n is not None:
        assert len(collect(batches)[0]) == n


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.float16, bool, ">f8", np.longdouble, ">g"])
def test_arrays_of_any_number_type_are_read(dtype):
    values = np.array([[1, 0], [0, 1]], dtype=dtype)
    assert Inputs.of(values).tensors[0].shape == (2, 2)
    np.testing.assert_array_equal(read_targets(values[:, 0]), [[1.0], [0.0]])
    assert read_targets(values[:, :1]).dtype == torch.float64


def test_reversed_and_read_only_arrays_are_read():
    values = np.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(Inputs.of(values[::-1]).tensors[0], values[::-1])
    values.flags.writeable = False
    np.testing.assert_array_equal(Inputs.of(values).tensors[0], values)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: read(X), TypeError, "targets are missing"),
        (lambda: read(X.numpy()), TypeError, "targets are missing"),
        (lambda: read(X, Y[:5]), ValueError, "10 inputs, 5 targets"),
        (lambda: collect(read([(X, Y), (X, torch.zeros(10, 2))])), ValueError, "batch 1, which begins with row 10"),
        (lambda: read(X, "y"), TypeError, "targets must be a tensor"),
        (
            lambda: read([[1, 2]], Y),
            TypeError,
            r"must be a tensor or a NumPy array, or several \(np.asarray\), got a list",
        ),
        (lambda: read(np.array([["a"]]), [1.0]), TypeError, "inputs must be numbers"),
        (lambda: read(np.array([[1j]]), [1.0]), TypeError, "inputs must be numbers"),
        (lambda: read(np.ma.masked_greater(X.numpy(), 5), Y), TypeError, "must not be masked"),
        (lambda: read(X.to_sparse(), Y), TypeError, "ordinary tensor"),
        (lambda: read(X.to("meta"), Y), TypeError, "ordinary tensor"),
        (lambda: collect(read([(torch.tensor(1.0), torch.tensor(2.0))])), ValueError, "one row per example"),
        (lambda: read(Unsized()), TypeError, "must have a length"),
        (lambda: read(X.to(torch.complex64), Y), TypeError, "inputs must be real"),
        (lambda: read(X, Y.to(torch.complex64)), TypeError, "targets must be real"),
        (lambda: read(torch.tensor(1.0), Y), ValueError, "one row per example"),
        (lambda: read(DataLoader(TensorDataset(X, Y)), Y), TypeError, "already holds its targets"),
        (lambda: read(Stream()), TypeError, "must be wrapped"),
        (lambda: read(3), TypeError, "got int"),
        (lambda: read(X, Y, 9), ValueError, "n_rows=9 was given, but the data hold 10"),
        (lambda: read(iter([]), None, 0), ValueError, "n_rows must be a positive"),
        (lambda: collect(read([X])), TypeError, r"pair \(x, y\), got Tensor"),
        (lambda: collect(read([(X, Y, Y)])), TypeError, r"pair \(x, y\), got a tuple of 3"),
        (lambda: collect(read((X, Y))), TypeError, "give arrays as X and y"),
    ],
)
def test_bad_data_are_refused_with_what_to_do(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("as_loader", [True, False])
def test_the_first_bad_row_is_named(bad, as_loader):
    for where in ("inputs", "targets"):
        x, y = X.clone(), Y.clone()
        (x if where == "inputs" else y)[7] = bad
        with pytest.raises(ValueError, match=f"{where} hold .* in row 7"):
            collect(read([(x[:5], y[:5]), (x[5:], y[5:])]) if as_loader else read(x, y))


@pytest.mark.parametrize("numbers", [1, 3, 4, 1000])
@pytest.mark.parametrize("row", [0, 5, 9])
def test_a_bad_row_is_named_however_many_are_looked_at_at_once(monkeypatch, numbers, row):
    monkeypatch.setattr(inputs, "NUMBERS_CHECKED_AT_ONCE", numbers)
    values = torch.zeros(10, 2)
    inputs.check_finite(values, "inputs")
    values[row:, 1] = torch.nan
    with pytest.raises(ValueError, match=f"inputs hold NaN in row {row + 7};"):
        inputs.check_finite(values, "inputs", first_row=7)
    inputs.check_finite(torch.zeros(0, 2), "inputs")


@pytest.mark.parametrize("source", ["list", "iterator", "arrays"])
def test_peek_reads_the_first_rows_once_and_loses_none(source):
    pairs = [(X[i : i + 3], Y[i : i + 3]) for i in range(0, 10, 3)]
    reads = []
    data = (reads.append(i) or pair for i, pair in enumerate(pairs)) if source == "iterator" else pairs
    batches = read(X, Y) if source == "arrays" else read(data)
    first, batches = batches.peek()
    assert torch.equal(first.x.tensors[0], X[: len(first.x)])
    assert torch.equal(first.y[:, 0], Y[: len(first.x)].double())
    assert len(first.x) >= 8
    n_read = len(reads)
    again, batches = batches.peek()
    assert again is first
    assert len(reads) == n_read
    assert torch.equal(collect(batches)[0], X)
    assert batches.reiterable == (source != "iterator")
    if batches.reiterable:
        assert torch.equal(collect(batches)[0], X)


@pytest.mark.parametrize("as_loader", [True, False])
def test_arrays_are_checked_once_and_loaders_as_they_stream(monkeypatch, as_loader):
    checked = []
    monkeypatch.setattr(batches_module, "check_finite", lambda values, *_: checked.append(len(values)))
    batches = read([(X, Y)]) if as_loader else read(X, Y)
    assert checked == ([] if as_loader else [10])
    _, batches = batches.peek()
    collect(batches)
    assert checked == ([10, 10] if as_loader else [10])
