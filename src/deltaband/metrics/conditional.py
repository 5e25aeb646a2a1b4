"""Coverage among some of the rows: groups, and the slab between two parallel planes where it is lowest."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..data.groups import group_names, read_indicators, read_labels
from ..data.inputs import as_tensor, check_finite
from ..results import Intervals
from ..validation import check_int, check_share
from .intervals import read, result

DIRECTIONS, CUTS = 100, 50  # of slabs that are searched
SLAB_SHARE = 0.2  # of the rows, which a slab has at least
SLAB_ROWS_AT_LEAST = 100  # of which half are for the search


class GroupCoverage(NamedTuple):
    """How often the rows of a group are covered."""

    n_rows: int  #: The number of its rows.
    coverage: Any  #: The share that is covered, a float, or an array as that of `coverage`.
    lower: Any  #: The lower end of the exact interval of Clopper and Pearson for the true share, of the same shape.
    upper: Any  #: Its upper end.


def coverage_by_group(
    y: Any, intervals: Intervals, groups: Any, *, confidence: float = 0.95
) -> dict[Any, GroupCoverage]:
    """Compute the coverage of each group of rows, with exact binomial bounds.

    Args:
        y, intervals: As in `coverage`.
        groups: A label for each row, (n,), or indicators (n, G) of groups that may overlap.
        confidence: The probability that the bounds of a group hold its true coverage.

    Returns:
        By label, or by the name or number of the column, what was found; groups without rows are left out.

    Raises:
        ValueError: If there is not one group for each row.
    """
    y, _, lower, upper = read(y, intervals)
    confidence = check_share(confidence, "confidence")
    inside = (lower <= y) & (y <= upper)  # (n, m, levels)
    members: Mapping[Any, np.ndarray]
    if np.ndim(groups) == 2:
        indicators = read_indicators(groups, len(y))
        members = dict(zip(group_names(groups) or range(indicators.shape[1]), indicators.T == 1, strict=True))
    else:
        labels = read_labels(groups, len(y))
        codes = {label: code for code, label in enumerate(dict.fromkeys(labels))}
        code = np.array([codes[label] for label in labels])
        members = {label: code == each for label, each in codes.items()}
    found = {label: inside[rows] for label, rows in members.items() if rows.any()}
    return {label: _with_bounds(each, confidence, intervals) for label, each in found.items()}


def _with_bounds(inside: np.ndarray, confidence: float, intervals: Intervals) -> GroupCoverage:
    from scipy.stats import beta

    n, k, tail = len(inside), inside.sum(axis=0), (1 - confidence) / 2
    lower = np.where(k == 0, 0.0, beta.ppf(tail, np.maximum(k, 1), n - k + 1))
    upper = np.where(k == n, 1.0, beta.ppf(1 - tail, k + 1, np.maximum(n - k, 1)))
    return GroupCoverage(n, *(result(each, intervals) for each in (k / n, lower, upper)))


def worst_slab_coverage(
    y: Any, intervals: Intervals, x: Any, *, share: float = SLAB_SHARE, seed: int = 0
) -> float | np.ndarray:
    """Compute the coverage between the two parallel planes where it is lowest (Cauchois, Gupta and Duchi, 2021).

    The slab is searched for on half of the rows, and its coverage is measured on the others, so that chance alone does
    not make it low.

    Args:
        y, intervals: As in `coverage`.
        x: Features of the rows, (n, d).
        share: The share of the rows that a slab has at least.
        seed: Seed for the directions of the planes, and for the halves.

    Returns:
        The coverage, of the shape of that of `coverage`; NaN where the slab has no rows to measure it on.

    Raises:
        ValueError: If there are fewer than 100 rows, or `x` is not a matrix of as many.
    """
    y, _, lower, upper = read(y, intervals)
    share, seed, features = check_share(share, "share", one=True), check_int(seed, "seed", 0), as_tensor(x, "x")
    if features.ndim != 2 or len(features) != len(y):
        raise ValueError(f"x must be features (n, d) of the {len(y)} rows, got shape {tuple(features.shape)}")
    check_finite(features, "x")
    if len(y) < SLAB_ROWS_AT_LEAST:
        raise ValueError(f"a slab takes at least {SLAB_ROWS_AT_LEAST} rows, got {len(y)}")
    inside = ((lower <= y) & (y <= upper)).reshape(len(y), -1)
    columns = features.cpu().double().numpy()
    columns = columns / np.maximum(np.abs(columns).max(axis=0), 1e-300)  # squares must not overflow
    spread = columns.std(axis=0)
    columns = (columns - columns.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    found = worst_slabs(columns, inside, seed, share)
    return result(found.reshape(lower.shape[1:]), intervals)


def worst_slabs(x: np.ndarray, covered: np.ndarray, seed: int = 0, share: float = SLAB_SHARE) -> np.ndarray:
    """Return the coverage in the slab that covers least on half of the rows, on the other half.

    Args:
        x: Features (n, d), of which all count alike if their spreads are alike.
        covered: Whether rows are covered, (n, k), by each of k intervals.
        seed: Seed for the directions of the planes, and for the halves.
        share: The share of the rows that a slab has at least.

    Returns:
        The coverages, (k,).
    """
    rng = np.random.default_rng(seed)
    searched, measured = np.array_split(rng.permutation(len(x)), 2)
    cuts = np.unique(np.linspace(0, len(searched), CUTS + 1).round().astype(int))
    first, last = np.triu_indices(len(cuts), 1)
    wide = cuts[last] - cuts[first] >= share * len(searched)
    first, last = first[wide], last[wide]
    k = covered.shape[1]
    lowest, shares = np.full(k, np.inf), np.full(k, np.nan)
    for direction in rng.standard_normal((DIRECTIONS, x.shape[1])):
        along = x @ direction
        order = searched[np.argsort(along[searched], kind="stable")]
        counts = np.concatenate([np.zeros((1, k)), np.cumsum(covered[order], axis=0)])[cuts]
        of_slabs = (counts[last] - counts[first]) / (cuts[last] - cuts[first])[:, None]
        ends = np.concatenate([[-np.inf], along[order[cuts[1:-1]]], [np.inf]])  # of slabs, the upper one excluded
        for column in np.flatnonzero(of_slabs.min(axis=0) < lowest):
            slab = of_slabs[:, column].argmin()
            inside = (along[measured] >= ends[first[slab]]) & (along[measured] < ends[last[slab]])
            if inside.any():
                lowest[column], shares[column] = of_slabs[slab, column], covered[measured[inside], column].mean()
    return shares
