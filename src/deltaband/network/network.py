"""Per-row gradients of a network: the rows of J."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..data.inputs import Inputs
from . import checks, per_row
from .checks import CERTIFIED_ALONE, AcceptedInputs, Certificate
from .gradient_batch import CHUNK_BYTES, CHUNK_ROWS_AT_LEAST, GradientBatch, StoredBlock, shaped
from .last import last_given
from .layers import hooks
from .layers.factors import DenseRows, Part
from .layers.hooks import Layers
from .model_copy import ModelCopy, eval_copy
from .probes import COMBINATION, EXACT_OUTPUTS, Probes

CERTIFIED_BYTES = 64 * 2**20
CHUNK_BYTES_AT_MOST = 256 * 2**20
CHUNK_ROWS_AT_MOST = 4096
LOOPED_ROWS = 4  # up to so many rows of J are faster by plain autograd than by torch.func
MAX_FEATURES = 100  # of a row; more are projected at random
PROBED_ROWS = 8  # on which it is tested which layers have gradients by hooks
REMEMBERED_KINDS = 256  # of inputs, such as sequences of different lengths

Head = Callable[[Tensor], Tensor]  # (b, n_returned) -> (b, n_outputs)
Parameters = dict[str, Tensor]


@contextmanager
def plain_autograd(device: torch.device) -> Iterator[None]:
    """Evaluate as in a plain context, whatever the caller's is (inference mode, no_grad, autocast)."""
    castable = torch.amp.is_autocast_available(device.type)
    autocast = torch.autocast(device.type, enabled=False) if castable else nullcontext()
    with torch.inference_mode(False), torch.enable_grad(), autocast:
        yield


