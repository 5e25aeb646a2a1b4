"""Labels of classes: whole numbers from 0, one per row; or for each label whether a row has it."""

from typing import Any

import numpy as np
from torch import Tensor


def count_classes(n_returned: int) -> int:
    return max(n_returned, 2)  # one logit is that of the second of two classes


def refuse_text_labels(y: Any) -> None:
    """Raise if labels are text or objects, with a more helpful error than that of other targets."""
    kind = getattr(getattr(y, "dtype", None), "kind", None)
    if kind in ("U", "S", "O") or (isinstance(y, list) and any(isinstance(label, str) for label in y)):
        advice = "number the classes as in training, for instance with np.unique(y, return_inverse=True)[1]"
        raise TypeError(f"labels must be whole numbers from 0, got words or objects: {advice}")


def check_labels(targets: Tensor, n_returned: int) -> Tensor:  # (b, 1) float64 -> (b,) int64
    classes = count_classes(n_returned)
    expected = f"labels must be whole numbers from 0 to {classes - 1}, one per row"
    if targets.shape[1] != 1:
        hint = ""
        if targets.shape[1] == classes:
            several = bool(((targets == 0) | (targets == 1)).all() & (targets.sum(dim=1) != 1).any())
            advice = "several labels a row give loss='bce'" if several else "one-hot rows give y.argmax(axis=1)"
            hint = f"; for {advice}"
        raise ValueError(f"{expected}, got {targets.shape[1]} columns{hint}")
    y = targets[:, 0]
    bad = ~((y >= 0) & (y < classes) & (y == y.round()))
    if bool(bad.any()):
        value = float(y[bad][0])
        hint = "one output is the logit of class 1" if n_returned == 1 else f"the network has {n_returned} outputs"
        if n_returned == 1 and value == -1:
            hint += "; give (y + 1) / 2"
        elif n_returned > 1 and value == classes:
            hint += "; if your labels start at 1, give y - 1"
        raise ValueError(f"{expected}, got {value:g}: {hint}")
    return y.long()


def refuse_ragged_labels(y: Any) -> None:
    """Raise if the labels of rows are lists of those that they have."""
    if isinstance(y, list | tuple) and len({np.size(labels) for labels in y}) > 1:
        advice = "sklearn.preprocessing.MultiLabelBinarizer().fit_transform(y) makes such rows of lists of labels"
        raise TypeError(f"labels must be 0 or 1, one column per label, got rows of different lengths: {advice}")


def check_several_labels(targets: Tensor, n_returned: int) -> Tensor:  # (b, L) float64 -> (b, L) bool
    expected = f"labels must be 0 or 1, (n, {n_returned}): one column per output of the network"
    if targets.shape[1] != n_returned:
        hint = "; for one class per row leave out loss='bce'" if targets.shape[1] == 1 else ""
        raise ValueError(f"{expected}, got {targets.shape[1]} column{'s'[: targets.shape[1] != 1]}{hint}")
    bad = (targets != 0) & (targets != 1)
    if bool(bad.any()):
        value, hint = float(targets[bad][0]), ""
        if 0 < value < 1:
            hint = ": of soft labels give whether they are over 0.5; the Fisher matrix is the same"
        elif value == -1:
            hint = ": give (y + 1) / 2"
        raise ValueError(f"{expected}, got {value:g}{hint}")
    return targets == 1
