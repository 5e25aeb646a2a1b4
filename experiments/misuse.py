"""What is said of networks that get the data they were trained on, and of those that get others.

    python -m experiments misuse --data DIR

For each data set, way of training, number of training rows and split there is one network of two layers of 50 without
early stopping: those of 100 rows know them by heart. It is used as it should be, with scaled data and with raw ones,
and in ten wrong ways; the columns say whether anything was said, a warning or an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from tqdm import tqdm

from deltaband import PredictionIntervals
from deltaband.errors import DeltabandWarning, MisfitWarning

from . import data
from .arguments import on_data, positive
from .calibration import SETTINGS
from .progress import SECONDS
from .protocol import Samples
from .rows import Rows, write_table

SIZES = (100, 1_000)  # training rows, at most 60 % of all
HELD = 300  # rows for calibration, and as many new ones, at most 20 % of all each
STEPS, BATCH = 1_000, 256
KEY = ("data", "setting", "rows", "split")  # of the rows of results
RIGHT = ("scaled data", "raw data and transforms")


def train(rows: Samples, setting: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    optimiser_class, weight_decay = SETTINGS[setting]
    model = network(rows.x.shape[1])
    optimiser = optimiser_class(model.parameters(), lr=3e-3, weight_decay=weight_decay)
    x, y = map(torch.from_numpy, rows)
    for _ in range(STEPS):
        part = torch.randint(len(x), (min(BATCH, len(x)),))
        optimiser.zero_grad()
        nn.functional.mse_loss(model(x[part])[:, 0], y[part]).backward()
        optimiser.step()
    return model


def network(features: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))


def says(use: Callable[[], Any]) -> bool:
    """Whether a use leads to an error, or to a warning that the data are not what the network was trained on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeltabandWarning)
        warnings.simplefilter("error", MisfitWarning)
        try:
            use()
        except (MisfitWarning, ValueError):
            return True
    return False


def run(X: np.ndarray, y: np.ndarray, setting: str, size: int, split: int) -> dict[str, bool]:
    order = np.random.default_rng(split).permutation(len(y))
    size, held = min(size, int(0.6 * len(y))), min(HELD, int(0.2 * len(y)))
    parts = np.split(order, [size, size + held, size + 2 * held])[:3]
    raw = [Samples(X[rows], y[rows]) for rows in parts]
    mean, std = raw[0].x.mean(axis=0), raw[0].x.std(axis=0)
    std = np.where(std < 1e-6 * np.maximum(1.0, np.abs(mean)), 1.0, std)
    units = float(raw[0].y.mean()), float(raw[0].y.std())
    scaled = [
        Samples(((part.x - mean) / std).astype(np.float32), ((part.y - units[0]) / units[1]).astype(np.float32))
        for part in raw
    ]
    model = train(scaled[0], setting, split)
    torch.manual_seed(split + 1_000)
    empty = network(X.shape[1])
    transforms = {"input_transform": (mean, std), "target_transform": units, "targets": "original"}

    def band(model: nn.Module = model, **options: Any) -> PredictionIntervals:
        return PredictionIntervals(model, weight_decay=SETTINGS[setting][1], **options)

    def fitted(**options: Any) -> PredictionIntervals:
        return band(**options).fit(*(raw[0] if options else scaled[0]), progress=False)

    def whole(band: PredictionIntervals, parts: Sequence[Samples]) -> None:
        for part in parts[1:]:
            band.predict_mean(part.x)
            for row in part.x[:20]:
                band.predict_mean(row[None])
        band.calibrate(*parts[1], noise="none").evaluate(*parts[2])

    made, with_transforms = fitted(), fitted(**transforms)
    uses: dict[str, Callable[[], Any]] = {
        RIGHT[0]: lambda: whole(fitted(), scaled),
        RIGHT[1]: lambda: whole(fitted(**transforms), raw),
        "fit: raw inputs": lambda: band().fit(raw[0].x, scaled[0].y, progress=False),
        "fit: raw targets": lambda: band().fit(scaled[0].x, raw[0].y, progress=False),
        "fit: raw targets, transform known": lambda: band(target_transform=units).fit(scaled[0].x, raw[0].y),
        "fit: inputs scaled twice": lambda: band(**transforms).fit(scaled[0].x, raw[0].y, progress=False),
        "fit: no weights loaded": lambda: band(empty).fit(*scaled[0], progress=False),
        "fit: no weights loaded, raw data": lambda: band(empty).fit(*raw[0], progress=False),
        "calibrate: raw targets": lambda: made.calibrate(scaled[1].x, raw[1].y, noise="none"),
        "calibrate: raw inputs": lambda: made.calibrate(raw[1].x, scaled[1].y, noise="none"),
        "predict: raw inputs": lambda: made.predict_mean(raw[2].x),
        "predict: inputs scaled twice": lambda: with_transforms.predict_mean(scaled[2].x),
    }
    return {name: says(use) for name, use in uses.items()}


def markdown(table: pd.DataFrame) -> str:
    lines = [
        "# What is said of right and wrong uses",
        "",
        "`python -m experiments misuse --data DIR`. Networks that were trained on scaled data, some of them on so few",
        "rows that they know these by heart; for each use the number of networks of which anything was said, a warning",
        f"or an error. {table.data.nunique()} data sets: {', '.join(table.data.unique())}.",
        "",
        "| use | networks | something is said |",
        "|---|---|---|",
    ]
    for use in [name for name in table.columns if name not in KEY]:
        kind = "right" if use in RIGHT else "wrong"
        lines.append(f"| {kind}: {use} | {len(table)} | {int(table[use].sum())} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = on_data("misuse", __doc__ or "", "misuse.csv")
    parser.add_argument("--splits", type=positive, default=2, metavar="N", help="the first N (default 2)")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", DeltabandWarning)
    rows = Rows(options.out, KEY)
    available = data.Available(list(data.NAMES), data.folder(options.data))
    for name, X, y in available:
        cells = [(setting, size, split) for setting in SETTINGS for size in SIZES for split in range(options.splits)]
        for setting, size, split in tqdm(cells, desc=name, mininterval=SECONDS):
            if (name, setting, size, split) not in rows.done():
                key = dict(zip(KEY, (name, setting, size, split), strict=True))
                found = run(X, y, setting, size, split)
                rows.append([key | {use: int(said) for use, said in found.items()}])
    write_table(options.out, KEY, markdown)
    if available.malformed:
        raise SystemExit(1)
