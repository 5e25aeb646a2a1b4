"""Calibrated intervals against the formula and against MAPIE on the same rows: `python -m experiments calibration`.

For each data set, split and way of training one network is trained; four methods then give 95 % intervals of its test
rows:

- formula: the delta method as published, λ from the weight decay (for AdamW as if its decay were coupled);
- constant: MAPIE's split conformal with absolute residuals;
- boosted: MAPIE's residual_normalized, the residuals learnt by gradient boosting on a quarter of the calibration rows;
- ours: `band.calibrate` with `noise="none"`; `python -m experiments noise` tells what learnt noise adds.

The rows of a cell are appended to the CSV as it finishes; a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from mapie.conformity_scores import ResidualNormalisedScore
from mapie.regression import SplitConformalRegressor
from sklearn.ensemble import GradientBoostingRegressor
from torch import nn

from deltaband import DeltabandWarning, Intervals, PredictionIntervals, metrics
from deltaband.sklearn import BandRegressor

from . import data
from .arguments import file_to_write, positive
from .rows import Rows

LEVEL = 0.95
SETTINGS = {
    "adam 1e-2": (torch.optim.Adam, 1e-2),
    "adam 1e-4": (torch.optim.Adam, 1e-4),
    "adamw 1e-2": (torch.optim.AdamW, 1e-2),
}
KEY = ("data", "setting", "split")  # of the rows of results
RESULTS = Path(__file__).parent / "results" / "calibration.csv"
STEPS, PATIENCE = 12_000, 100


def train(X: torch.Tensor, y: torch.Tensor, setting: str, name: str, seed: int) -> tuple[nn.Module, slice]:
    """Two layers of 50, early stopping on 15 % of the rows; returns the best network and the rows it was trained on."""
    torch.manual_seed(seed)
    optimiser_class, weight_decay = SETTINGS[setting]
    batch, rate, at_most = (32_000, 1e-2, 2_000) if name == "sgemm" else (512, 1e-3, STEPS)
    model = nn.Sequential(
        nn.Linear(X.shape[1], 50), nn.LeakyReLU(), nn.Linear(50, 50), nn.LeakyReLU(), nn.Linear(50, 1)
    )
    optimiser = optimiser_class(model.parameters(), lr=rate, weight_decay=weight_decay)
    held = int(0.15 * len(X))
    rows = slice(held, len(X))
    loss = nn.functional.mse_loss
    best, kept, waited, steps = np.inf, None, 0, 0
    while waited < PATIENCE and steps < at_most:
        for part in torch.randperm(len(X) - held).split(batch):
            optimiser.zero_grad()
            loss(model(X[rows][part])[:, 0], y[rows][part]).backward()
            optimiser.step()
            steps += 1
        with torch.no_grad():
            error = loss(model(X[:held])[:, 0], y[:held]).item()
        waited += 1
        if error < best:
            best, kept, waited = error, {k: w.clone() for k, w in model.state_dict().items()}, 0
    model.load_state_dict(kept)
    return model, rows


def run(name: str, X: np.ndarray, y: np.ndarray, setting: str, split: int) -> list[dict[str, object]]:
    order = np.random.default_rng(split).permutation(len(y))
    n_train = int(0.9 * len(y))
    n_calibration = int(0.2 * n_train)
    calibration, training, test = np.split(order, [n_calibration, n_train])
    std = X[training].std(axis=0)
    X = (X - X[training].mean(axis=0)) / np.where(std > 0, std, 1.0)
    y = (y - y[training].mean()) / y[training].std()
    X = X.astype(np.float32)

    model, rows = train(torch.from_numpy(X[training]), torch.from_numpy(y[training]).float(), setting, name, split)
    start = time.perf_counter()
    band = PredictionIntervals(model, weight_decay=SETTINGS[setting][1])
    band.fit(X[training][rows], y[training][rows], progress=False)
    cells = {}
    if band.effective_parameters_ < band.n_rows_:
        cells["formula"] = band.predict(X[test], LEVEL)
    regressor = BandRegressor(band)
    boosting = GradientBoostingRegressor(random_state=split)
    for method, score in (
        ("constant", "absolute"),
        ("boosted", ResidualNormalisedScore(boosting, random_state=split)),
    ):
        mapie = SplitConformalRegressor(regressor, confidence_level=LEVEL, conformity_score=score, prefit=True)
        mean, bounds = mapie.conformalize(X[calibration], y[calibration]).predict_interval(X[test])
        cells[method] = Intervals(mean, bounds[:, 0, 0], bounds[:, 1, 0], LEVEL)
    band.calibrate(X[calibration], y[calibration], noise="none")
    cells["ours"] = band.predict(X[test], LEVEL)
    seconds = time.perf_counter() - start
    print(f"{name}, split {split}, {setting}: {seconds:.0f} s", flush=True)
    return [
        {
            "data": name,
            "setting": setting,
            "split": split,
            "method": method,
            "n_calibration": n_calibration,
            "n_test": len(test),
            "p_cov": metrics.coverage(y[test], intervals),
            "w_sd": metrics.mean_width(y[test], intervals),
            "r": metrics.width_error_correlation(y[test], intervals),
            "score": metrics.interval_score(y[test], intervals),
        }
        for method, intervals in cells.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments calibration", description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of the data sets (or DELTABAND_DATA); what it lacks comes from OpenML")
    parser.add_argument("--datasets", nargs="+", default=data.NAMES, choices=data.NAMES)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--splits", type=positive, default=10)
    parser.add_argument("--out", type=file_to_write, default=RESULTS)
    options = parser.parse_args(arguments)
    folder = data.folder(options.data)
    warnings.simplefilter("ignore", DeltabandWarning)
    rows = Rows(options.out, KEY)
    done = rows.done()
    to_do = {
        name: [
            (setting, split)
            for split, setting in itertools.product(range(options.splits), dict.fromkeys(options.settings))
            if (name, setting, split) not in done
        ]
        for name in options.datasets
    }
    available = data.Available([name for name in to_do if to_do[name]], folder)
    for name, X, y in available:
        for setting, split in to_do[name]:
            rows.append(run(name, X, y, setting, split))
    if available.malformed:
        raise SystemExit(1)
