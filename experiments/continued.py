"""What a difference of the authors' code to the paper makes: networks that are not trained from scratch.

    python -m experiments continued --data DIR

The paper trains a network with early stopping, and then a new one on the whole training part. The authors' code goes on
with the first one instead, and its λ = n·wd/2 has the n without the validation rows. Here are both, and the paper's
protocol, on the data sets where n is small against p.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pandas as pd
from tqdm import tqdm

from deltaband import DeltabandWarning

from . import data, paper
from .arguments import SPLITS_HELP, on_data, positive
from .progress import SECONDS, beside
from .protocol import Protocol, groups
from .reproduce import Answer, exact_on_a_part, formula, row, sketch
from .rows import Rows, write_table

NAMES = ("boston", "concrete", "wine-red")
TRAININGS = ("from scratch", "continued", "continued, λ of 80 %")
METHODS = ("exact on 80 %", "directions", "compressed")
KEY = ("training", "data", "split", "method")  # of a row of results


def answer(protocol: Protocol, i: int, training: str, method: str) -> Answer:
    trained = (protocol.members(1) if training == TRAININGS[0] else protocol.continued())[i]
    if method == "exact on 80 %":
        return exact_on_a_part(protocol, i, trained)
    n = len(protocol.rest[i]) if training == TRAININGS[2] else None
    return formula(protocol, i, sketch(protocol.name, compress=method == "compressed"), None, trained, n)


def markdown(table: pd.DataFrame) -> str:
    lines = [
        "# Networks from scratch, and continued",
        "",
        "`python -m experiments continued --data DIR`. Means over splits; beside the methods, the paper's values.",
    ]
    for metric in paper.Values._fields:
        lines += ["", f"## {metric}", "", "| data | method | paper | " + " | ".join(TRAININGS) + " |"]
        lines += ["|---|---|---|" + "---|" * len(TRAININGS)]
        for (name, method), part in table.groupby(["data", "method"], sort=False):
            printed = paper.EXACT[name][0] if method.startswith("exact") else paper.DIRECTIONS[name]
            means = [part[part.training == each][metric].mean() for each in TRAININGS]
            values = " | ".join(f"{mean:.3f}" for mean in means)
            lines.append(f"| {name} | {method} | {getattr(printed, metric):.3g} | {values} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = on_data("continued", __doc__, "continued.csv")
    parser.add_argument("--splits", type=positive, default=20, metavar="N", help=SPLITS_HELP)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", DeltabandWarning)
    rows = Rows(options.out, KEY)
    done = rows.done()
    available = data.Available(NAMES, data.folder(options.data))
    with tqdm(available, unit="data set", mininterval=SECONDS) as bar:
        say = beside(bar)
        for name, X, y in bar:
            for splits in groups(len(y), options.splits):
                protocol = Protocol(name, X, y, splits, options.networks, say)
                cells = [(t, i, s, m) for m in METHODS for t in TRAININGS for i, s in enumerate(splits)]
                for training, i, split, method in cells:
                    if split < options.splits and (training, name, split, method) not in done:
                        found = row(protocol, i, method, answer(protocol, i, training, method))
                        rows.append([{"training": training, **found}])
    write_table(options.out, KEY, markdown)
    if available.malformed:
        raise SystemExit(1)
