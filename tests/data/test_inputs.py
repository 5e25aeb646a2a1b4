"""Inputs of every layout: what reaches `forward`, and that the intervals are those of plain gradients."""

from collections import UserDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset

import tests.reference as reference
from deltaband import Exact, PredictionIntervals
from deltaband.data.inputs import Inputs

pytestmark = pytest.mark.filterwarnings("ignore:the network has p", "ignore:n − p")
DAMPING = 0.5
N = 40


class Two(nn.Module):
    """What all of the networks below compute, however they are given a (n, 3) and b (n, 2)."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 1)

    def of(self, a, b):
        return self.head(torch.tanh(self.first(torch.cat([a, b], dim=1))))[:, 0]

    def forward(self, a, b):
        return self.of(a, b)


class WithDefaults(Two):
    def forward(self, a=None, unused=None, b=None, *, scale=1.0):
        assert unused is None
        return self.of(a, b) * scale


class Starred(Two):
    def forward(self, *tensors):
        return self.of(*tensors)


class Keywords(Two):
    def forward(self, **tensors):
        return self.of(**tensors)


class OneTuple(Two):
    def forward(self, pair):
        return self.of(*pair)


class OneDict(Two):
    def forward(self, batch):
        return self.of(batch["a"], batch["b"])


class OneDictAndOptions(Two):
    def forward(self, batch, **options):
        return self.of(batch["a"], batch["b"])


class BatchEncoding(UserDict):
    """As of Hugging Face: a mapping that is no dict."""


def pair(n=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, generator=generator), torch.randn(n, 2, generator=generator)


def by_name(a, b):
    return {"a": a, "b": b}


LAYOUTS = {
    "tuple": (Two, lambda a, b: (a, b)),
    "list": (Two, lambda a, b: [a, b]),
    "tuple, starred": (Starred, lambda a, b: (a, b)),
    "tuple as one": (OneTuple, lambda a, b: (a, b)),
    "names": (Two, by_name),
    "names in another order": (Two, lambda a, b: {"b": b, "a": a}),
    "names among defaults": (WithDefaults, by_name),
    "names, starred": (Keywords, by_name),
    "names as one": (OneDict, by_name),
    "names as one, options": (OneDictAndOptions, by_name),
    "a mapping": (Two, lambda a, b: BatchEncoding(a=a, b=b)),
    "a mapping as one": (OneDict, lambda a, b: BatchEncoding(a=a, b=b)),
    "arrays": (Two, lambda a, b: (a.numpy(), b.double().numpy())),
    "arrays by name": (Two, lambda a, b: {"a": a.numpy(), "b": b.numpy()}),
}


def expected(model, new, train=None):
    rows = [[(a[None], b[None]) for a, b in zip(*each, strict=True)] for each in (train or pair(), new)]
    two = Two()
    two.load_state_dict(model.state_dict())
    J, g = (reference.jacobians(two, each) for each in rows)
    return reference.answers(J, DAMPING, g)


@pytest.mark.parametrize("as_loader", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_of_any_layout_reach_the_network(layout, as_loader):
    torch.manual_seed(0)
    make, laid_out = LAYOUTS[layout]
    model, (a, b), new = make(), pair(), pair(5, seed=1)
    y = torch.randn(N)
    band = PredictionIntervals(model, damping=DAMPING, engine=Exact())
    if as_loader:
        band.fit([(laid_out(a[i : i + 7], b[i : i + 7]), y[i : i + 7]) for i in range(0, N, 7)])
    else:
        band.fit(laid_out(a, b), y)
    q, h, p_star = expected(model, new)
    np.testing.assert_allclose(band.variance(laid_out(*new)), q[:, 0], rtol=1e-4)
    np.testing.assert_allclose(band.leverage(laid_out(*new)), h[:, 0], rtol=1e-4)
    assert band.effective_parameters_ == pytest.approx(p_star, rel=1e-4)
    assert band.n_rows_ == N
    answer = band.calibrate(laid_out(*pair(60, seed=2)), torch.randn(60)).predict(laid_out(*new))
    assert type(answer.mean) is (np.ndarray if "arrays" in layout else torch.Tensor)
    torch.testing.assert_close(torch.as_tensor(answer.mean), model.of(*new).detach())


# --- batches of other layouts


@dataclass
class Batch:
    a: torch.Tensor
    b: torch.Tensor
    target: torch.Tensor


class Named(Dataset):
    """Rows as Hugging Face has them, with their labels inside."""

    def __init__(self, y):
        self.a, self.b, self.y = *pair(), y

    def __len__(self):
        return N

    def __getitem__(self, i):
        return {"a": self.a[i], "b": self.b[i], "labels": self.y[i]}


def without_labels(batch):
    return {name: batch[name] for name in ("a", "b")}, batch["labels"]


@pytest.mark.parametrize("source", ["dataset", "loader", "generator", "objects", "triples"])
def test_batches_of_any_layout_become_inputs_and_targets(source):
    torch.manual_seed(0)
    model, (a, b), y, new = Two(), pair(), torch.randn(N), pair(5, seed=1)
    pieces = [slice(i, i + 9) for i in range(0, N, 9)]
    data, batch = {
        "dataset": lambda: (Named(y), without_labels),
        "loader": lambda: (DataLoader(Named(y), batch_size=9, shuffle=True), without_labels),
        "generator": lambda: (({**by_name(a[i], b[i]), "labels": y[i]} for i in pieces), without_labels),
        "objects": lambda: ([Batch(a[i], b[i], y[i]) for i in pieces], lambda each: ((each.a, each.b), each.target)),
        "triples": lambda: ([(a[i], b[i], y[i]) for i in pieces], lambda each: (each[:2], each[2])),
    }[source]()
    band = PredictionIntervals(model, damping=DAMPING, engine=Exact(), batch=batch).fit(data)
    np.testing.assert_allclose(band.variance(by_name(*new)), expected(model, new)[0][:, 0], rtol=1e-4)
    assert band.n_rows_ == N


def test_a_generator_is_read_once():
    model, (a, b), y = Two(), pair(), torch.randn(N)
    data = (((a[i : i + 9], b[i : i + 9]), y[i : i + 9]) for i in range(0, N, 9))
    band = PredictionIntervals(model, damping=DAMPING, engine=Exact()).fit(data)
    assert band.n_rows_ == N
    with pytest.raises(ValueError, match="a generator can be read only once"):
        band.fit(data)
    assert band.n_rows_ == N


# --- sequences of different lengths


class Padded(nn.Module):
    """The mean over the steps that the mask leaves."""

    def __init__(self):
        super().__init__()
        self.table, self.places, self.head = nn.Embedding(9, 4), nn.Embedding(20, 4), nn.Linear(4, 1)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True)

    def forward(self, ids, mask=None):
        mask = torch.ones_like(ids) if mask is None else mask
        y = self.table(ids) + self.places(torch.arange(ids.shape[1])[None])
        y = self.encoder(y, src_key_padding_mask=mask == 0) * mask[:, :, None]
        return self.head(y.sum(dim=1) / mask.sum(dim=1, keepdim=True))


def padded(sentences):
    ids = torch.zeros(len(sentences), max(map(len, sentences)), dtype=torch.long)
    for row, sentence in zip(ids, sentences, strict=True):
        row[: len(sentence)] = sentence
    lengths = torch.tensor([[len(sentence)] for sentence in sentences])
    return {"ids": ids, "mask": (torch.arange(ids.shape[1]) < lengths).long()}


@pytest.mark.parametrize("n", [30, 200], ids=["dual", "primal"])
def test_padding_in_batches_of_different_lengths_changes_nothing(n):
    torch.manual_seed(0)
    model = Padded().eval()
    sentences = [torch.randint(0, 9, (int(length),)) for length in torch.randint(1, 12, (n,))]
    new = [torch.randint(0, 9, (length,)) for length in (1, 5, 14)]
    y = torch.randn(n)
    batches = [(padded(sentences[i : i + 8]), y[i : i + 8]) for i in range(0, n, 8)]
    assert len({len(x["ids"][0]) for x, _ in batches}) > 1
    band = PredictionIntervals(model, damping=DAMPING, engine=Exact()).fit(batches)
    J, g = (reference.jacobians(model, [(sentence[None],) for sentence in each]) for each in (sentences, new))
    q, h, p_star = reference.answers(J, DAMPING, g)
    np.testing.assert_allclose(band.variance(padded(new)), q[:, 0], rtol=1e-4)
    np.testing.assert_allclose(band.leverage(padded(new)), h[:, 0], rtol=1e-4)
    assert band.effective_parameters_ == pytest.approx(p_star, rel=1e-4)
    alone = torch.cat([band.variance({"ids": sentence[None]}) for sentence in new])
    np.testing.assert_allclose(alone, q[:, 0], rtol=1e-4)


# --- what cannot be


A, B = pair(6)
NESTED = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ((A, B[:4]), ValueError, "same number of rows, got {0: 6, 1: 4}"),
        ({"a": A, "b": B[:4]}, ValueError, "same number of rows, got {'a': 6, 'b': 4}"),
        ({"a": A, "b": {"c": B}}, TypeError, "input 'b' must be a tensor or a NumPy array, got dict"),
        ({"a": A, "b": [1.0, 2.0]}, TypeError, "input 'b' must be a tensor or a NumPy array, got a list of 2"),
        ({"a": A, "b": None}, TypeError, "input 'b' must be a tensor or a NumPy array, got NoneType"),
        ({"a": A, "b": "text"}, TypeError, "input 'b' must be a tensor or a NumPy array, got str"),
        ({"a": A, "b": torch.tensor(1.0)}, ValueError, "input 'b' must have one row per example, got a single number"),
        ({"a": A, 1: B}, TypeError, r"names that are strings, got \['a', 1\]"),
        ({}, ValueError, "inputs are an empty dict"),
        ((), ValueError, "inputs are an empty tuple"),
        ((A, {"b": B}), TypeError, r"NumPy array, or several \(np.asarray\), got a tuple of 2"),
        (["a", "b"], TypeError, "got a list of 2"),
        ("text", TypeError, "inputs must be a tensor or a NumPy array, got str"),
        ({"a": A, "b": np.array(["x"] * 6)}, TypeError, "input 'b' must be numbers"),
        (pack_sequence([torch.zeros(3), torch.zeros(2)]), TypeError, "give the padded tensor and lengths"),
        (NESTED, TypeError, "ordinary tensor"),
    ],
)
def test_inputs_that_are_not_rows_of_tensors_are_refused(x, error, message):
    with pytest.raises(error, match=message):
        Inputs.of(x)
    band = PredictionIntervals(Two(), damping=1.0)
    with pytest.raises((error, TypeError), match=message):
        band.fit(x, torch.zeros(6))


def test_arguments_that_forward_does_not_take_are_refused_with_what_it_takes():
    band = PredictionIntervals(Two(), damping=1.0)
    for x in ({"a": A, "c": B}, (A, B, B)):
        with pytest.raises(ValueError, match=r"could not be evaluated on a batch of .*its forward takes \(a, b\)"):
            band.fit(x, torch.zeros(6))


def test_a_bad_number_is_named_with_its_input():
    bad = B.clone()
    bad[3, 0] = torch.nan
    with pytest.raises(ValueError, match=r"inputs \(b\) hold NaN in row 3"):
        PredictionIntervals(Two(), damping=1.0).fit({"a": A, "b": bad}, torch.zeros(6))


@pytest.mark.parametrize(
    ("data", "batch", "message"),
    [
        ([by_name(A, B)], None, r"pair \(x, y\), got dict.*batch= function"),
        ([(A, B, B)], None, r"pair \(x, y\), got a tuple of 3.*batch= function"),
        ([by_name(A, B)], lambda batch: batch["a"], r"pair \(x, y\), got Tensor of shape \(6, 3\)"),
        ([by_name(A, B)], lambda batch: (batch, None), "targets must be a tensor or a NumPy array, got NoneType"),
        (by_name(A, B), None, "targets are missing"),
    ],
)
def test_batches_that_hold_no_pair_are_refused(data, batch, message):
    with pytest.raises(TypeError, match=message):
        PredictionIntervals(Two(), damping=1.0, batch=batch).fit(data)


def test_a_batch_that_is_no_function_is_refused():
    with pytest.raises(TypeError, match="batch must be a function, got 'labels'"):
        PredictionIntervals(Two(), damping=1.0, batch="labels")
