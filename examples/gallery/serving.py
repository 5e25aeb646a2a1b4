"""
One file for production
=======================

A band can be written as one program that maps inputs to mean and bounds. It runs where torch runs, without deltaband
and without the code of the model: network, covariance and calibration are inside.
"""

# %%
# A network, and rows with a hole in the middle.

from pathlib import Path
from tempfile import mkdtemp

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

from deltaband import PredictionIntervals, RandomProjection

rng = np.random.default_rng(0)
x = rng.uniform(-3, 3, (1500, 2))
x = x[np.abs(np.hypot(*x.T) - 1.2) > 0.7][:900]
X = torch.tensor(x, dtype=torch.float32)
y = torch.sin(2 * X[:, 0]) * torch.cos(X[:, 1]) + 0.1 * torch.tensor(rng.normal(size=len(X)), dtype=torch.float32)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-5)
for _ in range(500):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(X[:600])[:, 0], y[:600]).backward()
    optimizer.step()

band = PredictionIntervals(model, weight_decay=1e-5, engine=RandomProjection(100))
band.fit(X[:600], y[:600], progress=False).calibrate(X[600:], y[600:], noise="none")
path = Path(mkdtemp()) / "band.pt2"
band.export(path, levels=[0.9])

# %%
# From here on nothing but torch is needed. The answers are those of ``predict``.

program = torch.export.load(path).module()
side = torch.linspace(-3, 3, 81)
plane = torch.cartesian_prod(side, side)
with torch.no_grad():
    mean, lower, upper = program(plane)
difference = (upper[:, 0] - band.predict(plane, level=0.9).upper).abs().max().item()
print(f"{len(plane):,} rows; the bounds differ by at most {difference:.1e}")

# %%
# Both pictures were computed by the file.

figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained", sharey=True)
width = (upper - lower)[:, 0]
for ax, values, title in zip(axes, (mean, width), ("prediction", "width of the 90 % interval"), strict=True):
    image = ax.pcolormesh(side.numpy(), side.numpy(), values.reshape(81, 81).T.numpy(), cmap="viridis")
    ax.scatter(*x[:600].T, s=3, color="white", alpha=0.7)
    ax.set(title=title, aspect="equal")
    figure.colorbar(image, ax=ax)
plt.show()
