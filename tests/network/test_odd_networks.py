"""Networks as people write them: each has the variances of plain autograd, batch after batch."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import tests.reference as reference
from deltaband import Exact, Nystrom, PredictionIntervals

N, STEPS, FEATURES = 48, 7, 3
pytestmark = pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")


def rows(dtype):
    """Sequences whose first number is their length; those of the first batch are of one length, some of them equal."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(N, STEPS, FEATURES, generator=generator, dtype=torch.float64)
    X[:, 0, 0] = torch.randint(1, STEPS + 1, (N,), generator=generator)
    X[:32, 0, 0] = STEPS
    X[40:44] = X[44:48]
    return X.to(dtype)


def lengths(x):
    return x[:, 0, 0].round().clamp(1, STEPS).long()


class PackedBothWays(nn.Module):
    """Sorted, packed, unpacked, averaged over the steps there are, and put back."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(FEATURES, 4, batch_first=True, bidirectional=True), nn.Linear(8, 1)

    def forward(self, x):
        n = lengths(x)
        order = n.argsort(descending=True)
        packed = pack_padded_sequence(x[order], n[order].cpu(), batch_first=True)
        y, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=STEPS)
        used = (torch.arange(STEPS)[None] < n[order][:, None]).to(x)[:, :, None]
        return self.head((y * used).sum(dim=1) / used.sum(dim=1))[order.argsort()]


class ExpertsByGate(nn.Module):
    """Each row goes to the two of three experts that a gate prefers."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(21, 3), nn.ModuleList(nn.Linear(21, 1) for _ in range(3))

    def forward(self, x):
        x = x.flatten(1)
        weight, which = self.gate(x).softmax(dim=1).topk(2, dim=1)
        y = x.new_zeros(len(x), 1)
        for i, expert in enumerate(self.experts):
            row, place = (which == i).nonzero(as_tuple=True)
            y = y.index_add(0, row, weight[row, place, None] * expert(x[row]))
        return y


class Checkpointed(nn.Module):
    """In pieces whose activations are computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(FEATURES, 9), nn.Tanh()), nn.Linear(9, 1)

    def forward(self, x):
        return torch.cat([self.head(checkpoint(self.body, c, use_reentrant=False).amax(dim=1)) for c in x.chunk(5)])


class GhostNorm(nn.Module):
    """A batch norm over some rows at a time, in eval mode."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(21, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x):
        h = self.body(x.flatten(1))
        return self.head(torch.cat([self.norm(piece) for piece in h.split(16)]).relu())


class Messages(nn.Module):
    """The nodes of all graphs in one list, and a message from each graph to its nodes."""

    def __init__(self):
        super().__init__()
        self.node, self.message, self.head = nn.Linear(FEATURES, 5), nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x):
        n = lengths(x)
        there = torch.arange(STEPS)[None] < n[:, None]
        graph = there.nonzero()[:, 0]
        h = torch.tanh(self.node(x[there]))
        mean = x.new_zeros(len(x), 5).index_add(0, graph, h) / n[:, None]
        h = h + torch.tanh(self.message(mean))[graph]
        return self.head(x.new_zeros(len(x), 5).index_add(0, graph, h))


class BackAndForth(nn.Module):
    """Steps first, once from the end."""

    def __init__(self):
        super().__init__()
        self.there, self.back, self.head = nn.GRU(FEATURES, 4), nn.GRU(FEATURES, 4), nn.Linear(8, 1)

    def forward(self, x):
        x = x.transpose(0, 1)
        return self.head(torch.cat([self.there(x)[0][-1], self.back(x.flip(0))[0][-1]], dim=1))


class Scratch(nn.Module):
    """A layer's input lies in a buffer that each call uses again."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(21, 6), nn.Linear(6, 1)
        self.register_buffer("scratch", torch.zeros(64, 21), persistent=False)

    def forward(self, x):
        given = self.scratch[: len(x)]
        given.copy_(x.flatten(1))
        return self.head(torch.tanh(self.body(given)))


class WrittenTo(nn.Module):
    """Works on its input and its activations in place."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(21, 6), nn.Linear(6, 1)

    def forward(self, x):
        x = x.flatten(1)
        x.sub_(0.5).mul_(2.0)
        return self.head(self.body(x).relu_())


class OldWeightNorm(nn.Module):
    def __init__(self):
        super().__init__()
        normed = nn.utils.weight_norm
        self.body, self.head = normed(nn.Linear(21, 6)), normed(nn.Linear(6, 1), dim=None)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x.flatten(1))))


class EqualRowsOnce(nn.Module):
    """Rows that are equal are computed once."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(21, 6), nn.Linear(6, 1)

    def forward(self, x):
        different, which = torch.unique(x.flatten(1), dim=0, return_inverse=True)
        return self.head(torch.tanh(self.body(different)))[which]


class WeightBesideItsLayer(nn.Module):
    """For some rows, none of which are in the first batch, a layer's weight is used once more, by a function."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(21, 6), nn.Linear(6, 1)

    def forward(self, x):
        short, x = lengths(x) < STEPS, x.flatten(1)
        h = torch.tanh(self.body(x))
        if short.any():
            h = torch.where(short[:, None], h + F.linear(x, self.body.weight), h)
        return self.head(h)


