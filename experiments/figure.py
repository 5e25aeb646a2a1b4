"""Figure 1 of the paper: what Important Directions of rank 200 keeps of the spectra, for red wine.

python -m experiments figure --data DIR
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pandas as pd

from deltaband import DeltabandWarning, Exact, ImportantDirections, PredictionIntervals, plots

from . import data
from .arguments import on_data
from .protocol import Protocol, groups

NAME, RANK = "wine-red", 200


def main(arguments: Sequence[str] | None = None) -> None:
    from matplotlib.figure import Figure

    parser = on_data("figure", __doc__, "spectra.csv")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", DeltabandWarning)  # of a rank too small: that is what is studied
    X, y = data.load(NAME, data.folder(options.data))
    protocol = Protocol(NAME, X, y, next(groups(len(y), 1)), options.networks, lambda text: None)
    train, _ = protocol.training_and_test(0)
    network = protocol.members(1)[0].networks[0]
    engines = {
        "exact": Exact(),
        "directions": ImportantDirections(RANK),
        "compressed": ImportantDirections(RANK, compress=True),
    }
    found = {
        method: PredictionIntervals(network, weight_decay=protocol.recipe.weight_decay, engine=engine)
        .fit(*train, progress=False)
        .spectrum()
        for method, engine in engines.items()
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    pd.concat(
        [
            pd.DataFrame(
                {"method": method, "singular_value": spectrum[0], "eigenvalue": spectrum[1]},
                index=pd.RangeIndex(1, len(spectrum[0]) + 1, name="index"),
            )
            for method, spectrum in found.items()
        ]
    ).to_csv(options.out, float_format="%.5g")
    picture = Figure(figsize=(12, 4.5), layout="constrained")
    for ax, method in zip(picture.subplots(1, 2, sharey=True), ("directions", "compressed"), strict=True):
        plots.spectra(found[method], found["exact"], ax=ax)
        ax.set_title(f"{NAME}, rank {RANK}, {'to the letter' if method == 'directions' else 'compressed'}")
    picture.savefig(options.out.with_suffix(".png"), dpi=110)
