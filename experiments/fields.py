"""`python -m experiments fields`: outputs that are images and horizons, and how often their intervals cover.

A U-Net that predicts mean and variance of fields of 64 × 64 numbers, whose noise is known because it is made up; and an
LSTM that forecasts 24 months of the temperature of the sea off Peru (statsmodels' `elnino`). A part whose results are
there is not measured again: remove its file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import gaussian_nll_loss, interpolate, max_pool2d, mse_loss

from deltaband import PredictionIntervals, RandomProjection, metrics

RESULTS = Path(__file__).parent / "results"
SIZE, LEVEL, DECAY, PROBES = 64, 0.9, 1e-3, 4
MONTHS, HORIZONS = 36, 24


def smooth(n: int, rng: torch.Generator, cells: int = 6) -> Tensor:
    """Return smooth random fields of about unit variance, (n, 1, SIZE, SIZE)."""
    coarse = torch.randn(n, 1, cells, cells, generator=rng)
    return 1.4 * interpolate(coarse, size=(SIZE, SIZE), mode="bicubic", align_corners=True)


def fields(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return inputs (n, 2, SIZE, SIZE), observed targets, true means and true standard deviations of the noise."""
    rng = torch.Generator().manual_seed(seed)
    a, b = smooth(n, rng), smooth(n, rng)
    mean, noise = torch.sin(2 * a) + 0.5 * a * b, 0.05 + 0.25 * torch.sigmoid(2 * b)
    return torch.cat([a, b], dim=1), mean + noise * torch.randn(mean.shape, generator=rng), mean, noise


