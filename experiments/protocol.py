"""The paper's protocol: random splits, standardised rows, early stopping, training again on the whole training part.

    data ── 10 % test
        └── 90 % training ── 20 % held out (validation; for calibrated intervals: calibration)
                         └── 80 % the rest

Networks are kept in files, a file a stage of a data set's splits, so that an interrupted run trains none of them twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from .training import Recipe, Report, Rows, Stack, search, train

PATIENCE, EPOCHS_AT_LEAST = 100, 200
MEMBERS = 5  # of an ensemble; the first is the network of the other methods
DROPOUT_EPOCHS = 400
DROPOUT_RATES = (0.005, 0.01, 0.05, 0.1)
RECIPES = {"sgemm": Recipe(batch=32_000, rate=1e-2)}
# Gal's weight decay is l²(1 − p)/(2nτ) with l = 0.01: below 1e-7 for every data set here, which is none
NO_DECAY = 0.0
TOGETHER, ROWS_TOGETHER = 20, 200_000  # splits, and rows of all of them, whose networks are trained at once


Kept = tuple[Stack, dict[str, list[float]]]  # networks, and what was found on the way


class Samples(NamedTuple):
    x: np.ndarray  # (n, d) float32
    y: np.ndarray  # (n,) float32


def divide(order: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """The rows without a share of them at the end, and that share."""
    held = max(1, int(share * len(order)))
    return order[:-held], order[-held:]


def standardised(X: np.ndarray, y: np.ndarray, *parts: np.ndarray) -> list[Samples]:
    """The parts in units of the first: its columns and targets have mean 0 and standard deviation 1."""
    first = parts[0]
    mean, std = X[first].mean(axis=0), X[first].std(axis=0)
    std[std < 1e-6 * np.maximum(1.0, np.abs(mean))] = 1.0
    centre, unit = y[first].mean(), y[first].std()
    return [
        Samples(((X[rows] - mean) / std).astype(np.float32), ((y[rows] - centre) / unit).astype(np.float32))
        for rows in parts
    ]


def groups(n: int, splits: int) -> Iterator[range]:
    """The first splits of n rows, in the groups that are trained together; of large data sets they are small, so that
    results come out before the end.

    Groups are the same whatever number of splits is asked for, and whole, also the last one: how the numbers of a
    network are rounded, and which units it drops, depends on the networks that it is trained with.
    """
    size = max(1, min(TOGETHER, ROWS_TOGETHER // n))
    for start in range(0, splits, TOGETHER):
        end = start + TOGETHER
        for first in range(start, min(end, splits), size):
            yield range(first, min(first + size, end))


@dataclass(frozen=True)
class Trained:
    """Networks of one split, and what early stopping found."""

    networks: list[nn.Module]
    epochs: int
    validation_error: float  # mean square, in units of the targets' variance


class Protocol:
    """The splits of one data set, and the networks trained on them."""

    def __init__(
        self, name: str, X: np.ndarray, y: np.ndarray, splits: Sequence[int], folder: Path, report: Report
    ) -> None:
        self.name, self.X, self.y = name, X, y
        self.splits = list(splits)
        self.folder, self.report = folder, report
        self.recipe = RECIPES.get(name, Recipe())
        self.stages: dict[str, Any] = {}
        orders = [np.random.default_rng(split).permutation(len(y)) for split in self.splits]
        self.training, self.test = zip(*(divide(order, 0.1) for order in orders), strict=True)
        self.rest, self.held = zip(*(divide(rows, 0.2) for rows in self.training), strict=True)

    def training_and_test(self, i: int) -> list[Samples]:
        return standardised(self.X, self.y, self.training[i], self.test[i])

    def members(self, count: int) -> list[Trained]:
        """For each split `count` networks of different seeds, trained on the whole training part."""
        epochs, errors = self._search("search", self.training)
        first = self._train("network", self.training, [0], epochs)
        others = self._train("members", self.training, range(1, MEMBERS), epochs) if count > 1 else [[]] * len(epochs)
        return [Trained([*a, *b], e, error) for a, b, e, error in zip(first, others, epochs, errors, strict=True)]

    def without_held(self) -> list[Trained]:
        """For each split a network that has not seen the held-out rows, nor was its early stopping told of them."""
        epochs, errors = self._search("search-rest", self.rest)
        networks = self._train("network-rest", self.rest, [0], epochs)
        return [Trained(*each) for each in zip(networks, epochs, errors, strict=True)]

    def continued(self) -> list[Trained]:
        """For each split the network that was stopped early, trained on for as many epochs, now with the whole training
        part: as in the authors' code, where the paper has a network from scratch."""
        epochs, errors = self._search("search", self.training)

        def make() -> Kept:
            stopped, *_ = self._stopped("search", self.training)
            seeds = [self._seed("continued", split, 0) for split in self.splits]
            owner = list(range(len(self.splits)))
            rows = _stacked(standardised(self.X, self.y, rows)[0] for rows in self.training)
            return train(stopped, rows, owner, seeds, epochs, self.recipe, self._say("continued")), {}

        networks = self._by_split(self._kept("continued", make)[0], 1)
        return [Trained(*each) for each in zip(networks, epochs, errors, strict=True)]

    def dropout_grid(self, rates: Sequence[float]) -> list[list[nn.Module]]:
        """For each split a network for every dropout rate, trained on the rest of the training part."""
        return self._dropout("grid", self.rest, [rates] * len(self.splits))

    def dropout_final(self, rates: Sequence[float]) -> list[nn.Module]:
        """For each split a network with the rate chosen for it, trained on the whole training part."""
        return [networks[0] for networks in self._dropout("final", self.training, [[rate] for rate in rates])]

    def _search(self, stage: str, training: Sequence[np.ndarray]) -> tuple[list[int], list[float]]:
        def make() -> Kept:
            stack, epochs, errors = self._stopped(stage, training)
            return stack[:0], {"epochs": [max(e, EPOCHS_AT_LEAST) for e in epochs], "errors": errors}

        _, found = self._kept(stage, make)
        return [int(e) for e in found["epochs"]], found["errors"]

    def _stopped(self, stage: str, training: Sequence[np.ndarray]) -> tuple[Stack, list[int], list[float]]:
        """Networks that were stopped early by the validation rows, when that was, and their errors there."""
        parts = [standardised(self.X, self.y, *divide(rows, 0.2)) for rows in training]
        seeds = [self._seed(stage, split, 0) for split in self.splits]
        stack = Stack.initial(self.X.shape[1], seeds)
        owner = list(range(len(self.splits)))
        rows, held = _stacked(p[0] for p in parts), _stacked(p[1] for p in parts)
        return search(stack, rows, held, owner, seeds, self.recipe, PATIENCE, self._say(stage))

    def _train(
        self, stage: str, training: Sequence[np.ndarray], members: Iterable[int], epochs: list[int]
    ) -> list[list[nn.Module]]:
        members = list(members)

        def make() -> Kept:
            seeds = [self._seed(stage, split, member) for split in self.splits for member in members]
            owner = [i for i in range(len(self.splits)) for _ in members]
            stack = Stack.initial(self.X.shape[1], seeds)
            rows = _stacked(standardised(self.X, self.y, rows)[0] for rows in training)
            return train(stack, rows, owner, seeds, [epochs[i] for i in owner], self.recipe, self._say(stage)), {}

        stack, _ = self._kept(stage, make)
        return self._by_split(stack, len(members))

    def _dropout(
        self, stage: str, training: Sequence[np.ndarray], rates: Sequence[Sequence[float]]
    ) -> list[list[nn.Module]]:
        flat = [rate for each in rates for rate in each]
        stage = f"{'dropout' if any(flat) else 'no-dropout'}-{stage}"

        def make() -> Kept:
            owner = [i for i, each in enumerate(rates) for _ in each]
            seeds = [self._seed(stage, self.splits[i], k) for i, each in enumerate(rates) for k in range(len(each))]
            stack = Stack.initial(self.X.shape[1], seeds, flat)
            rows = _stacked(standardised(self.X, self.y, rows)[0] for rows in training)
            epochs = [DROPOUT_EPOCHS] * len(owner)
            undecayed = self.recipe._replace(weight_decay=NO_DECAY)
            return train(stack, rows, owner, seeds, epochs, undecayed, self._say(stage)), {}

        stack, _ = self._kept(stage, make, rates=flat)
        return self._by_split(stack, len(flat) // len(self.splits))

    def _by_split(self, stack: Stack, each: int) -> list[list[nn.Module]]:
        networks = [stack.network(i) for i in range(len(stack))]
        return [networks[start : start + each] for start in range(0, len(networks), each)]

    def _seed(self, stage: str, split: int, member: int) -> int:
        # a name's bytes, not its hash: Python's differs from run to run
        return int(np.random.SeedSequence([split, member, *stage.encode()]).generate_state(1)[0])

    def _say(self, stage: str) -> Report:
        return lambda text: self.report(f"{self.name}, {stage}: {text}")

    def _kept(self, stage: str, make: Callable[[], Kept], **conditions: Any) -> Kept:
        """What `make` gives, unless it was made before under the same conditions."""
        path = self.folder / f"{self.name}-{stage}-{self.splits[0]}-{self.splits[-1]}.safetensors"
        if stage not in self.stages:
            conditions |= {
                "data": [len(self.y), float(self.X.sum()), float(self.y.sum())],
                "splits": self.splits,
                "recipe": self.recipe,
                "epochs": [PATIENCE, EPOCHS_AT_LEAST, DROPOUT_EPOCHS],
            }
            kept = load(path, json.dumps(conditions))
            if kept is None:
                kept = make()
                save(path, kept, json.dumps(conditions))
            self.stages[stage] = kept
        return self.stages[stage]


def save(path: Path, kept: Kept, conditions: str) -> None:
    stack, found = kept
    tensors = {f"weight {i}": W for i, W in enumerate(stack.weights)}
    tensors |= {f"bias {i}": b for i, b in enumerate(stack.biases)}
    if stack.dropout is not None:
        tensors["dropout"] = stack.dropout
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")  # others may be training the same
    save_file(tensors, partial, {"conditions": conditions, "found": json.dumps(found)})
    partial.replace(path)


def load(path: Path, conditions: str) -> Kept | None:
    """What was saved under these conditions; None where nothing was."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("conditions") != conditions:
                return None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (FileNotFoundError, SafetensorError):
        return None
    layers = range(len(tensors) // 2)
    weights, biases = ([tensors[f"{kind} {i}"] for i in layers] for kind in ("weight", "bias"))
    return Stack(tuple(weights), tuple(biases), tensors.get("dropout")), json.loads(metadata["found"])


def _stacked(parts: Iterable[Samples]) -> Rows:
    parts = list(parts)
    return Rows(torch.from_numpy(np.stack([p.x for p in parts])), torch.from_numpy(np.stack([p.y for p in parts])))
