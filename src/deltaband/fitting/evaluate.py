"""Questions put to a covariance: rows in, their gradients, an answer for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from ..data.inputs import Inputs
from ..data.row_record import Sample
from ..network.gradient_batch import GradientBatch
from ..network.model_copy import plain_autograd
from ..network.network import Network
from ..validation import check_finite

ADVICE = "look at the scale of that row, and for NaN among the weights"


def ask(
    network: Network,
    X: Inputs,
    question: Callable[[GradientBatch], np.ndarray],
    rows_at_once: int = 0,  # of J; 0: as they come
    first: int = 0,  # the number of the first row in the data
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs (n, m) in float64 and the answer for each, (n, m, …)."""
    outputs: list[Tensor] = []
    answers: list[np.ndarray] = []
    waiting: list[GradientBatch] = []
    with plain_autograd(network.device):
        rows = network.chunk_rows(X)
        if rows_at_once:
            rows = max(1, min(rows, rows_at_once // network.validate(X).n_outputs))
        for x in X.split(rows):
            parts = []
            for part, gradients in checked_gradients(network, x, first):
                if waiting and sum(map(len, waiting)) + len(gradients) > rows_at_once:
                    answers.append(question(GradientBatch.concatenate(waiting)))
                    waiting = []
                parts.append(part)
                waiting.append(gradients)
            outputs.append(torch.cat(parts, dim=1))
            first += len(x)
        answers.append(question(GradientBatch.concatenate(waiting)))
    flat, start, ordered = np.concatenate(answers), 0, []
    for y in outputs:  # of each chunk the first output of all rows, then the second
        b, m = y.shape
        ordered.append(flat[start : start + b * m].reshape(m, b, *flat.shape[1:]).swapaxes(0, 1))
        start += b * m
    return torch.cat(outputs).cpu().double().numpy(), np.concatenate(ordered)


def ask_sample(
    network: Network, sample: Sample, question: Callable[[GradientBatch], np.ndarray], rows_at_once: int = 0
) -> np.ndarray:
    """The answers for the rows of a sample, (n, m, …), piece by piece."""
    return np.concatenate([ask(network, x, question, rows_at_once)[1] for x in sample.pieces])


def checked_gradients(network: Network, x: Inputs, first: int) -> Iterator[tuple[Tensor, GradientBatch]]:
    """Outputs and gradients, all finite, of some of the outputs at a time; `first` is the first row's number in the
    data."""
    for group in network.groups(x):
        outputs, gradients = network.gradients(x, group)
        check_outputs(outputs, first)
        norms = torch.from_numpy(gradients.squared_norms).reshape(-1, len(x)).T
        check_finite(norms, "the network's gradients", first, ADVICE)
        yield outputs, gradients


def check_outputs(outputs: Tensor, first: int = 0) -> None:
    check_finite(outputs, "the network's outputs", first, ADVICE)
