"""
Where to measure next
=====================

An experiment is expensive, and its best setting is wanted with few of them. The network's prediction says where the
result is likely to be high, its leverage where it knows nothing: an upper confidence bound puts both together.
"""

# %%
# The experiment has two peaks, and four settings have been tried.

import warnings

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

from deltaband import PredictionIntervals
from deltaband.errors import UnreliableFormulaWarning

warnings.simplefilter("ignore", UnreliableFormulaWarning)  # four rows do not tell the noise: here it is known
NOISE, DECAY = 0.02, 1e-3
rng = np.random.default_rng(0)
grid = torch.linspace(0, 1, 201, dtype=torch.float64)[:, None]


def truth(x):
    return 0.6 * torch.exp(-(((x - 0.25) / 0.12) ** 2)) + torch.exp(-(((x - 0.8) / 0.08) ** 2))


def experiment(x):
    return truth(x)[:, 0] + NOISE * torch.tensor(rng.normal(size=len(x)))


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(1, 60), nn.Linear(60, 1)
        nn.init.normal_(self.first.weight, std=12.0)
        nn.init.uniform_(self.first.bias, -np.pi, np.pi)

    def forward(self, x):
        return self.head(torch.sin(self.first(x)) / 6)


def trained(x, y):
    torch.manual_seed(0)
    model = Waves().double()
    model.first.requires_grad_(False)
    optimizer = torch.optim.LBFGS(model.head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        value = ((model(x)[:, 0] - y) ** 2).sum() + DECAY * sum(w.square().sum() for w in model.head.parameters())
        value.backward()
        return value

    optimizer.step(loss)
    return model


# %%
# After each experiment the network is trained anew, and the next setting is where the bound is highest. The leverage
# in units of the noise is the posterior variance; λ is the penalty that the network was trained with.

X = torch.tensor([[0.05], [0.3], [0.5], [0.95]], dtype=torch.float64)
y = experiment(X)
steps = []
for _ in range(8):
    model = trained(X, y)
    band = PredictionIntervals(model, damping=DECAY).fit(X, y, progress=False)
    mean = band.predict_mean(grid).flatten().numpy()
    spread = NOISE * band.leverage(grid).flatten().sqrt().numpy()
    chosen = grid[(mean + 2 * spread).argmax()][None]
    steps.append((X, y, mean, spread, chosen))
    X, y = torch.cat([X, chosen]), torch.cat([y, experiment(chosen)])
best = X[y.argmax()].item()
print(f"the best setting found is {best:.2f}, where the experiment gives {truth(torch.tensor(best)):.2f}")

# %%
# Four of the eight rounds: the prediction, two standard deviations either side, and the setting that is tried next.

figure, axes = plt.subplots(2, 2, figsize=(10, 6), layout="constrained", sharex=True, sharey=True)
places = grid[:, 0].numpy()
for ax, k in zip(axes.flat, (0, 2, 4, 7), strict=True):
    tried, results, mean, spread, chosen = steps[k]
    ax.fill_between(places, mean - 2 * spread, mean + 2 * spread, color="tab:blue", alpha=0.25, linewidth=0)
    ax.plot(places, mean, color="tab:blue")
    ax.plot(places, truth(grid)[:, 0].numpy(), color="grey", linestyle=":")
    ax.plot(tried[:, 0].numpy(), results.numpy(), "o", color="black")
    ax.axvline(chosen.item(), color="tab:red", linewidth=1)
    ax.set_title(f"after {len(results)} experiments; next: {chosen.item():.2f}")
plt.show()
