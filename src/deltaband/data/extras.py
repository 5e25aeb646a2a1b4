"""What comes with rows besides inputs and targets: weights, clusters, and which of the targets are there."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..validation import describe
from .inputs import Inputs, as_tensor, check_finite

EXTRAS = ("sample_weight", "clusters", "mask")
SMALLEST_WEIGHT, LARGEST_WEIGHT = 1e-100, 1e100  # beyond these, squares are too small or too large for numbers


def with_extras(
    x: Inputs, sample_weight: Any = None, clusters: Any = None, first_row: int = 0, **others: Any
) -> Inputs:
    """Return the rows with their weights and clusters, checked, where these are given."""
    if unknown := set(others):
        raise TypeError(f"the third of a batch may have {', '.join(EXTRAS)}, got {unknown.pop()!r}")
    if sample_weight is not None:
        given = np.asarray(sample_weight) if isinstance(sample_weight, list) else sample_weight
        w = as_tensor(given, "sample_weight")
        w = w.reshape(len(w), math.prod(w.shape[1:])).cpu().double().clone()  # kept with rows that are
        if len(w) != len(x):
            raise ValueError(f"sample_weight must have one number per row: {len(w)} weights, {len(x)} rows")
        check_finite(w, "weights", first_row, "remove such rows, or give them weight 0")
        extreme = ((w > 0) & ((w < SMALLEST_WEIGHT) | (w > LARGEST_WEIGHT))).any(dim=1)
        for bad, what in (
            ((w < 0).any(dim=1), "negative"),
            (extreme, f"not from {SMALLEST_WEIGHT:g} to {LARGEST_WEIGHT:g}"),
        ):
            if bool(bad.any()):
                row = first_row + int(bad.nonzero()[0])
                raise ValueError(f"weights must be positive, or zero to leave a row out; in row {row} it is {what}")
        if bool((unseen := (w == 0) & (w > 0).any(dim=1, keepdim=True)).any()):  # for some outputs, not for all
            x, w = x.with_extras(observed=(~unseen).double()), w.masked_fill(unseen, 1.0)
        x = x.with_extras(weight=w)
    if clusters is not None:
        labels = np.asarray(clusters)
        if labels.shape != (len(x),):
            raise ValueError(f"clusters must have one label per row: shape {labels.shape}, {len(x)} rows")
        if labels.dtype.kind not in "iubUSO":
            raise TypeError(f"clusters must be whole numbers or words, got {labels.dtype}")
        if missing := [i for i, label in enumerate(labels) if label is None or label != label]:
            raise ValueError(f"clusters have no label in row {first_row + missing[0]}: give each row one")
        if labels.dtype.kind in "USO":  # the same number for a word in every batch
            digests = (hashlib.blake2b(str(label).encode(), digest_size=8).digest() for label in labels)
            labels = np.frombuffer(b"".join(digests), dtype=np.int64)
        x = x.with_extras(cluster=torch.from_numpy(labels.astype(np.int64))[:, None])
    return x


def with_rows(x: Inputs, y: Tensor) -> tuple[Inputs, Tensor]:
    """Return the rows without those that say nothing: of weight zero, or without any target."""
    parts = [each for each in (x.weight, x.extras.get("observed")) if each is not None]
    if not parts or bool((kept := torch.stack([(each > 0).any(dim=1) for each in parts]).all(dim=0)).all()):
        return x, y
    return x[kept], y[kept]


def without_mask(extras: dict[str, Any], y: Tensor, shape: tuple[int, ...], first_row: int) -> tuple[Tensor, bool]:
    """Return targets (n, m) of this shape, NaN where a mask among the extras is false, and whether there is a mask."""
    if (given := extras.pop("mask", None)) is None:
        return y, False
    mask = as_tensor(np.asarray(given) if isinstance(given, list) else given, "a mask")
    if mask.dtype != torch.bool:
        raise TypeError(f"a mask must be true where there is a target and false elsewhere, got {describe(given)}")
    if tuple(mask.shape) not in ((*y.shape[:1], *shape), tuple(y.shape)):
        expected = (len(y), *shape)
        what = f"a mask must have the shape of its targets: expected {expected}, got {tuple(mask.shape)}"
        raise ValueError(f"{what}, in the batch that begins with row {first_row}")
    return y.masked_fill(~mask.reshape(y.shape).cpu(), torch.nan), True


def observed(x: Inputs, y: Tensor) -> tuple[Inputs, Tensor]:
    """Return rows that know which of their targets are there, as numbers 0 and 1, and zero for those that are not."""
    missing, there = y.isnan(), x.extras.get("observed")
    seen = (~missing).double() if there is None else (~missing).double() * there
    return x.with_extras(observed=seen), y.masked_fill(missing, 0.0)


def with_gaps(x: Inputs, y: Tensor) -> Tensor:
    """Return targets, NaN where the rows know that they are not there."""
    there = x.extras.get("observed")
    return y if there is None else y.masked_fill(there == 0, torch.nan)


def check_some(there: np.ndarray) -> None:
    """Raise unless each output has a target in one of these rows, given where there is one, (n, m)."""
    if not there.any(axis=0).all():
        o = int(np.argmin(there.any(axis=0)))
        raise ValueError(
            f"output {o} has no target among these rows: nothing can be said of it; give rows that have one"
        )
