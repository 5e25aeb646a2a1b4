"""Per-row gradients of a network: the rows of J.

`Network` is a private, eval-mode twin of the user's module. It shares the module's tensors but none of its state, so
nothing that happens here can be seen on the user's side, and every caller (every thread) can have its own.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

# A chunk of rows that fits the processor's cache is two to three times faster to make than one that does not, but
# a handful of rows wastes the matrix products that follow.
CHUNK_BYTES = 16 * 2**20
CHUNK_BYTES_AT_MOST = 256 * 2**20
CHUNK_ROWS_AT_LEAST = 64
CHUNK_ROWS_AT_MOST = 4096


@dataclass(frozen=True)
class GradientBatch:
    """The gradients of some rows, held as dense blocks.

    An engine that wants the rows asks for `rows()`; one that wants only inner products asks for `inner(other)`.
    """

    blocks: tuple[Tensor, ...]  # each (b_i, p)

    def __len__(self) -> int:
        return sum(len(block) for block in self.blocks)

    @property
    def n_parameters(self) -> int:
        return self.blocks[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def rows(self) -> Tensor:  # (b, p)
        return self.blocks[0] if len(self.blocks) == 1 else torch.cat(self.blocks)

    def squared_norms(self) -> Tensor:  # (b,) float64
        norms = [torch.linalg.vector_norm(block, dim=1, dtype=torch.float64) for block in self.blocks]
        return torch.cat(norms).square()

    def columns(self, width: int) -> Iterator[np.ndarray]:
        """All rows in float64, some columns at a time: (b, ≤ width)."""
        for start in range(0, self.n_parameters, width):
            yield torch.cat([block[:, start : start + width].double().cpu() for block in self.blocks]).numpy()

    def inner(self, other: GradientBatch) -> np.ndarray:
        """Inner products in float64: equals `self.rows() @ other.rows().T`."""  # (b, b')
        width = max(1, CHUNK_BYTES // (8 * max(len(self), len(other), 1)))
        products = np.zeros((len(self), len(other)))
        for mine, theirs in zip(self.columns(width), other.columns(width), strict=True):
            products += mine @ theirs.T
        return products

    @staticmethod
    def concatenate(batches: Iterable[GradientBatch]) -> GradientBatch:
        """One batch out of many; no row is copied."""
        return GradientBatch(tuple(block for batch in batches for block in batch.blocks))


class Network:
    """A trained network as a differentiable function of its trainable parameters, one number for each input row.

    Frozen parameters are constants. A parameter used in several places counts once.
    """

    def __init__(self, model: nn.Module) -> None:
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
        self.device = tensors[0].device
        self.dtype = tensors[0].dtype
        for w in tensors:
            self.dtype = torch.promote_types(self.dtype, w.dtype)
        self._row_gradients = vmap(grad_and_value(self._output), in_dims=(None, 0))

    @property
    def chunk_rows(self) -> int:
        """How many rows of J are made at once."""
        row_bytes = self.n_parameters * self.dtype.itemsize
        fewest = max(1, min(CHUNK_ROWS_AT_LEAST, CHUNK_BYTES_AT_MOST // row_bytes))
        return min(max(CHUNK_BYTES // row_bytes, fewest), CHUNK_ROWS_AT_MOST)

    def prepare(self, x: Tensor) -> Tensor:
        """`x` on the network's device and, where it is floating point, in the network's dtype."""
        x = x.to(self.device, self.dtype) if x.is_floating_point() else x.to(self.device)
        return x.clone() if x.is_inference() else x.detach()

    def check(self, x: Tensor) -> None:
        """Raise unless the network gives one real number for each row of `x`; two rows are enough to tell."""
        x = self.prepare(x[:2])
        with _plain_autograd(self.device), torch.no_grad():
            try:
                y = self.twin(x)
            except Exception as error:
                raise ValueError(
                    f"the network could not be evaluated on a batch of shape {tuple(x.shape)} and {x.dtype}: {error}"
                ) from error
        if not isinstance(y, Tensor):
            raise TypeError(
                f"the network must return one tensor, got {type(y).__name__}; a network that returns its own variance "
                "or several values is not covered: wrap it in a module that returns the prediction alone"
            )
        if not y.is_floating_point():
            raise TypeError(f"the network must return real numbers, got {y.dtype}")
        b = len(x)
        if y.ndim == 2 and len(y) == b and y.shape[1] > 1:
            raise ValueError(
                f"the network returns {y.shape[1]} outputs a row: several outputs, or an output with its own variance, "
                "are not supported yet; expected (b,) or (b, 1). Wrap the network in a module that returns one output"
            )
        if tuple(y.shape) not in {(b,), (b, 1)} and not (b == 1 and y.ndim == 0):
            raise ValueError(
                f"the network returns shape {tuple(y.shape)} for a batch of {b} rows, expected ({b},) or ({b}, 1)"
            )

    def gradients(self, x: Tensor) -> tuple[Tensor, GradientBatch]:
        """Outputs (b,) and gradients (b × p) of the rows of `x`, from one forward and one backward pass."""
        x = self.prepare(x)
        with _plain_autograd(self.device):
            try:
                by_name, outputs = self._row_gradients(self.parameters, x)
            except RuntimeError as error:
                raise TypeError(
                    "torch.func could not compute per-row gradients of this network (layers such as nn.GRU, or "
                    f"random numbers in forward, are not supported yet): {error}"
                ) from error
            rows = torch.cat([g.reshape(len(x), -1).to(self.dtype) for g in by_name.values()], dim=1)
        return outputs, GradientBatch((rows,))

    def fingerprint(self) -> dict[str, str]:
        """A digest of each parameter and buffer: two equal fingerprints mean equal predictions."""
        state = {**dict(self.twin.named_parameters()), **dict(self.twin.named_buffers())}
        return {name: _digest(tensor) for name, tensor in state.items()}

    def _output(self, parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(self.twin, parameters, (row.unsqueeze(0),)).reshape(())


def _twin(model: nn.Module) -> nn.Module:
    """A copy of the module tree, in eval mode, around the very same tensors."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("a TorchScript module cannot be differentiated row by row: pass the original nn.Module")
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps the module it was given
    shared: dict[int, object] = {}
    for module in model.modules():
        for holder in (module._parameters, module._buffers, vars(module)):
            shared |= {id(value): value for value in holder.values() if isinstance(value, Tensor)}
    try:
        return copy.deepcopy(model, shared).eval()
    except Exception as error:
        raise TypeError(f"the model could not be copied with copy.deepcopy, which deltaband needs: {error}") from error


@contextmanager
def _plain_autograd(device: torch.device) -> Iterator[None]:
    """Gradients as in training, whatever context the caller is in (inference mode, autocast)."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if torch.amp.is_autocast_available(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


def _digest(tensor: Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    shape = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return hashlib.blake2b(shape + raw.tobytes(), digest_size=16).hexdigest()
