"""
Every group covered, and a world that has shifted
=================================================

Nine of ten on average can be ten of ten at one site and seven of ten at another. And nine of ten among the customers of
last year says little about those of this year. ``calibrate`` takes both into account.
"""

# %%
# Four sites of different noise; all but the first are small.

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

from deltaband import PredictionIntervals

rng = np.random.default_rng(0)
NOISE = np.array([0.1, 0.2, 0.35, 0.6])


def drawn(n, towards=0.0):
    x = rng.normal(size=(n, 3))
    x[:, 0] += towards
    site = rng.choice(4, n, p=[0.55, 0.15, 0.15, 0.15])
    y = np.sin(x.sum(axis=1)) + NOISE[site] * rng.normal(size=n) * np.where(x[:, 0] > 0.7, 3, 1)
    return torch.tensor(x), torch.tensor(y), site


X, y, _ = drawn(500)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 1)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-2)
for _ in range(300):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(X)[:, 0], y).backward()
    optimizer.step()
band = PredictionIntervals(model, weight_decay=1e-2).fit(X, y, progress=False)

# %%
# First the sites. ``groups=`` calibrates each by its own rows.

X_held, y_held, site_held = drawn(1000)
X_new, y_new, site_new = drawn(4000)


def by_site(intervals):
    inside = intervals.contains(y_new).numpy()
    return np.array([inside[site_new == site].mean() for site in range(4)])


pooled = by_site(band.calibrate(X_held, y_held, noise="none").predict(X_new, level=0.9))
band.calibrate(X_held, y_held, noise="none", groups=site_held)
grouped = by_site(band.predict(X_new, level=0.9, groups=site_new))

# %%
# Then the shift: new rows have a larger first feature, where the noise is larger. Calibration rows that look like the
# new ones count more with ``target=``, the inputs of new rows, whose targets nobody knows yet.

sizes = np.array([0.0, 0.2, 0.4, 0.6, 0.8])
plain, weighted = [], []
for size in sizes:
    X_shifted, y_shifted, _ = drawn(2000, size)
    band.calibrate(X_held, y_held, noise="none")
    plain.append(band.predict(X_shifted, level=0.9).contains(y_shifted).double().mean().item())
    band.calibrate(X_held, y_held, noise="none", target=X_shifted)
    weighted.append(band.predict(X_shifted, level=0.9).contains(y_shifted).double().mean().item())

# %%
# What was covered of what was asked.

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
for offset, shares, colour, name in (
    (-0.2, pooled, "grey", "calibrate(x, y)"),
    (0.2, grouped, "tab:blue", "calibrate(x, y, groups=site)"),
):
    left.bar(np.arange(4) + offset, shares, 0.4, color=colour, label=name)
left.set(xticks=range(4), xlabel="site, from quiet to loud", ylabel="share covered", ylim=(0.5, 1.1))
right.plot(sizes, plain, "o-", color="grey", label="calibrate(x, y)")
right.plot(sizes, weighted, "o-", color="tab:blue", label="calibrate(x, y, target=x_new)")
right.set(xlabel="size of the shift, standard deviations")
for ax in (left, right):
    ax.axhline(0.9, color="black", linestyle=":", linewidth=1)
    ax.legend(frameon=False, loc="upper center", ncols=2, fontsize=9)
plt.show()