class Interleaved(nn.Module):
    """Even rows first, then odd ones."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv1d(FEATURES, 5, 2), nn.Linear(5, 1)

    def forward(self, x):
        order = torch.cat([torch.arange(0, len(x), 2), torch.arange(1, len(x), 2)])
        return self.head(torch.tanh(self.body(x.transpose(1, 2)[order])).mean(dim=2))[order.argsort()]


class StepsFirst(nn.Module):
    """Rows are the fast dimension of a long list of steps."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 6), nn.Linear(6, 1)

    def forward(self, x):
        h = torch.tanh(self.body(x.transpose(0, 1).reshape(-1, FEATURES)))
        return self.head(h.view(STEPS, len(x), 6).mean(dim=0))


class WeightsOfItsOwn(nn.Module):
    """A layer whose outputs are weights for each row."""

    def __init__(self):
        super().__init__()
        self.makes, self.mix = nn.Linear(FEATURES, 12), nn.Parameter(torch.randn(4))

    def forward(self, x):
        return torch.einsum("bij,bj,i->b", self.makes(x[:, 1]).view(-1, 4, FEATURES), x[:, 2], self.mix)


class ParametersByLength(nn.Module):
    """Parameters that each row looks up by an index."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(0.2 * torch.randn(STEPS + 1, 21)), nn.Parameter(torch.zeros(STEPS + 1))

    def forward(self, x):
        n = lengths(x)
        return torch.tanh((self.weight[n] * x.flatten(1)).sum(dim=1) + self.bias[n])


class TwoNames(nn.Module):
    """A layer that is registered twice, as an encoder of two sides is."""

    def __init__(self):
        super().__init__()
        self.left, self.head = nn.Linear(21, 21), nn.Linear(21, 1)
        self.right = self.left

    def forward(self, x):
        return self.head(torch.tanh(self.right(torch.tanh(self.left(x.flatten(1))))))


class TwoNamesPastLayers(TwoNames):
    """The same by functions alone."""

    def forward(self, x):
        h = torch.tanh(F.linear(x.flatten(1), self.left.weight, self.left.bias))
        return F.linear(torch.tanh(F.linear(h, self.right.weight)), self.head.weight)


class Ragged(nn.Module):
    """A layer whose input is a nested tensor."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 6), nn.Linear(6, 1)

    def forward(self, x):
        steps = [row[:n] for row, n in zip(x, lengths(x), strict=True)]
        h = torch.tanh(self.body(torch.nested.as_nested_tensor(steps, layout=torch.jagged)))
        return self.head(torch.stack([row.sum(dim=0) for row in h.unbind()]))


class NormedRecurrent(nn.Module):
    """A recurrent layer keeps a list of its weights, one of which is computed."""

    def __init__(self):
        super().__init__()
        gru = nn.GRU(FEATURES, 4, batch_first=True)
        self.rnn, self.head = nn.utils.parametrizations.weight_norm(gru, "weight_hh_l0"), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.rnn(x)[1][0])


class InFloat32(nn.Module):
    """A part in single precision."""

    def __init__(self):
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(21, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        h = torch.tanh(self.body(x.flatten(1)))
        h = F.linear(h.float(), self.middle.weight.float(), self.middle.bias.float()).to(h)
        return self.head(torch.tanh(h))


class RandomOrder(nn.Module):
    """Draws random numbers that its outputs do not depend on."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(21, 6), nn.Linear(6, 1)

    def forward(self, x):
        order = torch.randperm(len(x))
        return self.head(torch.tanh(self.body(x.flatten(1)[order])))[order.argsort()]


ODD = [
    PackedBothWays,
    ExpertsByGate,
    Checkpointed,
    GhostNorm,
    Messages,
    BackAndForth,
    Scratch,
    WrittenTo,
    OldWeightNorm,
    EqualRowsOnce,
    WeightBesideItsLayer,
    Interleaved,
    StepsFirst,
    WeightsOfItsOwn,
    ParametersByLength,
    TwoNames,
    TwoNamesPastLayers,
    Ragged,
    NormedRecurrent,
    InFloat32,
    RandomOrder,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ODD)
def test_odd_networks_have_the_variances_of_plain_autograd(kind, dtype):
    with pytest.warns(FutureWarning, match="weight_norm") if kind is OldWeightNorm else nullcontext():
        torch.manual_seed(1)
        model, same = kind().to(dtype).eval(), kind().double().eval()
    same.load_state_dict(model.state_dict())
    X, y = rows(dtype), torch.zeros(N, dtype=dtype)
    untouched = X.clone()
    J = reference.jacobians(same, [(x[None],) for x in X.double().clone()])
    expected = reference.answers(J, 1.0, J)[0][:, 0]
    for engine in (Exact(), Nystrom(N)):  # by one form and by landmarks at all rows
        band = PredictionIntervals(model, damping=1.0, engine=engine)
        band.fit([(X[i : i + 32], y[i : i + 32]) for i in range(0, N, 32)], progress=False)
        exact = dtype == torch.float64 and kind is not InFloat32
        rtol, smallest = (1e-8, 0.0) if exact else (1e-4, 1e-7 * expected.max())
        np.testing.assert_allclose(band.variance(X), expected, rtol=rtol, atol=smallest)
    assert torch.equal(X, untouched)
