"""Do the scores of networks that are trained on labels drawn anew scatter as much as their intervals say?

    python -m experiments logodds

A network is the truth. Labels are drawn from its softmax, for the same inputs again and again; each time a network is
trained to the minimum of the cross-entropy with weight decay. For eight other inputs and all classes the standard
deviation of the log-odds over these networks is compared with √q, from the Fisher matrix of the softmax ("joint") and
of each class against the rest ("own").
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm

from deltaband import ClassificationIntervals, DeltabandWarning

from .arguments import RESULTS, file_to_write, positive
from .progress import SECONDS
from .rows import Rows, write_table

KEY = ("setting",)
REPETITIONS, ASKED, CLASSES = 100, 8, 3


class Setting(NamedTuple):
    n: int
    hidden: int  # 0: a softmax regression
    weight_decay: float


SETTINGS = {
    "regression": Setting(500, 0, 1e-3),
    "2 hidden units": Setting(500, 2, 1e-3),
    "6 hidden units": Setting(500, 6, 1e-2),
    "6 hidden units and more rows": Setting(4000, 6, 1e-2),
    "6 hidden units and less weight decay": Setting(400, 6, 3e-3),
    "2 hidden units and fewer rows": Setting(400, 2, 3e-3),
}


def network(hidden: int) -> nn.Module:
    if hidden == 0:
        return nn.Linear(3, CLASSES).double()
    return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, CLASSES)).double()


def train(model: nn.Module, X: Tensor, y: Tensor, weight_decay: float) -> None:
    optimiser = torch.optim.LBFGS(
        model.parameters(), max_iter=500, tolerance_grad=1e-8, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def objective() -> Tensor:
        optimiser.zero_grad()
        penalty = sum((w.square().sum() for w in model.parameters()), torch.zeros(()))
        value = nn.functional.cross_entropy(model(X), y) + weight_decay / 2 * penalty
        value.backward()
        return value

    optimiser.step(objective)


def study(name: str, repetitions: int) -> list[dict[str, object]]:
    """A row for each input and class."""
    n, hidden, weight_decay = SETTINGS[name]
    torch.manual_seed(0)
    truth = network(hidden)
    with torch.no_grad():
        for w in truth.parameters():
            w.mul_(2)
    X, new = 2 * torch.randn(n, 3).double(), torch.randn(ASKED, 3).double()
    probabilities = truth(X).softmax(dim=1).detach()
    found: dict[str, list[np.ndarray]] = {"score": [], "joint": [], "own": []}
    p_star = []
    for _ in tqdm(range(repetitions), desc=name, unit="network", mininterval=SECONDS):
        y = torch.multinomial(probabilities, 1)[:, 0]
        model = network(hidden)
        model.load_state_dict(truth.state_dict())  # to the minimum nearby: others have the units in another order
        train(model, X, y, weight_decay)
        for per_output in (False, True):
            band = ClassificationIntervals(model, weight_decay=weight_decay, per_output=per_output).fit(
                X, y, progress=False
            )
            found["own" if per_output else "joint"].append(band.variance(new).numpy())
            if not per_output:
                found["score"].append(band.predict(new).log_odds.mean.numpy())
                p_star.append(band.effective_parameters_)
    simulated = np.std(found["score"], axis=0, ddof=1)
    joint, own = (np.sqrt(np.mean(found[each], axis=0)) for each in ("joint", "own"))
    return [
        {
            "setting": name,
            "input": i,
            "class": c,
            "simulated": simulated[i, c],
            "joint": joint[i, c],
            "own": own[i, c],
            "n": n,
            "networks": repetitions,
            "effective_parameters": np.mean(p_star),
        }
        for i in range(ASKED)
        for c in range(CLASSES)
    ]


def markdown(table: pd.DataFrame) -> str:
    lines = [
        "# The standard deviation of a log-odds: simulated, and √q",
        "",
        f"`python -m experiments logodds`. {table.networks.max()} networks each; the smallest and the largest of",
        f"{ASKED} inputs and {CLASSES} classes, and the median of √q over the simulated standard deviation.",
        "",
        "| network | n | p* | simulated | joint | own | joint/simulated | own/simulated |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, part in table.groupby("setting", sort=False):
        spans = [f"{part[key].min():.3f}–{part[key].max():.3f}" for key in ("simulated", "joint", "own")]
        ratios = [f"{(part[key] / part.simulated).median():.2f}" for key in ("joint", "own")]
        first = [str(name), f"{part.n.iloc[0]:,}", f"{part.effective_parameters.iloc[0]:.1f}"]
        lines.append(f"| {' | '.join(first + spans + ratios)} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments logodds", description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=positive, default=REPETITIONS, metavar="N")
    parser.add_argument("--out", type=file_to_write, default=RESULTS / "logodds.csv", metavar="FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the networks are small
    warnings.simplefilter("ignore", DeltabandWarning)
    rows = Rows(options.out, KEY)
    for name in SETTINGS:
        if (name,) not in rows.done():
            rows.append(study(name, options.repetitions))
    write_table(options.out, KEY, markdown)
