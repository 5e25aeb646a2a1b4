"""Processes that work together on `torch.distributed`: values, arrays and errors that they have in common.

No pickle: values travel as the tree and the tensors that a file would hold (see `encoding`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import DistributedFitError
from ..network.network import Network
from ..network.recomputed import network_hook, network_maker
from ..storage.container import as_json
from ..storage.encoding import Decoder, Encoder

MakeNetwork = Callable[[tuple[int, ...], Any], Network]


class Team:
    """The processes of the default group. What one of them calls, all must call, in the same order."""

    def __init__(self) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "distributed=True is for processes that torch.distributed has brought together: start them with "
                "torchrun, and call torch.distributed.init_process_group first"
            )
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        # nccl knows no other memory than that of its device
        nccl = dist.get_backend() == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    @contextmanager
    def step(self) -> Iterator[None]:
        """What each process does alone; whatever is raised in one of them ends it in all."""
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            failed = error
        said = self.gather("" if failed is None else f"{type(failed).__name__}: {failed}")
        if failed is not None:
            raise failed
        for rank, message in enumerate(said):
            if message:
                raise DistributedFitError(f"process {rank} of {self.size} has failed, and the fit with it: {message}")

    def gather(self, value: Any) -> list[Any]:
        """What each process gives, plain enough for JSON, by rank."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        with self._answers():
            sizes = self._all_gather(torch.tensor([len(text)]))
            longest = int(max(map(int, sizes)))
            padded = torch.nn.functional.pad(text, (0, longest - len(text)))
            texts = self._all_gather(padded)
        return [json.loads(bytes(each[: int(size)].tolist())) for each, size in zip(texts, sizes, strict=True)]

    def total(self, array: np.ndarray) -> np.ndarray:
        """The sum over all processes."""
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(self._device, copy=True)
        with self._answers():
            dist.all_reduce(tensor)
        return tensor.cpu().numpy()

    def share(self, value: Any, lead: int, network: MakeNetwork | None = None) -> Any:
        """What the lead gives, in all processes."""
        if self.size == 1:
            return value
        with self._answers():
            return self._travel(value if self.rank == lead else None, lambda t: dist.broadcast(t, lead), network)

    def send(self, value: Any, to: int) -> None:
        with self._answers():
            self._travel(value, lambda tensor: dist.send(tensor, to), None)

    def receive(self, rank: int, network: MakeNetwork | None = None) -> Any:
        with self._answers():
            return self._travel(None, lambda tensor: dist.recv(tensor, rank), network)

    def _travel(self, value: Any, move: Callable[[Tensor], Any], network: MakeNetwork | None) -> Any:
        """A value that is there moves away, one that is not moves here: a size, a description, and its tensors."""
        if value is None:
            size = self._moved(torch.zeros(1, dtype=torch.int64), move)
            text = self._moved(torch.zeros(int(size), dtype=torch.uint8), move)
            tree, about = json.loads(bytes(text.tolist()))
            empty = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, shape, dtype in about}
            return Decoder(
                {name: self._moved(t, move) for name, t in empty.items()}, network_maker(network or _no_network)
            )(tree)
        encode = Encoder(network_hook(()))
        tree = encode(value)
        about = [(name, list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in encode.tensors.items()]
        text = torch.frombuffer(bytearray(as_json([tree, about]).encode()), dtype=torch.uint8)
        for tensor in (torch.tensor([len(text)]), text, *encode.tensors.values()):
            self._moved(tensor, move)
        return value

    def _moved(self, tensor: Tensor, move: Callable[[Tensor], Any]) -> Tensor:
        """As bytes: not every backend knows every kind of number."""
        if tensor.numel() == 0:
            return tensor
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).to(self._device)
        move(raw)
        return raw.cpu().view(tensor.dtype).reshape(tensor.shape)

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        tensor = tensor.to(self._device)
        every = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(every, tensor)
        return [each.cpu() for each in every]

    @contextmanager
    def _answers(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            raise DistributedFitError(
                f"process {self.rank} of {self.size} has lost the others: one of them has died, or did not answer "
                f"within the time that init_process_group(timeout=...) gives it: {error}"
            ) from error


def _no_network(outputs: tuple[int, ...], layers: Any) -> Network:
    raise ValueError("no network is expected here")
