"""Rows on their own: what a network must satisfy for each row to have a gradient of its own, and all these at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vjp, vmap

from ..data.inputs import Inputs
from .layers.hooks import is_known, math_attention, owned, real_tensors
from .model_copy import AcceptedInputs, ModelCopy, plain_autograd

Parameters = dict[str, Tensor]
PAST_THE_TREE = (
    "some weights are reached past the module tree (a lambda or a list that holds a layer or a parameter), so their "
    "gradients would be missing: register them as submodules or parameters"
)


def rows_by_vmap(
    evaluate: Callable[[Inputs, Parameters], Tensor], varied: Parameters, x: Inputs, m: int
) -> tuple[Tensor, Tensor]:
    """Compute outputs (b, m) and rows of J (m, b, p), with respect to what is varied, by torch.func."""

    def outputs(varied: Parameters, *row: Tensor) -> Tensor:  # (m,)
        return evaluate(replace(x, tensors=tuple(part.unsqueeze(0) for part in row)), varied)[0]

    def single(varied: Parameters, *row: Tensor) -> Tensor:
        return outputs(varied, *row)[0]

    def several(varied: Parameters, *row: Tensor) -> tuple[Parameters, Tensor]:
        y, pull = vjp(lambda varied: outputs(varied, *row), varied)  # type: ignore[misc]
        return vmap(pull)(torch.eye(m, dtype=y.dtype, device=y.device))[0], y

    each: Callable[..., tuple[Parameters, Tensor]] = grad_and_value(single) if m == 1 else several
    with math_attention():
        try:
            by_name, y = vmap(each, in_dims=(None, *[0] * len(x.tensors)))(varied, *x.tensors)
        except Exception as error:
            raise TypeError(f"torch.func could not compute per-row gradients of this network: {error}") from error
    rows = torch.cat([g.reshape(len(x), m, -1) for g in by_name.values()], dim=2).movedim(1, 0)
    if y.requires_grad or rows.requires_grad:
        raise TypeError(PAST_THE_TREE)
    return y.reshape(len(x), m), rows


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
    last: str | None = None
    coarse: list[str] = []

    def evaluate(x: Inputs) -> Any:  # a copy: a network may work on its input in place
        return model(x.map(torch.clone))

    def pack(tensor: Tensor) -> Tensor:
        nonlocal remembered
        remembered += 0 if tensor.data_ptr() in weights else tensor.nbytes
        return tensor.detach()  # an output would hold the graph that holds it, for ever

    def watch(name: str, module: nn.Module, args: Any, output: Any) -> None:
        nonlocal returned, last
        returned += output.nbytes if isinstance(output, Tensor) else 0
        last = name if name in model.layer_names else last
        if is_known(module) and owned(module):
            coarse.extend(f"{name!r} in {each.dtype}" for each in real_tensors(output) if each.itemsize < 4)

    with ExitStack() as stack:
        stack.enter_context(plain_autograd(model.device))
        for name, module in model.module.named_modules():
            if next(module.children(), None) is None or name in model.layer_names:
                stack.callback(module.register_forward_hook(partial(watch, name)).remove)
        try:
            try:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    y = evaluate(x)
            except Exception:  # a network that uses torch.func refuses such hooks; any other fails once more
                y = evaluate(x)
        except Exception as error:
            integer = any(not tensor.is_floating_point() for tensor in x.tensors)
            hint = "; if these are not indices of an Embedding, pass x.float()" if integer and x.single else ""
            hint += "" if x.single else f"; its forward takes {inspect.signature(model.module.forward)}"
            raise ValueError(f"the network could not be evaluated on a batch of {x}: {error}{hint}") from error
    if coarse:
        raise TypeError(
            f"the network computes {coarse[0]}, too coarse for JᵀJ: use no torch.autocast, or enabled=self.training"
        )
    _check_output(y, b)
    if versions != [w._version for w in parameters]:
        raise ValueError(
            "the network's weights change while it is called: it writes to them (F.embedding with max_norm), or "
            "another thread trains it; neither is supported"
        )
    if b > 1:
        with plain_autograd(model.device):
            check_independent(lambda x: evaluate(x).reshape(len(x), -1), x, y.detach().reshape(b, -1), b - 1)
    if model.last_layer is not None and last not in (None, model.last_layer):
        raise ValueError(
            f"parameters='last' is the layer registered last, {model.last_layer!r}, but {last!r} runs last: name it, "
            f"parameters=['{last}.*']"
        )
    return AcceptedInputs(y.numel() // b, (x.nbytes + 2 * max(remembered, returned)) // b, b > 1)


def _check_output(y: Any, b: int) -> None:
    """Raise unless y holds real numbers for each of b rows."""
    if not isinstance(y, Tensor):
        pick = "pick the prediction with output=, such as output=lambda out: out[0] or output=lambda out: out.logits"
        raise TypeError(f"the network must return one tensor, got {type(y).__name__}; {pick}")
    if not y.is_floating_point():
        raise TypeError(f"the network must return real numbers, got {y.dtype}")
    rows = y.ndim in (1, 2) and len(y) == b and y.numel() > 0
    if not rows and not (b == 1 and y.ndim == 0):
        raise ValueError(
            f"the network returns shape {tuple(y.shape)} for a batch of {b} rows, expected ({b},) or, for m outputs, "
            f"({b}, m); pick some of it with output=, for instance output=lambda y: y[:, -1]"
        )


def check_independent(evaluate: Callable[[Inputs], Tensor], x: Inputs, y: Tensor, *which: int) -> None:
    """Raise unless some rows have the same outputs alone as in y (b, m), among all of these rows, and every time."""
    for row in which:
        try:
            alone = evaluate(x[row : row + 1])[0].detach()
        except Exception as error:
            raise ValueError(f"the network could not be evaluated on a single row (a batch norm?): {error}") from error
        if _close(y[row], alone, 1e-3):
            continue
        check_repeatable(evaluate(x).detach(), y)
        i = int((y[row] - alone).abs().nan_to_num(torch.inf).argmax())
        raise ValueError(
            f"the network's output for a row depends on the other rows of the batch ({alone[i]:.4g} alone, "
            f"{y[row, i]:.4g} among them), as with batch statistics, or a recurrent layer without batch_first=True"
        )


def check_repeatable(y: Tensor, again: Tensor) -> None:
    if not _close(y, again, 1e-5):
        raise ValueError(
            "the network's output changes from call to call: draw no random numbers in eval mode (F.dropout needs "
            "training=self.training), and mask the padded positions that an nn.TransformerEncoder returns"
        )


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    scale = 1e-5 * (1 + float(b.abs().max().nan_to_num(0.0, 0.0, 0.0)))
    return torch.allclose(a, b, rtol=tolerance, atol=scale, equal_nan=True)


def distinct_rows(x: Inputs, most: int) -> Inputs:
    """Return up to `most` rows that differ; a single row and a copy of it with some noise, where that is possible."""
    rows = x[np.unique(np.linspace(0, len(x) - 1, most).round().astype(int))]
    if len(rows) > 1 and not all(bool((tensor == tensor[:1]).all()) for tensor in rows.tensors):
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


def first_difference(got: Tensor, expected: Tensor, sizes: dict[str, int]) -> str | None:  # (p,) twice
    """Return the first parameter whose gradients differ by more than rounding, or a ReLU at its kink, can explain."""
    scale = float(expected.norm())
    pieces = zip(sizes, *(torch.split(values, list(sizes.values())) for values in (got, expected)), strict=True)
    return next((n for n, a, b in pieces if float((a - b).norm()) > 1e-2 * float(b.norm()) + 1e-3 * scale), None)
