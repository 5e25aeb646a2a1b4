"""
A classifier that can say that it has not seen this
===================================================

A softmax is sure of itself far away from all data. Three other numbers help: the interval of a probability, the set of
labels that a calibration allows, and the leverage, which asks whether the network has seen anything like this.
"""

# %%
# Three classes that overlap a little.

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

from deltaband import ClassificationIntervals

rng = np.random.default_rng(0)
centres = np.array([[-1.2, -0.8], [1.2, -0.8], [0.0, 1.2]])
labels = rng.integers(0, 3, 900)
X = torch.tensor(centres[labels] + 0.6 * rng.normal(size=(900, 2)))
y = torch.tensor(labels)
train, held_out, new = slice(0, 400), slice(400, 600), slice(600, 900)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 3)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-3)
for _ in range(400):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(X[train]), y[train]).backward()
    optimizer.step()

band = ClassificationIntervals(model, weight_decay=1e-3, classes="predicted")
band.fit(X[train], y[train], progress=False)
whole = ClassificationIntervals(model, weight_decay=1e-3).fit(X[train], y[train], progress=False)
sets = whole.calibrate(X[held_out], y[held_out]).predict_set(X[new], level=0.95)
held = sets[torch.arange(300), y[new]].double().mean().item()
print(f"{held:.0%} of the sets hold the true label; a set has {sets.sum(dim=1).double().mean():.2f} labels on average")

# %%
# The same plane four times, for the class that is predicted. The softmax is sure of nearly all of it, also where there
# are no data. The interval opens around the borders between the classes, the more the further out; sets have two labels
# along them; and the leverage grows away from the data, wherever the borders are.

side = torch.linspace(-5, 5, 61, dtype=torch.float64)
plane = torch.cartesian_prod(side, side)
interval = band.predict(plane, level=0.95).probability
pictures = {
    "probability": interval.mean,
    "width of its interval": interval.width,
    "labels in the set": whole.predict_set(plane, level=0.95).sum(dim=1),
    "leverage, logarithm": band.leverage(plane).log10(),
}
figure, axes = plt.subplots(1, 4, figsize=(12, 4.4), layout="constrained", sharey=True)
for ax, (title, values) in zip(axes, pictures.items(), strict=True):
    image = ax.pcolormesh(side.numpy(), side.numpy(), values.reshape(61, 61).T.numpy(), cmap="viridis")
    ax.scatter(*X[train].T.numpy(), s=2, c=np.array(["white", "tab:red", "black"])[labels[train]])
    ax.set(title=title, aspect="equal")
    figure.colorbar(image, ax=ax, location="bottom", shrink=0.9)
plt.show()
