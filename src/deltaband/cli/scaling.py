"""What columns went through before training: (x − mean)/std, from the training rows or from a file, by their names."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .output import Refusal, Usage, check_file, join_names, near, say
from .rows import Columns, StoredRows

UNSCALED = '{"mean": 0, "std": 1} stands for a column that was not scaled'


class Scaling(NamedTuple):
    """Means and standard deviations of some columns."""

    names: list[str]
    mean: np.ndarray
    std: np.ndarray

    def of(self, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the means and standard deviations of these columns: a transform of the library."""
        where = [self.names.index(name) for name in names]
        return self.mean[where], self.std[where]

    def about(self) -> dict[str, dict[str, float]]:
        """Return the means and standard deviations as a file holds them."""
        rows = zip(self.names, self.mean.tolist(), self.std.tolist(), strict=True)
        return {name: {"mean": mean, "std": std} for name, mean, std in rows}


def standardisation(rows: StoredRows, targets: bool) -> Scaling:
    """Return what scikit-learn's StandardScaler finds in these rows: std has n below, and is 1 for constant columns."""
    names = [*rows.columns.features, *(rows.columns.targets if targets else [])]
    n, k = rows.n_rows, len(names)
    mean = sum(values[:, :k].sum(axis=0) for values in rows.values()) / n
    variance = sum(np.square(values[:, :k] - mean).sum(axis=0) for values in rows.values()) / n
    eps = np.finfo(np.float64).eps
    constant = variance <= n * eps * variance + np.square(n * mean * eps)  # up to rounding
    for name in np.array(names)[constant]:
        if name in rows.columns.targets:
            raise Refusal(f"--standardise: the target {str(name)!r} is the same in all training rows")
        say(f"--standardise: column {str(name)!r} is the same in all training rows, and only centred")
    return Scaling(names, mean, np.where(constant, 1.0, np.sqrt(variance)))


def read_scaling(path: Path, features: Sequence[str], targets: Sequence[str], known: Sequence[str]) -> Scaling:
    """Read the means and standard deviations of all these columns; the file may have others of the `known` ones."""
    try:
        content = json.loads(check_file(path).read_text(encoding="utf-8-sig"), object_pairs_hook=_unrepeated)
    except (ValueError, UnicodeDecodeError) as error:
        raise Refusal(f"{path} could not be read as JSON: {error}") from error
    expected = 'expected an object such as {"area": {"mean": 110, "std": 52}, …}'
    if not isinstance(content, Mapping):
        raise Refusal(f"{path} holds {type(content).__name__}; {expected}")
    if unknown := next((name for name in content if name not in known), None):
        raise Refusal(f"{path}: there is no column {unknown!r}{near(unknown, known)}; there are {join_names(known)}")
    for names, what in ((features, "feature"), (targets, "target")):
        if missing := next((name for name in names if name not in content), None):
            raise Refusal(f"{path} has no entry for the {what} {missing!r}{near(missing, content)}; {UNSCALED}")
    for name, entry in content.items():
        if not isinstance(entry, Mapping) or sorted(entry) != ["mean", "std"]:
            raise Refusal(f"{path}: {name!r} is {json.dumps(entry)}; {expected}")
        for key, value in entry.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise Refusal(f"{path}: the {key} of {name!r} is {json.dumps(value)}; a finite number is expected")
        if entry["std"] <= 0:
            raise Refusal(f"{path}: the std of {name!r} is {entry['std']:g}; it must be above 0, and {UNSCALED}")
    mean, std = (np.array([float(entry[key]) for entry in content.values()]) for key in ("mean", "std"))
    return Scaling(list(content), mean, std)


def check_names(transforms: Mapping[str, Any], columns: Columns, model: str) -> None:
    """Raise if scalers of a factory were fitted to columns of other names, or in another order."""
    for name, given in (("input_transform", columns.features), ("target_transform", columns.targets)):
        fitted = list(map(str, getattr(transforms.get(name), "feature_names_in_", given)))
        if fitted != given:
            option = "--features" if name == "input_transform" else "--target"
            what = f"the {name} that {model} returns was fitted to {join_names(fitted)}, and {option} is"
            raise Usage(f"{what} {join_names(given)}: give the same columns in the same order")


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{repeated!r} is in it more than once")
    return dict(pairs)
