"""Networks whose rows have no gradients of their own are refused, with what to do."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from deltaband import Exact, PredictionIntervals


def rows(n=30, d=3, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


class Refused(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.layer, self.norm, self.change = nn.Linear(3, 4), nn.BatchNorm1d(4), change
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.change(self, self.layer(x)))


def trained_norm(self, x):
    self.norm.train()
    return self.norm(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (trained_norm, "depends on the other rows|evaluated on a single row"),
        (lambda self, x: F.batch_norm(x, None, None, training=True), "depends on the other rows|on a single row"),
        (lambda self, x: x / x.norm(dim=0), "depends on the other rows of the batch"),
        (lambda self, x: x.softmax(dim=0), "depends on the other rows of the batch"),
        (lambda self, x: F.dropout(x), "changes from call to call"),
        (lambda self, x: x + 1e-3 * torch.randn_like(x), "changes from call to call"),
        (lambda self, x: x.detach() * 0 + 1, None),
    ],
)
def test_networks_whose_rows_have_no_gradients_of_their_own_are_refused(change, message):
    torch.manual_seed(0)
    model = Refused(change)
    state = copy.deepcopy(model.state_dict())
    band = PredictionIntervals(model, damping=1.0, engine=Exact())
    if message is None:  # of the head there still are
        band.fit(rows(), torch.zeros(30))
        assert float(band.variance(rows()).min()) > 0
    else:
        with pytest.raises(ValueError, match=message):
            band.fit(rows(), torch.zeros(30))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(3, 1)

    def forward(self, x):
        return self.layer(x)[0][:, -1]


def test_a_recurrent_layer_that_takes_rows_for_steps_is_refused():
    with pytest.raises(ValueError, match=r"depends on the other rows .* a recurrent layer without batch_first=True"):
        PredictionIntervals(Recurrent(), damping=1.0).fit(rows(30, 12).reshape(30, 4, 3), torch.zeros(30))


def test_first_rows_that_are_equal_do_not_hide_that_rows_depend_on_each_other():
    x = rows()
    x[1] = x[0]
    with pytest.raises(ValueError, match="depends on the other rows of the batch"):
        PredictionIntervals(Refused(lambda self, y: y - y.mean(dim=0)), damping=1.0).fit(x, torch.zeros(30))


def test_half_precision_is_refused_where_it_is_chosen_and_taken_as_it_is_where_it_is_frozen():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(3, 4).bfloat16(), nn.Linear(4, 1)

        def forward(self, x):
            return self.head(torch.tanh(self.body(x.bfloat16())).float())

    with pytest.raises(TypeError, match=r"'body\.weight' is torch\.bfloat16.*precision='float32'"):
        PredictionIntervals(Mixed(), damping=1.0)
    band = PredictionIntervals(Mixed(), damping=1.0, parameters="last").fit(rows(), torch.zeros(30))
    assert band.variance(rows()).dtype == torch.float32
    with pytest.raises(TypeError, match=r"torch\.float16"):
        PredictionIntervals(nn.Linear(3, 1).half(), damping=1.0)


@pytest.mark.parametrize("layer", [nn.Linear(3, 4), nn.LSTM(3, 4)])
def test_autocast_within_the_network_is_refused_with_what_to_do(layer):
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = layer, nn.Linear(4, 1)

        def forward(self, x, enabled=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                h = self.layer(x if isinstance(self.layer, nn.Linear) else x[None])
                return self.head(h if isinstance(h, torch.Tensor) else h[0][0]).float()

    with pytest.raises(TypeError, match=r"computes 'layer' in torch\.bfloat16.*enabled=self\.training"):
        PredictionIntervals(Cast(), damping=1.0).fit(rows(), torch.zeros(30))


def test_complex_parameters_are_not_told_to_lose_their_imaginary_part():
    with pytest.raises(TypeError, match=r"'weight' is torch\.complex64.*real and imaginary parts"):
        PredictionIntervals(nn.Linear(3, 1, dtype=torch.complex64), damping=1.0)


def test_integer_parameters_are_constants_and_cannot_be_chosen():
    class Selected(nn.Module):
        def __init__(self):
            super().__init__()
            self.which, self.head = nn.Parameter(torch.tensor([2, 0]), requires_grad=False), nn.Linear(2, 1)

        def forward(self, x):
            return self.head(x[:, self.which])

    assert PredictionIntervals(Selected(), damping=1.0).fit(rows(), torch.zeros(30)).n_parameters_ == 3
    with pytest.raises(ValueError, match=r"'which' matches only frozen parameters"):
        PredictionIntervals(Selected(), damping=1.0, parameters=["which"])


def test_weights_that_a_call_changes_are_refused():
    class Renormed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Parameter(torch.randn(9, 4)), nn.Linear(4, 1)

        def forward(self, x):
            return self.head(F.embedding(x, self.table, max_norm=0.5).mean(dim=1))

    with pytest.raises(ValueError, match="weights change while it is called"):
        PredictionIntervals(Renormed(), damping=1.0).fit(torch.randint(0, 9, (30, 5)), torch.zeros(30))
    tied = nn.Sequential(nn.Embedding(4, 4, max_norm=0.5), nn.Flatten(), nn.Linear(4, 4, bias=False), nn.Linear(4, 1))
    tied[2].weight = tied[0].weight
    with pytest.raises(TypeError, match="with max_norm changes its weight whenever it is called"):
        PredictionIntervals(tied, damping=1.0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padded_positions_that_inference_makes_zero_are_found_out():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=True), nn.Linear(4, 1)

        def forward(self, x, padding):
            return self.head(self.encoder(x, src_key_padding_mask=padding).mean(dim=1))

    x, padding = rows(30, 12).reshape(30, 3, 4), torch.arange(3) >= torch.tensor([[1], [2], [3]]).repeat(10, 1)
    with pytest.raises(ValueError, match=r"mask the padded positions that an nn\.TransformerEncoder returns"):
        PredictionIntervals(Pooled(), damping=1.0).fit((x, padding), torch.zeros(30))
