"""Why the paper's widths for energy are four times ours: its target may have been classes, not numbers.

    python -m experiments energy --data DIR

The version of the data that the authors' code asks OpenML for has a nominal target. The heating load rounded to whole
numbers has as many values as that has classes, 37. Here the protocol is run on their codes, in three orders.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from tqdm import tqdm

from deltaband import DeltabandWarning

from . import data, paper
from .arguments import SPLITS_HELP, on_data, positive
from .progress import SECONDS, beside
from .protocol import Protocol, groups
from .reproduce import compressed, row
from .rows import Rows, write_table

Order = Callable[[np.ndarray], list[int]]
ORDERS: dict[str, Order] = {
    "numbers": lambda values: sorted(set(values.tolist())),
    "words": lambda values: sorted(set(values.tolist()), key=str),
    "appearance": lambda values: list(dict.fromkeys(values.tolist())),
}
KEY = ("order", "split")  # of a row of results


def codes(y: np.ndarray, order: str) -> np.ndarray:
    """The targets rounded to whole numbers, and these by their places in an order."""
    values = np.round(y).astype(int)
    place = {value: i for i, value in enumerate(ORDERS[order](values))}
    return np.array([float(place[value]) for value in values.tolist()])


def markdown(table: pd.DataFrame) -> str:
    printed = paper.DIRECTIONS["energy"]
    lines = [
        "# The energy target as classes",
        "",
        "`python -m experiments energy --data DIR`. Important Directions, compressed to rank 500; means over splits.",
        "",
        "| order of the classes | splits | p_cov | r | w_sd |",
        "|---|---|---|---|---|",
    ]
    for order, part in table.groupby("order", sort=False):
        lines.append(
            f"| {order} | {len(part)} | {part.p_cov.mean():.3f} | {part.r.mean():.3f} | {part.w_sd.mean():.3f} |"
        )
    lines.append(f"| the paper | 20 | {printed.p_cov} | {printed.r} | {printed.w_sd} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = on_data("energy", __doc__, "energy.csv")
    parser.add_argument("--splits", type=positive, default=20, metavar="N", help=SPLITS_HELP)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", DeltabandWarning)
    X, y = data.load("energy", data.folder(options.data))
    rows = Rows(options.out, KEY)
    with tqdm(ORDERS, unit="order", mininterval=SECONDS) as bar:
        say = beside(bar)
        for order in bar:
            networks = options.networks / f"energy-{order}"
            for splits in groups(len(y), options.splits):
                protocol = Protocol("energy", X, codes(y, order), splits, networks, say)
                for i, split in enumerate(splits):
                    if split < options.splits and (order, split) not in rows.done():
                        rows.append([{"order": order, **row(protocol, i, "compressed", compressed(protocol, i))}])
    write_table(options.out, KEY, markdown)
