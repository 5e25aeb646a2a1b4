"""How good is each engine at equal memory? Widths against the exact ones, on real data.

    python -m benchmarks.accuracy --data DIR

For each data set a [50, 50] and a [256, 256] network is trained, for each budget each engine gets the largest size that
its own prediction of its memory allows. "auto" is what `engine="auto"` would choose with that `memory`, of which it
leaves half to the comparison with the exact method. Results go
to `accuracy.csv`, row by row, then to `accuracy.md` and `accuracy.png`; an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import nn
from tqdm import tqdm

from deltaband import (
    DeltabandWarning,
    Exact,
    FrequentDirections,
    ImportantDirections,
    Nystrom,
    PredictionIntervals,
    RandomProjection,
    RobustFrequentDirections,
)
from deltaband.engines import Engine, Problem, largest, plan_fit
from experiments import data
from experiments.rows import Rows

HERE = Path(__file__).parent / "results"
DATASETS = ("concrete", "wine-red", "ailerons", "protein")
HIDDEN = (50, 256)
BUDGETS = (1e6, 4e6, 16e6, 64e6, 256e6)
ROWS = 3000  # of training, at most
TEST_ROWS = 500
WEIGHT_DECAY = 1e-2
ENGINES: dict[str, Callable[[int], Engine]] = {
    "Nystrom": Nystrom,
    "RandomProjection": RandomProjection,
    "RobustFrequentDirections": RobustFrequentDirections,
    "ImportantDirections": ImportantDirections,
    "FrequentDirections": FrequentDirections,
}


class Task(NamedTuple):
    """A trained network and its data, standardised."""

    network: nn.Module
    x: torch.Tensor
    y: torch.Tensor
    new: torch.Tensor

    @staticmethod
    def of(X: np.ndarray, y: np.ndarray, hidden: int) -> Task:
        order = np.random.default_rng(0).permutation(len(y))[: ROWS + TEST_ROWS]
        X, y = X[order], y[order]
        held = min(TEST_ROWS, len(y) // 5)
        spread = np.where(X[held:].std(axis=0) > 0, X[held:].std(axis=0), 1.0)
        x = torch.tensor((X - X[held:].mean(axis=0)) / spread, dtype=torch.float32)
        t = torch.tensor((y - y[held:].mean()) / y[held:].std(), dtype=torch.float32)
        torch.manual_seed(0)
        widths = (X.shape[1], hidden, hidden)
        layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.LeakyReLU())]
        network = nn.Sequential(*layers, nn.Linear(hidden, 1))
        optimiser = torch.optim.Adam(network.parameters(), lr=1e-3, weight_decay=WEIGHT_DECAY)
        for _ in range(100):
            for rows in torch.randperm(len(x) - held).split(512):
                optimiser.zero_grad()
                nn.functional.mse_loss(network(x[held:][rows])[:, 0], t[held:][rows]).backward()
                optimiser.step()
        return Task(network.eval(), x[held:], t[held:], x[:held])

    def fitted(self, engine: Engine) -> tuple[PredictionIntervals, np.ndarray, float]:
        """The band, the widths of the new rows, and the seconds of the fit."""
        band = PredictionIntervals(self.network, weight_decay=WEIGHT_DECAY, engine=engine)
        start = time.perf_counter()
        band.fit(self.x, self.y, progress=False)
        seconds = time.perf_counter() - start
        return band, band.predict(self.new).width.double().numpy(), seconds


def fitting(make: Callable[[int], Engine], problem: Problem, budget: float) -> Engine | None:
    """The engine of the largest size that is predicted to fit; more directions than rows are of no use."""
    most = min(problem.n_rows or 0, problem.n_parameters)
    size = largest(lambda size: make(size).cost(problem).nbytes <= budget, most)
    return make(size) if size >= 2 else None


def study(name: str, hidden: int, task: Task) -> Iterator[dict[str, object]]:
    truth, exact, seconds = task.fitted(Exact())
    schedule = PredictionIntervals(task.network, weight_decay=WEIGHT_DECAY).plan(task.x, task.y)
    problem = schedule.problem
    common = {"data": name, "hidden": hidden, "n": len(task.x), "p": problem.n_parameters}
    common |= {"p_star": truth.effective_parameters_}

    def row(budget: float, label: str, engine: Engine) -> dict[str, object]:
        band, widths, seconds = task.fitted(engine)
        return {
            **common,
            "budget_mb": round(budget / 1e6),
            "engine": label,
            "setting": repr(engine),
            "predicted_mb": engine.cost(problem).nbytes / 1e6,
            "width_error": float(np.abs(widths / exact - 1).mean()),
            "p_star_error": band.effective_parameters_ / truth.effective_parameters_ - 1,
            "estimated_error": band.error_report().width,
            "seconds": seconds,
        }

    yield {
        **common,
        "budget_mb": 0,
        "engine": "Exact",
        "setting": "Exact()",
        "predicted_mb": Exact().cost(problem).nbytes / 1e6,
        "width_error": 0.0,
        "p_star_error": 0.0,
        "estimated_error": 0.0,
        "seconds": seconds,
    }
    for budget in BUDGETS:
        for label, make in ENGINES.items():
            engine = fitting(make, problem, budget)
            if engine is not None:
                yield row(budget, label, engine)
        chosen = plan_fit(problem, None, budget).chosen
        if chosen is not None:
            yield row(budget, "auto", chosen.engine)


def markdown(table: pd.DataFrame) -> str:
    """A line for each network and budget; the smallest error of an approximation in bold."""
    names = ["auto", *ENGINES]
    lines = [
        "# Width error against exact at equal memory",
        "",
        "`python -m benchmarks.accuracy --data DIR`. Mean of |width/exact − 1| over new rows, in %; – where none fits.",
        "",
        "| data | network | n | p | p* | exact, MB | memory, MB | " + " | ".join(names) + " |",
        "|---|---|---|---|---|---|---|" + "---|" * len(names),
    ]
    for (name, hidden, budget), part in table[table.engine != "Exact"].groupby(
        ["data", "hidden", "budget_mb"], sort=False
    ):
        first = part.iloc[0]
        exact = table[(table.data == name) & (table.hidden == hidden) & (table.engine == "Exact")].iloc[0]
        errors = {engine: 100 * error for engine, error in zip(part.engine, part.width_error, strict=True)}
        best = min(errors.values())
        cells = [
            "–" if e not in errors else f"**{errors[e]:.2g}**" if errors[e] == best else f"{errors[e]:.2g}"
            for e in names
        ]
        lines.append(
            f"| {name} | [{hidden}, {hidden}] | {first.n:,} | {first.p:,} | {first.p_star:.0f} | "
            f"{exact.predicted_mb:.0f} | {budget} | " + " | ".join(cells) + " |"
        )
    return "\n".join([*lines, ""])


def plot(table: pd.DataFrame, path: Path) -> None:
    """Error against memory, and below it error against the time of the fit."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    cases = list(table.groupby(["data", "hidden"], sort=False).groups)
    names = list(dict.fromkeys(name for name, _ in cases))
    figure = Figure(figsize=(3.2 * len(names), 10), layout="constrained")
    axes = figure.subplots(2 * len(HIDDEN), len(names), squeeze=False, sharey=True)
    for name, hidden in cases:
        part = table[(table.data == name) & (table.hidden == hidden)]
        for against, offset, label in (("predicted_mb", 0, "memory, MB"), ("seconds", len(HIDDEN), "seconds to fit")):
            ax = axes[offset + HIDDEN.index(hidden), names.index(name)]
            for engine, marker in zip(ENGINES, "os^vD", strict=True):
                line = part[part.engine == engine].sort_values("budget_mb")
                ax.loglog(line[against], np.maximum(100 * line.width_error, 1e-4), f"{marker}-", ms=4, label=engine)
            ax.axvline(part[part.engine == "Exact"][against].iloc[0], color="black", lw=0.8, ls=":", label="Exact")
            ax.set_title(f"{name}, [{hidden}, {hidden}], p* = {part.p_star.iloc[0]:.0f}", fontsize=8)
            ax.set_xlabel(label, fontsize=8)
            ax.xaxis.set_minor_formatter(NullFormatter())
    axes[0, 0].legend(fontsize=6)
    figure.supylabel("mean error of the width against exact, %")
    figure.savefig(path, dpi=90)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__.splitlines()[0])
    parser.add_argument("--data", metavar="DIR", help="folder of the data sets (or DELTABAND_DATA; else OpenML)")
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=data.NAMES, metavar="NAME")
    parser.add_argument("--out", type=Path, default=HERE / "accuracy.csv", metavar="FILE")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", DeltabandWarning)  # of a size too small: that is what is measured
    rows = Rows(options.out, key=("data", "hidden"))
    available = data.Available(options.datasets, data.folder(options.data))
    with tqdm(available, unit="data set") as bar:
        for name, X, y in bar:
            for hidden in HIDDEN:
                if (name, hidden) not in rows.done():
                    bar.set_postfix_str(f"{name}, [{hidden}, {hidden}]")
                    rows.append(list(study(name, hidden, Task.of(X, y, hidden))))
    options.out.with_suffix(".md").write_text(markdown(rows.read()))
    plot(rows.read(), options.out.with_suffix(".png"))
    if available.malformed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
