"""`parameters=`: which of them take part, and that the others cost nothing."""

from fnmatch import fnmatchcase

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import tests.reference as reference
from deltaband import Exact, PredictionIntervals
from deltaband.network.model_copy import ModelCopy, select_parameters
from deltaband.network.network import Network
from tests.support.networks import probed

pytestmark = pytest.mark.filterwarnings("ignore:the network has p", "ignore:n − p")
DAMPING = 0.5


class Blocks(nn.Module):
    def __init__(self, head=None):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))
        self.head = head or nn.Linear(5, 1)

    def forward(self, x):
        y = torch.tanh(self.first(x))
        for block in self.blocks:
            y = block(y)
        return self.head(y)


class Recurrent(nn.Module):
    """The layer that was registered last is recurrent, and its last state the prediction."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.LSTM(5, 1, batch_first=True)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))[:, None].expand(-1, 3, -1))[0][:, -1]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.there, self.scale, self.back = nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(3, 3)
        self.back.weight = self.there.weight

    def forward(self, x):
        return self.back(torch.tanh(self.there(x)) * self.scale(x))[:, 0]


def rows(n=30):
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(0))


CHOICES = {
    "all": (Blocks, "all", ["*"]),
    "last": (Blocks, "last", ["head.weight", "head.bias"]),
    "last of a stack": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten()), "last",
                        ["2.weight", "2.bias"]),
    "last, a layer alone": (lambda: nn.Linear(3, 1), "last", ["weight", "bias"]),
    "last, frozen behind": (lambda: Blocks(nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 1).requires_grad_(False))),
                            "last", ["head.0.weight", "head.0.bias"]),
    "last, weight norm": (lambda: Blocks(weight_norm(nn.Linear(5, 1))), "last",
                          ["head.bias", "head.parametrizations.*"]),
    "last, recurrent": (Recurrent, "last", ["last.*"]),
    "last, tied": (Tied, "last", ["there.weight", "back.bias"]),
    "patterns": (Blocks, ["head.*", "blocks.2.*"], ["head.*", "blocks.2.*"]),
    "one name": (Blocks, ["blocks.1.0.bias"], ["blocks.1.0.bias"]),
    "the other name of a tied weight": (Tied, ("back.weight",), ["there.weight"]),
    "a pattern that is frozen in part": (lambda: partly_frozen(), ["*.bias"], ["head.bias", "blocks.*.bias"]),
    "a function": (Blocks, lambda name, w: w.ndim == 2 and "blocks" in name, ["blocks.*.weight"]),
}  # fmt: skip


def partly_frozen():
    model = Blocks()
    model.first.requires_grad_(False)
    return model


def matching(model, patterns):
    return [n for n, w in model.named_parameters() if w.requires_grad and any(fnmatchcase(n, p) for p in patterns)]


@pytest.mark.parametrize("n", [6, 200], ids=["dual", "primal"])
@pytest.mark.parametrize("choice", CHOICES)
def test_the_chosen_columns_are_those_of_plain_gradients(choice, n):
    torch.manual_seed(0)
    make, parameters, patterns = CHOICES[choice]
    model, X, new = make(), rows(n), rows(4) + 0.3
    names = matching(model, patterns)
    before = [w.requires_grad for w in model.parameters()]
    band = PredictionIntervals(model, damping=DAMPING, engine=Exact(), parameters=parameters)
    band.fit(X, torch.randn(n), progress=False)
    J, g = (reference.jacobians(model, [(row[None],) for row in x], names) for x in (X, new))
    q, h, p_star = reference.answers(J, DAMPING, g)
    assert band.n_parameters_ == J.shape[2] == sum(w.numel() for name, w in model.named_parameters() if name in names)
    np.testing.assert_allclose(band.variance(new), q[:, 0], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(band.leverage(new), h[:, 0], rtol=1e-4, atol=1e-7)
    assert band.effective_parameters_ == pytest.approx(p_star, rel=1e-4)
    assert [w.requires_grad for w in model.parameters()] == before


class Counted(torch.autograd.Function):
    backwards = 0

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        Counted.backwards += 1
        return gradient


class Below(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 6)

    def forward(self, x):
        return Counted.apply(torch.tanh(self.layer(x)))


@pytest.mark.parametrize(
    "head",
    [
        lambda: nn.Linear(6, 1),
        lambda: weight_norm(nn.Linear(6, 1)),
        lambda: nn.Sequential(nn.Linear(6, 3), nn.PReLU(), nn.Linear(3, 1)),
    ],
    ids=["linear", "weight norm", "stack"],
)
def test_below_the_lowest_chosen_layer_there_is_one_forward_pass_and_no_graph(head):
    torch.manual_seed(0)
    model, n = nn.Sequential(Below(), head()), 40
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append((len(output), output.requires_grad)))
    Counted.backwards = 0
    band = PredictionIntervals(model, damping=DAMPING, engine=Exact(), parameters=["1.*"])
    band.fit([(rows(n), torch.randn(n))], progress=False)
    assert "by hooks" in band.summary()
    assert not any(requires_grad for _, requires_grad in seen)
    assert Counted.backwards == 0
    network = probed(Network(ModelCopy(model, ["1.*"])), rows(n))
    seen.clear()
    network.gradients(rows(n))
    assert len(seen) == 2  # all rows, and some of them without the others
    assert seen[0] == (n, False)
    assert seen[1][0] <= n // 2
    assert not seen[1][1]
    PredictionIntervals(model, damping=DAMPING, engine=Exact()).fit([(rows(n), torch.randn(n))], progress=False)
    assert any(requires_grad for _, requires_grad in seen)
    assert Counted.backwards > 0


def test_a_network_that_needs_a_loop_keeps_no_graph_below_either():
    torch.manual_seed(0)
    model = nn.Sequential(Below(), nn.Unflatten(1, (2, 3)), Pairs())
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.requires_grad))
    Counted.backwards = 0
    band = PredictionIntervals(model, damping=DAMPING, engine=Exact(), parameters=["2.*"])
    band.fit(rows(), torch.randn(30), progress=False)
    assert "a plain loop" in band.summary()
    assert not any(seen)
    assert Counted.backwards == 0


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Bilinear(3, 3, 1)

    def forward(self, x):
        return self.layer(x[:, 0], x[:, 1])


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ("first", ValueError, r"must be 'all', 'last', a list of names such as \['head\.\*'\].*got 'first'"),
        (["heads.*"], ValueError, r"'heads\.\*' matches no parameter; trainable are: blocks\.0\.0\.weight.*head\.bias"),
        (["head.*", "first.*"], ValueError, r"'first\.\*' matches only frozen parameters \(first\.bias\); trainable"),
        ([], TypeError, r"a list of names .* or a function of name and parameter, got"),
        ([1], TypeError, r"got \[1\]"),
        (3, TypeError, "got 3"),
        (None, TypeError, "got None"),
        (lambda name, w: False, ValueError, r"chooses none of the trainable ones: blocks\.0\.0\.weight"),
    ],
)
def test_a_choice_that_cannot_be_is_refused_with_what_there_is(parameters, error, message):
    with pytest.raises(error, match=message):
        PredictionIntervals(partly_frozen(), damping=1.0, parameters=parameters)


def test_a_long_list_of_names_is_cut():
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(30)))
    with pytest.raises(ValueError, match=r"9\.bias and 40 more$"):
        PredictionIntervals(model, damping=1.0, parameters=["head"])


class Backwards(nn.Module):
    """The layer that runs last was registered first."""

    def __init__(self):
        super().__init__()
        self.head, self.body = nn.Linear(4, 1), nn.Linear(3, 4)

    def forward(self, x):
        return self.head(nn.functional.relu(self.body(x), inplace=True))


class TwoHeads(nn.Module):
    """The head of the variance is registered last; whether it runs last, too, does not matter."""

    def __init__(self, variance_first=False):
        super().__init__()
        self.body, self.head, self.log_variance = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 1)
        self.variance_first = variance_first

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        if self.variance_first:
            log_variance = self.log_variance(hidden)
            return self.head(hidden), log_variance
        return self.head(hidden), self.log_variance(hidden)


class Recurrent(nn.Module):
    """A layer that returns more than one tensor, in front of one that the output does not depend on."""

    def __init__(self):
        super().__init__()
        self.head, self.unused = nn.LSTM(3, 1, batch_first=True), nn.Linear(1, 1)

    def forward(self, x):
        states, _ = self.head(x[:, None])
        self.unused(states)
        return states[:, -1]


@pytest.mark.parametrize("start", ["fit", "partial_fit", "load"])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Backwards, {}),
        (Recurrent, {}),
        (TwoHeads, {"variance": "log_variance"}),
        (lambda: TwoHeads(True), {"variance": "log_variance"}),
    ],
    ids=["backwards", "recurrent", "two heads", "two heads, mean last"],
)
def test_last_is_the_layer_that_the_prediction_depends_on_last(make, options, start, tmp_path):
    torch.manual_seed(0)
    model, y = make(), torch.randn(30)
    band = PredictionIntervals(model, damping=1.0, parameters="last", **options)
    if start == "partial_fit":
        band.partial_fit(rows()[:10], y[:10]).partial_fit(rows()[10:], y[10:])
    else:
        band.fit(rows(), y)
    if start == "load":
        band.save(tmp_path / "a.band")
        band = PredictionIntervals.load(tmp_path / "a.band", model)
    named = PredictionIntervals(model, damping=1.0, parameters=["head.*"], **options).fit(rows(), y)
    assert band.n_parameters_ == named.n_parameters_
    torch.testing.assert_close(band.predict(rows()).width, named.predict(rows()).width)
    assert named.plan(rows(), y).problem.n_parameters == band.plan(rows(), y).problem.n_parameters


def test_a_fit_that_fails_leaves_the_choice_of_parameters_as_it_was():
    band = PredictionIntervals(Backwards(), damping=1.0, parameters="last")
    with pytest.raises(ValueError, match="NaN"):
        band.fit([(rows(), torch.full((30,), torch.nan))])
    assert band.spec.parameters == "last"


def test_parameters_that_the_output_does_not_depend_on_are_refused():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x):
            return self.used(x)

    band = PredictionIntervals(Unused(), damping=1.0, parameters=["unused.*"])
    with pytest.raises(ValueError, match="does not depend on any trainable parameter, of those chosen"):
        band.fit(rows(), torch.randn(30))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, within torch.compile
def test_names_are_those_of_the_network_that_was_compiled():
    model = Blocks()
    names = select_parameters(model, ["head.*"])
    assert names == {"head.weight", "head.bias"}
    band = PredictionIntervals(torch.compile(model), damping=1.0, parameters=["head.*"]).fit(rows(), torch.randn(30))
    assert band.n_parameters_ == 6
    part = nn.Sequential(torch.compile(Blocks()), nn.Linear(1, 1))
    for pattern in ("0.head.*", "0._orig_mod.head.*"):
        band = PredictionIntervals(part, damping=1.0, parameters=[pattern]).fit(rows(), torch.randn(30))
        assert band.n_parameters_ == 6
