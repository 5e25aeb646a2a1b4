"""What learnt noise costs in `calibrate` and `predict`: `python -m benchmarks.calibration`.

Everything is measured in turn in one process, as ratios. "Before" is a calibration without learnt noise, 71 candidate
scales, whose lower envelope is found by comparing all pairs of them; "after" has 355 candidates and walks along it.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import numpy as np
import torch

from deltaband import DeltabandWarning, PredictionIntervals
from deltaband.calibration import ConformalScale, Scales

from .measure import Report, Result, gflops, limited_to, race
from .problem import perceptron

HERE = Path(__file__).parent
N_TRAINING, N_CALIBRATION, N_NEW, LEVEL = 2000, 600, 600, 0.9


def all_pairs(scale: ConformalScale, q: np.ndarray, level: float) -> np.ndarray:
    """The upper bounds of rows, each candidate's stretch of the envelope found by comparing it with all others."""
    n, squared = len(scale.signed), scale.scales.squared(q)
    quantiles = np.sort(np.abs(scale.signed), axis=0)[int(np.ceil((n + 1) * level - 1e-9)) - 1]
    weight = np.exp((scale.log_weight + np.log(squared)) / (n + 1))
    a, d = scale.sum_squares * weight, weight / squared
    height, slope = a[:, None, :] - a[:, :, None], d[:, :, None] - d[:, None, :]  # of each candidate over each other
    with np.errstate(divide="ignore", invalid="ignore"):
        crossing = height / slope
    start = np.where(slope < 0, crossing, 0.0).max(axis=2)
    end = np.where(slope > 0, crossing, np.inf).min(axis=2)
    start = np.where(((slope == 0) & (height < 0)).any(axis=2), np.inf, np.maximum(start, 0.0))
    cut = np.sqrt(squared) * quantiles
    reached = np.where((start <= end) & (cut >= np.sqrt(start)), np.minimum(np.sqrt(np.maximum(end, 0)), cut), 0.0)
    return scale.unit * reached.max(axis=1)


def scales(n: int, learnt: bool) -> tuple[ConformalScale, np.ndarray]:
    """A calibration on n rows, and what is known of as many new ones."""
    rng = np.random.default_rng(0)
    eigenvalues = 10.0 ** np.linspace(3, -4, 200)
    candidates = Scales.grid(eigenvalues, N_TRAINING)
    z2, e = rng.standard_normal((2 * n, 200)) ** 2 * eigenvalues, eigenvalues[:, None]
    q = z2 @ (e / (e + candidates.dampings) ** 2) / N_TRAINING
    r = rng.standard_normal(n) * np.sqrt(1 + 50 * q[:n, 4])
    if learnt:
        candidates, q = candidates.with_noise(), np.column_stack([q, rng.normal(scale=0.3, size=2 * n)])
    return ConformalScale.fit(r, q[:n], candidates), q[n:]


def envelope(report: Report, threads: int) -> None:
    (plain, q), (learnt, with_noise) = scales(N_NEW, False), scales(N_NEW, True)
    np.testing.assert_allclose(all_pairs(plain, q, LEVEL), plain.bounds(q, (LEVEL,))[1][:, 0], rtol=1e-9)
    pairs, walk, long_walk = race(
        lambda: all_pairs(plain, q, LEVEL),
        lambda: plain.bounds(q, (LEVEL,)),
        lambda: learnt.bounds(with_noise, (LEVEL,)),
        repeats=7,
    )
    details = {"rows": N_NEW, "71 pairs s": pairs, "71 walk s": walk, "355 walk s": long_walk}
    claim = "bounds with 355 candidates, by a walk, over those with 71 by all pairs"
    report.add("envelope", threads, Result(claim, long_walk / pairs, at_most=2.0, details=details))


def whole(report: Report, threads: int) -> None:
    torch.manual_seed(0)
    X = torch.randn(N_TRAINING + N_CALIBRATION + N_NEW, 10)
    y = X[:, 0].sin() + (0.1 + 0.3 * (X[:, 1] > 0)) * torch.randn(len(X))
    training, held, new = X.split([N_TRAINING, N_CALIBRATION, N_NEW])
    targets = y[N_TRAINING : N_TRAINING + N_CALIBRATION]
    model = perceptron(10, 50, 50, 1)
    bands = {}
    for noise in ("none", "auto"):
        bands[noise] = PredictionIntervals(model, damping=1.0).fit(training, y[:N_TRAINING], progress=False)
        bands[noise].calibrate(held, targets, noise=noise)
    fit, plain, learnt = race(
        lambda: PredictionIntervals(model, damping=1.0).fit(training, y[:N_TRAINING], progress=False),
        lambda: bands["none"].calibrate(held, targets, noise="none"),
        lambda: bands["auto"].calibrate(held, targets, noise="auto"),
    )
    details = {"n": N_TRAINING, "p": bands["auto"].n_parameters_, "fit s": fit, "none s": plain, "auto s": learnt}
    report.add(
        "calibrate", threads, Result("calibrate with learnt noise over without", learnt / plain, details=details)
    )
    report.add("calibrate over fit", threads, Result("calibrate with learnt noise over the fit", learnt / fit))
    for rows in (1, N_NEW):
        x = new[:rows]
        plain, learnt = race(
            lambda x=x: bands["none"].predict(x), lambda x=x: bands["auto"].predict(x), repeats=20 if rows == 1 else 7
        )
        details = {"none ms": 1e3 * plain, "auto ms": 1e3 * learnt}
        claim = f"predict of {rows} row{'s'[: rows > 1]} with learnt noise over without"
        report.add(f"predict {rows}", threads, Result(claim, learnt / plain, at_most=2.0, details=details))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calibration", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for calibration.md and .json")
    options = parser.parse_args()
    warnings.simplefilter("ignore", DeltabandWarning)
    report = Report(options.out, "calibration", "What learnt noise costs", keep=False)
    for threads in (1, 2):
        with limited_to(threads):
            report.gflops[str(threads)] = {"float32": gflops(torch.float32), "float64": gflops(torch.float64)}
            envelope(report, threads)
            whole(report, threads)


if __name__ == "__main__":
    main()
