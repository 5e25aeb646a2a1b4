"""Many small networks trained at once: the paper's network, its parameters stacked, each step a batched product.

They learn the mean by squares, or mean and log variance by a Gaussian likelihood, or quantiles by the pinball loss.

A stack costs what its networks would cost one by one, less the overhead of the calls, which for networks this small is
most of it. Every network has its own seed and shuffles its own rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

HIDDEN = (50, 50)
ROWS_AT_ONCE = 16_384  # of all networks together: more than the cache holds would only be slower
EPOCHS_AT_MOST = 10_000
Report = Callable[[str], None]
Loss = Callable[[Tensor, Tensor], Tensor]  # outputs (m, b) or (m, b, k), targets (m, b) -> (m, b)


class Recipe(NamedTuple):
    """How a network is trained, by Adam."""

    batch: int = 512
    rate: float = 1e-3
    weight_decay: float = 1e-2


class Rows(NamedTuple):
    """Inputs and targets of several splits, a split a slice; all of the same number of rows."""

    x: Tensor  # (splits, n, d)
    y: Tensor  # (splits, n)


def squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - y) ** 2


@dataclass(frozen=True)
class Stack:
    """m networks of one shape, with or without dropout after each hidden layer."""

    weights: tuple[Tensor, ...]  # each (m, out, in)
    biases: tuple[Tensor, ...]  # each (m, out)
    dropout: Tensor | None = None  # (m,) the rates

    @classmethod
    def initial(
        cls, features: int, seeds: Sequence[int], dropout: Sequence[float] | None = None, outputs: int = 1
    ) -> Self:
        """As `nn.Linear` would start, network by network."""
        layers = []
        for seed in seeds:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                layers.append([nn.Linear(a, b) for a, b in itertools.pairwise((features, *HIDDEN, outputs))])
        return cls(
            tuple(torch.stack([linear.weight.detach() for linear in column]) for column in zip(*layers, strict=True)),
            tuple(torch.stack([linear.bias.detach() for linear in column]) for column in zip(*layers, strict=True)),
            None if dropout is None else torch.tensor(dropout),
        )

    def __len__(self) -> int:
        return len(self.biases[0])

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.weights, *self.biases]

    def __call__(self, x: Tensor, training: bool = False) -> Tensor:  # (m, b, d) -> (m, b), or (m, b, k)
        for layer, (W, b) in enumerate(zip(self.weights, self.biases, strict=True)):
            if layer > 0:
                x = nn.functional.leaky_relu(x)
                if training and self.dropout is not None:
                    rate = self.dropout[:, None, None]
                    x = x * (torch.rand_like(x) >= rate) / (1 - rate)
            x = torch.baddbmm(b[:, None], x, W.mT)
        return x[:, :, 0] if x.shape[2] == 1 else x

    def __getitem__(self, which: Tensor | slice) -> Self:
        """The stack of some of the networks; a copy."""
        return type(self)(
            tuple(W.detach()[which].clone() for W in self.weights),
            tuple(b.detach()[which].clone() for b in self.biases),
            None if self.dropout is None else self.dropout[which].clone(),
        )

    def take(self, which: Tensor, others: Self) -> None:
        """Overwrite some of the networks with others."""
        for mine, theirs in zip(self.parameters, others.parameters, strict=True):
            mine[which] = theirs

    @classmethod
    def concatenate(cls, stacks: Sequence[Self]) -> Self:
        rates = [stack.dropout for stack in stacks if stack.dropout is not None]
        return cls(
            tuple(torch.cat(parts) for parts in zip(*(stack.weights for stack in stacks), strict=True)),
            tuple(torch.cat(parts) for parts in zip(*(stack.biases for stack in stacks), strict=True)),
            torch.cat(rates) if rates else None,
        )

    def network(self, i: int) -> nn.Sequential:
        """The i-th network as a module of its own."""
        modules: list[nn.Module] = []
        for layer, (W, b) in enumerate(zip(self.weights, self.biases, strict=True)):
            if layer > 0:
                modules.append(nn.LeakyReLU())
                if self.dropout is not None and self.dropout[i] > 0:
                    modules.append(nn.Dropout(self.dropout[i].item()))
            linear = nn.Linear(W.shape[2], W.shape[1])
            linear.load_state_dict({"weight": W[i], "bias": b[i]})
            modules.append(linear)
        return nn.Sequential(*modules).eval()


def train(
    stack: Stack,
    rows: Rows,
    owner: Sequence[int],  # (m,) the split whose rows a network learns from
    seeds: Sequence[int],
    epochs: Sequence[int],
    recipe: Recipe,
    report: Report,
) -> Stack:
    """Each network for its own number of epochs."""
    trained = []
    for part in _groups(len(stack), recipe):
        left = torch.tensor(epochs[part])
        course = _Course(stack[part], rows, owner[part], seeds[part], recipe)
        finished: list[Stack | None] = [None] * len(left)
        for epoch in range(1, int(left.max()) + 1):
            course.epoch()
            report(f"epoch {epoch} of {int(left.max())}, {len(course.index)} networks")
            ended = left[course.index] == epoch
            for position in ended.nonzero()[:, 0].tolist():
                finished[int(course.index[position])] = course.stack[slice(position, position + 1)]
            course.drop(ended)
        trained += [network for network in finished if network is not None]
    return Stack.concatenate(trained)


def search(
    stack: Stack,
    rows: Rows,
    held: Rows,  # not learnt from
    owner: Sequence[int],
    seeds: Sequence[int],
    recipe: Recipe,
    patience: int,
    report: Report,
    *,
    loss: Loss = squared_error,
    decoupled: bool = False,  # the weight decay: AdamW
    epochs_at_most: int | None = None,
    best_of_all: bool = False,  # each network as it was at its best, instead of when it was stopped
) -> tuple[Stack, list[int], list[float]]:
    """Early stopping, when `held` has not been predicted better for `patience` epochs: each network as it is then, how
    many epochs that took, and its mean loss on `held`."""
    networks, epochs, errors = [], [], []
    epochs_at_most = EPOCHS_AT_MOST if epochs_at_most is None else epochs_at_most
    for part in _groups(len(stack), recipe):
        course = _Course(stack[part], rows, owner[part], seeds[part], recipe, loss, decoupled)
        kept = stack[part]
        m = len(course.index)
        best, waited = torch.full((m,), torch.inf), torch.zeros(m, dtype=torch.int)
        stopped, last = [0] * m, [0.0] * m
        finished: list[Stack | None] = [None] * m
        epoch = 0
        while len(course.index):
            epoch += 1
            course.epoch()
            report(f"early stopping, epoch {epoch}, {len(course.index)} networks")
            error = course.errors(held)
            better = error < best[course.index]
            best[course.index] = torch.where(better, error, best[course.index])
            waited[course.index] = torch.where(better, 0, waited[course.index] + 1)
            if best_of_all:
                kept.take(course.index[better], course.stack[better])
            ended = waited[course.index] >= patience
            if epoch == epochs_at_most:
                ended = torch.ones_like(ended)
            for position in ended.nonzero()[:, 0].tolist():
                i = int(course.index[position])
                stopped[i], last[i] = epoch, (best[i] if best_of_all else error[position]).item()
                finished[i] = kept[i : i + 1] if best_of_all else course.stack[position : position + 1]
            course.drop(ended)
        networks += [network for network in finished if network is not None]
        epochs += stopped
        errors += last
    return Stack.concatenate(networks), epochs, errors


class _Course:
    """Training under way: a stack, its optimiser and its shuffles. Networks leave it when they have finished."""

    def __init__(
        self,
        stack: Stack,
        rows: Rows,
        owner: Sequence[int],
        seeds: Sequence[int],
        recipe: Recipe,
        loss: Loss = squared_error,
        decoupled: bool = False,
    ) -> None:
        self.index = torch.arange(len(stack))  # of those still here
        self.rows, self.recipe, self.loss = rows, recipe, loss
        self.optimiser_class = torch.optim.AdamW if decoupled else torch.optim.Adam
        self.owner = torch.tensor(owner)
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.noise = torch.Generator().manual_seed(seeds[0])  # of the dropout
        self._hold(stack)

    def _hold(self, stack: Stack) -> None:
        self.stack = stack
        for w in stack.parameters:
            w.requires_grad_()
        self.optimiser = self.optimiser_class(
            stack.parameters, lr=self.recipe.rate, weight_decay=self.recipe.weight_decay, fused=True
        )

    def epoch(self) -> None:
        n = self.rows.x.shape[1]
        order = torch.stack([torch.randperm(n, generator=generator) for generator in self.generators])
        with torch.random.fork_rng(devices=[]), _flushed_denormals():
            torch.set_rng_state(self.noise.get_state())
            for batch in order.split(self.recipe.batch, dim=1):
                x, y = self.rows.x[self.owner[:, None], batch], self.rows.y[self.owner[:, None], batch]
                self.optimiser.zero_grad()
                # each network's parameters appear only in its own term, so the sum's gradient is that of each
                self.loss(self.stack(x, training=True), y).mean(dim=1).sum().backward()
                self.optimiser.step()
            self.noise.set_state(torch.get_rng_state())

    @torch.no_grad()
    def errors(self, held: Rows) -> Tensor:  # (m,)
        return self.loss(self.stack(held.x[self.owner]), held.y[self.owner]).mean(dim=1)

    def drop(self, ended: Tensor) -> None:
        """Finished networks leave, the others keep their momenta."""
        if not ended.any():
            return
        keep = ~ended
        states = [self.optimiser.state[w] for w in self.stack.parameters]
        self.index, self.owner = self.index[keep], self.owner[keep]
        self.generators = list(itertools.compress(self.generators, keep.tolist()))
        if not len(self.index):
            return
        self._hold(self.stack[keep])
        for w, state in zip(self.stack.parameters, states, strict=True):
            self.optimiser.state[w] = {
                "step": state["step"],
                "exp_avg": state["exp_avg"][keep].clone(),
                "exp_avg_sq": state["exp_avg_sq"][keep].clone(),
            }


@contextmanager
def _flushed_denormals() -> Iterator[None]:
    """A decayed weight's momentum ends in numbers so small that arithmetic with them takes a hundred times as long."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def _groups(m: int, recipe: Recipe) -> Iterator[slice]:
    size = max(1, ROWS_AT_ONCE // recipe.batch)
    return (slice(start, start + size) for start in range(0, m, size))
