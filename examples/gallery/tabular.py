"""
A table of numbers
==================

Ten measurements of 442 patients predict how far diabetes has progressed a year later. The noise is large, so a number
without an interval says little. A network is trained as usual, with AdamW and a validation set to stop it, and gets
intervals afterwards.
"""

# %%
# Three parts: training, calibration, and rows that neither sees. The network works on scaled data.

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import nn

from deltaband import PredictionIntervals, plots

X, y = load_diabetes(return_X_y=True)
train, held_out, new = np.split(np.random.default_rng(0).permutation(len(y)), [240, 340])
X = (X - X[train].mean(axis=0)) / X[train].std(axis=0)
centre, scale = y[train].mean(), y[train].std()
z = (y - centre) / scale
inputs, targets = torch.tensor(X[train]), torch.tensor(z[train])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-2)
for _ in range(60):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs)[:, 0], targets).backward()
    optimizer.step()

# %%
# ``fit`` reads the training rows once, ``calibrate`` the rows that were held out. From then on a 90 % interval holds
# the truth for nine of ten patients like these, whatever the network has or has not learnt. ``target_transform`` takes
# answers back to the units of the study.

band = PredictionIntervals(model, target_transform=(centre, scale))
band.fit(X[train], z[train], progress=False).calibrate(X[held_out], z[held_out])
intervals = band.predict(X[new], level=0.9)
covered = intervals.contains(y[new])
print(f"{covered.mean():.0%} of {len(new)} new patients are inside")

# %%
# On the left each new patient with the interval, sorted by its width; on the right the intervals around the
# predictions, against what came.

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
plots.sorted_by_width(y[new], intervals, ax=left)
order = np.argsort(y[new])
errors = np.stack([intervals.mean - intervals.lower, intervals.upper - intervals.mean])
for rows, colour in ((covered, "tab:blue"), (~covered, "tab:red")):
    right.errorbar(y[new][rows], intervals.mean[rows], errors[:, rows], fmt="o", ms=4, color=colour, alpha=0.6)
right.axline((150, 150), slope=1, color="grey", linestyle=":")
right.set(xlabel="progression after a year", ylabel="predicted, with 90 % interval")
plt.show()