class UNet(nn.Module):
    """One level down and up, with a skip connection; returns mean and log-variance."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, width, 3, padding=1)
        self.bottom = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.up = nn.Conv2d(3 * width, width, 3, padding=1)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        top = torch.tanh(self.down(x))
        low = torch.tanh(self.bottom(max_pool2d(top, 2)))
        both = torch.cat([top, interpolate(low, scale_factor=2, mode="bilinear")], dim=1)
        mean, log_variance = self.head(torch.tanh(self.up(both))).split(1, dim=1)
        return mean, log_variance.clamp(-8, 4)


class Forecaster(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, width, batch_first=True), nn.Linear(width, HORIZONS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def trained(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Callable[[Any, Tensor], Tensor],
    epochs: int,
    decay: float,
) -> float:
    """Train a model in batches of 20 rows; return the seconds of an epoch."""
    optimiser = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    began = time.perf_counter()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(20):
            optimiser.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimiser.step()
        schedule.step()
    return (time.perf_counter() - began) / epochs


def peak_memory() -> float:
    """Return the most memory that this process has had, in GB."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def unet(epochs: int, n_train: int, n_held: int, n_test: int, dim: int) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """Train, fit, calibrate and measure the U-Net; return the figures and what the picture shows."""
    torch.manual_seed(0)
    (x, y, _, _), (held_x, held_y, _, _) = fields(n_train, 1), fields(n_held, 2)
    test_x, test_y, test_mean, test_noise = fields(n_test, 3)
    model = UNet()

    def loss(out: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return gaussian_nll_loss(out[0], target, out[1].exp())

    epoch = trained(model, x, y, loss, epochs, DECAY)
    options = {"variance": "log_variance", "engine": RandomProjection(dim), "memory": 1e9, "probes": PROBES}
    band = PredictionIntervals(model, weight_decay=DECAY, **options)
    began = time.perf_counter()
    band.fit(x, y, progress=False)
    seconds = time.perf_counter() - began
    few = slice(n_test // 4)
    formula = float(band.predict(test_x[few], LEVEL).contains(test_y[few]).double().mean())
    band.calibrate(held_x, held_y, joint="share")
    began = time.perf_counter()
    intervals = band.predict(test_x, LEVEL)
    predicting = time.perf_counter() - began
    inside, half = intervals.contains(test_y).double(), intervals.width / 2
    quarter = torch.bucketize(test_noise, test_noise.quantile(torch.tensor([0.25, 0.5, 0.75])))
    error, scale = band.fits_[0].probe_error, (test_noise.square() + (intervals.mean - test_mean).square()).sqrt()
    together = np.corrcoef(np.stack([each.flatten() for each in (half, test_noise, scale)]))
    about = {
        "parameters": band.n_parameters_,
        "rows": n_train,
        "outputs": SIZE * SIZE,
        "probes": band.fits_[0].gradients_per_row,
        "error_of_widths_by_probes": None if error is None else float(f"{error.width:.2g}"),
        "effective_parameters": round(float(band.effective_parameters_), 1),
        "level": LEVEL,
        "coverage_by_formula": round(formula, 4),
        "coverage_by_pixel": round(float(inside.mean()), 4),
        "coverage_by_quarter_of_true_noise": [round(float(inside[quarter == k].mean()), 4) for k in range(4)],
        "correlation_of_half_width_with_true_noise": round(float(together[0, 1]), 4),
        "correlation_of_half_width_with_true_noise_and_error": round(float(together[0, 2]), 4),
        "mean_half_width": round(float(half.mean()), 4),
        "mean_half_width_of_the_true_noise": round(1.6449 * float(test_noise.mean()), 4),
        "error_of_the_mean": round(float((intervals.mean - test_mean).square().mean().sqrt()), 4),
        "fit_in_epochs": round(seconds / epoch, 1),
        "milliseconds_per_predicted_field": round(1e3 * predicting / n_test, 1),
        "peak_memory_gb": round(peak_memory(), 2),
    }
    return about, (test_mean[0, 0], (test_y - intervals.mean)[0, 0].abs(), half[0, 0], 1.6449 * test_noise[0, 0])


def sea() -> tuple[Tensor, Tensor]:
    """Return windows of standardised anomalies with the season, (n, MONTHS, 2), and the months after them."""
    from statsmodels.datasets import elnino

    table = elnino.load_pandas().data.to_numpy()[:, 1:]
    series = torch.tensor((table - table[:40].mean(axis=0)).ravel() / table[:40].std(), dtype=torch.float32)
    season = torch.sin(torch.arange(len(series)) * 2 * torch.pi / 12)
    both, n = torch.stack([series, season], dim=1), len(series) - MONTHS - HORIZONS + 1
    x = torch.stack([both[i : i + MONTHS] for i in range(n)])
    return x, torch.stack([series[i + MONTHS : i + MONTHS + HORIZONS] for i in range(n)])


def lstm(epochs: int) -> Iterator[dict[str, Any]]:
    """Train on the first half, calibrate on the next quarter, and yield coverage by horizon on the last."""
    torch.manual_seed(0)
    x, y = sea()
    a, b = len(x) // 2, 3 * len(x) // 4
    model = Forecaster()
    trained(model, x[:a], y[:a], mse_loss, epochs, 1e-3)
    band = PredictionIntervals(model, weight_decay=1e-3).fit(x[:a], y[:a], progress=False)
    found = {"formula": band.predict(x[b:], LEVEL)}
    for joint in ("horizon", True):
        band.calibrate(x[a:b], y[a:b], joint=joint)
        found["one quantile per horizon" if joint == "horizon" else "all horizons at once"] = band.predict(x[b:], LEVEL)
    for name, intervals in found.items():
        inside, widths = np.asarray(metrics.coverage(y[b:], intervals)), np.asarray(intervals.width.mean(dim=0))
        for h in range(HORIZONS):
            yield {
                "method": name,
                "horizon": h + 1,
                "coverage": round(float(inside[h]), 4),
                "width": round(float(widths[h]), 4),
            }
        together = float(intervals.contains(y[b:]).all(dim=1).double().mean())
        yield {"method": name, "horizon": "all at once", "coverage": round(together, 4), "width": ""}


def picture(path: Path, maps: tuple[Tensor, ...]) -> None:
    from matplotlib import pyplot as plt

    titles = ("true mean", "|observed − predicted|", "half width, 90 %", "that of the true noise")
    figure, axes = plt.subplots(1, 4, figsize=(11, 2.9), layout="constrained")
    largest = float(max(each.max() for each in maps[2:]))
    for ax, title, values in zip(axes, titles, maps, strict=True):
        ax.set(title=title, xticks=[], yticks=[])
        limits = {} if title == titles[0] else {"vmin": 0.0, "vmax": largest}
        figure.colorbar(ax.imshow(values.numpy(), cmap="viridis", **limits), ax=ax, shrink=0.7)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser("python -m experiments fields", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--small", action="store_true", help="a minute's version of it, whose figures say little")
    parser.add_argument("--part", choices=["unet", "lstm", "both"], default="both")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    measured, horizons = given.out / "fields.json", given.out / "horizons.csv"
    if given.part != "lstm" and not measured.exists():
        sizes = (2, 20, 16, 4, 16) if given.small else (60, 400, 270, 60, 320)
        about, maps = unet(*sizes)
        picture(given.out / "fields.png", maps)
        measured.write_text(json.dumps(about, indent=2) + "\n")
    if given.part != "unet" and not horizons.exists():
        rows = list(lstm(2 if given.small else 40))
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        horizons.write_text("\n".join(lines) + "\n")
    print("\n".join(path.read_text() for path in (measured, horizons) if path.exists()))
