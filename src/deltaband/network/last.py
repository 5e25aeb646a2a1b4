"""The last layer: which it is, and what it is given."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data.inputs import Inputs
from .model_copy import ModelCopy, layer_of


def last_layer(model: ModelCopy, x: Inputs) -> str | None:
    """Return the name of the layer that runs last of those whose weights the output depends on; None if there is none.

    What a layer returns would not do: forces depend on the weights of a layer that returns the energy, not on that.
    """
    ran: list[str] = []
    own = {name: w for name, w in model.module.named_parameters() if w.is_floating_point()}
    weights = {name: w.detach().requires_grad_() for name, w in own.items()}

    def watch(name: str, *_: Any) -> None:
        ran.append(name)

    with ExitStack() as stack:
        for name, module in model.module.named_modules():
            if name in model.layer_names:
                stack.callback(module.register_forward_hook(partial(watch, name)).remove)
        y = model(model.prepare(x[:2]), weights)
    if not isinstance(y, Tensor) or not y.requires_grad:
        return None
    gradients = torch.autograd.grad(y.sum(), list(weights.values()), allow_unused=True)
    taken = {id(w) for w, gradient in zip(own.values(), gradients, strict=True) if gradient is not None}
    every = model.module.named_parameters(remove_duplicate=False)  # a tied one belongs to several layers
    used = {layer_of(name) for name, w in every if id(w) in taken}
    return next((name for name in reversed(ran) if name in used), None)


def last_given(model: nn.Module, outputs: Callable[[Inputs], Any], x: Inputs) -> Tensor:  # (b, k)
    """Return what the last linear layer is given, averaged over positions; nothing if that has no rows."""
    given: list[Tensor] = []

    def record(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        given.extend(each.detach() for each in arguments[:1])

    few = x[:1] if len(x) > 1 else Inputs.cat([x, x])
    with ExitStack() as stack:
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                stack.callback(layer.register_forward_pre_hook(record).remove)
        outputs(few)
        of_few = list(given)
        given.clear()
        outputs(x)
    # another number of rows shows whether the first dimension holds them, or is as long by chance
    if not given or len(given) != len(of_few) or (len(of_few[-1]), len(given[-1])) != (len(few), len(x)):
        return torch.zeros(len(x), 0)
    last = given[-1]
    return last.reshape(len(x), math.prod(last.shape[1:-1]), last.shape[-1]).mean(dim=1)