def random_state(device: torch.device) -> Tensor:
    """Return the state of the generator that a network draws from unless it has one of its own."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


class Probe(NamedTuple):
    """What a network shows on some rows."""

    layers: Layers
    n_outputs: int  # how many numbers per row have gradients
    n_returned: int  # how many the model returns, before the head
    shape: tuple[int, ...]  # that of a row which the model returns


class Network:
    """A trained network as a differentiable function of its parameters: m numbers for each row of its inputs.

    `head` computes the numbers whose gradients are wanted from those that the model returns. Frozen parameters, and
    those not selected, are constants; one used in several places counts once. With `layers`, gradients are computed
    layer by layer, without rows where that is possible. With `probes` they are those of random combinations of a row's
    outputs. A network never changes, and serves one thread at a time: `copy` gives another.
    """

    def __init__(
        self,
        model: nn.Module | ModelCopy,
        layers: Layers | None = None,
        head: Head | None = None,
        probes: Probes | None = None,
    ) -> None:
        self.model_copy: Final = model if isinstance(model, ModelCopy) else ModelCopy(model)
        self.layers: Final = layers
        self.head: Final = head
        self.probes: Final = probes
        self.prepare: Final = self.model_copy.prepare
        self.eval_copy: Final = self.model_copy.module
        self.parameters: Final = self.model_copy.parameters
        self.n_parameters: Final = self.model_copy.n_parameters
        self.device: Final = self.model_copy.device
        self.dtype: Final = self.model_copy.dtype

    def with_layers(self, layers: Layers | None) -> Network:
        """Return a network whose gradients come by these layers, or as whole rows."""
        return Network(self.model_copy, layers, self.head, self.probes)

    def with_probes(self, probes: Probes | None) -> Network:
        """Return a network whose gradients are those of these combinations of a row's outputs, or of the outputs."""
        return Network(self.model_copy, self.layers, self.head, probes)

    @property
    def owners(self) -> tuple[tuple[str, ...], ...]:
        """The names of the parameters of each part of its gradients: of a layer, of all others, or of all."""
        return (tuple(self.parameters),) if self.layers is None else self.layers.owners

    def copy(self, *, own_weights: bool = False) -> Network:
        """Return the same network around an eval copy of its own: for another thread, or with a copy of the weights."""
        known, own = self.model_copy, eval_copy(self.eval_copy, own_weights=True) if own_weights else self.eval_copy
        copied = ModelCopy(own, output=known.output, precision=known.precision)
        copied.accepted.update(known.accepted)
        copied.uncertified.update(known.uncertified)
        return Network(copied, self.layers, self.head, self.probes)

    @property
    def fingerprint(self) -> dict[str, str]:
        return self.model_copy.fingerprint

    def evaluate(self, x: Inputs, parameters: Parameters | None = None) -> Tensor:  # (b, n_outputs)
        """Compute the head's outputs, or combinations of them, with the network's own parameters or others."""
        y = self.model_copy(x, parameters).reshape(len(x), -1)
        known = self.model_copy.accepted.get(x.without_extras().row_format)
        if known and y.shape[1] != math.prod(known.shape):
            raise checks.changed_shape(y.shape[1], math.prod(known.shape))
        y, c = y if self.head is None else self.head(y), x.extras.get(COMBINATION)
        return y if c is None else torch.einsum("brm,bm->br", c, y)

    def _fresh(self, x: Inputs, parameters: Parameters | None = None) -> Tensor:
        return self.evaluate(x.map(torch.clone), parameters)  # a network may work on its input in place

    def _of_group(self, x: Inputs, group: slice) -> Tensor:
        return self._fresh(x)[:, group]

    def validate(self, x: Any) -> int:
        """Return how many outputs there are; raise unless each of the first two rows of `x` has its own."""
        n_returned = math.prod(self.shape(x))
        if self.head is None:
            return n_returned
        return self.head(torch.zeros(1, n_returned, dtype=self.dtype, device=self.device)).shape[1]

    def shape(self, x: Any) -> tuple[int, ...]:
        """Return the shape of what the model returns for a row like these."""
        return self._accepted(Inputs.of(x)).shape

    def gradients_per_row(self, x: Any) -> int:
        """Return how many gradients each row has: one of each output, or of each combination of them."""
        return self.validate(x) if self.probes is None else self.probes.count

    def chunk_rows(self, x: Any) -> int:
        """Return how many rows of the kind of `x` are computed at once, from what a pass keeps in memory for each."""
        x = Inputs.of(x)
        per_row = self.gradients_per_row(x)
        row_bytes = self._gradient_bytes * self._outputs_at_once(per_row) + self._accepted(x).pass_bytes
        row_bytes += 0 if self.probes is None else 2 * per_row * self.validate(x) * self.dtype.itemsize
        fewest = max(1, min(CHUNK_ROWS_AT_LEAST // per_row, CHUNK_BYTES_AT_MOST // row_bytes))
        # certifying a batch takes time and memory for all weights: it should not be more than that of the rows
        weights = 0 if self.layers is None else self.n_parameters * self.dtype.itemsize
        wanted = max(CHUNK_BYTES, weights, min(4 * weights, CERTIFIED_BYTES))
        return min(max(min(wanted, CHUNK_BYTES_AT_MOST) // row_bytes, fewest), CHUNK_ROWS_AT_MOST)

    def groups(self, x: Any) -> Iterator[slice]:
        """Yield the outputs, or combinations, as many at a time as one row's gradients fit into memory."""
        per_row = self.gradients_per_row(x)
        step = self._outputs_at_once(per_row)
        for start in range(0, per_row, step):
            yield slice(start, min(start + step, per_row))

    @property
    def _gradient_bytes(self) -> int:
        """The size of one row's gradient of one output, while it is computed."""
        if self.layers is not None:
            return self.layers.factor_bytes + self.layers.working_bytes
        return self.n_parameters * self.dtype.itemsize

    def _outputs_at_once(self, n_outputs: int) -> int:
        return max(1, min(n_outputs, CHUNK_BYTES_AT_MOST // max(self._gradient_bytes, 1)))

    def _accepted(self, x: Inputs) -> AcceptedInputs:
        known = self.model_copy.accepted
        found = known.get(x.row_format)
        if found is None or (len(x) > 1 and not found.alone_and_together):
            if len(known) >= REMEMBERED_KINDS:
                known.clear()
            found = known[x.row_format] = self._try(x)
        return found

    def _try(self, x: Inputs) -> AcceptedInputs:
        with plain_autograd(self.device):
            return checks.try_rows(self.model_copy, x)

    def probe(self, x: Any) -> Probe:
        """Find out, on some of the rows of `x`, which layers have gradients by hooks, and count the outputs."""
        shape = self.shape(x)
        sizes = self.validate(x), math.prod(shape)
        x = self.prepare(checks.distinct_rows(Inputs.of(x), PROBED_ROWS))
        with plain_autograd(self.device):
            try:
                y = self._fresh(x, self.parameters)
                layers, again = checks.probe_layers(self.eval_copy, lambda: self._fresh(x), len(x), not x.tensors)
                checks.check_repeatable(y.detach(), again)
                checks.check_independent(self._fresh, x, y.detach(), slice(0, 1), slice(len(x) - 1, len(x)))
            except RuntimeError as error:
                raise TypeError(f"the network could not be differentiated: {error}") from error
            # with constant parameters y can have gradients with respect to others only, or to its inputs: a network
            # that differentiates its own outputs makes leaves of these, but new ones in each call
            if y.requires_grad and checks.leaves(y) & checks.leaves(self._fresh(x, self.parameters)):
                raise TypeError(per_row.PAST_THE_TREE)
        few = self if sizes[0] <= EXACT_OUTPUTS else self.with_probes(Probes(2))  # all of many would take long
        if layers.rest and not few.rows_by_vmap_work(x, layers.rest):
            layers = replace(layers, vmap=False)
        return Probe(layers, *sizes, shape)

    def rows_by_vmap_work(self, x: Any, names: tuple[str, ...] | None = None) -> bool:
        """Return whether torch.func gives the gradients that plain autograd does, on two rows of `x`."""
        x, names = self._combined(Inputs.of(x)[:2]), tuple(self.parameters) if names is None else names
        with plain_autograd(self.device):
            try:
                with hooks.no_inner_loops():
                    _, fast = per_row.vmapped(self, names, x, slice(None))
            except Exception:
                return False
            _, slow = per_row.looped(self, names, x, slice(None))
        finite = bool(torch.isfinite(slow).all())
        return finite and torch.allclose(fast, slow, rtol=1e-3, atol=1e-4 * float(slow.abs().max()))

    def gradients(self, x: Any, group: slice = slice(None)) -> tuple[Tensor, GradientBatch]:
        """Compute outputs (b, m) and their gradients: those of the first output for all rows, then of the second…

        The gradients of a row that has a weight are multiplied by its square root. Of a network with probes they are
        those of combinations, and all outputs come with the first of them.
        """
        x = Inputs.of(x)
        n_outputs, per_row = self.validate(x), self.gradients_per_row(x)
        k = len(range(per_row)[group])
        try:
            with plain_autograd(self.device):
                outputs, gradients = self._gradients(self._combined(x), group, by_loop=len(x) * k <= LOOPED_ROWS)
        except Exception:
            self._try(x)  # explains what is wrong, if the first rows are
            raise
        if self.probes is not None:
            return (self.outputs(x) if range(per_row)[group].start == 0 else outputs[:, :0]), gradients
        if x.weight is None:
            return outputs, gradients
        return outputs, gradients.scaled(x.weight.expand(-1, n_outputs)[:, group].T.reshape(-1).sqrt())

    def _combined(self, x: Inputs) -> Inputs:
        """Return rows as a pass takes them, with the combinations of their outputs where there are some."""
        x = self.prepare(x)
        if self.probes is None:
            return x
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        return x.without_extras().with_extras(**{COMBINATION: self.probes.combinations(x, self.validate(x), like)})

    def _gradients(self, x: Inputs, group: slice, by_loop: bool) -> tuple[Tensor, GradientBatch]:
        layers, copy, several = self.layers, self.model_copy, len(x) > 1  # of a single row nothing can be exchanged
        found: list[list[Part] | None] = []
        together = alone = certificate = None
        drawn = random_state(self.device)
        if layers is not None:
            left_out = copy.uncertified if several else ()
            outputs_of = partial(self._of_group, x, group)
            together, found = hooks.parts(self.eval_copy, layers, outputs_of, len(x), left_out, keep_graph=several)
        elif several and not by_loop:
            together = self._of_group(x, group)
        if several and together is not None and together.requires_grad:
            weights = {name: copy.trainable[name] for names in self.owners for name in names}
            certificate = Certificate.of(together, weights, copy.rng)
        for names in self.owners[len(found) :]:  # whole rows, or those of the rest
            slow = by_loop or not (layers is None or layers.vmap) or copy.uncertified.issuperset(names)
            alone, rows = (per_row.looped if slow else per_row.vmapped)(self, names, x, group)
            found.append(list(map(DenseRows, rows)))
        evaluate = partial(self._of_group, group=group)
        if several and together is not None:
            checks.check_batch(evaluate, x, together.detach(), alone, copy.rng)
        outputs = alone if together is None else together.detach()
        assert outputs is not None
        if not torch.equal(drawn, random_state(self.device)):
            checks.check_repeatable(evaluate(x).detach(), outputs)
        parts = self._certified(found, certificate, x, group)
        return outputs, GradientBatch(tuple(map(StoredBlock, map(list, zip(*parts, strict=True)))))

    def _certified(
        self,
        found: Sequence[list[Part] | None],
        certificate: Certificate | None,
        x: Inputs,
        group: slice,
    ) -> list[list[Part]]:
        """Return the parts of all parameters, one per output; those not found or certified as rows of autograd."""
        kept: dict[tuple[str, ...], list[Part]] = {
            names: parts
            for names, parts in zip(self.owners, found, strict=True)
            if parts is not None and (certificate is None or certificate.holds(names, parts))
        }
        if wrong := [names for names in self.owners if names not in kept]:
            _, rows = per_row.looped(self, tuple(name for names in wrong for name in names), x, group)
            sizes = [sum(self.parameters[name].numel() for name in names) for names in wrong]
            for names, *parts in zip(wrong, *(of_output.split(sizes, dim=1) for of_output in rows), strict=True):
                kept[names] = list(map(DenseRows, parts))
                if certificate is not None and not certificate.holds(names, kept[names], CERTIFIED_ALONE):
                    raise checks.not_certified(names[0], self.model_copy)
                self.model_copy.uncertified.update(names)
        return [
            [shaped(part, [self.parameters[name] for name in names]) for part in kept[names]] for names in self.owners
        ]

    def outputs(self, x: Any) -> Tensor:
        """Compute outputs (b, m) alone, without gradients."""
        x = Inputs.of(x)
        rows = self.chunk_rows(x)
        with plain_autograd(self.device):
            try:
                return torch.cat([self._answer(part) for part in x.split(rows)])
            except Exception as error:
                self._try(x)  # explains what is wrong, if the first rows are
                raise ValueError(f"the network could not be evaluated on a batch of {x}: {error}") from error

    def _answer(self, x: Inputs) -> Tensor:
        with suppress(RuntimeError), torch.no_grad():
            return self.evaluate(self.prepare(x)).detach()
        return self.evaluate(self.prepare(x)).detach()  # one that differentiates its own outputs needs a graph

    def features(self, x: Any) -> np.ndarray:  # (b, k)
        """Return numbers from which the noise or a density ratio can be learnt: the rows of a table, as they are.

        Of other inputs they are what the last linear layer is given, averaged over positions of a sequence or an image;
        there are none without linear layers, or where the first dimension of the last one does not hold the rows.
        """
        x = self.prepare(x)
        if len(x.tensors) == 1 and x.tensors[0].ndim == 2 and x.tensors[0].is_floating_point():
            return reduced(x.tensors[0]).numpy()
        parts = x.split(self.chunk_rows(x))
        return np.concatenate([reduced(last_given(self.eval_copy, self.outputs, each)).numpy() for each in parts])


def reduced(values: Tensor) -> Tensor:
    """Return as many columns as features may have: random combinations of more."""
    values, k = values.cpu(), values.shape[1]
    if k <= MAX_FEATURES:
        return values if values.dtype == torch.float64 else values.float()
    directions = torch.randn(k, MAX_FEATURES, generator=torch.Generator().manual_seed(k), dtype=torch.float32)
    return values.float() @ directions / k**0.5
