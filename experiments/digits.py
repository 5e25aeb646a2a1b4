"""Does the width of an interval tell wrong predictions, and inputs unlike the training data? scikit-learn's digits.

    python -m experiments digits

A network with 24 hidden units is trained on 70 % of the digits, and another one on those of them that are not 8 or 9.
Each input gets a score that should be high where the network ought not to be trusted: the width of the 95 % interval of
the predicted class, as a probability or as log-odds; how low its lower bound is; the leverage of its log-odds; or the
entropy of the softmax. The area under the ROC curve (AUROC) is the probability that of two inputs the bad one has the
higher score.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn
from tqdm import tqdm

from deltaband import ClassificationIntervals, DeltabandWarning

from .arguments import RESULTS, file_to_write, positive
from .progress import SECONDS
from .rows import Rows

KEY = ("weight_decay", "seed")
WEIGHT_DECAYS = (1e-2, 1e-3, 1e-4)
SEEDS = 10
HIDDEN, EPOCHS, BATCH = 24, 100, 128
KNOWN = 8  # classes of the second network; the others are out of its distribution
SCORES = {
    "probability": "width, probability",
    "log_odds": "width, log-odds",
    "lower": "− lower bound",
    "leverage": "leverage",
    "entropy": "entropy",
}
TASKS = {
    "wrong": "wrong predictions",
    "unknown": "unknown digits (8, 9)",
    "permuted": "pixels permuted",
    "inverted": "inverted",
}


def train(X: np.ndarray, y: np.ndarray, weight_decay: float, seed: int) -> nn.Sequential:
    """Adam with coupled weight decay and a mean cross-entropy, to where its cosine schedule ends."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(X.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, int(y.max()) + 1))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, EPOCHS)
    inputs, labels = torch.from_numpy(X), torch.from_numpy(y)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(X)).split(BATCH):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimiser.step()
        schedule.step()
    return model


def scores(band: ClassificationIntervals, X: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The predicted classes (n,), and each score (n,)."""
    intervals = band.predict(X)
    with torch.no_grad():
        log_p = band.model(torch.from_numpy(X)).log_softmax(dim=1).double().numpy()
    return intervals.classes, {
        "probability": intervals.probability.width,
        "log_odds": intervals.log_odds.width,
        "lower": -intervals.log_odds.lower,  # the order is that of the probability, and nothing is rounded to 1
        "leverage": band.leverage(X),
        "entropy": -(np.exp(log_p) * log_p).sum(axis=1),
    }


def auroc(good: np.ndarray, bad: np.ndarray) -> float:
    """P(bad > good), ties counting half."""
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(bad.astype(float), good.astype(float)).statistic / (len(good) * len(bad)))


def cell(X: np.ndarray, y: np.ndarray, weight_decay: float, seed: int) -> list[dict[str, object]]:
    """AUROCs of one split: a row for each score."""
    from sklearn.model_selection import train_test_split

    X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.3, random_state=seed, stratify=y)

    def fitted(rows: np.ndarray) -> ClassificationIntervals:
        model = train(X_train[rows], y_train[rows], weight_decay, seed)
        band = ClassificationIntervals(model, weight_decay=weight_decay, classes="predicted")
        return band.fit(X_train[rows], y_train[rows], progress=False)

    band = fitted(np.full(len(y_train), True))
    predicted, here = scores(band, X_test)
    wrong = predicted != y_test
    pixels = np.random.default_rng(seed).permutation(X.shape[1])
    permuted, inverted = scores(band, X_test[:, pixels])[1], scores(band, 1 - X_test)[1]
    narrow = fitted(y_train < KNOWN)
    known, unknown = scores(narrow, X_test[y_test < KNOWN])[1], scores(narrow, X_test[y_test >= KNOWN])[1]
    return [
        {
            "weight_decay": f"{weight_decay:g}",
            "seed": seed,
            "score": name,
            "wrong": auroc(here[name][~wrong], here[name][wrong]),
            "unknown": auroc(known[name], unknown[name]),
            "permuted": auroc(here[name], permuted[name]),
            "inverted": auroc(here[name], inverted[name]),
            "error_rate": float(wrong.mean()),
            "effective_parameters": band.effective_parameters_,
        }
        for name in SCORES
    ]


def markdown(table: pd.DataFrame) -> str:
    lines = [
        "# Which inputs not to trust: scikit-learn's digits",
        "",
        "`python -m experiments digits`. AUROC, mean ± standard error over splits; in bold the best, and what is not "
        "further",
        "behind it than two standard errors of the difference.",
        "",
        f"| weight decay | score | {' | '.join(TASKS.values())} |",
        "|---|---|" + "---|" * len(TASKS),
    ]
    for decay, part in table.groupby("weight_decay", sort=False):
        for name, title in SCORES.items():
            cells = [f"{decay:g}", title, *(_cell(part, name, task) for task in TASKS)]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "The networks, and the Fisher matrices of the softmax:", "", "| weight decay | test errors | p* |"]
    lines.append("|---|---|---|")
    for decay, part in table[table.score == "entropy"].groupby("weight_decay", sort=False):
        lines.append(f"| {decay:g} | {part.error_rate.mean():.1%} | {part.effective_parameters.mean():.0f} |")
    return "\n".join([*lines, ""])


def _cell(part: pd.DataFrame, name: str, task: str) -> str:
    by_score = part.pivot(index="seed", columns="score", values=task)
    best = by_score.mean().idxmax()
    behind = by_score[best] - by_score[name]
    text = f"{by_score[name].mean():.3f} ± {by_score[name].sem():.3f}"
    return f"**{text}**" if behind.mean() <= 2 * behind.sem() else text


def plot(table: pd.DataFrame, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3), layout="constrained")
    axes = figure.subplots(1, len(TASKS), sharey=True)
    for ax, (task, title) in zip(axes, TASKS.items(), strict=True):
        for (name, label), style in zip(SCORES.items(), ("o-", "s-", "v-", "^-", "x--"), strict=True):
            groups = table[table.score == name].groupby("weight_decay")[task]
            ax.errorbar(groups.mean().index, groups.mean(), 2 * groups.sem(), fmt=style, label=label, markersize=4)
        ax.set(title=title, xscale="log")
        ax.axhline(0.5, color="0.8", zorder=0)
    axes[0].set_ylabel("AUROC")
    axes[-1].legend(fontsize=7, loc="lower right")
    figure.supxlabel("weight decay")
    figure.savefig(path, dpi=90)


def write(results: Path) -> bool:
    """The table and the picture, where there are results."""
    table = Rows(results, KEY).read()
    if not table.empty:
        results.with_suffix(".md").write_text(markdown(table))
        plot(table, results.with_suffix(".png"))
    return not table.empty


def main(arguments: Sequence[str] | None = None) -> None:
    from sklearn.datasets import load_digits

    parser = argparse.ArgumentParser(prog="python -m experiments digits", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=positive, default=SEEDS, metavar="N")
    parser.add_argument("--out", type=file_to_write, default=RESULTS / "digits.csv", metavar="FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the networks are small
    warnings.simplefilter("ignore", DeltabandWarning)
    X, y = load_digits(return_X_y=True)
    X, y = (X / 16).astype(np.float32), y.astype(np.int64)
    rows = Rows(options.out, KEY)
    cells = [(decay, seed) for decay in WEIGHT_DECAYS for seed in range(options.seeds)]
    for decay, seed in tqdm(cells, unit="split", mininterval=SECONDS):
        if (f"{decay:g}", seed) not in rows.done():
            rows.append(cell(X, y, decay, seed))
    write(options.out)
