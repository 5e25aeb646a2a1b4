"""Sets of labels against MAPIE's, and whether the variance of log-odds makes them smaller: scikit-learn's digits.

    python -m experiments labelsets

The network of `python -m experiments digits` is trained on 200 or 700 digits; of the others one half calibrates, and
sets of the other half are counted: how many hold the true label, and how large they are. Softened probabilities are
those of log-odds divided by √(1 + π/8·v), the logistic function's mean under a normal distribution of variance v as
MacKay (1992) approximates it, with v = q, the variance that the band's intervals follow from, or v = h, the leverage,
that of linearised Laplace. Sets by softened probabilities are made and calibrated in the same way, on the same rows.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from scipy.special import expit, logit
from tqdm import tqdm

from deltaband import ClassificationIntervals, DeltabandWarning
from deltaband.calibration.labels import scores, uniforms
from deltaband.calibration.quantiles import conformal_quantiles

from .arguments import RESULTS, file_to_write, positive
from .digits import train
from .progress import SECONDS
from .rows import Rows, write_table

KEY = ("n_train", "seed")
TRAINED = (200, 700)
SEEDS = 5
WEIGHT_DECAY = 1e-3
LEVELS = (0.95, 0.99)
METHODS = {"lac": "LAC", "aps": "APS"}
KINDS = {
    "band": "`predict_set`",
    "empty": "`predict_set(allow_empty=True)`",
    "mapie": "MAPIE",
    "variance": "softened by q",
    "leverage": "softened by h",
}


class Prefitted:
    """A network as the classifier of scikit-learn that MAPIE takes."""

    def __init__(self, band: ClassificationIntervals, classes: np.ndarray) -> None:
        self.band, self.classes_, self.is_fitted_ = band, classes, True

    def fit(self, X: np.ndarray, y: np.ndarray) -> Prefitted:
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def predict_proba(self, X: np.ndarray) -> np.ndarray:
        p = np.asarray(self.band.predict_proba(X), dtype=np.float64)
        return p / p.sum(axis=1, keepdims=True)

    def predict(self, X: np.ndarray) -> np.ndarray:
        return self.predict_proba(X).argmax(axis=1)


def mapie_sets(band: ClassificationIntervals, held: tuple, X: np.ndarray, method: str, seed: int) -> np.ndarray:
    """Return MAPIE's sets (n, C, levels), by the same method."""
    from mapie.classification import SplitConformalClassifier

    network = Prefitted(band, np.unique(held[1]))
    classifier = SplitConformalClassifier(network, list(LEVELS), conformity_score=method, random_state=seed)
    others = {"include_last_label": "randomized"} if method == "aps" else {}
    return classifier.conformalize(*held).predict_set(X, conformity_score_params=others)[1]


def softened(band: ClassificationIntervals, X: np.ndarray, by: str) -> np.ndarray:
    """Return probabilities (n, C) that are less sure the larger the variance of their log-odds."""
    with torch.no_grad():
        log_odds = logit(band.model(torch.from_numpy(X)).double().softmax(dim=1).numpy())
    p = expit(log_odds / np.sqrt(1 + np.pi / 8 * getattr(band, by)(X)))
    return p / p.sum(axis=1, keepdims=True)


def sets_of(p: np.ndarray, p_held: np.ndarray, y_held: np.ndarray, method: str, seed: int) -> np.ndarray:
    """Return sets (n, C, levels) by probabilities, never empty."""
    found, known = (scores(method, each, uniforms(torch.from_numpy(each).log(), seed)) for each in (p, p_held))
    thresholds = conformal_quantiles(np.sort(known[np.arange(len(y_held)), y_held]), LEVELS)
    sets = found[:, :, None] <= thresholds
    likely = np.arange(p.shape[1]) == p.argmax(axis=1)[:, None]
    return sets | (likely[:, :, None] & ~sets.any(axis=1)[:, None, :])


def cell(X: np.ndarray, y: np.ndarray, n_train: int, seed: int) -> list[dict[str, object]]:
    """Coverage and size of one split: a row for each level, method and kind of sets."""
    from sklearn.model_selection import train_test_split

    X_train, X_rest, y_train, y_rest = train_test_split(X, y, train_size=n_train, random_state=seed, stratify=y)
    X_held, X_test, y_held, y_test = train_test_split(X_rest, y_rest, test_size=0.5, random_state=seed, stratify=y_rest)
    model, held = train(X_train, y_train, WEIGHT_DECAY, seed), (X_held, y_held)
    band = ClassificationIntervals(model, weight_decay=WEIGHT_DECAY).fit(X_train, y_train, progress=False)
    soft = {by: (softened(band, X_test, by), softened(band, X_held, by)) for by in ("variance", "leverage")}
    rows: list[dict[str, object]] = []
    for method in METHODS:
        band.calibrate(X_held, y_held, method=method, seed=seed)
        found = {
            "band": band.predict_set(X_test, LEVELS),
            "empty": band.predict_set(X_test, LEVELS, allow_empty=True),
            "mapie": mapie_sets(band, held, X_test, method, seed),
            **{by: sets_of(*p, y_held, method, seed) for by, p in soft.items()},
        }
        for kind, sets in found.items():
            sets = np.asarray(sets)
            covered, size = sets[np.arange(len(y_test)), y_test].mean(axis=0), sets.sum(axis=1).mean(axis=0)
            for level, share, mean in zip(LEVELS, covered, size, strict=True):
                about = {"n_train": n_train, "seed": seed, "method": method, "sets": kind, "level": level}
                rows.append(about | {"coverage": float(share), "size": float(mean)})
    return rows


def markdown(table: pd.DataFrame) -> str:
    lines = [
        "# Sets of labels: scikit-learn's digits",
        "",
        "`python -m experiments labelsets`. Coverage and mean size of the sets, and the size minus that of",
        "`predict_set` by the same method, split by split; mean ± standard error over splits.",
        "",
        "| trained on | level | method | sets | coverage | labels in a set | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for (n, level, method), part in table.groupby(["n_train", "level", "method"], sort=False):
        sizes = part.pivot(index="seed", columns="sets", values="size")
        for kind, title in KINDS.items():
            more = sizes[kind] - sizes["band"]
            covered = part.coverage[part.sets == kind]
            cells = [f"{n:,}", f"{level:.0%}", METHODS[method], title, f"{covered.mean():.3f} ± {covered.sem():.3f}"]
            cells.append(f"{sizes[kind].mean():.3f} ± {sizes[kind].sem():.3f}")
            cells.append("" if kind == "band" else f"{more.mean():+.3f} ± {more.sem():.3f}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    from sklearn.datasets import load_digits

    parser = argparse.ArgumentParser(prog="python -m experiments labelsets", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=positive, default=SEEDS, metavar="N")
    parser.add_argument("--out", type=file_to_write, default=RESULTS / "labelsets.csv", metavar="FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the networks are small
    warnings.simplefilter("ignore", DeltabandWarning)
    X, y = load_digits(return_X_y=True)
    X, y = (X / 16).astype(np.float32), y.astype(np.int64)
    rows = Rows(options.out, KEY)
    cells = [(n, seed) for n in TRAINED for seed in range(options.seeds)]
    for n, seed in tqdm(cells, unit="split", mininterval=SECONDS):
        if (n, seed) not in rows.done():
            rows.append(cell(X, y, n, seed))
    write_table(options.out, KEY, markdown)
