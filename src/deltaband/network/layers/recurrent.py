"""Gradients of LSTM, GRU and RNN layers, whose fused kernels show only what goes in and what comes out.

The layer is unrolled once more, for all rows at once, step by step: a forward and a backward pass of its own give the
gradient δₜ of every product Wxₜ within it, and each weight's gradient is Σₜ δₜ ⊗ xₜ.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from .factors import DenseRows


def recurrent(layer: nn.RNNBase, args: tuple[Any, ...], deltas: Sequence[Tensor | None], b: int) -> DenseRows:
    """Compute each row's gradient from those of the output, the last hidden state and, of an LSTM, the cell state."""
    (given, state, *_), (delta, *of_state), alive = (*args, None), deltas, None
    if isinstance(given, PackedSequence):
        x, lengths = pad_packed_sequence(given, batch_first=True)
        alive = torch.arange(x.shape[1], device=x.device) < lengths.to(x.device)[:, None]  # (b, t)
        if delta is not None:
            delta = pad_packed_sequence(given._replace(data=delta), batch_first=True)[0]
    elif layer.batch_first:
        x = given
    else:
        x, delta = given.transpose(0, 1), None if delta is None else delta.transpose(0, 1)
    if x.ndim != 3 or x.shape[0] != b:
        raise ValueError("a recurrent layer must be given (rows, steps, features)")
    with torch.enable_grad():
        tape = _Tape(layer)
        pairs = list(zip(unrolled(layer, tape, x, state, alive), (delta, *of_state), strict=True))
        rows = tape.rows([(y, d) for y, d in pairs if d is not None], b)
    trainable = [name for name, w in layer._parameters.items() if w is not None and w.requires_grad]
    return DenseRows(torch.cat([rows[name] for name in trainable], dim=1))


class Products(Protocol):
    """How the products of a layer's weights are computed."""

    def linear(self, which: str, x: Tensor) -> Tensor: ...  # Wx + b for `weight_{which}` and `bias_{which}`


class _Tape:
    """The products of a layer's weights: what went in, what came out."""

    def __init__(self, layer: nn.RNNBase) -> None:
        self._layer = layer
        self._made: dict[str, list[tuple[Tensor, Tensor]]] = {}  # by the end of the weights' names: (b, t, ·) or (b, ·)

    def linear(self, which: str, x: Tensor) -> Tensor:
        """Wx + b for the weights `weight_{which}` and `bias_{which}`."""
        weight, bias = (getattr(self._layer, f"{kind}_{which}", None) for kind in ("weight", "bias"))
        assert isinstance(weight, Tensor)
        y = F.linear(x, weight.detach(), None if bias is None else bias.detach())
        y = y if y.requires_grad else y.requires_grad_()
        self._made.setdefault(which, []).append((x.detach(), y))
        return y

    def rows(self, outputs: list[tuple[Tensor, Tensor]], b: int) -> dict[str, Tensor]:  # each (b, ·)
        products = [y for made in self._made.values() for _, y in made]
        values, deltas = zip(*outputs, strict=True)
        gradients = iter(torch.autograd.grad(values, products, deltas, allow_unused=True, materialize_grads=True))
        rows = {}
        for which, made in self._made.items():
            x = torch.cat([x.reshape(b, -1, x.shape[-1]) for x, _ in made], dim=1)
            delta = torch.cat([next(gradients).reshape(b, -1, y.shape[-1]) for _, y in made], dim=1)
            rows[f"weight_{which}"] = torch.bmm(delta.mT, x).flatten(1)
            rows[f"bias_{which}"] = delta.sum(dim=1)
        return rows


def unrolled(layer: nn.RNNBase, tape: Products, x: Tensor, state: Any, alive: Tensor | None) -> list[Tensor]:
    """Return (b, t, ·) and states (layers, b, ·). Rows end with `alive`: their state stays what it is from then on."""
    is_lstm, directions = isinstance(layer, nn.LSTM), 2 if layer.bidirectional else 1
    b, steps = x.shape[:2]
    given: Sequence[Tensor | None] = (None, None) if state is None else state if is_lstm else (state, None)
    last: list[tuple[Tensor, Tensor]] = []
    for i in range(layer.num_layers):
        sides = []
        for backwards in range(directions):
            which, number = f"l{i}" + "_reverse" * backwards, i * directions + backwards
            h = x.new_zeros(b, layer.proj_size or layer.hidden_size) if given[0] is None else given[0][number]
            c = x.new_zeros(b, layer.hidden_size) if given[1] is None else given[1][number]
            of_input = tape.linear(f"ih_{which}", x)
            side: list[Tensor] = []
            for t in reversed(range(steps)) if backwards else range(steps):
                h_, c_ = _cell(layer, tape, which, of_input[:, t], h, c)
                if alive is not None:
                    h_, c_ = (torch.where(alive[:, t, None], new, old) for new, old in ((h_, h), (c_, c)))
                h, c = h_, c_
                side.append(h)
            sides.append(torch.stack(side[::-1] if backwards else side, dim=1))
            last.append((h, c))
        x = torch.cat(sides, dim=2)
    return [x, *(torch.stack(states) for states in list(zip(*last, strict=True))[: 1 + is_lstm])]


def _cell(
    layer: nn.RNNBase, tape: Products, which: str, of_input: Tensor, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    of_state = tape.linear(f"hh_{which}", h)
    if isinstance(layer, nn.LSTM):
        i, f, g, o = (of_input + of_state).chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return tape.linear(f"hr_{which}", h) if layer.proj_size else h, c
    if isinstance(layer, nn.GRU):
        (r, z, n), (r_, z_, n_) = of_input.chunk(3, dim=1), of_state.chunk(3, dim=1)
        z = (z + z_).sigmoid()
        return (1 - z) * (n + (r + r_).sigmoid() * n_).tanh() + z * h, c
    activate = torch.relu if getattr(layer, "nonlinearity", "tanh") == "relu" else torch.tanh
    return activate(of_input + of_state), c
