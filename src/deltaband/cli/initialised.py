"""Which weights of a network are still the random numbers that it was initialised with.

All operations are watched while a network is made: a tensor counts as drawn if a random number generator has filled
it, or if it was computed from such tensors alone. Whatever comes from elsewhere, a file, an array, a gradient, ends
that. So it does not matter in which way weights were loaded, nor whether the generator was seeded.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RandomNumbers(TorchDispatchMode):
    """A context that watches operations, and knows which tensors hold random numbers and nothing else."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # storages by their address, which the reference keeps from being used again, and their first bytes
        self._drawn: dict[int, tuple[StorageWeakRef, list[int]]] = {}

    @staticmethod
    def load() -> None:
        """Let torch import what it needs for watching, as long as nobody else's folder is in `sys.path`."""
        with torch.random.fork_rng(devices=[]), RandomNumbers():
            nn.Linear(1, 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::").partition(".")[0]
        given, written = _tensors((args, kwargs)), _tensors(_written(func, args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags and (written or not given or name.endswith("_like")):
            drawn = True
        elif name.endswith("_like") or name.startswith("new_"):  # constants
            drawn = False
        elif name in ("fill_", "zero_"):  # of a part, the rest stays: the padding of an embedding
            drawn = self._is_drawn(given[0]) and given[0].nbytes < given[0].untyped_storage().nbytes()
        else:
            drawn = bool(given) and all(map(self._is_drawn, given[1:] if name == "copy_" else given))
        result = func(*args, **kwargs)
        for tensor in [*written, *_tensors(result)]:
            if (storage := _storage(tensor)) is not None:
                self._drawn.pop(storage.cdata, None)
                if drawn:
                    self._drawn[storage.cdata] = storage, _first_bytes(tensor)
        return result

    def names(self, network: nn.Module) -> Iterator[str]:
        """Yield the names of the trainable parameters that hold random numbers, still those that were seen."""
        for name, weight in network.named_parameters():
            if weight.requires_grad and self._is_drawn(weight):
                _, before = self._drawn[weight.untyped_storage()._cdata]
                if _first_bytes(weight) == before:  # NumPy may write into the same memory, unseen
                    yield name

    def _is_drawn(self, tensor: Tensor) -> bool:
        storage = _storage(tensor)
        return storage is not None and storage.cdata in self._drawn


def _storage(tensor: Tensor) -> StorageWeakRef | None:
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError):  # sparse tensors and some subclasses have none
        return None


def _first_bytes(tensor: Tensor) -> list[int]:
    try:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())[:64].tolist()
    except Exception:  # meta and fake tensors hold no numbers, and say so in different ways
        return []


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operation writes to."""
    arguments = func._schema.arguments
    pairs = [
        *zip(arguments, args, strict=False),
        *((each, kwargs[each.name]) for each in arguments if each.name in kwargs),
    ]
    return [value for each, value in pairs if each.alias_info is not None and each.alias_info.is_write]
