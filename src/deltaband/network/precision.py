"""Networks in bfloat16 and half precision, whose copy computes in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..machine import free_memory

Precision = Literal["float32"] | None


def make_precise(module: nn.Module) -> int:
    """Put all parameters and buffers of a private copy into float32 that are coarser; return the bytes that takes.

    Raises:
        MemoryError: If there is not as much free memory.
    """
    every = (w for part in module.modules() for w in (*part._parameters.values(), *part._buffers.values()))
    coarse = {id(w): w for w in every if w is not None and w.is_floating_point() and w.itemsize < 4}
    needed = 4 * sum(w.numel() for w in coarse.values())
    if needed > (free := free_memory()):
        raise MemoryError(
            f"the float32 copy of the model takes {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free: leave out "
            "precision=, and put the parameters that are chosen with parameters= into float32 alone"
        )
    made: dict[int, Any] = {}  # tied weights stay tied
    with torch.inference_mode(False), torch.no_grad():
        for key, w in coarse.items():
            made[key] = nn.Parameter(w.float(), w.requires_grad) if isinstance(w, nn.Parameter) else w.float()
    for part in module.modules():
        own: dict[str, Any]
        for own in (part._parameters, part._buffers):
            own.update({name: made[id(w)] for name, w in own.items() if id(w) in made})
    return needed


class _WithoutAutocast(TorchFunctionMode):
    """Switches `torch.autocast` off before each function, wherever `forward` has switched it on."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                torch.set_autocast_enabled(device, False)  # the end of its block restores what was before
        return function(*args, **(kwargs or {}))


@contextmanager
def without_autocast() -> Iterator[None]:
    """Evaluate as if no `torch.autocast` was in a network, in this thread."""
    with _WithoutAutocast():
        yield
