"""Which layers of a network have gradients that hooks can compute.

That the input of a layer and the gradients of its output determine the gradients of its parameters is not assumed but
tested: on some rows its part must equal plain gradients. Parameters that fail, or belong to no layer, get rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

import torch
from torch import Tensor, nn

from ...errors import NoGradientError
from . import hooks
from .factors import Part, cheapest
from .hooks import SHARED, Evaluate, Layers, Places, is_known, names_of

COMPARED_COLUMNS = 2**20  # at a time


def probe_layers(model: nn.Module, evaluate: Evaluate, b: int) -> tuple[Layers, Tensor]:
    """Test every layer on b rows; return what was found, and the outputs (b, m).

    Rows whose gradients are zero or equal show nothing, so at least two others are needed; a layer that cannot be
    tested gets rows of its own, and so does one that is not called, whose weights may be used all the same.
    """
    layers = hooks.candidates(model)
    dims = {name: (0,) if isinstance(layer, nn.RNNBase) else (0, 1) for name, layer in layers.items()}
    y, found = _verify_candidates(model, evaluate, b, layers, dims)
    tables = {n: each for n, each in layers.items() if n not in found and isinstance(each, nn.Embedding)}
    if tables:
        with suppress(RuntimeError):  # the network may not accept as many rows there
            found |= _verify_candidates(model, evaluate, b, tables, dict.fromkeys(tables, (SHARED,)))[1]
    found = {name: found[name] for name in layers if name in found}  # as they were registered
    parameters = tuple(names_of(name, layers[name]) for name in found)
    covered = {name for names in parameters for name in names}
    rest = {name: w for name, w in model.named_parameters() if w.requires_grad and name not in covered}
    parts = [part for _, part, _ in found.values()]
    kept = list(map(cheapest, parts))
    probed = Layers(
        {name: dim for name, (dim, _, _) in found.items()},
        parameters,
        tuple(rest),
        factor_bytes=sum(part.nbytes for part in kept) + sum(w.nbytes for w in rest.values()),
        inner_flops=2 * (sum(part.n_products for part in kept) + sum(w.numel() for w in rest.values())),
        working_bytes=2 * max((part.nbytes for part in parts), default=0),
        given={name: given for name, (_, _, given) in found.items() if not is_known(layers[name])},
    )
    return probed, y


def _verify_candidates(
    model: nn.Module, evaluate: Evaluate, b: int, layers: Mapping[str, nn.Module], dims: Mapping[str, tuple[int, ...]]
) -> tuple[Tensor, dict[str, tuple[int, Part, frozenset[Places]]]]:
    """Return the outputs, and for each layer whose part equals its plain gradients: the dimension of its inputs that
    holds the rows, the part of one row, and which of its arguments are tensors."""
    outputs, calls = hooks.forward(evaluate, layers, b, {name for name in layers if SHARED in dims[name]})
    if not outputs.requires_grad:
        raise NoGradientError(hooks.DEPENDS_ON_NOTHING)
    # of several outputs a mixture: gradients are linear in it
    y = outputs @ torch.linspace(1.0, 2.0, outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
    deltas = hooks.deltas_of(y, calls, retain_graph=True)
    guesses: dict[str, dict[int, Part]] = {}
    for name, layer in layers.items():
        for dim in dims[name] if calls[name] else ():
            # without rows in this dimension, or a rule in torch.func, the layer is not such a one
            with suppress(Exception), hooks.no_inner_loops():
                guesses.setdefault(name, {})[dim] = hooks.part_of(layer, calls[name], deltas[name], b, dim)
    signatures: dict[str, list[float]] = {name: [] for name in guesses}
    names = {name: names_of(name, layers[name]) for name in guesses}
    trainable = {name: w for name, w in model.named_parameters() if any(name in each for each in names.values())}
    for i in range(b) if trainable else ():  # a row at a time: whole gradients of a large network are not small
        gradients = torch.autograd.grad(y[i], list(trainable.values()), retain_graph=True, materialize_grads=True)
        by_name = dict(zip(trainable, gradients, strict=True))
        for name, by_dim in guesses.items():
            expected = [by_name[each].flatten() for each in names[name]]
            scale = max(float(values.abs().max()) for values in expected)
            for dim in list(by_dim):
                if not _equal(by_dim[dim].take(slice(i, i + 1)), expected, scale):
                    del by_dim[dim]
            if scale > 0:
                signatures[name].append(_signature(expected))
    return outputs.detach(), {
        name: (dim := min(by_dim), by_dim[dim].take(slice(0, 1)), frozenset(call.given for call in calls[name]))
        for name, by_dim in guesses.items()
        if by_dim and len(values := signatures[name]) > 1 and max(values) - min(values) > 1e-4 * max(values)
    }


def _signature(gradient: list[Tensor]) -> float:
    """Return a number that unequal gradients are unlikely to share."""
    return sum(
        float((piece.abs() * torch.arange(1, len(piece) + 1, device=piece.device).remainder(97)).sum())
        for piece in _pieces(gradient)
    )


def _equal(part: Part, expected: list[Tensor], scale: float) -> bool:
    """Return whether the part of one row is this gradient, comparing some columns at a time."""
    if part.n_parameters != sum(map(len, expected)) or not scale < float("inf"):
        return False
    start = 0
    for piece in _pieces(expected):
        got = part.columns(start, start + len(piece))[0]
        if not torch.allclose(got, piece, rtol=1e-3, atol=1e-4 * scale):
            return False
        start += len(piece)
    return True


def _pieces(gradient: list[Tensor]) -> Iterator[Tensor]:
    for values in gradient:
        yield from torch.split(values, COMPARED_COLUMNS)
