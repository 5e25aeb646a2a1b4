"""Labels of classes: whole numbers from 0, one per row."""

from typing import Any

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
        hint = "; for one-hot rows give y.argmax(axis=1)" if targets.shape[1] == classes else ""
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
