"""What is tested on some rows, not assumed: that each has a gradient of its own, and which layers hooks can compute.

A layer's part must equal plain gradients there. Parameters that fail, or belong to no layer, get rows.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial, reduce
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from ..data.inputs import Inputs
from ..errors import ChangedShapeError, NoGradientError
from .layers import hooks
from .layers.factors import DenseRows, OuterProducts, Part, cheapest
from .layers.hooks import SHARED, Evaluate, Layers, Places, is_known, names_of
from .layers.segments import SEGMENTS
from .model_copy import ModelCopy

COMPARED_COLUMNS = 2**20  # at a time
CERTIFIED_TO = {torch.float32: 1e-4, torch.float64: 1e-9}  # relative; more is not rounding
CERTIFIED_ALONE = 1e-4  # of rows that were computed alone, parts of which the network may compute in float32
CERTIFIED_DIRECTIONS = 4  # in which sums of gradients are compared


class AcceptedInputs(NamedTuple):
    """What the validation of one kind of inputs found."""

    shape: tuple[int, ...]  # of what the network returns for a row
    pass_bytes: int  # of a row: what a forward pass keeps for the backward pass
    alone_and_together: bool  # whether a row was seen to give the same alone as among others


def leaves(y: Tensor) -> set[Tensor]:
    """Return the tensors that y has gradients with respect to."""
    waiting, seen, found = [y.grad_fn], set(), {y} if y.is_leaf else set()
    while waiting:
        if (node := waiting.pop()) is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found


def try_rows(model: ModelCopy, x: Inputs) -> AcceptedInputs:
    """Evaluate the first two rows, raise unless each has outputs of its own, and measure the memory of a pass."""
    x = model.prepare(x[:2])
    b, parameters = len(x), list(model.module.parameters())
    weights, versions = {w.data_ptr() for w in parameters}, [w._version for w in parameters]
    remembered = returned = 0  # bytes for backward; where layers are frozen it remembers nothing, and outputs count
    coarse: list[str] = []

    def evaluate(x: Inputs) -> Any:  # a copy: a network may work on its input in place
        return model(x.map(torch.clone))

    def pack(tensor: Tensor) -> Tensor:
        nonlocal remembered
        remembered += 0 if tensor.data_ptr() in weights else tensor.nbytes
        return tensor.detach()  # an output would hold the graph that holds it, for ever

    def watch(name: str, module: nn.Module, args: Any, output: Any) -> None:
        nonlocal returned
        returned += output.nbytes if isinstance(output, Tensor) else 0
        if is_known(module) and hooks.owned(module):
            coarse.extend(f"{name!r} in {each.dtype}" for each in hooks.real_tensors(output) if each.itemsize < 4)

    with ExitStack() as stack:
        for name, module in model.module.named_modules():
            if next(module.children(), None) is None or name in model.layer_names:
                stack.callback(module.register_forward_hook(partial(watch, name)).remove)
        try:
            try:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    y = evaluate(x)
            except Exception:  # a network that uses torch.func refuses such hooks; any other fails once more
                y = evaluate(x)
        except ChangedShapeError:
            raise
        except Exception as error:
            integer = any(not tensor.is_floating_point() for tensor in x.tensors)
            hint = "; if these are not indices of an Embedding, pass x.float()" if integer and x.single else ""
            flat = x.single and any(tensor.ndim == 1 for tensor in x.tensors) and not integer
            hint += "; if each row is one feature, pass x[:, None]" if flat else ""
            hint += "" if x.single else f"; its forward takes {inspect.signature(model.module.forward)}"
            if model.precision is not None and "dtype" in str(error):
                hint += "; it is in float32 here, and forward converts to a lower precision itself"
            raise ValueError(f"the network could not be evaluated on a batch of {x}: {error}{hint}") from error
    if coarse:
        advice = "use no torch.autocast, or enabled=self.training, or give precision='float32', for a copy without it"
        raise TypeError(f"the network computes {coarse[0]}, too coarse for JᵀJ: {advice}")
    _check_output(y, b)
    if versions != [w._version for w in parameters]:
        raise ValueError(
            "the network's weights change while it is called: it writes to them (F.embedding with max_norm), or "
            "another thread trains it; neither is supported"
        )
    if b > 1:
        check_independent(lambda x: evaluate(x).reshape(len(x), -1), x, y.detach().reshape(b, -1), slice(b - 1, b))
    shape = tuple(y.shape[1:]) if y.ndim > 1 else (1,)
    return AcceptedInputs(shape, (x.nbytes + 2 * max(remembered, returned)) // b, b > 1)


def _check_output(y: Any, b: int) -> None:
    if not isinstance(y, Tensor):
        key = repr(next(iter(y), 0)) if isinstance(y, dict) else "0"
        pick = f"pick the prediction with output=, such as output=lambda out: out[{key}] or lambda out: out.logits"
        if isinstance(y, tuple):
            pick += ", or all by torch.cat(out, 1); if the network returns its variance as well, give variance="
        raise TypeError(f"the network must return one tensor, got {type(y).__name__}; {pick}")
    if not y.is_floating_point():
        raise TypeError(f"the network must return real numbers, got {y.dtype}")
    rows = y.ndim > 0 and len(y) == b and y.numel() > 0
    if not rows and not (b == 1 and y.ndim == 0):
        raise ValueError(
            f"the network returns shape {tuple(y.shape)} for a batch of {b} rows, expected ({b},) or, for several "
            f"outputs, ({b}, …); pick some of it with output=, for instance output=lambda y: y[:, -1]"
        )


def changed_shape(now: int, before: int) -> ChangedShapeError:
    """Return what to raise if rows have another number of outputs than rows of their kind had before."""
    return ChangedShapeError(
        f"the network returns {now} numbers for each of these rows, and returned {before} for the first ones: all rows "
        "need the same number; pad them, or pick some with output="
    )


def some_rows(b: int, rng: np.random.Generator) -> slice | np.ndarray:
    """Choose which of b rows to evaluate without the others: from one to half of them, of any order of magnitude.

    One alone misses what only a few rows have in common; many at once what none has alone.
    """
    count = int((b // 2 + 1) ** rng.random())
    if count > 1:
        return rng.choice(b, count, replace=False)
    return slice(row := int(rng.integers(b)), row + 1)


def check_batch(
    evaluate: Callable[[Inputs], Tensor], x: Inputs, y: Tensor, alone: Tensor | None, rng: np.random.Generator
) -> None:
    """Raise if rows have other outputs alone than in y (b, m); where those alone are unknown, evaluate some rows."""
    if alone is None:
        check_independent(evaluate, x, y, some_rows(len(x), rng))
    elif not close(y, alone):
        worst = int((y - alone).abs().amax(dim=1).argmax())
        check_independent(evaluate, x, y, slice(worst, worst + 1))


def check_independent(evaluate: Callable[[Inputs], Tensor], x: Inputs, y: Tensor, *which: slice | np.ndarray) -> None:
    """Raise unless some rows have the same outputs without the others as in y (b, m), and every time."""
    for rows in which:
        try:
            alone = evaluate(x[rows]).detach()
        except Exception as error:
            raise ValueError(f"the network could not be evaluated on a single row (a batch norm?): {error}") from error
        if close(together := y[rows], alone):
            continue
        check_repeatable(evaluate(x).detach(), y)
        i = int((together - alone).abs().nan_to_num(torch.inf).argmax())
        raise ValueError(
            f"the network's output for a row depends on the other rows of the batch ({alone.flatten()[i]:.4g} "
            f"{'alone' if len(alone) == 1 else 'among a few'}, {together.flatten()[i]:.4g} among them), as with batch "
            f"statistics, or {x.mixed_by}"
        )


def check_repeatable(y: Tensor, again: Tensor) -> None:
    if not close(y, again, 1e-5):
        raise ValueError(
            "the network's output changes from call to call: draw no random numbers in eval mode (F.dropout needs "
            "training=self.training), and mask the padded positions that an nn.TransformerEncoder returns"
        )


def close(a: Tensor, b: Tensor, tolerance: float = 1e-3) -> bool:
    scale = 1e-5 * (1 + float(b.abs().max().nan_to_num(0.0, 0.0, 0.0)))
    return torch.allclose(a, b, rtol=tolerance, atol=scale, equal_nan=True)


def distinct_rows(x: Inputs, most: int) -> Inputs:
    """Return up to `most` rows that differ; a single row and a copy of it with some noise, where that is possible."""
    rows = x[np.unique(np.linspace(0, len(x) - 1, most).round().astype(int))]
    if not rows.tensors or (len(rows) > 1 and not all(bool((each == each[:1]).all()) for each in rows.tensors)):
        return rows
    rows, generator = rows[:1], torch.Generator().manual_seed(0)
    if not any(tensor.is_floating_point() for tensor in rows.tensors):
        return rows

    def noisy(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.randn(tensor.shape, generator=generator, device="cpu").to(tensor)
        return tensor + 0.1 * noise * (1 + tensor.abs())

    return Inputs.cat([rows, rows.map(noisy)])


def probe_layers(model: nn.Module, evaluate: Evaluate, b: int, by_item: bool = False) -> tuple[Layers, Tensor]:
    """Test every layer on b rows, or items; return what was found, and the outputs (b, m).

    Rows whose gradients are zero or equal show nothing, so at least two others are needed; a layer that cannot be
    tested gets rows of its own, and so does one that is not called, whose weights may be used all the same.
    """
    layers = hooks.candidates(model)
    some = (SEGMENTS, 0) if by_item else (0, 1)
    dims = {name: (0,) if isinstance(layer, nn.RNNBase) else some for name, layer in layers.items()}
    y, found = _verify_candidates(model, evaluate, b, layers, dims)
    tables = {n: each for n, each in layers.items() if n not in found and isinstance(each, nn.Embedding)}
    if tables:
        with suppress(Exception):  # the network may not accept as many rows there
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
        positions=sum(part.delta.shape[1] for part in kept if isinstance(part, OuterProducts)),
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
    by_item = {name: calls[name] for name in layers if SEGMENTS in dims[name]}
    rows = hooks.by_item(outputs, by_item)
    guesses: dict[str, dict[int, Part]] = {}
    for name, layer in layers.items():
        for dim in dims[name] if calls[name] else ():
            # without rows in this dimension, or a rule in torch.func, the layer is not such a one
            with suppress(Exception), hooks.no_inner_loops():
                guesses.setdefault(name, {})[dim] = hooks.part_of(
                    layer, calls[name], deltas[name], b, dim, rows.get(name)
                )
    signatures: dict[str, list[float]] = {name: [] for name in guesses}
    names = {name: names_of(name, layers[name]) for name in guesses}
    trainable = {name: w for name, w in model.named_parameters() if any(name in each for each in names.values())}
    for i in range(b) if trainable else ():  # a row at a time: whole gradients of a large network are not small
        gradients = torch.autograd.grad(y[i], list(trainable.values()), retain_graph=True, materialize_grads=True)
        by_name = dict(zip(trainable, gradients, strict=True))
        for name, by_dim in guesses.items():
            flat = (by_name[each].flatten() for each in names[name])
            expected = [piece for values in flat for piece in torch.split(values, COMPARED_COLUMNS)]
            scale = max(float(values.abs().max()) for values in expected)
            for dim in list(by_dim):
                if not _equal(by_dim[dim].take(slice(i, i + 1)), expected, scale):
                    del by_dim[dim]
            if scale > 0:  # a number that unequal gradients are unlikely to share
                weights = [torch.arange(1, len(piece) + 1, device=piece.device).remainder(97) for piece in expected]
                signatures[name].append(sum(float((a.abs() * w).sum()) for a, w in zip(expected, weights, strict=True)))
    return outputs.detach(), {
        name: (dim := min(by_dim), by_dim[dim].take(slice(0, 1)), frozenset(call.given for call in calls[name]))
        for name, by_dim in guesses.items()
        if by_dim and len(values := signatures[name]) > 1 and max(values) - min(values) > 1e-4 * max(values)
    }


def _equal(part: Part, expected: list[Tensor], scale: float) -> bool:
    """Return whether the part of one row is this gradient, comparing some columns at a time."""
    if part.n_parameters != sum(map(len, expected)) or not scale < float("inf"):
        return False
    start = 0
    for piece in expected:
        got = part.columns(start, start + len(piece))[0]
        if not torch.allclose(got, piece, rtol=1e-3, atol=1e-4 * scale):
            return False
        start += len(piece)
    return True


def not_certified(name: str, model: ModelCopy) -> ValueError:
    """Return what to raise if not even the gradients of rows one by one add up to that of their batch."""
    coarse = [other for other, w in model.module.named_parameters() if w.is_floating_point() and w.itemsize < 4]
    why = f"the gradients of a batch with respect to {name!r} are not those of its rows one by one: "
    if coarse:
        return ValueError(f"{why}{coarse[0]!r}, which they pass through, rounds them; give precision='float32'")
    return ValueError(
        f"{why}outputs depend on the other rows of the batch, or a hook or a backward pass of your own clips or scales "
        "gradients. Leave the parameter out, parameters=, or change the model"
    )


class Certificate(NamedTuple):
    """The gradient of Σ fᵢⱼ yⱼ(xᵢ) with random f over a batch, by a backward pass of its own: Σ fᵢⱼ gᵢⱼ.

    Rows that were permuted, merged or dropped on their way to their gradients would make another sum: nothing that
    these are made of is trusted. Sums are compared in random directions, in which they take little time to form.
    """

    factors: Tensor  # (b, m)
    directions: Tensor  # (k, ·)
    gradients: dict[str, Tensor]

    @classmethod
    def of(cls, y: Tensor, weights: Mapping[str, Tensor], rng: np.random.Generator) -> Self:  # (b, m)
        """Take the gradient of outputs with a graph, which is gone afterwards."""
        # not signs alone: two rows of the same sign could be exchanged
        factors = torch.from_numpy(rng.standard_normal(y.shape)).to(y)
        # of a sum: given factors, torch would import sympy, which takes long
        found = torch.autograd.grad((y * factors).sum(), list(weights.values()), materialize_grads=True)
        longest = max(g.shape[1] if g.is_sparse else max(g.shape[:2], default=1) for g in found)
        directions = torch.from_numpy(rng.standard_normal((CERTIFIED_DIRECTIONS, longest))).to(y)
        return cls(factors, directions, dict(zip(weights, found, strict=True)))

    def holds(self, names: Sequence[str], parts: Sequence[Part], tolerance: float | None = None) -> bool:
        """Return whether the gradients with respect to some parameters, one part per output, have this sum, up to
        rounding in their own precision, or to a tolerance."""
        if len(parts) > 1 and len({type(part) for part in parts}) > 1:  # an output may not depend on a layer
            parts = [DenseRows(part.rows()) for part in parts]
        found = self._total(parts, self.factors)
        expected = parts[0].image([self.gradients[name] for name in names], self.directions)
        compared = torch.stack([found, expected, found - expected]).flatten(1)
        *sizes, difference = torch.linalg.vector_norm(compared, dim=1).tolist()
        largest, tolerance = max(sizes), tolerance or CERTIFIED_TO[found.dtype]
        if difference <= tolerance * largest or not math.isfinite(largest):  # a row will be named
            return True
        # rows that are alike cancel by their factors, and the rounding of each is left: next to nothing of all
        alike = torch.linalg.vector_norm(self._total(parts, self.factors.abs())).item()
        return difference <= tolerance / 10 * alike

    def _total(self, parts: Sequence[Part], factors: Tensor) -> Tensor:
        totals = (part.total(column, self.directions) for part, column in zip(parts, factors.T, strict=True))
        return reduce(torch.add, totals)
