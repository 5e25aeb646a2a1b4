"""A report of every kind, as files."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from deltaband import ImportantDirections, Intervals, PredictionIntervals, report

HOSTILE = "</script><script>document.title='taken'</script>\"'<b>"


def network(n_outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, n_outputs)).double()


def make(folder: Path) -> tuple[dict[str, Path], Intervals, np.ndarray]:
    """The files by name, and the intervals and targets of the plain one."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 3))
    y = np.sin(X.sum(axis=1)) + 0.1 * rng.normal(size=300)
    train, held, new = slice(0, 100), slice(100, 140), slice(140, 300)
    columns = {
        "number": np.concatenate([[np.nan, 9.0, 10.0, -2.0], rng.normal(size=156)]),
        "text": [f"kind {k % 3}" for k in range(160)],
        HOSTILE: [HOSTILE] * 160,
    }
    band = PredictionIntervals(network(), damping=1.0).fit(X[train], y[train], progress=False)
    calibrated = PredictionIntervals(network()).fit(X[train], y[train], progress=False).calibrate(X[held], y[held])
    Y = np.stack([y, 2 * y, X[:, 0]], axis=1)
    several = PredictionIntervals(network(3), damping=1.0, engine=ImportantDirections(50))
    several.fit(X[train], Y[train], progress=False)
    monitor = calibrated.monitor(0.9, window=50)
    monitor.update(X[new], y[new] + np.linspace(0, 1, 160))
    made = {
        "plain": report.page(band, X[new], y[new], columns=columns, title=f"Held-out rows {HOSTILE}"),
        "calibrated": report.page(calibrated, X[new], y[new], level=0.9, monitor=monitor),
        "outputs": report.page(several, X[new], Y[new], outputs=["load", "torque", HOSTILE]),
    }
    files = {name: folder / f"{name}.html" for name in made}
    for name, text in made.items():
        files[name].write_text(text, encoding="utf-8")
    return files, band.predict(X[new]), y[new]
