"""Per-row gradients of a network: the rows of J.

`Network` is a private, eval-mode twin of the user's module. It shares the module's tensors but none of its state, so
nothing that happens here can be seen on the user's side, and every caller (every thread) can have its own.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import capture
from .capture import Layers
from .layers import Part, Rows, inner

# A chunk of rows that fits the processor's cache is two to three times faster to make than one that does not, but
# a handful of rows wastes the matrix products that follow.
CHUNK_BYTES = 8 * 2**20
CHUNK_BYTES_AT_MOST = 256 * 2**20
CHUNK_ROWS_AT_LEAST = 64
CHUNK_ROWS_AT_MOST = 4096
PAST_THE_TREE = (
    "some weights are reached past the module tree (a lambda or a list that holds a layer or a parameter), so their "
    "gradients would be missing: register them as submodules or parameters"
)


@dataclass(frozen=True)
class GradientBatch:
    """The gradients of some rows: blocks of rows, each held part by part, a part being the parameters of a layer.

    An engine that wants the rows asks for `rows()` or `columns(width)`; one that wants only inner products asks for
    `inner(other)`, and no row is formed where a layer does without.
    """

    blocks: tuple[Sequence[Part], ...]  # of the same parameters each

    @classmethod
    def of(cls, *rows: Tensor) -> GradientBatch:  # each (b_i, p)
        """From blocks of rows."""
        return cls(tuple((Rows(block),) for block in rows))

    def __len__(self) -> int:
        return sum(len(parts[0]) for parts in self.blocks)

    @property
    def n_parameters(self) -> int:
        return sum(part.n_parameters for part in self.blocks[0])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self.blocks for part in parts)

    def row_blocks(self) -> Iterator[Tensor]:  # each (b_i, p)
        for parts in self.blocks:
            yield parts[0].rows() if len(parts) == 1 else torch.cat([part.rows() for part in parts], dim=1)

    def rows(self) -> Tensor:  # (b, p)
        return next(self.row_blocks()) if len(self.blocks) == 1 else torch.cat(list(self.row_blocks()))

    @cached_property
    def squared_norms(self) -> np.ndarray:  # (b,) float64
        return np.concatenate([sum(part.squared_norms() for part in parts) for parts in self.blocks])

    def columns(self, width: int) -> Iterator[np.ndarray]:
        """All rows in float64, some columns at a time: (b, ≤ width). Each overwrites the one before."""
        memory = np.empty(len(self) * min(width, self.n_parameters))
        for layer in zip(*self.blocks, strict=True):
            arrays = [part.rows().cpu().numpy() for part in layer]
            for start in range(0, layer[0].n_parameters, width):
                stop = min(start + width, layer[0].n_parameters)
                columns = memory[: len(self) * (stop - start)].reshape(len(self), stop - start)
                np.concatenate([rows[:, start:stop] for rows in arrays], out=columns)
                yield columns

    def inner(self, other: GradientBatch) -> np.ndarray:
        """Inner products in float64: equals `self.rows() @ other.rows().T`."""  # (b, b')
        if self.has_rows and other.has_rows:
            width = max(1, CHUNK_BYTES // (8 * max(len(self), len(other), 1)))
            products = np.zeros((len(self), len(other)))
            for mine, theirs in zip(self.columns(width), other.columns(width), strict=True):
                products += mine @ theirs.T
            return products
        return np.block([[_inner(mine, theirs) for theirs in other.blocks] for mine in self.blocks])

    @property
    def has_rows(self) -> bool:
        """Whether the rows are there, rather than what they could be formed from."""
        return all(isinstance(part, Rows) for parts in self.blocks for part in parts)

    def take(self, index: np.ndarray) -> GradientBatch:
        """The rows of these numbers, in order."""
        chosen, first = [], 0
        for parts in self.blocks:
            within = torch.as_tensor(index[(index >= first) & (index < first + len(parts[0]))] - first)
            first += len(parts[0])
            if len(within):
                chosen.append(tuple(part.take(within) for part in parts))
        return GradientBatch(tuple(chosen))

    @staticmethod
    def concatenate(batches: Iterable[GradientBatch]) -> GradientBatch:
        """One batch out of many; no row is copied."""
        return GradientBatch(tuple(parts for batch in batches for parts in batch.blocks))


def _inner(mine: Sequence[Part], theirs: Sequence[Part]) -> np.ndarray:  # (b, b')
    return sum((inner(a, b) for a, b in zip(mine, theirs, strict=True)), np.zeros((len(mine[0]), len(theirs[0]))))


class Network:
    """A trained network as a differentiable function of its trainable parameters, one number for each input row.

    Frozen parameters are constants. A parameter used in several places counts once. With `layers` gradients come layer
    by layer, without rows where that is possible.
    """

    def __init__(self, model: nn.Module, layers: Layers | None = None) -> None:
        self.layers = layers
        self.twin = _twin(model)
        self.parameters = {name: w.detach() for name, w in self.twin.named_parameters() if w.requires_grad}
        if not self.parameters:
            raise ValueError(
                "the model has no trainable parameters: the delta method needs gradients with respect to at least "
                "one; set requires_grad=True on the parameters that were trained"
            )
        for name, w in self.parameters.items():
            if w.dtype not in (torch.float32, torch.float64):
                raise TypeError(
                    f"parameter {name!r} is {w.dtype}, expected float32 or float64: "
                    "convert a copy of the model first, for instance with copy.deepcopy(model).float()"
                )
        tensors = list(self.parameters.values())
        self.n_parameters = sum(w.numel() for w in tensors)
        if self.n_parameters == 0:
            raise ValueError("the model's trainable parameters have no elements")
        if any(w.device.type == "meta" for w in tensors):
            raise TypeError("the model is on the meta device and has no weights: load them first")
        self.device = tensors[0].device
        self.dtype = tensors[0].dtype
        for w in tensors:
            self.dtype = torch.promote_types(self.dtype, w.dtype)

    def prepare(self, x: Tensor) -> Tensor:
        """A copy of `x` (a network may work on its input in place), in the network's dtype where it is not integer."""
        x = x.detach().to(self.device, self.dtype if x.is_floating_point() else None, copy=True)
        return x.clone() if x.is_inference() else x

    def check(self, x: Tensor) -> int:
        """How many rows of J fit into one chunk. Raises unless the network gives one real number for each row of `x`.

        Two rows are enough to tell, and to measure what the backward pass will have to remember of each.
        """
        x = self.prepare(x[:2])
        b = len(x)
        weights = {w.data_ptr() for w in self.twin.parameters()}
        remembered = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal remembered
            remembered += 0 if tensor.data_ptr() in weights else tensor.nbytes
            return tensor

        with plain_autograd(self.device), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            try:
                y = self.twin(x.clone())
            except Exception as error:
                hint = "" if x.is_floating_point() else "; if these are not indices of an Embedding, pass x.float()"
                raise ValueError(
                    f"the network could not be evaluated on a batch of shape {tuple(x.shape)} and {x.dtype}: "
                    f"{error}{hint}"
                ) from error
        self._check_output(y, b)
        if b > 1:
            with plain_autograd(self.device), torch.no_grad():
                try:
                    alone = self.twin(x[:1].clone()).reshape(-1)[0]
                except Exception as error:
                    raise ValueError(f"the network could not be evaluated on a single row: {error}") from error
            if not torch.isclose(y.detach().reshape(-1)[0], alone, rtol=1e-3, atol=1e-5, equal_nan=True):
                raise ValueError(
                    "the network's output for a row depends on the other rows of the batch, or changes from call to "
                    f"call ({alone.item():.4g} alone, {y.reshape(-1)[0].item():.4g} in a batch): not supported"
                )
        own = self.n_parameters * self.dtype.itemsize
        if self.layers is not None:
            own = self.layers.row_bytes + sum(self.parameters[name].nbytes for name in self.layers.rest)
        row_bytes = own + 2 * remembered // b
        fewest = max(1, min(CHUNK_ROWS_AT_LEAST, CHUNK_BYTES_AT_MOST // row_bytes))
        return min(max(CHUNK_BYTES // row_bytes, fewest), CHUNK_ROWS_AT_MOST)

    def _check_output(self, y: Any, b: int) -> None:
        if not isinstance(y, Tensor):
            raise TypeError(
                f"the network must return one tensor, got {type(y).__name__}; a network that returns its own variance "
                "or several values is not covered: wrap it in a module that returns the prediction alone"
            )
        if not y.is_floating_point():
            raise TypeError(f"the network must return real numbers, got {y.dtype}")
        if y.ndim == 2 and len(y) == b and y.shape[1] > 1:
            raise ValueError(
                f"the network returns {y.shape[1]} outputs a row: several outputs, or an output with its own variance, "
                "are not supported yet; expected (b,) or (b, 1). Wrap the network in a module that returns one output"
            )
        if tuple(y.shape) not in {(b,), (b, 1)} and not (b == 1 and y.ndim == 0):
            raise ValueError(
                f"the network returns shape {tuple(y.shape)} for a batch of {b} rows, expected ({b},) or ({b}, 1)"
            )

    def examine(self, x: Tensor) -> None:
        """Find out which layers do without rows, by the first rows of `x`."""
        x = self.prepare(x[:2])
        with plain_autograd(self.device):
            if functional_call(self.twin, self.parameters, (x.clone(),)).requires_grad:
                raise TypeError(PAST_THE_TREE)
            try:
                self.layers = capture.examine(self.twin, x)
            except RuntimeError as error:
                raise TypeError(f"the network could not be differentiated: {error}") from error

    def gradients(self, x: Tensor) -> tuple[Tensor, GradientBatch]:
        """Outputs (b,) and gradients of the rows of `x`, from one forward and one backward pass."""
        x = self.prepare(x)
        if self.layers is None:
            outputs, rows = self._rows(self.parameters, x)
            return outputs, GradientBatch.of(rows)
        with plain_autograd(self.device):
            outputs, parts = capture.parts(self.twin, self.layers, x.clone())
        if self.layers.rest:
            _, rows = self._rows({name: self.parameters[name] for name in self.layers.rest}, x)
            parts.append(Rows(rows))
        return outputs, GradientBatch((parts,))

    def _rows(self, parameters: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:  # (b,), (b, p)
        """Outputs and rows of J for some of the parameters."""
        others = {name: w for name, w in self.parameters.items() if name not in parameters}

        def output(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
            return functional_call(self.twin, {**others, **parameters}, (row.unsqueeze(0),)).reshape(())

        # the other kernels of attention have no batching rule
        with plain_autograd(self.device), sdpa_kernel(SDPBackend.MATH):
            try:
                by_name, outputs = vmap(grad_and_value(output), in_dims=(None, 0))(parameters, x)
            except Exception as error:
                raise TypeError(
                    "torch.func could not compute per-row gradients of this network (layers such as nn.GRU, "
                    "branches that depend on the data, random numbers or state written in forward are not supported "
                    f"yet): {error}"
                ) from error
            rows = torch.cat([g.reshape(len(x), -1).to(self.dtype) for g in by_name.values()], dim=1)
        if outputs.requires_grad or rows.requires_grad:
            raise TypeError(PAST_THE_TREE)
        return outputs, rows

    def outputs(self, x: Tensor) -> Tensor:
        """Outputs (b,) alone, without gradients."""
        with plain_autograd(self.device), torch.no_grad():
            parts = torch.split(self.prepare(x), CHUNK_ROWS_AT_MOST)
            return torch.cat([self.twin(part).reshape(len(part)) for part in parts])

    def fingerprint(self) -> dict[str, str]:
        """A digest of each parameter and buffer, what is trainable, and the types of the modules."""
        state = {**dict(self.twin.named_parameters()), **dict(self.twin.named_buffers())}
        kinds = {f"module {name!r}": type(module).__qualname__ for name, module in self.twin.named_modules()}
        return {name: _digest(tensor) for name, tensor in state.items()} | kinds


def _twin(model: nn.Module) -> nn.Module:
    """A copy of the module tree, in eval mode, around the very same parameters.

    Buffers are copied too: a forward pass may write to them.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("a TorchScript module cannot be differentiated row by row: pass the original nn.Module")
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps the module it was given
    model = model.module if isinstance(model, nn.DataParallel) else model
    shared: dict[int, object] = {id(w): w for w in model.parameters()}
    for module in model.modules():
        for value in vars(module).values():
            # old-style weight_norm keeps a computed weight, which cannot be copied; arrays are data, not state
            if isinstance(value, np.ndarray) or (isinstance(value, Tensor) and not value.is_leaf):
                shared[id(value)] = value
    try:
        twin = copy.deepcopy(model, shared)
    except Exception as error:
        raise TypeError(f"the model could not be copied with copy.deepcopy, which deltaband needs: {error}") from error
    if {id(module) for module in model.modules()} & {id(module) for module in twin.modules()}:
        raise TypeError("copy.deepcopy of the model returns parts of the model itself: deltaband would change them")
    twin.eval()
    for module in twin.modules():  # torch.func has no use for them, and stumbles
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
    return twin


@contextmanager
def plain_autograd(device: torch.device) -> Iterator[None]:
    """Arithmetic as written, whatever context the caller is in (inference mode, no_grad, autocast)."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if torch.amp.is_autocast_available(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


def _digest(tensor: Tensor) -> str:
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}".encode(), digest_size=16)
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
