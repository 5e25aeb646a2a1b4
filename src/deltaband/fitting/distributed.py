"""`ProcessGroup`: several processes that share a fit, with values, rows, sums and errors in common."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

from ..data.batches import EMPTY_DATA_MESSAGE, Batches
from ..data.row_record import RowSample
from ..errors import DistributedFitError, EmptyDataError
from ..machine import free_memory
from ..network.network import Network
from ..network.stored import network_hook, network_maker
from ..storage import container
from ..storage.encoding import Decoder, Encoder
from .accumulator import FitAccumulator
from .checkpoint import samplers
from .driver import OneProcess
from .fit import Fit, Outputs
from .spec import FitSpec, first_difference

MakeNetwork = Callable[..., Network]


class ProcessGroup(OneProcess):
    """The default group of `torch.distributed`: what one process calls, all must call in turn."""

    def __init__(self) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "distributed=True is for processes that torch.distributed has brought together: start them with "
                "torchrun, and call torch.distributed.init_process_group first"
            )
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.name = f"{self.rank} of {self.size}"
        # nccl works on the memory of its device alone
        nccl = dist.get_backend() == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    # --- values

    @contextmanager
    def step(self) -> Iterator[None]:
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            failed = error
        messages = self.gather("" if failed is None else f"{type(failed).__name__}: {failed}")
        if failed is not None:
            raise failed
        for rank, message in enumerate(messages):
            if message:
                raise DistributedFitError(f"process {rank} of {self.size} has failed, and the fit with it: {message}")

    def gather(self, value: Any) -> list[Any]:
        every: list[Any] = [None] * self.size
        with self._connected():
            dist.all_gather_object(every, value)
        return every

    def share(self, value: Any, lead: int, network: MakeNetwork | None = None) -> Any:
        if self.size == 1:
            return value
        packed = [_pack(value) if self.rank == lead else None]
        with self._connected():
            dist.broadcast_object_list(packed, lead)
        return value if self.rank == lead else _unpack(packed[0], network)

    def _send(self, value: Any, to: int) -> None:
        with self._connected():
            dist.send_object_list([_pack(value)], to)

    def _receive(self, rank: int, network: MakeNetwork | None = None) -> Any:
        packed: list[Any] = [None]
        with self._connected():
            dist.recv_object_list(packed, rank)
        return _unpack(packed[0], network)

    def total(self, array: np.ndarray) -> np.ndarray:
        """Return the sum of an array over all processes."""
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(self._device, copy=True)
        with self._connected():
            dist.all_reduce(tensor)
        return tensor.cpu().numpy()

    @contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            raise DistributedFitError(
                f"process {self.name} has lost the others: one of them has died, or did not answer within the time "
                f"that init_process_group(timeout=...) gives it: {error}"
            ) from error

    # --- before the first row

    def own_rows(self, batches: Batches) -> Batches:
        sampler = _distributed_sampler(batches)
        if sampler is None:
            return batches
        if (sampler.rank, sampler.num_replicas) != (self.rank, self.size):
            raise ValueError(
                f"the DistributedSampler is for process {sampler.rank} of {sampler.num_replicas}, and this is process "
                f"{self.name}"
            )
        n_rows = len(sampler.dataset)  # type: ignore[arg-type]
        own = min(sampler.num_samples, -(-max(n_rows - self.rank, 0) // self.size))
        if own < sampler.num_samples and not getattr(batches.source, "in_order", True):
            raise ValueError(
                "the DistributedSampler repeats its first rows at the end, which a DataLoader with in_order=False does "
                "not keep there: leave out in_order=False"
            )
        return replace(batches, max_rows=own, n_rows=None if batches.n_rows is None else min(own, batches.n_rows))

    def own_path(self, path: str | Path) -> Path:
        path = Path(path)
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder, not a file")
        return path.with_name(f"{path.stem}.{self.rank}{path.suffix}")

    def check_same_spec(self, spec: FitSpec, batches: Batches) -> None:
        sampler, names = _distributed_sampler(batches), ("seed", "epoch", "shuffle", "drop_last")
        drawn = {} if sampler is None else {name: getattr(sampler, name) for name in names}
        every = self.gather([spec.configuration(), spec.network().fingerprint, drawn])
        kinds = ("", "weights of ", "DistributedSamplers, in their ")
        for rank, each in enumerate(every):
            for what, mine, theirs in zip(kinds, every[0], each, strict=True):
                if name := first_difference(mine, theirs):
                    raise ValueError(f"processes 0 and {rank} have different {what}{name}: all must be given the same")

    def agree(self, groups: list[Outputs], n_rows: int | None) -> tuple[int, list[Outputs], int | None]:
        every = self.gather((groups, n_rows))
        lead = next((rank for rank, (found, _) in enumerate(every) if found), None)
        if lead is None:
            raise EmptyDataError(EMPTY_DATA_MESSAGE)
        for rank, (found, _) in enumerate(every):
            if found and found != every[lead][0]:
                raise ValueError(f"the networks of processes {lead} and {rank} return different numbers of outputs")
        lengths = [n for _, n in every]
        return lead, every[lead][0], None if None in lengths else sum(lengths)

    def check_same_outputs(self, spec: FitSpec, batches: Batches, lead: int) -> Batches:
        asked = None
        with self.step():
            if self.rank == lead:
                first, batches = batches.peek()
                first.x.check_storable()
                asked = (first.x, spec.model_outputs(first.x))
        x, outputs = self.share(asked, lead)
        with self.step():
            if not spec.still_returns(x, outputs):
                raise ValueError(
                    f"the network of process {self.rank} does not return for the same rows what that of process {lead} "
                    "does: all must be given the same"
                )
        return batches

    def memory_per_fit(self, spec: FitSpec, n_fits: int) -> float | None:
        if spec.memory is not None:
            return float(spec.memory) / n_fits
        # several processes may share the memory of one machine
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        free = min(self.gather(free_memory() / here))
        return free * (0.5 if spec.engine is None else 1.0) / n_fits

    def collect_sample(self, sample: RowSample, lead: int) -> None:
        for rank in range(self.size):
            if rank != lead and self.rank == lead:
                sample.merge(RowSample.from_state(self._receive(rank)))
            elif rank != lead and self.rank == rank:
                self._send(sample.state(), lead)

    # --- after the last row

    def merge_rows(self, rows: FitAccumulator) -> list[int]:
        """Add up sums; merge all else in pairs and then share it."""
        n = sum(self.gather(rows.n_rows))
        rows.check_size(n)
        summed = rows.all_reduce(self.total, n)
        apart, repeated = 1, []
        while apart < self.size:
            if self.rank % (2 * apart) == apart:
                self._send(rows.state(engine=not summed), self.rank - apart)
                break
            if self.rank + apart < self.size:
                other = self._receive(self.rank + apart, rows.kept_network)
                repeated += [self.rank + apart] if rows.record.shares_rows(other["record"]["hashes"]) else []
                rows.merge_state(other)
            apart *= 2
        shared = self.share(rows.state(engine=not summed), 0, rows.kept_network)
        if self.rank:
            rows.restore(shared)
        return sorted(rank for ranks in self.gather(repeated) for rank in ranks)

    def agree_on_fit(self, fit: Fit, network: Network) -> Fit:
        encode = Encoder(network_hook(()))
        tree = container.as_json(encode(fit))
        if len(set(self.gather(container.digest(encode.tensors, {"fit": tree})))) == 1:
            return fit
        shared: Fit = self.share(fit, 0, lambda outputs, layers: network.with_layers(layers).copy(own_weights=True))
        return shared


def _pack(value: Any) -> Any:
    """Return a tree and its tensors: what a file would hold, since networks and functions cannot be sent."""
    encode = Encoder(network_hook(()))
    return encode(value), {
        name: tensor.numpy() for name, tensor in encode.tensors.items()
    }  # torch cannot pickle uint64


def _unpack(packed: Any, network: MakeNetwork | None) -> Any:
    def no_network(*about: Any) -> Network:
        raise ValueError("no network is expected here")

    tree, arrays = packed
    return Decoder(
        {name: torch.from_numpy(each) for name, each in arrays.items()}, network_maker(network or no_network)
    )(tree)


def _distributed_sampler(batches: Batches) -> DistributedSampler[Any] | None:
    """Return the loader's DistributedSampler, unless it draws its rows in a way of its own."""
    found = (each for each in samplers(batches.source) if isinstance(each, DistributedSampler))
    return next((each for each in found if type(each).__iter__ is DistributedSampler.__iter__), None)
