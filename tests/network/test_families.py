"""Every family of models has the q, h and p* of the formula on plain gradients, one row after the other."""

import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import tests.reference as reference
from deltaband import Exact, PredictionIntervals
from tests.support.networks import ByFunction, Tied

pytestmark = pytest.mark.filterwarnings("ignore:the network has p", "ignore:n − p")
DAMPING = 0.5


class Pooled(nn.Module):
    """A layer at every step of a sequence, or over it, the mean of what it gives, and a linear head."""

    def __init__(self, layer, features, m=1):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(features, m)

    def forward(self, x):
        y = self.layer(x)
        return self.head(torch.tanh(y[0] if isinstance(y, tuple) else y).mean(dim=1))


class LastState(nn.Module):
    """A recurrent layer that sees the steps first, from a state that another layer gives."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.start, self.head = layer, nn.Linear(3, layer.hidden_size), nn.Linear(layer.hidden_size, 1)

    def forward(self, x):
        h = torch.tanh(self.start(x[:, 0]))[None]
        state = (h, torch.zeros_like(h)) if isinstance(self.layer, nn.LSTM) else h
        last = self.layer(x.transpose(0, 1), state)[1]
        return self.head((last[1] if isinstance(last, tuple) else last)[-1])


class Packed(nn.Module):
    """Sequences of different lengths, packed."""

    def __init__(self, layer, of_steps):
        super().__init__()
        self.layer, self.head, self.of_steps = layer, nn.Linear(2 * layer.hidden_size, 1), of_steps

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        y, last = self.layer(packed)
        if self.of_steps:
            return self.head(pad_packed_sequence(y, batch_first=True)[0].sum(dim=1))
        h = last[0] if isinstance(last, tuple) else last
        return self.head(torch.cat([h[-2], h[-1]], dim=1))


class Encoder(nn.Module):
    """Words and their places, padding masked: fused attention."""

    def __init__(self, m=1, **options):
        super().__init__()
        self.words, self.places = nn.Embedding(9, 4, padding_idx=0), nn.Embedding(10, 4)
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(4, m)

    def forward(self, x):
        padding = x == 0
        y = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        y = self.encoder(y, src_key_padding_mask=padding).masked_fill(padding[:, :, None], 0.0)
        return self.head(y.sum(dim=1) / (~padding).sum(dim=1, keepdim=True))


class Causal(nn.Module):
    """Attention that sees the steps first, and none of the later ones."""

    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, bias=True), nn.Linear(4, 1)

    def forward(self, x):
        x = x.transpose(0, 1)
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        return self.head(self.attention(x, x, x, attn_mask=later, need_weights=False)[0][-1])


class Table(nn.Module):
    """Categories and numbers."""

    def __init__(self, **options):
        super().__init__()
        self.table, self.first, self.head = nn.Embedding(7, 3, **options), nn.Linear(5, 6), nn.Linear(6, 1)

    def forward(self, category, numbers):
        return self.head(torch.tanh(self.first(torch.cat([self.table(category), numbers], dim=1))))[:, 0]


class Class(nn.Module):
    """An image in patches with a token for the class, as in a vision transformer."""

    def __init__(self):
        super().__init__()
        self.patches, self.token = nn.Conv2d(1, 4, 2, stride=2), nn.Parameter(torch.randn(1, 1, 4))
        self.places = nn.Parameter(torch.randn(1, 5, 4))

    def forward(self, x):
        y = self.patches(x).flatten(2).transpose(1, 2)
        return torch.cat([self.token.expand(len(x), -1, -1), y], dim=1) + self.places


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.attention, self.head = Class(), nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 1)

    def forward(self, x):
        y = self.tokens(x)
        return self.head(self.attention(y, y, y)[0][:, 0])


class Pairs(nn.Module):
    def __init__(self, m=1):
        super().__init__()
        self.layer, self.head = nn.Bilinear(2, 3, 5), nn.Linear(5, m)

    def forward(self, a, b):
        return self.head(torch.tanh(self.layer(a, b)))


class Force(nn.Module):
    """The slope of a potential: a network that differentiates itself, by autograd or by torch.func."""

    def __init__(self, by_func):
        super().__init__()
        self.first, self.head, self.by_func = nn.Linear(3, 5), nn.Linear(5, 1), by_func

    def potential(self, x):
        return self.head(torch.tanh(self.first(x))).sum()

    def forward(self, x):
        if self.by_func:
            return torch.func.grad(self.potential)(x)[:, 0]
        x = x.requires_grad_()
        return torch.autograd.grad(self.potential(x), x, create_graph=True)[0][:, 0] + self.head.bias


def old_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 5)), nn.Tanh(), nn.Linear(5, 1))


def convolutional(m=1):
    layers = [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Dropout(0.5), nn.Flatten(), nn.Linear(12, m))


def partly_frozen():
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))
    for w in (model[0].weight, model[1].bias, model[3].bias):
        w.requires_grad_(False)
    return model


def norms():
    layers = [nn.Conv1d(2, 4, 3, groups=2), nn.InstanceNorm1d(4, affine=True), nn.PReLU(4)]
    up = [nn.ConvTranspose1d(4, 4, 2), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten(), nn.RMSNorm(20)]
    return nn.Sequential(*layers, *up, nn.Linear(20, 1))


def sequence(n):
    return torch.randn(n, 4, 3)


def words(n):
    lengths = torch.randint(2, 6, (n, 1))
    return torch.randint(1, 9, (n, 5)) * (torch.arange(5) < lengths)


def packed(n):
    return torch.randn(n, 4, 3), torch.randint(1, 5, (n,))


def rows_of_3(n):
    return torch.randn(n, 3)


def categories(n):
    return torch.randint(0, 7, (n,)), torch.randn(n, 2)


def pairs(n):
    return torch.randn(n, 2), torch.randn(n, 3)


LSTM = {"input_size": 3, "hidden_size": 2, "batch_first": True}
HOOKS, FUNC, LOOP = r"\d+ layers? by hooks", r"parameters? by torch\.func", r"parameters? by a plain loop"
# network, inputs for n rows, which way gradients come by
FAMILIES = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(3, 9), nn.ReLU(inplace=True), nn.Linear(9, 1)), rows_of_3, HOOKS),
    "convolutions, BatchNorm": (convolutional, lambda n: torch.randn(n, 2, 7, 7), HOOKS),
    "convolutions, 3 outputs": (lambda: convolutional(3), lambda n: torch.randn(n, 2, 7, 7), HOOKS),
    "norms": (norms, lambda n: torch.randn(n, 2, 6), HOOKS),
    "LSTM": (lambda: Pooled(nn.LSTM(**LSTM, num_layers=2, bidirectional=True, dropout=0.5), 4), sequence, HOOKS),
    "LSTM from a state": (lambda: LastState(nn.LSTM(3, 3)), sequence, HOOKS),
    "LSTM, packed": (lambda: Packed(nn.LSTM(**LSTM, num_layers=2, bidirectional=True), False), packed, HOOKS),
    "GRU": (lambda: Pooled(nn.GRU(3, 4, batch_first=True), 4), sequence, HOOKS),
    "GRU, 2 outputs": (lambda: Pooled(nn.GRU(3, 4, batch_first=True), 4, m=2), sequence, HOOKS),
    "GRU from a state": (lambda: LastState(nn.GRU(3, 3)), sequence, HOOKS),
    "GRU, packed": (lambda: Packed(nn.GRU(**LSTM, bidirectional=True), True), packed, HOOKS),
    "RNN": (lambda: Pooled(nn.RNN(3, 4, nonlinearity="relu", bias=False, batch_first=True), 4), sequence, HOOKS),
    "transformer": (Encoder, words, HOOKS),
    "transformer, norm first, 2 outputs": (lambda: Encoder(2, norm_first=True), words, HOOKS),
    "attention, steps first": (Causal, lambda n: torch.randn(n, 5, 4), HOOKS),
    "patches and a token": (Mixing, lambda n: torch.randn(n, 1, 4, 4), HOOKS),
    "embedding": (Table, categories, HOOKS),
    "embedding, sparse": (lambda: Table(sparse=True), categories, HOOKS),
    "embedding, max_norm": (lambda: Table(max_norm=0.5), categories, HOOKS),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 5)), nn.Tanh(), nn.Linear(5, 1)),
                    rows_of_3, HOOKS),
    "weight norm, 2 outputs": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(),
                               parametrizations.weight_norm(nn.Linear(5, 2))), rows_of_3, HOOKS),
    "weight norm, old": (old_weight_norm, rows_of_3, HOOKS),
    "spectral norm": (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 5)), nn.Linear(5, 1)),
                      rows_of_3, HOOKS),
    "partly frozen": (partly_frozen, rows_of_3, HOOKS),
    "tied weights": (Tied, words, FUNC),
    "tied weights, 2 outputs": (lambda: Tied(n_outputs=2), words, FUNC),
    "past a layer": (ByFunction, rows_of_3, FUNC),
    "orthogonal": (lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 1)),
                   rows_of_3, LOOP),
    "embedding bag": (lambda: nn.Sequential(nn.EmbeddingBag(9, 4, padding_idx=0), nn.Tanh(), nn.Linear(4, 1)),
                      words, HOOKS),
    "embedding bag, sums": (lambda: nn.Sequential(nn.EmbeddingBag(9, 4, mode="sum", sparse=True), nn.Linear(4, 1)),
                            words, HOOKS),
    "embedding bag, largest": (lambda: nn.Sequential(nn.EmbeddingBag(9, 4, mode="max"), nn.Linear(4, 1)), words, LOOP),
    "bilinear, 2 outputs": (lambda: Pairs(2), pairs, LOOP),
    "slopes, by autograd": (lambda: Force(False), rows_of_3, LOOP),
    "slopes, by torch.func": (lambda: Force(True), rows_of_3, FUNC),
}  # fmt: skip


def made(family):
    """A network, in train mode, with affine parameters and statistics that are not 1 and 0."""
    torch.manual_seed(0)
    model, inputs, way = FAMILIES[family]
    model = model()
    with torch.no_grad():
        for w in model.parameters():
            w.add_(0.1 * torch.randn_like(w))
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 2)
    return model, inputs, way


def arguments(x):
    """Of a call for each row."""
    tensors = x if isinstance(x, tuple) else (x,)
    return [tuple(tensor[i : i + 1] for tensor in tensors) for i in range(len(tensors[0]))]


def state(model):
    return {
        "modes": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) for module in model.modules()],
        "gradients": [(w.requires_grad, w.grad) for w in model.parameters()],
        "numbers": {name: value.clone() for name, value in model.state_dict().items()},
    }


def assert_unchanged(before, model):
    after = state(model)
    assert all(before[key] == after[key] for key in ("modes", "hooks", "gradients"))
    assert all(torch.equal(value, after["numbers"][name]) for name, value in before["numbers"].items())


@pytest.mark.parametrize("form", ["dual", "primal"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_intervals_of_plain_gradients(family, form):
    model, inputs, way = made(family)
    m = model.head.out_features if hasattr(model, "head") else model[-1].weight.shape[0]
    p = sum(w.numel() for w in model.parameters() if w.requires_grad)
    n = 12 if form == "dual" else p // m + 10
    X, new, y = inputs(n), inputs(5), torch.randn(n, m)
    before = state(model)
    band = PredictionIntervals(model, damping=DAMPING, engine=Exact()).fit(X, y, progress=False)
    q, h = (answer.double().numpy().reshape(5, m) for answer in (band.variance(new), band.leverage(new)))
    mean = band.predict(new).mean if form == "primal" else band.predict_mean(new)
    assert_unchanged(before, model)

    evaluated = model.eval()
    J, g = (reference.jacobians(evaluated, arguments(x)) for x in (X, new))
    q_, h_, p_star = reference.answers(J, DAMPING, g)
    assert f"{form} form" in band.summary()
    np.testing.assert_allclose(q, q_, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(h, h_, rtol=1e-4, atol=1e-6)
    assert band.effective_parameters_ == pytest.approx(p_star, rel=1e-4)
    expected = torch.cat([evaluated(*row).detach().reshape(1, -1) for row in arguments(new)])
    torch.testing.assert_close(mean.reshape(5, m), expected, rtol=1e-4, atol=1e-5)
    gradients = re.search(r"gradients +(.*)", band.summary())[1]
    assert re.search(way, gradients) or (form == "primal" and gradients == "whole rows, by torch.func")
    if form == "dual" and way == HOOKS:
        assert "parameter" not in gradients
