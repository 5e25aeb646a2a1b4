"""Checks of class labels, and how well the scores of a network agree with them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def n_classes(n_returned: int) -> int:
    """Return the number of classes of a network with `n_returned` outputs."""
    return max(n_returned, 2)


def refuse_text_labels(y: Any) -> None:
    """Raise if labels are text or objects: the error that targets would give does not help."""
    kind = getattr(getattr(y, "dtype", None), "kind", None)
    if kind in ("U", "S", "O") or (isinstance(y, list) and any(isinstance(label, str) for label in y)):
        raise TypeError(
            "labels must be whole numbers from 0, got words or objects: number the classes as in training, for "
            "instance with np.unique(y, return_inverse=True)[1]"
        )


def check_labels(targets: Tensor, n_returned: int) -> Tensor:  # (b, 1) float64 -> (b,) int64
    """Return the labels, or raise with what came and what to do."""
    classes = n_classes(n_returned)
    expected = f"labels must be whole numbers from 0 to {classes - 1}, one per row"
    if targets.shape[1] != 1:
        one_hot = targets.shape[1] == classes
        hint = "; for one-hot rows give y.argmax(axis=1)" if one_hot else ""
        raise ValueError(f"{expected}, got {targets.shape[1]} columns{hint}")
    y = targets[:, 0]
    bad = ~((y >= 0) & (y < classes) & (y == y.round()))
    if bool(bad.any()):
        value = float(y[bad][0])
        if n_returned == 1:
            hint = "one output is the logit of class 1" + ("; give (y + 1) / 2" if value == -1 else "")
        elif value == classes:
            hint = f"the network has {n_returned} outputs; if your labels start at 1, give y - 1"
        else:
            hint = f"the network has {n_returned} outputs"
        raise ValueError(f"{expected}, got {value:g}: {hint}")
    return y.long()


class Tally:
    """A count of the rows that are classified correctly, for each fit, updated with every chunk of scores."""

    def __init__(self) -> None:
        self._n_correct: dict[tuple[int, ...], int] = {}  # by the classes of a fit
        self.lowest, self.highest = math.inf, -math.inf  # of all scores

    def __call__(self, classes: tuple[int, ...], s: Tensor, targets: Tensor, n_returned: int) -> Tensor:
        """Return the loss −log π of each row in the column of its class; for a single class that of "c or not c"."""
        y, s = check_labels(targets, n_returned), s.double()
        self.lowest, self.highest = min(self.lowest, float(s.min())), max(self.highest, float(s.max()))
        if s.shape[1] == 1:
            is_class = y == (1 if n_returned <= 2 else classes[0])
            losses = -logsigmoid(torch.where(is_class[:, None], s, -s))
            correct = (s[:, 0] > 0) == is_class
        else:
            losses = torch.zeros_like(s).scatter_(1, y[:, None], -logsigmoid(s.gather(1, y[:, None])))
            correct = s.argmax(dim=1) == y
        self._n_correct[classes] = self._n_correct.get(classes, 0) + int(correct.sum())
        return losses

    def accuracy(self, classes: tuple[int, ...], n_rows: int) -> float:
        """Return the share of the rows that are classified correctly."""
        return self._n_correct[classes] / n_rows
