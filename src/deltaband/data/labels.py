"""Class labels, checked, and how well the scores of a network fit them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def n_classes(n_returned: int) -> int:
    """How many classes a network with so many outputs tells apart."""
    return max(n_returned, 2)


def refuse_names(y: Any) -> None:
    """Labels that are words: what would be said of targets does not help."""
    kind = getattr(getattr(y, "dtype", None), "kind", None)
    if kind in ("U", "S", "O") or (isinstance(y, list) and any(isinstance(label, str) for label in y)):
        raise TypeError(
            "labels must be whole numbers from 0, got words or objects: number the classes as in training, for "
            "instance with np.unique(y, return_inverse=True)[1]"
        )


def checked(targets: Tensor, n_returned: int) -> Tensor:  # (b, 1) float64 -> (b,) int64
    """Labels, or an error that says what came and what to do."""
    classes = n_classes(n_returned)
    expected = f"labels must be whole numbers from 0 to {classes - 1}, one a row"
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
    """Takes in scores and labels chunk by chunk; for each fit the share of rows that are classified right."""

    def __init__(self) -> None:
        self._right: dict[tuple[int, ...], int] = {}
        self.lowest, self.highest = math.inf, -math.inf  # of all scores

    def __call__(self, classes: tuple[int, ...], s: Tensor, targets: Tensor, n_returned: int) -> Tensor:
        """The losses −log π of each row, in the column of its class; of a class alone, those of "c or not c"."""
        y, s = checked(targets, n_returned), s.double()
        self.lowest, self.highest = min(self.lowest, float(s.min())), max(self.highest, float(s.max()))
        if s.shape[1] == 1:
            is_class = y == (1 if n_returned <= 2 else classes[0])
            losses = -logsigmoid(torch.where(is_class[:, None], s, -s))
            right = (s[:, 0] > 0) == is_class
        else:
            losses = torch.zeros_like(s).scatter_(1, y[:, None], -logsigmoid(s.gather(1, y[:, None])))
            right = s.argmax(dim=1) == y
        self._right[classes] = self._right.get(classes, 0) + int(right.sum())
        return losses

    def accuracy(self, classes: tuple[int, ...], n_rows: int) -> float:
        return self._right[classes] / n_rows
