"""
Several outputs at once
=======================

A network learns where the hand of a robot arm is, from the angles of its two joints. Both coordinates should be right
at once, so each prediction gets a box.
"""

# %%
# The arm has been measured for a part of the angles only.

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import Rectangle
from torch import nn

from deltaband import PredictionIntervals

rng = np.random.default_rng(0)


def measured(angles):
    first, both = angles[:, 0], angles.sum(axis=1)
    hand = np.stack([np.cos(first) + 0.8 * np.cos(both), np.sin(first) + 0.8 * np.sin(both)], axis=1)
    return torch.tensor(angles), torch.tensor(hand + 0.02 * rng.normal(size=hand.shape))


X, Y = measured(rng.uniform(0, 1.6, (600, 2)))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 2)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2, weight_decay=1e-5)
for _ in range(400):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(X[:400]), Y[:400]).backward()
    optimizer.step()

# %%
# ``joint=True`` makes boxes that hold both coordinates at once with the probability asked for.

band = PredictionIntervals(model, weight_decay=1e-5).fit(X[:400], Y[:400], progress=False)
band.calibrate(X[400:], Y[400:], joint=True, noise="none")


def inside(x, y):
    return band.predict(x, level=0.9).contains(y).all(dim=1).double().mean().item()


X_new, Y_new = measured(rng.uniform(0, 1.6, (1000, 2)))
share = inside(X_new, Y_new)
print(f"{share:.0%} of the new hands are in their boxes")

# %%
# The arm swings on, out of the angles that were measured. The boxes grow more than tenfold along the way, and in the
# end the network is wrong by more than that: what lies outside the data is told, not promised.

swing = np.stack([np.full(26, 0.8), np.linspace(0.1, 2.9, 26)], axis=1)
x, hand = measured(swing)
boxes = band.predict(x, level=0.9)
area = boxes.width.prod(dim=1)
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
left.scatter(*Y[:400].T.numpy(), s=6, color="lightgrey", label="training rows")
for lower, upper, known in zip(boxes.lower, boxes.upper, swing[:, 1] <= 1.6, strict=True):
    colour = "tab:blue" if known else "tab:orange"
    left.add_patch(Rectangle(lower.tolist(), *(upper - lower).tolist(), fill=False, color=colour))
left.plot(*hand.T.numpy(), "k.", markersize=4, label="where the hand was")
left.set(title="boxes that hold both coordinates", xlabel="x", ylabel="y", aspect="equal")
left.legend(frameon=False, loc="lower left")
right.semilogy(swing[:, 1], area.numpy(), color="black")
right.axvspan(1.6, swing[-1, 1], color="tab:orange", alpha=0.2, label="never measured")
right.set(title="area of the box", xlabel="angle of the second joint")
right.legend(frameon=False, loc="upper left")
plt.show()
