"""ACP-GN's protocol on the Boston data, its published figures beside ours: `python -m benchmarks.outside boston`.

The protocol of Tailor et al. (ICLR 2025) and their code: ten-fold cross-validation, again for each seed; a network with
one hidden layer of 50 GELU units; 5 000 epochs of Adam in batches of 256, the rate falling from 1e-2 to 1e-5 along a
cosine; λ and the noise by the marginal likelihood of a Laplace approximation while it trains, every 50 epochs after the
first 100. Methods without held-out rows train on all rows but the fold's; the others hold some of these out. Widths are
in thousands of dollars. Differences: the likelihood is maximised by MacKay's fixed point (they take gradient steps),
every 250 epochs; and the seeds are fewer.

- split: split conformal, constant width; SCP-GN: its scale √(1 + h);
- Laplace: the posterior predictive, σ·√(1 + h);
- formula: `predict` without `calibrate`, from all rows;
- calibrate: `calibrate` on the same held-out rows, with learnt noise or without.

Their code holds out a half by default, and also a quarter; which of these a published figure is for could not be found
out, so it stands beside both.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pandas as pd
import torch
from scipy.stats import norm
from torch import Tensor, nn

from deltaband import Intervals, PredictionIntervals
from experiments import data
from experiments.protocol import Samples, standardised

from .table import Cell, fill, lines, scaled, scores

LEVEL = 0.95
FOLDS, SEEDS = 10, 3
HIDDEN, EPOCHS, BATCH = 50, 5_000, 256
RATES = 1e-2, 1e-5
BEGIN, EVERY = 100, 250  # of epochs, when λ is chosen
KEY = ("seed", "held_out")
HELD_OUT = {"none": 0.0, "half": 0.5, "a quarter": 0.25}
PUBLISHED = {  # Boston, 95 %: coverage and width
    "split": (94.6, 14.51),
    "SCP-GN": (94.8, 13.42),
    "CQR": (95.1, 15.12),
    "ACP-GN": (95.45, 12.22),
    "Laplace": (94.2, 11.19),
}


class Networks:
    """m networks of one hidden layer, trained at once, each with its λ."""

    def __init__(self, x: Tensor, y: Tensor, seed: int) -> None:  # (m, n, d), (m, n)
        self.x, self.y = x, y
        torch.manual_seed(seed)
        m, _, d = x.shape
        self.modules = [nn.Sequential(nn.Linear(d, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 1)) for _ in range(m)]
        pairs = zip(*(module.parameters() for module in self.modules), strict=True)
        self.weights = [torch.stack([w.detach() for w in each]).requires_grad_() for each in pairs]
        self.damping = torch.ones(m, dtype=torch.float64)
        self.noise = torch.ones(m, dtype=torch.float64)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:  # -> before the units (m, b, 50), outputs (m, b)
        W, b, v, c = self.weights
        z = torch.baddbmm(b[:, None], x, W.mT)
        return z, (nn.functional.gelu(z) @ v.mT + c[:, None])[:, :, 0]

    def train(self) -> list[nn.Sequential]:
        optimiser = torch.optim.Adam(self.weights, lr=RATES[0], fused=True)
        n = self.y.shape[1]
        for epoch in range(EPOCHS):
            cosine = (1 + math.cos(math.pi * epoch / EPOCHS)) / 2
            optimiser.param_groups[0]["lr"] = RATES[1] + (RATES[0] - RATES[1]) * cosine
            order = torch.rand(self.y.shape).argsort(dim=1)
            for batch in order.split(BATCH, dim=1):
                _, outputs = self(self.x.gather(1, batch[:, :, None].expand(-1, -1, self.x.shape[2])))
                squares = (outputs - self.y.gather(1, batch)).square().mean(dim=1)
                penalty = sum(w.square().flatten(1).sum(dim=1) for w in self.weights)
                optimiser.zero_grad()
                (squares + self.damping.float() / n * penalty).sum().backward()
                optimiser.step()
            if epoch >= BEGIN and (epoch - BEGIN) % EVERY == 0:
                self.choose()
        self.choose(noise_only=True)
        for i, module in enumerate(self.modules):
            for w, mine in zip(module.parameters(), self.weights, strict=True):
                w.data.copy_(mine[i].detach())
        return self.modules

    @torch.no_grad()
    def choose(self, noise_only: bool = False) -> None:
        """λ = σ²δ of greatest evidence for the linearised network: δ = γ/‖w‖², σ² = RSS/(n − γ)."""
        z, outputs = self(self.x)
        rss = (outputs - self.y).double().square().sum(dim=1)
        norm2 = sum(w.double().square().flatten(1).sum(dim=1) for w in self.weights)
        eigenvalues = torch.linalg.eigvalsh(self.kernel(z)).clamp(min=0.0)
        damping, n = self.damping, self.y.shape[1]
        for _ in range(20):
            determined = (eigenvalues / (eigenvalues + damping[:, None])).sum(dim=1)
            noise = rss / (n - determined).clamp(min=1.0)
            damping = noise * determined / norm2
        self.noise = noise.sqrt()
        if not noise_only:
            self.damping = damping

    def kernel(self, z: Tensor) -> Tensor:
        """JJᵀ (m, n, n): layer by layer a product of the inner products of what goes in and what comes back."""
        slope = torch.distributions.Normal(0.0, 1.0)
        derivative = slope.cdf(z) + z * slope.log_prob(z).exp()
        back = (derivative * self.weights[2]).double()
        x, units = self.x.double(), nn.functional.gelu(z).double()
        return (back @ back.mT) * (1 + x @ x.mT) + 1 + units @ units.mT


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    for _, X, y in data.Available(["boston"], options.data):
        for seed in range(1, SEEDS + 1):
            for held_out, share in HELD_OUT.items():
                yield (seed, held_out), partial(rows, X, y, seed, share)


def rows(X: np.ndarray, y: np.ndarray, seed: int, share: float) -> list[dict[str, object]]:
    """The methods that hold out so many rows: means over the folds."""
    rng = np.random.default_rng(seed)
    folds = np.array_split(rng.permutation(len(y)), FOLDS)
    others = [rng.permutation(np.concatenate([*folds[:k], *folds[k + 1 :]])) for k in range(FOLDS)]
    least = min(map(len, others))  # of as many rows each, to be trained at once
    held = int(share * least)
    parts, units = [], []
    for other, fold in zip(others, folds, strict=True):
        training = other[held:least]
        parts.append(
            standardised(X, y, training, other[:held], fold) if held else [*standardised(X, y, training, fold)]
        )
        units.append(float(y[training].std()))
    x, t = (torch.from_numpy(np.stack([part[0][i] for part in parts])) for i in (0, 1))
    networks = Networks(x, t, seed)
    found: dict[str, list[dict[str, float]]] = {}
    for i, module in enumerate(networks.train()):
        damping, noise = networks.damping[i].item(), networks.noise[i].item()
        of_fold = split_methods(module, damping, *parts[i]) if held else all_rows(module, damping, noise, *parts[i])
        for name, intervals in of_fold.items():
            of_name = scores(parts[i][-1].y, intervals)
            in_units = {k: v if k == "coverage" else v * units[i] for k, v in of_name.items()}
            found.setdefault(name, []).append(in_units)
    return [
        {"method": name} | {column: float(np.mean([each[column] for each in cells])) for column in cells[0]}
        for name, cells in found.items()
    ]


def all_rows(module: nn.Sequential, damping: float, noise: float, training: Samples, test: Samples) -> dict:
    band = PredictionIntervals(module, damping=damping).fit(*training, progress=False)
    mean = band.predict_mean(test.x)
    half = norm.ppf((1 + LEVEL) / 2) * noise * np.sqrt(1 + band.leverage(test.x))
    return {"Laplace": Intervals(mean, mean - half, mean + half, LEVEL), "formula": band.predict(test.x, LEVEL)}


def split_methods(module: nn.Sequential, damping: float, training: Samples, held: Samples, test: Samples) -> dict:
    band = PredictionIntervals(module, damping=damping).fit(*training, progress=False)
    residuals, mean = held.y - band.predict_mean(held.x), band.predict_mean(test.x)
    scales = [np.sqrt(1 + band.leverage(part.x)) for part in (held, test)]
    found = {
        "split": scaled(residuals, 1.0, mean, 1.0, LEVEL),
        "SCP-GN": scaled(residuals, scales[0], mean, scales[1], LEVEL),
        "calibrate": band.calibrate(*held).predict(test.x, LEVEL),
    }
    return found | {"calibrate, no noise": band.calibrate(*held, noise="none").predict(test.x, LEVEL)}


def markdown(table: pd.DataFrame) -> str:
    shown = []
    for (held_out, method), part in table.groupby(["held_out", "method"], sort=False):
        coverage, width = PUBLISHED.get(method, (None, None))
        shown.append(
            {
                "held out": held_out,
                "method": method,
                "width": f"{part.width.mean():.2f} ± {part.width.sem() if len(part) > 1 else 0:.2f}",
                "coverage": f"{100 * part.coverage.mean():.1f} %",
                "interval score": f"{part.score.mean():.2f}",
                "published width": "–" if width is None else f"{width:.2f}",
                "published coverage": "–" if coverage is None else f"{coverage:.1f} %",
            }
        )
    for held_out, method in (("none", "ACP-GN"), ("half", "CQR")):
        coverage, width = PUBLISHED[method]
        only = {"published width": f"{width:.2f}", "published coverage": f"{coverage:.1f} %"}
        shown.append({"held out": held_out, "method": method} | dict.fromkeys(list(shown[0])[2:5], "not run") | only)
    return "\n".join(
        [
            "# ACP-GN's protocol on the Boston data, 95 %",
            "",
            f"Widths in thousands of dollars, mean and standard error over {table.seed.nunique()} seeds of "
            f"{FOLDS} folds; published: over 10 seeds. `python -m benchmarks.outside boston --data DIR`.",
            "",
            *lines(pd.DataFrame(shown)),
            "",
        ]
    )


def main(arguments: Sequence[str]) -> None:
    fill("boston", __doc__ or "", KEY, cells, markdown, arguments)
