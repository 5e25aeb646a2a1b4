"""
An LSTM forecast through a crisis
=================================

Forecasts of a series are not exchangeable: the intervals of a calibration made in quiet years are too narrow when a
crisis comes. Online intervals watch how earlier ones have fared, and widen.
"""

# %%
# The turnover of the euro area's makers of electrical equipment comes with statsmodels. From twelve months of growth
# the network forecasts the thirteenth. It is trained up to 2002 and calibrated up to 2007.

import matplotlib.pyplot as plt
import numpy as np
import torch
from statsmodels.datasets import elec_equip
from torch import nn

from deltaband import PredictionIntervals

growth = np.log(elec_equip.load().data.iloc[:, 0]).diff(12).dropna()
scale = growth[:"2002"].std()
z = torch.tensor(growth.to_numpy() / scale)
X, y, months = z.unfold(0, 12, 1)[:-1, :, None], z[12:], growth.index[12:]
train, held_out, new = slice(0, 72), slice(72, 132), slice(132, None)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


torch.manual_seed(0)
model = Forecaster().double()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2, weight_decay=1e-3)
for _ in range(150):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(X[train])[:, 0], y[train]).backward()
    optimizer.step()

band = PredictionIntervals(model, weight_decay=1e-3).fit(X[train], y[train], progress=False)
band.calibrate(X[held_out], y[held_out], noise="none")

# %%
# ``replay`` forecasts month by month, each with what is known by then. The first intervals are of fixed width.

fixed = band.predict(X[new], level=0.9)
online = band.online(0.9, "aci").replay(X[new], y[new])
crisis = slice(9, 33)  # October 2008 to September 2010
shares = {}
for name, intervals in (("fixed", fixed), ("online", online)):
    inside = intervals.contains(y[new]).double()
    shares[name] = (inside[crisis].mean().item(), inside.mean().item())
    print(f"{name}: {shares[name][0]:.0%} covered in the crisis, {shares[name][1]:.0%} of all months")

# %%
# Growth over a year, with 90 % intervals.

figure, axes = plt.subplots(2, 1, figsize=(10, 5.5), layout="constrained", sharex=True, sharey=True)
for ax, (name, intervals) in zip(axes, (("fixed", fixed), ("online", online)), strict=True):
    mean, lower, upper = (100 * scale * part.numpy() for part in intervals)
    actual = 100 * growth.to_numpy()[12:][new]
    missed = ~intervals.contains(y[new]).numpy()
    ax.fill_between(months[new], np.maximum(lower, -60), np.minimum(upper, 60), color="tab:blue", alpha=0.25)
    ax.plot(months[new], mean, color="tab:blue", label="forecast")
    ax.plot(months[new], actual, color="black", linewidth=1, label="actual")
    ax.plot(months[new][missed], actual[missed], "o", color="tab:red", markersize=5, label=f"missed: {missed.sum()}")
    ax.set(title=f"{name} calibration", ylabel="growth, per cent", ylim=(-50, 50))
    ax.legend(frameon=False, ncols=3, loc="lower right")
plt.show()
