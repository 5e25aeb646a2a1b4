"""A higher rank or more parameters? The paper's open question, on its own networks.

    python -m experiments parameters --data DIR

For every split's network: Important Directions (compressed) of ranks 25 to 400 and the exact method, on the parameters
of the last layer, of the last two, and on all of them. The widths are compared with those of the exact method on all.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from tqdm import tqdm

from deltaband import DeltabandWarning, Exact, ImportantDirections, PredictionIntervals, metrics

from . import data
from .arguments import on_data
from .progress import SECONDS, beside
from .protocol import Protocol, groups
from .reproduce import LEVEL
from .rows import Rows, write_table

NAMES = ("concrete", "wine-red")
LAYERS = {"last layer": 1, "last two layers": 2, "all": 3}
RANKS = (25, 50, 100, 200, 400)
SPLITS = 20
KEY = ("data", "split")  # of the rows of results


def study(protocol: Protocol, i: int) -> Iterator[dict[str, object]]:
    train, test = protocol.training_and_test(i)
    network = protocol.members(1)[i].networks[0]
    weight_decay = protocol.recipe.weight_decay
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in network.named_parameters()))
    reference = None
    for choice, count in reversed(LAYERS.items()):
        names = [f"{owner}.*" for owner in owners[-count:]]
        for rank in (None, *RANKS):
            engine = Exact() if rank is None else ImportantDirections(rank, compress=True)
            band = PredictionIntervals(network, weight_decay=weight_decay, parameters=names, engine=engine)
            intervals = band.fit(*train, progress=False).predict(test.x, LEVEL)
            reference = intervals.width if reference is None else reference  # the first is exact on all
            p = band.n_parameters_
            yield {
                "data": protocol.name,
                "split": protocol.splits[i],
                "parameters": choice,
                "p": p,
                "rank": rank or 0,  # 0: exact
                "numbers": p * p if rank is None else 2 * min(rank, p + 1) * p,
                "width_error": float(np.abs(intervals.width / reference - 1).mean()),
                "bias": float((intervals.width / reference).mean() - 1),
                "p_cov": metrics.coverage(test.y, intervals),
                "r": metrics.width_error_correlation(test.y, intervals),
                "score": metrics.interval_score(test.y, intervals),
            }


def markdown(table: pd.DataFrame) -> str:
    lines = [
        "# A higher rank or more parameters?",
        "",
        "`python -m experiments parameters --data DIR`. Important Directions, compressed, with J restricted to some of",
        "the parameters, against the exact method on all of them: mean |width/exact − 1|, bias, coverage of 95 %",
        "intervals, correlation of width and error, interval score; means over the splits. Numbers held: 2·rank·p for",
        "a sketch, p² for the exact method.",
    ]
    for name in (name for name in NAMES if name in set(table.data)):
        part = table[table.data == name]
        lines += ["", f"## {name}, {part.split.nunique()} splits", ""]
        lines += ["| parameters | p | rank | numbers | width error | bias | p_cov | r | score |"]
        lines += ["|---|---|---|---|---|---|---|---|---|"]
        for choice in reversed(LAYERS):
            for rank in (*RANKS, 0):
                mean = part[(part.parameters == choice) & (part["rank"] == rank)].mean(numeric_only=True)
                lines.append(
                    f"| {choice} | {mean.p:,.0f} | {rank or 'exact'} | {mean.numbers:,.0f} | {mean.width_error:.1%} | "
                    f"{mean.bias:+.1%} | {mean.p_cov:.3f} | {mean.r:.3f} | {mean.score:.3f} |"
                )
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = on_data("parameters", __doc__, "parameters.csv")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", DeltabandWarning)  # of a rank too small: that is what is studied
    rows = Rows(options.out, KEY)
    available = data.Available(list(NAMES), data.folder(options.data))
    for name, X, y in available:
        with tqdm(total=SPLITS, desc=name, unit="split", mininterval=SECONDS) as bar:
            for splits in groups(len(y), SPLITS):
                protocol = Protocol(name, X, y, splits, options.networks, beside(bar))
                for i, split in enumerate(splits):
                    if (name, split) not in rows.done():
                        rows.append(list(study(protocol, i)))
                    bar.update()
    write_table(options.out, KEY, markdown)
    if available.malformed:
        raise SystemExit(1)
