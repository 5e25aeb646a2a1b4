"""Time and memory of a fit against n, p and the size of the engine.

    python -m benchmarks.scaling

Each point is a process of its own. Results go to `scaling.csv`, row by row, then to `scaling.md` and `scaling.png`; an
interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from tqdm import tqdm

from experiments.rows import Rows

from .measure import limited_to
from .scale import HERE, child

SIZED = {"Nystrom": "landmarks", "RandomProjection": "dim", "RobustFrequentDirections": "rank"}
SIZED |= {"ImportantDirections": "rank"}
PANELS = {"n": "rows n", "p": "parameters p", "size": "landmarks, dim or rank"}


class Point(NamedTuple):
    against: str  # n, p or size
    engine: str
    n: int
    hidden: int
    size: int

    def run(self) -> dict[str, object]:
        engine = f"deltaband.{self.engine}({self.size if self.engine in SIZED else ''})"
        found = child(f"fit_and_predict(Case({self.n}, (20, {self.hidden}, {self.hidden})), {engine})")
        return {
            **self._asdict(),
            "p": found["p"],
            "seconds": found["seconds"],
            "MB": found["MB"],
            "predicted MB": found["predicted MB"],
        }


def points() -> Iterator[Point]:
    for engine in ("Exact", *SIZED):
        small = 400 if engine in ("Nystrom", "RandomProjection") else 100
        for n in (500, 1000, 2000, 4000, 8000, 16000):
            yield Point("n", engine, n, 100, small)
        for hidden in (30, 100, 300, 1000):
            yield Point("p", engine, 2000, hidden, small)
        if engine in SIZED:
            for size in (50, 100, 200, 400, 800):
                yield Point("size", engine, 4000, 100, size)


def markdown(table: pd.DataFrame) -> str:
    lines = ["# Time and memory of a fit, and of 1,000 predictions", "", "`python -m benchmarks.scaling`", ""]
    for against, label in PANELS.items():
        part = table[table.against == against]
        engines = list(dict.fromkeys(part.engine))
        lines += [f"## Against {label}", "", f"| {against} | " + " | ".join(f"{e}: s, MB" for e in engines) + " |"]
        lines.append("|---|" + "---|" * len(engines))
        for x in sorted(set(part[against])):
            cells = []
            for engine in engines:
                row = part[(part.engine == engine) & (part[against] == x)]
                cells.append("" if row.empty else f"{row.seconds.iloc[0]:.2f}, {row.MB.iloc[0]:.0f}")
            lines.append(f"| {x:,} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def plot(table: pd.DataFrame, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    colours = {engine: f"C{i}" for i, engine in enumerate(dict.fromkeys(table.engine))}
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots(2, len(PANELS), squeeze=False, sharey="row")
    for column, (against, label) in enumerate(PANELS.items()):
        part = table[table.against == against]
        for row, (quantity, name) in enumerate((("seconds", "seconds"), ("MB", "peak memory, MB"))):
            ax = axes[row, column]
            for engine in dict.fromkeys(part.engine):
                line = part[part.engine == engine].sort_values(against)
                ax.loglog(line[against], line[quantity].clip(lower=1e-2), "o-", ms=4, label=engine, c=colours[engine])
            ax.set_xlabel(label, fontsize=8)
            ax.xaxis.set_minor_formatter(NullFormatter())
            if column == 0:
                ax.set_ylabel(name, fontsize=8)
    axes[0, 0].legend(fontsize=7)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=HERE / "results" / "scaling.csv", metavar="FILE")
    args = parser.parse_args()
    rows = Rows(args.out, key=Point._fields)
    done = rows.done()
    with limited_to(args.threads):
        for point in tqdm([point for point in points() if tuple(point) not in done], unit="point"):
            rows.append([point.run()])
    args.out.with_suffix(".md").write_text(markdown(rows.read()))
    plot(rows.read(), args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
