"""What the optimiser of the training says about λ: the weight decay of the parameters, where it is coupled."""

from collections import Counter
from typing import Any

from torch import nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, NAdam, Optimizer, RAdam, RMSprop

from ..damping import Damping
from ..errors import warn
from ..network.model_copy import ParameterChoice, select_parameters, unwrap

# These add weight_decay·w to the gradient. Others shrink the weights directly, and have no λ.
COUPLED_OPTIMISERS = (SGD, ASGD, RMSprop, Adagrad, Adadelta, Adam, Adamax, NAdam, RAdam)


def damping_rule(
    model: nn.Module,
    parameters: ParameterChoice,
    optimizer: Any,
    damping: float | None,
    weight_decay: float | None,
    loss: str,
    batch_size: int | None = None,
) -> Damping:
    """Return λ as it is given: by itself, by the weight decay, or by the optimiser that has trained the model."""
    if optimizer is None:
        return Damping(damping, weight_decay, loss, batch_size)
    if damping is not None or weight_decay is not None:
        raise ValueError("give optimizer= alone, or weight_decay= or damping= instead: each says what λ is")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be the torch.optim optimiser that trained the model, got {optimizer!r}")
    groups = _groups(optimizer, model, parameters)
    name = type(optimizer).__name__
    decoupled = any(group.get("decoupled_weight_decay") for _, group in groups)
    if decoupled or not isinstance(optimizer, COUPLED_OPTIMISERS):
        decays = any("weight_decay" in group for _, group in groups)
        why = f"the weight decay of {name} is not added to the loss" if decays else f"{name} has no weight decay"
        return Damping(None, None, loss, batch_size, unknown=why)
    found = Counter[float]()
    for w, group in groups:
        found[float(group["weight_decay"])] += w.numel()
    ((most, count), *others), total = found.most_common(), found.total()
    if most == 0:
        return Damping(None, None, loss, batch_size, unknown=f"{name} was run without weight decay")
    if others:
        rest = ", ".join(f"{decay:g} for {n:,}" for decay, n in others)
        warn(
            f"the optimiser has several weight decays, {most:g} for {count:,} of {total:,} parameters and {rest}: λ "
            f"follows from {most:g}, as if it were that of all"
        )
    return Damping(None, most, loss, batch_size)


def _groups(optimizer: Optimizer, model: nn.Module, parameters: ParameterChoice) -> list[tuple[nn.Parameter, Any]]:
    """Return the parameters that take part, each with its group of the optimiser, or raise."""
    module = unwrap(model)
    selected = select_parameters(module, parameters)
    group_of = {id(w): group for group in optimizer.param_groups for w in group["params"]}
    found = []
    for name, w in module.named_parameters():
        if name in selected:
            if id(w) not in group_of:
                raise ValueError(
                    f"the optimiser does not have the model's parameter {name!r}: give that which trained this very "
                    "model, not a copy of it; or, if that parameter was not trained, parameters= those that were"
                )
            found.append((w, group_of[id(w)]))
    return found
